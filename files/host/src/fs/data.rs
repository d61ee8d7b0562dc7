// SPDX-License-Identifier: Apache-2.0 OR MIT
//! File contents: data, file locks and extended attributes.

use std::ffi::{CString, c_int};

use rustix::io::Errno;

use super::{Attr, FileLock, Filesystem, Handle, Result, Run, check, check_len, now, raw};
use crate::sys;

impl Filesystem {
    /// Reads at most `buf.len()` bytes.
    pub fn pread(&self, ino: impl Into<Handle>, buf: &mut [u8], offset: u64) -> Result<usize> {
        // SAFETY: an open handle, buffer and its length.
        let len = unsafe {
            sys::tfs_pread(self.raw(), raw(ino), buf.as_mut_ptr().cast(), buf.len() as u64, offset)
        };
        Ok(check_len(len)? as usize)
    }

    /// Writes at `offset`.
    pub fn pwrite(&self, ino: impl Into<Handle>, buf: &[u8], offset: u64, kill_suid: bool) -> Result<usize> {
        self.pwrite_raw(ino, buf, offset, false, kill_suid).map(|(len, _)| len)
    }

    /// Writes all of `buf` at the end. Returns how much and where.
    pub fn append(&self, ino: impl Into<Handle>, buf: &[u8], kill_suid: bool) -> Result<(usize, u64)> {
        self.pwrite_raw(ino, buf, 0, true, kill_suid)
    }

    fn pwrite_raw(
        &self,
        ino: impl Into<Handle>,
        buf: &[u8],
        mut offset: u64,
        append: bool,
        kill: bool,
    ) -> Result<(usize, u64)> {
        let fs = self.writable()?;
        // SAFETY: an open handle, buffer and its length.
        let len = unsafe {
            sys::tfs_pwrite(
                fs,
                raw(ino),
                buf.as_ptr().cast(),
                buf.len() as u64,
                &mut offset,
                append,
                kill,
                now(),
            )
        };
        Ok((check_len(len)? as usize, offset))
    }

    /// Size in bytes.
    pub fn size(&self, ino: impl Into<Handle>) -> u64 {
        // SAFETY: an open handle.
        unsafe { sys::tfs_size(self.raw(), raw(ino)) }
    }

