// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The calls of the C library that std lacks. std links the library, and this program is built without crates.

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// `SIGINT`.
pub const SIGINT: i32 = 2;
/// `SIGKILL`.
pub const SIGKILL: i32 = 9;
/// `SIGTERM`.
pub const SIGTERM: i32 = 15;
/// The signals that end a node, and that a wrapper passes to its rank: HUP, INT, USR1, USR2, TERM.
pub const PASSED: [i32; 5] = [1, SIGINT, 10, 12, SIGTERM];

const SYS_CLONE3: c_long = 435;
const CLONE_NEWNS: c_int = 0x0002_0000;
const SIGCHLD: u64 = 17;
const PR_SET_PDEATHSIG: c_int = 1;
const PR_SET_CHILD_SUBREAPER: c_int = 36;
const PR_SET_NAME: c_int = 15;
const LOCK_SH: c_int = 1;
const LOCK_EX: c_int = 2;
const LOCK_NB: c_int = 4;
const SIG_SETMASK: c_int = 2;
const IN_MODIFY: u32 = 0x2;
const IN_CREATE: u32 = 0x100;
const IN_CLOEXEC: c_int = 0o2_000_000;
const IN_NONBLOCK: c_int = 0o4000;
const POLLIN: i16 = 1;
const O_CLOEXEC: c_int = 0o2_000_000;
const RLIMIT_CORE: c_int = 4;

/// A recursive change of what mounts pass on to other namespaces: nothing.
pub const PRIVATE: c_ulong = (1 << 14) | (1 << 18);
/// A bind mount.
pub const BIND: c_ulong = 1 << 12;
/// New flags for a bind mount: no set-id bits, no devices, programs may run.
pub const REBIND: c_ulong = BIND | (1 << 5) | (1 << 1) | (1 << 2);

/// `struct clone_args` of the kernel, up to `set_tid_size`.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
}

/// `sigset_t`.
type SignalSet = [u64; 16];

#[repr(C)]
struct PollFd {
    fd: c_int,
    events: i16,
    revents: i16,
}

/// `struct statvfs`.
#[repr(C)]
#[derive(Default)]
struct StatVfs {
    block: c_ulong,
    fragment: c_ulong,
    blocks: u64,
    free: u64,
    available: u64,
    files: [u64; 3],
    rest: [u64; 8],
}

// SAFETY: the declarations are those of the C library's headers for x86-64.
unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn unshare(flags: c_int) -> c_int;
    fn prctl(option: c_int, ...) -> c_int;
    fn kill(pid: c_int, signal: c_int) -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn flock(file: c_int, operation: c_int) -> c_int;
    fn statvfs(path: *const c_char, buffer: *mut StatVfs) -> c_int;
    fn sched_setaffinity(pid: c_int, size: usize, mask: *const u64) -> c_int;
    fn sigprocmask(how: c_int, set: *const SignalSet, old: *mut SignalSet) -> c_int;
    fn sigwait(set: *const SignalSet, signal: *mut c_int) -> c_int;
    fn signal(number: c_int, handler: usize) -> usize;
    fn inotify_init1(flags: c_int) -> c_int;
    fn inotify_add_watch(fd: c_int, path: *const c_char, mask: u32) -> c_int;
    fn poll(fds: *mut PollFd, count: c_ulong, timeout: c_int) -> c_int;
    fn pipe2(fds: *mut c_int, flags: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    fn setrlimit(resource: c_int, limit: *const [u64; 2]) -> c_int;
    fn geteuid() -> c_uint;
    fn getpid() -> c_int;
    fn _exit(code: c_int) -> !;
    fn mount(
        source: *const c_char,
        target: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_void,
    ) -> c_int;
}

fn result(value: c_int) -> io::Result<c_int> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

fn text(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_encoded_bytes())?)
}

/// Returns whether this process is root's.
pub fn is_root() -> bool {
    // SAFETY: it has no arguments and can't fail.
    unsafe { geteuid() == 0 }
}

