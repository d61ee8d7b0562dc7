// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Watched mappings beside a handler that the process had before.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: usize = 4096;

/// The address at which the process' own handler maps zero pages.
static OTHER: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

fn map(flags: libc::c_int, at: usize, fd: libc::c_int) -> usize {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, or one that replaces a mapping of this test as a whole.
    let address = unsafe { libc::mmap(at as *mut libc::c_void, PAGE, protection, flags, fd, 0) };
    assert_ne!(address, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    address as usize
}

extern "C" fn own_handler(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    CALLS.fetch_add(1, Ordering::SeqCst);
    map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED, OTHER.load(Ordering::SeqCst), -1);
}

/// A mapping of one page whose file has been cut short, so that every access raises SIGBUS.
fn cut_short() -> usize {
    // SAFETY: a string with its zero; the descriptor is new and has no other owner.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), 0)) };
    file.set_len(PAGE as u64).unwrap();
    let address = map(libc::MAP_SHARED, 0, file.as_raw_fd());
    file.set_len(0).unwrap();
    address
}

fn read(address: usize) -> u8 {
    // SAFETY: the address is that of a mapping of this test.
    unsafe { (address as *const u8).read_volatile() }
}

#[test]
fn a_fault_outside_watched_mappings_reaches_the_earlier_handler_and_the_next_watched_one_is_still_caught() {
    // SAFETY: an all-zero sigaction is valid; the handler has the SA_SIGINFO shape.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = own_handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()), 0);
    }
    let watched: Vec<usize> = (0..2).map(|_| cut_short()).collect();
    let watches: Vec<_> = watched.iter().map(|&start| tombolo_sigbus::watch(start, PAGE).unwrap()).collect();
    for round in 0..2 {
        let other = cut_short();
        OTHER.store(other, Ordering::SeqCst);
        assert_eq!(read(other), 0);
        assert_eq!(CALLS.load(Ordering::SeqCst), round + 1);
        assert!(!watches[round].is_hit());
        assert_eq!(read(watched[round]), 0);
        assert!(watches[round].is_hit());
        assert_eq!(tombolo_sigbus::hits(), round + 1);
    }
}
