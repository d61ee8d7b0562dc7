// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queries that the client answers itself: everything that names handles or pointers of the program, and counts that are kept
//! here. (Only the driver knows a device's default queue; the server sends its id.)

use crate::rt::{self, ARENA, Handle, Id, Obj};
use crate::state::{Body, Device};
use std::sync::Arc;
use tombolo_accel_spec::opencl::{self as wire, cl};
use tombolo_accel_spec::wire::Decoder;

fn handle(object: Option<Obj>) -> Vec<u8> {
    let handle: Handle = object.map_or(std::ptr::null_mut(), |o| o.handle());
    (handle as usize).to_ne_bytes().into()
}

fn handles(objects: &[rt::Ref]) -> Vec<u8> {
    objects.iter().flat_map(|o| (o.obj().handle() as usize).to_ne_bytes()).collect()
}

fn words<T: Copy + Into<i128>>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|v| ((*v).into() as u64).to_ne_bytes()).collect()
}

/// Extensions with functions that have no declaration here, by the beginnings of their names.
const WITHHELD: [&str; 27] = [
    "cl_khr_command_buffer",
    "cl_khr_d3d",
    "cl_khr_dx9",
    "cl_khr_egl_",
    "cl_khr_external_",
    "cl_khr_gl_",
    "cl_khr_semaphore",
    "cl_khr_suggested_local_work_size",
    "cl_khr_terminate_context",
    "cl_ext_buffer_device_address",
    "cl_ext_image_requirements_info",
    "cl_ext_migrate_memobject",
    "cl_arm_import_memory",
    "cl_arm_shared_virtual_memory",
    "cl_img_",
    "cl_intel_accelerator",
    "cl_intel_create_buffer_with_properties",
    "cl_intel_d3d",
    "cl_intel_dx9",
    "cl_intel_mem_",
    "cl_intel_program_scope_host_pipe",
    "cl_intel_sharing",
    "cl_intel_unified_shared_memory",
    "cl_intel_va_api",
    "cl_nv_create_buffer",
    "cl_nv_d3d",
    "cl_pocl_",
];

fn is_served(extension: &str) -> bool {
    !WITHHELD.iter().any(|withheld| extension.starts_with(withheld))
}

/// The extensions among the driver's that programs can use.
fn extensions(told: &[u8]) -> Vec<u8> {
    let told = String::from_utf8_lossy(told);
    let served: Vec<&str> =
        told.trim_end_matches('\0').split(' ').filter(|extension| is_served(extension)).collect();
    (served.join(" ") + "\0").into_bytes()
}

/// The same of a list with versions (cl_name_version).
fn versions(told: &[u8]) -> Vec<u8> {
    let is_named = |entry: &&[u8]| is_served(&String::from_utf8_lossy(&entry[size_of::<u32>()..]));
    told.chunks_exact(68).filter(is_named).flatten().copied().collect()
}

fn succeeded((status, bytes): (i32, Arc<[u8]>)) -> Result<Arc<[u8]>, i32> {
    if status == wire::SUCCESS { Ok(bytes) } else { Err(status) }
}

fn of_platform(platform: Obj, param: u32) -> Result<Arc<[u8]>, i32> {
    succeeded(rt::ask_once(&wire::GetPlatformInfo { platform: platform.id(), param })?)
}

/// A property of a device as its driver tells it: of a part as of the root device, of which the snapshot tells.
fn of_driver(device: Obj, param: u32) -> Result<Arc<[u8]>, i32> {
    match device.body() {
        Body::Device(Device { parent: Some(parent), .. }) => of_driver(parent.obj(), param),
        _ => succeeded(rt::ask_once(&wire::GetDeviceInfo { device: device.id(), param })?),
    }
}

fn bits(device: Obj, param: u32) -> Result<u64, i32> {
    of_driver(device, param)?.first_chunk().map(|bits| u64::from_ne_bytes(*bits)).ok_or(wire::LOST)
}

/// Returns whether the server may give a device functions of its own to run.
pub fn runs_native_kernels(device: Obj) -> Result<bool, i32> {
    Ok(bits(device, cl::DEVICE_EXECUTION_CAPABILITIES)? & cl::EXEC_NATIVE_KERNEL != 0)
}

/// The shared virtual memory of a device, as bits (CL_DEVICE_SVM_…): where [`crate::hand::svm`] has some, what the driver says without the program's
/// other memory, which the server doesn't see; elsewhere none.
fn shared_memory(device: Obj) -> Result<u64, i32> {
    let told = bits(device, cl::DEVICE_SVM_CAPABILITIES)?;
    let is_there =
        rt::connection()?.shares_window && bits(device, cl::DEVICE_TYPE)? & cl::DEVICE_TYPE_CPU != 0;
    Ok(if is_there { told & !cl::DEVICE_SVM_FINE_GRAIN_SYSTEM } else { 0 })
}

