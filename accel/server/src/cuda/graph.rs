// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Graphs made node by node. A node ends with its graph; one that the driver made itself, in a capture, gets an id when the client asks for the graph's nodes.

use super::cuboid::Cuboid;
use super::launch::{Launch, callable};
use super::{Cx, Extra, Handle, lock};
use std::collections::HashMap;
use std::ffi::c_void;
use tombolo_accel_spec::cuda::{self as wire, cu, kind};

/// The most nodes or edges that a client is told of: the reply has eight or sixteen bytes of each.
const TOLD: usize = 1 << 20;

/// The native handle of a graph, and those of its nodes that new ones come after.
fn place(cx: &Cx<'_>, graph: u64, after: &[u64]) -> Result<(Handle, Vec<Handle>), i32> {
    Ok((cx.get(kind::GRAPH, graph)?, nodes(cx, graph, after)?))
}

/// Native handles of nodes, all of one graph.
fn nodes(cx: &Cx<'_>, graph: u64, ids: &[u64]) -> Result<Vec<Handle>, i32> {
    let table = lock(&cx.cuda.table);
    let native = |id: &u64| {
        let native = table.get(kind::NODE, *id).ok()?;
        let is_there = table.extra(kind::NODE, *id).is_ok_and(|extra| extra.owners[0] == graph);
        is_there.then_some(native as Handle)
    };
    ids.iter().map(|id| native(id).ok_or(cu::CUDA_ERROR_INVALID_VALUE)).collect()
}

/// Adds a node. `make` gets room for its handle, the graph, and the nodes that it comes after.
pub(super) fn add(
    cx: &mut Cx<'_>,
    (new, graph): (u64, u64),
    after: &[u64],
    make: impl FnOnce(&mut Handle, Handle, *const c_void, usize) -> i32,
) -> Result<(), i32> {
    let (native, after) = place(cx, graph, after)?;
    cx.vacant(new)?;
    let mut node: Handle = std::ptr::null_mut();
    cx.status(make(&mut node, native, after.as_ptr().cast(), after.len()))?;
    cx.keep(kind::NODE, new, node, Extra { owners: [graph, 0], ..Extra::default() })
}

/// CUDA_KERNEL_NODE_PARAMS_v2
#[repr(C)]
struct KernelParams {
    function: Handle,
    shape: [u32; 6],
    shared: u32,
    each: *const c_void,
    extra: *const c_void,
    kernel: Handle,
    context: Handle,
}

const _: () = assert!(size_of::<KernelParams>() == 72);

/// The parameters of a node that launches a function; `launch` must live as long as they.
fn kernel(launch: &Launch, shared: u32) -> KernelParams {
    let none = std::ptr::null_mut();
    let (function, kernel) = if launch.is_kernel { (none, launch.native) } else { (launch.native, none) };
    let (each, extra) = (launch.each.as_ptr().cast(), std::ptr::null());
    KernelParams { function, shape: launch.shape, shared, each, extra, kernel, context: none }
}

pub(super) fn graph_add_kernel_node_v2(
    cx: &mut Cx<'_>,
    r: &wire::GraphAddKernelNodeV2<'_>,
) -> Result<(), i32> {
    let f = cx.native().cuGraphAddKernelNode_v2.ok_or(wire::UNSUPPORTED)?;
    let launch = callable(cx, r.f)?.with(&r.shape, r.parameters)?;
    let params = kernel(&launch, r.sharedMemBytes);
    add(cx, (r.new, r.hGraph), &r.after, |node, graph, after, count| {
        // SAFETY: a live graph with these nodes; a live function, and all of its parameters with the sizes that the driver said.
        unsafe { f(node, graph, after, count, (&raw const params).cast()) }
    })
}

pub(super) fn graph_kernel_node_set_params_v2(
    cx: &mut Cx<'_>,
    r: &wire::GraphKernelNodeSetParamsV2<'_>,
) -> Result<(), i32> {
    let f = cx.native().cuGraphKernelNodeSetParams_v2.ok_or(wire::UNSUPPORTED)?;
    let node = cx.get(kind::NODE, r.hNode)?;
    let launch = callable(cx, r.f)?.with(&r.shape, r.parameters)?;
    let params = kernel(&launch, r.sharedMemBytes);
    // SAFETY: a live node; a live function, and all of its parameters.
    cx.status(unsafe { f(node, (&raw const params).cast()) })
}

