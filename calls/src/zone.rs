// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Between processes of a VM and a server: the CALLS area of the VM's own zone (`zone/format/tombolo_calls.h`) has channels, each with
//! both rings and a window. In the guest a channel is an open file of `/dev/tombolo-calls-NAME` ([`connect`]); its driver sleeps
//! and rings. On the other side [`Area`] sees channels come and go, and a worker serves one of them (`accept`). That side is a process of
//! the host, or of the VM that owns the accelerator; then the host has an [`Area`] too, to clear channels and to say that the owner died.
//!
//! The handshake is the first record of each ring. The area's words may change at any time: the server believes the geometry it chose
//! itself, and of a channel's word only its state, which it moves on by compare and swap.

use crate::children::NotInChildren;
use crate::hello::{Geometry, Hello, welcome, welcomed};
use crate::memory::Mapping;
use crate::process::{EventBell, EventFd};
use crate::rings::{self, Bells, Ring, Side};
use crate::{Bell, Error, Link, send};
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[allow(missing_docs, non_camel_case_types, dead_code, clippy::all)]
mod format {
    include!(concat!(env!("OUT_DIR"), "/format.rs"));
}
use format::{tmb_calls_channel, tmb_calls_header, tmb_calls_info};

const FIRST: u64 = format::TMB_CALLS_FIRST as u64;
const RINGS: u64 = format::TMB_CALLS_RINGS_OFF as u64;
/// The offset of the server's doorbell, which is the lower half of an aligned word.
const DOORBELL: usize = offset_of!(tmb_calls_header, doorbell);
/// Data bytes of each ring of a VM's channel.
pub const RING: u64 = 256 << 10;
/// The most channels of a VM.
pub const CHANNELS_MAX: u32 = format::TMB_CALLS_CHANNELS;
const _: () = assert!(size_of::<tmb_calls_header>() == 4096 && size_of::<tmb_calls_channel>() == 4096);

/// A word of shared memory.
fn word(mapping: &Mapping, at: usize) -> &AtomicU64 {
    assert!(at % 8 == 0 && at + 8 <= mapping.len(), "a word outside of the mapping");
    // SAFETY: inside the mapping and aligned, as checked; an atomic may be written by others at any time.
    unsafe { AtomicU64::from_ptr(mapping.base().add(at).cast()) }
}

/// The driver of a guest process' channel. Tests have one without a kernel.
pub trait Device: Send + Sync {
    /// Sleeps until the count of rings isn't `seen`; the count. [`Error::Closed`]: the server is gone.
    fn wait(&self, seen: u64) -> Result<u64, Error>;
    /// Rings the server.
    fn ring(&self);
    /// Counts a ring, and wakes the threads that wait.
    fn wake(&self);
}

struct Driver(NotInChildren);

impl Driver {
    fn ioctl(&self, request: u32, argument: *mut libc::c_void) -> io::Result<()> {
        // SAFETY: every caller passes memory of the kind that the request wants, which lives during the call.
        let r = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::Ioctl::from(request), argument) };
        if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Device for Driver {
    fn wait(&self, seen: u64) -> Result<u64, Error> {
        let mut count = seen;
        match self.ioctl(format::TMB_CALLS_IOC_WAIT, (&raw mut count).cast()) {
            Ok(()) => Ok(count),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(seen),
            Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => Err(Error::Closed),
            Err(e) => Err(e.into()),
        }
    }
    fn ring(&self) {
        // Without a doorbell device there is no way to ring: the next wait returns the error.
        let _gone = self.ioctl(format::TMB_CALLS_IOC_RING, std::ptr::null_mut());
    }
    fn wake(&self) {
        let _never = self.ioctl(format::TMB_CALLS_IOC_WAKE, std::ptr::null_mut());
    }
}

/// Sleeps on the count of rings: what was rung since this bell last waited is not slept through.
struct DeviceBell {
    device: Arc<dyn Device>,
    seen: AtomicU64,
}

