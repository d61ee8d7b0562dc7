// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Buffers, images and pipes.
//!
//! A buffer that the program wants in host memory (CL_MEM_ALLOC_HOST_PTR) has its home in the window: the program, the server and its
//! device see the same bytes. A host pointer of the program is copied when the object is created and whenever it is mapped.

use super::context::queue;
use crate::rt::{self, ARENA, Handle, Id, Obj};
use crate::state::{As, Body, Destructor, Mem};
use crate::transfer::buffer::{Range, write};
use crate::transfer::region::Host;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::image;
use tombolo_accel_spec::opencl::{self as wire, BufferRegion, ImageDesc, ImageFormat, cl, kind};
use tombolo_accel_spec::wire::Decoder;

/// The flags that say how kernels access an object: at most one of them.
const KERNEL_ACCESS: u64 = cl::MEM_READ_WRITE | cl::MEM_WRITE_ONLY | cl::MEM_READ_ONLY;
/// The flags that say how the host accesses an object: at most one of them.
const HOST_ACCESS: u64 = cl::MEM_HOST_WRITE_ONLY | cl::MEM_HOST_READ_ONLY | cl::MEM_HOST_NO_ACCESS;
/// The most kinds of images that are remembered of a context.
const IMAGES: usize = 256;
/// The flags about an object's first bytes and its memory.
const HOST_PTR: u64 = cl::MEM_USE_HOST_PTR | cl::MEM_ALLOC_HOST_PTR | cl::MEM_COPY_HOST_PTR;

/// The flags as far as a client can judge them; the native driver judges what is left.
fn host_ptr_ok(flags: u64, host_ptr: usize) -> Result<(), i32> {
    if (host_ptr != 0) != (flags & (cl::MEM_USE_HOST_PTR | cl::MEM_COPY_HOST_PTR) != 0) {
        return Err(cl::INVALID_HOST_PTR);
    }
    Ok(())
}

/// Returns whether a program wants the driver to use its memory, and to copy it or allocate other memory too.
fn host_ptr_contradicts(flags: u64) -> bool {
    flags & cl::MEM_USE_HOST_PTR != 0 && flags & (cl::MEM_ALLOC_HOST_PTR | cl::MEM_COPY_HOST_PTR) != 0
}

fn flags_ok(flags: u64) -> bool {
    let one_of = |mask: u64| (flags & mask).count_ones() <= 1;
    flags & !(KERNEL_ACCESS | HOST_ACCESS | HOST_PTR) == 0
        && one_of(KERNEL_ACCESS)
        && one_of(HOST_ACCESS)
        && !host_ptr_contradicts(flags)
}

fn plain_mem(context: Obj, object_type: u32, flags: u64, size: u64) -> Mem {
    Mem {
        context: rt::hold(context),
        object_type,
        flags,
        size,
        host_ptr: 0,
        home: None,
        shared: false,
        parent: None,
        origin: 0,
        pixel: 0,
        format: (0, 0),
        pitches: (0, 0),
        extent: [0; 3],
        maps: Mutex::default(),
        destructors: Mutex::default(),
        properties: Vec::new(),
        handle: AtomicUsize::new(0),
    }
}

/// Remembers an object's own handle, for its destructors.
fn named(new: &rt::New) {
    if let Some(object) = new.object() {
        if let Ok(mem) = object.mem() {
            mem.handle.store(object.handle() as usize, Ordering::Relaxed);
        }
    }
}

/// Copies a host pointer's data into the window, for the creation of an object: the range, and the ticket that frees it.
fn stage(host: &Host) -> Result<(u64, u64), i32> {
    let connection = rt::connection()?;
    let len = host.len();
    let at = rt::lost(connection.take_staging(len, Place::Beside(host.pointer)))?
        .ok_or(cl::MEM_OBJECT_ALLOCATION_FAILURE)?;
    let to = connection.window.at(at, len).map_err(|_| cl::MEM_OBJECT_ALLOCATION_FAILURE)?;
    // SAFETY: the program's memory is as large as the API says; the range of the window is ours.
    unsafe { host.gather(to) };
    rt::lost(connection.push_window(at, len))?;
    Ok((at, connection.ticket(Box::new(move |c, _| c.give_staging(at, len)))))
}

