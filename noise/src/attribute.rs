// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Puts the time of gaps to the sources that had the CPU meanwhile. A pure function: the parts of a gap never sum up to more than the gap.
//!
//! In this order a part of a gap goes to
//! 1. what the host recorded as holding up the vCPU's thread, where it was traced on the same clock: whatever the guest did then, it stood still;
//! 2. what the machine's own kernel recorded as having the CPU, less what recording took; where that is the idle thread while the host fetched a page
//!    for the guest, the exit by which the guest missed the page;
//! 3. the way in and out of these: what is left beside them, up to [`Limits::edge`] on each side;
//! 4. a page fault, from its event to where the program goes on;
//! 5. a system management interrupt, where one was counted in the gap;
//! 6. stolen time, the longest gaps first, up to what the hypervisor has told of beyond the host's threads of 1;
//! 7. nothing that was recorded.

use crate::recording::Gap;
use crate::source::{Kind, Source};
use crate::timeline::{self, Span, Timeline};

/// Costs of the machine and of tracing, in ticks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// The longest way into a handler or thread before its first event, and out of it after its last.
    pub edge: u64,
    /// The cost of recording one event.
    pub event: u64,
    /// Time that a hypervisor has told of as stolen, and that the host's record puts to no thread.
    pub steal: u64,
}

/// A part of a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The occupant of the CPU.
    pub source: Source,
    /// Ticks.
    pub ticks: u64,
}

/// A gap and who had which part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    /// As the program on the CPU measured it.
    pub gap: Gap,
    /// One part for each source.
    pub parts: Vec<Part>,
    /// Ticks that tracing took.
    pub tracing: u64,
}

impl Explained {
    fn add(&mut self, source: &Source, ticks: u64) {
        if ticks == 0 {
            return;
        }
        match self.parts.iter_mut().find(|part| part.source == *source) {
            Some(part) => part.ticks += ticks,
            None => self.parts.push(Part { source: source.clone(), ticks }),
        }
    }

    /// Ticks that were put to a source.
    pub fn of(&self, source: &Source) -> u64 {
        self.parts.iter().filter(|part| part.source == *source).map(|part| part.ticks).sum()
    }
}

/// A part of a gap between two ticks.
type Segment = (u64, u64);

/// Explains the gaps of one CPU, which are in order and don't overlap. `host` is what held up the vCPU's thread, by this machine's clock.
pub fn attribute(gaps: &[Gap], here: &Timeline, host: Option<&Timeline>, limits: &Limits) -> Vec<Explained> {
    let spans = match host {
        Some(host) => {
            let waits = timeline::idle_for_pages(&here.spans, &host.awaited);
            timeline::overlaid(timeline::overlaid(here.spans.clone(), waits), host.spans.clone())
        }
        None => here.spans.clone(),
    };
    let mut explained: Vec<Explained> =
        gaps.iter().map(|gap| one(gap, &spans, &here.faults, limits)).collect();
    steal(&mut explained, limits.steal);
    explained
}

/// Spans that share time with the segment, cut to it.
fn within(spans: &[Span], (start, end): Segment) -> impl Iterator<Item = Span> + '_ {
    let first = spans.partition_point(|span| span.end <= start);
    let shared = spans[first..].iter().take_while(move |span| span.start < end);
    shared.map(move |span| Span {
        start: span.start.max(start),
        end: span.end.min(end),
        // An event before the gap took no time of it.
        recorded: span.recorded && span.start >= start,
        source: span.source.clone(),
    })
}

fn one(gap: &Gap, spans: &[Span], faults: &[u64], limits: &Limits) -> Explained {
    let mut explained = Explained { gap: *gap, parts: Vec::new(), tracing: 0 };
    let owned: Vec<Span> = within(spans, (gap.start, gap.end)).collect();
    for span in &owned {
        let tracing = if span.recorded { limits.event.min(span.end - span.start) } else { 0 };
        explained.tracing += tracing;
        explained.add(&span.source, span.end - span.start - tracing);
    }
    for (segment, beside) in between(gap, &owned) {
        match beside {
            Some(source) if segment.1 - segment.0 <= limits.edge => {
                explained.add(source, segment.1 - segment.0);
            }
            _ => rest(&mut explained, segment, faults),
        }
    }
    explained
}

