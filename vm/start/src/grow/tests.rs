// SPDX-License-Identifier: Apache-2.0 OR MIT
use super::*;
use crate::ahead::Prepared;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::rc::Rc;

const BLOCK: u64 = 16 * MIB;

/// A guest behind a monitor: takes a block at each look, as its settings allow.
struct Guest {
    size: u64,
    requested: u64,
    takes_at_most: u64,
    reboots_at: Option<u64>,
    driver: bool,
    dies_at: Option<u64>,
    most_offered_unprepared: u64,
    offers: Vec<u64>,
    ready: Rc<RefCell<u64>>,
    up: Option<Duration>,
}

impl Guest {
    fn new() -> Self {
        Self {
            size: 0,
            requested: 0,
            takes_at_most: u64::MAX,
            reboots_at: None,
            driver: true,
            dies_at: None,
            most_offered_unprepared: 0,
            offers: Vec::new(),
            ready: Rc::default(),
            up: None,
        }
    }
}

impl Monitor for Guest {
    fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, MonitorError> {
        match command {
            "query-memory-devices" => {
                Ok(json!([{"type": "virtio-mem", "data": {"id": "vmem0", "size": self.size,
                "requested-size": self.requested}}]))
            }
            "qom-set" => {
                self.requested = arguments["value"].as_u64().unwrap();
                self.offers.push(self.requested);
                let unprepared = self.requested.saturating_sub(*self.ready.borrow());
                self.most_offered_unprepared = self.most_offered_unprepared.max(unprepared);
                Ok(json!({}))
            }
            "x-query-virtio-status" => {
                let words = if self.driver { vec!["VIRTIO_CONFIG_S_DRIVER_OK: ready"] } else { vec![] };
                Ok(json!({"status": {"statuses": words}}))
            }
            other => panic!("{other} is not used here"),
        }
    }

    fn ready_for(&self) -> Option<Duration> {
        self.up
    }

    fn wait(&mut self, _: Duration) -> Result<(), MonitorError> {
        if self.dies_at.is_some_and(|at| self.size >= at) {
            return Err(MonitorError::Gone);
        }
        if self.reboots_at.is_some_and(|at| self.size >= at) {
            self.reboots_at = None;
            self.size = 0;
        } else if self.driver && self.size < self.requested.min(self.takes_at_most) {
            self.size += BLOCK;
        }
        Ok(())
    }
}

/// Prepares a step at each look, as far as it is allowed, and fails where told.
struct Pages {
    ready: Rc<RefCell<u64>>,
    limit: u64,
    fails_at: u64,
    starts: u32,
    stops: u32,
    hastened: u32,
}

impl Prepare for Pages {
    fn restart(&mut self) -> Result<(), MemoryError> {
        *self.ready.borrow_mut() = 0;
        self.limit = 0;
        self.starts += 1;
        Ok(())
    }
    fn hasten(&mut self) {
        self.hastened += 1;
    }
    fn allow(&mut self, limit: u64) {
        self.limit = limit;
        self.stops += u32::from(limit == 0);
    }
    fn prepared(&self) -> Result<Prepared, MemoryError> {
        let mut ready = self.ready.borrow_mut();
        *ready = (*ready + 3 * BLOCK).min(self.limit).max(*ready);
        if *ready > self.fails_at {
            let source = std::io::Error::from_raw_os_error(libc::ENOMEM);
            return Err(MemoryError::Exhausted { start: 0, end: 0, source });
        }
        Ok(Prepared { ready: *ready, ..Prepared::default() })
    }
}

fn options() -> Options {
    Options {
        driver_timeout: Duration::from_millis(20),
        settled: Duration::from_millis(20),
        offer_timeout: Duration::from_millis(20),
        memory_timeout: Duration::from_millis(20),
        tick: Duration::ZERO,
        share: Share::ALL,
        reserve: 0,
        available: Box::new(|| u64::MAX),
    }
}

fn run(
    guest: &mut Guest,
    fails_at: u64,
    options: &Options,
) -> (Result<Report, GrowError>, Vec<Progress>, Pages) {
    let layout = Layout { boot: 512 * MIB, grown: 1024 * MIB, block: BLOCK, step: 128 * MIB };
    let mut pages =
        Pages { ready: guest.ready.clone(), limit: 0, fails_at, starts: 0, stops: 0, hastened: 0 };
    let mut seen = Vec::new();
    let result = grow(guest, "vmem0", layout, &mut pages, options, &mut |p| seen.push(p.clone()));
    (result, seen, pages)
}

