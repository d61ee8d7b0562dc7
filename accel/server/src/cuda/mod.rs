// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CUDA on the server: the real driver, the client's objects and allocations, and the runtime that generated handlers call.
//!
//! - [`generated`]: native functions and decoders, from the declarations.
//! - [`hand`]: handlers written by hand; those of copies are in [`copy`] and [`cuboid`], of launches in [`launch`], of graphs' nodes in [`graph`], of the program's own functions in [`host`], of pools in [`pool`].
//! - [`memory`]: the client's allocations, by address.
//! - [`snapshot`]: devices, as a client sees them.

mod copy;
mod cuboid;
mod graph;
pub mod hand;
mod host;
mod launch;
pub mod memory;
mod pool;
pub mod snapshot;

use crate::account::Account;
use crate::device::Device;
use crate::limits::Limits;
use crate::output::Output;
use crate::quota::Quota;
use crate::session::{Api, Call, Session};
use crate::table::{Fault, Table};
use generated::Native;
use host::Turns;
use memory::Ranges;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use tombolo_accel_spec::cuda::{self as wire, cu, kind};
use tombolo_accel_spec::wire::{Encoder, Malformed, ReplyKind};
use tombolo_calls::say;

/// A handle of the native driver.
pub type Handle = *mut c_void;

/// Native functions and decoders, generated.
#[allow(unused_imports, unused_variables, non_snake_case, clippy::all)]
pub mod generated {
    use super::{Cx, Handle, hand};
    use std::ffi::{CStr, c_char, c_void};
    use tombolo_accel_spec::cuda::{self as wire, cu, kind};
    use tombolo_accel_spec::wire::{Malformed, Record};
    include!(concat!(env!("OUT_DIR"), "/cuda_server.rs"));
}

/// Offset and size of each parameter of a kernel.
type Parameters = Arc<[(usize, usize)]>;

/// The server's own state of an object.
#[derive(Debug, Default)]
pub struct Extra {
    /// The objects that it ends with: a context, a module, a library.
    owners: [u64; 2],
    /// Of a primary context: its device.
    primary: Option<i32>,
    /// Of a pool: it is the driver's own, which nobody destroys.
    is_borrowed: bool,
    /// Bytes that it was charged for.
    charged: u64,
    /// Of a function or a kernel.
    parameters: Parameters,
}

