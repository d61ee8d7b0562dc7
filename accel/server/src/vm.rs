// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMs: each has a zone of its own, whose CALLS area has channels that the VM's processes take; each that is taken gets a worker. One
//! thread per VM looks after that and carries no data: it starts and ends workers, and passes on which channel was rung when the VM rang.
//!
//! The zone and its doorbells are kept by this server (`--vm`), or by another process that outlives it (`tombolo up`): then a server that
//! is started again takes the area over, and serves whichever process comes next.

use crate::account::{Account, Files};
use crate::limits::Limits;
use crate::owner;
use crate::tenants::Tenants;
use crate::wall::cgroup::Group;
use crate::workers::{self, Caller, Confinement, Origin, Place};
use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::io::Write;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use tombolo_calls::hello::Geometry;
use tombolo_calls::say;
use tombolo_calls::zone::{Area, RING, State};
pub use tombolo_control::accel::Guest;
use tombolo_listen::lock::try_lock;
use tombolo_zone::doorbell::{Bell, DoorbellServer};
use tombolo_zone::serve::invitation::Invitation;
use tombolo_zone::{AreaConfig, AreaType, Backing, MemberId, Membership, Rights, Role, Zone, ZoneConfig};

/// The server's name among the members; no VM can have it.
const MEMBER: &str = "accel.server";

/// A VM to serve.
pub struct Config {
    /// A folder on tmpfs: gets `zone` and `bell`, which the VM's QEMU is given.
    pub folder: PathBuf,
    /// Processes of the VM at once.
    pub channels: u32,
    /// Limits: of all of them together, but for the window, which is a part of the zone.
    pub limits: Limits,
}

/// A guest's limits, where `others` are those of whom nothing is said.
fn limits_of(guest: &Guest, others: &Limits) -> Limits {
    Limits {
        memory: guest.memory.unwrap_or(others.memory),
        objects: guest.objects.unwrap_or(others.objects),
        rate: guest.rate.unwrap_or(others.rate),
        window: guest.window,
        weight: guest.weight.unwrap_or(others.weight),
    }
}

enum Message {
    /// The VM rang, or came or went.
    Look,
    /// A channel's worker ended.
    Ended(u32),
}

/// Messages to a VM's thread. All rings of the VM before its thread looks are one message: the VM decides how often it rings, and the thread
/// may be busy starting a worker.
#[derive(Clone)]
struct Messages {
    sender: Sender<Message>,
    /// A message to look has been sent, and not been read.
    rung: Arc<AtomicBool>,
}

impl Messages {
    fn new() -> (Messages, Receiver<Message>) {
        let (sender, receiver) = channel();
        (Messages { sender, rung: Arc::default() }, receiver)
    }

    /// The VM rang, or came or went.
    fn look(&self) {
        if !self.rung.swap(true, Ordering::SeqCst) {
            self.send(Message::Look);
        }
    }

    /// Rings from here on are reported again.
    fn looks(&self) {
        self.rung.store(false, Ordering::SeqCst);
    }

    fn send(&self, message: Message) {
        // The receiver is gone when the server ends.
        let _ended = self.sender.send(message);
    }
}

struct Worker {
    /// Ending it ends the worker.
    socket: UnixStream,
    bell: File,
}

/// A server's side of a VM's zone beside the area: the VM's life, and doorbells.
pub trait Side: Send {
    /// The VM's present life; no two lives of a VM have the same. `None`: it isn't there.
    fn life(&self) -> Option<u64>;
    /// Before a look at the channels: what comes later rings again. Nothing to do where a driver takes what is pending.
    fn attend(&self) {}
    /// Rings the VM.
    fn ring(&self);
    /// A descriptor whose writer rings the VM, and can do nothing else with it.
    fn doorbell(&self) -> anyhow::Result<OwnedFd>;
    /// The VM has ended and has not come back. Nothing to do where another process keeps the zone.
    fn gone(&self) {}
}

/// A VM whose zone this server keeps.
struct Kept {
    member: MemberId,
    _doorbells: DoorbellServer,
    /// The VM's folder.
    _lock: File,
}

/// The side of a server on the host, which is a member of the zone itself, with a doorbell.
struct HostSide {
    name: String,
    zone: Arc<Zone>,
    /// The VM, where this server keeps the zone.
    kept: Option<Kept>,
    bell: Bell,
    own: Membership,
}

