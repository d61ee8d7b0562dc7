// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads the kernel's trace as it prints it (tracefs, `trace`), with the time-stamp counter as its clock. The text may come from a guest, so
//! any bytes are accepted; what is no known event is left out.

use std::collections::BTreeMap;

/// The longest line that the kernel prints of an event, with room to spare.
const LONGEST: usize = 1024;
/// The name of an exit for an emulated device's registers on AMD's processors.
pub(crate) const MMIO: &str = "npf MMIO";
/// The width of the thread's name at the begin of a line; a `-` and the thread's number follow.
const NAME: usize = 16;

/// Something that the kernel recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Ticks of the time-stamp counter.
    pub at: u64,
    /// The thread that ran.
    pub thread: u32,
    /// The event that the kernel recorded at that time.
    pub what: What,
}

/// An action of the kernel on a CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Another thread runs from now on.
    Switch {
        /// The thread that ran.
        from: u32,
        /// It could have gone on.
        runnable: bool,
        /// The thread that runs now, 0 for the idle one.
        to: u32,
        /// The new thread's name (`comm`), at most 15 bytes.
        name: String,
    },
    /// A handler begins.
    Enter(Handler),
    /// A handler ends.
    Exit(Level),
    /// A page is mapped, which takes until the interrupted program goes on.
    PageFault,
    /// A handler of non-maskable interrupts has ended.
    Nmi {
        /// The handler's function in the kernel.
        name: String,
        /// How long it took.
        nanoseconds: u64,
    },
    /// The thread's guest has stopped, for this reason.
    VmExit(String),
    /// The thread's guest goes on.
    VmEntry,
    /// The thread's guest misses this page, which the host fetches while the guest does something else.
    PageAwaited(u64),
    /// The page is there, and the guest is told so.
    PageReady(u64),
    /// Events were lost here.
    Lost,
}

/// Levels of handlers; a CPU's handlers lie on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// A device's interrupt.
    Interrupt,
    /// An interrupt of the CPU's own controller.
    Vector,
    /// Work that an interrupt has put off.
    Softirq,
}

/// A handler that interrupts programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handler {
    /// How the CPU comes to run it.
    pub level: Level,
    /// Its name: a device's with its interrupt's number, a vector's, a softirq's.
    pub name: String,
}

/// Events by CPU, in order of time.
pub type Trace = BTreeMap<u32, Vec<Event>>;

/// Reads a trace. Each CPU's events are sorted, since the kernel's clock and buffers allow small steps back.
pub fn parse(text: &[u8]) -> Trace {
    let mut trace = Trace::new();
    let mut last = BTreeMap::new();
    // Lines that are no event by themselves: the kernel prints a thread's name as it is, which may have line ends.
    let mut broken: Vec<u8> = Vec::new();
    for line in text.split(|byte| *byte == b'\n') {
        broken.extend_from_slice(line);
        if let Some((cpu, event)) = event(line).or_else(|| event(&broken)) {
            last.insert(cpu, event.at);
            trace.entry(cpu).or_default().push(event);
            broken.clear();
        } else if let Some(cpu) = lost(line) {
            let at = last.get(&cpu).copied().unwrap_or(0);
            trace.entry(cpu).or_default().push(Event { at, thread: 0, what: What::Lost });
            broken.clear();
        } else if broken.len() < LONGEST {
            broken.push(b'\n');
        } else {
            broken.clear();
        }
    }
    for events in trace.values_mut() {
        events.sort_by_key(|event| event.at);
    }
    trace
}

/// `CPU:1 [LOST 123 EVENTS]`
fn lost(line: &[u8]) -> Option<u32> {
    let (cpu, rest) = std::str::from_utf8(line).ok()?.strip_prefix("CPU:")?.split_once(' ')?;
    rest.starts_with("[LOST").then_some(())?;
    cpu.parse().ok()
}

/// `            name-123     [001] d..2.  456: group_event: fields`
fn event(line: &[u8]) -> Option<(u32, Event)> {
    (line.get(NAME) == Some(&b'-')).then_some(())?;
    let rest = String::from_utf8_lossy(&line[NAME + 1..]);
    let (before, rest) = rest.split_once('[')?;
    let thread = before.split_ascii_whitespace().next()?.parse().ok()?;
    let (cpu, rest) = rest.split_once(']')?;
    // The flags are left out where the option irq-info is off.
    let (context, rest) = rest.split_once(": ")?;
    let at = context.split_ascii_whitespace().last()?.parse().ok()?;
    let (name, fields) = rest.split_once(':')?;
    let what = what(name, fields.strip_prefix(' ').unwrap_or(fields))?;
    Some((cpu.parse().ok()?, Event { at, thread, what }))
}

