// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The C functions. Each names the version at which cuGetProcAddress has it under its name without a suffix; a second name is the function whose default
//! stream is the calling thread's.

#![allow(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "C programs call these functions, with pointers as the API says"
)]

use super::launch::Shape;
use super::memory::{Kind, Way};
use super::module::{FUNCTIONS, Logs};
use super::stream;
use super::work::{Copy, Fill, Host, Work};
use super::{
    Handle, INVALID_VALUE, NOT_SUPPORTED, Result, UNKNOWN, array, context, device, event, find, graph,
    launch, linker, lock, memory, module, offer, put, text,
};
use std::ffi::{c_char, c_void};

fn call(body: impl FnOnce() -> Result) -> i32 {
    // A panic must not cross into C.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    }
}

macro_rules! api {
    ($($since:literal $name:ident $(/ $own:ident)? : $arguments:tt $body:block)*) => {
        $(
            function! { $name $arguments $body }
            $(own_default! { $own $name $arguments })?
        )*
        /// Name, version and address of every function.
        pub fn symbols() -> Vec<(&'static str, i32, usize)> {
            vec![$((stringify!($name), $since, $name as *const () as usize), $((stringify!($own), $since, $own as *const () as usize),)?)*]
        }
    };
}

macro_rules! function {
    ($name:ident ($($arg:ident: $ty:ty),*) $body:block) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> i32 {
            call(|| $body)
        }
    };
}

macro_rules! own_default {
    ($own:ident $name:ident ($($arg:ident: $ty:ty),*)) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $own($($arg: $ty),*) -> i32 {
            stream::with_own_default(|| $name($($arg),*))
        }
    };
}

/// Copies a list to an array of the caller; the count goes in as room and comes out as what there is.
fn list<T: std::marker::Copy>(values: &[T], to: *mut T, count: *mut usize) -> Result {
    let room = array(count, 1).first().copied().ok_or(INVALID_VALUE)?;
    if !to.is_null() {
        for (at, &value) in values.iter().enumerate().take(room) {
            put(to.wrapping_add(at), value)?;
        }
    }
    put(count, if to.is_null() { values.len() } else { values.len().min(room) })
}

fn words<const N: usize>(from: *const u64) -> Result<[u64; N]> {
    array(from, N).try_into().map_err(|_| INVALID_VALUE)
}

/// CUDA_MEMCPY2D and CUDA_MEMCPY3D, as 64-bit words. Arrays are not there.
fn rectangle(from: *const u64) -> Result<(Copy, Way)> {
    let w: [u64; 16] = words(from)?;
    let side = |at: usize| -> Result<u64> {
        match w[at + 2] as u32 {
            1 => Ok(w[at + 3]),
            2 | 4 => Ok(w[at + 4]),
            _ => Err(NOT_SUPPORTED),
        }
    };
    let pitch = |at: usize| if w[at + 6] == 0 { w[14] } else { w[at + 6] };
    let start = |at: usize| side(at).map(|base| base + w[at] + w[at + 1] * pitch(at));
    let copy = Copy {
        from: start(0)?,
        to: start(7)?,
        from_pitch: pitch(0) as usize,
        to_pitch: pitch(7) as usize,
        from_slice: 0,
        to_slice: 0,
        width: w[14] as usize,
        height: w[15] as usize,
        depth: 1,
    };
    Ok((copy, way(w[2], w[9])))
}

fn way(from: u64, to: u64) -> Way {
    match (from as u32, to as u32) {
        (2, 2) => Way::OnDevice,
        (2, _) => Way::ToHost,
        (_, 2) => Way::ToDevice,
        _ => Way::Any,
    }
}

