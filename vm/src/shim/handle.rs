// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A manager's side of a shim.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{EXTENSION, FORMAT, Order, Reply, Request, State, Watch, wire};
use crate::child::{self, Handle};

/// For a shim to answer. Before it says that a child has started, that must have become its program, whose file may be far away.
const ANSWER: Duration = Duration::from_secs(20);

/// A shim, which lives on when this is dropped.
#[derive(Debug)]
pub struct Shim {
    /// Its name in the project's folder.
    name: String,
    folder: PathBuf,
    /// The shim's own process.
    pid: u32,
    process: Handle,
    socket: Mutex<OwnedFd>,
}

/// A child that was started.
#[derive(Debug)]
pub struct Started {
    pub pid: u32,
    pub process: Handle,
}

fn packets() -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

fn pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// The address of a shim in an open folder. An address has room for 107 bytes: too few for some paths.
fn address(folder: &File, name: &str) -> rustix::io::Result<SocketAddrUnix> {
    SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}.{EXTENSION}", folder.as_raw_fd()))
}

/// A socket at which a shim of this name can listen; one that is there already is replaced.
fn listener(folder: &Path, name: &str) -> io::Result<OwnedFd> {
    let path = folder.join(format!("{name}.{EXTENSION}"));
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let socket = packets()?;
    rustix::net::bind(&socket, &address(&File::open(folder)?, name)?)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, 16)?;
    Ok(socket)
}

/// Starts the process of a shim.
#[cfg(not(test))]
fn launch(folder: &Path, name: &str, listener: OwnedFd, first: OwnedFd) -> anyhow::Result<()> {
    let mut command = child::own_program();
    command.args(["shim", "--name", name, "--dir"]).arg(folder);
    command.arg("--listener").arg(listener.as_raw_fd().to_string());
    command.arg("--manager").arg(first.as_raw_fd().to_string());
    child::start_apart(command, &[listener.as_fd(), first.as_fd()]).context("a shim can't be started")
}

/// A thread: a test's own program is no shim.
#[cfg(test)]
fn launch(_folder: &Path, name: &str, listener: OwnedFd, first: OwnedFd) -> anyhow::Result<()> {
    use std::os::fd::IntoRawFd;
    let run = move || super::process::run(listener.into_raw_fd(), first.into_raw_fd(), None).unwrap();
    Ok(crate::thread::start(name, run).map(drop)?)
}

/// The names of the shims whose sockets are in a project's folder, also of those that do not live any more.
///
/// # Errors
/// The folder can't be read.
pub fn names(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == EXTENSION) {
            names.extend(path.file_stem().and_then(|name| Some(name.to_str()?.to_owned())));
        }
    }
    names.sort();
    Ok(names)
}

/// Returns whether a shim lives in a project's folder.
pub fn any(folder: &Path) -> bool {
    names(folder).unwrap_or_default().iter().any(|name| connect(folder, name).is_ok())
}

fn connect(folder: &Path, name: &str) -> io::Result<OwnedFd> {
    let socket = packets()?;
    rustix::net::connect(&socket, &address(&File::open(folder)?, name)?)?;
    limit(&socket)?;
    Ok(socket)
}

fn limit(socket: &OwnedFd) -> io::Result<()> {
    for side in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(socket, side, Some(ANSWER))?;
    }
    Ok(())
}

impl Shim {
    /// Starts a shim of this name, which has no child yet. One that a manager before has left is ended.
    ///
    /// # Errors
    /// When no process can be had, or the folder takes no socket.
    pub fn start(folder: &Path, name: &str) -> anyhow::Result<Shim> {
        if let Some(left) = Shim::find(folder, name)? {
            left.end();
        }
        let listener = listener(folder, name).with_context(|| folder.display().to_string())?;
        let (own, first) = pair()?;
        launch(folder, name, listener, first)?;
        limit(&own)?;
        Shim::over(folder, name, own)
    }

    /// The shim at the other end of `socket`.
    fn over(folder: &Path, name: &str, socket: OwnedFd) -> anyhow::Result<Shim> {
        let mut shim = Shim {
            name: name.to_owned(),
            folder: folder.to_owned(),
            pid: 0,
            process: Handle::gone(),
            socket: Mutex::new(socket),
        };
        let (state, _) = shim.look()?;
        (shim.pid, shim.process) = (state.shim, Handle::of(state.shim));
        anyhow::ensure!(
            state.format == FORMAT,
            "the shim '{name}' (process {}) speaks format {}, and this program {FORMAT}; use the program that has started it to take the project down",
            state.shim,
            state.format
        );
        Ok(shim)
    }

