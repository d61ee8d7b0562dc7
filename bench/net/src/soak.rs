// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accounts for every frame, for any length of time: two cards ([`tombolo_net_driver`]) send to each other through a switch that runs as
//! a process of its own. Frames are numbered, so that the receiver finds missing ones.
//!
//! Rounds alternate. A *free* sender loses frames at a slow receiver, and the switch's counters must explain each. A *bounded* sender
//! (never more in flight than the receiver has buffers for) must lose none; then the switch is killed in the middle, without warning, and a
//! new one takes over the rings. A frame is done for its sender only after its receiver can see it. So a killed switch may repeat the
//! frames of one batch, and loses none.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tombolo_control::net::Ports;
use vhost::vhost_user::message::VhostUserInflight;

use tombolo_net::control::socket::{Request, ask};
use tombolo_net::forwarding::forward::BATCH;
use tombolo_net::frames::frame::{ETH_HEADER, Mac};
use tombolo_net_driver::{Nic, NicConfig};

/// Entries of each ring.
const RING: u16 = 256;
/// Frames in flight of a bounded sender.
const BOUND: u64 = 192;
/// Frames sent between two looks at the received ones.
const BURST: usize = 32;
/// Timeout of steps that take no time.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The program that runs a switch, and the arguments before the switch's own: `tombolo`, `net run`.
    pub program: PathBuf,
    /// See `program`.
    pub arguments: Vec<String>,
    /// The length of the run.
    pub until: Until,
    /// The approximate length of a round.
    pub round: Duration,
    /// Seed of the length of each round, and so of the time of its kill.
    pub seed: u64,
}

/// The end of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// After that time.
    Time(Duration),
    /// After so many frames.
    Frames(u64),
}

/// The result of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Frames that were sent.
    pub sent: u64,
    /// Frames that arrived, repeated ones not counted.
    pub received: u64,
    /// Frames that did not arrive, and that a counter of the switch explains, by reason.
    pub drops: BTreeMap<String, u64>,
    /// Frames that arrived again after a kill.
    pub repeated: u64,
    /// Switches that were killed under load.
    pub kills: u64,
    /// Time so far.
    pub time: Duration,
}

impl Tally {
    /// Returns the frames that did not arrive, and that a counter explains.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.drops.values().sum()
    }

    /// Returns the frames that did not arrive without an explanation.
    #[must_use]
    pub fn unexplained(&self) -> u64 {
        self.sent - self.received - self.dropped()
    }

    fn add_drops(&mut self, drops: BTreeMap<String, u64>) {
        for (reason, n) in drops {
            *self.drops.entry(reason).or_default() += n;
        }
    }
}

/// A line with every counter.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} s: {} sent, {} received, {} dropped by count",
            self.time.as_secs(),
            self.sent,
            self.received,
            self.dropped()
        )?;
        for (i, (reason, n)) in self.drops.iter().enumerate() {
            write!(f, "{}{reason} {n}", if i == 0 { " (" } else { ", " })?;
        }
        let close = if self.drops.is_empty() { "" } else { ")" };
        write!(
            f,
            "{close}, {} unexplained, {} repeated, {} switches killed",
            self.unexplained(),
            self.repeated,
            self.kills
        )
    }
}

struct Guest {
    nic: Nic,
    inflight: Option<(VhostUserInflight, std::fs::File)>,
    template: Vec<u8>,
    frame: Vec<u8>,
    sent: u64,
    /// The next number.
    next: u64,
    received: u64,
    repeated: u64,
}

fn mac(n: usize) -> Mac {
    Mac([0x52, 0x54, 0, 0, 1, n as u8])
}

impl Guest {
    fn new(n: usize, packed: bool) -> anyhow::Result<Self> {
        let nic = Nic::new(NicConfig { packed, size: RING, ..NicConfig::default() })?;
        let mut template = [mac(1 - n).0, mac(n).0].concat();
        template.extend([0x88, 0xb5]);
        template.resize(1514, n as u8);
        Ok(Self {
            nic,
            inflight: None,
            template,
            frame: Vec::new(),
            sent: 0,
            next: 0,
            received: 0,
            repeated: 0,
        })
    }

    /// Sends one frame; false: there is no room.
    fn send(&mut self) -> bool {
        self.template[ETH_HEADER..ETH_HEADER + 8].copy_from_slice(&self.sent.to_le_bytes());
        let len = 60 + (self.sent * 37 % 1455) as usize;
        let sent = self.nic.send(&self.template[..len]);
        self.sent += u64::from(sent);
        sent
    }

