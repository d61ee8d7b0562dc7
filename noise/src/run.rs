// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the collector on this host. It stops when its standard input ends, so it ends with the process that started it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::MemfdFlags;

use crate::recording::{self, Recording};

/// The collector's events, without those of modules.
macro_rules! resident_events {
    () => {
        "sched:sched_switch,irq:irq_handler_entry,irq:irq_handler_exit,irq:softirq_entry,irq:softirq_exit,irq_vectors,\
         nmi:nmi_handler,exceptions:page_fault_user,exceptions:page_fault_kernel"
    };
}

/// The collector: a static program.
pub const COLLECTOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/collector"));
/// The collector's option for a kernel that must not patch its code: it records events only if two other buffers record them too.
pub const NO_PATCHING: &str = "--no-patching";
/// The arguments of a guest's kernel that switch on all of the collector's events in two buffers, before the second CPU starts. Kernels from 6.12 on
/// let these buffers record nothing. The collector names these arguments where they are missing.
pub const RESIDENT: &str = concat!(
    "trace_instance=resident-1^traceoff,",
    resident_events!(),
    " trace_instance=resident-2^traceoff,",
    resident_events!()
);
/// The longest output that is read of a collector: the text of full buffers of many CPUs.
pub const LONGEST: usize = 1 << 30;
/// The line that the collector writes once it records.
const WATCHING: &str = "watching";

/// The CPUs and the duration of a measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Measurement {
    /// The CPUs, such as 0-3,8; those of the VM where a VM is measured [default: all that this process, or the guest, may use]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<String>,
    /// How long each of the two phases takes, without tracing and with it
    #[arg(long, value_name = "N", default_value = "10", value_parser = seconds)]
    pub seconds: f64,
    /// The shortest interruption that counts, in microseconds
    #[arg(long, value_name = "US", default_value = "5", value_parser = threshold)]
    pub threshold: f64,
}

fn seconds(text: &str) -> Result<f64, String> {
    within(text, 0.1, 600.0)
}

fn threshold(text: &str) -> Result<f64, String> {
    within(text, 0.1, 1e6)
}

fn within(text: &str, least: f64, most: f64) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("it is a number from {least} to {most}"))
}

impl Measurement {
    /// The collector's arguments.
    pub fn arguments(&self) -> Vec<String> {
        let nanoseconds = (self.threshold * 1e3) as u64;
        let mut words = vec!["--seconds".into(), self.seconds.to_string(), "--threshold-ns".into()];
        words.push(nanoseconds.to_string());
        words.extend(self.cpus.iter().flat_map(|cpus| ["--cpus".to_owned(), cpus.clone()]));
        words
    }
}

/// Measures this host.
///
/// # Errors
/// A CPU can't be measured; what the collector says.
pub fn host(measurement: &Measurement) -> Result<Recording> {
    Collector::start(&measurement.arguments())?.finish()
}

/// A collector that runs.
#[derive(Debug)]
pub struct Collector {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// The part of its output that was read already.
    read: Vec<u8>,
}

impl Collector {
    /// Starts it with these arguments.
    ///
    /// # Errors
    /// The kernel does not run it.
    pub fn start(arguments: &[String]) -> Result<Self> {
        let program = program()?;
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command.arg0("tombolo-noise-collector").args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is this process's: the collector ends in order when its input ends.
        command.process_group(0);
        let mut child = command.spawn().context("the collector can't be started")?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("its output is piped")?);
        Ok(Self { child, input, output, read: Vec::new() })
    }

    /// Starts one that records the events of these CPUs until [`Collector::stop`], and waits until it does.
    ///
    /// # Errors
    /// As [`Collector::start`], or what the collector says.
    pub fn watch(cpus: &str) -> Result<Self> {
        let mut collector = Self::start(&["--watch".into(), "--cpus".into(), cpus.into()])?;
        loop {
            let begin = collector.read.len();
            let length = collector.output.read_until(b'\n', &mut collector.read)?;
            if length == 0 {
                return match collector.finish() {
                    Err(e) => Err(e),
                    Ok(_) => bail!("the collector ended before it recorded anything"),
                };
            }
            if collector.read[begin..].starts_with(WATCHING.as_bytes()) {
                return Ok(collector);
            }
        }
    }

    /// Ends a collector that watches, and reads what it recorded.
    ///
    /// # Errors
    /// As [`Collector::finish`].
    pub fn stop(mut self) -> Result<Recording> {
        drop(self.input.take());
        self.finish()
    }

    /// Waits for its end and reads what it recorded.
    ///
    /// # Errors
    /// The collector's messages.
    pub fn finish(mut self) -> Result<Recording> {
        let room = LONGEST.saturating_sub(self.read.len());
        (&mut self.output).take(room as u64).read_to_end(&mut self.read)?;
        ensure!(self.read.len() < LONGEST, "the collector does not stop writing");
        let mut said = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            errors.read_to_string(&mut said)?;
        }
        let status = self.child.wait()?;
        drop(self.input.take());
        if !status.success() {
            let said = said.trim();
            bail!(
                "{}",
                if said.is_empty() { format!("the collector ended with {status}") } else { said.into() }
            );
        }
        recording::parse(&self.read).context("the collector's output can't be read")
    }
}

