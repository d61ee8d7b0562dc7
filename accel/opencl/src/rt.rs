// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The runtime of stubs: handles, wait lists, posting and waiting, answers to queries; and the connection.

use crate::state::{Body, Device, Event};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};
use tombolo_accel_client::connect::{VARIABLE, address, connect};
use tombolo_accel_client::connection::{Awaited, Connection, Lost};
use tombolo_accel_client::objects::{self, Arena};
use tombolo_accel_client::trace;
use tombolo_accel_spec::common::Snapshot;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_accel_spec::wire::{Decoder, Encoder, Malformed, Record};
use tombolo_calls::say;

/// A handle as programs hold it: the address of an object.
pub type Handle = *mut c_void;
/// A live object.
pub type Obj = objects::Obj<Body>;
/// A counted reference to an object.
pub type Ref = objects::Ref<Body>;

/// All objects of this process.
pub static ARENA: Arena<Body> = Arena::new();

/// An answer of the server that is kept: status and value.
type Answer = (i32, Arc<[u8]>);

struct Roots {
    platforms: Vec<Obj>,
    cache: HashMap<Vec<u8>, Answer>,
    tried: bool,
}

static CURRENT: AtomicPtr<Arc<Connection>> = AtomicPtr::new(std::ptr::null_mut());
static ROOTS: Mutex<Option<Roots>> = Mutex::new(None);

fn roots() -> std::sync::MutexGuard<'static, Option<Roots>> {
    ROOTS.lock().unwrap_or_else(|e| e.into_inner())
}

/// The connection in use, if there ever was one.
pub fn connection() -> Result<&'static Arc<Connection>, i32> {
    let p = CURRENT.load(Ordering::Acquire);
    // SAFETY: null, or leaked by establish(): never freed.
    unsafe { p.as_ref() }.ok_or(wire::LOST)
}

/// Turns a lost connection into OpenCL's code.
pub fn lost<T>(result: Result<T, Lost>) -> Result<T, i32> {
    result.map_err(|Lost| wire::LOST)
}

/// The platforms; connects first if there is no connection, or it was lost.
pub fn platforms() -> Result<Vec<Obj>, i32> {
    let mut guard = roots();
    let alive = connection().is_ok_and(|c| c.lost().is_none());
    if let Some(r) = guard.as_ref() {
        if alive || r.tried && connection().is_err() {
            return Ok(r.platforms.clone());
        }
    }
    if std::env::var_os("TOMBOLO_ACCEL_SERVER").is_some() {
        // Inside a server: its devices are native ones, never ours.
        return Ok(Vec::new());
    }
    let old = guard.take();
    match establish() {
        Ok(found) => {
            let platforms = found.platforms.clone();
            *guard = Some(found);
            Ok(platforms)
        }
        Err(why) => {
            let address = address();
            say!(
                "tombolo: no accelerator server at {address}: {why}; start one with 'tombolo accel serve' or set {VARIABLE}"
            );
            *guard = Some(old.unwrap_or(Roots { platforms: Vec::new(), cache: HashMap::new(), tried: true }));
            Err(cl::PLATFORM_NOT_FOUND_KHR)
        }
    }
}

fn establish() -> Result<Roots, String> {
    let link = connect(&address(), wire::API, wire::IDENTITY).map_err(|e| e.to_string())?;
    let connection = Connection::new(link).map_err(|e| e.to_string())?;
    let snapshot = connection.call(&Snapshot {}, |status, body| (status, body.to_vec()));
    let (status, body) = snapshot.map_err(|Lost| "the server went away during the handshake".to_string())?;
    if status != wire::SUCCESS {
        return Err(format!("the server has no usable OpenCL (code {status}); see its log"));
    }
    let roots = take_snapshot(&connection, &body)
        .map_err(|Malformed| "the server's snapshot can't be decoded".to_string())?;
    CURRENT.store(Box::into_raw(Box::new(connection)), Ordering::Release);
    crate::deferred::forget();
    trace::at_end(write_trace);
    Ok(roots)
}

