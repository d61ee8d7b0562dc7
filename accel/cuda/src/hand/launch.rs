// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Launches. A function's parameters are copied by the offsets and sizes that the server told when it was found. The first launch of a shape waits for the driver's
//! verdict; the same again is posted.

use super::device::read;
use super::module::callable;
use crate::rt::{self, Handle, Id};
use crate::state::Function;
use std::ffi::c_void;
use tombolo_accel_spec::cuda::{self as wire, cu, kind};

/// CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE, names in the list `extra`, which ends with 0.
const BUFFER: usize = 1;
const BUFFER_SIZE: usize = 2;

/// Occupancy of a multiprocessor and more depend on no grid; these are the largest that any device takes.
const GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];

struct Launch {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    cooperative: bool,
}

/// Bytes of parameters that a launch has on the stack.
const FEW: usize = 256;

/// Copies all parameters to `bytes`, which is as long as they are.
///
/// # Safety
/// `each` is null or points to a pointer for each parameter; `extra` is null or a list as the API describes it.
pub unsafe fn parameters(
    function: &Function,
    each: *const *const u8,
    extra: *const *const c_void,
    bytes: &mut [u8],
) -> Result<(), i32> {
    if !each.is_null() {
        for (i, (at, len)) in function.parameters().iter().enumerate() {
            // SAFETY: as the caller promises.
            let from = unsafe { each.add(i).read() };
            if from.is_null() {
                return Err(cu::CUDA_ERROR_INVALID_VALUE);
            }
            let to = &mut bytes[*at as usize..][..*len as usize];
            // SAFETY: the parameter has so many bytes, as the caller promises.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        }
        return Ok(());
    }
    if extra.is_null() {
        return if bytes.is_empty() { Ok(()) } else { Err(cu::CUDA_ERROR_INVALID_VALUE) };
    }
    // SAFETY: as the caller promises.
    let (buffer, size) = unsafe { listed(extra) }?;
    if buffer.is_null() || size < bytes.len() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the buffer has so many bytes, as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(buffer, bytes.as_mut_ptr(), bytes.len()) };
    Ok(())
}

/// The buffer with all parameters that a list names, and its size.
///
/// # Safety
/// `at` is a list as the API describes it.
unsafe fn listed(mut at: *const *const c_void) -> Result<(*const u8, usize), i32> {
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0);
    loop {
        // SAFETY: not past the end of the list, as the caller promises.
        let name = unsafe { at.read() } as usize;
        if name == 0 {
            return Ok((buffer, size));
        }
        // SAFETY: a name has a value behind it.
        let value = unsafe { at.add(1).read() };
        match name {
            BUFFER => buffer = value.cast(),
            // SAFETY: this value points to a size.
            BUFFER_SIZE => size = unsafe { read::<usize>(value) }?,
            _ => return Err(cu::CUDA_ERROR_INVALID_VALUE),
        }
        // SAFETY: as above.
        at = unsafe { at.add(2) };
    }
}

/// # Safety
/// As for [`parameters`].
unsafe fn launch(f: Handle, what: &Launch, each: *const c_void, extra: *const c_void) -> Result<(), i32> {
    let (object, function) = callable(f)?;
    let stream = rt::maybe(what.stream, kind::STREAM)?;
    let (mut few, mut many) = ([0; FEW], Vec::new());
    let bytes = match function.size() as usize {
        size @ 0..=FEW => &mut few[..size],
        size => {
            many.resize(size, 0);
            &mut many[..]
        }
    };
    // SAFETY: as the caller promises.
    unsafe { parameters(function, each.cast(), extra.cast(), bytes) }?;
    let shape = (what.block, what.shared, what.cooperative);
    let fits = (0..3).all(|i| (1..=GRID[i]).contains(&what.grid[i])) && !what.cooperative;
    let ([gx, gy, gz], [bx, by, bz]) = (what.grid, what.block);
    let sizes = [gx, gy, gz, bx, by, bz];
    let record = wire::LaunchKernel {
        f: object.id(),
        shape: sizes[..].into(),
        sharedMemBytes: what.shared,
        hStream: stream.map_or(0, |stream| stream.id()),
        cooperative: u32::from(what.cooperative),
        parameters: bytes,
        current: rt::current(),
    };
    if fits && function.accepts(&shape) {
        return rt::post(&record);
    }
    rt::call(&record)?;
    function.accept(shape);
    Ok(())
}

/// CUlaunchConfig
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: *const Attribute,
    count: u32,
}

/// CUlaunchAttribute
#[repr(C)]
#[derive(Clone, Copy)]
struct Attribute {
    id: u32,
    pad: u32,
    value: [u64; 8],
}

const _: () = assert!(size_of::<Config>() == 56 && size_of::<Attribute>() == 72);

/// The launch that a configuration describes.
///
/// # Safety
/// `config` is null or a CUlaunchConfig.
unsafe fn configured(config: *const c_void) -> Result<Launch, i32> {
    // SAFETY: as the caller promises.
    let config: Config = unsafe { read(config) }?;
    let mut cooperative = false;
    for i in 0..config.count as usize {
        if config.attributes.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: so many attributes, as the caller promises.
        let attribute = unsafe { config.attributes.add(i).read() };
        match attribute.id {
            cu::CU_LAUNCH_ATTRIBUTE_IGNORE => {}
            cu::CU_LAUNCH_ATTRIBUTE_COOPERATIVE => cooperative = attribute.value[0] as u32 != 0,
            _ => return Err(wire::UNSUPPORTED),
        }
    }
    let Config { grid, block, shared, stream, .. } = config;
    Ok(Launch { grid, block, shared, stream, cooperative })
}

super::exported! {
    fn cuLaunchKernel(f: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle, each: *const c_void, extra: *const c_void) {
        let (grid, block) = ([gx, gy, gz], [bx, by, bz]);
        // SAFETY: the function's parameters, as the API says.
        unsafe { launch(f, &Launch { grid, block, shared, stream, cooperative: false }, each, extra) }
    }

    fn cuLaunchCooperativeKernel(f: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle, each: *const c_void) {
        let (grid, block) = ([gx, gy, gz], [bx, by, bz]);
        // SAFETY: the function's parameters, as the API says.
        unsafe { launch(f, &Launch { grid, block, shared, stream, cooperative: true }, each, std::ptr::null()) }
    }

    fn cuLaunchKernelEx(config: *const c_void, f: Handle, each: *const c_void, extra: *const c_void) {
        // SAFETY: a configuration and the function's parameters, as the API says.
        unsafe { launch(f, &configured(config)?, each, extra) }
    }
}
