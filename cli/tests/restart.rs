// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Restart policies and the systemd unit, with the stand-in for QEMU.

use std::io::Read;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::stand_in::{self, number, said, until};
use common::{Lab, TIMEOUT, signal};

mod common;

/// A project of one VM whose QEMU is the stand-in.
fn lab(more: &str) -> Lab {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu");
    let lab = Lab::new(&format!(
        "qemu = \"{}\"\n[vm.a]\nkernel = \"./kernel\"\nmemory = \"128M\"\nready = \"running\"\n{more}",
        fake.display()
    ));
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    lab
}

fn vm(lab: &Lab) -> serde_json::Value {
    lab.ps()["vms"][0].clone()
}

/// Ends the VM's QEMU and waits until its policy has started it `restarts` times.
fn end_and_wait(lab: &Lab, how: &str, restarts: u64) {
    signal(number(&vm(lab)["pid"]), how);
    until("it does not start again", || {
        let vm = vm(lab);
        vm["restarts"] == restarts && vm["state"] == "up"
    });
}

#[test]
fn a_vm_that_is_killed_starts_again_after_pauses_that_grow_and_ps_tells_them() {
    let lab = lab("restart = \"on-failure\"\n");
    lab.good(&["up"]);
    let first = vm(&lab);
    assert_eq!((&first["restarts"], &first["reboots"]), (&0.into(), &0.into()));
    let mut longest = Vec::new();
    for restarts in 1..4 {
        signal(number(&vm(&lab)["pid"]), "KILL");
        let mut said = 0;
        until("it does not start again", || {
            let vm = vm(&lab);
            let state = vm["state"].as_str().unwrap();
            if let Some(rest) = state.strip_prefix("restarting in ") {
                assert!(state.contains("(ended: QEMU was killed by signal 9)"), "{state}");
                said = said.max(rest.split(' ').next().unwrap().parse().unwrap());
            }
            vm["restarts"] == restarts && state == "up"
        });
        longest.push(said);
    }
    assert_eq!(longest, [1, 2, 4]);
    assert_eq!(vm(&lab)["reboots"], 0);
    // A reboot is not a restart, and keeps the count.
    signal(number(&vm(&lab)["pid"]), "USR1");
    until("it does not reboot", || vm(&lab)["reboots"] == 1 && vm(&lab)["state"] == "up");
    assert_eq!(vm(&lab)["restarts"], 3);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn who_switches_itself_off_comes_back_under_always_only() {
    let careful = lab("restart = \"on-failure\"\n");
    careful.good(&["up"]);
    signal(number(&vm(&careful)["pid"]), "ALRM");
    until("it does not end", || vm(&careful)["state"] == "ended: the guest switched itself off");
    let always = lab("restart = \"always\"\n");
    always.good(&["up"]);
    end_and_wait(&always, "ALRM", 1);
    // Long enough for the other to have come back, had it been about to.
    assert_eq!(vm(&careful)["state"], "ended: the guest switched itself off");
    careful.good(&["down"]);
    always.good(&["down"]);
    always.assert_nothing_left();
}

#[test]
fn a_vm_that_waits_for_its_restart_is_stopped_by_down_and_started_by_up() {
    let lab = lab("restart = \"always\"\n");
    lab.good(&["up"]);
    for restarts in 1..3 {
        end_and_wait(&lab, "KILL", restarts);
    }
    signal(number(&vm(&lab)["pid"]), "KILL");
    let waits = || vm(&lab)["state"].as_str().unwrap().starts_with("restarting in ");
    until("it does not wait", waits);
    lab.good(&["up"]);
    let again = vm(&lab);
    assert_eq!((&again["state"], &again["restarts"]), (&"up".into(), &0.into()));
    signal(number(&again["pid"]), "KILL");
    until("it does not wait", waits);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_policy_with_a_number_gives_up() {
    let lab = lab("restart = \"on-failure:1\"\n");
    lab.good(&["up"]);
    end_and_wait(&lab, "KILL", 1);
    signal(number(&vm(&lab)["pid"]), "KILL");
    until("it does not give up", || vm(&lab)["state"] == "ended: QEMU was killed by signal 9");
    lab.good(&["down"]);
}

#[test]
fn a_vm_whose_reboot_fails_before_there_is_a_qemu_starts_again_by_its_policy() {
    let lab = lab("restart = \"on-failure\"\n");
    lab.good(&["up"]);
    let [kernel, away] = ["kernel", "away"].map(|name| lab.dir.path().join(name));
    std::fs::rename(&kernel, &away).unwrap();
    signal(number(&vm(&lab)["pid"]), "USR1");
    until("it does not wait", || vm(&lab)["state"].as_str().unwrap().starts_with("restarting in "));
    std::fs::rename(&away, &kernel).unwrap();
    until("it does not start again", || vm(&lab)["state"] == "up");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_vm_whose_start_with_all_memory_fails_before_there_is_a_qemu_starts_again_by_its_policy() {
    let lab = stand_in::lab(
        "[vm.a]\nkernel = \"kernel\"\nmemory = \"320M\"\nboot_memory = \"128M\"\nstart = \"fast\"\nrestart = \"always\"\n\
         ready = \"console:next words\"\nready_timeout = 6000\ndisks = [{ path = \"disk\" }]\n\
         qemu_args = [\"-fake\", \"driverless\"]\n",
    );
    let [disk, away] = ["disk", "away"].map(|name| lab.dir.path().join(name));
    std::fs::write(&disk, [0; 512]).unwrap();
    let up = lab.command(&["up"]).stderr(Stdio::piped()).spawn().unwrap();
    until("its guest says nothing", || {
        String::from_utf8_lossy(&lab.run(&["logs", "a"]).stdout).contains("first words")
    });
    // The next QEMU has no disk.
    std::fs::rename(&disk, &away).unwrap();
    signal(number(&vm(&lab)["pid"]), "USR2");
    let up = up.wait_with_output().unwrap();
    assert!(up.status.success(), "{}", said(&up));
    until("it does not wait", || vm(&lab)["state"].as_str().unwrap().starts_with("restarting in "));
    std::fs::rename(&away, &disk).unwrap();
    until("it does not start again", || vm(&lab)["restarts"] == 1 && vm(&lab)["state"] == "booting");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

/// Runs the command of the packages' unit with a socket for READY=1, as systemd does.
struct Unit {
    up: Child,
    ready: UnixDatagram,
}

impl Unit {
    fn start(lab: &Lab) -> Unit {
        let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../debian/tombolo.tombolo@.service");
        let text = std::fs::read_to_string(unit).unwrap();
        let key = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            line.unwrap_or_else(|| panic!("no {name} in the unit")).to_owned()
        };
        assert_eq!((key("Type").as_str(), key("Restart").as_str()), ("notify", "on-failure"));
        let command = key("ExecStart").replace("/etc/tombolo/%i.toml", "tombolo.toml");
        let words: Vec<&str> = command.strip_prefix("/usr/bin/tombolo ").unwrap().split(' ').collect();
        let socket = lab.dir.path().join("notify");
        // One of the start before.
        let _none = std::fs::remove_file(&socket);
        let ready = UnixDatagram::bind(&socket).unwrap();
        ready.set_read_timeout(Some(TIMEOUT)).unwrap();
        let up = lab.command(&words).env("NOTIFY_SOCKET", &socket).stderr(Stdio::piped()).spawn().unwrap();
        Unit { up, ready }
    }

    fn wait_ready(&self) {
        let mut message = [0; 64];
        let n = self.ready.recv(&mut message).unwrap();
        assert_eq!(message[..n].trim_ascii(), b"READY=1");
        std::fs::remove_file(self.ready.local_addr().unwrap().as_pathname().unwrap()).unwrap();
    }

    fn ended(mut self) -> (i32, String) {
        let mut words = String::new();
        self.up.stderr.take().unwrap().read_to_string(&mut words).unwrap();
        (self.up.wait().unwrap().code().unwrap(), words)
    }
}

#[test]
fn the_unit_goes_on_with_a_project_whose_supervisor_died_starts_one_again_that_has_ended_and_takes_it_down() {
    let lab = lab("");
    let unit = Unit::start(&lab);
    unit.wait_ready();
    let first = lab.ps();
    assert_eq!(first["vms"][0]["state"], "up");
    lab.kill_with_shims(&[]);
    until("there is no next supervisor", || {
        let now = lab.ps();
        now["supervisor"] != first["supervisor"] && now["vms"][0]["pid"] == first["vms"][0]["pid"]
    });
    lab.kill_with_shims(&["vm-a"]);
    let (code, words) = unit.ended();
    assert_eq!(code, 1, "a failure, so that systemd starts it again: {words}");

    let unit = Unit::start(&lab);
    unit.wait_ready();
    let second = lab.ps();
    assert_ne!(second["supervisor"], first["supervisor"]);
    // The unit's process dies, the supervisor lives: it is taken over with its VM.
    signal(unit.up.id(), "KILL");
    let mut killed = unit;
    killed.up.wait().unwrap();
    drop(killed);
    let unit = Unit::start(&lab);
    unit.wait_ready();
    let third = lab.ps();
    assert_eq!(
        (&third["supervisor"], &third["vms"][0]["pid"]),
        (&second["supervisor"], &second["vms"][0]["pid"])
    );

    signal(unit.up.id(), "TERM");
    let (code, words) = unit.ended();
    assert_eq!(code, 0, "{words}");
    lab.assert_nothing_left();

    // A 'down' by a user is no failure: systemd does not start the unit again.
    let unit = Unit::start(&lab);
    unit.wait_ready();
    lab.good(&["down"]);
    let (code, words) = unit.ended();
    assert_eq!(code, 0, "{words}");
    assert!(words.contains("was taken down"), "{words}");
    lab.assert_nothing_left();
}

#[test]
fn a_vm_that_down_has_stopped_stays_stopped_at_boot_until_somebody_starts_it() {
    let vm = "kernel = \"./kernel\"\nmemory = \"128M\"\nready = \"running\"\n";
    let lab = lab(&format!("restart = \"unless-stopped\"\n[vm.b]\n{vm}restart = \"always\"\n"));
    let names = |lab: &Lab| -> Vec<String> {
        let ps = lab.ps();
        ps["vms"].as_array().unwrap().iter().map(|vm| vm["name"].as_str().unwrap().to_owned()).collect()
    };
    lab.good(&["up"]);
    lab.good(&["down", "a"]);
    lab.good(&["down", "b"]);
    lab.good(&["up", "--boot"]);
    assert_eq!(names(&lab), ["b"]);
    lab.good(&["up", "a"]);
    // The host goes down with both up.
    lab.good(&["down"]);
    lab.good(&["up", "--boot"]);
    assert_eq!(names(&lab), ["a", "b"]);
    lab.good(&["down"]);
}

#[test]
fn vms_that_are_stopped_at_once_are_all_noted_and_one_whose_stop_is_not_waited_for_too() {
    let vm = "kernel = \"./kernel\"\nmemory = \"128M\"\nready = \"running\"\nrestart = \"unless-stopped\"\n";
    let names = ["b", "c", "d", "e", "f", "g"];
    let slow = "[vm.slow]\nqemu_args = [\"-fake\", \"no-quit\"]\n";
    let more: String = names.iter().map(|name| format!("[vm.{name}]\n{vm}")).collect();
    let lab = lab(&format!("restart = \"always\"\n{more}{slow}{vm}"));
    lab.good(&["up"]);
    std::thread::scope(|scope| {
        for name in names {
            scope.spawn(|| lab.good(&["down", name]));
        }
    });
    let mut down = lab.command(&["down", "slow"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut words = std::io::BufReader::new(down.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut words, &mut line).unwrap();
    assert!(line.contains("slow: stopping"), "{line}");
    down.kill().unwrap();
    down.wait().unwrap();
    lab.good(&["down"]);
    lab.good(&["up", "--boot"]);
    let ps = lab.ps();
    let there: Vec<&str> =
        ps["vms"].as_array().unwrap().iter().map(|vm| vm["name"].as_str().unwrap()).collect();
    assert_eq!(there, ["a"]);
    lab.good(&["down"]);
}

#[test]
fn the_unit_ends_without_a_failure_where_down_has_stopped_all_vms() {
    let lab = lab("restart = \"unless-stopped\"\n");
    lab.good(&["up"]);
    lab.good(&["down", "a"]);
    let unit = Unit::start(&lab);
    unit.wait_ready();
    let (code, words) = unit.ended();
    assert_eq!(code, 0, "{words}");
    lab.assert_nothing_left();
}

#[test]
fn a_unit_that_is_stopped_as_soon_as_it_is_ready_takes_its_project_down() {
    for _ in 0..10 {
        let lab = lab("");
        let unit = Unit::start(&lab);
        unit.wait_ready();
        signal(unit.up.id(), "TERM");
        let (code, words) = unit.ended();
        assert_eq!(code, 0, "{words}");
        lab.assert_nothing_left();
    }
}

#[test]
fn the_packages_unit_cuts_off_no_start_that_takes_long() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../debian/tombolo.tombolo@.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    // The memory of a large guest may take half an hour to be had; systemd's own limit is 90 s.
    let limits: Vec<&str> = unit.lines().filter_map(|line| line.strip_prefix("TimeoutStartSec=")).collect();
    assert_eq!(limits, ["infinity"]);
}

#[test]
fn a_guest_that_writes_an_images_header_into_its_raw_disk_has_it_raw_after_each_reboot_and_restart() {
    let raw = "disks = [{ path = \"disk.img\" }]\n";
    let lab = lab(&format!("restart = \"always\"\n{raw}"));
    let disk = lab.dir.path().join("disk.img");
    std::fs::write(&disk, [0; 1 << 16]).unwrap();
    let format = || {
        let line = std::fs::read(format!("/proc/{}/cmdline", number(&vm(&lab)["pid"]))).unwrap();
        let line = String::from_utf8_lossy(&line).into_owned();
        let drive = line.split('\0').find(|argument| argument.contains("id=disk0")).unwrap();
        drive.rsplit("format=").next().unwrap().to_owned()
    };
    lab.good(&["up"]);
    assert_eq!(format(), "raw");
    // As a guest that owns the disk can.
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&disk).arg("1T").output();
    assert!(made.expect("the package qemu-utils").status.success());
    signal(number(&vm(&lab)["pid"]), "USR1");
    until("it does not reboot", || vm(&lab)["reboots"] == 1 && vm(&lab)["state"] == "up");
    assert_eq!(format(), "raw");
    let next = lab.dir.path().join("next");
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_tombolo")).arg(&next).status();
    assert!(copied.unwrap().success());
    lab.good(&["upgrade", "--program", next.to_str().unwrap()]);
    end_and_wait(&lab, "KILL", 1);
    assert_eq!(format(), "raw");
    // A VM that runs is not stopped for a start that is refused.
    let pid = number(&vm(&lab)["pid"]);
    let refused = said(&lab.run(&["restart", "a"]));
    assert!(
        refused.contains("it begins as a qcow2 image") && refused.contains("format = \"raw\""),
        "{refused}"
    );
    assert_eq!(number(&vm(&lab)["pid"]), pid);
    lab.good(&["down"]);
    let refused = said(&lab.run(&["up"]));
    assert!(
        refused.contains("disk.img: its name makes it a raw image, and it begins as a qcow2 image"),
        "{refused}"
    );
    let file = lab.dir.path().join("tombolo.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("\"disk.img\"", "\"disk.img\", format = \"raw\"")).unwrap();
    lab.good(&["up"]);
    assert_eq!(format(), "raw");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
