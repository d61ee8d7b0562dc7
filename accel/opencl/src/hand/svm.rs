// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared virtual memory. A range lies in the window and is mapped at the same address in the program and in the server, so pointers
//! inside of it hold on both sides, and both see the same bytes. It exists where server and program share memory and the device is the
//! server's CPU; elsewhere there is none (clSVMAlloc returns null, as it may).

use crate::rt::{self, ARENA, Handle, Id, New, Obj};
use crate::state::{Argument, As};
use crate::transfer::region::Host;
use crate::transfer::slot::{read_slot, write_slot};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_accel_spec::wire::Decoder;

const PAGE: u64 = 4096;

/// Ranges by address: length, and offset in the window.
static RANGES: Mutex<BTreeMap<u64, (u64, u64)>> = Mutex::new(BTreeMap::new());

fn ranges() -> std::sync::MutexGuard<'static, BTreeMap<u64, (u64, u64)>> {
    RANGES.lock().unwrap_or_else(|e| e.into_inner())
}

/// Returns whether an address lies in shared memory.
fn is_shared(address: u64) -> bool {
    ranges().range(..=address).next_back().is_some_and(|(start, (len, _))| address - start < *len)
}

/// The offset in the window of `len` bytes from an address of shared memory; None: they aren't all shared.
pub(crate) fn in_window(address: u64, len: u64) -> Option<u64> {
    let ranges = ranges();
    let (start, (size, data)) = ranges.range(..=address).next_back()?;
    let offset = address - start;
    (offset.checked_add(len)? <= *size).then_some(data + offset)
}

fn alloc(context: Handle, flags: u64, size: usize, alignment: u32) -> Result<*mut c_void, i32> {
    let context = rt::object(context, kind::CONTEXT)?;
    let connection = rt::connection()?;
    // No type is larger than 16 longs.
    if size == 0
        || !connection.shares_window
        || alignment != 0 && !alignment.is_power_of_two()
        || alignment > 128
    {
        return Err(cl::INVALID_VALUE);
    }
    let len = (size as u64).checked_next_multiple_of(PAGE).ok_or(cl::INVALID_VALUE)?;
    let data = rt::lost(connection.take_staging(len, Place::Aligned(PAGE)))?
        .ok_or(cl::MEM_OBJECT_ALLOCATION_FAILURE)?;
    let made = rt::call(&wire::SvmAlloc { context: context.id(), flags, size: len, alignment, data })
        .and_then(|reply| Decoder::new(&reply).u64().map_err(|_| wire::LOST))
        .and_then(|address| {
            let mapped = connection
                .window
                .map_again(data, len, address)
                .map_err(|_| cl::MEM_OBJECT_ALLOCATION_FAILURE);
            mapped.map(|()| address).inspect_err(|_| {
                let _gone = rt::call(&wire::SvmFree { context: context.id(), address });
            })
        });
    match made {
        Ok(address) => {
            ranges().insert(address, (len, data));
            Ok(address as *mut c_void)
        }
        Err(code) => {
            connection.give_staging(data, len);
            Err(code)
        }
    }
}

/// Memory at an address that both sides have free. Null: there is none.
pub unsafe extern "C" fn clSVMAlloc(context: Handle, flags: u64, size: usize, alignment: u32) -> *mut c_void {
    // SAFETY: no code is written.
    unsafe { rt::create(std::ptr::null_mut(), || alloc(context, flags, size, alignment)) }
}

/// The range is unmapped here before the server gives its address up: from then on the driver may have it again for another thread's clSVMAlloc, which needs
/// it free on both sides. Its part of the window is given back last, when the server maps it no more.
fn free(context: u64, address: u64) -> Result<(), i32> {
    let Some((len, data)) = ranges().remove(&address) else { return Ok(()) };
    // SAFETY: the second view of the window that alloc() made; the program gave it up.
    unsafe { libc::munmap(address as *mut c_void, len as usize) };
    rt::call(&wire::SvmFree { context, address })?;
    rt::connection()?.give_staging(data, len);
    Ok(())
}

pub unsafe extern "C" fn clSVMFree(context: Handle, pointer: *mut c_void) -> i32 {
    rt::status(|| free(rt::object(context, kind::CONTEXT)?.id(), pointer as u64))
}

type FreeFunction = Option<unsafe extern "C" fn(Handle, u32, *mut *mut c_void, *mut c_void)>;

