// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands on their way to the driver: their wait lists, their events, and the tickets of those that move a client's data.

use super::{Cx, Extra, Handle, lock};
use tombolo_accel_spec::opencl::kind;

impl Cx<'_> {
    /// Enqueues a command: looks its wait list up and keeps its event.
    pub fn enqueue(
        &mut self,
        waits: &[u64],
        event: u64,
        run: impl FnOnce(u32, *const Handle, *mut Handle) -> i32,
    ) -> Result<(), i32> {
        let mut native: Handle = std::ptr::null_mut();
        let wanted: *mut Handle = if event == 0 { std::ptr::null_mut() } else { &mut native };
        self.enqueue_into(waits, event, wanted, run)?;
        if event != 0 {
            self.keep(kind::EVENT, event, native, Extra::default())?;
        }
        Ok(())
    }

    pub(super) fn enqueue_into(
        &mut self,
        waits: &[u64],
        event: u64,
        wanted: *mut Handle,
        run: impl FnOnce(u32, *const Handle, *mut Handle) -> i32,
    ) -> Result<(), i32> {
        if event != 0 {
            self.new = Some((kind::EVENT, event));
            lock(&self.cl.table).vacant(event).map_err(|f| Self::too_many(kind::EVENT, f))?;
        }
        let list = self.all(kind::EVENT, waits)?;
        let pointer = if list.is_empty() { std::ptr::null() } else { list.as_ptr() };
        self.status(run(list.len() as u32, pointer, wanted))
    }

    /// Enqueues a transfer, which may have filled a range of the window. Its ticket is redeemed, with the command's status, when the native command has ended:
    /// of one that blocked, before its reply.
    pub fn transfer(
        &mut self,
        waits: &[u64],
        event: u64,
        ticket: u64,
        filled: Option<(u64, u64)>,
        run: impl FnOnce(u32, *const Handle, *mut Handle) -> i32,
    ) -> Result<(), i32> {
        if ticket == 0 {
            return self.enqueue(waits, event, run);
        }
        let mut native: Handle = std::ptr::null_mut();
        self.enqueue_into(waits, event, &mut native, run)?;
        if event != 0 {
            if let Some(retain) = self.native().clRetainEvent {
                // SAFETY: a live event; this reference is the ticket's.
                unsafe { retain(native) };
            }
            self.keep(kind::EVENT, event, native, Extra::default())?;
        }
        self.owed = 0;
        self.cl.tickets.add(self.cl, ticket, native, filled);
        Ok(())
    }
}
