// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The measurements of `tombolo bench net` that need no VM: the switch and its peers under the same load, on the same
//! cores, in turns.
//!
//! The load is DPDK's testpmd with two virtio-user ports, which circulates frames: out of one port, through the system under
//! test, into the other, and out again. The system under test has one core (`back_cpu`), testpmd the other (`front_cpu`).
//! Within a repetition the systems take turns, so that other load on the machine hits all of them.
//!
//! Round trips are measured by two cards ([`tombolo_net_driver`]) on `front_cpu`; idle CPU with testpmd's
//! ports connected and silent. The speed of copying memory is measured too: frames of one buffer into another, in a set of
//! buffers as large as testpmd's, once (as the switch does) and through a third one (as DPDK does).

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::json;

use crate::peer::{Ovs, Peer};
use tombolo_net::control::config::Config;
use tombolo_net::control::daemon::Daemon;
use tombolo_net_driver::{Nic, NicConfig};

const MACS: [&str; 2] = ["02:00:00:00:00:00", "02:00:00:00:00:01"];

/// The measurements to make.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Frame sizes
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1500, 9000])]
    pub sizes: Vec<u32>,
    /// Systems: tombolo, dpdk-vhost, ovs-dpdk
    #[arg(long, value_delimiter = ',', default_values_t = ["tombolo", "dpdk-vhost"].map(String::from))]
    pub systems: Vec<String>,
    /// Only cases whose name contains one of these words: net-64-split, rtt, idle, copy
    #[arg(long, value_delimiter = ',', value_name = "WORD")]
    pub only: Vec<String>,
    /// Repetitions
    #[arg(long, default_value_t = 3)]
    pub repetitions: u32,
    /// Seconds per measurement
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Processor of the system under test
    #[arg(long, default_value_t = 0)]
    pub back_cpu: usize,
    /// Processor of the load
    #[arg(long, default_value_t = 1)]
    pub front_cpu: usize,
}

impl Options {
    /// Returns how often a case is measured.
    fn turns(&self, case: &str) -> u32 {
        if self.wants(case) { self.repetitions } else { 0 }
    }

    /// Returns whether a case is measured.
    #[must_use]
    pub fn wants(&self, case: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|word| case.contains(word.as_str()))
    }
}

/// A system under test, with two sockets.
struct Backend {
    dir: tempfile::TempDir,
    kind: Kind,
}

enum Kind {
    Tombolo(Arc<Daemon>),
    Vhost(Peer),
    Ovs(Ovs),
}

