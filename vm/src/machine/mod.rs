// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One VM's life: QEMU is started and watched by a thread of its own, the boot is followed by whoever called
//! [`Machine::start`], and its end is told to the supervisor however it comes.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use qapi::qmp;
use serde::{Deserialize, Serialize};

use crate::child::{self, Guarded};
use crate::compose::disks::Format;
use crate::compose::restart::STEADY;
use crate::compose::{Ready, VmSpec, ZoneUse};
use crate::guest::agent::Agent;
use crate::guest::health::Health;
use crate::guest::kit::Boot;
use crate::moment;
use crate::project::barrier::{HOUSEHOLD, Inside};
use crate::project::changes::Kind;
use crate::project::control::{ShareStatus, Stage, VmStatus};
use crate::project::journal;
use crate::project::network::Plug;
use crate::project::state::StateDir;
use crate::project::zones::Invitation;
use crate::qemu::Hypervisor;
use crate::qemu::cmdline::{self, Plan, ZoneDevice};
use crate::qemu::console::Console;
use crate::qemu::qmp::Qmp;
use crate::qemu::version::Qemu;
use cgroup::Group;
use disks::Drive;
use hotplug::Ports;
use placement::Placement;
use tombolo_start::layout::Layout;
use tombolo_start::progress::{Phase as Growth, Progress};
use tombolo_topology::apply::Thread;
use tombolo_topology::plan::VmPlan;

pub mod cgroup;
pub mod disks;
pub mod growth;
pub mod handover;
pub mod hotplug;
pub mod placement;
pub mod port;
pub mod stop;

/// How long QEMU may take to end when told to.
const QUIT: Duration = Duration::from_secs(5);
/// A guest agent that has not answered for so long does not answer.
const SILENT: Duration = Duration::from_secs(5);
/// How long QEMU may take to fill memory that is bound to nodes: a terabyte takes minutes.
const FILLED: Duration = Duration::from_secs(1800);
/// Lines of console and QEMU's log in an error.
const LAST_LINES: usize = 15;

/// What a VM is started from.
#[derive(Debug)]
pub struct Start<'a> {
    pub name: &'a str,
    /// What the compose file says.
    pub spec: &'a VmSpec,
    pub qemu: &'a Qemu,
    /// KVM or TCG.
    pub accel: Hypervisor,
    pub boot: Option<Boot>,
    /// Its zones: name, what for, and invitation.
    pub zones: Vec<(String, ZoneUse, Invitation)>,
    /// The zones of its accelerators.
    pub accelerators: Vec<(String, Invitation)>,
    /// How its memory arrives.
    pub memory: Layout,
    /// Where it lies on the host.
    pub placement: Option<VmPlan>,
    /// Its devices in networks.
    pub nics: Vec<Plug>,
    /// Its disks.
    pub drives: Vec<Drive>,
    /// The volume that cloud-init reads.
    pub seed: Option<OwnedFd>,
    /// The cgroup that limits it.
    pub group: Option<Group>,
    /// Devices of the host that it has.
    pub devices: growth::Taken,
    /// Where its logs go.
    pub dir: &'a StateDir,
    /// The machine that it follows where the guest has rebooted: its consoles go on.
    pub before: Option<&'a Machine>,
    /// How often in a row its policy has started it again, where that is why it follows.
    pub attempt: Option<u32>,
}

/// How a QEMU ended.
#[derive(Clone, Debug)]
pub struct Exit {
    how: String,
    /// The guest switched itself off.
    clean: bool,
}