    /// Takes the received frames.
    fn receive(&mut self) -> anyhow::Result<()> {
        while self.nic.receive_into(&mut self.frame).is_some() {
            let frame = &self.frame;
            let number = frame.get(ETH_HEADER..ETH_HEADER + 8).and_then(|b| b.try_into().ok());
            let number = u64::from_le_bytes(number.context("a frame came cut short")?);
            ensure!(
                frame.len() == 60 + (number * 37 % 1455) as usize,
                "frame {number} has {} bytes",
                frame.len()
            );
            if number < self.next {
                self.repeated += 1;
            } else {
                self.received += 1;
                self.next = number + 1;
            }
        }
        Ok(())
    }
}

struct Switch {
    child: Child,
    dir: tempfile::TempDir,
}

impl Switch {
    fn start(plan: &Plan) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let mut command = Command::new(&plan.program);
        command.args(&plan.arguments).arg("--control").arg(dir.path().join("control"));
        for n in 0..2 {
            command.arg("--port").arg(format!("{n},{},{}", socket(dir.path(), n).display(), mac(n)));
        }
        let child = command.env("RUST_LOG", "warn").stdin(Stdio::null()).spawn();
        let child = child.with_context(|| plan.program.display().to_string())?;
        let switch = Self { child, dir };
        let end = Instant::now() + TIMEOUT;
        while ask::<Ports>(&switch.dir.path().join("control"), &Request::Ports).is_err() {
            ensure!(Instant::now() < end, "the switch does not answer");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(switch)
    }

    fn connect(&self, guests: &mut [Guest; 2]) -> anyhow::Result<()> {
        for (n, guest) in guests.iter_mut().enumerate() {
            guest.nic.connect_with(&socket(self.dir.path(), n), &mut guest.inflight)?;
        }
        Ok(())
    }

    /// Returns the drops of all ports, by reason.
    fn drops(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let (answer, _) = ask::<Ports>(&self.dir.path().join("control"), &Request::Ports)?;
        let mut drops = BTreeMap::new();
        for (reason, n) in answer.ports.iter().flat_map(|p| [&p.sent.drops, &p.received.drops]).flatten() {
            *drops.entry(reason.clone()).or_default() += n;
        }
        Ok(drops)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // It may have ended.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

fn socket(dir: &Path, n: usize) -> PathBuf {
    dir.join(format!("port{n}"))
}

/// Sends in both directions for `time`, with at most `bound` frames in flight in each.
fn load(guests: &mut [Guest; 2], time: Duration, bound: u64) -> anyhow::Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        for n in 0..2 {
            let arrived = guests[1 - n].next;
            for _ in 0..BURST {
                if guests[n].sent - arrived >= bound || !guests[n].send() {
                    break;
                }
            }
            guests[1 - n].receive()?;
        }
    }
    Ok(())
}

/// Waits until the switch has handled all sent frames, and takes them.
fn settle(guests: &mut [Guest; 2]) -> anyhow::Result<()> {
    let end = Instant::now() + TIMEOUT;
    loop {
        let mut waiting = 0;
        for guest in &mut *guests {
            guest.nic.reap();
            waiting += guest.nic.unsent();
        }
        for guest in &mut *guests {
            guest.receive()?;
        }
        if waiting == 0 {
            // Receivers saw the last frame before it was done for its sender.
            return Ok(());
        }
        ensure!(Instant::now() < end, "{waiting} frames are never done");
        std::thread::yield_now();
    }
}

/// Runs rounds for as long as the plan says, with the kinds of rings and of senders in turn. Calls `tell` after each; its error ends the
/// run.
///
/// # Errors
/// A frame is lost without an explanation, or repeated without a kill; the switch fails.
pub fn run(plan: &Plan, mut tell: impl FnMut(&Tally) -> anyhow::Result<()>) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    let start = Instant::now();
    let mut random = Random(plan.seed);
    let mut packed = false;
    while tally.kills == 0 || !plan.until.is_reached(start.elapsed(), &tally) {
        let mut round = Round { plan, guests: [Guest::new(0, packed)?, Guest::new(1, packed)?] };
        round.free_senders(random.about(plan.round), &mut tally)?;
        round.bounded_senders(random.about(plan.round), &mut tally)?;
        tally.time = start.elapsed();
        packed = !packed;
        tell(&tally)?;
    }
    Ok(tally)
}

