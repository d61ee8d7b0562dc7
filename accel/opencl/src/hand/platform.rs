// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Platforms, devices, and the entry points of the ICD loader.

use crate::rt::{self, ARENA, Handle, Id};
use crate::state::{As, Body, Device};
use std::ffi::{c_char, c_void};
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_accel_spec::wire::Decoder;

/// Writes a list the way OpenCL returns lists: as many as there is room for, and their count.
unsafe fn give(objects: &[rt::Obj], room: u32, to: *mut Handle, count: *mut u32) {
    // SAFETY: the program passes room for `room` handles and for a count, or null.
    unsafe {
        if !to.is_null() {
            for (i, object) in objects.iter().take(room as usize).enumerate() {
                to.add(i).write(object.handle());
            }
        }
        rt::write(count, objects.len() as u32);
    }
}

/// The loader's entry point: the platforms of this driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clIcdGetPlatformIDsKHR(n: u32, platforms: *mut Handle, count: *mut u32) -> i32 {
    rt::status(|| {
        if (platforms.is_null() && count.is_null()) || (n == 0 && !platforms.is_null()) {
            return Err(cl::INVALID_VALUE);
        }
        let found = rt::platforms()?;
        // SAFETY: as the API says.
        unsafe { give(&found, n, platforms, count) };
        if found.is_empty() { Err(cl::PLATFORM_NOT_FOUND_KHR) } else { Ok(()) }
    })
}

/// The platforms of this driver.
pub unsafe extern "C" fn clGetPlatformIDs(n: u32, platforms: *mut Handle, count: *mut u32) -> i32 {
    // SAFETY: the same contract.
    unsafe { clIcdGetPlatformIDsKHR(n, platforms, count) }
}

/// The address of a function; null: none.
unsafe fn function(name: *const c_char) -> *mut c_void {
    // SAFETY: a C string, as the API says.
    let Ok(name) = (unsafe { rt::string(name) }) else { return std::ptr::null_mut() };
    // Extensions that later became a part of the API have its functions.
    let plain = name.strip_suffix(b"KHR").or(name.strip_suffix(b"EXT")).unwrap_or(name);
    let known = [name, plain].map(crate::stubs::by_name);
    known.into_iter().find(|f| !f.is_null()).unwrap_or(std::ptr::null()).cast_mut()
}

/// The loader's other entry point. Its own function of this name comes first where this library calls it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clGetExtensionFunctionAddress(name: *const c_char) -> *mut c_void {
    // SAFETY: as the API says.
    unsafe { function(name) }
}

/// The address of a function by name.
pub unsafe extern "C" fn clGetExtensionFunctionAddressForPlatform(
    platform: Handle,
    name: *const c_char,
) -> *mut c_void {
    if rt::object(platform, kind::PLATFORM).is_err() {
        return std::ptr::null_mut();
    }
    // SAFETY: as the API says.
    unsafe { function(name) }
}

/// The loader loads the driver also by this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clGetPlatformInfo(
    platform: Handle,
    param: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    // SAFETY: the same contract.
    unsafe { crate::stubs::clGetPlatformInfo(platform, param, size, value, size_ret) }
}

pub unsafe extern "C" fn clGetDeviceIDs(
    platform: Handle,
    device_type: u64,
    n: u32,
    devices: *mut Handle,
    count: *mut u32,
) -> i32 {
    rt::status(|| {
        let platform = rt::object(platform, kind::PLATFORM)?;
        if (n == 0 && !devices.is_null()) || (devices.is_null() && count.is_null()) {
            return Err(cl::INVALID_VALUE);
        }
        rt::platforms()?;
        let (status, ids) = rt::ask_once(&wire::GetDeviceIDs { platform: platform.id(), device_type })?;
        if status != wire::SUCCESS {
            return Err(status);
        }
        let ids = Decoder::new(&ids).u64s().map_err(|_| wire::LOST)?;
        let found: Vec<_> = ids.iter().filter_map(|id| ARENA.by_id(*id)).collect();
        // SAFETY: as the API says.
        unsafe { give(&found, n, devices, count) };
        Ok(())
    })
}

pub unsafe extern "C" fn clCreateSubDevices(
    device: Handle,
    properties: *const c_void,
    n: u32,
    out: *mut Handle,
    count: *mut u32,
) -> i32 {
    rt::status(|| {
        let device = rt::object(device, kind::DEVICE)?;
        // SAFETY: a list as the API says; by counts, it has two ends.
        let mut properties = unsafe { properties_of_partition(properties) };
        if properties.is_empty() {
            properties.push(0);
        }
        let platform = device.device()?.platform;
        if out.is_null() != (n == 0) {
            return Err(cl::INVALID_VALUE);
        }
        let wanted = n.min(1024);
        let new = (0..wanted)
            .map(|_| {
                let body = Device { platform, parent: Some(rt::hold(device)) };
                rt::new_object(kind::DEVICE, Body::Device(body))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let ids: Vec<u64> = new.iter().map(|n| n.id()).collect();
        let reply = rt::call(&wire::CreateSubDevices {
            device: device.id(),
            properties: properties.into(),
            new: ids.into(),
        })?;
        let made = Decoder::new(&reply).u32().map_err(|_| wire::LOST)?;
        // SAFETY: room for n handles and a count, as the API says.
        unsafe {
            if !out.is_null() {
                for (i, new) in new.into_iter().enumerate().take(made as usize) {
                    out.add(i).write(new.publish());
                }
            }
            rt::write(count, made);
        }
        Ok(())
    })
}

/// A partition's properties: the list by counts has a list inside that also ends with 0.
unsafe fn properties_of_partition(from: *const c_void) -> Vec<i64> {
    // SAFETY: as the caller promises.
    unsafe {
        if from.is_null() || from.cast::<i64>().read_unaligned() != cl::DEVICE_PARTITION_BY_COUNTS {
            return rt::properties(from, 2);
        }
        let mut out = rt::properties(from, 1);
        out.push(0);
        out
    }
}

/// Counts a reference; root devices aren't counted.
pub unsafe extern "C" fn clRetainDevice(device: Handle) -> i32 {
    rt::status(|| {
        let device = rt::object(device, kind::DEVICE)?;
        if device.device()?.parent.is_some() {
            ARENA.retain(device);
        }
        Ok(())
    })
}

/// Gives a reference up; root devices aren't counted.
pub unsafe extern "C" fn clReleaseDevice(device: Handle) -> i32 {
    rt::status(|| {
        let device = rt::object(device, kind::DEVICE)?;
        if device.device()?.parent.is_some() {
            ARENA.release(device);
        }
        Ok(())
    })
}

/// A hint; the server's compiler stays.
pub unsafe extern "C" fn clUnloadCompiler() -> i32 {
    wire::SUCCESS
}
