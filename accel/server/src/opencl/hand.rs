// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handlers of OpenCL that are written by hand: where data goes through the window, where callbacks come back, where one request
//! creates several objects.

use super::clear;
use super::{Cx, Extra, Handle, OpenCl, RESOURCES, VALUE, key, lock};
use crate::session::Api;
use std::ffi::{CString, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering;
use tombolo_accel_spec::opencl::{self as wire, kind};
use tombolo_accel_spec::wire::{Encoder, ReplyKind};

type Done = Result<(), i32>;
type Query<'a> = &'a dyn Fn(usize, *mut c_void, *mut usize) -> i32;

const USE_HOST_PTR: u64 = 1 << 3;
const ALLOC_HOST_PTR: u64 = 1 << 4;
const COPY_HOST_PTR: u64 = 1 << 5;

/// A function of the driver, or 'not supported'.
macro_rules! native {
    ($cx:expr, $name:ident) => {
        $cx.native().$name.ok_or(wire::UNSUPPORTED)?
    };
}

/// The value of a property: status and bytes.
pub(super) fn value(ask: Query<'_>) -> (i32, Vec<u8>) {
    let mut size = 0;
    let status = ask(0, null_mut(), &mut size);
    if status != 0 || size > 1 << 20 {
        return (status, Vec::new());
    }
    let mut bytes = vec![0; size];
    let status = if size == 0 { 0 } else { ask(size, bytes.as_mut_ptr().cast(), &mut size) };
    (status, bytes)
}

/// Handles of one kind that a function lists.
pub(super) fn listed(ask: impl Fn(u32, *mut Handle, *mut u32) -> i32) -> Result<Vec<Handle>, i32> {
    let mut n = 0;
    let status = ask(0, null_mut(), &mut n);
    if status != 0 {
        return Err(status);
    }
    let mut handles = vec![null_mut(); n.min(4096) as usize];
    if !handles.is_empty() {
        let status = ask(handles.len() as u32, handles.as_mut_ptr(), null_mut());
        if status != 0 {
            return Err(status);
        }
    }
    Ok(handles)
}

/// Platforms, then devices, numbered in this order; and what never changes about them.
pub fn snapshot(cl: &OpenCl, reply: &mut Vec<u8>) -> Done {
    let n = &cl.native;
    let (platform_ids, platform_info) =
        (n.clGetPlatformIDs.ok_or(wire::UNSUPPORTED)?, n.clGetPlatformInfo.ok_or(wire::UNSUPPORTED)?);
    let (device_ids, device_info) =
        (n.clGetDeviceIDs.ok_or(wire::UNSUPPORTED)?, n.clGetDeviceInfo.ok_or(wire::UNSUPPORTED)?);
    // SAFETY: handles come from the driver itself; buffers are as long as said.
    let platforms = listed(|n, list, count| unsafe { platform_ids(n, list, count) })?;
    let mut roots: Vec<(u32, u64, Handle)> = platforms.iter().map(|p| (kind::PLATFORM, 0, *p)).collect();
    for (i, platform) in platforms.iter().enumerate() {
        // SAFETY: as above.
        let devices = listed(|n, list, count| unsafe { device_ids(*platform, 0xffff_ffff, n, list, count) });
        roots.extend(devices.unwrap_or_default().into_iter().map(|d| (kind::DEVICE, i as u64 + 1, d)));
    }
    let mut answers: Vec<(Vec<u8>, i32, Vec<u8>)> = Vec::new();
    {
        let mut table = lock(&cl.table);
        for (i, (kind, _, native)) in roots.iter().enumerate() {
            let extra = Extra { root: true, ..Extra::default() };
            table.put(*kind, i as u64 + 1, Ok(*native as usize), extra).map_err(|_| RESOURCES)?;
        }
    }
    for (i, (kind, _, native)) in roots.iter().enumerate() {
        let id = i as u64 + 1;
        if *kind == kind::PLATFORM {
            for param in 0x900..=0x907 {
                // SAFETY: as above.
                let (status, bytes) = value(&|s, v, r| unsafe { platform_info(*native, param, s, v, r) });
                answers.push((key(&wire::GetPlatformInfo { platform: id, param }), status, bytes));
            }
            for (bit, device_type) in [1u64, 2, 4, 8, 0xffff_ffff].into_iter().enumerate() {
                let _order = bit;
                // SAFETY: as above.
                let found = listed(|n, list, c| unsafe { device_ids(*native, device_type, n, list, c) });
                let (status, bytes) = ids_of(&roots, found);
                answers.push((key(&wire::GetDeviceIDs { platform: id, device_type }), status, bytes));
            }
        } else {
            for param in (0x1000..=0x1076).chain([0x1042 + 0x20, 0x4000, 0x4001, 0x4002, 0x4003]) {
                // Handles are the client's own to answer; availability and references change.
                if [0x1027, 0x1031, 0x1042, 0x1047].contains(&param) {
                    continue;
                }
                // SAFETY: as above.
                let (status, bytes) = value(&|s, v, r| unsafe { device_info(*native, param, s, v, r) });
                if status == 0 {
                    answers.push((key(&wire::GetDeviceInfo { device: id, param }), status, bytes));
                }
            }
        }
    }
    let mut out = Encoder::new(reply);
    out.u32(roots.len() as u32);
    for (i, (kind, parent, _)) in roots.iter().enumerate() {
        out.u32(*kind);
        out.u64(i as u64 + 1);
        out.u64(*parent);
    }
    out.u32(answers.len() as u32);
    for (key, status, bytes) in answers {
        out.bytes(&key);
        out.i32(status);
        out.bytes(&bytes);
    }
    Ok(())
}

/// Ids of root devices, encoded.
fn ids_of(roots: &[(u32, u64, Handle)], found: Result<Vec<Handle>, i32>) -> (i32, Vec<u8>) {
    match found {
        Err(status) => (status, Vec::new()),
        Ok(found) => {
            let id = |h: &Handle| roots.iter().position(|r| r.0 == kind::DEVICE && r.2 == *h);
            let ids: Vec<u64> = found.iter().filter_map(id).map(|i| i as u64 + 1).collect();
            let mut bytes = Vec::new();
            Encoder::new(&mut bytes).u64s(&ids);
            (0, bytes)
        }
    }
}

pub(super) fn get_device_ids(cx: &mut Cx<'_>, r: &wire::GetDeviceIDs) -> Done {
    let platform = cx.get(kind::PLATFORM, r.platform)?;
    let f = native!(cx, clGetDeviceIDs);
    // SAFETY: a live platform; buffers are as long as said.
    let found = listed(|n, list, c| unsafe { f(platform, r.device_type, n, list, c) })?;
    let mut ids = Vec::new();
    {
        let table = lock(&cx.cl.table);
        for device in found {
            let id = (1..=table.live() as u64).find(|id| table.get(kind::DEVICE, *id) == Ok(device as usize));
            ids.extend(id);
        }
    }
    cx.reply().u64s(&ids);
    Ok(())
}

pub(super) fn create_sub_devices(cx: &mut Cx<'_>, r: &wire::CreateSubDevices<'_>) -> Done {
    let device = cx.get(kind::DEVICE, r.device)?;
    let f = native!(cx, clCreateSubDevices);
    if r.properties.last() != Some(&0) {
        return Err(VALUE);
    }
    let mut made = vec![null_mut(); r.new.len()];
    let mut n = 0;
    let list = if made.is_empty() { null_mut() } else { made.as_mut_ptr() };
    // SAFETY: the properties end with 0; the list is as long as said.
    let status = unsafe { f(device, r.properties.as_ptr().cast(), made.len() as u32, list, &mut n) };
    cx.status(status)?;
    for (id, native) in r.new.iter().zip(made).take(n as usize) {
        cx.keep(kind::DEVICE, *id, native, Extra::default())?;
    }
    cx.reply().u32(n);
    Ok(())
}

/// What a callback of the driver needs to find its client.
struct Notify {
    cl: &'static OpenCl,
    number: u64,
}

/// A pointer for a callback that comes once; freed there.
fn once(cx: &Cx<'_>, number: u64) -> *mut c_void {
    Box::into_raw(Box::new(Notify { cl: cx.cl, number })).cast()
}

unsafe fn notified(user: *mut c_void, status: i32) {
    // SAFETY: from once(), and the driver calls once.
    let notify = unsafe { Box::from_raw(user.cast::<Notify>()) };
    notify.cl.tickets.settle(notify.cl);
    notify.cl.session().notify(ReplyKind::Notify, status, notify.number, &[]);
}

unsafe extern "C" fn on_event(_event: Handle, status: i32, user: *mut c_void) {
    // SAFETY: registered with once().
    unsafe { notified(user, status) }
}

unsafe extern "C" fn on_program(_program: Handle, user: *mut c_void) {
    // SAFETY: registered with once().
    unsafe { notified(user, 0) }
}

unsafe extern "C" fn on_context(text: *const c_char, _: *const c_void, _: usize, user: *mut c_void) {
    // SAFETY: registered with a leaked Notify, as it may come any number of times; the text is a C string.
    let (notify, text) = unsafe { (&*user.cast_const().cast::<Notify>(), std::ffi::CStr::from_ptr(text)) };
    let text = &text.to_bytes()[..text.to_bytes().len().min(4096)];
    notify.cl.session().notify(ReplyKind::Notify, 0, notify.number, text);
}

/// A context's properties for the driver: ours name the platform by id. Nothing else may point anywhere.
fn context_properties(cx: &Cx<'_>, platform: u64, given: &[i64]) -> Result<Vec<isize>, i32> {
    const PLATFORM: isize = 0x1084;
    const INTEROP_USER_SYNC: i64 = 0x1085;
    let mut out = Vec::new();
    if platform != 0 {
        out.extend([PLATFORM, cx.get(kind::PLATFORM, platform)? as isize]);
    }
    for pair in given.chunks(2) {
        match *pair {
            [INTEROP_USER_SYNC, v] => out.extend([INTEROP_USER_SYNC as isize, v as isize]),
            [0] => {}
            // CL_INVALID_PROPERTY
            _ => return Err(-64),
        }
    }
    out.push(0);
    Ok(out)
}

fn context_notify(cx: &Cx<'_>, number: u64) -> (*const c_void, *const c_void) {
    if number == 0 { (null(), null()) } else { (on_context as *const c_void, once(cx, number)) }
}

pub(super) fn create_context(cx: &mut Cx<'_>, r: &wire::CreateContext<'_>) -> Done {
    let f = native!(cx, clCreateContext);
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let properties = context_properties(cx, r.platform, &r.properties)?;
    let (notify, user) = context_notify(cx, r.notify);
    cx.create(kind::CONTEXT, r.new, |code| {
        let properties = if properties.len() > 1 { properties.as_ptr().cast() } else { null() };
        // SAFETY: lists as long as said; the callback's data is never freed.
        unsafe { f(properties, devices.len() as u32, devices.as_ptr(), notify, user, code) }
    })
}

pub(super) fn create_context_from_type(cx: &mut Cx<'_>, r: &wire::CreateContextFromType<'_>) -> Done {
    let f = native!(cx, clCreateContextFromType);
    let properties = context_properties(cx, r.platform, &r.properties)?;
    let (notify, user) = context_notify(cx, r.notify);
    cx.create(kind::CONTEXT, r.new, |code| {
        // SAFETY: as above.
        unsafe { f(properties.as_ptr().cast(), r.device_type, notify, user, code) }
    })
}

pub(super) fn create_command_queue(cx: &mut Cx<'_>, r: &wire::CreateCommandQueue) -> Done {
    let f = native!(cx, clCreateCommandQueue);
    let (context, device) = (cx.get(kind::CONTEXT, r.context)?, cx.get(kind::DEVICE, r.device)?);
    let extra = Extra::default();
    // SAFETY: live handles.
    cx.create_with(kind::QUEUE, r.new, extra, |code| unsafe { f(context, device, r.properties, code) })
}

pub(super) fn create_command_queue_with_properties(
    cx: &mut Cx<'_>,
    r: &wire::CreateCommandQueueWithProperties<'_>,
) -> Done {
    let f = native!(cx, clCreateCommandQueueWithProperties);
    let (context, device) = (cx.get(kind::CONTEXT, r.context)?, cx.get(kind::DEVICE, r.device)?);
    let properties = ended(&r.properties)?;
    let extra = Extra::default();
    // SAFETY: live handles; the properties end with 0.
    cx.create_with(kind::QUEUE, r.new, extra, |code| unsafe { f(context, device, properties, code) })
}

/// A list of properties for the driver: null when empty, and otherwise pairs and a final 0.
fn ended(properties: &[i64]) -> Result<*const c_void, i32> {
    match properties {
        [] => Ok(null()),
        [.., 0] if properties.len() % 2 == 1 => Ok(properties.as_ptr().cast()),
        _ => Err(VALUE),
    }
}

pub(super) fn flush(cx: &mut Cx<'_>, r: &wire::Flush) -> Done {
    let queue = cx.get(kind::QUEUE, r.queue)?;
    let f = native!(cx, clFlush);
    // SAFETY: a live queue.
    cx.status(unsafe { f(queue) })
}

pub(super) fn finish(cx: &mut Cx<'_>, r: &wire::Finish) -> Done {
    let queue = cx.get(kind::QUEUE, r.queue)?;
    let f = native!(cx, clFinish);
    cx.may_block();
    // SAFETY: a live queue: the client can't release it meanwhile without harming only itself.
    cx.status(unsafe { f(queue) })?;
    match cx.cl.late.swap(0, Ordering::Relaxed) {
        0 => Ok(()),
        late => Err(late),
    }
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
fn unless(cx: &Cx<'_>, new: u64, ready: Done) -> Done {
    if ready.is_err() {
        cx.cl.release(kind::MEM, new);
    }
    ready
}

pub(super) fn create_buffer(cx: &mut Cx<'_>, r: &wire::CreateBuffer<'_>) -> Done {
    let context = cx.get(kind::CONTEXT, r.context)?;
    let window = &cx.cl.session().window;
    let size = usize::try_from(r.size).map_err(|_| VALUE)?;
    let properties = ended(&r.properties)?;
    let mut extra = Extra { size: r.size, ..Extra::default() };
    // A host pointer of the client means nothing here: its bytes lie in the window, or the buffer lives there.
    let (flags, pointer) = if r.home != 0 {
        let home = window.at(r.home, r.size).map_err(|_| VALUE)?;
        extra.home = home as usize;
        (r.flags & !(ALLOC_HOST_PTR | COPY_HOST_PTR) | USE_HOST_PTR, home.cast())
    } else if r.data != 0 {
        let data: *mut c_void = window.at(r.data, r.size).map_err(|_| VALUE)?.cast();
        (r.flags & !(USE_HOST_PTR | ALLOC_HOST_PTR) | COPY_HOST_PTR, data)
    } else {
        (r.flags, null_mut())
    };
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

pub(super) fn create_sub_buffer(cx: &mut Cx<'_>, r: &wire::CreateSubBuffer) -> Done {
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
        unsafe { f(buffer, r.flags, r.create_type, info.as_ptr().cast(), code) }
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

pub(super) fn create_image(cx: &mut Cx<'_>, r: &wire::CreateImage<'_>) -> Done {
    const IMAGE3D: u32 = 0x10f2;
    let f = native!(cx, clCreateImage);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let parent = cx.maybe(kind::MEM, r.parent)?;
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
    let (mut flags, mut pointer) = (r.flags, null_mut());
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
    create_mem(cx, r.new, bytes, 0, extra, |code| {
        // SAFETY: live handles; structures as the API has them; the pointer has what the image needs, checked above.
        unsafe { f(context, flags, format.as_ptr().cast(), (&raw const desc).cast(), pointer, code) }
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

pub(super) fn create_pipe(cx: &mut Cx<'_>, r: &wire::CreatePipe<'_>) -> Done {
    let f = native!(cx, clCreatePipe);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let properties = ended(&r.properties)?;
    let bytes = u64::from(r.packet_size).saturating_mul(u64::from(r.max_packets));
    create_mem(cx, r.new, bytes, 0, Extra::default(), |code| {
        // SAFETY: a live context; the properties end with 0.
        unsafe { f(context, r.flags, r.packet_size, r.max_packets, properties, code) }
    })
}

pub(super) fn get_supported_image_formats(cx: &mut Cx<'_>, r: &wire::GetSupportedImageFormats) -> Done {
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

pub(super) fn create_sampler_with_properties(
    cx: &mut Cx<'_>,
    r: &wire::CreateSamplerWithProperties<'_>,
) -> Done {
    let f = native!(cx, clCreateSamplerWithProperties);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let properties = ended(&r.properties)?;
    // SAFETY: a live context; the properties end with 0.
    cx.create(kind::SAMPLER, r.new, |code| unsafe { f(context, properties, code) })
}

pub(super) fn create_program_with_source(cx: &mut Cx<'_>, r: &wire::CreateProgramWithSource<'_>) -> Done {
    let f = native!(cx, clCreateProgramWithSource);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let (text, len) = (r.source.as_ptr(), r.source.len());
    cx.create(kind::PROGRAM, r.new, |code| {
        // SAFETY: one string of this length.
        unsafe { f(context, 1, (&raw const text).cast(), (&raw const len).cast(), code) }
    })
}

pub(super) fn create_program_with_binary(cx: &mut Cx<'_>, r: &wire::CreateProgramWithBinary<'_>) -> Done {
    let f = native!(cx, clCreateProgramWithBinary);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let mut rest = r.binaries;
    let mut starts = Vec::new();
    for len in r.lengths.iter() {
        let len = usize::try_from(*len).map_err(|_| VALUE)?;
        let (one, more) = rest.split_at_checked(len).ok_or(VALUE)?;
        starts.push(one.as_ptr());
        rest = more;
    }
    if starts.len() != devices.len() {
        return Err(VALUE);
    }
    let mut states = vec![0i32; devices.len()];
    cx.create(kind::PROGRAM, r.new, |code| {
        let (n, lengths) = (devices.len() as u32, r.lengths.as_ptr().cast());
        // SAFETY: lists as long as said; each binary lies in the record.
        unsafe {
            f(context, n, devices.as_ptr(), lengths, starts.as_ptr().cast(), states.as_mut_ptr().cast(), code)
        }
    })?;
    cx.reply().i32s(&states);
    Ok(())
}

pub(super) fn create_program_with_built_in_kernels(
    cx: &mut Cx<'_>,
    r: &wire::CreateProgramWithBuiltInKernels<'_>,
) -> Done {
    let f = native!(cx, clCreateProgramWithBuiltInKernels);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let names = cx.c_string(r.names)?;
    cx.create(kind::PROGRAM, r.new, |code| {
        // SAFETY: lists as long as said; a C string.
        unsafe { f(context, devices.len() as u32, devices.as_ptr(), names.as_ptr(), code) }
    })
}

pub(super) fn create_program_with_il(cx: &mut Cx<'_>, r: &wire::CreateProgramWithIL<'_>) -> Done {
    let f = native!(cx, clCreateProgramWithIL);
    let context = cx.get(kind::CONTEXT, r.context)?;
    cx.create(kind::PROGRAM, r.new, |code| {
        // SAFETY: bytes of this length.
        unsafe { f(context, r.il.as_ptr().cast(), r.il.len(), code) }
    })
}

fn optional(cx: &Cx<'_>, text: Option<&[u8]>) -> Result<Option<CString>, i32> {
    text.map(|t| cx.c_string(t)).transpose()
}

/// A program's options, with the folders of the files that came along before its own.
fn with_includes(
    cx: &Cx<'_>,
    options: Option<&[u8]>,
    (folders, files, texts): (&[u32], &[&[u8]], &[&[u8]]),
) -> Result<Option<CString>, i32> {
    // A worker's own folder (worker.rs).
    let mut all = super::include::keep(&std::env::temp_dir(), folders, files, texts)?.into_bytes();
    if all.is_empty() {
        return optional(cx, options);
    }
    all.extend_from_slice(options.unwrap_or_default());
    cx.c_string(&all).map(Some)
}

fn program_notify(cx: &Cx<'_>, number: u64) -> (*const c_void, *mut c_void) {
    if number == 0 { (null(), null_mut()) } else { (on_program as *const c_void, once(cx, number)) }
}

fn pointer_or_null<T>(list: &[T]) -> *const T {
    if list.is_empty() { null() } else { list.as_ptr() }
}

pub(super) fn build_program(cx: &mut Cx<'_>, r: &wire::BuildProgram<'_>) -> Done {
    let f = native!(cx, clBuildProgram);
    let program = cx.get(kind::PROGRAM, r.program)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let options = with_includes(cx, r.options, (&r.folders, &r.files, &r.texts))?;
    let (notify, user) = program_notify(cx, r.notify);
    cx.may_block();
    let text = options.as_ref().map_or(null(), |o| o.as_ptr());
    // SAFETY: lists as long as said; a C string or null; the callback's data is freed by the callback.
    cx.status(unsafe { f(program, devices.len() as u32, pointer_or_null(&devices), text, notify, user) })
}

pub(super) fn compile_program(cx: &mut Cx<'_>, r: &wire::CompileProgram<'_>) -> Done {
    let f = native!(cx, clCompileProgram);
    let program = cx.get(kind::PROGRAM, r.program)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let headers = cx.all(kind::PROGRAM, &r.headers)?;
    let options = with_includes(cx, r.options, (&r.folders, &r.files, &r.texts))?;
    let names = r.names.iter().map(|n| cx.c_string(n)).collect::<Result<Vec<_>, _>>()?;
    if names.len() != headers.len() {
        return Err(VALUE);
    }
    let names: Vec<_> = names.iter().map(|n| n.as_ptr()).collect();
    let (notify, user) = program_notify(cx, r.notify);
    cx.may_block();
    let text = options.as_ref().map_or(null(), |o| o.as_ptr());
    // SAFETY: as above.
    cx.status(unsafe {
        f(
            program,
            devices.len() as u32,
            pointer_or_null(&devices),
            text,
            headers.len() as u32,
            pointer_or_null(&headers),
            pointer_or_null(&names).cast(),
            notify,
            user,
        )
    })
}

pub(super) fn link_program(cx: &mut Cx<'_>, r: &wire::LinkProgram<'_>) -> Done {
    let f = native!(cx, clLinkProgram);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let programs = cx.all(kind::PROGRAM, &r.programs)?;
    let options = optional(cx, r.options)?;
    let (notify, user) = program_notify(cx, r.notify);
    cx.may_block();
    let text = options.as_ref().map_or(null(), |o| o.as_ptr());
    cx.create(kind::PROGRAM, r.new, |code| {
        // SAFETY: as above.
        unsafe {
            f(
                context,
                devices.len() as u32,
                pointer_or_null(&devices),
                text,
                programs.len() as u32,
                pointer_or_null(&programs),
                notify,
                user,
                code,
            )
        }
    })
}

pub(super) fn program_binaries(cx: &mut Cx<'_>, r: &wire::ProgramBinaries) -> Done {
    let f = native!(cx, clGetProgramInfo);
    let program = cx.get(kind::PROGRAM, r.program)?;
    // SAFETY (both): a live program; buffers as long as said.
    // SAFETY: live handles that were looked up; buffers and lists are as long as said.
    let (status, sizes) = value(&|s, v, ret| unsafe { f(program, 0x1165, s, v, ret) });
    cx.status(status)?;
    let sizes: Vec<usize> =
        sizes.chunks_exact(8).filter_map(|c| c.first_chunk().map(|c| usize::from_le_bytes(*c))).collect();
    if sizes.iter().sum::<usize>() > 256 << 20 {
        return Err(RESOURCES);
    }
    let mut binaries: Vec<Vec<u8>> = sizes.iter().map(|s| vec![0; *s]).collect();
    let pointers: Vec<*mut u8> = binaries.iter_mut().map(|b| b.as_mut_ptr()).collect();
    let size = size_of_val(&pointers[..]);
    // SAFETY: one pointer for each device, each with room for its binary.
    cx.status(unsafe { f(program, 0x1166, size, pointers.as_ptr().cast_mut().cast(), null_mut()) })?;
    let binaries: Vec<&[u8]> = binaries.iter().map(Vec::as_slice).collect();
    cx.reply().strs(&binaries);
    Ok(())
}

pub(super) fn create_kernel(cx: &mut Cx<'_>, r: &wire::CreateKernel<'_>) -> Done {
    let f = native!(cx, clCreateKernel);
    let program = cx.get(kind::PROGRAM, r.program)?;
    let name = cx.c_string(r.name)?;
    // SAFETY: a live program, a C string.
    cx.create(kind::KERNEL, r.new, |code| unsafe { f(program, name.as_ptr(), code) })
}

pub(super) fn create_kernels_in_program(cx: &mut Cx<'_>, r: &wire::CreateKernelsInProgram<'_>) -> Done {
    let f = native!(cx, clCreateKernelsInProgram);
    let program = cx.get(kind::PROGRAM, r.program)?;
    let mut made = vec![null_mut(); r.new.len()];
    let mut n = 0;
    let list = if made.is_empty() { null_mut() } else { made.as_mut_ptr() };
    // SAFETY: a live program; the list is as long as said.
    cx.status(unsafe { f(program, made.len() as u32, list, &mut n) })?;
    for (id, native) in r.new.iter().zip(made).take(n as usize) {
        cx.keep(kind::KERNEL, *id, native, Extra::default())?;
    }
    cx.reply().u32(n);
    Ok(())
}

pub(super) fn clone_kernel(cx: &mut Cx<'_>, r: &wire::CloneKernel) -> Done {
    let f = native!(cx, clCloneKernel);
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    // SAFETY: a live kernel.
    cx.create(kind::KERNEL, r.new, |code| unsafe { f(kernel, code) })
}

pub(super) fn set_kernel_arg(cx: &mut Cx<'_>, r: &wire::SetKernelArg<'_>) -> Done {
    let f = native!(cx, clSetKernelArg);
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    let size = usize::try_from(r.size).map_err(|_| VALUE)?;
    // SAFETY (all): a live kernel; the value has size bytes, or is null.
    match r.how {
        0 => {
            if r.value.len() != size {
                return Err(VALUE);
            }
            // SAFETY: live handles that were looked up; buffers and lists are as long as said.
            cx.status(unsafe { f(kernel, r.index, size, r.value.as_ptr().cast()) })
        }
        // SAFETY: live handles that were looked up; buffers and lists are as long as said.
        1 => cx.status(unsafe { f(kernel, r.index, size, null()) }),
        _ => {
            let kinds = [kind::MEM, kind::SAMPLER, kind::QUEUE];
            let native = kinds.into_iter().find_map(|k| cx.get(k, r.handle).ok());
            // CL_INVALID_ARG_VALUE
            let native = native.ok_or(-50)?;
            if size != size_of::<Handle>() {
                return Err(-51); // CL_INVALID_ARG_SIZE
            }
            // SAFETY: live handles that were looked up; buffers and lists are as long as said.
            cx.status(unsafe { f(kernel, r.index, size, (&raw const native).cast()) })
        }
    }
}

pub(super) fn get_kernel_sub_group_info(cx: &mut Cx<'_>, r: &wire::GetKernelSubGroupInfo<'_>) -> Done {
    let f = native!(cx, clGetKernelSubGroupInfo);
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    let device = cx.maybe(kind::DEVICE, r.device)?;
    let (len, input) = (r.input.len(), pointer_or_null(r.input));
    // SAFETY: live handles; lengths as said.
    cx.info(r.param, &[], |size, value, ret| unsafe {
        f(kernel, device, r.param, len, input.cast(), size, value.cast_const(), ret)
    })
}

pub(super) fn wait_for_events(cx: &mut Cx<'_>, r: &wire::WaitForEvents<'_>) -> Done {
    let f = native!(cx, clWaitForEvents);
    let events = cx.all(kind::EVENT, &r.events)?;
    cx.may_block();
    // SAFETY: live events; the list is as long as said.
    cx.status(unsafe { f(events.len() as u32, events.as_ptr()) })
}

pub(super) fn create_user_event(cx: &mut Cx<'_>, r: &wire::CreateUserEvent) -> Done {
    let f = native!(cx, clCreateUserEvent);
    let context = cx.get(kind::CONTEXT, r.context)?;
    // SAFETY: a live context.
    cx.create(kind::EVENT, r.new, |code| unsafe { f(context, code) })
}

pub(super) fn set_user_event_status(cx: &mut Cx<'_>, r: &wire::SetUserEventStatus) -> Done {
    let f = native!(cx, clSetUserEventStatus);
    let event = cx.get(kind::EVENT, r.event)?;
    // SAFETY: a live event.
    cx.status(unsafe { f(event, r.execution_status) })
}

pub(super) fn set_event_callback(cx: &mut Cx<'_>, r: &wire::SetEventCallback) -> Done {
    let f = native!(cx, clSetEventCallback);
    let event = cx.get(kind::EVENT, r.event)?;
    let user = once(cx, r.notify);
    // SAFETY: a live event; the callback's data is freed by the callback, or here if the driver refused.
    let status = unsafe { f(event, r.callback_type, on_event as *const c_void, user) };
    if status != 0 {
        // SAFETY: from once(), and nobody else has it.
        drop(unsafe { Box::from_raw(user.cast::<Notify>()) });
    }
    cx.status(status)
}

/// The address of a range of the window that the client offers for a transfer.
fn offered(cx: &Cx<'_>, at: u64, len: u64) -> Result<*mut c_void, i32> {
    if at == 0 {
        return Err(VALUE);
    }
    Ok(cx.cl.session().window.at(at, len).map_err(|_| VALUE)?.cast())
}

pub(super) fn enqueue_read_buffer(cx: &mut Cx<'_>, r: &wire::EnqueueReadBuffer<'_>) -> Done {
    let f = native!(cx, clEnqueueReadBuffer);
    let (queue, buffer) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.buffer)?);
    let to = offered(cx, r.data, r.size)?;
    let (offset, size) = (r.offset as usize, r.size as usize);
    // SAFETY: live handles; the range lies in the buffer (checked before) and in the window.
    cx.fill(&r.waits, r.event, (r.ticket, r.blocking != 0), (r.data, r.size), |n, list, event| unsafe {
        f(queue, buffer, r.blocking, offset, size, to, n, list, event)
    })
}

/// Bytes of a record that a command reads until it has ended.
unsafe extern "C" fn on_read(_event: Handle, _status: i32, user: *mut c_void) {
    // SAFETY: from enqueue_write_buffer(), and the driver calls once.
    drop(unsafe { Box::from_raw(user.cast::<Vec<u8>>()) });
}

pub(super) fn enqueue_write_buffer(cx: &mut Cx<'_>, r: &wire::EnqueueWriteBuffer<'_>) -> Done {
    let f = native!(cx, clEnqueueWriteBuffer);
    let (queue, buffer) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.buffer)?);
    let (offset, size) = (r.offset as usize, r.size as usize);
    if size == 0 {
        let marker = native!(cx, clEnqueueMarkerWithWaitList);
        // SAFETY: a live queue.
        return cx.transfer(&r.waits, r.event, r.ticket, None, |n, list, event| unsafe {
            marker(queue, n, list, event)
        });
    }
    if r.inline.is_empty() {
        let from = offered(cx, r.data, r.size)?;
        // SAFETY: live handles; the range lies in the buffer (checked before) and in the window.
        return cx.transfer(&r.waits, r.event, r.ticket, None, |n, list, event| unsafe {
            f(queue, buffer, 0, offset, size, from, n, list, event)
        });
    }
    cx.same_length(r.inline, r.size)?;
    let bytes = Box::into_raw(Box::new(r.inline.to_vec()));
    let mut native: Handle = null_mut();
    // SAFETY: as above; the bytes live until the command has ended.
    let sent = cx.enqueue_into(&r.waits, r.event, &mut native, |n, list, event| unsafe {
        f(queue, buffer, 0, offset, size, (*bytes).as_ptr().cast(), n, list, event)
    });
    if sent.is_err() {
        // SAFETY: the driver refused the command, nobody reads the bytes.
        drop(unsafe { Box::from_raw(bytes) });
        return sent;
    }
    let (set, release) = (native!(cx, clSetEventCallback), native!(cx, clReleaseEvent));
    // SAFETY: a live event; the callback frees the bytes. Our reference goes to the table, or is given up.
    unsafe {
        set(native, 0, on_read as *const c_void, bytes.cast());
        if r.event == 0 {
            release(native);
        }
    }
    if r.event != 0 {
        cx.keep(kind::EVENT, r.event, native, Extra::default())?;
    }
    Ok(())
}

pub(super) fn enqueue_read_buffer_rect(cx: &mut Cx<'_>, r: &wire::EnqueueReadBufferRect<'_>) -> Done {
    let f = native!(cx, clEnqueueReadBufferRect);
    let (queue, buffer) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.buffer)?);
    let len = r.region.iter().try_fold(1u64, |n, v| n.checked_mul(*v)).ok_or(VALUE)?;
    let to = offered(cx, r.data, len)?;
    let (origin, region) = (r.origin.map(|v| v as usize), r.region.map(|v| v as usize));
    let (row, slice, zero) = (r.row_pitch as usize, r.slice_pitch as usize, [0usize; 3]);
    cx.fill(&r.waits, r.event, (r.ticket, r.blocking != 0), (r.data, len), |n, list, event| {
        let (o, z, g) = (origin.as_ptr(), zero.as_ptr(), region.as_ptr());
        // SAFETY: live handles; the rectangle lies in the buffer (checked before), its packed bytes in the window.
        unsafe { f(queue, buffer, r.blocking, o, z, g, row, slice, 0, 0, to, n, list, event) }
    })
}

pub(super) fn enqueue_write_buffer_rect(cx: &mut Cx<'_>, r: &wire::EnqueueWriteBufferRect<'_>) -> Done {
    let f = native!(cx, clEnqueueWriteBufferRect);
    let (queue, buffer) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.buffer)?);
    let len = r.region.iter().try_fold(1u64, |n, v| n.checked_mul(*v)).ok_or(VALUE)?;
    let from = offered(cx, r.data, len)?;
    let (origin, region) = (r.origin.map(|v| v as usize), r.region.map(|v| v as usize));
    let (row, slice, zero) = (r.row_pitch as usize, r.slice_pitch as usize, [0usize; 3]);
    cx.transfer(&r.waits, r.event, r.ticket, None, |n, list, event| {
        let (o, z, g) = (origin.as_ptr(), zero.as_ptr(), region.as_ptr());
        // SAFETY: as above.
        unsafe { f(queue, buffer, 0, o, z, g, row, slice, 0, 0, from, n, list, event) }
    })
}

