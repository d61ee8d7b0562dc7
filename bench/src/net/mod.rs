// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench net`: the switch beside its peers.
//!
//! Without VMs: [`tombolo_net::bench`], DPDK's testpmd as the load. Between VMs: two VMs with two devices each, one on a
//! network of the compose file, one on a TAP device in a Linux bridge (with vhost-net where the host has that), so that all
//! systems are measured in the same guests, in turns: TCP by iperf3 with segmentation offload and without, round trips by
//! ping, and what the switch costs while nobody sends. TAP devices and bridge lie in a network namespace of the bench's own,
//! which needs root. And [`tombolo_net::soak`], every frame accounted for.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tombolo_net::bench::{Figure, Options};
use tombolo_net::soak;

use crate::guest::Project;
use crate::record::{Better, Machine, Results, Sample};

/// How much of it is run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is measured without VMs.
    pub load: Option<Options>,
    /// The guests' kernel, for what is measured between VMs.
    pub kernel: Option<String>,
    /// Nothing but a soak, of this length.
    pub soak: Option<Duration>,
    /// Folder of the guest kit.
    pub kit: PathBuf,
}

/// Turns of each cell between VMs.
const TURNS: u32 = 3;
/// Seconds of one iperf3 run.
const SECONDS: u32 = 5;

