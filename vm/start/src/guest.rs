// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a guest must know to take and use grown memory.
//!
//! Plugged memory is used only when it is online, and some distributions leave that to someone else (Debian 6.1). A device that pins
//! memory needs it in the kernel's zone: pages in the movable zone would be moved away first, which costs and can fail.

/// Kernel arguments for a guest that is booted with its kernel given directly.
pub const KERNEL_ARGUMENTS: &str = "memhp_default_state=online_kernel";

/// Where the guest kit puts [`UDEV_RULE`].
pub const UDEV_RULE_PATH: &str = "/etc/udev/rules.d/60-tombolo-memory.rules";

/// A udev rule that does the same for a guest whose kernel arguments are its own.
pub const UDEV_RULE: &str = "# Memory that Tombolo adds is used at once, and by the kernel too.\n\
    SUBSYSTEM==\"memory\", ACTION==\"add\", ATTR{state}==\"offline\", ATTR{state}=\"online_kernel\"\n";

/// The module that takes the memory.
pub const MODULE: &str = "virtio_mem";
