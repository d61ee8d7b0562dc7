// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Starts a worker for each client, behind the wall that this server can build, and looks after it until it has ended.

use crate::figures::Figures;
use crate::limits::Limits;
use crate::listen::Peer;
use crate::tenants::{Guest, Tenant, Tenants};
use crate::wall::Wall;
use crate::wall::cgroup::{self, Delegated, Group};
use crate::wall::exec::Executions;
use crate::wall::identity::Identity;
use crate::wall::limits::{self, WORKING};
use crate::wall::spawn::{self, Process, Start};
use crate::worker;
use anyhow::{Context, anyhow, bail};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown};
use rustix::pipe::PipeFlags;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tombolo_brief::Brief;
use tombolo_calls::say;

/// Where a client comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The address that it came by, or `vm:` and the VM's name.
    pub via: String,
    /// The number of the client, among those of an address.
    pub peer: Option<Peer>,
}

impl Origin {
    /// A process of a VM.
    pub fn of_vm(name: &str) -> Origin {
        Origin { via: format!("vm:{name}"), peer: None }
    }

    /// Returns whether the origin is a process of a VM.
    pub fn is_vm(&self) -> bool {
        self.peer.is_none()
    }
}

/// Where a worker's channel is, for one that serves a VM's process.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct Place {
    /// Its number, and that of the worker's place in the VM's account.
    pub channel: u32,
    /// Its first byte in the zone's memory.
    pub at: u64,
    /// Data bytes of each of its rings.
    pub ring: u64,
    /// Bytes of its window.
    pub window: u64,
}

/// The confinement of a server's workers; by default none.
#[derive(Clone, Default)]
pub struct Confinement {
    wall: Option<Wall>,
    cgroup: Option<Delegated>,
}

/// A worker that was started.
struct Begun {
    process: Process,
    /// The end of what it says.
    said: OwnedFd,
    /// What it executes, if it is confined.
    executions: Option<Executions>,
    /// The worker's control group, which goes when this is dropped.
    group: Option<Arc<Group>>,
    /// The folder of its driver, which goes when this is dropped.
    _scratch: Option<TempDir>,
}

impl Confinement {
    /// Tries on a worker without a client whether workers can be confined here. `unconfined`: nothing is tried. `folder`: a control group to
    /// divide between tenants; none: one that can be found, and without any each process has its limits alone. `places`: for so many workers.
    pub fn tried(unconfined: bool, folder: Option<&Path>, places: usize) -> anyhow::Result<Confinement> {
        let cgroup = match folder {
            Some(folder) => {
                Some(Delegated::at(folder).with_context(|| format!("--cgroup {}", folder.display()))?)
            }
            None => found(),
        };
        if unconfined {
            say!("tombolo accel: --unconfined: a client's kernels can do all that this server's user can");
            return Ok(Confinement { wall: None, cgroup });
        }
        let identity = Identity::here().context("/proc/self")?;
        if cgroup.is_none() && identity.is_hosts_root().context("/proc/self")? {
            bail!(
                "this server is root without what gives workers a user id of their own (CAP_SETGID, CAP_SETUID, CAP_SETPCAP, CAP_SYS_ADMIN) and without a \
                 control group, so a client's kernel could start as many processes as the host has numbers for; start it with these capabilities, with a control \
                 group (--cgroup FOLDER), or as an ordinary user; see docs/accelerators.md, or let clients' kernels do all that this user can: --unconfined"
            );
        }
        let confinement = Confinement {
            wall: Some(Wall { identity, memory: WORKING, tasks: limits::tasks(places) }),
            cgroup,
        };
        confinement.try_it().map_err(|why| {
            anyhow!(
                "workers can't be confined here: {why:#}; see docs/accelerators.md, \
                 or let clients' kernels do all that this user can: --unconfined"
            )
        })?;
        Ok(confinement)
    }

    /// The control group that tenants get theirs in.
    pub fn cgroup(&self) -> Option<&Delegated> {
        self.cgroup.as_ref()
    }

    fn try_it(&self) -> anyhow::Result<()> {
        let Begun { process, said, mut executions, group: _group, _scratch } =
            self.spawn(&["--trial"], &[], &Limits::default(), None)?;
        let mut words = String::new();
        File::from(said).take(MOST_SAID as u64).read_to_string(&mut words).context("what it says")?;
        if !process.wait()? {
            return Err(anyhow!("{}", words.trim()));
        }
        if executions.as_mut().is_some_and(|executions| executions.hear(libc::POLLIN, process.pid).is_err()) {
            say!(
                "tombolo accel: the system calls of this server are judged by another program, as some container managers do, so it can't judge what its workers \
                 execute: a client's kernel can outlive this server if that is killed. Remedy: start it outside of that container, or with a control group"
            );
        }
        Ok(())
    }

