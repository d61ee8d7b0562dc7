// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server: one thread, non-blocking, bounded.
//!
//! The thread polls the listeners (one per member, one for all processes of the host), the connections and a channel of commands from [`DoorbellServer`]. A
//! member has at most one connection; a second one is closed at once. The protocol has no messages from clients: a client that sends a byte is
//! disconnected. The server keeps messages for a client that doesn't read, but none of members that have come and gone meanwhile.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tombolo_brief::Brief;
use tombolo_listen::Name;

use super::allowance::{Allowance, Answer, MAX_CONNECTIONS};
use super::client::Bell;
use super::process::{self, Process};
use super::store::{self, Kept, NoStore, Store};
use super::{VECTORS, host, wire};
use crate::door::Door;
use crate::{Error, Member, MemberId, Result, Role, Zone};

/// Connected processes of the host that have not sent their member number yet.
const MAX_UNNAMED: usize = 16;

/// How long the server accepts no connection after an accept failed, for want of descriptors for example: the connection still waits, so
/// the next accept would fail at once.
const RECOVERY: Duration = Duration::from_millis(200);

/// A process that waits to be let in. It is told when it is refused.
#[derive(Debug)]
pub struct Knock {
    member: MemberId,
    /// `None`: it is let in.
    stream: Option<Brief<UnixStream>>,
}

impl Drop for Knock {
    fn drop(&mut self) {
        if let Some(stream) = &self.stream {
            wire::refuse(stream);
        }
    }
}

impl Knock {
    /// Returns whether nobody has the other end any more.
    pub fn has_gone(&self) -> bool {
        self.stream.as_ref().is_none_or(|stream| process::has_hung_up(stream) == Some(true))
    }

    /// The process. `None`: the kernel can't tell which one it is, or it has ended.
    ///
    /// # Errors
    /// Those of [`Process::of`].
    pub fn process(&self) -> io::Result<Option<Process>> {
        self.stream.as_ref().map_or(Ok(None), |stream| Process::of(stream))
    }
}

/// A report of the server to the zone's owner.
#[derive(Debug)]
pub enum Event {
    /// A member's doorbell is connected; the member's slot has the peer id already.
    Joined {
        /// The slot that the doorbell belongs to.
        member: MemberId,
        /// Its ivshmem peer id.
        peer: u16,
    },
    /// A process has connected to a socket of [`DoorbellServer::listen_at_the_door`], and waits.
    Knocked {
        /// The member whose socket it is.
        member: MemberId,
        /// Lets it in ([`DoorbellServer::let_in`]). Dropping it refuses it.
        guest: Knock,
    },
    /// A member's doorbell is gone: its QEMU ended, or the device was unplugged. The member's slot has no peer id any more.
    Left {
        /// The slot that the doorbell belonged to.
        member: MemberId,
        /// The peer id that it had. Peer ids are not used twice.
        peer: u16,
        /// The reason: closed, sent garbage, did not read …
        why: String,
    },
    /// A process that the owner has let in, or connected, did not get a doorbell.
    NotJoined {
        /// The slot that the doorbell would have belonged to.
        member: MemberId,
        /// Why.
        why: String,
    },
    /// A connection was refused.
    Refused {
        /// The member whose socket it was; `None`: the socket for processes of the host.
        member: Option<MemberId>,
        /// Why.
        why: String,
    },
}

enum Command {
    Listen {
        member: MemberId,
        listener: Brief<UnixListener>,
        name: Name,
        knock: bool,
    },
    Adopt {
        member: MemberId,
        stream: Brief<UnixStream>,
    },
    Unlisten {
        member: MemberId,
    },
    /// The store has lost what it kept.
    KeepAgain,
    Stop,
}

pub(super) type Bells = Arc<Mutex<BTreeMap<u16, Doorbell>>>;

/// A connected doorbell.
pub(super) struct Doorbell {
    pub(super) member: MemberId,
    pub(super) vectors: Vec<Arc<OwnedFd>>,
}

/// The doorbell server of one zone. Dropping it stops the thread, closes connections and removes its sockets.
pub struct DoorbellServer {
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
    bells: Bells,
    thread: Option<JoinHandle<()>>,
}

impl DoorbellServer {
    /// Starts the server of a zone that can be written; events come from the receiver.
    pub fn start(zone: Arc<Zone>) -> Result<(DoorbellServer, Receiver<Event>)> {
        Self::start_with(zone, Box::new(NoStore))
    }

