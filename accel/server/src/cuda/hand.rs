// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handlers written by hand: contexts; modules, and what is found in them; allocations. Copies, launches and graphs have modules of their own.

pub(super) use super::copy::*;
pub(super) use super::cuboid::*;
pub(super) use super::graph::*;
pub(super) use super::host::*;
pub(super) use super::launch::*;
use super::memory::Range;
pub(super) use super::pool::*;
use super::{CURRENT, Cx, Extra, Handle, lock};
use std::ffi::c_void;
use std::sync::Arc;
use tombolo_accel_spec::code;
use tombolo_accel_spec::cuda::{self as wire, cu, kind};

/// No id of a context: what is current in this thread is not known.
const UNKNOWN: u64 = u64::MAX;
/// The largest number of parameters that a kernel has.
const PARAMETERS: usize = 4096;

pub(super) fn device_primary_ctx_retain(
    cx: &mut Cx<'_>,
    r: &wire::DevicePrimaryCtxRetain,
) -> Result<(), i32> {
    let f = cx.native().cuDevicePrimaryCtxRetain.ok_or(wire::UNSUPPORTED)?;
    let device = cx.device(r.dev)?;
    cx.vacant(r.new)?;
    let mut native: Handle = std::ptr::null_mut();
    // SAFETY: room for a handle.
    cx.status(unsafe { f(&mut native, device) })?;
    cx.keep(kind::CONTEXT, r.new, native, Extra { primary: Some(device), ..Extra::default() })
}

pub(super) fn device_primary_ctx_reset_v2(
    cx: &mut Cx<'_>,
    r: &wire::DevicePrimaryCtxResetV2,
) -> Result<(), i32> {
    let f = cx.native().cuDevicePrimaryCtxReset_v2.ok_or(wire::UNSUPPORTED)?;
    let device = cx.device(r.dev)?;
    let contexts = lock(&cx.cuda.table).ids(|extra| extra.primary == Some(device));
    contexts.into_iter().for_each(|context| cx.cuda.end(context));
    CURRENT.set(UNKNOWN);
    // SAFETY: all that the client had of this context has been taken back.
    cx.status(unsafe { f(device) })
}

pub(super) fn ctx_create_v2(cx: &mut Cx<'_>, r: &wire::CtxCreateV2) -> Result<(), i32> {
    let f = cx.native().cuCtxCreate_v2.ok_or(wire::UNSUPPORTED)?;
    let device = cx.device(r.dev)?;
    cx.vacant(r.new)?;
    let mut native: Handle = std::ptr::null_mut();
    CURRENT.set(UNKNOWN);
    // SAFETY: room for a handle.
    cx.status(unsafe { f(&mut native, r.flags, device) })?;
    cx.keep(kind::CONTEXT, r.new, native, Extra::default())
}

/// Options of a compiler that are numbers and have no effect beyond its code.
const OPTIONS: &[u32] = &[
    cu::CU_JIT_MAX_REGISTERS,
    cu::CU_JIT_OPTIMIZATION_LEVEL,
    cu::CU_JIT_TARGET_FROM_CUCONTEXT,
    cu::CU_JIT_TARGET,
    cu::CU_JIT_FALLBACK_STRATEGY,
    cu::CU_JIT_GENERATE_DEBUG_INFO,
    cu::CU_JIT_LOG_VERBOSE,
    cu::CU_JIT_GENERATE_LINE_INFO,
    cu::CU_JIT_CACHE_MODE,
];

