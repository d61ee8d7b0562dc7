// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The keeper: the part of a switch that keeps the rights to open paths and devices, and touches nothing that guests can write.
//!
//! The switch itself maps guests' memory and reads front-ends' messages, so it gives up its rights (see
//! [`crate::control::sandbox`]): it opens no path, connects to nothing and removes nothing. The keeper is a process of its own,
//! forked before; it does these things and passes descriptors:
//! - it opens uplinks, starts passt for them, and starts it again when it ends;
//! - it makes the ports' sockets with their owner and mode, and removes them at the end;
//! - it connects to the sockets of ports that are clients, again and again, each over a [`Link`] of its own;
//! - it listens on the control socket, and so knows the users' requests itself: a switch that an attacker controls can
//!   only end ports and uplinks that it has.
//!
//! Without a sandbox (tests, the bench) the keeper is a thread of the same process and does the same.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use tombolo_control::net::{self as wire, Done};
use tombolo_listen::Name;
use tombolo_metrics::{Place, Server};

use crate::control::config::{Config, PortConfig, UplinkConfig, check_port, check_uplink};
use crate::control::link::Link;
use crate::control::log;
use crate::control::passt::{Connected, Kept};
use crate::control::socket::{self, Request};
use crate::control::uplinks;
use crate::ports::access::{self, Access};
use crate::ports::endpoint::{self, RETRY, Role};
use crate::uplink::Opened;

/// From the keeper to the switch.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Told {
    /// A port, with its listener or the link that brings its connections.
    Port(u64, PortConfig),
    /// An uplink, with its descriptor.
    Uplink(u64, UplinkConfig, Opened),
    /// The device of the uplink of this name is another one from now on.
    Renewed(String, Opened),
    /// The metrics' address, with its listener.
    Metrics(Place),
    /// All of the configuration was sent.
    Started,
    /// The reason why the configuration can't be served.
    Failed(String),
    /// A user's request, with the connection for the answer.
    Asked(Request),
}

/// From the switch to the keeper.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The switch serves the port or uplink.
    Has(u64),
    /// The switch refuses the port or uplink, for this reason.
    Refuses(u64, String),
    End,
}

/// The switch's handle of its keeper.
pub(crate) enum Keeper {
    Process(libc::pid_t),
    Thread(JoinHandle<()>),
}

impl Keeper {
    /// Starts the keeper of `config`: a process if `apart`, for which the caller's process has one thread only.
    ///
    /// # Errors
    /// The kernel gives no socket, process or thread.
    pub fn start(config: &Config, apart: bool) -> anyhow::Result<(Self, Link)> {
        let (own, theirs) = Link::pair()?;
        if !apart {
            let config = config.clone();
            let thread = std::thread::Builder::new()
                .name("net-keeper".into())
                .spawn(move || serve(theirs, &config))?;
            return Ok((Self::Thread(thread), own));
        }
        // SAFETY: the process has one thread, so the child finds no lock taken.
        match unsafe { libc::fork() } {
            -1 => Err(std::io::Error::last_os_error()).context("the switch's keeper"),
            0 => {
                // The link hangs up when the switch dies.
                drop(own);
                // If somebody has stopped this keeper, the kernel continues it when the switch dies, so that the keeper sees the hang-up.
                // SAFETY: the call changes an attribute of this process and reads no memory.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT) };
                let ended = std::panic::catch_unwind(|| {
                    // SAFETY: a string with its zero.
                    unsafe { libc::prctl(libc::PR_SET_NAME, c"net-keeper".as_ptr()) };
                    log::start();
                    serve(theirs, config);
                    log::finish();
                });
                // SAFETY: ends this process without running the parent's exit handlers.
                unsafe { libc::_exit(ended.is_err().into()) }
            }
            pid => Ok((Self::Process(pid), own)),
        }
    }

    /// Waits for its end, after [`Answer::End`].
    pub fn wait(self) {
        match self {
            Self::Thread(thread) => drop(thread.join()),
            // SAFETY: a child of this process, for which no other thread waits.
            Self::Process(pid) => drop(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }),
        }
    }
}

/// The kind of an entry, as far as it decides which other entries may be there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Guest,
    /// An uplink that serves one guest only, and that all ports lead to.
    ForOne,
    Uplink,
}

