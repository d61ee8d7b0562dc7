// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The half of a client library that knows no API.
//!
//! A program's thread encodes a call straight into the batch ([`connection`]) and goes on, or waits for its result: it spins for a
//! moment reading the ring itself, then sleeps; of several sleeping threads one owns the doorbell and delivers to the others.
//! Asynchronous transfers get a ticket, redeemed when the server says that the device is done; callbacks run on a thread of their own.
//!
//! - [`connection`]: requests, replies, tickets, callbacks; counts of calls and waits per function.
//! - [`connect`]: finds the server from an address.
//! - `here`: tells a process from one that was forked from it.
//! - [`mod@include`]: files that a kernel's source includes, which go along.
//! - [`objects`]: handles: addresses in an arena that always can be read, so that any value a program passes can be checked.
//! - [`staging`]: allocates ranges of the window.
//! - [`trace`]: what a process's calls cost, for `tombolo accel trace`.
//! - `waiter`: a thread that waits for a reply.

#![deny(missing_docs)]

pub mod connect;
pub mod connection;
mod here;
pub mod include;
pub mod objects;
pub mod staging;
pub mod trace;
mod waiter;
