// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The start of a VM's QEMU, and the thread that waits for its end.
//!
//! QEMU inherits all its sockets and the memory of its zones as descriptors, which its command line names by number. None has a name in
//! the file system.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::bypass::{Bypass, ForQemu, Prepared};
use super::cgroup::Group;
use super::disks::Drive;
use super::hotplug::Ports;
use super::partition;
use super::state::State;
use super::{Exit, Held, Machine, Phase, QUIT, Start};
use crate::child::Handle;
use crate::compose::Ready;
use crate::compose::disks::Format;
use crate::guest::agent::Agent;
use crate::project::zones::Invitation;
use crate::qemu::cmdline::{self, Plan, ZoneDevice};
use crate::qemu::console::Console;
use crate::qemu::qmp::{self, Qmp};
use crate::shim::handle::{Inherited, Started};
use crate::shim::{Order, Place, Stream};

/// Time for QEMU to fill memory that is bound to nodes: a terabyte takes minutes.
const FILL: Duration = Duration::from_secs(1800);

/// One side of the sockets of a QEMU. The shim has the other side of the console and of the log; it keeps a copy of the others for the next supervisor.
struct Sockets {
    monitor: UnixStream,
    console: UnixStream,
    agent: UnixStream,
    /// QEMU's standard output and standard error.
    log: UnixStream,
}

impl Sockets {
    /// Returns this process' side and QEMU's.
    fn pairs() -> io::Result<(Sockets, Sockets)> {
        let (monitor, qemus_monitor) = UnixStream::pair()?;
        qmp::ask_for_sender(&monitor)?;
        let (console, qemus_console) = UnixStream::pair()?;
        let (agent, qemus_agent) = UnixStream::pair()?;
        let (log, qemus_log) = UnixStream::pair()?;
        let qemus =
            Sockets { monitor: qemus_monitor, console: qemus_console, agent: qemus_agent, log: qemus_log };
        Ok((Sockets { monitor, console, agent, log }, qemus))
    }
}

/// The devices of the VM's zones and accelerators.
fn zone_devices(start: &mut Start<'_>, inherited: &mut Inherited) -> Vec<ZoneDevice> {
    let zones = mem::take(&mut start.zones).into_iter().map(|(name, _, invitation)| (name, invitation));
    // No zone of the compose file has a dot in its name.
    let accelerators =
        mem::take(&mut start.accelerators).into_iter().map(|(name, i)| (format!("accel.{name}"), i));
    zones
        .chain(accelerators)
        .map(|(name, Invitation { uuid, memory, size, read_only, doorbell, liveness })| {
            // QEMU only holds it.
            if let Some(held) = liveness {
                inherited.add(held);
            }
            let (memory, doorbell) = (inherited.add(memory), inherited.add(doorbell));
            ZoneDevice { name, uuid, memory, size, read_only, doorbell }
        })
        .collect()
}

/// The drive of the volume that cloud-init reads.
fn seed_drive(seed: OwnedFd, inherited: &mut Inherited) -> Drive {
    Drive {
        id: "seed".into(),
        file: format!("/proc/self/fd/{}", inherited.add(seed)).into(),
        format: Format::Raw,
        image: Format::Raw,
        read_only: true,
        snapshot: false,
        serial: None,
    }
}

/// QEMU's side of a bypass: the port's number, and the session, which QEMU only holds.
fn bypass_port(bypass: ForQemu, inherited: &mut Inherited) -> RawFd {
    inherited.add(bypass.session);
    inherited.add(bypass.port)
}

/// The console and QEMU's log.
fn consoles(start: &Start<'_>) -> anyhow::Result<(Arc<Console>, Arc<Console>)> {
    let pattern = match &start.spec.ready {
        Ready::Console(regex) => Some(regex_lite::Regex::new(regex)?),
        _ => None,
    };
    let console = Console::start(&start.shim, Stream::Console, pattern)?;
    Ok((console, Console::start(&start.shim, Stream::Log, None)?))
}

/// What the shim is to start. It does not let the guest run yet (`-S`).
fn order(
    start: &mut Start<'_>,
    qemus: Sockets,
    bypass: Option<ForQemu>,
    inherited: &mut Inherited,
) -> anyhow::Result<Order> {
    let zones = zone_devices(start, inherited);
    let mut drives = mem::take(&mut start.drives);
    drives.extend(start.seed.take().map(|seed| seed_drive(seed, inherited)));
    let plan = Plan {
        drives: &drives,
        name: start.name,
        spec: start.spec,
        qemu: start.qemu,
        hypervisor: start.hypervisor,
        boot: start.boot.take(),
        monitor: inherited.add(qemus.monitor),
        console: inherited.add(qemus.console),
        agent: inherited.add(qemus.agent),
        memory: start.memory,
        zones,
        nics: &start.nics,
        placement: start.placement.as_ref(),
        bypass: bypass.map(|bypass| bypass_port(bypass, inherited)),
    };
    let arguments = cmdline::arguments(&plan)?.into_iter().map(OsString::into_string);
    let mut arguments = arguments
        .collect::<Result<Vec<_>, _>>()
        .map_err(|text| anyhow::anyhow!("{} is not UTF-8", text.to_string_lossy()))?;
    arguments.push("-S".into());
    Ok(Order { program: Some(start.qemu.program.clone()), arguments, shielded: true, ..Order::default() })
}