/// Checks an image and its options, and counts the image; `make` gets it, with pointers to options and values. What it made is kept.
fn load(
    cx: &mut Cx<'_>,
    (kind, id): (u32, u64),
    image: &[u8],
    (options, values): (&[u32], &[u64]),
    make: impl FnOnce(&mut Handle, *const c_void, &mut [u32], &mut [u64]) -> i32,
) -> Result<(), i32> {
    if !code::is_whole(image) {
        return Err(cu::CUDA_ERROR_INVALID_IMAGE);
    }
    if options.len() != values.len() || !options.iter().all(|option| OPTIONS.contains(option)) {
        return Err(wire::UNSUPPORTED);
    }
    cx.vacant(id)?;
    let charged = image.len() as u64;
    cx.cuda.charge(charged)?;
    // Eight bytes are read at once here and there: an image begins where the driver expects one.
    let mut aligned = vec![0u64; image.len().div_ceil(8)];
    for (word, bytes) in aligned.iter_mut().zip(image.chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(padded);
    }
    let mut native: Handle = std::ptr::null_mut();
    let (mut options, mut values) = (options.to_vec(), values.to_vec());
    let made =
        cx.status(make(&mut native, aligned.as_ptr().cast(), &mut options, &mut values)).and_then(|()| {
            // A library belongs to no context.
            let owner = if kind == kind::LIBRARY { 0 } else { cx.current };
            cx.keep(kind, id, native, Extra { owners: [owner, 0], charged, ..Extra::default() })
        });
    made.inspect_err(|_| cx.cuda.uncharge(charged))
}

pub(super) fn module_load_data_ex(cx: &mut Cx<'_>, r: &wire::ModuleLoadDataEx<'_>) -> Result<(), i32> {
    let f = cx.native().cuModuleLoadDataEx.ok_or(wire::UNSUPPORTED)?;
    cx.cuda.output.expect();
    load(cx, (kind::MODULE, r.new), r.image, (&r.options, &r.values), |new, image, options, values| {
        // SAFETY: an image that is as long as it says; so many options and their values.
        unsafe {
            f(new, image, options.len() as u32, options.as_mut_ptr(), values.as_mut_ptr().cast_const().cast())
        }
    })
}

pub(super) fn library_load_data(cx: &mut Cx<'_>, r: &wire::LibraryLoadData<'_>) -> Result<(), i32> {
    let f = cx.native().cuLibraryLoadData.ok_or(wire::UNSUPPORTED)?;
    cx.cuda.output.expect();
    load(cx, (kind::LIBRARY, r.new), r.code, (&r.options, &r.values), |new, image, options, values| {
        let (count, none) = (options.len() as u32, std::ptr::null_mut());
        let values = values.as_mut_ptr().cast_const().cast();
        // SAFETY: an image that is as long as it says; so many options and their values. Without the option that the image is kept, the driver copies it.
        unsafe { f(new, image, options.as_mut_ptr(), values, count, none, std::ptr::null(), 0) }
    })
}

/// Offset and size of each parameter: asked for one after the other until there is none.
fn parameters(
    cx: &Cx<'_>,
    ask: impl Fn(usize, &mut usize, &mut usize) -> i32,
) -> Result<Vec<(usize, usize)>, i32> {
    let mut all = Vec::new();
    while all.len() < PARAMETERS {
        let (mut offset, mut size) = (0, 0);
        match ask(all.len(), &mut offset, &mut size) {
            cu::CUDA_ERROR_INVALID_VALUE => break,
            code => cx.status(code)?,
        }
        all.push((offset, size));
    }
    Ok(all)
}

/// Keeps a function or a kernel, and tells the client its parameters.
fn keep_callable(
    cx: &mut Cx<'_>,
    (kind, id): (u32, u64),
    native: Handle,
    owners: [u64; 2],
) -> Result<(), i32> {
    let (of_function, of_kernel) = (cx.native().cuFuncGetParamInfo, cx.native().cuKernelGetParamInfo);
    let f = if kind == kind::KERNEL { of_kernel } else { of_function }.ok_or(wire::UNSUPPORTED)?;
    // SAFETY: a handle that the driver just gave; room for two sizes.
    let all = parameters(cx, |i, offset, size| unsafe { f(native, i, offset, size) })?;
    let numbers: Vec<u64> = all.iter().flat_map(|(offset, size)| [*offset as u64, *size as u64]).collect();
    cx.keep(kind, id, native, Extra { owners, parameters: Arc::from(all), ..Extra::default() })?;
    cx.reply().u64s(&numbers);
    Ok(())
}

