// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM's own zone: made here, with a doorbell for the VM and one for this server. Its CALLS area has channels that the VM's processes
//! take; each that is taken gets a worker. One thread per VM looks after all of that and carries no data: it starts and
//! ends workers, and passes on which channel was rung when the VM rang.

use crate::limits::Limits;
use crate::supervisor::{self, Place};
use crate::tenants::Tenants;
use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use tombolo_calls::hello::Geometry;
use tombolo_calls::zone::{Area, State};
use tombolo_zone::doorbell::{Bell, DoorbellServer, Event};
use tombolo_zone::{AreaConfig, AreaType, Backing, MemberId, Membership, Rights, Role, Zone, ZoneConfig};

/// Data bytes of each ring of a channel.
const RING: u64 = 256 << 10;

/// A VM to serve.
pub struct Config {
    /// A folder on tmpfs: gets `zone` and `bell`, which the VM's QEMU is given.
    pub folder: PathBuf,
    /// Processes of the VM at once.
    pub channels: u32,
    /// Limits of each one; its window is a part of the zone.
    pub limits: Limits,
}

enum Message {
    /// The VM rang.
    Rung,
    /// Its doorbell came or went.
    Doorbell(Event),
    /// A channel's worker ended.
    Ended(u32),
}

struct Worker {
    /// Ending it ends the worker.
    socket: UnixStream,
    bell: File,
}

/// A VM that is served.
pub struct Vm {
    zone: Arc<Zone>,
    area: Area,
    member: MemberId,
    peer: Option<u16>,
    limits: Limits,
    doorbells: DoorbellServer,
    workers: BTreeMap<u32, Worker>,
    messages: Receiver<Message>,
    sender: Sender<Message>,
    _bell: Bell,
    own: Membership,
}

fn size(config: &Config) -> (u64, Geometry) {
    let geometry = Geometry { ring: RING, window: config.limits.window };
    let area = Area::bytes(config.channels, geometry).next_multiple_of(2 << 20);
    // The header and the member table come first.
    ((area + (2 << 20)).max(8 << 20), geometry)
}

/// The zone of a former server, whose VM must be started anew with it.
fn remove_old(path: &Path) -> anyhow::Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let old =
        Zone::take_over(path).with_context(|| format!("{}: not a zone without an owner", path.display()))?;
    drop(old);
    std::fs::remove_file(path).with_context(|| path.display().to_string())
}

impl Vm {
    /// Makes the zone and its doorbells.
    pub fn new(config: &Config) -> anyhow::Result<Vm> {
        let folder = &config.folder;
        let Some(name) = folder.file_name().and_then(|n| n.to_str()).filter(|n| n.len() < 32) else {
            bail!("{}: the folder's name names the zone: less than 32 bytes", folder.display());
        };
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let path = folder.join("zone");
        remove_old(&path)?;
        let (size, geometry) = size(config);
        let calls = AreaConfig { kind: AreaType::Calls, name: "calls".into(), size: None };
        let made = ZoneConfig::new(name, size).backing(Backing::File(path.clone())).areas(vec![calls]);
        let zone = Arc::new(Zone::create(&made)?);
        let own = zone.join(zone.invite("accel", Role::Host, Rights::READ_WRITE)?)?;
        let member = zone.invite(name, Role::Vm, Rights::READ_WRITE)?;
        let (doorbells, events) = DoorbellServer::start(zone.clone())?;
        doorbells.listen(member, folder.join("bell"))?;
        let (sender, messages) = channel();
        let rung = sender.clone();
        // The receiver lives as long as the server.
        let bell = doorbells.bell(own.id(), move || drop(rung.send(Message::Rung)))?;
        let forward = sender.clone();
        std::thread::Builder::new()
            .name("doorbell-events".into())
            .spawn(move || events.into_iter().all(|e| forward.send(Message::Doorbell(e)).is_ok()))?;
        let place = zone.area(AreaType::Calls, None)?;
        let memory = File::options().read(true).write(true).open(&path)?;
        let area = Area::make(memory, place.offset, place.len, config.channels, geometry, bell.peer())?;
        eprintln!(
            "tombolo accel: VM {name}: -object memory-backend-file,id=calls,mem-path={zone},size={size},share=on -device virtio-pmem-pci,memdev=calls \
             -chardev socket,id=calls,path={bell} -device ivshmem-doorbell,chardev=calls,vectors=1",
            zone = path.display(),
            bell = folder.join("bell").display(),
        );
        let workers = BTreeMap::new();
        let limits = config.limits.clone();
        Ok(Vm {
            zone,
            area,
            member,
            peer: None,
            limits,
            doorbells,
            workers,
            messages,
            sender,
            _bell: bell,
            own,
        })
    }

