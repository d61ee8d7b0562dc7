// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names, versions, codes, export tables.

use super::exported;
use crate::rt::{self, Handle, Out};
use crate::system::{initialize, system};
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::sync::OnceLock;
use tombolo_accel_spec::cuda::{CODES, cu};
use tombolo_cuda_tables::{proof, tables};

/// The name and the text of each code.
fn texts() -> &'static HashMap<i32, [CString; 2]> {
    static TEXTS: OnceLock<HashMap<i32, [CString; 2]>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let text = |name: &str| match name.strip_prefix("CUDA_ERROR_") {
            Some(words) => words.to_lowercase().replace('_', " "),
            None => "no error".into(),
        };
        let both = |name: &str| [name.to_string(), text(name)].map(|s| CString::new(s).unwrap_or_default());
        CODES.iter().map(|(code, name)| (*code, both(name))).collect()
    })
}

fn text(code: i32, which: usize, to: &Out<*const c_char>) -> Result<(), i32> {
    let found = texts().get(&code).map(|both| both[which].as_ptr());
    to.set(found.unwrap_or(std::ptr::null()))?;
    if found.is_some() { Ok(()) } else { Err(cu::CUDA_ERROR_INVALID_VALUE) }
}

/// The function that a program means with a name. Null where there is none: the second is why.
fn look_up(name: &[u8], version: i32, flags: u64) -> Result<(*const c_void, u32), i32> {
    let threaded = u64::from(cu::CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    if flags > 3 || version < 0 {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let own = system().map_or(i32::MAX, |system| system.version);
    let name = std::str::from_utf8(name).map_err(|_| cu::CUDA_ERROR_NOT_FOUND)?;
    Ok(match tombolo_cuda_tables::find(name, version.min(own) as u32, flags & threaded != 0) {
        Ok(symbol) => (crate::stubs::by_name(symbol.as_bytes()), cu::CU_GET_PROC_ADDRESS_SUCCESS),
        Err(why) => (std::ptr::null(), why),
    })
}

fn devices() -> Vec<proof::Device> {
    let devices = system().map_or(&[][..], |system| &system.devices);
    devices.iter().map(|d| proof::Device { uuid: d.uuid, place: d.place() }).collect()
}

unsafe extern "C" fn retain(context: *mut Handle, device: i32) -> i32 {
    // SAFETY: the runtime has room for a handle there.
    unsafe { super::cuDevicePrimaryCtxRetain(Out::of(context), device) }
}

unsafe extern "C" fn load(module: *mut Handle, image: *const c_void) -> i32 {
    // SAFETY: the runtime has room for a handle there, and an image.
    unsafe { super::cuModuleLoadData(Out::of(module), image) }
}

exported! {
    fn cuGetErrorString(code: i32, to: Out<*const c_char>) {
        text(code, 1, &to)
    }

    fn cuGetErrorName(code: i32, to: Out<*const c_char>) {
        text(code, 0, &to)
    }

    fn cuInit(flags: u32) {
        if flags == 0 { initialize() } else { Err(cu::CUDA_ERROR_INVALID_VALUE) }
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        version.set(system()?.version)
    }

    fn cuGetProcAddress(symbol: *const c_char, pfn: Out<*const c_void>, version: i32, flags: u64) {
        // SAFETY: a name, as the API says.
        let (function, why) = look_up(unsafe { rt::string(symbol) }?, version, flags)?;
        pfn.set(function)?;
        if why == cu::CU_GET_PROC_ADDRESS_SUCCESS { Ok(()) } else { Err(cu::CUDA_ERROR_NOT_FOUND) }
    }

    fn cuGetProcAddress_v2(symbol: *const c_char, pfn: Out<*const c_void>, version: i32, flags: u64, status: Out<u32>) {
        // SAFETY: a name, as the API says.
        let (function, why) = look_up(unsafe { rt::string(symbol) }?, version, flags)?;
        pfn.set(function)?;
        status.offer(why);
        let told = why == cu::CU_GET_PROC_ADDRESS_SUCCESS || !status.is_null();
        if told { Ok(()) } else { Err(cu::CUDA_ERROR_NOT_FOUND) }
    }

    fn cuGetExportTable(table: Out<*const c_void>, uuid: *const c_void) {
        if uuid.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: a CUuuid, as the API says.
        let uuid: [u8; 16] = unsafe { uuid.cast::<[u8; 16]>().read_unaligned() };
        let version = || system().map_or(0, |system| system.version as u32);
        let context = || rt::top().map_or(0, |context| context.handle);
        let found = tables::find(uuid, tables::Driver { version, devices, context, retain, load });
        table.set(found)?;
        if found.is_null() { Err(cu::CUDA_ERROR_INVALID_VALUE) } else { Ok(()) }
    }
}
