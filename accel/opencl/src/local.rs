// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queries that the client answers itself: everything that names handles or pointers of the program, and counts that are kept
//! here. (Only the driver knows a device's default queue; the server sends its id.)

use crate::rt::{self, ARENA, Handle, Id, Obj};
use crate::state::Body;
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

/// The shared virtual memory of a root device, as bits (CL_DEVICE_SVM_…): where [`crate::hand::svm`] has some, what the driver says without the program's
/// other memory, which the server doesn't see; elsewhere none.
fn shared_memory(device: u64) -> Result<u64, i32> {
    let of_driver = |param| {
        let (status, bytes) = rt::ask_once(&wire::GetDeviceInfo { device, param })?;
        match (status, bytes.first_chunk()) {
            (wire::SUCCESS, Some(bits)) => Ok(u64::from_ne_bytes(*bits)),
            (wire::SUCCESS, None) => Err(wire::LOST),
            (code, _) => Err(code),
        }
    };
    let told = of_driver(cl::DEVICE_SVM_CAPABILITIES)?;
    let is_there = rt::connection()?.shares_window && of_driver(cl::DEVICE_TYPE)? & cl::DEVICE_TYPE_CPU != 0;
    Ok(if is_there { told & !cl::DEVICE_SVM_FINE_GRAIN_SYSTEM } else { 0 })
}

/// The value of a property that its declaration lists as local.
pub fn answer(object: Obj, param: u32) -> Result<Vec<u8>, i32> {
    let refs = || object.api_refs().to_ne_bytes().to_vec();
    Ok(match (object.body(), param) {
        (Body::Device(d), cl::DEVICE_PLATFORM) => handle(Some(d.platform)),
        (Body::Device(d), cl::DEVICE_PARENT_DEVICE) => handle(d.parent.as_ref().map(|p| p.obj())),
        (Body::Device(_), cl::DEVICE_REFERENCE_COUNT) => refs(),
        (Body::Device(d), cl::DEVICE_SVM_CAPABILITIES) => match &d.parent {
            // As its root device, of which the snapshot tells.
            Some(parent) => return answer(parent.obj(), param),
            None => shared_memory(object.id())?.to_ne_bytes().into(),
        },
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
