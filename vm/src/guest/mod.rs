// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Work inside guests: kernels, the agent, commands, mounts.
//!
//! - [`kit`]: which kernel and initramfs a VM boots.
//! - [`agent`]: the guest agent; [`exec`]: commands through it; [`mount`]: file systems of zones in the guest;
//!   [`share`]: folders of the host.

pub mod agent;
pub mod exec;
pub mod health;
pub mod kit;
pub mod mount;
pub mod seed;
pub mod share;
pub mod terminal;
