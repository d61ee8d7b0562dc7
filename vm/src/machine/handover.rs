// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM that goes on in the next program of this process: QEMU, its sockets, and what is known of it.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tombolo_passthrough::address::Address;
use tombolo_start::layout::Layout;
use tombolo_start::progress::Phase as Growth;
use tombolo_topology::apply::Thread;
use tombolo_topology::interrupts::Interrupts;
use tombolo_topology::plan::VmPlan;
use tombolo_zone::keep::{Keep, Kept};

use super::cgroup::Group;
use super::growth::Taken;
use super::hotplug::Ports;
use super::partition::{Partition, Store};
use super::state::State;
use super::{Exit, Held, Machine, Phase};
use crate::child::{Guarded, Handle};
use crate::compose::VmSpec;
use crate::compose::disks::Format;
use crate::guest::agent::Agent;
use crate::moment::Moment;
use crate::project::barrier::Inside;
use crate::project::state::StateDir;
use crate::qemu::Hypervisor;
use crate::qemu::console::{Console, ConsoleState};
use crate::qemu::qmp::{Paused, Qmp, QmpState};

/// The state of a VM that goes over to the next program.
#[derive(Debug, Serialize, Deserialize)]
pub struct MachineState {
    name: String,
    spec: VmSpec,
    #[serde(default)]
    folder: PathBuf,
    #[serde(alias = "accel")]
    hypervisor: Hypervisor,
    started: Moment,
    pid: u32,
    console: ConsoleState,
    log: ConsoleState,
    agent: (Kept, bool),
    monitor: Option<(Kept, QmpState)>,
    state: State,
    cancelled: bool,
    reboots: u32,
    restarts: u32,
    attempt: u32,
    layout: Layout,
    #[serde(default)]
    formats: Vec<Format>,
    placement: Option<VmPlan>,
    threads: Option<Vec<Thread>>,
    ports: Ports,
    devices: Vec<Address>,
    group: Option<PathBuf>,
    /// The CPUs are the VM's own.
    #[serde(default)]
    isolated: bool,
    #[serde(default)]
    interrupts: Interrupts,
}

impl MachineState {
    /// The VM's name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Machine {
    /// Returns whether the VM is between two phases; an upgrade waits for the second.
    pub fn is_changing(&self) -> bool {
        let state = self.lock();
        match state.phase {
            Phase::Booting | Phase::Stopping => true,
            // QEMU has ended, or is about to.
            Phase::Up | Phase::Rebooting | Phase::Failed | Phase::Ended => false,
        }
    }

    /// Stops the monitor until the returned value is dropped.
    pub fn pause(&self) -> Option<Paused<'_>> {
        self.qmp.get().map(Qmp::pause)
    }

    /// Returns the state for the next program. The caller has [paused](Machine::pause) the monitor and closed `BACKGROUND`.
    pub fn hand_over(&self, monitor: Option<&Paused<'_>>, keep: &mut Keep) -> MachineState {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let monitor = monitor.zip(self.qmp.get());
        MachineState {
            name: self.name.clone(),
            spec: self.spec.clone(),
            folder: self.folder.clone(),
            hypervisor: self.hypervisor,
            started: self.started.into(),
            pid: self.pid,
            console: self.console.hand_over(keep),
            log: self.log.hand_over(keep),
            agent: self.agent.hand_over(keep),
            monitor: monitor.map(|(paused, qmp)| (keep.add(qmp.socket()), paused.state())),
            state: self.lock().clone(),
            cancelled: self.cancelled.load(Ordering::Acquire),
            reboots: self.reboots,
            restarts: self.restarts,
            attempt: self.attempt,
            layout: self.layout,
            formats: self.formats.clone(),
            placement: self.placement.clone(),
            threads: self.threads.get().cloned(),
            ports: self.ports.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            devices: held.devices.addresses().to_vec(),
            group: held.group.as_ref().map(|group| group.path().to_owned()),
            isolated: held.partition.is_some(),
            interrupts: held.interrupts.clone(),
        }
    }

    /// Goes on with a VM of the program before; `ended` as for [`Machine::start`].
    ///
    /// # Errors
    /// When a descriptor is not open, or no thread can be had.
    pub fn take_over(
        left: MachineState,
        dir: &StateDir,
        ended: impl FnOnce(&Arc<Machine>, Exit, Inside) + Send + 'static,
    ) -> anyhow::Result<Arc<Machine>> {
        let name = left.name;
        let qemu = match left.state.exit {
            None => {
                let qemu = Guarded::resume(left.pid);
                Some(qemu.with_context(|| format!("process {} of the VM '{name}' is no child", left.pid))?)
            }
            Some(_) => None,
        };
        let process = qemu.as_ref().map_or_else(|| Ok(Handle::gone()), Guarded::handle)?;
        let group = left.group.map(Group::take_over).transpose()?;
        let partition = match group.as_ref().filter(|_| left.isolated) {
            Some(group) => Some(Partition::take_over(&Store::of_user()?, group.path())?),
            None => None,
        };
        let machine = Arc::new(Machine {
            console: Console::take_over(left.console, &dir.console_log(&name))?,
            log: Console::take_over(left.log, &dir.qemu_log(&name))?,
            agent: Agent::take_over(left.agent)?,
            name,
            spec: left.spec,
            folder: left.folder,
            hypervisor: left.hypervisor,
            started: Instant::from(left.started),
            qmp: OnceLock::new(),
            process,
            pid: left.pid,
            state: Mutex::new(left.state),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(left.cancelled),
            reboots: left.reboots,
            restarts: left.restarts,
            attempt: left.attempt,
            layout: left.layout,
            formats: left.formats,
            placement: left.placement,
            threads: left.threads.map(OnceLock::from).unwrap_or_default(),
            ports: Mutex::new(left.ports),
            held: Mutex::new(Held {
                bypass: None,
                devices: Taken::take_over(left.devices),
                group,
                partition,
                interrupts: left.interrupts,
            }),
        });
        if let Some((socket, state)) = left.monitor {
            let qmp = Qmp::resume(UnixStream::from(socket.take()?), state, machine.events())?;
            let _only_one = machine.qmp.set(qmp);
        }
        if let Some(qemu) = qemu {
            machine.watch(qemu, ended)?;
        }
        Ok(machine)
    }

    /// Returns whether the VM's memory still grows.
    pub fn is_growing(&self) -> bool {
        let state = self.lock();
        state.exit.is_none()
            && state.growth.as_ref().is_none_or(|g| !matches!(g.phase, Growth::Complete | Growth::Failed(_)))
    }
}
