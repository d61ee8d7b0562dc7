// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Buffers, images, pipes and samplers.

use super::Done;
use crate::opencl::{Cx, Extra, Handle, OpenCl, VALUE, clear, lock, properties};
use crate::session::Api;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tombolo_accel_spec::opencl::{self as wire, kind};
use tombolo_accel_spec::wire::ReplyKind;

const USE_HOST_PTR: u64 = 1 << 3;
const ALLOC_HOST_PTR: u64 = 1 << 4;
const COPY_HOST_PTR: u64 = 1 << 5;
/// CL_MEM_HOST_WRITE_ONLY, _READ_ONLY, _NO_ACCESS
const HOST_ACCESS: u64 = 7 << 7;
const INVALID_PROPERTY: i32 = -64;

/// Without what the client's own library enforces: how the host may access an object. The server reads what is mapped for writing only, so
/// that what the program doesn't write stays as it is.
fn for_driver(flags: u64) -> u64 {
    // More than one is wrong; the driver says so.
    if (flags & HOST_ACCESS).is_power_of_two() { flags & !HOST_ACCESS } else { flags }
}

/// What happens when a memory object of the driver is really gone.
struct Gone {
    cl: &'static OpenCl,
    ticket: u64,
    bytes: u64,
}

unsafe extern "C" fn on_gone(_mem: Handle, user: *mut c_void) {
    // SAFETY: from keep_mem(), and the driver calls once.
    let gone = unsafe { Box::from_raw(user.cast::<Gone>()) };
    gone.cl.uncharge(gone.bytes);
    if gone.ticket != 0 {
        gone.cl.session().notify(ReplyKind::Ticket, 0, gone.ticket, &[]);
    }
}

/// Creates a memory object, charged to the client until the driver has freed it. `ticket` is told then.
fn create_mem(
    cx: &mut Cx<'_>,
    new: u64,
    bytes: u64,
    ticket: u64,
    extra: Extra,
    make: impl FnOnce(*mut i32) -> Handle,
) -> Done {
    cx.new = Some((kind::MEM, new));
    cx.cl.charge(bytes)?;
    let made = cx.create_with(kind::MEM, new, extra, make);
    if made.is_err() {
        cx.cl.uncharge(bytes);
        return made;
    }
    let native = cx.get(kind::MEM, new)?;
    if let Some(f) = cx.native().clSetMemObjectDestructorCallback {
        let gone = Box::into_raw(Box::new(Gone { cl: cx.cl, ticket, bytes }));
        // SAFETY: the callback's data is freed by the callback.
        unsafe { f(native, on_gone as *const c_void, gone.cast()) };
        cx.owed = 0;
    }
    Ok(())
}

/// Takes a new memory object back when it could not be made ready.
pub(super) fn unless(cx: &Cx<'_>, new: u64, ready: Done) -> Done {
    if ready.is_err() {
        cx.cl.release(kind::MEM, new);
    }
    ready
}

pub(crate) fn create_buffer(cx: &mut Cx<'_>, r: &wire::CreateBuffer<'_>) -> Done {
    let context = cx.get(kind::CONTEXT, r.context)?;
    let window = &cx.cl.session().window;
    let size = usize::try_from(r.size).map_err(|_| VALUE)?;
    let properties = properties::pairs(&r.properties, properties::NONE, INVALID_PROPERTY)?;
    let mut extra = Extra { size: r.size, ..Extra::default() };
    // A host pointer of the client means nothing here: its bytes lie in the window, or the buffer lives there.
    let (flags, pointer) = if r.home != 0 {
        let home = window.at(r.home, r.size).map_err(|_| VALUE)?;
        // The driver sees the address that the program has, too: kernels may leave pointers there.
        let home = if r.svm == 0 { home.cast() } else { cx.shared(r.svm, r.size)? };
        extra.home = home as usize;
        (r.flags & !(ALLOC_HOST_PTR | COPY_HOST_PTR) | USE_HOST_PTR, home)
    } else if r.data != 0 {
        let data: *mut c_void = window.at(r.data, r.size).map_err(|_| VALUE)?.cast();
        (r.flags & !(USE_HOST_PTR | ALLOC_HOST_PTR) | COPY_HOST_PTR, data)
    } else {
        (r.flags, null_mut())
    };
    let flags = for_driver(flags);
    if r.home == 0 && r.data == 0 && r.flags & (USE_HOST_PTR | COPY_HOST_PTR) != 0 {
        // CL_INVALID_HOST_PTR: what the driver says of null.
        return Err(-37);
    }
    let (plain, with) = (cx.native().clCreateBuffer, cx.native().clCreateBufferWithProperties);
    let ticket = if r.home == 0 { 0 } else { r.ticket };
    create_mem(cx, r.new, r.size, ticket, extra, |code| {
        match (plain, with) {
            // SAFETY (both): a live context; the pointer has size bytes, checked above.
            (_, Some(f)) if !properties.is_null() => {
                // SAFETY: live handles that were looked up; buffers and lists are as long as said.
                unsafe { f(context, properties, flags, size, pointer, code) }.cast()
            }
            // SAFETY: live handles that were looked up; buffers and lists are as long as said.
            (Some(f), _) => unsafe { f(context, flags, size, pointer, code) },
            _ => null_mut(),
        }
    })?;
    if pointer.is_null() {
        let native = cx.get(kind::MEM, r.new)?;
        let cleared = clear::buffer(cx, context, native, size);
        unless(cx, r.new, cleared)?;
    }
    if r.home == 0 {
        // The driver has copied: the staging is free at the end of this request.
        cx.owed = r.ticket;
    }
    Ok(())
}

