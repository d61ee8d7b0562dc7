// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench cuda`: the same program of CUDA's driver API (`cuda.c`) on the device itself and forwarded to a server process through memory, in one run, in turns; and
//! steps of a training with tinygrad (`lenet.py`), whose waits are counted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tombolo_bench_project::interrupt;
use tombolo_record::{Better, Machine, Results, Sample};

use crate::program::{Program, Server};

/// On the device itself.
const DIRECT: &str = "direct";
/// Through memory, from another process.
const OURS: &str = "tombolo";

/// The cases to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Turns of each cell
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Calls of the mix in all turns together
    #[arg(long, default_value_t = 1_100_000)]
    calls: u64,
    /// Steps of each training, of which the second half is measured
    #[arg(long, default_value_t = 60)]
    steps: u32,
    /// Only these parts: calls, memcpy, mix, module-load, lenet-step
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// The driver that is measured and served, a file [default: libtombolo_cuda_device.so beside tombolo, which executes kernels on the CPU]
    #[arg(long)]
    driver: Option<PathBuf>,
    /// The client library [default: libtombolo_cuda.so beside tombolo]
    #[arg(long)]
    library: Option<PathBuf>,
    /// A folder with tinygrad/ and digits.csv.gz, as accel/tests/cuda-toolkit tinygrad prints it; without it there are no steps
    #[arg(long)]
    tinygrad: Option<PathBuf>,
    /// Folder for the results
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
}

/// A folder with what a run needs: programs, the libraries under the name that programs load, sockets.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new(driver: &Path, library: &Path) -> Result<Place> {
        let place = Place { folder: tempfile::tempdir()? };
        for (system, file) in [(DIRECT, driver), (OURS, library)] {
            ensure!(file.is_file(), "{} is not there", file.display());
            std::fs::create_dir(place.path(system))?;
            // A copy: a confined worker sees the folder, and not where a link leads.
            std::fs::copy(file, place.path(system).join("libcuda.so.1"))?;
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda.c");
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-o"]).arg(place.path("cuda")).arg(&source).arg("-ldl");
        ensure!(
            cc.status().context("can't run cc (package gcc)")?.success(),
            "can't compile {}",
            source.display()
        );
        Ok(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn address(&self) -> String {
        format!("unix:{}", self.path("socket").display())
    }

    /// A command whose CUDA driver is the system's.
    fn on(&self, system: &str, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", self.path(system)).env("TOMBOLO_ACCEL", self.address());
        command
    }

    fn program(&self, system: &str) -> Result<Program> {
        Program::of(self.on(system, &self.path("cuda")))
    }

    fn serve(&self, computes: bool) -> Result<Server> {
        let mut command = self.on(DIRECT, &tombolo_bench_project::tombolo());
        command.args(["accel", "serve", "--listen", &self.address(), "--control"]).arg(self.path("control"));
        if !computes {
            command.env(COMPUTE, "off");
        }
        Server::start(command, &self.path("socket"))
    }
}

/// The test device's kernels end at once where this is `off`.
const COMPUTE: &str = "TOMBOLO_CUDA_DEVICE_COMPUTE";

struct Bench<'o> {
    options: &'o Options,
    place: Place,
    results: Results,
}

