// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Turns trace events into spans: who had a CPU, or what held up a thread, from when to when. Handlers lie on each other and on threads; the
//! innermost one has the time.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{Kind, Source};
use crate::trace::{Event, Level, Trace, What};

/// A time in which one source had what was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Ticks at its begin.
    pub start: u64,
    /// Ticks at its end; not before its begin.
    pub end: u64,
    /// The occupant of the CPU.
    pub source: Source,
    /// The span began with an event, whose recording took time of it.
    pub recorded: bool,
}

/// The state of a CPU, or of the thread that is measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// In order, without overlaps.
    pub spans: Vec<Span>,
    /// Moments at which pages were mapped while the measured thread ran.
    pub faults: Vec<u64>,
    /// Times in which the host fetched pages for a guest that could do something else meanwhile, each with the exit by which the guest missed the page.
    /// In order, without overlaps.
    pub awaited: Vec<Span>,
}

impl Timeline {
    /// Ticks between two moments in which other threads had the CPU.
    pub(crate) fn waited(&self, first: u64, last: u64) -> u64 {
        let threads = self.spans.iter().filter(|span| span.source.kind == Kind::Thread);
        threads.map(|span| span.end.min(last).saturating_sub(span.start.max(first))).sum()
    }
}

/// The state of a CPU between two events.
#[derive(Clone, Debug, Default)]
struct Cpu {
    /// Handlers, the innermost last.
    stack: Vec<(Level, Source)>,
    /// The thread below them; none where it is not known.
    thread: Option<(u32, String)>,
}

impl Cpu {
    fn apply(&mut self, event: &Event) {
        match &event.what {
            What::Switch { to, name, .. } => {
                // No handler switches threads, so one that has not ended was not seen to end.
                self.stack.clear();
                self.thread = Some((*to, name.clone()));
            }
            What::Enter(handler) => {
                let kind = match (handler.level, handler.name.as_str()) {
                    (Level::Interrupt, _) => Kind::Interrupt,
                    (Level::Softirq, _) => Kind::Softirq,
                    (Level::Vector, "local timer") => Kind::Timer,
                    (Level::Vector, _) => Kind::Ipi,
                };
                let name = if kind == Kind::Timer { String::new() } else { handler.name.clone() };
                self.stack.push((handler.level, Source::here(kind, name)));
            }
            What::Exit(level) => {
                if let Some(at) = self.stack.iter().rposition(|(entered, _)| entered == level) {
                    self.stack.truncate(at);
                }
            }
            What::Lost => *self = Self::default(),
            What::PageFault | What::Nmi { .. } => {}
            What::VmExit(_) | What::VmEntry | What::PageAwaited(_) | What::PageReady(_) => {}
        }
    }

    /// The occupant of the CPU, unless that is the thread `measured`.
    fn owner(&self, measured: u32) -> Option<Source> {
        if let Some((_, source)) = self.stack.last() {
            return Some(source.clone());
        }
        let (thread, name) = self.thread.as_ref()?;
        let name = if *thread == 0 { "idle".to_owned() } else { name.clone() };
        (*thread != measured).then(|| Source::here(Kind::Thread, name))
    }
}

/// Adds the time between two events if it has a source.
fn add(spans: &mut Vec<Span>, start: u64, end: u64, source: Option<Source>) {
    let Some(source) = source else { return };
    if start < end {
        spans.push(Span { start, end, source, recorded: true });
    }
}

/// Returns the owners, over time, of a CPU on which the thread `measured` runs. `hz` converts what the kernel says in nanoseconds.
pub fn of_cpu(events: &[Event], measured: u32, hz: u64) -> Timeline {
    let mut cpu = Cpu { thread: Some((measured, String::new())), ..Cpu::default() };
    let (mut spans, mut faults, mut nmis) = (Vec::new(), Vec::new(), Vec::new());
    let mut last = events.first().map_or(0, |event| event.at);
    for event in events {
        add(&mut spans, last, event.at, cpu.owner(measured));
        match &event.what {
            What::Nmi { name, nanoseconds } => {
                let ticks = u128::from(*nanoseconds) * u128::from(hz) / 1_000_000_000;
                let start = event.at.saturating_sub(u64::try_from(ticks).unwrap_or(u64::MAX));
                let source = Source::here(Kind::Nmi, name);
                nmis.push(Span { start, end: event.at, source, recorded: true });
            }
            What::PageFault if cpu.owner(measured).is_none() => faults.push(event.at),
            _ => {}
        }
        cpu.apply(event);
        last = event.at;
    }
    Timeline { spans: overlaid(spans, nmis), faults, ..Timeline::default() }
}

