// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Buffers, images and pipes.
//!
//! A buffer that the program wants in host memory (CL_MEM_ALLOC_HOST_PTR) has its home in the window: the program, the server and its
//! device see the same bytes. A host pointer of the program is copied when the object is created and whenever it is mapped.

use super::context::queue;
use super::counting;
use super::platform::list;
use super::region::Host;
use super::transfer::{Range, write};
use crate::rt::{self, ARENA, Handle, Id, Obj, code};
use crate::state::{As, Body, Destructor, Mem};
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::opencl::{self as wire, kind};
use tombolo_accel_spec::wire::Decoder;

const USE_HOST_PTR: u64 = 1 << 3;
const ALLOC_HOST_PTR: u64 = 1 << 4;
const COPY_HOST_PTR: u64 = 1 << 5;
/// All flags of OpenCL 1.2 and 2.0 for buffers that need no thought.
const PLAIN: u64 = 0b11_1011_0111;

pub(crate) const BUFFER: u32 = 0x10f0;
pub(crate) const IMAGE2D: u32 = 0x10f1;
pub(crate) const IMAGE3D: u32 = 0x10f2;
pub(crate) const IMAGE2D_ARRAY: u32 = 0x10f3;
pub(crate) const IMAGE1D_ARRAY: u32 = 0x10f5;
const IMAGE1D_BUFFER: u32 = 0x10f6;
pub(crate) const PIPE: u32 = 0x10f7;

counting!(MEM clRetainMemObject clReleaseMemObject);

/// The flags as far as a client can judge them; the native driver judges what is left.
fn host_ptr_ok(flags: u64, host_ptr: usize) -> Result<(), i32> {
    if (host_ptr != 0) != (flags & (USE_HOST_PTR | COPY_HOST_PTR) != 0) {
        return Err(code::HOST_PTR);
    }
    Ok(())
}

fn flags_ok(flags: u64) -> bool {
    let one_of = |mask: u64| (flags & mask).count_ones() <= 1;
    flags & !(PLAIN | USE_HOST_PTR) == 0
        && one_of(7)
        && one_of(7 << 7)
        && !(flags & USE_HOST_PTR != 0 && flags & (ALLOC_HOST_PTR | COPY_HOST_PTR) != 0)
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

/// The part of a host pointer's data that goes with the creation: a range of the window, and the ticket that frees it.
fn stage(host: &Host) -> Result<(u64, u64), i32> {
    let connection = rt::connection()?;
    let len = host.len();
    let at = rt::lost(connection.take_staging(len, Place::Beside(host.pointer)))?.ok_or(code::ALLOCATION)?;
    let to = connection.window.at(at, len).map_err(|_| code::ALLOCATION)?;
    // SAFETY: the program's memory is as large as the API says; the range of the window is ours.
    unsafe { host.gather(to) };
    rt::lost(connection.push_window(at, len))?;
    Ok((at, connection.ticket(Box::new(move |c, _| c.give_staging(at, len)))))
}

/// Writes a program's data to a new buffer in pieces, where the window has no room for all of it at once.
fn fill(context: Obj, buffer: Obj, pointer: usize, len: u64) -> Result<(), i32> {
    let device = context.context()?.devices.first().ok_or(code::CONTEXT)?.obj();
    let new = queue(context, device, 0)?;
    let queue = new.object().ok_or(code::HOST_MEMORY)?;
    new.publish();
    let range = Range { buffer, offset: 0, len, pointer };
    let filled = write(queue, range, true, &[], 0)
        .and_then(|()| rt::call(&wire::Finish { queue: queue.id() }).map(|_| ()));
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
        return Err(code::BUFFER_SIZE);
    }
    if flags & USE_HOST_PTR != 0 && flags & (ALLOC_HOST_PTR | COPY_HOST_PTR) != 0 {
        return Err(code::VALUE);
    }
    if max_alloc > 0 && size as u64 > max_alloc && flags_ok(flags) {
        return Err(code::BUFFER_SIZE);
    }
    let valid = flags_ok(flags) && size as u64 <= max_alloc && properties.len() < 2;
    if flags_ok(flags) {
        host_ptr_ok(flags, host_ptr as usize)?;
    }
    let mut mem = plain_mem(context, BUFFER, flags, size as u64);
    mem.properties = properties.clone();
    let (mut home, mut svm, mut data, mut ticket) = (0, 0, 0, 0);
    if valid && flags & ALLOC_HOST_PTR != 0 && connection.shares_window {
        let len = size as u64;
        if let Some(at) = rt::lost(connection.take_staging(len, Place::Aligned(4096)))? {
            let to = connection.window.at(at, len).map_err(|_| code::ALLOCATION)?;
            // SAFETY: the range of the window is ours; the program's pointer has size bytes if it asked to copy them.
            unsafe {
                if flags & COPY_HOST_PTR != 0 {
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
    let shared = super::svm::in_window(host_ptr as u64, size as u64).filter(|_| flags & USE_HOST_PTR != 0);
    if let (true, Some(at)) = (valid, shared) {
        (home, svm) = (at, host_ptr as u64);
        (mem.home, mem.shared) = (Some(at), true);
    }
    let mut piecewise = false;
    if valid && home == 0 && flags & (USE_HOST_PTR | COPY_HOST_PTR) != 0 {
        match stage(&Host::flat(host_ptr as usize, size as u64)) {
            Ok(staged) => (data, ticket) = staged,
            Err(code::ALLOCATION) => piecewise = true,
            Err(e) => return Err(e),
        }
    }
    if flags & USE_HOST_PTR != 0 {
        mem.host_ptr = host_ptr as usize;
    }
    let new = rt::new_object(kind::MEM, Body::Mem(Box::new(mem)))?;
    named(&new);
    let record = wire::CreateBuffer {
        context: context.id(),
        flags: if piecewise { flags & !(USE_HOST_PTR | COPY_HOST_PTR) } else { flags },
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
    let buffer = new.object().ok_or(code::HOST_MEMORY)?;
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
    unsafe { rt::create(errcode, || create_buffer(context, list(properties, 2), flags, size, host_ptr)) }
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
            if is_image(parent) {
                return Err(kind::invalid(kind::MEM));
            }
            if create_info.is_null() {
                return Err(code::VALUE);
            }
            let [origin, size] = create_info.cast::<[usize; 2]>().read_unaligned().map(|v| v as u64);
            // What the driver doesn't know of the parent.
            let [write, read, none] = [7, 8, 9].map(|bit| (flags >> bit & 1, parent.flags >> bit & 1));
            if write.0 & (read.1 | none.1) | read.0 & (write.1 | none.1) != 0 {
                return Err(code::VALUE);
            }
            let inherit = |mask: u64| if flags & mask == 0 { parent.flags & mask } else { 0 };
            let all = flags
                | inherit(7)
                | inherit(7 << 7)
                | parent.flags & (USE_HOST_PTR | ALLOC_HOST_PTR | COPY_HOST_PTR);
            let mut mem = plain_mem(parent.context.obj(), BUFFER, all, size);
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
                origin,
                size,
                new: new.id(),
            })?;
            Ok(new.publish())
        })
    }
}