/// A VM that has been started.
#[derive(Debug)]
pub struct Machine {
    name: String,
    spec: VmSpec,
    accel: Hypervisor,
    started: Instant,
    console: Arc<Console>,
    log: Arc<Console>,
    agent: Agent,
    qmp: OnceLock<Qmp>,
    process: child::Handle,
    pid: u32,
    state: Mutex<State>,
    changed: Condvar,
    cancelled: AtomicBool,
    reboots: u32,
    restarts: u32,
    attempt: u32,
    /// How its memory arrives.
    layout: Layout,
    /// Where it lies on the host.
    placement: Option<VmPlan>,
    /// The threads of its vCPUs, where they are pinned.
    threads: OnceLock<Vec<Thread>>,
    /// Where zones come to it while it runs.
    ports: Mutex<Ports>,
    /// What it has of the host until QEMU has ended.
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    devices: growth::Taken,
    group: Option<Group>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    phase: Phase,
    #[serde(with = "moment")]
    up_since: Option<Instant>,
    agent_open: bool,
    /// The guest asked for a reset: that, too, ends QEMU (-no-reboot).
    reset: bool,
    /// The guest's kernel panicked, which ends QEMU (pvpanic).
    panicked: bool,
    /// The monitor has told all it will.
    monitor_ended: bool,
    /// How QEMU ended.
    exit: Option<String>,
    /// Whether it ended by itself, and if so whether the guest switched itself off.
    ending: Option<bool>,
    /// It has ended, and its policy has not decided yet, or is about to start it again.
    restart_due: bool,
    /// Starts of its policy that have failed since it ended.
    failed_starts: u32,
    /// When its policy starts it again.
    #[serde(with = "moment")]
    restart_at: Option<Instant>,
    /// What its health check says.
    health: Option<Health>,
    /// How long it had been ready when it ended.
    lasted: Duration,
    zones: BTreeMap<String, ZoneUse>,
    timeline: Vec<(String, f64)>,
    /// How far its memory is, where it grows.
    growth: Option<Progress>,
    /// Folders of the host, where its guest was asked.
    shares: Vec<ShareStatus>,
}

/// Where a VM is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// On its way.
    Booting,
    /// Ready.
    Up,
    /// The guest rebooted after it was up; its next QEMU is about to be started.
    Rebooting,
    /// On its way out.
    Stopping,
    /// It never got ready.
    Failed,
    /// QEMU has ended.
    Ended,
}

