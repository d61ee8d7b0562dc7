// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What happens when a front-end truncates the file behind memory that it shared: the next access raises SIGBUS.
//!
//! A handler finds the mapping in a fixed table of watched ranges, puts zero pages over the whole of it and marks it,
//! so that the access goes on harmlessly and the port is stopped at its next look ([`Watch::is_hit`]). Faults outside
//! watched ranges get the default action. The handler only reads atomics and calls mmap, both safe in a signal.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::vring::memory::MAX_REGIONS;

/// Most ranges. More than 64 ports with as many regions as they may have, each with a new table beside the old one.
const SLOTS: usize = 16_640;
const _: () = assert!(SLOTS >= 64 * 2 * (MAX_REGIONS + 2), "no port may keep memory from others");

struct Slot {
    taken: AtomicBool,
    /// Length 0: not watched. Written after, and cleared before, `start`.
    len: AtomicUsize,
    start: AtomicUsize,
    hit: AtomicBool,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        taken: AtomicBool::new(false),
        len: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        hit: AtomicBool::new(false),
    }
}; SLOTS];
static HITS: AtomicUsize = AtomicUsize::new(0);
static ONCE: Once = Once::new();

/// A watched range; the watch ends when it is dropped.
#[derive(Debug)]
pub struct Watch(usize);

impl Watch {
    /// Was the range hit, and is it zero pages by now?
    #[must_use]
    pub fn is_hit(&self) -> bool {
        TABLE[self.0].hit.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let slot = &TABLE[self.0];
        slot.len.store(0, Ordering::SeqCst);
        slot.taken.store(false, Ordering::Release);
    }
}

/// How often memory was found taken away, in all.
#[inline(always)]
#[must_use]
pub fn hits() -> usize {
    HITS.load(Ordering::Acquire)
}

/// Watches `len` bytes from `start` on; the first call installs the handler.
///
/// # Errors
/// The handler can't be installed, or all of the table is in use.
pub fn watch(start: usize, len: usize) -> io::Result<Watch> {
    let mut result = Ok(());
    ONCE.call_once(|| result = install());
    result?;
    for (i, slot) in TABLE.iter().enumerate() {
        if slot.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            slot.hit.store(false, Ordering::Relaxed);
            slot.start.store(start, Ordering::Relaxed);
            slot.len.store(len, Ordering::SeqCst);
            return Ok(Watch(i));
        }
    }
    Err(io::Error::other(format!("more than {SLOTS} memory mappings; use fewer regions or ports")))
}

fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is valid; the handler is an extern "C" function of the SA_SIGINFO shape.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        if libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

extern "C" fn on_fault(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo for SIGBUS.
    let addr = unsafe { (*info).si_addr() } as usize;
    for slot in &TABLE {
        let len = slot.len.load(Ordering::SeqCst);
        let start = slot.start.load(Ordering::Relaxed);
        if len != 0 && addr.wrapping_sub(start) < len {
            slot.hit.store(true, Ordering::Relaxed);
            // SAFETY: the range is a mapping of ours; it is replaced as a whole by private zero pages.
            let new = unsafe {
                libc::mmap(
                    start as *mut libc::c_void,
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if new != libc::MAP_FAILED {
                HITS.fetch_add(1, Ordering::Release);
                return;
            }
        }
    }
    // Not ours: the default action takes place when the access is tried again.
    // SAFETY: both calls are allowed in a signal handler.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}
