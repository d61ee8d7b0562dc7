// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Functions of the program that a stream calls, or a graph. The driver's thread tells the client which one it is its turn to call, and holds up the stream until the client
//! has answered.

use super::{Cuda, Cx, Handle, lock};
use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use tombolo_accel_spec::cuda::{self as wire, kind};
use tombolo_accel_spec::wire::ReplyKind;

/// The functions that the client is about to call.
#[derive(Default)]
pub(super) struct Turns {
    /// Set once the client has asked for a function: from then on, a wait may need an answer of the client to end.
    used: AtomicBool,
    /// The last turn, and those that the client has not answered.
    open: Mutex<(u64, HashSet<u64>)>,
    answered: Condvar,
}

impl Turns {
    pub(super) fn used(&self) -> bool {
        self.used.load(Ordering::SeqCst)
    }

    fn begin(&self) -> u64 {
        let mut open = lock(&self.open);
        open.0 += 1;
        let turn = open.0;
        open.1.insert(turn);
        turn
    }

    fn wait(&self, turn: u64) {
        let waited = self.answered.wait_while(lock(&self.open), |open| open.1.contains(&turn));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn end(&self, turn: u64) {
        lock(&self.open).1.remove(&turn);
        self.answered.notify_all();
    }
}

/// The data of a driver's call: its client, and the client's number for the function.
struct Called {
    cuda: &'static Cuda,
    number: u64,
    /// A graph calls it, any number of times.
    again: bool,
}

impl Called {
    fn of(cx: &mut Cx<'_>, number: u64, again: bool) -> *mut c_void {
        cx.cuda.turns.used.store(true, Ordering::SeqCst);
        Box::into_raw(Box::new(Called { cuda: cx.cuda, number, again })).cast()
    }

    /// Lets the client call its function and waits until it has. The client's process may end meanwhile: this one ends with it.
    fn call(&self, status: i32) {
        let turn = self.cuda.turns.begin();
        self.cuda.output.settle();
        let mut body = turn.to_le_bytes().to_vec();
        body.push(u8::from(self.again));
        self.cuda.session().notify(ReplyKind::Notify, status, self.number, &body);
        self.cuda.turns.wait(turn);
    }
}

/// # Safety
/// `data` is from [`Called::of`], and this is its last use unless it is called again.
unsafe fn run(data: *mut c_void, status: i32) {
    let called = data.cast::<Called>();
    // SAFETY: as the caller promises.
    unsafe {
        (*called).call(status);
        if !(*called).again {
            drop(Box::from_raw(called));
        }
    }
}

unsafe extern "C" fn host(data: *mut c_void) {
    // SAFETY: the driver calls with what it was given, once, or for a graph as long as that is there.
    unsafe { run(data, wire::SUCCESS) }
}

unsafe extern "C" fn callback(_stream: Handle, status: i32, data: *mut c_void) {
    // SAFETY: as above.
    unsafe { run(data, status) }
}

pub(super) fn launch_host_func(cx: &mut Cx<'_>, r: &wire::LaunchHostFunc) -> Result<(), i32> {
    let (f, g) = (cx.native().cuLaunchHostFunc, cx.native().cuStreamAddCallback);
    let stream = cx.maybe(kind::STREAM, r.hStream)?;
    let captured = super::copy::is_captured(cx, stream)?;
    let data = Called::of(cx, r.number, captured);
    let started = if r.callback == 0 {
        // SAFETY: a live stream, a function, and what that takes.
        f.map(|f| unsafe { f(stream, host as *const c_void, data) })
    } else {
        // SAFETY: as above.
        g.map(|f| unsafe { f(stream, callback as *const c_void, data, 0) })
    };
    cx.status(started.unwrap_or(wire::UNSUPPORTED)).inspect_err(|_| {
        // SAFETY: the driver has not taken it.
        drop(unsafe { Box::from_raw(data.cast::<Called>()) });
    })
}

/// CUDA_HOST_NODE_PARAMS
#[repr(C)]
struct NodeParams {
    function: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
}

/// The parameters of a node that calls the client's function. They stay as long as this process, as nobody tells when a graph and its copies have ended.
fn node(cx: &mut Cx<'_>, number: u64) -> NodeParams {
    NodeParams { function: host, data: Called::of(cx, number, true) }
}

pub(super) fn graph_add_host_node(cx: &mut Cx<'_>, r: &wire::GraphAddHostNode<'_>) -> Result<(), i32> {
    let f = cx.native().cuGraphAddHostNode.ok_or(wire::UNSUPPORTED)?;
    let params = node(cx, r.number);
    super::graph::add(cx, (r.new, r.hGraph), &r.after, |node, graph, after, count| {
        // SAFETY: a live graph with these nodes, a function, and what that takes.
        unsafe { f(node, graph, after, count, (&raw const params).cast()) }
    })
}

pub(super) fn graph_host_node_set_params(
    cx: &mut Cx<'_>,
    r: &wire::GraphHostNodeSetParams,
) -> Result<(), i32> {
    let f = cx.native().cuGraphHostNodeSetParams.ok_or(wire::UNSUPPORTED)?;
    let (native, params) = (cx.get(kind::NODE, r.hNode)?, node(cx, r.number));
    // SAFETY: a live node, a function, and what that takes.
    cx.status(unsafe { f(native, (&raw const params).cast()) })
}

pub(super) fn graph_exec_host_node_set_params(
    cx: &mut Cx<'_>,
    r: &wire::GraphExecHostNodeSetParams,
) -> Result<(), i32> {
    let f = cx.native().cuGraphExecHostNodeSetParams.ok_or(wire::UNSUPPORTED)?;
    let (exec, native) = (cx.get(kind::EXEC, r.hGraphExec)?, cx.get(kind::NODE, r.hNode)?);
    let params = node(cx, r.number);
    // SAFETY: a live graph and a live node, a function, and what that takes.
    cx.status(unsafe { f(exec, native, (&raw const params).cast()) })
}

pub(super) fn returned(cx: &mut Cx<'_>, r: &wire::Returned) -> Result<(), i32> {
    cx.cuda.turns.end(r.turn);
    Ok(())
}
