// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The supervisor: one process per running project. It holds the zones, starts and watches the VMs, and answers the
//! commands over its control socket. It carries no data. Every process that it starts dies with it (see [`crate::child`]), so a
//! crash or a kill leaves nothing behind.
//!
//! - `reception`: accepts connections; `requests`: carries out their requests; `lasting`: connections that last.
//! - `turn`: one request at a time starts or stops VMs.
//! - `up`, `plan`, `hypervisor`, `order`: what `up` does; `launch`: the start of one VM. `down`: what `down` does.
//! - `again`: reboots and restart policies. `members`: memberships in zones. `owners`: VMs that own accelerators.
//! - `services`: the CPUs of switches, servers and interrupts.
//! - `status`: the answer to `ps`. `upgrade`, `takeover`: the next program of this process.

use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{DumpableBehavior, Resource, Rlimit};

use crate::child::main_thread;
use crate::compose::Project;
use crate::machine::{Machine, Phase, disks};
use crate::project::accelerator::Accelerator;
use crate::project::barrier::{BACKGROUND, REQUESTS};
use crate::project::control::Event;
use crate::project::journal;
use crate::project::losses::Losses;
use crate::project::network::Network;
use crate::project::peer::{self, Peer};
use crate::project::session;
use crate::project::state::{Endpoint, StateDir};
use crate::project::zones::HostZone;
use crate::thread;
use lasting::Lasting;
use reception::Connection;
use requests::Reporter;
use turn::Turns;

mod again;
mod down;
mod hypervisor;
mod lasting;
mod launch;
mod members;
mod order;
mod owners;
mod plan;
mod reception;
mod requests;
mod services;
mod status;
mod takeover;
mod turn;
mod up;
mod upgrade;

pub use takeover::go_on;
pub use upgrade::examine;

/// The pause between two rounds of [`Supervisor::tend`].
const TEND: Duration = Duration::from_secs(1);
/// Time for the main thread to end.
const END: Duration = Duration::from_secs(1);

/// Starts a thread of this name; what is given makes its work.
type StartThread<'a> = dyn Fn(&str, &dyn Fn() -> Box<dyn FnOnce() + Send>) -> std::io::Result<()> + 'a;

struct Supervisor {
    dir: StateDir,
    /// The compose file's path when the project was started.
    origin: PathBuf,
    /// By it this process is the project's supervisor.
    endpoint: Mutex<Endpoint>,
    signals: session::Signals,
    inner: Mutex<Inner>,
    /// Held while VMs are started or stopped: one such request at a time.
    changing: Turns,
    /// Everything is being stopped.
    ending: AtomicBool,
    /// This process is about to become another program.
    upgrading: AtomicBool,
    lasting: Lasting,
    /// Switches and servers that run on reserved CPUs.
    confined: Mutex<services::Confined>,
}

struct Inner {
    project: Project,
    /// KVM or TCG, and the reason for it.
    hypervisor: String,
    machines: BTreeMap<String, Arc<Machine>>,
    zones: BTreeMap<String, Arc<HostZone>>,
    networks: BTreeMap<String, Arc<Network>>,
    accelerators: BTreeMap<String, Arc<Accelerator>>,
    /// Zones, networks and accelerators that an upgrade has lost, by their keys in the compose file, with the reasons.
    lost: BTreeMap<String, String>,
    /// The number of requests that are being carried out.
    requests: usize,
    /// The number of those that have stopped everything and wait for the end of the others.
    downs: usize,
    /// The supervisor is about to end, and refuses requests.
    withdrawn: bool,
}

/// The networks and accelerators of a project.
struct Beside {
    networks: BTreeMap<String, Arc<Network>>,
    accelerators: BTreeMap<String, Arc<Accelerator>>,
}

impl Inner {
    /// Removes everything but the VMs. The caller ends the returned parts without the lock, since their ends take time.
    #[must_use]
    fn clear(&mut self) -> Beside {
        self.zones.clear();
        self.lost.clear();
        Beside {
            networks: std::mem::take(&mut self.networks),
            accelerators: std::mem::take(&mut self.accelerators),
        }
    }

    /// Returns whether this is the machine of that VM: one that reboots, or starts again, has the same name.
    fn is_current(&self, machine: &Arc<Machine>) -> bool {
        self.machines.get(machine.name()).is_some_and(|current| Arc::ptr_eq(current, machine))
    }

    /// Removes a machine; false: the VM has another one already, which stays.
    fn remove(&mut self, machine: &Arc<Machine>) -> bool {
        let is_current = self.is_current(machine);
        if is_current {
            self.machines.remove(machine.name());
        }
        is_current
    }

