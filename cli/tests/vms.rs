// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo up` and its relatives with real guests, as a user sees them. Under TCG, with the guest kit's 6.1 kernel.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Lab, TIMEOUT, assert_names_the_missing_module, signal};

mod common;

/// Bytes of memory that the guest of the VM 'a' knows of.
fn memory_of_a(lab: &Lab) -> u64 {
    let line = lab.good(&["exec", "a", "--", "grep", "MemTotal", "/proc/meminfo"]);
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Starts `up` and returns once its standard error has said `line`.
fn up_until(lab: &Lab, line: &str) -> (Child, BufReader<std::process::ChildStderr>) {
    let mut child = lab.command(&["up"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    let found = loop {
        let from = said.len();
        if reader.read_line(&mut said).unwrap() == 0 {
            break false;
        }
        if said[from..].contains(line) {
            break true;
        }
    };
    if !found {
        let status = child.wait().unwrap();
        panic!("{status} before '{line}': {said}");
    }
    (child, reader)
}

const TWO: &str = r#"
[zone.shared]
size = "32M"
files = true
[zone.late]
size = "16M"
[vm.a]
kernel = "6.1"
memory = "256M"
zones = { shared = { mount = "/mnt/shared" } }
[vm.b]
kernel = "6.1"
memory = "256M"
zones = { shared = { mount = "/mnt/shared", rights = "ro" } }
"#;

const ONE: &str = "[vm.a]\nkernel = \"6.1\"\nmemory = \"256M\"\n";

#[test]
fn two_vms_come_up_share_files_run_commands_and_go_without_a_trace() {
    let lab = Lab::new(TWO);
    lab.good(&["up"]);
    let ps = lab.ps();
    for vm in ps["vms"].as_array().unwrap() {
        assert_eq!((vm["state"].as_str(), vm["hypervisor"].as_str()), (Some("up"), Some("tcg")), "{vm}");
    }

    // exec: code, output, error output and input, each for itself.
    let output = lab.run(&["exec", "a", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    let output =
        lab.run(&["exec", "-e", "NAME=a value", "-C", "/tmp", "a", "--", "sh", "-c", "echo $NAME; pwd"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "a value\n/tmp\n");
    assert_eq!(lab.run(&["exec", "a", "--", "/nonexistent"]).status.code(), Some(127));
    assert_eq!(lab.run(&["exec", "nobody", "--", "true"]).status.code(), Some(125));
    // A command without input does not wait for it.
    assert_eq!(lab.good(&["exec", "a", "--", "cat"]), "");
    lab.good(&["exec", "-i", "a", "--", "true"]);
    assert_eq!(lab.good(&["exec", "-i", "a", "--", "cat"]), "");
    // Input that is not read keeps no command from ending.
    let zeros = std::fs::File::open("/dev/zero").unwrap();
    let output = lab.command(&["exec", "-i", "a", "--", "sh", "-c", "exit 4"]).stdin(zeros).output().unwrap();
    assert_eq!(output.status.code(), Some(4));

    // Three megabytes there and back arrive as they were sent.
    let data: Vec<u8> = (0u32..786_432).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let mut child = lab
        .command(&["exec", "-i", "a", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let sent = data.clone();
    let feeder = std::thread::spawn(move || input.write_all(&sent));
    let mut back = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut back).unwrap();
    assert!(child.wait().unwrap().success());
    feeder.join().unwrap().unwrap();
    assert!(back == data, "{} of {} bytes, or others", back.len(), data.len());
    // The commands left nothing in the guest.
    assert_eq!(
        lab.good(&["exec", "a", "--", "sh", "-c", "ls -d /run/.tombolo-* 2>/dev/null | wc -l"]),
        "1\n"
    );

    // One file system in both, with the rights that the file grants.
    lab.good(&["exec", "a", "--", "sh", "-c", "echo hello >/mnt/shared/x"]);
    assert_eq!(lab.good(&["exec", "b", "--", "cat", "/mnt/shared/x"]), "hello\n");
    assert!(!lab.run(&["exec", "b", "--", "sh", "-c", "echo no >/mnt/shared/y"]).status.success());

    // Neither a set-id program nor a device node that the other made counts in it.
    assert!(lab.good(&["exec", "a", "--", "grep", "tombolo", "/proc/mounts"]).contains("nosuid,nodev"));

    // Not even its kernel can write to the zone.
    lab.good(&["exec", "b", "--", "dd", "if=/dev/zero", "of=/dev/pmem0", "bs=4096", "count=1", "conv=fsync"]);
    let path = lab.good(&["zone", "path", "shared"]);
    assert!(lab.good(&["zone", "inspect", path.trim()]).starts_with("shared "));

    // A second up of the same file changes nothing.
    let pids = |ps: &serde_json::Value| -> Vec<u64> {
        ps["vms"].as_array().unwrap().iter().filter_map(|v| v["pid"].as_u64()).collect()
    };
    let again = lab.run(&["up"]);
    assert!(again.status.success());
    assert!(String::from_utf8_lossy(&again.stderr).contains("a: already running"));
    assert_eq!(pids(&lab.ps()), pids(&ps));

    // A zone comes to a running VM, and the VM leaves it again.
    lab.good(&["zone", "attach", "late", "a"]);
    let seen = "for i in $(seq 500); do [ -e /dev/pmem1 ] && break; usleep 10000; done; ls /dev/pmem1";
    assert_eq!(lab.good(&["exec", "a", "--", "sh", "-c", seen]), "/dev/pmem1\n");
    let unmounted = lab.run(&["zone", "attach", "--mount", "/mnt/late", "late", "b"]);
    let err = String::from_utf8_lossy(&unmounted.stderr);
    assert!(!unmounted.status.success() && err.contains("run `tombolo files mkfs` on the host"), "{err}");
    let left = lab.run(&["zone", "detach", "late", "a"]);
    assert!(String::from_utf8_lossy(&left.stderr).contains("can't unplug virtio-pmem"));

    // A VM that was killed is told apart, and up brings it back.
    signal(u32::try_from(pids(&ps)[1]).unwrap(), "KILL");
    let start = Instant::now();
    while lab.ps()["vms"][1]["state"] == "up" {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(lab.ps()["vms"][1]["state"], "ended: QEMU was killed by signal 9");
    lab.good(&["up"]);
    assert_eq!(lab.good(&["exec", "b", "--", "cat", "/mnt/shared/x"]), "hello\n");

    lab.good(&["down"]);
    lab.assert_nothing_left();
    assert!(lab.ps()["vms"].as_array().unwrap().is_empty());
}

#[test]
fn a_guest_that_fails_is_shown_by_its_last_words_and_takes_nobody_along() {
    let lab = Lab::new(&format!(
        "{ONE}[vm.b]\nkernel = \"6.1\"\nmemory = \"256M\"\ncmdline = \"loglevel=7 rdinit=/nonexistent root=/none\"\n"
    ));
    let output = lab.run(&["up"]);
    assert_eq!(output.status.code(), Some(1));
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("the VM 'b' failed: it ended while it booted"), "{err}");
    assert!(err.contains("last lines of its console") && err.contains("| "), "{err}");
    lab.assert_nothing_left();
}

#[test]
fn a_vm_outlives_its_supervisor_and_does_what_it_did() {
    let lab = Lab::new(ONE);
    lab.good(&["up"]);
    let before = lab.ps();
    lab.kill_with_shims(&[]);
    let boot = lab.good(&["exec", "a", "--", "cat", "/proc/sys/kernel/random/boot_id"]);
    let after = lab.ps();
    assert_eq!(after["vms"][0]["pid"], before["vms"][0]["pid"]);
    assert_ne!(after["supervisor"], before["supervisor"]);
    lab.good(&["restart", "a"]);
    assert_ne!(lab.good(&["exec", "a", "--", "cat", "/proc/sys/kernel/random/boot_id"]), boot);
    lab.kill_with_shims(&[]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
    let output = lab.run(&["exec", "a", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not up; start it with 'tombolo up'"));
}

#[test]
fn the_port_of_an_input_whose_supervisor_was_killed_is_the_next_ones() {
    let lab = Lab::new(ONE);
    lab.good(&["up"]);
    let mut feeding = lab.command(&["exec", "-i", "a", "--", "sh", "-c", "echo runs; cat"]);
    let mut feeding = feeding.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(feeding.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "runs\n");
    lab.kill_with_shims(&[]);
    assert!(!feeding.wait().unwrap().success());
    let names = lab.good(&["exec", "-i", "a", "--", "sh", "-c", "cat /sys/class/virtio-ports/*/name"]);
    assert_eq!(names.matches("org.tombolo.input.").count(), 1, "{names}");
    lab.good(&["down"]);
}

#[test]
fn ctrl_c_while_it_starts_takes_everything_back() {
    let lab = Lab::new(ONE);
    let (mut child, mut reader) = up_until(&lab, "a: booting");
    signal(child.id(), "INT");
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    assert!(rest.contains("interrupted; everything that was started has been stopped"), "{rest}");
    lab.assert_nothing_left();
}

#[test]
fn an_up_that_is_killed_while_it_starts_leaves_nothing() {
    let lab = Lab::new(ONE);
    let (mut child, _reader) = up_until(&lab, "a: booting");
    child.kill().unwrap();
    child.wait().unwrap();
    lab.assert_nothing_left();
}

#[test]
fn a_guest_without_an_agent_is_up_by_its_console_and_can_be_typed_at() {
    let lab = Lab::new(&format!("{ONE}ready = \"console:tombolo-guest ready\"\n"));
    lab.good(&["up"]);
    assert!(lab.good(&["logs", "a"]).contains("tombolo-guest ready"));
    let mut console =
        lab.command(&["console", "a"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    console.stdin.as_mut().unwrap().write_all(b"\necho $((6 * 7))-typed\n").unwrap();
    let mut said = BufReader::new(console.stdout.take().unwrap());
    let mut line = Vec::new();
    while !String::from_utf8_lossy(&line).contains("42-typed") {
        line.clear();
        assert!(said.read_until(b'\n', &mut line).unwrap() > 0, "the console ended");
    }
    console.kill().unwrap();
    console.wait().unwrap();
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_zone_in_a_file_is_in_use_by_one_project_and_persists() {
    let first = Lab::new("");
    let image = first.dir.path().join("zone.img");
    let compose = format!(
        "[zone.kept]\nsize = \"16M\"\nfiles = true\nbacking = \"{}\"\n{ONE}zones = {{ kept = {{ mount = \"/mnt\" }} }}\n",
        image.display()
    );
    std::fs::write(first.dir.path().join("tombolo.toml"), &compose).unwrap();
    first.good(&["up"]);
    first.good(&["exec", "a", "--", "sh", "-c", "echo kept >/mnt/x"]);
    let second = Lab::new(&compose);
    let output = second.run(&["up"]);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && err.contains("zone.kept") && err.contains("in use"), "{err}");
    second.assert_nothing_left();
    first.good(&["down"]);
    second.good(&["up"]);
    assert_eq!(second.good(&["exec", "a", "--", "cat", "/mnt/x"]), "kept\n");
}

/// Waits until the VM has rebooted `count` times and is up again.
fn wait_rebooted(lab: &Lab, count: u64) -> serde_json::Value {
    let start = Instant::now();
    loop {
        let vm = lab.ps()["vms"][0].clone();
        if vm["reboots"] == count && vm["state"] == "up" {
            return vm;
        }
        let state = vm["state"].as_str().unwrap();
        assert!(!state.starts_with("failed") && !state.starts_with("ended"), "{vm}");
        assert!(start.elapsed() < TIMEOUT, "{vm}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_guest_that_reboots_comes_back_a_new_member_with_all_its_zones_mounted() {
    let lab = Lab::new(&format!(
        "[zone.z]\nsize = \"16M\"\nfiles = true\n[zone.late]\nsize = \"16M\"\nfiles = true\n{ONE}zones = {{ z = {{ mount = \"/mnt/z\" }} }}\n"
    ));
    lab.good(&["up"]);
    lab.good(&["zone", "attach", "--mount", "/mnt/late", "late", "a"]);
    lab.good(&["exec", "a", "--", "sh", "-c", "echo one >/mnt/z/x; echo two >/mnt/late/x"]);
    let before = lab.ps()["vms"][0]["pid"].clone();
    let slot = || lab.good(&["exec", "a", "--", "sh", "-c", "grep -c tombolo /proc/mounts; ls /dev/pmem*"]);
    assert_eq!(slot(), "2\n/dev/pmem0\n/dev/pmem1\n");
    let epoch = || -> u64 {
        let path = lab.good(&["zone", "path", "z"]);
        let zone: serde_json::Value =
            serde_json::from_str(&lab.good(&["zone", "inspect", "--json", path.trim()])).unwrap();
        let members = zone["members"].as_array().unwrap();
        members.iter().find(|m| m["name"] == "a").unwrap()["epoch"].as_u64().unwrap()
    };
    let first = epoch();

    // Without a farewell, as a crash is, and in good order.
    let crashed = lab.run(&["exec", "a", "--", "sh", "-c", "echo b >/proc/sysrq-trigger"]);
    assert!(!crashed.status.success(), "its agent has gone with it");
    let vm = wait_rebooted(&lab, 1);
    assert_ne!(vm["pid"], before);
    assert_eq!(vm["zones"], serde_json::json!(["late", "z"]));
    assert_eq!(slot(), "2\n/dev/pmem0\n/dev/pmem1\n");
    assert_eq!(lab.good(&["exec", "a", "--", "cat", "/mnt/z/x", "/mnt/late/x"]), "one\ntwo\n");
    let second = epoch();
    assert!(second != first, "{first} and {second}");
    lab.run(&["exec", "a", "--", "reboot"]);
    wait_rebooted(&lab, 2);
    assert_eq!(lab.good(&["exec", "a", "--", "cat", "/mnt/z/x", "/mnt/late/x"]), "one\ntwo\n");
    assert!(epoch() != second);
    let log = lab.good(&["logs", "a"]);
    assert_eq!(log.matches("tombolo-guest ready").count(), 3, "{log}");

    // One that switches itself off stays off.
    lab.run(&["exec", "a", "--", "poweroff"]);
    let start = Instant::now();
    while lab.ps()["vms"][0]["state"] == "up" {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(lab.ps()["vms"][0]["state"], "ended: the guest switched itself off");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_disk_of_the_users_own_boots_by_itself_shares_files_and_keeps_what_was_written() {
    let lab = Lab::new(
        "[zone.z]\nsize = \"16M\"\nfiles = true\n[vm.a]\ndisk = \"own.img\"\nmemory = \"256M\"\nzones = { z = { mount = \"/mnt\" } }\n",
    );
    common::disk_image(&lab.dir.path().join("own.img"));
    lab.good(&["up"]);
    assert!(lab.good(&["exec", "a", "--", "cat", "/proc/cmdline"]).contains("BOOT_IMAGE=/boot/vmlinuz"));
    lab.good(&["exec", "a", "--", "sh", "-c", "echo disk >/root/x; echo zone >/mnt/x"]);
    lab.run(&["exec", "a", "--", "reboot"]);
    wait_rebooted(&lab, 1);
    assert_eq!(lab.good(&["exec", "a", "--", "cat", "/root/x", "/mnt/x"]), "disk\nzone\n");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn guests_and_their_mounts_run_on_while_the_supervisor_becomes_another_program() {
    let lab = Lab::new(&format!("{TWO}networks = [\"lan\"]\n[net.lan]\n"));
    // The program that comes is elsewhere, and looks for the guest kit beside itself where nothing names the folder.
    let cache = common::plain::kit().ancestors().nth(2).unwrap().to_owned();
    assert!(lab.command(&["up"]).env("TOMBOLO_CACHE", cache).status().unwrap().success());
    let uptime = || -> f64 {
        let said = lab.good(&["exec", "a", "--", "cat", "/proc/uptime"]);
        said.split_whitespace().next().unwrap().parse().unwrap()
    };
    let begun = "/tmp/begun";
    lab.good(&["exec", "a", "--", "sh", "-c", &format!("echo one >/mnt/shared/x; echo $$ >{begun}")]);
    lab.good(&["zone", "attach", "late", "a"]);
    let (before, at) = (lab.ps(), uptime());
    let next = lab.dir.path().join("next");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_tombolo")).arg(&next).status().unwrap().success());
    lab.good(&["upgrade", "--program", next.to_str().unwrap()]);
    let after = lab.ps();
    let supervisor = after["supervisor"].as_u64().unwrap();
    assert_eq!(std::fs::read_link(format!("/proc/{supervisor}/exe")).unwrap(), next);
    for (old, new) in before["vms"].as_array().unwrap().iter().zip(after["vms"].as_array().unwrap()) {
        assert_eq!((&old["pid"], "up"), (&new["pid"], new["state"].as_str().unwrap()));
    }
    assert!(uptime() > at, "the guest went on");
    // Both see each other's changes through the memory that they share, and the host does.
    assert_eq!(lab.good(&["exec", "b", "--", "cat", "/mnt/shared/x"]), "one\n");
    lab.good(&["exec", "a", "--", "sh", "-c", "echo two >/mnt/shared/x"]);
    assert_eq!(lab.good(&["exec", "b", "--", "cat", "/mnt/shared/x"]), "two\n");
    lab.good(&["files", "df", "shared"]);
    lab.good(&["zone", "detach", "late", "a"]);
    lab.good(&["zone", "attach", "late", "b"]);
    // A reboot has its zones again, and the others hear of it.
    lab.run(&["exec", "a", "--", "reboot"]);
    wait_rebooted(&lab, 1);
    assert!(!lab.run(&["exec", "a", "--", "test", "-e", begun]).status.success(), "it is a new guest");
    assert_eq!(lab.good(&["exec", "a", "--", "cat", "/mnt/shared/x"]), "two\n");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_guest_that_panics_is_dead_at_once_and_its_console_says_why() {
    let lab = Lab::new(&format!(
        "[zone.z]\nsize = \"16M\"\nfiles = true\n{ONE}cmdline = \"panic=0\"\nzones = {{ z = {{ mount = \"/mnt\" }} }}\n"
    ));
    lab.good(&["up"]);
    // Left alone, a kernel with panic=0 stands still for ever, a member with all its locks.
    lab.run(&["exec", "a", "--", "sh", "-c", "echo c >/proc/sysrq-trigger"]);
    let start = Instant::now();
    while lab.ps()["vms"][0]["state"] == "up" {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(lab.ps()["vms"][0]["state"], "ended: the guest's kernel panicked");
    assert!(lab.good(&["logs", "a"]).contains("sysrq triggered crash"));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_guest_without_virtio_mem_is_started_again_with_all_its_memory() {
    let lab = Lab::new(
        r#"
[zone.shared]
size = "16M"
files = true
[vm.a]
kernel = "6.1"
memory = "1G"
start = "fast"
boot_memory = "512M"
cmdline = "module_blacklist=virtio_mem"
zones = { shared = { mount = "/mnt/shared" } }
"#,
    );
    lab.good(&["up"]);
    let small = lab.ps()["vms"][0]["pid"].clone();
    lab.good(&["exec", "a", "--", "touch", "/mnt/shared/kept"]);
    let start = Instant::now();
    let vm = loop {
        let vm = lab.ps()["vms"][0].clone();
        if vm["pid"] != small && vm["state"] == "up" {
            break vm;
        }
        assert!(start.elapsed() < TIMEOUT, "{vm}");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(memory_of_a(&lab) > 900 << 20, "{vm}");
    lab.good(&["exec", "a", "--", "ls", "/mnt/shared/kept"]);
    // It stays so, also for an up of the same file and for the guest's own reboot.
    assert!(String::from_utf8_lossy(&lab.run(&["up"]).stderr).contains("a: already running"));
    lab.run(&["exec", "a", "--", "reboot", "-f"]);
    wait_rebooted(&lab, 1);
    assert!(memory_of_a(&lab) > 900 << 20);
    lab.good(&["down"]);
}

#[test]
fn zones_come_and_go_and_come_back_as_often_as_there_are_ports() {
    let lab = Lab::new(&format!(
        "[zone.late]\nsize = \"16M\"\nfiles = true\n[zone.other]\nsize = \"16M\"\nfiles = true\n{ONE}hotplug_ports = 4\n"
    ));
    lab.good(&["up"]);
    lab.good(&["zone", "attach", "--mount", "/mnt/late", "late", "a"]);
    lab.good(&["exec", "a", "--", "sh", "-c", "echo kept >/mnt/late/x"]);
    lab.good(&["zone", "attach", "--mount", r"/mnt/the other\one", "other", "a"]);
    // Its memory stays with QEMU; a new doorbell makes it a member again.
    for _ in 0..2 {
        lab.good(&["zone", "detach", "late", "a"]);
        lab.good(&["zone", "attach", "--mount", "/mnt/late", "late", "a"]);
        assert_eq!(lab.good(&["exec", "a", "--", "cat", "/mnt/late/x"]), "kept\n");
    }
    // The guest hears of the host's change, by the doorbell that came last.
    let host = lab.dir.path().join("host");
    std::fs::create_dir(&host).unwrap();
    lab.good(&["files", "mount", "late", host.to_str().unwrap()]);
    program("files/linux/tests/hear.c", &host.join("hear"));
    std::fs::create_dir(host.join("d")).unwrap();
    std::fs::write(host.join("d/file"), "x").unwrap();
    let hear = ["exec", "a", "--", "/mnt/late/hear", "/mnt/late/d", "/mnt/late/d/file", "/mnt/late/ready"];
    let hearing = lab.command(&hear).stdout(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while !host.join("ready").exists() {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(10));
    }
    std::fs::write(host.join("d/new"), "").unwrap();
    std::fs::write(host.join("d/end"), "").unwrap();
    let heard = hearing.wait_with_output().unwrap();
    assert!(
        heard.status.success() && String::from_utf8_lossy(&heard.stdout).contains("dir CREATE new"),
        "{heard:?}"
    );
    assert!(Command::new("umount").arg(&host).status().unwrap().success());
    lab.good(&["zone", "detach", "other", "a"]);
    let full = lab.run(&["zone", "attach", "other", "a"]);
    assert!(String::from_utf8_lossy(&full.stderr).contains("raise vm.a.hotplug_ports (now 4)"), "{full:?}");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn down_ends_a_reboot_and_leaves_nothing() {
    let lab = Lab::new(ONE);
    lab.good(&["up"]);
    lab.run(&["exec", "a", "--", "sh", "-c", "echo b >/proc/sysrq-trigger"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_guest_without_the_module_is_named_with_the_remedy() {
    // A module that is kept from loading is as good as one that is missing.
    let lab = Lab::new(&format!(
        "[zone.z]\nsize = \"16M\"\nfiles = true\n{ONE}cmdline = \"module_blacklist=tombolo\"\nzones = {{ z = {{ mount = \"/mnt\" }} }}\n"
    ));
    let output = lab.run(&["up"]);
    assert_names_the_missing_module(&output);
    lab.assert_nothing_left();
}

#[test]
fn the_tiny_guest_tells_an_accelerator_that_works() {
    let qemu = tombolo_vm::qemu::version::Qemu::find(None).unwrap();
    let kernel = common::plain::kit().join("vmlinuz");
    let tcg = tombolo_vm::qemu::Hypervisor::Tcg;
    let verdict = tombolo_vm::qemu::kvm::try_guest(&qemu, &kernel, tcg, TIMEOUT, &|| false).unwrap();
    assert!(verdict.works && verdict.why.starts_with("a tiny guest ran under TCG"), "{verdict:?}");
}

/// Compiles a program that runs in any guest.
fn program(source: &str, to: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(source);
    let built = Command::new("cc").args(["-O2", "-static", "-o"]).arg(to).arg(source).status().unwrap();
    assert!(built.success());
}

#[test]
fn the_host_and_a_guest_hear_of_each_other() {
    let lab = Lab::new(&format!(
        "[zone.shared]\nsize = \"64M\"\nfiles = true\n{ONE}zones = {{ shared = {{ mount = \"/mnt\", bytes = \"20M\" }} }}\n"
    ));
    lab.good(&["up"]);
    let host = lab.dir.path().join("host");
    std::fs::create_dir(&host).unwrap();
    lab.good(&["files", "mount", "shared", host.to_str().unwrap()]);
    program("demo/share.c", &host.join("share"));
    program("files/linux/tests/hear.c", &host.join("hear"));

    // A file that the guest maps is cut by the host: the guest is rung and lets go, so its blocks come back at once.
    let free = || -> u64 {
        let df: serde_json::Value =
            serde_json::from_str(&lab.good(&["files", "df", "shared", "--json"])).unwrap();
        df["free"].as_u64().unwrap()
    };
    let before = free();
    std::fs::write(host.join("big"), vec![1u8; 16 << 20]).unwrap();
    let mut holder = lab
        .command(&["exec", "-i", "a", "--", "/mnt/share", "hold", "/mnt/big"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(holder.stdout.take().unwrap());
    said.read_line(&mut String::new()).unwrap();
    std::fs::OpenOptions::new().write(true).open(host.join("big")).unwrap().set_len(0).unwrap();
    assert!(free() + (1 << 20) > before, "{} bytes of {before} came back", free());
    drop(holder.stdin.take());
    holder.wait().unwrap();

    // inotify in the guest hears of the host's change.
    std::fs::create_dir(host.join("d")).unwrap();
    std::fs::write(host.join("d/file"), "x").unwrap();
    let hear = ["exec", "a", "--", "/mnt/hear", "/mnt/d", "/mnt/d/file", "/mnt/ready"];
    let hearing = lab.command(&hear).stdout(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while !host.join("ready").exists() {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(10));
    }
    std::fs::write(host.join("d/new"), "y").unwrap();
    std::fs::rename(host.join("d/new"), host.join("d/moved")).unwrap();
    std::fs::OpenOptions::new().append(true).open(host.join("d/file")).unwrap().write_all(b"z").unwrap();
    std::fs::remove_file(host.join("d/moved")).unwrap();
    // Files that are gone before a VM hears of them.
    for n in 0..20 {
        std::fs::write(host.join(format!("d/brief{n}")), "y").unwrap();
        std::fs::remove_file(host.join(format!("d/brief{n}"))).unwrap();
    }
    std::fs::write(host.join("d/end"), "").unwrap();
    let heard = hearing.wait_with_output().unwrap();
    assert!(heard.status.success());
    let heard = String::from_utf8(heard.stdout).unwrap();
    for told in [
        "dir CREATE new",
        "dir MODIFY new",
        "dir MOVED_FROM 0 new",
        "dir MOVED_TO 0 moved",
        "dir MODIFY file",
        "file MODIFY -",
        "dir DELETE moved",
    ] {
        assert!(heard.lines().any(|l| l == told), "not heard: {told}; but:\n{heard}");
    }
    for n in 0..20 {
        let told = format!("dir MODIFY brief{n}");
        assert!(heard.lines().any(|l| l == told), "not heard: {told}; but:\n{heard}");
    }

    // watch on the host shows the guest's change.
    let mut watch = lab.command(&["files", "watch", "shared"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
    lines.next().unwrap();
    lab.good(&["exec", "a", "--", "mkdir", "/mnt/d/made"]);
    let line = lines.next().unwrap();
    assert_eq!(line.split_whitespace().collect::<Vec<_>>(), ["a", "create", "dir", "/d/made"]);
    signal(watch.id(), "TERM");
    assert!(watch.wait().unwrap().success());

    // The limit of the file holds: the guest's own files end at 20 MiB.
    let full = lab.run(&["exec", "a", "--", "dd", "if=/dev/zero", "of=/mnt/own", "bs=1M", "count=21"]);
    assert!(String::from_utf8_lossy(&full.stderr).contains("quota exceeded"), "{full:?}");
    let accounts = lab.good(&["files", "accounts", "shared"]);
    assert!(accounts.lines().any(|l| l.starts_with("a ") && l.contains(" 20480 ")), "{accounts}");

    lab.good(&["down"]);
    assert!(Command::new("umount").arg(&host).status().unwrap().success());
    lab.assert_nothing_left();
}