pub(super) fn module_get_function(cx: &mut Cx<'_>, r: &wire::ModuleGetFunction<'_>) -> Result<(), i32> {
    let f = cx.native().cuModuleGetFunction.ok_or(wire::UNSUPPORTED)?;
    let (module, name) = (cx.get(kind::MODULE, r.hmod)?, cx.c_string(r.name)?);
    cx.vacant(r.new)?;
    let mut native: Handle = std::ptr::null_mut();
    // SAFETY: room for a handle, a live module, a name.
    cx.status(unsafe { f(&mut native, module, name.as_ptr()) })?;
    keep_callable(cx, (kind::FUNCTION, r.new), native, [r.hmod, 0])
}

pub(super) fn library_get_kernel(cx: &mut Cx<'_>, r: &wire::LibraryGetKernel<'_>) -> Result<(), i32> {
    let f = cx.native().cuLibraryGetKernel.ok_or(wire::UNSUPPORTED)?;
    let (library, name) = (cx.get(kind::LIBRARY, r.library)?, cx.c_string(r.name)?);
    cx.vacant(r.new)?;
    let mut native: Handle = std::ptr::null_mut();
    // SAFETY: room for a handle, a live library, a name.
    cx.status(unsafe { f(&mut native, library, name.as_ptr()) })?;
    keep_callable(cx, (kind::KERNEL, r.new), native, [r.library, 0])
}

pub(super) fn kernel_get_function(cx: &mut Cx<'_>, r: &wire::KernelGetFunction) -> Result<(), i32> {
    let f = cx.native().cuKernelGetFunction.ok_or(wire::UNSUPPORTED)?;
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    cx.vacant(r.new)?;
    let mut native: Handle = std::ptr::null_mut();
    // SAFETY: room for a handle, a live kernel.
    cx.status(unsafe { f(&mut native, kernel) })?;
    keep_callable(cx, (kind::FUNCTION, r.new), native, [r.kernel, cx.current])
}

pub(super) fn library_get_module(cx: &mut Cx<'_>, r: &wire::LibraryGetModule) -> Result<(), i32> {
    let f = cx.native().cuLibraryGetModule.ok_or(wire::UNSUPPORTED)?;
    let library = cx.get(kind::LIBRARY, r.library)?;
    cx.vacant(r.new)?;
    let mut native: Handle = std::ptr::null_mut();
    // SAFETY: room for a handle, a live library.
    cx.status(unsafe { f(&mut native, library) })?;
    cx.keep(kind::MODULE, r.new, native, Extra { owners: [cx.current, r.library], ..Extra::default() })
}

/// A variable of a module or a library becomes memory of the client.
fn variable(cx: &mut Cx<'_>, owner: u64, ask: impl FnOnce(&mut u64, &mut usize) -> i32) -> Result<(), i32> {
    let (mut start, mut len) = (0, 0);
    cx.status(ask(&mut start, &mut len))?;
    lock(&cx.cuda.ranges).insert(start, Range { len: len as u64, owner, charged: 0 });
    cx.reply().u64(start);
    cx.reply().u64(len as u64);
    Ok(())
}

pub(super) fn module_get_global_v2(cx: &mut Cx<'_>, r: &wire::ModuleGetGlobalV2<'_>) -> Result<(), i32> {
    let f = cx.native().cuModuleGetGlobal_v2.ok_or(wire::UNSUPPORTED)?;
    let (module, name) = (cx.get(kind::MODULE, r.hmod)?, cx.c_string(r.name)?);
    // SAFETY: room for an address and a size, a live module, a name.
    variable(cx, r.hmod, |start, len| unsafe {
        f(std::ptr::from_mut(start).cast_const().cast(), len, module, name.as_ptr())
    })
}