/// cl_image_desc
#[repr(C)]
#[derive(Clone, Copy)]
struct Desc {
    image_type: u32,
    width: usize,
    height: usize,
    depth: usize,
    array_size: usize,
    row_pitch: usize,
    slice_pitch: usize,
    mip_levels: u32,
    samples: u32,
    mem: Handle,
}
const _: () = assert!(size_of::<Desc>() == 72);

/// Bytes of a pixel: channels times the size of one, or of all for packed types. 0: unknown, the driver will say so.
fn pixel_size(format: [u32; 2]) -> u64 {
    let channels = match format[0] {
        0x10b0 | 0x10b1 | 0x10b8 | 0x10b9 | 0x10bd => 1, // R, A, INTENSITY, LUMINANCE, DEPTH
        0x10b2 | 0x10b3 | 0x10ba => 2,                   // RG, RA, Rx
        0x10b4 | 0x10bb | 0x10bf => 3,                   // RGB, RGx, sRGB
        0x10b5..=0x10b7 | 0x10bc | 0x10c0..=0x10c3 => 4, // RGBA and its orders, RGBx, sRGBA …
        _ => 0,
    };
    match format[1] {
        0x10d0 | 0x10d2 | 0x10d7 | 0x10da => channels,
        0x10d1 | 0x10d3 | 0x10d8 | 0x10db | 0x10dd => 2 * channels,
        0x10d9 | 0x10dc | 0x10de => 4 * channels,
        0x10d4 | 0x10d5 => 2, // 565, 555
        0x10d6 | 0x10e0 => 4, // 101010, 101010_2
        _ => 0,
    }
}

