// SPDX-License-Identifier: Apache-2.0 OR MIT
//! OpenCL on the server: the real driver, the client's objects, and the runtime that generated handlers call.
//!
//! - [`generated`]: native functions and decoders, from the declarations.
//! - [`hand`]: handlers written by hand.
//! - [`clear`]: clears memory before a client gets it.
//! - [`enqueue`]: commands, their wait lists and events.
//! - [`checks`]: ranges, rectangles and pixels, before the driver sees them.
//! - [`properties`]: which properties a client may set.
//! - [`late`]: errors of posted commands, until the client waits for something.
//! - [`stream`]: long transfers in pieces.
//! - [`tickets`]: tells the client when its part of the window was read or filled.
//! - [`waits`]: waiting for events and queues.

pub mod checks;
pub mod clear;
pub mod enqueue;
pub mod hand;
pub mod include;
pub mod late;
pub mod properties;
pub mod stream;
pub mod tickets;
pub mod waits;

use crate::account::Account;
use crate::device::Device;
use crate::limits::Limits;
use crate::output::Output;
use crate::quota::Quota;
use crate::session::{Api, Call, Early, Session};
use crate::table::{Fault, Table};
use generated::Native;
use std::ffi::{CStr, CString, c_void};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_accel_spec::wire::{Encoder, Malformed, Record, ReplyKind};
use tombolo_calls::say;

/// A handle of the native driver.
pub type Handle = *mut c_void;

/// Native functions and decoders, generated.
#[allow(unused_imports, clippy::all)]
pub mod generated {
    use super::{Cx, Handle, hand, properties};
    use std::ffi::{CStr, c_char, c_void};
    use tombolo_accel_spec::opencl::{self as wire, cl, kind};
    use tombolo_accel_spec::wire::{Malformed, Record};
    include!(concat!(env!("OUT_DIR"), "/opencl_server.rs"));
}

/// The server's own state of an object.
#[derive(Debug, Default)]
pub struct Extra {
    /// Bytes of a buffer.
    size: u64,
    /// Bytes of a pixel of an image; 0: no image.
    pixel: u64,
    /// Width, height or layers, depth or layers of an image.
    extent: [u64; 3],
    /// Set for the server's own root objects.
    root: bool,
    /// The address in the window of a buffer at home there.
    home: usize,
    program: hand::Built,
    kernel: Option<Box<hand::Kernel>>,
    /// The queue of a posted command that failed, beside its event.
    queue: u64,
    /// Of a queue: the last wait for it took long.
    waits_long: bool,
}

/// OpenCL for one client.
pub struct OpenCl {
    native: Native,
    table: Mutex<Table<Extra>>,
    memory: Quota,
    tickets: tickets::Tickets,
    streams: stream::Streams,
    session: OnceLock<Arc<Session>>,
    late: late::Late,
    /// Some kernel has an argument whose posted setting failed: until then, none is asked.
    arguments_failed: AtomicBool,
    output: Output,
    svm: Mutex<hand::Svm>,
    queues: clear::Queues,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic ends the worker.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl OpenCl {
    /// Loads the driver. It stays until the process ends, as its threads may call back at any time.
    pub fn load(limits: Limits, account: Option<Arc<Account>>) -> Result<&'static OpenCl, String> {
        // SAFETY: loads a library by name; the system's OpenCL loader has no constructor that depends on us.
        let library = unsafe { libc::dlopen(c"libOpenCL.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(
                "libOpenCL.so.1 was not found; install an OpenCL loader (Debian: ocl-icd-libopencl1)".into(),
            );
        }
        // SAFETY: symbols of the OpenCL loader have the signatures that the declarations say.
        Ok(unsafe { OpenCl::with(limits, account, |name| libc::dlsym(library, name.as_ptr())) })
    }