    /// Starts a worker with descriptors from [`crate::worker::FIGURES_FD`] on, `within` the control group of its VM.
    fn spawn(
        &self,
        arguments: &[&str],
        fds: &[BorrowedFd<'_>],
        limits: &Limits,
        within: Option<&Group>,
    ) -> anyhow::Result<Begun> {
        let memory = limits.memory.saturating_add(WORKING);
        let wall = self.wall.clone().map(|wall| Wall { memory, ..wall });
        let group = self.cgroup.as_ref().map(|cgroup| match within {
            Some(vm) => cgroup.worker_of(vm, limits),
            None => cgroup.worker(limits),
        });
        let group = group.transpose().context("a cgroup")?.map(Arc::new);
        let null = File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
        let (said, says) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).context("a pipe")?;
        let mut arguments: Vec<OsString> =
            worker_arguments().into_iter().chain(arguments.iter().map(Into::into)).collect();
        if let Some(wall) = &wall {
            arguments.extend(["--wall".into(), serde_json::to_string(wall)?.into()]);
        }
        // This process removes it also where it has to kill the worker.
        let scratch = if wall.is_none() { worker::scratch()? } else { None };
        if let Some(scratch) = &scratch {
            arguments.extend(["--scratch".into(), scratch.path().into()]);
        }
        // Its standard input is not ours: that may be a socket that commands come in by.
        let standard = [null.as_fd(), null.as_fd(), says.as_fd()];
        let mut descriptors: Vec<BorrowedFd<'_>> = standard.into_iter().chain(fds.iter().copied()).collect();
        let executions = wall.is_some().then(Executions::new).transpose().context("a pair of sockets")?;
        let (executions, workers) = executions.unzip();
        if let Some(workers) = &workers {
            arguments.extend(["--executions".into(), descriptors.len().to_string().into()]);
            descriptors.push(workers.as_fd());
        }
        let process = spawn::spawn(&Start {
            arguments,
            variables: &[(worker::NATIVE, "1")],
            descriptors: &descriptors,
            nice: limits.nice(),
            namespaces: wall.as_ref().map_or(0, Wall::namespaces),
            cgroup: group.as_deref().map(Group::fd),
        })
        .map_err(|e| {
            let lacks = lacking(&e);
            anyhow::Error::from(e).context(lacks)
        })?;
        Ok(Begun { process, said, executions, group, _scratch: scratch })
    }
}

/// Names the resource for want of which the server could not start a process.
fn lacking(why: &std::io::Error) -> &'static str {
    match Errno::from_io_error(why) {
        Some(Errno::MFILE | Errno::NFILE) => {
            "no descriptors for one more process (ulimit -n, LimitNOFILE of a service; sysctl fs.file-max)"
        }
        Some(Errno::AGAIN) => {
            "no number for one more process (ulimit -u, TasksMax of a service, pids.max of a control group; sysctl kernel.pid_max)"
        }
        Some(Errno::NOMEM) => "no memory for one more process",
        _ => {
            "no process with namespaces of its own \
             (CONFIG_USER_NS, CONFIG_PID_NS, CONFIG_NET_NS; for a server that is not root also sysctl user.max_user_namespaces \
             and kernel.unprivileged_userns_clone; in a container its own rules)"
        }
    }
}

/// The group that this server finds; says where there is none.
fn found() -> Option<Delegated> {
    let none = |why: anyhow::Error| {
        say!(
            "tombolo accel: no control group: {why:#}. Memory, tasks and processor time are limited for each process of a worker, not for all of a tenant \
             together. Remedy: start this server as a systemd service with Delegate=yes, or give it a group without processes (--cgroup FOLDER, \
             or cgroup = \"FOLDER\" under [accel.NAME]); see docs/accelerators.md"
        );
    };
    cgroup::find().map_err(none).ok()
}

/// Bytes that a worker may say in the log of its server.
const MOST_SAID: usize = 64 << 10;

/// A worker may live on for so long when its client has gone.
const GRACE: Duration = Duration::from_secs(10);

