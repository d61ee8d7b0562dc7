// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accepts the connections of commands for as long as the process lives, also when it has run out of file descriptors.
//!
//! One descriptor is kept in reserve. When none is left, it makes room for one more connection at a time, for the commands that need no
//! other descriptor: `ps` and `down` (see [`Connection::scarce`]).

use std::fs::File;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

/// Pause after an accept that failed for another reason than want of descriptors, and between tries to have the reserve again.
const PAUSE: Duration = Duration::from_millis(100);

/// A connection of a process of this user, or of root.
#[derive(Debug)]
pub struct Connection {
    pub socket: UnixStream,
    /// The process has no descriptor left but this one.
    pub scarce: bool,
}

/// The descriptor that is kept.
#[derive(Debug, Default)]
struct Reserve {
    kept: Mutex<Option<File>>,
    changed: Condvar,
}

impl Reserve {
    /// Takes the descriptor, which closes it, once the connection that had its place is closed.
    fn open_up(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        while kept.take().is_none() {
            (kept, _) = self.changed.wait_timeout(kept, PAUSE).unwrap_or_else(PoisonError::into_inner);
            // Another part of the process may have taken the place, and closed it since.
            if kept.is_none() {
                *kept = File::open("/dev/null").ok();
            }
        }
    }

    fn refill(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_none() {
            *kept = File::open("/dev/null").ok();
        }
        drop(kept);
        self.changed.notify_all();
    }
}

/// Accepts connections and serves each on a thread of its own.
pub fn receive(listener: &UnixListener, serve: &Arc<dyn Fn(Connection) + Send + Sync>) {
    let reserve = Arc::new(Reserve::default());
    reserve.refill();
    let mut scarce = false;
    loop {
        // A descriptor is taken when accept begins to wait: too early to know whether there is one.
        let mut caller = [PollFd::new(listener, PollFlags::IN)];
        if !matches!(rustix::event::poll(&mut caller, None), Ok(n) if n > 0) {
            continue;
        }
        let socket = match listener.accept() {
            Ok((socket, _)) => socket,
            Err(e) if is_want(&e) => {
                reserve.open_up();
                scarce = true;
                continue;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => {
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        let connection = Connection { socket, scarce: std::mem::take(&mut scarce) };
        if !is_own(&connection.socket) {
            drop(connection);
            reserve.refill();
            continue;
        }
        let (serve, freed) = (serve.clone(), reserve.clone());
        // A thread that can't be had closes this connection, which its client is told; the next may have more luck.
        let thread = crate::thread::start("request", move || {
            serve(connection);
            freed.refill();
        });
        if thread.is_err() {
            reserve.refill();
        }
    }
}

/// The project's folder lets no other user near its socket; this is a second look.
fn is_own(socket: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    tombolo_listen::peer::of(socket).is_ok_and(|peer| [own, 0].contains(&peer.user))
}

/// Returns whether an accept failed for want of descriptors or memory: the caller still waits then.
fn is_want(error: &io::Error) -> bool {
    let wants = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    wants.iter().any(|want| error.raw_os_error() == Some(want.raw_os_error()))
}