    /// As [`Self::start`], beside VMs whose doorbells an earlier server has made, and that know their slots by these peer ids: no other one gets them.
    pub fn start_beside(zone: Arc<Zone>, taken: BTreeSet<u16>) -> Result<(DoorbellServer, Receiver<Event>)> {
        let hosts = host::listen(zone.uuid())?;
        Self::begin(zone, hosts, Bells::default(), Box::new(NoStore), |work| work.taken = taken)
    }

    /// As [`Self::start`]; the server's clients are kept in `store`.
    pub fn start_with(zone: Arc<Zone>, store: Box<dyn Store>) -> Result<(DoorbellServer, Receiver<Event>)> {
        let hosts = host::listen(zone.uuid())?;
        Self::begin(zone, hosts, Bells::default(), store, |_| ())
    }

    pub(super) fn begin(
        zone: Arc<Zone>,
        hosts: Door,
        bells: Bells,
        store: Box<dyn Store>,
        fill: impl FnOnce(&mut Work),
    ) -> Result<(DoorbellServer, Receiver<Event>)> {
        let (commands, command_receiver) = channel();
        let (events, event_receiver) = channel();
        let wake = Arc::new(wire::eventfd()?);
        let mut work = Work {
            hosts,
            unnamed: VecDeque::new(),
            zone,
            commands: command_receiver,
            events,
            wake: Arc::clone(&wake),
            bells: Arc::clone(&bells),
            listeners: BTreeMap::new(),
            clients: BTreeMap::new(),
            next_peer: Some(0),
            taken: BTreeSet::new(),
            closed_until: None,
            store,
        };
        fill(&mut work);
        let thread = std::thread::Builder::new()
            .name("doorbells".to_owned())
            .spawn(move || work.run())
            .map_err(|e| Error::io("starting the doorbell server's thread", e))?;
        Ok((DoorbellServer { commands, wake, bells, thread: Some(thread) }, event_receiver))
    }

    /// Makes the socket that a member's QEMU connects to (`-chardev socket,path=…,id=bell -device ivshmem-doorbell,chardev=bell,vectors=1`). Replaces a socket
    /// file at which no process listens. Only the owner may connect to the socket; the permissions of the caller's directory restrict it further.
    pub fn listen(&self, member: MemberId, path: impl AsRef<Path>) -> Result<()> {
        self.listen_with(member, path.as_ref(), false)
    }

    /// As [`Self::listen`]; who connects waits until the owner, told by [`Event::Knocked`], lets it in.
    pub fn listen_at_the_door(&self, member: MemberId, path: impl AsRef<Path>) -> Result<()> {
        self.listen_with(member, path.as_ref(), true)
    }

    /// Lets a process in that has knocked.
    pub fn let_in(&self, mut knock: Knock) -> Result<()> {
        let stream = knock.stream.take();
        stream.map_or(Ok(()), |stream| self.command(Command::Adopt { member: knock.member, stream }))
    }

    fn listen_with(&self, member: MemberId, path: &Path, knock: bool) -> Result<()> {
        let failed = |e| Error::io("making a doorbell socket", e);
        let (listener, name) = tombolo_listen::listen(path, Some(0o600)).map_err(|e| failed(e.into()))?;
        listener.set_nonblocking(true).map_err(failed)?;
        self.command(Command::Listen { member, listener: listener.into(), name, knock })
    }

    /// Has the [store](Store) keep all clients anew.
    pub fn keep_again(&self) -> Result<()> {
        self.command(Command::KeepAgain)
    }

    /// Ends a member's socket and connection.
    pub fn unlisten(&self, member: MemberId) -> Result<()> {
        self.command(Command::Unlisten { member })
    }

