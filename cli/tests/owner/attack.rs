// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients that come to an owner that runs, and clients that mean harm, with the owner's kernel 6.12. The phases share their VMs, as each boot takes
//! long.

use std::process::Stdio;

use serde_json::Value;

use crate::common::{Lab, signal};
use crate::{PROCESSES, Steady, accelerator, computes, images, shell, vm, wait_until, workers};

/// A project whose VM `owner` serves these clients.
fn compose(clients: &[&str]) -> String {
    let mut text = format!(
        r#"
[accel.gpu]
vm = "owner"
memory = "64M"
window = "1M"
channels = 2
[vm.owner]
kernel = "6.12"
initrd = "{}"
memory = "1536M"
qemu_args = ["-cpu", "max,-erms,-fsrm,-cx16,-avx"]
"#,
        images::owner("6.12").display()
    );
    for client in clients {
        text += &format!(
            "[vm.{client}]\nkernel = \"6.1\"\ninitrd = \"{}\"\nmemory = \"256M\"\naccelerators = [\"gpu\"]\n",
            images::client().display()
        );
    }
    text
}

/// Brings the project up with these clients, of which some may run.
fn up(lab: &Lab, clients: &[&str]) {
    std::fs::write(lab.dir.path().join("tombolo.toml"), compose(clients)).unwrap();
    lab.good(&["up"]);
}

fn pid(lab: &Lab, name: &str) -> Value {
    vm(lab, name)["pid"].clone()
}

/// The server in the owner.
fn server(lab: &Lab) -> String {
    shell(lab, "owner", &format!("{PROCESSES}echo $server"))
}

/// KiB of private memory that the server in the owner has.
fn memory_of_the_server(lab: &Lab) -> u64 {
    let said =
        shell(lab, "owner", &format!("{PROCESSES}awk '/^RssAnon/ {{ print $2 }}' /proc/$server/status"));
    said.trim().parse().unwrap()
}

/// b is declared while the owner runs: it computes, and the VMs that ran are the same. So does it with the server that comes after this one.
fn a_client_that_comes_later_joins(lab: &Lab) {
    let ran = [pid(lab, "owner"), pid(lab, "a")];
    let first = server(lab);
    up(lab, &["a", "b"]);
    computes(lab, "b", "once");
    assert_eq!(([pid(lab, "owner"), pid(lab, "a")], server(lab)), (ran, first.clone()));
    shell(lab, "owner", &format!("{PROCESSES}kill -9 $server"));
    wait_until("another server", || server(lab) != first && accelerator(lab)["vms"][1]["served"] == true);
    computes(lab, "b", "once");
    computes(lab, "a", "once");
}

/// The server dies whenever a client is about to connect, and clients go on trying: in the end both channels of a can be had.
fn a_server_that_dies_again_and_again_while_clients_connect_loses_no_channel(lab: &Lab) {
    let script = "for i in 1 2 3 4 5 6; do steady once; steady once & steady once; wait; done; echo over";
    let mut clients = lab.command(&["exec", "a", "--", "sh", "-c", script]);
    let mut clients = clients.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut deaths = 0;
    while clients.try_wait().unwrap().is_none() {
        // As soon as a worker is there, which may be at any step of its client.
        let kill = "until [ -n \"$(grep -lsx accel-worker /proc/[0-9]*/comm)\" ] || [ $((looks += 1)) -gt 50 ]; do usleep 100000; done\n";
        // None, where it is just being started again.
        let killed = lab.run(&[
            "exec",
            "owner",
            "--",
            "sh",
            "-c",
            &format!("looks=0\n{kill}{PROCESSES}kill -9 $server"),
        ]);
        deaths += u32::from(killed.status.success());
    }
    assert!(deaths > 1, "{deaths}");
    wait_until("another server", || accelerator(lab)["vms"][0]["served"] == true);
    let both = "steady once >/tmp/one & steady once >/tmp/two; wait; cat /tmp/one /tmp/two";
    assert_eq!(shell(lab, "a", both), "right\nright\n");
}