    /// OpenCL on a driver whose functions `find` tells.
    ///
    /// # Safety
    /// `find` returns null or the address of the API's function of that name.
    pub unsafe fn with(
        limits: Limits,
        account: Option<Arc<Account>>,
        find: impl FnMut(&CStr) -> *mut c_void,
    ) -> &'static OpenCl {
        // SAFETY: as the caller promises.
        let native = unsafe { Native::load(find) };
        let table = Table::shared(limits.objects as usize, account.clone());
        Box::leak(Box::new(OpenCl {
            native,
            table: Mutex::new(table),
            memory: Quota::new(limits.memory, account),
            tickets: tickets::Tickets::default(),
            streams: stream::Streams::default(),
            session: OnceLock::new(),
            late: late::Late::default(),
            arguments_failed: AtomicBool::new(false),
            output: Output::default(),
            svm: Mutex::default(),
            queues: clear::Queues::default(),
        }))
    }

    /// The native devices; none where there is no driver.
    pub fn devices(&self) -> Vec<Device> {
        let n = &self.native;
        let (Some(platform_ids), Some(platform_info), Some(device_ids), Some(device_info)) =
            (n.clGetPlatformIDs, n.clGetPlatformInfo, n.clGetDeviceIDs, n.clGetDeviceInfo)
        else {
            return Vec::new();
        };
        let text = |(_, mut bytes): (i32, Vec<u8>)| {
            bytes.retain(|b| *b != 0);
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let mut devices = Vec::new();
        // SAFETY: handles come from the driver itself; buffers are as long as said.
        let platforms = hand::listed(|n, list, count| unsafe { platform_ids(n, list, count) });
        for platform in platforms.unwrap_or_default() {
            let named = cl::PLATFORM_NAME;
            // SAFETY: as above.
            let name = text(hand::value(&|s, v, r| unsafe { platform_info(platform, named, s, v, r) }));
            let all = cl::DEVICE_TYPE_ALL;
            // SAFETY: as above.
            let list = hand::listed(|n, list, c| unsafe { device_ids(platform, all, n, list, c) });
            // SAFETY: as above.
            let told = |device, what| hand::value(&|s, v, r| unsafe { device_info(device, what, s, v, r) });
            let kind =
                |device| <[u8; 8]>::try_from(told(device, cl::DEVICE_TYPE).1).map_or(0, u64::from_ne_bytes);
            devices.extend(list.unwrap_or_default().into_iter().map(|device| Device {
                api: "opencl",
                platform: name.clone(),
                name: text(told(device, cl::DEVICE_NAME)),
                is_processor: kind(device) & cl::DEVICE_TYPE_CPU != 0,
            }));
        }
        devices
    }

    /// Ties it to its client.
    pub fn attach(&self, session: &Arc<Session>) {
        if self.session.set(session.clone()).is_err() {
            say!("tombolo accel: a driver serves one client; the second was ignored");
        }
    }

    /// From now on, what kernels print goes to the client. For a process that has one client and prints nothing itself.
    pub fn capture_output(&self) -> std::io::Result<()> {
        self.output.capture(self.session())
    }

    /// Tells the client what ended, and what was printed before.
    fn tell_what_ended(&self) {
        self.output.settle();
        self.tickets.settle(self);
    }

    fn session(&self) -> &Arc<Session> {
        self.session.get().expect("attach() comes before any request")
    }

    /// Counts device memory; an error beyond the client's limit.
    fn charge(&self, bytes: u64) -> Result<(), i32> {
        self.memory.charge(bytes, cl::MEM_OBJECT_ALLOCATION_FAILURE)
    }

    fn uncharge(&self, bytes: u64) {
        self.memory.uncharge(bytes);
    }
}

impl OpenCl {
    /// Gives back an object that the client has no more use for.
    fn give_up(&'static self, kind: u32, id: u64) {
        let taken = lock(&self.table).take(kind, id);
        let Ok((Some(native), extra)) = taken else { return };
        if extra.root {
            return;
        }
        match kind {
            kind::CONTEXT => self.queues.forget(self, native),
            // No call can ask for its error any more.
            kind::QUEUE => drop(self.late.check(id, true)),
            _ => {}
        }
        self.release_native(kind, native);
    }
}

impl Api for &'static OpenCl {
    fn success(&self) -> i32 {
        wire::SUCCESS
    }

    fn usage(&self) -> (u64, u64) {
        (self.memory.own(), lock(&self.table).live() as u64)
    }

    fn settle(&self) {
        self.tell_what_ended();
    }

    fn release(&self, _call: &mut Call<'_>, kind: u32, id: u64) {
        self.give_up(kind, id);
    }

    fn snapshot(&self, _session: &Arc<Session>, reply: &mut Vec<u8>) -> Result<(), i32> {
        hand::snapshot(self, reply)
    }

    fn call(&self, call: &mut Call<'_>, id: u32, body: &[u8]) -> Result<Result<(), i32>, Malformed> {
        let waited = call.waited;
        let mut reply = Vec::new();
        let (outcome, new, owed, queue) = {
            let mut cx = Cx { cl: self, reply: &mut reply, call, new: None, owed: 0, waited, queue: 0 };
            let outcome = generated::dispatch(&mut cx, id, body)?;
            (outcome, cx.new, cx.owed, cx.queue)
        };
        call.reply = reply;
        if owed != 0 {
            let status = outcome.err().unwrap_or(wire::SUCCESS);
            self.session().notify(ReplyKind::Ticket, status, owed, &[]);
        }
        if let (Err(code), false) = (outcome, waited) {
            self.posted_failed(id, code, new, queue);
        }
        Ok(outcome)
    }
}

