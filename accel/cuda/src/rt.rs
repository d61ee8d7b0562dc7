// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The runtime of stubs: handles, posting and waiting, and what is the calling thread's own: its stack of contexts and its default stream.

use crate::state::{Body, Detail};
use crate::system::initialized;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use tombolo_accel_client::connection::{Connection, Lost};
use tombolo_accel_client::objects::{self, Arena};
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::common::Ping;
use tombolo_accel_spec::cuda::{self as wire, cu, kind};
use tombolo_accel_spec::wire::Record;

/// A handle as programs hold it: the address of an object.
pub type Handle = *mut c_void;
/// A live object.
pub type Obj = objects::Obj<Body>;

/// All objects of this process.
pub static ARENA: Arena<Body> = Arena::new();

/// CU_STREAM_LEGACY
const LEGACY: usize = 1;
/// CU_STREAM_PER_THREAD
const PER_THREAD: usize = 2;

/// A context in a thread's stack. The id stays its own after the context has ended.
#[derive(Clone, Copy)]
pub struct Current {
    pub handle: usize,
    pub id: u64,
}

/// The default streams of a thread, by context.
struct Streams(HashMap<u64, Obj>);

impl Drop for Streams {
    fn drop(&mut self) {
        for stream in self.0.values() {
            ARENA.release(*stream);
        }
    }
}

thread_local! {
    static STACK: RefCell<Vec<Option<Current>>> = const { RefCell::new(Vec::new()) };
    static THREADED: Cell<bool> = const { Cell::new(false) };
    static STREAMS: RefCell<Streams> = RefCell::new(Streams(HashMap::new()));
}

/// The connection in use.
pub fn connection() -> Result<&'static Arc<Connection>, i32> {
    Ok(&initialized()?.connection)
}

/// Turns a lost connection into the code that programs get when their device is lost.
pub fn lost<T>(result: Result<T, Lost>) -> Result<T, i32> {
    result.map_err(|Lost| wire::LOST)
}

/// The status that a function returns; a panic becomes a code instead of crossing into C.
pub fn status(f: impl FnOnce() -> Result<(), i32>) -> i32 {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
    result.unwrap_or(Err(cu::CUDA_ERROR_UNKNOWN)).err().unwrap_or(wire::SUCCESS)
}

/// The answer of a function that is not forwarded.
pub fn unsupported(_name: &str, _id: u32) -> i32 {
    wire::UNSUPPORTED
}

/// Carries out a call of a function whose default stream is the calling thread's.
pub fn threaded<T>(f: impl FnOnce() -> T) -> T {
    let before = THREADED.try_with(|threaded| threaded.replace(true));
    let result = f();
    let _at_the_thread_s_end = THREADED.try_with(|threaded| threaded.set(before.unwrap_or(false)));
    result
}

/// The thread's stack of contexts.
pub fn with_stack<T>(f: impl FnOnce(&mut Vec<Option<Current>>) -> T) -> T {
    // In the destructors of other things of the thread, it has no context any more.
    let mut f = Some(f);
    let kept = STACK.try_with(|stack| f.take().map(|f| f(&mut stack.borrow_mut())));
    match (kept, f) {
        (Ok(Some(result)), _) => result,
        (_, Some(f)) => f(&mut Vec::new()),
        _ => unreachable!("it was called, or is still there"),
    }
}

/// The current context.
pub fn top() -> Option<Current> {
    with_stack(|stack| stack.last().copied().flatten())
}

/// The id of the current context; 0: none.
pub fn current() -> u64 {
    top().map_or(0, |context| context.id)
}

/// Writes through a program's pointer.
///
/// # Safety
/// `to` is null or points to room for a value.
pub unsafe fn write<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: as the caller promises; C programs may pass unaligned pointers.
        unsafe { to.write_unaligned(value) };
    }
}

