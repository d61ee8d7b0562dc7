// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Liveness of members, decided by locks that the kernel drops at a process' death.
//!
//! The owner of a zone and each of its members hold a write lock (OFD, `fcntl(2)`) on one byte of the backing file: the owner on byte 0,
//! member `i` on byte 1 + `i`. Such a lock belongs to an open file description, and the kernel drops it with the last copy of the description,
//! however the process dies. A child process (QEMU for example) that inherits the description keeps the lock for as long as it lives.
//! Byte 65 serializes changes of the member table; the 256 bytes after it belong to sessions of the SYNC area; byte 322 serializes grants, and the making,
//! restoring and repairing of file systems. The owner also holds byte 323, and a byte after it for each slot that it keeps for a member. A process that repairs
//! what lies in the zone holds byte 388. The locks touch no data and need no cooperation from guests.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::format::TMB_MAX_MEMBERS;
use crate::member::MemberId;
use crate::{Error, Result};

pub(crate) const OWNER_BYTE: u32 = 0;
pub(crate) const TABLE_BYTE: u32 = TMB_MAX_MEMBERS + 1;

/// From here on: a byte per session of the SYNC area (`format/tombolo_sync.h`), held by host processes that use it.
const SESSION_BYTES: u32 = TABLE_BYTE + 1;
const SESSIONS: u32 = 256;

/// Serializes changes of who is granted what, and of whole file systems ([`crate::Zone::hold_grants`]).
pub(crate) const GRANTS_BYTE: u32 = SESSION_BYTES + SESSIONS;

/// Held by an owner that holds the bytes of [`promise_byte`]; one of an earlier release doesn't.
pub(crate) const PROMISES_BYTE: u32 = GRANTS_BYTE + 1;

/// Held by the owner while it keeps a slot for a member.
pub(crate) fn promise_byte(id: MemberId) -> u32 {
    PROMISES_BYTE + 1 + id.index()
}

/// Held by a process that keeps members out ([`crate::Zone::keep_members_out`]).
pub(crate) const REPAIR_BYTE: u32 = PROMISES_BYTE + 1 + TMB_MAX_MEMBERS;
const _: () = assert!(REPAIR_BYTE == 388);

pub(crate) fn member_byte(id: MemberId) -> u32 {
    1 + id.index()
}

/// Holds a member (or the owner) alive until the last copy of its descriptor is closed.
///
/// To tie it to a child process, let the child inherit the descriptor ([`AsFd`]; it is close-on-exec here).
#[derive(Debug)]
pub struct Liveness {
    file: File,
}

impl Liveness {
    /// Goes on with the lock that this descriptor, kept from the program before, holds.
    pub fn resume(fd: OwnedFd) -> Liveness {
        Liveness { file: fd.into() }
    }

    /// Ends it at once, also where a child process still has a copy of the descriptor.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub fn end(self) -> Result<()> {
        unlock_all(&self.file)
    }
}

impl AsFd for Liveness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Holds a byte for this process alone. Dropping it frees the byte at once, which closing the descriptor would not: a process that is being
/// started has a copy of each descriptor until its `exec`.
#[derive(Debug)]
pub(crate) struct Own {
    liveness: Liveness,
    /// The process that may free the byte; a copy that `fork(2)` made may not.
    process: u32,
}

impl Own {
    fn new(liveness: Liveness) -> Self {
        Self { liveness, process: std::process::id() }
    }

    /// Goes on with the locks of the program before.
    pub(crate) fn resume(fd: OwnedFd) -> Self {
        Self::new(Liveness::resume(fd))
    }

    pub(crate) fn liveness(&self) -> &Liveness {
        &self.liveness
    }

    /// Tries to take `byte`; `Ok(None)` when another description has it.
    pub(crate) fn try_hold(fd: BorrowedFd<'_>, byte: u32) -> Result<Option<Self>> {
        Ok(try_hold(fd, true, byte)?.map(Self::new))
    }

    /// Holds another byte too, or frees it. No other process holds it at any time.
    pub(crate) fn set(&self, byte: u32, held: bool) -> Result<()> {
        let kind = if held { libc::F_WRLCK } else { libc::F_UNLCK };
        let set = set_lock(self.liveness.as_fd(), &lock_request(kind, byte));
        set.map(drop).map_err(|e| Error::io("locking the zone's memory", e))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            let freed = unlock_all(&self.liveness.file);
            debug_assert!(freed.is_ok(), "a process can free a lock that it holds");
        }
    }
}

/// Frees all bytes that a description holds.
fn unlock_all(file: &File) -> Result<()> {
    // From the first, of any number.
    let mut request = lock_request(libc::F_UNLCK, 0);
    request.l_len = 0;
    set_lock(file.as_fd(), &request).map(drop).map_err(|e| Error::io("unlocking the zone's memory", e))
}

