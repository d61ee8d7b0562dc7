// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cpu_limit` and `memory_limit` on a kernel with cgroups of version 2: this program runs in a guest, with a stand-in for QEMU that tells where
//! it is.

use std::path::Path;
use std::process::Command;

use common::Lab;

mod common;

/// Runs `up` in the cgroup `unit`, as in a unit with Delegate=yes, and then below a cgroup that the environment names, in which a supervisor that was
/// killed has left one.
const IN_GUEST: &str = r#"set -e
modprobe ext4
mkdir -p /mnt /tmp/p
mount -o ro /dev/vda /mnt
mount -t cgroup2 none /sys/fs/cgroup
cd /sys/fs/cgroup
echo '+cpu +memory' >cgroup.subtree_control
mkdir unit named
cd /tmp/p
cp /mnt/tombolo.toml /mnt/qemu /mnt/kernel .
export LD_LIBRARY_PATH=/mnt/lib TOMBOLO_HYPERVISOR=tcg XDG_RUNTIME_DIR=/tmp/p XDG_STATE_HOME=/tmp/p
sh -c 'echo $$ >/sys/fs/cgroup/unit/cgroup.procs; /mnt/tombolo up; /mnt/tombolo up' 2>&1 || echo "first $?"
TOMBOLO_CGROUP=/sys/fs/cgroup/named /mnt/tombolo up 2>&1 || echo "second $?"
mkdir /sys/fs/cgroup/named/tombolo-killed-0123abcd-a
/mnt/tombolo clean
find /sys/fs/cgroup -mindepth 2 -type d"#;

/// The stand-in: it says its cgroup and the limits there, and ends.
const QEMU: &str = r#"#!/bin/sh
[ "$1" != --version ] || { echo "QEMU emulator version 10.0.0"; exit; }
group=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
echo "in $group with $(cat "$group/cpu.max"), $(cat "$group/memory.max")"
exit 1
"#;

/// An image with this program, the libraries that it needs, and a compose file.
fn tools(lab: &Lab) {
    let stage = lab.dir.path().join("stage");
    let program = env!("CARGO_BIN_EXE_tombolo");
    std::fs::create_dir_all(stage.join("lib")).unwrap();
    std::fs::copy(program, stage.join("tombolo")).unwrap();
    let libraries = Command::new("ldd").arg(program).output().unwrap();
    for word in String::from_utf8(libraries.stdout).unwrap().split_whitespace().filter(|w| w.starts_with('/'))
    {
        let library = Path::new(word);
        std::fs::copy(library, stage.join("lib").join(library.file_name().unwrap())).unwrap();
    }
    let vm = "kernel = \"./kernel\"\nmemory = \"128M\"\ncpu_limit = 1.5\nmemory_limit = \"256M\"\n";
    let compose = format!("overcommit = true\nqemu = \"./qemu\"\n[vm.a]\n{vm}");
    for (name, text) in [("tombolo.toml", compose.as_str()), ("qemu", QEMU), ("kernel", "")] {
        std::fs::write(stage.join(name), text).unwrap();
    }
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(stage.join("qemu"), mode).unwrap();
    let made = Command::new("mke2fs")
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .args(["-q", "-t", "ext4", "-d"])
        .args([&stage, &lab.dir.path().join("tools.img")])
        .arg("256M")
        .output()
        .expect("the package e2fsprogs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

#[test]
fn a_qemu_is_in_a_cgroup_with_its_limits_which_goes_with_it() {
    let lab = Lab::new(
        "[vm.a]\nkernel = \"6.1\"\nmemory = \"512M\"\ndisks = [{ path = \"tools.img\", readonly = true }]\n",
    );
    tools(&lab);
    lab.good(&["up"]);
    let said = lab.good(&["exec", "a", "--", "sh", "-c", IN_GUEST]);
    let places: Vec<&str> =
        said.lines().filter_map(|line| line.trim().strip_prefix("| in /sys/fs/cgroup/")).collect();
    // Each is said once, by the QEMU that did not start.
    assert_eq!(places.len(), 3, "{said}");
    for (place, parent) in places.iter().zip(["unit/tombolo-p-", "unit/tombolo-p-", "named/tombolo-p-"]) {
        assert!(place.starts_with(parent) && place.ends_with("-a with 150000 100000, 268435456"), "{said}");
    }
    assert!(said.contains("first 1") && said.contains("second 1"), "{said}");
    let left: Vec<&str> = said.lines().filter(|line| line.starts_with("/sys/fs/cgroup/")).collect();
    assert_eq!(left, ["/sys/fs/cgroup/unit/supervisor"], "{said}");
    assert!(
        said.contains("removed /sys/fs/cgroup/named/tombolo-killed-0123abcd-a (the cgroup of a VM"),
        "{said}"
    );
    lab.good(&["down"]);
}