fn cuboid(from: *const u64) -> Result<(Copy, Way)> {
    let w: [u64; 25] = words(from)?;
    let side = |at: usize| -> Result<u64> {
        match w[at + 4] as u32 {
            1 => Ok(w[at + 5]),
            2 | 4 => Ok(w[at + 6]),
            _ => Err(NOT_SUPPORTED),
        }
    };
    let pitch = |at: usize| if w[at + 9] == 0 { w[22] } else { w[at + 9] };
    let slice = |at: usize| pitch(at) * if w[at + 10] == 0 { w[23] } else { w[at + 10] };
    let start = |at: usize| side(at).map(|base| base + w[at] + w[at + 1] * pitch(at) + w[at + 2] * slice(at));
    let copy = Copy {
        from: start(0)?,
        to: start(11)?,
        from_pitch: pitch(0) as usize,
        to_pitch: pitch(11) as usize,
        from_slice: slice(0) as usize,
        to_slice: slice(11) as usize,
        width: w[22] as usize,
        height: w[23] as usize,
        depth: w[24] as usize,
    };
    Ok((copy, way(w[4], w[15])))
}

fn one(to: u64, value: u32, element: usize, count: usize) -> Fill {
    Fill { to, pitch: count * element, value, element, width: count, height: 1 }
}

fn many(to: u64, pitch: usize, value: u32, element: usize, width: usize, height: usize) -> Fill {
    Fill { to, pitch, value, element, width, height }
}

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

const _: () =
    assert!(size_of::<Config>() == 56 && size_of::<Attribute>() == 72 && size_of::<KernelNode>() == 72);

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

fn copy_linear(to: u64, from: u64, bytes: usize, way: Way) -> Result {
    memory::copy(Copy::linear(to, from, bytes), way)
}

