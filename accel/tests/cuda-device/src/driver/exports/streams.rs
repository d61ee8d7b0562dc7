// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Launches, streams, events and captures.

use super::super::launch::Shape;
use super::super::work::{Host, Work};
use super::super::{
    Handle, INVALID_VALUE, NOT_SUPPORTED, Result, array, event, graph, launch, lock, offer, put, stream,
};
use std::ffi::c_void;

/// CUlaunchConfig.
#[repr(C)]
pub struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: *const Attribute,
    count: u32,
}

/// CUlaunchAttribute.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct Attribute {
    id: u32,
    pad: u32,
    value: [u64; 8],
}

thread_local! {
    static CAPTURE_MODE: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    /// Where cuStreamGetCaptureInfo points to until the thread asks again.
    static CAPTURE_ENDS: std::cell::RefCell<Vec<Handle>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn capture_info(
    handle: Handle,
    status: *mut u32,
    id: *mut u64,
    into: *mut Handle,
    after: *mut *const Handle,
    count: *mut usize,
) -> Result {
    let (_, stream) = stream::resolve(handle)?;
    let Some(capture) = lock(&stream.capture).clone() else { return put(status, 0) };
    put(status, 1)?;
    offer(id, capture.id);
    offer(into, capture.graph);
    CAPTURE_ENDS.with_borrow_mut(|ends| {
        *ends = capture.end_handles(&stream);
        offer(after, ends.as_ptr());
        offer(count, ends.len());
    });
    Ok(())
}

api! {
    4000 cuLaunchKernel / cuLaunchKernel_ptsz: (function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle, arguments: *const *const c_void, extra: *const *const c_void) {
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared, cooperative: false };
        // SAFETY: arguments as the API says.
        unsafe { launch::launch(function, shape, stream, arguments, extra) }
    }
    9000 cuLaunchCooperativeKernel / cuLaunchCooperativeKernel_ptsz: (function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle, arguments: *const *const c_void) {
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared, cooperative: true };
        // SAFETY: arguments as the API says.
        unsafe { launch::launch(function, shape, stream, arguments, std::ptr::null()) }
    }
    11060 cuLaunchKernelEx / cuLaunchKernelEx_ptsz: (config: *const Config, function: Handle, arguments: *const *const c_void, extra: *const *const c_void) {
        if config.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: a configuration, as the API says.
        let config = unsafe { &*config };
        let attributes = array(config.attributes, config.count as usize);
        let cooperative = attributes.iter().any(|attribute| attribute.id == 2 && attribute.value[0] as u32 != 0);
        // Clusters of one block are what a block is anyway.
        if attributes.iter().any(|attribute| attribute.id == 4 && (attribute.value[0] != 1 | 1 << 32 || attribute.value[1] as u32 != 1)) {
            return Err(NOT_SUPPORTED);
        }
        let shape = Shape { grid: config.grid, block: config.block, shared: config.shared, cooperative };
        // SAFETY: arguments as the API says.
        unsafe { launch::launch(function, shape, config.stream, arguments, extra) }
    }
    10000 cuLaunchHostFunc / cuLaunchHostFunc_ptsz: (stream: Handle, function: extern "C" fn(*mut c_void), data: usize) {
        let (context, stream) = stream::resolve(stream)?;
        stream.submit(&context, Work::Host(Host { function, data }))
    }

    2000 cuStreamCreate: (to: *mut Handle, flags: u32) { put(to, stream::create(flags, 0)?) }
    5050 cuStreamCreateWithPriority: (to: *mut Handle, flags: u32, priority: i32) { put(to, stream::create(flags, priority.clamp(-5, 0))?) }
    4000 cuStreamDestroy_v2: (handle: Handle) { stream::destroy(handle) }
    2000 cuStreamSynchronize / cuStreamSynchronize_ptsz: (handle: Handle) { stream::synchronize(handle) }
    2000 cuStreamQuery / cuStreamQuery_ptsz: (handle: Handle) { stream::query(handle) }
    3020 cuStreamWaitEvent / cuStreamWaitEvent_ptsz: (handle: Handle, event: Handle, _flags: u32) { event::wait(handle, event) }
    5000 cuStreamAddCallback / cuStreamAddCallback_ptsz: (handle: Handle, function: extern "C" fn(Handle, i32, *mut c_void), data: usize, _flags: u32) {
        let (context, stream) = stream::resolve(handle)?;
        stream.queue(&context, Vec::new(), move || {
            function(handle, 0, data as *mut c_void);
            Ok(())
        }).map(drop)
    }
    5050 cuStreamGetFlags / cuStreamGetFlags_ptsz: (handle: Handle, to: *mut u32) { put(to, stream::resolve(handle)?.1.flags) }
    5050 cuStreamGetPriority / cuStreamGetPriority_ptsz: (handle: Handle, to: *mut i32) { put(to, stream::resolve(handle)?.1.priority) }
    12000 cuStreamGetId / cuStreamGetId_ptsz: (handle: Handle, to: *mut u64) { put(to, stream::resolve(handle)?.1.id) }
    9020 cuStreamGetCtx / cuStreamGetCtx_ptsz: (handle: Handle, to: *mut Handle) { put(to, stream::resolve(handle)?.0.handle) }
    12080 cuStreamGetDevice / cuStreamGetDevice_ptsz: (handle: Handle, to: *mut i32) { stream::resolve(handle)?; put(to, 0) }
    10010 cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz: (handle: Handle, _mode: u32) { graph::begin_capture(handle, None, &[]) }
    12030 cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz: (handle: Handle, into: Handle, after: *const Handle, _edges: *const c_void, count: usize, _mode: u32) {
        graph::begin_capture(handle, Some(into), &array(after, count))
    }
    10000 cuStreamEndCapture / cuStreamEndCapture_ptsz: (handle: Handle, to: *mut Handle) { put(to, graph::end_capture(handle)?) }
    10000 cuStreamIsCapturing / cuStreamIsCapturing_ptsz: (handle: Handle, to: *mut u32) { put(to, u32::from(lock(&stream::resolve(handle)?.1.capture).is_some())) }
    11030 cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz: (handle: Handle, status: *mut u32, id: *mut u64, into: *mut Handle, after: *mut *const Handle, count: *mut usize) {
        capture_info(handle, status, id, into, after, count)
    }
    12030 cuStreamGetCaptureInfo_v3 / cuStreamGetCaptureInfo_v3_ptsz: (handle: Handle, status: *mut u32, id: *mut u64, into: *mut Handle, after: *mut *const Handle, edges: *mut *const c_void, count: *mut usize) {
        offer(edges, std::ptr::null());
        capture_info(handle, status, id, into, after, count)
    }
    10010 cuThreadExchangeStreamCaptureMode: (mode: *mut u32) { put(mode, CAPTURE_MODE.replace(array(mode, 1).first().copied().ok_or(INVALID_VALUE)?)) }

    2000 cuEventCreate: (to: *mut Handle, flags: u32) { put(to, event::create(flags)?) }
    4000 cuEventDestroy_v2: (handle: Handle) { event::EVENTS.remove(handle).map(drop) }
    2000 cuEventRecord / cuEventRecord_ptsz: (handle: Handle, stream: Handle) { event::record(handle, stream) }
    11010 cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz: (handle: Handle, stream: Handle, _flags: u32) { event::record(handle, stream) }
    2000 cuEventSynchronize: (handle: Handle) { event::synchronize(handle) }
    2000 cuEventQuery: (handle: Handle) { event::query(handle) }
    2000 cuEventElapsedTime: (to: *mut f32, start: Handle, end: Handle) { put(to, event::elapsed(start, end)?) }
    12080 cuEventElapsedTime_v2: (to: *mut f32, start: Handle, end: Handle) { put(to, event::elapsed(start, end)?) }
}