pub(crate) fn create_sub_buffer(cx: &mut Cx<'_>, r: &wire::CreateSubBuffer) -> Done {
    let f = native!(cx, clCreateSubBuffer);
    let buffer = cx.get(kind::MEM, r.buffer)?;
    let home = cx.of(r.buffer, |e| e.home)?;
    let info = [r.origin as usize, r.size as usize];
    let extra = Extra {
        size: r.size,
        home: if home == 0 { 0 } else { home.wrapping_add(r.origin as usize) },
        ..Extra::default()
    };
    let inside = r.create_type != 0x1220
        || cx.of(r.buffer, |e| r.origin.checked_add(r.size).is_some_and(|end| end <= e.size))?;
    if !inside {
        return Err(VALUE);
    }
    create_mem(cx, r.new, 0, 0, extra, |code| {
        // SAFETY: a live buffer; the region lies inside of it.
        unsafe { f(buffer, for_driver(r.flags), r.create_type, info.as_ptr().cast(), code) }
    })
}

/// cl_image_desc
#[repr(C)]
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

pub(crate) fn create_image(cx: &mut Cx<'_>, r: &wire::CreateImage<'_>) -> Done {
    const IMAGE3D: u32 = 0x10f2;
    let f = native!(cx, clCreateImage);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let parent = cx.maybe(kind::MEM, r.parent)?;
    properties::pairs(&r.properties, properties::NONE, INVALID_PROPERTY)?;
    let format: [u32; 2] = r.format[..].try_into().map_err(|_| VALUE)?;
    let words: [u64; 9] = r.desc[..].try_into().map_err(|_| VALUE)?;
    let size = |i: usize| usize::try_from(words[i]).map_err(|_| VALUE);
    let image_type = words[0] as u32;
    let mut desc = Desc {
        image_type,
        width: size(1)?,
        height: size(2)?,
        depth: size(3)?,
        array_size: size(4)?,
        row_pitch: size(5)?,
        slice_pitch: size(6)?,
        mip_levels: words[7] as u32,
        samples: words[8] as u32,
        mem: parent,
    };
    let extent = match image_type {
        IMAGE3D => [words[1], words[2], words[3]],
        0x10f1 => [words[1], words[2], 1],
        0x10f3 => [words[1], words[2], words[4]],
        0x10f5 => [words[1], words[4], 1],
        _ => [words[1], 1, 1],
    };
    let (mut flags, mut pointer) = (for_driver(r.flags), null_mut());
    if r.data != 0 {
        // Packed by the client. The driver may read as much as the pitches say, so they are taken away, and the size is checked
        // against what the largest pixel could need: the driver's own pixel size is only known once the image exists.
        (desc.row_pitch, desc.slice_pitch) = (0, 0);
        let pixels = extent.iter().try_fold(1u64, |n, e| n.checked_mul(*e)).ok_or(VALUE)?;
        let pixel = pixel_size(format).ok_or(-39)?; // CL_INVALID_IMAGE_FORMAT_DESCRIPTOR
        if pixels.checked_mul(pixel) != Some(r.data_size) {
            return Err(VALUE);
        }
        pointer = cx.cl.session().window.at(r.data, r.data_size).map_err(|_| VALUE)?.cast();
        flags = flags & !(USE_HOST_PTR | ALLOC_HOST_PTR) | COPY_HOST_PTR;
    } else if flags & (USE_HOST_PTR | COPY_HOST_PTR) != 0 {
        flags &= !(USE_HOST_PTR | COPY_HOST_PTR);
    }
    let bytes = extent
        .iter()
        .try_fold(pixel_size(format).unwrap_or(16), |n, e| n.checked_mul((*e).max(1)))
        .unwrap_or(u64::MAX);
    let bytes = if parent.is_null() { bytes } else { 0 };
    let extra = Extra { pixel: 1, extent, ..Extra::default() };
    // A driver may take pitches of an image without a host pointer, and make room by them, which is then too little.
    let row = extent[0].saturating_mul(pixel_size(format).unwrap_or(16));
    let narrow = |pitch: usize, needed: u64| pitch != 0 && (pitch as u64) < needed;
    let too_narrow = parent.is_null()
        && (narrow(desc.row_pitch, row) || narrow(desc.slice_pitch, row.saturating_mul(extent[1])));
    let cl = cx.cl;
    create_mem(cx, r.new, bytes, 0, extra, |code| {
        let make = |desc: &Desc, code| {
            // SAFETY: live handles; structures as the API has them; the pointer has what the image needs, checked above.
            unsafe {
                f(context, flags, format.as_ptr().cast(), std::ptr::from_ref(desc).cast(), pointer, code)
            }
        };
        let made = make(&desc, code);
        if made.is_null() || !too_narrow {
            return made;
        }
        cl.release_native(kind::MEM, made as usize);
        (desc.row_pitch, desc.slice_pitch) = (0, 0);
        make(&desc, code)
    })?;
    cx.owed = r.ticket;
    let native = cx.get(kind::MEM, r.new)?;
    if pointer.is_null() && parent.is_null() {
        let cleared = clear::image(cx, context, native, extent);
        unless(cx, r.new, cleared)?;
    }
    // Now the driver knows the pixel's size.
    let ask = native!(cx, clGetImageInfo);
    let mut pixel = 0usize;
    // SAFETY: a live image; room for a size.
    cx.status(unsafe { ask(native, 0x1111, size_of::<usize>(), (&raw mut pixel).cast(), null_mut()) })?;
    if let Ok(extra) = lock(&cx.cl.table).extra_mut(kind::MEM, r.new) {
        extra.pixel = pixel as u64;
    }
    Ok(())
}

