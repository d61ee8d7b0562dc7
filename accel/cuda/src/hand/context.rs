// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Primary contexts, and each thread's stack of contexts.

use super::device::device;
use super::exported;
use crate::rt::{self, ARENA, Current, Handle, Id, Obj, Out};
use crate::state::{Body, Context, Detail, ranges};
use crate::system::initialized;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tombolo_accel_spec::cuda::{self as wire, cu, kind};
use tombolo_cuda_tables::storage;

/// The primary context of a device.
#[derive(Default)]
struct Primary {
    context: Option<Obj>,
    /// How often the program has retained it.
    count: usize,
    flags: u32,
}

static PRIMARY: Mutex<Option<HashMap<i32, Primary>>> = Mutex::new(None);

fn primary() -> MutexGuard<'static, Option<HashMap<i32, Primary>>> {
    PRIMARY.lock().unwrap_or_else(PoisonError::into_inner)
}

fn context(handle: Handle) -> Result<Obj, i32> {
    rt::object(handle, kind::CONTEXT)
}

fn detail(context: Obj) -> &'static Context {
    match &context.body().detail {
        Detail::Context(detail) => detail,
        _ => unreachable!("an object of this kind has this detail"),
    }
}

/// The current context.
fn current() -> Result<Obj, i32> {
    initialized()?;
    context(rt::top().ok_or(cu::CUDA_ERROR_INVALID_CONTEXT)?.handle as Handle)
}

fn new_context(device: i32, flags: u32, is_primary: bool) -> Result<rt::New, i32> {
    let detail = Detail::Context(Context { device, flags, is_primary });
    rt::new_object(kind::CONTEXT, Body { context: 0, detail })
}

fn as_current(context: Obj) -> Current {
    Current { handle: context.handle() as usize, id: context.id() }
}

/// A context's memory and what the runtime keeps with it are gone.
fn end(context: Obj) {
    let handle = context.handle() as usize;
    storage::end(handle);
    ranges().end(handle);
}

fn retain(dev: i32) -> Result<Handle, i32> {
    let number = rt::device(dev)?;
    let mut all = primary();
    let primary = all.get_or_insert_default().entry(dev).or_default();
    if primary.context.is_none() {
        let new = new_context(dev, primary.flags, true)?;
        rt::call(&wire::DevicePrimaryCtxRetain { dev: number, new: new.id() })?;
        primary.context = Some(new.keep());
    }
    primary.count += 1;
    primary.context.map(|context| context.handle()).ok_or(cu::CUDA_ERROR_INVALID_CONTEXT)
}

fn release(dev: i32) -> Result<(), i32> {
    device(dev)?;
    let last = {
        let mut all = primary();
        let primary = all.get_or_insert_default().entry(dev).or_default();
        primary.count = primary.count.checked_sub(1).ok_or(cu::CUDA_ERROR_INVALID_CONTEXT)?;
        if primary.count == 0 { primary.context.take() } else { None }
    };
    if let Some(context) = last {
        end(context);
        ARENA.release(context);
    }
    Ok(())
}

fn reset(dev: i32) -> Result<(), i32> {
    let number = rt::device(dev)?;
    let context = primary().get_or_insert_default().entry(dev).or_default().context;
    let Some(context) = context else { return Ok(()) };
    end(context);
    rt::call(&wire::DevicePrimaryCtxResetV2 { dev: number }).map(drop)
}

fn set_flags(dev: i32, flags: u32) -> Result<(), i32> {
    let number = rt::device(dev)?;
    rt::call(&wire::DevicePrimaryCtxSetFlagsV2 { dev: number, flags })?;
    primary().get_or_insert_default().entry(dev).or_default().flags = flags;
    Ok(())
}

fn create(pctx: &Out<Handle>, flags: u32, dev: i32) -> Result<(), i32> {
    let number = rt::device(dev)?;
    if pctx.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let new = new_context(dev, flags, false)?;
    rt::call(&wire::CtxCreateV2 { flags, dev: number, new: new.id() })?;
    let made = new.keep();
    rt::with_stack(|stack| stack.push(Some(as_current(made))));
    pctx.set(made.handle())
}

fn destroy(ctx: Handle) -> Result<(), i32> {
    let context = context(ctx)?;
    if detail(context).is_primary {
        return Err(cu::CUDA_ERROR_INVALID_CONTEXT);
    }
    rt::with_stack(|stack| {
        if stack.last().copied().flatten().is_some_and(|top| top.handle == ctx as usize) {
            stack.pop();
        }
    });
    end(context);
    ARENA.release(context);
    Ok(())
}

fn push(ctx: Handle) -> Result<(), i32> {
    let context = as_current(context(ctx)?);
    rt::with_stack(|stack| stack.push(Some(context)));
    Ok(())
}

