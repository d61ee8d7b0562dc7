// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benches put Tombolo beside what its users have now: same VM, same run, same jobs, in turn. A run is a list of samples,
//! written as JSON lines after one line that says on which machine and from which commit they come; tables and the page of all results
//! are made from these lines, so that every figure can be traced to the command that made it.
//!
//! - [`record`]: samples, the machine's description, the results file; all benches of the project use it
//! - [`report`]: medians, tables, ratios; [`page`]: the page of all results
//! - [`files`]: the shared file system beside 9p, virtiofs, NFS, ext4 with DAX and tmpfs
//! - [`share`]: one root, one file of weights, one cache of many VMs beside qcow2, virtiofs, 9p and NFS
//! - [`net`]: the switch beside DPDK's vhost, and beside TAP and a bridge between VMs
//! - [`mpi`]: ranks of two VMs through a zone's memory, beside TCP, one VM and the host
//! - [`topology`]: HPC programs and noise on the host, in a VM, and in a VM that lies on the host's topology
//! - [`cli`]: `tombolo bench`, with the benches of accelerators (`accel/`) and of starts (`start/`)
//!
//! The VMs of a bench, and the end of a bench at Ctrl-C, are in the crate `tombolo_bench_project` (`project/`).

pub mod cli;
pub mod files;
pub mod mpi;
pub mod net;
pub mod page;
pub mod report;
pub mod share;
pub mod topology;
pub use tombolo_record as record;
