// SPDX-License-Identifier: Apache-2.0 OR MIT
//! MPI programs across the VMs of a host: unmodified libraries use the transports that they have for ranks of one machine, through memory that the VMs share.
//!
//! A program in each VM, the *node* (`node/`), makes the guests look alike; the host starts nodes through the guest agents, decides from what they tell
//! whether and how the job can run, and watches the VMs. The launcher is the guest's own and runs in the first VM.
//!
//! - [`cli`]: the commands; [`run`]: one job, from the questions to the end.
//! - [`plan`]: who runs where: VMs, ranks, process numbers, CPUs, or the one reason why not.
//! - [`mod@env`]: what launchers of the VMs' own need.
//! - [`launcher`]: command lines and variables for each library.
//! - [`node`]: the connection to a VM's node.

#![deny(missing_docs)]

pub mod cli;
pub mod env;
pub mod launcher;
pub mod node;
pub mod plan;
pub mod run;
