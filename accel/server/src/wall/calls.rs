// SPDX-License-Identifier: Apache-2.0 OR MIT
//! System calls (seccomp). What namespaces, an own user id and missing capabilities take away already is not listed again. A refused call
//! fails with EPERM, as libraries try more than they need and go on without. Drivers differ too much for a list of what is allowed.

use anyhow::Context;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    sock_filter,
};
use std::collections::BTreeMap;

/// Refused whatever the arguments.
const REFUSED: &[libc::c_long] = &[
    // Other processes: there are only the worker's own, unless a namespace has a hole or there is none (--unconfined).
    libc::SYS_kill,              // threads use tgkill on themselves: see below
    libc::SYS_tkill,             // tgkill's older form, by number of thread alone
    libc::SYS_rt_sigqueueinfo,   // kill with a value
    libc::SYS_rt_tgsigqueueinfo, // tgkill with a value
    libc::SYS_pidfd_open,        // the way to those below, and to setns
    libc::SYS_pidfd_send_signal, // kill by descriptor
    libc::SYS_pidfd_getfd,       // descriptors of another process
    libc::SYS_ptrace,            // its registers and memory
    libc::SYS_process_vm_readv,  // its memory
    libc::SYS_process_vm_writev, // the same
    libc::SYS_process_madvise,   // the same, thrown out
    libc::SYS_kcmp,              // where its objects lie in the kernel
    // A larger share of time than the supervisor gave.
    libc::SYS_setpriority,        // niceness
    libc::SYS_sched_setscheduler, // other classes of scheduling
    libc::SYS_sched_setparam,     // the same
    libc::SYS_sched_setattr,      // the same
    libc::SYS_sched_setaffinity,  // processors that the server was kept from
    libc::SYS_ioprio_set,         // the disk's
    // Running on while the supervisor has stopped it: whatever sends SIGCONT, even one that is ignored, ends the stop. tgkill, fcntl and clone are below.
    libc::SYS_timer_create, // with a signal of choice
    // Things that exist once for the whole host.
    libc::SYS_io_setup, // places for asynchronous transfers (fs.aio-max-nr), which QEMU and databases need
    libc::SYS_sync,     // writes out what all processes have written
    libc::SYS_syncfs,   // the same, of the file system that a library lies on
    // Things that exist once for each user; of a server that isn't root, all workers are one user's.
    libc::SYS_sendmsg, // descriptors under way: new clients get theirs so, before this filter holds
    libc::SYS_sendmmsg, // the same
    #[cfg(target_arch = "x86_64")]
    libc::SYS_inotify_init, // watchers of files (fs.inotify.max_user_instances)
    libc::SYS_inotify_init1, // the same
    libc::SYS_fanotify_init, // the same
    // Memory that the limit of private memory doesn't count.
    libc::SYS_memfd_create, // in a descriptor
    libc::SYS_memfd_secret, // the same, and no host that hibernates can while there is some
    libc::SYS_shmget,       // of System V
    libc::SYS_msgget,       // of System V, in messages
    libc::SYS_semget,       // of System V, in semaphores
    // A mapping of a file can reach other parts of it: of a zone, another process's channel. mremap is below.
    libc::SYS_remap_file_pages,
    // Namespaces: in one of its own a user has all capabilities, and with them the kernel's less tried parts. clone is below.
    libc::SYS_unshare,
    libc::SYS_setns,
    // The network, as far as pairs of sockets have one; socket is below.
    libc::SYS_connect,
    libc::SYS_bind,
    // Parts of the kernel that no namespace divides, or that are attacked most.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,    // stops the kernel in the middle of a copy
    libc::SYS_io_uring_setup, // carries out calls that no filter sees
    libc::SYS_add_key,        // keyrings
    libc::SYS_request_key,    // the same
    libc::SYS_keyctl,         // the same
    libc::SYS_syslog,         // the kernel's log
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt, // segments of 16 bits
    // A copy of the worker, out of whatever counts its memory; posix_spawn and vfork share it until they execute the linker.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
];

fn when(argument: u8, is: SeccompCmpOp, value: u64) -> anyhow::Result<SeccompCondition> {
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, is, value)?)
}

/// A part of a shared mapping that may be mapped a second time: a page, or a larger part that lies at a multiple of its size from the end, so that
/// it ends inside.
#[derive(Clone, Copy, Debug)]
pub struct Again {
    /// The address behind the mapping.
    pub end: u64,
    /// Bytes of the larger part, a power of two.
    pub part: u64,
}

