// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ports: a VM's network card on the switch's side.
//!
//! - [`endpoint`]: a port's socket, and [`access`]: its permissions; [`protocol`]: the vhost-user messages on it.
//! - [`port`]: a port's queues; [`counters`]: its counters; [`announce`]: announcements after a migration.

pub mod access;
pub(crate) mod announce;
pub mod counters;
pub mod endpoint;
pub mod port;
pub mod protocol;