/// Returns the causes that held up a thread of the host on any CPU: other threads, handlers, and its guest's exits.
pub fn of_thread(trace: &Trace, measured: u32) -> Timeline {
    let mut events: Vec<(u32, &Event)> =
        trace.iter().flat_map(|(cpu, events)| events.iter().map(|event| (*cpu, event))).collect();
    events.sort_by_key(|(_, event)| event.at);
    let mut cpus: BTreeMap<u32, Cpu> = BTreeMap::new();
    let mut spans = Vec::new();
    // Nothing is known of the thread before its first event.
    let mut place: Option<u32> = None;
    let (mut exit, mut asleep): (Option<Source>, bool) = (None, false);
    let mut pages = Pages::default();
    let mut last = 0;
    for (number, event) in events {
        let source = place.and_then(|place| {
            let of_cpu = cpus.get(&place).and_then(|cpu| cpu.owner(measured));
            let waits = asleep.then(|| Source::here(Kind::Asleep, ""));
            // A thread that sleeps in an exit sleeps because of it (HLT).
            if asleep { exit.clone().or(waits) } else { of_cpu.or_else(|| exit.clone()) }
        });
        // A guest that waits for a page does so by halting if it has nothing else to do.
        let source = source.map(|source| if source.halts() { pages.why(source) } else { source });
        add(&mut spans, last, event.at, source.map(Source::on_host));
        cpus.entry(number).or_default().apply(event);
        match &event.what {
            What::Switch { from, runnable, .. } if *from == measured => {
                (place, asleep) = (Some(number), !runnable);
            }
            What::Switch { to, .. } if *to == measured => (place, asleep) = (Some(number), false),
            What::VmExit(reason) if event.thread == measured => {
                exit = Some(Source::here(Kind::VmExit, reason));
                place = Some(number);
            }
            What::VmEntry if event.thread == measured => {
                exit = None;
                place = Some(number);
            }
            What::PageAwaited(page) if event.thread == measured => pages.miss(event.at, *page, exit.as_ref()),
            What::PageReady(page) if event.thread == measured => {
                exit = exit.map(|exit| if exit.halts() { pages.why(exit) } else { exit });
                pages.end(event.at, Some(*page));
            }
            What::Lost if place == Some(number) => {
                (place, exit, asleep) = (None, None, false);
                pages.end(last, None);
            }
            _ => {}
        }
        last = event.at;
    }
    pages.end(last, None);
    Timeline { spans, awaited: pages.awaited, ..Timeline::default() }
}

/// KVM's number that stands for all pages.
const ALL_PAGES: u64 = u32::MAX as u64;

/// The pages that a guest waits for while it could do something else.
#[derive(Default)]
struct Pages {
    missing: BTreeSet<u64>,
    /// The first of them: when the guest missed it, and by which exit.
    since: Option<(u64, Source)>,
    awaited: Vec<Span>,
}

impl Pages {
    fn miss(&mut self, at: u64, page: u64, exit: Option<&Source>) {
        self.missing.insert(page);
        if let (None, Some(exit)) = (&self.since, exit) {
            self.since = Some((at, exit.clone()));
        }
    }

    /// The end of the wait for a page or, without one, for all pages.
    fn end(&mut self, at: u64, page: Option<u64>) {
        match page {
            Some(page) if page != ALL_PAGES => drop(self.missing.remove(&page)),
            _ => self.missing.clear(),
        }
        if !self.missing.is_empty() {
            return;
        }
        if let Some((start, exit)) = self.since.take() {
            let exit = Some(exit.on_host()).filter(|_| start < at);
            self.awaited.extend(exit.map(|source| Span { start, end: at, source, recorded: false }));
        }
    }

    /// Why a guest halts.
    fn why(&self, halt: Source) -> Source {
        self.since.as_ref().map_or(halt, |(_, exit)| exit.clone())
    }
}

