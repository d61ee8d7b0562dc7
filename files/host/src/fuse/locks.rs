// SPDX-License-Identifier: Apache-2.0 OR MIT
//! flock and fcntl locks of a mount, which exclude across all members: the zone's table decides, the kernel has none of its own.
//!
//! The kernel gives a lock's owner a number: a process (POSIX), or an open file (flock, open-file-description locks). It reports the
//! end of owners differently: a FLUSH with the owner for each close by a process; for an open file only the RELEASE of its handle. So
//! every open has a handle of its own, whose release also releases its locks.
//!
//! No process waits for a RELEASE. When it comes, its process may have locked the file again through another descriptor, and another open file may
//! have got its number. So the owner of a flock is its handle, which no other open file gets, and a release leaves an owner that has locks through
//! another open file alone. A request that would fail because of an open file that is being closed waits for its RELEASE.
//!
//! A request that must wait does not block a serving thread: it goes to one waiting thread, which tries again when a lock may have
//! become free: a doorbell rang, or a request here released one. Without a doorbell it polls 50 times a second while a request waits.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::abi::{self, Cursor, Out};
use super::session;
use crate::caller;
use crate::fs::{FileLock, Filesystem, Handle, LockWait, Result};
use crate::sys;

/// Interval of polls while a request waits, without a doorbell.
const LOOK: Duration = Duration::from_millis(20);
/// The same with a doorbell.
const LOOK_ANYWAY: Duration = Duration::from_secs(1);
/// The waiting thread waits so long for a suspended member that is changing the locks of a file, then tries those of other files.
const SUSPENDED: Duration = Duration::from_millis(50);
/// A request waits so long for the RELEASE of an open file of which a descriptor was closed. Another process may have that file open still.
const CLOSING: Duration = Duration::from_millis(500);
/// So often a request is tried again when a lock that was in its way is gone.
const TRIES: u32 = 100;
/// Interrupts of requests that do not wait here (yet) are remembered up to this number; most are of requests that are answered by now.
const INTERRUPTS: usize = 64;
const END: u64 = i64::MAX as u64;

/// An owner of locks on an inode.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Holder {
    ino: Handle,
    owner: u64,
    kind: u32,
}

/// What was locked through an open file.
#[derive(Default)]
struct Through {
    holders: HashSet<Holder>,
    /// When a descriptor of it was closed, maybe the last one, since its last lock.
    closed: Option<Instant>,
}

#[derive(Default)]
struct Held {
    /// The owners that may have locks, with the open files through which they took them.
    holders: HashMap<Holder, HashSet<u64>>,
    handles: HashMap<u64, Through>,
    /// Owners whose locks are being released: of open files, and of processes that were killed while they waited for that. A new owner may get such a
    /// number.
    late: HashSet<Holder>,
}

impl Held {
    /// Returns how long the end of the owner's locks is still to be expected: they are being released, or its open file may be closed.
    fn expected(&self, holder: &Holder) -> Option<Duration> {
        if self.late.contains(holder) {
            return Some(CLOSING);
        }
        let handles = self.holders.get(holder)?.iter().filter_map(|handle| self.handles.get(handle));
        handles.filter_map(|through| CLOSING.checked_sub(through.closed?.elapsed())).max()
    }

    /// The open file is closed. Returns whether the owner's locks are to be released: it took them through that file, and has not closed it since.
    fn leave(&mut self, holder: &Holder, handle: u64) -> bool {
        let Entry::Occupied(mut entry) = self.holders.entry(*holder) else { return false };
        let last = entry.get_mut().remove(&handle) && entry.get().is_empty();
        if last {
            entry.remove();
            self.late.insert(*holder);
        }
        last
    }
}

struct Waiter {
    device: Arc<File>,
    unique: u64,
    handle: u64,
    ino: Handle,
    lock: FileLock,
    /// The wait that deadlock searches see, of a POSIX lock.
    wait: Option<LockWait>,
    /// The last turn of the waiting thread in which it tried this lock.
    turn: u64,
}

impl Waiter {
    /// Looks for deadlocks, for a waiter that has no slot and is not seen by other members' searches.
    fn look_for_deadlock(&mut self, fs: &Filesystem) -> Result<()> {
        if self.wait.as_ref().is_some_and(|wait| !wait.is_seen()) {
            self.wait = Some(fs.wait_lock(self.ino, &self.lock)?);
        }
        Ok(())
    }
}

#[derive(Default)]
struct Queue {
    waiters: VecDeque<Waiter>,
    interrupted: VecDeque<u64>,
    /// Grows when there is a reason to try again.
    reasons: u64,
}

