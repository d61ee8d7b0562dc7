// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The life of one VM.
//!
//! [`Machine::start`] starts QEMU and a thread that waits for its end. The caller then follows the boot with [`Machine::follow`]. The
//! thread tells the supervisor of the end, whatever its cause.
//!
//! - `launch`: the start of QEMU, and the thread that waits for its end.
//! - `boot`: from the guest's first instruction until the VM is ready.
//! - `state`: phases, and the events that change them; `status`: the VM as `tombolo ps` shows it.
//! - [`stop`]: the steps of a stop and their times.
//! - [`hotplug`]: devices of zones that come to a running VM; [`port`]: virtio-serial ports.
//! - [`growth`]: passed-through devices, and memory that grows; [`placement`]: the part of the host that a VM lies on.
//! - [`bypass`]: devices whose DMA is not translated.
//! - [`disks`], [`cgroup`]: overlays of disks, and limits; [`partition`]: CPUs that are the VM's own.
//! - [`orphans`]: what dead VMs have left.
//! - [`adopt`]: a VM whose supervisor has ended goes on under the next one.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use anyhow::Context;
use tombolo_start::layout::Layout;
use tombolo_topology::apply::Thread;
use tombolo_topology::interrupts::Interrupts;
use tombolo_topology::plan::VmPlan;

use crate::child;
use crate::compose::disks::Format;
use crate::compose::{VmSpec, ZoneUse};
use crate::guest::agent::Agent;
use crate::guest::kit::Boot;
use crate::project::network::Nic;
use crate::project::state::StateDir;
use crate::project::zones::Invitation;
use crate::qemu::Hypervisor;
use crate::qemu::console::Console;
use crate::qemu::qmp::Qmp;
use crate::qemu::version::Qemu;
use crate::shim::Shim;
use bypass::Bypass;
use cgroup::Group;
use disks::Drive;
use hotplug::Ports;
use partition::Partition;
use placement::Placement;
use state::State;

pub mod adopt;
mod boot;
pub mod bypass;
pub mod cgroup;
pub mod disks;
pub mod growth;
pub mod hotplug;
mod launch;
pub mod orphans;
pub mod partition;
pub mod placement;
pub mod port;
mod stall;
mod state;
mod status;
pub mod stop;

pub use state::{Exit, Phase, Sequel};

/// Time for QEMU to end after it was told to.
const QUIT: Duration = Duration::from_secs(5);

/// Everything that a VM is started from.
#[derive(Debug)]
pub struct Start<'a> {
    pub name: &'a str,
    /// The VM's table of the compose file.
    pub spec: &'a VmSpec,
    /// The compose file's folder, in which the VM has its files.
    pub folder: PathBuf,
    pub qemu: &'a Qemu,
    pub hypervisor: Hypervisor,
    /// Kernel and initramfs; `None` boots the disk.
    pub boot: Option<Boot>,
    /// Zones of the compose file, by name.
    pub zones: Vec<(String, ZoneUse, Invitation)>,
    /// Zones through which the VM calls accelerators, by the accelerator's name.
    pub accelerators: Vec<(String, Invitation)>,
    pub memory: Layout,
    /// The part of the host that the VM lies on; `None`: the kernel decides.
    pub placement: Option<VmPlan>,
    pub nics: Vec<Nic>,
    pub drives: Vec<Drive>,
    /// The volume that cloud-init reads.
    pub seed: Option<OwnedFd>,
    /// The cgroup with the VM's limits.
    pub group: Option<Group>,
    /// The host's devices that are passed through.
    pub devices: growth::Taken,
    /// The project's folder, for logs.
    pub dir: &'a StateDir,
    /// The VM's process, which has no child.
    pub shim: Arc<Shim>,
    /// The machine of the same VM that ended.
    pub before: Option<&'a Machine>,
    /// Starts in a row by the restart policy, if that policy starts the VM.
    pub attempt: Option<u32>,
    /// No command has asked for the start.
    pub again: bool,
}

