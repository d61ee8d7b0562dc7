// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The calls of the C library that std lacks. std links the library, and this program is built without crates.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::io;

/// `PR_SET_THP_DISABLE`: no transparent huge pages for this process.
const PR_SET_THP_DISABLE: c_int = 41;
/// `PR_SET_NAME`: the name of the calling thread, which those that it starts inherit.
const PR_SET_NAME: c_int = 15;
/// `MCL_CURRENT`: what is mapped now.
const MCL_CURRENT: c_int = 1;
/// `CLONE_NEWNS`: a mount namespace of its own.
const CLONE_NEWNS: c_int = 0x0002_0000;
/// `MS_REC | MS_PRIVATE`: nothing that is mounted below here is seen by other namespaces.
const MS_REC_PRIVATE: c_ulong = (1 << 14) | (1 << 18);
/// `PROT_READ | PROT_WRITE`.
const PROT_READ_WRITE: c_int = 3;
/// `MAP_PRIVATE | MAP_ANONYMOUS`.
const MAP_PRIVATE_ANONYMOUS: c_int = 0x22;
/// `SIGTERM`.
const SIGTERM: c_int = 15;
/// Bytes of a page.
const PAGE: usize = 4096;
/// Words of 64 CPUs in a mask of the kernel's.
const WORDS: usize = 1024;

// SAFETY: the declarations are those of the C library's headers for x86-64.
unsafe extern "C" {
    fn sched_setaffinity(pid: c_int, size: usize, mask: *const u64) -> c_int;
    fn mlockall(flags: c_int) -> c_int;
    fn prctl(option: c_int, ...) -> c_int;
    fn unshare(flags: c_int) -> c_int;
    fn gettid() -> c_int;
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
    fn sched_getcpu() -> c_int;
    fn mmap(
        address: *mut c_void,
        size: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn munmap(address: *mut c_void, size: usize) -> c_int;
    fn mount(
        source: *const c_char,
        target: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_void,
    ) -> c_int;
}

fn result(value: c_int) -> io::Result<()> {
    if value == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Binds the calling thread to these CPUs.
pub fn bind(cpus: &[u32]) -> Result<(), String> {
    let mut mask = vec![0u64; WORDS];
    for cpu in cpus {
        mask[*cpu as usize / 64] |= 1 << (cpu % 64);
    }
    // SAFETY: the kernel reads as many bytes of the mask as it is told.
    result(unsafe { sched_setaffinity(0, size_of_val(&mask[..]), mask.as_ptr()) })
        .map_err(|e| format!("a thread can't be bound to the CPUs {cpus:?}: {e}"))
}

/// Has `handler` run when the process is told to end. It may do only what a signal's handler may.
pub fn on_term(handler: extern "C" fn(c_int)) {
    // SAFETY: the handler lives as long as the program. Only a wrong signal's number fails.
    unsafe { signal(SIGTERM, handler) };
}

/// The calling thread's number.
pub fn thread() -> u32 {
    // SAFETY: it takes nothing and can't fail.
    unsafe { gettid() }.unsigned_abs()
}

/// Returns whether the calling thread runs on this CPU.
pub fn is_on(cpu: u32) -> bool {
    // SAFETY: it takes nothing.
    u32::try_from(unsafe { sched_getcpu() }) == Ok(cpu)
}

/// Keeps the pages that are mapped now in memory. Without the privilege they stay there anyway unless memory is short.
pub fn lock_memory() -> io::Result<()> {
    // SAFETY: it only changes how the kernel treats this process's pages.
    result(unsafe { mlockall(MCL_CURRENT) })
}

/// Has each page of this process faulted in by itself.
pub fn small_pages() -> io::Result<()> {
    let (on, unused): (c_ulong, c_ulong) = (1, 0);
    // SAFETY: the option takes these four numbers.
    result(unsafe { prctl(PR_SET_THP_DISABLE, on, unused, unused, unused) })
}

/// Names the calling thread, so that traces have a name for it, whatever its file is called.
pub fn name_thread(name: &CStr) -> io::Result<()> {
    // SAFETY: the kernel copies the name up to its zero.
    result(unsafe { prctl(PR_SET_NAME, name.as_ptr()) })
}

/// Mounts tracefs where only this process sees it.
pub fn mount_tracefs_for_itself(target: &CStr) -> io::Result<()> {
    let none = c"none".as_ptr();
    // SAFETY: all strings end with a zero, and neither mount takes data.
    unsafe {
        result(unshare(CLONE_NEWNS))?;
        result(mount(none, c"/".as_ptr(), std::ptr::null(), MS_REC_PRIVATE, std::ptr::null()))?;
        result(mount(none, target.as_ptr(), c"tracefs".as_ptr(), 0, std::ptr::null()))
    }
}

/// Maps new pages, writes into each of them, and unmaps them: the kernel is entered by a page fault for each.
pub fn touch_new_pages(pages: usize) -> io::Result<()> {
    let size = pages * PAGE;
    // SAFETY: the kernel chooses the address, so nothing that is mapped is replaced.
    let start = unsafe { mmap(std::ptr::null_mut(), size, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, 0) };
    if start.addr() == usize::MAX {
        return Err(io::Error::last_os_error());
    }
    for page in 0..pages {
        // SAFETY: the byte lies in the mapping, which no other code knows.
        unsafe { start.cast::<u8>().add(page * PAGE).write_volatile(1) };
    }
    // SAFETY: the mapping was made here, and nothing refers to it any more.
    result(unsafe { munmap(start, size) })
}
