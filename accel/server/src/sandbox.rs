// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a worker gives up, in this order, before it touches its client's memory. A worker runs kernels that its client wrote, in its own
//! address space if the device is the CPU; so whatever the worker may do, the client may do.
//!
//! 1. Privileges: no new ones, by any exec; no core dumps, which would hold the client's data.
//! 2. The file system (Landlock): read and execute programs and libraries; read /proc, /sys and /dev; write only its own scratch folder
//!    (kernels are compiled there) and the devices. Kernels too old for Landlock are told about in the log.
//! 3. System calls (seccomp): none that reach other processes, the network, other name spaces or the kernel itself. They fail with EPERM, so
//!    that a driver that only tries them goes on. Drivers differ too much for a list of what is allowed.

use anyhow::Context;
use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;
use std::path::Path;

/// System calls that no driver needs.
const REFUSED: &[libc::c_long] = &[
    // other processes
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    // its share of time
    libc::SYS_setpriority,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    // the network: whoever has no socket can't use one (socket itself is below)
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    // name spaces and mounts
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    // the kernel
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_acct,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
];

fn limit(resource: libc::__rlimit_resource_t, value: u64) -> anyhow::Result<()> {
    let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
    // SAFETY: the structure lives during the call.
    if unsafe { libc::setrlimit(resource, &limit) } < 0 {
        return Err(std::io::Error::last_os_error()).context("setrlimit");
    }
    Ok(())
}

fn file_system(scratch: &Path) -> anyhow::Result<()> {
    let abi = ABI::V2;
    let read: BitFlags<AccessFs> = AccessFs::from_read(abi);
    let all: BitFlags<AccessFs> = AccessFs::from_all(abi);
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .create()?
        .set_compatibility(CompatLevel::BestEffort);
    for path in ["/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys", "/opt"] {
        if let Ok(fd) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(fd, read))?;
        }
    }
    let write =
        [AccessFs::WriteFile, AccessFs::ReadFile, AccessFs::ReadDir].into_iter().collect::<BitFlags<_>>();
    rules = rules.add_rule(PathBeneath::new(PathFd::new("/dev")?, write))?;
    // The program itself, which may be anywhere.
    if let Ok(fd) = std::env::current_exe().map_err(anyhow::Error::from).and_then(|p| Ok(PathFd::new(p)?)) {
        rules = rules.add_rule(PathBeneath::new(fd, AccessFs::ReadFile | AccessFs::Execute))?;
    }
    let home = PathFd::new(scratch).with_context(|| scratch.display().to_string())?;
    let status = rules.add_rule(PathBeneath::new(home, all))?.restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        eprintln!("tombolo accel: this kernel has no Landlock: a worker sees all files that its user sees");
    }
    Ok(())
}

/// Sockets only of the kind that asks the kernel about itself (netlink, which hwloc and drivers use) or pairs within a process.
fn system_calls() -> anyhow::Result<()> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = REFUSED.iter().map(|n| (*n, Vec::new())).collect();
    let family = |domain: libc::c_int| {
        let is = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, domain as u64)?;
        SeccompRule::new(vec![is])
    };
    let families =
        [libc::AF_INET, libc::AF_INET6, libc::AF_VSOCK, libc::AF_PACKET, libc::AF_UNIX, libc::AF_ALG];
    rules.insert(libc::SYS_socket, families.into_iter().map(family).collect::<Result<_, _>>()?);
    // No signals to others: kill is refused; tgkill, which threads use on themselves, stays.
    rules.insert(libc::SYS_kill, Vec::new());
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        std::env::consts::ARCH.try_into()?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter_all_threads(&program)?;
    Ok(())
}

/// Gives up what a worker doesn't need. `scratch` is the only folder it may change.
pub fn enter(scratch: &Path) -> anyhow::Result<()> {
    // SAFETY: integers only.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } < 0 {
        return Err(std::io::Error::last_os_error()).context("no_new_privs");
    }
    limit(libc::RLIMIT_CORE, 0)?;
    limit(libc::RLIMIT_NPROC, 4096)?;
    file_system(scratch).context("the file system can't be restricted")?;
    system_calls().context("system calls can't be restricted")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs in a child, as the restrictions can't be taken back.
    fn in_child(f: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child only runs f and leaves by _exit. (The test harness's other threads don't exist in it.)
        unsafe {
            match libc::fork() {
                0 => libc::_exit(i32::from(!f())),
                pid => {
                    let mut status = 0;
                    assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
                    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
                }
            }
        }
    }

    #[test]
    fn a_worker_reaches_neither_files_nor_network_nor_other_processes_nor_a_larger_share() {
        let scratch = std::env::temp_dir().join(format!("tombolo-sandbox-{}", std::process::id()));
        let elsewhere = std::env::temp_dir().join(format!("tombolo-elsewhere-{}", std::process::id()));
        std::fs::create_dir_all(&scratch).expect("a scratch folder");
        std::fs::write(&elsewhere, b"secret").expect("a file elsewhere");
        let parent = std::process::id() as i32;
        assert!(in_child(|| {
            let entered = enter(&scratch).is_ok();
            let own = std::fs::write(scratch.join("kernel.o"), b"x").is_ok();
            let secret = std::fs::read(&elsewhere).is_ok();
            let network = std::net::TcpListener::bind("127.0.0.1:0").is_ok();
            // SAFETY: signal 0 only asks.
            let others = unsafe { libc::kill(parent, 0) } == 0;
            // SAFETY: integers only.
            let sooner = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 0) } == 0;
            entered && own && !secret && !network && !others && !sooner
        }));
        std::fs::remove_dir_all(&scratch).expect("removed");
        std::fs::remove_file(&elsewhere).expect("removed");
    }
}