/// Writes a program's data to a new buffer in pieces, where the window has no room for all of it at once.
fn fill(context: Obj, buffer: Obj, pointer: usize, len: u64) -> Result<(), i32> {
    let device = context.context()?.devices.first().ok_or(cl::INVALID_CONTEXT)?.obj();
    let new = queue(context, device, 0)?;
    let queue = new.object().ok_or(cl::OUT_OF_HOST_MEMORY)?;
    new.publish();
    let range = Range { buffer, offset: 0, len, pointer };
    let filled = write(queue, range, true, &[], 0)
        .and_then(|()| rt::call(&wire::Finish { command_queue: queue.id() }).map(|_| ()));
    ARENA.release(queue);
    filled
}

fn create_buffer(
    context: Handle,
    properties: Vec<i64>,
    flags: u64,
    size: usize,
    host_ptr: *mut c_void,
) -> Result<Handle, i32> {
    let context = rt::object(context, kind::CONTEXT)?;
    let connection = rt::connection()?;
    let max_alloc = context.context()?.max_alloc;
    if size == 0 {
        return Err(cl::INVALID_BUFFER_SIZE);
    }
    if host_ptr_contradicts(flags) {
        return Err(cl::INVALID_VALUE);
    }
    if max_alloc > 0 && size as u64 > max_alloc && flags_ok(flags) {
        return Err(cl::INVALID_BUFFER_SIZE);
    }
    let valid = flags_ok(flags) && size as u64 <= max_alloc && properties.len() < 2;
    if flags_ok(flags) {
        host_ptr_ok(flags, host_ptr as usize)?;
    }
    let mut mem = plain_mem(context, cl::MEM_OBJECT_BUFFER, flags, size as u64);
    mem.properties = properties.clone();
    let (mut home, mut svm, mut data, mut ticket) = (0, 0, 0, 0);
    if valid && flags & cl::MEM_ALLOC_HOST_PTR != 0 && connection.shares_window {
        let len = size as u64;
        if let Some(at) = rt::lost(connection.take_staging(len, Place::Aligned(4096)))? {
            let to = connection.window.at(at, len).map_err(|_| cl::MEM_OBJECT_ALLOCATION_FAILURE)?;
            // SAFETY: the range of the window is ours; the program's pointer has size bytes if it asked to copy them.
            unsafe {
                if flags & cl::MEM_COPY_HOST_PTR != 0 {
                    std::ptr::copy_nonoverlapping(host_ptr.cast::<u8>(), to, size);
                } else {
                    to.write_bytes(0, size);
                }
            }
            (home, mem.home) = (at, Some(at));
            ticket = connection.ticket(Box::new(move |c, _| c.give_staging(at, len)));
        }
    }
    // A buffer over shared memory lives there.
    let shared =
        super::svm::in_window(host_ptr as u64, size as u64).filter(|_| flags & cl::MEM_USE_HOST_PTR != 0);
    if let (true, Some(at)) = (valid, shared) {
        (home, svm) = (at, host_ptr as u64);
        (mem.home, mem.shared) = (Some(at), true);
    }
    let mut piecewise = false;
    if valid && home == 0 && flags & (cl::MEM_USE_HOST_PTR | cl::MEM_COPY_HOST_PTR) != 0 {
        match stage(&Host::flat(host_ptr as usize, size as u64)) {
            Ok(staged) => (data, ticket) = staged,
            Err(cl::MEM_OBJECT_ALLOCATION_FAILURE) => piecewise = true,
            Err(e) => return Err(e),
        }
    }
    if flags & cl::MEM_USE_HOST_PTR != 0 {
        mem.host_ptr = host_ptr as usize;
    }
    let new = rt::new_object(kind::MEM, Body::Mem(Box::new(mem)))?;
    named(&new);
    let record = wire::CreateBuffer {
        context: context.id(),
        flags: if piecewise { flags & !(cl::MEM_USE_HOST_PTR | cl::MEM_COPY_HOST_PTR) } else { flags },
        size: size as u64,
        properties: properties.into(),
        home,
        svm,
        data,
        ticket,
        new: new.id(),
    };
    if valid && !piecewise {
        rt::lost(connection.post(&record))?;
    } else {
        rt::call(&record)?;
    }
    let buffer = new.object().ok_or(cl::OUT_OF_HOST_MEMORY)?;
    let handle = new.publish();
    if piecewise {
        if let Err(e) = fill(context, buffer, host_ptr as usize, size as u64) {
            ARENA.release(buffer);
            return Err(e);
        }
    }
    Ok(handle)
}

