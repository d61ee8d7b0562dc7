// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kills each process that takes part in a command, at any moment of it, and compares what `ps` says with what the host has.
//! `TOMBOLO_KILLS=500 TOMBOLO_SEED=7 cargo test -p tombolo-cli --test kills` for more of them, or those of one seed.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::stand_in::until;
use common::{Lab, TIMEOUT, signal};

mod common;

/// Of the commands of the list the one that ends all, and the one that lets b grow again; and what is chosen beside them: guests that reboot.
const DOWN: u64 = 1;
const RESTART_B: u64 = 6;
const UPGRADE: u64 = 7;
const REBOOT_A: u64 = 10;
const REBOOT_B: u64 = 11;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

/// Two VMs, each with a stand-in for QEMU, zones that come and go, memory that grows, and a real switch.
fn lab() -> Lab {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-qemu");
    let vm = "kernel = \"./kernel\"\nhotplug_ports = 16\nnetworks = { lan = { address = \"none\" } }\n";
    let lab = Lab::new(&format!(
        "qemu = \"{}\"\n[zone.z]\nsize = \"8M\"\n[zone.late]\nsize = \"8M\"\n[net.lan]\n\
         [vm.a]\n{vm}memory = \"128M\"\nready = \"running\"\nzones = {{ z = {{}} }}\n\
         [vm.b]\n{vm}memory = \"320M\"\nboot_memory = \"128M\"\nstart = \"fast\"\nready = \"running\"\n",
        fake.display()
    ));
    std::fs::write(lab.dir.path().join("kernel"), "").unwrap();
    lab
}

