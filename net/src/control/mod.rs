// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The running switch and its interfaces.
//!
//! - [`config`]: the user's settings; [`daemon`]: the running switch; [`sandbox`]: the rights that it gives up.
//! - `services`: its own [services](crate::service), and the addresses that they give to guests.
//! - [`keeper`]: the process that keeps the rights to open things, at the other end of a [`link`]. `uplinks`: their devices; `passt`: its
//!   connections to passt; `loopback`: the options that keep its guest from the host's loopback.
//! - `log`: the messages of both.
//! - [`cli`] and [`socket`]: commands; [`metrics`]: counters for Prometheus; [`top`]: counters for users.

pub mod cli;
pub mod config;
pub mod daemon;
pub(crate) mod keeper;
pub(crate) mod link;
mod log;
pub(crate) mod loopback;
pub mod metrics;
pub(crate) mod passt;
pub mod sandbox;
mod services;
pub mod socket;
pub mod top;
pub(crate) mod uplinks;