    /// Returns a connection for a member, for its QEMU to inherit: no socket file needed.
    pub fn connect(&self, member: MemberId) -> Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair().map_err(|e| Error::io("making a doorbell connection", e))?;
        self.command(Command::Adopt { member, stream: theirs.into() })?;
        Ok(ours)
    }

    /// Returns a doorbell for a member in this process: no socket file needed. `on_ring` as for [`Bell::connect`].
    pub fn bell(&self, member: MemberId, on_ring: impl FnMut() + Send + 'static) -> Result<Bell> {
        Bell::over(self.connect(member)?, on_ring)
    }

    /// Rings a peer; false: there is none of this id (any more).
    pub fn ring(&self, peer: u16) -> Result<bool> {
        match lock(&self.bells).get(&peer).and_then(|bell| bell.vectors.first()) {
            Some(bell) => wire::ring(bell.as_fd()).map(|()| true),
            None => Ok(false),
        }
    }

    /// Rings the doorbells of a member, whatever its slot says of them.
    pub fn ring_member(&self, member: MemberId) -> Result<()> {
        self.ring_those(|bell| bell.member == member)
    }

    /// Rings all doorbells, so that each member looks at its pending bits.
    pub fn ring_all(&self) -> Result<()> {
        self.ring_those(|_| true)
    }

    fn ring_those(&self, which: impl Fn(&Doorbell) -> bool) -> Result<()> {
        let mut rung = Ok(());
        for bell in lock(&self.bells).values().filter(|bell| which(bell)) {
            rung = rung.and(bell.vectors.first().map_or(Ok(()), |vector| wire::ring(vector.as_fd())));
        }
        rung
    }

    /// Writes the peer ids of all connected doorbells into the member table again, where a member has changed them: a VM finds its slot by its own.
    pub fn restore(&self, zone: &Zone) -> Result<()> {
        self.restore_beside(zone, &BTreeMap::new())
    }

    /// As [`Self::restore`]; members that are not connected have these ids, which an earlier server has given.
    pub fn restore_beside(&self, zone: &Zone, earlier: &BTreeMap<MemberId, u16>) -> Result<()> {
        let bells = lock(&self.bells);
        for id in MemberId::all() {
            let peer = bells.iter().find(|(_, bell)| bell.member == id).map(|(peer, _)| *peer);
            let peer = peer.or_else(|| earlier.get(&id).copied());
            if zone.doorbell(id)? != peer {
                zone.set_doorbell(id, peer)?;
            }
        }
        Ok(())
    }

    fn command(&self, command: Command) -> Result<()> {
        let gone = || Error::io("telling the doorbell server", io::Error::from(io::ErrorKind::BrokenPipe));
        self.commands.send(command).map_err(|_| gone())?;
        wire::ring(self.wake.as_fd())
    }
}

impl Drop for DoorbellServer {
    fn drop(&mut self) {
        // The thread may have ended already; then there is nothing to stop.
        let _ = self.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for DoorbellServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DoorbellServer({} peers)", lock(&self.bells).len())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Listening {
    listener: Brief<UnixListener>,
    name: Name,
    /// The owner lets in who connects.
    knock: bool,
    allowance: Allowance,
}

impl Listening {
    fn forget(self) {
        // Its directory may have been removed.
        let _gone = self.name.remove();
    }
}

pub(super) struct Client {
    pub(super) member: MemberId,
    pub(super) stream: Brief<UnixStream>,
    pub(super) backlog: VecDeque<(i64, Option<Arc<OwnedFd>>)>,
    /// It is in the store.
    pub(super) is_kept: bool,
}

pub(super) struct Work {
    zone: Arc<Zone>,
    hosts: Door,
    /// Processes of the host that have not sent their member number yet.
    unnamed: VecDeque<Brief<UnixStream>>,
    commands: Receiver<Command>,
    events: Sender<Event>,
    wake: Arc<OwnedFd>,
    bells: Bells,
    listeners: BTreeMap<MemberId, Listening>,
    pub(super) clients: BTreeMap<u16, Client>,
    pub(super) next_peer: Option<u16>,
    /// Ids that an earlier server has given.
    taken: BTreeSet<u16>,
    /// No connection is accepted before this time.
    closed_until: Option<Instant>,
    store: Box<dyn Store>,
}

impl Work {
    fn run(mut self) {
        loop {
            let members: Vec<MemberId> = self.listeners.keys().copied().collect();
            let peers: Vec<u16> = self.clients.keys().copied().collect();
            let ready = self.wait(&members, &peers);
            let Some(([woken, admitting], rest)) = ready.split_first_chunk() else { return };
            if *woken {
                wire::take_rings(self.wake.as_fd());
            }
            for (peer, _) in peers.iter().zip(&rest[members.len()..]).filter(|(_, ready)| **ready) {
                self.serve(*peer);
            }
            for ready in &rest[members.len() + peers.len()..] {
                self.greet(*ready);
            }
            if *admitting {
                self.admit();
            }
            for (member, _) in members.iter().zip(rest).filter(|(_, ready)| **ready) {
                self.accept(*member);
            }
            while let Ok(command) = self.commands.try_recv() {
                match command {
                    Command::Listen { member, listener, name, knock } => {
                        let listening =
                            Listening { listener, name, knock, allowance: Allowance::new(Instant::now()) };
                        if let Some(old) = self.listeners.insert(member, listening) {
                            old.forget();
                        }
                    }
                    Command::Adopt { member, stream } => {
                        if let Err(why) = self.join(member, stream) {
                            self.tell(Event::NotJoined { member, why });
                        }
                    }
                    Command::Unlisten { member } => {
                        if let Some(old) = self.listeners.remove(&member) {
                            old.forget();
                        }
                        for peer in self.peers_of(member) {
                            self.leave(peer, "its doorbell was taken away".to_owned());
                        }
                    }
                    Command::KeepAgain => {
                        self.store.next_peer(self.next_peer);
                        self.clients.values_mut().for_each(|client| client.is_kept = false);
                        let peers: Vec<u16> = self.clients.keys().copied().collect();
                        peers.into_iter().for_each(|peer| self.flush(peer));
                    }
                    Command::Stop => {
                        std::mem::take(&mut self.listeners).into_values().for_each(Listening::forget);
                        return;
                    }
                }
            }
        }
    }

