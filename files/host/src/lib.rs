// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The shared file system in user space: mkfs, a FUSE mount, fsck and a library to use it with.
//!
//! The file system's logic is the C in `files/core`, the same that runs in the kernel module; `build.rs` compiles it for user space.
//! [`area::Area`] is the memory that holds it, [`fs::Filesystem`] the safe interface to its functions, [`fuse`] the skin that mounts
//! it,
//! [`fsck`] an independent reader of the format that finds and repairs damage.
//!
//! - [`sys`]: the core's interface and format, from its headers.
//! - [`area`]: mappings and areas; the one module that maps memory.
//! - `writeback`: makes an area's stores durable.
//! - [`fs`]: the core's functions with Rust types.
//! - `caller`: the process that a thread of a mount works for.
//! - `log`: messages of a process whose standard error is closed.
//! - [`change`]: its change events.
//! - [`account`]: files that are counted and limited together.
//! - [`fuse`]: the FUSE mount.
//! - [`fsck`]: check and repair.
//! - [`snapshot`]: consistent images of file systems in use.
//! - `room`: the room on a disk that a mapped file needs.
//! - [`shown`]: names that members made, as people see them.
//! - [`target`]: resolves a command's ZONE argument.
//! - [`cli`]: the commands `tombolo files …`.

pub mod account;
pub mod area;
mod caller;
pub mod change;
pub mod cli;
pub mod fs;
pub mod fsck;
pub mod fuse;
mod log;
mod room;
pub mod shown;
pub mod snapshot;
pub mod sys;
pub mod target;
mod writeback;
