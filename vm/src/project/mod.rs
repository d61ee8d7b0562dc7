// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A project at run time: its supervisor, what the supervisor holds, and how commands talk to it.
//!
//! - [`supervisor`]: the process that holds a project's VMs; [`session`]: what in it lasts (exec, console).
//! - [`state`]: the project's folder and the lock that tells whether its supervisor lives.
//! - [`control`], [`peer`]: the requests and answers, and the connection over which they go.
//! - [`zones`]: zones as the supervisor holds them.
//! - [`network`], [`accelerator`]: the switch of a network and the server of an accelerator, each a child process;
//!   [`keeper`] keeps such a child running; [`owner`]: the server of an accelerator in a VM.

pub mod accelerator;
pub mod control;
pub mod keeper;
pub mod network;
pub mod owner;
pub mod peer;
pub mod session;
pub mod state;
pub mod supervisor;
pub mod zones;
