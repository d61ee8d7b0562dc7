// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands: [`cli`] parses and dispatches them, [`client`] asks a supervisor, [`top`] and [`doctor`] print.

#[allow(clippy::print_stderr, clippy::print_stdout, reason = "commands talk to the terminal")]
pub mod cli;
#[allow(clippy::print_stderr, reason = "commands talk to the terminal")]
pub mod client;
pub mod copy;
pub mod doctor;
pub mod terminal;
pub mod top;
