// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One direction of a channel: a ring of records with one producer and one consumer.
//!
//! Four words, each on its own cache lines, and a power of two of data bytes. `head` and `tail` count bytes for ever;
//! a record is an 8-byte header (its length, and zero) and its bytes, padded to 8. A record never wraps: a header
//! with the length [`SKIP`] sends the consumer to the start of the data.
//!
//! The producer writes any number of records and then stores `head` once (release). No side rings the peer while it is
//! awake. Before it sleeps, a side sets its 'asleep' word, fences and looks again; the publishing side fences and then looks at that
//! word. So of two racing sides at least one sees the other (the model in `tests/ring_model.rs` tries all orders).
//!
//! A side trusts nothing that the peer can write: it copies positions once and checks them against its own position, it copies a record
//! out before it looks into it, and a position that makes no sense is [`Error::Broken`].

use crate::Error;
use std::sync::atomic::Ordering;

/// Length of a header that means 'go on at the start of the data'.
pub const SKIP: u32 = u32::MAX;
/// Bytes in front of each record.
pub const HEADER: u64 = 8;
/// Bytes of a cache line.
const LINE: u64 = 64;

/// The shared words of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Bytes produced so far; the producer writes it.
    Head = 0,
    /// Bytes consumed so far; the consumer writes it.
    Tail = 1,
    /// Not 0: the consumer sleeps, or is about to; ring its doorbell after publishing.
    ConsumerAsleep = 2,
    /// Not 0: the producer waits for room; ring its doorbell after consuming.
    ProducerAsleep = 3,
}

/// The memory of a ring, as one side sees it. Implemented over shared memory, and over a model in tests.
pub trait RingMem {
    /// Data bytes; a power of two, the same for the life of the ring, never read from shared memory.
    fn capacity(&self) -> u64;
    /// Loads a word.
    fn load(&self, word: Word, order: Ordering) -> u64;
    /// Stores a word.
    fn store(&self, word: Word, value: u64, order: Ordering);
    /// A sequentially consistent fence.
    fn fence(&self);
    /// Copies out of the data; `at + into.len() <= capacity`.
    fn read(&self, at: u64, into: &mut [u8]);
    /// Copies into the data; `at + from.len() <= capacity`.
    fn write(&self, at: u64, from: &[u8]);
    /// Announces that the bytes at `at` are written next: their cache line can be fetched meanwhile.
    fn writes_soon(&self, _at: u64) {}
}

/// Bytes a record of `len` bytes takes in the ring.
const fn room(len: u64) -> u64 {
    HEADER + len.div_ceil(8) * 8
}

/// The longest record a ring of `capacity` data bytes takes: a quarter, so that a skip always fits beside it.
pub const fn max_record(capacity: u64) -> usize {
    (capacity / 4 - HEADER) as usize
}

/// The writing side.
pub struct Producer<M> {
    mem: M,
    head: u64,
    published: u64,
    tail: u64,
}

impl<M: RingMem> Producer<M> {
    /// Starts at position 0 of a fresh ring.
    pub fn new(mem: M) -> Self {
        Producer { mem, head: 0, published: 0, tail: 0 }
    }

    /// The longest record.
    pub fn max_record(&self) -> usize {
        max_record(self.mem.capacity())
    }

    /// Writes one record, the concatenation of `parts`, without publishing it. `false`: no room now; what was written before is
    /// still unpublished. Errors: the record is longer than [`max_record`], or the peer's tail makes no sense.
    pub fn try_push(&mut self, parts: &[&[u8]]) -> Result<bool, Error> {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        if len > self.max_record() {
            return Err(Error::TooLong { len, max: self.max_record() });
        }
        let cap = self.mem.capacity();
        let need = room(len as u64);
        let to_end = cap - (self.head & (cap - 1));
        let skip = if to_end < need { to_end } else { 0 };
        if self.head + skip + need - self.tail > cap {
            let tail = self.mem.load(Word::Tail, Ordering::Acquire);
            if tail < self.tail || tail > self.published {
                return Err(Error::Broken("the reader's position is outside of what was written"));
            }
            self.tail = tail;
            if self.head + skip + need - tail > cap {
                return Ok(false);
            }
        }
        if skip != 0 {
            self.mem.write(self.head & (cap - 1), &u64::from(SKIP).to_le_bytes());
            self.head += skip;
        }
        let mut at = self.head & (cap - 1);
        self.mem.write(at, &(len as u64).to_le_bytes());
        at += HEADER;
        for part in parts {
            self.mem.write(at, part);
            at += part.len() as u64;
        }
        self.head += need;
        // The consumer has the next line from the last lap; the fence in publish() would wait for it.
        self.mem.writes_soon((self.head + LINE) & (cap - 1));
        Ok(true)
    }

