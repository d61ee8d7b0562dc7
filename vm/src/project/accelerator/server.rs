// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server's process on this host: how it is started, told of its slots, and asked.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::de::DeserializeOwned;
use tombolo_control::accel::{Answer, Listing, Request};
use tombolo_control::socket::Answer as _;

use super::adopt::Record;
use super::slot::{Channels, Reach, Slot};
use crate::compose::Project;
use crate::compose::accelerator::AccelSpec;
use crate::project::keeper::{ANSWER, Service};
use crate::project::patience::Patience;
use crate::project::peer::Peer;
use crate::project::zones::{HostZone, Place as ZonePlace};
use crate::shim::handle::Safe;
use crate::shim::{Order, Place, RECORD, Shim};

/// An accelerator's settings and slots, and the connection to the process that serves them.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) name: String,
    pub(super) spec: AccelSpec,
    /// The folder in which workers of this host compile. It is removed with the accelerator.
    pub(super) scratch: Option<PathBuf>,
    /// The shim that keeps the zones of the VMs.
    pub(super) safe: Arc<Safe>,
    /// Held while a server is told of slots, which may take long; locked before the others.
    pub(super) telling: Mutex<()>,
    pub(super) slots: Mutex<BTreeMap<String, Slot>>,
    /// It serves every slot.
    pub(super) link: Mutex<Option<Arc<Mutex<Peer>>>>,
    /// The connection to a process that is being started, for its shim.
    pub(super) started: Mutex<Option<UnixStream>>,
}

/// The name of the connection in the shim of a server's process.
pub(super) const LINK: &str = "link";

/// The name of the shim that keeps an accelerator's zones.
pub fn safe_of(accelerator: &str) -> String {
    format!("calls-{accelerator}")
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks a server, which answers in the order of the questions: what it answers, or why it won't.
fn ask<T: DeserializeOwned>(link: &Mutex<Peer>, request: &Request) -> anyhow::Result<Result<T, String>> {
    let mut link = lock(link);
    let sent = link.send(request).map_err(anyhow::Error::from);
    let answer = sent.and_then(|()| link.receive::<Answer<T>>()?.context("the server has ended"));
    let answer = answer.inspect_err(|_| {
        // A late answer would be taken for the next one's: without its link this server ends.
        let _gone_already = link.socket().shutdown(std::net::Shutdown::Both);
    })?;
    Ok(answer.into_result())
}

/// Time for a server to answer `ps`.
const LOOK: Duration = Duration::from_millis(300);

/// A server's listing, or why there is none within [`LOOK`]. A server that never answers is ended by [`ask`].
pub(super) fn look(link: Arc<Mutex<Peer>>, process: u32) -> Result<Listing, &'static str> {
    const SILENT: &str = "does not answer";
    let (sender, answer) = mpsc::channel();
    let asking = crate::thread::start("look", move || {
        // A late answer has no receiver.
        let _late = sender.send(ask(&link, &Request::Ls));
    });
    asking.map_err(|_| SILENT)?;
    let (begun, mut patience) = (Instant::now(), Patience::new(process, Some(LOOK)));
    loop {
        match answer.recv_timeout(patience.pause()) {
            Ok(Ok(Ok(listing))) => return Ok(listing),
            Err(mpsc::RecvTimeoutError::Timeout) => patience.look().map_err(|_| SILENT)?,
            _ => return Err(SILENT),
        }
        // The project's 'ps' must not wait for it.
        if begun.elapsed() >= LOOK {
            return Err("waits for a CPU of this busy host");
        }
    }
}