/// Sets a lock without waiting. Returns false when another description has it.
fn set_lock(fd: BorrowedFd<'_>, request: &libc::flock) -> io::Result<bool> {
    // SAFETY: a valid descriptor and a valid struct flock.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, request) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) { Ok(false) } else { Err(error) }
}

/// A new open file description of the same file, so that its locks are its own.
pub(crate) fn reopen(fd: BorrowedFd<'_>, writable: bool) -> io::Result<File> {
    std::fs::OpenOptions::new().read(true).write(writable).open(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

fn lock_request(kind: libc::c_int, byte: u32) -> libc::flock {
    // SAFETY: flock is plain data for which zero is valid.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    request.l_start = libc::off_t::from(byte);
    request.l_len = 1;
    request
}

/// Tries to take `byte`; `Ok(None)` when another description has it.
pub(crate) fn try_hold(fd: BorrowedFd<'_>, writable: bool, byte: u32) -> Result<Option<Liveness>> {
    let file = reopen(fd, writable)
        .map_err(|e| Error::io("reopening the zone's memory through /proc/self/fd", e))?;
    // A description that is open for reading only can hold only read locks. No process asks for a read lock otherwise, so it excludes as well,
    // except another read-only holder of the same byte.
    let kind = if writable { libc::F_WRLCK } else { libc::F_RDLCK };
    let taken = set_lock(file.as_fd(), &lock_request(kind, byte));
    let taken = taken.map_err(|e| Error::io("locking the zone's memory", e))?;
    Ok(taken.then_some(Liveness { file }))
}

/// Takes `byte`, and waits while another description has it: [`TABLE_BYTE`] is held for microseconds, [`GRANTS_BYTE`] for a grant, a member's
/// for its life.
pub(crate) fn hold_waiting(fd: BorrowedFd<'_>, byte: u32) -> Result<Own> {
    let file =
        reopen(fd, true).map_err(|e| Error::io("reopening the zone's memory through /proc/self/fd", e))?;
    let request = lock_request(libc::F_WRLCK, byte);
    loop {
        // SAFETY: a valid descriptor and a valid struct flock.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLKW, &request) } == 0 {
            return Ok(Own::new(Liveness { file }));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(Error::io("waiting for a lock of the zone's memory", error));
        }
    }
}

/// Has the open file description that `theirs` is a copy of hold `byte`, also if it does already: the kernel frees the byte at the end of the last process that has a copy
/// of the description. Returns false when another description has it.
pub(crate) fn hold_by(theirs: BorrowedFd<'_>, byte: u32) -> io::Result<bool> {
    // Of read locks, too, which do not exclude each other. The kernel does not tell of the description's own.
    if is_locked(theirs, lock_request(libc::F_WRLCK, byte))? {
        return Ok(false);
    }
    // As in try_hold().
    match set_lock(theirs, &lock_request(libc::F_WRLCK, byte)) {
        Err(e) if e.raw_os_error() == Some(libc::EBADF) => {
            set_lock(theirs, &lock_request(libc::F_RDLCK, byte))
        }
        done => done,
    }
}

/// Frees a byte that [`hold_by`] has had held.
pub(crate) fn free(theirs: BorrowedFd<'_>, byte: u32) -> io::Result<()> {
    set_lock(theirs, &lock_request(libc::F_UNLCK, byte)).map(drop)
}

/// Returns whether any description holds `byte`.
pub(crate) fn is_held(fd: BorrowedFd<'_>, byte: u32) -> Result<bool> {
    any_held(fd, lock_request(libc::F_WRLCK, byte))
}

/// Returns which members' bytes are held, a bit each.
pub(crate) fn members_held(fd: BorrowedFd<'_>) -> Result<u64> {
    bits_held(fd, 1)
}

/// Returns which slots the owner keeps for members, a bit each; `None`: it doesn't tell, or there is none.
pub(crate) fn promises_held(fd: BorrowedFd<'_>) -> Result<Option<u64>> {
    is_held(fd, PROMISES_BYTE)?.then(|| bits_held(fd, PROMISES_BYTE + 1)).transpose()
}

/// Returns which of the bytes for members that begin here are held.
fn bits_held(fd: BorrowedFd<'_>, begin: u32) -> Result<u64> {
    let file = look(fd)?;
    let mut held = 0;
    // The kernel names some lock of a range, not the first one, so a range that has one is halved.
    let mut ranges = vec![(0, TMB_MAX_MEMBERS)];
    while let Some((first, count)) = ranges.pop() {
        let mut request = lock_request(libc::F_WRLCK, begin + first);
        request.l_len = libc::off_t::from(count);
        if !is_locked(file.as_fd(), request).map_err(asking)? {
            continue;
        }
        if count == 1 {
            held |= 1 << first;
        } else {
            ranges.extend([(first, count / 2), (first + count / 2, count - count / 2)]);
        }
    }
    Ok(held)
}

/// Returns whether any host process has the SYNC area open.
pub(crate) fn sessions_held(fd: BorrowedFd<'_>) -> Result<bool> {
    let mut request = lock_request(libc::F_WRLCK, SESSION_BYTES);
    request.l_len = libc::off_t::from(SESSIONS);
    any_held(fd, request)
}

fn any_held(fd: BorrowedFd<'_>, request: libc::flock) -> Result<bool> {
    is_locked(look(fd)?.as_fd(), request).map_err(asking)
}

/// A description of its own: locks of the same description don't count as conflicts.
fn look(fd: BorrowedFd<'_>) -> Result<File> {
    reopen(fd, false).map_err(|e| Error::io("reopening the zone's memory through /proc/self/fd", e))
}

fn asking(e: io::Error) -> Error {
    Error::io("asking for locks on the zone's memory", e)
}

fn is_locked(fd: BorrowedFd<'_>, mut request: libc::flock) -> io::Result<bool> {
    // SAFETY: a valid descriptor and a valid struct flock.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::c_int::from(request.l_type) != libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_byte_of_ones_own_is_free_at_once_though_a_process_that_is_being_started_has_a_copy() {
        let file = tempfile::tempfile().unwrap();
        let held = Own::try_hold(file.as_fd(), OWNER_BYTE).unwrap().unwrap();
        let copy = held.liveness.as_fd().try_clone_to_owned().unwrap();
        assert!(is_held(file.as_fd(), OWNER_BYTE).unwrap());
        drop(held);
        assert!(!is_held(file.as_fd(), OWNER_BYTE).unwrap());
        assert!(Own::try_hold(file.as_fd(), OWNER_BYTE).unwrap().is_some());
        drop(copy);
    }

    #[test]
    fn each_member_that_is_held_is_found() {
        let file = tempfile::tempfile().unwrap();
        let ids = [0, 1, 31, 32, 40, 63];
        let hold = |i| try_hold(file.as_fd(), true, member_byte(MemberId::new(i).unwrap())).unwrap().unwrap();
        let _others =
            [OWNER_BYTE, TABLE_BYTE].map(|byte| try_hold(file.as_fd(), true, byte).unwrap().unwrap());
        assert_eq!(members_held(file.as_fd()).unwrap(), 0);
        let _held = ids.map(hold);
        assert_eq!(members_held(file.as_fd()).unwrap(), ids.iter().map(|i| 1 << i).sum::<u64>());
    }

    #[test]
    fn a_member_lives_as_long_as_any_copy_of_its_descriptor() {
        let file = tempfile::tempfile().unwrap();
        let byte = 3;
        let held = try_hold(file.as_fd(), true, byte).unwrap().unwrap();
        let copy = held.as_fd().try_clone_to_owned().unwrap();
        drop(held);
        assert!(is_held(file.as_fd(), byte).unwrap());
        drop(copy);
        assert!(!is_held(file.as_fd(), byte).unwrap());
    }

    #[test]
    fn a_member_that_is_let_go_lives_no_longer_though_a_copy_of_its_descriptor_stays() {
        let file = tempfile::tempfile().unwrap();
        let held = try_hold(file.as_fd(), true, 3).unwrap().unwrap();
        let _copy = held.as_fd().try_clone_to_owned().unwrap();
        held.end().unwrap();
        assert!(!is_held(file.as_fd(), 3).unwrap());
    }

    #[test]
    fn a_description_of_another_process_holds_a_byte_until_its_last_copy_is_closed_also_one_that_only_reads()
    {
        let file = tempfile::NamedTempFile::new().unwrap();
        let look = file.as_file().as_fd();
        for writes in [true, false] {
            let open = || File::options().read(true).write(writes).open(file.path()).unwrap();
            let (theirs, others) = (open(), open());
            let copy = theirs.try_clone().unwrap();
            assert!(hold_by(copy.as_fd(), 3).unwrap() && hold_by(copy.as_fd(), 3).unwrap());
            drop(copy);
            assert!(!hold_by(others.as_fd(), 3).unwrap(), "another one has it");
            assert!(is_held(look, 3).unwrap() && try_hold(look, true, 3).unwrap().is_none());
            drop(theirs);
            assert!(!is_held(look, 3).unwrap());
            assert!(hold_by(others.as_fd(), 3).unwrap());
            free(others.as_fd(), 3).unwrap();
            assert!(!is_held(look, 3).unwrap());
        }
    }
}
