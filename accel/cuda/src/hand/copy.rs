// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies between the program's memory and the device's. A few bytes travel in the record or in its reply; more go through the window, piece by piece; pinned memory
//! lies there already. When a copy of ordinary memory returns, its bytes were taken, or have arrived.

use crate::rt::{self, Handle, Id, Obj};
use crate::state::ranges;
use std::ffi::c_void;
use tombolo_accel_client::connection::Connection;
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::cuda::{self as wire, cu, kind};

/// Bytes that travel in a record.
const IN_RECORD: usize = 8 << 10;
/// Bytes that travel in a reply.
const IN_REPLY: usize = 32 << 10;
/// Bytes of a piece that goes through the window.
pub const PIECE: usize = 2 << 20;

/// A stream, and whether the call returns before what it puts there has ended.
#[derive(Clone, Copy)]
pub struct Where {
    stream: Option<Obj>,
    pub is_async: bool,
}

impl Where {
    pub fn id(self) -> u64 {
        self.stream.map_or(0, |stream| stream.id())
    }
}

/// The stream of a handle, for a call that returns before what it puts there has ended.
pub fn in_stream(stream: Handle) -> Result<Where, i32> {
    Ok(Where { stream: rt::maybe(stream, kind::STREAM)?, is_async: true })
}

/// The default stream, for a call that waits.
pub fn at_once() -> Result<Where, i32> {
    Ok(Where { stream: rt::maybe(std::ptr::null_mut(), kind::STREAM)?, is_async: false })
}

/// Returns whether the client knows that these bytes are device memory of its own: then the copy can't be refused.
pub fn is_sure(address: u64, len: usize) -> bool {
    let range = ranges().find(address).filter(|range| range.window.is_none());
    range.is_some_and(|range| range.len - (address - range.start) >= len as u64)
}

/// Sends a record; waits for it unless it is sure to succeed.
pub fn send<'a, R: tombolo_accel_spec::wire::Record<'a>>(record: &R, post: bool) -> Result<(), i32> {
    if post { rt::post(record) } else { rt::call(record).map(drop) }
}

/// # Safety
/// `from` has `len` bytes.
pub unsafe fn host_to_device(to: u64, from: *const u8, len: usize, place: Where) -> Result<(), i32> {
    let connection = rt::connection()?;
    if len == 0 {
        return Ok(());
    }
    if from.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let sure = is_sure(to, len);
    let record = |to, data, bytes, len: usize, ticket| wire::MemcpyHtoDAsyncV2 {
        dstDevice: to,
        data,
        bytes,
        ByteCount: len as u64,
        hStream: place.id(),
        ticket,
        current: rt::current(),
    };
    if let Some(data) = connection.window.offset_of(from as usize, len as u64) {
        rt::lost(connection.push_window(data, len as u64))?;
        return send(&record(to, data, &[], len, 0), sure && place.is_async);
    }
    // SAFETY: as the caller promises.
    let bytes = unsafe { std::slice::from_raw_parts(from, len) };
    if len <= IN_RECORD {
        return send(&record(to, 0, bytes, len, 0), sure);
    }
    let mut at = to;
    for piece in bytes.chunks(PIECE) {
        let n = piece.len() as u64;
        let data = rt::staging(n, Place::Beside(piece.as_ptr() as usize))?;
        let window = connection.window.at(data, n).map_err(|_| wire::LOST)?;
        // SAFETY: the range of the window is this call's own.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), window, piece.len()) };
        rt::lost(connection.push_window(data, n))?;
        let ticket = connection.ticket(Box::new(move |c: &Connection, _| c.give_staging(data, n)));
        send(&record(at, data, &[], piece.len(), ticket), sure)?;
        at += n;
    }
    Ok(())
}