impl Server {
    /// Adds slots for VMs that have none yet.
    pub(super) fn add_slots(&self, project: &Project) -> anyhow::Result<()> {
        let _telling = lock(&self.telling);
        for (vm, spec) in &project.compose.vm {
            let Some(used) = spec.accelerators.0.get(&self.name) else { continue };
            if lock(&self.slots).contains_key(vm) {
                continue;
            }
            let used = used.of(&self.spec);
            let zone = HostZone::for_calls(&self.name, used.zone_bytes(), ZonePlace::part(&self.safe, vm))
                .with_context(|| format!("the zone of vm.{vm} for accel.{}", self.name))?;
            let channels = if self.spec.vm.is_some() {
                let (channels, window) = used.geometry();
                Some(Channels { area: zone.prepare_calls(channels, window)?, reach: Reach::Apart })
            } else {
                None
            };
            let mut slot = Slot { zone: Arc::new(zone), used, served: None, library: None, channels };
            let link = lock(&self.link).clone();
            if let Some(link) = link {
                ask::<()>(&link, &slot.request(vm))?.map_err(anyhow::Error::msg)?;
                slot.served = Some(true);
            }
            // A server that is about to be started is told of it then.
            lock(&self.slots).insert(vm.clone(), slot);
        }
        self.save()
    }

    /// Has the shim keep what is known of the slots.
    pub(super) fn save(&self) -> anyhow::Result<()> {
        let slots = lock(&self.slots).iter().map(|(vm, slot)| (vm.clone(), slot.record())).collect();
        let record =
            Record { name: self.name.clone(), spec: self.spec.clone(), scratch: self.scratch.clone(), slots };
        self.safe.shim().put_record(RECORD, &record)
    }
}

impl Service for Server {
    type Link = Peer;

    fn order(&self) -> anyhow::Result<(Order, Vec<OwnedFd>, Peer)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(ANSWER))?;
        let mut arguments: Vec<String> = ["accel", "serve", "--overseen"].map(str::to_owned).into();
        if let Some(metrics) = &self.spec.metrics {
            arguments.extend(["--metrics".to_owned(), metrics.to_string()]);
        }
        if self.spec.unconfined {
            arguments.push("--unconfined".to_owned());
        }
        let mut environment = BTreeMap::new();
        let text = |path: &Path| {
            path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
        };
        if let Some(cgroup) = &self.spec.cgroup {
            arguments.extend(["--cgroup".to_owned(), text(cgroup)?]);
        }
        if let Some(scratch) = &self.scratch {
            environment.insert("TMPDIR".to_owned(), text(scratch)?);
        }
        *lock(&self.started) = Some(ours.try_clone()?);
        let order = Order { arguments, environment, places: vec![Place::Child(0)], ..Order::default() };
        Ok((order, vec![theirs.into()], Peer::new(ours)))
    }

    /// Tells a new server whom it serves. A VM can damage its own zone, so that no server can enter it again; the others are served.
    fn begin(&self, link: Peer) -> anyhow::Result<()> {
        let _telling = lock(&self.telling);
        let link = Arc::new(Mutex::new(link));
        let slots: Vec<_> = lock(&self.slots)
            .iter()
            .map(|(vm, slot)| (vm.clone(), slot.request(vm), slot.served.is_some()))
            .collect();
        for (vm, request, known) in slots {
            let served = match ask::<()>(&link, &request)? {
                Ok(()) => true,
                Err(why) if known => {
                    crate::say!("{why}; its programs have no accelerator until tombolo down && tombolo up");
                    false
                }
                Err(why) => anyhow::bail!("{why}"),
            };
            if let Some(slot) = lock(&self.slots).get_mut(&vm) {
                slot.served = Some(served);
            }
        }
        *lock(&self.link) = Some(link);
        self.save()
    }

    fn ended(&self) {
        *lock(&self.link) = None;
        // The zones are free for the next one when its membership has ended.
        for slot in lock(&self.slots).values() {
            if let Err(e) = slot.zone.tend() {
                crate::say!("{e:#}");
            }
        }
    }

    fn keep(&self, shim: &Shim, starts: u32) -> anyhow::Result<()> {
        if let Some(link) = lock(&self.started).take() {
            shim.put(&[(LINK.to_owned(), link.as_fd())])?;
        }
        shim.put_record(RECORD, &starts)
    }
}
