// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Start, stop and watch the VMs of a compose file.
//!
//! `tombolo up` reads the file ([`compose`]), finds or starts the project's *supervisor*, a process of its own
//! ([`project::supervisor`]), and hands it the checked file over a control socket ([`project::control`]). The supervisor holds the zones
//! ([`project::zones`]), starts one QEMU per VM ([`machine`], [`qemu`]), follows each until it is ready, and then answers the other
//! commands ([`commands`]). It talks to QEMU and to the guests over inherited sockets only. Each QEMU is the child of a process that
//! stands beside it ([`shim`]): when the supervisor dies, by whatever signal, the next one finds and goes on with all of them.
//!
//! - [`compose`]: the file, and errors that name file, line and key.
//! - [`project`]: the supervisor and what it holds: zones, networks, accelerators; the control socket.
//! - [`machine`]: one VM's life.
//! - [`qemu`]: command line, monitor, console, and whether KVM works.
//! - [`guest`]: the guest's kernel and image, its agent, commands in it, its mounts.
//! - [`commands`]: what a user types.
//! - [`shim`]: the process beside each VM.
//! - [`child`]: processes that never outlive this one; [`host`]: what the host has; [`log`]: logs that never fail; [`moment`]: instants
//!   that another program understands; [`thread`]: threads where none may be had.

// In the supervisor a print that fails would be a panic: see `log`.
#![deny(clippy::print_stderr, clippy::print_stdout)]

pub mod child;
pub mod commands;
pub mod compose;
pub mod guest;
pub mod host;
pub mod log;
pub mod machine;
pub mod moment;
pub mod project;
pub mod qemu;
pub mod shim;
pub mod thread;

/// The version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
