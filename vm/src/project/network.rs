// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch of a network: `tombolo net run`, a child of the supervisor that is started again when it dies. VMs are joined
//! to it by sockets in the project's folder, to which QEMU connects again by itself; what is asked of it while it runs goes
//! over its control socket, a line of JSON each way.
//!
//! The switch is told to end (rather than killed) when the supervisor dies, so that it takes its sockets with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tombolo_control::net::{Answer, Done, Ports, Request};
use tombolo_control::socket;

use crate::child::{self, Guarded};
use crate::compose::network::{self, Lease, NetSpec};
use crate::compose::ports::{self, Forward, Protocol};
use crate::compose::{Compose, Project, VmSpec};
use crate::guest::agent::Agent;
use crate::guest::exec;
use crate::project::changes::{self, Kind};
use crate::project::keeper::{Keeper, KeeperState, Names, PATIENCE, Part, Service};

/// Longest path of a Unix socket, in bytes.
const SOCKET_MAX: usize = 107;

/// A VM's device in a network.
#[derive(Clone, Debug)]
pub struct Nic {
    /// The network.
    pub net: String,
    /// Where QEMU connects.
    pub socket: PathBuf,
    /// MAC and address.
    pub lease: Lease,
    /// Queue pairs.
    pub queues: u32,
    /// Largest IP packet.
    pub mtu: u16,
    /// Way out of the subnet.
    pub gateway: Option<std::net::Ipv4Addr>,
    /// Names of the network's VMs that have an address.
    pub names: Vec<(String, std::net::Ipv4Addr)>,
}

impl Nic {
    /// Sets the address of the guest's device through its agent, and tells the guest the names of the others.
    ///
    /// # Errors
    /// The guest's own words.
    pub fn set_address(&self, vm: &str, agent: &Agent) -> anyhow::Result<()> {
        const SET: &str = r##"for nic in /sys/class/net/*; do
	[ -e "$nic/device" ] && [ "$(cat "$nic/address")" = "$1" ] && break
	nic=
done
[ "$nic" ] || { uname -r; exit 3; }
nic=${nic##*/}
ip link set dev "$nic" mtu "$2" up || exit 1
case $3 in
	dhcp) [ ! -e /etc/udhcpc ] || udhcpc -n -q -t 10 -i "$nic" -s /etc/udhcpc || exit 1 ;;
	none) exit ;;
	*)
		ip -4 addr flush dev "$nic" && ip addr add "$3" brd + dev "$nic" || exit 1
		[ -z "$4" ] || ip route replace default via "$4" || exit 1 ;;
esac
[ $# -gt 5 ] || exit 0
net=$5 hosts=$(sed "/# tombolo $5\$/d" /etc/hosts)
shift 5
{ echo "$hosts"; for line; do echo "$line # tombolo $net"; done; } >/etc/hosts"##;
        let address = match self.lease.address {
            _ if self.lease.dhcp => "dhcp".to_owned(),
            Some((ip, prefix)) => format!("{ip}/{prefix}"),
            None => "none".to_owned(),
        };
        let mut args = vec![self.lease.mac.to_string(), self.mtu.to_string(), address];
        args.push(self.gateway.map(|g| g.to_string()).unwrap_or_default());
        args.push(self.net.clone());
        args.extend(self.names.iter().map(|(name, ip)| format!("{ip} {name} {name}.{}", self.net)));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = exec::script(agent, SET, &args, Duration::from_secs(60))?;
        match output.code {
            0 => Ok(()),
            3 => anyhow::bail!(
                "the VM '{}' sees no network device {}: its kernel {} may lack virtio_net",
                vm,
                self.lease.mac,
                output.out.trim()
            ),
            code => anyhow::bail!(
                "the VM '{}' can't set its address in the network '{}' (code {code}): {}",
                vm,
                self.net,
                output.err.trim()
            ),
        }
    }
}

/// A network of a running project.
#[derive(Debug)]
pub struct Network {
    switch: Arc<Switch>,
    keeper: Keeper,
}