impl Bell for DeviceBell {
    fn wait(&self) -> Result<(), Error> {
        let now = self.device.wait(self.seen.load(Ordering::Acquire))?;
        self.seen.store(now, Ordering::Release);
        Ok(())
    }
    fn ring(&self) {
        self.device.wake();
    }
}

struct DeviceRing(Arc<dyn Device>);

impl Ring for DeviceRing {
    fn ring(&self) {
        self.0.ring();
    }
}

/// Makes a link of a channel that is mapped from its first byte on, as its client.
pub fn connect_over(
    mapping: Arc<Mapping>,
    geometry: Geometry,
    device: Arc<dyn Device>,
    gone: OwnedFd,
    hello: &Hello,
) -> Result<Link, Error> {
    let geometry = geometry.check()?;
    let bell = || Arc::new(DeviceBell { device: device.clone(), seen: AtomicU64::new(0) });
    let peer = || Arc::new(DeviceRing(device.clone()));
    let bells = Bells { bell: bell(), room: bell(), peer: peer(), peer_room: peer() };
    let gone = NotInChildren::new(gone)?;
    let mut link = rings::link(mapping, RINGS, geometry, Side::Client, bells, gone)?;
    let mut record = Vec::new();
    hello.send(&mut record)?;
    send(&mut *link.tx, &*link.room, &[&record])?;
    link.tx.publish()?;
    receive(&mut link, &mut record)?;
    welcomed(&mut &record[..])?;
    Ok(link)
}

/// Takes a channel of a guest's device.
pub fn connect(path: &Path, hello: &Hello) -> Result<Link, Error> {
    let file = File::options().read(true).write(true).open(path).map_err(|e| match e.raw_os_error() {
        Some(libc::EUSERS) => {
            Error::Refused(format!("{}: all channels of this VM are in use", path.display()))
        }
        Some(libc::ENOTCONN) => Error::Refused(format!(
            "{}: no server serves it now; the VM that owns the accelerator has to be up",
            path.display()
        )),
        _ => Error::Io(e),
    })?;
    let gone = file.as_fd().try_clone_to_owned()?;
    let driver = Driver(NotInChildren::new(file)?);
    let mut info = tmb_calls_info { channel_size: 0, ring: 0, window: 0 };
    driver.ioctl(format::TMB_CALLS_IOC_INFO, (&raw mut info).cast())?;
    let geometry = Geometry { ring: info.ring, window: info.window };
    let mapping = Arc::new(Mapping::of_whole(&driver.0, info.channel_size as usize)?);
    connect_over(mapping, geometry, Arc::new(driver), gone, hello)
}

fn receive(link: &mut Link, record: &mut Vec<u8>) -> Result<(), Error> {
    while !link.rx.try_recv(record)? {
        if link.rx.arm()? {
            link.bell.wait()?;
        }
        link.rx.disarm();
    }
    Ok(())
}

/// Wakes the client of a channel: sets its word, then rings its VM.
struct GuestRing {
    channel: Arc<Mapping>,
    doorbell: EventFd,
}

impl Ring for GuestRing {
    fn ring(&self) {
        word(&self.channel, offset_of!(tmb_calls_channel, client_rung)).store(1, Ordering::SeqCst);
        self.doorbell.ring();
    }
}

/// A worker's channel in the zone's memory, with its bells. All of it comes from the supervisor.
pub struct Channel {
    /// The zone's memory, or a part of it.
    pub memory: File,
    /// The offset of the channel in it.
    pub at: u64,
    /// The sizes that the server chose.
    pub geometry: Geometry,
    /// Rung by the supervisor when the client rang.
    pub bell: OwnedFd,
    /// The VM's doorbell.
    pub doorbell: OwnedFd,
    /// A descriptor that ends when the client is gone.
    pub gone: OwnedFd,
}

/// A channel whose client has sent its hello, and waits for the answer.
pub struct Greeted {
    link: Link,
    geometry: Geometry,
    /// The client's hello.
    pub hello: Hello,
}

