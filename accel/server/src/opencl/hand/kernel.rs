// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernels and their arguments.
//!
//! Drivers take the eight bytes of an argument for the address of an object wherever the kernel declares one, and don't look twice. So
//! what the bytes mean is decided here, by the kernel's own declaration: the driver gets an object's handle for a parameter that takes one, and the
//! client's bytes for a parameter that is passed by value.

use super::{Done, value};
use crate::opencl::{Cx, Extra, Handle, lock};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_calls::say;

const HANDLE: usize = size_of::<Handle>();
/// Bytes of the largest argument; drivers say 1024 to 4352 (CL_DEVICE_MAX_PARAMETER_SIZE).
const MOST: usize = 64 << 10;

/// A parameter as its kernel declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// A buffer, an image or a pipe.
    Memory,
    Sampler,
    /// A queue of the device.
    Queue,
    /// Passed by value, or a size of local memory.
    Value,
    /// The driver doesn't tell: not a buffer.
    Unknown,
}

/// The server's own state of a kernel.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// Found out when an argument is set that could be an object.
    parameters: Option<Arc<[Parameter]>>,
    /// Arguments whose posted setting failed: launches are refused with these codes until they are set again.
    failed: BTreeMap<u32, i32>,
    /// Set if its program tells of arguments.
    tells_arguments: bool,
}

fn of_program(cx: &Cx<'_>, program: u64) -> Extra {
    let tells_arguments = cx.extra(kind::PROGRAM, program, |e| e.program.tells_arguments).unwrap_or(false);
    Extra { kernel: Some(Box::new(Kernel { tells_arguments, ..Kernel::default() })), ..Extra::default() }
}

pub(crate) fn create_kernel(cx: &mut Cx<'_>, r: &wire::CreateKernel<'_>) -> Done {
    let f = native!(cx, clCreateKernel);
    let program = cx.get(kind::PROGRAM, r.program)?;
    let name = cx.c_string(r.name)?;
    let extra = of_program(cx, r.program);
    // SAFETY: a live program, a C string.
    cx.create_with(kind::KERNEL, r.new, extra, |code| unsafe { f(program, name.as_ptr(), code) })
}

pub(crate) fn create_kernels_in_program(cx: &mut Cx<'_>, r: &wire::CreateKernelsInProgram<'_>) -> Done {
    let f = native!(cx, clCreateKernelsInProgram);
    let program = cx.get(kind::PROGRAM, r.program)?;
    let mut made = vec![null_mut(); r.new.len()];
    let mut n = 0;
    let list = if made.is_empty() { null_mut() } else { made.as_mut_ptr() };
    // SAFETY: a live program; the list is as long as said.
    cx.status(unsafe { f(program, made.len() as u32, list, &mut n) })?;
    for (id, native) in r.new.iter().zip(made).take(n as usize) {
        let extra = of_program(cx, r.program);
        cx.keep(kind::KERNEL, *id, native, extra)?;
    }
    cx.reply().u32(n);
    Ok(())
}

pub(crate) fn clone_kernel(cx: &mut Cx<'_>, r: &wire::CloneKernel) -> Done {
    let f = native!(cx, clCloneKernel);
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    let extra = Extra { kernel: cx.extra(kind::KERNEL, r.kernel, |e| e.kernel.clone())?, ..Extra::default() };
    // SAFETY: a live kernel.
    cx.create_with(kind::KERNEL, r.new, extra, |code| unsafe { f(kernel, code) })
}

/// Tells of arguments what the native driver would: nothing, unless the client asked for it when it built the program (the server always asks).
pub(crate) fn get_kernel_arg_info(cx: &mut Cx<'_>, r: &wire::GetKernelArgInfo) -> Done {
    let f = native!(cx, clGetKernelArgInfo);
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    let tells = cx.extra(kind::KERNEL, r.kernel, |e| e.kernel.as_ref().is_some_and(|k| k.tells_arguments))?;
    if !tells {
        // The driver's answer comes first if there is no such argument.
        let asked = cl::KERNEL_ARG_ADDRESS_QUALIFIER;
        // SAFETY: a live kernel; only asked whether there is an answer.
        cx.status(unsafe { f(kernel, r.arg_index, asked, 0, null_mut(), null_mut()) })?;
        return Err(cl::KERNEL_ARG_INFO_NOT_AVAILABLE);
    }
    // SAFETY: a live kernel; buffers are as long as said.
    cx.info(r.param, &[], |size, value, ret| unsafe { f(kernel, r.arg_index, r.param, size, value, ret) })
}

