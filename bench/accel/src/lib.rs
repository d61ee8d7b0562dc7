// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench accel`: the same OpenCL program on the device itself and forwarded to a server process, in one run, in turns.
//!
//! - [`program`]: the server, and the program that measures (`opencl.c`) natively and forwarded.
//! - [`null`]: the transport alone: a call that waits and does nothing, and a posted one.

pub mod null;
pub mod program;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tombolo_record::{Better, Machine, Results, Sample};

use program::{Place, Program, Server};

const OURS: &str = "tombolo";
const NATIVE: &str = "native";

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Turns of each cell
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Calls of the mix in all turns together
    #[arg(long, default_value_t = 1_100_000)]
    calls: u64,
    /// Only these parts: null, calls, transfers, large, mix, clients, idle
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// The client library [default: libtombolo_opencl.so beside the program]
    #[arg(long)]
    library: Option<PathBuf>,
    /// Folder for the results
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
}

struct Bench<'o> {
    options: &'o Options,
    place: Place,
    server: Server,
    ours: Program,
    native: Program,
    results: Results,
}

/// Measures, writes `<results>/accel.jsonl` and prints it.
///
/// # Errors
/// Something is missing, or a measurement fails.
pub fn run(options: &Options, json: bool) -> Result<()> {
    let library = match &options.library {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("libtombolo_opencl.so"),
    };
    let place = Place::new(&library)?;
    let server = place.serve()?;
    let (ours, native) = (place.program(Some(&place.address()))?, place.program(None)?);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split_whitespace().next().unwrap_or("?");
    let versions =
        vec![package("pocl-opencl-icd"), package("ocl-icd-libopencl1"), format!("load before: {load}")];
    let machine = Machine::here(tombolo_record::command_line(), None, versions);
    let results = Results::create(&options.results, "accel", machine)?;
    let mut bench = Bench { options, place, server, ours, native, results };
    bench.all()?;
    if json {
        println!("{}", bench.results.machine);
        bench.results.samples.iter().for_each(|s| println!("{s}"));
    } else {
        print!("{}", table(&bench.results.samples));
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
        let parts: [(&str, Part<'_>); 7] = [
            ("idle", Bench::idle),
            ("null", Bench::null),
            ("calls", Bench::calls),
            ("transfers", Bench::transfers),
            ("large", Bench::large),
            ("mix", Bench::mix),
            ("clients", Bench::clients),
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

    /// The same question to both programs; natively first in every other turn.
    fn both(&mut self, turn: u32, case: &str, what: &str, unit: &str, better: Better) -> Result<()> {
        let order = if turn % 2 == 0 { [NATIVE, OURS] } else { [OURS, NATIVE] };
        for system in order {
            let program = if system == OURS { &mut self.ours } else { &mut self.native };
            let (value, _) = program.ask(what)?;
            self.add(case, system, value, unit, better)?;
        }
        Ok(())
    }

    /// Processor time while a client is connected and does nothing.
    fn idle(&mut self) -> Result<()> {
        // The client is there, and what it began with has ended.
        self.ours.ask("finish 1")?;
        for _ in 0..self.options.rounds.min(3) {
            let (begun, before) = (Instant::now(), self.server.cpu()?);
            std::thread::sleep(Duration::from_secs(3));
            let share = (self.server.cpu()? - before) / begun.elapsed().as_secs_f64() * 100.0;
            self.add("idle-cpu", OURS, share, "% of a core", Better::Lower)?;
        }
        Ok(())
    }

    fn null(&mut self) -> Result<()> {
        let address = self.place.address();
        for _ in 0..self.options.rounds {
            for (name, [client, worker]) in [("", [0, 1]), ("-one-core", [0, 0])] {
                let pin = || self.server.pin(worker);
                let (wait, post) = null::measure(&address, client, pin)?;
                self.add(format!("null-wait{name}"), OURS, wait, "ns", Better::Lower)?;
                self.add(format!("null-post{name}"), OURS, post, "ns", Better::Lower)?;
            }
        }
        Ok(())
    }

    fn calls(&mut self) -> Result<()> {
        for turn in 0..self.options.rounds {
            self.both(turn, "finish", "finish 20000", "ns", Better::Lower)?;
            self.both(turn, "set-arg", "set-arg 1000", "ns", Better::Lower)?;
            self.both(turn, "launch", "launch 2000", "ns", Better::Lower)?;
        }
        Ok(())
    }

    fn transfers(&mut self) -> Result<()> {
        for turn in 0..self.options.rounds {
            for (size, n, name) in SIZES {
                let (value, _) = self.native.ask(&format!("memcpy {size} {n}"))?;
                self.add(format!("write-{name}"), "memcpy", value, "MB/s", Better::Higher)?;
                for (pinned, tail) in [(0, ""), (1, "-pinned")] {
                    for way in ["write", "read"] {
                        let what = format!("{way} {size} {pinned} {n}");
                        self.both(turn, &format!("{way}-{name}{tail}"), &what, "MB/s", Better::Higher)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn large(&mut self) -> Result<()> {
        for turn in 0..self.options.rounds {
            self.both(turn, "large-kernel", "large 50000 9", "ms", Better::Lower)?;
        }
        Ok(())
    }

    fn mix(&mut self) -> Result<()> {
        let calls = self.options.calls / u64::from(self.options.rounds.max(1));
        let what = format!("mix {calls}");
        let each = |seconds: f64| seconds * 1e9 / calls as f64;
        for turn in 0..self.options.rounds {
            let order = if turn % 2 == 0 { [NATIVE, OURS] } else { [OURS, NATIVE] };
            for system in order {
                let before = self.server.cpu()?;
                let program = if system == OURS { &mut self.ours } else { &mut self.native };
                let (value, client) = program.ask(&what)?;
                let server = self.server.cpu()? - before;
                self.add("mix-wormhole", system, value, "ns/call", Better::Lower)?;
                self.add("mix-cpu-client", system, each(client), "ns/call", Better::Lower)?;
                if system == OURS {
                    self.add("mix-cpu-server", system, each(server), "ns/call", Better::Lower)?;
                }
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
                    // Nobody begins before all are ready.
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
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Medians: a row per case, a column per system, and how our time (or the inverse of our rate) stands to the native one.
fn table(samples: &[Sample]) -> String {
    let mut cells: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    let mut rows: Vec<&Sample> = Vec::new();
    for s in samples {
        if !rows.iter().any(|r| r.case == s.case) {
            rows.push(s);
        }
        cells.entry((&s.case, &s.system)).or_default().push(s.value);
    }
    let mut out = format!(
        "{:<24} {:<12} {:>12} {:>12} {:>12} {:>14}\n",
        "case", "unit", OURS, NATIVE, "memcpy", "tombolo/native"
    );
    for row in rows {
        let mut of = |system| cells.get_mut(&(row.case.as_str(), system)).map(|v| median(v));
        let (ours, native, memcpy) = (of(OURS), of(NATIVE), of("memcpy"));
        let show = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.1}"));
        let ratio = ours.zip(native).map_or("-".to_owned(), |(o, n)| match row.better {
            Better::Lower => format!("{:.2}", o / n),
            Better::Higher => format!("{:.2}", n / o),
        });
        out += &format!(
            "{:<24} {:<12} {:>12} {:>12} {:>12} {ratio:>14}\n",
            row.case,
            row.unit,
            show(ours),
            show(native),
            show(memcpy)
        );
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