    /// Serves the VM for ever.
    pub fn serve(mut self, tenants: &Arc<Tenants>) {
        while let Ok(message) = self.messages.recv() {
            match message {
                Message::Rung => self.look(tenants),
                Message::Doorbell(Event::Joined { member, peer }) if member == self.member => {
                    self.peer = Some(peer);
                    tenants.vm_came();
                }
                Message::Doorbell(Event::Left { member, .. }) if member == self.member => {
                    self.vm_is_gone();
                    tenants.vm_went();
                }
                Message::Doorbell(_) => {}
                Message::Ended(channel) => self.ended(channel),
            }
        }
    }

    fn look(&mut self, tenants: &Arc<Tenants>) {
        if let Err(e) = self.zone.take_pending(self.own.id()) {
            eprintln!("tombolo accel: {e}");
        }
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
        match self.try_start(channel, tenants) {
            Ok(worker) => {
                // What the client wrote before is in its ring; it may also have left again, which the next ring tells.
                self.area.serve(channel);
                worker.ring();
                self.workers.insert(channel, worker);
            }
            Err(e) => {
                eprintln!("tombolo accel: no worker for channel {channel} of {}: {e:#}", self.zone.name());
                self.lose(channel);
            }
        }
    }

    fn try_start(&self, channel: u32, tenants: &Arc<Tenants>) -> anyhow::Result<Worker> {
        let peer = self.peer.context("the VM has no doorbell")?;
        let doorbell = self.doorbells.descriptor(peer)?.context("the VM's doorbell is gone")?;
        let (socket, theirs) = UnixStream::pair()?;
        let bell = eventfd()?;
        let Geometry { ring, window } = self.area.geometry();
        let place = Place { at: self.area.offset(channel), ring, window };
        let fds = [theirs.as_fd(), self.area.memory().as_fd(), bell.as_fd(), doorbell.as_fd()];
        let sender = self.sender.clone();
        // Nobody listens when the server ends.
        let ended = move || drop(sender.send(Message::Ended(channel)));
        let via = format!("vm:{}", self.zone.name());
        supervisor::start(tenants, &via, &self.limits, &fds, Some(&place), ended)?;
        Ok(Worker { socket, bell: File::from(bell) })
    }

    fn ended(&mut self, channel: u32) {
        self.workers.remove(&channel);
        if self.area.state(channel) == State::Left || self.peer.is_none() {
            self.free(channel);
        } else {
            self.lose(channel);
        }
    }

    fn lose(&self, channel: u32) {
        self.area.lose(channel);
        if let Some(Err(e)) = self.peer.map(|peer| self.doorbells.ring(peer)) {
            eprintln!("tombolo accel: {}: {e}", self.zone.name());
        }
    }

    fn free(&self, channel: u32) {
        if let Err(e) = self.area.free(channel) {
            eprintln!("tombolo accel: channel {channel} of {} can't be cleared: {e}", self.zone.name());
        }
    }

    /// Its QEMU ended: nobody will close what its processes had open.
    fn vm_is_gone(&mut self) {
        self.peer = None;
        if let Err(e) = self.zone.declare_dead(self.member) {
            eprintln!("tombolo accel: {}: {e}", self.zone.name());
        }
        for channel in 0..self.area.channels() {
            match self.workers.get(&channel) {
                Some(worker) => worker.end(),
                None if self.area.state(channel) != State::Free => self.free(channel),
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