impl Backend {
    fn start(system: &str, options: &Options, size: u32) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let socket = |i: usize| dir.path().join(format!("s{i}"));
        let kind = match system {
            "tombolo" => {
                let mut config = Config::default();
                config.switch.cpus = vec![options.back_cpu];
                config.switch.sandbox = false;
                for (i, mac) in MACS.iter().enumerate() {
                    let port = json!({ "name": format!("p{i}"), "socket": socket(i), "macs": [mac] });
                    config.port.push(serde_json::from_value(port)?);
                }
                Kind::Tombolo(Daemon::start(&config)?)
            }
            "dpdk-vhost" => {
                let lcores = format!("0@{},1@{}", options.front_cpu, options.back_cpu);
                let (mut command, prefix) = Peer::testpmd("tbe");
                command.args(["--lcores", &lcores]);
                for i in 0..2 {
                    command.arg("--vdev").arg(format!("net_vhost{i},iface={}", socket(i).display()));
                }
                command.args(["--", "-i", "--nb-cores=1", "--forward-mode=io", "--auto-start"]);
                command.args(["--total-num-mbufs=4096", &mbuf(size)]);
                command.stdout(Stdio::null());
                Kind::Vhost(Peer::start(command, "dpdk-dev")?.with_prefix(prefix))
            }
            "ovs-dpdk" => Kind::Ovs(Ovs::start(dir.path(), options.front_cpu, options.back_cpu, size)?),
            other => anyhow::bail!("system '{other}' is unknown; use tombolo, dpdk-vhost or ovs-dpdk"),
        };
        let backend = Self { dir, kind };
        let end = Instant::now() + Duration::from_secs(20);
        for i in 0..2 {
            let path = backend.socket(i);
            while !path.metadata().is_ok_and(|m| m.file_type().is_socket()) {
                anyhow::ensure!(Instant::now() < end, "{system} made no socket within 20 s");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(backend)
    }

    fn socket(&self, i: usize) -> PathBuf {
        self.dir.path().join(format!("s{i}"))
    }

    /// Waits until it serves the connected cards.
    fn settle(&self) -> anyhow::Result<()> {
        if let Kind::Ovs(ovs) = &self.kind { ovs.wait_for_ports() } else { Ok(()) }
    }

    /// Processor time used so far, in seconds.
    fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let pid = match &self.kind {
            Kind::Tombolo(_) => std::process::id(),
            Kind::Vhost(peer) => peer.child.id(),
            Kind::Ovs(ovs) => ovs.switch.child.id(),
        };
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks: f64 = [11, 12].iter().filter_map(|i| fields.get(*i)?.parse::<f64>().ok()).sum();
        // SAFETY: asks for a number.
        Ok(ticks / unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if let Kind::Tombolo(daemon) = &self.kind {
            daemon.stop();
        }
    }
}

fn mbuf(size: u32) -> String {
    format!("--mbuf-size={}", if size > 2000 { size + 128 + 192 } else { 2176 })
}

/// The load: testpmd with two virtio-user ports.
struct Load {
    peer: Peer,
    log: PathBuf,
}

impl Load {
    fn start(backend: &Backend, options: &Options, size: u32, packed: bool) -> anyhow::Result<Self> {
        let log = backend.dir.path().join("load.log");
        let cpu = options.front_cpu;
        let (mut command, prefix) = Peer::testpmd("tfe");
        command.args(["--lcores", &format!("0@{cpu},1@{cpu}")]);
        for (i, mac) in MACS.iter().enumerate() {
            command.arg("--vdev").arg(format!(
                "net_virtio_user{i},path={},packed_vq={},queue_size=256,mac={mac}",
                backend.socket(i).display(),
                u8::from(packed)
            ));
        }
        command.args(["--", "-i", "--nb-cores=1", "--forward-mode=io", "--no-flush-rx"]);
        command.args(["--total-num-mbufs=4096", &mbuf(size)]);
        command.args([format!("--eth-peer=0,{}", MACS[1]), format!("--eth-peer=1,{}", MACS[0])]);
        command.stdout(File::create(&log)?);
        let mut load = Self { peer: Peer::start(command, "dpdk-dev")?.with_prefix(prefix), log };
        load.wait_for("testpmd>", 1)?;
        Ok(load)
    }

    fn say(&mut self, line: &str) -> anyhow::Result<()> {
        let stdin = self.peer.child.stdin.as_mut().context("testpmd has no input")?;
        writeln!(stdin, "{line}").context("testpmd has ended")
    }

