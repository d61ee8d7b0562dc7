// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Permissions of a port's socket: owner, group and mode. To connect takes the right to write.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use anyhow::Context;
pub use tombolo_control::net::config::Access;

/// Groups that libvirt runs QEMU as, the narrowest first: those of Debian and Fedora, and that of all KVM users.
const VMMS: [&str; 3] = ["libvirt-qemu", "qemu", "kvm"];
const MODE: u32 = 0o660;

/// Sets owner, group and mode of the socket at `path`. By default a switch that root runs gives its sockets to the first group of [`VMMS`]
/// that exists, with mode 0660.
///
/// # Errors
/// There is no such user or group, the mode is invalid, the path leads to no socket, or this process may not set them.
pub fn apply(access: &Access, path: &Path) -> anyhow::Result<()> {
    let owner = access.owner.as_deref().map(|name| id(name, user).with_context(|| no("user", name)));
    let group = access.group.as_deref().map(|name| id(name, group).with_context(|| no("group", name)));
    let (owner, mut group) = (owner.transpose()?, group.transpose()?);
    let mode = match &access.mode {
        Some(text) => Some(
            u32::from_str_radix(text, 8)
                .ok()
                .filter(|mode| *mode <= 0o777)
                .with_context(|| format!("mode '{text}' is invalid; use octal digits, such as 0660"))?,
        ),
        None => None,
    };
    // SAFETY: asks for a number.
    if *access == Access::default() && unsafe { libc::geteuid() } == 0 {
        group = VMMS.iter().find_map(|name| self::group(name));
    }
    let told = owner.or(group).map(|_| MODE);
    // Another user who may write to the folder can have put another file at this path: it keeps its owner and mode.
    let socket = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path);
    let socket = socket.with_context(|| path.display().to_string())?;
    anyhow::ensure!(socket.metadata()?.file_type().is_socket(), "{} is no socket any more", path.display());
    let itself = format!("/proc/self/fd/{}", socket.as_raw_fd());
    if owner.or(group).is_some() {
        std::os::unix::fs::chown(&itself, owner, group)
            .with_context(|| format!("owner and group of {}", path.display()))?;
    }
    if let Some(mode) = mode.or(told) {
        std::fs::set_permissions(&itself, std::fs::Permissions::from_mode(mode))
            .with_context(|| format!("mode of {}", path.display()))?;
    }
    Ok(())
}

fn no(kind: &str, name: &str) -> String {
    format!("there is no {kind} '{name}'; 'getent passwd' and 'getent group' list those that are")
}

/// Returns a number as it is, or the result of `find` for a name.
fn id(name: &str, find: fn(&str) -> Option<u32>) -> Option<u32> {
    name.parse().ok().or_else(|| find(name))
}

/// Room for the strings of an entry.
const ROOM: usize = 64 << 10;

/// The number of a user.
fn user(name: &str) -> Option<u32> {
    user_and_group(name).map(|(user, _)| user)
}

/// The numbers of a user and of its own group.
pub(crate) fn user_and_group(name: &str) -> Option<(u32, u32)> {
    let name = CString::new(name).ok()?;
    let mut room = vec![0; ROOM];
    let mut found = std::ptr::null_mut();
    // SAFETY: an all-zero entry is valid to be filled in; name, entry and room outlive the call.
    unsafe {
        let mut entry: libc::passwd = std::mem::zeroed();
        libc::getpwnam_r(name.as_ptr(), &mut entry, room.as_mut_ptr(), room.len(), &mut found);
        (!found.is_null()).then_some((entry.pw_uid, entry.pw_gid))
    }
}

/// The number of a group.
fn group(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut room = vec![0; ROOM];
    let mut found = std::ptr::null_mut();
    // SAFETY: as for a user.
    unsafe {
        let mut entry: libc::group = std::mem::zeroed();
        libc::getgrnam_r(name.as_ptr(), &mut entry, room.as_mut_ptr(), room.len(), &mut found);
        (!found.is_null()).then_some(entry.gr_gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixListener;

    fn access(owner: Option<&str>, group: Option<&str>, mode: Option<&str>) -> Access {
        Access { owner: owner.map(Into::into), group: group.map(Into::into), mode: mode.map(Into::into) }
    }

    /// A socket in a folder of its own.
    fn socket() -> tempfile::NamedTempFile<UnixListener> {
        tempfile::Builder::new().make(|path| UnixListener::bind(path)).unwrap()
    }

    #[test]
    fn a_file_that_has_taken_the_sockets_place_is_given_to_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link, other) =
            (folder.path().join("file"), folder.path().join("link"), folder.path().join("other"));
        std::fs::write(&file, []).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let _socket = UnixListener::bind(&other).unwrap();
        let before = other.metadata().unwrap().mode();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(apply(&access(None, None, Some("0666")), &link).is_err());
        assert!(apply(&access(None, None, Some("0666")), &file).is_err());
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(&other, &link).unwrap();
        assert!(apply(&access(None, None, Some("0606")), &link).is_err(), "a link to another socket");
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(other.metadata().unwrap().mode(), before);
    }

    #[test]
    fn a_socket_is_given_to_whom_the_configuration_names() {
        let file = socket();
        // SAFETY: asks for numbers.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        apply(&access(Some(&uid.to_string()), Some(&gid.to_string()), None), file.path()).unwrap();
        let meta = file.path().metadata().unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o777), (uid, gid, 0o660));
        apply(&access(None, None, Some("600")), file.path()).unwrap();
        assert_eq!(file.path().metadata().unwrap().mode() & 0o777, 0o600);
        if uid == 0 {
            apply(&access(Some("nobody"), Some("kvm"), Some("0666")), file.path()).unwrap();
            let meta = file.path().metadata().unwrap();
            assert_eq!((Some(meta.uid()), Some(meta.gid())), (user("nobody"), group("kvm")));
        }
    }

    #[test]
    fn what_cannot_be_given_is_named() {
        let file = socket();
        let said = |a: Access| format!("{:#}", apply(&a, file.path()).unwrap_err());
        assert!(said(access(Some("no such user"), None, None)).contains("no user 'no such user'"));
        assert!(said(access(None, Some("no such group"), None)).contains("no group 'no such group'"));
        for mode in ["rw", "1777", "8"] {
            assert!(said(access(None, None, Some(mode))).contains("such as 0660"), "{mode}");
        }
    }
}