impl Queue {
    /// Returns the number of waiters that were tried in this turn.
    fn tried(&self, turn: u64) -> usize {
        self.waiters.partition_point(|waiter| waiter.turn == turn)
    }

    /// Takes the first waiter that was not tried in this turn out of the queue.
    fn take_untried(&mut self, turn: u64) -> Option<Waiter> {
        self.waiters.remove(self.tried(turn))
    }
}

/// The locks of one mount.
#[derive(Default)]
pub struct Locks {
    handles: AtomicU64,
    held: Mutex<Held>,
    /// The locks of an open file were released.
    released: Condvar,
    queue: Mutex<Queue>,
    arrived: Condvar,
    stop: AtomicBool,
    has_bell: AtomicBool,
}

pub struct Request {
    handle: u64,
    lock: FileLock,
}

impl Request {
    /// `fuse_lk_in`.
    pub fn parse(mut c: Cursor<'_>) -> Option<Request> {
        let (handle, owner, start, end) = (c.u64()?, c.u64()?, c.u64()?, c.u64()?);
        let (kind, pid, flags) = (c.u32()?, c.u32()?, c.u32()?);
        let kind = match i32::try_from(kind).ok()? {
            libc::F_RDLCK => sys::TFS_LK_READ,
            libc::F_WRLCK => sys::TFS_LK_WRITE,
            libc::F_UNLCK => sys::TFS_LK_UNLOCK,
            _ => return None,
        };
        let flock = flags & abi::LK_FLOCK != 0;
        let lock = FileLock {
            owner: if flock { handle } else { owner },
            start,
            end: if end >= END { !0 } else { end },
            type_: kind,
            kind: if flock { sys::TFS_LK_FLOCK } else { sys::TFS_LK_POSIX },
            pid,
            member: 0,
        };
        Some(Request { handle, lock })
    }
}

fn held(locks: &Locks) -> MutexGuard<'_, Held> {
    // A panic elsewhere leaves sets as they were: still usable.
    locks.held.lock().unwrap_or_else(PoisonError::into_inner)
}

