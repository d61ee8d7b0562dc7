// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The doorbell of a host process, which corresponds to QEMU's ivshmem device of a VM.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use uuid::Uuid;

use super::{host, wire};
use crate::format::TMB_DOORBELL_MAGIC;
use crate::mem::SharedMem;
use crate::{Error, MemberId, Result, Zone};

/// Timeout for the server's part of the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Each further try means that a server ended between the connection and its part of the handshake.
const TRIES: u32 = 10;

type Peers = Arc<Mutex<BTreeMap<u16, OwnedFd>>>;

/// The reasons for which a bell's thread calls back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Heard {
    /// One or more rings.
    Rung,
    /// A peer connected or disconnected.
    Peers,
    /// The server ended.
    End,
}

/// A connected doorbell. Its thread receives peers and calls `on_ring`; dropping it disconnects.
pub struct Bell {
    peer: u16,
    zone: Uuid,
    peers: Peers,
    served: Arc<AtomicBool>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// A connection whose server has done its part of the handshake.
struct Connection {
    stream: UnixStream,
    peer: u16,
    zone: Uuid,
    own_bell: OwnedFd,
    peers: BTreeMap<u16, OwnedFd>,
}

impl Connection {
    fn over(stream: UnixStream) -> Result<Connection> {
        let failed = |e| Error::io("doorbell handshake", e);
        stream.set_read_timeout(Some(HANDSHAKE)).map_err(failed)?;
        let (version, _) = next(&stream)?;
        if version == wire::REFUSED {
            return Err(refused());
        }
        if version != wire::VERSION {
            return Err(protocol(format!("version {version}, expected {}", wire::VERSION)));
        }
        let (own, _) = next(&stream)?;
        let peer = u16::try_from(own).map_err(|_| protocol(format!("peer id {own}")))?;
        let (what, page) = next(&stream)?;
        let page = match page {
            Some(page) if what == wire::SHARED_MEMORY => page,
            _ => return Err(protocol(format!("message {what} instead of the shared page"))),
        };
        let zone = zone_of(page)?;
        let mut peers = BTreeMap::new();
        let own_bell = loop {
            match next(&stream)? {
                (id, Some(bell)) if id == own => break bell,
                (id, bell) => update(&mut peers, id, bell)?,
            }
        };
        // Rings to itself work, as they do for a VM.
        peers.insert(peer, own_bell.try_clone().map_err(failed)?);
        stream.set_read_timeout(None).map_err(failed)?;
        stream.set_nonblocking(true).map_err(failed)?;
        Ok(Connection { stream, peer, zone, own_bell, peers })
    }
}

/// Connects to the zone's doorbell server. `None`: there is none, or it ended meanwhile.
fn connection(zone: Uuid, member: MemberId) -> Result<Option<Connection>> {
    let mut tries = 1..TRIES;
    loop {
        match host::connect(zone, member)?.map(Connection::over).transpose() {
            Err(Error::Io { cause, .. }) if has_ended(&cause) && tries.next().is_some() => {}
            done => return done,
        }
    }
}

fn has_ended(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof)
}

