// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The wall around a worker. A worker runs kernels that its client wrote, in its own address space if the device is the CPU; so whatever the
//! worker may do, the client may do. Nothing here knows accelerators: any process that runs native code of others can stand behind it.
//!
//! The stages, in order, and what each takes away:
//!
//! 1. [`spawn`], by the supervisor: the worker begins as process 1 of its own PID, mount, network, IPC, UTS and cgroup namespaces, with
//!    the descriptors that it was given and no others, and with the variables that drivers read. Other processes, their sockets and their System V
//!    memory don't exist for it; what it forks dies with it.
//! 2. [`view`], by the worker before it reads a byte of its client: a root of its own with programs, libraries, the device's nodes, the kernel's
//!    facts about devices, all read-only, its own `/proc`, and a `/tmp` of limited size that nobody else sees and that ends with it.
//! 3. [`limits`]: memory, processes, descriptors; no core dump.
//! 4. [`rules`] (Landlock): the same view once more, should a mount be wrong; no signal, no abstract socket and no port beyond the worker.
//! 5. [`identity`]: a user id that nobody else has, or where the server may not give one, the server's own inside a user namespace; no
//!    capabilities, nor a way to get any.
//! 6. [`calls`] (seccomp), once the driver is loaded and before a request is carried out: system calls that no driver needs fail.
//!
//! A stage that fails ends the worker with a sentence that names what is missing. The supervisor tries all of them when it starts, so that
//! a server that can't confine its workers says so at once. `--unconfined` leaves out stages 1 (but for descriptors and variables), 2 and 4,
//! the own user id, and the limits that need one.

pub mod calls;
pub mod identity;
pub mod limits;
pub mod rules;
pub mod spawn;
pub mod view;

use anyhow::Context;
use identity::Identity;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// How a worker is confined, as its supervisor tells it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Wall {
    /// Who it becomes.
    pub identity: Identity,
    /// Bytes of private memory of each of its processes.
    pub memory: u64,
}

impl Wall {
    /// Namespaces that the worker begins in, as flags of clone(2).
    pub fn namespaces(&self) -> u64 {
        let all = libc::CLONE_NEWPID
            | libc::CLONE_NEWNS
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWCGROUP;
        let user = if self.identity == Identity::Mapped { libc::CLONE_NEWUSER } else { 0 };
        (all | user) as u64
    }

    /// Stages 2 to 5, for a process that has one thread.
    pub fn enter(&self) -> anyhow::Result<()> {
        // Asked while the host's /proc is there.
        let uid = self.identity.uid().context("a user id of its own")?;
        let groups = view::enter().context("a file system of its own (mount namespace)")?;
        limits::set(self.memory).context("limits")?;
        rules::set().context("Landlock")?;
        identity::become_nobody(uid, &groups).context("a user without capabilities")
    }
}

/// What remains of stages 2 to 5 for a worker that is not confined.
pub fn enter_unconfined() -> anyhow::Result<()> {
    limits::no_core_dump()?;
    identity::become_nobody(None, &[])
}

/// Where a driver may write, in a worker's view.
pub fn scratch() -> PathBuf {
    PathBuf::from("/tmp")
}