/// Receives the hello of a channel's client.
pub fn greet(channel: Channel) -> Result<Greeted, Error> {
    let Channel { memory, at, geometry, bell, doorbell, gone } = channel;
    let geometry = geometry.check()?;
    let mapping = Arc::new(Mapping::of_file(&memory, at, (RINGS + rings::total(geometry)) as usize)?);
    // From here on this process reaches these pages of the zone and no others.
    drop(memory);
    let (event, gone) = (Arc::new(EventFd::from(bell)), NotInChildren::new(gone)?);
    let bell = || -> Result<Arc<dyn Bell>, Error> {
        Ok(Arc::new(EventBell { event: event.clone(), socket: gone.try_clone()? }))
    };
    let peer: Arc<dyn Ring> =
        Arc::new(GuestRing { channel: mapping.clone(), doorbell: EventFd::from(doorbell) });
    let bells = Bells { bell: bell()?, room: bell()?, peer: peer.clone(), peer_room: peer };
    let mut link = rings::link(mapping, RINGS, geometry, Side::Server, bells, gone)?;
    let mut record = Vec::new();
    receive(&mut link, &mut record)?;
    let hello = Hello::receive(&mut &record[..])?;
    Ok(Greeted { link, geometry, hello })
}

impl Greeted {
    fn answer(&mut self, answer: Result<Geometry, &str>) -> Result<(), Error> {
        send(&mut *self.link.tx, &*self.link.room, &[&welcome(answer)])?;
        self.link.tx.publish()
    }

    /// Serves the client.
    pub fn accept(mut self) -> Result<Link, Error> {
        self.answer(Ok(self.geometry))?;
        Ok(self.link)
    }

    /// Tells the client that it can't be served, and why.
    pub fn refuse(mut self, why: &str) -> Result<(), Error> {
        self.answer(Err(why))
    }
}

/// The state of a channel, with what the server has to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No process has it.
    Free,
    /// A process opened it: [`Area::serve`], then start a worker.
    Wanted,
    /// A worker serves it, or is about to.
    Served,
    /// Its worker ended; its process still has it.
    Lost,
    /// Its process closed it (or the area says nonsense): end the worker, then [`Area::free`].
    Left,
    /// Left, and without a worker: the host clears it.
    Done,
}

/// The side that clears a channel which its process left.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clearing {
    /// This process: it gives the memory back to the host's kernel.
    Here,
    /// The host, as a guest has no way to give memory back.
    Host,
}

/// A CALLS area as its server sees it, or the host whose VM serves it.
pub struct Area {
    mapping: Mapping,
    memory: File,
    at: u64,
    channels: u32,
    geometry: Geometry,
    clearing: Clearing,
}

impl Area {
    fn channel_size(geometry: Geometry) -> u64 {
        RINGS.saturating_add(rings::total(geometry))
    }

    /// Bytes that an area with so many channels needs. The largest number for sizes that no memory has.
    pub fn bytes(channels: u32, geometry: Geometry) -> u64 {
        FIRST.saturating_add(u64::from(channels).saturating_mul(Self::channel_size(geometry)))
    }

    /// Bytes of a zone whose only area this is: the header and the member table come first.
    pub fn zone_bytes(channels: u32, window: u64) -> u64 {
        let area = Self::bytes(channels, Geometry { ring: RING, window });
        area.checked_next_multiple_of(2 << 20).unwrap_or(u64::MAX).saturating_add(2 << 20).max(8 << 20)
    }

    /// Makes the area at byte `at` of a zone's memory, which is zero or was this area before, with the same channels and another server:
    /// then the channels that were served are lost to their processes, who find out when the VM is rung, and those that are wanted are
    /// as if they had just been. `doorbell`: the server's ivshmem peer id.
    pub fn make(
        memory: File,
        at: u64,
        len: u64,
        channels: u32,
        geometry: Geometry,
        doorbell: u16,
    ) -> Result<Area, Error> {
        let area = Self::map(memory, at, len, channels, geometry, Clearing::Here)?;
        area.lay_out(u32::from(doorbell) + 1);
        area.take_over()?;
        area.announce();
        Ok(area)
    }

