// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Contexts and queues.

use crate::rt::{self, ARENA, Handle, Id, Obj};
use crate::state::{As, Body, Context, Destructor, Queue};
use std::ffi::{CString, c_void};
use std::sync::Mutex;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_accel_spec::wire::Decoder;

type ContextNotify = Option<unsafe extern "C" fn(*const i8, *const c_void, usize, *mut c_void)>;

/// The properties a program gave, the platform taken out, and the id of that.
unsafe fn properties(from: *const c_void) -> Result<(Vec<i64>, Vec<isize>, u64), i32> {
    // SAFETY: a list of pairs that ends with 0, as the caller promises.
    let given = unsafe { rt::properties(from, 2) };
    let mut rest = Vec::new();
    let mut platform = 0;
    for pair in given.chunks(2) {
        match pair {
            // The others are counted by the driver, which gets the platform once.
            [cl::CONTEXT_PLATFORM, _] if platform != 0 => return Err(cl::INVALID_PROPERTY),
            [cl::CONTEXT_PLATFORM, handle] => platform = rt::object(*handle as Handle, kind::PLATFORM)?.id(),
            [key, value] => rest.extend([*key, *value]),
            _ => {}
        }
    }
    if !rest.is_empty() {
        rest.push(0);
    }
    Ok((rest, given.iter().map(|v| *v as isize).collect(), platform))
}

/// Registers a context's callback; 0: none.
fn notify(f: ContextNotify, user: *mut c_void) -> Result<u64, i32> {
    let Some(f) = f else { return Ok(0) };
    let user = user as usize;
    Ok(rt::connection()?.callback(Box::new(move |_, body| {
        let text = CString::new(body).unwrap_or_default();
        // SAFETY: the program registered this function with this pointer.
        unsafe { f(text.as_ptr(), std::ptr::null(), 0, user as *mut c_void) };
        true
    })))
}

fn body(devices: Vec<rt::Ref>, properties: Vec<isize>) -> Body {
    let max_alloc = rt::max_alloc(&devices);
    Body::Context(Context {
        devices,
        properties,
        destructors: Mutex::default(),
        max_alloc,
        images: Mutex::default(),
    })
}

pub unsafe extern "C" fn clCreateContext(
    props: *const c_void,
    n: u32,
    devices: *const Handle,
    pfn_notify: ContextNotify,
    user: *mut c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            if n == 0 || devices.is_null() || (pfn_notify.is_none() && !user.is_null()) {
                return Err(cl::INVALID_VALUE);
            }
            let devices = rt::list(n, devices, kind::DEVICE)?;
            let (properties, given, platform) = properties(props)?;
            let ids: Vec<u64> = devices.iter().map(|d| d.id()).collect();
            let devices = devices.into_iter().map(rt::hold).collect();
            let new = rt::new_object(kind::CONTEXT, body(devices, given))?;
            let notify = notify(pfn_notify, user)?;
            rt::call(&wire::CreateContext {
                platform,
                properties: properties.into(),
                devices: ids.into(),
                notify,
                new: new.id(),
            })
            .inspect_err(|_| rt::connection().into_iter().for_each(|c| c.forget_callback(notify)))?;
            Ok(new.publish())
        })
    }
}

/// A context of all devices of a type.
pub unsafe extern "C" fn clCreateContextFromType(
    props: *const c_void,
    device_type: u64,
    pfn_notify: ContextNotify,
    user: *mut c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            if pfn_notify.is_none() && !user.is_null() {
                return Err(cl::INVALID_VALUE);
            }
            let (properties, given, platform) = properties(props)?;
            // The devices are known once the server has found them; which ones follows from the type alone.
            let platform = match platform {
                0 => rt::platforms()?.first().ok_or(cl::INVALID_PLATFORM)?.id(),
                id => id,
            };
            let (status, ids) = rt::ask_once(&wire::GetDeviceIDs { platform, device_type })?;
            if status != wire::SUCCESS {
                return Err(status);
            }
            let ids = Decoder::new(&ids).u64s().map_err(|_| wire::LOST)?;
            let devices = ids.iter().filter_map(|id| ARENA.by_id(*id)).map(rt::hold).collect();
            let new = rt::new_object(kind::CONTEXT, body(devices, given))?;
            let notify = notify(pfn_notify, user)?;
            rt::call(&wire::CreateContextFromType {
                platform,
                properties: properties.into(),
                device_type,
                notify,
                new: new.id(),
            })
            .inspect_err(|_| rt::connection().into_iter().for_each(|c| c.forget_callback(notify)))?;
            Ok(new.publish())
        })
    }
}

