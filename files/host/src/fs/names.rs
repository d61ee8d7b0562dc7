// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names: lookup, creation, renaming, removal and directory listings.

use std::ffi::{c_char, c_void};

use rustix::io::Errno;

use super::{Create, Entry, Filesystem, Handle, Result, check, check_len, now, raw};
use crate::sys;

impl Filesystem {
    /// Returns the inode of a name, and its `DT_*`.
    pub fn lookup(&self, dir: impl Into<Handle>, name: &[u8]) -> Result<(Handle, u8)> {
        let (mut found, mut kind) = (sys::tfs_handle::default(), 0);
        let len = name_len(name)?;
        // SAFETY: an open handle, name and its length.
        check(unsafe {
            sys::tfs_lookup(self.raw(), raw(dir), name.as_ptr().cast(), len, &mut found, &mut kind)
        })?;
        Ok((found.into(), kind))
    }

    /// Changes when names of the directory change.
    pub fn dir_seq(&self, dir: impl Into<Handle>) -> u64 {
        // SAFETY: an open handle.
        unsafe { sys::tfs_dir_seq(self.raw(), raw(dir)) }
    }

    /// Returns the parent of a directory. That of the directory that this member is confined to is the directory itself.
    pub fn parent(&self, dir: impl Into<Handle>) -> Result<u64> {
        let (dir, root) = (dir.into(), self.root().ino);
        if dir.ino == root {
            return Ok(root);
        }
        // SAFETY: an open handle.
        match unsafe { sys::tfs_parent(self.raw(), raw(dir)) } {
            0 => Err(Errno::from_raw_os_error(libc::EUCLEAN)),
            parent => Ok(parent),
        }
    }

    /// Makes an inode; without a name an unlinked, open one.
    pub fn create(&self, dir: impl Into<Handle>, name: Option<&[u8]>, what: &Create<'_>) -> Result<Handle> {
        let target = what.target.unwrap_or_default();
        let create = sys::tfs_create {
            mode: what.mode,
            uid: what.uid,
            gid: what.gid,
            rdev: what.rdev,
            symlink: if what.target.is_some() { target.as_ptr().cast() } else { std::ptr::null() },
            symlink_len: u32::try_from(target.len()).map_err(|_| Errno::NAMETOOLONG)?,
            xattrs: if what.xattrs.is_empty() { std::ptr::null() } else { what.xattrs.as_ptr().cast() },
            xattrs_len: u32::try_from(what.xattrs.len()).map_err(|_| Errno::NOSPC)?,
            open: what.open,
            now: now(),
        };
        let len = name_len(name.unwrap_or_default())?;
        let name = name.map_or(std::ptr::null(), <[u8]>::as_ptr);
        let mut made = sys::tfs_handle::default();
        // SAFETY: an open handle; pointers with their lengths.
        check(unsafe { sys::tfs_create(self.writable()?, raw(dir), name.cast(), len, &create, &mut made) })?;
        Ok(made.into())
    }

    /// Gives an inode one more name.
    pub fn link(&self, dir: impl Into<Handle>, name: &[u8], ino: impl Into<Handle>) -> Result<()> {
        // SAFETY: an open handle, name and its length.
        check(unsafe {
            sys::tfs_link(self.writable()?, raw(dir), name.as_ptr().cast(), name_len(name)?, raw(ino), now())
        })
    }

    /// Removes a name. `expect`: the inode that it must mean, else ESTALE.
    pub fn unlink(&self, dir: impl Into<Handle>, name: &[u8], expect: Option<Handle>) -> Result<()> {
        let (dir, expect) = (raw(dir), raw(expect.unwrap_or_default()));
        // SAFETY: an open handle, name and its length.
        check(unsafe {
            sys::tfs_unlink(self.writable()?, dir, name.as_ptr().cast(), name_len(name)?, expect, now())
        })
    }

