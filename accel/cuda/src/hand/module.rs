// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Modules, libraries, functions and kernels.

use super::exported;
use crate::rt::{self, ARENA, Handle, Id, New, Obj, Out};
use crate::state::{Body, Detail, Function, Range, ranges};
use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tombolo_accel_spec::code;
use tombolo_accel_spec::cuda::{self as wire, cu, kind};
use tombolo_accel_spec::wire::Decoder;

/// What was found in modules and libraries, by what it was found in, its name and the context: the same question has the same answer, and what was found ends with
/// what it was found in.
type Found = HashMap<(usize, Vec<u8>, u64), Obj>;

static FOUND: Mutex<Option<Found>> = Mutex::new(None);

fn found() -> MutexGuard<'static, Option<Found>> {
    FOUND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The object of this name in a module or a library; asks for it once.
fn find(from: Handle, name: &[u8], make: impl FnOnce() -> Result<New, i32>) -> Result<Handle, i32> {
    let key = (from as usize, name.to_vec(), rt::current());
    if let Some(known) = found().get_or_insert_default().get(&key) {
        return Ok(known.handle());
    }
    let made = make()?.keep();
    found().get_or_insert_default().insert(key, made);
    Ok(made.handle())
}

/// Ends a module or a library, and what was found in it.
fn unload(object: Obj) {
    let handle = object.handle() as usize;
    let mut parts = Vec::new();
    found().get_or_insert_default().retain(|(from, ..), part| {
        let stays = *from != handle;
        if !stays {
            parts.push(*part);
        }
        stays
    });
    parts.into_iter().for_each(unload);
    ARENA.release(object);
}

fn function(from: Handle, name: &[u8]) -> Body {
    let name = [name, &[0]].concat();
    let function = Function::new(name, from as usize);
    let context = rt::top().map_or(0, |context| context.handle);
    Body { context, detail: Detail::Function(Box::new(function)) }
}

/// The function or kernel that a handle names.
pub fn callable(handle: Handle) -> Result<(Obj, &'static Function), i32> {
    let object = rt::object(handle, kind::FUNCTION).or_else(|_| rt::object(handle, kind::KERNEL))?;
    match &object.body().detail {
        Detail::Function(function) => Ok((object, function)),
        _ => Err(cu::CUDA_ERROR_INVALID_HANDLE),
    }
}

/// The bytes of an image at a program's address: what a wrapper leads to, or the image itself.
///
/// # Safety
/// The address is that of an image, or null.
unsafe fn image<'a>(address: *const c_void) -> Result<&'a [u8], i32> {
    let mut start = address.cast::<u8>();
    if start.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: at least four bytes, as the caller promises.
    if unsafe { start.cast::<u32>().read_unaligned() } == code::WRAPPER {
        // SAFETY: magic, version, address: as the caller promises.
        start = unsafe { start.add(8).cast::<*const u8>().read_unaligned() };
    }
    let read = move |at: u64, len: u64| {
        // SAFETY: the image tells of no bytes that it doesn't have, as the caller promises.
        Some(unsafe { std::slice::from_raw_parts(start.add(at as usize), len as usize) })
    };
    let len = code::length(&read).ok_or(cu::CUDA_ERROR_INVALID_IMAGE)?;
    read(0, len).ok_or(cu::CUDA_ERROR_INVALID_IMAGE)
}

