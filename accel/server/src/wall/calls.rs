// SPDX-License-Identifier: Apache-2.0 OR MIT
//! System calls (seccomp). What namespaces, an own user id and missing capabilities take away already is not listed again. A refused call
//! fails with EPERM, as libraries try more than they need and go on without. Drivers differ too much for a list of what is allowed.
//! A call that writes files out to their disk does nothing and succeeds: drivers take its failure for their file's, and a worker's own files
//! lie in memory.

use anyhow::Context;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    sock_filter,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::RawFd;
use tombolo_calls::memory::{PAGE, PART};

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
    libc::SYS_setsid, // a session: outside of control groups each is a group of the scheduler (sched_autogroup), with as much as the server's
    // The signals that the kernel sends to a whole process group when the last one of it whose parent was in another group of the session ends.
    libc::SYS_setpgid,
    libc::SYS_timer_create, // signals and the kernel's memory, for which drivers have no use
    // Things that exist once for the whole host.
    libc::SYS_io_setup, // places for asynchronous transfers (fs.aio-max-nr), which QEMU and databases need
    libc::SYS_sync,     // writes out what all processes have written
    libc::SYS_syncfs,   // the same, of the file system that a library lies on
    libc::SYS_seccomp, // room for translated filters (net.core.bpf_jit_limit), without which no process of the host gets one
    libc::SYS_setsockopt, // the same, for sockets; and parts of TCP that are attacked more than used
    libc::SYS_fadvise64, // what it keeps of files in memory, thrown out
    // Limits that the kernel counts by user. If the server isn't root, all its workers belong to one user.
    libc::SYS_sendmsg, // descriptors under way: new clients get theirs so, before this filter holds
    libc::SYS_sendmmsg, // the same
    libc::SYS_epoll_ctl, // descriptors that are watched (fs.epoll.max_user_watches), and the kernel's memory for them; the link's own are before this filter holds
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_create, // the same
    libc::SYS_epoll_create1, // the same
    #[cfg(target_arch = "x86_64")]
    libc::SYS_inotify_init, // watchers of files (fs.inotify.max_user_instances)
    libc::SYS_inotify_init1, // the same
    libc::SYS_fanotify_init, // the same
    // Descriptors that a client passes to its worker. The kernel asks neither mounts nor Landlock when a file's mode is changed by a descriptor, only
    // whose the file is: of a server that isn't root, its user's, which the client may read but not write.
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    // Memory that the limit of private memory doesn't count.
    libc::SYS_memfd_create,            // in a descriptor
    libc::SYS_vmsplice, // in pipes: 2 MiB for each page, of which there are sixteen in a pipe, and which may then be unmapped
    libc::SYS_memfd_secret, // the same, and no host that hibernates can while there is some
    libc::SYS_shmget,   // of System V
    libc::SYS_msgget,   // of System V, in messages
    libc::SYS_semget,   // of System V, in semaphores
    libc::SYS_socketpair, // of the kernel, in what was sent and not received
    libc::SYS_landlock_create_ruleset, // of the kernel, in rules
    libc::SYS_landlock_add_rule, // the same
    libc::SYS_landlock_restrict_self, // the same
    MAP_SHADOW_STACK,   // counted as a stack, of any size
    libc::SYS_setxattr, // of the kernel, in attributes: those of memory files have no limit (Linux 6.6)
    libc::SYS_lsetxattr, // the same
    libc::SYS_fsetxattr, // the same
    SETXATTRAT,         // the same
    // Locks on files. They are the file's, so those of programs and libraries are seen by the whole host, where a script may wait for its own; and
    // each takes the kernel's memory. fcntl is below.
    libc::SYS_flock,
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

/// Calls that write a file out to its disk: they succeed without being done. On a file that a worker only reads or maps, they would make the disk
/// write out the data of all users.
const SAID_DONE: &[libc::c_long] =
    &[libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_msync, libc::SYS_sync_file_range];

