// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Graphs: nodes of kernels, copies and fills, and what can be launched. Nodes belong to their graph, and end with it. The client chooses ids for the nodes of a captured
//! graph when the program asks for them. New parameters of a launchable graph's node are posted where the same function took a launch of that shape before.

use super::cuboid;
use super::device::read;
use super::exported;
use super::launch::parameters;
use super::module::callable;
use crate::rt::{self, ARENA, Handle, Id, New, Obj, Out};
use crate::state::{Body, Detail, Function, Node, Shape};
use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tombolo_accel_spec::cuda::{self as wire, cu, kind};
use tombolo_accel_spec::wire::Decoder;

/// CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD and _DEVICE_LAUNCH
const UPLOAD: u64 = 2;
const DEVICE_LAUNCH: u64 = 4;

/// The nodes of each graph that the program knows, by the graph's handle.
static NODES: Mutex<Option<HashMap<usize, Vec<Obj>>>> = Mutex::new(None);

fn nodes() -> MutexGuard<'static, Option<HashMap<usize, Vec<Obj>>>> {
    NODES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn graph(handle: Handle) -> Result<Obj, i32> {
    rt::object(handle, kind::GRAPH)
}

pub fn node(handle: Handle) -> Result<Obj, i32> {
    rt::object(handle, kind::NODE)
}

fn detail(object: Obj) -> Option<&'static Node> {
    match &object.body().detail {
        Detail::Node(node) => Some(node),
        _ => None,
    }
}

fn fresh(graph: Obj) -> Result<New, i32> {
    let node = Node { graph: graph.handle() as usize, function: 0.into() };
    rt::new_object(kind::NODE, Body { context: 0, detail: Detail::Node(node) })
}

/// Makes a node its graph's, once the server knows it.
fn keep(graph: Obj, new: New) -> Obj {
    let object = new.keep();
    nodes().get_or_insert_default().entry(graph.handle() as usize).or_default().push(object);
    object
}

