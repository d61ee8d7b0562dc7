// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Allocations, and what is known of an address.

use super::exported;
use crate::rt::{self, Handle, Out};
use crate::state::{Range, ranges};
use std::ffi::c_void;
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::common::Ping;
use tombolo_accel_spec::cuda::{self as wire, cu};
use tombolo_accel_spec::wire::Decoder;

/// A page: pinned memory begins at one.
const PAGE: u64 = 4096;

/// Two numbers of a reply.
fn two(reply: &[u8]) -> Result<(u64, u64), i32> {
    let mut from = Decoder::new(reply);
    from.u64().and_then(|first| Ok((first, from.u64()?))).map_err(|_| wire::LOST)
}

pub fn own(start: u64, len: u64) {
    let context = rt::top().map_or(0, |context| context.handle);
    ranges().insert(Range { start, len, context, window: None, flags: 0 });
}

/// Memory in the window, which both sides see, or whose changes are pushed.
fn pinned(to: &Out<*mut c_void>, len: usize, flags: u32) -> Result<(), i32> {
    let known =
        cu::CU_MEMHOSTALLOC_PORTABLE | cu::CU_MEMHOSTALLOC_DEVICEMAP | cu::CU_MEMHOSTALLOC_WRITECOMBINED;
    if len == 0 || flags & !known != 0 || to.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let context = rt::top().ok_or(cu::CUDA_ERROR_INVALID_CONTEXT)?.handle;
    let len = len as u64;
    let at = rt::staging(len, Place::Aligned(PAGE))?;
    let address = rt::connection()?.window.at(at, len).map_err(|_| cu::CUDA_ERROR_OUT_OF_MEMORY)?;
    ranges().insert(Range { start: address as u64, len, context, window: Some(at), flags });
    to.set(address.cast())
}

/// Pinned memory that begins at an address.
fn pinned_at(address: *const c_void) -> Result<Range, i32> {
    let range = ranges().find(address as u64).filter(|range| range.window.is_some());
    range.ok_or(cu::CUDA_ERROR_INVALID_VALUE)
}

/// Writes what is known of an address; an error: nothing is.
fn attribute(data: *mut c_void, number: u32, address: u64) -> Result<(), i32> {
    let range = ranges().find(address).ok_or(cu::CUDA_ERROR_INVALID_VALUE)?;
    let is_device = range.window.is_none();
    // SAFETY: room for what the attribute is, as the API says.
    let word = |value: u64| unsafe { Out::of(data.cast::<u64>()) }.set(value);
    // SAFETY: as above.
    let half = |value: u32| unsafe { Out::of(data.cast::<u32>()) }.set(value);
    match number {
        cu::CU_POINTER_ATTRIBUTE_CONTEXT => word(range.context as u64),
        cu::CU_POINTER_ATTRIBUTE_MEMORY_TYPE if is_device => half(cu::CU_MEMORYTYPE_DEVICE),
        cu::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => half(cu::CU_MEMORYTYPE_HOST),
        cu::CU_POINTER_ATTRIBUTE_DEVICE_POINTER if is_device => word(address),
        cu::CU_POINTER_ATTRIBUTE_HOST_POINTER if !is_device => word(address),
        // Allocations don't overlap, and an address has one at a time.
        cu::CU_POINTER_ATTRIBUTE_BUFFER_ID => word(range.start),
        cu::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
            let mut ordinal = 0;
            // SAFETY: room for a number.
            super::result(unsafe {
                super::cuCtxGetDevice_v2(Out::of(&raw mut ordinal), range.context as Handle)
            })?;
            half(ordinal as u32)
        }
        cu::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => word(range.start),
        cu::CU_POINTER_ATTRIBUTE_RANGE_SIZE => word(range.len),
        cu::CU_POINTER_ATTRIBUTE_MAPPED => half(u32::from(is_device)),
        cu::CU_POINTER_ATTRIBUTE_IS_MANAGED
        | cu::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        | cu::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => half(0),
        cu::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES | cu::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => word(0),
        cu::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => half(3),
        _ => Err(cu::CUDA_ERROR_INVALID_VALUE),
    }
}