impl Machine {
    /// Starts QEMU. The VM is not ready yet: see [`Machine::follow`]. `ended` is called once, with how it ended, when QEMU is gone; it calls
    /// [`Machine::set_ended`], and drops what it is given when all that follows from the end has been noted.
    ///
    /// # Errors
    /// When QEMU can't be started.
    pub fn start(
        start: Start<'_>,
        ended: impl FnOnce(&Arc<Machine>, Exit, Inside) + Send + 'static,
    ) -> anyhow::Result<Arc<Machine>> {
        let begun = Instant::now();
        let (monitor, monitor_end) = UnixStream::pair()?;
        let (console, console_end) = UnixStream::pair()?;
        let (agent, agent_end) = UnixStream::pair()?;
        let (log, log_end) = UnixStream::pair()?;
        let mut inherited: Vec<OwnedFd> = Vec::new();
        let mut give = |fd: OwnedFd| {
            let number = fd.as_raw_fd();
            inherited.push(fd);
            number
        };
        let mut used = BTreeMap::new();
        let mut memory = BTreeMap::new();
        let named = start.zones.into_iter().map(|(name, zone_use, invitation)| {
            used.insert(name.clone(), zone_use);
            memory.insert(name.clone(), invitation.read_only);
            (name, invitation)
        });
        // No zone of the compose file has a dot in its name.
        let accelerators = start.accelerators.into_iter().map(|(name, i)| (format!("accel.{name}"), i));
        let zones = named
            .chain(accelerators)
            .map(|(name, invitation)| ZoneDevice {
                name,
                memory: give(invitation.memory),
                size: invitation.size,
                read_only: invitation.read_only,
                doorbell: give(invitation.doorbell.into()),
            })
            .collect();
        let ports = Ports::new(start.name, start.spec.hotplug_ports, memory);
        let mut drives = start.drives;
        drives.extend(start.seed.map(|seed| Drive {
            id: "seed".into(),
            file: format!("/proc/self/fd/{}", give(seed)).into(),
            format: Format::Raw,
            read_only: true,
            snapshot: false,
            serial: None,
        }));
        let plan = Plan {
            drives: &drives,
            name: start.name,
            spec: start.spec,
            qemu: start.qemu,
            accel: start.accel,
            boot: start.boot,
            monitor: give(monitor_end.into()),
            console: give(console_end.into()),
            agent: give(agent_end.into()),
            memory: start.memory,
            zones,
            nics: &start.nics,
            placement: start.placement.as_ref(),
        };
        let mut command = Command::new(&start.qemu.program);
        command.args(cmdline::arguments(&plan)?).arg("-S");
        command.stdin(Stdio::null());
        command.stdout(Stdio::from(OwnedFd::from(log_end.try_clone()?)));
        command.stderr(Stdio::from(OwnedFd::from(log_end)));
        child::tie(&mut command, &inherited);
        let group = start.group;
        if let Some(group) = &group {
            child::enter(&mut command, group.entrance())?;
        }

        let pattern = match &start.spec.ready {
            Ready::Console(regex) => Some(regex_lite::Regex::new(regex)?),
            _ => None,
        };
        let (console, log) = if let Some(before) = start.before {
            before.console.resume(console, pattern)?;
            before.log.resume(log, None)?;
            (before.console.clone(), before.log.clone())
        } else {
            let console = Console::start(console, &start.dir.console_log(start.name), pattern)?;
            (console, Console::start(log, &start.dir.qemu_log(start.name), None)?)
        };

        let qemu = Guarded::spawn(command)?;
        // QEMU has its copies; with these open its end of a socket would never be seen.
        drop(inherited);
        let (process, pid) = (qemu.handle()?, qemu.pid());
        let machine = Arc::new(Machine {
            name: start.name.to_owned(),
            spec: start.spec.clone(),
            accel: start.accel,
            started: begun,
            console,
            log,
            agent: Agent::new(agent),
            qmp: OnceLock::new(),
            process,
            pid,
            state: Mutex::new(State {
                phase: Phase::Booting,
                up_since: None,
                agent_open: false,
                reset: false,
                panicked: false,
                monitor_ended: false,
                exit: None,
                ending: None,
                restart_due: false,
                failed_starts: 0,
                restart_at: None,
                health: None,
                lasted: Duration::ZERO,
                zones: used,
                timeline: Vec::new(),
                growth: None,
                shares: Vec::new(),
            }),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
            reboots: start.before.map_or(0, |b| b.reboots + u32::from(start.attempt.is_none())),
            restarts: start.before.map_or(0, |b| b.restarts + u32::from(start.attempt.is_some())),
            attempt: start.attempt.or(start.before.map(|b| b.attempt)).unwrap_or(0),
            layout: start.memory,
            placement: start.placement,
            threads: OnceLock::new(),
            ports: Mutex::new(ports),
            held: Mutex::new(Held { devices: start.devices, group }),
        });
        machine.mark("qemu started");
        machine.tell(&Phase::Booting, start.accel.name());
        machine.watch(qemu, ended)?;
        // QEMU fills memory that is bound to nodes before it answers.
        let limit = if machine.placement.is_some() { FILLED } else { tombolo_qemu::qmp::REPLY };
        match Qmp::connect_within(monitor, limit, machine.events()) {
            Ok(qmp) => {
                machine.mark("monitor answers");
                let _ = machine.qmp.set(qmp);
                Ok(machine)
            }
            Err(e) => {
                machine.process.kill();
                machine.wait_ended(QUIT);
                Err(machine.failure(&e.to_string()))
            }
        }
    }