/// Names of types that are passed by value. Others may be defined by the kernel's source.
fn is_plain(name: &str) -> bool {
    let base = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let whole = ["bool", "half", "float", "double", "size_t", "ptrdiff_t", "intptr_t", "uintptr_t"];
    let integers = ["char", "short", "int", "long"];
    whole.contains(&base)
        || integers.contains(&base)
        || integers.contains(&base.strip_prefix('u').unwrap_or(base))
}

/// A second kernel like this one, to try arguments on.
fn like(cx: &Cx<'_>, kernel: Handle) -> Result<Handle, i32> {
    let (info, create) = (native!(cx, clGetKernelInfo), native!(cx, clCreateKernel));
    let named = cl::KERNEL_FUNCTION_NAME;
    // SAFETY: a live kernel; buffers are as long as said.
    let (status, mut name) = value(&|size, value, ret| unsafe { info(kernel, named, size, value, ret) });
    cx.status(status)?;
    name.push(0);
    let mut program: Handle = null_mut();
    let to = (&raw mut program).cast();
    // SAFETY: a live kernel; room for a handle.
    cx.status(unsafe { info(kernel, cl::KERNEL_PROGRAM, HANDLE, to, null_mut()) })?;
    let mut code = 0;
    // SAFETY: the kernel's program, and a string with its end.
    let made = unsafe { create(program, name.as_ptr().cast(), &mut code) };
    if made.is_null() { Err(code) } else { Ok(made) }
}

/// The parameters of a kernel. If the driver tells nothing, or names a type that the source defines, the server tries a null address: the driver
/// accepts one for a buffer, and for nothing else.
fn parameters(cx: &Cx<'_>, kernel: Handle) -> Result<Arc<[Parameter]>, i32> {
    const ADDRESS: u32 = cl::KERNEL_ARG_ADDRESS_QUALIFIER;
    const GLOBAL: u32 = cl::KERNEL_ARG_ADDRESS_GLOBAL;
    const LOCAL: u32 = cl::KERNEL_ARG_ADDRESS_LOCAL;
    const CONSTANT: u32 = cl::KERNEL_ARG_ADDRESS_CONSTANT;
    let (info, set) = (native!(cx, clGetKernelInfo), native!(cx, clSetKernelArg));
    let ask = cx.native().clGetKernelArgInfo;
    let mut count = 0u32;
    let to = (&raw mut count).cast();
    // SAFETY: a live kernel; room for a number.
    cx.status(unsafe { info(kernel, cl::KERNEL_NUM_ARGS, 4, to, null_mut()) })?;
    let trial = like(cx, kernel)?;
    let null_is = |index: u32, bytes: *const c_void| {
        // SAFETY: a kernel of ours; null, or as many bytes as said.
        (unsafe { set(trial, index, HANDLE, bytes) }) == wire::SUCCESS
    };
    let tried = |index: u32, otherwise: Parameter| {
        if !null_is(index, null()) {
            otherwise
        } else if null_is(index, [0u8; HANDLE].as_ptr().cast()) {
            Parameter::Memory
        } else {
            // Local memory takes no value.
            Parameter::Value
        }
    };
    let declared = |index: u32| {
        let Some(ask) = ask else { return Parameter::Unknown };
        let mut space = 0u32;
        // SAFETY: a live kernel; room for a number.
        let told = unsafe { ask(kernel, index, ADDRESS, 4, (&raw mut space).cast(), null_mut()) };
        let named = cl::KERNEL_ARG_TYPE_NAME;
        // SAFETY: a live kernel; buffers are as long as said.
        let (named, name) = value(&|size, value, ret| unsafe { ask(kernel, index, named, size, value, ret) });
        let name = String::from_utf8_lossy(&name);
        match (told, space, named, name.trim_end_matches('\0')) {
            (0, GLOBAL | CONSTANT, ..) => Parameter::Memory,
            (0, LOCAL, ..) => Parameter::Value,
            (0, _, 0, "sampler_t") => Parameter::Sampler,
            (0, _, 0, "queue_t") => Parameter::Queue,
            (0, _, 0, plain) if is_plain(plain) => Parameter::Value,
            (0, ..) => tried(index, Parameter::Value),
            _ => tried(index, Parameter::Unknown),
        }
    };
    let found = (0..count).map(declared).collect();
    cx.cl.release_native(kind::KERNEL, trial as usize);
    Ok(found)
}