impl HostSide {
    /// The VM's doorbell: only it and this server have one in its zone.
    fn peer(&self) -> Option<u16> {
        self.bell.peers().first().copied()
    }
}

impl Side for HostSide {
    fn life(&self) -> Option<u64> {
        // Peer ids are not used twice.
        self.peer().map(u64::from)
    }

    fn attend(&self) {
        if let Err(e) = self.zone.take_pending(self.own.id()) {
            say!("tombolo accel: {e}");
        }
    }

    fn ring(&self) {
        let rung = self.peer().map(|peer| self.bell.ring(peer));
        if let Some(Err(e)) = rung {
            say!("tombolo accel: {}: {e}", self.name);
        }
    }

    fn doorbell(&self) -> anyhow::Result<OwnedFd> {
        let peer = self.peer().context("the VM has no doorbell")?;
        self.bell.descriptor(peer)?.context("the VM's doorbell is gone")
    }

    fn gone(&self) {
        let kept = self.kept.as_ref();
        if let Some(Err(e)) = kept.map(|kept| self.zone.declare_dead(kept.member)) {
            say!("tombolo accel: {}: {e}", self.name);
        }
    }
}

/// A VM that is served.
pub struct Vm {
    name: String,
    area: Area,
    side: Box<dyn Side>,
    /// The memory and the objects of its processes together: they are limited by VM.
    account: Account,
    account_files: Files,
    /// The VM's life that was last seen.
    life: Option<u64>,
    limits: Limits,
    /// The control group of all its workers.
    group: Option<Arc<Group>>,
    workers: BTreeMap<u32, Worker>,
    messages: Messages,
    told: Receiver<Message>,
}

/// The zone of a former server, whose VM must be started anew with it.
fn remove_old(path: &Path) -> anyhow::Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let old = Zone::own(path).with_context(|| format!("{}: not a zone without an owner", path.display()))?;
    drop(old);
    std::fs::remove_file(path).with_context(|| path.display().to_string())
}

/// Makes a VM's folder if it is missing, and locks it for this server. Refuses one in which others could put another zone or socket in the place of the VM's: the folders
/// where zones lie are open to all users (`/dev/shm`), who may have made this one first.
fn own_folder(folder: &Path) -> anyhow::Result<File> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.with_context(|| folder.display().to_string())?;
    // SAFETY: takes nothing.
    let own = unsafe { libc::geteuid() };
    // The folder, and where the path is a link, the link.
    for found in [folder.symlink_metadata(), folder.metadata()] {
        let found = found.with_context(|| folder.display().to_string())?;
        let others_write = found.is_dir() && found.mode() & 0o002 != 0;
        if ![0, own].contains(&found.uid()) || others_write {
            bail!(
                "{}: other users can change what is in this folder; remove it, or choose another one",
                folder.display()
            );
        }
    }
    let opened = File::open(folder).with_context(|| folder.display().to_string())?;
    if !try_lock(&opened).with_context(|| format!("{}: locking it", folder.display()))? {
        bail!("{}: another server serves this VM; end it, or choose another folder", folder.display());
    }
    Ok(opened)
}

impl Vm {
    /// Makes a zone and its doorbells, and keeps them.
    pub fn keep(config: &Config, confinement: &Confinement) -> anyhow::Result<Vm> {
        let folder = &config.folder;
        let Some(name) = folder.file_name().and_then(|n| n.to_str()).filter(|n| n.len() < 32) else {
            bail!("{}: the folder's name names the zone: less than 32 bytes", folder.display());
        };
        let lock = own_folder(folder)?;
        let path = folder.join("zone");
        remove_old(&path)?;
        let size = Area::zone_bytes(config.channels, config.limits.window);
        let calls = AreaConfig { kind: AreaType::Calls, name: "calls".into(), size: None };
        let made = ZoneConfig::new(name, size).backing(Backing::File(path.clone())).areas(vec![calls]);
        let zone = Arc::new(Zone::create(&made)?);
        let member = zone.invite(name, Role::Vm, Rights::READ_WRITE)?;
        let arguments = Invitation {
            member: name.to_owned(),
            rights: Rights::READ_WRITE,
            zone: name.to_owned(),
            uuid: zone.uuid(),
            path,
            size,
            socket: folder.join("bell"),
        };
        // The events have no reader: the server's own doorbell rings when the VM comes and goes.
        let (doorbells, _) = DoorbellServer::start(zone.clone())?;
        doorbells.listen(member, arguments.socket.clone())?;
        let kept = Some(Kept { member, _doorbells: doorbells, _lock: lock });
        let vm = Vm::enter(name, zone, kept, config.channels, config.limits.clone(), confinement)?;
        say!("tombolo accel: VM {name}: {}", arguments.qemu_line());
        Ok(vm)
    }

