// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench accel`: the same OpenCL program on the device itself and forwarded to a server process, through memory, over TCP, and from a
//! VM, in one run, in turns.
//!
//! - [`program`]: the server, and the program that measures (`opencl.c`) natively and forwarded.
//! - [`cuda`]: `tombolo bench cuda`, the same of a program of CUDA's.
//! - [`clpeak`]: what clpeak measures, natively and forwarded.
//! - [`neighbours`]: what a hostile client costs another one, beside what an ordinary one costs it.
//! - [`null`]: the transport alone: a call that waits and does nothing, and a posted one.

pub mod clpeak;
pub mod cuda;
pub mod neighbours;
pub mod null;
pub mod program;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tombolo_record::{Better, Machine, Results, Sample};

use tombolo_bench_project::{Project, interrupt};

use program::{Place, Program, Server};

const NATIVE: &str = "native";
/// Through memory, from another process.
const OURS: &str = "tombolo";
/// Over TCP, from another process.
const TCP: &str = "tombolo-tcp";
/// Through memory, from a VM.
const VM: &str = "tombolo-vm";

/// The cases to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Turns of each cell
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Calls of the mix in all turns together
    #[arg(long, default_value_t = 1_100_000)]
    calls: u64,
    /// Only these parts: null, calls, transfers, large, blas, clpeak, mix, small-images, clients, neighbours, idle
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Leave out what is measured in a VM
    #[arg(long)]
    no_vms: bool,
    /// Guest kernel: a version of the guest kit
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Folder of the guest kit
    #[arg(long, default_value = ".cache/guest")]
    kit: PathBuf,
    /// The client library [default: libtombolo_opencl.so beside tombolo]
    #[arg(long)]
    library: Option<PathBuf>,
    /// Folder for the results
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
}

struct Bench<'o> {
    options: &'o Options,
    /// The program, natively and in each way forwarded. Dropped first, then what they run in, then where that lies.
    programs: Vec<(&'static str, Program)>,
    _vm: Option<Project>,
    server: Server,
    place: Place,
    results: Results,
}

/// Measures, writes `<results>/accel.jsonl` and prints it.
///
/// # Errors
/// Something is missing, or a measurement fails.
pub fn run(options: &Options, json: bool) -> Result<()> {
    interrupt::watch()?;
    let library = match &options.library {
        Some(path) => path.clone(),
        None => tombolo_bench_project::tombolo().with_file_name("libtombolo_opencl.so"),
    };
    let place = Place::new(&library)?;
    let server = place.serve()?;
    let mut programs = vec![
        (NATIVE, place.program(None)?),
        (OURS, place.program(Some(&place.address()))?),
        (TCP, place.program(Some(place.tcp()))?),
    ];
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split_whitespace().next().unwrap_or("?");
    let mut versions =
        vec![package("pocl-opencl-icd"), package("ocl-icd-libopencl1"), format!("load before: {load}")];
    let mut vm = None;
    if !options.no_vms {
        let (project, program) = place.vm(&options.kit, &options.kernel)?;
        versions.push(format!("VM: kernel {}, {}", options.kernel, project.hypervisor("a")?));
        programs.push((VM, program));
        vm = Some(project);
    }
    let machine = Machine::here(tombolo_record::command_line(), None, versions);
    let results = Results::create(&options.results, "accel", machine)?;
    let mut bench = Bench { options, programs, _vm: vm, server, place, results };
    bench.all()?;
    if json {
        println!("{}", bench.results.recorded.machines[0]);
        bench.results.recorded.samples.iter().for_each(|s| println!("{s}"));
    } else {
        print!("{}", table(&bench.results.recorded.samples));
        println!("results: {}", bench.results.path.display());
    }
    Ok(())
}

fn package(name: &str) -> String {
    let asked =
        std::process::Command::new("dpkg-query").args(["-W", "-f", "${Package} ${Version}", name]).output();
    asked.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default()
}

/// Bytes, repetitions and name of each size of the transfers.
const SIZES: [(u64, u32, &str); 8] = [
    (4, 500, "4"),
    (64, 500, "64"),
    (1 << 10, 500, "1k"),
    (16 << 10, 300, "16k"),
    (256 << 10, 100, "256k"),
    (4 << 20, 15, "4M"),
    (16 << 20, 7, "16M"),
    (64 << 20, 3, "64M"),
];

