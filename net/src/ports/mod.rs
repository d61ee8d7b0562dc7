// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM's network card as the switch has it.
//!
//! - [`endpoint`]: a port's socket, and [`access`]: who may connect; [`protocol`]: the vhost-user messages on it.
//! - [`port`]: a port's queues; [`counters`]: what is counted; [`announce`]: a guest that has come from another host.

pub mod access;
pub(crate) mod announce;
pub mod counters;
pub mod endpoint;
pub mod port;
pub mod protocol;
