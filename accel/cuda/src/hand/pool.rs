// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pools, and memory that a stream allocates and frees in its order. Which pool is a device's is known here.

use super::device::{device, read};
use super::exported;
use super::memory::own;
use crate::rt::{self, ARENA, Handle, Id, Obj, Out};
use crate::state::ranges;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tombolo_accel_spec::cuda::{self as wire, cu, kind};
use tombolo_accel_spec::wire::Decoder;

/// The pools of a device: its default one, and the one that the program has made its own.
#[derive(Default)]
struct Pools {
    default: Option<Obj>,
    current: Option<usize>,
}

static POOLS: Mutex<Option<HashMap<i32, Pools>>> = Mutex::new(None);

fn pools() -> MutexGuard<'static, Option<HashMap<i32, Pools>>> {
    POOLS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pool(handle: Handle) -> Result<Obj, i32> {
    rt::object(handle, kind::POOL)
}

fn default_pool(dev: i32) -> Result<Handle, i32> {
    let number = rt::device(dev)?;
    let mut all = pools();
    let pools = all.get_or_insert_default().entry(dev).or_default();
    if pools.default.is_none() {
        let new = rt::fresh(kind::POOL, false)?;
        rt::call(&wire::DeviceGetDefaultMemPool { dev: number, new: new.id() })?;
        pools.default = Some(new.keep());
    }
    pools.default.map(|pool| pool.handle()).ok_or(cu::CUDA_ERROR_INVALID_HANDLE)
}

/// The device of a location: CU_MEM_LOCATION_TYPE_DEVICE and its number.
fn place(kind: u32, id: i32) -> Result<i32, i32> {
    if kind == 1 { Ok(id) } else { Err(wire::UNSUPPORTED) }
}

fn current_pool(dev: i32) -> Result<Handle, i32> {
    device(dev)?;
    let chosen = pools().get_or_insert_default().entry(dev).or_default().current;
    chosen.map_or_else(|| default_pool(dev), |handle| Ok(handle as Handle))
}

fn choose(dev: i32, handle: Handle) -> Result<(), i32> {
    device(dev)?;
    pool(handle)?;
    pools().get_or_insert_default().entry(dev).or_default().current = Some(handle as usize);
    Ok(())
}

/// The pool that a stream takes memory from where no other is named, if it is not the device's default one.
fn chosen() -> Option<Handle> {
    let mut dev = 0;
    // SAFETY: room for a number.
    super::result(unsafe { super::cuCtxGetDevice(Out::of(&raw mut dev)) }).ok()?;
    pools().get_or_insert_default().get(&dev)?.current.map(|handle| handle as Handle)
}

fn stream(handle: Handle) -> Result<u64, i32> {
    Ok(rt::maybe(handle, kind::STREAM)?.map_or(0, |stream| stream.id()))
}

fn allocate(to: *const c_void, bytes: usize, from: Option<Handle>, of: Handle) -> Result<(), i32> {
    // SAFETY: null, or room for an address, as the API says.
    let to = unsafe { Out::<u64>::of(to.cast_mut().cast()) };
    if to.is_null() || bytes == 0 {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let (stream, current, bytesize) = (stream(of)?, rt::current(), bytes as u64);
    let reply = match from {
        Some(from) => {
            let pool = pool(from)?.id();
            rt::call(&wire::MemAllocFromPoolAsync { bytesize, pool, hStream: stream, current })
        }
        None => rt::call(&wire::MemAllocAsync { bytesize, hStream: stream, current }),
    }?;
    let start = Decoder::new(&reply).u64().map_err(|_| wire::LOST)?;
    own(start, bytesize);
    to.set(start)
}

/// CUmemPoolProps, as far as it is looked at.
#[repr(C)]
#[derive(Clone, Copy)]
struct Props {
    allocation: u32,
    handles: u32,
    location: u32,
    device: i32,
    security: usize,
    most: usize,
}

/// CUmemLocation
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: u32,
    id: i32,
}

/// The first attributes are 32 bits wide, the others 64.
const LAST_SHORT: u32 = 3;

