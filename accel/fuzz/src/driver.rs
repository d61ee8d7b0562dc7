// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A driver that takes every call. Handles are one address; transfers touch the first and the last byte that they were given.

use std::ffi::{CStr, c_void};

type Handle = *mut c_void;

/// The object that every handle points to.
static OBJECT: u64 = 0;

fn object() -> Handle {
    std::ptr::from_ref(&OBJECT).cast_mut().cast()
}

// Called with more arguments than these take: the caller removes them, on every system that this runs on.
extern "C" fn done() -> i32 {
    0
}

extern "C" fn made() -> Handle {
    object()
}

unsafe extern "C" fn list(n: u32, to: *mut Handle, count: *mut u32) {
    // SAFETY: null, or room as the API says.
    unsafe {
        if n > 0 && !to.is_null() {
            to.write(object());
        }
        if !count.is_null() {
            count.write(1);
        }
    }
}

unsafe extern "C" fn platforms(n: u32, to: *mut Handle, count: *mut u32) -> i32 {
    // SAFETY: as the API says.
    unsafe { list(n, to, count) };
    0
}

unsafe extern "C" fn devices(_platform: Handle, _type: u64, n: u32, to: *mut Handle, count: *mut u32) -> i32 {
    // SAFETY: as the API says.
    unsafe { list(n, to, count) };
    0
}

/// Answers a query with a value.
///
/// # Safety
/// `to` is null or has room for `size` bytes; `ret` is null or has room for its value.
unsafe fn answer<T>(value: T, size: usize, to: *mut c_void, ret: *mut usize) -> i32 {
    // SAFETY: as the caller promises.
    unsafe {
        if size >= size_of::<T>() && !to.is_null() {
            to.cast::<T>().write_unaligned(value);
        }
        if !ret.is_null() {
            ret.write(size_of::<T>());
        }
    }
    0
}

/// A property: eight bytes, which name a device where devices are asked for.
unsafe extern "C" fn property(
    _object: Handle,
    _param: u32,
    size: usize,
    to: *mut c_void,
    ret: *mut usize,
) -> i32 {
    // SAFETY: null, or room as the API says.
    unsafe { answer(object(), size, to, ret) }
}

/// The status of an event, which has ended; 4 bytes.
unsafe extern "C" fn event(
    _event: Handle,
    _param: u32,
    size: usize,
    to: *mut c_void,
    ret: *mut usize,
) -> i32 {
    // SAFETY: null, or room as the API says.
    unsafe { answer(0i32, size, to, ret) }
}

unsafe extern "C" fn read(
    _q: Handle,
    _m: Handle,
    _blocking: u32,
    _at: usize,
    size: usize,
    to: *mut u8,
) -> i32 {
    if size > 0 {
        // SAFETY: the server checked the range; that it did is what is tested here.
        unsafe {
            to.write_volatile(1);
            to.add(size - 1).write_volatile(1);
        }
    }
    0
}

unsafe extern "C" fn write(
    _q: Handle,
    _m: Handle,
    _blocking: u32,
    _at: usize,
    size: usize,
    from: *const u8,
) -> i32 {
    if size > 0 {
        // SAFETY: as above.
        unsafe {
            from.read_volatile();
            from.add(size - 1).read_volatile();
        }
    }
    0
}

/// Calls back at once: for the status of an event, or for the end of a memory object.
unsafe extern "C" fn at_once(
    object: Handle,
    _status: i32,
    f: extern "C" fn(Handle, i32, Handle),
    user: Handle,
) -> i32 {
    f(object, 0, user);
    0
}

unsafe extern "C" fn gone(object: Handle, f: extern "C" fn(Handle, Handle), user: Handle) -> i32 {
    f(object, user);
    0
}

/// The function of a name.
pub fn find(name: &CStr) -> *mut c_void {
    let name = name.to_str().unwrap_or_default();
    let makes =
        name.starts_with("clCreate") && !matches!(name, "clCreateKernelsInProgram" | "clCreateSubDevices");
    match name {
        "clGetPlatformIDs" => platforms as *mut c_void,
        "clGetDeviceIDs" => devices as *mut c_void,
        "clGetEventInfo" => event as *mut c_void,
        "clSetEventCallback" => at_once as *mut c_void,
        "clSetMemObjectDestructorCallback" => gone as *mut c_void,
        "clEnqueueReadBuffer" => read as *mut c_void,
        "clEnqueueWriteBuffer" => write as *mut c_void,
        // Properties with five parameters; the others have more, and tell nothing.
        "clGetPlatformInfo"
        | "clGetDeviceInfo"
        | "clGetContextInfo"
        | "clGetCommandQueueInfo"
        | "clGetMemObjectInfo"
        | "clGetImageInfo"
        | "clGetPipeInfo"
        | "clGetSamplerInfo"
        | "clGetProgramInfo"
        | "clGetKernelInfo" => property as *mut c_void,
        "clCloneKernel" | "clLinkProgram" | "clEnqueueMapBuffer" | "clEnqueueMapImage" => made as *mut c_void,
        // Not tried here: their memory is the driver's own.
        _ if name.starts_with("clSVM") || name.contains("SVM") => std::ptr::null_mut(),
        _ if makes => made as *mut c_void,
        _ => done as *mut c_void,
    }
}