/// Ends a client's connection, as its worker hears. By a Unix socket no client sends anything but descriptors once it has said who it is. One of them may be the client's
/// own end of the connection, which then stays open for as long as nobody reads the message, though the client has ended.
fn hang_up_on_one_that_sends_descriptors(client: &OwnedFd) {
    say!("tombolo accel: a client sent descriptors that no server takes; its connection is closed");
    // It fails where the client has hung up meanwhile.
    let _closed = rustix::net::shutdown(client, Shutdown::Both);
}

/// The events that tell of the end of a client's socket, and of what no client sends.
fn watched_events(client: &OwnedFd) -> libc::c_short {
    // Requests come by sockets of other kinds, which carry no descriptors.
    let says_nothing = rustix::net::sockopt::socket_domain(client) == Ok(AddressFamily::UNIX);
    libc::POLLRDHUP | if says_nothing { libc::POLLIN } else { 0 }
}

/// Passes on to the log what a worker says, until it has ended; which it has to soon after the other end of its client's socket has gone.
fn look_after(
    tenants: &Tenants,
    process: &Process,
    said: OwnedFd,
    mut executions: Option<Executions>,
    mut client: Option<Brief>,
) -> std::io::Result<()> {
    // A worker of this user could open the pipe anew and take out the bytes that poll(2) reported; a read must not wait for them then.
    rustix::fs::fcntl_setfl(&said, OFlags::NONBLOCK)?;
    let mut left = MOST_SAID;
    let mut said = Some(File::from(said));
    let mut gone: Option<Instant> = None;
    let of_client = client.as_deref().map_or(0, watched_events);
    let mut bytes = [0; 4096];
    loop {
        // Poll leaves a negative descriptor out.
        let number = |fd: Option<&dyn AsRawFd>| fd.map_or(-1, AsRawFd::as_raw_fd);
        let watched = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut fds = [
            watched(number(said.as_ref().map(|s| s as _)), libc::POLLIN),
            watched(number(client.as_deref().map(|c| c as _)), of_client),
            watched(process.pidfd.as_raw_fd(), libc::POLLIN),
            watched(number(executions.as_ref().map(|e| e as _)), libc::POLLIN),
        ];
        let left_of_grace = gone.map(|since| GRACE.saturating_sub(since.elapsed()));
        let timeout = left_of_grace.map_or(-1, |left| left.as_millis() as i32 + 1);
        // SAFETY: the array lives during the call.
        if unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout) } < 0 {
            let e = std::io::Error::last_os_error();
            if e.kind() == std::io::ErrorKind::Interrupted {
                continue;
            }
            return Err(e);
        }
        if let Some(client) = client.take_if(|_| fds[1].revents != 0) {
            if fds[1].revents & (libc::POLLRDHUP | libc::POLLHUP) == 0 {
                hang_up_on_one_that_sends_descriptors(&client);
            }
            gone = Some(Instant::now());
        }
        if fds[3].revents != 0 {
            // Where the worker asks no more, what it executes fails.
            let events = fds[3].revents;
            executions.take_if(|executions| executions.hear(events, process.pid).is_err());
        }
        // The last lines of the worker.
        if left_of_grace == Some(Duration::ZERO) {
            say!("tombolo accel: worker {} didn't end with its client, and is killed", process.pid);
            tenants.kill(process.pid);
            gone = None;
        }
        if fds[0].revents != 0 {
            let n = match said.as_mut().map_or(Ok(0), |said| said.read(&mut bytes)) {
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => continue,
                read => read?,
            };
            left = log(&bytes[..n], left);
            if n == 0 || left == 0 {
                // It closed its end, or has written as much as it may: this thread stops reading.
                said = None;
            }
        } else if fds[2].revents != 0 {
            return Ok(());
        }
    }
}

/// A worker's words without what moves the cursor of who reads them on a terminal: control characters, those beyond ASCII too, as U+009B begins what escape and a bracket
/// begin. No longer than the bytes.
fn harmless(bytes: &[u8]) -> String {
    let moves = |c: char| c.is_control() && !"\n\t".contains(c) || c == char::REPLACEMENT_CHARACTER;
    String::from_utf8_lossy(bytes).chars().map(|c| if moves(c) { '?' } else { c }).collect()
}

