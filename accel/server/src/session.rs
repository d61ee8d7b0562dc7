// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One client's requests, whatever the API.
//!
//! One thread at a time, the *leader* (of the Leader/Followers pattern), holds the lock of the incoming ring: it takes records from the ring, in order, and executes them. Before
//! a call that may take long the leader unlocks the ring and enters the driver; if a record arrives meanwhile, the doorbell wakes another
//! thread, which becomes the leader. So no record moves between threads as long as the client only waits. A leader that finds the
//! ring empty polls for a moment, then arms the doorbell and sleeps.
//!
//! Replies never block: what the ring doesn't take waits in a queue whose length is limited, so a client that doesn't read only harms itself.

use crate::figures::{Figure, Figures};
use crate::limits::Bucket;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tombolo_accel_spec::common::{Ping, Release, Snapshot};
use tombolo_accel_spec::wire::{
    HEADER, Malformed, PART, Record, Reply, ReplyKind, Request, WANTS_REPLY, decode,
};
use tombolo_calls::spin::Spin;
use tombolo_calls::try_lock::{Guard, TryLock};
use tombolo_calls::{Bell, Error, Link, Rx, Tx, Window};

/// A leader polls for more records so long before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Bytes of replies that may wait for a client to read.
const MAX_QUEUED: usize = 64 << 20;
/// Bytes of replies that wait when more of a kernel's output is not taken.
const MUCH_QUEUED: usize = 1 << 20;
/// Threads of a client that may be inside the driver at once.
const MAX_THREADS: usize = 256;

/// The part of a session that each API has of its own.
pub trait Api: Send + Sync + 'static {
    /// Root objects and their properties.
    fn snapshot(&self, session: &Arc<Session>, reply: &mut Vec<u8>) -> Result<(), i32>;
    /// Carries a request out. Outer error: it doesn't decode.
    fn call(&self, call: &mut Call<'_>, id: u32, body: &[u8]) -> Result<Result<(), i32>, Malformed>;
    /// The client has no more use for an object.
    fn release(&self, call: &mut Call<'_>, kind: u32, id: u64);
    /// Tells the client what ended since; called before each reply, so that no reply overtakes what led to it.
    fn settle(&self);
    /// Bytes of device memory and objects in use.
    fn usage(&self) -> (u64, u64);
    fn success(&self) -> i32;
}

struct Outbox {
    tx: Box<dyn Tx>,
    queue: VecDeque<Vec<u8>>,
    queued: usize,
    /// A thread waits until less is queued.
    awaited: bool,
}

/// The incoming side, held by the leader.
pub struct In {
    rx: Box<dyn Rx>,
    bucket: Bucket,
    /// The front of a request that is longer than a record.
    parts: Vec<u8>,
}

/// One client.
pub struct Session {
    outbox: Mutex<Outbox>,
    /// Notified when replies that waited have been sent, or the client takes none any more.
    room: Condvar,
    input: TryLock<In>,
    bell: Arc<dyn Bell>,
    /// Bulk data shared with the client.
    pub window: Arc<Window>,
    /// Set if the client sees the window without pushing.
    pub shares_window: bool,
    threads: AtomicUsize,
    idle: AtomicUsize,
    figures: Figures,
    over: Mutex<Option<Error>>,
    api: std::sync::OnceLock<Arc<dyn Api>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic ends the worker (see worker.rs); no thread works on with a half-changed value.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// The memory that a waiting reply takes, about: most are short.
fn weight(record: &[u8]) -> usize {
    record.len() + 64
}

/// The reply to a call that the client waits for, if another thread than the call's own may send it: the first of them does.
pub struct Early {
    session: Arc<Session>,
    tag: u64,
    sent: AtomicBool,
}

impl Early {
    /// Returns whether no thread has sent it yet: then the caller does.
    fn claim(&self) -> bool {
        !self.sent.swap(true, Ordering::SeqCst)
    }

    /// Sends a reply without a body, unless it was sent.
    pub fn answer(&self, status: i32) {
        if self.claim() {
            self.session.api().settle();
            self.session.notify(ReplyKind::Result, status, self.tag, &[]);
        }
    }
}

/// A request that is being carried out.
pub struct Call<'s> {
    pub session: &'s Arc<Session>,
    /// The body of its reply.
    pub reply: Vec<u8>,
    /// Set if the client waits for the reply.
    pub waited: bool,
    tag: u64,
    early: Option<Arc<Early>>,
    lead: Option<Guard<'s, In>>,
}

impl Call<'_> {
    /// The means by which another thread may send the reply. None: the client doesn't wait.
    pub fn early(&mut self) -> Option<Arc<Early>> {
        let (session, tag) = (self.session, self.tag);
        let new = || Arc::new(Early { session: session.clone(), tag, sent: AtomicBool::new(false) });
        self.waited.then(|| self.early.get_or_insert_with(new).clone())
    }

    /// Says that the driver is about to be entered for an unknown time: others may lead on meanwhile. `false`: it may not be, as there are as
    /// many threads in it as may be, and the request that would end this call's wait might find no thread left to read it.
    #[must_use]
    pub fn may_block(&mut self) -> bool {
        if self.lead.is_none() {
            return true;
        }
        if !self.session.ensure_follower() {
            return false;
        }
        let Some(mut input) = self.lead.take() else { return true };
        // Something arrived already, or the ring is broken (the next leader will see): wake a thread for it.
        let quiet = matches!(input.rx.arm(), Ok(true));
        if input.unlock() || !quiet {
            self.session.bell.ring();
        }
        true
    }
}