    /// The shim of this name; `None`: it does not live, and its socket is removed.
    ///
    /// # Errors
    /// It does not answer, or is of another version.
    pub fn find(folder: &Path, name: &str) -> anyhow::Result<Option<Shim>> {
        let socket = match connect(folder, name) {
            Ok(socket) => socket,
            Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
                // Another manager may have removed it.
                let _gone = std::fs::remove_file(folder.join(format!("{name}.{EXTENSION}")));
                return Ok(None);
            }
            Err(e) => return Err(e).with_context(|| format!("the shim '{name}' can't be reached")),
        };
        Shim::over(folder, name, socket).map(Some)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The shim's own process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    fn lock(&self) -> MutexGuard<'_, OwnedFd> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> anyhow::Result<(Reply, Vec<OwnedFd>)> {
        let socket = self.lock();
        let answered = wire::send(&*socket, request, fds).and_then(|()| wire::receive(&*socket));
        drop(socket);
        let (reply, fds) = self.answer(answered)?;
        match reply {
            Reply::Failed(why) => anyhow::bail!("{why}"),
            reply => Ok((reply, fds)),
        }
    }

    /// The answer, or why there is none.
    fn answer<T>(&self, answered: io::Result<Option<T>>) -> anyhow::Result<T> {
        let (name, pid) = (&self.name, self.pid);
        match answered {
            Ok(Some(answer)) => Ok(answer),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                // A late answer would be taken for that of the next question.
                let _gone = rustix::net::shutdown(&*self.lock(), rustix::net::Shutdown::Both);
                let why = child::halted::of(pid)
                    .map_or("look at the file system of the program that it starts".into(), |h| {
                        format!("it {h}")
                    });
                anyhow::bail!(
                    "the shim '{name}' (process {pid}) has not answered within {} s; {why}",
                    ANSWER.as_secs()
                )
            }
            Err(e) if e.kind() != io::ErrorKind::BrokenPipe && e.kind() != io::ErrorKind::ConnectionReset => {
                Err(e).with_context(|| format!("the shim '{name}' (process {pid})"))
            }
            _ => anyhow::bail!("the shim '{name}' (process {pid}) has ended"),
        }
    }

    /// Its state, with its child, also one that has ended.
    ///
    /// # Errors
    /// It does not answer.
    pub fn look(&self) -> anyhow::Result<(State, Option<Started>)> {
        self.state_of(self.ask(&Request::Look, &[])?)
    }

    fn state_of(&self, (reply, fds): (Reply, Vec<OwnedFd>)) -> anyhow::Result<(State, Option<Started>)> {
        let Reply::State(state) = reply else { anyhow::bail!("the shim '{}' answered {reply:?}", self.name) };
        let process = fds.into_iter().next().map_or_else(Handle::gone, Handle::from);
        let child = state.child.map(|pid| Started { pid, process });
        Ok((state, child))
    }

    /// Starts its child.
    ///
    /// # Errors
    /// Why the program can't be started.
    pub fn run(&self, order: Order, fds: &[BorrowedFd<'_>]) -> anyhow::Result<Started> {
        let what = order.program.as_ref().map_or("tombolo".into(), |program| program.display().to_string());
        let started = self.ask(&Request::Start(order), fds).and_then(|reply| self.state_of(reply));
        let (_, started) = started.with_context(|| format!("{what} can't be started"))?;
        started.with_context(|| format!("the shim '{}' has started nothing", self.name))
    }

    /// Waits for the end of the child. `None`: the shim has ended, and its child with it.
    ///
    /// # Errors
    /// When no descriptor can be had.
    pub fn wait(&self) -> anyhow::Result<Option<ExitStatus>> {
        let (own, its) = pair()?;
        if self.ask(&Request::Connect, &[its.as_fd()]).is_err() {
            return Ok(None);
        }
        drop(its);
        let answered = wire::send(&own, &Request::Wait, &[]).and_then(|()| wire::receive::<Reply>(&own));
        match answered {
            Ok(Some((Reply::State(state), _))) => Ok(state.exit.map(ExitStatus::from_raw)),
            Ok(Some((reply, _))) => anyhow::bail!("the shim '{}' answered {reply:?}", self.name),
            Ok(None) | Err(_) => Ok(None),
        }
    }

    /// Keeps descriptors in it under these names.
    ///
    /// # Errors
    /// It does not answer.
    pub fn put(&self, named: &[(String, BorrowedFd<'_>)]) -> anyhow::Result<()> {
        let (names, fds): (Vec<String>, Vec<BorrowedFd<'_>>) = named.iter().cloned().unzip();
        self.ask(&Request::Put(names), &fds).map(drop)
    }

    /// Closes what it keeps under these names.
    ///
    /// # Errors
    /// It does not answer.
    pub fn remove(&self, names: Vec<String>) -> anyhow::Result<()> {
        self.ask(&Request::Remove(names), &[]).map(drop)
    }

    /// A descriptor that it keeps.
    ///
    /// # Errors
    /// It keeps none of this name, or does not answer.
    pub fn get(&self, name: &str) -> anyhow::Result<OwnedFd> {
        let (_, fds) = self.ask(&Request::Get(vec![name.to_owned()]), &[])?;
        fds.into_iter().next().with_context(|| format!("the shim '{}' does not keep '{name}'", self.name))
    }

    /// The names of all that it keeps.
    ///
    /// # Errors
    /// It does not answer.
    pub fn kept(&self) -> anyhow::Result<Vec<String>> {
        Ok(self.look()?.0.kept)
    }

    /// Keeps what the manager knows under this name.
    ///
    /// # Errors
    /// It does not answer, or memory runs out.
    pub fn put_record<T: Serialize>(&self, name: &str, record: &T) -> anyhow::Result<()> {
        let file = child::memory_file(name, &serde_json::to_vec(record)?)?;
        self.put(&[(name.to_owned(), file.as_fd())])
    }

    /// What a manager before this one knew.
    ///
    /// # Errors
    /// There is nothing, or it is of another version.
    pub fn record<T: DeserializeOwned>(&self, name: &str) -> anyhow::Result<T> {
        let mut file = File::from(self.get(name)?);
        let mut text = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut text))?;
        serde_json::from_slice(&text).with_context(|| {
            format!("what the shim '{}' keeps is of another version; use the program that has started it to take the project down", self.name)
        })
    }

    /// Shows a stream to `socket`, and types what comes from it.
    ///
    /// # Errors
    /// Nothing was started, or it does not answer.
    pub fn watch(&self, socket: &UnixStream, watch: Watch) -> anyhow::Result<()> {
        self.ask(&Request::Watch(watch), &[socket.as_fd()]).map(drop)
    }

    /// Sends those away who watch.
    pub fn unwatch(&self) {
        // They are gone with a shim that has ended.
        let _ended = self.ask(&Request::Unwatch, &[]);
    }

    /// Listens at its place in the folder again, where that has vanished.
    ///
    /// # Errors
    /// The folder takes no socket.
    pub fn listen_again(&self) -> anyhow::Result<()> {
        if self.folder.join(format!("{}.{EXTENSION}", self.name)).exists() {
            return Ok(());
        }
        let listener = listener(&self.folder, &self.name)?;
        self.ask(&Request::Listen, &[listener.as_fd()]).map(drop)
    }

    /// Returns whether it has ended, and its child with it.
    pub fn has_ended(&self) -> bool {
        self.process.has_ended()
    }

    /// Kills it, and with it the child. One that waits for a child that does not begin hears nothing.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Ends it, and with it the child.
    pub fn end(&self) {
        // In a test it is a thread.
        if self.ask(&Request::End, &[]).is_err() && self.pid != std::process::id() {
            self.process.kill();
        }
        // The folder may be gone.
        let _gone = std::fs::remove_file(self.folder.join(format!("{}.{EXTENSION}", self.name)));
    }
}

/// A shim without a child, which is followed by another one when it dies.
#[derive(Debug)]
pub struct Safe {
    shim: Mutex<Arc<Shim>>,
}

impl Safe {
    /// Starts one of this name.
    ///
    /// # Errors
    /// See [`Shim::start`].
    pub fn start(folder: &Path, name: &str) -> anyhow::Result<Safe> {
        Ok(Safe::of(Shim::start(folder, name)?))
    }

    /// Goes on with one that an earlier manager has started.
    pub fn of(shim: Shim) -> Safe {
        Safe { shim: Mutex::new(Arc::new(shim)) }
    }

    /// The one that lives.
    pub fn shim(&self) -> Arc<Shim> {
        self.shim.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Starts another one where this one has died, and returns whether that is so: what it kept is to be put again.
    ///
    /// # Errors
    /// See [`Shim::start`].
    pub fn renew(&self) -> anyhow::Result<bool> {
        let mut shim = self.shim.lock().unwrap_or_else(PoisonError::into_inner);
        if !shim.process.has_ended() {
            return Ok(false);
        }
        *shim = Arc::new(Shim::start(&shim.folder, &shim.name)?);
        Ok(true)
    }
}

/// The numbers under which a child inherits descriptors.
#[derive(Debug, Default)]
pub struct Inherited {
    fds: Vec<OwnedFd>,
}

impl Inherited {
    /// The first number: none that a program has by itself.
    const FIRST: RawFd = 200;

    /// Adds a descriptor, and returns its number in the child.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> RawFd {
        self.fds.push(fd.into());
        Self::FIRST + self.fds.len() as RawFd - 1
    }

    /// The descriptors with their numbers.
    pub fn all(&self) -> impl Iterator<Item = (BorrowedFd<'_>, RawFd)> {
        self.fds.iter().zip(Self::FIRST..).map(|(fd, number)| (fd.as_fd(), number))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::super::{Place, Stream, Watch};
    use super::*;

    fn shell(script: &str) -> Order {
        Order {
            program: Some("/bin/sh".into()),
            arguments: vec!["-c".into(), script.into()],
            ..Order::default()
        }
    }

    #[test]
    fn the_next_manager_finds_the_child_and_what_was_kept_and_learns_how_it_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (mut own, its) = UnixStream::pair().unwrap();
        let first = Shim::start(dir.path(), "vm-a").unwrap();
        let order =
            Order { places: vec![Place::Child(0), Place::Child(7)], ..shell("read code <&7; exit $code") };
        let null = File::open("/dev/null").unwrap();
        let started = first.run(order, &[null.as_fd(), its.as_fd()]).unwrap();
        drop(its);
        assert!(first.run(shell("true"), &[]).unwrap_err().to_string().contains("can't be started"));
        first.put_record("record", &("a", 7)).unwrap();
        drop(first);
        let next = Shim::find(dir.path(), "vm-a").unwrap().unwrap();
        assert_eq!(next.record::<(String, u32)>("record").unwrap(), ("a".into(), 7));
        assert_eq!(next.kept().unwrap(), ["record"]);
        assert!(next.get("other").unwrap_err().to_string().contains("does not keep 'other'"));
        assert_eq!(next.look().unwrap().1.unwrap().pid, started.pid);
        own.write_all(b"3\n").unwrap();
        assert_eq!(next.wait().unwrap().unwrap().code(), Some(3));
        assert!(started.process.has_ended());
        // The shim tells a manager that asks later how the child ended, too.
        assert_eq!(next.wait().unwrap().unwrap().code(), Some(3));
        next.run(shell("exit 0"), &[]).unwrap();
        assert!(next.wait().unwrap().unwrap().success());
        next.end();
        assert!(Shim::find(dir.path(), "vm-a").unwrap().is_none() && names(dir.path()).unwrap().is_empty());
    }

    #[test]
    fn what_a_child_says_is_logged_and_shown_and_watchers_see_the_next_one_unless_they_wait_for_one() {
        let dir = tempfile::tempdir().unwrap();
        let shim = Shim::start(dir.path(), "vm-a").unwrap();
        let log = dir.path().join("console");
        let run = |script: &str| {
            let (child, its) = UnixStream::pair().unwrap();
            let places = vec![Place::Stream(Stream::Console, log.clone()), Place::Child(0), Place::Child(1)];
            let order = Order { places, ..shell(script) };
            shim.run(order, &[its.as_fd(), child.as_fd(), child.as_fd()]).unwrap();
        };
        run("echo past; read line; echo \"$line\"");
        let watch = |recent, one_child| {
            let (own, its) = UnixStream::pair().unwrap();
            shim.watch(&its, Watch { stream: Stream::Console, recent, one_child }).unwrap();
            own
        };
        let (mut one, mut all) = (watch(100, true), watch(0, false));
        let mut said = [0; 5];
        one.read_exact(&mut said).unwrap();
        all.write_all(b"typed\n").unwrap();
        shim.wait().unwrap();
        let mut rest = String::new();
        one.read_to_string(&mut rest).unwrap();
        assert_eq!((&said, rest.as_str()), (b"past\n", "typed\n"));
        run("echo next");
        shim.wait().unwrap();
        shim.unwatch();
        let mut seen = String::new();
        all.read_to_string(&mut seen).unwrap();
        assert!(seen.ends_with("typed\nnext\n"), "{seen}");
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "past\ntyped\nnext\n");
        shim.end();
    }

    #[test]
    fn a_shim_that_is_told_to_end_takes_its_child_and_all_of_its_group_along() {
        let dir = tempfile::tempdir().unwrap();
        let shim = Shim::start(dir.path(), "vm-a").unwrap();
        let (mut own, its) = UnixStream::pair().unwrap();
        let order = Order { places: vec![Place::Child(1)], ..shell("sleep 1000 & sleep 1000") };
        let started = shim.run(order, &[its.as_fd()]).unwrap();
        drop(its);
        let waiting = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| shim.wait().unwrap());
            shim.end();
            waiting.join().unwrap()
        });
        assert!(waiting.is_none_or(|status| !status.success()));
        started.process.wait_end();
        // No process has its output any more.
        assert_eq!(own.read(&mut [0]).unwrap(), 0);
    }
}
