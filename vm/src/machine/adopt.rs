// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM whose supervisor has ended goes on under the next one. What the supervisor knows of a VM is kept by the VM's shim, with the sockets of its
//! monitor and its agent, each time that it changes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, OnceLock, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tombolo_passthrough::address::Address;
use tombolo_start::layout::Layout;
use tombolo_start::progress::Phase as Growth;
use tombolo_topology::apply::Thread;
use tombolo_topology::interrupts::Interrupts;
use tombolo_topology::plan::VmPlan;

use super::cgroup::Group;
use super::growth::Taken;
use super::hotplug::Ports;
use super::partition::{Partition, Store};
use super::state::State;
use super::{Exit, Held, Machine, Phase};
use crate::child::Handle;
use crate::compose::VmSpec;
use crate::compose::disks::Format;
use crate::guest::agent::Agent;
use crate::moment::Moment;
use crate::qemu::Hypervisor;
use crate::qemu::console::Console;
use crate::qemu::qmp::Qmp;
use crate::shim::{RECORD, Shim, Stream, WITH_CHILD};

/// The names of the sockets that the shim keeps.
const MONITOR: &str = "monitor";
const AGENT: &str = "agent";
/// The name of the record of its ports, which are changed for as long as QEMU takes for it.
const PORTS: &str = "ports";

fn liveness_of(zone: &str) -> String {
    format!("{WITH_CHILD}live.{zone}")
}

/// What a supervisor knows of a VM.
#[derive(Debug, Serialize, Deserialize)]
pub struct Record {
    name: String,
    spec: VmSpec,
    folder: PathBuf,
    hypervisor: Hypervisor,
    started: Moment,
    state: State,
    reboots: u32,
    restarts: u32,
    attempt: u32,
    layout: Layout,
    formats: Vec<Format>,
    placement: Option<VmPlan>,
    threads: Option<Vec<Thread>>,
    devices: Vec<Address>,
    group: Option<PathBuf>,
    /// The CPUs are the VM's own.
    isolated: bool,
    interrupts: Interrupts,
}

impl Machine {
    /// Has the shim keep the sockets of a QEMU that has just been started, and what is known of it.
    /// `liveness`: of each zone, as for [`Machine::keep_liveness`].
    pub(super) fn keep(
        &self,
        monitor: &UnixStream,
        agent: &UnixStream,
        liveness: &[(String, OwnedFd)],
    ) -> anyhow::Result<()> {
        let sockets = [(MONITOR.to_owned(), monitor.as_fd()), (AGENT.to_owned(), agent.as_fd())];
        let liveness = liveness.iter().map(|(zone, held)| (liveness_of(zone), held.as_fd()));
        self.shim.put(&sockets.into_iter().chain(liveness).collect::<Vec<_>>())?;
        self.save_ports(&self.ports.lock().unwrap_or_else(PoisonError::into_inner));
        let record = self.record_of(&self.held.lock().unwrap_or_else(PoisonError::into_inner));
        self.shim.put_record(RECORD, &record)
    }

    /// Has the shim keep the descriptor by which the VM is alive in a zone, until QEMU ends: the next supervisor can end that membership sooner.
    ///
    /// # Errors
    /// The shim does not answer.
    pub fn keep_liveness(&self, zone: &str, liveness: BorrowedFd<'_>) -> anyhow::Result<()> {
        self.shim.put(&[(liveness_of(zone), liveness)])
    }

    /// That descriptor; `None`: the VM is no member of the zone, or has ended.
    pub fn liveness(&self, zone: &str) -> Option<OwnedFd> {
        self.shim.get(&liveness_of(zone)).ok()
    }

    /// Has the shim keep what is known of the VM's ports now.
    pub(super) fn save_ports(&self, ports: &Ports) {
        if let Err(e) = self.shim.put_record(PORTS, ports) {
            crate::say!("the VM '{}': {e:#}", self.name);
        }
    }

    /// Has the shim keep what is known of the VM now.
    pub(super) fn save(&self) {
        // The thread that has it locked changes it, and saves the VM afterwards.
        let Ok(held) = self.held.try_lock() else { return };
        let record = self.record_of(&held);
        drop(held);
        // A shim that has ended has taken the VM along.
        if let Err(e) = self.shim.put_record(RECORD, &record) {
            crate::say!("the VM '{}': {e:#}", self.name);
        }
    }