    /// Polls the wake-up, the socket for host processes, the listeners, the clients and the unnamed processes, in this order. Clients with a
    /// backlog are also polled for room.
    fn wait(&self, members: &[MemberId], peers: &[u16]) -> Vec<bool> {
        let lagging = self.clients.values().any(|c| !c.backlog.is_empty());
        let closed = self.closed_until.is_some_and(|until| Instant::now() < until);
        // A listener stays readable until its connection is accepted, so a poll of it would return at once.
        let unless_closed = |fd| if closed { self.wake.as_fd() } else { fd };
        let mut fds: Vec<BorrowedFd<'_>> =
            vec![self.wake.as_fd(), unless_closed(self.hosts.listener().as_fd())];
        fds.extend(members.iter().map(|m| unless_closed(self.listeners[m].listener.as_fd())));
        fds.extend(peers.iter().map(|p| self.clients[p].stream.as_fd()));
        fds.extend(self.unnamed.iter().map(AsFd::as_fd));
        // Polls now and then for room in a lagging client's socket: simpler than a second poll set, and rare.
        let timeout = match (lagging, closed) {
            (true, _) => Some(Duration::from_millis(20)),
            (false, true) => Some(RECOVERY),
            (false, false) => None,
        };
        let mut ready = wire::wait_readable(&fds, timeout).unwrap_or_else(|error| {
            tracing::error!(%error, "doorbell server");
            vec![false; fds.len()]
        });
        if closed {
            ready[1..2 + members.len()].fill(false);
        }
        for (peer, ready) in peers.iter().zip(&mut ready[2 + members.len()..]) {
            *ready |= !self.clients[peer].backlog.is_empty();
        }
        ready
    }

    /// Accepts a process of the host.
    fn admit(&mut self) {
        match host::accept(self.hosts.listener()) {
            Ok(stream) => {
                // The process that has been silent longest makes room.
                if self.unnamed.len() >= MAX_UNNAMED {
                    self.unnamed.pop_front();
                }
                self.unnamed.push_back(stream);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => {
                self.closed_until = Some(Instant::now() + RECOVERY);
                self.refuse(None, format!("at the socket for host processes: {e}"));
            }
        }
    }

    /// Takes the first unnamed process; one that has sent its member number joins.
    fn greet(&mut self, ready: bool) {
        let Some(stream) = self.unnamed.pop_front() else { return };
        if !ready {
            self.unnamed.push_back(stream);
            return;
        }
        match host::member_of(&stream) {
            Ok(member) => {
                let is_it = |m: &Member| m.id == member && m.alive && m.role == Some(Role::Host);
                let done = match self.zone.members() {
                    Ok(all) if all.iter().any(is_it) => self.join(member, stream),
                    Ok(_) => Err("it is no live member of the host".to_owned()),
                    Err(e) => Err(e.to_string()),
                };
                if let Err(why) = done {
                    self.refuse(Some(member), why);
                }
            }
            Err(e) => self.refuse(None, format!("at the socket for host processes: {e}")),
        }
    }

    fn refuse(&self, member: Option<MemberId>, why: String) {
        self.tell(Event::Refused { member, why });
    }

    fn accept(&mut self, member: MemberId) {
        let Some(listening) = self.listeners.get_mut(&member) else { return };
        let mut guest = match listening.listener.accept() {
            Ok((stream, _)) => Knock { member, stream: Some(stream.into()) },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                self.closed_until = Some(Instant::now() + RECOVERY);
                self.refuse(Some(member), format!("accepting: {error}"));
                return;
            }
        };
        match listening.allowance.take(Instant::now()) {
            Answer::Allowed => {}
            Answer::Refused => {
                let why = format!(
                    "it has connected more than {MAX_CONNECTIONS} times in a short time; it may again in a few seconds"
                );
                self.refuse(Some(member), why);
                return;
            }
            Answer::RefusedAgain => return,
        }
        let knock = listening.knock;
        let done = self.require_alone(member).and_then(|()| {
            if !knock {
                return guest.stream.take().map_or(Ok(()), |stream| self.join(member, stream));
            }
            self.tell(Event::Knocked { member, guest });
            Ok(())
        });
        if let Err(why) = done {
            self.refuse(Some(member), why);
        }
    }