/// A buffer. Posted where flags and size are sure to be right.
pub unsafe extern "C" fn clCreateBuffer(
    context: Handle,
    flags: u64,
    size: usize,
    host_ptr: *mut c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe { rt::create(errcode, || create_buffer(context, Vec::new(), flags, size, host_ptr)) }
}

/// A buffer, the way of OpenCL 3.
pub unsafe extern "C" fn clCreateBufferWithProperties(
    context: Handle,
    properties: *const c_void,
    flags: u64,
    size: usize,
    host_ptr: *mut c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || create_buffer(context, rt::properties(properties, 2), flags, size, host_ptr))
    }
}

/// Returns whether a part of a buffer wants more of the host's access than the buffer has. The driver doesn't know how the host may access the buffer.
fn host_access_contradicts(part: u64, buffer: u64) -> bool {
    let wants = |access, others| part & access != 0 && buffer & (others | cl::MEM_HOST_NO_ACCESS) != 0;
    wants(cl::MEM_HOST_WRITE_ONLY, cl::MEM_HOST_READ_ONLY)
        || wants(cl::MEM_HOST_READ_ONLY, cl::MEM_HOST_WRITE_ONLY)
}

/// A part of a buffer.
pub unsafe extern "C" fn clCreateSubBuffer(
    buffer: Handle,
    flags: u64,
    create_type: u32,
    create_info: *const c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let buffer = rt::object(buffer, kind::MEM)?;
            let parent = buffer.mem()?;
            if parent.is_image() {
                return Err(cl::INVALID_MEM_OBJECT);
            }
            if create_info.is_null() {
                return Err(cl::INVALID_VALUE);
            }
            let region = create_info.cast::<BufferRegion>().read_unaligned();
            let (origin, size) = (region.origin as u64, region.size as u64);
            if host_access_contradicts(flags, parent.flags) {
                return Err(cl::INVALID_VALUE);
            }
            let inherit = |mask: u64| if flags & mask == 0 { parent.flags & mask } else { 0 };
            let all = flags | inherit(KERNEL_ACCESS) | inherit(HOST_ACCESS) | parent.flags & HOST_PTR;
            let mut mem = plain_mem(parent.context.obj(), cl::MEM_OBJECT_BUFFER, all, size);
            mem.origin = origin;
            mem.parent = Some(rt::hold(buffer));
            mem.home = parent.home.map(|h| h + origin);
            mem.shared = parent.shared;
            mem.host_ptr =
                if parent.host_ptr == 0 { 0 } else { parent.host_ptr.wrapping_add(origin as usize) };
            let new = rt::new_object(kind::MEM, Body::Mem(Box::new(mem)))?;
            named(&new);
            rt::call(&wire::CreateSubBuffer {
                buffer: buffer.id(),
                flags,
                create_type,
                region,
                new: new.id(),
            })?;
            Ok(new.publish())
        })
    }
}

/// The pitches of an image's bytes in the program's memory, as the API has them: 0 stands for no gaps.
fn pitches(desc: &ImageDesc, extent: [u64; 3], pixel: u64) -> (u64, u64) {
    let row =
        if desc.image_row_pitch != 0 { desc.image_row_pitch as u64 } else { extent[0].wrapping_mul(pixel) };
    let rows = if desc.image_type == cl::MEM_OBJECT_IMAGE1D_ARRAY { 1 } else { extent[1] };
    let slice =
        if desc.image_slice_pitch != 0 { desc.image_slice_pitch as u64 } else { row.wrapping_mul(rows) };
    (row, slice)
}