pub(super) fn enqueue_read_image(cx: &mut Cx<'_>, r: &wire::EnqueueReadImage<'_>) -> Done {
    let f = native!(cx, clEnqueueReadImage);
    let (queue, image) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.image)?);
    let len = cx.packed(r.image, r.region)?;
    let to = offered(cx, r.data, len)?;
    let (origin, region) = (r.origin.map(|v| v as usize), r.region.map(|v| v as usize));
    cx.fill(&r.waits, r.event, (r.ticket, r.blocking != 0), (r.data, len), |n, list, event| {
        // SAFETY: live handles; the region lies in the image (checked before), its packed pixels in the window.
        unsafe { f(queue, image, r.blocking, origin.as_ptr(), region.as_ptr(), 0, 0, to, n, list, event) }
    })
}

pub(super) fn enqueue_write_image(cx: &mut Cx<'_>, r: &wire::EnqueueWriteImage<'_>) -> Done {
    let f = native!(cx, clEnqueueWriteImage);
    let (queue, image) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.image)?);
    let len = cx.packed(r.image, r.region)?;
    let from = offered(cx, r.data, len)?;
    let (origin, region) = (r.origin.map(|v| v as usize), r.region.map(|v| v as usize));
    cx.transfer(&r.waits, r.event, r.ticket, None, |n, list, event| {
        // SAFETY: as above.
        unsafe { f(queue, image, 0, origin.as_ptr(), region.as_ptr(), 0, 0, from, n, list, event) }
    })
}