fn parameter(cx: &Cx<'_>, id: u64, kernel: Handle, index: u32) -> Result<Option<Parameter>, i32> {
    let of = |all: &Arc<[Parameter]>| all.get(index as usize).copied();
    let known = |e: &Extra| e.kernel.as_ref().and_then(|k| k.parameters.as_ref()).map(of);
    if let Some(known) = cx.extra(kind::KERNEL, id, known)? {
        return Ok(known);
    }
    let found = parameters(cx, kernel)?;
    let wanted = of(&found);
    cx.with_kernel(id, |k| k.parameters = Some(found))?;
    Ok(wanted)
}

/// Returns whether an address is mapped in this process: only then could a driver follow it. What a driver allocates is mapped without the server's knowledge,
/// so the kernel is asked; by a call that the worker's filter leaves to it ([`crate::wall::calls`] answers msync itself), and where it doesn't say that
/// nothing is there, something is.
fn is_mapped(address: u64) -> bool {
    let (page, mut is_in_memory) = (address & !4095, 0_u8);
    // SAFETY: asks about a page, by its number only; room for the answer of one page.
    let told = unsafe { libc::mincore(page as *mut c_void, 4096, &mut is_in_memory) };
    let is_free = || std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM);
    address != 0 && (told == 0 || !is_free())
}

/// The eight bytes for the driver, of eight bytes of the client that name an object (or not: 0).
fn eight_bytes(
    cx: &Cx<'_>,
    parameter: Parameter,
    value: [u8; HANDLE],
    object: u64,
) -> Result<[u8; HANDLE], i32> {
    let null = value == [0; HANDLE];
    let native = |kind: u32, invalid: i32| match cx.get(kind, object) {
        Ok(native) => Ok((native as usize).to_ne_bytes()),
        Err(code) if code == kind::invalid(kind) => Err(invalid),
        Err(code) => Err(code),
    };
    match parameter {
        Parameter::Value => Ok(value),
        // No object: what becomes of it is the driver's to say.
        Parameter::Memory | Parameter::Sampler if null => Ok(value),
        Parameter::Memory => native(kind::MEM, kind::invalid(kind::MEM)),
        Parameter::Sampler => native(kind::SAMPLER, kind::invalid(kind::SAMPLER)),
        Parameter::Queue => native(kind::QUEUE, cl::INVALID_DEVICE_QUEUE),
        Parameter::Unknown if object != 0 => {
            let kinds = [kind::MEM, kind::SAMPLER, kind::QUEUE];
            let found = kinds.into_iter().find_map(|k| cx.get(k, object).ok());
            found.map(|native| (native as usize).to_ne_bytes()).ok_or(cl::INVALID_ARG_VALUE)
        }
        Parameter::Unknown if is_mapped(u64::from_ne_bytes(value)) => {
            say!(
                "tombolo accel: an argument of 8 bytes is an address of this process, and the driver doesn't say whether the kernel takes an object there; refused. A program that is built from its source has no such arguments"
            );
            Err(cl::INVALID_ARG_VALUE)
        }
        Parameter::Unknown => Ok(value),
    }
}

fn set(cx: &Cx<'_>, r: &wire::SetKernelArg<'_>) -> Done {
    let f = native!(cx, clSetKernelArg);
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    let size = usize::try_from(r.size).map_err(|_| cl::INVALID_VALUE)?;
    if r.how == 1 {
        // SAFETY: a live kernel; no value.
        return cx.status(unsafe { f(kernel, r.index, size, null()) });
    }
    if r.value.len() != size {
        return Err(cl::INVALID_VALUE);
    }
    let object = if r.how == 2 { r.handle } else { 0 };
    let mut bytes = [0; HANDLE];
    let value = match parameter(cx, r.kernel, kernel, r.index)? {
        // The driver says what is wrong with the index, before it looks at the value.
        None | Some(Parameter::Value) => r.value.as_ptr(),
        Some(Parameter::Unknown) if size != HANDLE => r.value.as_ptr(),
        Some(parameter) => {
            let value = <[u8; HANDLE]>::try_from(r.value).map_err(|_| cl::INVALID_ARG_SIZE)?;
            bytes = eight_bytes(cx, parameter, value, object)?;
            bytes.as_ptr()
        }
    };
    let _outlives = &bytes;
    // SAFETY: a live kernel; the value has size bytes, which name a live object where the driver takes one.
    cx.status(unsafe { f(kernel, r.index, size, value.cast()) })
}

