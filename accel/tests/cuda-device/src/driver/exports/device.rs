// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names, versions, errors; the device; contexts.

use super::super::{Handle, INVALID_VALUE, context, device, find, lock, offer, put, text};
use std::ffi::{c_char, c_void};

api! {
    6000 cuGetErrorString: (error: i32, to: *mut *const c_char) { find::error_text(error, to, true) }
    6000 cuGetErrorName: (error: i32, to: *mut *const c_char) { find::error_text(error, to, false) }
    2000 cuInit: (flags: u32) { device::init(flags) }
    2020 cuDriverGetVersion: (version: *mut i32) { put(version, device::VERSION) }
    11030 cuGetProcAddress: (name: *const c_char, to: *mut usize, version: i32, flags: u64) { find::proc_address(&text(name)?, to, version, flags, std::ptr::null_mut()) }
    12000 cuGetProcAddress_v2: (name: *const c_char, to: *mut usize, version: i32, flags: u64, status: *mut i32) { find::proc_address(&text(name)?, to, version, flags, status) }
    3000 cuGetExportTable: (table: *mut *const c_void, uuid: *const [u8; 16]) { find::export_table(table, uuid) }

    2000 cuDeviceGet: (to: *mut i32, ordinal: i32) { device::check(ordinal)?; put(to, ordinal) }
    2000 cuDeviceGetCount: (to: *mut i32) { device::initialized()?; put(to, device::count()) }
    2000 cuDeviceGetName: (to: *mut c_char, len: i32, number: i32) {
        device::check(number)?;
        let name = device::NAME.as_bytes();
        let room = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
        for at in 0..room.min(name.len() + 1) {
            put(to.wrapping_add(at).cast::<u8>(), if at + 1 == room { 0 } else { name.get(at).copied().unwrap_or(0) })?;
        }
        Ok(())
    }
    9020 cuDeviceGetUuid: (to: *mut [u8; 16], number: i32) { device::check(number)?; put(to, device::UUID) }
    11040 cuDeviceGetUuid_v2: (to: *mut [u8; 16], number: i32) { device::check(number)?; put(to, device::UUID) }
    3020 cuDeviceTotalMem_v2: (to: *mut usize, number: i32) { device::check(number)?; put(to, device::MEMORY) }
    2000 cuDeviceGetAttribute: (to: *mut i32, attribute: i32, number: i32) { device::check(number)?; put(to, device::attribute(attribute)?) }
    2000 cuDeviceComputeCapability: (major: *mut i32, minor: *mut i32, number: i32) { device::check(number)?; put(major, 9)?; put(minor, 0) }
    4010 cuDeviceGetByPCIBusId: (to: *mut i32, name: *const c_char) { if text(name)?.to_lowercase().ends_with("01:00.0") { put(to, 0) } else { Err(INVALID_VALUE) } }
    4010 cuDeviceGetPCIBusId: (to: *mut c_char, len: i32, number: i32) {
        device::check(number)?;
        if len < 13 {
            return Err(INVALID_VALUE);
        }
        put(to.cast::<[u8; 13]>(), *b"0000:01:00.0\0")
    }
    4000 cuDeviceCanAccessPeer: (to: *mut i32, number: i32, peer: i32) { device::check(number)?; device::check(peer)?; put(to, 0) }

    7000 cuDevicePrimaryCtxRetain: (to: *mut Handle, number: i32) { put(to, context::retain_primary(number)?) }
    7000 cuDevicePrimaryCtxRelease: (number: i32) { context::release_primary(number) }
    11000 cuDevicePrimaryCtxRelease_v2: (number: i32) { context::release_primary(number) }
    7000 cuDevicePrimaryCtxReset: (number: i32) { context::reset_primary(number) }
    11000 cuDevicePrimaryCtxReset_v2: (number: i32) { context::reset_primary(number) }
    7000 cuDevicePrimaryCtxGetState: (number: i32, flags: *mut u32, active: *mut i32) { let (f, a) = context::primary_state(number)?; put(flags, f)?; put(active, a) }
    7000 cuDevicePrimaryCtxSetFlags: (number: i32, flags: u32) { context::set_primary_flags(number, flags) }
    11000 cuDevicePrimaryCtxSetFlags_v2: (number: i32, flags: u32) { context::set_primary_flags(number, flags) }
    3020 cuCtxCreate_v2: (to: *mut Handle, flags: u32, number: i32) { put(to, context::create(flags, number)?) }
    11040 cuCtxCreate_v3: (to: *mut Handle, _affinity: *const c_void, _count: i32, flags: u32, number: i32) { put(to, context::create(flags, number)?) }
    12050 cuCtxCreate_v4: (to: *mut Handle, _parameters: *const c_void, flags: u32, number: i32) { put(to, context::create(flags, number)?) }
    4000 cuCtxDestroy_v2: (handle: Handle) { context::destroy(handle) }
    4000 cuCtxPushCurrent_v2: (handle: Handle) { context::push(handle) }
    4000 cuCtxPopCurrent_v2: (to: *mut Handle) { offer(to, context::pop()?); Ok(()) }
    4000 cuCtxSetCurrent: (handle: Handle) { context::set_current(handle) }
    4000 cuCtxGetCurrent: (to: *mut Handle) { device::initialized()?; put(to, context::current_handle()) }
    2000 cuCtxGetDevice: (to: *mut i32) { context::current()?; put(to, 0) }
    13000 cuCtxGetDevice_v2: (to: *mut i32, _context: Handle) { put(to, 0) }
    7000 cuCtxGetFlags: (to: *mut u32) { put(to, context::current()?.flags.load(std::sync::atomic::Ordering::Relaxed)) }
    12000 cuCtxGetId: (handle: Handle, to: *mut u64) { put(to, if handle == 0 { context::current()?.id } else { context::CONTEXTS.get(handle)?.id }) }
    3020 cuCtxGetApiVersion: (_context: Handle, to: *mut u32) { put(to, 3020) }
    2000 cuCtxSynchronize: () { context::current()?.synchronize() }
    3010 cuCtxSetLimit: (limit: u32, value: usize) { lock(&context::current()?.limits).insert(limit, value); Ok(()) }
    3010 cuCtxGetLimit: (to: *mut usize, limit: u32) { put(to, lock(&context::current()?.limits).get(&limit).copied().unwrap_or(0)) }
    3020 cuCtxGetCacheConfig: (to: *mut u32) { put(to, 0) }
    3020 cuCtxSetCacheConfig: (_config: u32) { Ok(()) }
    4020 cuCtxGetSharedMemConfig: (to: *mut u32) { put(to, 1) }
    4020 cuCtxSetSharedMemConfig: (_config: u32) { Ok(()) }
    5050 cuCtxGetStreamPriorityRange: (least: *mut i32, greatest: *mut i32) { context::current()?; offer(least, 0); offer(greatest, -5); Ok(()) }

    4000 cuProfilerStart: () { Ok(()) }
    4000 cuProfilerStop: () { Ok(()) }
}
