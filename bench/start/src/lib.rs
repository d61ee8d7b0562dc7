// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The time that a VM's start takes, with and without a passed-through device, slow and fast; and claims about it that are checked in a lab.
//!
//! Outside, `tombolo bench start` boots a lab and runs itself in it. Inside, it binds a network card to vfio-pci and starts nested
//! guests under real KVM: as QEMU does by itself, with stock tuning (hugetlb and preallocation threads), and fast. The guest's script says
//! when it is up and how much work it gets done. Every figure is one JSON line.
//!
//! - [`nested`]: a guest inside the lab, its console and its monitor.
//! - [`measure`]: one start, from the command to full memory.
//! - [`report`]: figures as JSON lines and as a table; the model.
//! - [`claims`]: what must hold, checked inside a lab.
//! - [`cli`]: `tombolo bench start`.

pub mod claims;
pub mod cli;
pub mod measure;
pub mod nested;
pub mod report;
