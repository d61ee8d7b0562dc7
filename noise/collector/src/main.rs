// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures quanta of work on chosen CPUs and records what the kernel did there meanwhile. One static program for hosts and guests; the
//! attribution is done elsewhere, from what it writes.
//!
//! It measures twice for as long as it is told: without tracing, which is the noise as programs have it, and with tracing, which names the
//! causes. With `--watch` it measures nothing and traces until its standard input ends. In both cases it stops when its standard input ends, so
//! that it never outlives the process that started it. With `--no-patching` it traces only what the kernel records with no change of its code.
//!
//! - [`clock`]: how fast the time-stamp counter is.
//! - [`cpus`]: the CPUs that are measured.
//! - [`quanta`]: the loop that is measured.
//! - [`tracefs`]: a buffer of trace events of its own, removed at the end.
//! - [`output`]: what is written to the standard output.
//! - [`system`]: the calls of the C library that std lacks.

mod clock;
mod cpus;
mod output;
mod quanta;
mod system;
mod tracefs;

use std::io::{Read, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use clock::Moment;
use quanta::{Plan, Record};
use tracefs::Instance;

/// Set when the standard input has ended, or SIGTERM has come: measurements end at their next quantum.
static STOP: AtomicBool = AtomicBool::new(false);
/// How long the frequency of the time-stamp counter, and then the length of a unit, is measured before the first phase.
const CALIBRATION: Duration = Duration::from_millis(50);
/// How far ahead of now a phase begins, so that the threads of all CPUs begin together.
const HEAD_START: Duration = Duration::from_millis(20);

struct Options {
    cpus: Option<String>,
    seconds: f64,
    threshold_ns: u64,
    watch: bool,
    patching: bool,
}

fn options() -> Result<Options, String> {
    let mut options = Options { cpus: None, seconds: 1.0, threshold_ns: 5000, watch: false, patching: true };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "--watch" {
            options.watch = true;
            continue;
        }
        if word == "--no-patching" {
            options.patching = false;
            continue;
        }
        let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
        let wrong = || format!("{word}: '{value}' is no number");
        match word.as_str() {
            "--cpus" => options.cpus = Some(value),
            "--seconds" => options.seconds = value.parse().map_err(|_| wrong())?,
            "--threshold-ns" => options.threshold_ns = value.parse().map_err(|_| wrong())?,
            _ => return Err(format!("there is no option {word}")),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let options = options()?;
    if !options.watch {
        system::on_term(stop);
    }
    system::name_thread(c"tombolo-noise").map_err(|e| format!("the process can't be named: {e}"))?;
    let cpus = cpus::choose(options.cpus.as_deref())?;
    let (sender, ended) = channel();
    watch_input(sender);
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let written = |e: std::io::Error| format!("the output can't be written: {e}");
    output::head(&mut out).map_err(written)?;
    let own = |root: std::path::PathBuf| Instance::new(&root, &cpus, options.patching);
    let mut instance = match tracefs::find().and_then(own) {
        Ok(instance) => Some(instance),
        Err(why) => {
            output::note(&mut out, &why).map_err(written)?;
            None
        }
    };
    for name in instance.iter().flat_map(Instance::missing) {
        output::note(&mut out, &format!("this kernel has no trace event {name}")).map_err(written)?;
    }
    if options.watch {
        watch(&mut out, instance.as_mut(), &ended)?;
    } else {
        measure(&mut out, &options, &cpus, instance.as_mut())?;
    }
    if let Some(instance) = &mut instance {
        output::trace(&mut out, instance)?;
    }
    output::end(&mut out).and_then(|()| out.flush()).map_err(written)
}

/// Ends a measurement in order when the process is told to end, as the guest agent does where the one who measures was killed.
extern "C" fn stop(_: std::ffi::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

/// Tells of the end of the standard input, and stops the measurement then.
fn watch_input(sender: Sender<()>) {
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        let mut buffer = [0; 64];
        while matches!(input.read(&mut buffer), Ok(n) if n > 0) {}
        STOP.store(true, Ordering::Relaxed);
        // The receiver is gone where nothing waits for the end.
        let _ = sender.send(());
    });
}

/// Traces until the standard input ends.
fn watch(
    out: &mut impl Write,
    mut instance: Option<&mut Instance>,
    ended: &Receiver<()>,
) -> Result<(), String> {
    let begin = Moment::now();
    if let Some(instance) = &mut instance {
        instance.record(true)?;
    }
    output::line(out, "watching")?;
    out.flush().map_err(|e| format!("the output can't be written: {e}"))?;
    // An error means that the other thread has ended, which it does with the input.
    let _ = ended.recv();
    if let Some(instance) = &mut instance {
        instance.record(false)?;
    }
    output::line(out, &format!("clock {}", begin.frequency(Moment::now())))
}

fn measure(
    out: &mut impl Write,
    options: &Options,
    cpus: &[u32],
    mut instance: Option<&mut Instance>,
) -> Result<(), String> {
    let begin = Moment::now();
    std::thread::sleep(CALIBRATION);
    let hz = begin.frequency(Moment::now());
    let event_cost = match &mut instance {
        Some(instance) => Some(instance.event_cost(cpus[0])?),
        None => None,
    };
    let nanoseconds = |ns: u64| (u128::from(hz) * u128::from(ns) / 1_000_000_000) as u64;
    let unit = quanta::calibrate(cpus[0], nanoseconds(CALIBRATION.as_nanos() as u64))?;
    let plan = Plan {
        begin: 0,
        end: 0,
        threshold: nanoseconds(options.threshold_ns).max(unit),
        unit,
        units: (nanoseconds(quanta::QUANTUM_NS) / unit).max(1),
        slot: nanoseconds(quanta::QUANTUM_NS),
        smis: false,
        gaps: quanta::MOST_GAPS,
        stop: &STOP,
    };
    let length = nanoseconds((options.seconds * 1e9) as u64);
    let head = nanoseconds(HEAD_START.as_nanos() as u64);
    let phase = |smis| {
        let first = quanta::now() + head;
        quanta::on_all(&Plan { begin: first, end: first + length, smis, ..plan.clone() }, cpus)
    };
    let plain = phase(false)?;
    let traced = match &mut instance {
        Some(instance) if !STOP.load(Ordering::Relaxed) => {
            instance.record(true)?;
            let traced = phase(true)?;
            instance.record(false)?;
            Some(traced)
        }
        _ => None,
    };
    if STOP.load(Ordering::Relaxed) {
        return Err("stopped: the standard input has ended, or SIGTERM has come".into());
    }
    output::line(out, &format!("clock {}", begin.frequency(Moment::now())))?;
    if let Some(cost) = event_cost {
        output::line(out, &format!("event-cost {cost}"))?;
    }
    output::line(out, &format!("quantum {} {}", plan.units, plan.slot))?;
    write_phase(out, "plain", &plain)?;
    traced.map_or(Ok(()), |traced| write_phase(out, "traced", &traced))
}

fn write_phase(out: &mut impl Write, name: &str, records: &[Record]) -> Result<(), String> {
    output::line(out, &format!("phase {name}"))?;
    records.iter().try_for_each(|record| output::record(out, record))
}