/// The collector in memory, ready to be run.
fn program() -> Result<File> {
    let create = |flags| rustix::fs::memfd_create("tombolo-noise-collector", flags | MemfdFlags::CLOEXEC);
    // Kernels before 6.3 don't know the flag, and need none.
    let fd = create(MemfdFlags::EXEC).or_else(|_| create(MemfdFlags::empty()));
    let mut file = File::from(fd.context("memory for the collector can't be had")?);
    file.write_all(COLLECTOR)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(cpus: Option<&str>) -> Measurement {
        Measurement { cpus: cpus.map(str::to_owned), seconds: 0.2, threshold: 5.0 }
    }

    #[test]
    fn the_collector_that_is_carried_along_measures_this_host() {
        let recording = host(&measurement(None)).unwrap();
        assert!(!recording.plain.is_empty() && recording.units > 0);
        for record in &recording.plain {
            assert!(!record.work.is_empty() && !record.time.is_empty(), "CPU {}", record.cpu);
        }
        // Without tracefs it says why; with it, there is a second phase on the same CPUs.
        let cpus =
            |records: &[recording::Record]| records.iter().map(|record| record.cpu).collect::<Vec<_>>();
        if recording.traced.is_empty() {
            assert!(
                recording.notes.iter().any(|note| note.contains("no cause can be named")),
                "{:?}",
                recording.notes
            );
        } else {
            assert_eq!(cpus(&recording.traced), cpus(&recording.plain));
        }
    }

    #[test]
    fn what_the_collector_says_is_the_error() {
        let error = format!("{:#}", host(&measurement(Some("65000"))).unwrap_err());
        assert!(error.starts_with("there is no CPU 65000; this machine has the CPUs 0"), "{error}");
        let error = format!("{:#}", Collector::watch("x").unwrap_err());
        assert!(error.contains("'x' is no list of CPUs"), "{error}");
    }

    #[test]
    fn a_watch_ends_when_it_is_told_to() {
        let cpu = host(&measurement(None)).unwrap().plain[0].cpu.to_string();
        let recording = Collector::watch(&cpu).unwrap().stop().unwrap();
        assert!(recording.plain.is_empty() && recording.hz > 0);
    }

    #[test]
    fn a_collector_that_is_told_to_end_stops_in_order() {
        let mut measurement = measurement(None);
        measurement.seconds = 600.0;
        let collector = Collector::start(&measurement.arguments()).unwrap();
        let process = collector.child.id();
        // It has its name once it has its handler.
        while std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap().trim() != "tombolo-noise" {}
        let process = rustix::process::Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
        rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
        let error = format!("{:#}", collector.finish().unwrap_err());
        assert!(error.contains("SIGTERM has come"), "{error}");
    }

    #[test]
    fn a_collector_whose_starter_is_gone_ends() {
        let mut measurement = measurement(None);
        measurement.seconds = 600.0;
        let collector = Collector::start(&measurement.arguments()).unwrap();
        let error = format!("{:#}", collector.stop().unwrap_err());
        assert!(error.contains("the standard input has ended"), "{error}");
    }
}