/// A pointer of a program to room for a result.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// The same, of a pointer that a program passed for this purpose.
    ///
    /// # Safety
    /// It is null or points to room for a value until the call ends.
    pub unsafe fn of(pointer: *mut T) -> Out<T> {
        Out(pointer)
    }

    /// Writes the result. Null is refused.
    pub fn set(&self, value: T) -> Result<(), i32> {
        if self.0.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        self.offer(value);
        Ok(())
    }

    /// Writes the result, where the program wants it.
    pub fn offer(&self, value: T) {
        // SAFETY: C calls exported functions with pointers to room for what they declare, or null.
        unsafe { write(self.0, value) };
    }

    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl<T: Copy> Out<T> {
    /// What the program has there, where it also tells something. Null is refused.
    pub fn get(&self) -> Result<T, i32> {
        if self.0.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: C calls exported functions with pointers to values of what they declare, or null; they may be unaligned.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

/// The object that a program's handle names.
pub fn object(handle: Handle, kind: u32) -> Result<Obj, i32> {
    if kind == kind::STREAM && handle as usize <= PER_THREAD {
        return default_stream(handle).and_then(|stream| stream.ok_or(cu::CUDA_ERROR_INVALID_HANDLE));
    }
    initialized()?;
    ARENA.find(handle, kind).ok_or_else(|| kind::invalid(kind))
}

/// The same for a handle that may be null; of a stream, null is a default one, and None the context's.
pub fn maybe(handle: Handle, kind: u32) -> Result<Option<Obj>, i32> {
    if kind == kind::STREAM && handle as usize <= PER_THREAD {
        return default_stream(handle);
    }
    if handle.is_null() { Ok(None) } else { object(handle, kind).map(Some) }
}

/// The stream of a handle that names none by itself. None: the context's.
fn default_stream(handle: Handle) -> Result<Option<Obj>, i32> {
    let of_thread = match handle as usize {
        LEGACY => false,
        PER_THREAD => true,
        _ => THREADED.try_with(Cell::get).unwrap_or(false),
    };
    if !of_thread {
        return Ok(None);
    }
    let context = top().ok_or(cu::CUDA_ERROR_INVALID_CONTEXT)?;
    let known = STREAMS.try_with(|streams| streams.borrow().0.get(&context.id).copied());
    if let Some(stream) = known.map_err(|_| cu::CUDA_ERROR_DEINITIALIZED)? {
        return Ok(Some(stream));
    }
    // A stream like any other is what a thread's default stream is: it waits for the context's, and that for it.
    let new = fresh(kind::STREAM, false)?;
    call(&wire::StreamCreate { phStream: new.id(), Flags: 0, current: context.id })?;
    let stream = new.keep();
    let _at_the_thread_s_end = STREAMS.try_with(|streams| streams.borrow_mut().0.insert(context.id, stream));
    Ok(Some(stream))
}

/// The server's number of a device.
pub fn device(ordinal: i32) -> Result<i32, i32> {
    let devices = &initialized()?.devices;
    let device = usize::try_from(ordinal).ok().and_then(|n| devices.get(n));
    device.map(|device| device.ordinal).ok_or(cu::CUDA_ERROR_INVALID_DEVICE)
}

/// A C string of a program.
///
/// # Safety
/// `from` is null or a C string that lives during the call.
pub unsafe fn string<'a>(from: *const c_char) -> Result<&'a [u8], i32> {
    if from.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { CStr::from_ptr(from) }.to_bytes())
}

/// Ids, as objects have them.
pub trait Id {
    /// The id of an object.
    fn id(&self) -> u64;
}

impl Id for Obj {
    fn id(&self) -> u64 {
        ARENA.id(*self)
    }
}

/// An object that is being created: forgotten unless published.
pub struct New(Option<Obj>);

impl New {
    /// Its id.
    pub fn id(&self) -> u64 {
        self.0.map_or(0, |o| o.id())
    }

    pub fn object(&self) -> Option<Obj> {
        self.0
    }

    /// Makes the object the program's, once the server knows it.
    pub fn publish(self) -> Handle {
        self.keep().handle()
    }

    /// The same, for the library itself.
    pub fn keep(mut self) -> Obj {
        self.0.take().expect("it is taken once, here")
    }
}

impl Drop for New {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            ARENA.forget(object);
        }
    }
}

/// A new object of the current context. A program that has no room for its handle is refused.
pub fn fresh(kind: u32, is_null: bool) -> Result<New, i32> {
    if is_null {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    new_object(kind, Body { context: top().map_or(0, |context| context.handle), detail: Detail::Plain })
}

pub fn new_object(kind: u32, body: Body) -> Result<New, i32> {
    let object = ARENA.create(kind, std::ptr::null(), connection()?.clone(), body);
    object.map(|object| New(Some(object))).ok_or(cu::CUDA_ERROR_OUT_OF_MEMORY)
}

/// Sends a request and waits; the body of its reply, or the code it failed with.
pub fn call<'a, R: Record<'a>>(record: &R) -> Result<Vec<u8>, i32> {
    let (status, body) = lost(connection()?.call(record, |status, body| (status, body.to_vec())))?;
    if status == wire::SUCCESS { Ok(body) } else { Err(status) }
}

/// Sends a request without waiting.
pub fn post<'a, R: Record<'a>>(record: &R) -> Result<(), i32> {
    lost(connection()?.post(record))
}

/// Takes a range of the window; where transfers under way hold too much of it, waits for them.
pub fn staging(len: u64, place: Place) -> Result<u64, i32> {
    let connection = connection()?;
    if let Some(at) = lost(connection.take_staging(len, place))? {
        return Ok(at);
    }
    lost(connection.call(&Ping {}, |_, _| ()))?;
    lost(connection.take_staging(len, place))?.ok_or(cu::CUDA_ERROR_OUT_OF_MEMORY)
}
