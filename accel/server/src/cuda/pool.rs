// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pools, and memory that a stream allocates and frees in its order. What is taken from any pool counts against the client's quota as other memory does, from its
//! allocation to the call that frees it.

use super::copy::is_captured;
use super::memory::Range;
use super::{Cx, Extra, Handle, lock};
use std::ffi::c_void;
use tombolo_accel_spec::cuda::{self as wire, cu, kind};

/// CUmemPoolProps, of memory on a device that no other process gets.
#[repr(C)]
struct Props {
    /// CU_MEM_ALLOCATION_TYPE_PINNED
    allocation: u32,
    handles: u32,
    /// CU_MEM_LOCATION_TYPE_DEVICE
    location: u32,
    device: i32,
    rest: [u64; 9],
}

const _: () = assert!(size_of::<Props>() == 88);

pub(super) fn device_get_default_mem_pool(
    cx: &mut Cx<'_>,
    r: &wire::DeviceGetDefaultMemPool,
) -> Result<(), i32> {
    let f = cx.native().cuDeviceGetDefaultMemPool.ok_or(wire::UNSUPPORTED)?;
    let device = cx.device(r.dev)?;
    cx.vacant(r.new)?;
    let mut native: Handle = std::ptr::null_mut();
    // SAFETY: room for a handle.
    cx.status(unsafe { f(&mut native, device) })?;
    cx.keep(kind::POOL, r.new, native, Extra { is_borrowed: true, ..Extra::default() })
}

pub(super) fn mem_pool_create(cx: &mut Cx<'_>, r: &wire::MemPoolCreate) -> Result<(), i32> {
    let f = cx.native().cuMemPoolCreate.ok_or(wire::UNSUPPORTED)?;
    let device = cx.device(r.dev)?;
    cx.vacant(r.new)?;
    let mut rest = [0; 9];
    rest[1] = r.maxSize;
    let props = Props { allocation: 1, handles: 0, location: 1, device, rest };
    let mut native: Handle = std::ptr::null_mut();
    // SAFETY: room for a handle; properties of the size that the API says.
    cx.status(unsafe { f(&mut native, (&raw const props).cast()) })?;
    cx.keep(kind::POOL, r.new, native, Extra::default())
}

/// Attributes up to CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES are 32 bits wide, those up to CU_MEMPOOL_ATTR_USED_MEM_HIGH 64.
fn is_attribute(number: u32) -> Result<(), i32> {
    if (1..=8).contains(&number) { Ok(()) } else { Err(cu::CUDA_ERROR_INVALID_VALUE) }
}

pub(super) fn mem_pool_set_attribute(cx: &mut Cx<'_>, r: &wire::MemPoolSetAttribute) -> Result<(), i32> {
    let f = cx.native().cuMemPoolSetAttribute.ok_or(wire::UNSUPPORTED)?;
    let pool = cx.get(kind::POOL, r.pool)?;
    is_attribute(r.attr)?;
    let value = r.value;
    // SAFETY: a live pool; eight bytes, of which the driver reads as many as the attribute has.
    cx.status(unsafe { f(pool, r.attr, (&raw const value).cast()) })
}

pub(super) fn mem_pool_get_attribute(cx: &mut Cx<'_>, r: &wire::MemPoolGetAttribute) -> Result<(), i32> {
    let f = cx.native().cuMemPoolGetAttribute.ok_or(wire::UNSUPPORTED)?;
    let pool = cx.get(kind::POOL, r.pool)?;
    is_attribute(r.attr)?;
    let mut value = 0u64;
    // SAFETY: a live pool; room for eight bytes.
    cx.status(unsafe { f(pool, r.attr, (&raw mut value).cast_const().cast()) })?;
    cx.reply().u64(value);
    Ok(())
}

/// Counts memory, lets a stream allocate it, and tells its address. In a capture, each launch of the graph would allocate, uncounted.
fn allocate(
    cx: &mut Cx<'_>,
    bytes: u64,
    stream: u64,
    make: impl FnOnce(*const c_void, Handle) -> i32,
) -> Result<(), i32> {
    let stream = cx.maybe(kind::STREAM, stream)?;
    if is_captured(cx, stream)? {
        return Err(cu::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    cx.cuda.charge(bytes)?;
    let mut start = 0u64;
    cx.status(make((&raw mut start).cast_const().cast(), stream)).inspect_err(|_| cx.cuda.uncharge(bytes))?;
    lock(&cx.cuda.ranges).insert(start, Range { len: bytes, owner: cx.current, charged: bytes });
    cx.reply().u64(start);
    Ok(())
}

pub(super) fn mem_alloc_async(cx: &mut Cx<'_>, r: &wire::MemAllocAsync) -> Result<(), i32> {
    let f = cx.native().cuMemAllocAsync.ok_or(wire::UNSUPPORTED)?;
    // SAFETY: room for an address; a live stream.
    allocate(cx, r.bytesize, r.hStream, |start, stream| unsafe { f(start, r.bytesize as usize, stream) })
}

pub(super) fn mem_alloc_from_pool_async(cx: &mut Cx<'_>, r: &wire::MemAllocFromPoolAsync) -> Result<(), i32> {
    let f = cx.native().cuMemAllocFromPoolAsync.ok_or(wire::UNSUPPORTED)?;
    let pool = cx.get(kind::POOL, r.pool)?;
    let make = |start, stream| {
        // SAFETY: room for an address; a live pool and a live stream.
        unsafe { f(start, r.bytesize as usize, pool, stream) }
    };
    allocate(cx, r.bytesize, r.hStream, make)
}

pub(super) fn mem_free_async(cx: &mut Cx<'_>, r: &wire::MemFreeAsync) -> Result<(), i32> {
    let f = cx.native().cuMemFreeAsync.ok_or(wire::UNSUPPORTED)?;
    let stream = cx.maybe(kind::STREAM, r.hStream)?;
    if is_captured(cx, stream)? {
        return Err(cu::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    let range = lock(&cx.cuda.ranges).take(r.dptr).ok_or(cu::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: the client's own allocation, of which no other call knows any more.
    let freed = cx.status(unsafe { f(r.dptr, stream) });
    match freed {
        Ok(()) => cx.cuda.uncharge(range.charged),
        Err(_) => lock(&cx.cuda.ranges).insert(r.dptr, range),
    }
    freed
}
