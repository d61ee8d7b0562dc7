// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The vhost-user protocol of one port: the front-end's messages change the state of the port's vrings.
//!
//! The `vhost` crate reads and checks messages and calls a [`Session`], on the port's own control thread. A session that
//! fails, or whose front-end disconnects, leaves its port down and everything else unchanged.

use std::fs::File;
use std::io;
use std::sync::Arc;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use crate::event::check_peer_event;
use crate::forwarding::switch::Switch;
use crate::frames::frame::Mac;
use crate::ports::announce::announce;
use crate::ports::port::Port;
use crate::vring::dirty::DirtyLog;
use crate::vring::features::{OFFERED, bit, has, negotiated};
use crate::vring::inflight;
use crate::vring::memory::{GuestMemory, MAX_REGIONS, Region, Translator, check_sum};
use crate::vring::queue::{Guard, State};
use crate::vring::ring::RingAddress;

/// The state of one connection.
pub struct Session {
    switch: Arc<Switch>,
    port: Arc<Port>,
    offered: u64,
    features: u64,
    memory: Arc<GuestMemory>,
    log: Option<Arc<DirtyLog>>,
}

/// An error with its reason, for the log.
fn refuse(why: impl std::fmt::Display) -> Error {
    Error::ReqHandlerError(io::Error::other(why.to_string()))
}

impl Session {
    /// Makes the session of a new connection of `port`, which is offered `offered` (a part of [`OFFERED`]).
    #[must_use]
    pub fn new(switch: Arc<Switch>, port: Arc<Port>, offered: u64) -> Self {
        let offered = offered & OFFERED;
        Self { switch, port, offered, features: 0, memory: Arc::default(), log: None }
    }

    /// Returns whether the virtio features have been negotiated.
    #[must_use]
    pub fn has_features(&self) -> bool {
        self.features != 0
    }

    /// SEND_RARP: the guest has come from another host and can't announce itself.
    ///
    /// # Errors
    /// The port has been removed.
    pub fn send_rarp(&mut self, mac: Mac) -> Result<()> {
        self.switch.watch().within(|| announce(&self.switch, &self.port, mac)).map_err(refuse)
    }

