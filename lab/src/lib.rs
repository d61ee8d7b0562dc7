// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab: an emulated KVM host on any x86-64 machine, of one of two kinds.
//!
//! The first boots in seconds. QEMU's own emulation (TCG) runs a Debian kernel on a machine with two NUMA nodes, an IOMMU, AMD SVM with
//! nested paging, network cards and NVMe disks to pass through, and huge pages. A small initramfs mounts the root file
//! system of the machine that runs the lab over 9p, read-only, lays a RAM overlay over it, changes into it and
//! starts an agent there. So every program, library and guest image of the outer machine is also in the lab, nothing that
//! happens in the lab reaches the outer machine, and real KVM, VFIO and kernel modules work in it. Commands go over
//! virtio-serial ports, one session each, with their input, output, exit code and files. The kernel is taken from its
//! package without installing it.
//!
//! The second, `--vmx`, has Intel VMX with EPT and VMFUNC. Bochs emulates it, and boots the same kernel from a CD that is made for each
//! lab and holds the programs and files that it is given; commands go over TCP to the same agent.
//!
//! - [`config`]: what a lab is made of, and what is refused.
//! - [`cache`]: kernel and emulators, from their Debian packages to unpacked trees that are kept.
//! - [`initramfs`]: the archive that the lab's kernel starts from, and small guests for tests inside the lab.
//! - [`qemu`]: which QEMU there is, and the command line of the emulated host.
//! - [`bochs`]: Bochs, its configuration, and how its lab is reached.
//! - [`emulator`]: either of the two.
//! - [`carry`]: what a lab under Bochs is given of this machine, with libraries and interpreters.
//! - [`iso`]: the CD with all that.
//! - [`progress`]: what a long start shows.
//! - [`instance`]: a running lab: its folder, its process, its end.
//! - [`protocol`]: the frames between a client and the agent.
//! - [`agent`]: runs inside the lab: init's children, and one command at a time per port.
//! - [`client`]: runs a command in a lab from outside.
//! - [`signals`]: signals as a descriptor, and the mask given to children.
//! - [`cli`]: `tombolo lab …`.

pub mod agent;
pub mod bochs;
pub mod cache;
pub mod carry;
pub mod cli;
pub mod client;
pub mod config;
pub mod emulator;
pub mod initramfs;
pub mod instance;
pub mod iso;
pub mod progress;
pub mod protocol;
pub mod qemu;
pub mod signals;