/// Bytes of a pixel of the formats that the specification names; None: unknown.
fn pixel_size(format: [u32; 2]) -> Option<u64> {
    let channels = match format[0] {
        0x10b0 | 0x10b1 | 0x10b8 | 0x10b9 | 0x10bd => 1,
        0x10b2 | 0x10b3 | 0x10ba => 2,
        0x10b4 | 0x10bb | 0x10bf => 3,
        0x10b5..=0x10b7 | 0x10bc | 0x10c0..=0x10c3 => 4,
        _ => return None,
    };
    Some(match format[1] {
        0x10d0 | 0x10d2 | 0x10d7 | 0x10da => channels,
        0x10d1 | 0x10d3 | 0x10d8 | 0x10db | 0x10dd => 2 * channels,
        0x10d9 | 0x10dc | 0x10de => 4 * channels,
        0x10d4 | 0x10d5 => 2,
        0x10d6 | 0x10e0 => 4,
        _ => return None,
    })
}

pub(crate) fn create_pipe(cx: &mut Cx<'_>, r: &wire::CreatePipe<'_>) -> Done {
    let f = native!(cx, clCreatePipe);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let properties = properties::pairs(&r.properties, properties::NONE, VALUE)?;
    let bytes = u64::from(r.packet_size).saturating_mul(u64::from(r.max_packets));
    create_mem(cx, r.new, bytes, 0, Extra::default(), |code| {
        // SAFETY: a live context; the properties end with 0.
        unsafe { f(context, r.flags, r.packet_size, r.max_packets, properties, code) }
    })
}

pub(crate) fn get_supported_image_formats(cx: &mut Cx<'_>, r: &wire::GetSupportedImageFormats) -> Done {
    let f = native!(cx, clGetSupportedImageFormats);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let mut n = 0;
    // SAFETY: a live context; lists as long as said.
    cx.status(unsafe { f(context, r.flags, r.image_type, 0, null(), &mut n) })?;
    let mut formats = vec![[0u32; 2]; n.min(4096) as usize];
    if !formats.is_empty() {
        let room = formats.len() as u32;
        // SAFETY: as above.
        cx.status(unsafe {
            f(context, r.flags, r.image_type, room, formats.as_mut_ptr().cast_const().cast(), null_mut())
        })?;
    }
    cx.reply().u32s(formats.as_flattened());
    Ok(())
}

pub(crate) fn create_sampler_with_properties(
    cx: &mut Cx<'_>,
    r: &wire::CreateSamplerWithProperties<'_>,
) -> Done {
    let f = native!(cx, clCreateSamplerWithProperties);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let properties = properties::pairs(&r.properties, properties::OF_SAMPLERS, VALUE)?;
    // SAFETY: a live context; the properties end with 0.
    cx.create(kind::SAMPLER, r.new, |code| unsafe { f(context, properties, code) })
}
