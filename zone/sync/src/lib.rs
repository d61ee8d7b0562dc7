// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Named semaphores, mutexes, read-write locks and event counters, shared by processes of all members of a zone and of the host.
//!
//! The C core does the work (`sync.c`, `libtombolo-sync.h`), which C programs link as well. This crate is its safe interface, and [`agent`] is the
//! part of a zone's server that ends waits across machines.
//!
//! - [`raw`]: the C functions.
//! - [`agent`]: rings members for host processes, wakes host processes for members, frees the locks of dead processes.

#![deny(missing_docs)]

pub mod agent;
pub mod raw;

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::time::Duration;

pub use agent::Agent;

/// An error of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The timeout is over.
    #[error("timed out")]
    TimedOut,
    /// The object was destroyed.
    #[error("the object was destroyed")]
    Destroyed,
    /// No object of this name.
    #[error("no object of this name")]
    NotFound,
    /// The name is taken.
    #[error("an object of this name exists")]
    Exists,
    /// The zone has no server.
    #[error("no process serves this zone's semaphores; start its project with `tombolo up`")]
    NotServed,
    /// Another errno of the C core.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// The result of locking: whether the last owner died with the lock. The lock is held in both cases; after a death the caller repairs the data
/// that it protects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Locked {
    /// The last owner had unlocked it.
    Clean,
    /// The last owner died while it held the lock.
    OwnerDied,
}

fn checked(code: i32) -> Result<()> {
    // Linux's numbers, as the C core returns them.
    match -code {
        0 => Ok(()),
        110 => Err(Error::TimedOut),
        43 => Err(Error::Destroyed),
        2 => Err(Error::NotFound),
        17 => Err(Error::Exists),
        107 => Err(Error::NotServed),
        other => Err(Error::Os(other)),
    }
}

fn locked(code: i32) -> Result<Locked> {
    const EOWNERDEAD: i32 = 130;
    if code == -EOWNERDEAD { Ok(Locked::OwnerDied) } else { checked(code).map(|()| Locked::Clean) }
}

fn nanos(timeout: Option<Duration>) -> i64 {
    timeout.map_or(-1, |t| i64::try_from(t.as_nanos()).unwrap_or(i64::MAX))
}

/// A process's session in a zone's SYNC area. Share it between threads by reference.
pub struct Sync {
    raw: NonNull<raw::TmbSync>,
}

// SAFETY: the C core's functions may be called from several threads at once (libtombolo-sync.h).
unsafe impl Send for Sync {}
// SAFETY: as above.
unsafe impl std::marker::Sync for Sync {}

impl Sync {
    /// Opens the semaphores of a zone: by its file or `/proc/PID/fd/N` on the host, by `/dev/tombolo-sync-…` in a guest.
    pub fn open(path: impl AsRef<Path>) -> Result<Sync> {
        let path = CString::new(path.as_ref().as_os_str().as_bytes()).map_err(|_| Error::NotFound)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a valid string and a valid place for the result.
        checked(unsafe { raw::tmb_sync_open(path.as_ptr(), &mut raw) })?;
        NonNull::new(raw).map(|raw| Sync { raw }).ok_or(Error::NotFound)
    }

    fn create(&self, kind: raw::Kind, name: &str, initial: u64) -> Result<raw::TmbObject> {
        self.named(name, |name, object| {
            // SAFETY: an open session, a valid string, a valid place for the result.
            unsafe { raw::tmb_sync_create(self.raw.as_ptr(), kind, name, initial, object) }
        })
    }

    fn lookup(&self, kind: raw::Kind, name: &str) -> Result<raw::TmbObject> {
        self.named(name, |name, object| {
            // SAFETY: an open session, a valid string, a valid place for the result.
            unsafe { raw::tmb_sync_lookup(self.raw.as_ptr(), kind, name, object) }
        })
    }

    fn named(
        &self,
        name: &str,
        call: impl FnOnce(*const std::ffi::c_char, *mut raw::TmbObject) -> i32,
    ) -> Result<raw::TmbObject> {
        let name = CString::new(name).map_err(|_| Error::Os(22))?;
        let mut object = raw::TmbObject::default();
        checked(call(name.as_ptr(), &mut object)).map(|()| object)
    }

    /// Removes a name; waiters on its object get [`Error::Destroyed`].
    pub fn destroy(&self, name: &str) -> Result<()> {
        let name = CString::new(name).map_err(|_| Error::NotFound)?;
        // SAFETY: an open session and a valid string.
        checked(unsafe { raw::tmb_sync_destroy(self.raw.as_ptr(), name.as_ptr()) })
    }
}

impl Drop for Sync {
    fn drop(&mut self) {
        // SAFETY: open until here, and objects borrow `self`, so none is left.
        unsafe { raw::tmb_sync_close(self.raw.as_ptr()) };
    }
}

macro_rules! object {
    ($(#[$doc:meta])* $name:ident, $kind:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name<'a> {
            sync: &'a Sync,
            at: raw::TmbObject,
        }

        impl<'a> $name<'a> {
            /// Opens an existing object of this type.
            pub fn open(sync: &'a Sync, name: &str) -> Result<Self> {
                Ok($name { sync, at: sync.lookup($kind, name)? })
            }

            fn call(&self, call: impl FnOnce(*mut raw::TmbSync, raw::TmbObject) -> i32) -> i32 {
                call(self.sync.raw.as_ptr(), self.at)
            }
        }
    };
}