/// b stands still in the middle of its calls; a computes meanwhile, and b goes on where it stood.
fn a_client_vm_that_stands_still_in_a_call_keeps_nobody_waiting(lab: &Lab) {
    let steady = Steady::begin(lab, "b");
    let qemu = u32::try_from(pid(lab, "b").as_u64().unwrap()).unwrap();
    signal(qemu, "STOP");
    for _ in 0..3 {
        computes(lab, "a", "once");
    }
    signal(qemu, "CONT");
    shell(lab, "b", "killall steady");
    drop(steady);
    wait_until("the end of b's worker", || workers(lab) == 0);
    computes(lab, "b", "once");
}

/// A kernel of b's has its worker die, and asks for a dump first. The owner has a program that takes dumps, which runs as root.
fn no_program_of_the_owner_reads_what_a_hostile_worker_dumps(lab: &Lab) {
    let prepare = "printf '#!/bin/sh\n: >/run/dumped\n' >/run/dump && chmod +x /run/dump && echo '|/run/dump' >/proc/sys/kernel/core_pattern";
    shell(lab, "owner", prepare);
    // It works, for a process of the owner's own.
    shell(
        lab,
        "owner",
        "sh -c 'kill -SEGV $$' & wait; until [ -e /run/dumped ]; do usleep 10000; done; rm /run/dumped",
    );
    let output = lab.run(&["exec", "b", "--", "escape", "crash"]);
    assert!(!String::from_utf8_lossy(&output.stdout).contains("survived"));
    wait_until("the worker's end", || workers(lab) == 0);
    assert_eq!(shell(lab, "owner", "ls /run/dumped 2>/dev/null; true"), "");
}

/// Words for a shell in a guest: its doorbell has no driver any more, and answers all the same.
const WITHOUT_A_DRIVER: &str = r#"cd /sys/bus/pci/drivers/tombolo_doorbell
for device in 0000:*; do
	echo $device >unbind && echo 1 >/sys/bus/pci/devices/$device/enable
done
"#;

#[test]
fn a_vm_that_damages_its_zone_and_rings_without_end_harms_no_other() {
    let lab = &Lab::new("");
    up(lab, &["a", "b"]);
    // Its log is as long as it may get: one more line begins it anew.
    let log = "/run/tombolo-accel-gpu/log";
    shell(lab, "owner", &format!("head -c 5000000 /dev/zero >>{log}"));
    let (before, memory) = (server(lab), memory_of_the_server(lab));
    let mut steady = Steady::begin(lab, "a");
    computes(lab, "b", "once");
    // b's kernel, for a minute.
    let said = shell(lab, "b", &format!("{WITHOUT_A_DRIVER}damage 60 7"));
    assert!(said.starts_with("damaged: "), "{said}");
    steady.assert_runs();
    assert_eq!(server(lab), before);
    let grown = memory_of_the_server(lab).saturating_sub(memory);
    assert!(grown < 16 << 10, "{grown} KiB more after {said}");
    let length = shell(lab, "owner", &format!("stat -c %s {log}"));
    assert!(length.trim().parse::<u64>().unwrap() < 5_000_000, "{length}");
    shell(lab, "a", "killall steady");
    computes(lab, "a", "once");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn clients_join_an_owner_that_runs_and_what_becomes_of_one_harms_no_other() {
    let lab = Lab::new("");
    up(&lab, &["a"]);
    computes(&lab, "a", "once");
    a_client_that_comes_later_joins(&lab);
    a_server_that_dies_again_and_again_while_clients_connect_loses_no_channel(&lab);
    a_client_vm_that_stands_still_in_a_call_keeps_nobody_waiting(&lab);
    no_program_of_the_owner_reads_what_a_hostile_worker_dumps(&lab);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
