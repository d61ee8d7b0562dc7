// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listens, and has a worker started for each client that connects and says who it is. Of what a client sends the supervisor reads that hello, which is short, and nothing
//! else: a worker costs much, and who talks nonsense gets none.

use crate::control::{self, Listing};
use crate::limits::Limits;
use crate::listen::{Listener, Peer};
use crate::metrics;
use crate::signals;
use crate::tenants::{Full, Guest, Tenants};
use crate::vm;
use crate::wall::identity;
use crate::worker;
use crate::workers::{self, Caller, Confinement, Origin};
use anyhow::Context;
use rustix::pipe::PipeFlags;
use rustix::process::Resource;
use std::fmt::Arguments;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use tombolo_brief::aside::Aside;
use tombolo_brief::{self as brief, Brief};
use tombolo_calls::hello::Hello;
use tombolo_calls::{Error, say, stream};
use tombolo_listen::Name;

/// The settings of a server.
pub struct Config {
    /// Addresses to listen on (`unix:/path`, `tcp:host:port`), and the limits of each client that comes by it.
    pub listen: Vec<(String, Limits)>,
    /// VMs to serve through zones that this server keeps.
    pub vms: Vec<vm::Config>,
    /// VMs to serve through zones that another process keeps.
    pub guests: Vec<vm::Guest>,
    /// Limits of VMs that come later, as far as nothing is said of them.
    pub of_vms: Limits,
    /// Its standard input is a socket of a process that looks after it.
    pub overseen: bool,
    /// No other process writes to its log.
    pub own_log: bool,
    /// Clients' kernels may do all that this process's user may.
    pub unconfined: bool,
    /// A cgroup (version 2) that is this server's own: each tenant gets one in it. None: one is looked for.
    pub cgroup: Option<PathBuf>,
    /// Clients at once, not counting processes of VMs.
    pub clients: usize,
    /// Of these, clients of one peer.
    pub of_peer: usize,
    /// Where commands come in.
    pub control: Option<PathBuf>,
    /// The address at which Prometheus asks.
    pub metrics: Option<tombolo_metrics::Place>,
}

/// The time without new tenants after a connection was lost, unless a tenant leaves.
const PAUSE: Duration = Duration::from_secs(1);

/// A client may take so long for its hello.
const HELLO: Duration = Duration::from_secs(10);

/// More clients than wait at a socket that listens (SOMAXCONN), for the last look at it.
const WAITING: usize = 4096;

/// Sockets of those who get no worker, and wait to be closed.
const ENDING: usize = 256;

/// A file that ends while its client's hello is read may take so long. The client alone waits for that.
const LATE: Duration = Duration::from_millis(200);

/// What a client is told that the server has no threads, processes or descriptors for.
const NO_WORKER: &str = "the server could not start a worker for this client; its log says why";

/// What peers without a worker are worth in the log: a line a second. They can connect as fast as they like.
#[derive(Default)]
struct Seldom {
    /// When the last line was said, and how many were left out since.
    last: Mutex<(Option<Instant>, u64)>,
}

impl Seldom {
    fn say(&self, line: Arguments<'_>) {
        if let Some(left_out) = self.turn(Instant::now()) {
            match left_out {
                0 => say!("tombolo accel: {line}"),
                n => say!("tombolo accel: {line} ({n} others are left out)"),
            }
        }
    }

    /// The number of lines that were left out before this one; `None`: it is left out, too.
    fn turn(&self, now: Instant) -> Option<u64> {
        let mut last = lock(&self.last);
        if last.0.is_some_and(|at| now.saturating_duration_since(at) < Duration::from_secs(1)) {
            last.1 += 1;
            return None;
        }
        let (_, left_out) = std::mem::replace(&mut *last, (Some(now), 0));
        Some(left_out)
    }
}

/// A pipe from which a worker reads a client's hello. It has room for all of it.
fn passed_on(hello: &Hello) -> anyhow::Result<OwnedFd> {
    let (said, says) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).context("a pipe")?;
    hello.send(&mut File::from(says)).context("a client's hello")?;
    Ok(said)
}

