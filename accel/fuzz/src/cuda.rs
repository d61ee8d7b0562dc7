// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A CUDA driver that takes every call. Handles are one address; whatever it is told is memory, it touches at the first and the last byte. Its device memory lies at an
//! address that an input can name.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use tombolo_accel_spec::code;
use tombolo_accel_spec::cuda::{Memcpy3d, MemsetNodeParams};

type Handle = *mut c_void;

/// Where device memory begins.
const BASE: usize = 64 << 24;
/// What there is of it. Every allocation is a page.
const PAGES: usize = 16;
const PAGE: usize = 4096;

/// The object that every handle points to.
static OBJECT: u64 = 0;

/// The pages that are taken.
static TAKEN: std::sync::Mutex<[bool; PAGES]> = std::sync::Mutex::new([false; PAGES]);

/// Maps device memory: nothing else is near.
fn memory() -> usize {
    static MEMORY: OnceLock<usize> = OnceLock::new();
    *MEMORY.get_or_init(|| {
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
        );
        // SAFETY: fresh pages where nothing is mapped, or an error.
        let at = unsafe { libc::mmap(BASE as Handle, PAGES * PAGE, access, flags, -1, 0) };
        assert_eq!(at as usize, BASE, "nothing else is mapped there");
        BASE
    })
}

fn touch(address: usize, len: usize) {
    if len > 0 {
        // SAFETY: the server checked the range; that it did is what is tested here.
        unsafe {
            (address as *mut u8).write_volatile(1);
            ((address + len - 1) as *mut u8).write_volatile(1);
        }
    }
}

fn look(address: usize, len: usize) {
    if len > 0 {
        // SAFETY: as above.
        unsafe {
            (address as *const u8).read_volatile();
            ((address + len - 1) as *const u8).read_volatile();
        }
    }
}

// Called with more arguments than these take: the caller removes them, on every system that this runs on.
extern "C" fn done() -> i32 {
    0
}

unsafe extern "C" fn made(to: *mut Handle) -> i32 {
    // SAFETY: room for a handle.
    unsafe { to.write(std::ptr::from_ref(&OBJECT).cast_mut().cast()) };
    0
}

unsafe extern "C" fn made_second(_first: Handle, to: *mut Handle) -> i32 {
    // SAFETY: room for a handle.
    unsafe { made(to) }
}

unsafe extern "C" fn count(to: *mut i32) -> i32 {
    // SAFETY: room for a number.
    unsafe { to.write(1) };
    0
}

unsafe extern "C" fn load(to: *mut Handle, image: *const u8) -> i32 {
    // SAFETY: the server checked that the image has what it says; that it did is what is tested here.
    let read =
        |at: u64, len: u64| Some(unsafe { std::slice::from_raw_parts(image.add(at as usize), len as usize) });
    look(image as usize, code::length(&read).expect("an image") as usize);
    // SAFETY: room for a handle.
    unsafe { made(to) }
}