fn what(name: &str, fields: &str) -> Option<What> {
    let enter = |level, name: String| Some(What::Enter(Handler { level, name }));
    match name {
        "sched_switch" => switch(fields),
        "irq_handler_entry" => {
            let (number, name) = (word(fields, "irq=")?, fields.split_once(" name=")?.1);
            enter(Level::Interrupt, format!("{name} (irq {number})"))
        }
        "irq_handler_exit" => Some(What::Exit(Level::Interrupt)),
        "softirq_entry" => {
            enter(Level::Softirq, fields.split_once("[action=")?.1.strip_suffix(']')?.to_owned())
        }
        "softirq_exit" => Some(What::Exit(Level::Softirq)),
        "page_fault_user" | "page_fault_kernel" => Some(What::PageFault),
        "nmi_handler" => {
            let (handler, rest) = fields.split_once(' ')?;
            let nanoseconds = word(rest, "delta_ns: ")?.parse().ok()?;
            Some(What::Nmi { name: handler.trim_end_matches("()").to_owned(), nanoseconds })
        }
        "kvm_exit" => Some(What::VmExit(exit(fields)?)),
        "kvm_entry" => Some(What::VmEntry),
        "kvm_async_pf_not_present" => Some(What::PageAwaited(token(fields)?)),
        "kvm_async_pf_ready" => Some(What::PageReady(token(fields)?)),
        _ if !fields.starts_with("vector=") => None,
        _ => match (name.strip_suffix("_entry"), name.strip_suffix("_exit")) {
            (Some(vector), _) => enter(Level::Vector, vector.replace('_', " ")),
            (_, Some(_)) => Some(What::Exit(Level::Vector)),
            _ => None,
        },
    }
}

/// The reason of an exit. AMD's processors have one for memory that is not mapped and for an emulated device's registers, which KVM maps by a reserved bit.
fn exit(fields: &str) -> Option<String> {
    const RESERVED: u64 = 1 << 3;
    let reason = word(fields, "reason ")?;
    let info = word(fields, "info1 0x").and_then(|info| u64::from_str_radix(info, 16).ok());
    let device = reason == "npf" && info.is_some_and(|info| info & RESERVED != 0);
    Some(if device { MMIO.to_owned() } else { reason.to_owned() })
}

/// KVM's number of a page that a guest waits for: `token 0x12000 gva 0x3000`.
fn token(fields: &str) -> Option<u64> {
    u64::from_str_radix(word(fields, "token 0x")?, 16).ok()
}

/// The word after `key`.
fn word<'a>(fields: &'a str, key: &str) -> Option<&'a str> {
    let at = fields.find(key)?;
    fields[at + key.len()..].split([' ', ',']).next()
}