    fn record_of(&self, held: &Held) -> Record {
        Record {
            name: self.name.clone(),
            spec: self.spec.clone(),
            folder: self.folder.clone(),
            hypervisor: self.hypervisor,
            started: self.started.into(),
            state: self.lock().clone(),
            reboots: self.reboots,
            restarts: self.restarts,
            attempt: self.attempt,
            layout: self.layout,
            formats: self.formats.clone(),
            placement: self.placement.clone(),
            threads: self.threads.get().cloned(),
            devices: held.devices.addresses().to_vec(),
            group: held.group.as_ref().map(|group| group.path().to_owned()),
            isolated: held.partition.is_some(),
            interrupts: held.interrupts.clone(),
        }
    }

    /// A VM that an earlier supervisor has started, and with which this one [goes on](Machine::go_on).
    ///
    /// # Errors
    /// The shim keeps no record, or this program can't read it.
    pub fn adopt(shim: Shim) -> anyhow::Result<Arc<Machine>> {
        let record = shim.record::<Record>(RECORD)?;
        let (_, child) = shim.look()?;
        let (pid, process) = child.map_or((0, Handle::gone()), |child| (child.pid, child.process));
        let stream = |stream| Console::start(&shim, stream, None).unwrap_or_else(|_| Console::ended());
        let (console, log) = (stream(Stream::Console), stream(Stream::Log));
        let group = record.group.and_then(|path| said(Group::take_over(path)));
        let partition = group.as_ref().filter(|_| record.isolated).and_then(|group| {
            said(Store::of_user().and_then(|store| Partition::take_over(&store, group.path())))
        });
        let held = Held {
            devices: Taken::take_over(record.devices),
            interrupts: record.interrupts,
            group,
            partition,
            ..Held::default()
        };
        let (agent, ports) = (Agent::new(shim.get(AGENT)?.into()), shim.record::<Ports>(PORTS)?);
        Ok(Arc::new(Machine {
            console,
            log,
            agent,
            name: record.name,
            spec: record.spec,
            folder: record.folder,
            hypervisor: record.hypervisor,
            started: Instant::from(record.started),
            shim: Arc::new(shim),
            qmp: OnceLock::new(),
            process,
            pid,
            state: Mutex::new(record.state),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
            again: false,
            reboots: record.reboots,
            restarts: record.restarts,
            attempt: record.attempt,
            layout: record.layout,
            formats: record.formats,
            placement: record.placement,
            threads: record.threads.map(OnceLock::from).unwrap_or_default(),
            isolated: held.partition.as_ref().map(|own| OnceLock::from(own.path())).unwrap_or_default(),
            ports: Mutex::new(ports),
            old_ports: Once::new(),
            held: Mutex::new(held),
        }))
    }

    /// Hears the monitor of a VM that has not ended, and waits for its end; `ended` as for [`Machine::start`]. A VM that was booting or stopping is ended:
    /// who asked for that is gone.
    ///
    /// # Errors
    /// When its monitor, or a thread, can't be had.
    pub fn go_on(
        self: &Arc<Self>,
        ended: impl FnOnce(&Arc<Machine>, Exit) + Send + 'static,
    ) -> anyhow::Result<()> {
        let monitor = UnixStream::from(self.shim.get(MONITOR)?);
        let _set_once = self.qmp.set(Qmp::resume(monitor, self.events())?);
        if self.phase() != Phase::Up {
            self.cancelled.store(true, Ordering::Release);
            self.process.kill();
        }
        Ok(self.watch(ended)?)
    }

    /// Ends the QEMU that a supervisor has started for a VM that had ended, and of which it could note nothing any more.
    pub fn end_unfinished(&self) {
        self.process.kill();
        if let Err(e) = self.shim.wait() {
            crate::say!("the VM '{}': {e:#}", self.name);
        }
    }

    /// Returns whether the VM's memory still grows.
    pub fn is_growing(&self) -> bool {
        let state = self.lock();
        // A VM whose growth has failed may be about to be started again for that.
        state.exit.is_none()
            && !state.grown
            && state.growth.as_ref().is_none_or(|growth| growth.phase != Growth::Complete)
    }
}

/// Says why something of a VM that goes on can't be had: the kernel keeps to it all the same, and 'tombolo clean' gives it back.
fn said<T>(taken: anyhow::Result<T>) -> Option<T> {
    taken.inspect_err(|e| crate::say!("{e:#}")).ok()
}

/// Checks that this program can go on with a VM.
///
/// # Errors
/// It can't read what the shim keeps.
pub fn check(shim: &Shim) -> anyhow::Result<()> {
    shim.record::<Record>(RECORD)?;
    shim.record::<Ports>(PORTS).map(drop)
}