/// The spans in which the guest idles while it waits for a page, by the exits through which it missed them.
pub(crate) fn idle_for_pages(guest: &[Span], awaited: &[Span]) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut next = 0;
    for idle in guest.iter().filter(|span| span.source.idles()) {
        next += awaited[next..].partition_point(|wait| wait.end <= idle.start);
        for wait in awaited[next..].iter().take_while(|wait| wait.start < idle.end) {
            let (start, end) = (wait.start.max(idle.start), wait.end.min(idle.end));
            spans.push(Span { start, end, ..wait.clone() });
        }
    }
    spans
}

/// Puts spans over others, which lose the time that they share. Both are in order.
pub(crate) fn overlaid(below: Vec<Span>, mut above: Vec<Span>) -> Vec<Span> {
    above.sort_by_key(|span| span.start);
    let mut free = 0;
    above.retain_mut(|span| {
        span.start = span.start.max(free);
        free = free.max(span.end);
        span.start < span.end
    });
    let mut spans = Vec::with_capacity(below.len() + above.len());
    let mut next = 0;
    for mut span in below {
        while above.get(next).is_some_and(|over| over.end <= span.start) {
            next += 1;
        }
        for over in above[next..].iter().take_while(|over| over.start < span.end) {
            if span.start < over.start {
                spans.push(Span { end: over.start, ..span.clone() });
                span.recorded = false;
            }
            span.start = over.end.min(span.end);
        }
        if span.start < span.end {
            spans.push(span);
        }
    }
    spans.extend(above);
    spans.sort_by_key(|span| span.start);
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Handler;

    fn event(at: u64, thread: u32, what: What) -> Event {
        Event { at, thread, what }
    }

    fn switch(at: u64, from: u32, to: u32, name: &str, runnable: bool) -> Event {
        event(at, from, What::Switch { from, runnable, to, name: name.into() })
    }

    fn enter(at: u64, level: Level, name: &str) -> Event {
        event(at, 5, What::Enter(Handler { level, name: name.into() }))
    }

    fn exit(at: u64, level: Level) -> Event {
        event(at, 5, What::Exit(level))
    }

    fn shown(timeline: &Timeline) -> Vec<(u64, u64, String)> {
        timeline.spans.iter().map(|span| (span.start, span.end, span.source.to_string())).collect()
    }

    #[test]
    fn the_innermost_handler_has_the_time() {
        let events = [
            enter(10, Level::Vector, "local timer"),
            exit(20, Level::Vector),
            enter(22, Level::Softirq, "TIMER"),
            enter(25, Level::Interrupt, "eth0 (irq 30)"),
            exit(28, Level::Interrupt),
            exit(30, Level::Softirq),
            event(35, 5, What::PageFault),
            switch(40, 5, 7, "kworker/1:0", true),
            event(45, 7, What::PageFault),
            switch(50, 7, 5, "a", false),
        ];
        let timeline = of_cpu(&events, 5, 1_000_000_000);
        let expected = [
            (10, 20, "timer interrupt"),
            (22, 25, "softirq TIMER"),
            (25, 28, "interrupt eth0 (irq 30)"),
            (28, 30, "softirq TIMER"),
            // Each event has its cost, also one that changes nothing.
            (40, 45, "thread kworker/1:0"),
            (45, 50, "thread kworker/1:0"),
        ];
        assert_eq!(shown(&timeline), expected.map(|(start, end, name)| (start, end, name.to_owned())));
        assert_eq!(timeline.faults, [35], "another thread's page faults are that thread's time");
    }

    #[test]
    fn an_nmi_takes_its_time_from_what_it_interrupts() {
        let events = [
            switch(100, 5, 7, "b", true),
            event(160, 7, What::Nmi { name: "perf".into(), nanoseconds: 20 }),
            switch(200, 7, 5, "a", true),
            event(300, 5, What::Nmi { name: "perf".into(), nanoseconds: 10 }),
        ];
        let expected =
            [(100, 140, "thread b"), (140, 160, "NMI perf"), (160, 200, "thread b"), (290, 300, "NMI perf")];
        let timeline = of_cpu(&events, 5, 1_000_000_000);
        assert_eq!(shown(&timeline), expected.map(|(start, end, name)| (start, end, name.to_owned())));
    }

    #[test]
    fn after_lost_events_nothing_is_claimed_until_the_next_switch() {
        let events = [
            switch(10, 5, 7, "b", true),
            event(20, 0, What::Lost),
            event(30, 9, What::PageFault),
            switch(40, 9, 8, "c", true),
            switch(50, 8, 5, "a", true),
        ];
        let expected = [(10, 20, "thread b"), (40, 50, "thread c")];
        let timeline = of_cpu(&events, 5, 1);
        assert_eq!(shown(&timeline), expected.map(|(start, end, name)| (start, end, name.to_owned())));
        assert!(timeline.faults.contains(&30), "the measured thread may have run");
    }

    #[test]
    fn a_guest_that_halts_until_a_page_is_there_was_held_up_by_the_exit_that_missed_it() {
        let exit = |at, reason: &str| event(at, 5, What::VmExit(reason.into()));
        let trace = Trace::from([(
            1,
            vec![
                exit(10, "npf"),
                event(12, 5, What::PageAwaited(7)),
                event(14, 5, What::VmEntry),
                exit(20, "npf"),
                event(22, 5, What::PageAwaited(8)),
                event(24, 5, What::VmEntry),
                exit(30, "hlt"),
                switch(32, 5, 0, "swapper/1", false),
                switch(60, 0, 5, "CPU 0/KVM", true),
                event(61, 5, What::PageReady(8)),
                event(62, 5, What::PageReady(7)),
                event(63, 5, What::VmEntry),
                exit(70, "hlt"),
                event(80, 5, What::VmEntry),
                exit(90, "npf"),
                event(91, 5, What::PageAwaited(9)),
                event(92, 5, What::PageReady(ALL_PAGES)),
                event(93, 5, What::VmEntry),
            ],
        )]);
        let timeline = of_thread(&trace, 5);
        let halts = timeline.spans.iter().filter(|span| span.source.halts());
        assert_eq!(halts.map(|span| (span.start, span.end)).collect::<Vec<_>>(), [(70, 80)]);
        let missed: u64 = timeline.spans.iter().map(|span| span.end - span.start).sum::<u64>() - 10;
        assert_eq!(missed, 4 + 4 + 33 + 3);
        let awaited = |spans: &[Span]| -> Vec<_> {
            spans.iter().map(|span| (span.start, span.end, span.source.to_string())).collect()
        };
        let npf = || "host: VM exit npf".to_owned();
        assert_eq!(awaited(&timeline.awaited), [(12, 62, npf()), (91, 92, npf())]);

        // The guest's idle thread polls before it halts.
        let guest = of_cpu(
            &[
                switch(15, 3, 0, "swapper/0", false),
                switch(19, 0, 4, "b", true),
                switch(26, 4, 0, "swapper/0", false),
                switch(65, 0, 3, "a", true),
            ],
            3,
            1,
        );
        let idle = idle_for_pages(&guest.spans, &timeline.awaited);
        assert_eq!(awaited(&idle), [(15, 19, npf()), (26, 62, npf())]);
    }

    #[test]
    fn a_vcpu_is_held_up_by_its_exits_by_threads_and_by_the_hosts_interrupts() {
        let trace = Trace::from([
            (
                0,
                vec![
                    event(10, 5, What::VmEntry),
                    event(20, 5, What::VmExit("MSR_WRITE".into())),
                    event(25, 5, What::VmEntry),
                    event(30, 5, What::VmExit("EXTERNAL_INTERRUPT".into())),
                    enter(32, Level::Vector, "local timer"),
                    exit(36, Level::Vector),
                    switch(38, 5, 7, "make", true),
                    event(60, 7, What::PageFault),
                    switch(70, 7, 0, "swapper/0", false),
                ],
            ),
            (
                1,
                vec![
                    switch(80, 0, 5, "CPU 0/KVM", true),
                    event(82, 5, What::VmEntry),
                    event(90, 5, What::VmExit("HLT".into())),
                    switch(92, 5, 0, "swapper/1", false),
                    switch(120, 0, 5, "CPU 0/KVM", true),
                    event(121, 5, What::VmEntry),
                ],
            ),
        ]);
        let timeline = of_thread(&trace, 5);
        let mut sums: BTreeMap<String, u64> = BTreeMap::new();
        for span in &timeline.spans {
            *sums.entry(span.source.to_string()).or_default() += span.end - span.start;
        }
        let expected = [
            ("host: VM exit EXTERNAL_INTERRUPT", 2 + 2 + 2),
            ("host: VM exit HLT", 31),
            ("host: VM exit MSR_WRITE", 5),
            ("host: thread idle", 10),
            ("host: thread make", 32),
            ("host: timer interrupt", 4),
        ];
        assert_eq!(sums, expected.map(|(name, ticks)| (name.to_owned(), ticks)).into());
    }
}