unsafe fn create_image(
    context: Handle,
    properties: Vec<i64>,
    flags: u64,
    format: *const c_void,
    desc: *const c_void,
    host_ptr: *mut c_void,
) -> Result<Handle, i32> {
    const INVALID_FORMAT: i32 = -39;
    const INVALID_DESC: i32 = -65;
    let context = rt::object(context, kind::CONTEXT)?;
    if format.is_null() {
        return Err(INVALID_FORMAT);
    }
    if desc.is_null() {
        return Err(INVALID_DESC);
    }
    // SAFETY: structures of the program, as the API says.
    let (format, desc) =
        unsafe { (format.cast::<[u32; 2]>().read_unaligned(), desc.cast::<Desc>().read_unaligned()) };
    let parent = rt::maybe(desc.mem, kind::MEM).map_err(|_| INVALID_DESC)?;
    let pixel = pixel_size(format);
    let extent = match desc.image_type {
        IMAGE3D => [desc.width, desc.height, desc.depth],
        IMAGE2D => [desc.width, desc.height, 1],
        IMAGE2D_ARRAY => [desc.width, desc.height, desc.array_size],
        IMAGE1D_ARRAY => [desc.width, desc.array_size, 1],
        _ => [desc.width, 1, 1],
    }
    .map(|v| v as u64);
    if flags & USE_HOST_PTR != 0 && flags & (ALLOC_HOST_PTR | COPY_HOST_PTR) != 0 {
        return Err(code::VALUE);
    }
    if parent.is_none() {
        host_ptr_ok(flags, host_ptr as usize)?;
    }
    let row = if desc.row_pitch != 0 { desc.row_pitch as u64 } else { extent[0].wrapping_mul(pixel) };
    let rows = if desc.image_type == IMAGE1D_ARRAY { 1 } else { extent[1] };
    let slice = if desc.slice_pitch != 0 { desc.slice_pitch as u64 } else { row.wrapping_mul(rows) };
    let mut mem = plain_mem(context, desc.image_type, flags, 0);
    (mem.pixel, mem.extent, mem.properties) = (pixel, extent, properties.clone());
    mem.pitches = (row as usize, slice as usize);
    mem.parent = parent.map(rt::hold);
    let sane =
        extent.iter().all(|v| (1..=1 << 20).contains(v)) && pixel > 0 && row < 1 << 32 && slice < 1 << 40;
    let (mut data, mut data_size, mut ticket) = (0, 0, 0);
    if host_ptr as usize != 0 && parent.is_none() && sane {
        // Rows and slices as the program has them; a 1D array has its layers as slices.
        let (rows, slices) =
            if desc.image_type == IMAGE1D_ARRAY { (1, extent[1]) } else { (extent[1], extent[2]) };
        let host = Host {
            pointer: host_ptr as usize,
            row: extent[0] * pixel,
            rows,
            slices,
            row_pitch: row,
            slice_pitch: slice,
        };
        (data, ticket) = stage(&host)?;
        data_size = host.len();
        if flags & USE_HOST_PTR != 0 {
            mem.host_ptr = host_ptr as usize;
        }
    }
    let words = [
        u64::from(desc.image_type),
        desc.width as u64,
        desc.height as u64,
        desc.depth as u64,
        desc.array_size as u64,
        desc.row_pitch as u64,
        desc.slice_pitch as u64,
        u64::from(desc.mip_levels),
        u64::from(desc.samples),
    ];
    let new = rt::new_object(kind::MEM, Body::Mem(Box::new(mem)))?;
    named(&new);
    let made = rt::call(&wire::CreateImage {
        context: context.id(),
        flags,
        format: (&format[..]).into(),
        desc: (&words[..]).into(),
        parent: parent.map_or(0, |p| p.id()),
        properties: properties.into(),
        data,
        data_size,
        ticket,
        new: new.id(),
    });
    made?;
    Ok(new.publish())
}

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
        rt::create(errcode, || create_image(context, list(properties, 2), flags, format, desc, host_ptr))
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
    let desc = Desc {
        image_type: IMAGE2D,
        width,
        height,
        depth: 0,
        array_size: 0,
        row_pitch,
        slice_pitch: 0,
        mip_levels: 0,
        samples: 0,
        mem: std::ptr::null_mut(),
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
    let desc = Desc {
        image_type: IMAGE3D,
        width,
        height,
        depth,
        array_size: 0,
        row_pitch,
        slice_pitch,
        mip_levels: 0,
        samples: 0,
        mem: std::ptr::null_mut(),
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
            let mem = plain_mem(context, PIPE, flags, 0);
            let new = rt::new_object(kind::MEM, Body::Mem(Box::new(mem)))?;
            named(&new);
            rt::call(&wire::CreatePipe {
                context: context.id(),
                flags,
                packet_size,
                max_packets,
                properties: list(properties, 2).into(),
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
            return Err(code::VALUE);
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

/// Registers what is called when a memory object goes.
pub unsafe extern "C" fn clSetMemObjectDestructorCallback(
    mem: Handle,
    f: Option<unsafe extern "C" fn(Handle, *mut c_void)>,
    user: *mut c_void,
) -> i32 {
    rt::status(|| {
        let mem = rt::object(mem, kind::MEM)?;
        let f = f.ok_or(code::VALUE)?;
        let destructor: Destructor = (f, user as usize);
        mem.mem()?.destructors.lock().map_err(|_| code::HOST_MEMORY)?.push(destructor);
        Ok(())
    })
}

/// What the program said of the host's access. The driver doesn't know: the server reads what is mapped for writing only.
pub(crate) fn host_access(mem: &Mem, reads: bool) -> Result<(), i32> {
    const WRITE_ONLY: u64 = 1 << 7;
    const READ_ONLY: u64 = 1 << 8;
    const NO_ACCESS: u64 = 1 << 9;
    let refused = NO_ACCESS | if reads { WRITE_ONLY } else { READ_ONLY };
    if mem.flags & refused == 0 { Ok(()) } else { Err(wire::UNSUPPORTED) }
}

/// Whether an object is an image.
pub(crate) fn is_image(mem: &Mem) -> bool {
    !matches!(mem.object_type, BUFFER | PIPE)
}

/// Whether rows of a region are layers (1D arrays) or the image has no rows at all.
pub(crate) fn is_one_dimensional(mem: &Mem) -> bool {
    matches!(mem.object_type, IMAGE1D_ARRAY | IMAGE1D_BUFFER | 0x10f4)
}
