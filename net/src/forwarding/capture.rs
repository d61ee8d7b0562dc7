// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Captures of a port: copies of its frames, as pcapng (draft-ietf-opsawg-pcapng).
//!
//! A worker only tries the lock of a bounded buffer; frames that it can't put there are counted as missed. A reader
//! swaps the buffer out and writes it at its own pace.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::forwarding::deliver::Frame;

/// The largest number of bytes that wait for the reader.
const ROOM: usize = 8 << 20;

/// The direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The port's guest sent it.
    FromGuest,
    /// The port's guest received it.
    ToGuest,
}

/// A capture of one port.
#[derive(Debug)]
pub struct Capture {
    blocks: Mutex<Vec<u8>>,
    snap: u32,
    missed: AtomicU64,
}

fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend([0; 4]);
    body(out);
    let len = (out.len() - start + 4) as u32;
    out.extend(len.to_le_bytes());
    out[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    out.extend(code.to_le_bytes());
    out.extend((value.len() as u16).to_le_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}

impl Capture {
    /// Makes a capture that keeps at most `snap` bytes of each frame.
    #[must_use]
    pub fn new(snap: u32) -> Self {
        Self { blocks: Mutex::new(Vec::with_capacity(ROOM)), snap, missed: AtomicU64::new(0) }
    }

    /// Returns the first blocks of a file: section header and the interface, which is called `name`.
    #[must_use]
    pub fn preamble(&self, name: &str) -> Vec<u8> {
        let mut out = Vec::new();
        block(&mut out, 0x0a0d_0d0a, |out| {
            out.extend(0x1a2b_3c4du32.to_le_bytes());
            out.extend([1, 0, 0, 0]);
            out.extend(u64::MAX.to_le_bytes());
            option(out, 4, b"tombolo");
            option(out, 0, &[]);
        });
        block(&mut out, 1, |out| {
            // Ethernet.
            out.extend([1, 0, 0, 0]);
            out.extend(self.snap.to_le_bytes());
            option(out, 2, name.as_bytes());
            // Nanoseconds.
            option(out, 9, &[9]);
            option(out, 0, &[]);
        });
        out
    }

    /// Keeps a copy of a frame, if there is room.
    #[cold]
    pub(crate) fn take(&self, frame: &Frame<'_>, direction: Direction) {
        let keep = frame.len.min(self.snap) as usize;
        let Ok(mut out) = self.blocks.try_lock() else {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        if out.len() + keep + 64 > ROOM {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let time = now();
        block(&mut out, 6, |out| {
            out.extend(0u32.to_le_bytes());
            out.extend(((time >> 32) as u32).to_le_bytes());
            out.extend((time as u32).to_le_bytes());
            out.extend((keep as u32).to_le_bytes());
            out.extend(frame.len.to_le_bytes());
            let end = out.len() + keep;
            out.extend_from_slice(&frame.prefix[..frame.prefix.len().min(keep)]);
            let mut skip = frame.skip as usize;
            for s in frame.rest {
                let n = (s.len as usize - skip).min(end - out.len());
                let at = out.len();
                out.resize(at + n, 0);
                // SAFETY: n bytes from skip on are mapped, and the vector has just grown by n.
                unsafe { std::ptr::copy_nonoverlapping(s.ptr.add(skip), out.as_mut_ptr().add(at), n) };
                skip = 0;
            }
            out.resize(out.len().next_multiple_of(4), 0);
            let flags = if direction == Direction::ToGuest { 1u32 } else { 2 };
            option(out, 2, &flags.to_le_bytes());
            option(out, 0, &[]);
        });
    }

    /// Writes the captured frames to `to`; returns how many bytes.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn drain(&self, to: &mut dyn Write, spare: &mut Vec<u8>) -> io::Result<usize> {
        spare.clear();
        spare.reserve(ROOM);
        std::mem::swap(&mut *self.blocks.lock().unwrap_or_else(PoisonError::into_inner), spare);
        to.write_all(spare)?;
        Ok(spare.len())
    }

    /// Returns the last block of a file: how many frames were missed.
    #[must_use]
    pub fn statistics(&self) -> Vec<u8> {
        let (mut out, time) = (Vec::new(), now());
        block(&mut out, 5, |out| {
            out.extend(0u32.to_le_bytes());
            out.extend(((time >> 32) as u32).to_le_bytes());
            out.extend((time as u32).to_le_bytes());
            option(out, 5, &self.missed().to_le_bytes());
            option(out, 0, &[]);
        });
        out
    }

    /// Returns the frames for which there was no room.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}