/// A port or uplink that the switch has, or is about to have.
struct Entry {
    id: u64,
    name: String,
    /// Of its socket, if the keeper made one.
    socket: Option<Name>,
    kind: Kind,
    /// Its connection to passt.
    passt: Option<Kept>,
    /// The user's connection that waits for the answer.
    asker: Option<UnixStream>,
}

#[derive(Default)]
struct Entries {
    /// The number of the latest.
    last: u64,
    all: Vec<Entry>,
    /// The switch ends: there are no new ones.
    closed: bool,
}

struct State {
    link: Link,
    access: Access,
    entries: Mutex<Entries>,
    /// Held while a port or uplink is opened or removed, until the switch is told: one that is removed has been opened.
    changes: Mutex<()>,
}

/// Serves the switch at the other end of `link` until that ends.
fn serve(link: Link, config: &Config) {
    let access = config.switch.access.clone();
    let state = Arc::new(State { link, access, entries: Mutex::default(), changes: Mutex::default() });
    let mut names = Vec::new();
    let control = match state.open_all(config, &mut names) {
        Ok(control) => control,
        Err(err) => {
            state.tell(&Told::Failed(format!("{err:#}")), None);
            None
        }
    };
    loop {
        match state.link.receive::<Answer>() {
            Ok(Some((Answer::Has(id), _))) => state.settle(id, None),
            Ok(Some((Answer::Refuses(id, why), _))) => state.settle(id, Some(&why)),
            Ok(Some((Answer::End, _))) => {
                names.extend(state.close().into_iter().filter_map(|e| e.socket));
                for name in names {
                    // It may have been removed already.
                    let _gone = name.remove();
                }
                break;
            }
            // The switch was killed: its sockets stay, since a successor may have made them anew already.
            Ok(None) => break,
            Err(err) => {
                tracing::error!("the switch's keeper: {err}");
                break;
            }
        }
    }
    drop(state.close());
    // The switch sees the end of the link even while a thread here waits for a request.
    endpoint::interrupt(&state.link);
    if let Some((listener, thread)) = control {
        endpoint::interrupt(&listener);
        // A thread that panicked has ended, too.
        let _ended = thread.join();
    }
}

impl State {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all entries, once those that are being opened are among them. There are none afterwards.
    fn close(&self) -> Vec<Entry> {
        let _changes = self.changes();
        let mut entries = self.entries();
        entries.closed = true;
        std::mem::take(&mut entries.all)
    }

    fn changes(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, told: &Told, fd: Option<&dyn AsFd>) {
        if let Err(err) = self.link.send(told, fd.map(|fd| fd.as_fd())) {
            tracing::debug!("the switch is gone: {err}");
        }
    }

    /// Opens everything in the configuration, the control socket last.
    fn open_all(
        self: &Arc<Self>,
        config: &Config,
        names: &mut Vec<Name>,
    ) -> anyhow::Result<Option<(UnixListener, JoinHandle<()>)>> {
        for port in &config.port {
            if let Err(err) = self.open_port(port, None) {
                tracing::error!("{err:#}");
            }
        }
        for uplink in &config.uplink {
            if let Err(err) = self.open_uplink(uplink, None) {
                tracing::error!("{err:#}");
            }
        }
        if let Some(place) = &config.switch.metrics {
            if let Place::Unix(path) = place {
                endpoint::wait_for_end(path);
            }
            let server =
                Server::bind(place).with_context(|| format!("metrics at {place}; choose another address"))?;
            let (listener, name) = server.into_parts()?;
            names.extend(name);
            self.tell(&Told::Metrics(place.clone()), Some(&listener));
        }
        let control = match &config.switch.control {
            None => None,
            Some(path) => {
                let taken = endpoint::begin(path).and_then(tombolo_listen::Begun::finish);
                let (listener, name) = taken.context("control socket")?;
                names.push(name);
                let (state, waiting) = (self.clone(), listener.try_clone()?);
                let thread = std::thread::Builder::new()
                    .name("net-control".into())
                    .spawn(move || state.serve_control(&listener))?;
                Some((waiting, thread))
            }
        };
        self.tell(&Told::Started, None);
        Ok(control)
    }