#[test]
fn a_guest_gets_all_of_its_memory_and_only_prepared_memory_after_the_first_block() {
    let mut guest = Guest::new();
    let (result, seen, pages) = run(&mut guest, u64::MAX, &options());
    assert_eq!(result.unwrap().restarts, 0);
    assert_eq!((guest.size, pages.starts, pages.stops, pages.hastened), (1024 * MIB, 1, 0, 1));
    assert!(guest.most_offered_unprepared <= BLOCK);
    let last = seen.last().unwrap();
    assert_eq!((&last.phase, last.present), (&Phase::Complete, 1536 * MIB));
    assert!(seen[..seen.len() - 1].iter().all(|p| p.phase != Phase::Complete));
}

#[test]
fn with_a_share_the_guest_has_pauses_in_which_nothing_is_prepared_or_offered() {
    let mut guest = Guest { reboots_at: Some(512 * MIB), ..Guest::new() };
    let options = Options { share: "50".parse().unwrap(), ..options() };
    let (result, _, pages) = run(&mut guest, u64::MAX, &options);
    assert_eq!((result.unwrap().restarts, guest.size), (1, 1024 * MIB));
    // A pause after each section but the last; the first time the guest rebooted after four.
    assert!(pages.stops >= 3 + 7, "{}", pages.stops);
    let from_first = guest.offers.rsplitn(2, |offer| *offer == BLOCK).next().unwrap();
    for end in (1..=8).map(|section| section * 128 * MIB) {
        let at = from_first.iter().position(|offer| *offer == end).unwrap();
        assert_eq!(from_first[at - 1], end - BLOCK, "{from_first:?}");
    }
}

#[test]
fn a_guest_that_reboots_is_grown_again_from_nothing() {
    let mut guest = Guest { reboots_at: Some(512 * MIB), ..Guest::new() };
    let (result, _, pages) = run(&mut guest, u64::MAX, &options());
    assert_eq!(result.unwrap().restarts, 1);
    assert_eq!((guest.size, pages.starts, pages.hastened), (1024 * MIB, 2, 2));
}

#[test]
fn a_guest_without_the_driver_is_told_apart_from_one_that_refuses() {
    let mut guest = Guest { driver: false, ..Guest::new() };
    let (result, seen, pages) = run(&mut guest, u64::MAX, &options());
    assert!(matches!(result, Err(GrowError::NoDriver { .. })));
    assert_eq!(pages.hastened, 0);
    assert!(matches!(&seen.last().unwrap().phase, Phase::Failed(why) if why.contains("start = \"slow\"")));
    assert_eq!(guest.requested, 0);
    // A guest whose user space runs loads no driver any more: the wait is shorter than during a boot.
    let mut guest = Guest { driver: false, up: Some(Duration::from_secs(1)), ..Guest::new() };
    let long = Options { driver_timeout: Duration::from_secs(3600), ..options() };
    assert!(matches!(run(&mut guest, u64::MAX, &long).0, Err(GrowError::NoDriver { .. })));

    let mut guest = Guest { takes_at_most: 0, ..Guest::new() };
    assert!(matches!(run(&mut guest, u64::MAX, &options()).0, Err(GrowError::Refused { .. })));
}

#[test]
fn a_guest_that_stops_half_way_is_failed_and_offered_nothing_more() {
    let mut guest = Guest { takes_at_most: 512 * MIB, ..Guest::new() };
    let (result, seen, _) = run(&mut guest, u64::MAX, &options());
    assert!(matches!(result, Err(GrowError::Refused { present: 1024, total: 1536, .. })));
    assert_eq!(guest.requested, 512 * MIB);
    assert!(matches!(seen.last().unwrap().phase, Phase::Failed(_)));
}

#[test]
fn a_host_without_memory_is_waited_for_and_then_told() {
    let mut guest = Guest::new();
    let (result, seen, _) = run(&mut guest, u64::MAX, &Options { available: Box::new(|| 0), ..options() });
    assert!(matches!(result, Err(GrowError::HostMemory { .. })));
    assert!(seen.iter().any(|p| p.phase == Phase::AwaitingHostMemory));
    assert_eq!(guest.requested, guest.size);
}

#[test]
fn pages_that_cannot_be_made_end_it_with_the_guest_as_it_is() {
    let mut guest = Guest::new();
    let (result, _, _) = run(&mut guest, 400 * MIB, &options());
    assert!(matches!(result, Err(GrowError::Memory(MemoryError::Exhausted { .. }))));
    assert_eq!(guest.requested, guest.size);
}

#[test]
fn a_vm_that_ends_while_it_grows_is_no_success() {
    let mut guest = Guest { dies_at: Some(256 * MIB), ..Guest::new() };
    let (result, seen, _) = run(&mut guest, u64::MAX, &options());
    assert!(matches!(result, Err(GrowError::Monitor(MonitorError::Gone))));
    assert!(matches!(seen.last().unwrap().phase, Phase::Failed(_)));
}