/// The ids of a program's nodes.
///
/// # Safety
/// `list` is null or points to `count` handles.
unsafe fn ids(list: *const c_void, count: usize) -> Result<Vec<u64>, i32> {
    if list.is_null() && count > 0 {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    (0..count).map(|i| Ok(node(unsafe { list.cast::<Handle>().add(i).read() })?.id())).collect()
}

/// Adds a node. `send` gets its id, the graph's and those of the nodes that it waits for.
///
/// # Safety
/// As for [`ids`].
pub unsafe fn add(
    to: &Out<Handle>,
    in_graph: Handle,
    (after, count): (*const c_void, usize),
    send: impl FnOnce(u64, u64, Vec<u64>) -> Result<(), i32>,
) -> Result<Obj, i32> {
    let graph = graph(in_graph)?;
    if to.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    let after = unsafe { ids(after, count) }?;
    let new = fresh(graph)?;
    send(new.id(), graph.id(), after)?;
    let made = keep(graph, new);
    to.set(made.handle())?;
    Ok(made)
}

/// The id of a context; of null the current one's.
fn context(handle: Handle) -> Result<u64, i32> {
    if handle.is_null() { Ok(rt::current()) } else { Ok(rt::object(handle, kind::CONTEXT)?.id()) }
}

/// CUDA_KERNEL_NODE_PARAMS_v1
#[repr(C)]
#[derive(Clone, Copy)]
struct KernelParamsV1 {
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    each: *const c_void,
    extra: *const c_void,
}

/// CUDA_KERNEL_NODE_PARAMS_v2
#[repr(C)]
#[derive(Clone, Copy)]
struct KernelParams {
    first: KernelParamsV1,
    kernel: Handle,
    context: Handle,
}

const _: () = assert!(size_of::<KernelParamsV1>() == 56 && size_of::<KernelParams>() == 72);

/// The launch that a node stands for.
struct Kernel {
    object: Obj,
    function: &'static Function,
    sizes: [u32; 6],
    shared: u32,
    parameters: Vec<u8>,
    context: u64,
}

impl Kernel {
    /// # Safety
    /// `params` is null or a CUDA_KERNEL_NODE_PARAMS of version 2.
    unsafe fn of(params: *const c_void) -> Result<Kernel, i32> {
        // SAFETY: as the caller promises.
        unsafe { Kernel::new(read(params)?) }
    }

    /// # Safety
    /// `params` is null or a CUDA_KERNEL_NODE_PARAMS of version 1.
    unsafe fn of_v1(params: *const c_void) -> Result<Kernel, i32> {
        // SAFETY: as the caller promises.
        let first = unsafe { read(params) }?;
        let none = std::ptr::null_mut();
        // SAFETY: as the caller promises.
        unsafe { Kernel::new(KernelParams { first, kernel: none, context: none }) }
    }

    /// # Safety
    /// Pointers lead to what the API says.
    unsafe fn new(params: KernelParams) -> Result<Kernel, i32> {
        let KernelParams { first, kernel, context: of } = params;
        let (object, function) = callable(if first.function.is_null() { kernel } else { first.function })?;
        let mut bytes = vec![0; function.size() as usize];
        // SAFETY: as the caller promises.
        unsafe { parameters(function, first.each.cast(), first.extra.cast(), &mut bytes) }?;
        let ([gx, gy, gz], [bx, by, bz]) = (first.grid, first.block);
        let sizes = [gx, gy, gz, bx, by, bz];
        Ok(Kernel { object, function, sizes, shared: first.shared, parameters: bytes, context: context(of)? })
    }

    fn shape(&self) -> Shape {
        let [.., bx, by, bz] = self.sizes;
        ([bx, by, bz], self.shared, false)
    }

    /// The driver took it, for a node.
    fn accept(&self, node: Obj) {
        self.function.accept(self.shape());
        if let Some(node) = detail(node) {
            node.function.store(self.object.id(), Ordering::Relaxed);
        }
    }

    /// # Safety
    /// As for [`ids`].
    unsafe fn add(&self, to: &Out<Handle>, graph: Handle, after: (*const c_void, usize)) -> Result<(), i32> {
        let send = |new, graph, after: Vec<u64>| {
            let record = wire::GraphAddKernelNodeV2 {
                new,
                hGraph: graph,
                after: after.into(),
                f: self.object.id(),
                shape: self.sizes[..].into(),
                sharedMemBytes: self.shared,
                parameters: &self.parameters,
                current: self.context,
            };
            rt::call(&record).map(drop)
        };
        // SAFETY: as the caller promises.
        self.accept(unsafe { add(to, graph, after, send) }?);
        Ok(())
    }

    fn set(&self, handle: Handle) -> Result<(), i32> {
        let node = node(handle)?;
        rt::call(&wire::GraphKernelNodeSetParamsV2 {
            hNode: node.id(),
            f: self.object.id(),
            shape: self.sizes[..].into(),
            sharedMemBytes: self.shared,
            parameters: &self.parameters,
            current: self.context,
        })?;
        self.accept(node);
        Ok(())
    }

    fn set_in(&self, exec: Handle, handle: Handle) -> Result<(), i32> {
        let (exec, node) = (rt::object(exec, kind::EXEC)?, node(handle)?);
        let record = wire::GraphExecKernelNodeSetParamsV2 {
            hGraphExec: exec.id(),
            hNode: node.id(),
            f: self.object.id(),
            shape: self.sizes[..].into(),
            sharedMemBytes: self.shared,
            parameters: &self.parameters,
            current: self.context,
        };
        let is_same = |node: &Node| node.function.load(Ordering::Relaxed) == self.object.id();
        let grid = self.sizes[..3].iter().all(|size| (1..=65535).contains(size));
        if grid
            && is_of(exec, node)
            && detail(node).is_some_and(is_same)
            && self.function.accepts(&self.shape())
        {
            return rt::post(&record);
        }
        rt::call(&record)?;
        self.accept(node);
        Ok(())
    }
}

/// Returns whether a launchable graph was made of the graph that a node is in.
fn is_of(exec: Obj, node: Obj) -> bool {
    let made_of = match &exec.body().detail {
        Detail::Exec(graph) => *graph,
        _ => return false,
    };
    detail(node).is_some_and(|node| node.graph == made_of)
}

fn instantiate(to: &Out<Handle>, of: Handle, flags: u64) -> Result<Obj, i32> {
    let graph = graph(of)?;
    if to.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    if flags & DEVICE_LAUNCH != 0 {
        return Err(wire::UNSUPPORTED);
    }
    let new = rt::new_object(kind::EXEC, Body { context: 0, detail: Detail::Exec(of as usize) })?;
    rt::call(&wire::GraphInstantiateWithFlags {
        phGraphExec: new.id(),
        hGraph: graph.id(),
        flags: flags & !UPLOAD,
        current: rt::current(),
    })?;
    let exec = new.keep();
    to.set(exec.handle())?;
    Ok(exec)
}

/// The same, with room for a node that was at fault and for words about it: there are none.
fn instantiate_with_log(
    to: &Out<Handle>,
    graph: Handle,
    culprit: *mut Handle,
    (log, room): (*mut c_char, usize),
) -> Result<(), i32> {
    // SAFETY: null, or room for a handle, as the API says.
    unsafe { Out::of(culprit) }.offer(std::ptr::null_mut());
    if room > 0 {
        // SAFETY: null, or room for so many bytes, as the API says.
        unsafe { Out::of(log) }.offer(0);
    }
    instantiate(to, graph, 0).map(drop)
}

/// CUDA_GRAPH_INSTANTIATE_PARAMS
#[repr(C)]
#[derive(Clone, Copy)]
struct InstantiateParams {
    flags: u64,
    upload: Handle,
    culprit: Handle,
    result: u32,
}

/// Forgets the nodes of a graph.
fn forget(graph: Handle) {
    let gone = nodes().get_or_insert_default().remove(&(graph as usize));
    for node in gone.into_iter().flatten() {
        ARENA.release(node);
    }
}

/// A list as the API gives it: with room for `count` of them, or, without, only their number.
fn list(values: &[Handle], to: *const c_void, count: &Out<usize>) -> Result<(), i32> {
    let (to, len) = (to.cast_mut().cast::<Handle>(), values.len());
    let room = if to.is_null() { len } else { count.get()? };
    if !to.is_null() {
        for i in 0..room {
            // SAFETY: room for so many handles, as the API says.
            unsafe { to.add(i).write(values.get(i).copied().unwrap_or(std::ptr::null_mut())) };
        }
    }
    count.set(len.min(room))
}

/// Handles of all nodes of a graph, or of those that wait for none; those that the program did not know become its own.
fn all_nodes(of: Handle, roots: bool) -> Result<Vec<Handle>, i32> {
    let graph = graph(of)?;
    // Asked again where nodes were added meanwhile.
    let mut room = 0;
    loop {
        let new = (0..room).map(|_| fresh(graph)).collect::<Result<Vec<_>, _>>()?;
        let offered: Vec<u64> = new.iter().map(New::id).collect();
        let record =
            wire::GraphGetNodes { hGraph: graph.id(), roots: u32::from(roots), new: offered[..].into() };
        let reply = rt::call(&record)?;
        let told = Decoder::new(&reply).u64s().map_err(|_| wire::LOST)?.into_owned();
        for new in new.into_iter().filter(|new| told.contains(&new.id())) {
            keep(graph, new);
        }
        let missing = told.iter().filter(|id| **id == 0).count();
        if missing == 0 {
            let handle = |id: &u64| ARENA.by_id(*id).map(|node| node.handle()).ok_or(wire::LOST);
            return told.iter().map(handle).collect();
        }
        room = missing;
    }
}

/// The ends of all edges of a graph.
fn edges(of: Handle) -> Result<(Vec<Handle>, Vec<Handle>), i32> {
    // All nodes have ids from now on.
    all_nodes(of, false)?;
    let reply = rt::call(&wire::GraphGetEdges { hGraph: graph(of)?.id() })?;
    let told = Decoder::new(&reply).u64s().map_err(|_| wire::LOST)?.into_owned();
    let handle = |id: u64| ARENA.by_id(id).map(|node| node.handle()).ok_or(wire::LOST);
    told.chunks_exact(2).map(|ends| Ok((handle(ends[0])?, handle(ends[1])?))).collect()
}

fn give_edges(of: Handle, from: *const c_void, to: *const c_void, count: *mut usize) -> Result<(), i32> {
    let (starts, ends) = edges(of)?;
    // SAFETY: null, or room for a size with a size in it, as the API says.
    let (count, mut room) = unsafe { (Out::of(count), 0) };
    if !from.is_null() {
        room = count.get()?;
        list(&starts, from, &count)?;
    }
    if !to.is_null() {
        if !from.is_null() {
            count.set(room)?;
        }
        return list(&ends, to, &count);
    }
    if from.is_null() { count.set(starts.len()) } else { Ok(()) }
}

/// # Safety
/// As for [`ids`].
unsafe fn dependencies(
    of: Handle,
    from: *const c_void,
    to: *const c_void,
    count: usize,
    add: bool,
) -> Result<(), i32> {
    let graph = graph(of)?.id();
    // SAFETY: as the caller promises.
    let (from, to) = unsafe { (ids(from, count)?.into(), ids(to, count)?.into()) };
    match add {
        true => rt::call(&wire::GraphAddDependencies { hGraph: graph, from, to }).map(drop),
        false => rt::call(&wire::GraphRemoveDependencies { hGraph: graph, from, to }).map(drop),
    }
}

/// Updates a launchable graph; the code, and the API's word of what stood against it.
fn update(exec: Handle, of: Handle) -> Result<(i32, u32), i32> {
    let (exec, graph) = (rt::object(exec, kind::EXEC)?, graph(of)?);
    let reply = rt::call(&wire::GraphExecUpdateV2 { hGraphExec: exec.id(), hGraph: graph.id() })?;
    let mut from = Decoder::new(&reply);
    from.i32().and_then(|code| Ok((code, from.u32()?))).map_err(|_| wire::LOST)
}

exported! {
    fn cuGraphAddKernelNode(to: Out<Handle>, graph: Handle, after: *const c_void, count: usize, params: *const c_void) {
        // SAFETY: parameters, and so many nodes, as the API says.
        unsafe { Kernel::of_v1(params)?.add(&to, graph, (after, count)) }
    }

    fn cuGraphAddKernelNode_v2(to: Out<Handle>, graph: Handle, after: *const c_void, count: usize, params: *const c_void) {
        // SAFETY: parameters, and so many nodes, as the API says.
        unsafe { Kernel::of(params)?.add(&to, graph, (after, count)) }
    }

    fn cuGraphKernelNodeSetParams(node: Handle, params: *const c_void) {
        // SAFETY: parameters, as the API says.
        unsafe { Kernel::of_v1(params) }?.set(node)
    }

    fn cuGraphKernelNodeSetParams_v2(node: Handle, params: *const c_void) {
        // SAFETY: parameters, as the API says.
        unsafe { Kernel::of(params) }?.set(node)
    }

    fn cuGraphExecKernelNodeSetParams(exec: Handle, node: Handle, params: *const c_void) {
        // SAFETY: parameters, as the API says.
        unsafe { Kernel::of_v1(params) }?.set_in(exec, node)
    }

    fn cuGraphExecKernelNodeSetParams_v2(exec: Handle, node: Handle, params: *const c_void) {
        // SAFETY: parameters, as the API says.
        unsafe { Kernel::of(params) }?.set_in(exec, node)
    }

    fn cuGraphAddMemcpyNode(to: Out<Handle>, graph: Handle, after: *const c_void, count: usize, params: *const c_void, ctx: Handle) {
        // SAFETY: a copy, as the API says.
        let ((copy, _), current) = (unsafe { cuboid::of_node(params) }?, context(ctx)?);
        let send = |new, into, after: Vec<u64>| {
            rt::call(&wire::GraphAddMemcpyNode { new, hGraph: into, after: after.into(), copy, current }).map(drop)
        };
        // SAFETY: so many nodes, as the API says.
        unsafe { add(&to, graph, (after, count), send) }.map(drop)
    }

    fn cuGraphMemcpyNodeSetParams(handle: Handle, params: *const c_void) {
        // SAFETY: a copy, as the API says.
        let (copy, _) = unsafe { cuboid::of_node(params) }?;
        rt::call(&wire::GraphMemcpyNodeSetParams { hNode: node(handle)?.id(), copy, current: rt::current() }).map(drop)
    }

    fn cuGraphExecMemcpyNodeSetParams(exec: Handle, handle: Handle, params: *const c_void, ctx: Handle) {
        // SAFETY: a copy, as the API says.
        let (copy, _) = unsafe { cuboid::of_node(params) }?;
        let (exec, node, current) = (rt::object(exec, kind::EXEC)?, node(handle)?, context(ctx)?);
        let record =
            wire::GraphExecMemcpyNodeSetParams { hGraphExec: exec.id(), hNode: node.id(), copy, current };
        rt::call(&record).map(drop)
    }

    fn cuGraphAddMemsetNode(to: Out<Handle>, graph: Handle, after: *const c_void, count: usize, params: *const c_void, ctx: Handle) {
        // SAFETY: a fill, as the API says.
        let (fill, current) = (unsafe { read(params) }?, context(ctx)?);
        let send = |new, into, after: Vec<u64>| {
            rt::call(&wire::GraphAddMemsetNode { new, hGraph: into, after: after.into(), fill, current }).map(drop)
        };
        // SAFETY: so many nodes, as the API says.
        unsafe { add(&to, graph, (after, count), send) }.map(drop)
    }

    fn cuGraphMemsetNodeSetParams(handle: Handle, params: *const c_void) {
        // SAFETY: a fill, as the API says.
        let fill = unsafe { read(params) }?;
        rt::call(&wire::GraphMemsetNodeSetParams { hNode: node(handle)?.id(), fill, current: rt::current() }).map(drop)
    }

    fn cuGraphExecMemsetNodeSetParams(exec: Handle, handle: Handle, params: *const c_void, ctx: Handle) {
        // SAFETY: a fill, as the API says.
        let (fill, current) = (unsafe { read(params) }?, context(ctx)?);
        let (exec, node) = (rt::object(exec, kind::EXEC)?, node(handle)?);
        let record =
            wire::GraphExecMemsetNodeSetParams { hGraphExec: exec.id(), hNode: node.id(), fill, current };
        rt::call(&record).map(drop)
    }

    fn cuGraphAddEmptyNode(to: Out<Handle>, graph: Handle, after: *const c_void, count: usize) {
        let send = |new, into, after: Vec<u64>| {
            rt::call(&wire::GraphAddEmptyNode { new, hGraph: into, after: after.into(), current: rt::current() }).map(drop)
        };
        // SAFETY: so many nodes, as the API says.
        unsafe { add(&to, graph, (after, count), send) }.map(drop)
    }

    fn cuGraphAddChildGraphNode(to: Out<Handle>, in_graph: Handle, after: *const c_void, count: usize, child: Handle) {
        let (child, current) = (graph(child)?.id(), rt::current());
        let send = |new, into, after: Vec<u64>| {
            let after = after.into();
            rt::call(&wire::GraphAddChildGraphNode { new, hGraph: into, after, childGraph: child, current }).map(drop)
        };
        // SAFETY: so many nodes, as the API says.
        unsafe { add(&to, in_graph, (after, count), send) }.map(drop)
    }

    fn cuGraphAddDependencies(graph: Handle, from: *const c_void, to: *const c_void, count: usize) {
        // SAFETY: so many nodes, as the API says.
        unsafe { dependencies(graph, from, to, count, true) }
    }

    fn cuGraphAddDependencies_v2(graph: Handle, from: *const c_void, to: *const c_void, data: *const c_void, count: usize) {
        if !data.is_null() {
            return Err(wire::UNSUPPORTED);
        }
        // SAFETY: so many nodes, as the API says.
        unsafe { dependencies(graph, from, to, count, true) }
    }

    fn cuGraphRemoveDependencies(graph: Handle, from: *const c_void, to: *const c_void, count: usize) {
        // SAFETY: so many nodes, as the API says.
        unsafe { dependencies(graph, from, to, count, false) }
    }

    fn cuGraphRemoveDependencies_v2(graph: Handle, from: *const c_void, to: *const c_void, data: *const c_void, count: usize) {
        if !data.is_null() {
            return Err(wire::UNSUPPORTED);
        }
        // SAFETY: so many nodes, as the API says.
        unsafe { dependencies(graph, from, to, count, false) }
    }

    fn cuGraphDestroyNode(handle: Handle) {
        let object = node(handle)?;
        rt::call(&wire::GraphDestroyNode { hNode: object.id() })?;
        if let Some(Node { graph, .. }) = detail(object) {
            nodes().get_or_insert_default().entry(*graph).or_default().retain(|other| *other != object);
        }
        ARENA.release(object);
        Ok(())
    }

    fn cuGraphDestroy(handle: Handle) {
        let object = graph(handle)?;
        forget(handle);
        ARENA.release(object);
        Ok(())
    }

    fn cuGraphGetNodes(graph: Handle, to: *const c_void, count: *const c_void) {
        // SAFETY: room for a size with a size in it, as the API says.
        list(&all_nodes(graph, false)?, to, &unsafe { Out::of(count.cast_mut().cast()) })
    }

    fn cuGraphGetRootNodes(graph: Handle, to: *const c_void, count: *const c_void) {
        // SAFETY: room for a size with a size in it, as the API says.
        list(&all_nodes(graph, true)?, to, &unsafe { Out::of(count.cast_mut().cast()) })
    }

    fn cuGraphGetEdges(graph: Handle, from: *const c_void, to: *const c_void, count: *const c_void) {
        give_edges(graph, from, to, count.cast_mut().cast())
    }

    fn cuGraphGetEdges_v2(graph: Handle, from: *const c_void, to: *const c_void, data: *const c_void, count: *const c_void) {
        // Edges of graphs that are forwarded have no data: what asks for it gets none.
        if !data.is_null() {
            return Err(wire::UNSUPPORTED);
        }
        give_edges(graph, from, to, count.cast_mut().cast())
    }

    fn cuGraphInstantiateWithFlags(to: Out<Handle>, graph: Handle, flags: u64) {
        instantiate(&to, graph, flags).map(drop)
    }

    fn cuGraphInstantiate(to: Out<Handle>, graph: Handle, culprit: *mut Handle, log: *mut c_char, room: usize) {
        instantiate_with_log(&to, graph, culprit, (log, room))
    }

    fn cuGraphInstantiate_v2(to: Out<Handle>, graph: Handle, culprit: *mut Handle, log: *mut c_char, room: usize) {
        instantiate_with_log(&to, graph, culprit, (log, room))
    }

    fn cuGraphInstantiateWithParams(to: *mut Handle, graph: Handle, params: *const c_void) {
        // SAFETY: parameters, as the API says.
        let mut wanted: InstantiateParams = unsafe { read(params) }?;
        // SAFETY: null, or room for a handle, as the API says.
        let made = instantiate(&unsafe { Out::of(to) }, graph, wanted.flags);
        // CUDA_GRAPH_INSTANTIATE_SUCCESS or _ERROR
        (wanted.culprit, wanted.result) = (std::ptr::null_mut(), u32::from(made.is_err()));
        // SAFETY: as above.
        unsafe { Out::of(params.cast_mut().cast()) }.offer(wanted);
        let exec = made?;
        if wanted.flags & UPLOAD == 0 {
            return Ok(());
        }
        let stream = rt::maybe(wanted.upload, kind::STREAM)?.map_or(0, |stream| stream.id());
        rt::post(&wire::GraphUpload { hGraph: exec.id(), hStream: stream, current: rt::current() })
    }

    fn cuGraphExecUpdate_v2(exec: Handle, graph: Handle, info: *mut c_void) {
        let (code, result) = update(exec, graph)?;
        // CUgraphExecUpdateResultInfo: the result, and nodes, which are not told.
        // SAFETY: null, or room for it, as the API says.
        unsafe { Out::of(info.cast::<[u64; 3]>()) }.offer([u64::from(result), 0, 0]);
        super::result(code)
    }

    fn cuGraphExecUpdate(exec: Handle, graph: Handle, culprit: *mut c_void, result: *mut c_void) {
        let (code, why) = update(exec, graph)?;
        // SAFETY: null, or room for a handle and a number, as the API says.
        unsafe {
            Out::of(culprit.cast::<Handle>()).offer(std::ptr::null_mut());
            Out::of(result.cast::<u32>()).offer(why);
        }
        super::result(code)
    }
}