/// `prev_comm=a prev_pid=1 prev_prio=120 prev_state=R+ ==> next_comm=b next_pid=2 next_prio=120`; names may have spaces, `=` and `==>` in them.
fn switch(fields: &str) -> Option<What> {
    let (from, to) = fields.rsplit_once(" ==> next_comm=")?;
    let (name, number) = to.rsplit_once(" next_pid=")?;
    let (from, state) = from.rsplit_once(" prev_state=")?;
    let (_, from) = from.rsplit_once(" prev_pid=")?;
    Some(What::Switch {
        from: from.split(' ').next()?.parse().ok()?,
        runnable: state.starts_with('R'),
        to: number.split(' ').next()?.parse().ok()?,
        name: name.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_kind_of_event_is_read() {
        let text = b"# tracer: nop
            init-1       [001] d..2.   100: sched_switch: prev_comm=a b prev_pid=1 prev_prio=120 prev_state=R+ ==> next_comm=x ==> y next_pid=70 next_prio=49
          <idle>-0       [000] d.h1.   110: irq_handler_entry: irq=4 name=ttyS0
          <idle>-0       [000] d.h1.   120: irq_handler_exit: irq=4 ret=handled
           <...>-70      [001] d.s..   130: softirq_entry: vec=1 [action=TIMER]
           <...>-70      [001] d.s..   140: softirq_exit: vec=1 [action=TIMER]
           <...>-70      [001]   150: call_function_single_entry: vector=251
           <...>-70      [001] d....   160: call_function_single_exit: vector=251
CPU:1 [LOST 7 EVENTS]
           <...>-70      (     70) [001] d.... 170: page_fault_user: address=0x7f ip=0x1 error_code=0x4
           <...>-70      [001] d.Z..   180: nmi_handler: perf_event_nmi_handler() delta_ns: 1500 handled: 1
           <...>-70      [001] d....   190: kvm_exit: vcpu 0 reason EPT_VIOLATION rip 0x1 info1 0x2
           <...>-70      [001] d....   200: kvm_entry: vcpu 0, rip 0x1
           <...>-70      [001] .....   204: kvm_async_pf_not_present: token 0x3ad000 gva 0x9180736
           <...>-70      [001] .....   206: kvm_async_pf_ready: token 0x3ad000 gva 0x9180736
           <...>-70      [001] d....   207: kvm_exit: vcpu 0 reason npf rip 0xff info1 0x0000000100000014 info2 0x00000000066ccf90
           <...>-70      [001] d....   208: kvm_exit: vcpu 0 reason npf rip 0xff info1 0x000000010000000e info2 0x00000000fe003000
           <...>-70      [001] d....   210: vector_alloc: irq=4 vector=3 reserved=0 ret=0
";
        let trace = parse(text);
        let at = |cpu: u32| trace[&cpu].iter().map(|e| (e.at, e.thread, e.what.clone())).collect::<Vec<_>>();
        let handler = |level, name: &str| What::Enter(Handler { level, name: name.into() });
        assert_eq!(
            at(0),
            [(110, 0, handler(Level::Interrupt, "ttyS0 (irq 4)")), (120, 0, What::Exit(Level::Interrupt))]
        );
        let switch = What::Switch { from: 1, runnable: true, to: 70, name: "x ==> y".into() };
        let expected = [
            (100, 1, switch),
            (130, 70, handler(Level::Softirq, "TIMER")),
            (140, 70, What::Exit(Level::Softirq)),
            (150, 70, handler(Level::Vector, "call function single")),
            (160, 70, What::Exit(Level::Vector)),
            (160, 0, What::Lost),
            (170, 70, What::PageFault),
            (180, 70, What::Nmi { name: "perf_event_nmi_handler".into(), nanoseconds: 1500 }),
            (190, 70, What::VmExit("EPT_VIOLATION".into())),
            (200, 70, What::VmEntry),
            (204, 70, What::PageAwaited(0x3ad000)),
            (206, 70, What::PageReady(0x3ad000)),
            (207, 70, What::VmExit("npf".into())),
            (208, 70, What::VmExit(MMIO.into())),
        ];
        assert_eq!(at(1), expected);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(text in proptest::collection::vec(any::<u8>(), 0..2000)) {
            for events in parse(&text).values() {
                prop_assert!(events.windows(2).all(|two| two[0].at <= two[1].at));
            }
        }

        #[test]
        fn damaged_events_are_read(
            lines in proptest::collection::vec("[a-z <>.-]{16}-[0-9]{0,12} *\\[[0-9]{1,11}\\] [a-z.]{0,5} [0-9]{0,22}: \
                (sched_switch|irq_handler_entry|softirq_entry|nmi_handler|kvm_exit|kvm_async_pf_ready|local_timer_entry): \
                ((prev_comm|prev_pid|prev_state|irq| name|reason| ==> next_comm| next_pid|vector|token| info1|\\[action)[=: ][a-z0-9 \\]=>é]{0,9}){0,6}", 0..20)
        ) {
            let read: usize = parse(lines.join("\n").as_bytes()).values().map(Vec::len).sum();
            prop_assert!(read <= lines.len());
        }

        #[test]
        fn a_thread_of_any_name_is_named(name in "[ -~\n\u{1b}]{0,15}", from in 1u32.., to in 1u32.., at: u64) {
            let line = format!("{name:>16}-{from:<7} [003] d..2. {at:>12}: sched_switch: prev_comm={name} prev_pid={from} \
                prev_prio=120 prev_state=S ==> next_comm={name} next_pid={to} next_prio=9");
            let trace = parse(line.as_bytes());
            let event = Event { at, thread: from, what: What::Switch { from, runnable: false, to, name } };
            prop_assert_eq!(&trace[&3][..], [event]);
        }
    }
}
