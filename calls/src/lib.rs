// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Calls between a client and a server that share memory, or only a stream.
//!
//! A [`Link`] is one side of a channel: records go out by [`Tx`], come in by [`Rx`], bulk data lies in the [`Window`], and a
//! side that has nothing to do sleeps on its [`Bell`]. Nothing here knows what a record means. The transports differ
//! in what carries the records; everything above is the same and so are the tests:
//!
//! - [`ring`]: the shared-memory protocol: records, one release store per batch, sleep without lost wake-ups.
//! - [`try_lock`]: the lock by which several threads read one ring, one at a time.
//! - [`memory`]: mappings, sealed memfds, ring memory, the window.
//! - [`spin`]: polling before sleep.
//! - [`process`]: between processes of one host: a memfd and eventfds, passed over a Unix socket.
//! - `rings`: a link over rings in memory that two processes share.
//! - [`zone`]: between a VM and a server: channels in a zone's CALLS area, a device of the guest's kernel, doorbells.
//! - [`stream`]: TCP and vsock, where no memory is shared: frames; the window is pushed explicitly.
//! - [`children`]: descriptors that forked processes don't keep.
//! - [`hello`]: the handshake that compares builds before the first record.
//! - [`mod@say`]: lines on the standard error, without a panic and without waiting.

#![deny(missing_docs)]

pub mod children;
pub mod hello;
pub mod memory;
pub mod process;
pub mod ring;
mod rings;
pub mod say;
pub mod spin;
pub mod stream;
pub mod try_lock;
pub mod zone;

pub use memory::Window;
use std::sync::Arc;

/// The reason why a channel can't be used (any more).
#[derive(Debug)]
pub enum Error {
    /// The peer wrote something that makes no sense; the channel is given up.
    Broken(&'static str),
    /// The peer is gone.
    Closed,
    /// A record is longer than the transport carries.
    TooLong {
        /// Bytes of the record.
        len: usize,
        /// Bytes of the longest record of this transport.
        max: usize,
    },
    /// The two sides don't fit each other; the text says how and what to do.
    Refused(String),
    /// The operating system said no.
    Io(std::io::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Broken(what) => {
                write!(f, "the peer broke the protocol: {what}; the connection was given up")
            }
            Error::Closed => write!(f, "the peer is gone"),
            Error::TooLong { len, max } => write!(f, "a record of {len} bytes; this transport carries {max}"),
            Error::Refused(why) => write!(f, "{why}"),
            Error::Io(e) => write!(f, "{e}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    fn from(e: std::io::Error) -> Self {
        Error::Io(e)
    }
}

/// The outgoing direction.
pub trait Tx: Send {
    /// Puts one record, the concatenation of `parts`, at the end of the batch. `false`: no room now; see [`Tx::arm_room`].
    fn try_send(&mut self, parts: &[&[u8]]) -> Result<bool, Error>;
    /// Hands the batch to the peer and wakes it if it sleeps.
    fn publish(&mut self) -> Result<(), Error>;
    /// Says that this side waits for room. `true`: there is still none, sleep on [`Link::room`]; `false`: try again.
    fn arm_room(&mut self) -> Result<bool, Error>;
    /// The longest record.
    fn max_record(&self) -> usize;
    /// Makes `len` bytes of the window from `offset` visible to the peer before the next record. Free where memory is shared.
    fn push_window(&mut self, offset: u64, len: u64) -> Result<(), Error>;
    /// Returns whether the peer sees the window without [`Tx::push_window`].
    fn shares_window(&self) -> bool;
}

/// The incoming direction.
pub trait Rx: Send {
    /// Copies the next record into `into`; `false`: none is there.
    fn try_recv(&mut self, into: &mut Vec<u8>) -> Result<bool, Error>;
    /// Says that this side is about to sleep. `true`: nothing is there, sleep on [`Link::bell`]; `false`: there is something.
    fn arm(&mut self) -> Result<bool, Error>;
    /// Says that this side is awake.
    fn disarm(&mut self);
}

/// The wake-up of one side. A ring wakes at least one sleeper, and is kept if no thread sleeps.
pub trait Bell: Send + Sync {
    /// Sleeps until rung; may return early. [`Error::Closed`]: the peer is gone.
    fn wait(&self) -> Result<(), Error>;
    /// Wakes a sleeper of this very side.
    fn ring(&self);
}

/// One side of a channel.
pub struct Link {
    /// Outgoing records.
    pub tx: Box<dyn Tx>,
    /// Incoming records.
    pub rx: Box<dyn Rx>,
    /// Rung when something came in while this side slept.
    pub bell: Arc<dyn Bell>,
    /// Rung when there is room after [`Tx::arm_room`].
    pub room: Arc<dyn Bell>,
    /// Bulk data.
    pub window: Arc<Window>,
    /// Readable at its end when the peer is gone.
    pub gone: children::NotInChildren,
}

/// Sends one record, waiting for room as long as the peer lives. Publishes first what was sent before.
pub fn send(tx: &mut dyn Tx, room: &dyn Bell, parts: &[&[u8]]) -> Result<(), Error> {
    while !tx.try_send(parts)? {
        tx.publish()?;
        if tx.arm_room()? {
            room.wait()?;
        }
    }
    Ok(())
}