    /// Notes that an upgrade has lost what the compose file has under `key`.
    fn lose(&mut self, key: String, why: &str, losses: &mut Losses) {
        losses.note(format!("{key} is lost ({why}); for a new one: tombolo down && tombolo up"));
        self.lost.insert(key, why.to_owned());
    }

    /// As [`Inner::lose`]: the zone's VMs share its memory on, without an owner that declares members dead.
    fn lose_zone(&mut self, name: &str, why: &str, losses: &mut Losses) {
        self.lose(format!("zone.{name}"), why, losses);
        for machine in self.machines.values().filter(|machine| machine.zones().contains_key(name)) {
            let text = format!(
                "is in the zone '{name}', which has no owner since the upgrade; for a new one: tombolo down && tombolo up"
            );
            losses.note_for(machine.name(), text);
        }
    }

    /// Refuses what an upgrade has lost.
    ///
    /// # Errors
    /// It was lost. Names the remedy.
    fn check_not_lost(&self, key: &str) -> anyhow::Result<()> {
        match self.lost.get(key) {
            Some(why) => anyhow::bail!(
                "{key} was lost in an upgrade ({why}); for a new one: tombolo down && tombolo up"
            ),
            None => Ok(()),
        }
    }
}

/// Runs the supervisor of `project` in `dir`; `control` is the inherited connection of the command that started it.
///
/// # Errors
/// When it can't begin. Later failures go to the client that asked.
pub fn run(project: Project, dir: &Path, control: RawFd) -> anyhow::Result<()> {
    // SAFETY: the command that starts this process passes the number of a descriptor that no other part of it owns.
    let control = UnixStream::from(unsafe { OwnedFd::from_raw_fd(control) });
    let mut peer = Peer::new(control);
    let state = StateDir::at(dir.to_owned());
    let queue = main_thread::claim();
    let endpoint = match settle(&state) {
        Ok(Some(endpoint)) => endpoint,
        Ok(None) => return Ok(peer.send(&Event::Taken)?),
        Err(e) => {
            let message = format!("the project's folder {} can't be used: {e:#}", dir.display());
            return Ok(peer.send(&Event::Failed { message })?);
        }
    };
    let inside = REQUESTS.enter("the command that started the project");
    let begun = session::signals().and_then(|signals| {
        let supervisor = Arc::new(Supervisor::new(state, endpoint, signals, project));
        supervisor.lock().requests = 1;
        supervisor.attend_to_all(&|name, work| thread::start(name, work()).map(drop))?;
        Ok(supervisor)
    });
    let supervisor = match begun {
        Ok(supervisor) => supervisor,
        Err(e) => {
            let message = format!("the project's supervisor can't begin: {e:#}");
            return Ok(peer.send(&Event::Failed { message })?);
        }
    };
    peer.send(&Event::Note { text: "ready".into() })?;
    let (own, client) = (supervisor.clone(), peer.socket());
    if let Err(e) = thread::start("request", move || own.begin(peer, inside)) {
        let message = format!("the project's supervisor can't begin: {e}");
        return Ok(peer::send(&client, &Event::Failed { message })?);
    }
    queue.serve();
    journal::close();
    Ok(())
}

/// Ends this process, also where the main thread is stuck in the start of a child. All that this process has started ends with it.
fn end() {
    main_thread::end();
    if !main_thread::has_ended_within(END) {
        journal::close();
        std::process::exit(1);
    }
}

/// Makes this process the project's supervisor. `None`: another process is the supervisor.
fn settle(state: &StateDir) -> anyhow::Result<Option<Endpoint>> {
    let Some(endpoint) = state.listen()? else { return Ok(None) };
    be_seen()?;
    crate::log::open(&state.path().join("supervisor.log"))?;
    // Those of a supervisor that was killed: what they lie over may have changed since.
    disks::discard(state, None);
    // Each VM, console and command takes a few.
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    Ok(Some(endpoint))
}

/// Lets other processes of this user that have no fewer capabilities look at this one, also where its program's file gives it some.
fn be_seen() -> std::io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?)
}

impl Supervisor {
    fn new(dir: StateDir, endpoint: Endpoint, signals: session::Signals, project: Project) -> Supervisor {
        Supervisor {
            dir,
            origin: project.file.clone(),
            endpoint: Mutex::new(endpoint),
            signals,
            inner: Mutex::new(Inner {
                project,
                hypervisor: "not known yet".into(),
                machines: BTreeMap::new(),
                zones: BTreeMap::new(),
                networks: BTreeMap::new(),
                accelerators: BTreeMap::new(),
                lost: BTreeMap::new(),
                requests: 0,
                downs: 0,
                withdrawn: false,
            }),
            changing: Turns::default(),
            ending: AtomicBool::new(false),
            upgrading: AtomicBool::new(false),
            lasting: Lasting::default(),
            confined: Mutex::default(),
        }
    }

