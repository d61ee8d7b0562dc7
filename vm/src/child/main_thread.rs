// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Work for the main thread of the supervisor. A child is told to die when the thread that started it ends, and of all threads only the one
//! that calls execve(2) survives that. So the main thread starts all children that last, and it is the one that becomes another program
//! (see [`crate::project::upgrade`]).

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

type Job = Box<dyn FnOnce() + Send>;

/// To the main thread of this process, while that serves.
static JOBS: Mutex<Option<Sender<Option<Job>>>> = Mutex::new(None);
/// The main thread does no more jobs.
static ENDED: Condvar = Condvar::new();

fn jobs() -> Option<Sender<Option<Job>>> {
    JOBS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The main thread's end of the queue.
#[derive(Debug)]
pub struct Queue(Receiver<Option<Job>>);

/// Makes the calling thread the one that does the jobs of this process; it must call [`Queue::serve`].
pub fn claim() -> Queue {
    let (sender, queue) = channel();
    *JOBS.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
    Queue(queue)
}

impl Queue {
    /// Does jobs until [`end`].
    pub fn serve(self) {
        while let Ok(Some(job)) = self.0.recv() {
            job();
        }
        *JOBS.lock().unwrap_or_else(PoisonError::into_inner) = None;
        ENDED.notify_all();
    }
}

/// The main thread does no more jobs, and goes on.
pub fn end() {
    if let Some(jobs) = jobs() {
        // It has ended already.
        let _ended = jobs.send(None);
    }
}

/// Waits at most `limit` until the main thread does no more jobs. Returns whether that is so: a job can be stuck in the kernel.
pub fn has_ended_within(limit: Duration) -> bool {
    let jobs = JOBS.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = ENDED.wait_timeout_while(jobs, limit, |jobs| jobs.is_some());
    waited.unwrap_or_else(PoisonError::into_inner).0.is_none()
}

/// Does something on the main thread and waits for it; here, where no thread has [claimed](claim) the jobs. `None`: the process is about to
/// end.
pub fn run<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    run_watched(job, Duration::MAX, &mut || ())
}

/// As [`run`]; calls `late` each time that the job has taken another `limit`. The jobs before it do not count.
pub fn run_watched<T: Send + 'static>(
    job: impl FnOnce() -> T + Send + 'static,
    limit: Duration,
    late: &mut dyn FnMut(),
) -> Option<T> {
    let Some(jobs) = jobs() else { return Some(job()) };
    let (begin, begun) = channel();
    let (sender, result) = channel();
    let job = move || {
        // The thread that asked waits for both.
        let _waits = begin.send(());
        let _waits = sender.send(job());
    };
    jobs.send(Some(Box::new(job))).ok()?;
    begun.recv().ok()?;
    loop {
        match result.recv_timeout(limit) {
            Ok(done) => return Some(done),
            Err(RecvTimeoutError::Timeout) => late(),
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}