/// Gives a queue up. Its commands go to the device, as a release implies a flush.
pub unsafe extern "C" fn clReleaseCommandQueue(queue: Handle) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        crate::deferred::leave(queue)?;
        ARENA.release(queue);
        rt::connection().into_iter().for_each(|c| {
            let _lost = c.publish();
        });
        Ok(())
    })
}

/// Registers a callback for the end of a context.
pub unsafe extern "C" fn clSetContextDestructorCallback(
    context: Handle,
    f: Option<unsafe extern "C" fn(Handle, *mut c_void)>,
    user: *mut c_void,
) -> i32 {
    rt::status(|| {
        let context = rt::object(context, kind::CONTEXT)?;
        let f = f.ok_or(cl::INVALID_VALUE)?;
        let destructor: Destructor = (f, user as usize);
        context.context()?.destructors.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?.push(destructor);
        Ok(())
    })
}

/// A new queue, at the server too.
pub(super) fn queue(context: Obj, device: Obj, properties: u64) -> Result<rt::New, i32> {
    let queue = Queue::new(context, device, properties)?;
    let new = rt::new_object(kind::QUEUE, Body::Queue(queue))?;
    rt::call(&wire::CreateCommandQueue {
        context: context.id(),
        device: device.id(),
        properties,
        new: new.id(),
    })?;
    Ok(new)
}

/// A queue, the way of OpenCL 1.
pub unsafe extern "C" fn clCreateCommandQueue(
    context: Handle,
    device: Handle,
    properties: u64,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let context = rt::object(context, kind::CONTEXT)?;
            let device = rt::object(device, kind::DEVICE)?;
            Ok(queue(context, device, properties)?.publish())
        })
    }
}

pub unsafe extern "C" fn clCreateCommandQueueWithProperties(
    context: Handle,
    device: Handle,
    properties: *const c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let context = rt::object(context, kind::CONTEXT)?;
            let device = rt::object(device, kind::DEVICE)?;
            let properties = rt::properties(properties, 2);
            let given = properties.chunks(2).find(|p| p[0] == cl::QUEUE_PROPERTIES).and_then(|p| p.get(1));
            let queue = Queue::new(context, device, given.copied().unwrap_or(0) as u64)?;
            let new = rt::new_object(kind::QUEUE, Body::Queue(queue))?;
            rt::call(&wire::CreateCommandQueueWithProperties {
                context: context.id(),
                device: device.id(),
                properties: properties.into(),
                new: new.id(),
            })?;
            Ok(new.publish())
        })
    }
}

/// Gone since OpenCL 1.1.
pub unsafe extern "C" fn clSetCommandQueueProperty(queue: Handle, _: u64, _: u32, _: *mut u64) -> i32 {
    rt::status(|| {
        rt::object(queue, kind::QUEUE)?;
        Err(wire::UNSUPPORTED)
    })
}

/// Hands all commands to the device: they are there already, or in the batch.
pub unsafe extern "C" fn clFlush(queue: Handle) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        rt::lost(rt::connection()?.post(&wire::Flush { command_queue: queue.id() }))
    })
}

pub unsafe extern "C" fn clFinish(queue: Handle) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        rt::call(&wire::Finish { command_queue: queue.id() }).map(|_| ())
    })
}
