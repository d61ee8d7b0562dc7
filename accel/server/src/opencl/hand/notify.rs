// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Callbacks of the driver, on their way to the client.

use crate::opencl::{Cx, Handle, OpenCl};
use std::ffi::{c_char, c_void};
use tombolo_accel_spec::wire::ReplyKind;

/// The data of a driver's callback: its client, and the client's number for it.
pub(super) struct Notify {
    cl: &'static OpenCl,
    number: u64,
}

/// A pointer for a callback that comes once; freed there.
pub(super) fn once(cx: &Cx<'_>, number: u64) -> *mut c_void {
    Box::into_raw(Box::new(Notify { cl: cx.cl, number })).cast()
}

unsafe fn notified(user: *mut c_void, status: i32) {
    // SAFETY: from once(), and the driver calls once.
    let notify = unsafe { Box::from_raw(user.cast::<Notify>()) };
    notify.cl.tell_what_ended();
    notify.cl.session().notify(ReplyKind::Notify, status, notify.number, &[]);
}

pub(super) unsafe extern "C" fn on_event(_event: Handle, status: i32, user: *mut c_void) {
    // SAFETY: registered with once().
    unsafe { notified(user, status) }
}

pub(super) unsafe extern "C" fn on_program(_program: Handle, user: *mut c_void) {
    // SAFETY: registered with once().
    unsafe { notified(user, 0) }
}

pub(super) unsafe extern "C" fn on_context(
    text: *const c_char,
    _: *const c_void,
    _: usize,
    user: *mut c_void,
) {
    // SAFETY: registered with a leaked Notify, as it may come any number of times; the text is a C string.
    let (notify, text) = unsafe { (&*user.cast_const().cast::<Notify>(), std::ffi::CStr::from_ptr(text)) };
    let text = &text.to_bytes()[..text.to_bytes().len().min(4096)];
    notify.cl.session().notify(ReplyKind::Notify, 0, notify.number, text);
}
