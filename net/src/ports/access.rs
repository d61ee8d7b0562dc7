// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Permissions of a port's socket: owner, group and mode. To connect takes the right to write.

use std::ffi::CString;
use std::os::fd::AsRawFd;

use anyhow::Context;
pub use tombolo_control::net::config::Access;
use tombolo_listen::Begun;

/// Groups that libvirt runs QEMU as, the narrowest first: those of Debian and Fedora, and that of all KVM users.
const VMMS: [&str; 3] = ["libvirt-qemu", "qemu", "kvm"];
const MODE: u32 = 0o660;

/// Sets owner, group and mode of a socket before it gets its name. By default a switch that root runs gives its sockets to the first group of [`VMMS`]
/// that exists, with mode 0660.
///
/// # Errors
/// There is no such user or group, the mode is invalid, or this process may not set them.
pub fn apply(access: &Access, socket: &Begun) -> anyhow::Result<()> {
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
    if owner.or(group).is_some() {
        let itself = format!("/proc/self/fd/{}", socket.file().as_raw_fd());
        std::os::unix::fs::chown(itself, owner, group).context("owner and group of the socket")?;
    }
    if let Some(mode) = mode.or(told) {
        socket.set_mode(mode).context("mode of the socket")?;
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

    fn access(owner: Option<&str>, group: Option<&str>, mode: Option<&str>) -> Access {
        Access { owner: owner.map(Into::into), group: group.map(Into::into), mode: mode.map(Into::into) }
    }

    /// A socket in a folder of its own.
    fn socket() -> (Begun, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        (tombolo_listen::begin(&folder.path().join("socket")).unwrap(), folder)
    }

    #[test]
    fn a_socket_is_given_to_whom_the_configuration_names() {
        let (socket, _folder) = socket();
        let found = || socket.file().metadata().unwrap();
        // SAFETY: asks for numbers.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        apply(&access(Some(&uid.to_string()), Some(&gid.to_string()), None), &socket).unwrap();
        assert_eq!((found().uid(), found().gid(), found().mode() & 0o777), (uid, gid, 0o660));
        apply(&access(None, None, Some("600")), &socket).unwrap();
        assert_eq!(found().mode() & 0o777, 0o600);
        if uid == 0 {
            apply(&access(Some("nobody"), Some("kvm"), Some("0666")), &socket).unwrap();
            assert_eq!((Some(found().uid()), Some(found().gid())), (user("nobody"), group("kvm")));
        }
    }

    #[test]
    fn what_cannot_be_given_is_named() {
        let (socket, _folder) = socket();
        let said = |a: Access| format!("{:#}", apply(&a, &socket).unwrap_err());
        assert!(said(access(Some("no such user"), None, None)).contains("no user 'no such user'"));
        assert!(said(access(None, Some("no such group"), None)).contains("no group 'no such group'"));
        for mode in ["rw", "1777", "8"] {
            assert!(said(access(None, None, Some(mode))).contains("such as 0660"), "{mode}");
        }
    }
}