    /// Makes the area at byte `at` of a zone's memory, which is zero, for a server in another VM that comes and goes. No server serves it yet.
    pub fn prepare(
        memory: File,
        at: u64,
        len: u64,
        channels: u32,
        geometry: Geometry,
    ) -> Result<Area, Error> {
        let area = Self::map(memory, at, len, channels, geometry, Clearing::Here)?;
        area.lay_out(0);
        area.announce();
        Ok(area)
    }

    /// The area that an earlier program of this process [prepared](Area::prepare), as it is.
    pub fn resume(memory: File, at: u64, len: u64, channels: u32, geometry: Geometry) -> Result<Area, Error> {
        Self::map(memory, at, len, channels, geometry, Clearing::Here)
    }

    /// The area behind `/dev/tombolo-serve-UUID`, which the host prepared, as its server. The driver knows which VM to ring.
    pub fn of_device(device: File, channels: u32, geometry: Geometry) -> Result<Area, Error> {
        let area = Self::map(device, 0, Self::bytes(channels, geometry), channels, geometry, Clearing::Host)?;
        area.take_over()?;
        Ok(area)
    }

    fn map(
        memory: File,
        at: u64,
        len: u64,
        channels: u32,
        geometry: Geometry,
        clearing: Clearing,
    ) -> Result<Area, Error> {
        let geometry = geometry.check()?;
        if channels == 0 || channels > format::TMB_CALLS_CHANNELS || Self::bytes(channels, geometry) > len {
            return Err(Error::Broken("the channels don't fit into the zone's area"));
        }
        let mapping = Mapping::of_file(&memory, at, Self::bytes(channels, geometry) as usize)?;
        Ok(Area { mapping, memory, at, channels, geometry, clearing })
    }