impl Until {
    fn is_reached(self, elapsed: Duration, tally: &Tally) -> bool {
        match self {
            Until::Time(time) => elapsed >= time,
            Until::Frames(frames) => tally.sent >= frames,
        }
    }
}

/// A linear congruential generator.
struct Random(u64);

impl Random {
    /// Returns a time from half of `time` to one and a half of it.
    fn about(&mut self, time: Duration) -> Duration {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        time / 2 + time.mul_f64((self.0 >> 40) as f64 / (1u64 << 24) as f64)
    }
}

/// One round: two guests with rings of one kind, and a switch for each of its parts.
struct Round<'a> {
    plan: &'a Plan,
    guests: [Guest; 2],
}

impl Round<'_> {
    /// Starts a switch and connects the guests to it.
    fn connect(&mut self) -> anyhow::Result<Switch> {
        let switch = Switch::start(self.plan)?;
        switch.connect(&mut self.guests)?;
        Ok(switch)
    }

    /// Lets both guests send as fast as they can: the switch's counters must explain each lost frame.
    fn free_senders(&mut self, time: Duration, tally: &mut Tally) -> anyhow::Result<()> {
        let switch = self.connect()?;
        load(&mut self.guests, time, u64::MAX)?;
        settle(&mut self.guests)?;
        let (sent, received, repeated) = sums(&self.guests);
        let drops = switch.drops()?;
        let dropped: u64 = drops.values().sum();
        ensure!(
            sent == received + dropped && repeated == 0,
            "{sent} sent, {received} received, {dropped} dropped by count, {repeated} repeated"
        );
        tally.add_drops(drops);
        tally.sent += sent;
        tally.received += received;
        Ok(())
    }

    /// Lets both guests send no more than fits, and kills the switch in the middle: the next switch loses no frame.
    fn bounded_senders(&mut self, time: Duration, tally: &mut Tally) -> anyhow::Result<()> {
        // Restart the numbers, so that a free sender's losses don't count.
        for n in 0..2 {
            self.guests[1 - n].next = self.guests[n].sent;
        }
        let (sent_before, received_before, _) = sums(&self.guests);
        let mut switch = self.connect()?;
        load(&mut self.guests, time, BOUND)?;
        // In the middle: frames are in flight in both directions.
        switch.child.kill()?;
        load(&mut self.guests, Duration::from_millis(1), BOUND)?;
        drop(switch);
        let switch = self.connect()?;
        load(&mut self.guests, self.plan.round / 4, BOUND)?;
        settle(&mut self.guests)?;
        let (sent, received, repeated) = sums(&self.guests);
        let (sent, received) = (sent - sent_before, received - received_before);
        // While only one of them was connected again, its frames had no receiver. These may be frames that the killed switch had already
        // delivered: they arrived, and were dropped when they came again.
        let mut drops = switch.drops()?;
        let down: u64 = drops.values().sum();
        let lost = sent.saturating_sub(received);
        let again = repeated + down.saturating_sub(lost);
        ensure!(
            lost <= down && again <= 2 * BATCH as u64,
            "{sent} sent around a kill, {received} received, {down} dropped by count, {repeated} repeated"
        );
        take(&mut drops, down - lost);
        tally.add_drops(drops);
        tally.sent += sent;
        tally.received += received;
        tally.repeated += again;
        tally.kills += 1;
        Ok(())
    }
}

/// Subtracts `count` from the sum of the reasons.
fn take(drops: &mut BTreeMap<String, u64>, mut count: u64) {
    for n in drops.values_mut() {
        let taken = count.min(*n);
        (*n, count) = (*n - taken, count - taken);
    }
}

fn sums(guests: &[Guest; 2]) -> (u64, u64, u64) {
    let sum = |f: fn(&Guest) -> u64| guests.iter().map(f).sum();
    (sum(|g| g.sent), sum(|g| g.received), sum(|g| g.repeated))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_of_frames_that_had_arrived_are_taken_from_the_reasons_in_turn() {
        let mut drops = BTreeMap::from([("down".to_owned(), 224), ("no_buffer".to_owned(), 10)]);
        take(&mut drops, 32);
        assert_eq!(drops.values().sum::<u64>(), 202);
        take(&mut drops, 1000);
        assert_eq!(drops.values().sum::<u64>(), 0);
    }
}
