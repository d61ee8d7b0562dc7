// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Quanta of work: a loop of equal units that reads the time-stamp counter after each of them. The same run gives three measures:
//!
//! - *gaps*: two readings that are further apart than the threshold. Something else had the CPU between them.
//! - *fixed work*: how long each quantum of equally many units takes.
//! - *fixed time*: how many units are done in each slot of equal length.

use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::system;

/// The length of a slot of fixed time, and about that of a quantum of fixed work without noise.
pub const QUANTUM_NS: u64 = 1_000_000;
/// Gaps that are kept of a CPU in one phase.
pub const MOST_GAPS: usize = 200_000;
/// Steps of arithmetic in a unit.
const STEPS: u32 = 16;
/// Room for quanta of fixed work, in slots: so many times faster may a CPU become after its calibration.
const FASTEST: usize = 8;
/// `MSR_SMI_COUNT` of Intel's processors: system management interrupts since reset.
const MSR_SMI_COUNT: u64 = 0x34;

/// The settings of a measurement on each CPU. Times are in ticks of the time-stamp counter.
#[derive(Clone)]
pub struct Plan<'a> {
    pub begin: u64,
    pub end: u64,
    /// The shortest gap that is recorded.
    pub threshold: u64,
    /// The shortest time that a unit takes.
    pub unit: u64,
    /// Units of a quantum of fixed work.
    pub units: u64,
    /// Length of a slot of fixed time.
    pub slot: u64,
    /// Count system management interrupts in each gap.
    pub smis: bool,
    /// Gaps that are kept.
    pub gaps: usize,
    pub stop: &'a AtomicBool,
}

/// Something else had the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    pub start: u64,
    pub end: u64,
    /// System management interrupts in it, where they can be counted.
    pub smis: u32,
}

/// The measurements of one CPU.
#[derive(Clone, Debug, Default)]
pub struct Record {
    pub cpu: u32,
    pub thread: u32,
    pub first: u64,
    pub last: u64,
    pub gaps: Vec<Gap>,
    /// Gaps beyond those that are kept.
    pub dropped: u64,
    pub fixed_work: Vec<u32>,
    pub fixed_time: Vec<u32>,
    /// Nanoseconds in which a hypervisor ran something else, as the kernel was told.
    pub steal_ns: u64,
    /// System management interrupts were counted.
    pub smis_counted: bool,
}

/// The time-stamp counter, read after everything before it.
pub fn now() -> u64 {
    // SAFETY: every x86-64 processor has LFENCE and RDTSC.
    unsafe {
        _mm_lfence();
        _rdtsc()
    }
}

/// One unit of work.
#[inline(always)]
fn unit(mut value: u64) -> u64 {
    for _ in 0..STEPS {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    }
    value
}

/// The shortest time that a unit takes on `cpu`, found in so many ticks; they should be enough for the CPU to come to its full speed.
///
/// # Errors
/// This process may not use the CPU.
pub fn calibrate(cpu: u32, ticks: u64) -> Result<u64, String> {
    let measure = move || -> Result<u64, String> {
        system::bind(&[cpu])?;
        let first = now();
        let (mut value, mut shortest, mut last) = (0, u64::MAX, first);
        while last.saturating_sub(first) < ticks {
            value = black_box(unit(value));
            let then = std::mem::replace(&mut last, now());
            shortest = shortest.min(last.saturating_sub(then));
        }
        Ok(shortest.max(1))
    };
    let failed = |_| Err("the calibration's thread has failed".to_string());
    std::thread::spawn(measure).join().unwrap_or_else(failed)
}

