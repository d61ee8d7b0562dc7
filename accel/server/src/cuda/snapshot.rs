// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices, as a client sees them: all that it may ask of them, told once. What is not forwarded, no device has.

use super::Cuda;
use super::generated::Native;
use tombolo_accel_spec::cuda::{self as wire, cu};
use tombolo_accel_spec::wire::Encoder;

/// Attributes up to this one are told; later headers have more.
const ATTRIBUTES: u32 = 200;

/// Attributes that are 0, since what they announce is not forwarded.
const NOT_FORWARDED: &[u32] = &[
    cu::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
    cu::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
    cu::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    cu::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    cu::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    cu::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
    cu::CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
    cu::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
    cu::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH,
    cu::CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
    cu::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
    cu::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1,
    cu::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1,
    cu::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1,
    cu::CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH,
    cu::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS,
    cu::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK,
    cu::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    cu::CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED,
];

fn status(code: i32) -> Result<(), i32> {
    if code == wire::SUCCESS { Ok(()) } else { Err(code) }
}

/// Initializes the driver; its numbers of all devices.
pub fn devices(native: &Native) -> Result<Vec<i32>, i32> {
    let (Some(init), Some(count), Some(get)) = (native.cuInit, native.cuDeviceGetCount, native.cuDeviceGet)
    else {
        return Err(wire::UNSUPPORTED);
    };
    let mut devices = 0;
    // SAFETY: room for a number each.
    status(unsafe { init(0) }).and_then(|()| status(unsafe { count(&mut devices) }))?;
    (0..devices)
        .map(|ordinal| {
            let mut device = 0;
            // SAFETY: as above.
            status(unsafe { get(&mut device, ordinal) }).map(|()| device)
        })
        .collect()
}

/// A device's name.
pub fn name(native: &Native, device: i32) -> Result<Vec<u8>, i32> {
    let mut name = [0u8; 256];
    let named = native.cuDeviceGetName.ok_or(wire::UNSUPPORTED)?;
    // SAFETY: room for so many bytes.
    status(unsafe { named(name.as_mut_ptr().cast_const().cast(), name.len() as i32, device) })?;
    let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(name[..len].to_vec())
}

/// The snapshot: the driver's version; of each device name, UUID, bytes of memory, codes and values of attributes.
pub fn write(cuda: &Cuda, reply: &mut Vec<u8>) -> Result<(), i32> {
    let native = &cuda.native;
    let mut version = 0;
    // SAFETY: room for a number.
    status(unsafe { native.cuDriverGetVersion.ok_or(wire::UNSUPPORTED)?(&mut version) })?;
    let mut to = Encoder::new(reply);
    to.i32(version);
    to.u32(cuda.devices.len() as u32);
    for device in &cuda.devices {
        let (mut uuid, mut memory) = ([0u8; 16], 0usize);
        let (told, sized) = (native.cuDeviceGetUuid_v2, native.cuDeviceTotalMem_v2);
        // SAFETY: room for a UUID, and for a size.
        unsafe {
            status(told.ok_or(wire::UNSUPPORTED)?(uuid.as_mut_ptr().cast_const().cast(), *device))?;
            status(sized.ok_or(wire::UNSUPPORTED)?(&mut memory, *device))?;
        }
        to.bytes(&name(native, *device)?);
        to.bytes(&uuid);
        to.u64((memory as u64).min(cuda.memory.limit()));
        let (codes, values): (Vec<i32>, Vec<i32>) =
            (0..ATTRIBUTES).map(|n| attribute(native, n, *device)).unzip();
        to.i32s(&codes);
        to.i32s(&values);
    }
    Ok(())
}

fn attribute(native: &Native, number: u32, device: i32) -> (i32, i32) {
    let Some(get) = native.cuDeviceGetAttribute else { return (wire::UNSUPPORTED, 0) };
    let mut value = 0;
    // SAFETY: room for a number.
    let code = unsafe { get(&mut value, number, device) };
    (code, if NOT_FORWARDED.contains(&number) { 0 } else { value })
}
