// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Settings of a compose file for `up` and `down`, with the stand-in for QEMU: order, health, variables, disks, ports.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

use common::stand_in::{said, until};
use common::{Lab, write_program};
use serde_json::Value;

mod common;

/// A compose file's beginning, and lines that each VM has.
fn lab(more: impl Fn(&str) -> String) -> Lab {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu");
    let lab = Lab::new("");
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    let vm = "kernel = \"./kernel\"\nmemory = \"128M\"\n";
    write(&lab, &format!("qemu = \"{}\"\n{}", fake.display(), more(vm)));
    lab
}

fn write(lab: &Lab, compose: &str) {
    std::fs::write(lab.dir.path().join("tombolo.toml"), compose).unwrap();
}

/// Returns whether these lines come in this order.
fn in_order(text: &str, lines: &[&str]) -> bool {
    let mut rest = text;
    lines.iter().all(|line| match rest.find(line) {
        Some(at) => {
            rest = &rest[at + line.len()..];
            true
        }
        None => false,
    })
}

/// web waits until db is healthy, which it is as long as there is the file 'well'; db waits until cache is up.
fn chain() -> Lab {
    let lab = lab(|vm| {
        format!(
            "[vm.web]\n{vm}depends_on = {{ db = \"healthy\" }}\n[vm.cache]\n{vm}[vm.db]\n{vm}depends_on = [\"cache\"]\nqemu_args = [\"-fake\", \
             \"healthy=WELL\"]\nhealthcheck = {{ command = [\"check-health\"], interval = \"100ms\", retries = 2, start_period = \"1h\" }}\n[vm.alone]\n{vm}"
        )
    });
    let file = lab.dir.path().join("tombolo.toml");
    let well = lab.dir.path().join("well");
    let compose = std::fs::read_to_string(&file).unwrap().replace("WELL", well.to_str().unwrap());
    write(&lab, &compose);
    lab
}

fn health(lab: &Lab) -> String {
    let ps = lab.ps();
    let vms = ps["vms"].as_array().unwrap();
    let db = vms.iter().find(|vm| vm["name"] == "db");
    db.and_then(|db| db["health"].as_str()).unwrap_or("none").to_owned()
}

#[test]
fn vms_are_started_in_the_order_of_what_they_depend_on_and_stopped_in_reverse() {
    let lab = chain();
    let up = lab.command(&["up", "web"]).stderr(Stdio::piped()).spawn().unwrap();
    until("db is not checked", || health(&lab) == "starting");
    assert_eq!(lab.ps()["vms"].as_array().unwrap().len(), 2, "web waits");
    std::fs::write(lab.dir.path().join("well"), "").unwrap();
    let output = up.wait_with_output().unwrap();
    let words = said(&output);
    assert!(output.status.success(), "{words}");
    let order = ["cache: starting", "cache: up", "db: starting", "db: up", "web: starting", "web: up"];
    assert!(in_order(&words, &order), "{words}");
    assert!(words.contains("web: waiting (until 'db' is healthy)") && !words.contains("alone"), "{words}");
    let table = lab.good(&["ps"]);
    assert!(table.contains("up (healthy)"), "{table}");

    let words = said(&lab.run(&["down"]));
    let order =
        ["web: stopping", "web: stopped", "db: stopping", "db: stopped", "cache: stopping", "cache: stopped"];
    assert!(in_order(&words, &order), "{words}");
    lab.assert_nothing_left();
}

#[test]
fn up_waits_for_health_where_it_is_told_to_and_ps_tells_who_is_unhealthy() {
    let lab = chain();
    let well = lab.dir.path().join("well");
    std::fs::write(&well, "").unwrap();
    lab.good(&["up", "--wait", "db"]);
    assert_eq!(health(&lab), "healthy");
    std::fs::remove_file(&well).unwrap();
    until("ps shows no failed check", || health(&lab) == "unhealthy");
    let refused = lab.run(&["up", "web"]);
    assert!(
        !refused.status.success() && said(&refused).contains("the VM 'db' is unhealthy"),
        "{}",
        said(&refused)
    );
    let waited = lab.run(&["up", "--wait", "db"]);
    assert!(!waited.status.success() && said(&waited).contains("unhealthy"), "{}", said(&waited));
    // It runs on, and may get well.
    std::fs::write(&well, "").unwrap();
    until("ps shows no good check", || health(&lab) == "healthy");
    lab.good(&["up", "web"]);
    lab.good(&["down"]);
}

