// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listens, and starts a worker for each client. The supervisor never reads what a client sends.

use crate::control::{self, Listing};
use crate::figures::Figures;
use crate::limits::Limits;
use crate::metrics;
use crate::tenants::{Pause, Tenant, Tenants};
use crate::vm;
use crate::wall::identity::Identity;
use crate::wall::spawn::{self, Process, Start};
use crate::wall::{Wall, limits as limits_of_processes};
use anyhow::{Context, bail};
use rustix::pipe::PipeFlags;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::Instant;

/// How a server runs.
pub struct Config {
    /// Addresses to listen on (`unix:/path`, `tcp:host:port`), and the limits of each client that comes by it.
    pub listen: Vec<(String, Limits)>,
    /// VMs to serve through zones that this server keeps.
    pub vms: Vec<vm::Config>,
    /// Limits of VMs that come later, as far as nothing is said of them.
    pub of_vms: Limits,
    /// Its standard input is a socket of a process that looks after it.
    pub overseen: bool,
    /// Clients' kernels may do all that this process's user may.
    pub unconfined: bool,
    /// Clients at once, not counting processes of VMs.
    pub clients: usize,
    /// Where commands come in.
    pub control: Option<PathBuf>,
    /// Where Prometheus asks.
    pub metrics: Option<SocketAddr>,
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    fn bind(address: &str) -> anyhow::Result<Listener> {
        match address.split_once(':') {
            Some(("unix", path)) => {
                if UnixStream::connect(path).is_ok() {
                    bail!("{address}: a server listens there already");
                }
                if let Some(folder) = Path::new(path).parent() {
                    std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
                }
                // Whoever sees the socket can connect: it gets its name when it listens.
                let unnamed = format!("{path}.{}", std::process::id());
                let listener = UnixListener::bind(&unnamed).with_context(|| unnamed.clone())?;
                std::fs::set_permissions(&unnamed, std::fs::Permissions::from_mode(0o660))
                    .and_then(|()| std::fs::rename(&unnamed, path))
                    .with_context(|| address.to_string())?;
                Ok(Listener::Unix(listener))
            }
            Some(("tcp", rest)) => {
                Ok(Listener::Tcp(TcpListener::bind(rest).with_context(|| address.to_string())?))
            }
            _ => bail!("{address}: expected unix:/path or tcp:host:port"),
        }
    }

    fn accept(&self) -> std::io::Result<OwnedFd> {
        match self {
            Listener::Unix(l) => l.accept().map(|(s, _)| s.into()),
            Listener::Tcp(l) => l.accept().and_then(|(s, _)| {
                s.set_nodelay(true)?;
                Ok(s.into())
            }),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(l) => l.as_fd(),
            Listener::Tcp(l) => l.as_fd(),
        }
    }
}

/// A running server.
pub struct Server {
    /// Who is served.
    pub tenants: Arc<Tenants>,
    listens: Mutex<Vec<String>>,
    of_vms: Limits,
    /// Copies of the sockets that clients find, to shut down.
    sockets: Mutex<Vec<(String, OwnedFd)>>,
    control: Option<PathBuf>,
    most: usize,
    draining: AtomicBool,
    /// Nobody can come any more.
    closed: AtomicBool,
    /// Waits for that.
    main: Thread,
}