impl OpenCl {
    /// A posted request failed: whatever uses its object gets the code, and so does what follows in its queue ([`late`]).
    fn posted_failed(&self, id: u32, code: i32, new: Option<(u32, u64)>, queue: u64) {
        let name = wire::FUNCTIONS.iter().find(|f| f.0 == id).map_or("?", |f| f.1);
        say!(
            "tombolo accel: posted {name} failed with code {code}; the program is told when it uses the result, or waits for the queue"
        );
        if queue != 0 {
            self.late.note(queue, code);
        }
        if let Some((kind, id)) = new {
            if queue == 0 {
                self.late.note(late::NO_QUEUE, code);
            }
            // An id in use stays what it is: the client broke its own object.
            let _kept = lock(&self.table).put(kind, id, Err(code), Extra { queue, ..Extra::default() });
        }
    }

    pub fn release_all(&self) {
        let all = lock(&self.table).drain();
        for (kind, native, extra) in all {
            if kind == kind::CONTEXT {
                self.queues.forget(self, native);
            }
            if !extra.root {
                self.release_native(kind, native);
            }
        }
    }

    fn release_native(&self, kind: u32, native: usize) {
        let n = &self.native;
        let f = match kind {
            kind::CONTEXT => n.clReleaseContext,
            kind::QUEUE => n.clReleaseCommandQueue,
            kind::MEM => n.clReleaseMemObject,
            kind::SAMPLER => n.clReleaseSampler,
            kind::PROGRAM => n.clReleaseProgram,
            kind::KERNEL => n.clReleaseKernel,
            kind::EVENT => n.clReleaseEvent,
            kind::DEVICE => n.clReleaseDevice,
            _ => None,
        };
        if let Some(f) = f {
            // SAFETY: the table held one reference to this handle, and it is taken out.
            unsafe { f(native as Handle) };
        }
    }
}

/// The part of a session's call that handlers use.
trait Waited {
    /// [`Call::may_block`]
    fn may_block(&mut self) -> bool;
    /// [`Call::early`]
    fn early(&mut self) -> Option<Arc<Early>>;
}

impl Waited for Call<'_> {
    fn may_block(&mut self) -> bool {
        Call::may_block(self)
    }
    fn early(&mut self) -> Option<Arc<Early>> {
        Call::early(self)
    }
}

/// One request, for its handler.
pub struct Cx<'a> {
    cl: &'static OpenCl,
    reply: &'a mut Vec<u8>,
    call: &'a mut dyn Waited,
    /// The object that the request creates.
    new: Option<(u32, u64)>,
    /// A ticket that is redeemed when the request ends, unless a native event does it.
    owed: u64,
    /// Set if the client waits for the reply.
    waited: bool,
    /// The queue that the request puts a command into.
    queue: u64,
}

