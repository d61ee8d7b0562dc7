// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ring's protocol under a model checker: every interleaving of a producer and of consumers that sleep and wake each other, with the
//! reorderings that the memory model allows (and at most [`PREEMPTIONS`] involuntary switches). Built only with `RUSTFLAGS="--cfg loom"`: see calls/README.md.
#![cfg(loom)]

use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use std::sync::atomic::Ordering as StdOrdering;
use tombolo_calls::ring::{Consumer, Popped, Producer, RingMem, Word};
use tombolo_calls::try_lock::TryLock;

/// Enough for every bug known so far, and little enough to end within seconds.
const PREEMPTIONS: usize = 3;

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(check);
}

/// Ring memory in the model: words are the model's atomics, the data is one cell per 8 bytes, read and written relaxed, so that a missing
/// release or acquire shows as stale bytes.
struct Model {
    words: [AtomicU64; 4],
    data: Vec<AtomicU64>,
}

#[derive(Clone)]
struct Shared(Arc<Model>);

fn same(order: StdOrdering) -> Ordering {
    match order {
        StdOrdering::Relaxed => Ordering::Relaxed,
        StdOrdering::Acquire => Ordering::Acquire,
        StdOrdering::Release => Ordering::Release,
        _ => Ordering::SeqCst,
    }
}

impl RingMem for Shared {
    fn capacity(&self) -> u64 {
        self.0.data.len() as u64 * 8
    }
    fn load(&self, word: Word, order: StdOrdering) -> u64 {
        self.0.words[word as usize].load(same(order))
    }
    fn store(&self, word: Word, value: u64, order: StdOrdering) {
        self.0.words[word as usize].store(value, same(order));
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
    fn read(&self, at: u64, into: &mut [u8]) {
        for (i, chunk) in into.chunks_mut(8).enumerate() {
            let value = self.0.data[at as usize / 8 + i].load(Ordering::Relaxed);
            chunk.copy_from_slice(&value.to_le_bytes()[..chunk.len()]);
        }
    }
    fn write(&self, at: u64, from: &[u8]) {
        for (i, chunk) in from.chunks(8).enumerate() {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            self.0.data[at as usize / 8 + i].store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
    }
}

/// A doorbell: keeps a ring until a thread waits.
#[derive(Default)]
struct Doorbell(Mutex<bool>, Condvar);

impl Doorbell {
    fn ring(&self) {
        *self.0.lock().expect("no panics") = true;
        self.1.notify_one();
    }
    fn wait(&self) {
        let mut rung = self.0.lock().expect("no panics");
        while !*rung {
            rung = self.1.wait(rung).expect("no panics");
        }
        *rung = false;
    }
}

fn ring(cells: usize) -> Shared {
    let words = std::array::from_fn(|_| AtomicU64::new(0));
    Shared(Arc::new(Model { words, data: (0..cells).map(|_| AtomicU64::new(0)).collect() }))
}

/// If a wake-up could be lost, the model finds the schedule in which both sides sleep, and reports a deadlock.
fn all_arrive(cells: usize, records: u64) {
    model(move || {
        let shared = ring(cells);
        let (data, room) = (Arc::new(Doorbell::default()), Arc::new(Doorbell::default()));
        let consumer = {
            let (shared, data, room) = (shared.clone(), data.clone(), room.clone());
            loom::thread::spawn(move || {
                let mut ring = Consumer::new(shared);
                let mut record = Vec::new();
                let mut seen = 0;
                while seen < records {
                    match ring.try_pop(&mut record).expect("an honest producer") {
                        Popped::Record => {
                            assert_eq!(record, seen.to_le_bytes(), "records arrive whole and in order");
                            seen += 1;
                            continue;
                        }
                        Popped::EmptyWake => room.ring(),
                        Popped::Empty => {}
                    }
                    if ring.arm().expect("an honest producer") {
                        data.wait();
                    }
                }
                if ring.try_pop(&mut record).expect("an honest producer") == Popped::EmptyWake {
                    room.ring();
                }
            })
        };
        let mut ring = Producer::new(shared);
        for i in 0..records {
            while !ring.try_push(&[&i.to_le_bytes()]).expect("an honest consumer") {
                if ring.publish() {
                    data.ring();
                }
                if ring.arm().expect("an honest consumer") {
                    room.wait();
                }
            }
            if ring.publish() {
                data.ring();
            }
        }
        consumer.join().expect("the consumer's assertions hold");
    });
}

#[test]
fn no_wakeup_is_lost_when_the_consumer_sleeps() {
    all_arrive(16, 2);
}

#[test]
fn no_wakeup_is_lost_when_the_ring_is_full_and_the_producer_sleeps() {
    // Room for four records of 16 bytes.
    all_arrive(8, 5);
}

/// A server's threads: one at a time holds the ring's lock, until it finds the ring empty and asks for the doorbell; all of them sleep on it.
struct Served {
    ring: TryLock<Consumer<Shared>>,
    bell: Doorbell,
    seen: AtomicU64,
}

impl Served {
    fn serve(&self, records: u64) {
        let mut record = Vec::new();
        while self.seen.load(Ordering::Acquire) < records {
            if let Some(mut ring) = self.ring.try_lock_or_flag() {
                ring.disarm();
                while ring.try_pop(&mut record).expect("an honest producer") == Popped::Record
                    || !ring.arm().expect("an honest producer")
                {
                    if !record.is_empty() {
                        self.seen.fetch_add(1, Ordering::AcqRel);
                        record.clear();
                    }
                }
                if ring.unlock() {
                    continue;
                }
                if self.seen.load(Ordering::Acquire) == records {
                    break;
                }
            }
            self.bell.wait();
        }
        // Each thread wakes the next, as at the end of a session.
        self.bell.ring();
    }
}

#[test]
fn no_wakeup_is_lost_among_threads_that_take_turns_to_lead() {
    const RECORDS: u64 = 1;
    model(|| {
        let shared = ring(8);
        let served = Arc::new(Served {
            ring: TryLock::new(Consumer::new(shared.clone())),
            bell: Doorbell::default(),
            seen: AtomicU64::new(0),
        });
        let threads = [(); 2].map(|()| {
            let served = served.clone();
            loom::thread::spawn(move || served.serve(RECORDS))
        });
        let mut ring = Producer::new(shared);
        for i in 0..RECORDS {
            assert!(ring.try_push(&[&i.to_le_bytes()]).expect("honest consumers"), "there is room");
            if ring.publish() {
                served.bell.ring();
            }
        }
        for thread in threads {
            thread.join().expect("it ends by itself");
        }
    });
}