/// Tries on a second kernel whether it takes a value of a size, for a client that doesn't know yet how much of its program's memory to read.
fn takes_size(cx: &Cx<'_>, r: &wire::SetKernelArg<'_>) -> Done {
    let f = native!(cx, clSetKernelArg);
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    let size = usize::try_from(r.size).ok().filter(|size| *size <= MOST).ok_or(cl::INVALID_ARG_SIZE)?;
    match parameter(cx, r.kernel, kernel, r.index)? {
        Some(Parameter::Memory | Parameter::Sampler | Parameter::Queue) if size != HANDLE => {
            return Err(cl::INVALID_ARG_SIZE);
        }
        _ => {}
    }
    let trial = like(cx, kernel)?;
    // SAFETY: a kernel of ours; as many zeroes as said, which name no object.
    let status = unsafe { f(trial, r.index, size, vec![0_u8; size].as_ptr().cast()) };
    cx.cl.release_native(kind::KERNEL, trial as usize);
    cx.status(status)
}

pub(crate) fn set_kernel_arg(cx: &mut Cx<'_>, r: &wire::SetKernelArg<'_>) -> Done {
    if r.how == 3 {
        return takes_size(cx, r);
    }
    let done = set(cx, r);
    match done {
        Err(code) if !cx.waited => {
            cx.cl.arguments_failed.store(true, Ordering::Release);
            cx.with_kernel(r.kernel, |k| k.failed.insert(r.index, code))?;
        }
        Ok(()) if cx.cl.arguments_failed.load(Ordering::Acquire) => {
            cx.with_kernel(r.kernel, |k| k.failed.remove(&r.index))?;
        }
        _ => {}
    }
    done
}

impl Cx<'_> {
    fn with_kernel<T>(&self, kernel: u64, f: impl FnOnce(&mut Kernel) -> T) -> Result<T, i32> {
        let mut table = lock(&self.cl.table);
        let extra = table.extra_mut(kind::KERNEL, kernel).map_err(|e| Self::fault(kind::KERNEL, e))?;
        Ok(f(extra.kernel.get_or_insert_default()))
    }

    /// No argument of a kernel is an older one because setting it failed unheard.
    pub fn check_args(&self, kernel: u64) -> Result<(), i32> {
        if !self.cl.arguments_failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let failed = self.extra(kind::KERNEL, kernel, |e| {
            e.kernel.as_ref().and_then(|k| k.failed.first_key_value().map(|(_, code)| *code))
        })?;
        failed.map_or(Ok(()), Err)
    }
}

pub(crate) fn get_kernel_sub_group_info(cx: &mut Cx<'_>, r: &wire::GetKernelSubGroupInfo<'_>) -> Done {
    let f = native!(cx, clGetKernelSubGroupInfo);
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    let device = cx.maybe(kind::DEVICE, r.device)?;
    let (len, input) = (r.input.len(), super::program::pointer_or_null(r.input));
    // SAFETY: live handles; lengths as said.
    cx.info(r.param, &[], |size, value, ret| unsafe {
        f(kernel, device, r.param, len, input.cast(), size, value.cast_const(), ret)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_by_value_are_told_from_those_that_a_source_defines() {
        for plain in ["int", "uint", "ulong", "uchar16", "float4", "double", "size_t", "half", "long2"] {
            assert!(is_plain(plain), "{plain}");
        }
        for defined in ["u64", "sampler_t", "image2d_t", "my", "int*", "queue_t", "", "16"] {
            assert!(!is_plain(defined), "{defined}");
        }
    }

    #[test]
    fn an_address_is_mapped_or_not_also_behind_the_filter_of_system_calls() {
        let told = || {
            assert!(is_mapped(std::ptr::from_ref(&0u8) as u64));
            for free in [0, 1, 1 << 20, 0x4141_4141_4141, u64::MAX, 1 << 63] {
                assert!(!is_mapped(free), "{free:#x}");
            }
        };
        told();
        let behind = std::thread::spawn(move || {
            crate::wall::calls::filter_this_thread().expect("filtered");
            told();
        });
        behind.join().expect("the same behind the filter");
    }
}
