// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The next program of a supervisor's process takes over what the one before has noted (`upgrade`).
//!
//! Each part is taken over by itself: one that can't be is noted in [`Losses`], with its remedy, and the others go on. Only without the project's
//! socket, through which commands come, does the process end, and with it all that it has started.

use std::collections::BTreeSet;
use std::os::fd::RawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use tombolo_zone::keep::Kept;

use super::lasting::What;
use super::upgrade::State;
use super::{Reporter, Supervisor};
use crate::child::{Guarded, main_thread};
use crate::guest::health;
use crate::machine::{Machine, growth};
use crate::project::accelerator::Accelerator;
use crate::project::barrier::{BACKGROUND, REQUESTS};
use crate::project::control::{Event, Request};
use crate::project::journal::{self, Since};
use crate::project::losses::Losses;
use crate::project::network::Network;
use crate::project::peer::Peer;
use crate::project::session;
use crate::project::state::{Endpoint, StateDir};
use crate::project::upgrade;
use crate::project::zones::HostZone;
use crate::thread;

/// Time for threads to be had that this process needs for the parts of the project.
const ROOM: Duration = Duration::from_secs(60);

/// The answer to the upgrade.
struct Answer {
    /// Who has asked for it, if that can still be reached.
    peer: Option<Peer>,
    /// The version of the program before.
    before: String,
    /// Why another program did not go on.
    refused: Option<String>,
    losses: Losses,
}

/// Goes on as the supervisor that this process was in another program; `refused`: why another one did not.
///
/// # Errors
/// When the project has no socket any more, memory runs out, or no VM is left for which a thread is waited for: the process ends then, and with it all
/// that it has started.
pub fn go_on(state: RawFd, refused: Option<String>) -> anyhow::Result<()> {
    let queue = main_thread::claim();
    // By the descriptor under which it was started it would be a number.
    rustix::thread::set_name(c"tombolo")?;
    super::be_seen()?;
    let (fd, text) = upgrade::text(state)?;
    let mut state = match upgrade::read::<State>(&text) {
        Ok(state) => state,
        // One that was refused is not tried again.
        Err(e) if refused.is_some() => return Err(e),
        Err(e) => return Err(upgrade::fall_back(&fd, &text, &format!("{e:#}"))),
    };
    drop(fd);
    // Threads that begin wait until the state is complete.
    let standstill =
        BACKGROUND.close(Duration::ZERO).map_err(|_| anyhow::anyhow!("another thread runs already"))?;
    crate::log::resume(&state.dir.join("supervisor.log"));
    let client = state.client.take().and_then(|client| client.take().ok());
    let mut answer = Answer {
        peer: client.map(|client| Peer::new(client.into())),
        before: state.head.version.clone(),
        refused,
        losses: Losses::default(),
    };
    let lasting = std::mem::take(&mut state.lasting);
    // The program before has had them. Without them parts are lost.
    if let Err(e) = thread::await_room(state.threads, ROOM) {
        crate::say!("{e}");
    }
    let supervisor = Supervisor::take_over(state, &mut answer.losses)?;
    // While no other thread works: one that holds a lock may wait for a process that only this thread can start.
    supervisor.go_on(lasting, &mut answer.losses);
    drop(standstill);
    // If this process ended, its VMs would end too.
    let waits = || supervisor.has_vms() && !supervisor.signals.are_there();
    let start =
        |name: &str, work: &dyn Fn() -> Box<dyn FnOnce() + Send>| thread::start_at_last(name, work, &waits);
    supervisor.attend_to_all(&start)?;
    let answer = Arc::new(Mutex::new(Some(answer)));
    // It may end what takes the main thread to end.
    start("request", &|| {
        let (own, answer) = (supervisor.clone(), answer.clone());
        Box::new(move || {
            let answer = answer.lock().unwrap_or_else(PoisonError::into_inner).take();
            answer.into_iter().for_each(|answer| own.report_upgrade(answer));
        })
    })?;
    queue.serve();
    journal::close();
    Ok(())
}

impl Supervisor {
    fn take_over(state: State, losses: &mut Losses) -> anyhow::Result<Arc<Supervisor>> {
        // It is needed for the way back only.
        let _closed = state.head.program.take();
        let dir = StateDir::at(state.dir);
        let endpoint = endpoint_of(&dir, state.lock, state.listener)?;
        let signals = session::signals()?;
        if let Ok(before) = state.signals.take() {
            signals.take_over(UnixStream::from(before));
        }
        upgrade::block_signals(false);
        let mut supervisor = Supervisor::new(dir, endpoint, signals, state.project);
        if let Some(origin) = state.origin {
            supervisor.origin = origin;
        }
        let supervisor = Arc::new(supervisor);
        {
            let mut inner = supervisor.lock();
            // The one that asked for this.
            (inner.requests, inner.hypervisor) = (1, state.hypervisor);
        }
        for left in state.machines {
            let (own, name) = (supervisor.clone(), left.name().to_owned());
            let ended = move |machine: &Arc<Machine>, exit, inside| own.ended(machine, exit, inside);
            let machine = Machine::take_over(left, &supervisor.dir, ended, losses);
            supervisor.lock().machines.insert(name, machine);
        }
        let mut inner = supervisor.lock();
        for (name, zone) in state.zones {
            match HostZone::take_over(zone, losses) {
                Ok(zone) => drop(inner.zones.insert(name, Arc::new(zone))),
                Err(e) => inner.lose_zone(&name, &format!("{e:#}"), losses),
            }
        }
        for (name, network) in state.networks {
            match Network::take_over(network, losses) {
                Ok(network) => drop(inner.networks.insert(name, Arc::new(network))),
                Err(e) => inner.lose(format!("net.{name}"), &format!("{e:#}"), losses),
            }
        }
        for (name, left) in state.accelerators {
            match Accelerator::take_over(left, supervisor.dir.path(), &inner.machines, losses) {
                Ok(accelerator) => drop(inner.accelerators.insert(name, Arc::new(accelerator))),
                Err(e) => inner.lose(format!("accel.{name}"), &format!("{e:#}"), losses),
            }
        }
        drop(inner);
        *supervisor.confined.lock().unwrap_or_else(PoisonError::into_inner) = state.confined;
        journal::take_over(state.journal);
        supervisor.end_strangers();
        Ok(supervisor)
    }

