// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Platforms and devices, and what never changes about them.

use super::{Done, listed, value};
use crate::opencl::{Cx, Extra, Handle, OpenCl, key, lock, properties};
use std::ops::RangeInclusive;
use std::path::Path;
use std::ptr::null_mut;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_accel_spec::wire::Encoder;
use tombolo_calls::say;

/// Says in the log why there is nothing to serve.
fn no_platform(code: i32) {
    let given = std::env::var_os("OCL_ICD_VENDORS");
    let place = given.as_ref().map_or("/etc/OpenCL/vendors".as_ref(), Path::new);
    let why =
        match place.metadata().and_then(|m| if m.is_dir() { place.read_dir().map(drop) } else { Ok(()) }) {
            Ok(()) => "its files name no driver that loads here".to_string(),
            Err(e) => format!("a worker can't read it: {e}"),
        };
    let from = if given.is_some() { " (OCL_ICD_VENDORS)" } else { "" };
    say!(
        "tombolo accel: no OpenCL platform (code {code}): the loader looked in {}{from}, and {why}. Workers read programs and libraries of the system only (/usr, /lib, /etc, /opt): drivers and the files that name them belong there",
        place.display()
    );
}

/// The types of devices that programs ask for, each with the list of its devices in the snapshot.
const DEVICE_TYPES: [u64; 5] = [
    cl::DEVICE_TYPE_DEFAULT,
    cl::DEVICE_TYPE_CPU,
    cl::DEVICE_TYPE_GPU,
    cl::DEVICE_TYPE_ACCELERATOR,
    cl::DEVICE_TYPE_ALL,
];
/// The properties of devices in the snapshot.
const DEVICE_PROPERTIES: RangeInclusive<u32> = cl::DEVICE_TYPE..=cl::DEVICE_KERNEL_CLOCK_CAPABILITIES_KHR;
const DEVICE_PROPERTIES_NV: RangeInclusive<u32> =
    cl::DEVICE_COMPUTE_CAPABILITY_MAJOR_NV..=cl::DEVICE_WARP_SIZE_NV;
/// Properties of devices that aren't in the snapshot: handles, which the client answers, and what changes.
const CHANGING: [u32; 4] =
    [cl::DEVICE_AVAILABLE, cl::DEVICE_PLATFORM, cl::DEVICE_PARENT_DEVICE, cl::DEVICE_REFERENCE_COUNT];

/// Platforms, then devices, numbered in this order; and what never changes about them.
pub(crate) fn snapshot(cl: &OpenCl, reply: &mut Vec<u8>) -> Done {
    let n = &cl.native;
    let (platform_ids, platform_info) =
        (n.clGetPlatformIDs.ok_or(wire::UNSUPPORTED)?, n.clGetPlatformInfo.ok_or(wire::UNSUPPORTED)?);
    let (device_ids, device_info) =
        (n.clGetDeviceIDs.ok_or(wire::UNSUPPORTED)?, n.clGetDeviceInfo.ok_or(wire::UNSUPPORTED)?);
    // SAFETY: handles come from the driver itself; buffers are as long as said.
    let platforms = listed(|n, list, count| unsafe { platform_ids(n, list, count) })
        .inspect_err(|code| no_platform(*code))?;
    let mut roots: Vec<(u32, u64, Handle)> = platforms.iter().map(|p| (kind::PLATFORM, 0, *p)).collect();
    for (i, platform) in platforms.iter().enumerate() {
        let all = cl::DEVICE_TYPE_ALL;
        // SAFETY: as above.
        let devices = listed(|n, list, count| unsafe { device_ids(*platform, all, n, list, count) });
        roots.extend(devices.unwrap_or_default().into_iter().map(|d| (kind::DEVICE, i as u64 + 1, d)));
    }
    let mut answers: Vec<(Vec<u8>, i32, Vec<u8>)> = Vec::new();
    {
        let mut table = lock(&cl.table);
        for (i, (kind, _, native)) in roots.iter().enumerate() {
            let extra = Extra { root: true, ..Extra::default() };
            table.put(*kind, i as u64 + 1, Ok(*native as usize), extra).map_err(|_| cl::OUT_OF_RESOURCES)?;
        }
    }
    for (i, (kind, _, native)) in roots.iter().enumerate() {
        let id = i as u64 + 1;
        if *kind == kind::PLATFORM {
            for param in cl::PLATFORM_PROFILE..=cl::PLATFORM_EXTENSIONS_WITH_VERSION {
                // SAFETY: as above.
                let (status, bytes) = value(&|s, v, r| unsafe { platform_info(*native, param, s, v, r) });
                answers.push((key(&wire::GetPlatformInfo { platform: id, param }), status, bytes));
            }
            for device_type in DEVICE_TYPES {
                // SAFETY: as above.
                let found = listed(|n, list, c| unsafe { device_ids(*native, device_type, n, list, c) });
                let (status, bytes) = ids_of(&roots, found);
                answers.push((key(&wire::GetDeviceIDs { platform: id, device_type }), status, bytes));
            }
        } else {
            for param in DEVICE_PROPERTIES.chain(DEVICE_PROPERTIES_NV).filter(|p| !CHANGING.contains(p)) {
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

pub(crate) fn get_device_ids(cx: &mut Cx<'_>, r: &wire::GetDeviceIDs) -> Done {
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

pub(crate) fn create_sub_devices(cx: &mut Cx<'_>, r: &wire::CreateSubDevices<'_>) -> Done {
    let device = cx.get(kind::DEVICE, r.device)?;
    let f = native!(cx, clCreateSubDevices);
    if !properties::partition(&r.properties) {
        return Err(cl::INVALID_VALUE);
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
