// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch of a network: `tombolo net run`, which is started again when it dies, and lives on when the supervisor does. VMs are joined
//! to it by sockets in the project's folder, to which QEMU connects again by itself; what is asked of it while it runs goes
//! over its control socket, a line of JSON each way.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tombolo_control::net::config::UplinkConfig;
use tombolo_control::net::{Answer, Done, Ports, Request};
use tombolo_control::socket;

use crate::compose::network::{self, Lease, NetSpec};
use crate::compose::ports::{self, Forward};
use crate::compose::{Compose, Project, VmSpec};
use crate::project::changes::{self, Kind};
use crate::project::keeper::{ANSWER, Keeper, Names, Part, Service};
use crate::shim::{Order, RECORD, Shim};
use config::Port;

mod config;
mod nic;

pub use config::uplink_name;
pub use nic::Nic;

/// Longest path of a Unix socket, in bytes.
const SOCKET_MAX: usize = 107;

/// Time for a switch to say what is up, and for a passt to be started again.
const SOON: Duration = Duration::from_secs(1);
/// Time for the driver of a device that has its address to start it at the switch.
const DRIVER: Duration = Duration::from_secs(5);
/// Longer than a passt runs that can't have its ports.
const MOMENT: Duration = Duration::from_millis(200);

/// A network of a running project.
#[derive(Debug)]
pub struct Network {
    switch: Arc<Switch>,
    keeper: Keeper,
}

/// What the supervisor knows of a network.
#[derive(Debug, Serialize, Deserialize)]
pub struct Record {
    name: String,
    spec: NetSpec,
    ports: BTreeMap<String, (Port, Lease)>,
    uplinks: Uplinks,
    starts: u32,
}

/// VMs' own uplinks, each with the ports of the host that it forwards.
type Uplinks = BTreeMap<String, (UplinkConfig, Vec<Forward>)>;

/// A port that the switch is to be told of.
struct NewPort {
    port: Port,
    uplink: Option<UplinkConfig>,
    /// The names of the VM's port and uplink that are there already.
    replaces: Vec<String>,
}

/// The switch: what it is told to have.
#[derive(Debug)]
struct Switch {
    name: String,
    spec: NetSpec,
    /// The project's folder.
    dir: PathBuf,
    ports: Mutex<BTreeMap<String, (Port, Lease)>>,
    uplinks: Mutex<Uplinks>,
}

impl Network {
    /// Goes on with a network whose switch an earlier supervisor has started; `dir` is the project's folder.
    ///
    /// # Errors
    /// This program can't read what the shim keeps, or there is no thread for it.
    pub fn adopt(shim: Shim, dir: &Path) -> anyhow::Result<(String, Network)> {
        let Record { name, spec, ports, uplinks, starts } = shim.record(RECORD)?;
        let (ports, uplinks) = (Mutex::new(ports), Mutex::new(uplinks));
        let switch = Arc::new(Switch { name: name.clone(), spec, dir: dir.to_owned(), ports, uplinks });
        let keeper = Keeper::adopt(switch.names(), switch.clone(), shim, starts)?;
        Ok((name, Network { switch, keeper }))
    }

    /// Gives the shim of its switch its socket again, where the project's folder has vanished.
    ///
    /// # Errors
    /// See [`Shim::listen_again`].
    pub fn listen_again(&self) -> anyhow::Result<()> {
        self.keeper.listen_again()
    }

    /// The network's table of the compose file, as it was when the switch was started.
    pub fn spec(&self) -> &NetSpec {
        &self.switch.spec
    }

    /// Its settings, as [`crate::project::changes`] compares them.
    pub fn settings(&self) -> Value {
        changes::value(&self.switch.spec)
    }

    /// The ports of the host that it forwards, by VM.
    pub fn forwards(&self) -> BTreeMap<String, Vec<Forward>> {
        self.switch.uplinks().iter().map(|(vm, (_, forwards))| (vm.clone(), forwards.clone())).collect()
    }

