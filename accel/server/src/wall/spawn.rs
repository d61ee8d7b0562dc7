// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Starts this program again inside of new namespaces: clone3(2), then execve(2). `std::process::Command` can make neither a PID namespace
//! nor a process in a cgroup.

use rustix::pipe::PipeFlags;
use std::ffi::{CStr, CString, OsString, c_char};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// Variables that a worker gets, by how their names begin: what loaders, drivers, compilers and the C library read. Whatever else stands in the server's
/// environment is nothing that a client should be able to read.
const VARIABLES: &[&str] = &[
    "PATH=",
    "HOME=",
    "XDG_",
    "TMPDIR=",
    "LANG=",
    "LC_",
    "TZ=",
    "LD_LIBRARY_PATH=",
    "RUST_BACKTRACE=",
    "TOMBOLO_ACCEL_", // programs
    "OCL_ICD_",
    "OPENCL_",
    "POCL_",
    "HWLOC_", // OpenCL loaders and PoCL
    "CUDA_",
    "NVIDIA_",
    "HSA_",
    "HIP_",
    "ROCR_",
    "AMD_",
    "GPU_", // drivers of devices
    "MESA_",
    "RUSTICL_",
    "GALLIUM_",
    "LIBGL_",
    "NEO_",
    "ZE_",
    "SYCL_",
    "IGC_",
];

/// libc's constant is cut to 32 bits.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

pub struct Start<'a> {
    /// Arguments, the program's name first.
    pub arguments: Vec<OsString>,
    /// Variables beside those of this process that drivers read.
    pub variables: &'a [(&'a str, &'a str)],
    /// Its descriptors, from 0 on. It gets no others.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// Its niceness above this process's.
    pub nice: i32,
    /// Flags of clone(2): its namespaces.
    pub namespaces: u64,
    /// The cgroup (version 2) that it begins in.
    pub cgroup: Option<BorrowedFd<'a>>,
}

/// A process that was started, a child of this one.
pub struct Process {
    pub pid: u32,
    /// The process, whatever becomes of its number.
    pub pidfd: Arc<OwnedFd>,
}

impl Process {
    /// Waits until it has ended, and forgets it; whether it ended well.
    pub fn wait(&self) -> io::Result<bool> {
        let mut status = 0;
        loop {
            // SAFETY: integers, and room for a status.
            if unsafe { libc::waitpid(self.pid as libc::pid_t, &mut status, 0) } >= 0 {
                return Ok(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
            }
            let e = io::Error::last_os_error();
            if e.kind() != io::ErrorKind::Interrupted {
                return Err(e);
            }
        }
    }
}

/// Sends a signal to a process, by a pidfd or by its folder in a /proc.
///
/// # Errors
/// The process has ended.
pub fn signal(process: BorrowedFd<'_>, signal: libc::c_int) -> io::Result<()> {
    let no_more = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: integers, and no further information.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, no_more, 0) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The values that the child needs between clone3 and execve, where it may allocate nothing.
struct Prepared {
    arguments: Vec<*const c_char>,
    variables: Vec<*const c_char>,
    descriptors: Vec<RawFd>,
    nice: i32,
    maps: Option<[(&'static CStr, CString); 3]>,
    failed: RawFd,
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
}

fn strings(from: impl Iterator<Item = Vec<u8>>) -> Vec<CString> {
    // A string with a zero inside can't be passed on; the kernel gave none, and ours have none.
    from.filter_map(|s| CString::new(s).ok()).collect()
}

fn variables(own: &[(&str, &str)]) -> Vec<CString> {
    use std::os::unix::ffi::OsStringExt;
    let inherited = std::env::vars_os().map(|(name, value)| {
        let mut line = name.into_vec();
        line.push(b'=');
        line.extend(value.into_vec());
        line
    });
    let read_by_drivers = |line: &Vec<u8>| VARIABLES.iter().any(|v| line.starts_with(v.as_bytes()));
    let own = own.iter().map(|(name, value)| format!("{name}={value}").into_bytes());
    strings(inherited.filter(read_by_drivers).chain(own))
}

/// The user's own ids, which are root's inside: execve would take a user's capabilities away that has none of its own.
fn maps() -> [(&'static CStr, CString); 3] {
    // SAFETY: takes nothing.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    let text = |text: String| CString::new(text).unwrap_or_default();
    [
        (c"/proc/self/setgroups", text("deny".into())),
        (c"/proc/self/uid_map", text(format!("0 {uid} 1"))),
        (c"/proc/self/gid_map", text(format!("0 {gid} 1"))),
    ]
}

/// Starts this program. It is killed when the thread that calls this ends.
///
/// # Errors
/// The kernel doesn't make such a process.
pub fn spawn(start: &Start<'_>) -> io::Result<Process> {
    let arguments = strings(start.arguments.iter().map(|a| a.as_bytes().to_owned()));
    let variables = variables(start.variables);
    // First out of the way of the numbers they get.
    let above = start.descriptors.len() as RawFd;
    let copies = start.descriptors.iter().map(|fd| copy_above(*fd, above)).collect::<io::Result<Vec<_>>>()?;
    let (said, fails) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let failed = copy_above(fails.as_fd(), above)?;
    let prepared = Prepared {
        arguments: pointers(&arguments),
        variables: pointers(&variables),
        descriptors: copies.iter().map(AsRawFd::as_raw_fd).collect(),
        nice: start.nice,
        maps: (start.namespaces & libc::CLONE_NEWUSER as u64 != 0).then(maps),
        failed: failed.as_raw_fd(),
    };
    let mut pidfd: RawFd = -1;
    // SAFETY: plain integers, for which zeroes are values.
    let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
    how.flags = libc::CLONE_PIDFD as u64 | start.namespaces;
    how.pidfd = (&raw mut pidfd) as u64;
    how.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = start.cgroup {
        how.flags |= CLONE_INTO_CGROUP;
        how.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: a copy of this process with one thread, as of fork; the child makes async-signal-safe calls only, then execve or _exit.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut how, size_of_val(&how)) };
    if pid == 0 {
        // SAFETY: in the child, with pointers to memory that was prepared before.
        unsafe { become_program(&prepared) };
    }
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel made it for this call.
    let process = Process { pid: pid as u32, pidfd: Arc::new(unsafe { OwnedFd::from_raw_fd(pidfd) }) };
    drop((fails, failed));
    let mut errno = [0; 4];
    // Its end closes with execve.
    if File::from(said).read_exact(&mut errno).is_ok() {
        process.wait()?;
        return Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno)));
    }
    Ok(process)
}

