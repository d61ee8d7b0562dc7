// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Buffers, images and pipes.

use super::Done;
use crate::opencl::{Cx, Extra, Handle, OpenCl, clear, lock, properties};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tombolo_accel_spec::image;
use tombolo_accel_spec::opencl::{self as wire, ImageDesc, cl, kind};
use tombolo_accel_spec::wire::ReplyKind;

/// The flags that say how the host accesses an object: at most one of them.
const HOST_ACCESS: u64 = cl::MEM_HOST_WRITE_ONLY | cl::MEM_HOST_READ_ONLY | cl::MEM_HOST_NO_ACCESS;
/// Bytes of the largest pixel: four channels of 32 bits.
const LARGEST_PIXEL: u64 = 16;

/// What small images are made of: no command clears them.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// The flags for the driver, without the host's access, which the client's own library enforces. The server reads regions that are mapped for
/// writing only, so that bytes which the program doesn't write stay as they are.
fn for_driver(flags: u64) -> u64 {
    // More than one is wrong; the driver says so.
    if (flags & HOST_ACCESS).is_power_of_two() { flags & !HOST_ACCESS } else { flags }
}

/// The data of the callback for the end of a memory object.
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
        cx.cl.give_up(kind::MEM, new);
    }
    ready
}

pub(crate) fn create_buffer(cx: &mut Cx<'_>, r: &wire::CreateBuffer<'_>) -> Done {
    let context = cx.get(kind::CONTEXT, r.context)?;
    let window = &cx.cl.session().window;
    let size = usize::try_from(r.size).map_err(|_| cl::INVALID_VALUE)?;
    let properties = properties::pairs(&r.properties, properties::NONE, cl::INVALID_PROPERTY)?;
    let mut extra = Extra { size: r.size, ..Extra::default() };
    // A host pointer of the client means nothing here: its bytes lie in the window, or the buffer lives there.
    let (flags, pointer) = if r.home != 0 {
        let home = window.at(r.home, r.size).map_err(|_| cl::INVALID_VALUE)?;
        // The driver sees the address that the program has, too: kernels may leave pointers there.
        let home = if r.svm == 0 { home.cast() } else { cx.shared(r.svm, r.size)? };
        extra.home = home as usize;
        (r.flags & !(cl::MEM_ALLOC_HOST_PTR | cl::MEM_COPY_HOST_PTR) | cl::MEM_USE_HOST_PTR, home)
    } else if r.data != 0 {
        let data: *mut c_void = window.at(r.data, r.size).map_err(|_| cl::INVALID_VALUE)?.cast();
        (r.flags & !(cl::MEM_USE_HOST_PTR | cl::MEM_ALLOC_HOST_PTR) | cl::MEM_COPY_HOST_PTR, data)
    } else {
        (r.flags, null_mut())
    };
    let flags = for_driver(flags);
    if r.home == 0 && r.data == 0 && r.flags & (cl::MEM_USE_HOST_PTR | cl::MEM_COPY_HOST_PTR) != 0 {
        // As the driver answers null.
        return Err(cl::INVALID_HOST_PTR);
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
    let (offset, size) = (r.region.origin as u64, r.region.size as u64);
    let extra = Extra {
        size,
        home: if home == 0 { 0 } else { home.wrapping_add(r.region.origin) },
        ..Extra::default()
    };
    let inside = r.create_type != cl::BUFFER_CREATE_TYPE_REGION
        || cx.of(r.buffer, |e| offset.checked_add(size).is_some_and(|end| end <= e.size))?;
    if !inside {
        return Err(cl::INVALID_VALUE);
    }
    create_mem(cx, r.new, 0, 0, extra, |code| {
        let region = (&raw const r.region).cast();
        // SAFETY: a live buffer; the region lies inside of it.
        unsafe { f(buffer, for_driver(r.flags), r.create_type, region, code) }
    })
}

/// The size that an image is charged with: unknown formats count as the largest.
fn charged(desc: &ImageDesc, extent: [u64; 3], pixel: Option<u64>) -> u64 {
    if desc.mem_object != 0 {
        return 0;
    }
    let bytes = extent.iter().try_fold(pixel.unwrap_or(LARGEST_PIXEL), |n, e| n.checked_mul((*e).max(1)));
    bytes.unwrap_or(u64::MAX)
}

/// Returns whether a pitch is smaller than the rows or slices that it separates.
fn is_too_narrow(desc: &ImageDesc, extent: [u64; 3], pixel: Option<u64>) -> bool {
    let row = extent[0].saturating_mul(pixel.unwrap_or(LARGEST_PIXEL));
    let narrow = |pitch: usize, needed: u64| pitch != 0 && (pitch as u64) < needed;
    desc.mem_object == 0
        && (narrow(desc.image_row_pitch, row)
            || narrow(desc.image_slice_pitch, row.saturating_mul(extent[1])))
}

/// The size of a pixel, from the driver.
fn pixel_size(cx: &Cx<'_>, image: Handle) -> Result<u64, i32> {
    let ask = native!(cx, clGetImageInfo);
    let mut pixel = 0usize;
    let to = (&raw mut pixel).cast();
    // SAFETY: a live image; room for a size.
    cx.status(unsafe { ask(image, cl::IMAGE_ELEMENT_SIZE, size_of::<usize>(), to, null_mut()) })?;
    Ok(pixel as u64)
}

pub(crate) fn create_image(cx: &mut Cx<'_>, r: &wire::CreateImage<'_>) -> Done {
    let f = native!(cx, clCreateImage);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let parent = cx.maybe(kind::MEM, r.desc.mem_object)?;
    properties::pairs(&r.properties, properties::NONE, cl::INVALID_PROPERTY)?;
    let mut desc = ImageDesc { mem_object: parent as u64, ..r.desc };
    let (pixel, extent) = (image::pixel_size(&r.format), image::extent(&desc));
    let (mut flags, mut pointer) = (for_driver(r.flags), null_mut());
    if r.data != 0 {
        // Packed by the client. The driver may read as much as the pitches say, so they are taken away, and the size is checked
        // against what the format needs: the driver's own pixel size is only known once the image exists.
        (desc.image_row_pitch, desc.image_slice_pitch) = (0, 0);
        let pixels = extent.iter().try_fold(1u64, |n, e| n.checked_mul(*e)).ok_or(cl::INVALID_VALUE)?;
        let pixel = pixel.ok_or(cl::INVALID_IMAGE_FORMAT_DESCRIPTOR)?;
        if pixels.checked_mul(pixel) != Some(r.data_size) {
            return Err(cl::INVALID_VALUE);
        }
        pointer = cx.cl.session().window.at(r.data, r.data_size).map_err(|_| cl::INVALID_VALUE)?.cast();
        flags = flags & !(cl::MEM_USE_HOST_PTR | cl::MEM_ALLOC_HOST_PTR) | cl::MEM_COPY_HOST_PTR;
    } else {
        flags &= !(cl::MEM_USE_HOST_PTR | cl::MEM_COPY_HOST_PTR);
        let packed = (desc.image_row_pitch, desc.image_slice_pitch) == (0, 0);
        if parent.is_null() && packed && charged(&desc, extent, None) <= ZEROS.len() as u64 {
            pointer = ZEROS.as_ptr().cast_mut().cast();
            flags |= cl::MEM_COPY_HOST_PTR;
        }
    }
    let extra = Extra { pixel: 1, extent, ..Extra::default() };
    // A driver may take pitches of an image without a host pointer, and make room by them, which is then too little.
    let too_narrow = is_too_narrow(&desc, extent, pixel);
    let client = cx.cl;
    create_mem(cx, r.new, charged(&desc, extent, pixel), 0, extra, |code| {
        let make = |desc: &ImageDesc, code| {
            let (format, desc) = ((&raw const r.format).cast(), std::ptr::from_ref(desc).cast());
            // SAFETY: live handles; structures as the API has them; the pointer has what the image needs, checked above.
            unsafe { f(context, flags, format, desc, pointer, code) }
        };
        let made = make(&desc, code);
        if made.is_null() || !too_narrow {
            return made;
        }
        client.release_native(kind::MEM, made as usize);
        (desc.image_row_pitch, desc.image_slice_pitch) = (0, 0);
        make(&desc, code)
    })?;
    cx.owed = r.ticket;
    let native = cx.get(kind::MEM, r.new)?;
    if pointer.is_null() && parent.is_null() {
        let cleared = clear::image(cx, context, native, extent);
        unless(cx, r.new, cleared)?;
    }
    let pixel = pixel_size(cx, native)?;
    if let Ok(extra) = lock(&cx.cl.table).extra_mut(kind::MEM, r.new) {
        extra.pixel = pixel;
    }
    Ok(())
}

pub(crate) fn create_pipe(cx: &mut Cx<'_>, r: &wire::CreatePipe<'_>) -> Done {
    let f = native!(cx, clCreatePipe);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let properties = properties::pairs(&r.properties, properties::NONE, cl::INVALID_VALUE)?;
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
