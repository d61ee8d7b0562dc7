// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The protocol of sleeping and waking (`format/tombolo_sync.h`), whose interleavings shuttle explores: no thread sleeps for ever, and no
//! two hold one count. In the model a sleep has no timeout: the claims hold without the 250 ms slices. `sync.c` does these steps in this
//! order, with sequentially consistent operations, as shuttle's atomics are.

use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

const SCHEDULES: usize = 2_000;

/// An object, with the kernel's part: a queue of sleepers per member.
struct Object {
    value: AtomicU64,
    waiters: AtomicU64,
    seq: AtomicU32,
    queues: [(Mutex<()>, Condvar); 2],
}

impl Object {
    fn new(value: u64) -> Arc<Object> {
        Arc::new(Object {
            value: AtomicU64::new(value),
            waiters: AtomicU64::new(0),
            seq: AtomicU32::new(0),
            queues: [(Mutex::new(()), Condvar::new()), (Mutex::new(()), Condvar::new())],
        })
    }

    /// As FUTEX_WAIT and TMB_SYNC_IOC_WAIT: no sleep once seq has changed, and no lost wake-up in between.
    fn sleep(&self, member: usize, seq: u32) {
        let (lock, queue) = &self.queues[member];
        let mut guard = lock.lock().unwrap();
        while self.seq.load(SeqCst) == seq {
            guard = queue.wait(guard).unwrap();
        }
    }

    fn wake_waiters(&self) {
        if self.waiters.load(SeqCst) == 0 {
            return;
        }
        let who = self.waiters.swap(0, SeqCst);
        if who == 0 {
            return;
        }
        self.seq.fetch_add(1, SeqCst);
        for (member, (lock, queue)) in self.queues.iter().enumerate() {
            if who >> member & 1 != 0 {
                drop(lock.lock().unwrap());
                queue.notify_all();
            }
        }
    }

    fn wait_for(&self, member: usize, looks_again: bool, try_it: impl Fn(&Object) -> bool) {
        if try_it(self) {
            return;
        }
        loop {
            let seq = self.seq.load(SeqCst);
            self.waiters.fetch_or(1 << member, SeqCst);
            if looks_again && try_it(self) {
                return;
            }
            self.sleep(member, seq);
            if !looks_again && try_it(self) {
                return;
            }
        }
    }

    fn try_take(&self) -> bool {
        let mut count = self.value.load(SeqCst);
        while count > 0 {
            match self.value.compare_exchange(count, count - 1, SeqCst, SeqCst) {
                Ok(_) => return true,
                // Giving up here, with a count left, is a mistake that this model found in itself.
                Err(found) => count = found,
            }
        }
        false
    }

    fn post(&self) {
        self.value.fetch_add(1, SeqCst);
        self.wake_waiters();
    }

    fn lock(&self, member: usize, me: u64) {
        self.wait_for(member, true, |o| o.value.compare_exchange(0, me, SeqCst, SeqCst).is_ok());
    }

    fn unlock(&self, me: u64) {
        assert_eq!(self.value.swap(0, SeqCst), me, "another thread was in");
        self.wake_waiters();
    }
}

fn posts_meet_waits(looks_again: bool) {
    let sem = Object::new(0);
    let waiters: Vec<_> = [0, 0, 1]
        .into_iter()
        .map(|member| {
            let sem = Arc::clone(&sem);
            thread::spawn(move || sem.wait_for(member, looks_again, Object::try_take))
        })
        .collect();
    let poster = Arc::clone(&sem);
    let other = thread::spawn(move || poster.post());
    sem.post();
    sem.post();
    other.join().unwrap();
    for waiter in waiters {
        waiter.join().unwrap();
    }
    assert_eq!(sem.value.load(SeqCst), 0);
}

#[test]
fn as_many_posts_as_waits_leave_nobody_asleep() {
    shuttle::check_random(|| posts_meet_waits(true), SCHEDULES);
    shuttle::check_pct(|| posts_meet_waits(true), SCHEDULES, 3);
}

/// The model finds the mistake that the second look prevents; without this the test above would prove little.
#[test]
#[should_panic(expected = "deadlock")]
fn a_waiter_that_does_not_look_again_may_sleep_for_ever() {
    shuttle::check_random(|| posts_meet_waits(false), SCHEDULES);
}

#[test]
fn a_lock_lets_one_in_at_a_time_and_everybody_in_the_end() {
    let run = || {
        let mutex = Object::new(0);
        let inside = Arc::new(AtomicU32::new(0));
        let threads: Vec<_> = (0..3u64)
            .map(|n| {
                let (mutex, inside) = (Arc::clone(&mutex), Arc::clone(&inside));
                thread::spawn(move || {
                    for _ in 0..2 {
                        mutex.lock(usize::from(n == 2), n + 1);
                        assert_eq!(inside.fetch_add(1, SeqCst), 0);
                        inside.fetch_sub(1, SeqCst);
                        mutex.unlock(n + 1);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    };
    shuttle::check_random(run, SCHEDULES / 4);
    shuttle::check_pct(run, SCHEDULES / 4, 3);
}
