// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A zone is one piece of memory shared by its members: virtual machines and processes of their host.
//!
//! A host process creates a zone ([`Zone::create`]) or takes over one that persisted in a file
//! ([`Zone::take_over`]) and is then its *owner*: it invites members, holds their liveness, declares them dead.
//! Other host processes attach to it ([`Zone::open`]) by its file or by the owner's file descriptor. A member joins the slot it was
//! invited to, which gives it an epoch. Lock words in the zone name member and epoch, so that a waiter can find out whether the owner
//! lives. Every value read from the zone is copied, checked, and the copy is used.
//!
//! The kernel's file locks show which members are alive: the owner and each member hold a byte of the backing file with an
//! open-file-description lock, which the kernel drops at the process' death ([`liveness`]).
//!
//! Modules:
//! - [`mod@format`]: the format, from `format/tombolo_zone.h`; sizes and offsets asserted.
//! - [`mem`]: the only accesses to shared memory: bounds-checked atomics and copies.
//! - [`backing`]: memfd, huge pages or file; seals.
//! - [`liveness`]: the file locks of living members.
//! - [`header`]: making and checking the zone's header.
//! - [`member`]: checked copies of member slots.
//! - [`cli`]: `tombolo zone`.
//! - [`daemon`]: processes that outlive the command that starts them.
//! - [`doorbell`]: interrupts from member to member: an ivshmem server, and a host process's own doorbell.
//! - [`door`]: listening sockets without a name, which only the same user reaches.
//! - [`numa`]: the NUMA nodes of a zone's memory.
//! - [`pci`]: access to a zone in a guest without the kernel module.
//! - [`serve`]: zones for VMs that tombolo does not start.
//! - `boot`: a number of the host's boot.
//! - [`mod@zone`]: [`Zone`]: create, open, take over, invite, join, declare dead.

#![deny(missing_docs)]

pub mod backing;
mod boot;
pub mod cli;
pub mod daemon;
pub mod door;
pub mod doorbell;
pub mod error;
pub mod format;
pub mod header;
pub mod liveness;
pub mod mem;
pub mod member;
pub mod numa;
pub mod pci;
pub mod serve;
pub mod zone;

pub use backing::Backing;
pub use error::Error;
pub use header::{Area, AreaConfig, AreaType};
pub use liveness::Liveness;
pub use member::{Member, MemberId, MemberState, Pending, Rights, Role};
pub use zone::{GrantsHeld, KeptOut, Membership, Unburied, Zone, ZoneConfig};

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
