// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones in VMs whose QEMU the user starts: docs/qemu.md, step by step. Under TCG, with the guest kit's 6.1 kernel.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::plain::Plain;
use common::{TIMEOUT, page};

mod common;

struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    /// A zone with a file system in it.
    fn new() -> Host {
        let host = Host { dir: tempfile::tempdir_in("/dev/shm").unwrap() };
        host.good(&["zone", "create", "own.zone", "--size", "32M"]);
        host.good(&["files", "mkfs", "own.zone"]);
        host
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        command.args(args).current_dir(self.dir.path()).env("TOMBOLO_ZONES_RUN", self.dir.path().join("run"));
        command.stdin(Stdio::null());
        command
    }

    fn good(&self, args: &[&str]) -> String {
        let output = self.command(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// QEMU's arguments and the guest's mount command, as `invite` prints them.
    fn invite(&self, name: &str, more: &[&str]) -> (Vec<String>, String) {
        let invite =
            |form| self.good(&[&["zone", "invite", "own.zone", name, "--only", form], more].concat());
        (invite("qemu").lines().map(str::to_owned).collect(), invite("mount").trim().to_owned())
    }

    fn zone(&self) -> serde_json::Value {
        serde_json::from_str(&self.good(&["zone", "inspect", "own.zone", "--json"])).unwrap()
    }

    fn member(&self, name: &str) -> serde_json::Value {
        let zone = self.zone();
        let members = zone["members"].as_array().unwrap();
        members.iter().find(|m| m["name"] == name).unwrap().clone()
    }

    fn kill_server(&self) {
        let uuid = self.zone()["uuid"].as_str().unwrap().to_owned();
        let record = self.dir.path().join("run").join(uuid).join("server.lock");
        common::signal(std::fs::read_to_string(record).unwrap().trim().parse().unwrap(), "KILL");
        self.until("the server lives", || self.zone()["owned"] == false);
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < TIMEOUT, "{what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn expel_all(&self, names: &[&str]) {
        for name in names {
            self.until("the VM does not end", || !self.member(name)["alive"].as_bool().unwrap());
            self.good(&["zone", "expel", "own.zone", name]);
        }
        let listing =
            || std::fs::read_dir(self.dir.path().join("run")).unwrap().next().unwrap().unwrap().path();
        self.until("a socket is left", || {
            let names = std::fs::read_dir(listing()).unwrap().map(|e| e.unwrap().file_name());
            !names.into_iter().any(|name| name.to_string_lossy().ends_with(".sock"))
        });
    }
}

#[test]
fn two_qemus_share_a_zone_and_one_that_is_killed_comes_back_as_the_same_member() {
    let host = Host::new();
    let (a_arguments, printed) = host.invite("a", &[]);
    let [(mount, nothing)] = &page::commands("qemu.md", "guest")[..] else {
        panic!("one command mounts a zone")
    };
    assert_eq!(nothing, "");
    let uuid = host.zone()["uuid"].as_str().unwrap().to_owned();
    assert_eq!(
        printed,
        mount.replace("\"$UUID\"", &uuid),
        "the page's command is the one that 'invite' prints"
    );
    let mount = format!("UUID={uuid}; {mount}");
    let (b_arguments, _) = host.invite("b", &[]);
    let mut a = Plain::start(&a_arguments);
    let mut b = Plain::start(&b_arguments);
    for vm in [&mut a, &mut b] {
        vm.shell.good(&mount);
    }
    a.shell.good("mkdir /mnt/d && echo hello >/mnt/d/from-a");
    assert_eq!(b.shell.good("cat /mnt/d/from-a"), "hello");
    let before = host.member("a");
    a.kill();
    host.until("the dead VM was not declared dead", || {
        let now = host.member("a");
        now["state"] == "invited" && now["epoch"].as_u64() > before["epoch"].as_u64()
    });
    // The directory that the dead one had changed can be changed by others.
    b.shell.good("echo back >/mnt/d/from-b");
    let mut a = Plain::start(&a_arguments);
    a.shell.good(&mount);
    assert_eq!(a.shell.good("cat /mnt/d/from-a /mnt/d/from-b"), "hello\nback");
    assert_eq!(host.member("a")["id"], before["id"]);

    // A reset within the same QEMU: the guest takes its slot again, in a new epoch.
    let before = host.member("b");
    b.shell.send("reboot -f");
    b.shell.wait_ready();
    b.shell.good(&mount);
    assert_eq!(b.shell.good("cat /mnt/d/from-b"), "back");
    assert!(host.member("b")["epoch"].as_u64() > before["epoch"].as_u64());
    b.shell.good("echo again >/mnt/d/from-b");
    assert_eq!(a.shell.good("cat /mnt/d/from-b"), "again");
    drop((a, b));
    host.expel_all(&["a", "b"]);
}

/// Neither the VM nor the server that follows has anything of the one that was killed but QEMU's lock and the zone.
#[test]
fn a_qemu_whose_server_is_killed_goes_on_is_found_by_the_next_one_and_frees_its_slot_at_its_end() {
    let host = Host::new();
    let (a_arguments, mount) = host.invite("a", &[]);
    let mut a = Plain::start(&a_arguments);
    a.shell.good(&mount);
    let before = host.member("a");
    assert_eq!(before["assumed"], false, "QEMU does not hold its slot");
    host.kill_server();
    a.shell.good("echo hello >/mnt/from-a");
    let refused = host.command(&["files", "fsck", "-y", "own.zone"]).output().unwrap();
    assert!(!refused.status.success(), "a zone was repaired under a VM");
    // This starts a server.
    let (b_arguments, _) = host.invite("b", &[]);
    let mut b = Plain::start(&b_arguments);
    b.shell.good(&mount);
    assert_eq!(b.shell.good("cat /mnt/from-a"), "hello");
    assert_eq!(host.member("a"), before);
    // It knows its slot by what the former server has said.
    a.shell.send("reboot -f");
    a.shell.wait_ready();
    a.shell.good(&mount);
    assert_eq!((&host.member("a")["id"], &host.member("a")["alive"]), (&before["id"], &true.into()));
    b.shell.good("echo back >/mnt/from-b");
    assert_eq!(a.shell.good("cat /mnt/from-b"), "back");
    host.kill_server();
    a.kill();
    host.until("the slot of a VM that has ended is held", || host.member("a")["alive"] == false);
    assert_eq!(host.member("b")["alive"], true);
    host.invite("a", &[]);
    let mut a = Plain::start(&a_arguments);
    a.shell.good(&mount);
    assert_eq!(a.shell.good("cat /mnt/from-a /mnt/from-b"), "hello\nback");
    assert_eq!(host.member("a")["id"], before["id"]);
    b.shell.good("echo more >>/mnt/from-a");
    drop((a, b));
    host.expel_all(&["a", "b"]);
    host.good(&["files", "fsck", "-n", "own.zone"]);
}

#[test]
fn a_qemu_that_may_only_read_can_not_write() {
    let host = Host::new();
    let (arguments, mount) = host.invite("reader", &["--read-only"]);
    let mut reader = Plain::start(&arguments);
    reader.shell.good(&mount);
    let (status, said) = reader.shell.run("echo x >/mnt/file");
    assert!(status != 0 && said.contains("Read-only"), "{said}");
    drop(reader);
    host.expel_all(&["reader"]);
}
