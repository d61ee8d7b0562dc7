// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listens, and starts a worker for each client. The supervisor never reads what a client sends.

use crate::limits::Limits;
use anyhow::{Context, bail};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

/// How a server runs.
pub struct Config {
    /// Addresses to listen on: `unix:/path`, `tcp:host:port`.
    pub listen: Vec<String>,
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
                match std::fs::remove_file(path) {
                    Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                        return Err(e).with_context(|| format!("{path}: the old socket can't be removed"));
                    }
                    _ => {}
                }
                if let Some(folder) = std::path::Path::new(path).parent() {
                    std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
                }
                let listener = UnixListener::bind(path).with_context(|| address.to_string())?;
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
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
    let limits = serde_json::to_string(&config.limits)?;
    let workers: Arc<Mutex<Vec<Child>>> = Arc::default();
    std::thread::scope(|scope| {
        for listener in &listeners {
            let (workers, limits) = (workers.clone(), &limits);
            scope.spawn(move || {
                loop {
                    match listener.accept() {
                        Ok(socket) => admit(socket, &workers, limits, config.clients),
                        Err(e) => eprintln!("tombolo accel: a connection was lost before it began: {e}"),
                    }
                }
            });
        }
    });
    Ok(())
}

fn admit(socket: OwnedFd, workers: &Mutex<Vec<Child>>, limits: &str, most: usize) {
    let mut workers = workers.lock().unwrap_or_else(|e| e.into_inner());
    workers.retain_mut(|w| matches!(w.try_wait(), Ok(None)));
    if workers.len() >= most {
        let why = format!("this server has {most} clients already; try later or raise --clients");
        if tombolo_calls::stream::refuse(&socket, &why).is_err() {
            eprintln!("tombolo accel: a client left before it could be refused");
        }
        return;
    }
    match start(&socket, limits) {
        Ok(child) => workers.push(child),
        Err(e) => eprintln!("tombolo accel: no worker could be started: {e}"),
    }
}

fn start(socket: &OwnedFd, limits: &str) -> anyhow::Result<Child> {
    let fd = socket.as_raw_fd();
    let mut command = Command::new(std::env::current_exe()?);
    command.args(worker_arguments()).arg("--limits").arg(limits);
    // Inside a worker no OpenCL of ours may be found: its devices are the native ones.
    command.env("TOMBOLO_ACCEL_SERVER", "1");
    // SAFETY: between fork and exec only async-signal-safe calls are made.
    unsafe {
        command.pre_exec(move || {
            if libc::dup2(fd, crate::worker::SOCKET_FD) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            if fd == crate::worker::SOCKET_FD && libc::fcntl(fd, libc::F_SETFD, 0) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            // A worker doesn't outlive its supervisor.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
    Ok(command.spawn()?)
}

/// The words that make this program a worker: as `tombolo accel worker` or as `tombolo-accel worker`.
fn worker_arguments() -> Vec<String> {
    let alone = std::env::args().nth(1).is_some_and(|a| a != "accel");
    if alone { vec!["worker".into()] } else { vec!["accel".into(), "worker".into()] }
}