/// Returns whether a driver could accept an image of this size. Only then the program's bytes are read.
fn is_sane(extent: [u64; 3], pixel: u64, (row, slice): (u64, u64)) -> bool {
    extent.iter().all(|v| (1..=1 << 20).contains(v)) && pixel > 0 && row < 1 << 32 && slice < 1 << 40
}

unsafe fn create_image(
    context: Handle,
    properties: Vec<i64>,
    flags: u64,
    format: *const c_void,
    desc: *const c_void,
    host_ptr: *mut c_void,
) -> Result<Handle, i32> {
    let context = rt::object(context, kind::CONTEXT)?;
    if format.is_null() {
        return Err(cl::INVALID_IMAGE_FORMAT_DESCRIPTOR);
    }
    if desc.is_null() {
        return Err(cl::INVALID_IMAGE_DESCRIPTOR);
    }
    // SAFETY: structures of the program, as the API says.
    let (format, desc) =
        unsafe { (format.cast::<ImageFormat>().read_unaligned(), desc.cast::<ImageDesc>().read_unaligned()) };
    let parent = rt::maybe(desc.mem_object as Handle, kind::MEM).map_err(|_| cl::INVALID_IMAGE_DESCRIPTOR)?;
    let (pixel, extent) = (image::pixel_size(&format).unwrap_or(0), image::extent(&desc));
    if host_ptr_contradicts(flags) {
        return Err(cl::INVALID_VALUE);
    }
    if parent.is_none() {
        host_ptr_ok(flags, host_ptr as usize)?;
    }
    let (row, slice) = pitches(&desc, extent, pixel);
    let mut mem = plain_mem(context, desc.image_type, flags, 0);
    (mem.pixel, mem.extent, mem.properties) = (pixel, extent, properties.clone());
    mem.format = (format.image_channel_order, format.image_channel_data_type);
    mem.pitches = (row as usize, slice as usize);
    mem.parent = parent.map(rt::hold);
    let (mut data, mut data_size, mut ticket) = (0, 0, 0);
    if !host_ptr.is_null() && parent.is_none() && is_sane(extent, pixel, (row, slice)) {
        let host = Host::pixels(host_ptr as usize, &mem, extent, row, slice);
        (data, ticket) = stage(&host)?;
        data_size = host.len();
        if flags & cl::MEM_USE_HOST_PTR != 0 {
            mem.host_ptr = host_ptr as usize;
        }
    }
    // The driver judges one like another.
    let plain = parent.is_none() && properties.len() < 2 && desc.num_mip_levels == 0 && desc.num_samples == 0;
    let pitches = (desc.image_row_pitch as u64, desc.image_slice_pitch as u64);
    let like = (flags, desc.image_type, mem.format, extent, pitches);
    let images = &context.context()?.images;
    let known = plain && images.lock().is_ok_and(|images| images.contains(&like));
    let new = rt::new_object(kind::MEM, Body::Mem(Box::new(mem)))?;
    named(&new);
    let record = wire::CreateImage {
        context: context.id(),
        flags,
        format,
        desc: ImageDesc { mem_object: parent.map_or(0, |p| p.id()), ..desc },
        properties: properties.into(),
        data,
        data_size,
        ticket,
        new: new.id(),
    };
    rt::send(&record, known)?;
    if let (true, false, Ok(mut images)) = (plain, known, images.lock()) {
        if images.len() >= IMAGES {
            images.clear();
        }
        images.insert(like);
    }
    Ok(new.publish())
}

/// An image. Posted where the driver made one like it.
pub unsafe extern "C" fn clCreateImage(
    context: Handle,
    flags: u64,
    format: *const c_void,
    desc: *const c_void,
    host_ptr: *mut c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe { rt::create(errcode, || create_image(context, Vec::new(), flags, format, desc, host_ptr)) }
}