#[test]
fn variables_come_from_the_environment_and_env_files_and_errors_name_key_and_line() {
    let lab = lab(|vm| {
        format!(
            "name = \"${{PROJECT:-demo}}\"\n[vm.a]\n{vm}ready = \"running\"\ncpus = \"${{CPUS:?how many}}\"\ncmdline = \"cost=$$5 ${{WORDS:-}}\"\n"
        )
    });
    let refused = lab.run(&["up"]);
    assert!(said(&refused).contains("tombolo.toml:7: vm.a.cpus: CPUS: how many"), "{}", said(&refused));
    std::fs::write(lab.dir.path().join(".env"), "CPUS=3\nPROJECT=beside\n").unwrap();
    lab.good(&["up"]);
    let ps = lab.ps();
    assert_eq!((&ps["project"], &ps["vms"][0]["cpus"]), (&"beside".into(), &3.into()));
    let pid = ps["vms"][0]["pid"].as_u64().unwrap();
    let arguments = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(arguments.contains("cost=$5 "), "{arguments}");
    lab.good(&["down"]);
    std::fs::write(lab.dir.path().join("prod.env"), "CPUS=4\n").unwrap();
    let up = lab.command(&["up", "--env-file", "prod.env"]).env("PROJECT", "shell").output().unwrap();
    assert!(up.status.success(), "{}", said(&up));
    let ps = lab.command(&["ps", "--json", "--env-file", "prod.env"]).output().unwrap();
    let ps: serde_json::Value = serde_json::from_slice(&ps.stdout).unwrap();
    assert_eq!((&ps["project"], &ps["vms"][0]["cpus"]), (&"shell".into(), &4.into()));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_port_of_the_host_that_is_in_use_is_told_before_anything_is_started() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let lab = lab(|vm| {
        format!(
            "[net.out]\nuplink = \"user\"\n[vm.a]\n{vm}networks = [\"out\"]\nports = [\"127.0.0.1:{port}:80\"]\n[vm.b]\n{vm}"
        )
    });
    let refused = lab.run(&["up"]);
    let words = said(&refused);
    assert!(
        !refused.status.success() && words.contains(&format!("tcp port {port} of the host is in use")),
        "{words}"
    );
    assert!(!words.contains("starting"), "{words}");
    lab.assert_nothing_left();
}

/// Puts a passt first in the PATH that notes its pid, and that ends at once while there is the file 'broken'.
fn own_passt(lab: &Lab) -> std::ffi::OsString {
    let bin = lab.dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let (script, path) = (bin.join("passt"), std::env::var_os("PATH").unwrap());
    let folder = lab.dir.path().display();
    let text = format!(
        "#!/bin/sh\n[ ! -e '{folder}/broken' ] || exit 1\necho $$ >'{folder}/pid'\nPATH='{}' exec passt \"$@\"\n",
        path.to_str().unwrap()
    );
    write_program(&script, &text);
    std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path))).unwrap()
}