/// As many descriptors as this process may have: each worker takes some.
fn raise_descriptors() {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // A kernel's own limit may be lower; then it stays as it was.
    let _as_before = rustix::process::setrlimit(Resource::Nofile, limit);
}

/// An address that clients connect to.
struct Place {
    address: String,
    /// The limits of each client that comes by it.
    limits: Limits,
    listener: Brief<Listener>,
}

/// The thread that answers Prometheus.
struct Figures {
    stop: tombolo_metrics::Stop,
    thread: JoinHandle<()>,
}

/// A running server.
pub struct Server {
    pub tenants: Arc<Tenants>,
    listens: Mutex<Vec<String>>,
    of_vms: Limits,
    /// The addresses that clients find, until this server is drained.
    places: Mutex<Vec<Arc<Place>>>,
    figures: Mutex<Option<Figures>>,
    /// Where commands come in, once they do.
    control: OnceLock<Name>,
    most: usize,
    of_peer: usize,
    seldom: Seldom,
    /// Closes the sockets of those who get no worker.
    aside: Aside<Brief>,
    draining: AtomicBool,
    /// Set when no client can connect any more and the command to drain was answered.
    closed: AtomicBool,
    /// The thread that waits until `closed` is set.
    main: Thread,
}

/// Serves until the process is told to end, or is drained.
pub fn serve(config: Config) -> anyhow::Result<()> {
    if config.own_log {
        tombolo_calls::say::log_is_own();
    }
    raise_descriptors();
    signals::keep_ended_children();
    signals::keep_writes_beyond_a_files_limit_from_ending_this();
    identity::keep_what_a_server_needs().context("capabilities that a server has no use for")?;
    let channels = config.vms.iter().map(|vm| vm.channels).chain(config.guests.iter().map(|vm| vm.channels));
    let most = config.clients + channels.map(|n| n as usize).sum::<usize>();
    let confinement = Confinement::tried(config.unconfined, config.cgroup.as_deref(), most)?;
    let cgroup = confinement.cgroup().cloned();
    signals::before_the_end(move || cgroup.iter().for_each(|cgroup| cgroup.end())).context("signals")?;
    let place = |(address, limits): &(String, Limits)| {
        let (address, limits) = (address.clone(), limits.clone());
        Ok(Arc::new(Place { listener: Listener::bind(&address)?.into(), address, limits }))
    };
    let places = config.listen.iter().map(place).collect::<anyhow::Result<Vec<_>>>()?;
    let vms =
        config.vms.iter().map(|vm| vm::Vm::keep(vm, &confinement)).collect::<anyhow::Result<Vec<_>>>()?;
    let folders = config.vms.iter().map(|vm| vm.folder.display().to_string());
    let server = Arc::new(Server {
        tenants: Arc::new(Tenants::of(confinement)),
        listens: Mutex::new(config.listen.iter().map(|l| l.0.clone()).chain(folders).collect()),
        of_vms: config.of_vms,
        places: Mutex::new(places.clone()),
        figures: Mutex::default(),
        control: OnceLock::new(),
        most: config.clients,
        of_peer: config.of_peer,
        seldom: Seldom::default(),
        aside: Aside::start(ENDING).context("no thread could be started")?,
        draining: AtomicBool::new(false),
        closed: AtomicBool::new(false),
        main: std::thread::current(),
    });
    for guest in &config.guests {
        // One that has damaged its zone keeps no other from being served.
        if let Err(e) = server.serve_vm(guest) {
            say!("tombolo accel: the VM {} can't be served: {e:#}", guest.vm);
        }
    }
    if let Some(place) = config.metrics {
        let figures = tombolo_metrics::Server::bind(&place)
            .with_context(|| format!("metrics at {place}; choose another address"))?;
        let (stop, tenants) = (figures.stop().context("metrics")?, server.tenants.clone());
        let thread = spawn("metrics", move || metrics::serve(&figures, &tenants))?;
        *lock(&server.figures) = Some(Figures { stop, thread });
    }
    if let Some(path) = &config.control {
        let (listener, name) = control::listen(path)?;
        server.control.get_or_init(|| name);
        let server = server.clone();
        spawn("control", move || control::serve(&listener, &server))?;
    }
    for vm in vms {
        let tenants = server.tenants.clone();
        spawn("vm", move || vm.serve(&tenants))?;
    }
    let accepting = places
        .into_iter()
        .map(|place| {
            let server = server.clone();
            spawn("listen", move || server.accept(&place))
        })
        .collect::<std::io::Result<Vec<_>>>()?;
    if config.overseen {
        let (overseer, server) =
            (UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?), server.clone());
        spawn("overseer", move || control::obey(&overseer, &server))?;
    }
    while !server.closed.load(Ordering::SeqCst) {
        std::thread::park();
    }
    for thread in accepting {
        // One that panicked has said so.
        let _ended = thread.join();
    }
    // The workers end with this process, so it stays until no client needs one.
    server.tenants.wait_until_gone();
    server.end();
    if let Some(name) = server.control.get() {
        // An administrator may have removed it already.
        let _gone = std::fs::remove_file(control::draining(name.path()));
    }
    Ok(())
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

