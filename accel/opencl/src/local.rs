// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queries that are answered from what the client knows: everything that names handles or pointers of the program, and what is
//! counted here. (Which queue is a device's default only the driver knows; it comes as an id.)

use crate::hand::memory::PIPE;
use crate::rt::{self, ARENA, Handle, Id, Obj, code};
use crate::state::Body;
use tombolo_accel_spec::opencl::{self as wire, kind};
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

/// The value of a property that its declaration lists as local.
pub fn answer(object: Obj, param: u32) -> Result<Vec<u8>, i32> {
    let refs = || object.api_refs().to_ne_bytes().to_vec();
    Ok(match (object.body(), param) {
        (Body::Device(d), 0x1031) => handle(Some(d.platform)),
        (Body::Device(d), 0x1042) => handle(d.parent.as_ref().map(|p| p.obj())),
        (Body::Context(_), 0x1080) => refs(),
        (Body::Context(c), 0x1081) => handles(&c.devices),
        (Body::Context(c), 0x1082) => c.properties.iter().flat_map(|p| p.to_ne_bytes()).collect(),
        (Body::Context(c), 0x1083) => (c.devices.len() as u32).to_ne_bytes().into(),
        (Body::Queue(q), 0x1090) => handle(Some(q.context.obj())),
        (Body::Queue(q), 0x1091) => handle(Some(q.device.obj())),
        (Body::Queue(_), 0x1092) => refs(),
        (Body::Queue(_), 0x1095) => {
            let reply = rt::call(&wire::GetCommandQueueInfo { command_queue: object.id(), param })?;
            let id = Decoder::new(&reply).u64().map_err(|_| wire::LOST)?;
            handle(ARENA.by_id(id))
        }
        (Body::Mem(m), 0x1101) => {
            // No flags at all mean CL_MEM_READ_WRITE; others are told as they were given.
            let flags = if m.flags == 0 { 1 } else { m.flags };
            flags.to_ne_bytes().into()
        }
        (Body::Mem(m), 0x1103) => m.host_ptr.to_ne_bytes().into(),
        (Body::Mem(m), 0x1104) => (m.maps.lock().map_or(0, |maps| maps.len()) as u32).to_ne_bytes().into(),
        (Body::Mem(_), 0x1105) => refs(),
        (Body::Mem(m), 0x1106) => handle(Some(m.context.obj())),
        (Body::Mem(m), 0x1107 | 0x1118) => handle(m.parent.as_ref().map(|p| p.obj())),
        (Body::Mem(m), 0x1109) => u32::from(m.shared).to_ne_bytes().into(),
        (Body::Mem(m), 0x1122) if m.object_type != PIPE => return Err(kind::invalid(kind::MEM)),
        (Body::Mem(m), 0x110a | 0x1122) => words(&m.properties),
        (Body::Child(_), 0x1150) => refs(),
        (Body::Child(c), 0x1151) => handle(Some(c.obj())),
        (Body::Program(_), 0x1160) => refs(),
        (Body::Program(p), 0x1161) => handle(Some(p.context.obj())),
        (Body::Program(p), 0x1162) => (p.devices.len() as u32).to_ne_bytes().into(),
        (Body::Program(p), 0x1163) => handles(&p.devices),
        (Body::Kernel(_), 0x1192) => refs(),
        (Body::Kernel(k), 0x1193) => handle(k.program.obj().body().context()),
        (Body::Kernel(k), 0x1194) => handle(Some(k.program.obj())),
        (Body::Event(e), 0x11d0) => handle(e.queue.as_ref().map(|q| q.obj())),
        (Body::Event(e), 0x11d1) => e.command.to_ne_bytes().into(),
        (Body::Event(_), 0x11d2) => refs(),
        (Body::Event(e), 0x11d4) => handle(Some(e.context.obj())),
        _ => return Err(code::VALUE),
    })
}
