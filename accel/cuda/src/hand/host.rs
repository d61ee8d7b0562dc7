// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Functions of the program that a stream calls, or a graph. The server says when it is a function's turn; one thread of this process calls them, one after the other, as
//! a driver's own does, and the stream goes on when the function has returned.

use super::device::read;
use super::exported;
use super::graph::{add, node};
use crate::rt::{self, Handle, Id, Out};
use std::ffi::c_void;
use tombolo_accel_spec::cuda::{self as wire, cu, kind};
use tombolo_accel_spec::wire::Decoder;

/// CUhostFn
type Function = unsafe extern "C" fn(*mut c_void);
/// CUstreamCallback
type Callback = unsafe extern "C" fn(Handle, i32, *mut c_void);

/// The function that a program passed as a pointer.
///
/// # Safety
/// It is null or leads to a function of this type.
unsafe fn function<F: Copy>(pointer: *const c_void) -> Result<F, i32> {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    if pointer.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: as the caller promises; it is not null.
    Ok(unsafe { std::mem::transmute_copy(&pointer) })
}

/// Registers a function; its number for the server.
fn register(call: impl Fn(i32) + Send + 'static) -> Result<u64, i32> {
    let run = move |status: i32, body: &[u8]| {
        let mut from = Decoder::new(body);
        let (Ok(turn), Ok(again)) = (from.u64(), from.u8()) else { return false };
        call(status);
        // A server that is gone waits for nothing.
        let _lost = rt::post(&wire::Returned { turn });
        again != 0
    };
    Ok(rt::connection()?.callback(Box::new(run)))
}

/// A pointer of the program, for its own function on another thread.
#[derive(Clone, Copy)]
struct Data(*mut c_void);
// SAFETY: the program passes it to be used by a function that runs on some thread.
unsafe impl Send for Data {}

impl Data {
    fn get(self) -> *mut c_void {
        self.0
    }
}

/// # Safety
/// The pointer is null or a CUhostFn.
unsafe fn host(pointer: *const c_void, data: *const c_void) -> Result<u64, i32> {
    // SAFETY: as the caller promises.
    let (function, data) = (unsafe { function::<Function>(pointer) }?, Data(data.cast_mut()));
    // SAFETY: the program's own function, with the data that it passed for it.
    register(move |_| unsafe { function(data.get()) })
}

fn launch(stream: Handle, number: impl FnOnce() -> Result<u64, i32>, callback: u32) -> Result<(), i32> {
    let id = rt::maybe(stream, kind::STREAM)?.map_or(0, |stream| stream.id());
    let number = number()?;
    rt::post(&wire::LaunchHostFunc { hStream: id, number, callback, current: rt::current() })
}

/// CUDA_HOST_NODE_PARAMS
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    function: *const c_void,
    data: *const c_void,
}

/// # Safety
/// `from` is null or a CUDA_HOST_NODE_PARAMS.
unsafe fn params(from: *const c_void) -> Result<u64, i32> {
    // SAFETY: as the caller promises.
    unsafe {
        let Params { function, data } = read(from)?;
        host(function, data)
    }
}

exported! {
    fn cuLaunchHostFunc(stream: Handle, function: *const c_void, data: *const c_void) {
        // SAFETY: a function, as the API says.
        launch(stream, || unsafe { host(function, data) }, 0)
    }

    // The modes differ in how a driver waits, which it does not do here.
    fn cuLaunchHostFunc_v2(stream: Handle, function: *const c_void, data: *const c_void, _mode: u32) {
        // SAFETY: a function, as the API says.
        launch(stream, || unsafe { host(function, data) }, 0)
    }

    fn cuStreamAddCallback(stream: Handle, callback: *const c_void, data: *const c_void, flags: u32) {
        // SAFETY: a function, as the API says.
        let (callback, data) = (unsafe { function::<Callback>(callback) }?, Data(data.cast_mut()));
        if flags != 0 {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        let handle = Data(stream);
        // SAFETY: the program's own function, with the data that it passed for it.
        launch(stream, || register(move |status| unsafe { callback(handle.get(), status, data.get()) }), 1)
    }

    fn cuGraphAddHostNode(to: Out<Handle>, graph: Handle, after: *const c_void, count: usize, with: *const c_void) {
        // SAFETY: parameters, as the API says.
        let (number, current) = (unsafe { params(with) }?, rt::current());
        let send = |new, into, after: Vec<u64>| {
            rt::call(&wire::GraphAddHostNode { new, hGraph: into, after: after.into(), number, current }).map(drop)
        };
        // SAFETY: so many nodes, as the API says.
        unsafe { add(&to, graph, (after, count), send) }.map(drop)
    }

    fn cuGraphHostNodeSetParams(handle: Handle, with: *const c_void) {
        // SAFETY: parameters, as the API says.
        let number = unsafe { params(with) }?;
        rt::call(&wire::GraphHostNodeSetParams { hNode: node(handle)?.id(), number, current: rt::current() }).map(drop)
    }

    fn cuGraphExecHostNodeSetParams(exec: Handle, handle: Handle, with: *const c_void) {
        // SAFETY: parameters, as the API says.
        let number = unsafe { params(with) }?;
        let (exec, node) = (rt::object(exec, kind::EXEC)?, node(handle)?);
        let record = wire::GraphExecHostNodeSetParams {
            hGraphExec: exec.id(),
            hNode: node.id(),
            number,
            current: rt::current(),
        };
        rt::call(&record).map(drop)
    }
}