/// Frees shared memory when the commands before have ended.
pub unsafe extern "C" fn clEnqueueSVMFree(
    queue: Handle,
    count: u32,
    pointers: *const *mut c_void,
    f: FreeFunction,
    user: *mut c_void,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        if pointers.is_null() || count == 0 {
            return Err(cl::INVALID_VALUE);
        }
        // SAFETY: as the API says.
        let (waits, pointers) = unsafe {
            (
                rt::waits(n, list)?,
                std::slice::from_raw_parts(pointers.cast::<usize>(), count as usize).to_vec(),
            )
        };
        let context = queue.body().context().ok_or(cl::INVALID_CONTEXT)?;
        // The end of a marker says when; its event is needed whether the program wants one or not.
        let new = rt::new_event(queue, true, cl::COMMAND_SVM_FREE)?;
        let marker = new.object().ok_or(cl::OUT_OF_HOST_MEMORY)?;
        rt::call(&wire::EnqueueMarkerWithWaitList {
            command_queue: queue.id(),
            waits: waits.into(),
            event: new.id(),
        })?;
        let handle = new.publish();
        let (held, user) = (rt::hold(queue), user as usize);
        let connection = rt::connection()?;
        let notify = connection.callback(Box::new(move |_, _| {
            let mut pointers = pointers.clone();
            match f {
                // SAFETY: the program registered this function with this pointer.
                Some(f) => unsafe {
                    f(held.obj().handle(), count, pointers.as_mut_ptr().cast(), user as *mut c_void)
                },
                None => pointers.iter().for_each(|p| {
                    let _lost = free(context.id(), *p as u64);
                }),
            }
            false
        }));
        rt::call(&wire::SetEventCallback { event: marker.id(), callback_type: 0, notify })
            .inspect_err(|_| connection.forget_callback(notify))?;
        if event.is_null() {
            ARENA.release(marker);
        } else {
            // SAFETY: room for a handle, as the API says.
            unsafe { rt::write(event, handle) };
        }
        Ok(())
    })
}

/// Copies between shared memory and any memory of the program.
pub unsafe extern "C" fn clEnqueueSVMMemcpy(
    queue: Handle,
    blocking: u32,
    dst: *mut c_void,
    src: *const c_void,
    size: usize,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        if dst.is_null() || src.is_null() {
            return Err(cl::INVALID_VALUE);
        }
        // SAFETY: as the API says.
        let waits = unsafe { rt::waits(n, list)? };
        let new = rt::new_event(queue, !event.is_null(), cl::COMMAND_SVM_MEMCPY)?;
        let (to, from) = (is_shared(dst as u64), is_shared(src as u64));
        let (how, slot) = match (to, from) {
            (true, true) => (0, None),
            (false, true) => (1, Some(read_slot(queue, Host::flat(dst as usize, size as u64))?)),
            (true, false) => (2, Some(write_slot(queue, &Host::flat(src as usize, size as u64))?)),
            (false, false) => {
                let (to, from) = (dst as usize, src as usize);
                let copy = move || {
                    // SAFETY: both are the program's own, as the API says, until the command is complete.
                    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
                };
                // SAFETY: as the API says.
                return unsafe { on_host(queue, copy, blocking != 0, waits, new, event) };
            }
        };
        let record = wire::EnqueueSVMMemcpy {
            queue: queue.id(),
            how,
            dst: dst as u64,
            src: src as u64,
            size: size as u64,
            data: slot.as_ref().map_or(0, |s| s.data),
            ticket: slot.as_ref().map_or(0, |s| s.ticket),
            blocking,
            waits: waits.into(),
            event: new.id(),
        };
        // SAFETY: as the API says.
        unsafe { rt::submit(&record, false, new, event) }
    })
}

/// Does something with memory of the program alone, as a command of the queue: when the commands before it have ended.
///
/// # Safety
/// `event` is null or points to room for a handle.
unsafe fn on_host(
    queue: Obj,
    work: impl FnOnce() + Send + 'static,
    blocking: bool,
    waits: Vec<u64>,
    new: New,
    event: *mut Handle,
) -> Result<(), i32> {
    let connection = rt::connection()?;
    let (ticket, done) = connection.awaited(Box::new(move |_, status| {
        if status >= 0 {
            work();
        }
    }));
    let record = wire::EnqueueHost { queue: queue.id(), ticket, waits: waits.into(), event: new.id() };
    // SAFETY: as the caller promises.
    unsafe { rt::submit(&record, false, new, event)? };
    if blocking { rt::redeemed(ticket, &done) } else { Ok(()) }
}

