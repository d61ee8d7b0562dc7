// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Modules, libraries, functions, kernels; the linker.

use super::super::module::{FUNCTIONS, Logs};
use super::super::{Handle, INVALID_VALUE, array, device, launch, linker, module, offer, put, text};
use super::call_code;
use std::ffi::c_char;

api! {
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
}