    /// Waits for QEMU's end on a thread of its own.
    fn watch(
        self: &Arc<Self>,
        mut qemu: Guarded,
        ended: impl FnOnce(&Arc<Machine>, Exit, Inside) + Send + 'static,
    ) -> std::io::Result<()> {
        let machine = self.clone();
        let watch = move || {
            qemu.wait_end();
            machine.await_last_words();
            let inside = HOUSEHOLD.enter("the end of a VM");
            let mut exit = match qemu.wait() {
                Ok(status) => describe(status),
                Err(e) => Exit { how: format!("its end is unknown: {e}"), clean: false },
            };
            let held = std::mem::take(&mut *machine.held.lock().unwrap_or_else(PoisonError::into_inner));
            if held.group.as_ref().is_some_and(Group::ran_out_of_memory) {
                exit.how.push_str(", for want of memory: raise memory_limit");
            }
            // A QEMU that follows takes its own.
            drop(held);
            ended(&machine, exit, inside);
        };
        std::thread::Builder::new().name(format!("vm-{}", self.name)).spawn(watch).map(drop)
    }

    /// What hears the monitor's events.
    fn events(self: &Arc<Self>) -> impl FnMut(&str, &serde_json::Value) + Send + use<> {
        let weak = Arc::downgrade(self);
        move |event, data| {
            if let Some(machine) = weak.upgrade() {
                machine.event(event, data);
            }
        }
    }

    /// The VM's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the compose file said when it was started.
    pub fn spec(&self) -> &VmSpec {
        &self.spec
    }

    /// KVM or TCG.
    pub fn accel(&self) -> Hypervisor {
        self.accel
    }

    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Its serial console.
    pub fn console(&self) -> &Console {
        &self.console
    }

    pub fn phase(&self) -> Phase {
        self.lock().phase.clone()
    }