exported! {
    fn cuDeviceGetDefaultMemPool(to: Out<Handle>, dev: i32) {
        to.set(default_pool(dev)?)
    }

    fn cuDeviceGetMemPool(to: Out<Handle>, dev: i32) {
        to.set(current_pool(dev)?)
    }

    fn cuDeviceSetMemPool(dev: i32, pool: Handle) {
        choose(dev, pool)
    }

    fn cuMemGetDefaultMemPool(to: Out<Handle>, at: *const c_void, _kind: u32) {
        // SAFETY: a location, as the API says.
        let Location { kind, id } = unsafe { read(at) }?;
        to.set(default_pool(place(kind, id)?)?)
    }

    fn cuMemGetMemPool(to: Out<Handle>, at: *const c_void, _kind: u32) {
        // SAFETY: a location, as the API says.
        let Location { kind, id } = unsafe { read(at) }?;
        to.set(current_pool(place(kind, id)?)?)
    }

    fn cuMemSetMemPool(at: *const c_void, _kind: u32, pool: Handle) {
        // SAFETY: a location, as the API says.
        let Location { kind, id } = unsafe { read(at) }?;
        choose(place(kind, id)?, pool)
    }

    fn cuMemPoolCreate(to: Out<Handle>, props: *const c_void) {
        // SAFETY: properties, as the API says.
        let props: Props = unsafe { read(props) }?;
        if props.handles != 0 {
            return Err(wire::UNSUPPORTED);
        }
        let number = rt::device(place(props.location, props.device)?)?;
        let new = rt::fresh(kind::POOL, to.is_null())?;
        rt::call(&wire::MemPoolCreate { dev: number, maxSize: props.most as u64, new: new.id() })?;
        to.set(new.publish())
    }

    fn cuMemPoolDestroy(handle: Handle) {
        let object = pool(handle)?;
        let mut all = pools();
        let pools = all.get_or_insert_default();
        if pools.values().any(|pools| pools.default == Some(object)) {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        // The device's own one is again what it was before.
        pools.values_mut().filter(|p| p.current == Some(handle as usize)).for_each(|p| p.current = None);
        ARENA.release(object);
        Ok(())
    }

    fn cuMemPoolSetAttribute(handle: Handle, attribute: u32, value: *const c_void) {
        let pool = pool(handle)?.id();
        // SAFETY: a value as wide as the attribute, as the API says.
        let value = unsafe {
            if attribute <= LAST_SHORT { u64::from(read::<u32>(value)?) } else { read::<u64>(value)? }
        };
        rt::call(&wire::MemPoolSetAttribute { pool, attr: attribute, value }).map(drop)
    }

    fn cuMemPoolGetAttribute(handle: Handle, attribute: u32, value: *const c_void) {
        let reply = rt::call(&wire::MemPoolGetAttribute { pool: pool(handle)?.id(), attr: attribute })?;
        let told = Decoder::new(&reply).u64().map_err(|_| wire::LOST)?;
        let to = value.cast_mut();
        match attribute <= LAST_SHORT {
            // SAFETY: room for what the attribute is, as the API says.
            true => unsafe { Out::of(to.cast::<u32>()) }.set(told as u32),
            // SAFETY: as above.
            false => unsafe { Out::of(to.cast::<u64>()) }.set(told),
        }
    }

    fn cuMemAllocAsync(to: *const c_void, bytes: usize, stream: Handle) {
        allocate(to, bytes, chosen(), stream)
    }

    fn cuMemAllocFromPoolAsync(to: *const c_void, bytes: usize, pool: Handle, stream: Handle) {
        allocate(to, bytes, Some(pool), stream)
    }

    fn cuMemFreeAsync(address: u64, of: Handle) {
        let record = wire::MemFreeAsync { dptr: address, hStream: stream(of)?, current: rt::current() };
        // One that begins there and is device memory can be freed.
        let known = ranges().find(address).is_some_and(|range| range.start == address && range.window.is_none());
        if !known {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        ranges().remove(address);
        rt::post(&record)
    }

    // What a thread may do while a stream is captured is the server's driver's business.
    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        mode.set(CAPTURE_MODE.try_with(|own| own.replace(mode.get().unwrap_or(0))).unwrap_or(0))
    }
}

thread_local! {
    static CAPTURE_MODE: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}
