// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a running switch gives up, once its devices and sockets are open.
//!
//! 1. [`drop_capabilities`], once uplinks are open and before any thread is started: all capabilities, for good
//!    (PR_SET_NO_NEW_PRIVS); a switch that began as root can no longer open devices, load modules, trace others or
//!    change the network.
//! 2. [`filter_calls`], once all threads run: all system calls but those below; others kill the process with SIGSYS. What stays allowed is what carrying
//!    packets, mapping a new front-end's memory and answering control requests takes.
//!
//! Threads started before and after are bound alike (the filter is set for all threads at once).

use std::collections::BTreeMap;
use std::io;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// Calls that stay allowed, by what they are for.
const ALLOWED: &[&[libc::c_long]] = &[
    // Waiting and waking.
    &[
        libc::SYS_epoll_create1,
        libc::SYS_epoll_ctl,
        libc::SYS_epoll_pwait,
        libc::SYS_ppoll,
        libc::SYS_futex,
        libc::SYS_eventfd2,
        libc::SYS_clock_nanosleep,
        libc::SYS_nanosleep,
        libc::SYS_clock_gettime,
        libc::SYS_gettimeofday,
        libc::SYS_sched_yield,
        libc::SYS_restart_syscall,
    ],
    // Frames, messages and signals through descriptors that are open.
    &[
        libc::SYS_read,
        libc::SYS_readv,
        libc::SYS_write,
        libc::SYS_writev,
        libc::SYS_recvmsg,
        libc::SYS_recvfrom,
        libc::SYS_sendmsg,
        libc::SYS_sendto,
        libc::SYS_close,
        libc::SYS_fcntl,
        libc::SYS_fstat,
        libc::SYS_ioctl,
        libc::SYS_dup,
    ],
    // Connections; sockets of ports that come and go.
    &[
        libc::SYS_accept4,
        libc::SYS_socket,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_connect,
        libc::SYS_shutdown,
        libc::SYS_getsockopt,
        libc::SYS_setsockopt,
        libc::SYS_getsockname,
        libc::SYS_newfstatat,
        libc::SYS_statx,
        libc::SYS_unlinkat,
    ],
    // Memory: a guest's, our own, and what replaces memory that was taken away.
    &[
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_mprotect,
        libc::SYS_madvise,
        libc::SYS_brk,
        libc::SYS_memfd_create,
        libc::SYS_ftruncate,
    ],
    // Threads: a port's, an answer's, and their end.
    &[
        libc::SYS_clone3,
        libc::SYS_clone,
        libc::SYS_set_robust_list,
        libc::SYS_rseq,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_setaffinity,
        libc::SYS_prctl,
        libc::SYS_gettid,
        libc::SYS_getpid,
        libc::SYS_tgkill,
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_sigaltstack,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_getrandom,
    ],
    // The end of a program that was started before: passt.
    &[libc::SYS_wait4],
];

/// Calls of older ways that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const LEGACY: &[libc::c_long] =
    &[libc::SYS_epoll_wait, libc::SYS_poll, libc::SYS_unlink, libc::SYS_stat, libc::SYS_lstat];
#[cfg(not(target_arch = "x86_64"))]
const LEGACY: &[libc::c_long] = &[];

/// Gives up all system calls that are not needed from now on, in all threads.
///
/// # Errors
/// The kernel refuses.
pub fn filter_calls() -> io::Result<()> {
    let rules: BTreeMap<i64, Vec<seccompiler::SeccompRule>> =
        ALLOWED.iter().copied().chain([LEGACY]).flatten().map(|call| (*call, Vec::new())).collect();
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)
        .map_err(io::Error::other)?;
    let program: BpfProgram = filter.try_into().map_err(io::Error::other)?;
    seccompiler::apply_filter_all_threads(&program).map_err(io::Error::other)
}

/// Empties the calling thread's capability sets for good, and so those of the threads that it starts.
///
/// # Errors
/// The kernel refuses.
pub fn drop_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    // _LINUX_CAPABILITY_VERSION_3: two words per set.
    let header = Header { version: 0x2008_0522, pid: 0 };
    let none = [0u32; 6];
    // SAFETY: structures of the shapes that capset and prctl take.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
