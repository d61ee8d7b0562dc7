// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A shim: a small process that stands beside each thing that must live on when the supervisor ends, as containerd's shim and conmon do.
//!
//! A shim has at most one child at a time, a QEMU, a switch or an accelerator's server, which the kernel kills when the shim ends. It keeps
//! descriptors by name for whoever manages the child: the child's sockets, a zone's memory, and a record of what the manager knows. It writes the
//! console of a VM and the log of its QEMU. It decides nothing.
//!
//! Managers come and go. They find a shim by its socket in the project's folder, and speak [`wire`]: one message a packet, with descriptors. The one that
//! started the child may have died since: the next one reads the record, and goes on. A shim ends when it is told to ([`Request::End`]).
//!
//! - [`wire`]: the messages; [`process`]: the shim itself; [`handle`]: a manager's side of it; `streams`: consoles and logs.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub mod handle;
pub mod process;
mod streams;
pub mod wire;

pub use handle::Shim;

/// The ending of the name of a shim's socket in the project's folder.
pub const EXTENSION: &str = "shim";

/// The beginning of the names of what is closed when the child ends.
pub const WITH_CHILD: &str = "child.";

/// The name under which a manager keeps what it knows.
pub const RECORD: &str = "record";

/// The program that a shim is to start. Descriptors come with the message, in the order of `places`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Order {
    /// The program's file; `None`: this program.
    pub program: Option<PathBuf>,
    pub arguments: Vec<String>,
    /// Added to the shim's own environment.
    pub environment: BTreeMap<String, String>,
    pub places: Vec<Place>,
    /// It does not hear the signals by which a service manager ends a whole session or unit at once (SIGTERM, SIGHUP).
    pub shielded: bool,
}

/// The use of a descriptor that comes with an [`Order`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Place {
    /// The child inherits it under this number.
    Child(RawFd),
    /// The file cgroup.procs of the cgroup that the child enters before it begins.
    Group,
    /// The shim writes what comes from it to the log at this path, and shows it to those who watch.
    Stream(Stream, PathBuf),
}

/// What a VM says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stream {
    /// The guest's serial console.
    Console,
    /// The output of QEMU itself.
    Log,
}

/// How a stream is watched.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Watch {
    pub stream: Stream,
    /// Bytes of its end that come first.
    pub recent: usize,
    /// Until the child ends; else those of the next child are shown, too.
    pub one_child: bool,
}

/// A manager's request. Each has one [`Reply`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Answer with the state.
    Look,
    /// Start a child. The one before has ended.
    Start(Order),
    /// Answer when the child has ended.
    Wait,
    /// Keep the descriptors that come with this, under these names; those that were kept under them are closed.
    Put(Vec<String>),
    /// Close what is kept under these names.
    Remove(Vec<String>),
    /// Answer with the descriptors of these names; unknown names are left out.
    Get(Vec<String>),
    /// Show a stream to the socket that comes with this, and type what comes from it.
    Watch(Watch),
    /// Send those away who watch: no child follows.
    Unwatch,
    /// Serve the connection that comes with this, too.
    Connect,
    /// Listen at the socket that comes with this from now on.
    Listen,
    /// End, and with it the child.
    End,
}

/// The answer to a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    Done,
    /// The state, with a pidfd of a child that runs.
    State(State),
    /// The descriptors of these names.
    Descriptors(Vec<String>),
    Failed(String),
}

/// The state of a shim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The format of the messages.
    pub format: u32,
    /// The shim's own process.
    pub shim: u32,
    /// The child, also one that has ended.
    pub child: Option<u32>,
    /// The status with which the child has ended (waitpid(2)); `None`: it runs, or none was started.
    pub exit: Option<i32>,
    /// The names of the descriptors that are kept.
    pub kept: Vec<String>,
}

/// The format of the messages and of records, which a manager of another version may find.
pub const FORMAT: u32 = 1;