fn take_snapshot(connection: &Arc<Connection>, body: &[u8]) -> Result<Roots, Malformed> {
    let mut from = Decoder::new(body);
    let mut platforms = Vec::new();
    for _ in 0..from.u32()? {
        let (kind_, id, parent) = (from.u32()?, from.u64()?, from.u64()?);
        let object = match ARENA.by_id(id) {
            Some(known) => known,
            None => {
                let body = if kind_ == kind::PLATFORM {
                    Body::Platform
                } else {
                    let platform = ARENA.by_id(parent).ok_or(Malformed)?;
                    Body::Device(Device { platform, parent: None })
                };
                let table = crate::stubs::DISPATCH.0.as_ptr().cast();
                let object = ARENA.create(kind_, table, connection.clone(), body).ok_or(Malformed)?;
                // Roots come first, in the server's order; so both sides count them alike.
                if ARENA.id(object) != id {
                    return Err(Malformed);
                }
                object
            }
        };
        if kind_ == kind::PLATFORM {
            platforms.push(object);
        }
    }
    let mut cache = HashMap::new();
    for _ in 0..from.u32()? {
        let key = from.bytes()?.to_vec();
        let status = from.i32()?;
        cache.insert(key, (status, from.bytes()?.into()));
    }
    from.end()?;
    Ok(Roots { platforms, cache, tried: true })
}

extern "C" fn write_trace() {
    if let Ok(connection) = connection() {
        trace::write(connection, wire::FUNCTIONS);
    }
}

/// Runs a stub's body; a panic becomes an error code instead of crossing into C.
fn caught<T>(f: impl FnOnce() -> Result<T, i32>) -> Result<T, i32> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(Err(cl::OUT_OF_HOST_MEMORY))
}

/// The status that a stub returns.
pub fn status(f: impl FnOnce() -> Result<(), i32>) -> i32 {
    caught(f).err().unwrap_or(wire::SUCCESS)
}

/// The handle that a creating stub returns, and its code.
///
/// # Safety
/// `errcode` is null or points to room for a code.
pub unsafe fn create<T>(errcode: *mut i32, f: impl FnOnce() -> Result<*mut T, i32>) -> *mut T {
    let (handle, status) = match caught(f) {
        Ok(handle) => (handle, wire::SUCCESS),
        Err(status) => (std::ptr::null_mut(), status),
    };
    // SAFETY: as the caller promises.
    unsafe { write(errcode, status) };
    handle
}

/// Writes through a pointer that may be null.
///
/// # Safety
/// `to` is null or points to room for a value.
pub unsafe fn write<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: as the caller promises; C programs may pass unaligned pointers.
        unsafe { to.write_unaligned(value) };
    }
}

/// The object that a program's handle names.
pub fn object(handle: Handle, kind: u32) -> Result<Obj, i32> {
    let object = ARENA.find(handle, kind).ok_or_else(|| kind::invalid(kind))?;
    let root = kind == kind::PLATFORM || kind == kind::DEVICE;
    if !root && !std::ptr::eq(&**object.connection(), &**connection()?) {
        return Err(wire::LOST);
    }
    Ok(object)
}

/// The same for a handle that may be null.
pub fn maybe(handle: Handle, kind: u32) -> Result<Option<Obj>, i32> {
    if handle.is_null() { Ok(None) } else { object(handle, kind).map(Some) }
}

/// The objects of an array, as a vector.
///
/// # Safety
/// `list` is null or points to `count` handles.
pub unsafe fn list(count: u32, list: *const Handle, kind: u32) -> Result<Vec<Obj>, i32> {
    if list.is_null() || count == 0 {
        return if list.is_null() && count == 0 { Ok(Vec::new()) } else { Err(cl::INVALID_VALUE) };
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(list, count as usize) }.iter().map(|h| object(*h, kind)).collect()
}

/// The ids of an array of handles.
///
/// # Safety
/// As for [`list`].
pub unsafe fn objects(count: u32, handles: *const Handle, kind: u32) -> Result<Vec<u64>, i32> {
    // SAFETY: as the caller promises.
    Ok(unsafe { list(count, handles, kind) }?.iter().map(|o| o.id()).collect())
}

/// The ids of a wait list.
///
/// # Safety
/// As for [`list`].
pub unsafe fn waits(count: u32, handles: *const Handle) -> Result<Vec<u64>, i32> {
    if count == 0 && handles.is_null() {
        return Ok(Vec::new());
    }
    if count == 0 || handles.is_null() {
        return Err(cl::INVALID_EVENT_WAIT_LIST);
    }
    // SAFETY: as the caller promises.
    let handles = unsafe { std::slice::from_raw_parts(handles, count as usize) };
    handles
        .iter()
        .map(|h| object(*h, kind::EVENT).map(|o| o.id()).map_err(|_| cl::INVALID_EVENT_WAIT_LIST))
        .collect()
}

