// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM that goes on in the next program of this process: QEMU, its sockets, and what is known of it.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Instant;

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
use crate::child::leash::Leash;
use crate::child::{Guarded, Handle};
use crate::compose::VmSpec;
use crate::compose::disks::Format;
use crate::guest::agent::Agent;
use crate::moment::Moment;
use crate::project::barrier::Inside;
use crate::project::losses::Losses;
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
    agent: (Option<Kept>, bool),
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
    #[serde(default)]
    leash: Option<Kept>,
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
    /// Returns whether the VM boots; an upgrade waits for the end of that. One that is stopping while no command stops VMs is stuck: its
    /// process does not die.
    pub fn is_booting(&self) -> bool {
        self.lock().phase == Phase::Booting
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
            leash: held.leash.as_ref().map(|leash| keep.add(leash)),
            isolated: held.partition.is_some(),
            interrupts: held.interrupts.clone(),
        }
    }

    /// Goes on with a VM of the program before; `ended` as for [`Machine::start`]. What can't be taken over is noted in `losses`: the VM runs on
    /// without its console, its agent, its monitor or the care of its limits. A VM whose process can't be had ends.
    pub fn take_over(
        left: MachineState,
        dir: &StateDir,
        ended: impl FnOnce(&Arc<Machine>, Exit, Inside) + Send + 'static,
        losses: &mut Losses,
    ) -> Arc<Machine> {
        let name = left.name;
        let (qemu, process) = process_of(left.pid, left.state.exit.is_some(), &name, losses);
        let held = Held {
            devices: Taken::take_over(left.devices),
            interrupts: left.interrupts,
            // One that is not open has let its QEMU go, or has ended it.
            leash: left.leash.and_then(|kept| kept.take().ok()).map(Leash::resume),
            ..limits(&name, left.group, left.isolated, losses)
        };
        let mut console = |what, (console, taken): (Arc<Console>, anyhow::Result<()>)| {
            if let Err(e) = taken {
                losses.of_vm(&name, what, format!("{e:#}"));
            }
            console
        };
        let (log, own) = (dir.qemu_log(&name), dir.console_log(&name));
        let (log, own) = (Console::take_over(left.log, &log), Console::take_over(left.console, &own));
        let (log, console) = (console("the log of its QEMU", log), console("its console", own));
        let agent = Agent::take_over(left.agent).unwrap_or_else(|e| {
            losses.of_vm(&name, "its guest agent", e);
            Agent::lost()
        });
        let machine = Arc::new(Machine {
            console,
            log,
            agent,
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
            // A VM that boots is not handed over.
            again: false,
            reboots: left.reboots,
            restarts: left.restarts,
            attempt: left.attempt,
            layout: left.layout,
            formats: left.formats,
            placement: left.placement,
            threads: left.threads.map(OnceLock::from).unwrap_or_default(),
            isolated: held.partition.as_ref().map(|own| OnceLock::from(own.path())).unwrap_or_default(),
            ports: Mutex::new(left.ports),
            held: Mutex::new(held),
        });
        if let Some((socket, state)) = left.monitor {
            machine.resume_monitor(socket, state, losses);
        }
        if let Some(qemu) = qemu {
            machine.watch_on(qemu, ended, losses);
        }
        machine
    }

    fn resume_monitor(self: &Arc<Self>, socket: Kept, state: QmpState, losses: &mut Losses) {
        let socket = socket.take().map(UnixStream::from).map_err(anyhow::Error::from);
        match socket.and_then(|socket| Ok(Qmp::resume(socket, state, self.events())?)) {
            Ok(qmp) => drop(self.qmp.set(qmp)),
            Err(e) => {
                losses.of_vm(&self.name, "its monitor, so that a reboot would end it", format!("{e:#}"));
                // No event follows.
                self.lock().monitor_ended = true;
            }
        }
    }

    /// Waits for the end of a QEMU of the program before, or ends the VM.
    fn watch_on(
        self: &Arc<Self>,
        qemu: Result<Guarded, String>,
        ended: impl FnOnce(&Arc<Machine>, Exit, Inside) + Send + 'static,
        losses: &mut Losses,
    ) {
        // A thread that can't be had has dropped the process, which kills it.
        if let Err(e) = self.watch(qemu, ended) {
            let how = format!("it could not be watched any more: {e}");
            losses.note_for(&self.name, format!("has ended, as {how}; to start it again: tombolo up"));
            let _no_thread_follows_up = self.set_ended(Exit { how, clean: false });
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

/// The process of a VM that runs, or why it is lost; `None`: it had ended before.
fn process_of(
    pid: u32,
    has_ended: bool,
    vm: &str,
    losses: &mut Losses,
) -> (Option<Result<Guarded, String>>, Handle) {
    if has_ended {
        return (None, Handle::gone());
    }
    match Guarded::resume(pid).and_then(|qemu| Ok((qemu.handle()?, qemu))) {
        Ok((handle, qemu)) => (Some(Ok(qemu)), handle),
        Err(e) => {
            let how = format!("its process {pid} could not be taken over: {e}");
            losses.note_for(vm, format!("has ended: {how}; to start it again: tombolo up"));
            (Some(Err(how)), Handle::gone())
        }
    }
}

/// The cgroup of a VM, and its part of the host's CPUs. The kernel keeps to both without the supervisor, which gives them back.
fn limits(vm: &str, group: Option<PathBuf>, isolated: bool, losses: &mut Losses) -> Held {
    let mut taken = |group: anyhow::Result<Group>| match group {
        Ok(group) => Some(group),
        Err(e) => {
            losses.of_vm(vm, "the care of its cgroup, which stays when it ends", format!("{e:#}"));
            None
        }
    };
    let group = group.and_then(|path| taken(Group::take_over(path)));
    let partition = group.as_ref().filter(|_| isolated).and_then(|group| {
        let partition = Store::of_user().and_then(|store| Partition::take_over(&store, group.path()));
        partition
            .inspect_err(|e| {
                losses.of_vm(
                    vm,
                    "the care of its own CPUs, which 'tombolo clean' gives back",
                    format!("{e:#}"),
                );
            })
            .ok()
    });
    Held { group, partition, ..Held::default() }
}