const PAGE: u64 = 4096;

/// Of fcntl(2); libc has no name for it.
const F_SETSIG: u64 = 10;

/// Refused of mremap: whatever may reach beyond a mapping into its file; what is left is a part of a shared one, mapped a second time (an old
/// size of 0). realloc copies instead.
fn mremap(again: Again) -> anyhow::Result<Vec<SeccompRule>> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let when = |argument, is, value| SeccompCondition::new(argument, SeccompCmpArgLen::Qword, is, value);
    let twice = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut rules = vec![
        vec![when(1, Ne, 0)?],
        vec![when(2, Ne, PAGE)?, when(2, Ne, again.part)?],
        vec![when(3, Ne, twice)?],
    ];
    // An address that differs from the end in a bit below the part's size.
    let mut bit = PAGE;
    while bit < again.part {
        rules.push(vec![when(2, Eq, again.part)?, when(0, MaskedEq(bit), !again.end & bit)?]);
        bit <<= 1;
    }
    Ok(rules.into_iter().map(SeccompRule::new).collect::<Result<_, _>>()?)
}

/// Refused by its arguments.
fn conditional(again: Again) -> anyhow::Result<Vec<(libc::c_long, Vec<SeccompRule>)>> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let rule = |conditions| Ok::<_, anyhow::Error>(SeccompRule::new(conditions)?);
    let bits = |argument, bits: libc::c_int| when(argument, MaskedEq(bits as u64), bits as u64);
    let new = [
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWNS,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWCGROUP,
    ];
    let mut clone = vec![rule(vec![when(0, MaskedEq(libc::CLONE_VM as u64), 0)?])?]; // as fork
    for namespace in new {
        clone.push(rule(vec![bits(0, namespace)?])?);
    }
    clone.push(rule(vec![bits(0, libc::CLONE_PARENT)?])?); // as a child of the supervisor
    // As a child whose end lets a stopped parent go on: the lowest byte is the signal that tells of it.
    clone.push(rule(vec![when(0, MaskedEq(0xff), libc::SIGCONT as u64)?])?);
    let own = std::process::id().into();
    Ok(vec![
        (libc::SYS_clone, clone),
        (libc::SYS_mremap, mremap(again)?),
        // Signals to own threads only, as raise and abort send; none that lets a stopped worker go on.
        (
            libc::SYS_tgkill,
            vec![rule(vec![when(0, Ne, own)?])?, rule(vec![when(2, Eq, libc::SIGCONT as u64)?])?],
        ),
        // The signal that tells of a descriptor's events: SIGIO, and no other. To make a descriptor block: the bells of a VM are the supervisor's
        // too, and a write that blocks there would keep it from serving the VM.
        (
            libc::SYS_fcntl,
            vec![
                rule(vec![when(1, Eq, F_SETSIG)?])?,
                rule(vec![
                    when(1, Eq, libc::F_SETFL as u64)?,
                    when(2, MaskedEq(libc::O_NONBLOCK as u64), 0)?,
                ])?,
            ],
        ),
        (libc::SYS_ioctl, vec![rule(vec![when(1, Eq, libc::FIONBIO)?])?]),
        // Limits of own processes by their number; 0 is the caller.
        (libc::SYS_prlimit64, vec![rule(vec![when(0, Ne, 0)?])?]),
        // Sockets but of the kind that asks the kernel about devices.
        (
            libc::SYS_socket,
            vec![
                rule(vec![when(0, Ne, libc::AF_NETLINK as u64)?])?,
                rule(vec![when(2, Ne, libc::NETLINK_KOBJECT_UEVENT as u64)?])?,
            ],
        ),
        // Memory that the limit of private memory doesn't count: shared without a file, and stacks. Huge pages are the host's, kept for its VMs.
        (
            libc::SYS_mmap,
            vec![
                rule(vec![bits(3, libc::MAP_SHARED | libc::MAP_ANONYMOUS)?])?,
                rule(vec![bits(3, libc::MAP_GROWSDOWN)?])?,
                rule(vec![bits(3, libc::MAP_HUGETLB)?])?,
            ],
        ),
        // To outlive the supervisor; to keep others from the threads of a core (core scheduling).
        (
            libc::SYS_prctl,
            vec![
                rule(vec![when(0, Eq, libc::PR_SET_PDEATHSIG as u64)?])?,
                rule(vec![when(0, Eq, libc::PR_SCHED_CORE as u64)?])?,
            ],
        ),
        // Children that end without a trace of the time they used.
        (
            libc::SYS_rt_sigaction,
            vec![rule(vec![
                when(0, Eq, libc::SIGCHLD as u64)?,
                SeccompCondition::new(1, SeccompCmpArgLen::Qword, Ne, 0)?,
            ])?],
        ),
    ])
}

