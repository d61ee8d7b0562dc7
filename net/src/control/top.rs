// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo top`, the switches' part: each port's traffic per second, from two readings of its counters.

use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;
use tombolo_control::net::{Flow, Ports};

use crate::control::socket::{Request, ask};

/// A switch's counters at one moment.
#[derive(Clone, Debug)]
pub struct Look {
    at: Instant,
    answer: Ports,
}

/// Reads the counters of the switch whose control socket is `control`.
///
/// # Errors
/// No switch answers there.
pub fn look(control: &Path) -> anyhow::Result<Look> {
    let (answer, _) = ask(control, &Request::Ports)?;
    Ok(Look { at: Instant::now(), answer })
}

/// A switch's rates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SwitchRates {
    /// Its network, or its socket.
    pub name: String,
    /// Processor time, in hundredths of a processor.
    pub cpu_percent: f64,
    pub ports: Vec<PortRates>,
}

/// A port's rates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PortRates {
    pub name: String,
    /// "up", "connected" or "down".
    pub state: &'static str,
    /// The workers that carry what it sends, by queue.
    pub workers: Vec<usize>,
    /// From the guest into the switch.
    pub sent: Rates,
    /// From the switch to the guest.
    pub received: Rates,
}

/// One direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Frames.
    pub packets_per_s: f64,
    /// Bits of frames.
    pub bits_per_s: f64,
    /// Frames lost, for all reasons.
    pub drops_per_s: f64,
}

/// Returns the growth of a counter; one that is smaller than before started again at zero.
fn growth(before: Option<u64>, now: u64) -> f64 {
    let before = before.filter(|b| *b <= now).unwrap_or(0);
    (now - before) as f64
}

fn flow(before: Option<&Flow>, now: &Flow, time: f64) -> Rates {
    let rate = |count: fn(&Flow) -> u64| growth(before.map(count), count(now)) / time;
    Rates {
        packets_per_s: rate(|f| f.packets),
        bits_per_s: rate(|f| f.bytes) * 8.0,
        drops_per_s: rate(Flow::dropped),
    }
}

/// Returns the rates of the switch called `name` between two readings.
#[must_use]
pub fn rates(name: &str, before: &Look, now: &Look) -> SwitchRates {
    let time = now.at.duration_since(before.at).max(Duration::from_millis(1)).as_secs_f64();
    let cpu = growth(Some(before.answer.cpu_ns), now.answer.cpu_ns);
    let ports = now
        .answer
        .ports
        .iter()
        .map(|port| {
            let was = before.answer.ports.iter().find(|p| p.name == port.name);
            PortRates {
                name: port.name.clone(),
                state: port.state(),
                workers: port.workers.clone(),
                sent: flow(was.map(|w| &w.sent), &port.sent, time),
                received: flow(was.map(|w| &w.received), &port.received, time),
            }
        })
        .collect();
    SwitchRates { name: name.into(), cpu_percent: cpu / time / 1e7, ports }
}

/// Formats a number with a unit prefix: 1234567 is 1.23 M.
fn short(n: f64) -> String {
    let (mut n, mut letters) = (n, ["", " k", " M", " G", " T"].into_iter());
    let mut letter = letters.next().unwrap_or_default();
    while n >= 999.5 {
        let Some(next) = letters.next() else { break };
        (n, letter) = (n / 1000.0, next);
    }
    let digits = if letter.is_empty() || n >= 99.95 {
        0
    } else if n >= 9.995 {
        1
    } else {
        2
    };
    format!("{n:.digits$}{letter}")
}

/// Formats a table.
#[must_use]
pub fn table(switches: &[SwitchRates]) -> String {
    let head = [
        "NET",
        "CPU",
        "PORT",
        "STATE",
        "WORKER",
        "SENT/S",
        "BIT/S",
        "LOST/S",
        "RECEIVED/S",
        "BIT/S",
        "LOST/S",
    ];
    let mut rows = vec![head.map(String::from)];
    for switch in switches {
        let mut first = [switch.name.clone(), format!("{:.0} %", switch.cpu_percent)];
        for port in &switch.ports {
            let workers: Vec<String> = port.workers.iter().map(usize::to_string).collect();
            let [name, cpu] = std::mem::take(&mut first);
            let (s, r) = (&port.sent, &port.received);
            rows.push([
                name,
                cpu,
                port.name.clone(),
                port.state.into(),
                if workers.is_empty() { "-".into() } else { workers.join(",") },
                short(s.packets_per_s),
                short(s.bits_per_s),
                short(s.drops_per_s),
                short(r.packets_per_s),
                short(r.bits_per_s),
                short(r.drops_per_s),
            ]);
        }
    }
    crate::control::cli::columns(&rows, |column| column == 1 || column > 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_control::net::{Kind, PortStatus};

    fn at(seconds: u64, base: Instant, sent: u64, drops: u64) -> Look {
        let drops = ["rate", "vlan"].map(|reason| (reason.to_owned(), drops)).into();
        let flow = |n: u64, drops| Flow { packets: n, bytes: n * 100, drops, ..Flow::default() };
        let port = PortStatus {
            name: "a".into(),
            kind: Kind::Guest,
            up: true,
            connected: true,
            macs: vec![],
            workers: vec![1],
            groups: vec![],
            rules: vec![],
            sent: flow(sent, drops),
            received: Flow::default(),
        };
        Look {
            at: base + Duration::from_secs(seconds),
            answer: Ports { cpu_ns: seconds * 250_000_000, ports: vec![port], ..Ports::default() },
        }
    }

    #[test]
    fn rates_are_what_was_counted_between_two_looks() {
        let base = Instant::now();
        let seen = rates("lan", &at(1, base, 100, 0), &at(3, base, 5100, 4));
        let port = &seen.ports[0];
        assert_eq!((port.name.as_str(), port.state, &port.workers[..]), ("a", "up", &[1][..]));
        assert!((seen.cpu_percent - 25.0).abs() < 1e-6);
        assert_eq!(port.sent, Rates { packets_per_s: 2500.0, bits_per_s: 2_000_000.0, drops_per_s: 4.0 });
        let text = table(&[seen]);
        assert!(text.contains("2.50 k") && text.contains("2.00 M") && text.contains("25 %"), "{text}");
    }

    #[test]
    fn a_switch_that_began_again_and_a_port_that_is_new_count_from_zero() {
        let base = Instant::now();
        let seen = rates("lan", &at(1, base, 1_000_000, 0), &at(2, base, 300, 0));
        assert!((seen.ports[0].sent.packets_per_s - 300.0).abs() < 1e-6);
        let mut before = at(1, base, 0, 0);
        before.answer.ports.clear();
        assert!((rates("lan", &before, &at(2, base, 7, 0)).ports[0].sent.packets_per_s - 7.0).abs() < 1e-6);
    }

    #[test]
    fn numbers_keep_three_digits_and_a_letter() {
        for (n, text) in [
            (0.0, "0"),
            (999.0, "999"),
            (999.9, "1.00 k"),
            (45_600.0, "45.6 k"),
            (1.2e9, "1.20 G"),
            (99.97e6, "100 M"),
        ] {
            assert_eq!(short(n), text);
        }
    }
}