impl Session {
    /// Takes a link over, whose requests come no faster than the bucket allows.
    pub fn new(link: Link, bucket: Bucket, figures: Figures) -> Arc<Session> {
        Arc::new(Session {
            shares_window: link.tx.shares_window(),
            room: Condvar::new(),
            outbox: Mutex::new(Outbox { tx: link.tx, queue: VecDeque::new(), queued: 0, awaited: false }),
            input: TryLock::new(In { rx: link.rx, bucket, parts: Vec::new() }),
            bell: link.bell,
            window: link.window,
            threads: AtomicUsize::new(1),
            idle: AtomicUsize::new(0),
            figures,
            over: Mutex::new(None),
            api: std::sync::OnceLock::new(),
        })
    }

    /// Sets the API that carries requests out. Calls after the first have no effect.
    pub fn set_api(&self, api: Arc<dyn Api>) {
        self.api.get_or_init(|| api);
    }

    /// Carries a record out as if it had come in, for tests and fuzzers.
    pub fn carry(self: &Arc<Self>, record: &[u8]) -> Result<(), Error> {
        let input = loop {
            match self.input.try_lock() {
                Some(input) => break input,
                None => std::thread::yield_now(),
            }
        };
        let back = self.carry_out(record, input)?;
        drop(back);
        Ok(())
    }

    /// Serves the client on this thread and others until it is gone; why it ended.
    pub fn run(self: &Arc<Self>, api: Arc<dyn Api>) -> Error {
        self.set_api(api);
        self.serve();
        lock(&self.over).take().unwrap_or(Error::Closed)
    }

    fn api(&self) -> &Arc<dyn Api> {
        self.api.get().expect("plugged in before anything is served")
    }

    /// A thread exists that sleeps on the doorbell; otherwise one is started. `false`: none is left, and none can be started.
    fn ensure_follower(self: &Arc<Self>) -> bool {
        if self.idle.load(Ordering::SeqCst) > 0 {
            return true;
        }
        if self.threads.fetch_add(1, Ordering::SeqCst) >= MAX_THREADS {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            return false;
        }
        let session = self.clone();
        // Counted before it runs, so that the next call doesn't start another.
        self.idle.fetch_add(1, Ordering::SeqCst);
        let spawned = std::thread::Builder::new().name("follower".into()).spawn(move || {
            session.idle.fetch_sub(1, Ordering::SeqCst);
            session.serve();
        });
        if spawned.is_err() {
            self.idle.fetch_sub(1, Ordering::SeqCst);
            self.threads.fetch_sub(1, Ordering::SeqCst);
        }
        spawned.is_ok()
    }