/// Runs the plan and writes `<dir>/net.jsonl`; `net-vm.jsonl` where only VMs are measured, `net-soak.jsonl` after a soak.
///
/// # Errors
/// A peer or the guest kit is missing, or a measurement fails.
pub fn run(plan: &Plan, dir: &Path, command: String) -> Result<Results> {
    let mut versions = Vec::new();
    for package in ["dpdk", "iperf3"] {
        let output =
            Command::new("dpkg-query").args(["-W", "-f", "${Package} ${Version}", package]).output()?;
        versions.push(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let name = if plan.soak.is_some() { "net-soak" } else { "net" };
    let accel =
        if plan.kernel.is_some() && plan.soak.is_none() { "tcg or kvm, see net-vm" } else { "no guests" };
    let mut results = Results::create(dir, name, Machine::here(command, Some(accel), versions))?;
    if let Some(time) = plan.soak {
        soak(time, &mut results)?;
        return Ok(results);
    }
    if let Some(options) = &plan.load {
        tombolo_net::bench::run(options, &mut |figure| results.add(sample(figure)))?;
    }
    if let Some(kernel) = &plan.kernel {
        between_vms(kernel, &plan.kit, &mut results)?;
    }
    Ok(results)
}

fn sample(figure: Figure) -> Sample {
    let Figure { case, system, value, unit, higher } = figure;
    let better = if higher { Better::Higher } else { Better::Lower };
    Sample { bench: "net".into(), case, system, value, unit: unit.into(), better }
}

fn soak(time: Duration, results: &mut Results) -> Result<()> {
    let plan = soak::Plan {
        program: std::env::current_exe()?,
        arguments: vec!["net".into(), "run".into()],
        time,
        round: Duration::from_secs(5),
    };
    let tally = soak::run(&plan, |tally| eprintln!("{tally:?}"))?;
    let figures = [
        ("sent", tally.sent, true),
        ("received", tally.received, true),
        ("dropped-and-counted", tally.dropped, false),
        ("unexplained", tally.sent - tally.received - tally.dropped, false),
        ("repeated", tally.repeated, false),
        ("kills", tally.kills, true),
    ];
    for (what, value, higher) in figures {
        let case = format!("net-soak-{what}");
        let value = value as f64;
        results.add(sample(Figure { case, system: "tombolo".into(), value, unit: "frames", higher }))?;
    }
    Ok(())
}

/// A way from VM to VM: what it is called, and the receiver's address on it.
struct Way {
    system: &'static str,
    address: &'static str,
}

fn sh(text: &str) -> Result<()> {
    let output = Command::new("sh").args(["-ec", text]).output()?;
    ensure!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

fn between_vms(kernel: &str, kit: &Path, results: &mut Results) -> Result<()> {
    // SAFETY: a network namespace of its own takes nothing from this process's memory or descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
        .context("a network namespace for TAP devices and a bridge needs root; --no-vms leaves this out")?;
    let temp = tempfile::tempdir()?;
    let base = kit.join(kernel).join("initrd.img");
    ensure!(base.exists(), "{} is not there: 'make guest' makes it", base.display());
    let image = temp.path().join("initrd.img");
    let status = Command::new("guest/add")
        .arg("--base")
        .arg(&base)
        .arg("-o")
        .arg(&image)
        .args(["iperf3", "ethtool"])
        .env("TOMBOLO_CACHE", kit.parent().unwrap_or(kit))
        .stdout(std::process::Stdio::null())
        .status()
        .context("guest/add; run this in the project's folder")?;
    ensure!(status.success(), "guest/add failed ({status})");

    let vhost = Path::new("/dev/vhost-net").exists();
    let mut bridges = vec![("tap-bridge", "10.87.1", false)];
    if vhost {
        bridges.push(("vhost-net", "10.87.2", true));
    }
    let mut arguments = [Vec::new(), Vec::new()];
    for (n, (_, _, vhost)) in bridges.iter().enumerate() {
        sh(&format!("ip link add br{n} type bridge; ip link set br{n} up"))?;
        for (v, list) in arguments.iter_mut().enumerate() {
            sh(&format!(
                "ip tuntap add t{n}{v} mode tap vnet_hdr; ip link set t{n}{v} master br{n}; ip link set t{n}{v} up"
            ))?;
            let vhost = if *vhost { "on" } else { "off" };
            list.extend([
                "-netdev".to_owned(),
                format!("tap,id=b{n},ifname=t{n}{v},script=no,downscript=no,vhost={vhost}"),
                "-device".to_owned(),
                format!("virtio-net-pci,netdev=b{n},mac=52:54:00:87:0{n}:0{v},romfile="),
            ]);
        }
    }
    let vm = |name: &str, arguments: &[String]| {
        format!(
            "[vm.{name}]\nkernel = {:?}\ninitrd = {:?}\ncpus = 1\nmemory = \"384M\"\nnetworks = [\"lan\"]\nqemu_args = {arguments:?}\n",
            kit.join(kernel).join("vmlinuz"),
            image
        )
    };
    let compose =
        format!("name = \"bench-net\"\n[net.lan]\n{}{}", vm("a", &arguments[0]), vm("b", &arguments[1]));
    let project = Project::up(temp.path(), &compose)?;
    let accel = project.accel("a")?;
    let mut paths = vec![Way { system: "tombolo", address: "10.86.0.3" }];
    for (n, (system, net, _)) in bridges.into_iter().enumerate() {
        for (v, name) in ["a", "b"].into_iter().enumerate() {
            let set = format!(
                "for d in /sys/class/net/*; do if [ $(cat $d/address) = 52:54:00:87:0{n}:0{v} ]; then \
                 ip addr add {net}.{}/24 dev ${{d##*/}}; exit; fi; done; exit 1",
                v + 2
            );
            project.exec(name, &set)?;
        }
        let address = if n == 0 { "10.87.1.3" } else { "10.87.2.3" };
        paths.push(Way { system, address });
    }
    project.exec("b", "iperf3 -s -D >/dev/null 2>&1")?;
    for tso in ["on", "off"] {
        for name in ["a", "b"] {
            let set = format!(
                "for d in /sys/class/net/eth*; do ethtool -K ${{d##*/}} tso {tso} gso {tso} gro {tso} >/dev/null; done"
            );
            project.exec(name, &set)?;
        }
        for _ in 0..TURNS {
            for path in &paths {
                let script = format!("iperf3 -c {} -t {SECONDS} -f m | grep receiver", path.address);
                let said = project.exec("a", &script)?;
                let words: Vec<&str> = said.split_whitespace().collect();
                let at = words.iter().position(|w| *w == "Mbits/sec");
                let Some(value) = at.and_then(|i| words.get(i.checked_sub(1)?)?.parse().ok()) else {
                    bail!("iperf3 said: {said}");
                };
                let case = format!("net-vm-{accel}-tcp-tso-{tso}");
                results.add(sample(Figure {
                    case,
                    system: path.system.into(),
                    value,
                    unit: "Mbit/s",
                    higher: true,
                }))?;
            }
        }
    }
    for _ in 0..TURNS {
        for path in &paths {
            let said = project.exec("a", &format!("ping -A -q -c 300 {} | tail -1", path.address))?;
            let Some(value) = said.split('/').nth(3).and_then(|v| v.trim().parse::<f64>().ok()) else {
                bail!("ping said: {said}");
            };
            let case = format!("net-vm-{accel}-rtt");
            let value = value * 1000.0;
            results.add(sample(Figure {
                case,
                system: path.system.into(),
                value,
                unit: "us",
                higher: false,
            }))?;
        }
    }
    let pid = project.switch("lan")?;
    let (start, before) = (Instant::now(), cpu_seconds(pid)?);
    std::thread::sleep(Duration::from_secs(10));
    let value = (cpu_seconds(pid)? - before) / start.elapsed().as_secs_f64() * 100.0;
    let case = format!("net-vm-{accel}-idle-cpu");
    results.add(sample(Figure { case, system: "tombolo".into(), value, unit: "% of a core", higher: false }))
}

/// Processor time that a process has used, in seconds.
fn cpu_seconds(pid: u64) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: f64 = [11, 12].iter().filter_map(|i| fields.get(*i)?.parse::<f64>().ok()).sum();
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}
