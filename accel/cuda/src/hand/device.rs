// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices, from the snapshot.

use super::exported;
use crate::rt::{self, Out};
use crate::system::{Device, initialized};
use std::ffi::{c_char, c_void};
use tombolo_accel_spec::cuda::cu;

/// A device that the program sees.
pub fn device(ordinal: i32) -> Result<&'static Device, i32> {
    let found = usize::try_from(ordinal).ok().and_then(|n| initialized().ok()?.devices.get(n));
    initialized()?;
    found.ok_or(cu::CUDA_ERROR_INVALID_DEVICE)
}

/// Writes a text and the zero that ends it into a program's room of `len` bytes; what is too long is cut.
fn put_text(text: &[u8], to: *mut c_char, len: i32) -> Result<(), i32> {
    let room =
        usize::try_from(len).ok().and_then(|len| len.checked_sub(1)).ok_or(cu::CUDA_ERROR_INVALID_VALUE)?;
    if to.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let text = &text[..text.len().min(room)];
    // SAFETY: room for len bytes, as the API says.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

fn bus(device: &Device) -> String {
    let [domain, bus, number] = device.place();
    format!("{domain:04x}:{bus:02x}:{number:02x}.0")
}

/// The members of CUdevprop, in their order.
const PROPERTIES: [u32; 14] = [
    cu::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    cu::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
    cu::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
    cu::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z,
    cu::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
    cu::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y,
    cu::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z,
    cu::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
    cu::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY,
    cu::CU_DEVICE_ATTRIBUTE_WARP_SIZE,
    cu::CU_DEVICE_ATTRIBUTE_MAX_PITCH,
    cu::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK,
    cu::CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
    cu::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT,
];

exported! {
    fn cuDeviceGet(to: Out<i32>, ordinal: i32) {
        device(ordinal)?;
        to.set(ordinal)
    }

    fn cuDeviceGetCount(count: Out<i32>) {
        count.set(initialized()?.devices.len() as i32)
    }

    fn cuDeviceGetName(name: *mut c_char, len: i32, dev: i32) {
        put_text(&device(dev)?.name, name, len)
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, dev: i32) {
        uuid.set(device(dev)?.uuid)
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, dev: i32) {
        uuid.set(device(dev)?.uuid)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, dev: i32) {
        bytes.set(device(dev)?.memory as usize)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, number: u32, dev: i32) {
        value.set(device(dev)?.attribute(number)?)
    }

    fn cuDeviceGetProperties(properties: Out<[i32; 14]>, dev: i32) {
        let device = device(dev)?;
        properties.set(PROPERTIES.map(|number| device.attribute(number).unwrap_or(0)))
    }

    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, dev: i32) {
        let device = device(dev)?;
        major.set(device.attribute(cu::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?)?;
        minor.set(device.attribute(cu::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?)
    }

    fn cuDeviceGetPCIBusId(to: *mut c_char, len: i32, dev: i32) {
        put_text(bus(device(dev)?).as_bytes(), to, len)
    }

    fn cuDeviceGetByPCIBusId(to: Out<i32>, name: *const c_char) {
        // SAFETY: a name, as the API says.
        let name = unsafe { rt::string(name) }?;
        let found = initialized()?.devices.iter().position(|d| bus(d).as_bytes().eq_ignore_ascii_case(name));
        to.set(found.ok_or(cu::CUDA_ERROR_INVALID_DEVICE)? as i32)
    }

    // Devices of a server don't reach into each other's memory.
    fn cuDeviceCanAccessPeer(to: Out<i32>, dev: i32, peer: i32) {
        device(dev)?;
        device(peer)?;
        to.set(0)
    }

    fn cuDeviceGetP2PAttribute(to: Out<i32>, _number: u32, from: i32, peer: i32) {
        device(from)?;
        device(peer)?;
        if from == peer { Err(cu::CUDA_ERROR_INVALID_DEVICE) } else { to.set(0) }
    }

    fn cuDeviceGetExecAffinitySupport(to: Out<i32>, _number: u32, dev: i32) {
        device(dev)?;
        to.set(0)
    }

    // What the driver's own answer is where CUDA_MODULE_LOADING is not set.
    fn cuModuleGetLoadingMode(mode: Out<u32>) {
        initialized()?;
        mode.set(cu::CU_MODULE_LAZY_LOADING)
    }
}

/// Makes a value of a program's pointer to what it passes by reference.
///
/// # Safety
/// `from` is null or points to a value.
pub unsafe fn read<T: Copy>(from: *const c_void) -> Result<T, i32> {
    if from.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: as the caller promises; C programs may pass unaligned pointers.
    Ok(unsafe { from.cast::<T>().read_unaligned() })
}
