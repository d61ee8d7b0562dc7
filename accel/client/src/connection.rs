// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests and replies over a link, from any thread of a program.

use crate::here::Here;
use crate::staging::{Place, Staging};
use crate::waiter::{Waiter, with_scratch};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use tombolo_accel_spec::wire::{Encoder, HEADER, PART, Record, Reply, ReplyKind, Request, WANTS_REPLY};
use tombolo_calls::say;
use tombolo_calls::spin::Spin;
use tombolo_calls::{Bell, Error, Link, Rx, Tx, Window};

/// A waiting thread reads the ring itself so long before it sleeps; for most of that time it offers the processor to others.
const SPIN: Duration = Duration::from_micros(100);

/// The server is gone, or what it said made no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

/// Called with a ticket's final status, while no other reply is handled; must be short.
pub type Redeem = Box<dyn FnOnce(&Connection, i32) + Send>;
/// Called on the callback thread with status and body; `false`: that was the last time.
pub type Callback = Box<dyn FnMut(i32, &[u8]) -> bool + Send>;

/// A ticket that a thread waits for.
pub struct Awaited(Arc<Waiter>);

struct Out {
    tx: Box<dyn Tx>,
    /// Something is in the batch that isn't published.
    lazy: bool,
}

struct In {
    rx: Box<dyn Rx>,
    buffer: Vec<u8>,
}

/// The threads that sleep, and their bells.
#[derive(Default)]
struct Sleepers {
    /// A thread owns the doorbell.
    owned: bool,
    /// Threads that wait for the owner to deliver.
    parked: Vec<Arc<Waiter>>,
    /// Callbacks to run.
    queue: VecDeque<(u64, i32, Vec<u8>)>,
    /// Callbacks that may still come.
    registered: usize,
    stop: bool,
}

/// Counts of one function.
#[derive(Default)]
pub struct Count {
    /// Requests sent.
    pub calls: AtomicU64,
    /// Of these, those whose result was waited for.
    pub waits: AtomicU64,
    /// Nanoseconds waited.
    pub waited_ns: AtomicU64,
    /// Bytes sent in records.
    pub bytes: AtomicU64,
}