    /// One thread per request: a user may be slow.
    fn serve_control(self: &Arc<Self>, listener: &UnixListener) {
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                // Shut down.
                Err(err) if err.kind() == std::io::ErrorKind::InvalidInput => return,
                Err(err) => {
                    tracing::warn!("control connection: {err}");
                    std::thread::park_timeout(RETRY);
                    continue;
                }
            };
            let state = self.clone();
            let spawned = std::thread::Builder::new().name("net-asker".into()).spawn(move || {
                if let Err(err) = state.asked(stream) {
                    tracing::debug!("control connection: {err}");
                }
            });
            if let Err(err) = spawned {
                tracing::warn!("no thread for a control connection: {err}");
            }
        }
    }

    fn asked(self: &Arc<Self>, stream: UnixStream) -> std::io::Result<()> {
        let asker = stream.try_clone()?;
        let outcome = match socket::read(&stream)? {
            Err(err) => Err(err),
            Ok(Request::Add { port }) => self.open_port(&port, Some(asker)),
            Ok(Request::AddUplink { uplink }) => self.open_uplink(&uplink, Some(asker)),
            Ok(Request::Remove { name }) => {
                let _changes = self.changes();
                self.forget(|e| e.name == name);
                self.tell(&Told::Asked(Request::Remove { name }), Some(&stream));
                return Ok(());
            }
            Ok(request) => {
                self.tell(&Told::Asked(request), Some(&stream));
                return Ok(());
            }
        };
        match outcome {
            // The switch decides.
            Ok(()) => Ok(()),
            Err(err) => socket::reply(&stream, &wire::Answer::<Done>::Error { error: format!("{err:#}") }),
        }
    }

    /// Removes the entry that `which` selects, and its socket.
    fn forget(&self, which: impl Fn(&Entry) -> bool) -> Option<Entry> {
        let mut entries = self.entries();
        let at = entries.all.iter().position(which)?;
        let entry = entries.all.remove(at);
        // It may have been removed already.
        let _gone = entry.socket.as_ref().map(Name::remove);
        Some(entry)
    }

    /// Completes an entry with the switch's answer. None: it serves the entry; otherwise the reason why not.
    fn settle(&self, id: u64, refused: Option<&str>) {
        let asker = match refused {
            Some(why) => {
                let entry = self.forget(|e| e.id == id);
                let asker = entry.and_then(|e| e.asker);
                if asker.is_none() {
                    tracing::error!("{why}");
                }
                asker
            }
            None => self.entries().all.iter_mut().find(|e| e.id == id).and_then(|e| e.asker.take()),
        };
        if let Some(asker) = asker {
            let answer = match refused {
                None => wire::Answer::Value(Done { ok: true }),
                Some(why) => wire::Answer::Error { error: why.to_owned() },
            };
            // The user may have hung up.
            let _gone = socket::reply(&asker, &answer);
        }
    }

    /// Reserves the name of an entry.
    fn enter(&self, kind: Kind, name: &str, asker: Option<UnixStream>) -> anyhow::Result<u64> {
        let word = if kind == Kind::Guest { "port" } else { "uplink" };
        let mut entries = self.entries();
        anyhow::ensure!(!entries.closed, "{word} {name}: the switch ends; start it again");
        let taken = entries.all.iter().any(|e| e.name == name);
        anyhow::ensure!(!taken, "{word} {name}: the name is in use; choose another");
        let of = |kind| entries.all.iter().filter(move |e| e.kind == kind);
        let guests = of(Kind::Guest).count();
        if let (Kind::Guest, 1.., Some(uplink)) = (kind, guests, of(Kind::ForOne).next()) {
            anyhow::bail!(
                "port {name}: {}, a passt, serves one guest, and the switch has another port; remove the uplink, and add one for each port (--port)",
                uplink.name
            );
        }
        anyhow::ensure!(
            kind != Kind::ForOne || guests < 2,
            "uplink {name}: passt serves one guest, and the switch has {guests} ports; write an uplink for each, with port = \"NAME\" (--port)"
        );
        entries.last += 1;
        let id = entries.last;
        entries.all.push(Entry { id, name: name.into(), kind, socket: None, passt: None, asker });
        Ok(id)
    }

    /// Opens a port for the switch, whose answer goes to `asker`.
    fn open_port(self: &Arc<Self>, config: &PortConfig, asker: Option<UnixStream>) -> anyhow::Result<()> {
        check_port(config)?;
        let _changes = self.changes();
        let id = self.enter(Kind::Guest, &config.name, asker)?;
        let opened = self.open_source(id, config);
        match opened.with_context(|| format!("port {}", config.name)) {
            Ok(source) => self.hand_over(id, &config.name, &Told::Port(id, config.clone()), &source),
            Err(err) => {
                self.forget(|e| e.id == id);
                Err(err)
            }
        }
    }

    /// Passes a port or uplink to the switch. Too many settings for one message are the user's mistake; without a switch no caller waits.
    fn hand_over(&self, id: u64, name: &str, told: &Told, fd: &OwnedFd) -> anyhow::Result<()> {
        match self.link.send(told, Some(fd.as_fd())) {
            Err(err) if err.kind() == std::io::ErrorKind::InvalidInput => {
                self.forget(|e| e.id == id);
                Err(err).with_context(|| {
                    format!("{name} has too many settings; give it fewer rules or addresses")
                })
            }
            Err(err) => {
                tracing::debug!("the switch is gone: {err}");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Makes the source of a port's connections.
    fn open_source(&self, id: u64, config: &PortConfig) -> anyhow::Result<OwnedFd> {
        match config.role {
            Role::Server => {
                let begun = endpoint::begin(&config.socket)?;
                access::apply(config.access.as_ref().unwrap_or(&self.access), &begun)?;
                let (listener, name) = begun.finish()?;
                if let Some(entry) = self.entries().all.iter_mut().find(|e| e.id == id) {
                    entry.socket = Some(name);
                }
                Ok(listener.into())
            }
            Role::Client => {
                let (own, theirs) = UnixStream::pair()?;
                let path = config.socket.clone();
                let link = Link::over(own.try_clone()?.into());
                let name = format!("dial-{}", config.name).chars().take(15).collect();
                std::thread::Builder::new().name(name).spawn(move || dial(&path, own, &link))?;
                Ok(theirs.into())
            }
        }
    }

    fn open_uplink(self: &Arc<Self>, config: &UplinkConfig, asker: Option<UnixStream>) -> anyhow::Result<()> {
        check_uplink(config)?;
        let _changes = self.changes();
        let kind = if config.serves_one_of_many() { Kind::ForOne } else { Kind::Uplink };
        let id = self.enter(kind, &config.name, asker)?;
        let opened = self.pass_uplink(id, config);
        opened.inspect_err(|_| drop(self.forget(|e| e.id == id)))
    }

    /// Opens the device of an uplink, and passes it to the switch; a connection to passt again whenever it ends.
    fn pass_uplink(self: &Arc<Self>, id: u64, config: &UplinkConfig) -> anyhow::Result<()> {
        let name = config.name.clone();
        let (opened, fd, connected) = uplinks::open(config).with_context(|| format!("uplink {name}"))?;
        let keep = |(source, connection): Connected| {
            let (state, uplink) = (self.clone(), name.clone());
            connection.keep(source, &name, move |opened, socket| {
                state.tell(&Told::Renewed(uplink.clone(), opened), Some(socket));
            })
        };
        let kept = connected.map(keep).transpose().with_context(|| format!("uplink {name}"))?;
        self.hand_over(id, &name, &Told::Uplink(id, config.clone(), opened), &fd)?;
        if let Some(kept) = kept {
            kept.begin();
            if let Some(entry) = self.entries().all.iter_mut().find(|e| e.id == id) {
                entry.passt = Some(kept);
            }
        }
        Ok(())
    }
}

/// Connects to `path` for each byte received on `channel`, and sends the connection back over `link`, which is the same socket, until
/// the other end hangs up.
fn dial(path: &Path, channel: UnixStream, link: &Link) {
    while matches!((&channel).read(&mut [0]), Ok(1)) {
        let stream = loop {
            match endpoint::connect(path) {
                Ok(stream) => break stream,
                Err(_) if hangs_up(&channel, RETRY) => return,
                Err(_) => {}
            }
        };
        // The other end may have hung up.
        let _gone = link.send(&(), Some(stream.as_fd()));
    }
}

/// Returns whether the other end hangs up within `time`.
fn hangs_up(channel: &UnixStream, time: Duration) -> bool {
    let mut fds = [PollFd::new(channel, PollFlags::RDHUP)];
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    poll(&mut fds, Some(&time)).is_ok_and(|n| n > 0)
}
