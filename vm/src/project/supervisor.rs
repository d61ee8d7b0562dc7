// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The supervisor: one process per running project. It owns the zones, starts and watches the VMs, and answers the
//! commands over its control socket. It carries no data, and keeps nothing that it can't read again: each VM, switch and server is the child of a
//! [shim](crate::shim), and when the supervisor dies the next command, or a shim, starts another one, which goes on with them (`adopt`).
//!
//! - `reception`: accepts connections; `requests`: carries out their requests.
//! - `turn`: one request at a time starts or stops VMs.
//! - `up`, `plan`, `hypervisor`, `order`: what `up` does; `launch`: the start of one VM. `down`: what `down` does.
//! - `again`: reboots and restart policies. `members`: memberships in zones. `owners`: VMs that own accelerators.
//! - `services`: the CPUs of switches, servers and interrupts.
//! - `status`: the answer to `ps`. `adopt`: what an earlier supervisor has left; `leave`: the end of this one before another.

use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{DumpableBehavior, Resource, Rlimit};

use crate::compose::Project;
use crate::machine::{Machine, Phase};
use crate::project::accelerator::Accelerator;
use crate::project::control::Event;
use crate::project::journal;
use crate::project::network::Network;
use crate::project::peer::{self, Peer};
use crate::project::revival;
use crate::project::session;
use crate::project::state::{Endpoint, StateDir};
use crate::project::zones::HostZone;
use crate::shim::Shim;
use crate::thread;
use reception::Connection;
use requests::Reporter;
use turn::Turns;

mod adopt;
mod again;
mod down;
mod hypervisor;
mod launch;
mod leave;
mod members;
mod order;
mod owners;
mod plan;
mod reception;
mod requests;
mod services;
mod status;
mod turn;
mod up;

pub use adopt::check;

/// The pause between two rounds of [`Supervisor::tend`].
const TEND: Duration = Duration::from_secs(1);

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
    /// Switches and servers that run on reserved CPUs.
    confined: Mutex<services::Confined>,
}

struct Inner {
    project: Project,
    /// KVM or TCG, and the reason for it.
    hypervisor: String,
    machines: BTreeMap<String, Arc<Machine>>,
    /// The shims of VMs whose QEMU is being started.
    starting: BTreeMap<String, Arc<Shim>>,
    zones: BTreeMap<String, Arc<HostZone>>,
    networks: BTreeMap<String, Arc<Network>>,
    accelerators: BTreeMap<String, Arc<Accelerator>>,
    /// The requests that are being carried out, by number, in words.
    requests: BTreeMap<u64, String>,
    /// The number of requests so far.
    entered: u64,
    /// The number of those that have stopped everything and wait for the end of the others.
    downs: usize,
    /// New requests wait, as the supervisor is about to leave.
    held: bool,
    /// The supervisor is about to end, and refuses requests.
    withdrawn: bool,
}

/// The zones, networks and accelerators of a project.
#[derive(Default)]
struct Beside {
    zones: BTreeMap<String, Arc<HostZone>>,
    networks: BTreeMap<String, Arc<Network>>,
    accelerators: BTreeMap<String, Arc<Accelerator>>,
}

impl Inner {
    /// Counts a request that begins: its number.
    fn enter(&mut self, what: String) -> u64 {
        self.entered += 1;
        self.requests.insert(self.entered, what);
        self.entered
    }

    /// Removes everything but the VMs. The caller ends the returned parts without the lock, since their ends take time.
    #[must_use]
    fn clear(&mut self) -> Beside {
        Beside {
            zones: std::mem::take(&mut self.zones),
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
    let endpoint = match settle(&state) {
        Ok(Some(endpoint)) => endpoint,
        Ok(None) => return Ok(peer.send(&Event::Taken)?),
        Err(e) => {
            let message = format!("the project's folder {} can't be used: {e:#}", dir.display());
            return Ok(peer.send(&Event::Failed { message })?);
        }
    };
    let begun = session::signals().and_then(|signals| {
        let supervisor = Arc::new(Supervisor::new(state, endpoint, signals, project));
        let request = supervisor.lock().enter("the command that started the project".into());
        supervisor.adopt()?;
        supervisor.attend_to_all()?;
        Ok((supervisor, request))
    });
    let (supervisor, request) = match begun {
        Ok(begun) => begun,
        Err(e) => {
            let message = format!("the project's supervisor can't begin: {e:#}");
            peer.send(&Event::Failed { message })?;
            // Nothing that lives is given back by it.
            end();
        }
    };
    peer.send(&Event::Note { text: "ready".into() })?;
    let (own, client) = (supervisor.clone(), peer.socket());
    if let Err(e) = thread::start("request", move || own.begin(peer, request)) {
        let message = format!("the project's supervisor can't begin: {e}");
        return Ok(peer::send(&client, &Event::Failed { message })?);
    }
    loop {
        std::thread::park();
    }
}

/// Ends this process.
fn end() -> ! {
    journal::close();
    std::process::exit(0);
}

/// Makes this process the project's supervisor. `None`: another process is the supervisor.
fn settle(state: &StateDir) -> anyhow::Result<Option<Endpoint>> {
    let Some(endpoint) = state.listen()? else { return Ok(None) };
    be_seen()?;
    crate::log::open(&state.path().join("supervisor.log"))?;
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
                starting: BTreeMap::new(),
                zones: BTreeMap::new(),
                networks: BTreeMap::new(),
                accelerators: BTreeMap::new(),
                requests: BTreeMap::new(),
                entered: 0,
                downs: 0,
                held: false,
                withdrawn: false,
            }),
            changing: Turns::default(),
            ending: AtomicBool::new(false),
            confined: Mutex::default(),
        }
    }

    /// Begins to hear commands and signals, and to look after zones.
    fn attend_to_all(self: &Arc<Self>) -> std::io::Result<()> {
        let start = |name, work: fn(&Arc<Self>)| {
            let own = self.clone();
            thread::start(name, move || work(&own)).map(drop)
        };
        start("control", Supervisor::receive)?;
        start("signals", Supervisor::hear_signals)?;
        start("tend", |own| own.tend())
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
        self.tend_shims();
        let own = self.clone();
        if let Err(e) = thread::start("control", move || own.receive()) {
            crate::say!("no command is heard: {e}");
        }
    }

    /// Makes the sockets of shims again where the project's folder has vanished.
    fn tend_shims(&self) {
        let inner = self.lock();
        let vms = inner.machines.values().map(|machine| machine.shim().listen_again());
        let networks = inner.networks.values().map(|network| network.listen_again());
        let zones = inner.zones.values().map(|zone| zone.listen_again());
        let accelerators = inner.accelerators.values().map(|accelerator| accelerator.listen_again());
        for failed in vms.chain(networks).chain(zones).chain(accelerators).filter_map(Result::err) {
            crate::say!("{failed:#}");
        }
        if let Err(e) = revival::note(&self.dir, &inner.project) {
            crate::say!("{e:#}");
        }
    }

    fn hear_signals(self: &Arc<Self>) {
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
            self.bury();
            for zone in self.all_zones() {
                if let Err(e) = zone.tend() {
                    crate::say!("{e:#}");
                }
            }
            self.tend_accelerators();
            self.tend_places();
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