/// Measures, writes `<results>/cuda.jsonl` and prints it.
///
/// # Errors
/// Something is missing, or a measurement fails.
pub fn run(options: &Options, json: bool) -> Result<()> {
    interrupt::watch()?;
    let beside = |own: &Option<PathBuf>, name: &str| {
        own.clone().unwrap_or_else(|| tombolo_bench_project::tombolo().with_file_name(name))
    };
    let driver = beside(&options.driver, "libtombolo_cuda_device.so");
    let place = Place::new(&driver, &beside(&options.library, "libtombolo_cuda.so"))?;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split_whitespace().next().unwrap_or("?");
    let name = driver.file_name().unwrap_or_default().to_string_lossy();
    let versions = vec![format!("driver: {name}"), format!("load before: {load}")];
    let machine = Machine::here(tombolo_record::command_line(), None, versions);
    let results = Results::create(&options.results, "cuda", machine)?;
    let mut bench = Bench { options, place, results };
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

/// Bytes, repetitions and name of each size of the copies.
const SIZES: [(u64, u32, &str); 6] = [
    (4, 500, "4"),
    (1 << 10, 500, "1k"),
    (64 << 10, 200, "64k"),
    (1 << 20, 40, "1M"),
    (16 << 20, 7, "16M"),
    (64 << 20, 3, "64M"),
];

/// Kernels of a module that is loaded: 500 bytes of text each.
const KERNELS: u32 = 4000;

impl Bench<'_> {
    fn all(&mut self) -> Result<()> {
        type Part<'o> = fn(&mut Bench<'o>) -> Result<()>;
        let parts: [(&str, Part<'_>); 5] = [
            ("calls", Bench::calls),
            ("memcpy", Bench::memcpy),
            ("mix", Bench::mix),
            ("module-load", Bench::module_load),
            ("lenet-step", Bench::lenet_step),
        ];
        for (name, part) in parts {
            if self.options.only.is_empty() || self.options.only.iter().any(|o| o == name) {
                part(self).with_context(|| name.to_owned())?;
            }
        }
        Ok(())
    }

    fn add(&mut self, case: &str, system: &str, value: f64, unit: &str, better: Better) -> Result<()> {
        self.results.add(Sample::new("cuda", case.to_owned(), system, value, unit, better))
    }

    /// Both systems, in another order every other turn.
    fn order(turn: u32) -> [&'static str; 2] {
        if turn % 2 == 0 { [DIRECT, OURS] } else { [OURS, DIRECT] }
    }

    /// The same questions to the program on both systems.
    fn each(&mut self, questions: &[(String, String, &str, Better)]) -> Result<()> {
        let _server = self.place.serve(true)?;
        let mut programs = BTreeMap::new();
        for system in [DIRECT, OURS] {
            programs.insert(system, self.place.program(system)?);
        }
        for turn in 0..self.options.rounds {
            for (case, what, unit, better) in questions {
                for system in Self::order(turn) {
                    interrupt::check()?;
                    let program = programs.get_mut(system).context("it was started")?;
                    let (value, _) = program.ask(what).with_context(|| system.to_owned())?;
                    self.add(case, system, value, unit, *better)?;
                }
            }
        }
        Ok(())
    }

    fn calls(&mut self) -> Result<()> {
        let question = |case: &str, what: &str| (case.to_owned(), what.to_owned(), "ns", Better::Lower);
        self.each(&[
            question("null-wait", "wait 20000"),
            question("null-launch", "launch 200"),
            question("null-launched", "launched 2000"),
            question("launch-graph", "graph 200"),
        ])
    }

    fn memcpy(&mut self) -> Result<()> {
        let mut questions = Vec::new();
        for (size, n, name) in SIZES {
            for (pinned, tail) in [(0, ""), (1, "-pinned")] {
                for way in ["write", "read"] {
                    let what = format!("{way} {size} {pinned} {n}");
                    questions.push((format!("{way}-{name}{tail}"), what, "MB/s", Better::Higher));
                }
            }
        }
        self.each(&questions)
    }

    fn mix(&mut self) -> Result<()> {
        let calls = self.options.calls / u64::from(self.options.rounds.max(1));
        self.each(&[("mix-wormhole".to_owned(), format!("mix {calls}"), "ns/call", Better::Lower)])
    }

    /// An image that no client loaded before; the same again in another process; and in ten processes at once.
    fn module_load(&mut self) -> Result<()> {
        let _server = self.place.serve(true)?;
        for turn in 0..self.options.rounds {
            let what = format!("load {KERNELS} {}", turn + 1);
            for system in Self::order(turn) {
                for case in ["module-load-cold", "module-load-again"] {
                    interrupt::check()?;
                    let (value, _) = self.place.program(system)?.ask(&what)?;
                    self.add(case, system, value, "ms", Better::Lower)?;
                }
                let mut crowd =
                    (0..10).map(|_| self.place.program(system)).collect::<Result<Vec<Program>>>()?;
                // All begin at once, when the last one is ready.
                crowd.iter_mut().try_for_each(|program| program.ask("wait 1").map(drop))?;
                crowd.iter_mut().try_for_each(|program| program.tell(&what))?;
                let times =
                    crowd.iter_mut().map(|program| Ok(program.hear()?.0)).collect::<Result<Vec<f64>>>()?;
                let slowest = times.into_iter().fold(0.0, f64::max);
                self.add("module-load-ten", system, slowest, "ms", Better::Lower)?;
            }
        }
        Ok(())
    }

    /// Steps of a training whose kernels compute nothing, so that only calls count, and how often a step waits.
    fn lenet_step(&mut self) -> Result<()> {
        let Some(tinygrad) = self.options.tinygrad.clone() else {
            eprintln!("lenet-step is left out: --tinygrad says where tinygrad is");
            return Ok(());
        };
        let _server = self.place.serve(false)?;
        let steps = self.options.steps;
        for turn in 0..self.options.rounds {
            for system in Self::order(turn) {
                interrupt::check()?;
                let (time, _) = self.train(system, &tinygrad, steps)?;
                self.add("lenet-step", system, time, "ms", Better::Lower)?;
            }
        }
        // What all steps have in common are the waits of half of them.
        let (whole, half) =
            (self.train(OURS, &tinygrad, steps)?.1, self.train(OURS, &tinygrad, steps / 2)?.1);
        let each = (whole - half) / f64::from(steps - steps / 2);
        self.add("lenet-step-waits", OURS, each, "waits", Better::Lower)
    }

    /// Milliseconds of a step, and the waits of all.
    fn train(&self, system: &str, tinygrad: &Path, steps: u32) -> Result<(f64, f64)> {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../accel/tests/cuda");
        let trace = self.place.path("trace");
        std::fs::write(&trace, "")?;
        let mut command = self.place.on(system, Path::new("python3"));
        command
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("lenet.py"))
            .arg(steps.to_string())
            .env("PYTHONPATH", format!("{}:{}", tests.display(), tinygrad.display()))
            .env("TOMBOLO_DIGITS", tinygrad)
            .env("TOMBOLO_ACCEL_TRACE", &trace)
            .env("DEV", "CUDA:PTX")
            .env("CACHELEVEL", "0")
            .env(COMPUTE, "off");
        let output = command.output().context("can't run python3")?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "{system}: {}", String::from_utf8_lossy(&output.stderr));
        let time = said.trim().parse().with_context(|| format!("{system}: {said}"))?;
        Ok((time, waits(&std::fs::read_to_string(&trace)?)))
    }
}

/// The waits of all functions in the lines of a trace.
fn waits(trace: &str) -> f64 {
    let numbers = trace.split("\"waits\":").skip(1);
    numbers.filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<f64>().ok()).sum()
}

/// Medians: a row per case, a column per system, and how our time (or the inverse of our rate) stands to the direct one.
fn table(samples: &[Sample]) -> String {
    crate::side_by_side(samples, &[OURS, DIRECT], DIRECT)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_waits_of_a_trace_add_up() {
        let trace = r#"{"pid":7,"functions":[{"name":"a","calls":2,"waits":2,"bytes":3},{"name":"b","calls":3,"waits":0}]}
{"pid":8,"functions":[{"name":"a","calls":9,"waits":5,"bytes":3}]}"#;
        assert_eq!(super::waits(trace), 7.0);
    }
}