/// A connection to a server.
pub struct Connection {
    /// The process that it is of.
    here: Here,
    out: Mutex<Out>,
    input: Mutex<In>,
    bell: Arc<dyn Bell>,
    room: Arc<dyn Bell>,
    pending: Mutex<Vec<(u64, Arc<Waiter>)>>,
    next: AtomicU64,
    sleepers: Mutex<Sleepers>,
    changed: Condvar,
    /// Mirrors `sleepers.owned`, so that a spinning thread needn't lock.
    owned: AtomicBool,
    tickets: Mutex<HashMap<u64, Redeem>>,
    callbacks: Mutex<HashMap<u64, Callback>>,
    started: AtomicBool,
    prints_by_stdio: AtomicBool,
    lost: OnceLock<String>,
    staging: Mutex<Staging>,
    /// Threads wait here for staging memory.
    staging_freed: AtomicU64,
    /// Memory for bulk data that client and worker share; over TCP the client pushes its changes.
    pub window: Arc<Window>,
    /// The longest record.
    pub max_record: usize,
    /// The server sees the window without pushing.
    pub shares_window: bool,
    counts: Vec<Count>,
    _gone: tombolo_calls::children::NotInChildren,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that holds these locks can panic half way through a change.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Why a connection is none for a child of its process.
const FORKED: &str =
    "this process was forked from the one that uses the accelerator, whose objects are not its own";

unsafe extern "C" {
    static stdout: *mut libc::FILE;
}

/// Writes what a kernel printed to the standard output: past the buffers of the C library, as an OpenCL driver in this process does.
fn print(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the slice lives during the call.
        let n = unsafe { libc::write(libc::STDOUT_FILENO, bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(n) {
            Ok(n) => bytes = &bytes[n..],
            Err(_) => match std::io::Error::last_os_error().kind() {
                std::io::ErrorKind::Interrupted => {}
                std::io::ErrorKind::WouldBlock => {
                    let mut fd = libc::pollfd { fd: libc::STDOUT_FILENO, events: libc::POLLOUT, revents: 0 };
                    // SAFETY: the structure lives during the call.
                    unsafe { libc::poll(&mut fd, 1, -1) };
                }
                // The program's standard output is closed: the output is dropped.
                _ => return,
            },
        }
    }
}

/// Functions counted; larger ids share the last.
pub const COUNTED: usize = 1024;

impl Connection {
    /// Takes a link over.
    pub fn new(link: Link) -> Result<Arc<Connection>, Error> {
        Ok(Arc::new(Connection {
            here: Here::new()?,
            max_record: link.tx.max_record() - HEADER,
            shares_window: link.tx.shares_window(),
            out: Mutex::new(Out { tx: link.tx, lazy: false }),
            input: Mutex::new(In { rx: link.rx, buffer: Vec::new() }),
            bell: link.bell,
            room: link.room,
            pending: Mutex::default(),
            next: AtomicU64::new(1),
            sleepers: Mutex::default(),
            changed: Condvar::new(),
            owned: AtomicBool::new(false),
            tickets: Mutex::default(),
            callbacks: Mutex::default(),
            started: AtomicBool::new(false),
            lost: OnceLock::new(),
            prints_by_stdio: AtomicBool::new(false),
            staging: Mutex::new(Staging::new(link.window.len())),
            staging_freed: AtomicU64::new(0),
            window: link.window,
            counts: (0..COUNTED).map(|_| Count::default()).collect(),
            _gone: link.gone,
        }))
    }

    /// From now on, what kernels print goes through C's standard output stream, between what the program prints itself.
    pub fn print_by_stdio(&self) {
        self.prints_by_stdio.store(true, Ordering::Relaxed);
    }

    /// Counts of a function.
    pub fn count(&self, call: u32) -> &Count {
        &self.counts[(call as usize).min(COUNTED - 1)]
    }

    /// Why the connection was lost, if it was: also for a process that was forked from the one that made it.
    pub fn lost(&self) -> Option<&str> {
        let lost = self.lost.get().map(String::as_str);
        lost.or_else(|| (!self.here.is_here()).then_some(FORKED))
    }

    /// Refuses calls on a lost connection. Must come before any lock: in a forked process no thread may be left to unlock it.
    fn usable(&self) -> Result<(), Lost> {
        if self.here.is_here() {
            return if self.lost.get().is_some() { Err(Lost) } else { Ok(()) };
        }
        Err(Lost)
    }

    /// Gives the connection up: everyone who waits is told.
    fn lose(&self, why: &Error) -> Lost {
        if self.lost.set(why.to_string()).is_ok() {
            say!("tombolo: the accelerator server was lost: {why}");
        }
        for (_, waiter) in lock(&self.pending).drain(..) {
            waiter.done.store(2, Ordering::Release);
            waiter.unpark();
        }
        let mut sleepers = lock(&self.sleepers);
        sleepers.parked.drain(..).for_each(|w| w.unpark());
        self.changed.notify_all();
        self.bell.ring();
        Lost
    }

    fn send<'a, R: Record<'a>>(&self, record: &R, flags: u32, tag: u64) -> Result<(), Lost> {
        self.usable()?;
        let count = self.count(R::ID);
        count.calls.fetch_add(1, Ordering::Relaxed);
        with_scratch(|bytes| {
            bytes.extend_from_slice(&Request { call: R::ID, flags, tag }.to_bytes());
            record.encode(&mut Encoder::new(bytes));
            count.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            let mut out = lock(&self.out);
            let mut rest = &bytes[..];
            let mut parts = Ok(());
            if rest.len() > self.max_record + HEADER {
                let body = &bytes[HEADER..];
                let front = Request { call: PART, flags: 0, tag: 0 }.to_bytes();
                let last = (body.len() - 1) / self.max_record * self.max_record;
                for part in body[..last].chunks(self.max_record) {
                    parts =
                        parts.and_then(|()| tombolo_calls::send(&mut *out.tx, &*self.room, &[&front, part]));
                }
                let end = HEADER + last;
                bytes.drain(HEADER..end);
                rest = &bytes[..];
            }
            let sent = match out.tx.try_send(&[rest]) {
                Ok(true) => Ok(()),
                Ok(false) => tombolo_calls::send(&mut *out.tx, &*self.room, &[rest]),
                Err(e) => Err(e),
            };
            let sent = parts.and(sent).and_then(|()| {
                out.lazy = R::LAZY && flags == 0;
                if out.lazy { Ok(()) } else { out.tx.publish() }
            });
            drop(out);
            sent.map_err(|e| self.lose(&e))
        })
    }

    /// Sends a request without waiting; a lazy one stays in the batch until the next that isn't.
    pub fn post<'a, R: Record<'a>>(&self, record: &R) -> Result<(), Lost> {
        self.send(record, 0, 0)
    }

    /// Hands lazy requests to the server.
    pub fn publish(&self) -> Result<(), Lost> {
        self.usable()?;
        let mut out = lock(&self.out);
        if !std::mem::take(&mut out.lazy) {
            return Ok(());
        }
        let published = out.tx.publish();
        drop(out);
        published.map_err(|e| self.lose(&e))
    }

    /// Makes a range of the window visible to the server before the next request.
    pub fn push_window(&self, offset: u64, len: u64) -> Result<(), Lost> {
        self.usable()?;
        if self.shares_window {
            return Ok(());
        }
        let pushed = lock(&self.out).tx.push_window(offset, len);
        pushed.map_err(|e| self.lose(&e))
    }

    /// Sends a request and waits for its result: the API's status, and what `then` makes of the body.
    pub fn call<'a, R: Record<'a>, T>(
        &self,
        record: &R,
        then: impl FnOnce(i32, &[u8]) -> T,
    ) -> Result<T, Lost> {
        self.usable().inspect_err(|_| self.tell_child())?;
        let waiter = Waiter::own();
        waiter.done.store(0, Ordering::Relaxed);
        lock(&waiter.body).clear();
        let tag = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.pending).push((tag, waiter.clone()));
        let begun = Instant::now();
        let outcome = self.send(record, WANTS_REPLY, tag).and_then(|()| self.wait(&waiter));
        let count = self.count(R::ID);
        count.waits.fetch_add(1, Ordering::Relaxed);
        count.waited_ns.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        outcome?;
        if waiter.done.load(Ordering::Acquire) != 1 {
            return Err(Lost);
        }
        let body = lock(&waiter.body);
        Ok(then(waiter.status.load(Ordering::Relaxed), &body))
    }

    /// Says once in a forked process why its calls fail.
    fn tell_child(&self) {
        if !self.here.is_here() && self.lost.set(FORKED.into()).is_ok() {
            say!("tombolo: {FORKED}; clGetDeviceIDs gives it a connection of its own");
        }
    }

    fn wait(&self, waiter: &Arc<Waiter>) -> Result<(), Lost> {
        let done = || waiter.done.load(Ordering::Acquire) != 0;
        let mut spin = Spin::new(SPIN);
        while !done() {
            if let Ok(mut input) = self.input.try_lock() {
                self.drain(&mut input).map_err(|e| self.lose(&e))?;
                if done() {
                    // A thread sleeps on the doorbell: from now on it must ring again.
                    if self.owned.load(Ordering::SeqCst) {
                        self.rearm(&mut input)?;
                    }
                    return Ok(());
                }
            }
            if !spin.turn() {
                return self.sleep(waiter);
            }
        }
        Ok(())
    }

    /// Sets the flag that asks for the doorbell, and looks again until nothing more came.
    fn rearm(&self, input: &mut In) -> Result<(), Lost> {
        loop {
            match input.rx.arm() {
                Ok(true) => return Ok(()),
                Ok(false) => self.drain(input).map_err(|e| self.lose(&e))?,
                Err(e) => return Err(self.lose(&e)),
            };
        }
    }

    /// Becomes the owner of the doorbell if no thread is. `false`: another thread is.
    fn own(&self, sleepers: &mut Sleepers) -> bool {
        if sleepers.owned {
            return false;
        }
        sleepers.owned = true;
        self.owned.store(true, Ordering::SeqCst);
        true
    }

    /// Gives the doorbell up and wakes who needs it next.
    fn disown(&self) {
        let mut sleepers = lock(&self.sleepers);
        sleepers.owned = false;
        self.owned.store(false, Ordering::SeqCst);
        // All of them: the first may have been served already, and go without becoming the owner.
        sleepers.parked.drain(..).for_each(|w| w.unpark());
        self.changed.notify_all();
    }

    /// Handles what came; unless that was what the caller waits for, sleeps on the doorbell once. The caller owns the doorbell, and
    /// a thread that takes its reply from now on rings it.
    fn listen(&self, done: impl Fn() -> bool) -> Result<(), Lost> {
        let armed = {
            let mut input = lock(&self.input);
            self.drain(&mut input).map_err(|e| self.lose(&e))?;
            !done() && input.rx.arm().map_err(|e| self.lose(&e))?
        };
        if armed { self.bell.wait().or_else(|e| self.last_words(&e)) } else { Ok(()) }
    }

    /// The peer is gone; what it said before still counts.
    fn last_words(&self, e: &Error) -> Result<(), Lost> {
        let mut input = lock(&self.input);
        let _more = self.drain(&mut input);
        drop(input);
        Err(self.lose(e))
    }

    fn sleep(&self, waiter: &Arc<Waiter>) -> Result<(), Lost> {
        let done = || waiter.done.load(Ordering::Acquire) != 0;
        loop {
            let mut sleepers = lock(&self.sleepers);
            if done() {
                return Ok(());
            }
            if self.lost.get().is_some() {
                return Err(Lost);
            }
            if self.own(&mut sleepers) {
                drop(sleepers);
                let mut result = Ok(());
                while result.is_ok() && !done() {
                    result = self.listen(done);
                }
                self.disown();
                return if done() { Ok(()) } else { result };
            }
            sleepers.parked.push(waiter.clone());
            drop(sleepers);
            waiter.park();
            lock(&self.sleepers).parked.retain(|w| !Arc::ptr_eq(w, waiter));
        }
    }

    /// Handles all that came in.
    fn drain(&self, input: &mut In) -> Result<(), Error> {
        let In { rx, buffer } = input;
        while rx.try_recv(buffer)? {
            let (reply, body) =
                Reply::split(buffer).map_err(|_| Error::Broken("a reply that can't be decoded"))?;
            match reply.kind {
                ReplyKind::Result => {
                    let mut pending = lock(&self.pending);
                    let at = pending.iter().position(|p| p.0 == reply.tag);
                    let (_, waiter) =
                        pending.swap_remove(at.ok_or(Error::Broken("a reply that no thread waits for"))?);
                    drop(pending);
                    let mut copy = lock(&waiter.body);
                    copy.extend_from_slice(body);
                    drop(copy);
                    waiter.status.store(reply.status, Ordering::Relaxed);
                    self.wake(&waiter);
                }
                ReplyKind::Part => {
                    let pending = lock(&self.pending);
                    let waiter = pending.iter().find(|p| p.0 == reply.tag);
                    let (_, waiter) = waiter.ok_or(Error::Broken("a reply that no thread waits for"))?;
                    lock(&waiter.body).extend_from_slice(body);
                }
                ReplyKind::Ticket => {
                    let redeem = lock(&self.tickets).remove(&reply.tag);
                    redeem.ok_or(Error::Broken("an unknown ticket"))?(self, reply.status);
                }
                ReplyKind::Output if self.prints_by_stdio.load(Ordering::Relaxed) => {
                    // SAFETY: the slice lives during the call; C's own stream, which a program may have closed: then it writes nothing.
                    unsafe { libc::fwrite(body.as_ptr().cast(), 1, body.len(), stdout) };
                }
                ReplyKind::Output => print(body),
                ReplyKind::Notify => {
                    let mut sleepers = lock(&self.sleepers);
                    sleepers.queue.push_back((reply.tag, reply.status, body.to_vec()));
                    self.changed.notify_all();
                    drop(sleepers);
                    if self.owned.load(Ordering::SeqCst) {
                        self.bell.ring();
                    }
                }
            }
        }
        Ok(())
    }

    /// Tells a thread that what it waits for is there.
    fn wake(&self, waiter: &Arc<Waiter>) {
        waiter.done.store(1, Ordering::Release);
        waiter.unpark();
        // The owner of the doorbell may be asleep on it while a spinning thread took its reply.
        if self.owned.load(Ordering::SeqCst) && !waiter.is_own() {
            self.bell.ring();
        }
    }

    /// A ticket like [`Connection::ticket`]'s, which [`Connection::redeemed`] waits for.
    pub fn awaited(&self, redeem: Redeem) -> (u64, Awaited) {
        let awaited = Awaited(Arc::default());
        let waiter = awaited.0.clone();
        let ticket = self.ticket(Box::new(move |connection, status| {
            redeem(connection, status);
            connection.wake(&waiter);
        }));
        (ticket, awaited)
    }

    /// Waits until a ticket has been redeemed.
    pub fn redeemed(&self, awaited: &Awaited) -> Result<(), Lost> {
        self.wait(&awaited.0)?;
        if awaited.0.done.load(Ordering::Acquire) == 1 { Ok(()) } else { Err(Lost) }
    }

    /// Waits for as long as a thread would before it sleeps; whether the ticket has been redeemed.
    pub fn redeemed_soon(&self, awaited: &Awaited) -> Result<bool, Lost> {
        let mut spin = Spin::new(SPIN);
        while awaited.0.done.load(Ordering::Acquire) == 0 && spin.turn() {
            self.poll()?;
        }
        Ok(awaited.0.done.load(Ordering::Acquire) == 1)
    }

    /// A ticket whose redemption runs `redeem`.
    pub fn ticket(&self, redeem: Redeem) -> u64 {
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.tickets).insert(ticket, redeem);
        ticket
    }