pub(super) fn enqueue_map_home(cx: &mut Cx<'_>, r: &wire::EnqueueMapHome<'_>) -> Done {
    const BLOCKING: u64 = 1 << 63;
    let f = native!(cx, clEnqueueMapBuffer);
    let (queue, buffer) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.buffer)?);
    if cx.of(r.buffer, |e| e.home)? == 0 {
        return Err(VALUE);
    }
    let (offset, size) = (r.offset as usize, r.size as usize);
    let blocking = u32::from(r.flags & BLOCKING != 0);
    if blocking != 0 {
        cx.may_block();
    }
    cx.enqueue(&r.waits, r.event, |n, list, event| {
        let mut code = 0;
        // SAFETY: live handles; the range lies in the buffer (checked before).
        unsafe { f(queue, buffer, blocking, r.flags & !BLOCKING, offset, size, n, list, event, &mut code) };
        code
    })
}

pub(super) fn enqueue_unmap_home(cx: &mut Cx<'_>, r: &wire::EnqueueUnmapHome<'_>) -> Done {
    let f = native!(cx, clEnqueueUnmapMemObject);
    let (queue, buffer) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::MEM, r.buffer)?);
    let home = cx.of(r.buffer, |e| e.home)?;
    if home == 0 {
        return Err(VALUE);
    }
    let mapped = home.wrapping_add(r.offset as usize) as *const c_void;
    // SAFETY: live handles; the driver checks that this address is mapped.
    cx.enqueue(&r.waits, r.event, |n, list, event| unsafe { f(queue, buffer, mapped, n, list, event) })
}

