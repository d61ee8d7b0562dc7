// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Graphs made node by node.

use super::super::launch::{self, Shape};
use super::super::work::{Host, Work};
use super::super::{GRAPH_UPDATE_FAILURE, Handle, INVALID_VALUE, Result, array, graph, offer, put};
use super::copies::{cuboid, many};
use super::{list, words};
use std::ffi::{c_char, c_void};

/// CUDA_KERNEL_NODE_PARAMS_v1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelNodeV1 {
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    arguments: *const *const c_void,
    extra: *const *const c_void,
}

/// CUDA_KERNEL_NODE_PARAMS_v2.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelNode {
    first: KernelNodeV1,
    kernel: Handle,
    context: Handle,
}

const _: () = assert!(size_of::<KernelNode>() == 72);

fn kernel_work(node: *const KernelNode) -> Result<Work> {
    let node = array(node, 1).first().copied().ok_or(INVALID_VALUE)?;
    let function = if node.first.function == 0 { node.kernel } else { node.first.function };
    node_work(KernelNodeV1 { function, ..node.first })
}

fn kernel_work_v1(node: *const KernelNodeV1) -> Result<Work> {
    node_work(array(node, 1).first().copied().ok_or(INVALID_VALUE)?)
}

fn node_work(node: KernelNodeV1) -> Result<Work> {
    let shape = Shape { grid: node.grid, block: node.block, shared: node.shared, cooperative: false };
    // SAFETY: arguments as cuLaunchKernel has them.
    let kernel = unsafe { launch::prepare(node.function, shape, node.arguments, node.extra) }?;
    Ok(Work::Kernel(std::sync::Arc::new(kernel)))
}

/// CUDA_MEMCPY3D
fn copy_work(what: *const u64) -> Result<Work> {
    let (copy, way) = cuboid(what)?;
    copy.check(way)?;
    Ok(Work::Copy(copy))
}

/// CUDA_HOST_NODE_PARAMS
fn host_work(what: *const Host) -> Result<Work> {
    array(what, 1).first().copied().map(Work::Host).ok_or(INVALID_VALUE)
}

/// CUDA_MEMSET_NODE_PARAMS
fn fill_work(what: *const u64) -> Result<Work> {
    let [at, pitch, value, width, height] = words(what)?;
    let (pitch, width, height) = (pitch as usize, width as usize, height as usize);
    let fill = many(at, pitch, value as u32, (value >> 32) as usize, width, height);
    fill.check()?;
    Ok(Work::Fill(fill))
}

fn graph_edges(handle: Handle, from: *mut Handle, to: *mut Handle, count: *mut usize) -> Result {
    let edges = graph::edges(handle)?;
    let (starts, ends): (Vec<Handle>, Vec<Handle>) = edges.into_iter().unzip();
    let room = array(count, 1).first().copied().ok_or(INVALID_VALUE)?;
    list(&starts, from, count)?;
    put(count, room)?;
    list(&ends, to, count)
}