/// Serves until the process is told to end, or is drained.
pub fn serve(config: Config) -> anyhow::Result<()> {
    let confinement = Confinement::tried(config.unconfined)?;
    let listeners = config
        .listen
        .iter()
        .map(|(address, limits)| Ok((address.clone(), limits.clone(), Listener::bind(address)?)))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let copy = |(address, _, listener): &(String, Limits, Listener)| {
        Ok((address.clone(), listener.fd().try_clone_to_owned()?))
    };
    let vms = config.vms.iter().map(vm::Vm::keep).collect::<anyhow::Result<Vec<_>>>()?;
    let folders = config.vms.iter().map(|vm| vm.folder.display().to_string());
    let server = Arc::new(Server {
        tenants: Arc::new(Tenants::of(confinement)),
        listens: Mutex::new(config.listen.iter().map(|l| l.0.clone()).chain(folders).collect()),
        of_vms: config.of_vms,
        sockets: Mutex::new(listeners.iter().map(copy).collect::<std::io::Result<_>>()?),
        control: config.control,
        most: config.clients,
        draining: AtomicBool::new(false),
        closed: AtomicBool::new(false),
        main: std::thread::current(),
    });
    if let Some(address) = config.metrics {
        let listener = TcpListener::bind(address)
            .with_context(|| format!("metrics at {address}; choose another address"))?;
        let tenants = server.tenants.clone();
        spawn("metrics", move || metrics::serve(&listener, &tenants))?;
    }
    if let Some(path) = &server.control {
        let (listener, server) = (control::listen(path)?, server.clone());
        spawn("control", move || control::serve(&listener, &server))?;
    }
    for vm in vms {
        let tenants = server.tenants.clone();
        spawn("vm", move || vm.serve(&tenants))?;
    }
    let tenants = server.tenants.clone();
    spawn("divider", move || tenants.divide())?;
    let accepting = listeners
        .into_iter()
        .map(|(address, limits, listener)| {
            let server = server.clone();
            spawn("listen", move || server.accept(&address, &limits, &listener))
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
    // The workers end with this process, so it stays until nobody needs one.
    server.tenants.wait_until_gone();
    if let Some(path) = &server.control {
        // Somebody may have tidied up already.
        let _gone = std::fs::remove_file(control::draining(path));
    }
    Ok(())
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

impl Server {
    /// Serves one more VM, whose zone another process keeps.
    pub fn serve_vm(&self, guest: &vm::Guest) -> anyhow::Result<()> {
        let vm = vm::Vm::join(guest, &self.of_vms)?;
        lock(&self.listens).push(format!("vm:{}", vm.name()));
        let tenants = self.tenants.clone();
        spawn("vm", move || vm.serve(&tenants))?;
        Ok(())
    }

    fn accept(&self, address: &str, limits: &Limits, listener: &Listener) {
        while !self.draining.load(Ordering::SeqCst) {
            match listener.accept() {
                Ok(socket) => self.admit(address, limits, &socket),
                Err(_) if self.draining.load(Ordering::SeqCst) => return,
                Err(e) => eprintln!("tombolo accel: a connection was lost before it began: {e}"),
            }
        }
    }

    fn admit(&self, address: &str, limits: &Limits, socket: &OwnedFd) {
        if self.tenants.by_sockets() >= self.most {
            let why = format!("this server has {} clients already; try later or raise --clients", self.most);
            if tombolo_calls::stream::refuse(socket, &why).is_err() {
                eprintln!("tombolo accel: a client left before it could be refused");
            }
            return;
        }
        if let Err(e) = start(&self.tenants, address, limits, &[socket.as_fd()], None, || ()) {
            eprintln!("tombolo accel: no worker could be started: {e:#}");
        }
    }

    /// Takes no clients any more; [`serve`] ends when the last one has gone. The address is free when this returns.
    pub fn drain(&self) {
        if self.draining.swap(true, Ordering::SeqCst) {
            return;
        }
        for (address, socket) in lock(&self.sockets).drain(..) {
            if let Some(path) = address.strip_prefix("unix:") {
                if let Err(e) = std::fs::remove_file(path) {
                    eprintln!("tombolo accel: {path}: {e}");
                }
            }
            // SAFETY: an integer; wakes whoever accepts on it.
            unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
        }
        if let Some(path) = &self.control {
            if let Err(e) = std::fs::rename(path, control::draining(path)) {
                eprintln!("tombolo accel: {}: {e}", path.display());
            }
        }
        eprintln!("tombolo accel: draining: {} clients are left", self.tenants.status().len());
        self.closed.store(true, Ordering::SeqCst);
        self.main.unpark();
    }

    /// Who is served.
    pub fn listing(&self) -> Listing {
        Listing {
            pid: std::process::id(),
            listens: lock(&self.listens).clone(),
            draining: self.draining.load(Ordering::SeqCst),
            tenants: self.tenants.status(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Lists stay whole whatever happens between two changes.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

/// How a server's workers are confined, whoever they serve; by default not.
#[derive(Clone, Default)]
pub struct Confinement(Option<Wall>);

impl Confinement {
    /// Tries on a worker that serves nobody whether workers can be confined here. `unconfined`: nothing is tried.
    pub fn tried(unconfined: bool) -> anyhow::Result<Confinement> {
        if unconfined {
            eprintln!(
                "tombolo accel: --unconfined: a client's kernels can do all that this server's user can"
            );
            return Ok(Confinement(None));
        }
        let identity = Identity::here().context("/proc/self")?;
        let confinement = Confinement(Some(Wall { identity, memory: limits_of_processes::WORKING }));
        let (said, process) = confinement.spawn(&["--trial"], &[], 0)?;
        let mut words = String::new();
        File::from(said).take(MOST_SAID).read_to_string(&mut words).context("what it says")?;
        let ended = process.wait()?;
        if !ended {
            bail!(
                "workers can't be confined here: {}; \
                 see docs/accelerators.md, or let clients' kernels do all that this user can: --unconfined",
                words.trim()
            );
        }
        Ok(confinement)
    }

    fn of(&self, limits: &Limits) -> Confinement {
        let memory = limits.memory.saturating_add(limits_of_processes::WORKING);
        Confinement(self.0.clone().map(|wall| Wall { memory, ..wall }))
    }

    /// Starts a worker with descriptors from [`crate::worker::FIGURES_FD`] on. The end of what it says, and the process.
    fn spawn(
        &self,
        arguments: &[&str],
        fds: &[BorrowedFd<'_>],
        nice: i32,
    ) -> anyhow::Result<(OwnedFd, Process)> {
        let null = File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
        let (said, says) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).context("a pipe")?;
        let mut arguments: Vec<String> =
            worker_arguments().into_iter().chain(arguments.iter().map(|a| (*a).to_owned())).collect();
        if let Some(wall) = &self.0 {
            arguments.extend(["--wall".into(), serde_json::to_string(wall)?]);
        }
        // Its standard input is not ours: that may be a socket that commands come in by.
        let standard = [null.as_fd(), null.as_fd(), says.as_fd()];
        let descriptors: Vec<BorrowedFd<'_>> = standard.into_iter().chain(fds.iter().copied()).collect();
        let process = spawn::spawn(&Start {
            arguments,
            variables: &[(crate::worker::NATIVE, "1")],
            descriptors: &descriptors,
            nice,
            namespaces: self.0.as_ref().map_or(0, Wall::namespaces),
            cgroup: None,
        })
        .context(
            "workers can't be confined here: no process with namespaces of its own \
             (CONFIG_USER_NS, CONFIG_PID_NS, CONFIG_NET_NS; for a server that is not root also sysctl user.max_user_namespaces \
             and kernel.unprivileged_userns_clone; in a container its own rules)",
        )?;
        Ok((said, process))
    }
}

/// Bytes that a worker may say in the log of its server.
const MOST_SAID: u64 = 64 << 10;

/// Passes on to the log what a worker says, until it has ended.
fn listen_to(said: OwnedFd, process: &Process) -> std::io::Result<()> {
    let mut left = MOST_SAID as usize;
    let mut said = Some(File::from(said));
    let mut bytes = [0; 4096];
    loop {
        // Poll leaves a negative descriptor out: it closed its end, and may live on.
        let mut fds = [
            libc::pollfd {
                fd: said.as_ref().map_or(-1, AsRawFd::as_raw_fd),
                events: libc::POLLIN,
                revents: 0,
            },
            libc::pollfd { fd: process.pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 },
        ];
        // SAFETY: the array lives during the call.
        if unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) } < 0 {
            let e = std::io::Error::last_os_error();
            if e.kind() == std::io::ErrorKind::Interrupted {
                continue;
            }
            return Err(e);
        }
        if fds[0].revents == 0 {
            return Ok(());
        }
        let n = said.as_mut().map_or(Ok(0), |said| said.read(&mut bytes))?;
        if n == 0 {
            said = None;
        }
        let passed = n.min(left);
        left -= passed;
        let mut log = std::io::stderr().lock();
        // A log that can't be written is nothing that a worker should end of.
        let _written = log.write_all(&bytes[..passed]);
        if passed > 0 && left == 0 {
            let _written = log.write_all(b"\ntombolo accel: a worker says too much; the rest is left out\n");
        }
    }
}

/// Starts a worker for a client that came by `via`. It finds its figures at [`crate::worker::FIGURES_FD`] and the descriptors from
/// [`crate::worker::SOCKET_FD`] on. `ended` is called when it has.
pub fn start(
    tenants: &Arc<Tenants>,
    via: &str,
    limits: &Limits,
    fds: &[BorrowedFd<'_>],
    place: Option<&Place>,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<()> {
    let (figures, page) = Figures::new().context("its figures")?;
    let copies = fds.iter().map(BorrowedFd::try_clone_to_owned).collect::<std::io::Result<Vec<_>>>()?;
    let mut arguments = vec!["--limits".to_owned(), serde_json::to_string(limits)?];
    if let Some(place) = place {
        arguments.extend(["--place".to_owned(), serde_json::to_string(place)?]);
    }
    let confinement = tenants.confinement().of(limits);
    let (via, limits) = (via.to_owned(), limits.clone());
    let tenants = tenants.clone();
    // The signal of the parent's death comes when the thread that started a worker ends; so that thread waits for it.
    let (told, started) = std::sync::mpsc::channel();
    std::thread::Builder::new().name("worker-watch".into()).spawn(move || {
        let passed: Vec<BorrowedFd<'_>> =
            [page.as_fd()].into_iter().chain(copies.iter().map(|c| c.as_fd())).collect();
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (said, process) = match confinement.spawn(&words, &passed, limits.nice()) {
            Ok(begun) => begun,
            Err(e) => return drop(told.send(Err(e))),
        };
        drop((page, copies));
        let pidfd = process.pidfd.clone();
        let paused = Pause::default();
        tenants
            .add(process.pid, Tenant { via, limits, figures, since: Instant::now(), process: pidfd, paused });
        // Whoever asked waits for this.
        let _heard = told.send(Ok(()));
        if let Err(e) = listen_to(said, &process).and_then(|()| process.wait()) {
            eprintln!("tombolo accel: a worker can't be waited for: {e}");
        }
        tenants.remove(process.pid);
        ended();
    })?;
    started.recv().context("the thread that starts a worker ended")?
}

/// The words that make this program a worker: as `tombolo accel worker` or as `tombolo-accel worker`.
fn worker_arguments() -> Vec<String> {
    let alone = std::env::args().nth(1).is_some_and(|a| a != "accel");
    let words: &[&str] = if alone { &["tombolo", "worker"] } else { &["tombolo", "accel", "worker"] };
    words.iter().map(|w| (*w).to_owned()).collect()
}