thread_local! {
    /// The context that is current in this thread, by its id: an address may be that of another one later.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// CUDA for one client.
pub struct Cuda {
    native: Native,
    /// By the client's numbers.
    devices: Vec<i32>,
    table: Mutex<Table<Extra>>,
    ranges: Mutex<Ranges>,
    memory: Quota,
    session: OnceLock<Arc<Session>>,
    /// The code of a posted request that failed, for the next call that waits; 0: none did.
    late: AtomicI32,
    /// Carries the output of kernels to the client.
    output: Output,
    turns: Turns,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic ends the worker.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

fn fault(kind: u32, fault: Fault) -> i32 {
    match fault {
        Fault::Invalid | Fault::InUse => kind::invalid(kind),
        Fault::Failed(code) => code,
        Fault::TooMany => {
            say!("tombolo accel: a client's quota is reached: no more objects; raise its limit of objects");
            cu::CUDA_ERROR_OUT_OF_MEMORY
        }
    }
}

impl Cuda {
    /// Loads the driver and initializes it. It stays until the process ends, as its threads may call back at any time.
    pub fn load(limits: Limits, account: Option<Arc<Account>>) -> Result<&'static Cuda, String> {
        // SAFETY: loads a library by name; NVIDIA's driver has no constructor that depends on us.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err("libcuda.so.1 was not found; install NVIDIA's driver".into());
        }
        // SAFETY: symbols of the driver have the signatures that the declarations say, which a compiler compared with its header.
        let cuda = unsafe { Cuda::with(limits, account, |name| libc::dlsym(library, name.as_ptr())) };
        cuda.map_err(|code| format!("cuInit of this host's libcuda.so.1 failed with code {code}"))
    }

    /// CUDA on a driver whose functions `find` tells.
    ///
    /// # Safety
    /// `find` returns null or the address of the API's function of that name.
    pub unsafe fn with(
        limits: Limits,
        account: Option<Arc<Account>>,
        find: impl FnMut(&CStr) -> *mut c_void,
    ) -> Result<&'static Cuda, i32> {
        // SAFETY: as the caller promises.
        let native = unsafe { Native::load(find) };
        let devices = snapshot::devices(&native)?;
        let table = Table::shared(limits.objects as usize, account.clone());
        Ok(Box::leak(Box::new(Cuda {
            native,
            devices,
            table: Mutex::new(table),
            ranges: Mutex::default(),
            memory: Quota::new(limits.memory, account),
            session: OnceLock::new(),
            late: AtomicI32::new(wire::SUCCESS),
            output: Output::default(),
            turns: Turns::default(),
        })))
    }

    /// The driver's devices.
    pub fn devices(&self) -> Result<Vec<Device>, i32> {
        let device = |device: &i32| {
            let name = String::from_utf8_lossy(&snapshot::name(&self.native, *device)?).into_owned();
            Ok(Device { api: "cuda", platform: "CUDA".into(), name, is_processor: false })
        };
        self.devices.iter().map(device).collect()
    }

    /// Ties it to its client.
    pub fn attach(&self, session: &Arc<Session>) {
        if self.session.set(session.clone()).is_err() {
            say!("tombolo accel: a driver serves one client; the second was ignored");
        }
    }

    /// Sends to the client what kernels print from now on.
    pub fn capture_output(&self) -> std::io::Result<()> {
        self.output.capture(self.session())
    }

    fn session(&self) -> &Arc<Session> {
        self.session.get().expect("attach() comes before any request")
    }

    /// Counts device memory; an error beyond the client's limit.
    fn charge(&self, bytes: u64) -> Result<(), i32> {
        self.memory.charge(bytes, cu::CUDA_ERROR_OUT_OF_MEMORY)
    }

    fn uncharge(&self, bytes: u64) {
        self.memory.uncharge(bytes);
    }

    /// An object has ended, and with it what it owned: the driver has freed that, so only its names are taken back.
    fn end(&self, owner: u64) {
        let mut todo = vec![owner];
        while let Some(owner) = todo.pop() {
            let gone = lock(&self.table).take_if(|extra| extra.owners.contains(&owner));
            let parts = gone.iter().map(|(_, extra)| extra.charged).sum::<u64>();
            todo.extend(gone.iter().map(|(id, _)| *id));
            let freed = lock(&self.ranges).end(owner);
            self.uncharge(freed + parts);
        }
    }

    /// Gives everything back.
    pub fn release_all(&self) {
        let all = lock(&self.table).drain();
        let charged = all.iter().map(|(_, _, extra)| extra.charged).sum();
        self.uncharge(charged);
        for (address, range) in lock(&self.ranges).drain() {
            if let Some(free) = self.native.cuMemFree_v2.filter(|_| range.charged > 0) {
                // SAFETY: the client's own allocation, of which nothing knows any more.
                unsafe { free(address) };
            }
            self.uncharge(range.charged);
        }
        all.into_iter().for_each(|(kind, native, extra)| self.release_native(kind, native, &extra));
        self.late.store(wire::SUCCESS, Ordering::SeqCst);
    }

    /// Gives a native object back that the table had.
    fn release_native(&self, kind: u32, native: usize, extra: &Extra) {
        let n = &self.native;
        if let Some(device) = extra.primary {
            if let Some(f) = n.cuDevicePrimaryCtxRelease_v2 {
                // SAFETY: it was retained once for this object.
                unsafe { f(device) };
            }
            return;
        }
        let f = match kind {
            kind::CONTEXT => n.cuCtxDestroy_v2,
            kind::MODULE if extra.owners[1] == 0 => n.cuModuleUnload,
            kind::LIBRARY => n.cuLibraryUnload,
            kind::STREAM => n.cuStreamDestroy_v2,
            kind::EVENT => n.cuEventDestroy_v2,
            kind::GRAPH => n.cuGraphDestroy,
            kind::EXEC => n.cuGraphExecDestroy,
            kind::POOL if !extra.is_borrowed => n.cuMemPoolDestroy,
            // A function, a kernel or a module of a library ends with what it is a part of.
            _ => None,
        };
        if let Some(f) = f {
            // SAFETY: the handle was the table's, which has it no more.
            unsafe { f(native as Handle) };
        }
    }
}