/// The value of a property that its declaration lists as local.
pub fn answer(object: Obj, param: u32) -> Result<Vec<u8>, i32> {
    let refs = || object.api_refs().to_ne_bytes().to_vec();
    Ok(match (object.body(), param) {
        (Body::Device(d), cl::DEVICE_PLATFORM) => handle(Some(d.platform)),
        (Body::Device(d), cl::DEVICE_PARENT_DEVICE) => handle(d.parent.as_ref().map(|p| p.obj())),
        (Body::Device(_), cl::DEVICE_REFERENCE_COUNT) => refs(),
        (Body::Device(_), cl::DEVICE_SVM_CAPABILITIES) => shared_memory(object)?.to_ne_bytes().into(),
        // A function of the program can't run elsewhere.
        (Body::Device(_), cl::DEVICE_EXECUTION_CAPABILITIES) => {
            (bits(object, param)? & !cl::EXEC_NATIVE_KERNEL).to_ne_bytes().into()
        }
        (Body::Device(_), cl::DEVICE_EXTENSIONS) => extensions(&of_driver(object, param)?),
        (Body::Device(_), cl::DEVICE_EXTENSIONS_WITH_VERSION) => versions(&of_driver(object, param)?),
        (Body::Platform, cl::PLATFORM_EXTENSIONS) => extensions(&of_platform(object, param)?),
        (Body::Platform, cl::PLATFORM_EXTENSIONS_WITH_VERSION) => versions(&of_platform(object, param)?),
        (Body::Context(_), cl::CONTEXT_REFERENCE_COUNT) => refs(),
        (Body::Context(c), cl::CONTEXT_DEVICES) => handles(&c.devices),
        (Body::Context(c), cl::CONTEXT_PROPERTIES) => {
            c.properties.iter().flat_map(|p| p.to_ne_bytes()).collect()
        }
        (Body::Context(c), cl::CONTEXT_NUM_DEVICES) => (c.devices.len() as u32).to_ne_bytes().into(),
        (Body::Queue(q), cl::QUEUE_CONTEXT) => handle(Some(q.context.obj())),
        (Body::Queue(q), cl::QUEUE_DEVICE) => handle(Some(q.device.obj())),
        (Body::Queue(_), cl::QUEUE_REFERENCE_COUNT) => refs(),
        (Body::Queue(_), cl::QUEUE_DEVICE_DEFAULT) => {
            let reply = rt::call(&wire::GetCommandQueueInfo { command_queue: object.id(), param })?;
            let id = Decoder::new(&reply).u64().map_err(|_| wire::LOST)?;
            handle(ARENA.by_id(id))
        }
        (Body::Mem(m), cl::MEM_FLAGS) => {
            // No flags at all mean CL_MEM_READ_WRITE; others are told as they were given.
            let flags = if m.flags == 0 { cl::MEM_READ_WRITE } else { m.flags };
            flags.to_ne_bytes().into()
        }
        (Body::Mem(m), cl::MEM_HOST_PTR) => m.host_ptr.to_ne_bytes().into(),
        (Body::Mem(m), cl::MEM_MAP_COUNT) => {
            (m.maps.lock().map_or(0, |maps| maps.len()) as u32).to_ne_bytes().into()
        }
        (Body::Mem(_), cl::MEM_REFERENCE_COUNT) => refs(),
        (Body::Mem(m), cl::MEM_CONTEXT) => handle(Some(m.context.obj())),
        (Body::Mem(m), cl::MEM_ASSOCIATED_MEMOBJECT | cl::IMAGE_BUFFER) => {
            handle(m.parent.as_ref().map(|p| p.obj()))
        }
        (Body::Mem(m), cl::MEM_USES_SVM_POINTER) => u32::from(m.shared).to_ne_bytes().into(),
        (Body::Mem(m), cl::PIPE_PROPERTIES) if m.object_type != cl::MEM_OBJECT_PIPE => {
            return Err(cl::INVALID_MEM_OBJECT);
        }
        (Body::Mem(m), cl::MEM_PROPERTIES | cl::PIPE_PROPERTIES) => words(&m.properties),
        (Body::Child(_), cl::SAMPLER_REFERENCE_COUNT) => refs(),
        (Body::Child(c), cl::SAMPLER_CONTEXT) => handle(Some(c.obj())),
        (Body::Program(_), cl::PROGRAM_REFERENCE_COUNT) => refs(),
        (Body::Program(p), cl::PROGRAM_CONTEXT) => handle(Some(p.context.obj())),
        (Body::Program(p), cl::PROGRAM_NUM_DEVICES) => (p.devices.len() as u32).to_ne_bytes().into(),
        (Body::Program(p), cl::PROGRAM_DEVICES) => handles(&p.devices),
        (Body::Kernel(_), cl::KERNEL_REFERENCE_COUNT) => refs(),
        (Body::Kernel(k), cl::KERNEL_CONTEXT) => handle(k.program.obj().body().context()),
        (Body::Kernel(k), cl::KERNEL_PROGRAM) => handle(Some(k.program.obj())),
        (Body::Event(e), cl::EVENT_COMMAND_QUEUE) => handle(e.queue.as_ref().map(|q| q.obj())),
        (Body::Event(e), cl::EVENT_COMMAND_TYPE) => e.command.to_ne_bytes().into(),
        (Body::Event(_), cl::EVENT_REFERENCE_COUNT) => refs(),
        (Body::Event(e), cl::EVENT_CONTEXT) => handle(Some(e.context.obj())),
        _ => return Err(cl::INVALID_VALUE),
    })
}