    /// Refuses a second connection of a member. An earlier one may have been closed a moment ago; the owner hears so first.
    fn require_alone(&mut self, member: MemberId) -> std::result::Result<(), String> {
        for peer in self.peers_of(member) {
            self.serve(peer);
        }
        match self.peers_of(member).first() {
            Some(peer) => Err(format!("the member is connected already, as peer {peer}")),
            None => Ok(()),
        }
    }

    /// Gives a connection its peer id and announces it to all clients.
    fn join(&mut self, member: MemberId, stream: Brief<UnixStream>) -> std::result::Result<(), String> {
        let is_alone = self.require_alone(member);
        let next = || {
            let mut left = self.next_peer.into_iter().flat_map(|next| next..=u16::MAX);
            left.find(|id| !self.taken.contains(id))
                .ok_or("all 65536 peer ids were used; restart the zone".to_owned())
        };
        let peer = is_alone.and_then(|()| next()).inspect_err(|_| wire::refuse(&stream))?;
        self.clients.insert(peer, Client { member, stream, backlog: VecDeque::new(), is_kept: false });
        self.introduce(member, peer).map_err(|error| {
            // Nothing was sent to it yet.
            if let Some(client) = self.clients.remove(&peer) {
                wire::refuse(&client.stream);
            }
            lock(&self.bells).remove(&peer);
            error.to_string()
        })
    }

    fn introduce(&mut self, member: MemberId, peer: u16) -> Result<()> {
        self.clients[&peer]
            .stream
            .set_nonblocking(true)
            .map_err(|e| Error::io("a doorbell connection", e))?;
        let vectors: Vec<Arc<OwnedFd>> =
            (0..VECTORS).map(|_| wire::eventfd().map(Arc::new)).collect::<Result<_>>()?;
        let page: OwnedFd = wire::doorbell_page(self.zone.uuid())?.into();
        let mut backlog: VecDeque<(i64, Option<Arc<OwnedFd>>)> =
            [(wire::VERSION, None), (i64::from(peer), None), (wire::SHARED_MEMORY, Some(Arc::new(page)))]
                .into();
        for (other, bell) in lock(&self.bells).iter() {
            for bell in &bell.vectors {
                backlog.push_back((i64::from(*other), Some(Arc::clone(bell))));
            }
        }
        // From here on the id is used, also after an error.
        self.next_peer = peer.checked_add(1);
        self.store.next_peer(self.next_peer);
        let others: Vec<u16> = self.clients.keys().copied().filter(|other| *other != peer).collect();
        for vector in &vectors {
            backlog.push_back((i64::from(peer), Some(Arc::clone(vector))));
        }
        self.clients.entry(peer).and_modify(|client| client.backlog = backlog);
        {
            // Under the lock, so that no restore comes between the two. The slot has the peer id before the guest can look for it.
            let mut bells = lock(&self.bells);
            self.zone.set_doorbell(member, Some(peer))?;
            bells.insert(peer, Doorbell { member, vectors: vectors.clone() });
        }
        for other in others {
            // A send that finds another client gone tells this one, which may be gone too: nobody else would be told then that it has left.
            if !self.clients.contains_key(&peer) {
                break;
            }
            for vector in &vectors {
                self.send(other, i64::from(peer), Some(Arc::clone(vector)));
            }
        }
        self.tell(Event::Joined { member, peer });
        self.flush(peer);
        Ok(())
    }