/// What the next program of this process needs to go on with a network.
#[derive(Debug, Serialize, Deserialize)]
pub struct NetworkState {
    name: String,
    spec: NetSpec,
    forwards: Vec<Forward>,
    dir: PathBuf,
    ports: BTreeMap<String, (Value, Lease)>,
    switch: KeeperState,
}

/// A port that the switch is to be told of.
struct NewPort {
    port: Value,
    /// A port of this name is there already.
    replaces: bool,
}

/// The switch: what it is told to have.
#[derive(Debug)]
struct Switch {
    name: String,
    spec: NetSpec,
    /// Ports of the host that its uplink forwards.
    forwards: Vec<Forward>,
    /// The project's folder.
    dir: PathBuf,
    ports: Mutex<BTreeMap<String, (Value, Lease)>>,
}

impl Network {
    /// What the next program needs; nobody is in the household.
    pub fn hand_over(&self) -> NetworkState {
        let switch = &self.switch;
        NetworkState {
            name: switch.name.clone(),
            spec: switch.spec.clone(),
            forwards: switch.forwards.clone(),
            dir: switch.dir.clone(),
            ports: switch.ports().clone(),
            switch: self.keeper.hand_over(),
        }
    }

    /// Goes on with a network of the program before.
    ///
    /// # Errors
    /// When its switch is no child of this process.
    pub fn take_over(left: NetworkState) -> anyhow::Result<Network> {
        let NetworkState { name, spec, forwards, dir, ports, switch: kept } = left;
        let switch = Arc::new(Switch { name, spec, forwards, dir, ports: Mutex::new(ports) });
        let keeper = Keeper::take_over(switch.names(), switch.clone(), kept)?;
        Ok(Network { switch, keeper })
    }

    /// What the compose file said of it.
    pub fn spec(&self) -> &NetSpec {
        &self.switch.spec
    }

    /// Its settings, as [`crate::project::changes`] compares them.
    pub fn settings(&self) -> Value {
        changes::network(&self.switch.spec, self.switch.forwards.iter())
    }

    /// The control socket of its switch.
    pub fn control(&self) -> PathBuf {
        self.switch.control()
    }

    /// What its switch said.
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
        let end = Instant::now() + PATIENCE;
        let answer = loop {
            match self.switch.ask::<Ports>(&Request::Ports) {
                Ok(answer) => break answer,
                // It is starting, or has ended: the second start tells.
                Err(e) if self.keeper.process().1 > 1 || Instant::now() > end => {
                    return Err(self.keeper.failure(&format!("its switch does not start: {e:#}")));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let there: Vec<&str> = answer.ports.iter().map(|p| p.name.as_str()).collect();
        let uplink = self.switch.spec.uplink.as_ref().map(|_| "uplink".to_owned());
        for wanted in self.switch.ports().keys().cloned().chain(uplink) {
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
            socket: port["socket"].as_str()?.into(),
            lease: lease.clone(),
            queues: port["queues"].as_u64().and_then(|q| u32::try_from(q).ok())?,
            mtu: self.switch.spec.mtu.unwrap_or(1500),
            gateway: self.switch.spec.gateway,
            names: names.collect(),
        })
    }
}

impl Part for Network {
    fn used_by<'a>(_: &str, vm: &'a VmSpec, _: &'a Compose) -> impl Iterator<Item = &'a String> + use<'a> {
        vm.networks.0.keys()
    }