pub(super) fn graph_exec_kernel_node_set_params_v2(
    cx: &mut Cx<'_>,
    r: &wire::GraphExecKernelNodeSetParamsV2<'_>,
) -> Result<(), i32> {
    let f = cx.native().cuGraphExecKernelNodeSetParams_v2.ok_or(wire::UNSUPPORTED)?;
    let (exec, node) = (cx.get(kind::EXEC, r.hGraphExec)?, cx.get(kind::NODE, r.hNode)?);
    let launch = callable(cx, r.f)?.with(&r.shape, r.parameters)?;
    let params = kernel(&launch, r.sharedMemBytes);
    // SAFETY: a live graph and a live node; a live function, and all of its parameters.
    cx.status(unsafe { f(exec, node, (&raw const params).cast()) })
}

/// The native handle of the current context.
fn context(cx: &Cx<'_>) -> Result<Handle, i32> {
    cx.get(kind::CONTEXT, cx.current)
}

pub(super) fn graph_add_memcpy_node(cx: &mut Cx<'_>, r: &wire::GraphAddMemcpyNode<'_>) -> Result<(), i32> {
    let f = cx.native().cuGraphAddMemcpyNode.ok_or(wire::UNSUPPORTED)?;
    let (copy, context) = (Cuboid::of(cx, &r.copy)?.in_graph(cx)?, context(cx)?);
    add(cx, (r.new, r.hGraph), &r.after, |node, graph, after, count| {
        // SAFETY: a live graph with these nodes; the client's memory, or its window, which stays as long as this process.
        unsafe { f(node, graph, after, count, (&raw const copy).cast(), context) }
    })
}

pub(super) fn graph_memcpy_node_set_params(
    cx: &mut Cx<'_>,
    r: &wire::GraphMemcpyNodeSetParams,
) -> Result<(), i32> {
    let f = cx.native().cuGraphMemcpyNodeSetParams.ok_or(wire::UNSUPPORTED)?;
    let (node, copy) = (cx.get(kind::NODE, r.hNode)?, Cuboid::of(cx, &r.copy)?.in_graph(cx)?);
    // SAFETY: a live node; memory as above.
    cx.status(unsafe { f(node, (&raw const copy).cast()) })
}

pub(super) fn graph_exec_memcpy_node_set_params(
    cx: &mut Cx<'_>,
    r: &wire::GraphExecMemcpyNodeSetParams,
) -> Result<(), i32> {
    let f = cx.native().cuGraphExecMemcpyNodeSetParams.ok_or(wire::UNSUPPORTED)?;
    let (exec, node) = (cx.get(kind::EXEC, r.hGraphExec)?, cx.get(kind::NODE, r.hNode)?);
    let (copy, context) = (Cuboid::of(cx, &r.copy)?.in_graph(cx)?, context(cx)?);
    // SAFETY: a live graph and a live node; memory as above.
    cx.status(unsafe { f(exec, node, (&raw const copy).cast(), context) })
}

