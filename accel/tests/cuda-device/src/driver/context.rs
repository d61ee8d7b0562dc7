// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Contexts: the device's primary one, others, and each thread's stack of them. A kernel's fault stays with its context: every later call tells it.

use super::registry::Registry;
use super::stream::Stream;
use super::{Code, DEINITIALIZED, Handle, INVALID_CONTEXT, Result, device, lock};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

pub struct Context {
    pub handle: Handle,
    pub id: u64,
    pub flags: AtomicU32,
    fault: Mutex<Option<Code>>,
    /// The legacy default stream.
    pub null: Arc<Stream>,
    /// The default stream of each thread that has used its own.
    threads: Mutex<HashMap<ThreadId, Arc<Stream>>>,
    /// All but the default streams.
    pub streams: Mutex<Vec<Arc<Stream>>>,
    /// Held while the order among streams is decided.
    pub order: Mutex<()>,
    pub limits: Mutex<HashMap<u32, usize>>,
}

pub static CONTEXTS: Registry<Context> = Registry::new(INVALID_CONTEXT);

/// The primary context has one handle all the time: it stays current for threads while it is reset.
const PRIMARY_HANDLE: Handle = 0x4000;
/// The primary context and how often it is retained.
static PRIMARY: Mutex<Option<(Arc<Context>, usize)>> = Mutex::new(None);
static PRIMARY_FLAGS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

impl Context {
    fn create(handle: Handle, flags: u32) -> Arc<Context> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let context = Arc::new(Context {
            handle,
            id: IDS.fetch_add(1, Ordering::Relaxed),
            flags: AtomicU32::new(flags),
            fault: Mutex::new(None),
            null: Stream::new(true),
            threads: Mutex::default(),
            streams: Mutex::default(),
            order: Mutex::default(),
            limits: Mutex::new(HashMap::from([(0, 64 << 10), (1, 1 << 20), (2, 8 << 20)])),
        });
        CONTEXTS.insert_as(context.handle, context.clone());
        context
    }

    /// Every call after a fault fails with its code.
    pub fn healthy(&self) -> Result {
        lock(&self.fault).map_or(Ok(()), Err)
    }

    pub fn set_fault(&self, code: Code) {
        lock(&self.fault).get_or_insert(code);
    }

    pub fn thread_stream(&self) -> Arc<Stream> {
        lock(&self.threads).entry(std::thread::current().id()).or_insert_with(|| Stream::new(true)).clone()
    }

    /// All streams but the legacy default one.
    pub fn others(&self) -> Vec<Arc<Stream>> {
        let mut all = lock(&self.streams).clone();
        all.extend(lock(&self.threads).values().cloned());
        all
    }

    pub fn synchronize(&self) -> Result {
        for stream in self.others() {
            stream.drain();
        }
        self.null.drain();
        super::launch::flush();
        self.healthy()
    }
}

/// The calling thread's stack. A thread that ends has none any more: the runtime unloads its modules then.
fn stack<T>(call: impl FnOnce(&mut Vec<Handle>) -> T) -> Result<T> {
    STACK.try_with(|stack| call(&mut stack.borrow_mut())).map_err(|_| DEINITIALIZED)
}

/// The calling thread's context.
pub fn current() -> Result<Arc<Context>> {
    device::initialized()?;
    let top = stack(|stack| stack.last().copied())?.ok_or(INVALID_CONTEXT)?;
    CONTEXTS.get(top)
}

pub fn current_handle() -> Handle {
    stack(|stack| stack.last().copied()).ok().flatten().unwrap_or(0)
}

pub fn set_current(handle: Handle) -> Result {
    device::initialized()?;
    if handle != 0 {
        CONTEXTS.get(handle)?;
    }
    stack(|stack| {
        stack.pop();
        if handle != 0 {
            stack.push(handle);
        }
    })
}

pub fn push(handle: Handle) -> Result {
    CONTEXTS.get(handle)?;
    stack(|stack| stack.push(handle))
}

pub fn pop() -> Result<Handle> {
    stack(Vec::pop)?.ok_or(INVALID_CONTEXT)
}

pub fn create(flags: u32, number: i32) -> Result<Handle> {
    device::check(number)?;
    let context = Context::create(super::registry::handle(), flags);
    push(context.handle)?;
    Ok(context.handle)
}

pub fn destroy(handle: Handle) -> Result {
    if handle == PRIMARY_HANDLE {
        return Err(INVALID_CONTEXT);
    }
    end(handle)?;
    stack(|stack| {
        if stack.last() == Some(&handle) {
            stack.pop();
        }
    })
}

/// What the context has begun ends first; its fault is nobody's any more.
fn end(handle: Handle) -> Result {
    let context = CONTEXTS.remove(handle)?;
    let _ = context.synchronize();
    tombolo_cuda_tables::storage::end(handle);
    Ok(())
}

pub fn retain_primary(number: i32) -> Result<Handle> {
    device::check(number)?;
    let mut primary = lock(&PRIMARY);
    let (context, count) = primary
        .get_or_insert_with(|| (Context::create(PRIMARY_HANDLE, PRIMARY_FLAGS.load(Ordering::Relaxed)), 0));
    *count += 1;
    Ok(context.handle)
}

pub fn release_primary(number: i32) -> Result {
    device::check(number)?;
    let mut primary = lock(&PRIMARY);
    match primary.as_mut() {
        Some((_, count)) if *count > 1 => *count -= 1,
        Some(_) => return end_primary(primary.take()),
        None => return Err(INVALID_CONTEXT),
    }
    Ok(())
}

pub fn reset_primary(number: i32) -> Result {
    device::check(number)?;
    let ended = lock(&PRIMARY).take();
    end_primary(ended)
}

fn end_primary(primary: Option<(Arc<Context>, usize)>) -> Result {
    match primary {
        Some((context, _)) => end(context.handle),
        None => Ok(()),
    }
}

/// Flags, and whether it is active.
pub fn primary_state(number: i32) -> Result<(u32, i32)> {
    device::check(number)?;
    Ok((PRIMARY_FLAGS.load(Ordering::Relaxed), i32::from(lock(&PRIMARY).is_some())))
}

pub fn set_primary_flags(number: i32, flags: u32) -> Result {
    device::check(number)?;
    PRIMARY_FLAGS.store(flags, Ordering::Relaxed);
    if let Some((context, _)) = lock(&PRIMARY).as_ref() {
        context.flags.store(flags, Ordering::Relaxed);
    }
    Ok(())
}
