// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMs whose root is a directory of a zone, under TCG, with the guest kit.

use std::path::Path;
use std::process::Command;

use common::Lab;

mod common;

/// The image of a container: busybox, a file, no init.
fn image(into: &Path) {
    for folder in ["bin", "etc", "srv"] {
        std::fs::create_dir_all(into.join(folder)).unwrap();
    }
    let busybox =
        ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists()).unwrap();
    common::copy_program(busybox, &into.join("bin/busybox"));
    for applet in ["sh", "cat", "ls", "mkdir", "rm", "grep", "mkfifo", "od", "id", "sleep"] {
        std::os::unix::fs::symlink("busybox", into.join("bin").join(applet)).unwrap();
    }
    std::fs::write(into.join("etc/motd"), "one copy\n").unwrap();
}

/// Makes an OCI image of the folder `image`: a layer, and one that hides a file which the first has beside it.
const LAYOUT: &str = r#"set -e
mkdir -p layout/blobs/sha256 upper/srv
cp -a image lower
touch lower/srv/hidden upper/srv/.wh.hidden
tar -C lower -czf layer1 .
tar -C upper -cf layer2 srv
put() {
    hash=$(sha256sum <$1 | cut -c -64)
    mv $1 layout/blobs/sha256/$hash
    printf '{"digest":"sha256:%s","size":%s}' $hash $(stat -c %s layout/blobs/sha256/$hash)
}
printf '{"layers":[%s,%s]}' "$(put layer1)" "$(put layer2)" >manifest
printf '{"manifests":[%s]}' "$(put manifest)" >layout/index.json
echo '{"imageLayoutVersion":"1.0.0"}' >layout/oci-layout"#;

fn project(vms: &str) -> Lab {
    let lab =
        Lab::new(&format!("[zone.base]\nsize = \"64M\"\nbacking = \"./base.zone\"\nfiles = true\n{vms}"));
    image(&lab.dir.path().join("image"));
    lab.good(&["zone", "create", "base.zone", "--size", "64M"]);
    lab.good(&["files", "mkfs", "base.zone"]);
    let made = Command::new("sh").args(["-c", LAYOUT]).current_dir(lab.dir.path()).status();
    assert!(made.unwrap().success());
    lab.good(&["files", "import", "layout", "base.zone:images/one"]);
    lab
}

#[test]
fn vms_start_from_one_image_which_none_of_them_changes() {
    let vm = |name: &str| {
        format!("[vm.{name}]\nmemory = \"256M\"\nroot = {{ zone = \"base\", path = \"/images/one\" }}\n")
    };
    let lab = project(&["a", "b"].map(vm).concat());
    lab.good(&["up"]);
    let sh = |vm: &str, script: &str| lab.good(&["exec", vm, "--", "sh", "-c", script]);
    for vm in ["a", "b"] {
        assert_eq!(sh(vm, "cat /etc/motd"), "one copy\n");
        assert!(sh(vm, "grep ' / ' /proc/mounts").contains("overlay / overlay rw,"));
        sh(vm, &format!("echo {vm} >/etc/motd && mkdir /srv/{vm} && rm /bin/od"));
    }
    assert_eq!([sh("a", "cat /etc/motd; ls /srv"), sh("b", "cat /etc/motd; ls /srv")], ["a\na\n", "b\nb\n"]);
    lab.good(&["restart", "a"]);
    assert_eq!(sh("a", "cat /etc/motd; ls /srv"), "one copy\n");
    lab.good(&["down"]);
    lab.assert_nothing_left();
    lab.good(&["files", "export", "base.zone:images/one", "back"]);
    let same = Command::new("diff")
        .args(["-r", "--no-dereference", "image", "back"])
        .current_dir(lab.dir.path())
        .status();
    assert!(same.unwrap().success());
}

#[test]
fn a_root_that_is_not_there_and_one_that_can_t_be_are_named() {
    let lab = project("[vm.a]\nmemory = \"256M\"\nroot = { zone = \"base\", path = \"/no\" }\n");
    let up = lab.run(&["up"]);
    assert!(!up.status.success());
    let console = lab.good(&["logs", "a"]);
    assert!(
        console.contains("tombolo: the root /no of the zone ") && console.contains("no such directory"),
        "{console}"
    );
    lab.good(&["down"]);
    for (vm, why) in [
        ("root = { zone = \"bose\" }", "did you mean 'base'?"),
        ("root = { zone = \"base\", path = \"no\" }", "write an absolute path"),
        ("kernel = \"./vmlinuz\"\nroot = { zone = \"base\" }", "for kernels of the guest kit"),
    ] {
        let text = format!("[zone.base]\nsize = \"64M\"\nfiles = true\n[vm.a]\n{vm}\n");
        std::fs::write(lab.dir.path().join("tombolo.toml"), text).unwrap();
        let config = lab.run(&["config"]);
        let words = String::from_utf8_lossy(&config.stderr);
        assert!(!config.status.success() && words.contains(why), "{words}");
    }
}