/// The parts of a gap that lie between spans, each with the source beside it.
fn between<'a>(gap: &Gap, owned: &'a [Span]) -> Vec<(Segment, Option<&'a Source>)> {
    let mut segments = Vec::new();
    let (mut at, mut before) = (gap.start, None);
    for span in owned {
        if at < span.start {
            segments.push(((at, span.start), Some(&span.source)));
        }
        (at, before) = (span.end, Some(&span.source));
    }
    if at < gap.end {
        segments.push(((at, gap.end), before));
    }
    segments
}

/// Explains a part of a gap for which the trace names no owner of the CPU.
fn rest(explained: &mut Explained, (start, end): Segment, faults: &[u64]) {
    let fault = faults[faults.partition_point(|at| *at < start)..].first();
    let before = fault.map_or(end, |at| (*at).min(end));
    explained.add(&Source::here(Kind::PageFault, ""), end - before);
    let kind = if explained.gap.smis > 0 { Kind::Smi } else { Kind::Unknown };
    explained.add(&Source::here(kind, ""), before - start);
}

/// Puts unknown time to the hypervisor, the longest parts first, as far as it has told of stolen time.
fn steal(explained: &mut [Explained], mut stolen: u64) {
    let unknown = Source::here(Kind::Unknown, "");
    let mut order: Vec<usize> = (0..explained.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(explained[*at].of(&unknown)));
    for at in order {
        let taken = explained[at].of(&unknown).min(stolen);
        if taken == 0 {
            return;
        }
        stolen -= taken;
        let parts = &mut explained[at].parts;
        for part in parts.iter_mut().filter(|part| part.source == unknown) {
            part.ticks -= taken;
        }
        parts.retain(|part| part.ticks > 0);
        explained[at].add(&Source::here(Kind::Steal, ""), taken);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::timeline::of_cpu;
    use crate::trace::{Event, What};

    const EDGE: u64 = 10;

    fn gap(start: u64, end: u64) -> Gap {
        Gap { start, end, smis: 0 }
    }

    fn span(start: u64, end: u64, kind: Kind) -> Span {
        Span { start, end, source: Source::here(kind, ""), recorded: true }
    }

    fn shares(explained: &Explained) -> Vec<(Kind, u64)> {
        explained.parts.iter().map(|part| (part.source.kind, part.ticks)).collect()
    }

    fn total(explained: &[Explained]) -> u64 {
        explained.iter().map(|one| one.tracing + one.parts.iter().map(|part| part.ticks).sum::<u64>()).sum()
    }

    #[test]
    fn the_way_in_and_out_belongs_to_what_is_beside_it_and_tracing_is_taken_off() {
        let here = Timeline { spans: vec![span(105, 120, Kind::Timer)], ..Timeline::default() };
        let limits = Limits { edge: EDGE, event: 4, steal: 0 };
        let all = attribute(&[gap(100, 128)], &here, None, &limits);
        assert_eq!((shares(&all[0]), all[0].tracing), (vec![(Kind::Timer, 5 + 11 + 8)], 4));
    }

    #[test]
    fn a_long_rest_is_a_page_fault_the_host_an_smi_stolen_or_unknown() {
        let here =
            Timeline { spans: vec![span(100, 110, Kind::Thread)], faults: vec![160], ..Timeline::default() };
        let host = Timeline { spans: vec![span(105, 150, Kind::VmExit)], ..Timeline::default() };
        let limits = Limits { edge: EDGE, event: 0, steal: 0 };
        let faulted = attribute(&[gap(100, 200)], &here, Some(&host), &limits);
        // The exit lasts on while the guest's trace has the thread, which stood still then; 10 ticks after it are its way out.
        let parts = vec![(Kind::Thread, 5), (Kind::VmExit, 45), (Kind::PageFault, 40), (Kind::Unknown, 10)];
        assert_eq!(shares(&faulted[0]), parts);
        let none = Timeline::default();
        let smi = attribute(&[Gap { smis: 1, ..gap(0, 50) }], &none, None, &limits);
        assert_eq!(shares(&smi[0]), [(Kind::Smi, 50)]);
        let limits = Limits { steal: 45, ..limits };
        let stolen = attribute(&[gap(0, 20), gap(30, 70)], &none, None, &limits);
        assert_eq!(shares(&stolen[0]), [(Kind::Unknown, 15), (Kind::Steal, 5)]);
        assert_eq!(shares(&stolen[1]), [(Kind::Steal, 40)]);
    }

    #[test]
    fn a_span_before_a_gap_explains_nothing_of_it() {
        let here = Timeline { spans: vec![span(0, 100, Kind::Thread)], ..Timeline::default() };
        let all = attribute(&[gap(100, 105)], &here, None, &Limits { edge: EDGE, event: 1, steal: 0 });
        assert_eq!(shares(&all[0]), [(Kind::Unknown, 5)]);
    }

    /// An interruption that a test plants: how long after the last one, how long, and what.
    fn planted() -> impl Strategy<Value = Vec<(u64, u64, bool)>> {
        proptest::collection::vec((100u64..5000, 50u64..20_000, any::<bool>()), 0..60)
    }

    /// The gaps and events of planted interruptions: threads, and page faults. The gap begins up to `edge` before the first event of its thread.
    fn recorded(planted: &[(u64, u64, bool)], edge: u64) -> (Vec<Gap>, Vec<Event>) {
        let (mut at, mut gaps, mut events) = (1000, Vec::new(), Vec::new());
        for (pause, length, thread) in planted {
            let start = at + pause;
            let end = start + length;
            if *thread {
                let switch = |from, to| What::Switch { from, runnable: true, to, name: format!("t{to}") };
                events.push(Event { at: start + edge, thread: 5, what: switch(5, 7) });
                events.push(Event { at: end - edge, thread: 7, what: switch(7, 5) });
            } else {
                events.push(Event { at: start, thread: 5, what: What::PageFault });
            }
            gaps.push(gap(start, end));
            at = end;
        }
        (gaps, events)
    }

    proptest! {
        #[test]
        fn planted_time_is_found_and_nothing_is_invented(planted in planted(), edge in 0u64..EDGE, cost in 0u64..3) {
            let (gaps, events) = recorded(&planted, edge);
            let all = attribute(&gaps, &of_cpu(&events, 5, 1), None, &Limits { edge: EDGE, event: cost, steal: 0 });
            for (name, thread) in [(Source::here(Kind::Thread, "t7"), true), (Source::here(Kind::PageFault, ""), false)] {
                let found: u64 = all.iter().map(|one| one.of(&name)).sum();
                let of: u64 = planted.iter().filter(|p| p.2 == thread).map(|p| p.1).sum();
                prop_assert!(found <= of && found * 100 >= of * 95, "{found} of {of}");
            }
            prop_assert!(all.iter().all(|one| one.of(&Source::here(Kind::Unknown, "")) == 0));
        }

        #[test]
        fn without_events_everything_is_unknown(planted in planted()) {
            let (gaps, _) = recorded(&planted, 0);
            for one in attribute(&gaps, &Timeline::default(), None, &Limits { edge: EDGE, event: 5, steal: 0 }) {
                prop_assert_eq!(shares(&one), [(Kind::Unknown, one.gap.end - one.gap.start)]);
            }
        }

        #[test]
        fn the_parts_of_all_gaps_are_the_gaps(
            lengths in proptest::collection::vec((1u64..50, 1u64..50, 0u32..2), 0..40),
            here in proptest::collection::vec((0u64..30, 1u64..60), 0..60),
            host in proptest::collection::vec((0u64..30, 1u64..60), 0..60),
            mut faults in proptest::collection::vec(0u64..4000, 0..20),
            edge in 0u64..20, event in 0u64..20, steal in 0u64..2000,
        ) {
            let mut at = 0;
            let gaps: Vec<Gap> = lengths.iter().map(|(pause, length, smis)| {
                at += pause + length;
                Gap { start: at - length, end: at, smis: *smis }
            }).collect();
            let timeline = |list: &[(u64, u64)], kind| {
                let mut at = 0;
                let spans = list.iter().map(|(pause, length)| { at += pause + length; span(at - length, at, kind) });
                Timeline { spans: spans.collect(), ..Timeline::default() }
            };
            faults.sort_unstable();
            let here = Timeline { faults, ..timeline(&here, Kind::Thread) };
            let all = attribute(&gaps, &here, Some(&timeline(&host, Kind::VmExit)), &Limits { edge, event, steal });
            prop_assert_eq!(total(&all), gaps.iter().map(|gap| gap.end - gap.start).sum::<u64>());
        }
    }
}
