// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listens, and starts a worker for each client. The supervisor never reads what a client sends.

use crate::limits::Limits;
use crate::vm;
use anyhow::{Context, bail};
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Mutex;

/// How a server runs.
pub struct Config {
    /// Addresses to listen on: `unix:/path`, `tcp:host:port`.
    pub listen: Vec<String>,
    /// VMs to serve through zones of their own.
    pub vms: Vec<vm::Config>,
    /// Limits of each client.
    pub limits: Limits,
    /// Clients at once.
    pub clients: usize,
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    fn bind(address: &str) -> anyhow::Result<Listener> {
        match address.split_once(':') {
            Some(("unix", path)) => {
                if std::os::unix::net::UnixStream::connect(path).is_ok() {
                    bail!("{address}: a server listens there already");
                }
                if let Some(folder) = std::path::Path::new(path).parent() {
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
}

/// Serves until the process is told to end.
pub fn serve(config: Config) -> anyhow::Result<()> {
    let listeners = config.listen.iter().map(|a| Listener::bind(a)).collect::<anyhow::Result<Vec<_>>>()?;
    let vms = config.vms.iter().map(vm::Vm::new).collect::<anyhow::Result<Vec<_>>>()?;
    let admission = Admission { limits: serde_json::to_string(&config.limits)?, most: config.clients };
    let workers: Mutex<Vec<Child>> = Mutex::default();
    std::thread::scope(|scope| {
        for vm in vms {
            scope.spawn(|| vm.serve(&admission));
        }
        for listener in &listeners {
            scope.spawn(|| {
                loop {
                    match listener.accept() {
                        Ok(socket) => admission.admit(socket, &workers),
                        Err(e) => eprintln!("tombolo accel: a connection was lost before it began: {e}"),
                    }
                }
            });
        }
    });
    Ok(())
}

/// Where a worker's channel is, for one that serves a VM's process.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct Place {
    /// Its first byte in the zone's memory.
    pub at: u64,
    /// Data bytes of each of its rings.
    pub ring: u64,
    /// Bytes of its window.
    pub window: u64,
}

/// Starts workers.
pub struct Admission {
    limits: String,
    most: usize,
}

impl Admission {
    fn admit(&self, socket: OwnedFd, workers: &Mutex<Vec<Child>>) {
        let mut workers = workers.lock().unwrap_or_else(|e| e.into_inner());
        workers.retain_mut(|w| matches!(w.try_wait(), Ok(None)));
        if workers.len() >= self.most {
            let why = format!("this server has {} clients already; try later or raise --clients", self.most);
            if tombolo_calls::stream::refuse(&socket, &why).is_err() {
                eprintln!("tombolo accel: a client left before it could be refused");
            }
            return;
        }
        match self.start(&[socket.as_fd()], None) {
            Ok(child) => workers.push(child),
            Err(e) => eprintln!("tombolo accel: no worker could be started: {e}"),
        }
    }

    /// Starts a worker, which finds the descriptors from [`crate::worker::SOCKET_FD`] on.
    pub fn start(&self, fds: &[BorrowedFd<'_>], place: Option<&Place>) -> anyhow::Result<Child> {
        // First out of the way of the numbers they get.
        let above = crate::worker::SOCKET_FD + fds.len() as i32;
        let copies = fds.iter().map(|fd| copy_above(*fd, above)).collect::<std::io::Result<Vec<_>>>()?;
        let raw: Vec<i32> = copies.iter().map(AsRawFd::as_raw_fd).collect();
        let mut command = Command::new(std::env::current_exe()?);
        command.args(worker_arguments()).arg("--limits").arg(&self.limits);
        if let Some(place) = place {
            command.arg("--place").arg(serde_json::to_string(place)?);
        }
        // Inside a worker no OpenCL of ours may be found: its devices are the native ones.
        command.env("TOMBOLO_ACCEL_SERVER", "1");
        // SAFETY: between fork and exec only async-signal-safe calls are made.
        unsafe {
            command.pre_exec(move || {
                for (fd, to) in raw.iter().zip(crate::worker::SOCKET_FD..) {
                    if libc::dup2(*fd, to) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                // A worker doesn't outlive its supervisor.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        Ok(command.spawn()?)
    }
}

fn copy_above(fd: BorrowedFd<'_>, least: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: integers only; the result is checked.
    let copy = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least) };
    if copy < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the copy is fresh.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// The words that make this program a worker: as `tombolo accel worker` or as `tombolo-accel worker`.
fn worker_arguments() -> Vec<String> {
    let alone = std::env::args().nth(1).is_some_and(|a| a != "accel");
    if alone { vec!["worker".into()] } else { vec!["accel".into(), "worker".into()] }
}
