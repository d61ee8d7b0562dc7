// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Driving QEMU: which one, its command line, its monitor, and what of a guest's console is kept.

pub mod cmdline;
pub mod console;
pub mod kvm;
pub mod qmp;
pub mod tiny;
pub mod version;
