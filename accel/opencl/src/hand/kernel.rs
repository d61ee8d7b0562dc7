// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernels, their arguments and launches.

use crate::rt::{self, ARENA, Handle, Id, Obj};
use crate::state::{Argument, As, Body, Kernel};
use crate::sure;
use std::ffi::{c_char, c_void};
use std::sync::Mutex;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_accel_spec::wire::Decoder;

fn kernel(program: Obj) -> Result<rt::New, i32> {
    let kernel = Kernel { program: rt::hold(program), learned: Mutex::default() };
    rt::new_object(kind::KERNEL, Body::Kernel(kernel))
}

/// A kernel of a program.
pub unsafe extern "C" fn clCreateKernel(p: Handle, name: *const c_char, errcode: *mut i32) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let p = rt::object(p, kind::PROGRAM)?;
            let name = rt::string(name)?;
            let new = kernel(p)?;
            rt::call(&wire::CreateKernel { program: p.id(), name, new: new.id() })?;
            Ok(new.publish())
        })
    }
}

pub unsafe extern "C" fn clCreateKernelsInProgram(
    p: Handle,
    n: u32,
    kernels: *mut Handle,
    count: *mut u32,
) -> i32 {
    rt::status(|| {
        let p = rt::object(p, kind::PROGRAM)?;
        if kernels.is_null() != (n == 0) {
            return Err(cl::INVALID_VALUE);
        }
        let wanted = n.min(4096);
        let new = (0..wanted).map(|_| kernel(p)).collect::<Result<Vec<_>, _>>()?;
        let ids: Vec<u64> = new.iter().map(|n| n.id()).collect();
        let reply = rt::call(&wire::CreateKernelsInProgram { program: p.id(), new: ids.into() })?;
        let made = Decoder::new(&reply).u32().map_err(|_| wire::LOST)?;
        // SAFETY: room for n handles and a count, as the API says.
        unsafe {
            if !kernels.is_null() {
                for (i, new) in new.into_iter().enumerate().take(made as usize) {
                    kernels.add(i).write(new.publish());
                }
            }
            rt::write(count, made);
        }
        Ok(())
    })
}

/// A copy of a kernel with its arguments.
pub unsafe extern "C" fn clCloneKernel(source: Handle, errcode: *mut i32) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let source = rt::object(source, kind::KERNEL)?;
            let new = kernel(source.kernel()?.program.obj())?;
            rt::call(&wire::CloneKernel { kernel: source.id(), new: new.id() })?;
            Ok(new.publish())
        })
    }
}

/// An argument, as far as it matters to a driver: is it a buffer of this kernel's context, how large is the local memory?
fn argument(kernel: Obj, object: Option<Obj>, null: bool, size: usize) -> Argument {
    let Some(object) = object else {
        return if null { Argument::Null(size) } else { Argument::Value(size) };
    };
    if object.body().context() != kernel.body().context() {
        return Argument::Doubtful;
    }
    match object.body() {
        Body::Mem(m) => Argument::Object(kind::MEM, m.object_type, m.origin),
        Body::Queue(_) => Argument::Object(kind::QUEUE, 0, 0),
        _ => Argument::Object(kind::SAMPLER, 0, 0),
    }
}