pub(super) fn library_get_global(cx: &mut Cx<'_>, r: &wire::LibraryGetGlobal<'_>) -> Result<(), i32> {
    let f = cx.native().cuLibraryGetGlobal.ok_or(wire::UNSUPPORTED)?;
    let (library, name) = (cx.get(kind::LIBRARY, r.library)?, cx.c_string(r.name)?);
    // SAFETY: room for an address and a size, a live library, a name.
    variable(cx, r.library, |start, len| unsafe {
        f(std::ptr::from_mut(start).cast_const().cast(), len, library, name.as_ptr())
    })
}

pub(super) fn mem_get_info_v2(cx: &mut Cx<'_>, _: &wire::MemGetInfoV2) -> Result<(), i32> {
    let f = cx.native().cuMemGetInfo_v2.ok_or(wire::UNSUPPORTED)?;
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: room for two sizes.
    cx.status(unsafe { f(&mut free, &mut total) })?;
    let (limit, used) = (cx.cuda.memory.limit(), cx.cuda.memory.used());
    cx.reply().u64((free as u64).min(limit.saturating_sub(used)));
    cx.reply().u64((total as u64).min(limit));
    Ok(())
}

/// Counts memory before it is made, and keeps its address; `make` returns address and length.
fn allocate(cx: &mut Cx<'_>, charged: u64, make: impl FnOnce() -> (i32, u64, u64)) -> Result<u64, i32> {
    cx.cuda.charge(charged)?;
    let (code, start, len) = make();
    cx.status(code).inspect_err(|_| cx.cuda.uncharge(charged))?;
    lock(&cx.cuda.ranges).insert(start, Range { len, owner: cx.current, charged });
    Ok(start)
}

pub(super) fn mem_alloc_v2(cx: &mut Cx<'_>, r: &wire::MemAllocV2) -> Result<(), i32> {
    let f = cx.native().cuMemAlloc_v2.ok_or(wire::UNSUPPORTED)?;
    let start = allocate(cx, r.bytesize, || {
        let mut start = 0u64;
        // SAFETY: room for an address.
        let code = unsafe { f((&raw mut start).cast_const().cast(), r.bytesize as usize) };
        (code, start, r.bytesize)
    })?;
    cx.reply().u64(start);
    Ok(())
}

pub(super) fn mem_alloc_pitch_v2(cx: &mut Cx<'_>, r: &wire::MemAllocPitchV2) -> Result<(), i32> {
    let f = cx.native().cuMemAllocPitch_v2.ok_or(wire::UNSUPPORTED)?;
    // A row is padded to no more than this; what it really takes is only known afterwards.
    let row = r.WidthInBytes.checked_next_multiple_of(4096).ok_or(cu::CUDA_ERROR_INVALID_VALUE)?;
    let most = row.checked_mul(r.Height).ok_or(cu::CUDA_ERROR_INVALID_VALUE)?;
    let mut pitch = 0usize;
    let start = allocate(cx, most, || {
        let mut start = 0u64;
        let (width, height) = (r.WidthInBytes as usize, r.Height as usize);
        // SAFETY: room for an address and a size.
        let code =
            unsafe { f((&raw mut start).cast_const().cast(), &mut pitch, width, height, r.ElementSizeBytes) };
        (code, start, (pitch as u64).saturating_mul(r.Height).min(most))
    })?;
    cx.reply().u64(start);
    cx.reply().u64(pitch as u64);
    Ok(())
}

pub(super) fn mem_free_v2(cx: &mut Cx<'_>, r: &wire::MemFreeV2) -> Result<(), i32> {
    let f = cx.native().cuMemFree_v2.ok_or(wire::UNSUPPORTED)?;
    let range = lock(&cx.cuda.ranges).take(r.dptr).ok_or(cu::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: the client's own allocation, of which no other call knows any more.
    let freed = cx.status(unsafe { f(r.dptr) });
    match freed {
        Ok(()) => cx.cuda.uncharge(range.charged),
        Err(_) => lock(&cx.cuda.ranges).insert(r.dptr, range),
    }
    freed
}
