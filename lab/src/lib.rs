// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab: an emulated KVM host that boots in seconds on any x86-64 machine with QEMU.
//!
//! QEMU's own emulation (TCG) runs a Debian kernel on a machine with two NUMA nodes, an IOMMU, AMD SVM with
//! nested paging, network cards and NVMe disks to pass through, and huge pages. A small initramfs mounts the root file
//! system of the machine that runs the lab over 9p, read-only, lays a RAM overlay over it, changes into it and
//! starts an agent there. So every program, library and guest image of the outer machine is also in the lab, nothing that
//! happens in the lab reaches the outer machine, and real KVM, VFIO and kernel modules work in it. Commands go over
//! virtio-serial ports, one session each, with their input, output, exit code and files. The kernel is taken from its
//! package without installing it.
//!
//! - [`config`]: what a lab is made of, and what is refused.
//! - [`cache`]: the kernel, from its Debian package to an unpacked tree that is kept.
//! - [`initramfs`]: the archive that the lab's kernel starts from, and small guests for tests inside the lab.
//! - [`cpio`]: the archive format.
//! - [`qemu`]: which QEMU there is, and the command line of the emulated host.
//! - [`instance`]: a running lab: its folder, its process, its end.
//! - [`protocol`]: the frames between a client and the agent.
//! - [`agent`]: runs inside the lab: init's children, and one command at a time per port.
//! - [`client`]: runs a command in a lab from outside.
//! - [`signals`]: signals as a descriptor, and the mask given to children.
//! - [`cli`]: `tombolo lab …`.

pub mod agent;
pub mod cache;
pub mod cli;
pub mod client;
pub mod config;
pub mod cpio;
pub mod initramfs;
pub mod instance;
pub mod protocol;
pub mod qemu;
pub mod signals;