/// The bytes that an attribute has, for an address of which nothing is known.
fn nothing(data: *mut c_void, number: u32) -> Result<(), i32> {
    let words = [
        cu::CU_POINTER_ATTRIBUTE_CONTEXT,
        cu::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        cu::CU_POINTER_ATTRIBUTE_HOST_POINTER,
        cu::CU_POINTER_ATTRIBUTE_BUFFER_ID,
        cu::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        cu::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        cu::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        cu::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
    ];
    let none = if number == cu::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL { u32::MAX - 1 } else { 0 };
    match words.contains(&number) {
        // SAFETY: room for what the attribute is, as the API says.
        true => unsafe { Out::of(data.cast::<u64>()) }.set(0),
        // SAFETY: as above.
        false => unsafe { Out::of(data.cast::<u32>()) }.set(none),
    }
}

exported! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let (left, all) = two(&rt::call(&wire::MemGetInfoV2 { current: rt::current() })?)?;
        free.set(left as usize)?;
        total.set(all as usize)
    }

    fn cuMemAlloc_v2(address: Out<u64>, len: usize) {
        if address.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        let reply = rt::call(&wire::MemAllocV2 { bytesize: len as u64, current: rt::current() })?;
        let start = Decoder::new(&reply).u64().map_err(|_| wire::LOST)?;
        own(start, len as u64);
        address.set(start)
    }

    fn cuMemAllocPitch_v2(address: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        if address.is_null() || pitch.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        let record = wire::MemAllocPitchV2 {
            WidthInBytes: width as u64,
            Height: height as u64,
            ElementSizeBytes: element,
            current: rt::current(),
        };
        let (start, step) = two(&rt::call(&record)?)?;
        own(start, step.saturating_mul(height as u64));
        pitch.set(step as usize)?;
        address.set(start)
    }

    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            return rt::connection().map(drop);
        }
        rt::call(&wire::MemFreeV2 { dptr: address, current: rt::current() })?;
        ranges().remove(address);
        Ok(())
    }

    fn cuMemGetAddressRange_v2(start: Out<u64>, len: Out<usize>, address: u64) {
        let range = ranges().find(address).filter(|range| range.window.is_none());
        let range = range.ok_or(cu::CUDA_ERROR_NOT_FOUND)?;
        start.offer(range.start);
        len.offer(range.len as usize);
        Ok(())
    }

    fn cuMemAllocHost_v2(to: Out<*mut c_void>, len: usize) {
        pinned(&to, len, 0)
    }

    fn cuMemHostAlloc(to: Out<*mut c_void>, len: usize, flags: u32) {
        pinned(&to, len, flags)
    }

    fn cuMemFreeHost(address: *mut c_void) {
        let range = pinned_at(address)?;
        if range.start != address as u64 {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        ranges().remove(range.start);
        if let Some(at) = range.window {
            let connection = rt::connection()?;
            // Copies from and to this range that are still posted.
            rt::lost(connection.call(&Ping {}, |_, _| ()))?;
            connection.give_staging(at, range.len);
        }
        Ok(())
    }

    // CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY is 0.
    fn cuMemHostGetDevicePointer_v2(_to: Out<u64>, address: *const c_void, _flags: u32) {
        pinned_at(address)?;
        Err(wire::UNSUPPORTED)
    }

    fn cuMemHostGetFlags(flags: Out<u32>, address: *const c_void) {
        flags.set(pinned_at(address)?.flags)
    }

    fn cuPointerGetAttribute(data: *mut c_void, number: u32, address: u64) {
        rt::connection()?;
        attribute(data, number, address)
    }

    fn cuPointerGetAttributes(count: u32, numbers: *const u32, data: *const *mut c_void, address: u64) {
        rt::connection()?;
        if numbers.is_null() || data.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        for i in 0..count as usize {
            // SAFETY: so many numbers and pointers, as the API says.
            let (number, data) = unsafe { (numbers.add(i).read(), data.add(i).read()) };
            if attribute(data, number, address).is_err() {
                nothing(data, number)?;
            }
        }
        Ok(())
    }
}