    /// Keeps the inode's blocks for a reader until the value is dropped. Only for short copies. EAGAIN: all pins are taken;
    /// [`Filesystem::pread`] needs none.
    pub fn pin(&self, ino: impl Into<Handle>) -> Result<Pin<'_>> {
        let fs = self.writable()?;
        // SAFETY: an open handle.
        let pin = unsafe { sys::tfs_pin(fs, ino.into().ino) };
        if pin == sys::TFS_PINS { Err(Errno::AGAIN) } else { Ok(Pin { fs: self, pin }) }
    }

    /// Returns the run at a file block; block 0: a hole.
    pub fn map(&self, ino: impl Into<Handle>, fblock: u64, count: u64) -> Result<Run> {
        let mut run = Run::default();
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_map(self.raw(), raw(ino), fblock, count, &mut run) })?;
        Ok(run)
    }

    /// Returns how many of n bytes from `at` on were the file's. Called with a pin after [`Filesystem::map`].
    pub fn still_there(&self, ino: impl Into<Handle>, at: u64, n: u64) -> Result<u64> {
        // SAFETY: an open handle.
        check_len(unsafe { sys::tfs_still_there(self.raw(), raw(ino), at, n) })
    }

    /// Sets the size.
    pub fn truncate(&self, ino: impl Into<Handle>, size: u64, kill_suid: bool) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_truncate(self.writable()?, raw(ino), size, kill_suid, now()) })
    }

    /// Allocates, punches or zeroes; mode is `TFS_FALLOC_*`.
    pub fn fallocate(&self, ino: impl Into<Handle>, mode: u32, offset: u64, len: u64) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_fallocate(self.writable()?, raw(ino), mode, offset, len, now()) })
    }

    /// Returns the offset of the next data or hole.
    pub fn seek(&self, ino: impl Into<Handle>, offset: u64, hole: bool) -> Result<u64> {
        // SAFETY: an open handle.
        check_len(unsafe { sys::tfs_seek(self.raw(), raw(ino), offset, hole) })
    }

    /// Takes, changes or releases a file lock; EAGAIN: another owner has it.
    pub fn set_lock(&self, ino: impl Into<Handle>, lock: &FileLock) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_set_lock(self.writable()?, raw(ino), lock) })
    }

    /// Returns a conflicting lock; its type is `TFS_LK_UNLOCK` if there is none.
    pub fn get_lock(&self, ino: impl Into<Handle>, lock: &FileLock) -> Result<FileLock> {
        let mut found = *lock;
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_get_lock(self.writable()?, raw(ino), &mut found) })?;
        Ok(found)
    }

    /// Stores in the zone that an owner waits for a lock, until [`Filesystem::end_wait`]. EDEADLK: the lock's holder waits
    /// for this owner.
    pub fn wait_lock(&self, ino: impl Into<Handle>, lock: &FileLock) -> Result<LockWait> {
        let fs = self.writable()?;
        // SAFETY: an open handle.
        let slot = check_len(i64::from(unsafe { sys::tfs_lock_wait_begin(fs, raw(ino), lock) }))?;
        Ok(LockWait(slot as c_int))
    }

    /// Ends a wait.
    pub fn end_wait(&self, wait: LockWait) {
        // SAFETY: an open handle; the slot was given by tfs_lock_wait_begin and is given back once.
        unsafe { sys::tfs_lock_wait_end(self.raw(), wait.0) };
    }

    /// Returns an extended attribute's value.
    pub fn xattr_get(&self, ino: impl Into<Handle>, name: &[u8]) -> Result<Vec<u8>> {
        let ino = ino.into();
        let name = CString::new(name).map_err(|_| Errno::INVAL)?;
        // Repeated if the value grew in between, a bounded number of times.
        for _ in 0..1000 {
            // SAFETY: an open handle; size 0 asks for the length.
            let len = check_len(unsafe {
                sys::tfs_xattr_get(self.raw(), raw(ino), name.as_ptr(), std::ptr::null_mut(), 0)
            })?;
            let mut value = vec![0; len as usize];
            if len == 0 {
                return Ok(value);
            }
            // SAFETY: an open handle, buffer and its length.
            let got = unsafe {
                sys::tfs_xattr_get(self.raw(), raw(ino), name.as_ptr(), value.as_mut_ptr().cast(), len)
            };
            match check_len(got) {
                Err(Errno::RANGE) => {}
                got => {
                    value.truncate(got? as usize);
                    return Ok(value);
                }
            }
        }
        Err(Errno::AGAIN)
    }

    /// Names of all extended attributes, each with its NUL.
    pub fn xattr_list(&self, ino: impl Into<Handle>) -> Result<Vec<u8>> {
        let mut list = vec![0; sys::TFS_XATTR_MAX as usize];
        // SAFETY: an open handle, buffer and its length.
        let len = check_len(unsafe {
            sys::tfs_xattr_list(self.raw(), raw(ino), list.as_mut_ptr().cast(), list.len() as u64)
        })?;
        list.truncate(len as usize);
        Ok(list)
    }

    /// Sets (Some) or removes an extended attribute; flags are `TFS_XATTR_*`; `mode` sets the inode's mode with it.
    pub fn xattr_set(
        &self,
        ino: impl Into<Handle>,
        name: &[u8],
        value: Option<&[u8]>,
        flags: u32,
        mode: Option<u32>,
    ) -> Result<()> {
        self.store_xattr(ino.into(), name, value, flags, mode, std::ptr::null())
    }

    /// The same for a caller whose right to it follows from the inode's owner and flags in `checked`. EAGAIN: it has others by now.
    pub fn xattr_set_as(
        &self,
        checked: &Attr,
        name: &[u8],
        value: Option<&[u8]>,
        flags: u32,
        mode: Option<u32>,
    ) -> Result<()> {
        self.store_xattr(checked.into(), name, value, flags, mode, checked)
    }

    fn store_xattr(
        &self,
        file: Handle,
        name: &[u8],
        value: Option<&[u8]>,
        flags: u32,
        mode: Option<u32>,
        checked: *const Attr,
    ) -> Result<()> {
        let name = CString::new(name).map_err(|_| Errno::INVAL)?;
        // An empty value is not "remove": any non-null pointer will do for it.
        let (ptr, len) = value.map_or((std::ptr::null(), 0), |v| (v.as_ptr(), v.len() as u64));
        let mode = mode.map_or(-1, |m| m as c_int);
        let (fs, name) = (self.writable()?, name.as_ptr());
        // SAFETY: an open handle; pointers with their lengths; 'checked' is null or a reference.
        check(unsafe {
            sys::tfs_xattr_set(fs, raw(file), name, ptr.cast(), len, flags, mode, checked, now())
        })
    }
}

/// An owner's wait for a file lock, stored in the zone; for [`Filesystem::end_wait`].
#[derive(Debug)]
pub struct LockWait(c_int);

impl LockWait {
    /// Returns whether other members' deadlock searches see the wait. The slots are limited: with very many waiters some
    /// have none.
    pub fn is_seen(&self) -> bool {
        self.0 < sys::TFS_LOCK_WAITS as c_int
    }
}

/// Keeps blocks from being reused until it is dropped.
pub struct Pin<'a> {
    fs: &'a Filesystem,
    pin: u32,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        // SAFETY: taken in Filesystem::pin of this handle.
        unsafe { sys::tfs_unpin(self.fs.raw(), self.pin) }
    }
}