    fn lay_out(&self, doorbell: u32) {
        let put = |at: usize, value: u64| word(&self.mapping, at).store(value, Ordering::Relaxed);
        let of = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        put(offset_of!(tmb_calls_header, version), of(format::TMB_CALLS_VERSION, self.channels));
        put(offset_of!(tmb_calls_header, channel_size), Self::channel_size(self.geometry));
        put(offset_of!(tmb_calls_header, ring), self.geometry.ring);
        put(offset_of!(tmb_calls_header, window), self.geometry.window);
        put(DOORBELL, of(doorbell, 0));
        // A client that leaves from here on rings the new server. The words of the channels tell the new server which clients rang the old one.
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    fn take_over(&self) -> Result<(), Error> {
        for i in 0..self.channels {
            match self.state(i) {
                State::Free | State::Done => {}
                State::Left => self.free(i)?,
                State::Wanted => self.server_rung(i).store(1, Ordering::SeqCst),
                State::Served | State::Lost => self.lose(i),
            }
        }
        Ok(())
    }

    fn announce(&self) {
        word(&self.mapping, offset_of!(tmb_calls_header, magic))
            .store(format::TMB_CALLS_MAGIC, Ordering::Release);
    }

    /// Returns whether the area's own words name a server.
    pub fn is_served(&self) -> bool {
        word(&self.mapping, DOORBELL).load(Ordering::Acquire) as u32 != 0
    }

    /// Marks the channels of a server VM that has ended as lost, and keeps clients from waiting for it. The caller rings the client VM.
    pub fn abandon(&self) {
        word(&self.mapping, DOORBELL).store(0, Ordering::SeqCst);
        // A client that takes a channel looks at the doorbell afterwards: either it sees the 0, or its channel is seen below.
        std::sync::atomic::fence(Ordering::SeqCst);
        let waits = |i: &u32| matches!(self.state(*i), State::Wanted | State::Served);
        (0..self.channels).filter(waits).for_each(|i| self.lose(i));
    }

    /// Clears the channels that their server is done with. Returns whether there were any: then the caller rings the client VM.
    pub fn clear_done(&self) -> Result<bool, Error> {
        let mut cleared = false;
        for channel in 0..self.channels {
            let was = self.state_word(channel).load(Ordering::Acquire);
            if was as u32 & 0xff == format::TMB_CALLS_DONE {
                self.clear(channel, was)?;
                cleared = true;
            }
        }
        Ok(cleared)
    }

    /// The number of channels.
    pub fn channels(&self) -> u32 {
        self.channels
    }

    /// The sizes of each channel.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The offset of a channel in the zone's memory.
    pub fn offset(&self, channel: u32) -> u64 {
        self.at + self.inside(channel)
    }

    /// The zone's memory, for a worker.
    pub fn memory(&self) -> &File {
        &self.memory
    }

    fn inside(&self, channel: u32) -> u64 {
        assert!(channel < self.channels, "no such channel");
        FIRST + u64::from(channel) * Self::channel_size(self.geometry)
    }

    fn state_word(&self, channel: u32) -> &AtomicU64 {
        assert!(channel < self.channels, "no such channel");
        word(&self.mapping, offset_of!(tmb_calls_header, states) + channel as usize * 8)
    }

    /// The state that a channel's word names.
    pub fn state(&self, channel: u32) -> State {
        match self.state_word(channel).load(Ordering::Acquire) as u32 & 0xff {
            format::TMB_CALLS_FREE => State::Free,
            format::TMB_CALLS_WANTED => State::Wanted,
            format::TMB_CALLS_SERVED => State::Served,
            format::TMB_CALLS_LOST => State::Lost,
            format::TMB_CALLS_DONE => State::Done,
            _ => State::Left,
        }
    }

    fn step(&self, channel: u32, from: u32, to: u32) -> bool {
        let state = self.state_word(channel);
        let was = state.load(Ordering::Acquire);
        let next = was & !0xff | u64::from(to);
        was as u32 & 0xff == from
            && state.compare_exchange(was, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Marks a channel as served, before its worker reads anything. `false`: no client wants it any more.
    pub fn serve(&self, channel: u32) -> bool {
        self.step(channel, format::TMB_CALLS_WANTED, format::TMB_CALLS_SERVED)
    }

    /// Marks a channel whose worker ended. The client learns of it when the caller rings its VM.
    pub fn lose(&self, channel: u32) {
        let _left_meanwhile = self.step(channel, format::TMB_CALLS_SERVED, format::TMB_CALLS_LOST)
            || self.step(channel, format::TMB_CALLS_WANTED, format::TMB_CALLS_LOST);
        word(&self.mapping, self.inside(channel) as usize + offset_of!(tmb_calls_channel, client_rung))
            .store(1, Ordering::SeqCst);
    }

    /// Clears a channel that no process uses and marks it as free, or has the host do both. No process maps a channel that holds another's bytes.
    pub fn free(&self, channel: u32) -> Result<(), Error> {
        let was = self.state_word(channel).load(Ordering::Acquire);
        match self.clearing {
            Clearing::Here => self.clear(channel, was),
            Clearing::Host => {
                let done = was & !0xff | u64::from(format::TMB_CALLS_DONE);
                // A client that changes the word meanwhile rings, so the server looks again.
                let _again =
                    self.state_word(channel).compare_exchange(was, done, Ordering::AcqRel, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Clears a channel, and marks it as free if its word still is `was`.
    fn clear(&self, channel: u32, was: u64) -> Result<(), Error> {
        let (at, len) = (self.offset(channel), Self::channel_size(self.geometry));
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a descriptor of our own; the range is checked against the file by the kernel.
        let r =
            unsafe { libc::fallocate(self.memory.as_raw_fd(), punch, at as libc::off_t, len as libc::off_t) };
        if r < 0 {
            return Err(io::Error::last_os_error().into());
        }
        let free = (was >> 32).wrapping_add(1) << 32 | u64::from(format::TMB_CALLS_FREE);
        // A VM that came back meanwhile has marked the channel as left itself.
        let _again =
            self.state_word(channel).compare_exchange(was, free, Ordering::AcqRel, Ordering::Relaxed);
        Ok(())
    }

    /// Returns whether a channel's client rang since the last call.
    pub fn take_ring(&self, channel: u32) -> bool {
        self.server_rung(channel).swap(0, Ordering::AcqRel) != 0
    }

    fn server_rung(&self, channel: u32) -> &AtomicU64 {
        word(&self.mapping, self.inside(channel) as usize + offset_of!(tmb_calls_channel, server_rung))
    }
}
