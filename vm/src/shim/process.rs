// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The shim's own process: one thread, which polls its managers, its child and what that says.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::streams::Streamed;
use super::{FORMAT, Order, Place, Reply, Request, State, Stream, WITH_CHILD, wire};
use crate::child;
use crate::qemu::start::no_process;

/// For another manager to come, when the last one has gone without a word.
const ALONE: Duration = Duration::from_secs(5);
/// The longest pause between two tries to have one.
const ALONE_MAX: Duration = Duration::from_secs(300);

/// Runs a shim that listens at `listener` and serves `first`, until it is told to end. `folder` is that of its project, for which it starts a supervisor when
/// there is none.
///
/// # Errors
/// When the descriptors are not what they should be, or polling fails.
pub fn run(listener: RawFd, first: RawFd, folder: Option<PathBuf>) -> anyhow::Result<()> {
    // SAFETY: the manager that starts this process passes the numbers of descriptors that no other part of it owns.
    let (listener, first) = unsafe { (OwnedFd::from_raw_fd(listener), OwnedFd::from_raw_fd(first)) };
    let mut shim = Process {
        listener,
        connections: vec![Connection { socket: first, waits: false }],
        kept: BTreeMap::new(),
        child: None,
        streams: BTreeMap::new(),
        ends: false,
        folder,
        alone: None,
        pause: ALONE,
    };
    while !shim.ends {
        shim.turn()?;
    }
    shim.end_child();
    Ok(())
}

struct Process {
    listener: OwnedFd,
    connections: Vec<Connection>,
    kept: BTreeMap<String, OwnedFd>,
    child: Option<Running>,
    streams: BTreeMap<Stream, Streamed>,
    /// It was told to end.
    ends: bool,
    /// The project's folder.
    folder: Option<PathBuf>,
    /// When it starts a supervisor, as it has no manager.
    alone: Option<Instant>,
    /// The pause before that.
    pause: Duration,
}

/// A manager.
struct Connection {
    socket: OwnedFd,
    /// It waits for the end of the child.
    waits: bool,
}

/// A child, also one that has ended.
struct Running {
    process: Child,
    pidfd: OwnedFd,
    /// The kernel kills the child's group when this is closed, as at this process's death.
    _leash: UnixStream,
    exit: Option<i32>,
}

impl Running {
    fn runs(&self) -> bool {
        self.exit.is_none()
    }
}

impl Process {
    /// Waits until there is something to do, and does it.
    fn turn(&mut self) -> anyhow::Result<()> {
        let ready = self.wait()?;
        let mut ready = ready.into_iter();
        let mut next = || ready.next().unwrap_or_default();
        let (child_ended, comes) = (next(), next());
        let connections: Vec<bool> = self.connections.iter().map(|_| next()).collect();
        for stream in self.streams.values_mut() {
            let ready: Vec<bool> = stream.polled().iter().map(|_| next()).collect();
            stream.pump(&ready);
        }
        // Each is served once; those that come are behind them.
        let mut kept = Vec::new();
        for (mut connection, ready) in std::mem::take(&mut self.connections).into_iter().zip(connections) {
            if !ready || self.serve(&mut connection) {
                kept.push(connection);
            }
        }
        kept.append(&mut self.connections);
        self.connections = kept;
        if child_ended {
            self.reap();
        }
        if comes {
            self.accept();
        }
        self.tend_manager();
        Ok(())
    }

    /// Has a supervisor started where there is no manager for a while: a VM that ends, or a member of a zone, would not be heard. The pause doubles with each try.
    fn tend_manager(&mut self) {
        if !self.connections.is_empty() {
            self.alone = None;
        } else if self.alone.is_none_or(|at| at <= Instant::now()) {
            if self.alone.is_some() {
                self.call_supervisor();
                self.pause = (self.pause * 2).min(ALONE_MAX);
            }
            self.alone = Some(Instant::now() + self.pause);
        }
    }

    fn call_supervisor(&self) {
        let Some(folder) = &self.folder else { return };
        let mut command = child::own_program();
        command.args(["supervise", "--revive", "--dir"]).arg(folder);
        // The next try may have a process.
        let _none = child::start_apart(command, &[]);
    }