/// A VM that has been started.
#[derive(Debug)]
pub struct Machine {
    name: String,
    spec: VmSpec,
    folder: PathBuf,
    hypervisor: Hypervisor,
    started: Instant,
    /// The process whose child QEMU is.
    shim: Arc<Shim>,
    console: Arc<Console>,
    /// The output of QEMU itself.
    log: Arc<Console>,
    agent: Agent,
    qmp: OnceLock<Qmp>,
    process: child::Handle,
    pid: u32,
    state: Mutex<State>,
    changed: Condvar,
    cancelled: AtomicBool,
    /// It has followed another machine of the same VM; see [`Machine::starts_by_itself`].
    again: bool,
    reboots: u32,
    restarts: u32,
    attempt: u32,
    layout: Layout,
    /// Of the images of its disks, in the guest's order.
    formats: Vec<Format>,
    placement: Option<VmPlan>,
    /// The threads of its vCPUs, if they are pinned.
    threads: OnceLock<Vec<Thread>>,
    /// The cgroup of its CPUs, if they are its own.
    isolated: OnceLock<PathBuf>,
    /// PCI Express ports for zones that are attached later.
    ports: Mutex<Ports>,
    /// The ports that an earlier supervisor has left are removed before the first one is added.
    old_ports: Once,
    /// It is locked while the host gives or takes something, which may take long: `ps` does without. A thread that has it may lock `state`; not the other way
    /// round.
    held: Mutex<Held>,
}

/// Resources of the host that are given back when QEMU has ended.
#[derive(Debug, Default)]
struct Held {
    /// They are being given back: nothing is added.
    ended: bool,
    /// Ends before the devices are given back.
    bypass: Option<Bypass>,
    devices: growth::Taken,
    group: Option<Group>,
    /// Below the cgroup.
    partition: Option<Partition>,
    /// Of the devices.
    interrupts: Interrupts,
}

impl Machine {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The VM's table of the compose file, as it was when the VM was started.
    pub fn spec(&self) -> &VmSpec {
        &self.spec
    }

    /// The path of the compose file's folder when the VM was started.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The formats of its disks' images, in the guest's order.
    pub fn formats(&self) -> &[Format] {
        &self.formats
    }

    pub fn hypervisor(&self) -> Hypervisor {
        self.hypervisor
    }

    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// The VM's process.
    pub fn shim(&self) -> &Arc<Shim> {
        &self.shim
    }

    /// The connection to the QMP monitor of the machine's QEMU.
    ///
    /// # Errors
    /// QEMU has not answered yet.
    pub fn qmp(&self) -> anyhow::Result<&Qmp> {
        self.qmp.get().with_context(|| format!("the VM '{}' has no monitor yet", self.name))
    }

    /// QEMU's process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The parts of memory that are there at the start and that grow.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The part of the host that the VM lies on, with its pinned threads.
    pub fn placement(&self) -> Option<Placement> {
        let threads = self.threads.get().cloned().unwrap_or_default();
        let plan = self.placement.clone()?;
        let partition = self.isolated.get().filter(|_| !self.has_ended()).cloned();
        let dedicated = placement::dedicated(&plan, &self.spec, self.hypervisor);
        Some(Placement { plan, threads, partition, dedicated })
    }

    /// The part of the host that the VM was planned for.
    pub fn plan(&self) -> Option<&VmPlan> {
        self.placement.as_ref()
    }

    /// Gives the interrupts that its devices have now to their CPUs; called once a second.
    pub fn tend_interrupts(&self) {
        let Some(plan) = self.placement.as_ref().filter(|_| !self.has_ended()) else { return };
        let mut held = match self.held.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            // Its CPUs are being isolated, or it ends.
            Err(TryLockError::WouldBlock) => return,
        };
        for root in plan.roots.iter().filter(|root| !root.interrupts.is_empty()) {
            for device in &root.devices {
                for refused in held.interrupts.place(Path::new("/"), &device.address, &root.interrupts) {
                    crate::say!("the VM '{}': {refused}", self.name);
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for QEMU's end for at most `limit`. Returns whether QEMU has ended.
    pub fn wait_end(&self, limit: Duration) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), limit, |s| s.exit.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        state.exit.is_some()
    }

    /// Kills QEMU. A boot that is followed fails with 'cancelled'.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.process.kill();
        self.changed.notify_all();
    }
}