    /// The monitor.
    ///
    /// # Errors
    /// When QEMU is not there yet.
    pub fn qmp(&self) -> anyhow::Result<&Qmp> {
        self.qmp.get().with_context(|| format!("the VM '{}' has no monitor yet", self.name))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// QEMU's process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How its memory arrives.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Where it lies on the host.
    pub fn placement(&self) -> Option<Placement> {
        let threads = self.threads.get().cloned().unwrap_or_default();
        Some(Placement { plan: self.placement.clone()?, threads })
    }

    /// Pins the threads of a VM that lies on a part of the host.
    fn pin(&self) -> anyhow::Result<()> {
        if let Some(plan) = &self.placement {
            let threads = placement::pin(self.pid, self.qmp()?, plan)?;
            // It is pinned once, before its guest runs.
            let _ = self.threads.set(threads);
            self.mark("threads pinned");
        }
        Ok(())
    }

    /// Keeps how far its memory is.
    pub fn set_growth(&self, progress: Progress) {
        self.lock().growth = Some(progress);
    }

    /// Keeps what its guest made of the host's folders.
    pub fn set_shares(&self, shares: Vec<ShareStatus>) {
        self.lock().shares = shares;
    }

    /// Whether QEMU has ended.
    pub fn has_ended(&self) -> bool {
        self.lock().exit.is_some()
    }

    /// Waits for QEMU's end, at most so long; whether it came.
    pub fn wait_end_for(&self, longest: Duration) -> bool {
        self.wait_ended(longest)
    }

    /// Notes that the VM has come to something now.
    pub fn mark(&self, what: &str) {
        let at = self.started.elapsed().as_secs_f64();
        self.lock().timeline.push((what.to_owned(), at));
    }

    /// Waits for what the monitor says last, which tells a reboot from a shutdown.
    fn await_last_words(&self) {
        drop(self.changed.wait_timeout_while(self.lock(), QUIT, |s| !s.monitor_ended));
    }

    /// QEMU is gone, and whatever it had is free again. The phase that follows is returned: [`Phase::Rebooting`] is for the caller to
    /// go on with. The caller then closes the [consoles](Machine::close_consoles).
    pub fn set_ended(&self, exit: Exit) -> Phase {
        let mut state = self.lock();
        state.exit = Some(if state.panicked {
            "the guest's kernel panicked".into()
        } else if state.reset {
            "the guest reset itself".into()
        } else {
            exit.how
        });
        let wanted = state.phase == Phase::Stopping || self.cancelled.load(Ordering::Acquire);
        state.ending = (!wanted).then_some(exit.clean && !state.panicked && !state.reset);
        state.lasted = state.up_since.map_or(Duration::ZERO, |since| since.elapsed());
        state.phase = match state.phase {
            Phase::Failed => Phase::Failed,
            Phase::Up if state.reset => Phase::Rebooting,
            _ => Phase::Ended,
        };
        let phase = state.phase.clone();
        state.restart_due = phase != Phase::Rebooting;
        self.tell(&phase, state.exit.as_deref().unwrap_or_default());
        drop(state);
        self.changed.notify_all();
        phase
    }

    /// Waits for the last words of the consoles of a VM that has ended, and sends those away who watch where it is over.
    pub fn close_consoles(&self) {
        self.console.wait_end(QUIT);
        self.log.wait_end(QUIT);
        if self.phase() != Phase::Rebooting {
            self.console.close();
        }
    }

    /// Whether it ended by itself, and if so whether the guest switched itself off; `None`: somebody ended it, or it has not ended.
    pub fn ending(&self) -> Option<bool> {
        self.lock().ending
    }

    /// How often in a row its policy has started it again; one that was up for long begins anew.
    pub fn attempts(&self) -> u32 {
        let state = self.lock();
        state.failed_starts + if state.lasted >= STEADY { 0 } else { self.attempt }
    }

    /// Notes when its policy starts it again.
    pub fn set_restart_in(&self, pause: Duration) {
        self.lock().restart_at = Some(Instant::now() + pause);
    }

    /// A start by its policy has failed.
    pub fn count_failed_start(&self) {
        self.lock().failed_starts += 1;
    }

    /// Its policy does not start it again.
    pub fn stay_ended(&self) {
        let mut state = self.lock();
        (state.restart_due, state.restart_at) = (false, None);
    }

    /// Whether it has ended and its policy is about to decide, or to start it again.
    pub fn is_restart_due(&self) -> bool {
        self.lock().restart_due
    }

    /// It can't be brought to run: kills it, and says why to whoever asks.
    pub fn fail(&self, why: &str) {
        self.process.kill();
        self.wait_ended(QUIT);
        let mut state = self.lock();
        (state.phase, state.exit) = (Phase::Failed, Some(why.to_owned()));
        self.tell(&Phase::Failed, why);
        drop(state);
        self.console.close();
    }

    fn event(&self, event: &str, data: &serde_json::Value) {
        let mut state = self.lock();
        match event {
            "VSERPORT_CHANGE" if data["id"] == "agent" => state.agent_open = data["open"] == true,
            "SHUTDOWN" if data["reason"] == "guest-reset" => state.reset = true,
            "SHUTDOWN" if data["reason"] == "guest-panic" => state.panicked = true,
            "" => state.monitor_ended = true,
            _ => return,
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Lets the guest run and waits until it is ready, as the compose file defines it.
    ///
    /// # Errors
    /// With the console's last lines. QEMU is gone then.
    pub fn follow(&self, report: &dyn Fn(Stage, &str)) -> anyhow::Result<()> {
        report(Stage::Booting, self.accel.name());
        let result = self.boot();
        if let Err(e) = &result {
            self.lock().phase = Phase::Failed;
            self.tell(&Phase::Failed, e.to_string().lines().next().unwrap_or_default());
            self.process.kill();
            self.wait_ended(QUIT);
        }
        result
    }

    fn boot(&self) -> anyhow::Result<()> {
        self.pin().map_err(|e| self.failure(&format!("{e:#}")))?;
        self.qmp()?.execute(qmp::cont {}).map_err(|e| self.failure(&e.to_string()))?;
        self.mark("guest runs");
        let limit = Duration::from_secs(self.spec.ready_timeout.into());
        let deadline = self.started + limit;
        match &self.spec.ready {
            Ready::Running => {}
            Ready::Console(pattern) => {
                let matched = self.console.wait_match(limit);
                self.check_alive()?;
                if !matched {
                    let what =
                        format!("no line of its console matched '{pattern}' within {} s", limit.as_secs());
                    return Err(self.failure(&what));
                }
            }
            Ready::Agent => {
                let silent = |e: &str| {
                    self.failure(&format!(
                        "its guest agent did not answer within {} s{e}; if the image has no qemu-guest-agent, set ready = \"running\" or \"console:REGEX\"",
                        limit.as_secs()
                    ))
                };
                let left = deadline.saturating_duration_since(Instant::now());
                let (state, _) = self
                    .changed
                    .wait_timeout_while(self.lock(), left, |s| !s.agent_open && s.exit.is_none())
                    .unwrap_or_else(PoisonError::into_inner);
                let open = state.agent_open;
                drop(state);
                self.check_alive()?;
                if !open {
                    return Err(silent(""));
                }
                let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
                if let Err(e) = self.agent.ping(left) {
                    self.check_alive()?;
                    return Err(silent(&format!(" ({e})")));
                }
            }
        }
        if let Some(first) = self.console.first_output() {
            let at = first.saturating_duration_since(self.started).as_secs_f64();
            self.lock().timeline.push(("first console output".into(), at));
        }
        self.mark("ready");
        Ok(())
    }

    /// Adds the phase that it has come to to the journal.
    fn tell(&self, phase: &Phase, detail: &str) {
        let state = match phase {
            Phase::Booting => "booting",
            Phase::Up => "up",
            Phase::Rebooting => "rebooting",
            Phase::Stopping => "stopping",
            Phase::Failed => "failed",
            Phase::Ended => "ended",
        };
        journal::record(Kind::Vm, &self.name, state, detail);
    }

    /// The VM counts as up from here.
    pub fn set_up(&self) {
        let mut state = self.lock();
        if state.phase == Phase::Booting {
            state.phase = Phase::Up;
            state.up_since = Some(Instant::now());
            self.tell(&Phase::Up, "");
        }
    }

    /// Whether it is up.
    pub fn is_up(&self) -> bool {
        self.lock().phase == Phase::Up
    }

    /// Keeps what its health check says.
    pub fn set_health(&self, health: Health) {
        let before = self.lock().health.replace(health);
        if before != Some(health) {
            journal::record(Kind::Vm, &self.name, &health.to_string(), "");
        }
    }

    /// What its health check says, where it has one.
    pub fn health(&self) -> Option<Health> {
        self.lock().health
    }

    /// How long it has been ready.
    pub fn up_for(&self) -> Option<Duration> {
        self.lock().up_since.map(|since| since.elapsed())
    }

    fn check_alive(&self) -> anyhow::Result<()> {
        if self.cancelled.load(Ordering::Acquire) {
            anyhow::bail!("cancelled");
        }
        let exit = self.lock().exit.clone();
        match exit {
            None => Ok(()),
            Some(how) => {
                self.console.wait_end(QUIT);
                self.log.wait_end(QUIT);
                Err(self.failure(&format!("it ended while it booted ({how})")))
            }
        }
    }

    /// An error that carries the last lines of the console and of QEMU's own log.
    fn failure(&self, what: &str) -> anyhow::Error {
        let explained = disks::explain(&self.log.last_lines(LAST_LINES));
        let what = explained.as_deref().unwrap_or(what);
        let mut text = format!("the VM '{}' failed: {what}", self.name);
        for (title, lines) in [
            ("QEMU said", self.log.last_lines(LAST_LINES)),
            ("last lines of its console", self.console.last_lines(LAST_LINES)),
        ] {
            if !lines.is_empty() {
                text.push_str(&format!("\n  {title}:"));
                for line in lines {
                    text.push_str("\n  | ");
                    text.push_str(&line);
                }
            }
        }
        anyhow::anyhow!(text)
    }

    /// Waits for QEMU's end: whether it came within `limit`.
    fn wait_ended(&self, limit: Duration) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), limit, |s| s.exit.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        state.exit.is_some()
    }

    /// Kills it now; a boot that is followed ends with 'cancelled'.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.process.kill();
    }