/// Calls that answer as if this kernel didn't have them: clone3, whose flags a filter can't read (the C library then calls clone), and on x86-64 the calls of
/// the x32 ABI, whose numbers the other filter doesn't know.
fn missing() -> BpfProgram {
    const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
    const RETURN: u16 = 0x06; // BPF_RET | BPF_K
    let x32 = if cfg!(target_arch = "x86_64") { 0x4000_0000 } else { u32::MAX };
    let line = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    vec![
        line(LOAD, 0, 0, 0), // the number of the call
        line(EQUAL, 2, 0, libc::SYS_clone3 as u32),
        line(AT_LEAST, 1, 0, x32),
        line(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        line(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ]
}

/// Restricts all threads of this process, and whatever they start. After no_new_privs.
pub fn filter(again: Again) -> anyhow::Result<()> {
    for program in programs(again)? {
        seccompiler::apply_filter_all_threads(&program).context("seccomp")?;
    }
    Ok(())
}

fn programs(again: Again) -> anyhow::Result<[BpfProgram; 2]> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = REFUSED.iter().map(|n| (*n, Vec::new())).collect();
    rules.extend(conditional(again)?);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        std::env::consts::ARCH.try_into()?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    Ok([program, missing()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    const PART: usize = 2 << 20;
    /// Bytes of a file that this process maps, in front of others that it doesn't.
    const MAPPED: usize = 2 * PART + 3 * PAGE as usize;

    /// Maps parts a second time; which of the attempts succeed.
    fn attempts(base: usize, spare: usize) -> Vec<bool> {
        let page = PAGE as usize;
        let end = base + MAPPED;
        let twice = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        [
            // Inside.
            (base, 0, page, twice),
            (end - page, 0, page, twice),
            (end - PART, 0, PART, twice),
            (end - 2 * PART, 0, PART, twice),
            // Over the end, from any page.
            (end - page, 0, PART, twice),
            (end - PART + page, 0, PART, twice),
            (end - page, 0, 2 * page, twice),
            (base, 0, 2 * PART, twice),
            // By growing.
            (end - page, page, 2 * page, twice),
            (end - page, page, 2 * page, libc::MREMAP_MAYMOVE),
            (base, MAPPED, 2 * MAPPED, libc::MREMAP_MAYMOVE),
        ]
        .into_iter()
        .map(|(old, old_len, len, flags)| {
            // SAFETY: the spare pages are this test's own.
            let got = unsafe { libc::mremap(old as *mut _, old_len, len, flags, spare as *mut libc::c_void) };
            got != libc::MAP_FAILED
        })
        .collect()
    }

    #[test]
    fn a_mapping_of_a_part_of_a_file_reaches_no_other_part_of_it() {
        let file = tombolo_calls::memory::sealed_memfd(c"zone", 4 * MAPPED as u64).expect("a file");
        let map = |len: usize, flags, fd| {
            // SAFETY: fresh mappings.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), len, 3, flags, fd, 0) };
            assert_ne!(at, libc::MAP_FAILED);
            at as usize
        };
        let base = map(MAPPED, libc::MAP_SHARED, file.as_raw_fd());
        let spare = map(4 * MAPPED, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        // A thread's filter ends with it.
        let outcome = std::thread::spawn(move || {
            // SAFETY: integers only.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            let again = Again { end: (base + MAPPED) as u64, part: PART as u64 };
            seccompiler::apply_filter(&programs(again).expect("programs")[0]).expect("applied");
            attempts(base, spare)
        });
        let outcome = outcome.join().expect("it ends");
        assert_eq!(outcome, [[true; 4].as_slice(), &[false; 7]].concat());
        // Without the filter the kernel lets them, so that it is the filter which refused; those that grow change what is mapped, so one of them.
        assert_eq!(attempts(base, spare)[4..9], [true; 5]);
    }
}
