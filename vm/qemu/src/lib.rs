// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QEMU as every part starts it: the VMs of a project, the emulated host of the lab, and the guests of tests.
//!
//! - [`version`]: which QEMU program, and its version.
//! - [`hypervisor`]: KVM or TCG, and the CPU and kernel arguments that fit each: the workarounds for TCG stand here and nowhere else.
//! - [`qmp`]: the client of QEMU's monitor.
//! - [`cpio`]: the writer of the archives that a kernel unpacks as its first file system.
//! - [`start`]: why a program can't be started.
//! - [`tiny`]: the smallest guest that proves that a hypervisor runs stock kernels.

#![deny(missing_docs)]

pub mod cpio;
pub mod hypervisor;
pub mod qmp;
pub mod start;
pub mod tiny;
pub mod version;
