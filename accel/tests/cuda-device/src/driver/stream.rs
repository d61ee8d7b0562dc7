// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Streams. Each has a queue and a thread, which starts with its first work. Work that must wait for work of another stream has its end as a condition, which was
//! always queued before: so no two streams wait for each other. A call that waits anyway is carried out by the calling thread, once it is its turn.

use super::context::{self, Context};
use super::graph::Capture;
use super::registry::Registry;
use super::work::Work;
use super::{CAPTURE_UNSUPPORTED, Handle, INVALID_HANDLE, Result, lock};
use std::cell::Cell;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// The end of a piece of work.
#[derive(Default)]
pub struct Done {
    at: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Done {
    fn set(&self) {
        *lock(&self.at) = Some(Instant::now());
        self.changed.notify_all();
    }

    pub fn wait(&self) -> Instant {
        let mut at = lock(&self.at);
        loop {
            match *at {
                Some(instant) => return instant,
                None => at = self.changed.wait(at).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    pub fn when(&self) -> Option<Instant> {
        *lock(&self.at)
    }
}

struct Job {
    context: Arc<Context>,
    conditions: Vec<Arc<Done>>,
    work: Box<dyn FnOnce() -> Result + Send>,
    done: Arc<Done>,
}

pub struct Stream {
    /// Work of the legacy default stream and of this one wait for each other.
    pub blocking: bool,
    pub flags: u32,
    pub priority: i32,
    pub id: u64,
    queue: Mutex<Option<Sender<Job>>>,
    last: Mutex<Option<Arc<Done>>>,
    pub capture: Mutex<Option<Arc<Capture>>>,
}

pub static STREAMS: Registry<Stream> = Registry::new(INVALID_HANDLE);
/// CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
const LEGACY: Handle = 1;
const PER_THREAD: Handle = 2;

thread_local! {
    /// The stream 0 of the call that this thread is in is its own: a function whose name ends in _ptsz or _ptds.
    static OWN_DEFAULT: Cell<bool> = const { Cell::new(false) };
}

/// Calls with the thread's own default stream in the place of the legacy one.
pub fn with_own_default<T>(call: impl FnOnce() -> T) -> T {
    let before = OWN_DEFAULT.replace(true);
    let result = call();
    OWN_DEFAULT.set(before);
    result
}

/// The stream of a handle in the current context.
pub fn resolve(handle: Handle) -> Result<(Arc<Context>, Arc<Stream>)> {
    let context = context::current()?;
    let stream = match handle {
        0 if OWN_DEFAULT.get() => context.thread_stream(),
        0 | LEGACY => context.null.clone(),
        PER_THREAD => context.thread_stream(),
        handle => STREAMS.get(handle)?,
    };
    Ok((context, stream))
}

pub fn create(flags: u32, priority: i32) -> Result<Handle> {
    let context = context::current()?;
    let stream = Arc::new(Stream { flags, priority, ..Stream::fresh(flags & 1 == 0) });
    lock(&context.streams).push(stream.clone());
    Ok(STREAMS.insert(stream))
}

/// What the stream has begun goes on.
pub fn destroy(handle: Handle) -> Result {
    let stream = STREAMS.remove(handle)?;
    *lock(&stream.queue) = None;
    if let Ok(context) = context::current() {
        // The legacy default stream still waits for what is queued.
        let idle = stream.idle();
        lock(&context.streams).retain(|other| !(Arc::ptr_eq(other, &stream) && idle));
    }
    Ok(())
}

impl Stream {
    pub fn new(blocking: bool) -> Arc<Stream> {
        Arc::new(Stream::fresh(blocking))
    }

    fn fresh(blocking: bool) -> Stream {
        let id = super::registry::handle() as u64;
        Stream {
            blocking,
            flags: 0,
            priority: 0,
            id,
            queue: Mutex::default(),
            last: Mutex::default(),
            capture: Mutex::default(),
        }
    }

    /// What must have ended before new work of this stream begins, except for its own queue.
    fn conditions(self: &Arc<Stream>, context: &Context) -> Vec<Arc<Done>> {
        let null = Arc::ptr_eq(self, &context.null);
        let streams = match (null, self.blocking) {
            (true, _) => context.others().into_iter().filter(|stream| stream.blocking).collect(),
            (false, true) => vec![context.null.clone()],
            (false, false) => Vec::new(),
        };
        streams
            .iter()
            .filter_map(|stream| lock(&stream.last).clone())
            .filter(|done| done.when().is_none())
            .collect()
    }

    /// Queues a closure, which begins once `more` have ended too.
    pub fn queue(
        self: &Arc<Stream>,
        context: &Arc<Context>,
        more: Vec<Arc<Done>>,
        work: impl FnOnce() -> Result + Send + 'static,
    ) -> Result<Arc<Done>> {
        context.healthy()?;
        let order = lock(&context.order);
        let mut conditions = self.conditions(context);
        conditions.extend(more);
        let done = Arc::new(Done::default());
        let job = Job { context: context.clone(), conditions, work: Box::new(work), done: done.clone() };
        *lock(&self.last) = Some(done.clone());
        let mut queue = lock(&self.queue);
        let sender = queue.get_or_insert_with(|| {
            let (sender, jobs) = channel::<Job>();
            std::thread::spawn(move || jobs.into_iter().for_each(run));
            sender
        });
        let sent = sender.send(job);
        drop(order);
        sent.map(|()| done).map_err(|_| super::UNKNOWN)
    }

    /// Queues work, or records it when the stream is being captured.
    pub fn submit(self: &Arc<Stream>, context: &Arc<Context>, work: Work) -> Result {
        if let Some(capture) = lock(&self.capture).clone() {
            return capture.record(self, work);
        }
        self.queue(context, Vec::new(), move || work.execute()).map(drop)
    }

    /// Carries work out in this thread when it is the stream's turn.
    pub fn run(self: &Arc<Stream>, context: &Arc<Context>, work: impl FnOnce() -> Result) -> Result {
        if lock(&self.capture).is_some() {
            return Err(CAPTURE_UNSUPPORTED);
        }
        let conditions = self.conditions(context);
        for done in &conditions {
            done.wait();
        }
        self.drain();
        context.healthy()?;
        work()
    }

    pub fn idle(&self) -> bool {
        lock(&self.last).as_ref().is_none_or(|done| done.when().is_some())
    }

    pub fn drain(&self) {
        let last = lock(&self.last).clone();
        if let Some(done) = last {
            done.wait();
        }
    }

    pub fn last(&self) -> Option<Arc<Done>> {
        lock(&self.last).clone()
    }
}

fn run(job: Job) {
    for done in &job.conditions {
        done.wait();
    }
    let outcome = job.context.healthy().and_then(|()| (job.work)());
    if let Err(code) = outcome {
        job.context.set_fault(code);
    }
    job.done.set();
}

pub fn synchronize(handle: Handle) -> Result {
    let (context, stream) = resolve(handle)?;
    if lock(&stream.capture).is_some() {
        return Err(CAPTURE_UNSUPPORTED);
    }
    stream.drain();
    super::launch::flush();
    context.healthy()
}

pub fn query(handle: Handle) -> Result {
    let (context, stream) = resolve(handle)?;
    context.healthy()?;
    if stream.idle() { Ok(()) } else { Err(super::NOT_READY) }
}
