// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Driving QEMU: its command line, whether KVM is usable, and what of a guest's console is kept. What other parts need of QEMU too (version, CPU,
//! monitor) is in the crate `tombolo-qemu`.

pub mod cmdline;
pub mod console;
pub mod kvm;

pub use tombolo_qemu::hypervisor::Hypervisor;
pub use tombolo_qemu::version::Qemu;
pub use tombolo_qemu::{qmp, start, tiny, version};
