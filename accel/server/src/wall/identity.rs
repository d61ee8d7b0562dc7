// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The identity of a worker: a user that owns nothing.

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::io;

/// The first user id of workers; a worker's is this plus its process number on the host, so no two have the same. Debian, systemd and
/// containers leave this range alone (systemd, UIDs-GIDs.md: 0x70000000 to 0x7fffffff, unused).
pub const FIRST: u32 = 0x7000_0000;
/// The kernel's process numbers are below this.
const PIDS: u64 = 1 << 22;

/// The way in which a worker becomes another user than its server's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Identity {
    /// A user id that no other process has.
    Own,
    /// The server's, in a user namespace that knows no other.
    Mapped,
}

/// Returns whether the lines of a uid_map or gid_map have all ids of workers.
fn has_all(map: &str) -> bool {
    let has = |line: &str| {
        let mut numbers = line.split_whitespace().map_while(|n| n.parse::<u64>().ok());
        let (inside, _outside, count) = (numbers.next()?, numbers.next()?, numbers.next()?);
        Some(inside <= u64::from(FIRST) && u64::from(FIRST) + PIDS <= inside + count)
    };
    map.lines().any(|line| has(line) == Some(true))
}

/// The user outside that this user is inside, by the lines of a uid_map.
fn outside(map: &str, user: u64) -> Option<u64> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map_while(|n| n.parse::<u64>().ok());
        let (inside, outside, count) = (numbers.next()?, numbers.next()?, numbers.next()?);
        user.checked_sub(inside).filter(|nth| *nth < count).map(|nth| outside + nth)
    })
}

/// The bits of the effective capabilities of /proc/self/status.
fn effective(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

/// CAP_SETGID, CAP_SETUID, CAP_SETPCAP, CAP_SYS_ADMIN: to give an own user id and namespaces.
const NEEDED: u64 = 1 << 6 | 1 << 7 | 1 << 8 | 1 << 21;
/// CAP_SETFCAP: to map root, of a server that is root in a user namespace (a container), into the namespace of a worker.
const MAPS_ROOT: u64 = 1 << 31;
/// CAP_DAC_OVERRIDE, CAP_KILL, CAP_NET_BIND_SERVICE, CAP_SYS_PTRACE, CAP_SYS_RESOURCE: sockets and zones in folders of others, ending workers, low ports, zones that are
/// descriptors of a supervisor with more capabilities, their place among those that end when memory does.
const USED: u64 = 1 << 1 | 1 << 5 | 1 << 10 | 1 << 19 | 1 << 24;

impl Identity {
    /// The identity that this process can give to its workers.
    pub fn here() -> io::Result<Identity> {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}"));
        let own = effective(&read("status")?) & NEEDED == NEEDED
            && has_all(&read("uid_map")?)
            && has_all(&read("gid_map")?);
        Ok(if own { Identity::Own } else { Identity::Mapped })
    }

    /// Returns whether workers are the host's root, by another name: the kernel limits the number of root's processes by control groups only, not by
    /// RLIMIT_NPROC.
    pub fn is_hosts_root(self) -> io::Result<bool> {
        // SAFETY: takes nothing.
        let own = unsafe { libc::geteuid() };
        let map = std::fs::read_to_string("/proc/self/uid_map")?;
        Ok(self == Identity::Mapped && outside(&map, own.into()) == Some(0))
    }

    /// The user id to take, of a worker that still sees the host's /proc.
    pub fn uid(self) -> anyhow::Result<Option<u32>> {
        if self == Identity::Mapped {
            return Ok(None);
        }
        let pid = std::fs::read_link("/proc/self").context("/proc/self")?;
        let pid = pid.to_str().and_then(|p| p.parse::<u32>().ok()).context("/proc/self names no process")?;
        Ok(Some(FIRST + pid))
    }
}

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

/// _LINUX_CAPABILITY_VERSION_3: two words per set.
static HEADER: Header = Header { version: 0x2008_0522, pid: 0 };

