// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opens VMs' doorbell sockets and, for domains of libvirt, a zone's file to the group that libvirt runs QEMU as.

use std::ffi::CString;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::{Error, Result};

/// Groups of libvirt's QEMU on Debian and on Fedora, and the group of all who may use KVM. The switch has the same default.
const VMMS: [&str; 3] = ["libvirt-qemu", "qemu", "kvm"];

/// Gives a socket or a file of root's to the first of [`VMMS`] that exists. Another user's file stays that user's.
///
/// # Errors
/// Those of the file system.
pub fn give(path: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("group and mode of {}", path.display()), e);
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let Some(group) = VMMS.iter().find_map(|name| group(name)) else { return Ok(()) };
    std::os::unix::fs::chown(path, None, Some(group)).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660)).map_err(failed)
}

/// Returns the number of a group.
fn group(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut room = vec![0; 64 << 10];
    let mut found = std::ptr::null_mut();
    // SAFETY: an all-zero entry is valid to be filled in; name, entry and room outlive the call.
    unsafe {
        let mut entry: libc::group = std::mem::zeroed();
        libc::getgrnam_r(name.as_ptr(), &mut entry, room.as_mut_ptr(), room.len(), &mut found);
        (!found.is_null()).then_some(entry.gr_gid)
    }
}
