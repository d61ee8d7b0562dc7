// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The FUSE skin: the file system mounted by a process, on the host or in a guest without the kernel module.
//!
//! A few threads each read requests from a clone of /dev/fuse and answer them with calls into the core. Names and
//! attributes are valid for no time and files are opened with direct I/O, so the kernel caches nothing that another
//! member could make stale. A read's reply is written to the device directly from the zone's memory: one copy, by the
//! kernel.
//!
//! The protocol is implemented here and not by a library, because coherence needs features that libraries lack:
//! O_TMPFILE, set-id handling flags, birth times, times before 1970, replies without a copy.
//!
//! - [`abi`]: the wire format.
//! - [`acl`]: POSIX ACLs.
//! - `attributes`: attributes of inodes, and extended ones.
//! - `create`: new inodes, and names that another member made meanwhile.
//! - `data`: reads and writes.
//! - `flags`: immutable and append-only inodes (chattr).
//! - `kept`: files that are kept for a moment after they were looked up.
//! - [`locks`]: flock and fcntl.
//! - [`nodes`]: the kernel's lookups and opens of our inodes.
//! - `notify`: telling watchers in other members.
//! - [`ops`]: the mount's state, and which function answers a request.
//! - [`options`]: mount options.
//! - `replies`: replies that say what an inode is.
//! - `rights`: permission checks that the kernel does not make.
//! - [`session`]: device, mount, threads.

pub mod abi;
pub mod acl;
mod attributes;
mod create;
mod data;
mod flags;
mod kept;
pub mod locks;
pub mod nodes;
mod notify;
pub mod ops;
pub mod options;
mod replies;
mod rights;
pub mod session;