    /// A client became readable, has room, or hung up.
    fn serve(&mut self, peer: u16) {
        let Some(client) = self.clients.get(&peer) else { return };
        match wire::take(&client.stream) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.flush(peer),
            Ok(None) => self.leave(peer, "it closed its connection".to_owned()),
            Ok(Some(_)) => self.leave(peer, "it sent something, which no doorbell does".to_owned()),
            Err(error) => self.leave(peer, error.to_string()),
        }
    }

    fn send(&mut self, peer: u16, value: i64, fd: Option<Arc<OwnedFd>>) {
        if let Some(client) = self.clients.get_mut(&peer) {
            client.backlog.push_back((value, fd));
            self.flush(peer);
        }
    }

    fn flush(&mut self, peer: u16) {
        let Some(client) = self.clients.get_mut(&peer) else { return };
        while let Some((value, fd)) = client.backlog.front() {
            match wire::send(&client.stream, *value, fd.as_ref().map(|fd| fd.as_fd())) {
                Ok(()) => {
                    client.backlog.pop_front();
                }
                // ETOOMANYREFS: too many descriptors on their way to processes that don't read.
                Err(e)
                    if e.kind() == io::ErrorKind::WouldBlock
                        || e.raw_os_error() == Some(libc::ETOOMANYREFS) =>
                {
                    return;
                }
                Err(error) => {
                    self.leave(peer, error.to_string());
                    return;
                }
            }
        }
        if !std::mem::replace(&mut client.is_kept, true) {
            if let Some(bell) = lock(&self.bells).get(&peer) {
                let kept = Kept { peer, member: client.member };
                self.store.joined(&kept, &store::descriptors(&client.stream, &bell.vectors));
            }
        }
    }

    /// Forgets a peer and tells the other clients, each of which may turn out to have closed as well.
    fn leave(&mut self, peer: u16, why: String) {
        let Some(client) = self.clients.remove(&peer) else { return };
        lock(&self.bells).remove(&peer);
        let member = client.member;
        drop(client);
        self.announce_end(member, peer, why);
        let others: Vec<u16> = self.clients.keys().copied().collect();
        for other in others {
            // flush() may call this again; each time with a client less.
            self.flush(other);
        }
        self.store.left(peer);
    }

    /// Takes a peer that is no client any more out of its member's slot, and tells the clients.
    fn announce_end(&mut self, member: MemberId, peer: u16, why: String) {
        if self.zone.doorbell(member).is_ok_and(|there| there == Some(peer)) {
            // The zone was writable when the slot was set.
            let _ = self.zone.set_doorbell(member, None);
        }
        self.tell(Event::Left { member, peer, why });
        let peer = i64::from(peer);
        for client in self.clients.values_mut() {
            let is_its_join = |(value, fd): &(i64, Option<Arc<OwnedFd>>)| *value == peer && fd.is_some();
            if client.backlog.iter().filter(|message| is_its_join(message)).count() == VECTORS {
                client.backlog.retain(|message| !is_its_join(message));
            } else {
                client.backlog.push_back((peer, None));
            }
        }
    }

    fn peers_of(&self, member: MemberId) -> Vec<u16> {
        self.clients.iter().filter(|(_, c)| c.member == member).map(|(peer, _)| *peer).collect()
    }

    fn tell(&self, event: Event) {
        // An owner that doesn't listen any more needs no events.
        let _ = self.events.send(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, Rights, ZoneConfig};

    /// QEMU reads for ever of a connection that is closed without a message.
    #[test]
    fn a_vm_whose_doorbell_can_not_be_made_is_told_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("z");
        let made = Zone::create(&ZoneConfig::new("z", 8 << 20).backing(Backing::File(path.clone()))).unwrap();
        let member = made.invite("vm", Role::Vm, Rights::READ_WRITE).unwrap();
        // Its slot can't get the peer id.
        let zone = Arc::new(Zone::open(&path, false).unwrap());
        let (server, _events) = DoorbellServer::start(zone).unwrap();
        let stream = server.connect(member).unwrap();
        assert_eq!(wire::receive(&stream).unwrap().map(|(value, _)| value), Some(wire::REFUSED));
        assert!(wire::receive(&stream).unwrap().is_none());
    }
}
