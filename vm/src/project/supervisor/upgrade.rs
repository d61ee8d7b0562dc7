// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The supervisor's side of `tombolo upgrade`: what it holds is noted while it stands still, and taken over by the next program (see
//! [`crate::project::upgrade`]).

use std::collections::BTreeMap;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tombolo_zone::door::DoorState;
use tombolo_zone::doorbell::handover::Paused;
use tombolo_zone::keep::{Keep, Kept};

use super::lasting::What;
use super::turn::Of;
use super::{Ownership, Reporter, Supervisor};
use crate::child::main_thread;
use crate::compose::Project;
use crate::guest::health;
use crate::machine::handover::MachineState;
use crate::machine::{Machine, growth};
use crate::project::accelerator::{Accelerator, AcceleratorState};
use crate::project::barrier::{BACKGROUND, Inside, REQUESTS};
use crate::project::control::{Event, Request};
use crate::project::identity::Folder;
use crate::project::journal::{self, Entry, Since};
use crate::project::network::{Network, NetworkState};
use crate::project::peer::Peer;
use crate::project::session;
use crate::project::state::StateDir;
use crate::project::upgrade::{self, FORMAT, Head, Program};
use crate::project::zones::{HostZone, HostZoneState};

/// Time for each barrier to close. Commands that come meanwhile wait, and `ps` waits for less than a second.
const CLOSING: Duration = Duration::from_millis(200);
/// Between two tries, in which commands are heard.
const PAUSE: Duration = Duration::from_millis(300);

/// The state of the project that goes over to the next program.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    #[serde(flatten)]
    head: Head,
    dir: PathBuf,
    project: Project,
    #[serde(alias = "accel")]
    hypervisor: String,
    lock: Kept,
    door: DoorState,
    #[serde(default)]
    folder: Option<Kept>,
    signals: Kept,
    /// The client of the upgrade.
    client: Kept,
    machines: Vec<MachineState>,
    zones: BTreeMap<String, HostZoneState>,
    networks: BTreeMap<String, NetworkState>,
    accelerators: BTreeMap<String, AcceleratorState>,
    journal: (u64, Vec<Entry>),
    lasting: Vec<(Kept, What)>,
    #[serde(default)]
    confined: super::services::Confined,
}

/// One upgrade at a time.
struct Only<'a>(&'a AtomicBool);