/// Starts QEMU as the child of the VM's shim.
fn run(
    start: &Start<'_>,
    mut order: Order,
    own: &Sockets,
    log: &UnixStream,
    inherited: &Inherited,
) -> anyhow::Result<Started> {
    let streams = [
        (Stream::Console, start.dir.console_log(start.name), &own.console),
        (Stream::Log, start.dir.qemu_log(start.name), &own.log),
    ];
    let streams =
        streams.into_iter().map(|(stream, log, socket)| (Place::Stream(stream, log), socket.as_fd()));
    let group = start.group.iter().map(|group| (Place::Group, group.procs().as_fd()));
    let output = [1, 2].map(|number| (Place::Child(number), log.as_fd()));
    let fds = inherited.all().map(|(fd, number)| (Place::Child(number), fd));
    let (places, fds): (Vec<Place>, Vec<BorrowedFd<'_>>) =
        streams.chain(group).chain(output).chain(fds).unzip();
    order.places = places;
    start.shim.run(order, &fds)
}

impl Machine {
    /// Starts QEMU and waits until its monitor answers. The guest does not run yet: see [`Machine::follow`]. `registered` gets the machine
    /// before that wait, which [`Machine::cancel`] ends.
    ///
    /// When QEMU has ended, a thread of its own calls `ended` once. `ended` must call [`Machine::set_ended`].
    ///
    /// # Errors
    /// QEMU can't be started, or its monitor does not answer. In the second case `ended` is called.
    pub fn start(
        mut start: Start<'_>,
        ended: impl FnOnce(&Arc<Machine>, Exit) + Send + 'static,
        registered: impl FnOnce(&Arc<Machine>),
    ) -> anyhow::Result<Arc<Machine>> {
        let started = Instant::now();
        let zones = start.zones.iter().map(|(name, zone_use, _)| (name.clone(), zone_use.clone())).collect();
        let memory: BTreeMap<_, _> =
            start.zones.iter().map(|(name, _, invitation)| (name.clone(), invitation.read_only)).collect();
        let formats = start.drives.iter().map(|drive| drive.image).collect();
        let held = |(zone, _, invitation): &(String, _, Invitation)| {
            Some(invitation.liveness.as_ref()?.try_clone().map(|held| (zone.clone(), held)))
        };
        let liveness = start.zones.iter().filter_map(held).collect::<io::Result<Vec<_>>>()?;
        let (own, qemus) = Sockets::pairs()?;
        let mut inherited = Inherited::default();
        let (prepared, bypass) = Prepared::of(start.spec)?.unzip();
        let log = qemus.log.try_clone()?;
        let order = order(&mut start, qemus, bypass, &mut inherited)?;
        let qemu = run(&start, order, &own, &log, &inherited)?;
        // While a process has QEMU's side of a socket open, nobody sees the end of that socket.
        drop((inherited, log));
        let (console, log) = consoles(&start)?;
        let restarted = start.attempt.is_some();
        let machine = Arc::new(Machine {
            name: start.name.to_owned(),
            spec: start.spec.clone(),
            folder: start.folder,
            hypervisor: start.hypervisor,
            started,
            shim: start.shim,
            console,
            log,
            agent: Agent::new(own.agent.try_clone()?),
            qmp: OnceLock::new(),
            process: qemu.process,
            pid: qemu.pid,
            state: Mutex::new(State::booting(zones)),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
            again: start.again,
            reboots: start.before.map_or(0, |b| b.reboots + u32::from(!restarted)),
            restarts: start.before.map_or(0, |b| b.restarts + u32::from(restarted)),
            attempt: start.attempt.or(start.before.map(|b| b.attempt)).unwrap_or(0),
            layout: start.memory,
            formats,
            placement: start.placement,
            threads: OnceLock::new(),
            isolated: OnceLock::new(),
            ports: Mutex::new(Ports::new(start.name, start.spec.hotplug_ports, memory)),
            old_ports: Once::new(),
            held: Mutex::new(Held { devices: start.devices, group: start.group, ..Held::default() }),
        });
        machine.mark("qemu started");
        machine.record(&Phase::Booting, start.hypervisor.name());
        machine.keep(&own.monitor, &own.agent, &liveness)?;
        machine.watch(ended)?;
        registered(&machine);
        machine.connect(own.monitor)?;
        if let Some(prepared) = prepared {
            machine.begin_bypass(prepared)?;
        }
        Ok(machine)
    }

    /// Waits until the monitor answers. Ends QEMU if it does not.
    fn connect(self: &Arc<Self>, monitor: UnixStream) -> anyhow::Result<()> {
        // QEMU fills memory that is bound to nodes before it answers.
        let limit = if self.placement.is_some() { FILL } else { tombolo_qemu::qmp::REPLY };
        match Qmp::connect_within(monitor, limit, self.events()) {
            Ok(qmp) => {
                self.mark("monitor answers");
                let sender = qmp.sender();
                let _set_once = self.qmp.set(qmp);
                sender
                    .filter(|sender| *sender != self.pid)
                    .map_or(Ok(()), |other| Err(self.refuse_wrapper(other)))
            }
            Err(e) => {
                // One that has ended by itself says how.
                let ended = matches!(e, qmp::Error::Ended) && self.wait_end(QUIT);
                self.process.kill();
                self.wait_end(QUIT);
                anyhow::ensure!(!self.cancelled.load(Ordering::Acquire), "cancelled");
                let how = self.lock().exit.clone().filter(|_| ended);
                Err(self.failure(
                    &how.map_or(e.to_string(), |how| format!("it ended before its monitor answered ({how})")),
                ))
            }
        }
    }

    /// Ends a QEMU that another process has started than this one: its end is not seen, and signals don't reach it.
    fn refuse_wrapper(&self, qemu: u32) -> anyhow::Error {
        self.process.kill();
        Handle::of(qemu).kill();
        self.wait_end(QUIT);
        self.failure(&format!(
            "its QEMU (process {qemu}) was started by the program of the key 'qemu' (process {}), which has not become it: its end would not be \
             seen; write exec before QEMU's name in that script",
            self.pid
        ))
    }

    /// Pins the VM's memory for its bypassed devices. Ends QEMU if that fails.
    fn begin_bypass(self: &Arc<Self>, prepared: Prepared) -> anyhow::Result<()> {
        let begun = Bypass::begin(self, prepared);
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match begun {
            // Else the session would outlive the devices' return, and keep the next VM from them.
            Ok(bypass) if !held.ended => held.bypass = Some(bypass),
            Ok(_) => {
                drop(held);
                return Err(self.failure("it ended before its memory was pinned"));
            }
            Err(e) => {
                drop(held);
                self.process.kill();
                self.wait_end(QUIT);
                return Err(self.failure(&format!("{e:#}")));
            }
        }
        Ok(())
    }

    /// Starts the thread that waits for QEMU's end and calls `ended`.
    pub(super) fn watch(
        self: &Arc<Self>,
        ended: impl FnOnce(&Arc<Machine>, Exit) + Send + 'static,
    ) -> io::Result<()> {
        let machine = self.clone();
        let watch = move || {
            let mut exit = machine.wait_exit();
            machine.await_monitor_end();
            let given = Held { ended: true, ..Held::default() };
            let mut held =
                mem::replace(&mut *machine.held.lock().unwrap_or_else(PoisonError::into_inner), given);
            if held.group.as_ref().is_some_and(Group::ran_out_of_memory) {
                exit.how.push_str(", for want of memory: raise memory_limit");
            }
            // The module stops the devices, then gives the memory back.
            drop(held.bypass.take());
            held.interrupts.give_back(Path::new("/"));
            if let Some(Err(e)) = held.partition.take().map(partition::give_back) {
                crate::say!("the VM '{}': {e:#}", machine.name);
            }
            // The devices and the cgroup must be free before `ended` starts the next QEMU.
            drop(held);
            ended(&machine, exit);
        };
        crate::thread::start(&format!("vm-{}", self.name), watch).map(drop)
    }

    fn wait_exit(&self) -> Exit {
        let how = match self.shim.wait() {
            Ok(Some(status)) => return describe(status),
            Ok(None) => {
                // The kernel kills QEMU with the shim.
                self.process.wait_end();
                format!("the VM's own process (tombolo shim, process {}) was killed", self.shim.pid())
            }
            Err(e) => {
                self.process.wait_end();
                format!("its end is unknown: {e:#}")
            }
        };
        Exit { how, clean: false }
    }

    /// Returns the handler of the monitor's events.
    pub(super) fn events(self: &Arc<Self>) -> impl FnMut(&str, &serde_json::Value) + Send + use<> {
        let weak = Arc::downgrade(self);
        move |event, data| {
            if let Some(machine) = weak.upgrade() {
                machine.event(event, data);
            }
        }
    }

    /// Waits for the monitor's last event, which tells a reboot from a shutdown. A VM that is stopped does not reboot, and is waited for.
    fn await_monitor_end(&self) {
        let is_open = |s: &mut State| !s.monitor_ended && matches!(s.phase, Phase::Booting | Phase::Up);
        let waits = |s: &mut State| is_open(s) && !self.cancelled.load(Ordering::Acquire);
        drop(self.changed.wait_timeout_while(self.lock(), QUIT, waits));
    }
}

fn describe(status: ExitStatus) -> Exit {
    use std::os::unix::process::ExitStatusExt;
    let how = match (status.code(), status.signal()) {
        (Some(0), _) => "the guest switched itself off".into(),
        (Some(code), _) => format!("QEMU ended with code {code}"),
        (None, Some(signal)) => format!("QEMU was killed by signal {signal}"),
        (None, None) => "QEMU ended".into(),
    };
    Exit { how, clean: status.success() }
}