/// Measures all CPUs at once, a thread on each.
///
/// # Errors
/// A thread can't be started or bound, or is no longer on its CPU at the end.
pub fn on_all(plan: &Plan<'_>, cpus: &[u32]) -> Result<Vec<Record>, String> {
    let before = steal();
    let mut records = std::thread::scope(|scope| {
        let threads: Vec<_> = cpus.iter().map(|cpu| scope.spawn(move || on(plan, *cpu))).collect();
        let failed = |_| Err("a thread that measures has failed".to_string());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(failed)).collect::<Result<Vec<_>, _>>()
    })?;
    let after = steal();
    for record in &mut records {
        let of =
            |list: &[(u32, u64)]| list.iter().find(|(cpu, _)| *cpu == record.cpu).map_or(0, |(_, ns)| *ns);
        record.steal_ns = of(&after).saturating_sub(of(&before));
    }
    Ok(records)
}

fn on(plan: &Plan<'_>, cpu: u32) -> Result<Record, String> {
    system::bind(&[cpu])?;
    let quanta = ((plan.end - plan.begin) / plan.slot) as usize + 2;
    let counter = if plan.smis { SmiCounter::open(cpu) } else { None };
    let mut record = Record {
        cpu,
        thread: system::thread(),
        gaps: touched(plan.gaps, Gap { start: 1, end: 1, smis: 1 }),
        fixed_work: touched(FASTEST * quanta, 1),
        fixed_time: touched(quanta, 1),
        smis_counted: counter.is_some(),
        ..Record::default()
    };
    // Not allowed without CAP_IPC_LOCK or a limit; the pages were touched just now.
    let _ = system::lock_memory();
    turn(plan, counter.as_ref(), &mut record);
    if !system::is_on(cpu) {
        return Err(format!(
            "CPU {cpu} went offline while it was measured, or another program moved the thread that measures it; measure again, or without it (--cpus)"
        ));
    }
    Ok(record)
}

/// An empty vector whose memory is there already, so that filling it faults no page in.
fn touched<T: Copy>(capacity: usize, value: T) -> Vec<T> {
    let mut vector = vec![value; capacity];
    black_box(&mut vector).clear();
    vector
}

/// The loop that is measured.
fn turn(plan: &Plan<'_>, counter: Option<&SmiCounter>, record: &mut Record) {
    let mut smis = counter.and_then(SmiCounter::read);
    while now() < plan.begin {
        std::hint::spin_loop();
    }
    let mut value = 0;
    let mut last = now();
    record.first = last;
    // A thread that was held up before is measured as long as the others.
    let end = plan.end + last.saturating_sub(plan.begin);
    let (mut quantum, mut done) = (last, 0);
    let (mut slot_end, mut slot_done) = (last + plan.slot, 0u32);
    loop {
        value = black_box(unit(value));
        let time = now();
        done += 1;
        slot_done += 1;
        let mut resume = time;
        if time.saturating_sub(last) > plan.threshold {
            let mut gap = Gap { start: last, end: (time - plan.unit).max(last), smis: 0 };
            if let Some(before) = smis {
                let after = counter.and_then(SmiCounter::read).unwrap_or(before);
                gap.smis = u32::try_from(after.saturating_sub(before)).unwrap_or(u32::MAX);
                smis = Some(after);
                resume = now();
            }
            if record.gaps.len() < record.gaps.capacity() {
                record.gaps.push(gap);
            } else {
                record.dropped += 1;
            }
        }
        while time >= slot_end {
            push(&mut record.fixed_time, slot_done);
            (slot_end, slot_done) = (slot_end + plan.slot, 0);
        }
        if done == plan.units {
            push(&mut record.fixed_work, u32::try_from(time.saturating_sub(quantum)).unwrap_or(u32::MAX));
            if time >= end || plan.stop.load(Ordering::Relaxed) {
                record.last = time;
                return;
            }
            (quantum, done) = (resume, 0);
        }
        last = resume;
    }
}

fn push(to: &mut Vec<u32>, value: u32) {
    if to.len() < to.capacity() {
        to.push(value);
    }
}

/// Counts system management interrupts of one CPU.
struct SmiCounter(File);

