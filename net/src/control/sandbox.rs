// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rights that a running switch gives up. The [keeper](crate::control::keeper) passes it the descriptors that it needs.
//!
//! 1. [`drop_user`] and [`drop_capabilities`], once the keeper runs and before any thread is started: root, its groups and
//!    all capabilities, for good (PR_SET_NO_NEW_PRIVS).
//! 2. [`filter_calls`], right after, before any message of a front-end is read: all system calls but those for carrying packets,
//!    mapping a new front-end's memory and answering control requests. A call falls into one of four classes:
//!    - [`ALLOWED`] and [`narrowed`] calls work, the latter only with the arguments named there;
//!    - [`FATAL`] calls kill the process: only an attacker makes them;
//!    - [`ABSENT`] calls fail with ENOSYS, so that the C library takes an older call whose arguments a filter can see;
//!    - every other call fails with EPERM. Libraries make calls of their own accord: glibc's malloc opens
//!      `/proc/sys/vm/overcommit_memory` before it trims a thread's heap, a panic's backtrace opens the program's file.
//!      They go on without the answer; a killed switch would take all ports down.
//!
//! Threads started before and after are bound alike (the filters are set for all threads at once).

use std::collections::BTreeMap;
use std::io;

use anyhow::Context;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

/// Calls that stay allowed with any arguments, by their purpose.
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
    // Frames, messages and signals through open descriptors.
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
        libc::SYS_dup,
    ],
    // Signals to a thread that closes files which peers have passed along (tombolo_brief).
    &[libc::SYS_timer_create, libc::SYS_timer_settime, libc::SYS_timer_delete],
    // Connections at sockets that the keeper has made.
    &[libc::SYS_accept4, libc::SYS_shutdown, libc::SYS_getsockopt, libc::SYS_setsockopt],
    // Type of a descriptor: fstat, and statx for those that front-ends send. Of a path they tell no more than that.
    &[libc::SYS_newfstatat, libc::SYS_statx],
    // Memory: guests', the switch's own, the zero pages in place of memory that a front-end cut short, and how much the host has.
    &[
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_madvise,
        libc::SYS_brk,
        libc::SYS_memfd_create,
        libc::SYS_ftruncate,
        libc::SYS_sysinfo,
    ],
    // Threads of ports and of answers.
    &[
        libc::SYS_clone3,
        libc::SYS_set_robust_list,
        libc::SYS_rseq,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_setaffinity,
        libc::SYS_gettid,
        libc::SYS_getpid,
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_sigaltstack,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_getrandom,
    ],
    // The end of the keeper.
    &[libc::SYS_wait4],
];

/// Older calls that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const LEGACY: &[libc::c_long] = &[libc::SYS_epoll_wait, libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const LEGACY: &[libc::c_long] = &[];

/// Calls that no library makes of its own accord and that serve to leave the process or to change the kernel.
const FATAL: &[libc::c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_bpf,
];

/// Calls that fail as on a kernel that doesn't have them. The flags of clone3 lie in memory, where no filter can look;
/// the C library then takes clone, whose flags are an argument.
const ABSENT: &[libc::c_long] = &[libc::SYS_clone3];

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls that stay allowed with some arguments.
fn narrowed() -> Result<Rules, seccompiler::BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq};
    // The kernel uses the low halves only.
    let rule = |argument, op, value: u64| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)
            .and_then(|c| SeccompRule::new(vec![c]))
    };
    // Flags of a thread, without those of a process or a namespace.
    const THREAD: libc::c_int = libc::CLONE_THREAD;
    const KIND: libc::c_int = THREAD
        | libc::CLONE_VFORK
        | libc::CLONE_PTRACE
        | libc::CLONE_PIDFD
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWUTS;
    let number = |n: libc::c_int| u64::from(n as u32);
    let no_code = || rule(2, MaskedEq(number(libc::PROT_EXEC)), 0);
    Ok([
        (libc::SYS_clone, vec![rule(0, MaskedEq(number(KIND)), number(THREAD))?]),
        (libc::SYS_mmap, vec![no_code()?]),
        (libc::SYS_mprotect, vec![no_code()?]),
        // The standard library's settings of a socket: non-blocking, close-on-exec.
        (libc::SYS_ioctl, vec![rule(1, Eq, libc::FIONBIO)?, rule(1, Eq, libc::FIOCLEX)?]),
        // A thread's name.
        (libc::SYS_prctl, vec![rule(0, Eq, number(libc::PR_SET_NAME))?]),
        // Signals to itself: abort.
        (libc::SYS_tgkill, vec![rule(0, Eq, std::process::id().into())?]),
    ]
    .into())
}

