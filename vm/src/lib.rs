// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Start, stop and watch the VMs of a compose file.
//!
//! `tombolo up` reads the file ([`compose`]), finds or starts the project's *supervisor*, a process of its own
//! ([`supervisor`]), and hands it the checked file over a control socket ([`control`]). The supervisor holds the zones
//! ([`zones`]), starts one QEMU per VM ([`machine`], [`qemu`]), follows each until it is ready, and then answers the other
//! commands ([`cli`]). It talks to QEMU and to the guests over inherited sockets only, and everything it starts is tied to
//! its own life ([`child`]): whichever process dies, by whatever signal, nothing stays behind.
//!
//! - [`compose`]: the file, and errors that name file, line and key.
//! - [`guestkit`]: which kernel and initramfs a VM boots.
//! - [`host`]: what the host has.
//! - [`state`]: the project's folder and the lock that tells whether its supervisor lives.
//! - [`control`], [`peer`]: what commands and supervisor say to each other, and the connection over which they do.
//! - [`supervisor`], [`session`]: the supervisor, and what in it lasts (exec, console).
//! - [`machine`]: one VM's life.
//! - [`mount`]: file systems of zones in its guest.
//! - [`growth`]: passed-through devices, and memory that arrives while the VM runs.
//! - [`qemu`]: command line, monitor, console, and whether KVM works.
//! - [`agent`], [`exec`]: the guest agent, and commands through it.
//! - [`log`]: logs that never fail.
//! - [`zones`]: zones as the supervisor holds them.
//! - [`netspec`], [`network`]: networks in the file, and the switch of each, which is a child of the supervisor.
//! - [`accelspec`], [`accelerator`]: accelerators in the file, and the server of each, another child.
//! - [`keeper`]: keeps such a child running.
//! - [`named`]: keys that are a table or a list of names.
//! - [`child`]: processes that never outlive this one.
//! - [`doctor`]: what this host can do.
//! - [`client`], [`cli`], [`top`]: the commands.

// In the supervisor a print that fails would be a panic: see `log`.
#![deny(clippy::print_stderr, clippy::print_stdout)]

pub mod accelerator;
pub mod accelspec;
pub mod agent;
pub mod child;
#[allow(clippy::print_stderr, clippy::print_stdout, reason = "commands talk to the terminal")]
pub mod cli;
#[allow(clippy::print_stderr, reason = "commands talk to the terminal")]
pub mod client;
pub mod compose;
pub mod control;
pub mod doctor;
pub mod exec;
pub mod growth;
pub mod guestkit;
pub mod host;
pub mod keeper;
pub mod log;
pub mod machine;
pub mod mount;
pub mod named;
pub mod netspec;
pub mod network;
pub mod peer;
pub mod qemu;
pub mod session;
pub mod state;
pub mod supervisor;
pub mod top;
pub mod zones;