    /// Adds a zone's devices to the running VM. After [`hotplug::Failure::Open`], too, it is a member.
    ///
    /// # Errors
    /// When no port is free or QEMU refuses or does not answer.
    pub fn plug(
        &self,
        zone: &str,
        zone_use: &ZoneUse,
        invitation: &Invitation,
    ) -> Result<(), hotplug::Failure> {
        let qmp = self.qmp().map_err(|e| hotplug::Failure::Undone(e.to_string()))?;
        let mut ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        let plugged = ports.plug(qmp, zone, invitation);
        if !matches!(plugged, Err(hotplug::Failure::Undone(_))) {
            self.lock().zones.insert(zone.to_owned(), zone_use.clone());
        }
        plugged
    }

    /// Adds the devices of a zone that no user of the VM names: an accelerator's.
    ///
    /// # Errors
    /// As [`Machine::plug`].
    pub fn plug_device(&self, name: &str, invitation: &Invitation) -> Result<(), hotplug::Failure> {
        let qmp = self.qmp().map_err(|e| hotplug::Failure::Undone(e.to_string()))?;
        self.ports.lock().unwrap_or_else(PoisonError::into_inner).plug(qmp, name, invitation)
    }

    /// Zones it is a member of, those attached later included.
    pub fn zones(&self) -> BTreeMap<String, ZoneUse> {
        self.lock().zones.clone()
    }