    /// Enters a zone that another process keeps, and takes its area over where another server had it. In a VM that owns the accelerator, `zone`
    /// is a device.
    pub fn join(guest: &Guest, others: &Limits, confinement: &Confinement) -> anyhow::Result<Vm> {
        let (limits, channels) = (limits_of(guest, others), guest.channels);
        if owner::is_device(&guest.zone) {
            let geometry = Geometry { ring: RING, window: limits.window };
            return Vm::with(&guest.vm, limits, channels, confinement, |look| {
                let (area, side) = owner::open(&guest.zone, channels, geometry, look)?;
                Ok((area, Box::new(side) as Box<dyn Side>))
            });
        }
        let zone = Arc::new(Zone::open(&guest.zone, true)?);
        Vm::enter(&guest.vm, zone, None, channels, limits, confinement)
    }

    fn enter(
        name: &str,
        zone: Arc<Zone>,
        kept: Option<Kept>,
        channels: u32,
        limits: Limits,
        confinement: &Confinement,
    ) -> anyhow::Result<Vm> {
        let geometry = Geometry { ring: RING, window: limits.window };
        Vm::with(name, limits, channels, confinement, |look| {
            let (id, liveness) = zone.claim(MEMBER, Role::Host, Rights::READ_WRITE)?;
            let own = zone.join_claimed(id, liveness)?;
            let bell = Bell::enter_and_watch(&zone, own.id(), look)?
                .context("no process serves its zone's doorbells")?;
            let place = zone.area(AreaType::Calls, None)?;
            let memory = File::from(zone.as_fd().try_clone_to_owned()?);
            let area = Area::make(memory, place.offset, place.len, channels, geometry, bell.peer())?;
            let side = HostSide { name: name.to_owned(), zone, kept, bell, own };
            Ok((area, Box::new(side) as Box<dyn Side>))
        })
    }

    /// `open` gets what is to be called after each ring, and when the VM came or went.
    fn with(
        name: &str,
        limits: Limits,
        channels: u32,
        confinement: &Confinement,
        open: impl FnOnce(Box<dyn FnMut() + Send>) -> anyhow::Result<(Area, Box<dyn Side>)>,
    ) -> anyhow::Result<Vm> {
        let (messages, told) = Messages::new();
        let rung = messages.clone();
        let (area, side) = open(Box::new(move || rung.look()))?;
        let (account, account_files) = Account::new(channels).context("its account")?;
        let group = confinement.cgroup().map(|cgroup| cgroup.vm(name, &limits, channels));
        let group = group.transpose().context("its control group")?.map(Arc::new);
        Ok(Vm {
            name: name.to_owned(),
            area,
            side,
            account,
            account_files,
            life: None,
            limits,
            group,
            workers: BTreeMap::new(),
            messages,
            told,
        })
    }

    /// Serves the VM for ever.
    pub fn serve(mut self, tenants: &Arc<Tenants>) {
        while let Ok(message) = self.told.recv() {
            match message {
                Message::Look => {
                    self.messages.looks();
                    self.meet(tenants);
                    self.look(tenants);
                }
                Message::Ended(channel) => self.ended(channel),
            }
        }
    }

    /// Finds out whether the VM came, went, or was started again.
    fn meet(&mut self, tenants: &Arc<Tenants>) {
        let now = self.side.life();
        let before = std::mem::replace(&mut self.life, now);
        if now == before {
            return;
        }
        if before.is_some() {
            self.vm_is_gone(now.is_none());
            tenants.vm_went();
        }
        if now.is_some() {
            tenants.vm_came();
            // Its processes may have slept since before this server took the area over.
            self.side.ring();
        }
    }

    fn look(&mut self, tenants: &Arc<Tenants>) {
        self.side.attend();
        for channel in 0..self.area.channels() {
            if !self.area.take_ring(channel) {
                continue;
            }
            match (self.area.state(channel), self.workers.get(&channel)) {
                (State::Wanted, None) => self.start(channel, tenants),
                (State::Left, Some(worker)) => worker.end(),
                (State::Left, None) => self.free(channel),
                (_, Some(worker)) => worker.ring(),
                (_, None) => {}
            }
        }
    }