impl Server {
    /// Serves one more VM, whose zone another process keeps. One that is served already stays so: it was told of while this server began.
    pub fn serve_vm(&self, guest: &vm::Guest) -> anyhow::Result<()> {
        let place = Origin::of_vm(&guest.vm).via;
        if lock(&self.listens).contains(&place) {
            return Ok(());
        }
        let vm = vm::Vm::join(guest, &self.of_vms, self.tenants.confinement())?;
        lock(&self.listens).push(place);
        let tenants = self.tenants.clone();
        spawn("vm", move || vm.serve(&tenants))?;
        Ok(())
    }

    fn accept(self: &Arc<Self>, place: &Place) {
        while !self.draining.load(Ordering::SeqCst) {
            match place.listener.accept() {
                Ok((socket, peer)) => self.admit(place, peer, socket),
                Err(_) if self.draining.load(Ordering::SeqCst) => return,
                Err(e) => {
                    say!("tombolo accel: a connection was lost before it began: {e}");
                    self.rest();
                }
            }
        }
    }

    /// Waits for a moment, after a connection was lost for want of descriptors or memory: the next one would be lost at once.
    pub fn rest(&self) {
        self.tenants.wait_for_change(PAUSE);
    }

    fn admit(self: &Arc<Self>, place: &Place, peer: Peer, socket: Brief) {
        if has_gone(&socket) {
            return self.aside.end(socket);
        }
        let guest = match self.tenants.welcome(peer, self.most, self.of_peer) {
            Ok(guest) => guest,
            Err(full) => {
                self.refuse(&socket, &self.refusal(peer, full));
                return self.aside.end(socket);
            }
        };
        let (server, address, limits) = (self.clone(), place.address.clone(), place.limits.clone());
        let socket = Arc::new(socket);
        let heard = socket.clone();
        // A thread of its own: one that says nothing, or a byte now and then, keeps nobody waiting. There are no more of them than places.
        let met = spawn("hello", move || server.meet(address, &limits, guest, &heard));
        if let Err(e) = met {
            self.seldom.say(format_args!("no thread could be started for a client: {e}"));
            self.refuse(&socket, NO_WORKER);
        }
    }

    /// Hears who a client is, and has a worker started for it.
    fn meet(&self, address: String, limits: &Limits, guest: Guest, socket: &Brief) {
        let hello = match brief::within(LATE, || stream::hello(socket, HELLO)) {
            Ok(hello) => hello,
            Err(Error::Closed) => return,
            Err(e) => return self.seldom.say(format_args!("handshake with {}: {e}", guest.peer())),
        };
        if let Err(why) = worker::understands(&hello) {
            self.refuse(socket, &why.to_string());
            return self.seldom.say(format_args!("{}, of {}: {why}", hello.name, guest.peer()));
        }
        if has_gone(socket) {
            return;
        }
        let origin = Origin { via: address, peer: Some(guest.peer()) };
        let started = passed_on(&hello).and_then(|said| {
            let fds = [socket.as_fd(), said.as_fd()];
            workers::start(&self.tenants, origin, limits, &fds, Caller::Guest(guest))
        });
        if let Err(e) = started {
            say!("tombolo accel: no worker could be started: {e:#}");
            self.refuse(socket, NO_WORKER);
        }
    }

