// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Virtqueues in guest memory.
//!
//! - [`memory`]: guest memory and address translation; [`dirty`]: the log of a migration; [`inflight`]: the state for a
//!   successor.
//! - [`ring`]: the device's side of split and packed rings; [`queue`]: a queue with its lock; [`features`]: the offered
//!   features.

pub mod dirty;
pub mod features;
pub mod inflight;
pub mod memory;
pub mod queue;
pub mod ring;
