// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The supervisor's side of `tombolo upgrade`: what it holds is noted while it stands still. The next program takes it over (`takeover`); see
//! also [`crate::project::upgrade`].

use std::collections::BTreeMap;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tombolo_zone::doorbell::handover::Paused;
use tombolo_zone::keep::{Keep, Kept};

use super::lasting::What;
use super::turn::Of;
use super::{Reporter, Supervisor};
use crate::child::main_thread;
use crate::compose::Project;
use crate::machine::Machine;
use crate::machine::handover::MachineState;
use crate::project::accelerator::AcceleratorState;
use crate::project::barrier::{BACKGROUND, Inside, REQUESTS};
use crate::project::control::Event;
use crate::project::journal::{self, Entry};
use crate::project::network::NetworkState;
use crate::project::peer::Peer;
use crate::project::session;
use crate::project::upgrade::{self, FORMAT, Head, Program};
use crate::project::zones::HostZoneState;

/// Time for each barrier to close. Commands that come meanwhile wait, and `ps` waits for less than a second.
const CLOSING: Duration = Duration::from_millis(200);
/// Between two tries, in which commands are heard.
const PAUSE: Duration = Duration::from_millis(300);

/// The state of the project that goes over to the next program.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct State {
    #[serde(flatten)]
    pub(super) head: Head,
    pub(super) dir: PathBuf,
    #[serde(default)]
    pub(super) origin: Option<PathBuf>,
    pub(super) project: Project,
    #[serde(alias = "accel")]
    pub(super) hypervisor: String,
    pub(super) lock: Kept,
    pub(super) listener: Kept,
    pub(super) signals: Kept,
    /// The client of the upgrade.
    pub(super) client: Option<Kept>,
    pub(super) machines: Vec<MachineState>,
    pub(super) zones: BTreeMap<String, HostZoneState>,
    pub(super) networks: BTreeMap<String, NetworkState>,
    pub(super) accelerators: BTreeMap<String, AcceleratorState>,
    pub(super) journal: (u64, Vec<Entry>),
    pub(super) lasting: Vec<(Kept, What)>,
    #[serde(default)]
    pub(super) confined: super::services::Confined,
    /// The number of threads of the process.
    #[serde(default)]
    pub(super) threads: usize,
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
        inside: Option<Inside>,
    ) -> anyhow::Result<()> {
        let _only = Only::of(&self.upgrading)?;
        let socket = peer.socket();
        let next = match program {
            Some(path) => Program::open(path)?,
            None => {
                let client = tombolo_listen::peer::of(&socket)?.process;
                let client = client.context("this command runs where its project doesn't see it (another container); name a program: --program PATH")?;
                Program::open(Path::new(&format!("/proc/{client}/exe")))?
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
        let (begun, longest) = (Instant::now(), Duration::from_secs(seconds));
        let (mut examined, mut told) = (false, false);
        loop {
            let Busy(what) = self.try_upgrade(&next, &own, &socket, &mut examined)?;
            if examined && what.is_empty() {
                continue;
            }
            anyhow::ensure!(!session::has_gone(&socket), "cancelled; the project '{name}' runs on as it did");
            let what = what.join(", ");
            anyhow::ensure!(
                begun.elapsed() < longest,
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
        if let Some(machine) = machines.iter().find(|machine| machine.is_booting()) {
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
            let handed_over = zone.hand_over(keep).with_context(|| refusal("zone", name));
            let (state, paused) = handed_over?;
            zones.insert(name.clone(), state);
            doorbells.push(paused);
        }
        for (name, accelerator) in &inner.accelerators {
            let handed_over = accelerator.hand_over(keep).with_context(|| refusal("accelerator", name));
            let (state, paused) = handed_over?;
            accelerators.insert(name.clone(), state);
            doorbells.extend(paused);
        }
        let networks = inner.networks.iter().map(|(name, net)| (name.clone(), net.hand_over(keep))).collect();
        let head = Head { format: FORMAT, version: crate::VERSION.to_owned(), program: own.keep(keep) };
        let endpoint = self.endpoint();
        let state = State {
            head,
            dir: self.dir.path().to_owned(),
            origin: Some(self.origin.clone()),
            project: inner.project.clone(),
            hypervisor: inner.hypervisor.clone(),
            lock: keep.add(endpoint.lock()),
            listener: keep.add(endpoint.listener()),
            signals: keep.add(self.signals.socket()),
            client: Some(keep.add(client)),
            machines: Vec::new(),
            zones,
            networks,
            accelerators,
            journal: journal::entries(),
            lasting: self.lasting.hand_over(keep),
            confined: self.confined.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            threads: std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count),
        };
        Ok((state, doorbells))
    }
}

/// Why a project goes on under the old program, as a part can't be handed over.
fn refusal(kind: &str, name: &str) -> String {
    format!(
        "the {kind} '{name}' can't be handed over; to change over all the same: tombolo down && tombolo up"
    )
}

/// Checks that this program could go on with the state behind a descriptor.
///
/// # Errors
/// Why it can't.
pub fn examine(state: RawFd) -> anyhow::Result<()> {
    let (_, text) = upgrade::text(state)?;
    upgrade::read::<State>(&text).map(drop)
}