/// The answer of `ps` once no VM starts or stops, and the processes of this project on the host.
fn settled(lab: &Lab) -> (serde_json::Value, Vec<u32>) {
    let start = Instant::now();
    loop {
        let ps = lab.ps();
        let pid = |value: &serde_json::Value| value.as_u64().map(|pid| u32::try_from(pid).unwrap());
        let vms = ps["vms"].as_array().unwrap();
        let states: Vec<&str> = vms.iter().map(|vm| vm["state"].as_str().unwrap()).collect();
        let networks = ps["networks"].as_array().unwrap();
        let changing =
            |state: &&str| matches!(*state, "booting" | "rebooting" | "stopping") || state.starts_with("up,");
        let moving = states.iter().any(changing) || networks.iter().any(|net| net["pid"].is_null());
        let parts = vms.iter().chain(networks).map(|part| &part["pid"]);
        let mut known: Vec<u32> = parts.chain([&ps["supervisor"]]).filter_map(pid).collect();
        // A switch has a process that opens for it what it may not.
        let switches: Vec<u32> = networks.iter().map(|net| &net["pid"]).filter_map(pid).collect();
        let (mut there, shims) = (lab.processes(), lab.shims());
        there.retain(|process| !parent(*process).is_some_and(|parent| switches.contains(&parent)));
        there.retain(|process| !shims.values().any(|shim| shim == process));
        known.sort_unstable();
        there.sort_unstable();
        let kinds = [("vm-", &ps["vms"]), ("switch-", &ps["networks"]), ("zone-", &ps["zones"])];
        let parts = kinds.iter().flat_map(|(kind, parts)| {
            parts
                .as_array()
                .unwrap()
                .iter()
                .map(move |part| format!("{kind}{}", part["name"].as_str().unwrap()))
        });
        let parts: BTreeSet<String> = parts.collect();
        // A VM that has ended may have lost its shim, too.
        let all_known = shims.keys().all(|shim| parts.contains(shim));
        if !moving && known == there && all_known {
            return (ps, there);
        }
        assert!(start.elapsed() < TIMEOUT, "ps knows {known:?}, the host has {there:?}: {ps}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The parent of a process that lives.
fn parent(process: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
}

fn begin(lab: &Lab, arguments: &[&str]) -> Child {
    lab.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn whichever_process_is_killed_at_whatever_moment_nothing_is_left_that_ps_does_not_know_and_nothing_is_lost_that_was_up()
 {
    let seed = common::setting("TOMBOLO_SEED", u64::from(std::process::id()));
    println!("TOMBOLO_SEED={seed}");
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let lab = lab();
    let programs = ["one", "two"].map(|name| lab.dir.path().join(name));
    for program in &programs {
        // Another process writes it: a child that is being started elsewhere could hold it open for writing.
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_tombolo")).arg(program).status();
        assert!(copied.unwrap().success());
    }
    let mut was_down = false;
    for round in 0..common::setting("TOMBOLO_KILLS", 30) {
        // A 'down' whose client was killed goes on, and may begin only now.
        let up = lab.run(&["up"]);
        if was_down && String::from_utf8_lossy(&up.stderr).contains("the project is being taken down") {
            until("it is not down", || lab.ps()["supervisor"].is_null());
            lab.good(&["up"]);
        } else {
            assert!(
                up.status.success(),
                "seed {seed}, round {round}: {}",
                String::from_utf8_lossy(&up.stderr)
            );
        }
        let (before, _) = settled(&lab);
        let shims = lab.shims();
        let vm = |name: &str, ps: &serde_json::Value| {
            ps["vms"].as_array().unwrap().iter().find(|vm| vm["name"] == name).cloned()
        };
        let program = programs[usize::try_from(round % 2).unwrap()].to_str().unwrap();
        let commands: [&[&str]; 10] = [
            &["up"],
            &["down"],
            &["down", "b"],
            &["exec", "a", "--", "true"],
            &["zone", "attach", "late", "a"],
            &["zone", "detach", "late", "a"],
            &["restart", "b"],
            &["upgrade", "--program", program],
            &["cp", "kernel", "a:/tmp/kernel"],
            &["exec", "-t", "b", "--", "true"],
        ];
        let chosen = random.below(12);
        was_down = chosen == DOWN;
        // An 'up' has something to do.
        if chosen == 0 {
            lab.good(&["down"]);
        }
        let reboots = match chosen {
            REBOOT_A => Some("a"),
            REBOOT_B => Some("b"),
            _ => None,
        };
        let mut client = match reboots {
            None => begin(&lab, commands[usize::try_from(chosen).unwrap()]),
            Some(name) => {
                let pid = vm(name, &before).unwrap()["pid"].as_u64().unwrap();
                signal(u32::try_from(pid).unwrap(), "USR1");
                begin(&lab, &["ps"])
            }
        };
        std::thread::sleep(Duration::from_millis(random.below(150)));
        // The client is ended in time; the others may have ended already.
        let others: Vec<u32> = lab.processes().into_iter().filter(|pid| *pid != client.id()).collect();
        let victims = others.len() as u64 + 1;
        let victim = match others.get(usize::try_from(random.below(victims)).unwrap()) {
            Some(pid) => {
                let pid = rustix::process::Pid::from_raw(i32::try_from(*pid).unwrap()).unwrap();
                let _ended_by_itself = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                Some(u64::try_from(pid.as_raw_nonzero().get()).unwrap())
            }
            None => {
                let _ended_by_itself = client.kill();
                None
            }
        };
        client.wait().unwrap();
        let (after, there) = settled(&lab);
        let what =
            format!("seed {seed}, round {round}: {chosen} with {victim:?} killed; {before} then {after}");
        if after["supervisor"].is_null() {
            assert_eq!(there, Vec::<u32>::new(), "{what}");
        }
        // Only what was killed, or told to stop, is not what it was.
        if chosen >= 3 {
            // A restart that is cut off takes back what it started.
            let lasting = if chosen == RESTART_B { &["a"][..] } else { &["a", "b"] };
            for &name in lasting {
                let old = vm(name, &before).unwrap();
                let Some(new) = vm(name, &after) else {
                    // Nobody saw its end: its shim was killed between two supervisors.
                    let shim = shims.get(&format!("vm-{name}")).map(|pid| u64::from(*pid));
                    assert!(chosen == UPGRADE && shim.is_some() && victim == shim, "{name} is lost: {what}");
                    continue;
                };
                let state = new["state"].as_str().unwrap();
                // A reboot whose new QEMU, or the question for its version, is killed has failed.
                let killed = state.starts_with("ended: QEMU was killed")
                    || state.starts_with("ended: the VM's own process")
                    || reboots == Some(name) && state.starts_with("failed: it reboots, and fails");
                assert!(new["state"] == "up" || killed && victim.is_some(), "{name}: {what}");
                assert!(new["pid"] == old["pid"] || killed || reboots == Some(name), "{name}: {what}");
            }
        }
    }
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