fn rings(mut on_ring: impl FnMut() + Send + 'static) -> impl FnMut(Heard) + Send + 'static {
    move |heard| {
        if heard != Heard::Peers {
            on_ring();
        }
    }
}

impl Bell {
    /// Connects to a member's socket of a doorbell server. The bell's thread calls `on_ring` after one or more rings; the caller then takes
    /// its pending bits. It is also called once at the start, for bits that were pending before, and at the server's end ([`Bell::is_served`]).
    pub fn connect(path: impl AsRef<Path>, on_ring: impl FnMut() + Send + 'static) -> Result<Bell> {
        let path = path.as_ref();
        let stream = UnixStream::connect(path)
            .map_err(|e| Error::io(format!("connecting to the doorbell socket {}", path.display()), e))?;
        Self::over(stream, on_ring)
    }

    /// A doorbell for a member of the host, from the zone's doorbell server. `None`: the zone has none. `on_ring` as for [`Bell::connect`].
    pub fn enter(
        zone: &Zone,
        member: MemberId,
        on_ring: impl FnMut() + Send + 'static,
    ) -> Result<Option<Bell>> {
        let connection = connection(zone.uuid(), member)?;
        connection.map(|connection| Self::attended(connection, rings(on_ring))).transpose()
    }

    /// As [`Bell::enter`]; `look` is called after rings and also when a peer came or went, which [`Bell::peers`] then shows.
    pub fn enter_and_watch(
        zone: &Zone,
        member: MemberId,
        mut look: impl FnMut() + Send + 'static,
    ) -> Result<Option<Bell>> {
        let connection = connection(zone.uuid(), member)?;
        connection.map(|connection| Self::attended(connection, move |_| look())).transpose()
    }

    /// The same over an existing connection.
    pub fn over(stream: UnixStream, on_ring: impl FnMut() + Send + 'static) -> Result<Bell> {
        Self::attended(Connection::over(stream)?, rings(on_ring))
    }

    fn attended(connection: Connection, hear: impl FnMut(Heard) + Send + 'static) -> Result<Bell> {
        let Connection { stream, peer, zone, own_bell, peers } = connection;
        let peers = Arc::new(Mutex::new(peers));
        let stop = Arc::new(wire::eventfd()?);
        let served = Arc::new(AtomicBool::new(true));
        let (thread_peers, thread_stop, is_served) =
            (Arc::clone(&peers), Arc::clone(&stop), Arc::clone(&served));
        let thread = std::thread::Builder::new()
            .name("doorbell".to_owned())
            .spawn(move || attend(&stream, &own_bell, &thread_stop, &thread_peers, &is_served, hear))
            .map_err(|e| Error::io("starting a doorbell's thread", e))?;
        Ok(Bell { peer, zone, peers, served, stop, thread: Some(thread) })
    }

    /// Own peer id.
    pub fn peer(&self) -> u16 {
        self.peer
    }

    /// Returns the zone that the server names.
    pub fn zone(&self) -> Uuid {
        self.zone
    }

    /// Returns whether its server has not ended. Without one, members that come later can't ring this one, and no process may tell it of a member's death.
    pub fn is_served(&self) -> bool {
        self.served.load(Ordering::SeqCst)
    }

    /// Rings a peer; false: it is not known (any more): dead, or not yet announced.
    pub fn ring(&self, peer: u16) -> Result<bool> {
        match self.peers.lock().unwrap_or_else(PoisonError::into_inner).get(&peer) {
            Some(bell) => wire::ring(bell.as_fd()).map(|()| true),
            None => Ok(false),
        }
    }

    /// Returns a peer's doorbell for another process, which can only ring it; `None`: there is no such peer.
    pub fn descriptor(&self, peer: u16) -> Result<Option<OwnedFd>> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let copy = peers.get(&peer).map(AsFd::as_fd).map(|bell| bell.try_clone_to_owned()).transpose();
        copy.map_err(|e| Error::io("copying a doorbell's descriptor", e))
    }

    /// Returns the peers known now, without itself.
    pub fn peers(&self) -> Vec<u16> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.keys().copied().filter(|&p| p != self.peer).collect()
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        let _ = wire::ring(self.stop.as_fd());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Bell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bell(peer {} of zone {})", self.peer, self.zone)
    }
}

fn protocol(what: String) -> Error {
    Error::io("doorbell handshake", io::Error::new(io::ErrorKind::InvalidData, what))
}

fn refused() -> Error {
    let why = "the server refused: is the member connected already?";
    Error::io("doorbell handshake", io::Error::new(io::ErrorKind::ConnectionAborted, why))
}

/// Nothing was read for [`HANDSHAKE`].
fn silent() -> Error {
    let why = "the zone's owner (a project's supervisor, 'tombolo zone serve' or a mount) does not answer; if it is suspended, have it go on (kill -CONT)";
    Error::io("doorbell handshake", io::Error::new(io::ErrorKind::TimedOut, why))
}