fn command(queue: Handle, n: u32, list: *const Handle) -> Result<(Obj, Vec<u64>), i32> {
    let queue = rt::object(queue, kind::QUEUE)?;
    // SAFETY: as the API says.
    Ok((queue, unsafe { rt::waits(n, list)? }))
}

pub unsafe extern "C" fn clEnqueueSVMMemFill(
    queue: Handle,
    pointer: *mut c_void,
    pattern: *const c_void,
    pattern_size: usize,
    size: usize,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let (queue, waits) = command(queue, n, list)?;
        let new = rt::new_event(queue, !event.is_null(), cl::COMMAND_SVM_MEMFILL)?;
        if !pointer.is_null() && !is_shared(pointer as u64) {
            // SAFETY: pattern_size bytes, as the API says.
            let pattern = unsafe { rt::bytes(pattern, pattern_size)? }.to_vec();
            let whole = |n: usize| size % n == 0 && pointer as usize % n == 0;
            if size == 0 || !pattern.len().is_power_of_two() || pattern.len() > 128 || !whole(pattern.len()) {
                return Err(cl::INVALID_VALUE);
            }
            let at = pointer as usize;
            let fill = move || {
                for i in (0..size).step_by(pattern.len()) {
                    // SAFETY: memory of the program, until the command is complete; a whole number of patterns.
                    unsafe {
                        ((at + i) as *mut u8).copy_from_nonoverlapping(pattern.as_ptr(), pattern.len())
                    };
                }
            };
            // SAFETY: as the API says.
            return unsafe { on_host(queue, fill, false, waits, new, event) };
        }
        let record = wire::EnqueueSVMMemFill {
            command_queue: queue.id(),
            svm_ptr: pointer as u64,
            // SAFETY: pattern_size bytes, as the API says.
            pattern: unsafe { rt::bytes(pattern, pattern_size)? },
            pattern_size: pattern_size as u64,
            size: size as u64,
            waits: waits.into(),
            event: new.id(),
        };
        // SAFETY: as above.
        unsafe { rt::submit(&record, false, new, event) }
    })
}

/// Says on which device shared memory will be used.
pub unsafe extern "C" fn clEnqueueSVMMigrateMem(
    queue: Handle,
    count: u32,
    pointers: *const *const c_void,
    sizes: *const usize,
    flags: u64,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let (queue, waits) = command(queue, n, list)?;
        if count == 0 || pointers.is_null() {
            return Err(cl::INVALID_VALUE);
        }
        let new = rt::new_event(queue, !event.is_null(), cl::COMMAND_SVM_MIGRATE_MEM)?;
        let count = count as usize;
        // SAFETY: lists as the API says.
        let (addresses, sizes) = unsafe {
            let pointers = std::slice::from_raw_parts(pointers.cast::<usize>(), count);
            let sizes = if sizes.is_null() {
                vec![0; count]
            } else {
                std::slice::from_raw_parts(sizes, count).to_vec()
            };
            (pointers.iter().map(|p| *p as u64).collect::<Vec<_>>(), sizes)
        };
        let record = wire::EnqueueSVMMigrateMem {
            queue: queue.id(),
            flags,
            addresses: addresses.into(),
            sizes: sizes.iter().map(|s| *s as u64).collect::<Vec<_>>().into(),
            waits: waits.into(),
            event: new.id(),
        };
        // SAFETY: as the API says.
        unsafe { rt::submit(&record, false, new, event) }
    })
}

/// An argument that is a shared address.
pub unsafe extern "C" fn clSetKernelArgSVMPointer(kernel: Handle, index: u32, value: *const c_void) -> i32 {
    rt::status(|| {
        let kernel = rt::object(kernel, kind::KERNEL)?;
        let record =
            wire::SetKernelArgSVMPointer { kernel: kernel.id(), arg_index: index, arg_value: value as u64 };
        let mut learned = kernel.kernel()?.learned.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?;
        rt::call(&record)?;
        learned.set(index, Argument::Shared);
        Ok(())
    })
}