fn pop(pctx: &Out<Handle>) -> Result<(), i32> {
    initialized()?;
    let popped = rt::with_stack(Vec::pop).flatten().ok_or(cu::CUDA_ERROR_INVALID_CONTEXT)?;
    pctx.offer(popped.handle as Handle);
    Ok(())
}

exported! {
    fn cuDevicePrimaryCtxRetain(pctx: Out<Handle>, dev: i32) {
        if pctx.is_null() {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        pctx.set(retain(dev)?)
    }

    fn cuDevicePrimaryCtxRelease(dev: i32) {
        release(dev)
    }

    fn cuDevicePrimaryCtxRelease_v2(dev: i32) {
        release(dev)
    }

    fn cuDevicePrimaryCtxReset(dev: i32) {
        reset(dev)
    }

    fn cuDevicePrimaryCtxReset_v2(dev: i32) {
        reset(dev)
    }

    fn cuDevicePrimaryCtxSetFlags(dev: i32, flags: u32) {
        set_flags(dev, flags)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(dev: i32, flags: u32) {
        set_flags(dev, flags)
    }

    fn cuDevicePrimaryCtxGetState(dev: i32, flags: Out<u32>, active: Out<i32>) {
        device(dev)?;
        let mut all = primary();
        let primary = all.get_or_insert_default().entry(dev).or_default();
        flags.set(primary.flags)?;
        active.set(i32::from(primary.context.is_some()))
    }

    fn cuCtxCreate_v2(pctx: Out<Handle>, flags: u32, dev: i32) {
        create(&pctx, flags, dev)
    }

    fn cuCtxCreate_v3(pctx: Out<Handle>, _affinities: *const c_void, count: i32, flags: u32, dev: i32) {
        if count == 0 { create(&pctx, flags, dev) } else { Err(wire::UNSUPPORTED) }
    }

    fn cuCtxCreate_v4(pctx: Out<Handle>, parameters: *const c_void, flags: u32, dev: i32) {
        if parameters.is_null() { create(&pctx, flags, dev) } else { Err(wire::UNSUPPORTED) }
    }

    fn cuCtxDestroy(ctx: Handle) {
        destroy(ctx)
    }

    fn cuCtxDestroy_v2(ctx: Handle) {
        destroy(ctx)
    }

    fn cuCtxPushCurrent(ctx: Handle) {
        push(ctx)
    }

    fn cuCtxPushCurrent_v2(ctx: Handle) {
        push(ctx)
    }

    fn cuCtxPopCurrent(pctx: Out<Handle>) {
        pop(&pctx)
    }

    fn cuCtxPopCurrent_v2(pctx: Out<Handle>) {
        pop(&pctx)
    }

    fn cuCtxSetCurrent(ctx: Handle) {
        initialized()?;
        let new = if ctx.is_null() { None } else { Some(as_current(context(ctx)?)) };
        rt::with_stack(|stack| {
            stack.pop();
            stack.extend(new.map(Some));
        });
        Ok(())
    }

    fn cuCtxGetCurrent(pctx: Out<Handle>) {
        initialized()?;
        pctx.set(rt::top().map_or(std::ptr::null_mut(), |top| top.handle as Handle))
    }

    fn cuCtxGetDevice(to: Out<i32>) {
        to.set(detail(current()?).device)
    }

    fn cuCtxGetDevice_v2(to: Out<i32>, ctx: Handle) {
        to.set(detail(if ctx.is_null() { current()? } else { context(ctx)? }).device)
    }

    fn cuCtxGetFlags(flags: Out<u32>) {
        flags.set(detail(current()?).flags)
    }

    fn cuCtxGetId(ctx: Handle, id: Out<u64>) {
        id.set(if ctx.is_null() { current()? } else { context(ctx)? }.id())
    }

    fn cuCtxGetApiVersion(ctx: Handle, version: Out<u32>) {
        if ctx.is_null() { current()? } else { context(ctx)? };
        // The version of the interface of contexts: that of cuCtxCreate_v2.
        version.set(3020)
    }

    fn cuCtxSynchronize_v2(ctx: Handle) {
        let context = if ctx.is_null() { current()? } else { context(ctx)? };
        rt::call(&wire::CtxSynchronize { current: context.id() }).map(drop)
    }
}

/// The context of a stream.
fn of_stream(stream: Handle) -> Result<Handle, i32> {
    Ok(match rt::maybe(stream, kind::STREAM)? {
        Some(stream) => stream.body().context as Handle,
        None => current()?.handle(),
    })
}

exported! {
    fn cuStreamGetCtx(stream: Handle, pctx: *mut Handle) {
        // SAFETY: null, or room for a handle, as the API says.
        unsafe { Out::of(pctx) }.set(of_stream(stream)?)
    }

    fn cuStreamGetDevice(stream: Handle, to: *mut i32) {
        // SAFETY: null, or room for a number, as the API says.
        unsafe { Out::of(to) }.set(detail(context(of_stream(stream)?)?).device)
    }
}