fn next(stream: &UnixStream) -> Result<(i64, Option<OwnedFd>)> {
    match wire::receive(stream) {
        Ok(Some(message)) => Ok(message),
        Ok(None) => {
            let why = "the server ended the connection";
            Err(Error::io("doorbell handshake", io::Error::new(io::ErrorKind::UnexpectedEof, why)))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(silent()),
        Err(error) => Err(Error::io("doorbell handshake", error)),
    }
}

fn zone_of(page: OwnedFd) -> Result<Uuid> {
    // A page that is too small would fault (SIGBUS) when read.
    let page = std::fs::File::from(page);
    let length = page.metadata().map_err(|e| Error::io("doorbell handshake", e))?.len();
    if length < 4096 {
        return Err(protocol(format!("a shared page of {length} bytes")));
    }
    let mem = SharedMem::map(page.as_fd(), 0, 4096, false)?;
    let magic = mem.load_u64(0)?;
    if magic != TMB_DOORBELL_MAGIC {
        return Err(protocol(format!("the shared page's magic is {magic:#x}: not tombolo's ivshmem server")));
    }
    let mut uuid = [0; 16];
    mem.read(8, &mut uuid)?;
    Ok(Uuid::from_bytes(uuid))
}

/// A peer came (with its eventfd; further vectors are not used) or went.
fn update(peers: &mut BTreeMap<u16, OwnedFd>, id: i64, bell: Option<OwnedFd>) -> Result<()> {
    let id = u16::try_from(id).map_err(|_| protocol(format!("peer id {id}")))?;
    match bell {
        Some(bell) => {
            peers.entry(id).or_insert(bell);
        }
        None => {
            peers.remove(&id);
        }
    }
    Ok(())
}

fn attend(
    stream: &UnixStream,
    own: &OwnedFd,
    stop: &OwnedFd,
    peers: &Peers,
    served: &AtomicBool,
    mut hear: impl FnMut(Heard),
) {
    hear(Heard::Rung);
    loop {
        let mut fds = vec![stop.as_fd(), own.as_fd()];
        let connected = served.load(Ordering::SeqCst);
        if connected {
            fds.push(stream.as_fd());
        }
        let ready = match wire::wait_readable(&fds, None) {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error, "doorbell");
                return;
            }
        };
        if ready[0] {
            return;
        }
        if ready[1] && wire::take_rings(own.as_fd()) {
            hear(Heard::Rung);
        }
        if connected && ready[2] {
            let goes_on = learn(stream, peers);
            served.store(goes_on, Ordering::SeqCst);
            hear(if goes_on { Heard::Peers } else { Heard::End });
        }
    }
}

/// Handles one message of the server; false: the server has ended. Known doorbells keep working without it.
fn learn(stream: &UnixStream, peers: &Peers) -> bool {
    match wire::receive(stream) {
        Ok(Some((id, bell))) => {
            let updated = update(&mut peers.lock().unwrap_or_else(PoisonError::into_inner), id, bell);
            updated.is_ok()
        }
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        Ok(None) => false,
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags};

    use super::*;

    /// The kernel resets a connection whose server ends with something unread.
    #[test]
    fn a_server_that_ends_as_a_member_connects_is_none() {
        let zone = Uuid::new_v4();
        let door = host::listen(zone).unwrap();
        let ending = std::thread::spawn(move || {
            door.listener().set_nonblocking(false).unwrap();
            let accept = || {
                let (stream, _) = door.listener().accept().unwrap();
                rustix::event::poll(&mut [PollFd::new(&stream, PollFlags::IN)], None).unwrap();
                stream
            };
            drop(accept());
            // Another one had read what the member sent.
            wire::take(&accept()).unwrap();
        });
        assert!(connection(zone, MemberId::new(0).unwrap()).unwrap().is_none());
        ending.join().unwrap();
    }

    #[test]
    fn an_owner_that_does_not_answer_is_named_with_what_to_do() {
        let (own, _owners) = UnixStream::pair().unwrap();
        own.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let said = next(&own).unwrap_err().to_string();
        assert!(said.contains("owner") && said.contains("kill -CONT"), "{said}");
    }
}
