// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch between VMs, and between a VM and the outside, each beside what QEMU does without a switch of ours.
//!
//! Between VMs: a network of the compose file beside a Linux bridge with TAP devices (with vhost-net too where the host has
//! it). To the outside: the switch with a TAP device as uplink beside QEMU's own TAP backend, the other end of both being the
//! host. Both VMs have all the devices, so that the systems are measured in the same guests, in turns: TCP by iperf3 with
//! segmentation offload and without, UDP with frames of 64 B to 2 KB (the sizes of the NOVA paper), round trips by ping, and
//! what the switches cost while no VM sends. TAP devices and bridge lie in a network namespace that ends with the bench,
//! and need root.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tombolo_bench_project::kit::Kit;
use tombolo_bench_project::{Project, interrupt};
use tombolo_net_load::load::{Figure, Options};

use super::sample;
use crate::record::Results;

/// Turns of each cell.
const TURNS: u32 = 3;
/// Seconds of one run over TCP.
const TCP_SECONDS: u32 = 5;
/// Seconds of one run over UDP.
const UDP_SECONDS: u32 = 2;
/// Bytes of UDP's frames.
const SIZES: [u32; 7] = [64, 128, 256, 512, 1024, 1500, 2048];
/// Largest IP packet that the devices take; TCP is measured with the usual 1500.
const MTU: u32 = 4000;

/// A way from VM a: what it is called, the address at its other end, and the name of the pair that it is one of.
struct Way {
    pair: &'static str,
    system: &'static str,
    address: &'static str,
}