    /// Returns whether a VM runs.
    fn has_vms(&self) -> bool {
        self.lock().machines.values().any(|machine| !machine.has_ended())
    }

    /// Ends processes that the program before has started and no part has taken over.
    fn end_strangers(&self) {
        let known: BTreeSet<u32> = {
            let inner = self.lock();
            let vms = inner.machines.values().map(|machine| machine.pid());
            let switches = inner.networks.values().filter_map(|network| network.process().0);
            let servers = inner.accelerators.values().filter_map(|accelerator| accelerator.process());
            vms.chain(switches).chain(servers).collect()
        };
        match Guarded::others(&known) {
            Ok(others) => {
                for mut other in others {
                    crate::say!("process {} is no part's any more and is killed", other.pid());
                    // One that does not die is waited for by nobody else.
                    let ended = move || other.kill();
                    let _not_had = thread::start("end", ended);
                }
            }
            // Not each kernel tells of children (CONFIG_PROC_CHILDREN).
            Err(e) => crate::say!("processes that no part has taken over would run on: {e}"),
        }
    }

    /// Goes on with what the program before was in the middle of.
    fn go_on(self: &Arc<Self>, lasting: Vec<(Kept, What)>, losses: &mut Losses) {
        for (socket, what) in lasting {
            let name = what.to_string();
            let socket = socket.take().map(|socket| Arc::new(UnixStream::from(socket)));
            if let Err(e) = socket.and_then(|socket| self.serve_on(socket, what)) {
                losses.note(format!("{name} has ended in the upgrade ({e}); begin it again"));
            }
        }
        let machines: Vec<Arc<Machine>> = self.lock().machines.values().cloned().collect();
        for machine in machines {
            match machine.has_ended() {
                true => self.follow_up_on(machine, losses),
                false => self.go_on_with(&machine, losses),
            }
        }
        for (vm, loss) in losses.of_vms() {
            if let Ok(machine) = self.machine(vm) {
                machine.add_loss(loss);
            }
        }
    }

    /// Goes on with what follows from a VM's end.
    fn follow_up_on(self: &Arc<Self>, machine: Arc<Machine>, losses: &mut Losses) {
        let (own, name) = (self.clone(), machine.name().to_owned());
        let ended = move || own.follow_up(&machine, machine.sequel());
        if let Err(e) = thread::start("follow-up", ended) {
            losses.note_for(&name, format!("does not start again by itself ({e}); to start it: tombolo up"));
        }
    }

    /// Goes on with a VM's growth and health checks.
    fn go_on_with(self: &Arc<Self>, machine: &Arc<Machine>, losses: &mut Losses) {
        if machine.is_growing() {
            let own = self.clone();
            // A VM that is ending has no memory any more; it must not end the others.
            if let Err(e) = growth::begin(machine, move |machine| own.start_slowly(machine)) {
                crate::say!("the VM '{}': its memory does not grow on: {e:#}", machine.name());
            }
        }
        if let Some(check) = machine.spec().healthcheck.as_ref().filter(|_| machine.is_up()) {
            if let Err(e) = health::go_on(machine, check, machine.up_for().unwrap_or_default()) {
                losses.of_vm(machine.name(), "its health checks", e);
            }
        }
    }

    /// Tells who has asked for the upgrade how it went.
    fn report_upgrade(&self, answer: Answer) {
        let Answer { peer, before, refused, losses } = answer;
        let reporter = peer.as_ref().map(|peer| Reporter::of(peer, &Request::Ps));
        let name = self.lock().project.name.clone();
        let mut text = match &refused {
            None => format!("the project '{name}' is run by version {} now, after {before}", crate::VERSION),
            Some(why) => format!("the project '{name}' is run by version {before} as before: {why}"),
        };
        let lost = losses.summary();
        if let Some(lost) = &lost {
            text.push_str(&format!("; not all of it could be taken over:\n{lost}"));
        }
        crate::say!("{text}");
        let idle = self.leave();
        let send = |event: Event| reporter.iter().for_each(|reporter| reporter.send(&event));
        if refused.is_none() && lost.is_none() {
            send(Event::Note { text });
            send(Event::Done);
        } else {
            send(Event::Failed { message: text });
        }
        if idle {
            super::end();
        }
    }

    /// Goes on with a connection that lasts.
    ///
    /// # Errors
    /// When no thread can be had.
    fn serve_on(self: &Arc<Self>, socket: Arc<UnixStream>, what: What) -> std::io::Result<()> {
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
        thread::start("request", serve)?;
        Ok(())
    }
}

/// The lock and the socket of the program before, or new ones where their descriptors are gone.
///
/// # Errors
/// There is no socket.
fn endpoint_of(dir: &StateDir, lock: Kept, listener: Kept) -> anyhow::Result<Endpoint> {
    match (lock.take(), listener.take()) {
        (Ok(lock), Ok(listener)) => Ok(Endpoint::resume(lock.into(), UnixListener::from(listener))),
        // A descriptor that was passed without the other one has been closed, which has freed the lock.
        _ => dir.listen()?.context("another process has taken the project's lock"),
    }
}