impl Cx<'_> {
    /// Notes the request's ticket: the client waits for its redemption, also if the request fails.
    fn owe(&mut self, ticket: u64) {
        self.owed = ticket;
    }

    /// The request puts a command into this queue: refused if a posted one failed there before, of which the client knows nothing yet.
    /// If the command is refused later, its event (0: none) has that code.
    pub fn in_queue(&mut self, queue: u64, event: u64) -> Result<(), i32> {
        self.queue = queue;
        if event != 0 {
            self.new = Some((kind::EVENT, event));
        }
        self.cl.late.check(queue, self.waited)
    }

    /// Reads the server's own facts about an object.
    fn extra<T>(&self, kind: u32, id: u64, f: impl FnOnce(&Extra) -> T) -> Result<T, i32> {
        lock(&self.cl.table).extra(kind, id).map(f).map_err(|e| Self::fault(kind, e))
    }

    pub fn native(&self) -> &'static Native {
        &self.cl.native
    }

    fn fault(kind: u32, fault: Fault) -> i32 {
        match fault {
            Fault::Invalid | Fault::InUse => kind::invalid(kind),
            Fault::Failed(code) => code,
            Fault::TooMany => cl::OUT_OF_RESOURCES,
        }
    }

    /// The native handle of an object of this client.
    pub fn get(&self, kind: u32, id: u64) -> Result<Handle, i32> {
        lock(&self.cl.table).get(kind, id).map(|h| h as Handle).map_err(|f| Self::fault(kind, f))
    }

    /// The same for an id that may be 0.
    pub fn maybe(&self, kind: u32, id: u64) -> Result<Handle, i32> {
        if id == 0 { Ok(std::ptr::null_mut()) } else { self.get(kind, id) }
    }

    /// The native handles of several objects.
    pub fn all(&self, kind: u32, ids: &[u64]) -> Result<Vec<Handle>, i32> {
        let table = lock(&self.cl.table);
        ids.iter()
            .map(|id| table.get(kind, *id).map(|h| h as Handle).map_err(|f| Self::fault(kind, f)))
            .collect()
    }

    /// A length that travels beside its bytes is theirs.
    pub fn same_length(&self, bytes: &[u8], len: u64) -> Result<(), i32> {
        if bytes.len() as u64 == len { Ok(()) } else { Err(cl::INVALID_VALUE) }
    }

    /// A count that travels beside its list is the list's.
    pub fn same_count(&self, len: usize, count: u32) -> Result<(), i32> {
        if len == count as usize { Ok(()) } else { Err(cl::INVALID_VALUE) }
    }

    pub fn c_string(&self, bytes: &[u8]) -> Result<CString, i32> {
        CString::new(bytes).map_err(|_| cl::INVALID_VALUE)
    }

    /// A status of the driver.
    pub fn status(&self, status: i32) -> Result<(), i32> {
        if status == wire::SUCCESS { Ok(()) } else { Err(status) }
    }

    /// An encoder that appends to the reply.
    pub fn reply(&mut self) -> Encoder<'_> {
        Encoder::new(self.reply)
    }

    /// The driver may be entered for long; an error where too many threads of this client are inside of it.
    pub fn may_block(&mut self) -> Result<(), i32> {
        if self.call.may_block() { Ok(()) } else { Err(cl::OUT_OF_RESOURCES) }
    }

    /// A property: asked for its size, then for its value. Properties that name native handles are never told.
    pub fn info(
        &mut self,
        param: u32,
        local: &[u32],
        ask: impl Fn(usize, *mut c_void, *mut usize) -> i32,
    ) -> Result<(), i32> {
        if local.contains(&param) {
            return Err(cl::INVALID_VALUE);
        }
        let mut size = 0;
        self.status(ask(0, std::ptr::null_mut(), &mut size))?;
        if size > 64 << 20 {
            return Err(cl::OUT_OF_RESOURCES);
        }
        let mut value = vec![0u8; size];
        if size > 0 {
            self.status(ask(size, value.as_mut_ptr().cast(), &mut size))?;
        }
        value.truncate(size);
        self.reply.extend_from_slice(&value);
        Ok(())
    }

    /// Creates an object under the id that the client chose.
    pub fn create(&mut self, kind: u32, id: u64, make: impl FnOnce(*mut i32) -> Handle) -> Result<(), i32> {
        self.create_with(kind, id, Extra::default(), make)
    }

    /// The same, with what is kept beside it.
    pub fn create_with(
        &mut self,
        kind: u32,
        id: u64,
        extra: Extra,
        make: impl FnOnce(*mut i32) -> Handle,
    ) -> Result<(), i32> {
        self.new = Some((kind, id));
        lock(&self.cl.table).vacant(id).map_err(|f| Self::too_many(kind, f))?;
        let mut code = cl::INVALID_VALUE;
        let native = make(&mut code);
        if native.is_null() {
            return Err(if code == wire::SUCCESS { cl::OUT_OF_RESOURCES } else { code });
        }
        self.keep(kind, id, native, extra)
    }

    fn too_many(kind: u32, fault: Fault) -> i32 {
        if fault == Fault::TooMany {
            say!("tombolo accel: a client's quota is reached: no more objects; raise its limit of objects");
        }
        Self::fault(kind, fault)
    }

    fn keep(&mut self, kind: u32, id: u64, native: Handle, extra: Extra) -> Result<(), i32> {
        let kept = lock(&self.cl.table).put(kind, id, Ok(native as usize), extra);
        kept.map_err(|f| {
            self.cl.release_native(kind, native as usize);
            Self::too_many(kind, f)
        })
    }
}

/// The key of a query in the client's store of answers.
fn key<'a, R: Record<'a>>(query: &R) -> Vec<u8> {
    let mut key = R::ID.to_le_bytes().to_vec();
    query.encode(&mut Encoder::new(&mut key));
    key
}