#[test]
fn net_ls_tells_which_vms_and_uplinks_are_down() {
    let lab = lab(|vm| {
        let vm = format!("{vm}ready = \"running\"\nnetworks");
        format!(
            "[net.lan]\n[net.out]\nuplink = \"user\"\n[vm.a]\n{vm} = [\"out\"]\n[vm.b]\n{vm} = [\"lan\"]\n"
        )
    });
    let path = own_passt(&lab);
    let up = lab.command(&["up"]).env("PATH", path).output().unwrap();
    assert!(up.status.success(), "{}", said(&up));
    let own_uplink = |state: bool| {
        let networks: Value = serde_json::from_str(&lab.good(&["net", "ls", "--json"])).unwrap();
        let [lan, out] = ["lan", "out"].map(|name| {
            let found = networks.as_array().unwrap().iter().find(|net| net["name"] == name);
            found.unwrap().clone()
        });
        // The stand-in for QEMU has no driver that receives. Neither network has an uplink of all VMs, and b has none of its own.
        assert_eq!((&lan["ports"][0]["up"], lan["ports"][0].get("uplink_up")), (&false.into(), None));
        assert_eq!((&out["ports"][0]["up"], out.get("uplink_up")), (&false.into(), None));
        out["ports"][0]["uplink_up"] == state
    };
    until("the uplink is never up", || own_uplink(true));
    let text = lab.good(&["net", "ls"]);
    assert!(text.contains("  a (down)  ") && text.contains("  b (down)  "), "{text}");
    std::fs::write(lab.dir.path().join("broken"), "").unwrap();
    let passt = std::fs::read_to_string(lab.dir.path().join("pid")).unwrap();
    common::signal(passt.trim().parse().unwrap(), "KILL");
    until("the uplink is never down", || own_uplink(false));
    let text = lab.good(&["net", "ls"]);
    assert!(text.contains("  a (down, uplink down)  ") && text.contains("  b (down)  "), "{text}");
    std::fs::remove_file(lab.dir.path().join("broken")).unwrap();
    until("the uplink never comes back", || own_uplink(true));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_port_that_another_program_has_taken_from_a_vm_refuses_its_restart_and_is_told_by_up() {
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = free();
    let lab = lab(|vm| {
        format!(
            "[net.out]\nuplink = \"user\"\n[vm.a]\n{vm}ready = \"running\"\nnetworks = [\"out\"]\nports = [\"{address}:80\"]\n"
        )
    });
    let path = own_passt(&lab);
    let run = |arguments: &[&str]| lab.command(arguments).env("PATH", &path).output().unwrap();
    let up = run(&["up"]);
    assert!(up.status.success() && !said(&up).contains("no port of the host"), "{}", said(&up));
    let before = lab.ps()["vms"][0]["pid"].clone();
    // A VM's own ports do not refuse its restart.
    let restarted = run(&["restart", "a"]);
    assert!(
        restarted.status.success() && !said(&restarted).contains("no port of the host"),
        "{}",
        said(&restarted)
    );
    let own = lab.ps()["vms"][0]["pid"].clone();
    assert_ne!(own, before);
    let broken = lab.dir.path().join("broken");
    std::fs::write(&broken, "").unwrap();
    let passt = std::fs::read_to_string(lab.dir.path().join("pid")).unwrap();
    common::signal(passt.trim().parse().unwrap(), "KILL");
    let mut stranger = None;
    until("the port is never free", || {
        stranger = std::net::TcpListener::bind(address).ok();
        stranger.is_some()
    });
    let refused = run(&["restart", "a"]);
    let words = said(&refused);
    assert!(
        !refused.status.success()
            && words.contains(&format!("tcp port {} of the host is in use", address.port())),
        "{words}"
    );
    assert_eq!(lab.ps()["vms"][0]["pid"], own, "it runs on");
    drop(stranger);
    // Nobody has it, and no passt will.
    let restarted = run(&["restart", "a"]);
    let words = said(&restarted);
    assert!(
        restarted.status.success()
            && words.contains("a: up (")
            && words.contains("no port of the host leads to it"),
        "{words}"
    );
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn an_overlay_is_in_the_projects_folder_until_down() {
    let lab = lab(|vm| {
        format!(
            "[vm.a]\n{vm}ready = \"running\"\nrestart = \"always\"\ndisks = [{{ path = \"base.img\", overlay = true, serial = \"data\" }}]\n"
        )
    });
    let image = lab.dir.path().join("base.img");
    std::fs::write(&image, vec![7; 1 << 20]).unwrap();
    let overlays = || -> Vec<std::path::PathBuf> {
        let projects = std::fs::read_dir(lab.dir.path().join("tombolo")).into_iter().flatten();
        let files = projects.flat_map(|p| std::fs::read_dir(p.unwrap().path()).unwrap());
        files.map(|f| f.unwrap().path()).filter(|f| f.extension().is_some_and(|e| e == "overlay")).collect()
    };
    lab.good(&["up"]);
    let first = overlays();
    assert_eq!(first.len(), 1);
    let pid = lab.ps()["vms"][0]["pid"].as_u64().unwrap();
    let arguments = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(
        arguments.contains(first[0].to_str().unwrap()) && arguments.contains("serial=data"),
        "{arguments}"
    );
    let info = Command::new("qemu-img").arg("info").arg(&first[0]).output().unwrap();
    assert!(String::from_utf8_lossy(&info.stdout).contains("base.img"), "{info:?}");
    // The next supervisor goes on with that of a VM that lives. One that a VM has left which died with its shim is made anew.
    let stamp = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
    let before = stamp(&first[0]);
    lab.kill_with_shims(&[]);
    lab.good(&["up"]);
    assert_eq!((stamp(&first[0]), lab.ps()["vms"][0]["pid"].as_u64()), (before, Some(pid)));
    lab.kill_with_shims(&["vm-a"]);
    lab.good(&["up"]);
    assert_ne!(stamp(&first[0]), before);
    lab.good(&["down"]);
    assert_eq!(overlays(), Vec::<std::path::PathBuf>::new());
    assert!(std::fs::read(&image).unwrap().iter().all(|&b| b == 7));
    lab.assert_nothing_left();
}

#[test]
fn a_limit_without_a_delegated_cgroup_names_the_remedy() {
    let lab = lab(|vm| format!("[vm.a]\n{vm}ready = \"running\"\ncpu_limit = 1.5\n"));
    let up = lab.command(&["up"]).env("TOMBOLO_CGROUP", lab.dir.path().join("none")).output().unwrap();
    let words = said(&up);
    assert!(
        !up.status.success() && words.contains("Delegate=yes") && words.contains("TOMBOLO_CGROUP="),
        "{words}"
    );
    lab.assert_nothing_left();
}