/// Sets a filter for all threads: calls that match `rules` end with `matched`, others with `other`.
fn set(rules: Rules, matched: SeccompAction, other: SeccompAction) -> io::Result<()> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, other, matched, arch).map_err(io::Error::other)?;
    let program: BpfProgram = filter.try_into().map_err(io::Error::other)?;
    seccompiler::apply_filter_all_threads(&program).map_err(io::Error::other)
}

/// Gives up all system calls that the running switch does not need, in all threads.
///
/// # Errors
/// The kernel refuses.
pub fn filter_calls() -> io::Result<()> {
    let any = |calls: &[libc::c_long]| calls.iter().map(|call| (*call, Vec::new())).collect::<Rules>();
    // Of several filters the kernel takes the strictest answer. The last one forbids further filters.
    set(any(FATAL), SeccompAction::KillProcess, SeccompAction::Allow)?;
    set(any(ABSENT), SeccompAction::Errno(libc::ENOSYS as u32), SeccompAction::Allow)?;
    let mut allowed = any(&[ALLOWED.concat(), LEGACY.to_vec()].concat());
    allowed.extend(narrowed().map_err(io::Error::other)?);
    set(allowed, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32))
}

/// Changes root's process to the user `named`. Without a name it takes `tombolo`, or `nobody` where there is no `tombolo`. A user
/// namespace may have no other user: the process stays root there, which is an ordinary user outside.
///
/// # Errors
/// There is no such user, or the kernel refuses.
pub fn drop_user(named: Option<&str>) -> anyhow::Result<()> {
    const NOBODY: u32 = 65_534;
    // SAFETY: asks for a number.
    if unsafe { libc::geteuid() } != 0 {
        return Ok(());
    }
    let found = crate::ports::access::user_and_group;
    let (user, group) = match named {
        Some(name) => found(name).with_context(|| {
            format!("user '{name}': there is none of that name; 'getent passwd' lists them")
        })?,
        None => found("tombolo").or_else(|| found("nobody")).unwrap_or((NOBODY, NOBODY)),
    };
    let mut signal: libc::c_int = 0;
    // SAFETY: numbers, an empty list of groups and a number of our own.
    let (dropped, err) = unsafe {
        libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut signal);
        let parent = libc::getppid();
        let dropped = libc::setgroups(0, std::ptr::null()) == 0
            && libc::setresgid(group, group, group) == 0
            && libc::setresuid(user, user, user) == 0;
        let err = io::Error::last_os_error();
        // The switch may have to end with its parent; the kernel clears that setting when the user changes.
        libc::prctl(libc::PR_SET_PDEATHSIG, signal);
        if signal != 0 && libc::getppid() != parent {
            libc::raise(signal);
        }
        (dropped, err)
    };
    // A step before the refusal is not undone.
    if !dropped && named.is_none() && matches!(err.raw_os_error(), Some(libc::EINVAL | libc::EPERM)) {
        tracing::warn!("the switch goes on as root, without its capabilities: {err}");
        return Ok(());
    }
    anyhow::ensure!(dropped, "the switch can't go on as user {user}: {err}");
    Ok(())
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
