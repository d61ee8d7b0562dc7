// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ranges of the window that carry a transfer's bytes: the program's own memory where it lies in the window, staging elsewhere.

use super::region::Host;
use crate::rt::{self, Id, Obj};
use crate::state::Pages;
use std::sync::Arc;
use tombolo_accel_client::connection::{Connection, Redeem};
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::opencl::{self as wire, cl};

/// Takes staging memory; when transfers under way hold too much of it, waits for the queue once.
pub fn staging(queue: Obj, len: u64, place: Place) -> Result<u64, i32> {
    let connection = rt::connection()?;
    if let Some(at) = rt::lost(connection.take_staging(len, place))? {
        return Ok(at);
    }
    if len > connection.window.len() {
        return Err(cl::MEM_OBJECT_ALLOCATION_FAILURE);
    }
    rt::call(&wire::Finish { command_queue: queue.id() })?;
    rt::lost(connection.take_staging(len, place))?.ok_or(cl::MEM_OBJECT_ALLOCATION_FAILURE)
}

/// The place of a transfer's bytes in the window.
pub struct Slot {
    /// The offset of the first byte.
    pub data: u64,
    /// The ticket that the server redeems when the native command has ended; 0: none.
    pub ticket: u64,
}

/// The offset of a region that lies in the window already (memory that the program got by mapping). None: it lies elsewhere.
pub fn pinned(connection: &Connection, host: &Host) -> Option<u64> {
    host.is_flat().then(|| connection.window.offset_of(host.pointer, host.len())).flatten()
}

/// Takes a range of the window that a read fills: the program's own memory, or staging whose contents are copied when the ticket is redeemed.
pub fn read_slot(queue: Obj, host: Host) -> Result<Slot, i32> {
    let connection = rt::connection()?;
    if let Some(data) = pinned(connection, &host) {
        return Ok(filled_in_place(connection, data));
    }
    let (data, redeem) = staged_read(queue, host, None)?;
    Ok(Slot { data, ticket: connection.ticket(redeem) })
}

/// The slot of a range of the window that the program sees itself. Over a stream, the ticket makes the server push the range when it is filled.
pub fn filled_in_place(connection: &Connection, data: u64) -> Slot {
    let ticket = if connection.shares_window { 0 } else { connection.ticket(Box::new(|_, _| ())) };
    Slot { data, ticket }
}

/// Takes staging that a read fills, and returns the copy out of it for the ticket to run; until then, `pages` stay.
pub fn staged_read(queue: Obj, host: Host, pages: Option<Arc<Pages>>) -> Result<(u64, Redeem), i32> {
    let len = host.len();
    let data = staging(queue, len, Place::Beside(host.pointer))?;
    let redeem = Box::new(move |c: &Connection, status| {
        let _until_copied = &pages;
        if status >= 0 {
            if let Ok(from) = c.window.at(data, len) {
                // SAFETY: the program keeps its memory until the command is complete, which is what the ticket says.
                unsafe { host.scatter(from) };
            }
        }
        c.give_staging(data, len);
    });
    Ok((data, redeem))
}

/// Takes a range of the window with a program's bytes; its ticket frees it.
pub fn write_slot(queue: Obj, host: &Host) -> Result<Slot, i32> {
    let connection = rt::connection()?;
    let len = host.len();
    if let Some(data) = pinned(connection, host) {
        rt::lost(connection.push_window(data, len))?;
        return Ok(Slot { data, ticket: 0 });
    }
    let (data, redeem) = staged_write(queue, host)?;
    Ok(Slot { data, ticket: connection.ticket(redeem) })
}

/// Copies a program's bytes into staging, and returns what frees it, for the ticket to run.
pub fn staged_write(queue: Obj, host: &Host) -> Result<(u64, Redeem), i32> {
    let connection = rt::connection()?;
    let len = host.len();
    let data = staging(queue, len, Place::Beside(host.pointer))?;
    let to = connection.window.at(data, len).map_err(|_| cl::MEM_OBJECT_ALLOCATION_FAILURE)?;
    // SAFETY: the program's region is readable, as the API says; the range is ours.
    unsafe { host.gather(to) };
    rt::lost(connection.push_window(data, len))?;
    Ok((data, Box::new(move |c: &Connection, _| c.give_staging(data, len))))
}