/// Writes what a worker said, of which so much is left to it; how much is left then.
fn log(bytes: &[u8], left: usize) -> usize {
    let words = harmless(bytes);
    let (passed, after) = (words.len().min(left), left.saturating_sub(words.len()));
    tombolo_calls::say::write(&words.as_bytes()[..passed]);
    if passed > 0 && after == 0 {
        say!("\ntombolo accel: a worker says too much; the rest is left out");
    }
    after
}

/// The client that a worker is for.
pub enum Caller<'a> {
    /// One that has connected to a socket and said who it is; it has this place.
    Guest(Guest),
    /// A process of a VM.
    OfVm {
        /// Where its channel is.
        place: &'a Place,
        /// The control group of its VM.
        group: Option<Arc<Group>>,
        /// Called when the worker has ended.
        ended: Box<dyn FnOnce() + Send>,
    },
}

/// Starts a worker for a client. It finds its figures at [`crate::worker::FIGURES_FD`] and the descriptors from
/// [`crate::worker::SOCKET_FD`] on.
pub fn start(
    tenants: &Arc<Tenants>,
    origin: Origin,
    limits: &Limits,
    fds: &[BorrowedFd<'_>],
    caller: Caller<'_>,
) -> anyhow::Result<()> {
    let (figures, page) = Figures::new().context("its figures")?;
    let copy = |fd: &BorrowedFd<'_>| fd.try_clone_to_owned().map(Brief::from);
    let copies = fds.iter().map(copy).collect::<std::io::Result<Vec<_>>>()?;
    let mut arguments = vec!["--limits".to_owned(), serde_json::to_string(limits)?];
    let (within, ended, guest) = match caller {
        Caller::Guest(guest) => (None, None, Some(guest)),
        Caller::OfVm { place, group, ended } => {
            arguments.extend(["--place".to_owned(), serde_json::to_string(place)?]);
            (group, Some(ended), None)
        }
    };
    let confinement = tenants.confinement().clone();
    let limits = limits.clone();
    let tenants = tenants.clone();
    // The signal of the parent's death comes when the thread that started a worker ends; so that thread waits for it.
    let (told, started) = std::sync::mpsc::channel();
    std::thread::Builder::new().name("worker-watch".into()).spawn(move || {
        let passed: Vec<BorrowedFd<'_>> =
            [page.as_fd()].into_iter().chain(copies.iter().map(|c| c.as_fd())).collect();
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let begun = confinement.spawn(&words, &passed, &limits, within.as_deref());
        let Begun { process, said, executions, group, _scratch } = match begun {
            Ok(begun) => begun,
            Err(e) => return drop(told.send(Err(e))),
        };
        drop(page);
        // The first is the socket whose end says that the client has gone.
        let client = copies.into_iter().next();
        let (since, pidfd) = (Instant::now(), process.pidfd.clone());
        tenants.add(process.pid, Tenant { origin, limits, figures, since, process: pidfd, group }, guest);
        // The caller waits for this.
        let _heard = told.send(Ok(()));
        let looked = look_after(&tenants, &process, said, executions, client);
        // It has its number, and its clock says what it has used, until it is waited for.
        tenants.remove(process.pid);
        if let Err(e) = looked.and_then(|()| process.wait()) {
            say!("tombolo accel: a worker can't be waited for: {e}");
        }
        if let Some(ended) = ended {
            ended();
        }
    })?;
    started.recv().context("the thread that starts a worker ended")?
}

/// The words that make this program a worker: as `tombolo accel worker` or as `tombolo-accel worker`.
fn worker_arguments() -> Vec<OsString> {
    let alone = std::env::args().nth(1).is_some_and(|a| a != "accel");
    let words: &[&str] = if alone { &["tombolo", "worker"] } else { &["tombolo", "accel", "worker"] };
    words.iter().map(Into::into).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_words_move_no_cursor() {
        assert_eq!(
            harmless("caf\u{e9} \u{2018}x\u{2019}\tfailed\n".as_bytes()),
            "caf\u{e9} \u{2018}x\u{2019}\tfailed\n"
        );
        // Escape, and the one character (CSI) that stands for escape and a bracket.
        assert_eq!(harmless("\u{1b}[2J \u{9b}2J\r\u{7f}".as_bytes()), "?[2J ?2J??");
        // In 8 bits, and what the end of a read cuts in two.
        assert_eq!(harmless(b"\x9b2J \xc2"), "?2J ?");
        assert!((0..=255_u8).all(|byte| harmless(&[byte; 7]).len() <= 7));
    }
}