fn queue(locks: &Locks) -> MutexGuard<'_, Queue> {
    locks.queue.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Locks {
    /// Returns a number for an open file.
    pub fn open(&self) -> u64 {
        self.handles.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The caller calls [`Locks::look`] when this member's doorbell rings.
    pub fn has_bell(&self) {
        self.has_bell.store(true, Ordering::SeqCst);
    }

    /// Takes or releases a lock without waiting.
    pub fn set(&self, fs: &Filesystem, ino: Handle, request: &Request) -> Result<()> {
        let mut done = self.try_set(fs, ino, request);
        for _ in 0..TRIES {
            if done != Err(Errno::AGAIN) || !self.await_release(fs, ino, &request.lock) {
                break;
            }
            done = self.try_set(fs, ino, request);
        }
        if request.lock.type_ != sys::TFS_LK_WRITE {
            self.look();
        }
        done
    }

    /// Waits for the end of a lock of this mount that is in the way of 'lock', if its open file is being closed. Returns whether it is gone.
    fn await_release(&self, fs: &Filesystem, ino: Handle, lock: &FileLock) -> bool {
        let in_the_way = || fs.get_lock(ino, lock).ok().map(|found| (found.type_, found.member, found.owner));
        let mut holder = Holder { ino, owner: lock.owner, kind: lock.kind };
        let mut found = None;
        // Else an earlier owner with its number is in the way.
        if !held(self).late.contains(&holder) {
            found = in_the_way();
            let Some((type_, member, owner)) = found else { return false };
            if type_ == sys::TFS_LK_UNLOCK {
                return true;
            }
            if fs.area().incarnation().is_some_and(|own| own.member != member) {
                return false;
            }
            holder.owner = owner;
        }
        let held = held(self);
        let Some(time) = held.expected(&holder) else {
            drop(held);
            // It may have been released since it was found.
            return in_the_way() != found;
        };
        let waited = self.released.wait_timeout_while(held, time, |held| held.expected(&holder).is_some());
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn try_set(&self, fs: &Filesystem, ino: Handle, request: &Request) -> Result<()> {
        let lock = &request.lock;
        let set = || fs.set_lock(ino, lock).map_err(|e| if e == Errno::ROFS { Errno::NOLCK } else { e });
        if lock.type_ == sys::TFS_LK_UNLOCK {
            return set();
        }
        let holder = Holder { ino, owner: lock.owner, kind: lock.kind };
        let remember = |held: &mut Held| {
            held.holders.entry(holder).or_default().insert(request.handle);
            let through = held.handles.entry(request.handle).or_default();
            through.holders.insert(holder);
            through.closed = None;
        };
        {
            let mut held = held(self);
            if held.late.contains(&holder) {
                return Err(Errno::AGAIN);
            }
            // First, so that a close once the zone has the lock releases it.
            remember(&mut held);
        }
        set()?;
        // And once more: a close before that, of another descriptor of the process, found no lock in the zone, and the next one must look again.
        remember(&mut held(self));
        Ok(())
    }

    /// Takes the lock, or queues the request. None: the waiting thread answers later.
    pub fn set_or_wait(
        &self,
        fs: &Filesystem,
        (device, unique): (&Arc<File>, u64),
        ino: Handle,
        request: &Request,
    ) -> Option<Result<()>> {
        match self.try_set(fs, ino, request) {
            Err(Errno::AGAIN) => {}
            done => return Some(done),
        }
        let wait = match (request.lock.kind == sys::TFS_LK_POSIX).then(|| fs.wait_lock(ino, &request.lock)) {
            None => None,
            Some(Ok(wait)) => Some(wait),
            Some(Err(e)) => return Some(Err(e)),
        };
        let mut queue = queue(self);
        if let Some(at) = queue.interrupted.iter().position(|u| *u == unique) {
            queue.interrupted.remove(at);
            if let Some(wait) = wait {
                fs.end_wait(wait);
            }
            return Some(Err(Errno::INTR));
        }
        let (device, handle, lock) = (Arc::clone(device), request.handle, request.lock);
        queue.waiters.push_back(Waiter { device, unique, handle, ino, lock, wait, turn: 0 });
        drop(queue);
        self.look();
        None
    }

    /// The kernel has interrupted a request for a lock. One that the waiting thread tries now, or that does not wait here yet, is answered later.
    pub fn interrupt(&self, fs: &Filesystem, unique: u64) {
        let mut queue = queue(self);
        let at = queue.waiters.iter().position(|waiter| waiter.unique == unique);
        if let Some(waiter) = at.and_then(|at| queue.waiters.remove(at)) {
            drop(queue);
            return self.answer(fs, waiter, Err(Errno::INTR));
        }
        queue.interrupted.push_back(unique);
        if queue.interrupted.len() > INTERRUPTS {
            queue.interrupted.pop_front();
        }
        queue.reasons += 1;
        self.arrived.notify_one();
    }

    /// Wakes the waiting thread: a lock may be free.
    pub fn look(&self) {
        queue(self).reasons += 1;
        self.arrived.notify_one();
    }

    /// Returns a conflicting lock as `fuse_lk_out`.
    pub fn get(&self, fs: &Filesystem, ino: Handle, request: &Request) -> Result<Out> {
        let found = fs.get_lock(ino, &request.lock)?;
        let mut out = Out::new();
        let kind = match found.type_ {
            sys::TFS_LK_READ => libc::F_RDLCK,
            sys::TFS_LK_WRITE => libc::F_WRLCK,
            _ => libc::F_UNLCK,
        };
        // A process of another member has no PID here.
        let own = fs.area().incarnation().is_none_or(|own| own.member == found.member);
        out.u64(found.start.min(END)).u64(found.end.min(END)).u32(kind as u32).u32(if own {
            found.pid
        } else {
            0
        });
        Ok(out)
    }

    /// A process closed a descriptor of an open file: releases its POSIX locks on it. INTR: the process was killed while it waited for a suspended
    /// member, and the caller calls [`Locks::flush_late`].
    pub fn flush(&self, fs: &Filesystem, ino: Handle, handle: u64, owner: u64) -> Result<()> {
        let holder = Holder { ino, owner, kind: sys::TFS_LK_POSIX };
        {
            let mut held = held(self);
            if let Some(through) = held.handles.get_mut(&handle) {
                through.closed = Some(Instant::now());
            }
            if held.holders.remove(&holder).is_none() {
                return Ok(());
            }
        }
        let done = self.give_back(fs, &holder);
        if done == Err(Errno::INTR) {
            held(self).late.insert(holder);
        }
        done
    }

    /// The same once the process no longer waits.
    pub fn flush_late(&self, fs: &Filesystem, ino: Handle, owner: u64) -> Result<()> {
        let holder = Holder { ino, owner, kind: sys::TFS_LK_POSIX };
        let done = self.give_back(fs, &holder);
        held(self).late.remove(&holder);
        self.released.notify_all();
        self.look();
        done
    }

    /// An open file was closed: releases all locks that were taken through it.
    pub fn release(&self, fs: &Filesystem, handle: u64) -> Result<()> {
        let gone: Vec<Holder> = {
            let mut held = held(self);
            let Some(through) = held.handles.remove(&handle) else { return Ok(()) };
            through.holders.into_iter().filter(|holder| held.leave(holder, handle)).collect()
        };
        let mut all = Ok(());
        for holder in gone {
            let done = self.give_back(fs, &holder);
            held(self).late.remove(&holder);
            all = all.and(done);
        }
        self.released.notify_all();
        all
    }

    /// Runs the waiting thread until [`Locks::stop`].
    pub fn serve(&self, fs: &Filesystem) {
        let mut turn = 0;
        while !self.stop.load(Ordering::SeqCst) {
            let mut waiting = queue(self);
            if waiting.waiters.is_empty() {
                let _woken = self.arrived.wait_while(waiting, |queue| {
                    queue.waiters.is_empty() && !self.stop.load(Ordering::SeqCst)
                });
                continue;
            }
            let seen = waiting.reasons;
            let mut suspended = HashSet::new();
            turn += 1;
            // One by one and without the mutex: a lock may wait for a suspended member, and meanwhile other requests are taken or interrupted.
            // Those that were tried stay in front, so the order is that of their arrival.
            while let Some(mut waiter) = waiting.take_untried(turn) {
                drop(waiting);
                waiter.turn = turn;
                let left = self.try_again(fs, waiter, &mut suspended);
                waiting = queue(self);
                if let Some(waiter) = left {
                    let at = waiting.tried(turn);
                    waiting.waiters.insert(at, waiter);
                }
            }
            let is_told = self.has_bell.load(Ordering::SeqCst) && suspended.is_empty();
            let time = if is_told { LOOK_ANYWAY } else { LOOK };
            let _woken = self.arrived.wait_timeout_while(waiting, time, |queue| queue.reasons == seen);
        }
        for waiter in queue(self).waiters.drain(..) {
            self.answer(fs, waiter, Err(session::GONE));
        }
    }

    /// Tries to take a waiter's lock, and answers it if it has the lock or its wait has ended; else returns it. suspended: the files whose locks a
    /// suspended member is changing.
    fn try_again(
        &self,
        fs: &Filesystem,
        mut waiter: Waiter,
        suspended: &mut HashSet<Handle>,
    ) -> Option<Waiter> {
        if self.is_interrupted(waiter.unique) {
            self.answer(fs, waiter, Err(Errno::INTR));
            return None;
        }
        if suspended.contains(&waiter.ino) {
            return Some(waiter);
        }
        let answer = {
            let _limited = caller::wait_at_most(SUSPENDED);
            self.try_set(fs, waiter.ino, &Request { handle: waiter.handle, lock: waiter.lock })
        };
        let answer = match answer {
            Err(Errno::INTR) => {
                suspended.insert(waiter.ino);
                return Some(waiter);
            }
            Err(Errno::AGAIN) => match waiter.look_for_deadlock(fs) {
                Ok(()) => return Some(waiter),
                found => found,
            },
            done => done,
        };
        self.answer(fs, waiter, answer);
        None
    }

    fn is_interrupted(&self, unique: u64) -> bool {
        let interrupted = &mut queue(self).interrupted;
        interrupted.iter().position(|u| *u == unique).and_then(|at| interrupted.remove(at)).is_some()
    }

    fn answer(&self, fs: &Filesystem, waiter: Waiter, answer: Result<()>) {
        if let Some(wait) = waiter.wait {
            fs.end_wait(wait);
        }
        let taken = answer.is_ok();
        let told = session::answer_late(&waiter.device, waiter.unique, answer);
        if taken && told.is_err() {
            // The asking process is dead, so no other process would release the lock.
            let _ = fs.set_lock(waiter.ino, &FileLock { type_: sys::TFS_LK_UNLOCK, ..waiter.lock });
        }
    }

    /// Ends the waiting thread.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.look();
    }

    fn give_back(&self, fs: &Filesystem, holder: &Holder) -> Result<()> {
        let (owner, kind) = (holder.owner, holder.kind);
        let all = FileLock { owner, kind, start: 0, end: !0, type_: sys::TFS_LK_UNLOCK, pid: 0, member: 0 };
        let done = fs.set_lock(holder.ino, &all);
        self.look();
        done
    }
}