    fn end(&self, why: Error) {
        lock(&self.over).get_or_insert(why);
        self.bell.ring();
        let _not_between = lock(&self.outbox);
        self.room.notify_all();
    }

    /// Waits while many replies wait for the client. `false`: the session is over.
    pub fn wait_for_room(&self) -> bool {
        let over = || lock(&self.over).is_some();
        let full = |out: &mut Outbox| {
            out.awaited = out.queued > MUCH_QUEUED && !over();
            out.awaited
        };
        let waited = self.room.wait_while(lock(&self.outbox), full);
        drop(waited);
        !over()
    }

    /// Runs a thread: it leads when no other does, and sleeps otherwise.
    fn serve(self: &Arc<Self>) {
        loop {
            if lock(&self.over).is_some() {
                // Each thread wakes the next.
                self.bell.ring();
                return;
            }
            if let Some(input) = self.input.try_lock_or_flag() {
                match self.lead(input) {
                    Ok(false) => {}
                    Ok(true) => continue,
                    Err(e) => {
                        self.end(e);
                        continue;
                    }
                }
            }
            self.idle.fetch_add(1, Ordering::SeqCst);
            let woken = self.bell.wait();
            self.idle.fetch_sub(1, Ordering::SeqCst);
            if let Err(e) = woken {
                self.end(e);
            }
        }
    }

