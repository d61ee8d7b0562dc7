// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Settings of a guest that takes and uses grown memory.
//!
//! Plugged memory is used only when it is online, and some distributions leave that to a program or rule (Debian 6.1). A device that pins
//! memory needs it in the kernel's zone: pages in the movable zone would be moved away first, which costs and can fail.

/// Kernel arguments for a guest that is booted with its kernel given directly.
pub const KERNEL_ARGUMENTS: &str = "memhp_default_state=online_kernel";

/// The path of [`UDEV_RULE`] in a guest that has udev and sets its own kernel arguments.
pub const UDEV_RULE_PATH: &str = "/etc/udev/rules.d/60-tombolo-memory.rules";

/// The guest kit's udev rule that does the same.
pub const UDEV_RULE: &str = include_str!("../../../guest/60-tombolo-memory.rules");