fn copy_linear_async(to: u64, from: u64, bytes: usize, way: Way, stream: Handle) -> Result {
    memory::copy_async(Copy::linear(to, from, bytes), way, stream)
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
    11020 cuDeviceGetDefaultMemPool: (to: *mut Handle, number: i32) { device::check(number)?; put(to, POOL) }
    11020 cuDeviceGetMemPool: (to: *mut Handle, number: i32) { device::check(number)?; put(to, POOL) }

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

    2000 cuModuleLoad: (to: *mut Handle, path: *const c_char) { put(to, module::load_file(&text(path)?, Logs::default())?) }
    // SAFETY: an image, as the API says.
    2000 cuModuleLoadData: (to: *mut Handle, image: *const u8) { put(to, unsafe { module::load(image, Logs::default()) }?) }
    2010 cuModuleLoadDataEx: (to: *mut Handle, image: *const u8, count: u32, options: *const u32, values: *const usize) {
        let logs = Logs::of(&array(options, count as usize), &array(values, count as usize));
        // SAFETY: an image, as the API says.
        put(to, unsafe { module::load(image, logs) }?)
    }
    // SAFETY: an image, as the API says.
    2000 cuModuleLoadFatBinary: (to: *mut Handle, image: *const u8) { put(to, unsafe { module::load(image, Logs::default()) }?) }
    2000 cuModuleUnload: (handle: Handle) { module::unload(handle) }
    11070 cuModuleGetLoadingMode: (to: *mut u32) { put(to, 2) }
    2000 cuModuleGetFunction: (to: *mut Handle, owner: Handle, name: *const c_char) { put(to, module::function(owner, &text(name)?)?) }
    12040 cuModuleGetFunctionCount: (to: *mut u32, owner: Handle) { put(to, module::names(owner)?.len() as u32) }
    3020 cuModuleGetGlobal_v2: (address: *mut u64, bytes: *mut usize, owner: Handle, name: *const c_char) {
        let (at, size) = module::global(owner, &text(name)?)?;
        offer(address, at);
        offer(bytes, size);
        Ok(())
    }
    12000 cuLibraryLoadData: (to: *mut Handle, image: *const u8, options: *const u32, values: *const usize, count: u32, _library_options: *const u32, _library_values: *const usize, _library_count: u32) {
        let logs = Logs::of(&array(options, count as usize), &array(values, count as usize));
        // SAFETY: an image, as the API says.
        put(to, unsafe { module::load(image, logs) }?)
    }
    12000 cuLibraryLoadFromFile: (to: *mut Handle, path: *const c_char, options: *const u32, values: *const usize, count: u32, _library_options: *const u32, _library_values: *const usize, _library_count: u32) {
        let logs = Logs::of(&array(options, count as usize), &array(values, count as usize));
        put(to, module::load_file(&text(path)?, logs)?)
    }
    12000 cuLibraryUnload: (handle: Handle) { module::unload(handle) }
    12000 cuLibraryGetKernel: (to: *mut Handle, owner: Handle, name: *const c_char) { put(to, module::function(owner, &text(name)?)?) }
    12000 cuLibraryGetModule: (to: *mut Handle, owner: Handle) { module::MODULES.get(owner)?; put(to, owner) }
    12000 cuLibraryGetGlobal: (address: *mut u64, bytes: *mut usize, owner: Handle, name: *const c_char) { call_code(cuModuleGetGlobal_v2(address, bytes, owner, name)) }
    12000 cuLibraryGetManaged: (address: *mut u64, bytes: *mut usize, owner: Handle, name: *const c_char) { call_code(cuModuleGetGlobal_v2(address, bytes, owner, name)) }
    12040 cuLibraryGetKernelCount: (to: *mut u32, owner: Handle) { put(to, module::names(owner)?.len() as u32) }
    12040 cuLibraryEnumerateKernels: (to: *mut Handle, room: u32, owner: Handle) {
        for (at, name) in module::names(owner)?.iter().enumerate().take(room as usize) {
            put(to.wrapping_add(at), module::function(owner, name)?)?;
        }
        Ok(())
    }
    12000 cuKernelGetFunction: (to: *mut Handle, kernel: Handle) { FUNCTIONS.get(kernel)?; put(to, kernel) }
    12050 cuKernelGetLibrary: (to: *mut Handle, kernel: Handle) { put(to, FUNCTIONS.get(kernel)?.owner) }
    12000 cuKernelGetAttribute: (to: *mut i32, attribute: i32, kernel: Handle, _device: i32) { put(to, FUNCTIONS.get(kernel)?.attribute(attribute)?) }
    12000 cuKernelSetAttribute: (attribute: i32, value: i32, kernel: Handle, _device: i32) { FUNCTIONS.get(kernel)?.set_attribute(attribute, value) }
    12000 cuKernelSetCacheConfig: (kernel: Handle, _config: u32, _device: i32) { FUNCTIONS.get(kernel).map(drop) }
    12030 cuKernelGetName: (to: *mut *const c_char, kernel: Handle) { put(to, FUNCTIONS.get(kernel)?.c_name.as_ptr()) }
    12040 cuKernelGetParamInfo: (kernel: Handle, index: usize, offset: *mut usize, size: *mut usize) { call_code(cuFuncGetParamInfo(kernel, index, offset, size)) }
    2020 cuFuncGetAttribute: (to: *mut i32, attribute: i32, function: Handle) { put(to, FUNCTIONS.get(function)?.attribute(attribute)?) }
    9000 cuFuncSetAttribute: (function: Handle, attribute: i32, value: i32) { FUNCTIONS.get(function)?.set_attribute(attribute, value) }
    3000 cuFuncSetCacheConfig: (function: Handle, _config: u32) { FUNCTIONS.get(function).map(drop) }
    4020 cuFuncSetSharedMemConfig: (function: Handle, _config: u32) { FUNCTIONS.get(function).map(drop) }
    11000 cuFuncGetModule: (to: *mut Handle, function: Handle) { put(to, FUNCTIONS.get(function)?.owner) }
    12030 cuFuncGetName: (to: *mut *const c_char, function: Handle) { put(to, FUNCTIONS.get(function)?.c_name.as_ptr()) }
    12040 cuFuncGetParamInfo: (function: Handle, index: usize, offset: *mut usize, size: *mut usize) {
        let program = FUNCTIONS.get(function)?.program()?;
        let parameter = program.parameters.get(index).ok_or(INVALID_VALUE)?;
        offer(offset, parameter.offset);
        offer(size, parameter.size);
        Ok(())
    }
    12040 cuFuncIsLoaded: (to: *mut i32, function: Handle) { FUNCTIONS.get(function)?; put(to, 1) }
    12040 cuFuncLoad: (function: Handle) { FUNCTIONS.get(function).map(drop) }
    6050 cuOccupancyMaxActiveBlocksPerMultiprocessor: (to: *mut i32, function: Handle, block: i32, shared: usize) { put(to, launch::occupancy(function, block, shared)?) }
    7000 cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags: (to: *mut i32, function: Handle, block: i32, shared: usize, _flags: u32) { put(to, launch::occupancy(function, block, shared)?) }
    6050 cuOccupancyMaxPotentialBlockSize: (grid: *mut i32, block: *mut i32, function: Handle, shared_of: Option<extern "C" fn(i32) -> usize>, shared: usize, limit: i32) {
        let most = FUNCTIONS.get(function)?.attribute(0)?.min(if limit == 0 { 1024 } else { limit });
        let shared = shared_of.map_or(shared, |shared_of| shared_of(most));
        put(block, most)?;
        put(grid, launch::occupancy(function, most, shared)?.max(1) * device::PROCESSORS)
    }

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
        let (_, from, bytes) = memory::find(address).ok_or(super::NOT_FOUND)?;
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
    11020 cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz: (to: *mut u64, bytes: usize, _pool: Handle, stream: Handle) { put(to, memory::allocate_async(bytes, stream)?) }
    11020 cuMemFreeAsync / cuMemFreeAsync_ptsz: (address: u64, stream: Handle) { memory::free_async(address, stream) }
    11020 cuMemPoolTrimTo: (_pool: Handle, _keep: usize) { Ok(()) }
    11020 cuMemPoolSetAttribute: (_pool: Handle, _attribute: u32, _value: *const c_void) { Ok(()) }
    11020 cuMemPoolGetAttribute: (_pool: Handle, attribute: u32, to: *mut c_void) { if attribute <= 3 { put(to.cast::<i32>(), 1) } else { put(to.cast::<u64>(), 0) } }

    4000 cuMemcpy / cuMemcpy_ptds: (to: u64, from: u64, bytes: usize) { copy_linear(to, from, bytes, Way::Any) }
    3020 cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds: (to: u64, from: u64, bytes: usize) { copy_linear(to, from, bytes, Way::ToDevice) }
    3020 cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds: (to: u64, from: u64, bytes: usize) { copy_linear(to, from, bytes, Way::ToHost) }
    3020 cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds: (to: u64, from: u64, bytes: usize) { copy_linear(to, from, bytes, Way::OnDevice) }
    4000 cuMemcpyAsync / cuMemcpyAsync_ptsz: (to: u64, from: u64, bytes: usize, stream: Handle) { copy_linear_async(to, from, bytes, Way::Any, stream) }
    3020 cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz: (to: u64, from: u64, bytes: usize, stream: Handle) { copy_linear_async(to, from, bytes, Way::ToDevice, stream) }
    3020 cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz: (to: u64, from: u64, bytes: usize, stream: Handle) { copy_linear_async(to, from, bytes, Way::ToHost, stream) }
    3020 cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz: (to: u64, from: u64, bytes: usize, stream: Handle) { copy_linear_async(to, from, bytes, Way::OnDevice, stream) }
    3020 cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds: (what: *const u64) { let (copy, way) = rectangle(what)?; memory::copy(copy, way) }
    3020 cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds: (what: *const u64) { let (copy, way) = rectangle(what)?; memory::copy(copy, way) }
    3020 cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz: (what: *const u64, stream: Handle) { let (copy, way) = rectangle(what)?; memory::copy_async(copy, way, stream) }
    3020 cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds: (what: *const u64) { let (copy, way) = cuboid(what)?; memory::copy(copy, way) }
    3020 cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz: (what: *const u64, stream: Handle) { let (copy, way) = cuboid(what)?; memory::copy_async(copy, way, stream) }
    3020 cuMemsetD8_v2 / cuMemsetD8_v2_ptds: (to: u64, value: u8, count: usize) { memory::fill(one(to, value.into(), 1, count), None) }
    3020 cuMemsetD16_v2 / cuMemsetD16_v2_ptds: (to: u64, value: u16, count: usize) { memory::fill(one(to, value.into(), 2, count), None) }
    3020 cuMemsetD32_v2 / cuMemsetD32_v2_ptds: (to: u64, value: u32, count: usize) { memory::fill(one(to, value, 4, count), None) }
    3020 cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds: (to: u64, pitch: usize, value: u8, width: usize, height: usize) { memory::fill(many(to, pitch, value.into(), 1, width, height), None) }
    3020 cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds: (to: u64, pitch: usize, value: u32, width: usize, height: usize) { memory::fill(many(to, pitch, value, 4, width, height), None) }
    3020 cuMemsetD8Async / cuMemsetD8Async_ptsz: (to: u64, value: u8, count: usize, stream: Handle) { memory::fill(one(to, value.into(), 1, count), Some(stream)) }
    3020 cuMemsetD16Async / cuMemsetD16Async_ptsz: (to: u64, value: u16, count: usize, stream: Handle) { memory::fill(one(to, value.into(), 2, count), Some(stream)) }
    3020 cuMemsetD32Async / cuMemsetD32Async_ptsz: (to: u64, value: u32, count: usize, stream: Handle) { memory::fill(one(to, value, 4, count), Some(stream)) }
    3020 cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz: (to: u64, pitch: usize, value: u8, width: usize, height: usize, stream: Handle) { memory::fill(many(to, pitch, value.into(), 1, width, height), Some(stream)) }
    3020 cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz: (to: u64, pitch: usize, value: u32, width: usize, height: usize, stream: Handle) { memory::fill(many(to, pitch, value, 4, width, height), Some(stream)) }
    8000 cuMemPrefetchAsync / cuMemPrefetchAsync_ptsz: (_address: u64, _bytes: usize, _device: i32, _stream: Handle) { Ok(()) }
    12020 cuMemPrefetchAsync_v2 / cuMemPrefetchAsync_v2_ptsz: (_address: u64, _bytes: usize, _location: u64, _flags: u32, _stream: Handle) { Ok(()) }
    8000 cuMemAdvise: (_address: u64, _bytes: usize, _advice: u32, _device: i32) { Ok(()) }
    12020 cuMemAdvise_v2: (_address: u64, _bytes: usize, _advice: u32, _location: u64) { Ok(()) }

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

    10000 cuGraphCreate: (to: *mut Handle, _flags: u32) { put(to, graph::create()?) }
    10000 cuGraphDestroy: (handle: Handle) { graph::destroy(handle) }
    12000 cuGraphAddKernelNode_v2: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, node: *const KernelNode) { put(to, graph::add(handle, &array(after, count), kernel_work(node)?)?) }
    10000 cuGraphAddMemcpyNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, what: *const u64, _context: Handle) {
        put(to, graph::add(handle, &array(after, count), Work::Copy(cuboid(what)?.0))?)
    }
    10000 cuGraphAddMemsetNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, what: *const u64, _context: Handle) {
        let [at, pitch, value, width, height] = words(what)?;
        let fill = many(at, pitch as usize, value as u32, (value >> 32) as usize, width as usize, height as usize);
        put(to, graph::add(handle, &array(after, count), Work::Fill(fill))?)
    }
    10000 cuGraphAddHostNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, what: *const Host) {
        let host = array(what, 1).first().copied().ok_or(INVALID_VALUE)?;
        put(to, graph::add(handle, &array(after, count), Work::Host(host))?)
    }
    10000 cuGraphAddEmptyNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize) { put(to, graph::add(handle, &array(after, count), Work::Nothing)?) }
    10000 cuGraphAddChildGraphNode: (to: *mut Handle, handle: Handle, after: *const Handle, count: usize, child: Handle) { put(to, graph::add_child(handle, &array(after, count), child)?) }
    10000 cuGraphAddDependencies: (handle: Handle, from: *const Handle, to: *const Handle, count: usize) { graph::add_dependencies(handle, &array(from, count), &array(to, count)) }
    12030 cuGraphAddDependencies_v2: (handle: Handle, from: *const Handle, to: *const Handle, _edges: *const c_void, count: usize) { graph::add_dependencies(handle, &array(from, count), &array(to, count)) }
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
    10020 cuGraphExecMemcpyNodeSetParams: (executable: Handle, node: Handle, what: *const u64, _context: Handle) {
        graph::set_executable_work(executable, node, Work::Copy(cuboid(what)?.0))
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
        if same { Ok(()) } else { Err(super::GRAPH_UPDATE_FAILURE) }
    }

    6050 cuLinkCreate_v2: (count: u32, options: *const u32, values: *const usize, to: *mut Handle) {
        put(to, linker::create(Logs::of(&array(options, count as usize), &array(values, count as usize)))?)
    }
    6050 cuLinkAddData_v2: (handle: Handle, kind: u32, data: *const u8, size: usize, _name: *const c_char, _count: u32, _options: *const u32, _values: *const usize) {
        linker::add(handle, kind, &array(data, size))
    }
    6050 cuLinkAddFile_v2: (handle: Handle, kind: u32, path: *const c_char, _count: u32, _options: *const u32, _values: *const usize) {
        linker::add_file(handle, kind, &text(path)?)
    }
    5050 cuLinkComplete: (handle: Handle, to: *mut usize, size: *mut usize) {
        let (image, bytes) = linker::complete(handle)?;
        offer(size, bytes);
        put(to, image)
    }
    5050 cuLinkDestroy: (handle: Handle) { linker::LINKS.remove(handle).map(drop) }
    12040 cuFuncGetParamCount: (function: Handle, to: *mut usize) { put(to, FUNCTIONS.get(function)?.program()?.parameters.len()) }
    12040 cuKernelGetParamCount: (function: Handle, to: *mut usize) { put(to, FUNCTIONS.get(function)?.program()?.parameters.len()) }
    11000 cuOccupancyAvailableDynamicSMemPerBlock: (to: *mut usize, function: Handle, _blocks: i32, _threads: i32) { put(to, FUNCTIONS.get(function)?.attribute(8)?.max(0) as usize) }

    4000 cuProfilerStart: () { Ok(()) }
    4000 cuProfilerStop: () { Ok(()) }
}

/// The only pool. Its handle is no other object's.
const POOL: Handle = 0x8000;

thread_local! {
    static CAPTURE_MODE: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    /// Where cuStreamGetCaptureInfo points to until the thread asks again.
    static CAPTURE_ENDS: std::cell::RefCell<Vec<Handle>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn call_code(code: i32) -> Result {
    if code == 0 { Ok(()) } else { Err(code) }
}

fn graph_edges(handle: Handle, from: *mut Handle, to: *mut Handle, count: *mut usize) -> Result {
    let edges = graph::edges(handle)?;
    let (starts, ends): (Vec<Handle>, Vec<Handle>) = edges.into_iter().unzip();
    let room = array(count, 1).first().copied().ok_or(INVALID_VALUE)?;
    list(&starts, from, count)?;
    put(count, room)?;
    list(&ends, to, count)
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