    /// Starts the switch of network `name` with a port for each of its VMs, and waits until it answers. `dir` is the
    /// project's folder.
    ///
    /// # Errors
    /// The switch's own words where it can't have its uplink or a port.
    fn start(name: &str, project: &Project, dir: &Path) -> anyhow::Result<Network> {
        let spec = project.compose.net.get(name).cloned().unwrap_or_default();
        let forwards = ports::through(&project.compose, name).cloned().collect();
        let switch = Arc::new(Switch {
            name: name.to_owned(),
            spec,
            forwards,
            dir: dir.to_owned(),
            ports: Mutex::default(),
        });
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
        for NewPort { port, replaces } in new {
            if replaces {
                let name = port["name"].as_str().unwrap_or_default().to_owned();
                self.switch.ask::<Done>(&Request::Remove { name })?;
            }
            self.switch.ask::<Done>(&Request::Add { port })?;
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

    fn ports(&self) -> MutexGuard<'_, BTreeMap<String, (Value, Lease)>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leases(&self) -> BTreeMap<String, Lease> {
        self.ports().iter().map(|(vm, (_, lease))| (vm.clone(), lease.clone())).collect()
    }

    /// Plans the ports of VMs that have none, and anew those of VMs in `starting`; what is returned is not yet the switch's.
    fn plan(&self, project: &Project, starting: &BTreeSet<&String>) -> anyhow::Result<Vec<NewPort>> {
        let id = project.file.to_string_lossy();
        // What holds is what the file said when the switch was started.
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
            let port = network::port(
                &vm,
                &socket,
                &project.compose.vm[&vm].networks.0[&self.name],
                &lease,
                self.spec.dhcp,
            );
            let before = self.ports().insert(vm, (port.clone(), lease));
            if before.as_ref().is_none_or(|(old, _)| *old != port) {
                new.push(NewPort { port, replaces: before.is_some() });
            }
        }
        Ok(new)
    }

    fn write_config(&self) -> anyhow::Result<()> {
        let mut switch = json!({ "control": self.control() });
        let spec = &self.spec;
        let numbers = [
            ("workers", spec.workers.map(u64::from)),
            ("poll-us", spec.poll_us),
            ("budget", spec.budget.map(u64::from)),
        ];
        for (key, value) in numbers.into_iter().filter_map(|(k, v)| Some((k, v?))) {
            switch[key] = value.into();
        }
        if !spec.cpus.is_empty() {
            switch["cpus"] = json!(spec.cpus);
        }
        if let Some(address) = &spec.metrics {
            switch["metrics"] = address.to_string().into();
        }
        let ports: Vec<Value> = self.ports().values().map(|(port, _)| port.clone()).collect();
        let mut config = json!({ "switch": switch, "port": ports });
        if let Some(service) = network::service(&self.name, &self.spec) {
            config["dhcp"] = service;
        }
        if let Some(multicast) = &spec.multicast {
            config["switch"]["multicast"] = json!(multicast);
        }
        if let Some(prefix) = &spec.subnet6 {
            config["ipv6"] = json!({ "prefix": prefix });
        }
        if let Some(uplink) = &spec.uplink {
            let mut way = match uplink {
                network::Uplink::User => json!({ "user": "passt" }),
                network::Uplink::Tap(name) => json!({ "tap": name }),
                network::Uplink::Interface(name) => json!({ "interface": name }),
            };
            for (key, protocol) in [("tcp-ports", Protocol::Tcp), ("udp-ports", Protocol::Udp)] {
                let wanted = self.forwards.iter().filter(|forward| forward.protocol == protocol);
                let wanted: Vec<String> = wanted.map(Forward::for_passt).collect();
                if !wanted.is_empty() {
                    way[key] = json!(wanted);
                }
            }
            way["name"] = "uplink".into();
            config["uplink"] = json!([way]);
        }
        Ok(crate::project::state::write_atomically(&self.config(), toml::to_string(&config)?.as_bytes())?)
    }

    fn ask<T: DeserializeOwned>(&self, request: &Request<Value, Value>) -> anyhow::Result<T> {
        let who = ("switch", "it may be starting");
        let answer = socket::ask::<Answer<T>>(&self.control(), request, Some(PATIENCE), who);
        let (value, _) = answer.with_context(|| format!("net.{}", self.name))?;
        Ok(value)
    }
}

impl Service for Switch {
    type Link = ();

    /// The switch is told to end when the thread that starts it ends.
    fn spawn(&self, log: File) -> anyhow::Result<(Guarded, ())> {
        let mut command = crate::child::own_program();
        command.args(["net", "run", "--config"]).arg(self.config());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        child::tie_to_end(&mut command, Signal::TERM, &[]);
        Ok((Guarded::spawn(command)?, ()))
    }

    fn begin(&self, (): ()) -> anyhow::Result<()> {
        Ok(())
    }

    fn ended(&self) {}
}