fn sh(text: &str) -> Result<()> {
    let output = Command::new("sh").args(["-ec", text]).output()?;
    ensure!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// iperf3's server at the host's end.
struct Server(Child);

impl Server {
    fn start() -> Result<Self> {
        let mut command = Command::new("iperf3");
        command.arg("-s").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self(command.spawn().context("iperf3 (package iperf3)")?))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

/// Measures all that is wanted.
pub(super) fn run(kernel: &str, kit: &Path, options: &Options, results: &mut Results) -> Result<()> {
    // SAFETY: a network namespace of its own takes nothing from this process's memory or descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
        .context("a network namespace for TAP devices and a bridge needs root; --no-vms leaves this out")?;
    let temp = tempfile::tempdir()?;
    let image = temp.path().join("initrd.img");
    let kit = Kit::new(kit, kernel)?;
    kit.add(&["iperf3", "ethtool"].map(String::from), &image)?;
    let mut ways = vec![
        Way { pair: "vm", system: "tombolo", address: "10.86.0.3" },
        Way { pair: "vm", system: "tap-bridge", address: "10.87.1.3" },
        Way { pair: "ext", system: "tombolo", address: "10.86.1.1" },
        Way { pair: "ext", system: "tap", address: "10.87.2.1" },
    ];
    let vhost = Path::new("/dev/vhost-net").exists();
    if vhost {
        ways.push(Way { pair: "vm", system: "vhost-net", address: "10.87.3.3" });
    }
    let arguments = devices(vhost)?;
    let vm = |name: &str, arguments: &[String]| {
        format!(
            "[vm.{name}]\nkernel = {:?}\ninitrd = {:?}\ncpus = 1\nmemory = \"384M\"\nnetworks = [\"lan\", \"out\"]\nqemu_args = {arguments:?}\n",
            kit.kernel(),
            image
        )
    };
    let compose = format!(
        "name = \"bench-net\"\n[net.lan]\nsubnet = \"10.86.0.0/24\"\nmtu = {MTU}\n\
         [net.out]\nsubnet = \"10.86.1.0/24\"\nmtu = {MTU}\nuplink = {{ tap = \"out0\" }}\n{}{}",
        vm("a", &arguments[0]),
        vm("b", &arguments[1])
    );
    let project = Project::up(temp.path(), &compose)?;
    let bench = Bench { hypervisor: project.hypervisor("a")?, project, options };
    for net in 1..=if vhost { 3 } else { 2 } {
        for (v, name) in ["a", "b"].into_iter().enumerate() {
            bench.set_address(name, net, v)?;
        }
    }
    bench.project.exec("b", "iperf3 -s -D >/dev/null 2>&1")?;
    let _server = Server::start()?;
    bench.tcp(&ways, results)?;
    bench.udp(&ways, results)?;
    bench.round_trips(&ways, results)?;
    bench.idle(results)
}

/// Makes the host's ends, and says what both VMs' QEMU is told of them: 1 is the bridge, 2 the outside, 3 the bridge with
/// vhost-net.
fn devices(vhost: bool) -> Result<[Vec<String>; 2]> {
    sh(&format!(
        "ip link set lo up; ip tuntap add out0 mode tap vnet_hdr; ip addr add 10.86.1.1/24 dev out0
         ip link set out0 mtu {MTU} up"
    ))?;
    let mut arguments = [Vec::new(), Vec::new()];
    for net in 1..=if vhost { 3 } else { 2 } {
        sh(&format!("ip link add br{net} type bridge; ip link set br{net} mtu {MTU} up"))?;
        for (v, list) in arguments.iter_mut().enumerate() {
            let tap = format!("t{net}{v}");
            sh(&format!("ip tuntap add {tap} mode tap vnet_hdr; ip link set {tap} mtu {MTU} up"))?;
            // Outside means the host itself, straight from a's TAP device; b has one that leads nowhere.
            sh(&match (net, v) {
                (2, 0) => format!("ip addr add 10.87.2.1/24 dev {tap}"),
                _ => format!("ip link set {tap} master br{net}"),
            })?;
            let with = if net == 3 { "on" } else { "off" };
            list.extend([
                "-netdev".to_owned(),
                format!("tap,id=b{net},ifname={tap},script=no,downscript=no,vhost={with}"),
                "-device".to_owned(),
                format!("virtio-net-pci,netdev=b{net},mac=52:54:00:87:0{net}:0{v},romfile="),
            ]);
        }
    }
    Ok(arguments)
}

struct Bench<'a> {
    project: Project,
    hypervisor: String,
    options: &'a Options,
}

impl Bench<'_> {
    fn set_address(&self, name: &str, net: usize, v: usize) -> Result<()> {
        let set = format!(
            "for d in /sys/class/net/*; do if [ $(cat $d/address) = 52:54:00:87:0{net}:0{v} ]; then \
             ip addr add 10.87.{net}.{}/24 dev ${{d##*/}}; ip link set ${{d##*/}} up; exit; fi; done; exit 1",
            v + 2
        );
        self.project.exec(name, &set).map(drop)
    }

    /// Runs a command for every device of both VMs.
    fn each_device(&self, command: &str) -> Result<()> {
        for name in ["a", "b"] {
            let all = format!("for d in /sys/class/net/eth*; do d=${{d##*/}}; {command} >/dev/null; done");
            self.project.exec(name, &all)?;
        }
        Ok(())
    }

    /// Measures a case (`net-<pair>-<hypervisor>-<what>`) on all ways in turns, as far as it is wanted.
    fn cell(
        &self,
        ways: &[Way],
        what: &str,
        (unit, higher): (&'static str, bool),
        results: &mut Results,
        measure: impl Fn(&Way) -> Result<f64>,
    ) -> Result<()> {
        for _ in 0..TURNS {
            for way in ways {
                let case = format!("net-{}-{}-{what}", way.pair, self.hypervisor);
                if self.options.wants(&case) {
                    interrupt::check()?;
                    let value = measure(way)?;
                    results.add(sample(Figure { case, system: way.system.into(), value, unit, higher }))?;
                }
            }
        }
        Ok(())
    }

    /// The receiver's figures, of iperf3 in VM a.
    fn iperf(&self, way: &Way, arguments: &str) -> Result<Value> {
        let said = self.project.exec("a", &format!("iperf3 -J -c {} {arguments}", way.address))?;
        let all: Value = serde_json::from_str(&said).with_context(|| format!("iperf3 said: {said}"))?;
        Ok(all["end"].clone())
    }

    fn tcp(&self, ways: &[Way], results: &mut Results) -> Result<()> {
        self.each_device("ip link set $d mtu 1500")?;
        for tso in ["on", "off"] {
            self.each_device(&format!("ethtool -K $d tso {tso} gso {tso} gro {tso}"))?;
            for (what, way_back) in [("tcp", ""), ("tcp-back", "-R")] {
                self.cell(ways, &format!("{what}-tso-{tso}"), ("Mbit/s", true), results, |way| {
                    let end = self.iperf(way, &format!("-t {TCP_SECONDS} {way_back}"))?;
                    let rate = end["sum_received"]["bits_per_second"].as_f64();
                    Ok(rate.with_context(|| format!("iperf3 said no rate: {end}"))? / 1e6)
                })?;
            }
        }
        self.each_device("ethtool -K $d tso on gso on gro on")
    }

    fn udp(&self, ways: &[Way], results: &mut Results) -> Result<()> {
        self.each_device(&format!("ip link set $d mtu {MTU}"))?;
        for size in SIZES {
            // Ethernet, IPv4 and UDP headers.
            let payload = size - 42;
            self.cell(ways, &format!("udp-{size}"), ("packets/s", true), results, |way| {
                let end = self.iperf(way, &format!("-u -b 0 -l {payload} -t {UDP_SECONDS}"))?;
                let sum = &end["sum"];
                let all = (sum["packets"].as_f64(), sum["lost_packets"].as_f64(), sum["seconds"].as_f64());
                let (Some(packets), Some(lost), Some(seconds)) = all else {
                    bail!("iperf3 said no counts: {end}");
                };
                Ok((packets - lost) / seconds)
            })?;
        }
        Ok(())
    }

    fn round_trips(&self, ways: &[Way], results: &mut Results) -> Result<()> {
        self.cell(ways, "rtt", ("us", false), results, |way| {
            let said = self.project.exec("a", &format!("ping -A -q -c 300 {} | tail -1", way.address))?;
            let average = said.split('/').nth(3).and_then(|v| v.trim().parse::<f64>().ok());
            Ok(average.with_context(|| format!("ping said: {said}"))? * 1000.0)
        })
    }

    fn idle(&self, results: &mut Results) -> Result<()> {
        let case = format!("net-vm-{}-idle-cpu", self.hypervisor);
        if !self.options.wants(&case) {
            return Ok(());
        }
        interrupt::check()?;
        let pid = self.project.switch("lan")?;
        let (start, before) = (Instant::now(), cpu_seconds(pid)?);
        std::thread::sleep(Duration::from_secs(10));
        let value = (cpu_seconds(pid)? - before) / start.elapsed().as_secs_f64() * 100.0;
        let system = "tombolo".into();
        results.add(sample(Figure { case, system, value, unit: "% of a core", higher: false }))
    }
}

/// Processor time that a process has used, in seconds.
fn cpu_seconds(pid: u64) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: f64 = [11, 12].iter().filter_map(|i| fields.get(*i)?.parse::<f64>().ok()).sum();
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}