    fn refuse(&self, socket: &OwnedFd, why: &str) {
        if stream::refuse(socket, why).is_err() {
            self.seldom.say(format_args!("a client left before it could be refused"));
        }
    }

    /// Why a peer can't have one more place. Those that have not said yet who they are have places too.
    fn refusal(&self, peer: Peer, full: Full) -> String {
        match full {
            Full::Server => {
                format!("this server has {} clients already; try later or raise --clients", self.most)
            }
            Full::Peer(own) => format!(
                "this server has {own} clients of {peer} already, the most of one peer; close some, or raise --clients-per-peer"
            ),
        }
    }

    /// Takes no clients any more but those that have connected. The addresses are free when this returns, that for Prometheus too. [`Server::end_if_drained`] comes
    /// next.
    pub fn drain(self: &Arc<Self>) {
        if self.draining.swap(true, Ordering::SeqCst) {
            return;
        }
        for place in lock(&self.places).drain(..) {
            if let Err(e) = place.listener.give_up() {
                say!("tombolo accel: {}: {e}", place.address);
            }
            // Clients whose connections wait are served: a closed socket would hang up on them. At most so many can wait.
            for _ in 0..WAITING {
                match place.listener.accept() {
                    Ok((socket, peer)) => self.admit(&place, peer, socket),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    // This one has gone.
                    Err(_) => {}
                }
            }
            place.listener.close();
        }
        if let Some(Figures { stop, thread }) = lock(&self.figures).take() {
            stop.now();
            // One that panicked has said so.
            let _ended = thread.join();
        }
        if let Some(name) = self.control.get() {
            if let Err(e) = name.change(control::draining(name.path())) {
                say!("tombolo accel: {}: {e}", name.path().display());
            }
        }
        say!("tombolo accel: draining: {} clients are left", self.tenants.status().len());
    }

    /// Lets [`serve`] end with the last client if the server was drained. Called when the command to drain was answered.
    pub fn end_if_drained(&self) {
        if self.draining.load(Ordering::SeqCst) {
            self.closed.store(true, Ordering::SeqCst);
            self.main.unpark();
        }
    }

    /// Removes the control groups, before this process ends.
    pub fn end(&self) {
        if let Some(cgroup) = self.tenants.confinement().cgroup() {
            cgroup.end();
        }
    }

    pub fn listing(&self) -> Listing {
        Listing {
            pid: std::process::id(),
            vm: None,
            listens: lock(&self.listens).clone(),
            draining: self.draining.load(Ordering::SeqCst),
            trouble: None,
            tenants: self.tenants.status(),
        }
    }
}

/// Returns whether the other end of a socket has been closed.
fn has_gone(socket: &OwnedFd) -> bool {
    let mut fd = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: the structure lives during the call.
    let ready = unsafe { libc::poll(&mut fd, 1, 0) };
    ready > 0 && fd.revents & (libc::POLLRDHUP | libc::POLLHUP) != 0
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Lists stay whole whatever happens between two changes.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn of_what_peers_without_a_worker_do_the_log_has_a_line_a_second() {
        let (seldom, begun) = (Seldom::default(), Instant::now());
        let turns = [0, 1, 999, 1000, 1500, 5000].map(|ms| seldom.turn(begun + Duration::from_millis(ms)));
        assert_eq!(turns, [Some(0), None, None, Some(2), None, Some(1)]);
    }

    #[test]
    fn a_client_that_has_gone_is_known_before_a_worker_is_started_for_it() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let ours = OwnedFd::from(ours);
        assert!(!has_gone(&ours));
        drop(theirs);
        assert!(has_gone(&ours));
    }
}