/// Of Linux 6.6; libc has no name for it.
const MAP_SHADOW_STACK: libc::c_long = 453;
/// Of Linux 6.13; libc has no name for it.
const SETXATTRAT: libc::c_long = 463;

fn when(argument: u8, is: SeccompCmpOp, value: u64) -> anyhow::Result<SeccompCondition> {
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, is, value)?)
}

/// The shared mapping of which parts may be mapped a second time, elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct Again {
    base: u64,
    end: u64,
}

impl Again {
    /// Parts of the mapping at these addresses.
    pub fn inside(mapping: Range<usize>) -> Again {
        Again { base: mapping.start as u64, end: mapping.end as u64 }
    }
}

/// Commands of fcntl(2) that lock a file, or have a process told when others open or change it; and one that takes pages for pipes, of which a user
/// has so many (fs.pipe-user-pages-soft).
const OF_FILES: [libc::c_int; 7] = [
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_SETLEASE,
    libc::F_NOTIFY,
    libc::F_SETPIPE_SZ,
];
/// Commands of fcntl(2) that give a descriptor another number.
const COPIES: [libc::c_int; 2] = [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC];
/// Requests of ioctl(2) to sockets begin so: they tell of the interfaces of the network that the socket is in. A client's socket is in the host's.
const OF_NETWORKS: u64 = 0x8900;

/// Calls that read from a descriptor, or give it another number, and which of their arguments is that descriptor. fcntl is below.
const TAKES: &[(libc::c_long, u8)] = &[
    (libc::SYS_read, 0),
    (libc::SYS_readv, 0),
    (libc::SYS_preadv2, 0),
    (libc::SYS_splice, 0),
    (libc::SYS_sendfile, 1),
    (libc::SYS_dup, 0),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_dup2, 0),
    (libc::SYS_dup3, 0),
];

/// Refused of a VM's doorbell: all but to ring. The eventfd that rings the VM is the one that its QEMU reads, so a worker that read it would swallow the rings of
/// the VM's other workers.
fn doorbell(fd: RawFd) -> anyhow::Result<Vec<(libc::c_long, Vec<SeccompRule>)>> {
    use SeccompCmpOp::Eq;
    let takes = |(call, argument): &(_, u8)| {
        Ok((*call, vec![SeccompRule::new(vec![when(*argument, Eq, fd as u64)?])?]))
    };
    TAKES.iter().map(takes).collect()
}

/// Refused of mremap: whatever may reach beyond a mapping into its file. What is left maps a page, or [`PART`] bytes, of one shared mapping a second time (an
/// old size of 0). The kernel bounds the new mapping by neither the old one nor the file, so the old addresses all have to lie inside of
/// the one mapping. No new address lies there: what was mapped a second time is itself no source, and can't be put where it would be one. realloc
/// copies instead.
fn mremap(again: Again) -> anyhow::Result<Vec<SeccompRule>> {
    use SeccompCmpOp::{Eq, Gt, Lt, Ne};
    let when = |argument, is, value| SeccompCondition::new(argument, SeccompCmpArgLen::Qword, is, value);
    let Again { base, end } = again;
    let sizes = [PAGE, PART].map(|size| size as u64);
    let twice = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut rules = vec![
        vec![when(1, Ne, 0)?],
        vec![when(2, Ne, sizes[0])?, when(2, Ne, sizes[1])?],
        vec![when(3, Ne, twice)?],
        vec![when(0, Lt, base)?],
    ];
    for size in sizes {
        rules.push(vec![when(2, Eq, size)?, when(0, Gt, end.saturating_sub(size))?]);
        rules.push(vec![when(2, Eq, size)?, when(4, Gt, base.saturating_sub(size))?, when(4, Lt, end)?]);
    }
    Ok(rules.into_iter().map(SeccompRule::new).collect::<Result<_, _>>()?)
}