/// Sets an argument. Eight bytes may be a value or a handle: the server knows by the kernel, so it gets both. Posted if the driver accepted
/// the same kind of argument before.
pub unsafe extern "C" fn clSetKernelArg(
    kernel: Handle,
    index: u32,
    size: usize,
    value: *const c_void,
) -> i32 {
    const PLAIN: u32 = 0;
    const NULL: u32 = 1;
    const NAMES_OBJECT: u32 = 2;
    const ASKS: u32 = 3;
    rt::status(|| {
        let kernel = rt::object(kernel, kind::KERNEL)?;
        let bytes: &[u8] = if value.is_null() {
            &[]
        } else if size <= 64 << 10 {
            let is_known = || -> Result<bool, i32> {
                let learned = kernel.kernel()?.learned.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?;
                Ok(learned.accepts(index, Argument::Value(size)))
            };
            // A driver compares sizes before it reads; so behind the value of a program that is wrong about the size there may be nothing to read.
            if size > size_of::<Handle>() && !is_known()? {
                let (kernel, size) = (kernel.id(), size as u64);
                rt::call(&wire::SetKernelArg { kernel, index, how: ASKS, size, handle: 0, value: &[] })?;
            }
            // SAFETY: size bytes, as the API says.
            unsafe { std::slice::from_raw_parts(value.cast(), size) }
        } else {
            return Err(cl::INVALID_ARG_SIZE);
        };
        let object = bytes.first_chunk::<8>().filter(|_| size == 8).and_then(|b| {
            let handle = usize::from_ne_bytes(*b) as *const c_void;
            [kind::MEM, kind::SAMPLER, kind::QUEUE].into_iter().find_map(|k| ARENA.find(handle, k))
        });
        let argument = argument(kernel, object, value.is_null(), size);
        let how = match object {
            Some(_) => NAMES_OBJECT,
            None if value.is_null() => NULL,
            None => PLAIN,
        };
        let record = wire::SetKernelArg {
            kernel: kernel.id(),
            index,
            how,
            size: size as u64,
            handle: object.map_or(0, |o| o.id()),
            value: bytes,
        };
        // Held until the request is in the ring: what is learned must not overtake what the server does.
        let mut learned = kernel.kernel()?.learned.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?;
        if learned.accepts(index, argument) {
            rt::lost(rt::connection()?.post(&record))?;
        } else {
            rt::call(&record)?;
            learned.accept(index, argument);
        }
        learned.set(index, argument);
        Ok(())
    })
}

/// Further properties of a launch.
pub unsafe extern "C" fn clSetKernelExecInfo(
    kernel: Handle,
    param: u32,
    size: usize,
    value: *const c_void,
) -> i32 {
    rt::status(|| {
        let kernel = rt::object(kernel, kind::KERNEL)?;
        // SAFETY: as the API says.
        let value = unsafe { rt::bytes(value, size)? };
        rt::call(&wire::SetKernelExecInfo { kernel: kernel.id(), param, value }).map(|_| ())
    })
}

/// A property of a kernel's sub-groups.
pub unsafe extern "C" fn clGetKernelSubGroupInfo(
    kernel: Handle,
    device: Handle,
    param: u32,
    input_size: usize,
    input: *const c_void,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    rt::status(|| {
        let kernel = rt::object(kernel, kind::KERNEL)?;
        let device = rt::maybe(device, kind::DEVICE)?.map_or(0, |d| d.id());
        // SAFETY: as the API says.
        let input = if input_size == 0 { &[][..] } else { unsafe { rt::bytes(input, input_size)? } };
        let reply = rt::call(&wire::GetKernelSubGroupInfo { kernel: kernel.id(), device, param, input })?;
        // SAFETY: as the API says.
        unsafe { rt::answer(&reply, size, value, size_ret) }
    })
}

/// Launches a kernel. Posted if the driver accepted a launch of this shape before.
pub unsafe extern "C" fn clEnqueueNDRangeKernel(
    queue: Handle,
    kernel: Handle,
    work_dim: u32,
    offset: *const usize,
    global: *const usize,
    local: *const usize,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        let kernel = rt::object(kernel, kind::KERNEL)?;
        // Drivers take a list of none here, and programs pass it.
        // SAFETY: as the API says.
        let waits = if n == 0 { Vec::new() } else { unsafe { rt::waits(n, list)? } };
        let sizes = |from: *const usize| {
            let mut out = [0; 3];
            if !from.is_null() {
                for (i, to) in out.iter_mut().enumerate().take(work_dim as usize) {
                    // SAFETY: work_dim numbers, as the API says.
                    *to = unsafe { *from.add(i) } as u64;
                }
            }
            out
        };
        let present = u32::from(!offset.is_null())
            | u32::from(!global.is_null()) << 1
            | u32::from(!local.is_null()) << 2;
        let new = rt::new_event(queue, !event.is_null(), cl::COMMAND_NDRANGE_KERNEL)?;
        let record = wire::EnqueueNDRangeKernel {
            queue: queue.id(),
            kernel: kernel.id(),
            work_dim,
            present,
            offset: sizes(offset),
            global: sizes(global),
            local: sizes(local),
            waits: waits.into(),
            event: new.id(),
        };
        let sure = sure::launch(queue, kernel, &record);
        // SAFETY: as the API says.
        unsafe { rt::submit(&record, sure, new, event)? };
        if !sure {
            let device = queue.queue()?.device.id();
            let like = (work_dim, record.local, device);
            kernel.kernel()?.learned.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?.launch(like);
        }
        Ok(())
    })
}
