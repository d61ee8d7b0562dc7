// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Making stores in a mapped file durable, for many threads at once.
//!
//! All files of a mount lie in one file of its host, and the kernel tells of a failed write to the disk only once for each open description, to whoever
//! syncs next. Afterwards the kernel takes the lost pages for written, so the next fdatasync(2) succeeds though the caller's data may be in them. Here such
//! a failure stays: no later sync succeeds. Threads that sync at the same time share one call, since of two calls at once the kernel may tell the failure
//! to the one alone.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::io::Errno;

/// The state of a mapped file's stores on their way to the disk.
#[derive(Debug)]
pub(crate) struct Writeback {
    file: Arc<OwnedFd>,
    calls: Mutex<Calls>,
    ended: Condvar,
}

/// Calls of fdatasync(2), one after the other.
#[derive(Debug, Default)]
struct Calls {
    begun: u64,
    runs: bool,
    /// The last one that succeeded.
    succeeded: u64,
    failed: Option<Errno>,
}

impl Writeback {
    pub(crate) fn of(file: Arc<OwnedFd>) -> Writeback {
        Writeback { file, calls: Mutex::default(), ended: Condvar::new() }
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Makes all stores before this call durable.
    ///
    /// # Errors
    /// Those of fdatasync(2), and that of an earlier one.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(self.sync_by(|| rustix::fs::fdatasync(&*self.file))?)
    }

    fn sync_by(&self, sync: impl Fn() -> Result<(), Errno>) -> Result<(), Errno> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // One that runs already may have begun before the last stores.
        let wanted = calls.begun + 1;
        loop {
            if calls.succeeded >= wanted {
                return Ok(());
            }
            if let Some(error) = calls.failed {
                return Err(error);
            }
            if calls.runs {
                calls = self.ended.wait(calls).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            calls.begun += 1;
            calls.runs = true;
            drop(calls);
            let done = sync();
            calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            calls.runs = false;
            self.ended.notify_all();
            match done {
                Ok(()) => calls.succeeded = calls.begun,
                // These say nothing of what was written.
                Err(error @ (Errno::INTR | Errno::NOMEM)) => return Err(error),
                Err(error) => calls.failed = Some(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn nothing() -> Writeback {
        Writeback::of(Arc::new(rustix::pipe::pipe().expect("a pipe").0))
    }

    #[test]
    fn once_stores_could_not_be_written_no_later_sync_says_that_they_are() {
        let stores = nothing();
        assert_eq!(stores.sync_by(|| Ok(())), Ok(()));
        assert_eq!(stores.sync_by(|| Err(Errno::NOSPC)), Err(Errno::NOSPC));
        assert_eq!(stores.sync_by(|| Ok(())), Err(Errno::NOSPC));
    }

    #[test]
    fn a_sync_that_was_interrupted_can_be_made_again() {
        let stores = nothing();
        assert_eq!(stores.sync_by(|| Err(Errno::INTR)), Err(Errno::INTR));
        assert_eq!(stores.sync_by(|| Ok(())), Ok(()));
    }

    /// Several that come while one runs share the next one, which fails for all of them.
    #[test]
    fn who_syncs_beside_another_one_is_told_of_the_failure_too() {
        let (stores, calls) = (nothing(), AtomicU32::new(0));
        let meet = Barrier::new(2);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                stores.sync_by(|| {
                    meet.wait();
                    meet.wait();
                    Ok(())
                })
            });
            meet.wait();
            let others = [0; 5].map(|_| {
                scope.spawn(|| {
                    stores.sync_by(|| {
                        calls.fetch_add(1, Ordering::SeqCst);
                        Err(Errno::IO)
                    })
                })
            });
            meet.wait();
            assert_eq!(first.join().expect("no panic"), Ok(()));
            assert!(others.into_iter().all(|other| other.join().expect("no panic") == Err(Errno::IO)));
        });
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }
}