    /// Polls the child's end, the listener, the managers and the streams, in this order.
    fn wait(&self) -> io::Result<Vec<bool>> {
        let child = self.child.as_ref().filter(|child| child.runs());
        let pidfd = child.map_or(self.listener.as_fd(), |child| child.pidfd.as_fd());
        let events = |wanted| if wanted { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![
            PollFd::from_borrowed_fd(pidfd, events(child.is_some())),
            PollFd::new(&self.listener, PollFlags::IN),
        ];
        fds.extend(self.connections.iter().map(|connection| PollFd::new(&connection.socket, PollFlags::IN)));
        for stream in self.streams.values() {
            for (index, (fd, writes)) in stream.polled().into_iter().enumerate() {
                let mut wanted = events(stream.wants(index));
                wanted.set(PollFlags::OUT, writes);
                fds.push(PollFd::from_borrowed_fd(fd, wanted));
            }
        }
        loop {
            let left = self.alone.map(|at| at.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match rustix::event::poll(&mut fds, left.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                polled => {
                    polled?;
                    break;
                }
            };
        }
        let mut ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        ready[0] &= child.is_some();
        Ok(ready)
    }

    fn accept(&mut self) {
        // One that fails has gone already, or there is no descriptor for it: it is told so by the end of its connection at the latest.
        if let Ok(socket) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
            let own = rustix::process::geteuid().as_raw();
            let user = tombolo_listen::peer::of(&socket).map(|peer| peer.user);
            if user.is_ok_and(|user| [own, 0].contains(&user)) {
                self.connections.push(Connection { socket, waits: false });
            }
        }
    }

    /// Serves a request. Returns whether the connection stays.
    fn serve(&mut self, connection: &mut Connection) -> bool {
        let (request, fds) = match wire::receive::<Request>(&connection.socket) {
            Ok(Some(request)) => request,
            Ok(None) => return false,
            Err(e) => {
                let reply = Reply::Failed(e.to_string());
                return wire::send(&connection.socket, &reply, &[]).is_ok();
            }
        };
        if matches!(request, Request::Wait) {
            connection.waits = true;
            return self.child.as_ref().is_some_and(Running::runs) || self.tell_end(connection);
        }
        match self.carry_out(request, fds) {
            Ok(Reply::Descriptors(names)) => {
                let fds: Vec<BorrowedFd<'_>> = names.iter().map(|name| self.kept[name].as_fd()).collect();
                wire::send(&connection.socket, &Reply::Descriptors(names.clone()), &fds).is_ok()
            }
            Ok(reply) => {
                let running = self.child.as_ref().filter(|child| child.runs());
                let fds =
                    running.filter(|_| matches!(reply, Reply::State(_))).map(|child| child.pidfd.as_fd());
                wire::send(&connection.socket, &reply, fds.as_slice()).is_ok()
            }
            Err(e) => wire::send(&connection.socket, &Reply::Failed(format!("{e:#}")), &[]).is_ok(),
        }
    }

    fn carry_out(&mut self, request: Request, mut fds: Vec<OwnedFd>) -> anyhow::Result<Reply> {
        match request {
            Request::Look | Request::Wait => return Ok(Reply::State(self.state())),
            Request::Start(order) => {
                self.start(&order, fds)?;
                return Ok(Reply::State(self.state()));
            }
            Request::Put(names) => {
                let runs = self.child.as_ref().is_some_and(Running::runs);
                let named = names.into_iter().zip(fds);
                self.kept.extend(named.filter(|(name, _)| runs || !name.starts_with(WITH_CHILD)));
            }
            Request::Remove(names) => self.kept.retain(|name, _| !names.contains(name)),
            Request::Get(names) => {
                let known = names.into_iter().filter(|name| self.kept.contains_key(name));
                return Ok(Reply::Descriptors(known.collect()));
            }
            Request::Watch(watch) => {
                let socket = fds.pop().ok_or_else(|| anyhow::anyhow!("a watcher without a socket"))?;
                match self.streams.get_mut(&watch.stream) {
                    Some(stream) => stream.watch(socket, watch)?,
                    None => anyhow::bail!("nothing was started"),
                }
            }
            Request::Unwatch => self.streams.values_mut().for_each(Streamed::unwatch),
            Request::Connect => {
                self.connections.extend(fds.pop().map(|socket| Connection { socket, waits: false }));
            }
            Request::Listen => {
                if let Some(listener) = fds.pop() {
                    self.listener = listener;
                }
            }
            Request::End => self.ends = true,
        }
        Ok(Reply::Done)
    }

    fn state(&self) -> State {
        State {
            format: FORMAT,
            shim: std::process::id(),
            child: self.child.as_ref().map(|child| child.process.id()),
            exit: self.child.as_ref().and_then(|child| child.exit),
            kept: self.kept.keys().cloned().collect(),
        }
    }

    /// # Errors
    /// A child runs, or the program can't be started.
    fn start(&mut self, order: &Order, fds: Vec<OwnedFd>) -> anyhow::Result<()> {
        anyhow::ensure!(self.child.as_ref().is_none_or(|child| !child.runs()), "a child runs already");
        anyhow::ensure!(order.places.len() == fds.len(), "descriptors are missing");
        let mut command = match &order.program {
            Some(program) => Command::new(program),
            None => child::own_program(),
        };
        command.args(&order.arguments).envs(&order.environment).current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let (mut inherited, mut group) = (Vec::new(), None);
        for (place, fd) in order.places.iter().zip(fds) {
            match place {
                Place::Child(number) => inherited.push((fd, *number)),
                Place::Group => group = Some(File::from(fd)),
                Place::Stream(stream, log) => {
                    self.streams.entry(*stream).or_insert_with(|| Streamed::new(log)).begin(fd)?;
                }
            }
        }
        prepare(&mut command, inherited, order.shielded);
        let leash = put_on_leash(&mut command)?;
        // It dies with this process from here on, also where the group does not let it in.
        group.map_or(Ok(()), |procs| child::enter(&mut command, &procs))?;
        if order.program.is_none() {
            child::tie_own(&mut command);
        }
        let process = command.spawn().map_err(|e| no_process(&e))?;
        let pid = Pid::from_child(&process);
        // Its number is its own until it is reaped.
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        self.child = Some(Running { process, pidfd, _leash: leash, exit: None });
        Ok(())
    }

    /// The child has ended: its last words are written before that is told.
    fn reap(&mut self) {
        let Some(child) = &mut self.child else { return };
        // What a script has started beside it, or instead of becoming it. There may be no such group.
        let _none = rustix::process::kill_process_group(Pid::from_child(&child.process), Signal::KILL);
        let Ok(status) = child.process.wait() else { return };
        child.exit = Some(status.into_raw());
        self.kept.retain(|name, _| !name.starts_with(WITH_CHILD));
        self.streams.values_mut().for_each(Streamed::drain);
        let mut connections = std::mem::take(&mut self.connections);
        connections.retain_mut(|connection| !connection.waits || self.tell_end(connection));
        self.connections = connections;
    }

    fn tell_end(&self, connection: &mut Connection) -> bool {
        connection.waits = false;
        wire::send(&connection.socket, &Reply::State(self.state()), &[]).is_ok()
    }

    fn end_child(&mut self) {
        if let Some(child) = self.child.as_mut().filter(|child| child.runs()) {
            // It fails where it has just ended.
            let _ended = child.process.kill();
            self.reap();
        }
    }
}

/// Makes the command's process the leader of a group that dies with this process, with the descriptors under their numbers.
fn prepare(command: &mut Command, inherited: Vec<(OwnedFd, RawFd)>, shielded: bool) {
    let parent = rustix::process::getpid();
    // Above all of the numbers, so that no copy is in the place of another one.
    let above = inherited.iter().map(|(_, number)| number + 1).max().unwrap_or(3);
    let mut copies: Vec<RawFd> = inherited.iter().map(|_| -1).collect();
    // SAFETY: between fork and exec only async-signal-safe system calls are made: prctl, getppid, setpgid, sigprocmask, fcntl, dup3; the set is initialized
    // before it is used, and the closure owns the descriptors. Copies that are made there are closed by exec.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the line above.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            rustix::process::setpgid(None, None)?;
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGTERM, libc::SIGHUP].into_iter().filter(|_| shielded) {
                libc::sigaddset(&raw mut set, signal);
            }
            if libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()) < 0 {
                return Err(io::Error::last_os_error());
            }
            let done =
                |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
            for (copy, (fd, _)) in copies.iter_mut().zip(&inherited) {
                // A number above the limit of open files is an invalid argument of it.
                *copy = done(libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, above))
                    .map_err(|_| io::Error::from_raw_os_error(libc::EMFILE))?;
            }
            copies
                .iter()
                .zip(&inherited)
                .try_for_each(|(copy, (_, number))| done(libc::dup2(*copy, *number)).map(drop))
        });
    }
}

/// Has the kernel kill the process group that the command's process leads when what this returns is closed. The signal of a parent's death reaches the child
/// alone, and not one that has changed its user since (QEMU's `-runas`) or has become a program with more rights.
///
/// # Errors
/// When no descriptor can be had.
fn put_on_leash(command: &mut Command) -> io::Result<UnixStream> {
    /// Not in the crate libc (Linux, include/uapi/asm-generic/fcntl.h).
    const F_SETSIG: libc::c_int = 10;
    let (own, held) = UnixStream::pair()?;
    // SAFETY: between fork and exec only async-signal-safe system calls are made: fcntl, getpid; no allocation. The command keeps the descriptor open.
    unsafe {
        command.pre_exec(move || {
            let calls = [
                (libc::F_SETFD, 0),
                (libc::F_SETOWN, -libc::getpid()),
                (F_SETSIG, libc::SIGKILL),
                (libc::F_SETFL, libc::O_ASYNC),
            ];
            calls.into_iter().try_for_each(|(call, argument)| {
                let done = libc::fcntl(held.as_raw_fd(), call, argument);
                if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            })
        });
    }
    Ok(own)
}