pub(super) fn enqueue_nd_range_kernel(cx: &mut Cx<'_>, r: &wire::EnqueueNDRangeKernel<'_>) -> Done {
    let f = native!(cx, clEnqueueNDRangeKernel);
    let (queue, kernel) = (cx.get(kind::QUEUE, r.queue)?, cx.get(kind::KERNEL, r.kernel)?);
    if !(1..=3).contains(&r.work_dim) {
        return Err(-53); // CL_INVALID_WORK_DIMENSION
    }
    let sizes = [r.offset, r.global, r.local].map(|t| t.map(|v| v as usize));
    let given = |bit: u32| -> *const c_void {
        if r.present & 1 << bit == 0 { null() } else { sizes[bit as usize].as_ptr().cast() }
    };
    let (offset, global, local) = (given(0), given(1), given(2));
    cx.enqueue(&r.waits, r.event, |n, list, event| {
        // SAFETY: live handles; three numbers each, or null.
        unsafe { f(queue, kernel, r.work_dim, offset, global, local, n, list, event) }
    })
}

pub(super) use super::svm::{
    alloc as svm_alloc, fill as enqueue_svm_mem_fill, free as svm_free, map as enqueue_svm_map,
    memcpy as enqueue_svm_memcpy, migrate as enqueue_svm_migrate_mem, set_arg as set_kernel_arg_svm_pointer,
    set_exec_info as set_kernel_exec_info, unmap as enqueue_svm_unmap,
};