object!(
    /// A counting semaphore.
    Semaphore,
    raw::SEMAPHORE
);
object!(
    /// A robust mutex. It excludes processes, and threads of one process; it is not recursive.
    Mutex,
    raw::MUTEX
);
object!(
    /// A robust read-write lock. A writer that waits comes before readers of other processes; a process that reads may lock again at once, so one whose
    /// threads' locks overlap without end keeps writers out.
    RwLock,
    raw::RWLOCK
);
object!(
    /// A counter that only grows, and can be waited for.
    Event,
    raw::EVENT
);

impl<'a> Semaphore<'a> {
    /// Makes a semaphore with a first count, at most 2³¹ − 1.
    pub fn create(sync: &'a Sync, name: &str, count: u32) -> Result<Self> {
        Ok(Semaphore { sync, at: sync.create(raw::SEMAPHORE, name, u64::from(count))? })
    }

    /// Adds one and wakes a waiter.
    pub fn post(&self) -> Result<()> {
        // SAFETY: an open session; the object is checked by the core.
        checked(self.call(|s, o| unsafe { raw::tmb_sem_post(s, o) }))
    }

    /// Takes one, waiting for it. `None`: for ever.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        // SAFETY: as in post.
        checked(self.call(|s, o| unsafe { raw::tmb_sem_wait(s, o, nanos(timeout)) }))
    }

    /// The count at this moment.
    pub fn value(&self) -> Result<u32> {
        let mut value = 0;
        // SAFETY: as in post; a valid place for the result.
        checked(self.call(|s, o| unsafe { raw::tmb_sem_value(s, o, &mut value) }))?;
        Ok(value)
    }
}

impl<'a> Mutex<'a> {
    /// Makes a mutex, unlocked.
    pub fn create(sync: &'a Sync, name: &str) -> Result<Self> {
        Ok(Mutex { sync, at: sync.create(raw::MUTEX, name, 0)? })
    }

    /// Locks it. `None`: waits for ever.
    pub fn lock(&self, timeout: Option<Duration>) -> Result<Locked> {
        // SAFETY: an open session; the object is checked by the core.
        locked(self.call(|s, o| unsafe { raw::tmb_mutex_lock(s, o, nanos(timeout)) }))
    }

    /// Unlocks it; refused if this process doesn't hold it.
    pub fn unlock(&self) -> Result<()> {
        // SAFETY: as in lock.
        checked(self.call(|s, o| unsafe { raw::tmb_mutex_unlock(s, o) }))
    }
}

impl<'a> RwLock<'a> {
    /// Makes a lock, unlocked.
    pub fn create(sync: &'a Sync, name: &str) -> Result<Self> {
        Ok(RwLock { sync, at: sync.create(raw::RWLOCK, name, 0)? })
    }

    /// Locks it for reading.
    pub fn read(&self, timeout: Option<Duration>) -> Result<Locked> {
        // SAFETY: an open session; the object is checked by the core.
        locked(self.call(|s, o| unsafe { raw::tmb_rwlock_rdlock(s, o, nanos(timeout)) }))
    }

    /// Locks it for writing.
    pub fn write(&self, timeout: Option<Duration>) -> Result<Locked> {
        // SAFETY: as in read.
        locked(self.call(|s, o| unsafe { raw::tmb_rwlock_wrlock(s, o, nanos(timeout)) }))
    }

    /// Ends one reading lock of this process.
    pub fn unlock_read(&self) -> Result<()> {
        // SAFETY: as in read.
        checked(self.call(|s, o| unsafe { raw::tmb_rwlock_rdunlock(s, o) }))
    }

    /// Ends the writing lock.
    pub fn unlock_write(&self) -> Result<()> {
        // SAFETY: as in read.
        checked(self.call(|s, o| unsafe { raw::tmb_rwlock_wrunlock(s, o) }))
    }
}

impl<'a> Event<'a> {
    /// Makes a counter.
    pub fn create(sync: &'a Sync, name: &str, count: u64) -> Result<Self> {
        Ok(Event { sync, at: sync.create(raw::EVENT, name, count)? })
    }

    /// Adds to it and wakes the waiters.
    pub fn advance(&self, by: u64) -> Result<()> {
        // SAFETY: an open session; the object is checked by the core.
        checked(self.call(|s, o| unsafe { raw::tmb_event_advance(s, o, by) }))
    }

    /// The count at this moment.
    pub fn read(&self) -> Result<u64> {
        let mut count = 0;
        // SAFETY: as in advance; a valid place for the result.
        checked(self.call(|s, o| unsafe { raw::tmb_event_read(s, o, &mut count) }))?;
        Ok(count)
    }

    /// Waits until the count is at least this.
    pub fn wait(&self, at_least: u64, timeout: Option<Duration>) -> Result<()> {
        // SAFETY: as in advance.
        checked(self.call(|s, o| unsafe { raw::tmb_event_await(s, o, at_least, nanos(timeout)) }))
    }
}