impl Bench<'_> {
    fn all(&mut self) -> Result<()> {
        type Part<'o> = fn(&mut Bench<'o>) -> Result<()>;
        let parts: [(&str, Part<'_>); 11] = [
            ("idle", Bench::idle),
            ("null", Bench::null),
            ("calls", Bench::calls),
            ("transfers", Bench::transfers),
            ("large", Bench::large),
            ("blas", Bench::blas),
            ("clpeak", Bench::clpeak),
            ("mix", Bench::mix),
            ("small-images", Bench::small_images),
            ("clients", Bench::clients),
            ("neighbours", Bench::neighbours),
        ];
        for (name, part) in parts {
            if self.options.only.is_empty() || self.options.only.iter().any(|o| o == name) {
                part(self).with_context(|| name.to_owned())?;
            }
        }
        Ok(())
    }

    fn add(
        &mut self,
        case: impl Into<String>,
        system: &str,
        value: f64,
        unit: &str,
        better: Better,
    ) -> Result<()> {
        self.results.add(Sample::new("accel", case.into(), system, value, unit, better))
    }

    /// The same question to all programs, in another order every other turn.
    fn each(&mut self, turn: u32, case: &str, what: &str, unit: &str, better: Better) -> Result<()> {
        for system in self.order(turn) {
            let (value, _) = self.ask(system, what)?;
            self.add(case, system, value, unit, better)?;
        }
        Ok(())
    }

    fn order(&self, turn: u32) -> Vec<&'static str> {
        let names = self.programs.iter().map(|(name, _)| *name);
        if turn % 2 == 0 { names.collect() } else { names.rev().collect() }
    }

    fn ask(&mut self, system: &str, what: &str) -> Result<(f64, f64)> {
        interrupt::check()?;
        let program = self.programs.iter_mut().find(|(name, _)| *name == system);
        let (_, program) = program.with_context(|| format!("no program runs as {system}"))?;
        program.ask(what).with_context(|| system.to_owned())
    }

    /// Processor time while a client is connected and does nothing.
    fn idle(&mut self) -> Result<()> {
        // The client is there, and what it began with has ended.
        self.ask(OURS, "finish 1")?;
        for _ in 0..self.options.rounds.min(3) {
            let (begun, before) = (Instant::now(), self.server.cpu()?);
            std::thread::sleep(Duration::from_secs(3));
            let share = (self.server.cpu()? - before) / begun.elapsed().as_secs_f64() * 100.0;
            self.add("idle-cpu", OURS, share, "% of a core", Better::Lower)?;
        }
        Ok(())
    }

    fn null(&mut self) -> Result<()> {
        let ways = [(OURS, self.place.address()), (TCP, self.place.tcp().to_owned())];
        for _ in 0..self.options.rounds {
            for (name, [client, worker]) in [("", [0, 1]), ("-one-core", [0, 0])] {
                for (system, address) in &ways {
                    interrupt::check()?;
                    let pin = || self.server.pin(worker);
                    let (wait, post) = null::measure(address, client, pin)?;
                    self.add(format!("null-wait{name}"), system, wait, "ns", Better::Lower)?;
                    self.add(format!("null-post{name}"), system, post, "ns", Better::Lower)?;
                }
            }
        }
        Ok(())
    }

    fn calls(&mut self) -> Result<()> {
        for turn in 0..self.options.rounds {
            self.each(turn, "finish", "finish 20000", "ns", Better::Lower)?;
            self.each(turn, "set-arg", "set-arg 1000", "ns", Better::Lower)?;
            self.each(turn, "launch", "launch 2000", "ns", Better::Lower)?;
        }
        Ok(())
    }

    fn transfers(&mut self) -> Result<()> {
        for turn in 0..self.options.rounds {
            for (size, n, name) in SIZES {
                let (value, _) = self.ask(NATIVE, &format!("memcpy {size} {n}"))?;
                self.add(format!("write-{name}"), "memcpy", value, "MB/s", Better::Higher)?;
                for (pinned, tail) in [(0, ""), (1, "-pinned")] {
                    for way in ["write", "read"] {
                        let what = format!("{way} {size} {pinned} {n}");
                        self.each(turn, &format!("{way}-{name}{tail}"), &what, "MB/s", Better::Higher)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn large(&mut self) -> Result<()> {
        for turn in 0..self.options.rounds {
            self.each(turn, "large-kernel", "large 50000 9", "ms", Better::Lower)?;
            self.each(turn, "larger-kernel", "large 500000 3", "ms", Better::Lower)?;
        }
        Ok(())
    }

    fn blas(&mut self) -> Result<()> {
        for turn in 0..self.options.rounds {
            self.each(turn, "clblast-gemm-512", "gemm 512 3", "GFLOPS", Better::Higher)?;
            self.each(turn, "clblast-axpy-4M", "axpy 4000000 5", "GB/s", Better::Higher)?;
        }
        Ok(())
    }

    /// In fewer turns: each takes half a minute.
    fn clpeak(&mut self) -> Result<()> {
        let address = self.place.address();
        for turn in 0..self.options.rounds.min(3) {
            let mut ways = [(NATIVE, None), (OURS, Some(address.as_str()))];
            if turn % 2 == 1 {
                ways.reverse();
            }
            for (system, server) in ways {
                interrupt::check()?;
                for figure in clpeak::run(&self.place, server)? {
                    let better = if figure.unit == "us" { Better::Lower } else { Better::Higher };
                    self.add(format!("clpeak-{}", figure.case), system, figure.value, &figure.unit, better)?;
                }
            }
        }
        Ok(())
    }

    fn mix(&mut self) -> Result<()> {
        let calls = self.options.calls / u64::from(self.options.rounds.max(1));
        let what = format!("mix {calls}");
        let each = |seconds: f64| seconds * 1e9 / calls as f64;
        for turn in 0..self.options.rounds {
            for system in self.order(turn) {
                let before = self.server.cpu()?;
                let (value, client) = self.ask(system, &what)?;
                let server = self.server.cpu()? - before;
                self.add("mix-wormhole", system, value, "ns/call", Better::Lower)?;
                self.add("mix-cpu-client", system, each(client), "ns/call", Better::Lower)?;
                if [OURS, TCP].contains(&system) {
                    self.add("mix-cpu-server", system, each(server), "ns/call", Better::Lower)?;
                }
            }
        }
        Ok(())
    }

    fn small_images(&mut self) -> Result<()> {
        for turn in 0..self.options.rounds {
            for dimensions in [2, 3] {
                let what = format!("images {dimensions} 5000");
                self.each(turn, &format!("small-images-{dimensions}d"), &what, "ns", Better::Lower)?;
            }
        }
        Ok(())
    }

    /// Several clients at once: what all get done, calls of the mix and kernels, and how far from equal their shares are.
    fn clients(&mut self) -> Result<()> {
        const SECONDS: f64 = 2.0;
        const WORK: [(&str, &str, &str); 2] = [("", "spin", "calls/s"), ("-kernels", "busy", "kernels/s")];
        let address = self.place.address();
        for count in [1u32, 2, 4] {
            let start = |server: Option<&str>| -> Result<Vec<Program>> {
                (0..count).map(|_| self.place.program(server)).collect()
            };
            let mut crowds = [(OURS, start(Some(&address))?), (NATIVE, start(None)?)];
            for (tail, what, unit) in (0..self.options.rounds).flat_map(|_| WORK) {
                for (system, crowd) in &mut crowds {
                    interrupt::check()?;
                    // All clients begin at once, when the last one is ready.
                    crowd.iter_mut().try_for_each(|p| p.ask("finish 1").map(drop))?;
                    crowd.iter_mut().try_for_each(|p| p.tell(&format!("{what} {SECONDS}")))?;
                    let done = crowd.iter_mut().map(|p| Ok(p.hear()?.0)).collect::<Result<Vec<f64>>>()?;
                    let sum: f64 = done.iter().sum();
                    let mean = sum / done.len() as f64;
                    let off = done.iter().map(|d| (d - mean).abs() / mean).fold(0.0, f64::max);
                    let case = format!("clients-{count}{tail}");
                    let sample =
                        Sample::new("accel", case.clone(), system, sum / SECONDS, unit, Better::Higher);
                    self.results.add(sample)?;
                    if count > 1 {
                        let case = format!("{case}-unfair");
                        let sample = Sample::new("accel", case, system, off * 100.0, "% off", Better::Lower);
                        self.results.add(sample)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Measures the work of a client beside another one: an ordinary one that always computes, and hostile ones, in turns. The loss beside a hostile
    /// neighbour, compared with an ordinary one, is computed from the medians.
    fn neighbours(&mut self) -> Result<()> {
        const FIGURES: [(&str, &str, &str, Better); 3] = [
            ("kernels", "busy 2", "kernels", Better::Higher),
            ("calls", "spin 2", "calls", Better::Higher),
            ("finish", "finish 100000", "ns", Better::Lower),
        ];
        let hostile = neighbours::compile(&self.place)?;
        let own = self.server.workers()?.len();
        let mut seen: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
        for turn in 0..self.options.rounds {
            for beside in neighbours::order(turn) {
                let neighbour = neighbours::Neighbour::start(beside, &self.place, &hostile)?;
                // Not counted: the neighbour compiles meanwhile.
                self.ask(OURS, "busy 2")?;
                for (figure, what, unit, better) in FIGURES {
                    let (value, _) = self.ask(OURS, what)?;
                    self.add(format!("{figure}-beside-{beside}"), OURS, value, unit, better)?;
                    seen.entry((figure, beside)).or_default().push(value);
                }
                neighbour.end()?;
                self.server.wait_until_left(own)?;
            }
        }
        for (figure, _, _, better) in FIGURES {
            let mut of = |beside| seen.get_mut(&(figure, beside)).map_or(f64::NAN, |values| median(values));
            let ordinary = of(neighbours::ORDINARY);
            for beside in neighbours::HOSTILE {
                let loss = neighbours::loss(ordinary, of(beside), better);
                self.add(format!("{figure}-lost-to-{beside}"), OURS, loss, "%", Better::Lower)?;
            }
        }
        Ok(())
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Medians: a row per case, a column per system, and how our time (or the inverse of our rate) stands to the native one.
fn table(samples: &[Sample]) -> String {
    side_by_side(samples, &[OURS, NATIVE, TCP, VM, "memcpy"], NATIVE)
}

/// The same with these systems, of which `peer` is the one that ours is compared with.
fn side_by_side(samples: &[Sample], systems: &[&str], peer: &str) -> String {
    let mut cells: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    let mut rows: Vec<&Sample> = Vec::new();
    for s in samples {
        if !rows.iter().any(|r| r.case == s.case) {
            rows.push(s);
        }
        cells.entry((&s.case, &s.system)).or_default().push(s.value);
    }
    let width = rows.iter().map(|r| r.case.len()).max().unwrap_or(0);
    let mut out = format!("{:<width$} {:<12}", "case", "unit");
    systems.iter().for_each(|system| out += &format!(" {system:>12}"));
    out += &format!(" {:>14}\n", format!("tombolo/{peer}"));
    for row in rows {
        let mut of = |system| cells.get_mut(&(row.case.as_str(), system)).map(|v| median(v));
        let ratio = of(OURS).zip(of(peer)).map_or("-".to_owned(), |(o, n)| match row.better {
            Better::Lower => format!("{:.2}", o / n),
            Better::Higher => format!("{:.2}", n / o),
        });
        out += &format!("{:<width$} {:<12}", row.case, row.unit);
        for system in systems.iter().copied() {
            out += &format!(" {:>12}", of(system).map_or("-".to_owned(), |v| format!("{v:.1}")));
        }
        out += &format!(" {ratio:>14}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_above_one_says_that_forwarding_costs_whatever_the_unit() {
        let s = |case: &str, system: &str, value, better| {
            Sample::new("accel", case.into(), system, value, "x", better)
        };
        let text = table(&[
            s("time", OURS, 3.0, Better::Lower),
            s("time", NATIVE, 2.0, Better::Lower),
            s("rate", NATIVE, 3.0, Better::Higher),
            s("rate", OURS, 2.0, Better::Higher),
            s("alone", OURS, 2.0, Better::Lower),
        ]);
        let last: Vec<&str> = text.lines().skip(1).filter_map(|l| l.split_whitespace().last()).collect();
        assert_eq!(last, ["1.50", "1.50", "-"]);
    }
}