    /// Makes all that was pushed visible, with one release store. `true`: the consumer sleeps, ring its doorbell.
    pub fn publish(&mut self) -> bool {
        if self.published == self.head {
            return false;
        }
        self.published = self.head;
        self.mem.store(Word::Head, self.head, Ordering::Release);
        self.mem.fence();
        if self.mem.load(Word::ConsumerAsleep, Ordering::Relaxed) != 0 {
            self.mem.store(Word::ConsumerAsleep, 0, Ordering::Relaxed);
            return true;
        }
        false
    }

    /// Says that this side will sleep until there is room, and looks again. `true`: still nothing was consumed since the
    /// last look, sleep on the doorbell; `false`: try again at once.
    pub fn arm(&mut self) -> Result<bool, Error> {
        self.mem.store(Word::ProducerAsleep, 1, Ordering::Relaxed);
        self.mem.fence();
        let tail = self.mem.load(Word::Tail, Ordering::Acquire);
        if tail < self.tail || tail > self.published {
            return Err(Error::Broken("the reader's position is outside of what was written"));
        }
        if tail != self.tail {
            self.mem.store(Word::ProducerAsleep, 0, Ordering::Relaxed);
            return Ok(false);
        }
        Ok(true)
    }
}

/// The reading side.
pub struct Consumer<M> {
    mem: M,
    tail: u64,
    head: u64,
    /// Consumed since the producer's 'asleep' word was last looked at.
    unlooked: bool,
}

/// The outcome of [`Consumer::try_pop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Popped {
    /// A record was copied out.
    Record,
    /// Nothing there.
    Empty,
    /// Nothing there, and the producer waits for room: ring its doorbell.
    EmptyWake,
}

impl<M: RingMem> Consumer<M> {
    /// Starts at position 0 of a fresh ring.
    pub fn new(mem: M) -> Self {
        Consumer { mem, tail: 0, head: 0, unlooked: false }
    }

    /// Copies the next record into `into`, whose former contents are dropped.
    pub fn try_pop(&mut self, into: &mut Vec<u8>) -> Result<Popped, Error> {
        let cap = self.mem.capacity();
        loop {
            if self.tail == self.head && !self.look()? {
                return Ok(self.empty());
            }
            let available = self.head - self.tail;
            let at = self.tail & (cap - 1);
            let mut header = [0; HEADER as usize];
            self.mem.read(at, &mut header);
            let header = u64::from_le_bytes(header);
            if header == u64::from(SKIP) {
                let skip = cap - at;
                if skip > available {
                    return Err(Error::Broken("a skip reaches beyond what was written"));
                }
                self.consumed(skip);
                continue;
            }
            let need = match header {
                len if len as usize <= max_record(cap) => room(len),
                _ => return Err(Error::Broken("a record is longer than the ring allows")),
            };
            if need > available || need > cap - at {
                return Err(Error::Broken("a record reaches beyond what was written"));
            }
            into.clear();
            into.resize(header as usize, 0);
            self.mem.read(at + HEADER, into);
            self.consumed(need);
            return Ok(Popped::Record);
        }
    }

    fn consumed(&mut self, bytes: u64) {
        self.tail += bytes;
        self.mem.store(Word::Tail, self.tail, Ordering::Release);
        self.unlooked = true;
    }

    /// Copies and checks the producer's position; whether there is something to read.
    fn look(&mut self) -> Result<bool, Error> {
        let head = self.mem.load(Word::Head, Ordering::Acquire);
        if head < self.head || head - self.tail > self.mem.capacity() || head % 8 != 0 {
            return Err(Error::Broken("the writer's position is outside of the ring"));
        }
        self.head = head;
        Ok(head != self.tail)
    }

    fn empty(&mut self) -> Popped {
        if self.unlooked {
            self.unlooked = false;
            self.mem.fence();
            if self.mem.load(Word::ProducerAsleep, Ordering::Relaxed) != 0 {
                self.mem.store(Word::ProducerAsleep, 0, Ordering::Relaxed);
                return Popped::EmptyWake;
            }
        }
        Popped::Empty
    }

    /// Says that this side is about to sleep, and looks again. `true`: the ring is empty, sleep on the doorbell.
    pub fn arm(&mut self) -> Result<bool, Error> {
        self.mem.store(Word::ConsumerAsleep, 1, Ordering::Relaxed);
        self.mem.fence();
        Ok(self.tail == self.head && !self.look()?)
    }

    /// Says that this side is awake, so that no doorbell is rung in vain.
    pub fn disarm(&mut self) {
        self.mem.store(Word::ConsumerAsleep, 0, Ordering::Relaxed);
    }
}