/// # Safety
/// In a child of clone3 that shares no memory with its parent.
unsafe fn become_program(prepared: &Prepared) -> ! {
    // SAFETY: calls that are safe in a signal handler, with arguments that live.
    unsafe {
        // Before anything else fails: the error is in errno.
        let _ = try_become_program(prepared);
        let errno = (*libc::__errno_location()).to_ne_bytes();
        libc::write(prepared.failed, errno.as_ptr().cast(), errno.len());
        libc::_exit(127)
    }
}

/// None: the error is in errno.
///
/// # Safety
/// As for [`become_program`].
unsafe fn try_become_program(prepared: &Prepared) -> Option<()> {
    let done = |r: libc::c_int| (r >= 0).then_some(());
    // SAFETY: as the caller promises.
    unsafe {
        for (path, text) in prepared.maps.iter().flatten() {
            let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            done(fd)?;
            let len = text.as_bytes().len();
            done(libc::write(fd, text.as_ptr().cast(), len) as libc::c_int)?;
            done(libc::close(fd))?;
        }
        // Programs expect signals that are ignored or blocked here to be as they were.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        done(libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()))?;
        keep_only(&prepared.descriptors, prepared.failed)?;
        if prepared.nice != 0 {
            let own = libc::getpriority(libc::PRIO_PROCESS, 0);
            done(libc::setpriority(libc::PRIO_PROCESS, 0, own + prepared.nice))?;
        }
        // A session of its own: what the kernel sends to a process group for a worker's sake reaches neither the server nor other workers, and outside of control
        // groups the scheduler divides between sessions (sched_autogroup).
        done(libc::setsid())?;
        done(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        // This program, even where another has taken its name meanwhile.
        libc::execve(c"/proc/self/exe".as_ptr(), prepared.arguments.as_ptr(), prepared.variables.as_ptr());
        None
    }
}

/// Gives these descriptors the numbers from 0 on, and closes all others of this process but `failed`, however they were opened. All have larger numbers than they get.
///
/// The others are copies of the server's sockets. If the server has closed its own meanwhile, the files that clients passed along end here ([`tombolo_brief::child`]).
///
/// # Safety
/// As for [`become_program`].
unsafe fn keep_only(descriptors: &[RawFd], failed: RawFd) -> Option<()> {
    let done = |r: libc::c_int| (r >= 0).then_some(());
    let close = || {
        for (to, fd) in (0..).zip(descriptors) {
            // SAFETY: numbers of descriptors.
            done(unsafe { libc::dup2(*fd, to) })?;
        }
        let (rest, failed) = (descriptors.len() as libc::c_uint, failed as libc::c_uint);
        for (first, last) in [(rest, failed.checked_sub(1)?), (failed + 1, libc::c_uint::MAX)] {
            if first <= last {
                // SAFETY: this process uses none of these any more.
                done(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } as libc::c_int)?;
            }
        }
        Some(())
    };
    // SAFETY: as the caller promises.
    unsafe { tombolo_brief::child::while_signals_come(close) }.ok()?
}

fn copy_above(fd: BorrowedFd<'_>, least: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: integers only; the result is checked.
    let copy = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the copy is fresh.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use tombolo_brief::{Brief, endless};

    #[test]
    fn a_process_that_is_started_waits_for_no_file_of_a_client_that_has_gone_meanwhile() {
        let (file, _others) = endless::lingering().expect("a connection");
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        endless::pass(&theirs, b"T", file).expect("passed");
        let ours = Brief::from(ours);
        let (reads, writes) = rustix::pipe::pipe().expect("a pipe");
        let null = File::open("/dev/null").expect("/dev/null");
        let ([kept, failed], go) = ([&null; 2].map(|fd| copy_above(fd.as_fd(), 3).expect("a copy")), [1]);
        // SAFETY: the child makes async-signal-safe calls only, with what lives in its copy of the memory.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: as above.
            unsafe {
                // Until the other process has closed its end.
                let mut byte = [0_u8; 1];
                libc::read(reads.as_raw_fd(), byte.as_mut_ptr().cast(), 1);
                let kept = keep_only(&[kept.as_raw_fd()], failed.as_raw_fd());
                let others_closed = libc::fcntl(reads.as_raw_fd(), libc::F_GETFD) < 0;
                let is_left =
                    libc::fcntl(failed.as_raw_fd(), libc::F_GETFD) >= 0 && libc::fcntl(0, libc::F_GETFD) >= 0;
                libc::_exit(if kept.is_some() && others_closed && is_left { 0 } else { 1 });
            }
        }
        assert!(pid > 0);
        drop(ours);
        rustix::io::write(&writes, &go).expect("written");
        let mut status = -1;
        // SAFETY: integers, and room for a status.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0);
    }
}