    /// Carries requests out until there are none for a while, or another thread has taken over. `true`: another thread was woken
    /// meanwhile and left it to this one, so look again before sleeping.
    fn lead<'s>(self: &'s Arc<Self>, mut input: Guard<'s, In>) -> Result<bool, Error> {
        let mut record = Vec::new();
        input.rx.disarm();
        let mut idle: Option<Spin> = None;
        loop {
            if input.rx.try_recv(&mut record)? {
                idle = None;
                if let Some(wait) = input.bucket.take() {
                    // The client's own rate: only its own requests wait.
                    std::thread::sleep(wait);
                    self.figures.add(Figure::Held, wait.as_nanos() as u64);
                }
                match self.carry_out(&record, input)? {
                    Some(back) => input = back,
                    None => return Ok(false),
                }
                continue;
            }
            if idle.is_none() {
                self.flush()?;
                self.tell_usage();
            }
            if !idle.get_or_insert_with(|| Spin::new(SPIN)).turn() {
                if input.rx.arm()? {
                    return Ok(input.unlock());
                }
                idle = None;
            }
        }
    }

    /// Carries one request out. None: another thread leads now.
    fn carry_out<'s>(
        self: &'s Arc<Self>,
        record: &[u8],
        mut input: Guard<'s, In>,
    ) -> Result<Option<Guard<'s, In>>, Error> {
        let malformed = |Malformed| Error::Broken("a request that can't be decoded");
        let (request, body) = Request::split(record).map_err(malformed)?;
        if request.call == PART {
            input.parts.extend_from_slice(body);
            return if input.parts.len() > MAX_QUEUED {
                Err(Error::Broken("a request is too long"))
            } else {
                Ok(Some(input))
            };
        }
        let mut whole = std::mem::take(&mut input.parts);
        let body = if whole.is_empty() {
            body
        } else {
            whole.extend_from_slice(body);
            &whole
        };
        let waited = request.flags & WANTS_REPLY != 0;
        self.figures.add(Figure::Calls, 1);
        self.figures.add(Figure::Bytes, record.len() as u64);
        let begun = waited.then(Instant::now);
        let api = self.api();
        let mut call = Call {
            session: self,
            reply: Vec::new(),
            waited,
            tag: request.tag,
            early: None,
            lead: Some(input),
        };
        let outcome = match request.call {
            Ping::ID => decode::<Ping>(body).map(|_| Ok(())),
            Snapshot::ID => decode::<Snapshot>(body).map(|_| api.snapshot(self, &mut call.reply)),
            Release::ID => decode::<Release>(body).map(|r| {
                api.release(&mut call, r.kind, r.id);
                Ok(())
            }),
            id => api.call(&mut call, id, body),
        }
        .map_err(malformed)?;
        let status = outcome.err().unwrap_or_else(|| api.success());
        if call.lead.is_none() {
            // Before the reply, so that the client's next request need not ring.
            call.lead = self.input.try_lock();
            if let Some(input) = &mut call.lead {
                input.rx.disarm();
            }
        }
        if waited {
            self.figures.add(Figure::Waits, 1);
            if let Some(begun) = begun {
                self.figures.add(Figure::Busy, begun.elapsed().as_nanos() as u64);
            }
        }
        if waited && call.early.as_ref().is_none_or(|early| early.claim()) {
            api.settle();
            // A call that failed may have results, too.
            self.send(Reply { kind: ReplyKind::Result, status, tag: request.tag }, &call.reply)?;
        }
        Ok(call.lead.take())
    }

    /// Sends a record to the client. Never blocks.
    pub fn send(&self, reply: Reply, body: &[u8]) -> Result<(), Error> {
        let mut guard = lock(&self.outbox);
        let out = &mut *guard;
        let max = out.tx.max_record() - HEADER;
        let last = if body.is_empty() { 0 } else { (body.len() - 1) / max * max };
        for part in body[..last].chunks(max) {
            Self::put(out, Reply { kind: ReplyKind::Part, ..reply }, part)?;
        }
        Self::put(out, reply, &body[last..])
    }

    fn put(out: &mut Outbox, reply: Reply, body: &[u8]) -> Result<(), Error> {
        let head = reply.to_bytes();
        Self::drain(out)?;
        if out.queue.is_empty() && out.tx.try_send(&[&head, body])? {
            return out.tx.publish();
        }
        let mut record = head.to_vec();
        record.extend_from_slice(body);
        out.queued += weight(&record);
        out.queue.push_back(record);
        if out.queued > MAX_QUEUED {
            return Err(Error::Broken("the client doesn't read its replies"));
        }
        Self::drain(out)
    }

    /// The same from a thread of the driver, which can't end the session itself.
    pub fn notify(&self, kind: ReplyKind, status: i32, tag: u64, body: &[u8]) {
        if let Err(e) = self.send(Reply { kind, status, tag }, body) {
            self.end(e);
        }
    }

    /// Makes a range of the window visible to the client before the next record.
    pub fn push_window(&self, offset: u64, len: u64) {
        if self.shares_window {
            return;
        }
        let pushed = lock(&self.outbox).tx.push_window(offset, len);
        if let Err(e) = pushed {
            self.end(e);
        }
    }

    fn drain(out: &mut Outbox) -> Result<(), Error> {
        while let Some(record) = out.queue.front() {
            if !out.tx.try_send(&[record])? {
                out.tx.publish()?;
                // From now on the client rings when it has read something; the leader then comes here again.
                if out.tx.arm_room()? {
                    return Ok(());
                }
                continue;
            }
            out.queued -= weight(record);
            out.queue.pop_front();
            if out.queue.is_empty() {
                out.tx.publish()?;
            }
        }
        Ok(())
    }

    fn tell_usage(&self) {
        let (memory, objects) = self.api().usage();
        self.figures.set(Figure::Memory, memory);
        self.figures.set(Figure::Objects, objects);
    }

    fn flush(&self) -> Result<(), Error> {
        let mut out = lock(&self.outbox);
        let drained = if out.queue.is_empty() { Ok(()) } else { Self::drain(&mut out) };
        if out.awaited {
            self.room.notify_all();
        }
        drained
    }
}
