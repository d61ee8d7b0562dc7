// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the host's side of `tombolo mpi` says to the program in a VM, and hears from it.

#![deny(missing_docs)]

pub mod frame;