    /// Returns whether a VM has its ports of the host: the passt that forwards them runs on. `None`: it has none here, or the switch does not answer.
    pub fn has_ports(&self, vm: &str) -> Option<bool> {
        let uplinks = self.switch.uplinks();
        let (uplink, _) = uplinks.get(vm).filter(|(_, forwards)| !forwards.is_empty())?;
        let name = uplink.name.clone();
        drop(uplinks);
        if !self.is_up(&name)? {
            return Some(false);
        }
        // One that can't have them runs for a moment each time that it is started.
        std::thread::sleep(MOMENT);
        self.is_up(&name)
    }

    /// Whether frames can pass at a port or an uplink. `None`: the switch does not answer.
    fn is_up(&self, name: &str) -> Option<bool> {
        let answer = self.switch.ask_within::<Ports>(&Request::Ports, SOON).ok()?;
        Some(answer.ports.iter().any(|port| port.name == name && port.up))
    }

    /// Waits for the driver of a VM's device to start it at the switch, and returns whether it does; also where the switch does not answer.
    pub fn await_device(&self, vm: &str) -> bool {
        let begun = Instant::now();
        while self.is_up(vm) == Some(false) {
            if begun.elapsed() >= DRIVER {
                return false;
            }
            std::thread::sleep(MOMENT);
        }
        true
    }

    /// Waits for a passt that has just ended to be started again, and returns whether a VM has its ports then; also where it has none here, or the switch does
    /// not answer.
    pub fn await_ports(&self, vm: &str) -> bool {
        let begun = Instant::now();
        while self.has_ports(vm) == Some(false) {
            if begun.elapsed() >= SOON {
                return false;
            }
            std::thread::sleep(MOMENT);
        }
        true
    }

    /// The control socket of its switch.
    pub fn control(&self) -> PathBuf {
        self.switch.control()
    }

    /// The path of its switch's log.
    pub fn log(&self) -> PathBuf {
        self.switch.log()
    }

    /// Process of the switch, and how often it has been started.
    pub fn process(&self) -> (Option<u32>, u32) {
        self.keeper.process()
    }

    /// MACs and addresses by VM.
    pub fn leases(&self) -> BTreeMap<String, Lease> {
        self.switch.leases()
    }