impl<'a> Only<'a> {
    fn of(flag: &'a AtomicBool) -> anyhow::Result<Only<'a>> {
        anyhow::ensure!(!flag.swap(true, Ordering::AcqRel), "another upgrade of this project is under way");
        Ok(Only(flag))
    }
}

impl Drop for Only<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Why a try was given up: what has to end first.
struct Busy(Vec<String>);

impl Supervisor {
    /// Makes this process another program, the client's own where none is named. It returns only where that is not done.
    ///
    /// # Errors
    /// Why the project runs on as it did.
    pub(super) fn upgrade(
        &self,
        program: Option<&Path>,
        seconds: u64,
        peer: Peer,
        reporter: &Reporter,
        inside: Inside,
    ) -> anyhow::Result<()> {
        let _only = Only::of(&self.upgrading)?;
        let socket = peer.socket();
        let next = match program {
            Some(path) => Program::open(path)?,
            None => {
                let client = rustix::net::sockopt::socket_peercred(&socket)?.pid;
                Program::open(Path::new(&format!("/proc/{}/exe", client.as_raw_pid())))?
            }
        };
        let own = Program::own()?;
        let note = |text: String| reporter.send(&Event::Note { text });
        let name = self.lock().project.name.clone();
        if next.is_same(&own)? {
            note(format!("the project '{name}' is run by this program already"));
            return Ok(());
        }
        // This request is none that is waited for.
        drop(inside);
        let until = Instant::now() + Duration::from_secs(seconds);
        let (mut examined, mut told) = (false, false);
        loop {
            let Busy(what) = self.try_upgrade(&next, &own, &socket, &mut examined)?;
            if examined && what.is_empty() {
                continue;
            }
            anyhow::ensure!(!session::has_gone(&socket), "cancelled; the project '{name}' runs on as it did");
            let what = what.join(", ");
            anyhow::ensure!(
                Instant::now() < until,
                "the project '{name}' is busy, so it runs on as it did; to be ended first: {what}"
            );
            if !std::mem::replace(&mut told, true) {
                note(format!("this waits for the end of: {what}"));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// One try: with everything at a standstill the state is noted. The first time it is the program's to examine, afterwards that becomes
    /// of this process.
    fn try_upgrade(
        &self,
        next: &Program,
        own: &Program,
        client: &UnixStream,
        examined: &mut bool,
    ) -> anyhow::Result<Busy> {
        let requests = match REQUESTS.close(CLOSING) {
            Ok(closed) => closed,
            Err(what) => return Ok(Busy(what)),
        };
        // VMs that start again by themselves wait for their turn.
        let Some(turn) = self.changing.take_within(Of::All, CLOSING) else {
            return Ok(Busy(vec!["the start of a VM".into()]));
        };
        let background = match BACKGROUND.close(CLOSING) {
            Ok(closed) => closed,
            Err(what) => return Ok(Busy(what)),
        };
        let machines: Vec<Arc<Machine>> = self.lock().machines.values().cloned().collect();
        if let Some(machine) = machines.iter().find(|machine| machine.is_changing()) {
            return Ok(Busy(vec![format!("{} of the VM '{}'", machine.status().state, machine.name())]));
        }
        if let Some(machine) = machines.iter().find(|m| !m.has_ended() && !m.spec().bypassed().is_empty()) {
            anyhow::bail!(
                "the VM '{}' has bypassed devices, whose requests this program answers: stop it before the upgrade",
                machine.name()
            );
        }
        let mut keep = Keep::default();
        let monitors: Vec<_> = machines.iter().map(|machine| machine.pause()).collect();
        let (mut state, doorbells) = self.hand_over(own, client, &mut keep)?;
        let paused = machines.iter().zip(&monitors);
        state.machines =
            paused.map(|(machine, monitor)| machine.hand_over(monitor.as_ref(), &mut keep)).collect();
        let state = upgrade::write(&state)?;
        if *examined {
            return Err(self.become_it(next, state, keep));
        }
        drop((doorbells, monitors, background, turn, requests));
        next.examine(&state)?;
        *examined = true;
        Ok(Busy(Vec::new()))
    }

    /// Becomes the program; why that failed.
    fn become_it(&self, next: &Program, state: OwnedFd, keep: Keep) -> anyhow::Error {
        let path = next.path().display().to_string();
        let program = match next.try_clone() {
            Ok(program) => program,
            Err(e) => return e.into(),
        };
        let failed = main_thread::run(move || {
            upgrade::block_signals(true);
            let failed = program.become_it(&state, &keep);
            upgrade::block_signals(false);
            failed
        });
        match failed {
            Some(e) => anyhow::anyhow!("this process can't become {path}: {e}"),
            None => anyhow::anyhow!("the project ends"),
        }
    }

    /// Notes all but the VMs.
    fn hand_over(
        &self,
        own: &Program,
        client: &UnixStream,
        keep: &mut Keep,
    ) -> anyhow::Result<(State, Vec<Paused>)> {
        let inner = self.lock();
        let (mut zones, mut accelerators, mut doorbells) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for (name, zone) in &inner.zones {
            let (state, paused) = zone.hand_over(keep)?;
            zones.insert(name.clone(), state);
            doorbells.push(paused);
        }
        for (name, accelerator) in &inner.accelerators {
            let (state, paused) = accelerator.hand_over(keep)?;
            accelerators.insert(name.clone(), state);
            doorbells.extend(paused);
        }
        let networks = inner.networks.iter().map(|(name, net)| (name.clone(), net.hand_over())).collect();
        let head = Head { format: FORMAT, version: crate::VERSION.to_owned(), program: own.keep(keep) };
        let state = State {
            head,
            dir: self.dir.path().to_owned(),
            project: inner.project.clone(),
            hypervisor: inner.hypervisor.clone(),
            lock: keep.add(&self.ownership.lock),
            door: DoorState::of(&self.ownership.door, keep),
            folder: self.ownership.folder.as_ref().map(|folder| folder.keep(keep)),
            signals: keep.add(self.signals.socket()),
            client: keep.add(client),
            machines: Vec::new(),
            zones,
            networks,
            accelerators,
            journal: journal::entries(),
            lasting: self.lasting.hand_over(keep),
            confined: self.confined.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        Ok((state, doorbells))
    }

    /// Goes on with what the program before was in the middle of.
    fn go_on(self: &Arc<Self>, lasting: Vec<(Kept, What)>) -> anyhow::Result<()> {
        for (socket, what) in lasting {
            self.serve_on(Arc::new(UnixStream::from(socket.take()?)), what)?;
        }
        let machines: Vec<Arc<Machine>> = self.lock().machines.values().cloned().collect();
        for machine in machines {
            if machine.has_ended() {
                let own = self.clone();
                let ended = move || own.follow_up(&machine, machine.sequel());
                std::thread::Builder::new().name("follow-up".into()).spawn(ended)?;
                continue;
            }
            if machine.is_growing() {
                let own = self.clone();
                // A VM that is ending has no memory any more; it must not end the others.
                if let Err(e) = growth::begin(&machine, move |machine| own.start_slowly(machine)) {
                    crate::say!("the VM '{}': its memory does not grow on: {e:#}", machine.name());
                }
            }
            if let Some(check) = machine.spec().healthcheck.as_ref().filter(|_| machine.is_up()) {
                health::go_on(&machine, check, machine.up_for().unwrap_or_default())?;
            }
        }
        Ok(())
    }

    /// Tells who has asked for the upgrade how it went.
    fn report_upgrade(&self, peer: Peer, before: &str, refused: Option<String>) {
        let reporter = Reporter::of(&peer, &Request::Ps);
        let name = self.lock().project.name.clone();
        let text = match &refused {
            None => format!("the project '{name}' is run by version {} now, after {before}", crate::VERSION),
            Some(why) => format!("the project '{name}' is run by version {before} as before: {why}"),
        };
        crate::say!("{text}");
        let idle = self.leave();
        match refused {
            None => {
                reporter.send(&Event::Note { text });
                reporter.send(&Event::Done);
            }
            Some(_) => reporter.send(&Event::Failed { message: text }),
        }
        if idle {
            main_thread::end();
        }
    }

    /// Goes on with a connection that lasts.
    fn serve_on(self: &Arc<Self>, socket: Arc<UnixStream>, what: What) -> anyhow::Result<()> {
        let inside = REQUESTS.enter("a connection that is taken over");
        let own = self.clone();
        let serve: Box<dyn FnOnce() + Send> = match what {
            What::Attend => Box::new(move || own.lasting.attend(Peer::over(socket), inside)),
            What::Events(next) => Box::new(move || {
                let reporter = Reporter::of(&Peer::over(socket.clone()), &Request::Events { since: None });
                own.lasting.tell(&socket, Since::Number(next), &reporter, inside);
            }),
            What::Console(vm) => {
                self.lock().requests += 1;
                Box::new(move || {
                    if let Ok(machine) = own.machine(&vm) {
                        if machine.console().watch(socket.clone(), 0).is_ok() {
                            own.lasting.type_all(&machine, &socket, Some(inside));
                        }
                    }
                    own.leave_unanswered();
                })
            }
        };
        std::thread::Builder::new().name("request".into()).spawn(serve)?;
        Ok(())
    }
}

/// Checks that this program could go on with the state behind a descriptor.
///
/// # Errors
/// Why it can't.
pub fn examine(state: RawFd) -> anyhow::Result<()> {
    let (_, text) = upgrade::text(state)?;
    upgrade::read::<State>(&text).map(drop)
}

/// Goes on as the supervisor that this process was in another program; `refused`: why another one did not.
///
/// # Errors
/// When a descriptor is not open, or memory or threads run out: the process ends then, and with it all that it has started.
pub fn go_on(state: RawFd, refused: Option<String>) -> anyhow::Result<()> {
    let queue = main_thread::claim();
    // By the descriptor under which it was started it would be a number.
    rustix::thread::set_name(c"tombolo")?;
    let (fd, text) = upgrade::text(state)?;
    let state = match upgrade::read::<State>(&text) {
        Ok(state) => state,
        // One that was refused is not tried again.
        Err(e) if refused.is_some() => return Err(e),
        Err(e) => return Err(upgrade::fall_back(&fd, &text, &format!("{e:#}"))),
    };
    drop(fd);
    drop(state.head.program.take()?);
    let client = UnixStream::from(state.client.take()?);
    // Threads that begin wait until the state is complete.
    let standstill =
        BACKGROUND.close(Duration::ZERO).map_err(|_| anyhow::anyhow!("another thread runs already"))?;
    crate::log::resume(&state.dir.join("supervisor.log"));
    let version = state.head.version;
    let folder = match state.folder {
        Some(kept) => Some(Folder::resume(kept)?),
        // The program before did not hold it.
        None => Folder::of(&state.project.file).ok(),
    };
    let ownership = Ownership { lock: state.lock.take()?.into(), door: state.door.resume()?, folder };
    let signals = session::signals()?;
    signals.take_over(UnixStream::from(state.signals.take()?));
    upgrade::block_signals(false);
    let supervisor = Supervisor::new(StateDir::at(state.dir.clone()), ownership, signals, state.project);
    let supervisor = Arc::new(supervisor);
    {
        let mut inner = supervisor.lock();
        // The one that asked for this.
        (inner.requests, inner.hypervisor) = (1, state.hypervisor);
    }
    for left in state.machines {
        let (own, name) = (supervisor.clone(), left.name().to_owned());
        let ended = move |machine: &Arc<Machine>, exit, inside| own.ended(machine, exit, inside);
        let machine = Machine::take_over(left, &supervisor.dir, ended)?;
        supervisor.lock().machines.insert(name, machine);
    }
    {
        let mut inner = supervisor.lock();
        for (name, zone) in state.zones {
            inner.zones.insert(name, Arc::new(HostZone::take_over(zone)?));
        }
        for (name, network) in state.networks {
            inner.networks.insert(name, Arc::new(Network::take_over(network)?));
        }
        for (name, accelerator) in state.accelerators {
            let accelerator = Accelerator::take_over(accelerator, &state.dir, &inner.machines)?;
            inner.accelerators.insert(name, Arc::new(accelerator));
        }
    }
    *supervisor.confined.lock().unwrap_or_else(PoisonError::into_inner) = state.confined;
    journal::take_over(state.journal);
    // While no other thread works: one that holds a lock may wait for a process that only this thread can start.
    supervisor.go_on(state.lasting)?;
    drop(standstill);
    supervisor.attend_to_all()?;
    let own = supervisor.clone();
    let report = move || own.report_upgrade(Peer::new(client), &version, refused);
    // It may end what takes the main thread to end.
    std::thread::Builder::new().name("request".into()).spawn(report)?;
    queue.serve();
    journal::close();
    Ok(())
}
