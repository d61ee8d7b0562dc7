// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A project at run time: its supervisor, what the supervisor holds, and how commands talk to it.
//!
//! - [`supervisor`]: the process that manages a project's VMs; [`session`]: what in it lasts (exec); [`revival`]: its start.
//! - [`state`]: the project's folder, and the lock and the socket by which its supervisor is found.
//! - [`changes`]: the difference between what runs and what the compose file says, as actions; [`journal`]: what happened, for `tombolo events`.
//! - [`preflight`]: what can be wrong with a start, found out before anything is started.
//! - [`control`], [`peer`]: the requests and answers, and the connection over which they go; [`patience`]: how long another process is waited for.
//! - [`silent`]: what is known of a project whose supervisor does not answer.
//! - [`zones`]: zones as the supervisor holds them.
//! - [`network`], [`accelerator`]: the switch of a network and the server of an accelerator, each a child process;
//!   [`keeper`] keeps such a child running; [`owner`]: the server of an accelerator in a VM.

pub mod accelerator;
pub mod changes;
pub mod control;
pub mod journal;
pub mod keeper;
pub mod network;
pub mod owner;
pub mod patience;
pub mod peer;
pub mod preflight;
pub mod revival;
pub mod services;
pub mod session;
pub mod silent;
pub mod state;
pub mod stopped;
pub mod supervisor;
pub mod zones;