    /// Waits until the switch answers and has all that it was told to have.
    fn wait_ready(&self) -> anyhow::Result<()> {
        let end = Instant::now() + ANSWER;
        let answer = loop {
            match self.switch.ask::<Ports>(&Request::Ports) {
                Ok(answer) => break answer,
                // It is starting, or has ended: the second start tells.
                Err(e) if self.keeper.process().1 > 1 || Instant::now() > end => {
                    let why = self.keeper.trouble().unwrap_or_else(|| format!("{e:#}"));
                    return Err(self.keeper.failure(&format!("its switch does not start: {why}")));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let there: Vec<&str> = answer.ports.iter().map(|p| p.name.as_str()).collect();
        let uplinks: Vec<String> = self.switch.all_uplinks().into_iter().map(|uplink| uplink.name).collect();
        for wanted in self.switch.ports().keys().cloned().chain(uplinks) {
            if !there.contains(&wanted.as_str()) {
                return Err(self.keeper.failure(&format!("its switch can't have '{wanted}'")));
            }
        }
        Ok(())
    }

    /// The device of a VM; `None`: the VM has no port here.
    pub fn nic(&self, vm: &str) -> Option<Nic> {
        let ports = self.switch.ports();
        let (port, lease) = ports.get(vm)?;
        let names = ports.iter().filter_map(|(vm, (_, lease))| Some((vm.clone(), lease.address?.0)));
        Some(Nic {
            net: self.switch.name.clone(),
            socket: port.socket.clone(),
            lease: lease.clone(),
            queues: port.queues,
            mtu: self.switch.spec.mtu.unwrap_or(1500),
            gateway: self.switch.spec.gateway,
            names: names.collect(),
        })
    }
}

impl Part for Network {
    fn used_by<'a>(_: &str, vm: &'a VmSpec, _: &'a Compose) -> Vec<&'a String> {
        vm.networks.0.keys().collect()
    }

    /// Starts the switch of network `name` with a port for each of its VMs, and waits until it answers. `dir` is the
    /// project's folder.
    ///
    /// # Errors
    /// The switch's own words where it can't have its uplink or a port.
    fn start(name: &str, project: &Project, dir: &Path) -> anyhow::Result<Network> {
        let spec = project.compose.net.get(name).cloned().unwrap_or_default();
        let (ports, uplinks) = (Mutex::default(), Mutex::default());
        let switch = Switch { name: name.to_owned(), spec, dir: dir.to_owned(), ports, uplinks };
        let switch = Arc::new(switch);
        switch.plan(project, &BTreeSet::new())?;
        switch.write_config()?;
        let keeper = Keeper::start(switch.names(), switch.clone())?;
        let network = Network { switch, keeper };
        network.wait_ready()?;
        Ok(network)
    }

    /// Makes ports for VMs that the compose file has now and had not before. A port of a VM in `starting` that the file has changed is
    /// removed and made anew.
    ///
    /// # Errors
    /// The switch's own words.
    fn extend(&self, project: &Project, starting: &BTreeSet<&String>) -> anyhow::Result<()> {
        let new = self.switch.plan(project, starting)?;
        if new.is_empty() {
            return Ok(());
        }
        // One that starts again meanwhile has the new ports from its file.
        self.switch.write_config()?;
        self.keeper.keep(&*self.switch)?;
        // A port of the host may go over from one VM to another.
        for name in new.iter().flat_map(|new| new.replaces.clone()) {
            self.switch.ask::<Done>(&Request::Remove { name })?;
        }
        for NewPort { port, uplink, .. } in new {
            self.switch.ask::<Done>(&Request::Add { port })?;
            if let Some(uplink) = uplink {
                self.switch.ask::<Done>(&Request::AddUplink { uplink })?;
            }
        }
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Its sockets are gone afterwards.
        self.keeper.stop();
        let _ = std::fs::remove_file(self.switch.config());
    }
}

impl Switch {
    fn names(&self) -> Names {
        Names { kind: Kind::Network, name: self.name.clone(), process: "switch", log: self.log() }
    }

    fn control(&self) -> PathBuf {
        self.dir.join(format!("{}.net", self.name))
    }

    fn config(&self) -> PathBuf {
        self.dir.join(format!("{}.switch.toml", self.name))
    }

    fn log(&self) -> PathBuf {
        self.dir.join(format!("{}.switch", self.name))
    }

    fn ports(&self) -> MutexGuard<'_, BTreeMap<String, (Port, Lease)>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn uplinks(&self) -> MutexGuard<'_, Uplinks> {
        self.uplinks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The uplink of all VMs, or those of each.
    fn all_uplinks(&self) -> Vec<UplinkConfig> {
        let own: Vec<_> = self.uplinks().values().map(|(uplink, _)| uplink.clone()).collect();
        let shared = self.spec.uplink.iter().filter_map(|uplink| config::of_uplink(&self.name, uplink));
        shared.chain(own).collect()
    }

    fn leases(&self) -> BTreeMap<String, Lease> {
        self.ports().iter().map(|(vm, (_, lease))| (vm.clone(), lease.clone())).collect()
    }

    /// Plans the ports of VMs that have none, and anew those of VMs in `starting`; what is returned is not yet the switch's.
    fn plan(&self, project: &Project, starting: &BTreeSet<&String>) -> anyhow::Result<Vec<NewPort>> {
        let id = project.file.to_string_lossy();
        // The switch keeps the settings with which it was started.
        let mut compose = project.compose.clone();
        compose.net.insert(self.name.clone(), self.spec.clone());
        let held = self.leases();
        let leases = network::leases(&compose, &id, &self.name, &held);
        let mut new = Vec::new();
        for (vm, lease) in leases.map_err(|(_, message)| anyhow::anyhow!(message))? {
            if held.contains_key(&vm) && !starting.contains(&vm) {
                continue;
            }
            let holder = held.iter().find(|(other, old)| {
                **other != vm
                    && !starting.contains(other)
                    && old.address.is_some()
                    && old.address == lease.address
            });
            if let Some((other, _)) = holder {
                anyhow::bail!(
                    "vm.{vm} is to have an address in '{}' that the VM '{other}' still has; tombolo restart {other} {vm}",
                    self.name
                );
            }
            let socket = self.dir.join(format!("{}.{vm}.port", self.name));
            let length = socket.as_os_str().len();
            anyhow::ensure!(
                length <= SOCKET_MAX,
                "net.{}: the socket {} would have {length} bytes, {SOCKET_MAX} are possible; shorten the names of project, \
                 network or VM",
                self.name,
                socket.display()
            );
            let nic = &project.compose.vm[&vm].networks.0[&self.name];
            let port = config::of_port(&vm, socket, nic, &lease, &self.spec);
            let forwards = ports::through(&compose, &compose.vm[&vm], &self.name);
            let uplink = config::of_vm(&vm, &self.spec, forwards);
            let own = uplink.clone().map(|uplink| (uplink, forwards.to_owned()));
            let old_uplink = match own {
                Some(own) => self.uplinks().insert(vm.clone(), own),
                None => self.uplinks().remove(&vm),
            };
            let old_uplink = old_uplink.map(|(uplink, _)| uplink);
            let old_port = self.ports().insert(vm, (port.clone(), lease)).map(|(port, _)| port);
            if old_port.as_ref() != Some(&port) || old_uplink != uplink {
                let replaces =
                    old_port.map(|p| p.name).into_iter().chain(old_uplink.map(|u| u.name)).collect();
                new.push(NewPort { port, uplink, replaces });
            }
        }
        Ok(new)
    }

    fn write_config(&self) -> anyhow::Result<()> {
        let ports = self.ports().values().map(|(port, _)| port.clone()).collect();
        let config = config::of_network(&self.name, &self.spec, self.control(), ports, self.all_uplinks());
        Ok(crate::project::state::write_atomically(&self.config(), toml::to_string(&config)?.as_bytes())?)
    }

    fn ask<T: DeserializeOwned>(&self, request: &Request<Port, UplinkConfig>) -> anyhow::Result<T> {
        self.ask_within(request, ANSWER)
    }

    fn ask_within<T: DeserializeOwned>(
        &self,
        request: &Request<Port, UplinkConfig>,
        limit: Duration,
    ) -> anyhow::Result<T> {
        let who = ("switch", "it may be starting");
        let answer = socket::ask::<Answer<T>>(&self.control(), request, Some(limit), who);
        let (value, _) = answer.with_context(|| format!("net.{}", self.name))?;
        Ok(value)
    }
}

impl Service for Switch {
    type Link = ();

    /// Its file may have vanished with the project's folder.
    fn order(&self) -> anyhow::Result<(Order, Vec<OwnedFd>, ())> {
        // One that is there is up to date, also where there is no room for another.
        if !self.config().exists() {
            self.write_config()?;
        }
        let config = self.config().into_os_string().into_string();
        let config = config.map_err(|path| anyhow::anyhow!("{} is not UTF-8", path.to_string_lossy()))?;
        let arguments = ["net", "run", "--config"].map(str::to_owned).into_iter().chain([config]).collect();
        Ok((Order { arguments, ..Order::default() }, Vec::new(), ()))
    }

    fn begin(&self, (): ()) -> anyhow::Result<()> {
        Ok(())
    }

    fn ended(&self) {}

    fn keep(&self, shim: &Shim, starts: u32) -> anyhow::Result<()> {
        let (name, spec) = (self.name.clone(), self.spec.clone());
        let (ports, uplinks) = (self.ports().clone(), self.uplinks().clone());
        shim.put_record(RECORD, &Record { name, spec, ports, uplinks, starts })
    }
}