impl Api for &'static Cuda {
    fn success(&self) -> i32 {
        wire::SUCCESS
    }

    fn usage(&self) -> (u64, u64) {
        (self.memory.own(), lock(&self.table).live() as u64)
    }

    fn settle(&self) {}

    fn release(&self, call: &mut Call<'_>, kind: u32, id: u64) {
        let taken = lock(&self.table).take(kind, id);
        let Ok((Some(native), extra)) = taken else { return };
        self.end(id);
        self.uncharge(extra.charged);
        // A driver waits for what a context or a module still does, and that may wait for the client. Where no thread is left to read its answer, the object stays.
        if self.turns.used() && !call.may_block() {
            return;
        }
        self.release_native(kind, native, &extra);
    }

    fn snapshot(&self, _session: &Arc<Session>, reply: &mut Vec<u8>) -> Result<(), i32> {
        snapshot::write(self, reply)
    }

    fn call(&self, call: &mut Call<'_>, id: u32, body: &[u8]) -> Result<Result<(), i32>, Malformed> {
        let waited = call.waited;
        let mut reply = Vec::new();
        let (outcome, owed, blocks) = {
            let mut cx =
                Cx { cuda: self, reply: &mut reply, call, current: 0, owed: 0, blocks: Cell::new(false) };
            // Any call of a driver may wait for a stream that waits for the client; what is posted keeps its order, and says so itself.
            if waited && self.turns.used() && cx.may_block().is_err() {
                return Ok(Err(cu::CUDA_ERROR_OUT_OF_MEMORY));
            }
            let outcome = generated::dispatch(&mut cx, id, body)?;
            (outcome, cx.owed, cx.blocks.get())
        };
        call.reply = reply;
        // A driver writes what kernels printed in calls that wait for them.
        if blocks {
            self.output.settle();
        }
        if owed != 0 {
            self.session().notify(ReplyKind::Ticket, outcome.err().unwrap_or(wire::SUCCESS), owed, &[]);
        }
        match (outcome, waited) {
            (Err(code), false) => {
                let name = wire::FUNCTIONS.iter().find(|f| f.0 == id).map_or("?", |f| f.1);
                say!(
                    "tombolo accel: posted {name} failed with code {code}; the program's next call that waits has it"
                );
                self.late.store(code, Ordering::SeqCst);
                Ok(outcome)
            }
            // As a driver tells of a failed launch: at a later call, instead of that one's own success.
            (Ok(()), true) => match self.late.swap(wire::SUCCESS, Ordering::SeqCst) {
                wire::SUCCESS => Ok(Ok(())),
                code => Ok(Err(code)),
            },
            _ => Ok(outcome),
        }
    }
}

/// The part of a session's call that handlers use.
trait Waited {
    /// [`Call::may_block`]
    fn may_block(&mut self) -> bool;
}

impl Waited for Call<'_> {
    fn may_block(&mut self) -> bool {
        Call::may_block(self)
    }
}

/// One request, for its handler.
pub struct Cx<'a> {
    cuda: &'static Cuda,
    reply: &'a mut Vec<u8>,
    call: &'a mut dyn Waited,
    /// The id of the current context; 0: none.
    current: u64,
    /// A ticket that is redeemed when the request ends.
    owed: u64,
    /// It has entered the driver for long.
    blocks: Cell<bool>,
}

