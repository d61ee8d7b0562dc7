// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones, networks, accelerators and growing memory for domains of libvirt.
//!
//! Everything that a domain gets stands in its own XML: the devices, each with an alias of ours, and in `<metadata>` the *wants* from which
//! the devices were made. libvirt runs a hook when a domain starts and when it has ended; the hook reads the wants from the XML that libvirt
//! hands it, and sees to it that zone servers and switch ports are there, or gone. So nothing else has to be kept or configured.
//!
//! - [`want`]: what a domain can have, and its form in `<metadata>`.
//! - [`identity`]: a zone as it was when it was attached, by which one in memory is made anew.
//! - [`domain`]: a domain's XML and the changes to it.
//! - [`devices`]: the elements that a want becomes.
//! - [`virsh`]: reading and defining domains through `virsh`.
//! - [`hook`]: what is done when a domain starts and ends.
//! - [`kubevirt`]: the same XML for KubeVirt's hook sidecar.
//! - [`cli`]: `tombolo libvirt`.

pub mod cli;
pub mod devices;
pub mod domain;
pub mod hook;
pub mod identity;
pub mod kubevirt;
pub mod virsh;
pub mod want;

/// Returns a path as a word of a command that a user gives a shell.
pub(crate) fn word(path: &std::path::Path) -> String {
    let text = path.to_string_lossy().into_owned();
    // No path has a zero byte in it, which alone can't be quoted.
    shlex::try_quote(&text).map_or_else(|_| text.clone(), std::borrow::Cow::into_owned)
}
