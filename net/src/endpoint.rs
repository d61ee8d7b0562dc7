// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A port's socket: the switch listens on it (server) or connects to it (client), one connection at a time, again and
//! again. One thread per port, which sleeps in the kernel unless the front-end has something to say.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vhost::vhost_user::{BackendReqHandler, Error, VhostUserBackendReqHandlerMut};

use crate::port::Port;
use crate::protocol::Session;
use crate::switch::Switch;

/// Who makes the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The switch listens (QEMU's default, libvirt's `mode='client'`).
    #[default]
    Server,
    /// The front-end listens (QEMU's `server=on`, libvirt's `mode='server'`).
    Client,
}

/// Where a port is to be had.
pub struct Endpoint {
    path: PathBuf,
    listener: Option<UnixListener>,
}

/// How long a client waits before it tries again.
const RETRY: Duration = Duration::from_millis(200);

impl Endpoint {
    /// The socket at `path`; a server binds it here. A socket that a dead server left is replaced.
    ///
    /// # Errors
    /// The path is in use, or something else than a socket, or not ours to make.
    pub fn open(path: &Path, role: Role) -> io::Result<Self> {
        let named = |err: io::Error| io::Error::new(err.kind(), format!("{}: {err}", path.display()));
        let listener = match role {
            Role::Client => None,
            Role::Server => {
                if let Ok(meta) = path.symlink_metadata() {
                    if !meta.file_type().is_socket() {
                        let err = io::Error::new(io::ErrorKind::AlreadyExists, "exists and is no socket");
                        return Err(named(err));
                    }
                    if UnixStream::connect(path).is_ok() {
                        let text = "another server listens there; stop it or choose another path";
                        return Err(named(io::Error::new(io::ErrorKind::AddrInUse, text)));
                    }
                    std::fs::remove_file(path).map_err(named)?;
                }
                Some(UnixListener::bind(path).map_err(named)?)
            }
        };
        Ok(Self { path: path.into(), listener })
    }

    /// Serves one front-end after the other until `stop` is [`Stop::now`].
    pub fn serve(&self, switch: &Arc<Switch>, port: &Arc<Port>, offered: u64, stop: &Stop) {
        while !stop.is_set() {
            let stream = match &self.listener {
                Some(listener) => listener.accept().map(|(stream, _)| stream),
                None => UnixStream::connect(&self.path),
            };
            let Ok(stream) = stream else {
                std::thread::park_timeout(RETRY);
                continue;
            };
            if !stop.watch(&stream) {
                return;
            }
            tracing::info!(port = port.name(), "front-end connected");
            port.connected.store(true, Ordering::Relaxed);
            let why = converse(stream, switch, port, offered);
            port.connected.store(false, Ordering::Relaxed);
            tracing::info!(port = port.name(), %why, "front-end gone");
            stop.forget();
            if self.listener.is_none() {
                std::thread::park_timeout(RETRY);
            }
        }
    }

    /// What ends [`Endpoint::serve`].
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn stop(&self) -> io::Result<Stop> {
        let listener = self.listener.as_ref().map(UnixListener::try_clone).transpose()?;
        Ok(Stop { set: AtomicBool::new(false), listener, stream: Mutex::default() })
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.listener.take().is_some() {
            // Gone already is as good.
            let _gone = std::fs::remove_file(&self.path);
        }
    }
}

/// Ends a port's thread wherever it waits: for a connection, or for a front-end that has sent a part of a message or
/// doesn't take its answer.
#[derive(Debug, Default)]
pub struct Stop {
    set: AtomicBool,
    listener: Option<UnixListener>,
    /// The connection that is served.
    stream: Mutex<Option<UnixStream>>,
}

impl Stop {
    /// Ends the connection, and lets no other begin.
    pub fn now(&self) {
        self.set.store(true, Ordering::Release);
        if let Some(listener) = &self.listener {
            interrupt(listener);
        }
        if let Some(stream) = &*self.stream.lock().unwrap_or_else(PoisonError::into_inner) {
            // The front-end may have gone.
            let _gone = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    /// Takes note of the connection that is served from now on. False: none is to be served.
    fn watch(&self, stream: &UnixStream) -> bool {
        let mut watched = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(own) = stream.try_clone() else { return false };
        *watched = Some(own);
        // Whoever stops sets the flag before it looks for a connection.
        !self.is_set()
    }

    fn forget(&self) {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Makes a waiting server look at its stop flag, also where its path leads to it no more.
pub fn interrupt(listener: &UnixListener) {
    // SAFETY: the descriptor is open. One that is shut down already is as good.
    unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Answers one front-end until it goes or breaks the protocol; says why it ended.
fn converse(stream: UnixStream, switch: &Arc<Switch>, port: &Arc<Port>, offered: u64) -> Error {
    let session = Arc::new(Mutex::new(Session::new(switch.clone(), port.clone(), offered)));
    let own = match stream.try_clone() {
        Ok(own) => own,
        Err(err) => return Error::SocketError(err),
    };
    let mut handler = BackendReqHandler::from_stream(stream, session.clone());
    loop {
        let mut poll = libc::pollfd { fd: own.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd of our own.
        unsafe { libc::poll(&mut poll, 1, -1) };
        match early_enable(&own, &session) {
            Ok(true) => continue,
            Ok(false) => {}
            Err(why) => return why,
        }
        match handler.handle_request() {
            Ok(()) => {}
            Err(Error::SocketRetry(_)) => {}
            Err(why) => return why,
        }
    }
}

/// Answers a SET_VRING_ENABLE that comes before SET_FEATURES: QEMU sends it as soon as the protocol features are agreed
/// upon, the `vhost` crate (0.14) takes it only after the virtio features. True: there was one.
fn early_enable(stream: &UnixStream, session: &Mutex<Session>) -> Result<bool, Error> {
    const SET_VRING_ENABLE: u32 = 18;
    const NEED_REPLY: u32 = 8;
    const REPLY: u32 = 5;
    let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
    if session.has_features() {
        return Ok(false);
    }
    // Three words of header, two of body.
    let mut bytes = [0u8; 20];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: our own buffer, as long as said.
    let n = unsafe { libc::recv(stream.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), flags) };
    let word =
        |b: &[u8; 20], i: usize| u32::from_ne_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]]);
    if n != 20 || word(&bytes, 0) != SET_VRING_ENABLE || word(&bytes, 2) != 8 {
        return Ok(false);
    }
    (&*stream).read_exact(&mut bytes).map_err(Error::SocketError)?;
    let (index, enable) = (word(&bytes, 3), word(&bytes, 4));
    session.set_vring_enable(index, enable != 0)?;
    if word(&bytes, 1) & NEED_REPLY != 0 {
        let mut reply = bytes;
        reply[4..8].copy_from_slice(&REPLY.to_ne_bytes());
        reply[12..].fill(0);
        (&*stream).write_all(&reply).map_err(Error::SocketError)?;
    }
    Ok(true)
}