    fn wait_for(&mut self, what: &str, times: usize) -> anyhow::Result<String> {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let mut text = String::new();
            File::open(&self.log)?.read_to_string(&mut text)?;
            if text.matches(what).count() >= times {
                return Ok(text);
            }
            anyhow::ensure!(Instant::now() < end, "testpmd never said '{what}':\n{text}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Measures frames per second and direction, the mean of both.
    fn rate(&mut self, size: u32, seconds: f64) -> anyhow::Result<f64> {
        self.say(&format!("set txpkts {size}"))?;
        self.say("start tx_first 8")?;
        std::thread::sleep(Duration::from_millis(400));
        self.say("show port stats all")?;
        std::thread::sleep(Duration::from_secs_f64(seconds));
        self.say("show port stats all")?;
        let text = self.wait_for("Rx-pps:", 4)?;
        let rates: Vec<f64> = text
            .lines()
            .filter_map(|l| l.trim().strip_prefix("Rx-pps:")?.split_whitespace().next()?.parse().ok())
            .collect();
        anyhow::ensure!(rates.len() >= 4, "testpmd said no rates");
        Ok((rates[2] + rates[3]) / 2.0)
    }
}

/// Median round trip in microseconds of a 64-byte frame from one polling card to another and back.
fn round_trip(backend: &Backend, packed: bool, cpu: usize) -> anyhow::Result<f64> {
    tombolo_net::forwarding::worker::pin(cpu)?;
    let config = NicConfig { packed, ..NicConfig::default() };
    let mut nics = [Nic::new(config)?, Nic::new(config)?];
    for (i, nic) in nics.iter_mut().enumerate() {
        nic.connect(&backend.socket(i))?;
    }
    backend.settle()?;
    let frame = |to: usize| -> anyhow::Result<Vec<u8>> {
        let mut f = Vec::new();
        for i in [to, 1 - to] {
            f.extend(MACS[i].parse::<tombolo_net::frames::frame::Mac>()?.0);
        }
        f.extend([0x88, 0xb5]);
        f.resize(64, 0);
        Ok(f)
    };
    let (there, back) = (frame(1)?, frame(0)?);
    let [a, b] = &mut nics;
    if !matches!(backend.kind, Kind::Tombolo(_)) {
        until_forwarded(a, b, &there)?;
        until_forwarded(b, a, &back)?;
    }
    let mut times = Vec::new();
    for _ in 0..20_000 {
        let start = Instant::now();
        let limit = start + Duration::from_secs(5);
        one_way(a, b, &there, limit)?;
        one_way(b, a, &back, limit)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Sends frames until one of them has arrived: testpmd and OVS drop frames until they poll both cards, and don't report when
/// they do.
fn until_forwarded(from: &mut Nic, to: &mut Nic, frame: &[u8]) -> anyhow::Result<()> {
    let end = Instant::now() + Duration::from_secs(20);
    let mut sent = 0;
    let mut arrived = 0;
    while arrived == 0 {
        anyhow::ensure!(Instant::now() < end, "none of {sent} frames arrived within 20 s");
        sent += u32::from(from.send(frame));
        let pause = Instant::now() + Duration::from_millis(50);
        while Instant::now() < pause {
            arrived += u32::from(to.receive().is_some());
        }
    }
    Ok(())
}

/// Sends a frame and polls until it is there.
fn one_way(from: &mut Nic, to: &mut Nic, frame: &[u8], limit: Instant) -> anyhow::Result<()> {
    anyhow::ensure!(from.send(frame), "no room to send one frame");
    while to.receive().is_none() {
        anyhow::ensure!(Instant::now() < limit, "a frame was lost");
        std::hint::spin_loop();
    }
    Ok(())
}

#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The measured case.
    pub case: String,
    pub system: String,
    /// The figure, in `unit`.
    pub value: f64,
    pub unit: &'static str,
    /// More is better.
    pub higher: bool,
}

/// A report of a running bench.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    Figure(Figure),
    /// A peer that could not be measured in one case.
    LeftOut {
        system: String,
        /// The case, and what went wrong in it.
        reason: String,
    },
}

/// Measures every case and calls `tell` with each figure at once. A peer that fails is left out of that case.
///
/// # Errors
/// The switch itself fails, or `tell` does.
pub fn run(options: &Options, tell: &mut dyn FnMut(News) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut cell = |case: &str, system: &str, unit: &'static str, measured: anyhow::Result<f64>| {
        let (case, system) = (case.to_owned(), system.to_owned());
        match measured {
            Ok(value) => {
                let higher = unit.ends_with("/s");
                tell(News::Figure(Figure { case, system, value, unit, higher }))
            }
            Err(err) if system == "tombolo" => Err(err.context(case)),
            Err(err) => tell(News::LeftOut { system, reason: format!("{case}: {err:#}") }),
        }
    };
    for packed in [false, true] {
        let ring = if packed { "packed" } else { "split" };
        for &size in &options.sizes {
            let case = format!("net-{size}-{ring}");
            for _ in 0..options.turns(&case) {
                for system in &options.systems {
                    cell(&case, system, "packets/s", forwarded(system, options, size, packed))?;
                }
            }
        }
        let case = format!("net-rtt-64-{ring}");
        for _ in 0..options.turns(&case) {
            for system in &options.systems {
                cell(&case, system, "us", answered(system, options, packed))?;
            }
        }
    }
    let case = "net-idle-cpu";
    for system in options.systems.iter().filter(|_| options.wants(case)) {
        cell(case, system, "% of a core", idle(system, options))?;
    }
    for &size in &options.sizes {
        let case = format!("net-copy-{size}");
        for _ in 0..options.turns(&case) {
            for (system, through) in [("memcpy", false), ("memcpy-twice", true)] {
                cell(&case, system, "frames/s", copies(size as usize, through, options.back_cpu))?;
            }
        }
    }
    Ok(())
}

/// Frames per second and direction between two cards.
fn forwarded(system: &str, options: &Options, size: u32, packed: bool) -> anyhow::Result<f64> {
    let backend = Backend::start(system, options, size)?;
    let mut load = Load::start(&backend, options, size, packed)?;
    backend.settle()?;
    let rate = load.rate(size, options.seconds)?;
    anyhow::ensure!(rate > 0.0, "{system} forwards nothing");
    Ok(rate)
}

/// The median round trip between two cards, in microseconds.
fn answered(system: &str, options: &Options, packed: bool) -> anyhow::Result<f64> {
    let backend = Backend::start(system, options, 64)?;
    let us = std::thread::scope(|s| s.spawn(|| round_trip(&backend, packed, options.front_cpu)).join());
    us.map_err(|_| anyhow::anyhow!("the measurement panicked"))?
}

/// Percent of a core that the system uses while two cards are connected and silent.
fn idle(system: &str, options: &Options) -> anyhow::Result<f64> {
    let backend = Backend::start(system, options, 64)?;
    let _load = Load::start(&backend, options, 64, false)?;
    backend.settle()?;
    std::thread::sleep(Duration::from_millis(500));
    let (start, before) = (Instant::now(), backend.cpu_seconds()?);
    std::thread::sleep(Duration::from_secs_f64(options.seconds.max(2.0)));
    Ok((backend.cpu_seconds()? - before) / start.elapsed().as_secs_f64() * 100.0)
}

/// Measures the frames per second that one core copies from buffer to buffer among as many as testpmd has in flight, in an
/// order that no prefetcher predicts; `through`: by way of a buffer that stays in the cache.
fn copies(size: usize, through: bool, cpu: usize) -> anyhow::Result<f64> {
    const BUFFERS: usize = 1536;
    const FRAMES: usize = 100_000;
    let work = move || -> anyhow::Result<f64> {
        tombolo_net::forwarding::worker::pin(cpu)?;
        let stride = size + 320;
        let mut memory = vec![1u8; stride * BUFFERS];
        let mut third = vec![0u8; size];
        // A permutation: the factor has no divisor in common with the number of buffers.
        let at = |i: usize| (i * 1151 % BUFFERS) * stride;
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let start = Instant::now();
            for i in 0..FRAMES {
                let (from, to) = (at(i), at(i + BUFFERS / 2));
                if through {
                    third.copy_from_slice(&memory[from..from + size]);
                    memory[to..to + size].copy_from_slice(std::hint::black_box(&third));
                } else {
                    memory.copy_within(from..from + size, to);
                }
                std::hint::black_box(&mut memory);
            }
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(FRAMES as f64 / best)
    };
    std::thread::spawn(work).join().map_err(|_| anyhow::anyhow!("the measurement panicked"))?
}