/// # Safety
/// `to` has room for `len` bytes.
pub unsafe fn device_to_host(to: *mut u8, from: u64, len: usize, place: Where) -> Result<(), i32> {
    let connection = rt::connection()?;
    if len == 0 {
        return Ok(());
    }
    if to.is_null() {
        return Err(cu::CUDA_ERROR_INVALID_VALUE);
    }
    let record = |from, data, len: usize| wire::MemcpyDtoHAsyncV2 {
        data,
        srcDevice: from,
        ByteCount: len as u64,
        hStream: place.id(),
        current: rt::current(),
    };
    if let Some(data) = connection.window.offset_of(to as usize, len as u64) {
        return send(&record(from, data, len), is_sure(from, len) && place.is_async);
    }
    if len <= IN_REPLY {
        let bytes = rt::call(&record(from, 0, len))?;
        if bytes.len() != len {
            return Err(wire::LOST);
        }
        // SAFETY: as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, len) };
        return Ok(());
    }
    for done in (0..len).step_by(PIECE) {
        let n = PIECE.min(len - done);
        // SAFETY: within the room, as the caller promises.
        let target = unsafe { to.add(done) };
        let data = rt::staging(n as u64, Place::Beside(target as usize))?;
        let copied = rt::call(&record(from + done as u64, data, n)).and_then(|_| {
            let window = connection.window.at(data, n as u64).map_err(|_| wire::LOST)?;
            // SAFETY: the range of the window is this call's own, and the server has filled it.
            unsafe { std::ptr::copy_nonoverlapping(window, target, n) };
            Ok(())
        });
        connection.give_staging(data, n as u64);
        copied?;
    }
    Ok(())
}

/// A copy whose addresses say where their memory is.
///
/// # Safety
/// What is no device memory of this process is memory of the program of `len` bytes.
unsafe fn unified(to: u64, from: u64, len: usize, place: Where) -> Result<(), i32> {
    let is_device = |address| ranges().find(address).is_some_and(|range| range.window.is_none());
    let (current, stream) = (rt::current(), place.id());
    match (is_device(to), is_device(from)) {
        (true, true) => {
            let record = wire::MemcpyDtoDAsyncV2 {
                dstDevice: to,
                srcDevice: from,
                ByteCount: len as u64,
                hStream: stream,
                current,
            };
            send(&record, is_sure(to, len) && is_sure(from, len))
        }
        // SAFETY: as the caller promises.
        (true, false) => unsafe { host_to_device(to, from as *const u8, len, place) },
        // SAFETY: as the caller promises.
        (false, true) => unsafe { device_to_host(to as *mut u8, from, len, place) },
        (false, false) => {
            // After what the stream did before.
            rt::call(&wire::StreamSynchronize { hStream: stream, current })?;
            // SAFETY: as the caller promises.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) };
            Ok(())
        }
    }
}

super::exported! {
    fn cuMemcpy(to: u64, from: u64, len: usize) {
        // SAFETY: the program's own addresses, as the API says.
        unsafe { unified(to, from, len, at_once()?) }
    }

    fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: Handle) {
        // SAFETY: the program's own addresses, as the API says.
        unsafe { unified(to, from, len, in_stream(stream)?) }
    }

    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) {
        // SAFETY: so many bytes, as the API says.
        unsafe { host_to_device(to, from.cast(), len, at_once()?) }
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, stream: Handle) {
        // SAFETY: so many bytes, as the API says.
        unsafe { host_to_device(to, from.cast(), len, in_stream(stream)?) }
    }

    fn cuMemcpyDtoH_v2(to: *const c_void, from: u64, len: usize) {
        // SAFETY: room for so many bytes, as the API says.
        unsafe { device_to_host(to.cast_mut().cast(), from, len, at_once()?) }
    }

    fn cuMemcpyDtoHAsync_v2(to: *const c_void, from: u64, len: usize, stream: Handle) {
        // SAFETY: room for so many bytes, as the API says.
        unsafe { device_to_host(to.cast_mut().cast(), from, len, in_stream(stream)?) }
    }
}