    /// Handles what came in without waiting for more.
    pub fn poll(&self) -> Result<(), Lost> {
        self.usable()?;
        let Ok(mut input) = self.input.try_lock() else { return Ok(()) };
        self.drain(&mut input).map_err(|e| self.lose(&e))?;
        if self.owned.load(Ordering::SeqCst) {
            self.rearm(&mut input)?;
        }
        Ok(())
    }

    /// Takes a range of the window; waits (by asking the server to catch up) while transfers under way hold too much of it.
    /// None: it can't fit.
    pub fn take_staging(&self, len: u64, place: Place) -> Result<Option<u64>, Lost> {
        self.usable()?;
        if let Some(at) = lock(&self.staging).take(len, place) {
            return Ok(Some(at));
        }
        self.poll()?;
        Ok(lock(&self.staging).take(len, place))
    }

    /// Gives a range of the window back.
    pub fn give_staging(&self, at: u64, len: u64) {
        lock(&self.staging).give(at, len);
        self.staging_freed.fetch_add(1, Ordering::Relaxed);
    }

    /// Registers a callback and gives the number the server announces it by. Starts the callback thread.
    pub fn callback(self: &Arc<Self>, callback: Callback) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.callbacks).insert(number, callback);
        lock(&self.sleepers).registered += 1;
        self.changed.notify_all();
        if !self.started.swap(true, Ordering::SeqCst) {
            let weak = Arc::downgrade(self);
            let thread = std::thread::Builder::new().name("tombolo-notify".into());
            let spawned = thread.spawn(move || {
                while let Some(connection) = weak.upgrade() {
                    if connection.serve_callbacks() {
                        return;
                    }
                }
            });
            if spawned.is_err() {
                say!("tombolo: no thread for callbacks could be started; callbacks will not be called");
            }
        }
        number
    }

    /// Takes a callback back that the server never heard of.
    pub fn forget_callback(&self, number: u64) {
        if lock(&self.callbacks).remove(&number).is_some() {
            lock(&self.sleepers).registered -= 1;
        }
    }

    /// Runs callbacks that came, or waits for some. `true`: no more will ever come.
    fn serve_callbacks(&self) -> bool {
        let mut sleepers = lock(&self.sleepers);
        loop {
            if let Some((number, status, body)) = sleepers.queue.pop_front() {
                drop(sleepers);
                // Out of the map while it runs, so that it may register others.
                let callback = lock(&self.callbacks).remove(&number);
                if let Some(mut callback) = callback {
                    if callback(status, &body) {
                        lock(&self.callbacks).insert(number, callback);
                    } else {
                        lock(&self.sleepers).registered -= 1;
                    }
                }
                return false;
            }
            if sleepers.stop || self.lost().is_some() {
                return true;
            }
            if sleepers.registered > 0 && self.own(&mut sleepers) {
                drop(sleepers);
                let lost = self.listen(|| !lock(&self.sleepers).queue.is_empty()).is_err();
                if let Ok(mut input) = self.input.lock() {
                    let _seen_below = self.drain(&mut input);
                }
                self.disown();
                return lost && lock(&self.sleepers).queue.is_empty();
            }
            sleepers = self.changed.wait(sleepers).unwrap_or_else(|e| e.into_inner());
        }
    }
}