impl Cx<'_> {
    /// Notes the request's ticket: the client waits for its redemption, also if the request fails.
    fn owe(&mut self, ticket: u64) {
        self.owed = ticket;
    }

    pub fn native(&self) -> &'static Native {
        &self.cuda.native
    }

    /// Makes the client's current context the current one of this thread.
    pub fn enter(&mut self, context: u64) -> Result<(), i32> {
        self.current = context;
        if CURRENT.get() == context && (context == 0 || self.get(kind::CONTEXT, context).is_ok()) {
            return Ok(());
        }
        let native = self.maybe(kind::CONTEXT, context)?;
        let set = self.native().cuCtxSetCurrent.ok_or(wire::UNSUPPORTED)?;
        // SAFETY: a live context of this client, or null.
        self.status(unsafe { set(native) })?;
        CURRENT.set(context);
        Ok(())
    }

    /// The native handle of an object of this client.
    pub fn get(&self, kind: u32, id: u64) -> Result<Handle, i32> {
        lock(&self.cuda.table).get(kind, id).map(|h| h as Handle).map_err(|f| fault(kind, f))
    }

    /// The same for an id that may be 0.
    pub fn maybe(&self, kind: u32, id: u64) -> Result<Handle, i32> {
        if id == 0 { Ok(std::ptr::null_mut()) } else { self.get(kind, id) }
    }

    /// The driver's number of a device.
    pub fn device(&self, number: i32) -> Result<i32, i32> {
        let found = usize::try_from(number).ok().and_then(|n| self.cuda.devices.get(n));
        found.copied().ok_or(cu::CUDA_ERROR_INVALID_DEVICE)
    }

    pub fn c_string(&self, bytes: &[u8]) -> Result<CString, i32> {
        CString::new(bytes).map_err(|_| cu::CUDA_ERROR_INVALID_VALUE)
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
        self.blocks.set(true);
        if self.call.may_block() { Ok(()) } else { Err(cu::CUDA_ERROR_OUT_OF_MEMORY) }
    }

    /// An id that a new object can have.
    pub fn vacant(&self, id: u64) -> Result<(), i32> {
        lock(&self.cuda.table).vacant(id).map_err(|f| fault(kind::CONTEXT, f))
    }

    /// Gives its id to an object that the driver made in the current context.
    pub fn created(&mut self, kind: u32, id: u64, native: Handle) -> Result<(), i32> {
        self.keep(kind, id, native, Extra { owners: [self.current, 0], ..Extra::default() })
    }

    fn keep(&mut self, kind: u32, id: u64, native: Handle, extra: Extra) -> Result<(), i32> {
        let (owners, primary) = (extra.owners, extra.primary);
        let kept = lock(&self.cuda.table).put(kind, id, Ok(native as usize), extra);
        kept.map_err(|f| {
            let unkept = Extra { owners, primary, ..Extra::default() };
            self.cuda.release_native(kind, native as usize, &unkept);
            fault(kind, f)
        })
    }

    /// An address in an allocation of this client.
    pub fn address(&self, address: u64) -> Result<(), i32> {
        self.bytes(address, 0)
    }

    /// `len` bytes, all of which one allocation of this client has.
    pub fn bytes(&self, address: u64, len: u64) -> Result<(), i32> {
        if lock(&self.cuda.ranges).has(address, len) { Ok(()) } else { Err(cu::CUDA_ERROR_INVALID_VALUE) }
    }
}

macro_rules! checks {
    ($($words:ident $rows:ident $size:literal),*) => {
        impl Cx<'_> {
            $(
                /// So many elements.
                fn $words(&self, address: u64, count: u64) -> Result<(), i32> {
                    self.bytes(address, count.checked_mul($size).ok_or(cu::CUDA_ERROR_INVALID_VALUE)?)
                }

                /// So many rows of elements, a pitch apart.
                #[allow(dead_code)]
                fn $rows(&self, address: u64, pitch: u64, width: u64, height: u64) -> Result<(), i32> {
                    let len = memory::rectangle(pitch, width.checked_mul($size), height);
                    self.bytes(address, len.ok_or(cu::CUDA_ERROR_INVALID_VALUE)?)
                }
            )*
        }
    };
}
checks!(check_words8 check_rows8 1, check_words16 check_rows16 2, check_words32 check_rows32 4);