/// Gives this process a mount namespace of its own, from which nothing is passed on.
///
/// # Errors
/// Those of unshare(2) and mount(2).
pub fn own_mounts() -> io::Result<()> {
    // SAFETY: it changes this process alone, which has one thread.
    result(unsafe { unshare(CLONE_NEWNS) })?;
    mount_on(None, Path::new("/"), PRIVATE)
}

/// Calls mount(2) without a type and data.
///
/// # Errors
/// Those of the call.
pub fn mount_on(source: Option<&Path>, target: &Path, flags: c_ulong) -> io::Result<()> {
    let source = source.map(text).transpose()?;
    let target = text(target)?;
    let from = source.as_ref().map_or(std::ptr::null(), |source| source.as_ptr());
    // SAFETY: the strings live until it returns.
    result(unsafe { mount(from, target.as_ptr(), std::ptr::null(), flags, std::ptr::null()) }).map(drop)
}

/// Starts a copy of this process with this process number, or the next free one. Returns the child's number, and `None` in the child.
///
/// # Safety
/// This process has one thread, and the child calls [`exit_now`] or executes a program before it returns from where it was started.
///
/// # Errors
/// Those of clone3(2): EEXIST for a number that another process or thread has.
pub unsafe fn fork(pid: Option<i32>) -> io::Result<Option<i32>> {
    let wanted = pid.unwrap_or(0);
    let mut args = CloneArgs { exit_signal: SIGCHLD, ..CloneArgs::default() };
    if pid.is_some() {
        args.set_tid = std::ptr::from_ref(&wanted) as u64;
        args.set_tid_size = 1;
    }
    // SAFETY: the structure is the kernel's, and without flags and a stack the child has copies of all memory.
    let child = unsafe { syscall(SYS_CLONE3, &raw const args, size_of::<CloneArgs>()) };
    match result(i32::try_from(child).unwrap_or(-1))? {
        0 => Ok(None),
        child => Ok(Some(child)),
    }
}

/// Ends this process at once.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: it does not return.
    unsafe { _exit(code) }
}

/// Gives the calling process this name, and has it killed when its parent's thread ends.
pub fn become_seat(name: &str) {
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: the string lives until the call returns; neither call fails.
    unsafe {
        prctl(PR_SET_NAME, name.as_ptr());
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    }
}

/// Makes this process the parent of what its descendants leave behind.
pub fn adopt_orphans() {
    // SAFETY: it has no pointers.
    unsafe { prctl(PR_SET_CHILD_SUBREAPER, 1) };
}

/// Writes no core file when the calling process ends itself by a signal.
pub fn no_core() {
    // SAFETY: the limit lives until the call returns.
    unsafe { setrlimit(RLIMIT_CORE, &[0, 0]) };
}

/// Sends a signal. A process that has gone is no error.
pub fn send_signal(pid: i32, number: i32) {
    // SAFETY: it has no pointers.
    unsafe { kill(pid, number) };
}

/// Ends this process by a signal, as one that it passes on from a child.
pub fn die_by(number: i32) -> ! {
    no_core();
    set_mask(&[]);
    // SAFETY: neither has pointers; 0 is SIG_DFL.
    unsafe {
        signal(number, 0);
        kill(getpid(), number);
    }
    exit_now(128 + number)
}

