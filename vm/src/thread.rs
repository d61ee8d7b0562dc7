// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Threads where none may be had: a limit on processes counts threads too. A supervisor that has reached it fails at what it begins, and still
//! ends what it has begun.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::qemu::start::no_process;

/// Starts a thread of this name.
///
/// # Errors
/// When none can be had. Names the remedy.
pub fn start<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(work).map_err(|e| no_process(&e))
}

/// As [`start`], for a thread that ends with the scope.
///
/// # Errors
/// As [`start`].
pub fn start_in<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().name(name.into()).spawn_scoped(scope, work).map_err(|e| no_process(&e))
}

/// Does these jobs at the same time, each on a thread of its own; those for which none can be had one after the other, in their order, on this one.
/// Returns their results in their order; `None`: that job has panicked.
pub fn all<T: Send, J: FnOnce() -> T + Send>(
    name: &str,
    jobs: impl IntoIterator<Item = J>,
) -> Vec<Option<T>> {
    all_by(&|scope, work| start_in(scope, name, work), jobs)
}

/// Has a job done on a thread.
type StartIn<'a> = dyn for<'s> Fn(&'s Scope<'s, '_>, Box<dyn FnOnce() + Send + 's>) -> io::Result<ScopedJoinHandle<'s, ()>>
    + 'a;

fn all_by<T: Send, J: FnOnce() -> T + Send>(
    start: &StartIn<'_>,
    jobs: impl IntoIterator<Item = J>,
) -> Vec<Option<T>> {
    let slots: Vec<Slot<T, J>> = jobs.into_iter().map(Slot::new).collect();
    std::thread::scope(|scope| {
        let alone: Vec<&Slot<T, J>> =
            slots.iter().filter(|slot| start(scope, Box::new(|| slot.work())).is_err()).collect();
        alone.into_iter().for_each(Slot::work);
    });
    slots.into_iter().map(Slot::result).collect()
}

/// A job, which a thread that can't be had must not take along, and its result.
struct Slot<T, J> {
    job: Mutex<Option<J>>,
    result: Mutex<Option<T>>,
}

impl<T, J: FnOnce() -> T> Slot<T, J> {
    fn new(job: J) -> Slot<T, J> {
        Slot { job: Mutex::new(Some(job)), result: Mutex::default() }
    }

    fn work(&self) {
        let job = self.job.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic is told by the hook; the other jobs go on.
        let result = job.and_then(|job| catch_unwind(AssertUnwindSafe(job)).ok());
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = result;
    }

    fn result(self) -> Option<T> {
        self.result.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn jobs_for_which_no_thread_can_be_had_are_done_all_the_same_and_in_their_order() {
        let here = std::thread::current().id();
        for threads in 0..=4 {
            let left = AtomicUsize::new(threads);
            let turn = AtomicUsize::new(0);
            let jobs = (0..4).map(|n| {
                let turn = &turn;
                move || (n, std::thread::current().id(), turn.fetch_add(1, Ordering::Relaxed))
            });
            let done = all_by(
                &|scope, work| {
                    let had = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                    had.map_err(|_| io::ErrorKind::WouldBlock)?;
                    start_in(scope, "job", work)
                },
                jobs,
            );
            let done: Vec<_> = done.into_iter().map(Option::unwrap).collect();
            assert!(done.iter().map(|(n, ..)| *n).eq(0..4));
            let alone: Vec<usize> =
                done.iter().filter(|(_, id, _)| *id == here).map(|(.., turn)| *turn).collect();
            assert!(alone.len() == 4 - threads && alone.is_sorted(), "{alone:?}");
        }
    }

    #[test]
    fn a_job_that_panics_takes_no_other_along() {
        let done = all("job", (0..3).map(|n| move || if n == 1 { panic!("on purpose") } else { n }));
        assert_eq!(done, [Some(0), None, Some(2)]);
    }
}