impl SmiCounter {
    /// None without the module `msr`, without CAP_SYS_RAWIO, and on processors that don't count them.
    fn open(cpu: u32) -> Option<Self> {
        let counter = Self(File::open(format!("/dev/cpu/{cpu}/msr")).ok()?);
        counter.read().map(|_| counter)
    }

    fn read(&self) -> Option<u64> {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, MSR_SMI_COUNT).ok()?;
        Some(u64::from_le_bytes(bytes))
    }
}

/// Stolen time of each CPU in nanoseconds.
fn steal() -> Vec<(u32, u64)> {
    parse_steal(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
}

fn parse_steal(stat: &str) -> Vec<(u32, u64)> {
    let of = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split_ascii_whitespace();
        let cpu = words.next()?.parse().ok()?;
        // Hundredths of a second: USER_HZ is 100 on x86.
        Some((cpu, words.nth(7)?.parse::<u64>().ok()? * 10_000_000))
    };
    // The first line is the sum and has no number.
    stat.lines().filter(|line| !line.starts_with("cpu ")).filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quanta_cover_the_time_and_gaps_lie_in_it() {
        let stop = AtomicBool::new(false);
        let cpu = crate::cpus::choose(None).unwrap()[0];
        let unit = calibrate(cpu, 50_000_000).unwrap();
        let begin = now() + 1_000_000;
        let plan = Plan {
            begin,
            end: begin + 200_000_000,
            threshold: unit * 100,
            unit,
            units: 2_000_000 / unit,
            slot: 2_000_000,
            smis: false,
            gaps: 1000,
            stop: &stop,
        };
        let records = on_all(&plan, &[cpu]).unwrap();
        let [record] = &records[..] else { panic!("{records:?}") };
        assert_eq!(record.cpu, cpu);
        assert!(record.first >= plan.begin && record.last >= plan.end);
        let work: u64 = record.fixed_work.iter().map(|ticks| u64::from(*ticks)).sum();
        assert!(work <= record.last - record.first, "{work}");
        let units: u64 = record.fixed_time.iter().map(|units| u64::from(*units)).sum();
        assert!(units > 0 && units <= plan.units * record.fixed_work.len() as u64, "{units}");
        let ordered = record.gaps.windows(2).all(|two| two[0].end <= two[1].start);
        assert!(ordered && record.gaps.iter().all(|gap| record.first <= gap.start && gap.end <= record.last));
    }

    #[test]
    fn a_thread_that_begins_late_is_measured_as_long_as_the_others() {
        let stop = AtomicBool::new(false);
        let cpu = crate::cpus::choose(None).unwrap()[0];
        // The planned measurement has ended before the thread begins.
        let (length, now) = (20_000_000, now());
        let [begin, end] = [3, 2].map(|lengths| now - lengths * length);
        let plan = Plan {
            begin,
            end,
            threshold: 1 << 30,
            unit: 1,
            units: 100,
            slot: length,
            smis: false,
            gaps: 1,
            stop: &stop,
        };
        let record = &on_all(&plan, &[cpu]).unwrap()[0];
        assert!(record.last - record.first >= length, "{} ticks", record.last - record.first);
    }

    #[test]
    fn a_stopped_measurement_ends_after_one_quantum() {
        let stop = AtomicBool::new(true);
        let cpu = crate::cpus::choose(None).unwrap()[0];
        let begin = now();
        let end = begin + (1 << 50);
        let plan = Plan {
            begin,
            end,
            threshold: 1 << 30,
            unit: 1,
            units: 100,
            slot: 1 << 40,
            smis: false,
            gaps: 1,
            stop: &stop,
        };
        assert_eq!(on_all(&plan, &[cpu]).unwrap()[0].fixed_work.len(), 1);
    }

    #[test]
    fn stolen_time_is_read_by_cpu() {
        let stat = "cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 3 0 0\ncpu12 0 0 0 0 0 0 0 5 0 0\nintr 5\n";
        assert_eq!(parse_steal(stat), [(0, 30_000_000), (12, 50_000_000)]);
    }
}