/// Waits for the end of any child: its number and status. `None`: there is no child.
pub fn wait_any() -> Option<(i32, i32)> {
    let mut status = 0;
    loop {
        // SAFETY: `status` lives until the call returns.
        match result(unsafe { waitpid(-1, &raw mut status, 0) }) {
            Ok(pid) => return Some((pid, status)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}

/// Takes a lock of a whole file, across the members of a zone, without waiting.
///
/// # Errors
/// Another process has it.
pub fn try_lock(file: &File, exclusive: bool) -> io::Result<()> {
    let how = if exclusive { LOCK_EX } else { LOCK_SH };
    // SAFETY: the descriptor is open.
    result(unsafe { flock(file.as_raw_fd(), how | LOCK_NB) }).map(drop)
}

/// Takes a lock of a whole file alone, and waits for it.
///
/// # Errors
/// Those of flock(2).
pub fn lock(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open.
    result(unsafe { flock(file.as_raw_fd(), LOCK_EX) }).map(drop)
}

/// Bytes that a file system has left for this process.
///
/// # Errors
/// Those of statvfs(3).
pub fn bytes_free(path: &Path) -> io::Result<u64> {
    let path = text(path)?;
    let mut all = StatVfs::default();
    // SAFETY: both live until it returns; the structure is at least as large as the library's.
    result(unsafe { statvfs(path.as_ptr(), &raw mut all) })?;
    Ok(all.available * all.fragment)
}

/// Binds the calling process to these CPUs.
///
/// # Errors
/// None of them is online.
pub fn bind(cpus: &[usize]) -> io::Result<()> {
    let mut mask = [0u64; 64];
    for cpu in cpus {
        *mask.get_mut(cpu / 64).ok_or(io::ErrorKind::InvalidInput)? |= 1 << (cpu % 64);
    }
    // SAFETY: the mask lives until the call returns, and has the size that is told.
    result(unsafe { sched_setaffinity(0, size_of_val(&mask), mask.as_ptr()) }).map(drop)
}

fn set_of(signals: &[i32]) -> SignalSet {
    let mut set = [0; 16];
    for number in signals {
        set[0] |= 1 << (number - 1);
    }
    set
}

/// Holds these signals back, and no others, for the calling thread and those that it starts from here on.
pub fn set_mask(signals: &[i32]) {
    // SAFETY: the set lives until the call returns; null asks for no old one.
    unsafe { sigprocmask(SIG_SETMASK, &set_of(signals), std::ptr::null_mut()) };
}

/// Waits for one of these signals, which are held back.
pub fn wait_signal(signals: &[i32]) -> i32 {
    let mut number = 0;
    // SAFETY: both live until the call returns.
    unsafe { sigwait(&set_of(signals), &raw mut number) };
    number
}

/// A pipe: what is read, and what is written to.
///
/// # Errors
/// No descriptor is left.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [-1; 2];
    // SAFETY: the array has room for both.
    result(unsafe { pipe2(fds.as_mut_ptr(), O_CLOEXEC) })?;
    // SAFETY: both are new and owned by nobody else.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// Makes these the descriptors 0, 1, 2 and 3 of the calling process, which keeps no other one. Descriptors above 3 must be given.
///
/// # Safety
/// Nothing of this process uses its other descriptors afterwards.
pub unsafe fn keep_only(fds: [RawFd; 4]) {
    // SAFETY: descriptors are numbers to these calls; the caller vouches for the rest.
    unsafe {
        for (fd, number) in fds.into_iter().zip(0..) {
            dup2(fd, number);
        }
        close_range(4, c_uint::MAX, 0);
    }
}

/// Reports changes of the files in one directory.
#[derive(Debug)]
pub struct Watch(OwnedFd);

impl Watch {
    /// Watches a directory.
    ///
    /// # Errors
    /// Those of inotify(7).
    pub fn new(dir: &Path) -> io::Result<Watch> {
        // SAFETY: it has no pointers.
        let fd = result(unsafe { inotify_init1(IN_CLOEXEC | IN_NONBLOCK) })?;
        // SAFETY: the descriptor is new.
        let watch = Watch(unsafe { OwnedFd::from_raw_fd(fd) });
        let dir = text(dir)?;
        // SAFETY: the string lives until the call returns.
        result(unsafe { inotify_add_watch(fd, dir.as_ptr(), IN_MODIFY | IN_CREATE) })?;
        Ok(watch)
    }

    /// Waits for a change, at most so many milliseconds, and forgets all that have come.
    pub fn wait(&self, longest: i32) {
        let mut fds = PollFd { fd: self.0.as_raw_fd(), events: POLLIN, revents: 0 };
        // SAFETY: the structure lives until the call returns.
        unsafe { poll(&raw mut fds, 1, longest) };
        let mut events = [0; 4096];
        // SAFETY: the descriptor stays open for as long as it is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) };
        if let Ok(fd) = fd.try_clone_to_owned() {
            let _nothing_there = io::Read::read(&mut File::from(fd), &mut events);
        }
    }
}