/// The options of a compiler that are numbers. A program's room for texts is given back empty.
///
/// # Safety
/// `options` and `values` are null, or point to `count` of them.
unsafe fn options(
    count: u32,
    options: *const u32,
    values: *const *mut c_void,
) -> Result<(Vec<u32>, Vec<u64>), i32> {
    let (mut numbers, mut their_values) = (Vec::new(), Vec::new());
    if count > 0 && (options.is_null() || values.is_null()) {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let mut buffer_follows = None;
    for i in 0..count as usize {
        // SAFETY: as the caller promises.
        let (option, value) = unsafe { (options.add(i).read(), values.add(i).read()) };
        match option {
            cu::CU_JIT_INFO_LOG_BUFFER | cu::CU_JIT_ERROR_LOG_BUFFER => buffer_follows = Some(value),
            cu::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES | cu::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES => {
                let buffer = buffer_follows.take().filter(|buffer| !buffer.is_null() && value as usize > 0);
                if let Some(buffer) = buffer {
                    // SAFETY: the program has room for at least one byte there, as it says.
                    unsafe { buffer.cast::<u8>().write(0) };
                }
            }
            cu::CU_JIT_WALL_TIME | cu::CU_JIT_THREADS_PER_BLOCK => {}
            _ => {
                numbers.push(option);
                their_values.push(value as u64);
            }
        }
    }
    Ok((numbers, their_values))
}

/// # Safety
/// The API's own rules for cuModuleLoadDataEx.
unsafe fn load_module(
    module: &Out<Handle>,
    image_at: *const c_void,
    count: u32,
    names: *const u32,
    values: *const *mut c_void,
) -> Result<(), i32> {
    // SAFETY: as the caller promises.
    let (bytes, (options, values)) = unsafe { (image(image_at)?, options(count, names, values)?) };
    let new = rt::fresh(kind::MODULE, module.is_null())?;
    let (options, values) = (options.into(), values.into());
    rt::call(&wire::ModuleLoadDataEx {
        image: bytes,
        options,
        values,
        new: new.id(),
        current: rt::current(),
    })?;
    module.set(new.publish())
}

/// # Safety
/// The API's own rules for cuLibraryLoadData.
unsafe fn load_library(
    library: &Out<Handle>,
    code_at: *const c_void,
    jit: (*const u32, *const *mut c_void, u32),
    own: (*const u32, u32),
) -> Result<(), i32> {
    // SAFETY: as the caller promises.
    let (bytes, (options, values)) = unsafe { (image(code_at)?, options(jit.2, jit.0, jit.1)?) };
    for i in 0..own.1 as usize {
        // SAFETY: as the caller promises.
        let option = unsafe { own.0.add(i).read() };
        // Only that the program keeps the image is known here, and needs nothing.
        if option != cu::CU_LIBRARY_BINARY_IS_PRESERVED {
            return Err(wire::UNSUPPORTED);
        }
    }
    let new = rt::fresh(kind::LIBRARY, library.is_null())?;
    rt::call(&wire::LibraryLoadData {
        code: bytes,
        options: options.into(),
        values: values.into(),
        new: new.id(),
    })?;
    library.set(new.publish())
}

/// A file of the program's, with a zero behind it.
///
/// # Safety
/// `name` is null or a C string.
unsafe fn file(name: *const c_char) -> Result<Vec<u8>, i32> {
    // SAFETY: as the caller promises.
    let name = OsStr::from_bytes(unsafe { rt::string(name) }?);
    let mut bytes = std::fs::read(name).map_err(|_| cu::CUDA_ERROR_FILE_NOT_FOUND)?;
    // PTX ends with it; to others it does not belong.
    bytes.push(0);
    Ok(bytes)
}

/// An address and a length that the server told, which the program now knows.
fn global(reply: &[u8], address: &Out<u64>, bytes: &Out<usize>) -> Result<(), i32> {
    let mut from = Decoder::new(reply);
    let (start, len) = from.u64().and_then(|start| Ok((start, from.u64()?))).map_err(|_| wire::LOST)?;
    let context = rt::top().map_or(0, |context| context.handle);
    ranges().insert(Range { start, len, context, window: None, flags: 0 });
    address.offer(start);
    bytes.offer(len as usize);
    Ok(())
}

/// Offset and size of a parameter.
fn parameter(handle: Handle, index: usize, offset: &Out<usize>, size: &Out<usize>) -> Result<(), i32> {
    let (_, function) = callable(handle)?;
    let (at, len) = function.parameters().get(index).ok_or(cu::CUDA_ERROR_INVALID_VALUE)?;
    offset.set(*at as usize)?;
    size.offer(*len as usize);
    Ok(())
}

fn name(handle: Handle, to: &Out<*const c_char>) -> Result<(), i32> {
    let (_, function) = callable(handle)?;
    to.set(CStr::from_bytes_with_nul(&function.name).map_or(std::ptr::null(), CStr::as_ptr))
}

exported! {
    fn cuModuleLoad(module: Out<Handle>, file_name: *const c_char) {
        // SAFETY: a name, as the API says.
        let bytes = unsafe { file(file_name) }?;
        // SAFETY: the bytes are the file's; one that says it is longer is refused by the server's reading of what came.
        unsafe { load_module(&module, checked(&bytes)?, 0, std::ptr::null(), std::ptr::null()) }
    }

    fn cuModuleLoadData(module: Out<Handle>, image: *const c_void) {
        // SAFETY: an image, as the API says.
        unsafe { load_module(&module, image, 0, std::ptr::null(), std::ptr::null()) }
    }

    fn cuModuleLoadFatBinary(module: Out<Handle>, image: *const c_void) {
        // SAFETY: an image, as the API says.
        unsafe { load_module(&module, image, 0, std::ptr::null(), std::ptr::null()) }
    }

    fn cuModuleLoadDataEx(module: Out<Handle>, image: *const c_void, count: u32, options: *const u32, values: *const *mut c_void) {
        // SAFETY: an image and so many options, as the API says.
        unsafe { load_module(&module, image, count, options, values) }
    }

    fn cuModuleUnload(module: Handle) {
        unload(rt::object(module, kind::MODULE)?);
        Ok(())
    }

    fn cuModuleGetFunction(to: Out<Handle>, module: Handle, name: *const c_char) {
        // SAFETY: a name, as the API says.
        let name = unsafe { rt::string(name) }?;
        let hmod = rt::object(module, kind::MODULE)?.id();
        if to.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        to.set(find(module, name, || {
            let current = rt::current();
            asked(kind::FUNCTION, function(module, name), |new| {
                rt::call(&wire::ModuleGetFunction { hmod, name, new, current })
            })
        })?)
    }

    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, module: Handle, name: *const c_char) {
        // SAFETY: a name, as the API says.
        let name = unsafe { rt::string(name) }?;
        let hmod = rt::object(module, kind::MODULE)?.id();
        global(&rt::call(&wire::ModuleGetGlobalV2 { hmod, name, current: rt::current() })?, &address, &bytes)
    }

    fn cuLibraryLoadData(library: Out<Handle>, code: *const c_void, jit: *const u32, jit_values: *const *mut c_void, jit_count: u32, own: *const u32, _values: *const *mut c_void, count: u32) {
        // SAFETY: an image and so many options, as the API says.
        unsafe { load_library(&library, code, (jit, jit_values, jit_count), (own, count)) }
    }

    fn cuLibraryLoadFromFile(library: Out<Handle>, file_name: *const c_char, jit: *const u32, jit_values: *const *mut c_void, jit_count: u32, own: *const u32, _values: *const *mut c_void, count: u32) {
        // SAFETY: a name, as the API says.
        let bytes = unsafe { file(file_name) }?;
        // SAFETY: as for cuModuleLoad; so many options, as the API says.
        unsafe { load_library(&library, checked(&bytes)?, (jit, jit_values, jit_count), (own, count)) }
    }

    fn cuLibraryUnload(library: Handle) {
        unload(rt::object(library, kind::LIBRARY)?);
        Ok(())
    }

    fn cuLibraryGetKernel(to: Out<Handle>, library: Handle, name: *const c_char) {
        // SAFETY: a name, as the API says.
        let name = unsafe { rt::string(name) }?;
        let id = rt::object(library, kind::LIBRARY)?.id();
        if to.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        to.set(find(library, name, || {
            asked(kind::KERNEL, function(library, name), |new| {
                rt::call(&wire::LibraryGetKernel { library: id, name, new })
            })
        })?)
    }

    fn cuLibraryGetModule(to: Out<Handle>, library: Handle) {
        let id = rt::object(library, kind::LIBRARY)?.id();
        if to.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        to.set(find(library, b"", || {
            let new = rt::fresh(kind::MODULE, false)?;
            rt::call(&wire::LibraryGetModule { library: id, new: new.id(), current: rt::current() })?;
            Ok(new)
        })?)
    }

    fn cuLibraryGetGlobal(address: Out<u64>, bytes: Out<usize>, library: Handle, name: *const c_char) {
        // SAFETY: a name, as the API says.
        let name = unsafe { rt::string(name) }?;
        let id = rt::object(library, kind::LIBRARY)?.id();
        global(&rt::call(&wire::LibraryGetGlobal { library: id, name, current: rt::current() })?, &address, &bytes)
    }

    fn cuKernelGetFunction(to: Out<Handle>, kernel: Handle) {
        let object = rt::object(kernel, kind::KERNEL)?;
        let (_, known) = callable(kernel)?;
        if to.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        let name = known.name.strip_suffix(b"\0").unwrap_or(&known.name);
        to.set(find(kernel, name, || {
            let current = rt::current();
            asked(kind::FUNCTION, function(kernel, name), |new| {
                rt::call(&wire::KernelGetFunction { kernel: object.id(), new, current })
            })
        })?)
    }

    fn cuKernelGetLibrary(to: Out<Handle>, kernel: Handle) {
        rt::object(kernel, kind::KERNEL)?;
        to.set(callable(kernel)?.1.from as Handle)
    }

    fn cuKernelGetName(to: Out<*const c_char>, kernel: Handle) {
        name(kernel, &to)
    }

    fn cuKernelGetParamInfo(kernel: Handle, index: usize, offset: Out<usize>, size: Out<usize>) {
        parameter(kernel, index, &offset, &size)
    }

    fn cuKernelGetParamCount(kernel: Handle, count: Out<usize>) {
        count.set(callable(kernel)?.1.parameters().len())
    }

    fn cuFuncGetName(to: Out<*const c_char>, function: Handle) {
        name(function, &to)
    }

    fn cuFuncGetModule(to: Out<Handle>, function: Handle) {
        let from = callable(function)?.1.from as Handle;
        // The module of a function that was found through a kernel is its library's.
        match rt::object(from, kind::MODULE) {
            Ok(module) => to.set(module.handle()),
            // SAFETY: room for a handle, as the API says.
            Err(_) => super::result(unsafe { cuLibraryGetModule(to, callable(from)?.1.from as Handle) }),
        }
    }

    fn cuFuncGetParamInfo(function: Handle, index: usize, offset: Out<usize>, size: Out<usize>) {
        parameter(function, index, &offset, &size)
    }

    fn cuFuncGetParamCount(function: Handle, count: Out<usize>) {
        count.set(callable(function)?.1.parameters().len())
    }
}

/// A new function or kernel, with the parameters that the server tells of it.
fn asked(kind: u32, body: Body, ask: impl FnOnce(u64) -> Result<Vec<u8>, i32>) -> Result<New, i32> {
    let new = rt::new_object(kind, body)?;
    let reply = ask(new.id())?;
    let numbers = Decoder::new(&reply).u64s().map_err(|_| wire::LOST)?;
    if let Some(Detail::Function(function)) = new.object().map(|object| &object.body().detail) {
        function.parameters.get_or_init(|| numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect());
    }
    Ok(new)
}

/// The address of a file's bytes, if they are one whole image.
fn checked(bytes: &[u8]) -> Result<*const c_void, i32> {
    let without_zero = &bytes[..bytes.len() - 1];
    if code::is_whole(without_zero) || code::is_whole(bytes) {
        return Ok(bytes.as_ptr().cast());
    }
    Err(cu::CUDA_ERROR_INVALID_IMAGE)
}
