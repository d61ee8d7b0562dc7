// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fast start: a VM with passed-through devices that starts as fast as a small one, whatever its memory.
//!
//! A device given to a VM by VFIO may write to any of the VM's memory, so all of it is allocated, zeroed, pinned and mapped before the first
//! instruction. Here only a small part exists at start; the rest is virtio-mem, which VFIO maps block by block as the guest
//! plugs it. While the guest boots, threads with a low priority make that memory exist from outside, in huge pages where the kernel gives
//! them; so plugging only has to pin. The guest is offered one block until its driver has taken it. From then on the offer
//! (`requested-size`) follows the prepared memory, step by step, until all is there. A guest that reboots loses what it had plugged and
//! is grown again; one that stops taking memory is reported, never called complete.
//!
//! - [`layout`]: how much at start, how large a block, how large a step.
//! - [`check`]: limits of the host that would fail later, found before.
//! - [`monitor`]: the narrow view of QMP that growing needs; over a socket, and over libvirt.
//! - [`memory`]: QEMU's memory seen from outside, and preparing it.
//! - [`remote`]: pages of another process, made to exist without being written.
//! - [`ahead`]: the threads that prepare memory ahead of the guest, within a budget.
//! - [`grow`]: offers memory until the guest has all of it.
//! - [`prepare`]: makes the pages of memory before it is offered.
//! - [`pace`]: the share of the time in which growing may disturb the guest.
//! - [`progress`]: how far it is, how fast, how long it will take; as a file and for Prometheus.
//! - [`timeline`]: what a start spent its time on.
//! - [`guest`]: what the guest must be told.
//! - [`model`]: from measured costs per page and mapping to sizes that no lab holds.
//! - [`libvirt`]: the same for existing domains.
//! - [`cli`]: `tombolo start blame`, `tombolo grow`.

#![deny(missing_docs)]

pub mod ahead;
pub mod check;
pub mod cli;
pub mod grow;
pub mod guest;
pub mod layout;
pub mod libvirt;
pub mod memory;
pub mod model;
pub mod monitor;
pub mod pace;
pub mod prepare;
pub mod progress;
pub mod remote;
pub mod timeline;