/// Three numbers.
///
/// # Safety
/// `from` is null or points to three numbers.
pub unsafe fn triple(from: *const usize) -> Result<[u64; 3], i32> {
    if from.is_null() {
        return Err(cl::INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { from.cast::<[usize; 3]>().read_unaligned() }.map(|v| v as u64))
}

/// A program's list of properties with the 0 that ends it, which stands at a multiple of `step`. Null: an empty list.
///
/// # Safety
/// `from` is null or points to such a list.
pub unsafe fn properties(from: *const c_void, step: usize) -> Vec<i64> {
    let mut out = Vec::new();
    if from.is_null() {
        return out;
    }
    // A list without an end would be a program's error; no list of OpenCL is longer.
    for i in 0..512 {
        // SAFETY: not past the end, as the caller promises.
        let value = unsafe { from.cast::<i64>().add(i).read_unaligned() };
        out.push(value);
        if value == 0 && i % step == 0 {
            break;
        }
    }
    out
}

/// Bytes of a program.
///
/// # Safety
/// `from` is null or points to `len` bytes that live during the call.
pub unsafe fn bytes<'a>(from: *const c_void, len: usize) -> Result<&'a [u8], i32> {
    if from.is_null() || len > 1 << 20 {
        return Err(cl::INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { std::slice::from_raw_parts(from.cast(), len) })
}

/// A C string of a program.
///
/// # Safety
/// `from` is null or a C string that lives during the call.
pub unsafe fn string<'a>(from: *const c_char) -> Result<&'a [u8], i32> {
    if from.is_null() {
        return Err(cl::INVALID_VALUE);
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
impl Id for Ref {
    fn id(&self) -> u64 {
        ARENA.id(self.obj())
    }
}

/// Counts a reference.
pub fn hold(object: Obj) -> Ref {
    ARENA.hold(object)
}

/// An object that is being created: forgotten unless published.
pub struct New(Option<Obj>);

impl New {
    /// Its id; 0: no object was wanted.
    pub fn id(&self) -> u64 {
        self.0.map_or(0, |o| o.id())
    }
    /// The object, if one was wanted.
    pub fn object(&self) -> Option<Obj> {
        self.0
    }
    /// Makes the object the program's, once the server knows it.
    pub fn publish(mut self) -> Handle {
        self.0.take().map_or(std::ptr::null_mut(), |o| o.handle())
    }
    /// Gives the program its event, if it wanted one.
    ///
    /// # Safety
    /// `event` is null or points to room for a handle.
    pub unsafe fn give(self, event: *mut Handle) {
        if self.0.is_some() {
            // SAFETY: as the caller promises.
            unsafe { write(event, self.publish()) };
        }
    }
}

impl Drop for New {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            ARENA.forget(object);
        }
    }
}

pub fn new_object(kind: u32, body: Body) -> Result<New, i32> {
    let body = match body {
        Body::Plain(parent) => Body::Child(hold(parent)),
        other => other,
    };
    let table = crate::stubs::DISPATCH.0.as_ptr().cast();
    let object = ARENA.create(kind, table, connection()?.clone(), body).ok_or(cl::OUT_OF_HOST_MEMORY)?;
    Ok(New(Some(object)))
}

/// A new event for a command, if the program wants one.
pub fn new_event(queue: Obj, wanted: bool, command: u32) -> Result<New, i32> {
    if !wanted {
        return Ok(New(None));
    }
    let Body::Queue(q) = queue.body() else { return Err(kind::invalid(kind::QUEUE)) };
    new_object(
        kind::EVENT,
        Body::Event(Event {
            context: hold(q.context.obj()),
            queue: Some(hold(queue)),
            command,
            status: AtomicI32::new(i32::MAX),
            counted: None,
        }),
    )
}

/// Sends a command: posts it if it is sure to succeed, waits for its status otherwise; then the program gets its event.
///
/// # Safety
/// `event` is null or points to room for a handle.
pub unsafe fn submit<'a, R: Record<'a>>(
    record: &R,
    sure: bool,
    new: New,
    event: *mut Handle,
) -> Result<(), i32> {
    send(record, sure)?;
    // SAFETY: as the caller promises.
    unsafe { new.give(event) };
    Ok(())
}

/// Posts a request, or waits for its status.
pub fn send<'a, R: Record<'a>>(record: &R, post: bool) -> Result<(), i32> {
    if post { lost(connection()?.post(record)) } else { call(record).map(|_| ()) }
}

/// Sends a request and waits; the body of its reply, or the code it failed with.
pub fn call<'a, R: Record<'a>>(record: &R) -> Result<Vec<u8>, i32> {
    let (status, body) = lost(connection()?.call(record, |status, body| (status, body.to_vec())))?;
    if status == wire::SUCCESS { Ok(body) } else { Err(status) }
}

/// Waits until a ticket has been redeemed; soon the server waits for its command.
pub fn redeemed(ticket: u64, awaited: &Awaited) -> Result<(), i32> {
    let connection = connection()?;
    if !lost(connection.redeemed_soon(awaited))? {
        call(&wire::TicketWait { outstanding: ticket })?;
    }
    lost(connection.redeemed(awaited))
}

/// Answers a query with bytes.
///
/// # Safety
/// `value` is null or points to `size` bytes, `size_ret` is null or points to room for a size.
pub unsafe fn answer(bytes: &[u8], size: usize, value: *mut c_void, size_ret: *mut usize) -> Result<(), i32> {
    if !value.is_null() {
        if size < bytes.len() {
            return Err(cl::INVALID_VALUE);
        }
        // SAFETY: room for size bytes, as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), bytes.len()) };
    }
    // SAFETY: as the caller promises.
    unsafe { write(size_ret, bytes.len()) };
    Ok(())
}

/// Answers a query from the snapshot, or by asking the server.
///
/// # Safety
/// As for [`answer`].
pub unsafe fn info<'a, R: Record<'a>>(
    record: &R,
    cached: bool,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> Result<(), i32> {
    let (status, bytes) = if cached { ask_once(record)? } else { ask(record)? };
    if status != wire::SUCCESS {
        return Err(status);
    }
    // SAFETY: as the caller promises.
    unsafe { answer(&bytes, size, value, size_ret) }
}

fn ask<'a, R: Record<'a>>(record: &R) -> Result<Answer, i32> {
    lost(connection()?.call(record, |status, body| (status, Arc::from(body))))
}

/// At most this many answers are kept.
const KEPT: usize = 1 << 14;

/// The answer to a query whose answer never changes.
pub fn ask_once<'a, R: Record<'a>>(record: &R) -> Result<Answer, i32> {
    let mut key = R::ID.to_le_bytes().to_vec();
    record.encode(&mut Encoder::new(&mut key));
    if let Some(known) = roots().as_ref().and_then(|r| r.cache.get(&key)) {
        return Ok(known.clone());
    }
    let answer = ask(record)?;
    // A failure may be that of a moment: no memory, too many threads.
    if answer.0 != wire::SUCCESS {
        return Ok(answer);
    }
    if let Some(r) = roots().as_mut() {
        if r.cache.len() >= KEPT {
            r.cache.clear();
        }
        r.cache.insert(key, answer.clone());
    }
    Ok(answer)
}

/// The answer of an unsupported function.
pub fn unsupported(_name: &str, _id: u32) -> i32 {
    wire::UNSUPPORTED
}

/// Entry of the dispatch table for a function of another system.
pub extern "C" fn unsupported_status() -> i32 {
    wire::UNSUPPORTED
}

macro_rules! unsupported_pointer {
    ($($name:ident($($unused:ident),*)),*) => {
        $(
            /// Entry of the dispatch table for a creating function of another system.
            ///
            /// # Safety
            /// `errcode` is null or points to room for a code.
            pub unsafe extern "C" fn $name($($unused: usize,)* errcode: *mut i32) -> Handle {
                let _unused = ($($unused,)*);
                // SAFETY: as the caller promises.
                unsafe { create(errcode, || Err(wire::UNSUPPORTED)) }
            }
        )*
    };
}
unsupported_pointer!(
    unsupported_3(_a, _b),
    unsupported_4(_a, _b, _c),
    unsupported_5(_a, _b, _c, _d),
    unsupported_6(_a, _b, _c, _d, _e)
);

/// The smallest of the devices' largest buffers, from the snapshot.
pub fn max_alloc(devices: &[Ref]) -> u64 {
    let of = |d: &Ref| {
        let query = wire::GetDeviceInfo { device: d.id(), param: cl::DEVICE_MAX_MEM_ALLOC_SIZE };
        let (status, bytes) = ask_once(&query).ok()?;
        (status == wire::SUCCESS).then(|| bytes.first_chunk().map(|b| u64::from_le_bytes(*b)))?
    };
    devices.iter().map(of).min().flatten().unwrap_or(0)
}

/// A queue takes only objects of its own context.
pub fn same_context(queue: Obj, object: Obj) -> Result<(), i32> {
    if crate::sure::same_context(queue, object) { Ok(()) } else { Err(cl::INVALID_CONTEXT) }
}