    fn vring(&self, index: u32) -> Result<Guard<'_>> {
        let vring =
            self.port.vrings().get(index as usize).ok_or_else(|| {
                refuse(format!("queue {index}, but the port has {}", self.port.vrings().len()))
            })?;
        Ok(vring.lock())
    }

    /// Called after rings have started, stopped or changed.
    fn changed(&self) {
        let was_down = self.port.active_rx(0).is_none();
        self.port.note_active();
        if was_down && self.port.active_rx(0).is_some() {
            // A guest that was migrated joined its groups on the other host.
            self.port.groups.open_from(self.switch.now());
        }
        self.switch.changed();
    }

    /// Stops everything, as when the front-end has disconnected.
    pub fn reset(&mut self) {
        self.memory = Arc::default();
        self.log = None;
        self.renew(|_| State::default());
    }

    /// Stops all queues and forgets the driver's settings of them. Memory, log and interrupts are the connection's and stay: a
    /// front-end sends them once. QEMU (version 10) sends RESET_DEVICE whenever the guest resets its device.
    fn reset_queues(&mut self) {
        let memory = self.memory.clone();
        self.renew(|old| State {
            translator: Translator::new(memory.clone()),
            log: old.log.take(),
            call: old.call.take(),
            err: old.err.take(),
            ..State::default()
        });
    }

    /// Replaces the state of each queue by what `fresh` makes of the old one, and forgets the negotiated features.
    fn renew(&mut self, fresh: impl Fn(&mut State) -> State) {
        self.features = 0;
        for vring in self.port.vrings() {
            let mut vring = vring.lock();
            vring.stop();
            let fresh = State { blocks: vring.blocks.clone(), ..fresh(&mut vring) };
            let old = std::mem::replace(&mut *vring, fresh);
            // Files are closed and memory unmapped without holding the lock.
            drop(vring);
            drop(old);
        }
        self.changed();
    }

    fn set_memory(&mut self, memory: GuestMemory) -> Result<()> {
        // The last reference to the old memory: it is unmapped when no lock is held.
        let _old = std::mem::replace(&mut self.memory, Arc::new(memory));
        let mut result = Ok(());
        for (i, vring) in self.port.vrings().iter().enumerate() {
            if let Err(why) = vring.lock().set_memory(self.memory.clone()) {
                result = Err(refuse(format!("queue {i} after a change of memory: {why}")));
            }
        }
        self.changed();
        result
    }

    fn logged(&self) -> Option<Arc<DirtyLog>> {
        self.log.clone().filter(|_| has(self.features, bit::LOG_ALL))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.reset();
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_queues();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset_queues();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.offered != 0 {
            return Err(refuse(format!("features {:#x} were never offered", features & !self.offered)));
        }
        self.features = features;
        let log = self.logged();
        for vring in self.port.vrings() {
            let mut vring = vring.lock();
            // A running ring only learns of logging; other features can't change under it.
            if vring.ring.is_none() {
                vring.negotiated = negotiated(features);
                if !has(features, bit::PROTOCOL_FEATURES) {
                    vring.enabled = true;
                }
            }
            vring.log.clone_from(&log);
        }
        Ok(())
    }

    fn set_mem_table(&mut self, regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<()> {
        check_sum(0, files.iter().zip(regions.iter().map(|r| r.memory_size))).map_err(refuse)?;
        let regions = regions
            .iter()
            .zip(files)
            .map(|(r, file)| {
                Region::map_or_leave_out(&file, r.guest_phys_addr, r.memory_size, r.user_addr, r.mmap_offset)
            })
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(refuse)?;
        self.set_memory(GuestMemory::new(regions).map_err(refuse)?)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    /// QEMU before version 8.1 sends each change of memory once for each queue pair.
    fn add_mem_region(&mut self, r: &VhostUserSingleMemoryRegion, file: File) -> Result<()> {
        if self.memory.has(&file, r.guest_phys_addr, r.memory_size, r.user_addr, r.mmap_offset) {
            return Ok(());
        }
        check_sum(self.memory.mapped(), [(&file, r.memory_size)]).map_err(refuse)?;
        let region =
            Region::map_or_leave_out(&file, r.guest_phys_addr, r.memory_size, r.user_addr, r.mmap_offset)
                .map_err(refuse)?;
        self.set_memory(self.memory.with(region).map_err(refuse)?)
    }

    fn remove_mem_region(&mut self, r: &VhostUserSingleMemoryRegion) -> Result<()> {
        match self.memory.without(r.guest_phys_addr, r.memory_size, r.user_addr) {
            Some(left) => self.set_memory(left),
            // Removed for another queue pair.
            None => Ok(()),
        }
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).map_err(|_| refuse(format!("queue {index} of {num} entries")))?;
        self.vring(index)?.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let mut vring = self.vring(index)?;
        let address = RingAddress { desc: descriptor, avail: available, used };
        vring.log_used = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        if vring.address != address {
            vring.address = address;
            if vring.ring.is_some() {
                vring.start().map_err(|why| refuse(format!("queue {index}: {why}")))?;
            }
        }
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let mut vring = self.vring(index)?;
        if vring.ring.is_some() {
            return Err(refuse(format!("base for queue {index}, which is running")));
        }
        vring.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let base = {
            let mut vring = self.vring(index)?;
            vring.kick = None;
            vring.stop()
        };
        self.changed();
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        if let Some(fd) = &fd {
            check_peer_event(fd).map_err(refuse)?;
        }
        {
            let mut vring = self.vring(index.into())?;
            vring.kick = fd.map(Arc::new);
            vring.log = self.logged();
            vring.negotiated = negotiated(self.features);
            vring.start().map_err(|why| refuse(format!("queue {index}: {why}")))?;
        }
        self.changed();
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        if let Some(fd) = &fd {
            check_peer_event(fd).map_err(refuse)?;
        }
        let first = fd.as_ref().map(File::try_clone).transpose().map_err(refuse)?;
        self.vring(index.into())?.call = fd;
        // Chains used before the driver could be interrupted are signalled now. Not under the lock: the front-end can make
        // this block.
        if let Some(mut call) = first {
            let _full = self.switch.watch().within(|| io::Write::write(&mut call, &1u64.to_ne_bytes()));
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        if let Some(fd) = &fd {
            check_peer_event(fd).map_err(refuse)?;
        }
        self.vring(index.into())?.err = fd;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::RARP
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.port.pairs() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let changes = {
            let mut vring = self.vring(index)?;
            let was = vring.is_active();
            vring.enabled = enable;
            vring.is_active() != was
        };
        if changes {
            self.changed();
        }
        Ok(())
    }

    fn get_config(&mut self, _: u32, _: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        Err(Error::InvalidOperation("the configuration space belongs to the VMM"))
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("the configuration space belongs to the VMM"))
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("a network port has no GPU"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("a network port shares no objects"))
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (asked.num_queues, asked.queue_size);
        if usize::from(queues) > self.port.vrings().len() {
            return Err(refuse(format!("in-flight state for {queues} queues")));
        }
        let file = inflight::create(queues, size).map_err(refuse)?;
        Ok((VhostUserInflight::new(inflight::total_bytes(queues, size), 0, queues, size), file))
    }

    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, size, len) = (given.num_queues, given.queue_size, given.mmap_size);
        if usize::from(queues) > self.port.vrings().len() || len < inflight::total_bytes(queues, size) {
            return Err(refuse(format!("in-flight state of {len} bytes for {queues} queues of {size}")));
        }
        let parts = inflight::map(&file, given.mmap_offset, queues, size).map_err(refuse)?;
        // Queues without a part keep none of an older file.
        let mut parts = parts.into_iter();
        for vring in self.port.vrings() {
            vring.lock().inflight = parts.next();
        }
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("a port has no state beyond its queues"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("a port has no state beyond its queues"))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let mapped = DirtyLog::map(&file, log.mmap_size, log.mmap_offset).map_err(refuse)?;
        self.log = Some(Arc::new(mapped));
        let log = self.logged();
        for vring in self.port.vrings() {
            vring.lock().log.clone_from(&log);
        }
        Ok(())
    }
}
