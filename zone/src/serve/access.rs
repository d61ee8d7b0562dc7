// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opens VMs' doorbell sockets and, for domains of libvirt, a zone's file to the group that libvirt runs QEMU as.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags};

use crate::{Error, Result};

/// Groups of libvirt's QEMU on Debian and on Fedora, and the group of all who may use KVM. The switch has the same default.
const VMMS: [&str; 3] = ["libvirt-qemu", "qemu", "kvm"];

/// Returns the user as whom this process opens files.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Gives a socket or a file of root's to the first of [`VMMS`] that exists. Another user's file stays that user's.
///
/// # Errors
/// The path is a symbolic link: another user could lead root to any file by one. Those of the file system.
pub fn give(path: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let Some(group) = VMMS.iter().find_map(|name| group(name)) else { return Ok(()) };
    give_to(path, group).map_err(|e| Error::io(format!("group and mode of {}", path.display()), e))
}

/// As [`give`], for one group. Another file may take the path's place at any moment, so all is done with the file that was opened.
fn give_to(path: &Path, group: u32) -> io::Result<()> {
    let file =
        rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let there = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(there.st_mode) == FileType::Symlink {
        return Err(io::Error::other("it is a symbolic link; name the file itself"));
    }
    if there.st_uid != rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    rustix::fs::chownat(file.as_fd(), c"", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?;
    // fchmod refuses a descriptor of this kind.
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP;
    Ok(rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)?)
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn group_and_mode(path: &Path) -> (u32, u32) {
        let there = path.symlink_metadata().unwrap();
        (there.gid(), there.mode() & 0o7777)
    }

    #[test]
    fn files_and_sockets_of_ones_own_are_given_and_no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (file, socket, link) =
            (folder.path().join("own.zone"), folder.path().join("bell"), folder.path().join("link"));
        std::fs::write(&file, "").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        symlink(&file, &link).unwrap();
        let own = rustix::process::getegid().as_raw();

        assert!(give_to(&link, own).unwrap_err().to_string().contains("symbolic link"));
        assert_eq!(group_and_mode(&file), (own, 0o600));
        for path in [&file, &socket] {
            give_to(path, own).unwrap();
            assert_eq!(group_and_mode(path), (own, 0o660));
        }
    }

    #[test]
    fn another_users_file_stays_that_users() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("own.zone");
        std::fs::write(&file, "").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(&file, Some(65534), Some(65534)).unwrap();
        give_to(&file, 0).unwrap();
        assert_eq!(group_and_mode(&file), (65534, 0o600));
    }
}