/// The client's memory has all that a fill writes.
fn check(cx: &Cx<'_>, fill: &wire::MemsetNodeParams) -> Result<(), i32> {
    let (width, height) = (fill.width as u64, fill.height as u64);
    if ![1, 2, 4].contains(&fill.elementSize) {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let row = width.checked_mul(fill.elementSize.into());
    let len = super::memory::rectangle(fill.pitch as u64, row, height);
    cx.bytes(fill.dst, len.ok_or(cu::CUDA_ERROR_INVALID_VALUE)?)
}

pub(super) fn graph_add_memset_node(cx: &mut Cx<'_>, r: &wire::GraphAddMemsetNode<'_>) -> Result<(), i32> {
    let f = cx.native().cuGraphAddMemsetNode.ok_or(wire::UNSUPPORTED)?;
    check(cx, &r.fill)?;
    let context = context(cx)?;
    add(cx, (r.new, r.hGraph), &r.after, |node, graph, after, count| {
        // SAFETY: a live graph with these nodes; the client's memory.
        unsafe { f(node, graph, after, count, (&raw const r.fill).cast(), context) }
    })
}

pub(super) fn graph_memset_node_set_params(
    cx: &mut Cx<'_>,
    r: &wire::GraphMemsetNodeSetParams,
) -> Result<(), i32> {
    let f = cx.native().cuGraphMemsetNodeSetParams.ok_or(wire::UNSUPPORTED)?;
    check(cx, &r.fill)?;
    let node = cx.get(kind::NODE, r.hNode)?;
    // SAFETY: a live node; the client's memory.
    cx.status(unsafe { f(node, (&raw const r.fill).cast()) })
}

pub(super) fn graph_exec_memset_node_set_params(
    cx: &mut Cx<'_>,
    r: &wire::GraphExecMemsetNodeSetParams,
) -> Result<(), i32> {
    let f = cx.native().cuGraphExecMemsetNodeSetParams.ok_or(wire::UNSUPPORTED)?;
    check(cx, &r.fill)?;
    let (exec, node) = (cx.get(kind::EXEC, r.hGraphExec)?, cx.get(kind::NODE, r.hNode)?);
    let context = context(cx)?;
    // SAFETY: a live graph and a live node; the client's memory.
    cx.status(unsafe { f(exec, node, (&raw const r.fill).cast(), context) })
}

pub(super) fn graph_add_empty_node(cx: &mut Cx<'_>, r: &wire::GraphAddEmptyNode<'_>) -> Result<(), i32> {
    let f = cx.native().cuGraphAddEmptyNode.ok_or(wire::UNSUPPORTED)?;
    add(cx, (r.new, r.hGraph), &r.after, |node, graph, after, count| {
        // SAFETY: a live graph with these nodes.
        unsafe { f(node, graph, after, count) }
    })
}

pub(super) fn graph_add_child_graph_node(
    cx: &mut Cx<'_>,
    r: &wire::GraphAddChildGraphNode<'_>,
) -> Result<(), i32> {
    let f = cx.native().cuGraphAddChildGraphNode.ok_or(wire::UNSUPPORTED)?;
    let child = cx.get(kind::GRAPH, r.childGraph)?;
    add(cx, (r.new, r.hGraph), &r.after, |node, graph, after, count| {
        // SAFETY: live graphs, the first with these nodes.
        unsafe { f(node, graph, after, count, child) }
    })
}

/// Both ends of edges: as many nodes each, all of one graph.
fn ends(cx: &Cx<'_>, graph: u64, from: &[u64], to: &[u64]) -> Result<(Handle, [Vec<Handle>; 2]), i32> {
    if from.len() != to.len() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let (native, from) = place(cx, graph, from)?;
    Ok((native, [from, nodes(cx, graph, to)?]))
}

pub(super) fn graph_add_dependencies(cx: &mut Cx<'_>, r: &wire::GraphAddDependencies<'_>) -> Result<(), i32> {
    let f = cx.native().cuGraphAddDependencies.ok_or(wire::UNSUPPORTED)?;
    let (graph, [from, to]) = ends(cx, r.hGraph, &r.from, &r.to)?;
    // SAFETY: a live graph and so many of its nodes twice.
    cx.status(unsafe { f(graph, from.as_ptr().cast(), to.as_ptr().cast(), from.len()) })
}

pub(super) fn graph_remove_dependencies(
    cx: &mut Cx<'_>,
    r: &wire::GraphRemoveDependencies<'_>,
) -> Result<(), i32> {
    let f = cx.native().cuGraphRemoveDependencies.ok_or(wire::UNSUPPORTED)?;
    let (graph, [from, to]) = ends(cx, r.hGraph, &r.from, &r.to)?;
    // SAFETY: as above.
    cx.status(unsafe { f(graph, from.as_ptr().cast(), to.as_ptr().cast(), from.len()) })
}

pub(super) fn graph_destroy_node(cx: &mut Cx<'_>, r: &wire::GraphDestroyNode) -> Result<(), i32> {
    let f = cx.native().cuGraphDestroyNode.ok_or(wire::UNSUPPORTED)?;
    let node = cx.get(kind::NODE, r.hNode)?;
    // SAFETY: a live node.
    cx.status(unsafe { f(node) })?;
    // Only now: the driver may have refused.
    drop(lock(&cx.cuda.table).take(kind::NODE, r.hNode));
    Ok(())
}

/// The ids of a graph's nodes, by native handle.
fn known(cx: &Cx<'_>, graph: u64) -> HashMap<usize, u64> {
    let table = lock(&cx.cuda.table);
    let ids = table.ids(|extra| extra.owners[0] == graph);
    ids.into_iter().filter_map(|id| Some((table.get(kind::NODE, id).ok()?, id))).collect()
}

/// A list that the driver tells: first how long it is, then what is in it.
fn told(cx: &Cx<'_>, ask: impl Fn(*mut Handle, &mut usize) -> i32) -> Result<Vec<Handle>, i32> {
    let mut count = 0;
    cx.status(ask(std::ptr::null_mut(), &mut count))?;
    if count > TOLD {
        return Err(cu::CUDA_ERROR_OUT_OF_MEMORY);
    }
    let mut list = vec![std::ptr::null_mut(); count];
    if count > 0 {
        cx.status(ask(list.as_mut_ptr(), &mut count))?;
    }
    list.truncate(count);
    Ok(list)
}

pub(super) fn graph_get_nodes(cx: &mut Cx<'_>, r: &wire::GraphGetNodes<'_>) -> Result<(), i32> {
    let n = cx.native();
    let f = if r.roots == 0 { n.cuGraphGetNodes } else { n.cuGraphGetRootNodes }.ok_or(wire::UNSUPPORTED)?;
    let graph = cx.get(kind::GRAPH, r.hGraph)?;
    // SAFETY: a live graph; no room, or room for so many handles.
    let all = told(cx, |list, count| unsafe {
        f(graph, list.cast_const().cast(), (&raw mut *count).cast_const().cast())
    })?;
    let (known, mut new) = (known(cx, r.hGraph), r.new.iter());
    let mut ids = Vec::with_capacity(all.len());
    for node in all {
        ids.push(match (known.get(&(node as usize)), new.next()) {
            (Some(id), _) => *id,
            // The client asks again, with as many ids as it lacks.
            (None, None) => 0,
            (None, Some(id)) => {
                cx.keep(kind::NODE, *id, node, Extra { owners: [r.hGraph, 0], ..Extra::default() })?;
                *id
            }
        });
    }
    cx.reply().u64s(&ids);
    Ok(())
}

pub(super) fn graph_get_edges(cx: &mut Cx<'_>, r: &wire::GraphGetEdges) -> Result<(), i32> {
    let f = cx.native().cuGraphGetEdges.ok_or(wire::UNSUPPORTED)?;
    let graph = cx.get(kind::GRAPH, r.hGraph)?;
    let mut count = 0usize;
    let none = std::ptr::null();
    // SAFETY: a live graph; no room for handles, room for a size.
    cx.status(unsafe { f(graph, none, none, (&raw mut count).cast_const().cast()) })?;
    if count > TOLD {
        return Err(cu::CUDA_ERROR_OUT_OF_MEMORY);
    }
    let mut ends = [vec![0usize; count], vec![0usize; count]];
    if count > 0 {
        let [from, to] = ends.each_mut().map(|list| list.as_mut_ptr().cast_const().cast());
        // SAFETY: as above, with room for so many handles twice.
        cx.status(unsafe { f(graph, from, to, (&raw mut count).cast_const().cast()) })?;
    }
    let known = known(cx, r.hGraph);
    let id = |list: &[usize], i: usize| known.get(&list[i]).copied().unwrap_or(0);
    let told: Vec<u64> =
        (0..count.min(ends[0].len())).flat_map(|i| [id(&ends[0], i), id(&ends[1], i)]).collect();
    cx.reply().u64s(&told);
    Ok(())
}

/// CUgraphExecUpdateResultInfo
#[repr(C)]
#[derive(Default)]
struct UpdateResult {
    result: u32,
    nodes: [usize; 2],
}

pub(super) fn graph_exec_update_v2(cx: &mut Cx<'_>, r: &wire::GraphExecUpdateV2) -> Result<(), i32> {
    let f = cx.native().cuGraphExecUpdate_v2.ok_or(wire::UNSUPPORTED)?;
    let (exec, graph) = (cx.get(kind::EXEC, r.hGraphExec)?, cx.get(kind::GRAPH, r.hGraph)?);
    let mut result = UpdateResult::default();
    // SAFETY: live graphs; room for the result.
    let code = unsafe { f(exec, graph, (&raw mut result).cast_const().cast()) };
    if code != cu::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE {
        cx.status(code)?;
    }
    // A refusal has a reason, so it is an answer and no failure of the request.
    cx.reply().i32(code);
    cx.reply().u32(result.result);
    Ok(())
}
