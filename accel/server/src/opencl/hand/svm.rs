// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared virtual memory of a client: a range of the window, mapped over an allocation of the driver, so that both sides see the same
//! bytes at the same address. Only for CPU devices: they use memory by its address alone.
//!
//! Every address that a client passes is looked up in the tree of its ranges before the driver gets it.

use crate::opencl::{Cx, Handle, lock};
use std::collections::BTreeMap;
use std::ffi::c_void;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};

type Done = Result<(), i32>;
const PAGE: u64 = 4096;

/// A range: its length, its context, and the driver's allocation that it lies in.
type Range = (u64, usize, u64);

/// Ranges of a client by address.
#[derive(Debug, Default)]
pub struct Svm(BTreeMap<u64, Range>);

impl Svm {
    /// Returns whether `len` bytes from an address all lie in one range.
    fn contains(&self, address: u64, len: u64) -> bool {
        self.0.range(..=address).next_back().is_some_and(|(start, (size, ..))| {
            (address - start).checked_add(len.max(1)).is_some_and(|end| end <= *size)
        })
    }
}

/// Replaces pages by fresh ones.
fn refresh(at: u64, len: u64) -> Done {
    let (to, flags) = (at as *mut c_void, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
    // SAFETY: the pages belong to a view made by alloc.
    let done = unsafe { libc::mmap(to, len as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if done == to { Ok(()) } else { Err(cl::OUT_OF_RESOURCES) }
}

impl Cx<'_> {
    /// Refuses an address whose `len` bytes aren't all shared memory of this client.
    pub fn shared(&self, address: u64, len: u64) -> Result<*mut c_void, i32> {
        if lock(&self.cl.svm).contains(address, len) {
            Ok(address as *mut c_void)
        } else {
            Err(cl::INVALID_VALUE)
        }
    }

    /// Returns whether all devices of a context are CPUs.
    fn on_cpu(&self, context: Handle) -> Result<bool, i32> {
        let (of_context, of_device) = (
            self.native().clGetContextInfo.ok_or(wire::UNSUPPORTED)?,
            self.native().clGetDeviceInfo.ok_or(wire::UNSUPPORTED)?,
        );
        let mut devices = [std::ptr::null_mut::<c_void>(); 64];
        let mut size = 0;
        // SAFETY: live handles; buffers as long as said.
        unsafe {
            self.status(of_context(
                context,
                cl::CONTEXT_DEVICES,
                size_of_val(&devices),
                devices.as_mut_ptr().cast(),
                &mut size,
            ))?;
            for device in &devices[..size / size_of::<Handle>()] {
                let mut kind = 0u64;
                let to = (&raw mut kind).cast();
                self.status(of_device(*device, cl::DEVICE_TYPE, 8, to, std::ptr::null_mut()))?;
                if kind & cl::DEVICE_TYPE_CPU == 0 {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

pub(crate) fn alloc(cx: &mut Cx<'_>, r: &wire::SvmAlloc) -> Done {
    let f = cx.native().clSVMAlloc.ok_or(wire::UNSUPPORTED)?;
    let free = cx.native().clSVMFree.ok_or(wire::UNSUPPORTED)?;
    let context = cx.get(kind::CONTEXT, r.context)?;
    let session = cx.cl.session();
    if r.size == 0 || r.size % PAGE != 0 || r.data == 0 || r.data % PAGE != 0 || !session.shares_window {
        return Err(cl::INVALID_VALUE);
    }
    if !cx.on_cpu(context)? {
        return Err(wire::UNSUPPORTED);
    }
    let from = session.window.at(r.data, r.size).map_err(|_| cl::INVALID_VALUE)?;
    if from as u64 % PAGE != 0 {
        return Err(cl::INVALID_VALUE);
    }
    cx.cl.charge(r.size)?;
    // Drivers align no further than their largest type; one page more holds the whole pages that are asked for, and nothing else lies
    // in those.
    // SAFETY: a live context.
    let native = unsafe { f(context, r.flags, (r.size + PAGE) as usize, 0) } as u64;
    if native == 0 {
        cx.cl.uncharge(r.size);
        return Err(cl::OUT_OF_RESOURCES);
    }
    let address = native.next_multiple_of(PAGE);
    // SAFETY: whole pages of an allocation that this client owns.
    if unsafe { session.window.map_over(r.data, r.size, address as *mut u8) }.is_err() {
        // Some of it may be the window's by now, which the driver must not get back.
        refresh(address, r.size)?;
        // SAFETY: just allocated.
        unsafe { free(context, native as *const c_void) };
        cx.cl.uncharge(r.size);
        return Err(cl::OUT_OF_RESOURCES);
    }
    lock(&cx.cl.svm).0.insert(address, (r.size, context as usize, native));
    cx.reply().u64(address);
    Ok(())
}

pub(crate) fn free(cx: &mut Cx<'_>, r: &wire::SvmFree) -> Done {
    let f = cx.native().clSVMFree.ok_or(wire::UNSUPPORTED)?;
    let (len, context, native) = lock(&cx.cl.svm).0.remove(&r.address).ok_or(cl::INVALID_VALUE)?;
    refresh(r.address, len)?;
    // SAFETY: an allocation of this context, whose pages are private memory again.
    unsafe { f(context as Handle, native as *const c_void) };
    cx.cl.uncharge(len);
    Ok(())
}

pub(crate) fn set_exec_info(cx: &mut Cx<'_>, r: &wire::SetKernelExecInfo<'_>) -> Done {
    const POINTERS: u32 = cl::KERNEL_EXEC_INFO_SVM_PTRS;
    let f = cx.native().clSetKernelExecInfo.ok_or(wire::UNSUPPORTED)?;
    let kernel = cx.get(kind::KERNEL, r.kernel)?;
    // Others could name anything.
    if r.param != POINTERS && r.param != cl::KERNEL_EXEC_INFO_SVM_FINE_GRAIN_SYSTEM {
        return Err(cl::INVALID_VALUE);
    }
    if r.param == POINTERS {
        for address in r.value.chunks(8) {
            let address = address.first_chunk().map(|a| u64::from_le_bytes(*a)).ok_or(cl::INVALID_VALUE)?;
            cx.shared(address, 1)?;
        }
    }
    // SAFETY: a live kernel; a value of this length, whose addresses are this client's.
    cx.status(unsafe { f(kernel, r.param, r.value.len(), r.value.as_ptr().cast()) })
}

pub(crate) fn memcpy(cx: &mut Cx<'_>, r: &wire::EnqueueSVMMemcpy<'_>) -> Done {
    let f = cx.native().clEnqueueSVMMemcpy.ok_or(wire::UNSUPPORTED)?;
    let queue = cx.get(kind::QUEUE, r.queue)?;
    let window = &cx.cl.session().window;
    let data = || -> Result<*mut c_void, i32> {
        Ok(window.at(r.data, r.size).map_err(|_| cl::INVALID_VALUE)?.cast())
    };
    let to = if r.how == 1 { data()? } else { cx.shared(r.dst, r.size)? };
    let from = if r.how == 2 { data()? } else { cx.shared(r.src, r.size)? };
    if r.blocking != 0 {
        cx.may_block()?;
    }
    let size = r.size as usize;
    // SAFETY: a live queue; both ranges were checked.
    cx.transfer(&r.waits, r.event, r.ticket, None, |n, list, event| unsafe {
        f(queue, r.blocking, to, from, size, n, list, event)
    })
}

pub(crate) fn migrate(cx: &mut Cx<'_>, r: &wire::EnqueueSVMMigrateMem<'_>) -> Done {
    let f = cx.native().clEnqueueSVMMigrateMem.ok_or(wire::UNSUPPORTED)?;
    let queue = cx.get(kind::QUEUE, r.queue)?;
    if r.addresses.len() != r.sizes.len() || r.addresses.is_empty() {
        return Err(cl::INVALID_VALUE);
    }
    for (address, size) in r.addresses.iter().zip(r.sizes.iter()) {
        cx.shared(*address, *size)?;
    }
    let (count, addresses, sizes) =
        (r.addresses.len() as u32, r.addresses.as_ptr().cast(), r.sizes.as_ptr().cast());
    // SAFETY: a live queue; all ranges were checked; lists as long as said.
    cx.enqueue(&r.waits, r.event, |n, list, event| unsafe {
        f(queue, count, addresses, sizes, r.flags, n, list, event)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_good_only_inside_of_one_range() {
        let mut s = Svm::default();
        s.0.insert(0x1000, (0x1000, 0, 0));
        s.0.insert(0x3000, (0x1000, 0, 0));
        assert!(s.contains(0x1000, 0x1000) && s.contains(0x1fff, 1) && s.contains(0x3800, 0));
        assert!(!s.contains(0xfff, 1) && !s.contains(0x2000, 1) && !s.contains(0x1fff, 2));
        assert!(!s.contains(0x1800, u64::MAX) && !s.contains(u64::MAX, 1) && !s.contains(0, 0));
    }
}