/// An image, the way of OpenCL 3.
pub unsafe extern "C" fn clCreateImageWithProperties(
    context: Handle,
    properties: *const c_void,
    flags: u64,
    format: *const c_void,
    desc: *const c_void,
    host_ptr: *mut c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            create_image(context, rt::properties(properties, 2), flags, format, desc, host_ptr)
        })
    }
}

/// An image, the way of OpenCL 1.
pub unsafe extern "C" fn clCreateImage2D(
    context: Handle,
    flags: u64,
    format: *const c_void,
    width: usize,
    height: usize,
    row_pitch: usize,
    host_ptr: *mut c_void,
    errcode: *mut i32,
) -> Handle {
    let desc = ImageDesc {
        image_type: cl::MEM_OBJECT_IMAGE2D,
        image_width: width,
        image_height: height,
        image_row_pitch: row_pitch,
        ..ImageDesc::default()
    };
    // SAFETY: all pointers as the API says.
    unsafe { clCreateImage(context, flags, format, (&raw const desc).cast(), host_ptr, errcode) }
}

/// An image, the way of OpenCL 1.
pub unsafe extern "C" fn clCreateImage3D(
    context: Handle,
    flags: u64,
    format: *const c_void,
    width: usize,
    height: usize,
    depth: usize,
    row_pitch: usize,
    slice_pitch: usize,
    host_ptr: *mut c_void,
    errcode: *mut i32,
) -> Handle {
    let desc = ImageDesc {
        image_type: cl::MEM_OBJECT_IMAGE3D,
        image_width: width,
        image_height: height,
        image_depth: depth,
        image_row_pitch: row_pitch,
        image_slice_pitch: slice_pitch,
        ..ImageDesc::default()
    };
    // SAFETY: all pointers as the API says.
    unsafe { clCreateImage(context, flags, format, (&raw const desc).cast(), host_ptr, errcode) }
}

pub unsafe extern "C" fn clCreatePipe(
    context: Handle,
    flags: u64,
    packet_size: u32,
    max_packets: u32,
    properties: *const c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let context = rt::object(context, kind::CONTEXT)?;
            let mem = plain_mem(context, cl::MEM_OBJECT_PIPE, flags, 0);
            let new = rt::new_object(kind::MEM, Body::Mem(Box::new(mem)))?;
            named(&new);
            rt::call(&wire::CreatePipe {
                context: context.id(),
                flags,
                packet_size,
                max_packets,
                properties: rt::properties(properties, 2).into(),
                new: new.id(),
            })?;
            Ok(new.publish())
        })
    }
}

/// The formats images may have.
pub unsafe extern "C" fn clGetSupportedImageFormats(
    context: Handle,
    flags: u64,
    image_type: u32,
    n: u32,
    formats: *mut c_void,
    count: *mut u32,
) -> i32 {
    rt::status(|| {
        let context = rt::object(context, kind::CONTEXT)?;
        if n == 0 && !formats.is_null() {
            return Err(cl::INVALID_VALUE);
        }
        let query = wire::GetSupportedImageFormats { context: context.id(), flags, image_type };
        let (status, bytes) = rt::ask_once(&query)?;
        if status != wire::SUCCESS {
            return Err(status);
        }
        let words = Decoder::new(&bytes).u32s().map_err(|_| wire::LOST)?;
        // SAFETY: room for n formats of two numbers and a count, as the API says.
        unsafe {
            if !formats.is_null() {
                let some = words.len().min(n as usize * 2);
                std::ptr::copy_nonoverlapping(words.as_ptr(), formats.cast::<u32>(), some);
            }
            rt::write(count, words.len() as u32 / 2);
        }
        Ok(())
    })
}

/// Registers a callback for the end of a memory object.
pub unsafe extern "C" fn clSetMemObjectDestructorCallback(
    mem: Handle,
    f: Option<unsafe extern "C" fn(Handle, *mut c_void)>,
    user: *mut c_void,
) -> i32 {
    rt::status(|| {
        let mem = rt::object(mem, kind::MEM)?;
        let f = f.ok_or(cl::INVALID_VALUE)?;
        let destructor: Destructor = (f, user as usize);
        mem.mem()?.destructors.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?.push(destructor);
        Ok(())
    })
}