    /// It is no longer a member of this zone.
    pub fn forget_zone(&self, zone: &str) {
        self.lock().zones.remove(zone);
    }

    /// Who does not answer, as far as that is known without asking.
    fn trouble(&self) -> Option<String> {
        let agent = || {
            let silent = self.agent.silent_for().filter(|silent| *silent > SILENT)?;
            Some(format!("its guest agent has not answered for {} s", silent.as_secs()))
        };
        child::stopped(self.pid).map(|text| format!("QEMU {text}")).or_else(agent)
    }

    /// For `ps`.
    pub fn status(&self) -> VmStatus {
        let state = self.lock();
        let how = state.exit.as_deref().unwrap_or("QEMU still runs");
        let text = match state.phase {
            Phase::Booting => "booting".to_owned(),
            Phase::Rebooting => "rebooting".to_owned(),
            // A VM that lacks memory must not look complete.
            Phase::Up => match state.growth.as_ref().filter(|g| g.phase != Growth::Complete) {
                Some(growth) => format!("up, {}", growth.line()),
                None => "up".to_owned(),
            },
            Phase::Stopping => "stopping".to_owned(),
            Phase::Failed => format!("failed: {how}"),
            Phase::Ended => format!("ended: {how}"),
        };
        let text = match state.restart_at {
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now()).as_secs_f64().ceil();
                format!("restarting in {left} s ({text})")
            }
            None => text,
        };
        VmStatus {
            name: self.name.clone(),
            state: text,
            pid: state.exit.is_none().then_some(self.pid),
            accel: self.accel,
            cpus: self.placement.as_ref().map_or(self.spec.cpus, VmPlan::cpus),
            memory: self.spec.memory.0,
            zones: state.zones.keys().cloned().collect(),
            uptime: self.started.elapsed().as_secs_f64(),
            reboots: self.reboots,
            restarts: self.restarts,
            health: state.health.filter(|_| state.phase == Phase::Up),
            trouble: self.trouble().filter(|_| state.exit.is_none()),
            timeline: state.timeline.clone(),
            shares: state.shares.clone(),
            growth: state.growth.clone(),
            placement: self.placement(),
        }
    }
}

fn describe(status: std::process::ExitStatus) -> Exit {
    use std::os::unix::process::ExitStatusExt;
    let how = match (status.code(), status.signal()) {
        (Some(0), _) => "the guest switched itself off".into(),
        (Some(code), _) => format!("QEMU ended with code {code}"),
        (None, Some(signal)) => format!("QEMU was killed by signal {signal}"),
        (None, None) => "QEMU ended".into(),
    };
    Exit { how, clean: status.success() }
}
