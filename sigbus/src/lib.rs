// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mappings of files that another process may cut short: the next access beyond the file's new end raises SIGBUS, which would end this process.
//!
//! [`watch`] enters a mapping into a fixed table and installs a signal handler. When an access to a watched mapping raises SIGBUS, the handler
//! replaces the whole mapping by private zero pages and marks it. The access then continues on zeroes, and the owner of the mapping learns
//! of it when it next asks [`Watch::is_hit`] or sees [`hits`] grow. A SIGBUS elsewhere goes to the handler that was installed before, or
//! has the default effect. The handler only reads and writes atomics and calls `mmap` and `sigaction`, all allowed in a signal handler.

#![deny(missing_docs)]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

/// Mappings that can be watched at once: a switch with 64 ports needs this many (`net/src/vring/memory.rs`).
pub const SLOTS: usize = 16_640;

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
/// The action that [`install`] replaced.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static ONCE: Once = Once::new();

/// A watched mapping; the watch ends when this is dropped.
#[derive(Debug)]
pub struct Watch(usize);

impl Watch {
    /// Returns whether the mapping has been replaced by zero pages.
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

/// Returns how many mappings this process has replaced so far.
#[inline(always)]
#[must_use]
pub fn hits() -> usize {
    HITS.load(Ordering::Acquire)
}

/// Watches the mapping of `len` bytes from address `start` on; the first call installs the handler. The mapping must stay until the watch is
/// dropped.
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
    Err(io::Error::other(format!(
        "this process maps more than {SLOTS} shared files; use fewer zones, memory regions or ports"
    )))
}

fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is valid; the handler is an extern "C" function of the SA_SIGINFO shape.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut before) != 0 {
            return Err(io::Error::last_os_error());
        }
        // Before the handler is installed, which reads it.
        BEFORE.get_or_init(|| before);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        if libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    if TABLE.iter().any(|slot| replace(slot, address)) {
        HITS.fetch_add(1, Ordering::Release);
    } else {
        pass_on(signal, info, context);
    }
}

/// Replaces the slot's mapping by zero pages if it holds `address`.
fn replace(slot: &Slot, address: usize) -> bool {
    let len = slot.len.load(Ordering::SeqCst);
    let start = slot.start.load(Ordering::Relaxed);
    if len == 0 || address.wrapping_sub(start) >= len {
        return false;
    }
    slot.hit.store(true, Ordering::Relaxed);
    // SAFETY: the range is a mapping of this process, which its owner keeps while it is watched; it is replaced as a whole.
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
    new != libc::MAP_FAILED
}

/// Calls the handler that was installed before. Without one, the default action takes place when the access is repeated.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = BEFORE.get() else { return };
    let handler = before.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: allowed in a signal handler; the action was valid before.
        unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
    } else if before.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: with SA_SIGINFO the action is a function of this shape.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: without SA_SIGINFO the action is a function of this shape.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}
