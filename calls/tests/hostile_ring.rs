// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that writes anything, at any time, into the ring it shares with us.

use proptest::prelude::*;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use tombolo_calls::Error;
use tombolo_calls::ring::{Consumer, Popped, Producer, RingMem, Word, max_record};

const CAPACITY: u64 = 4096;

/// Ring memory whose contents the test may change between any two accesses.
#[derive(Clone)]
struct Memory(Rc<RefCell<State>>);

struct State {
    words: [u64; 4],
    data: Vec<u8>,
    /// After each access, the next of these is written: a word (0-3) and its value, or (4…) a data offset and a byte.
    attacks: Vec<(u16, u64)>,
    accesses: usize,
}

impl Memory {
    fn new(attacks: Vec<(u16, u64)>) -> Memory {
        Memory(Rc::new(RefCell::new(State {
            words: [0; 4],
            data: vec![0; CAPACITY as usize],
            attacks,
            accesses: 0,
        })))
    }
    fn attack(&self) {
        let mut s = self.0.borrow_mut();
        s.accesses += 1;
        if let Some((place, value)) = s.attacks.pop() {
            match place % 5 {
                w @ 0..4 => s.words[w as usize] = value,
                _ => {
                    let at = usize::from(place / 5) * 8 % (CAPACITY as usize - 8);
                    s.data[at..at + 8].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }
}

impl RingMem for Memory {
    fn capacity(&self) -> u64 {
        CAPACITY
    }
    fn load(&self, word: Word, _: Ordering) -> u64 {
        let value = self.0.borrow().words[word as usize];
        self.attack();
        value
    }
    fn store(&self, word: Word, value: u64, _: Ordering) {
        self.0.borrow_mut().words[word as usize] = value;
        self.attack();
    }
    fn fence(&self) {}
    fn read(&self, at: u64, into: &mut [u8]) {
        // The claim under test: never outside, whatever was in the ring. (The slice operation would panic.)
        into.copy_from_slice(&self.0.borrow().data[at as usize..][..into.len()]);
        self.attack();
    }
    fn write(&self, at: u64, from: &[u8]) {
        self.0.borrow_mut().data[at as usize..][..from.len()].copy_from_slice(from);
        self.attack();
    }
}

/// Values that an attacker would try: near the edges, or anything.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0u64..20_000),
        (0u64..2_000).prop_map(|v| v * 8),
        Just(u64::from(u32::MAX)),
        (0u64..64).prop_map(|v| u64::MAX - v),
        (0u64..2_000).prop_map(|v| max_record(CAPACITY) as u64 + v - 1_000),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn whatever_a_writer_does_the_reader_stays_inside_and_ends(attacks in prop::collection::vec((any::<u16>(), value()), 0..200)) {
        let memory = Memory::new(attacks);
        let mut ring = Consumer::new(memory.clone());
        let mut record = Vec::new();
        for _ in 0..300 {
            match ring.try_pop(&mut record) {
                Ok(Popped::Record) => prop_assert!(record.len() <= max_record(CAPACITY)),
                Ok(_) => { let _broken = ring.arm(); }
                Err(Error::Broken(_)) => break,
                Err(e) => prop_assert!(false, "unexpected {e}"),
            }
        }
        // Skips and records both move on, so a pop ends within one lap.
        prop_assert!(memory.0.borrow().accesses < 100_000);
    }

    #[test]
    fn whatever_a_reader_does_the_writer_stays_inside(attacks in prop::collection::vec((any::<u16>(), value()), 0..200), lengths in prop::collection::vec(0usize..1500, 1..60)) {
        let mut ring = Producer::new(Memory::new(attacks));
        for len in lengths {
            match ring.try_push(&[&vec![7; len]]) {
                Ok(_) => { ring.publish(); let _broken = ring.arm(); }
                Err(Error::TooLong { .. }) => prop_assert!(len > max_record(CAPACITY)),
                Err(Error::Broken(_)) => break,
                Err(e) => prop_assert!(false, "unexpected {e}"),
            }
        }
    }

    #[test]
    fn between_honest_sides_every_record_arrives_whole_and_in_order(lengths in prop::collection::vec(0usize..1016, 1..200)) {
        let memory = Memory::new(Vec::new());
        let (mut tx, mut rx) = (Producer::new(memory.clone()), Consumer::new(memory));
        let mut record = Vec::new();
        let (mut sent, mut got) = (0u8, 0u8);
        for len in lengths {
            while !tx.try_push(&[&[sent], &vec![sent; len]]).expect("honest") {
                tx.publish();
                prop_assert_eq!(rx.try_pop(&mut record).expect("honest"), Popped::Record);
                prop_assert!(record.iter().all(|b| *b == got));
                got = got.wrapping_add(1);
            }
            sent = sent.wrapping_add(1);
            tx.publish();
        }
        while rx.try_pop(&mut record).expect("honest") == Popped::Record {
            prop_assert!(record.iter().all(|b| *b == got));
            got = got.wrapping_add(1);
        }
        prop_assert_eq!(sent, got);
    }
}
