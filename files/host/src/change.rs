// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Change events: tells other members of changes made here, and reads theirs (`files/core/change.c`).

use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use crate::fs::{Filesystem, Result, check};
use crate::sys;

/// One change. The mask's bits are inotify's (`libc::IN_*`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub ino: u64,
    /// The directory and the name in it; `None`: not known.
    pub place: Option<(u64, Vec<u8>)>,
    /// `IN_CREATE`, `IN_MODIFY` …, with `IN_ISDIR`.
    pub mask: u32,
    /// Ties both halves of a rename together.
    pub cookie: u32,
    /// Heard: the member that made the change.
    pub member: u32,
}

impl Change {
    /// Makes a change without a cookie.
    pub fn new(ino: u64, place: Option<(u64, Vec<u8>)>, mask: u32) -> Change {
        Change { ino, place, mask, cookie: 0, member: 0 }
    }

    fn raw(&self) -> sys::tfs_change {
        let mut raw =
            sys::tfs_change { ino: self.ino, mask: self.mask, cookie: self.cookie, ..Default::default() };
        if let Some((dir, name)) = &self.place {
            raw.dir = *dir;
            let len = name.len().min(sys::TFS_NAME_MAX as usize);
            raw.name_len = len as u32;
            for (to, from) in raw.name.iter_mut().zip(&name[..len]) {
                *to = *from as std::ffi::c_char;
            }
        }
        raw
    }

    fn of(raw: &sys::tfs_change) -> Change {
        let name = raw.name.iter().take(raw.name_len as usize).map(|c| *c as u8).collect();
        Change {
            ino: raw.ino,
            place: (raw.dir != 0).then_some((raw.dir, name)),
            mask: raw.mask,
            cookie: raw.cookie,
            member: raw.member,
        }
    }
}

/// Serializes the threads that post changes, as the core wants it. Holds the last cookie.
#[derive(Default)]
pub(crate) struct Teller(Mutex<u32>);

impl Filesystem {
    /// Returns whether another member watches changes.
    pub fn change_wanted(&self) -> bool {
        // SAFETY: an open handle.
        unsafe { sys::tfs_change_wanted(self.raw()) }
    }

    /// Posts changes to the watching members; both halves of a rename together, so that they get one cookie. Returns the end of
    /// the last record.
    pub fn tell(&self, changes: &mut [Change]) -> u64 {
        let mut cookie = self.teller().0.lock().unwrap_or_else(PoisonError::into_inner);
        *cookie = cookie.wrapping_add(1).max(1);
        let mut end = 0;
        for change in changes {
            if change.mask & libc::IN_MOVE != 0 {
                change.cookie = *cookie;
            }
            // SAFETY: an open handle; one thread at a time, by the lock.
            end = unsafe { sys::tfs_change_post(self.raw(), &change.raw()) };
        }
        end
    }

    /// Returns whether no watcher has read the record that ends there.
    pub fn change_unheard(&self, end: u64) -> bool {
        // SAFETY: an open handle.
        unsafe { sys::tfs_change_unheard(self.raw(), end) }
    }

    /// Starts to receive other members' changes. One listener at a time.
    pub fn listen(&self) -> Result<Listener<'_>> {
        let mut raw = sys::tfs_listener::default();
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_listen_begin(self.raw(), &mut raw) })?;
        Ok(Listener { fs: self, raw })
    }
}

/// Receives changes until it is dropped.
pub struct Listener<'a> {
    fs: &'a Filesystem,
    raw: sys::tfs_listener,
}

impl Listener<'_> {
    /// Returns the next change; `None`: none now. EOVERFLOW: some were lost, and the next call gives those that follow.
    pub fn next_change(&mut self) -> Result<Option<Change>> {
        let mut raw = sys::tfs_change::default();
        // SAFETY: an open handle and this listener's own state.
        match unsafe { sys::tfs_listen_next(self.fs.raw(), &mut self.raw, &mut raw) } {
            0 => Ok(None),
            1 => Ok(Some(Change::of(&raw))),
            e => Err(Errno::from_raw_os_error(-e)),
        }
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        // SAFETY: an open handle.
        unsafe { sys::tfs_listen_end(self.fs.raw()) }
    }
}