/// A kernel of three parameters.
unsafe extern "C" fn parameter(_f: Handle, index: usize, offset: *mut usize, size: *mut usize) -> i32 {
    if index > 2 {
        return 1;
    }
    // SAFETY: room for two sizes.
    unsafe {
        offset.write(index * 8);
        size.write(8);
    }
    0
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn launch(
    _f: Handle,
    _gx: u32,
    _gy: u32,
    _gz: u32,
    _bx: u32,
    _by: u32,
    _bz: u32,
    _shared: u32,
    _stream: Handle,
    each: *const usize,
) -> i32 {
    // SAFETY: three pointers to eight bytes each.
    unsafe { std::slice::from_raw_parts(each, 3) }.iter().for_each(|from| look(*from, 8));
    0
}

unsafe extern "C" fn variable(to: *mut u64, len: *mut usize) -> i32 {
    // SAFETY: room for an address and a size.
    unsafe {
        to.write(memory() as u64);
        len.write(16);
    }
    0
}

unsafe extern "C" fn allocate(to: *mut u64, len: usize) -> i32 {
    let mut taken = TAKEN.lock().expect("a panic ends the process");
    match taken.iter().skip(1).position(|taken| !taken).filter(|_| (1..=PAGE).contains(&len)) {
        None => 2,
        Some(page) => {
            taken[page + 1] = true;
            // SAFETY: room for an address.
            unsafe { to.write((memory() + (page + 1) * PAGE) as u64) };
            0
        }
    }
}

unsafe extern "C" fn allocate_pitch(to: *mut u64, pitch: *mut usize, width: usize, height: usize) -> i32 {
    if width > 256 || height > 16 {
        return 2;
    }
    // SAFETY: room for an address and a size.
    unsafe {
        pitch.write(256);
        allocate(to, 256 * height)
    }
}

extern "C" fn free(address: u64) -> i32 {
    let page = (address as usize - memory()) / PAGE;
    let mut taken = TAKEN.lock().expect("a panic ends the process");
    assert!(std::mem::take(&mut taken[page]), "freed once");
    0
}

macro_rules! sets {
    ($($flat:ident $rows:ident $size:literal),*) => {
        $(
            extern "C" fn $flat(to: usize, _value: u32, count: usize) -> i32 {
                touch(to, count * $size);
                0
            }

            extern "C" fn $rows(to: usize, pitch: usize, _value: u32, width: usize, height: usize) -> i32 {
                for row in 0..height {
                    touch(to + row * pitch, width * $size);
                }
                0
            }
        )*
    };
}
sets!(flat8 rows8 1, flat16 rows16 2, flat32 rows32 4);

extern "C" fn copy(to: usize, from: usize, len: usize) -> i32 {
    touch(to, len);
    look(from, len);
    0
}

unsafe extern "C" fn node_made(to: *mut Handle, _graph: Handle, after: *const Handle, count: usize) -> i32 {
    // SAFETY: so many nodes, and room for a handle.
    unsafe {
        (0..count).for_each(|i| assert!(!after.add(i).read().is_null(), "a node is a handle"));
        made(to)
    }
}

unsafe extern "C" fn kernel_node(
    to: *mut Handle,
    graph: Handle,
    after: *const Handle,
    count: usize,
    params: *const usize,
) -> i32 {
    // SAFETY: CUDA_KERNEL_NODE_PARAMS: the sixth word leads to three pointers to eight bytes each.
    unsafe {
        std::slice::from_raw_parts(params.add(5).read() as *const usize, 3)
            .iter()
            .for_each(|from| look(*from, 8));
        node_made(to, graph, after, count)
    }
}

/// A copy as CUDA_MEMCPY3D describes it: touches every row.
unsafe extern "C" fn cuboid(copy: *const Memcpy3d) -> i32 {
    // SAFETY: a description, as the API says.
    let c = unsafe { &*copy };
    assert!(c.srcArray == 0 && c.dstArray == 0 && c.srcZ == 0 && c.dstY == 0, "only what was checked");
    let side = |memory, host, device: u64| if memory == 2 { device as usize } else { host };
    let (from, to) =
        (side(c.srcMemoryType, c.srcHost, c.srcDevice), side(c.dstMemoryType, c.dstHost, c.dstDevice));
    for slice in 0..c.Depth {
        for row in 0..c.Height {
            touch(to + (slice * c.dstHeight + row) * c.dstPitch, c.WidthInBytes);
            look(from + (slice * c.srcHeight + row) * c.srcPitch, c.WidthInBytes);
        }
    }
    0
}

unsafe extern "C" fn copy_node(
    to: *mut Handle,
    graph: Handle,
    after: *const Handle,
    count: usize,
    copy: *const Memcpy3d,
) -> i32 {
    // SAFETY: as above.
    unsafe {
        cuboid(copy);
        node_made(to, graph, after, count)
    }
}

unsafe extern "C" fn fill_node(
    to: *mut Handle,
    graph: Handle,
    after: *const Handle,
    count: usize,
    fill: *const MemsetNodeParams,
) -> i32 {
    // SAFETY: a description, as the API says.
    unsafe {
        let MemsetNodeParams { dst, pitch, elementSize, width, height, .. } = *fill;
        (0..height).for_each(|row| touch(dst as usize + row * pitch, width * elementSize as usize));
        node_made(to, graph, after, count)
    }
}

/// A graph of one node.
unsafe extern "C" fn nodes(_graph: Handle, to: *mut Handle, count: *mut usize) -> i32 {
    // SAFETY: room for a size, and where it says so for a handle.
    unsafe {
        if !to.is_null() {
            made(to);
        }
        count.write(1);
    }
    0
}

/// The data of functions that are never called.
static KEPT: std::sync::Mutex<Vec<usize>> = std::sync::Mutex::new(Vec::new());

extern "C" fn host(_stream: Handle, _function: usize, data: usize) -> i32 {
    KEPT.lock().expect("a panic ends the process").push(data);
    0
}

unsafe extern "C" fn host_node(
    to: *mut Handle,
    graph: Handle,
    after: *const Handle,
    count: usize,
    params: *const usize,
) -> i32 {
    // SAFETY: CUDA_HOST_NODE_PARAMS: a function and its data.
    unsafe {
        host(graph, params.read(), params.add(1).read());
        node_made(to, graph, after, count)
    }
}

unsafe extern "C" fn host_params(_node: Handle, params: *const usize) -> i32 {
    // SAFETY: as above.
    unsafe { host(_node, params.read(), params.add(1).read()) }
}

unsafe extern "C" fn host_params_in(_exec: Handle, node: Handle, params: *const usize) -> i32 {
    // SAFETY: as above.
    unsafe { host_params(node, params) }
}

/// The function of a name.
pub fn find(name: &CStr) -> *mut c_void {
    let name = name.to_str().unwrap_or_default();
    match name.trim_end_matches("_v2").trim_end_matches("Async") {
        "cuDeviceGetCount" => count as *mut c_void,
        "cuDevicePrimaryCtxRetain" | "cuCtxCreate" | "cuModuleGetFunction" | "cuLibraryGetKernel" => {
            made as *mut c_void
        }
        "cuKernelGetFunction" | "cuLibraryGetModule" | "cuStreamCreate" | "cuStreamCreateWithPriority" => {
            made as *mut c_void
        }
        "cuEventCreate" | "cuGraphInstantiateWithFlags" | "cuGraphCreate" => made as *mut c_void,
        "cuStreamEndCapture" => made_second as *mut c_void,
        "cuModuleLoadDataEx" | "cuLibraryLoadData" => load as *mut c_void,
        "cuFuncGetParamInfo" | "cuKernelGetParamInfo" => parameter as *mut c_void,
        "cuLaunchKernel" | "cuLaunchCooperativeKernel" => launch as *mut c_void,
        "cuModuleGetGlobal" | "cuLibraryGetGlobal" => variable as *mut c_void,
        "cuMemAlloc" => allocate as *mut c_void,
        "cuMemAllocPitch" => allocate_pitch as *mut c_void,
        "cuMemFree" => free as *mut c_void,
        "cuMemsetD8" => flat8 as *mut c_void,
        "cuMemsetD16" => flat16 as *mut c_void,
        "cuMemsetD32" => flat32 as *mut c_void,
        "cuMemsetD2D8" => rows8 as *mut c_void,
        "cuMemsetD2D16" => rows16 as *mut c_void,
        "cuMemsetD2D32" => rows32 as *mut c_void,
        "cuMemcpyHtoD" | "cuMemcpyDtoH" | "cuMemcpyDtoD" => copy as *mut c_void,
        "cuMemcpy3D" => cuboid as *mut c_void,
        "cuGraphAddEmptyNode" | "cuGraphAddChildGraphNode" => node_made as *mut c_void,
        "cuGraphAddKernelNode" => kernel_node as *mut c_void,
        "cuGraphAddMemcpyNode" => copy_node as *mut c_void,
        "cuGraphAddMemsetNode" => fill_node as *mut c_void,
        "cuGraphAddHostNode" => host_node as *mut c_void,
        "cuGraphHostNodeSetParams" => host_params as *mut c_void,
        "cuGraphExecHostNodeSetParams" => host_params_in as *mut c_void,
        "cuLaunchHostFunc" | "cuStreamAddCallback" => host as *mut c_void,
        "cuGraphGetNodes" | "cuGraphGetRootNodes" => nodes as *mut c_void,
        "cuGraphClone" | "cuDeviceGetDefaultMemPool" | "cuMemPoolCreate" => made as *mut c_void,
        "cuMemAllocFromPool" => allocate as *mut c_void,
        _ => done as *mut c_void,
    }
}