/// Capabilities that the kernel knows.
fn known() -> impl Iterator<Item = u32> {
    // SAFETY: integers only.
    (0..64).take_while(|c| unsafe { libc::prctl(libc::PR_CAPBSET_READ, *c, 0, 0, 0) } >= 0)
}

/// Gives up, for good, the capabilities that a server has no use for. For a process that has one thread.
pub fn keep_what_a_server_needs() -> anyhow::Result<()> {
    let mapped = Identity::here().context("/proc/self")? == Identity::Mapped;
    let kept = NEEDED | USED | if mapped { MAPS_ROOT } else { 0 };
    for capability in known().filter(|c| kept & 1 << c == 0) {
        // A process without CAP_SETPCAP has no capability that it could pass on either.
        // SAFETY: integers only.
        let _fails = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    let own = effective(&std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?) & kept;
    let (low, high) = (own as u32, (own >> 32) as u32);
    // Effective, permitted, inheritable: low words, then high ones.
    let sets = [low, low, 0, high, high, 0];
    // SAFETY: structures of the shapes that the call takes, which live during it.
    let r = unsafe { libc::syscall(libc::SYS_capset, &raw const HEADER, sets.as_ptr()) };
    check(r as libc::c_int, "capset")
}

fn check(r: libc::c_int, what: &'static str) -> anyhow::Result<()> {
    if r < 0 { Err(io::Error::last_os_error()).context(what) } else { Ok(()) }
}

/// Takes a user id and the groups of the device's nodes, gives up all capabilities and every way to get some back, and ties this process's life
/// to that of the thread that started it.
pub fn become_nobody(uid: Option<u32>, groups: &[libc::gid_t]) -> anyhow::Result<()> {
    let none = [0u32; 6];
    // SAFETY: integers, and structures of the shapes that the calls take, which live during them.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")?;
        for capability in known() {
            // A process without CAP_SETPCAP has no capability that it could pass on either.
            let _fails = libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        if let Some(uid) = uid {
            check(libc::setgroups(groups.len(), groups.as_ptr()), "setgroups")?;
            check(libc::setresgid(uid, uid, uid), "setresgid")?;
            check(libc::setresuid(uid, uid, uid), "setresuid")?;
        }
        check(libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient")?;
        check(libc::syscall(libc::SYS_capset, &raw const HEADER, none.as_ptr()) as libc::c_int, "capset")?;
        // Another process of the same user can't look into this one.
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")?;
        // Another user id took the signal of the parent's death away.
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0), "the parent's death")?;
        // The supervisor reads this pipe. A supervisor that died before the line above leaves it without a reader.
        let mut said = libc::pollfd { fd: libc::STDERR_FILENO, events: 0, revents: 0 };
        check(libc::poll(&mut said, 1, 0), "poll")?;
        if said.revents & libc::POLLERR != 0 {
            bail!("the supervisor has ended");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_root_is_known_by_the_map_of_its_namespace() {
        assert_eq!(outside("         0          0 4294967295\n", 0), Some(0));
        assert_eq!(outside("0 1000 1\n1 100000 65536\n", 0), Some(1000));
        assert_eq!(outside("0 1000 1\n1 100000 65536\n", 65534), Some(165_533));
        assert_eq!((outside("1 0 1\n", 0), outside("nonsense\n", 0)), (None, None));
        assert_eq!(outside("65534 0 1\n", 65534), Some(0));
        assert!(!Identity::Own.is_hosts_root().expect("/proc"));
    }

    #[test]
    fn an_own_user_id_needs_the_capabilities_and_all_ids_of_workers() {
        assert!(has_all("         0          0 4294967295\n"));
        assert!(!has_all("         0     100000      65536\n"));
        assert!(!has_all(&format!("0 0 {FIRST}\n{FIRST} 100000 65536\n")));
        assert!(!has_all("nonsense\n"));
        assert_eq!(effective("Name:\tx\nCapEff:\t00000000002001c0\n") & NEEDED, NEEDED);
        assert_eq!(effective(""), 0);
    }
}