api! {
    10000 cuGraphCreate: (to: *mut Handle, _flags: u32) { put(to, graph::create()?) }
    10000 cuGraphDestroy: (handle: Handle) { graph::destroy(handle) }
    12000 cuGraphAddKernelNode_v2: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, node: *const KernelNode) { put(to, graph::add(handle, &array(after, count), kernel_work(node)?)?) }
    10000 cuGraphAddMemcpyNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, what: *const u64, _context: Handle) {
        put(to, graph::add(handle, &array(after, count), copy_work(what)?)?)
    }
    10000 cuGraphAddMemsetNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, what: *const u64, _context: Handle) {
        put(to, graph::add(handle, &array(after, count), fill_work(what)?)?)
    }
    10000 cuGraphAddHostNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, what: *const Host) {
        put(to, graph::add(handle, &array(after, count), host_work(what)?)?)
    }
    10000 cuGraphAddEmptyNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize) { put(to, graph::add(handle, &array(after, count), Work::Nothing)?) }
    10000 cuGraphAddChildGraphNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, child: Handle) { put(to, graph::add_child(handle, &array(after, count), child)?) }
    10000 cuGraphAddDependencies: (handle: Handle, from: *const Handle, to: *const Handle, count: usize) { graph::add_dependencies(handle, &array(from, count), &array(to, count)) }
    12030 cuGraphAddDependencies_v2: (handle: Handle, from: *const Handle, to: *const Handle, _edges: *const c_void, count: usize) { graph::add_dependencies(handle, &array(from, count), &array(to, count)) }
    10000 cuGraphRemoveDependencies: (handle: Handle, from: *const Handle, to: *const Handle, count: usize) { graph::remove_dependencies(handle, &array(from, count), &array(to, count)) }
    12030 cuGraphRemoveDependencies_v2: (handle: Handle, from: *const Handle, to: *const Handle, _edges: *const c_void, count: usize) { graph::remove_dependencies(handle, &array(from, count), &array(to, count)) }
    10000 cuGraphDestroyNode: (node: Handle) { graph::destroy_node(node) }
    10000 cuGraphClone: (to: *mut Handle, handle: Handle) { put(to, graph::clone(handle)?) }
    10000 cuGraphGetNodes: (handle: Handle, to: *mut Handle, count: *mut usize) { list(&graph::nodes(handle, false)?, to, count) }
    10000 cuGraphGetRootNodes: (handle: Handle, to: *mut Handle, count: *mut usize) { list(&graph::nodes(handle, true)?, to, count) }
    10000 cuGraphGetEdges: (handle: Handle, from: *mut Handle, to: *mut Handle, count: *mut usize) { graph_edges(handle, from, to, count) }
    12030 cuGraphGetEdges_v2: (handle: Handle, from: *mut Handle, to: *mut Handle, _edges: *mut c_void, count: *mut usize) { graph_edges(handle, from, to, count) }
    10000 cuGraphNodeGetType: (node: Handle, to: *mut i32) { put(to, graph::node_type(node)?) }
    10000 cuGraphAddKernelNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, node: *const KernelNodeV1) {
        put(to, graph::add(handle, &array(after, count), kernel_work_v1(node)?)?)
    }
    10000 cuGraphKernelNodeSetParams: (node: Handle, what: *const KernelNodeV1) { graph::set_work(node, kernel_work_v1(what)?) }
    10010 cuGraphExecKernelNodeSetParams: (executable: Handle, node: Handle, what: *const KernelNodeV1) {
        graph::set_executable_work(executable, node, kernel_work_v1(what)?)
    }
    10000 cuGraphHostNodeSetParams: (node: Handle, what: *const Host) { graph::set_work(node, host_work(what)?) }
    10020 cuGraphExecHostNodeSetParams: (executable: Handle, node: Handle, what: *const Host) { graph::set_executable_work(executable, node, host_work(what)?) }
    10000 cuGraphMemcpyNodeSetParams: (node: Handle, what: *const u64) { graph::set_work(node, copy_work(what)?) }
    10000 cuGraphMemsetNodeSetParams: (node: Handle, what: *const u64) { graph::set_work(node, fill_work(what)?) }
    10020 cuGraphExecMemsetNodeSetParams: (executable: Handle, node: Handle, what: *const u64, _context: Handle) {
        graph::set_executable_work(executable, node, fill_work(what)?)
    }
    10020 cuGraphExecMemcpyNodeSetParams: (executable: Handle, node: Handle, what: *const u64, _context: Handle) {
        graph::set_executable_work(executable, node, copy_work(what)?)
    }
    12000 cuGraphKernelNodeSetParams_v2: (node: Handle, what: *const KernelNode) { graph::set_work(node, kernel_work(what)?) }
    12000 cuGraphExecKernelNodeSetParams_v2: (executable: Handle, node: Handle, what: *const KernelNode) { graph::set_executable_work(executable, node, kernel_work(what)?) }
    11000 cuGraphInstantiate_v2: (to: *mut Handle, handle: Handle, _node: *mut Handle, _log: *mut c_char, _len: usize) { put(to, graph::instantiate(handle)?) }
    11040 cuGraphInstantiateWithFlags: (to: *mut Handle, handle: Handle, _flags: u64) { put(to, graph::instantiate(handle)?) }
    12000 cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz: (to: *mut Handle, handle: Handle, _parameters: *mut c_void) { put(to, graph::instantiate(handle)?) }
    10000 cuGraphLaunch / cuGraphLaunch_ptsz: (executable: Handle, stream: Handle) { graph::launch(executable, stream) }
    11010 cuGraphUpload / cuGraphUpload_ptsz: (executable: Handle, _stream: Handle) { graph::EXECUTABLES.get(executable).map(drop) }
    10000 cuGraphExecDestroy: (executable: Handle) { graph::EXECUTABLES.remove(executable).map(drop) }
    12000 cuGraphExecUpdate_v2: (executable: Handle, handle: Handle, result: *mut u64) {
        let same = graph::update(executable, handle)?;
        // CUgraphExecUpdateResult: 0, or 2: the topology changed.
        offer(result, if same { 0 } else { 2 });
        if same { Ok(()) } else { Err(GRAPH_UPDATE_FAILURE) }
    }
}
