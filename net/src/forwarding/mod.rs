// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The path of a frame from a sender's ring into a receiver's.
//!
//! - [`worker`]: the thread that polls and sleeps; [`balance`]: which worker carries which queue.
//! - [`forward`]: a pass over a queue; `route`: the receivers of its frames; [`deliver`]: the copy; [`fallback`]: the copy
//!   that is checksummed or segmented first.
//! - [`held`]: a frame that waits, and [`credit`]: how long it may; `opens`: the receivers whose rings a pass holds.
//! - [`table`]: which port owns a MAC address, [`learn`]: which port has been seen to use one; [`multicast`]: which port has
//!   joined which multicast group.
//! - [`watch`]: the thread that frees a worker which a front-end's eventfd blocks.
//! - [`switch`]: passes a change to the workers; [`view`]: all ports at one moment.
//! - [`capture`]: frames for Wireshark.

pub mod balance;
pub mod capture;
pub mod credit;
pub mod deliver;
pub mod fallback;
pub mod forward;
pub mod held;
pub mod learn;
pub mod multicast;
pub(crate) mod opens;
mod route;
pub mod switch;
pub mod table;
pub mod view;
pub mod watch;
pub mod worker;
