// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A service's image in this process' memory, protected as its context would protect it.

use crate::Error;
use crate::format::tombolo_visit;
use crate::image::Image;
use std::io;
use std::sync::{Mutex, PoisonError};
use tombolo_calls::Window;
use tombolo_calls::memory::Mapping;

/// A service that this process executes. One call at a time is in it, as in a context of its own.
pub struct Loaded {
    memory: Mapping,
    calls: Vec<u32>,
    visit: Mutex<()>,
}

type Call = unsafe extern "C" fn(*const tombolo_visit, u64, u64, u64) -> u64;

impl Loaded {
    /// Maps the image.
    pub fn new(image: &Image) -> io::Result<Loaded> {
        let memory = Mapping::private(image.len() as usize)?;
        for segment in &image.segments {
            // SAFETY: the image's length covers each of its segments, and the mapping is this value's alone.
            let at = unsafe { memory.base().add(segment.at as usize) };
            // SAFETY: as above; nothing executes or reads the memory yet.
            unsafe { std::ptr::copy_nonoverlapping(segment.bytes.as_ptr(), at, segment.bytes.len()) };
            let mut access = libc::PROT_READ;
            if segment.write {
                access |= libc::PROT_WRITE;
            }
            if segment.execute {
                access |= libc::PROT_EXEC;
            }
            // SAFETY: pages of this value's own mapping.
            if unsafe { libc::mprotect(at.cast(), segment.bytes.len(), access) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Loaded { memory, calls: image.calls.clone(), visit: Mutex::new(()) })
    }

    /// Calls a function of the service for a client.
    pub fn call(&self, client: u64, window: &Window, call: u32, arguments: [u64; 3]) -> Result<u64, Error> {
        let offset = *self.calls.get(call as usize).ok_or(Error::NoSuchCall(call))?;
        let visit = tombolo_visit {
            window: window.at(0, window.len())?.cast(),
            window_size: window.len(),
            client,
            ended: 0,
        };
        let _alone = self.visit.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: Image::parse has checked that the offset is code of the service, whose author promises a function of this type.
        let function: Call = unsafe { std::mem::transmute(self.memory.base().add(offset as usize)) };
        let [a, b, c] = arguments;
        // SAFETY: as above; the visit and its window live during the call.
        Ok(unsafe { function(&raw const visit, a, b, c) })
    }
}
