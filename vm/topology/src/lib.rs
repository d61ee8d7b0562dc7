// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The host's topology inside of a VM: found out, planned, given to QEMU or libvirt, and checked from inside the guest.
//!
//! [`read`] asks hwloc for the host's topology and turns it into plain data ([`model`]). From that, [`plan`] decides what each VM gets; it is
//! a pure function, and what it decides names every host CPU and every node. [`qemu`] and [`domain`] say a plan in the words of QEMU's command
//! line and of libvirt's XML, [`apply`] pins the threads of a QEMU that runs. The proof comes from the guest: [`gather`] takes what its
//! kernel shows in /sys, hwloc reads that, and [`compare`] puts it beside the plan, object by object.
//!
//! - [`cpus`]: sets of CPUs.
//! - [`model`]: a machine's topology as plain data.
//! - [`read`]: hwloc's view of this host, of a folder with /sys in it, or of a synthetic machine.
//! - [`request`]: what VMs ask for.
//! - [`plan`]: what each VM gets; [`shape`] for its sockets, dies, cores and threads, [`memory`] for its nodes' memory.
//! - [`qemu`]: QEMU's arguments.
//! - [`domain`]: libvirt's XML.
//! - [`dedicated`]: what KVM gives a VM whose vCPUs have CPUs of their own.
//! - [`apply`]: the threads of a QEMU are pinned, and what its memory lies on is read; [`affinity`]: the CPUs of any thread or process.
//! - [`interrupts`]: the CPUs that handle the interrupts of passed-through devices.
//! - [`gather`]: what a guest's kernel shows of its machine.
//! - [`compare`]: a machine beside what it must be.
//! - [`picture`]: a topology as a tree of text and as SVG.
//! - [`cli`]: `tombolo topology show`.

#![deny(missing_docs)]

pub mod affinity;
pub mod apply;
pub mod cli;
pub mod compare;
pub mod cpus;
pub mod dedicated;
pub mod domain;
pub mod gather;
pub mod interrupts;
pub mod memory;
pub mod model;
pub mod picture;
mod place;
pub mod plan;
pub mod qemu;
pub mod read;
pub mod request;
pub mod shape;