/// Refused of fcntl: the signal that tells of a descriptor's events, but SIGIO; to make a descriptor block, as the bells of a VM are the supervisor's
/// too, and a write that blocks there would keep it from serving the VM; another number for the VM's doorbell ([`doorbell`]); what is a file's ([`OF_FILES`]).
fn fcntl(doorbell: Option<RawFd>) -> anyhow::Result<Vec<SeccompRule>> {
    use SeccompCmpOp::{Eq, MaskedEq};
    let mut rules =
        vec![vec![when(1, Eq, libc::F_SETFL as u64)?, when(2, MaskedEq(libc::O_NONBLOCK as u64), 0)?]];
    for command in OF_FILES {
        rules.push(vec![when(1, Eq, command as u64)?]);
    }
    for (fd, command) in doorbell.iter().flat_map(|fd| COPIES.map(|command| (*fd, command))) {
        rules.push(vec![when(0, Eq, fd as u64)?, when(1, Eq, command as u64)?]);
    }
    Ok(rules.into_iter().map(SeccompRule::new).collect::<Result<_, _>>()?)
}

/// Refused by its arguments.
fn conditional(
    again: Again,
    doorbell: Option<RawFd>,
) -> anyhow::Result<Vec<(libc::c_long, Vec<SeccompRule>)>> {
    use SeccompCmpOp::{Eq, Ge, MaskedEq, Ne};
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
    let own = std::process::id().into();
    Ok(vec![
        (libc::SYS_clone, clone),
        (libc::SYS_mremap, mremap(again)?),
        // Signals to own threads only, as raise and abort send.
        (libc::SYS_tgkill, vec![rule(vec![when(0, Ne, own)?])?]),
        (libc::SYS_fcntl, fcntl(doorbell)?),
        (
            libc::SYS_ioctl,
            vec![
                rule(vec![when(1, Eq, libc::FIONBIO)?])?,
                rule(vec![when(1, MaskedEq(0xffff_ff00), OF_NETWORKS)?])?,
            ],
        ),
        // Limits of own processes by their number; 0 is the caller. And the limit of core dumps: see super::limits.
        (
            libc::SYS_prlimit64,
            vec![
                rule(vec![when(0, Ne, 0)?])?,
                rule(vec![
                    when(1, Eq, libc::RLIMIT_CORE.into())?,
                    SeccompCondition::new(2, SeccompCmpArgLen::Qword, Ne, 0)?,
                ])?,
            ],
        ),
        (libc::SYS_setrlimit, vec![rule(vec![when(0, Eq, libc::RLIMIT_CORE.into())?])?]),
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
        // To outlive the supervisor; to keep others from the threads of a core (core scheduling); core dumps; filters (seccomp).
        (
            libc::SYS_prctl,
            [libc::PR_SET_PDEATHSIG, libc::PR_SCHED_CORE, libc::PR_SET_DUMPABLE, libc::PR_SET_SECCOMP]
                .into_iter()
                .map(|option| (Eq, option as u64))
                .chain([(Ge, NEWER_OPTIONS)])
                .map(|(is, option)| rule(vec![when(0, is, option)?]))
                .collect::<anyhow::Result<_>>()?,
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

/// The first number of the system calls that came after Linux 6.13, the last version whose calls were judged for this filter.
const UNJUDGED: u32 = 464;
/// The first option of prctl(2) of those that came with Linux 6.4 or later: memory that ksmd merges, the kernel's memory for the buckets of futexes, which no limit
/// counts, and others that no driver needs. The C library does without the one above them all, names of mappings.
const NEWER_OPTIONS: u64 = 67;

/// System calls that fail as if this kernel didn't have them: clone3, whose flags a filter can't read (the C library then calls clone); those from [`UNJUDGED`] on;
/// and on x86-64 the calls of the x32 ABI, whose numbers the other filter doesn't know and which are higher.
fn missing() -> BpfProgram {
    const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
    const RETURN: u16 = 0x06; // BPF_RET | BPF_K
    let line = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    vec![
        line(LOAD, 0, 0, 0), // the number of the call
        line(EQUAL, 2, 0, libc::SYS_clone3 as u32),
        line(AT_LEAST, 1, 0, UNJUDGED),
        line(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        line(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ]
}

/// Restricts all threads of this process, and whatever they start. After no_new_privs. `doorbell`: the descriptor that rings the client's VM, if it has one.
pub fn filter(again: Again, doorbell: Option<RawFd>) -> anyhow::Result<()> {
    for program in programs(again, doorbell)? {
        seccompiler::apply_filter_all_threads(&program).context("seccomp")?;
    }
    Ok(())
}

/// Restricts this thread alone, which a test has made for that.
#[cfg(test)]
pub(crate) fn filter_this_thread() -> anyhow::Result<()> {
    // SAFETY: integers only.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    programs(Again::inside(0..0), None)?
        .iter()
        .try_for_each(|program| seccompiler::apply_filter(program).context("seccomp"))
}

/// The program that lets calls with these rules end with an error; 0: with success.
fn program(rules: BTreeMap<i64, Vec<SeccompRule>>, error: libc::c_int) -> anyhow::Result<BpfProgram> {
    let (allow, end) = (SeccompAction::Allow, SeccompAction::Errno(error as u32));
    Ok(SeccompFilter::new(rules, allow, end, std::env::consts::ARCH.try_into()?)?.try_into()?)
}

/// In the order in which they are applied: after the last one no further filter can be.
fn programs(again: Again, bell: Option<RawFd>) -> anyhow::Result<[BpfProgram; 3]> {
    let always = |calls: &[libc::c_long]| calls.iter().map(|n| (*n, Vec::new())).collect();
    let mut refused: BTreeMap<i64, Vec<SeccompRule>> = always(REFUSED);
    refused.extend(conditional(again, bell)?);
    if let Some(fd) = bell {
        refused.extend(doorbell(fd)?);
    }
    Ok([missing(), program(always(SAID_DONE), 0)?, program(refused, libc::EPERM)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// Bytes of a file that this process maps, in front of others that it doesn't.
    const MAPPED: usize = 2 * PART + 3 * PAGE;

    /// Maps parts a second time; which of the attempts succeed.
    fn attempts(base: usize, spare: usize) -> Vec<bool> {
        let (page, end) = (PAGE, base + MAPPED);
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

    /// Maps memory at an address, or where the kernel wants (0).
    fn map(at: usize, len: usize, flags: libc::c_int, fd: RawFd) -> usize {
        // SAFETY: fresh mappings, or over one of this test's own.
        let at = unsafe { libc::mmap(at as *mut _, len, 3, flags, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        at as usize
    }

    #[test]
    fn a_mapping_of_a_part_of_a_file_reaches_no_other_part_of_it() {
        let file = tombolo_calls::memory::sealed_memfd(c"zone", 4 * MAPPED as u64).expect("a file");
        let base = map(0, MAPPED, libc::MAP_SHARED, file.as_raw_fd());
        let spare = map(0, 4 * MAPPED, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        // A thread's filter ends with it.
        let outcome = std::thread::spawn(move || {
            // SAFETY: integers only.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            let again = Again::inside(base..base + MAPPED);
            seccompiler::apply_filter(&programs(again, None).expect("programs")[2]).expect("applied");
            attempts(base, spare)
        });
        let outcome = outcome.join().expect("it ends");
        assert_eq!(outcome, [[true; 4].as_slice(), &[false; 7]].concat());
        // Without the filter the kernel lets them, so that it is the filter which refused; those that grow change what is mapped, so one of them.
        assert_eq!(attempts(base, spare)[4..9], [true; 5]);
    }

    /// Maps a part a second time.
    fn again(old: usize, len: usize, to: usize) -> bool {
        let twice = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: over pages of this test's own.
        unsafe { libc::mremap(old as *mut _, 0, len, twice, to as *mut libc::c_void) != libc::MAP_FAILED }
    }

    #[test]
    fn what_was_mapped_a_second_time_leads_no_further_and_lies_outside_of_the_mapping() {
        let file = tombolo_calls::memory::sealed_memfd(c"zone", 4 * MAPPED as u64).expect("a file");
        std::os::unix::fs::FileExt::write_all_at(&file, b"of others", MAPPED as u64).expect("written");
        let room = map(0, 16 * PART, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        let base = map(room + 2 * PART, MAPPED, libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd());
        let end = base + MAPPED;
        // Whole parts behind the end, as the last page's copy and what follows it would be.
        let (copy, beyond) = (end + 2 * PART, end + 4 * PART);
        let filtered = std::thread::spawn(move || {
            // SAFETY: integers only.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            let inside = Again::inside(base..end);
            seccompiler::apply_filter(&programs(inside, None).expect("programs")[2]).expect("applied");
            let allowed = [
                again(end - PAGE, PAGE, copy),
                again(base + PAGE, PART, beyond),
                // Next to the mapping.
                again(base, PAGE, base - PAGE),
                again(base, PART, base - PART),
                again(base, PAGE, end),
                again(base, PART, end),
            ];
            let refused = [
                // From a copy.
                again(copy, PART, beyond),
                again(copy, PAGE, beyond),
                again(base - PAGE, PAGE, beyond),
                again(end, PAGE, beyond),
                again(base - PAGE, PART, beyond),
                again(end - PART + PAGE, PART, beyond),
                // Into the mapping, or over one of its ends.
                again(base, PAGE, base + PAGE),
                again(base, PAGE, end - PAGE),
                again(base + PAGE, PAGE, base),
                again(end - PART, PART, base),
                again(end - PART, PART, base - PART + PAGE),
                again(base, PART, end - PAGE),
            ];
            (allowed, refused)
        });
        assert_eq!(filtered.join().expect("it ends"), ([true; 6], [false; 12]));
        // Without the filter the copy leads on into what the file has behind the mapping.
        assert!(again(copy, PART, beyond));
        // SAFETY: just mapped, of a file that is longer.
        let read = unsafe { std::slice::from_raw_parts((beyond + PAGE) as *const u8, 9) };
        assert_eq!(read, b"of others");
    }

    /// Takes what an eventfd has in all ways that there are; which of them succeed. Each needs the fd to have been rung.
    fn takes(bell: RawFd) -> Vec<bool> {
        let mut word = 0_u64;
        let mut vector = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
        let mut pipe = [0; 2];
        // SAFETY: room for two descriptors.
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        let (at, null) = (&raw mut vector, std::ptr::null_mut());
        type Take<'a> = Box<dyn Fn() -> i64 + 'a>;
        // SAFETY: the word, the vector and the descriptors live during the calls.
        let ways: [Take<'_>; 9] = unsafe {
            [
                Box::new(|| libc::read(bell, (*at).iov_base, 8) as i64),
                Box::new(|| libc::readv(bell, at, 1) as i64),
                Box::new(|| libc::preadv2(bell, at, 1, -1, 0) as i64),
                Box::new(|| libc::splice(bell, null, pipe[1], null.cast(), 8, 0) as i64),
                Box::new(|| libc::dup(bell).into()),
                Box::new(|| libc::dup2(bell, 200).into()),
                Box::new(|| libc::dup3(bell, 201, 0).into()),
                Box::new(|| libc::fcntl(bell, libc::F_DUPFD, 0).into()),
                Box::new(|| libc::fcntl(bell, libc::F_DUPFD_CLOEXEC, 0).into()),
            ]
        };
        let ring = || {
            let one = 1_u64;
            // SAFETY: a word that lives during the call.
            assert_eq!(unsafe { libc::write(bell, (&raw const one).cast(), 8) }, 8);
        };
        ways.iter().map(|way| (ring(), way() >= 0).1).collect()
    }

    #[test]
    fn a_worker_rings_its_vm_and_takes_no_ring_of_another() {
        // SAFETY: takes no memory.
        let bell = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK) };
        let taken = std::thread::spawn(move || {
            // SAFETY: integers only.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            let again = Again::inside(0..0);
            seccompiler::apply_filter(&programs(again, Some(bell)).expect("programs")[2]).expect("applied");
            takes(bell)
        });
        assert_eq!(taken.join().expect("it ends"), [false; 9]);
        // All rings are there, and without the filter each way takes them.
        let mut rings = 0_u64;
        // SAFETY: a word that lives during the call.
        assert_eq!(unsafe { libc::read(bell, (&raw mut rings).cast(), 8) }, 8);
        assert_eq!(rings, 9);
        let (natively, splice) = (takes(bell), 3);
        // Not every kernel splices from an eventfd.
        assert!(natively.iter().enumerate().all(|(way, taken)| *taken || way == splice), "{natively:?}");
    }

    #[test]
    fn what_newer_kernels_offer_and_nobody_has_judged_is_missing_behind_the_wall() {
        const GETXATTRAT: libc::c_long = UNJUDGED as libc::c_long;
        const PR_FUTEX_HASH: libc::c_long = 78;
        let error = |answer: libc::c_long| {
            if answer < 0 { std::io::Error::last_os_error().raw_os_error() } else { None }
        };
        // SAFETY: integers; no call gets an address at which there is memory.
        let asked = move || unsafe {
            [
                error(libc::syscall(GETXATTRAT, -1, 0, 0, 0, 0, 0)),
                error(libc::syscall(libc::SYS_prctl, PR_FUTEX_HASH, 2, 0, 0, 0)),
            ]
        };
        let behind = std::thread::spawn(move || {
            filter_this_thread().expect("filtered");
            asked()
        });
        assert_eq!(behind.join().expect("it ends"), [Some(libc::ENOSYS), Some(libc::EPERM)]);
    }

    #[test]
    fn a_worker_waits_at_its_links_descriptors_and_has_no_more_of_them_watched() {
        // SAFETY: integers, and an event that lives during the calls.
        let (epoll, watched, more) =
            unsafe { (libc::epoll_create1(0), libc::eventfd(1, 0), libc::eventfd(1, 0)) };
        let add = move |fd| {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
            // SAFETY: as above.
            unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &mut event) }
        };
        let wait = move || {
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            // SAFETY: as above.
            unsafe { libc::epoll_wait(epoll, &mut event, 1, 0) }
        };
        assert_eq!(add(watched), 0);
        let behind = std::thread::spawn(move || {
            filter_this_thread().expect("filtered");
            (add(more), std::io::Error::last_os_error().raw_os_error(), wait())
        });
        assert_eq!(behind.join().expect("it ends"), (-1, Some(libc::EPERM), 1));
        // It is the filter that refused it.
        assert_eq!(add(more), 0);
    }

    #[test]
    fn nothing_is_written_out_to_a_disk_and_nobody_takes_that_for_an_error() {
        // SAFETY: no descriptor has this number, and the address is that of no mapping.
        let all = || unsafe {
            let null = std::ptr::null_mut();
            [
                libc::fsync(-1),
                libc::fdatasync(-1),
                libc::sync_file_range(-1, 0, 0, 0),
                libc::msync(null, 1, libc::MS_SYNC),
            ]
        };
        assert_eq!(all(), [-1; 4]);
        let behind = std::thread::spawn(move || {
            // SAFETY: integers only.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            let again = Again::inside(0..0);
            seccompiler::apply_filter(&programs(again, None).expect("programs")[1]).expect("applied");
            all()
        });
        assert_eq!(behind.join().expect("it ends"), [0; 4]);
    }
}
