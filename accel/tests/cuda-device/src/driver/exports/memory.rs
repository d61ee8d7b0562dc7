// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Allocations, and what an address is.

use super::super::memory::{self, Kind};
use super::super::registry::Registry;
use super::super::{Handle, INVALID_VALUE, NOT_FOUND, Result, array, context, device, offer, put};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The device's own pool. Its handle is no other object's.
const POOL: Handle = 0x8000;
/// Pools that programs have made.
static POOLS: Registry<()> = Registry::new(INVALID_VALUE);
/// The pool that a program has made the device's.
static CHOSEN: AtomicUsize = AtomicUsize::new(POOL);

fn pool_of(handle: Handle) -> Result {
    if handle == POOL { Ok(()) } else { POOLS.get(handle).map(drop) }
}

/// One attribute of a pointer, in its own width.
fn pointer_attribute(to: *mut c_void, number: i32, address: u64) -> Result {
    let value = memory::attribute(number, address)?;
    match memory::attribute_size(number) {
        1 => put(to.cast::<u8>(), value as u8),
        4 => put(to.cast::<u32>(), value as u32),
        _ => put(to.cast::<u64>(), value),
    }
}

api! {
    11020 cuDeviceGetDefaultMemPool: (to: *mut Handle, number: i32) { device::check(number)?; put(to, POOL) }
    11020 cuDeviceGetMemPool: (to: *mut Handle, number: i32) { device::check(number)?; put(to, CHOSEN.load(Ordering::Relaxed)) }
    11020 cuDeviceSetMemPool: (number: i32, pool: Handle) { device::check(number)?; pool_of(pool)?; CHOSEN.store(pool, Ordering::Relaxed); Ok(()) }
    3020 cuMemGetInfo_v2: (free: *mut usize, total: *mut usize) { context::current()?; put(free, device::MEMORY.saturating_sub(memory::used()))?; put(total, device::MEMORY) }
    3020 cuMemAlloc_v2: (to: *mut u64, bytes: usize) { put(to, memory::allocate(bytes, Kind::Device)?) }
    3020 cuMemAllocPitch_v2: (to: *mut u64, pitch: *mut usize, width: usize, height: usize, _element: u32) {
        let row = width.next_multiple_of(512);
        put(to, memory::allocate(row.checked_mul(height).ok_or(INVALID_VALUE)?, Kind::Device)?)?;
        put(pitch, row)
    }
    3020 cuMemFree_v2: (address: u64) { memory::free(address, false) }
    6000 cuMemAllocManaged: (to: *mut u64, bytes: usize, _flags: u32) { put(to, memory::allocate(bytes, Kind::Managed)?) }
    3020 cuMemAllocHost_v2: (to: *mut u64, bytes: usize) { put(to, memory::allocate(bytes, Kind::Host)?) }
    2020 cuMemHostAlloc: (to: *mut u64, bytes: usize, _flags: u32) { put(to, memory::allocate(bytes, Kind::Host)?) }
    2000 cuMemFreeHost: (address: u64) { memory::free(address, true) }
    3020 cuMemHostGetDevicePointer_v2: (to: *mut u64, host: u64, _flags: u32) { memory::check(host, 1)?; put(to, host) }
    2030 cuMemHostGetFlags: (to: *mut u32, _host: u64) { put(to, 0) }
    6050 cuMemHostRegister_v2: (address: u64, bytes: usize, _flags: u32) { memory::register(address, bytes) }
    4000 cuMemHostUnregister: (address: u64) { memory::unregister(address) }
    3020 cuMemGetAddressRange_v2: (start: *mut u64, size: *mut usize, address: u64) {
        let (_, from, bytes) = memory::find(address).ok_or(NOT_FOUND)?;
        offer(start, from);
        offer(size, bytes);
        Ok(())
    }
    4000 cuPointerGetAttribute: (to: *mut c_void, attribute: i32, address: u64) { pointer_attribute(to, attribute, address) }
    7000 cuPointerGetAttributes: (count: u32, attributes: *const i32, values: *const *mut c_void, address: u64) {
        for (attribute, to) in array(attributes, count as usize).into_iter().zip(array(values, count as usize)) {
            // Zero for what the address has not, as with NVIDIA's driver.
            match pointer_attribute(to, attribute, address) {
                Err(_) if memory::attribute_size(attribute) == 8 => put(to.cast::<u64>(), 0)?,
                Err(_) if memory::attribute_size(attribute) == 4 => put(to.cast::<u32>(), if attribute == 9 { u32::MAX - 1 } else { 0 })?,
                Err(_) => put(to.cast::<u8>(), 0)?,
                Ok(()) => {}
            }
        }
        Ok(())
    }
    11020 cuMemAllocAsync / cuMemAllocAsync_ptsz: (to: *mut u64, bytes: usize, stream: Handle) { put(to, memory::allocate_async(bytes, stream)?) }
    11020 cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz: (to: *mut u64, bytes: usize, pool: Handle, stream: Handle) { pool_of(pool)?; put(to, memory::allocate_async(bytes, stream)?) }
    11020 cuMemFreeAsync / cuMemFreeAsync_ptsz: (address: u64, stream: Handle) { memory::free_async(address, stream) }
    // Pools have names only: their memory is all of the device's.
    11020 cuMemPoolCreate: (to: *mut Handle, _properties: *const c_void) { put(to, POOLS.insert(std::sync::Arc::default())) }
    11020 cuMemPoolDestroy: (pool: Handle) {
        POOLS.remove(pool)?;
        let _chosen = CHOSEN.compare_exchange(pool, POOL, Ordering::Relaxed, Ordering::Relaxed);
        Ok(())
    }
    11020 cuMemPoolTrimTo: (_pool: Handle, _keep: usize) { Ok(()) }
    11020 cuMemPoolSetAttribute: (_pool: Handle, _attribute: u32, _value: *const c_void) { Ok(()) }
    11020 cuMemPoolGetAttribute: (_pool: Handle, attribute: u32, to: *mut c_void) { if attribute <= 3 { put(to.cast::<i32>(), 1) } else { put(to.cast::<u64>(), 0) } }
}