    /// Removes an empty directory; `expect` as for [`Filesystem::unlink`].
    pub fn rmdir(&self, dir: impl Into<Handle>, name: &[u8], expect: Option<Handle>) -> Result<()> {
        let (dir, expect) = (raw(dir), raw(expect.unwrap_or_default()));
        // SAFETY: an open handle, name and its length.
        check(unsafe {
            sys::tfs_rmdir(self.writable()?, dir, name.as_ptr().cast(), name_len(name)?, expect, now())
        })
    }

    /// Renames; flags are `TFS_RENAME_*`.
    pub fn rename<D: Into<Handle>, E: Into<Handle>>(
        &self,
        old: (D, &[u8]),
        new: (E, &[u8]),
        flags: u32,
    ) -> Result<()> {
        self.rename_expecting((old.0.into(), old.1), (new.0.into(), new.1), [Expect::Any; 2], flags)
    }

    /// Renames if both names mean the expected inodes, else ESTALE.
    pub fn rename_expecting(
        &self,
        old: (Handle, &[u8]),
        new: (Handle, &[u8]),
        expect: [Expect; 2],
        flags: u32,
    ) -> Result<()> {
        let name = |(dir, name): (Handle, &[u8]), expect: Expect| {
            let expect = match expect {
                Expect::Any => Handle::default(),
                Expect::Nothing => Handle::from(sys::TFS_NOTHING),
                Expect::This(handle) => handle,
            };
            Ok(sys::tfs_name {
                dir: raw(dir),
                name: name.as_ptr().cast(),
                len: name_len(name)?,
                expect: raw(expect),
            })
        };
        let (from, to) = (name(old, expect[0])?, name(new, expect[1])?);
        // SAFETY: an open handle, names and their lengths.
        check(unsafe { sys::tfs_rename(self.writable()?, &from, &to, flags, now()) })
    }

    /// Calls `emit` for each name from cookie `pos` on until it returns false; returns the cookie of the first name that it
    /// refused.
    pub fn readdir(
        &self,
        dir: impl Into<Handle>,
        mut pos: u64,
        mut emit: impl FnMut(&[u8], u64, u8, u64) -> bool,
    ) -> Result<u64> {
        type Emit<'a> = &'a mut dyn FnMut(&[u8], u64, u8, u64) -> bool;
        unsafe extern "C" fn trampoline(
            ctx: *mut c_void,
            name: *const c_char,
            len: u32,
            ino: u64,
            kind: u8,
            next: u64,
        ) -> bool {
            // SAFETY: ctx is the Emit below, name has len bytes of private memory.
            let (emit, name) = unsafe {
                (&mut *ctx.cast::<Emit<'_>>(), std::slice::from_raw_parts(name.cast(), len as usize))
            };
            emit(name, ino, kind, next)
        }
        let mut emit: Emit<'_> = &mut emit;
        // SAFETY: an open handle; emit lives across the call.
        check(unsafe {
            sys::tfs_readdir(self.raw(), raw(dir), &mut pos, Some(trampoline), (&raw mut emit).cast())
        })?;
        Ok(pos)
    }

    /// All names of a directory.
    pub fn list(&self, dir: impl Into<Handle>) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        self.readdir(dir, 0, |name, ino, kind, next| {
            entries.push(Entry { name: name.to_vec(), ino, kind, next });
            true
        })?;
        Ok(entries)
    }

    /// Target of a symbolic link.
    pub fn readlink(&self, ino: impl Into<Handle>) -> Result<Vec<u8>> {
        let mut buf = vec![0; sys::TFS_SYMLINK_MAX as usize + 1];
        // SAFETY: an open handle, buffer and its length.
        let len = check_len(i64::from(unsafe {
            sys::tfs_readlink(self.raw(), raw(ino), buf.as_mut_ptr().cast(), buf.len() as u32)
        }))?;
        buf.truncate(len as usize);
        Ok(buf)
    }
}

/// The expected meaning of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Any inode, or none.
    Any,
    /// None: the name is free.
    Nothing,
    /// This inode.
    This(Handle),
}

fn name_len(name: &[u8]) -> Result<u32> {
    if name.len() > sys::TFS_NAME_MAX as usize {
        return Err(Errno::NAMETOOLONG);
    }
    Ok(name.len() as u32)
}
