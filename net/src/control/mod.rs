// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The running switch and the ways to talk to it.
//!
//! - [`config`]: what a user says; [`daemon`]: the running whole; [`sandbox`]: what it gives up.
//! - `services`: which of its own [services](crate::service) it has, and what they give to whom.
//! - [`keeper`]: the process that keeps the rights to open things, at the other end of a [`link`].
//! - `log`: what both say.
//! - [`cli`] and [`socket`]: commands; [`metrics`]: counters for Prometheus; [`top`]: counters for people.

pub mod cli;
pub mod config;
pub mod daemon;
pub(crate) mod keeper;
pub(crate) mod link;
mod log;
pub mod metrics;
pub mod sandbox;
mod services;
pub mod socket;
pub mod top;
