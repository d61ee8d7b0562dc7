// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands: [`cli`] parses and dispatches them, [`client`] asks a supervisor. Each of the other modules has one command, or a few
//! that are alike.

pub mod carried;
pub mod clean;
#[allow(clippy::print_stderr, clippy::print_stdout, reason = "commands talk to the terminal")]
pub mod cli;
pub mod client;
pub mod config;
pub mod copy;
pub mod doctor;
pub mod events;
pub mod guest_doctor;
pub mod logs;
pub mod names;
pub mod net;
pub mod noise;
pub mod ps;
pub mod start;
pub mod terminal;
pub mod top;
pub mod topology;
pub mod up;
pub mod upgrade;
pub mod zone;
