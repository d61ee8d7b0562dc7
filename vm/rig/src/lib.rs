// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests for tests and benches: small VMs that boot a kernel with an image made here, under the QEMU options that the product itself uses.
//!
//! A guest has two serial ports. The first one is the kernel's console and goes to a file. On the second one a shell runs one command at a
//! time: it answers a line with the command's output and [`guest::END`], its exit status in it. Tests in Rust use [`guest::Guest`]; those in
//! Python and shell use the program `tombolo-rig`, whose standard input and output are that second port.
//!
//! - [`kernel`]: a kernel of the guest kit, or an installed one.
//! - [`image`]: the archive that the kernel unpacks: busybox, modules, programs with their libraries, the init script.
//! - [`machine`]: QEMU's command line.
//! - [`guest`]: a running guest and its shell.

#![deny(missing_docs)]

pub mod guest;
pub mod image;
pub mod kernel;
pub mod machine;