    fn start(&mut self, channel: u32, tenants: &Arc<Tenants>) {
        if !self.area.serve(channel) {
            // It left again, and its ring says so.
            return;
        }
        match self.try_start(channel, tenants) {
            Ok(worker) => {
                // The client may have written to its ring before.
                worker.ring();
                self.workers.insert(channel, worker);
            }
            Err(e) => {
                say!("tombolo accel: no worker for channel {channel} of {}: {e:#}", self.name);
                self.lose(channel);
            }
        }
    }

    fn try_start(&self, channel: u32, tenants: &Arc<Tenants>) -> anyhow::Result<Worker> {
        let doorbell = self.side.doorbell()?;
        let (socket, theirs) = UnixStream::pair()?;
        let bell = eventfd()?;
        let Geometry { ring, window } = self.area.geometry();
        let place = Place { channel, at: self.area.offset(channel), ring, window };
        let memory = self.area.memory().as_fd();
        let [write, read] = self.account_files.fds();
        let fds = [theirs.as_fd(), memory, bell.as_fd(), doorbell.as_fd(), write, read];
        let messages = self.messages.clone();
        let ended = Box::new(move || messages.send(Message::Ended(channel)));
        let origin = Origin::of_vm(&self.name);
        let caller = Caller::OfVm { place: &place, group: self.group.clone(), ended };
        workers::start(tenants, origin, &self.limits, &fds, caller)?;
        Ok(Worker { socket, bell: File::from(bell) })
    }

    fn ended(&mut self, channel: u32) {
        self.workers.remove(&channel);
        self.account.clear(channel);
        if self.area.state(channel) == State::Left || self.life.is_none() {
            self.free(channel);
        } else {
            self.lose(channel);
        }
    }

    fn lose(&self, channel: u32) {
        self.area.lose(channel);
        self.side.ring();
    }

    fn free(&self, channel: u32) {
        if let Err(e) = self.area.free(channel) {
            say!("tombolo accel: channel {channel} of {} can't be cleared: {e}", self.name);
        }
        // A process may wait for it.
        self.side.ring();
    }

    /// Frees the channels of a VM whose QEMU ended, as its processes close none any more. A VM that is back already frees those of its former life itself.
    fn vm_is_gone(&mut self, for_good: bool) {
        if for_good {
            self.side.gone();
        }
        for channel in 0..self.area.channels() {
            match self.workers.get(&channel) {
                Some(worker) => worker.end(),
                None if for_good && self.area.state(channel) != State::Free => self.free(channel),
                None => {}
            }
        }
    }
}

impl Worker {
    fn ring(&self) {
        // A counter that is full needs no more ringing.
        let _full = (&self.bell).write(&1u64.to_ne_bytes());
    }

    fn end(&self) {
        // It may have ended by itself.
        let _ended = self.socket.shutdown(Shutdown::Both);
    }
}

fn eventfd() -> std::io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: takes no memory; the result is checked.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: fd is fresh.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_folder_that_others_can_change_gets_no_zone() {
        let above = tempfile::tempdir().expect("a folder");
        let (fresh, open) = (above.path().join("a/vm"), above.path().join("open"));
        let lock = own_folder(&fresh).expect("made");
        assert_eq!(fresh.metadata().expect("it is there").mode() & 0o7777, 0o700);
        let why = own_folder(&fresh).expect_err("another server's").to_string();
        assert!(why.contains("another server serves this VM"), "{why}");
        drop(lock);
        own_folder(&fresh).expect("this user's own");
        std::fs::create_dir(&open).expect("a folder");
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).expect("its mode");
        let why = own_folder(&open).expect_err("others write to it").to_string();
        assert!(why.contains("other users can change"), "{why}");
        let link = above.path().join("link");
        std::os::unix::fs::symlink(&open, &link).expect("a link");
        assert!(own_folder(&link).is_err());
    }

    #[test]
    fn a_vm_that_rings_while_nobody_looks_takes_one_message_and_is_told_of_again_afterwards() {
        let (messages, told) = Messages::new();
        let by_the_doorbell = messages.clone();
        for _ in 0..2 {
            (0..100_000).for_each(|_| by_the_doorbell.look());
            messages.send(Message::Ended(1));
            let read: Vec<Message> = told.try_iter().inspect(|_| messages.looks()).collect();
            assert!(matches!(read[..], [Message::Look, Message::Ended(1)]), "{}", read.len());
        }
    }
}