    /// Begins to hear commands and signals, and to look after zones; `start` has each of them done on a thread.
    fn attend_to_all(self: &Arc<Self>, start: &StartThread<'_>) -> std::io::Result<()> {
        let on = |work: fn(&Arc<Self>)| {
            let own = self.clone();
            move || {
                let own = own.clone();
                Box::new(move || work(&own)) as Box<dyn FnOnce() + Send>
            }
        };
        start("control", &on(Supervisor::receive))?;
        start("signals", &on(Supervisor::hear_signals))?;
        start("tend", &on(|own| own.tend()))
    }

    fn receive(self: &Arc<Self>) {
        let admitting = self.clone();
        let serve = Arc::new(move |connection| admitting.admit(connection));
        let serve = serve as Arc<dyn Fn(Connection) + Send + Sync>;
        let listener = self.endpoint().listener().try_clone();
        match listener {
            Ok(listener) => reception::receive(&listener, &serve),
            Err(e) => crate::say!("no command is heard: {e}"),
        }
    }

    fn endpoint(&self) -> MutexGuard<'_, Endpoint> {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the project's folder, its lock and its socket again where they have vanished.
    fn tend_endpoint(self: &Arc<Self>) {
        if self.is_ending() || self.lock().withdrawn || self.endpoint().is_in(&self.dir) {
            return;
        }
        // There may be no place for it, and another user's folder may be in that place.
        let Ok(Some(endpoint)) = self.dir.renew().and_then(|()| self.dir.listen()) else { return };
        *self.endpoint() = endpoint;
        let own = self.clone();
        if let Err(e) = thread::start("control", move || own.receive()) {
            crate::say!("no command is heard: {e}");
        }
    }

    fn hear_signals(self: &Arc<Self>) {
        self.signals.wait_there();
        // It ends with the process: there is nothing left to hand over.
        let _inside = BACKGROUND.enter("the end of the project, by a signal");
        if self.signals.wait() {
            if let Err(e) = self.down_all(None) {
                crate::say!("{e:#}");
            }
            end();
        }
    }

    /// Looks after zones for as long as the process lives.
    fn tend(self: &Arc<Self>) {
        loop {
            self.tend_endpoint();
            let inside = BACKGROUND.enter("the care of zones");
            for zone in self.all_zones() {
                if let Err(e) = zone.tend() {
                    crate::say!("{e:#}");
                }
            }
            self.tend_accelerators();
            self.tend_places();
            drop(inside);
            let machines: Vec<_> = self.lock().machines.values().cloned().collect();
            for machine in machines {
                machine.tend_stall();
            }
            std::thread::sleep(TEND);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that this process keeps, those of accelerators among them.
    fn all_zones(&self) -> Vec<Arc<HostZone>> {
        let (mut zones, accelerators): (Vec<_>, Vec<_>) = {
            let inner = self.lock();
            (inner.zones.values().cloned().collect(), inner.accelerators.values().cloned().collect())
        };
        zones.extend(accelerators.iter().flat_map(|a| a.zones()));
        zones
    }

    fn machine(&self, vm: &str) -> anyhow::Result<Arc<Machine>> {
        let inner = self.lock();
        let Some(machine) = inner.machines.get(vm) else {
            let names: Vec<&str> = inner.machines.keys().map(String::as_str).collect();
            let hint = match crate::compose::nearest(vm, names.iter().copied()) {
                Some(near) => format!("did you mean '{near}'?"),
                None => {
                    format!("running: {}", if names.is_empty() { "none".into() } else { names.join(", ") })
                }
            };
            anyhow::bail!("no VM '{vm}' runs in the project '{}'; {hint}", inner.project.name);
        };
        Ok(machine.clone())
    }

    fn running(&self, vm: &str) -> anyhow::Result<Arc<Machine>> {
        let machine = self.machine(vm)?;
        match machine.phase() {
            Phase::Up => Ok(machine),
            Phase::Booting => anyhow::bail!("the VM '{vm}' is still booting"),
            Phase::Rebooting | Phase::Stopping | Phase::Ended if machine.is_to_start_again() => {
                anyhow::bail!("the VM '{vm}' is still booting")
            }
            _ => anyhow::bail!(
                "the VM '{vm}' does not run ({}); start it with 'tombolo up'",
                machine.status().state
            ),
        }
    }
}
