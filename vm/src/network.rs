// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch of a network: `tombolo net run`, a child of the supervisor that is started again when it dies. VMs are joined
//! to it by sockets in the project's folder, to which QEMU connects again by itself; what is asked of it while it runs goes
//! over its control socket, a line of JSON each way.
//!
//! The switch is told to end (rather than killed) when the supervisor dies, so that it takes its sockets with it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::agent::Agent;
use crate::child::{self, Guarded, Handle};
use crate::compose::Project;
use crate::exec;
use crate::netspec::{self, Lease, NetSpec};

/// How long a switch may take to answer, or to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest pause before a switch that died is started again.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A switch that lived so long starts again at once.
const SETTLED: Duration = Duration::from_secs(2);
/// Longest path of a Unix socket, in bytes.
const SOCKET_MAX: usize = 107;
/// Lines of the switch's log in an error.
const LAST_LINES: usize = 8;

/// A VM's end of a network.
#[derive(Clone, Debug)]
pub struct Plug {
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

impl Plug {
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
	dhcp) [ ! -e /etc/udhcpc ] || udhcpc -n -q -t 10 -i "$nic" -s /etc/udhcpc; exit ;;
	none) exit ;;
esac
ip -4 addr flush dev "$nic" && ip addr add "$3" brd + dev "$nic" || exit 1
[ -z "$4" ] || ip route replace default via "$4" || exit 1
net=$5 hosts=$(sed "/# tombolo $5\$/d" /etc/hosts)
shift 5
{ echo "$hosts"; for line; do echo "$line # tombolo $net"; done; } >/etc/hosts"##;
        let address = match self.lease.address {
            Some((ip, prefix)) => format!("{ip}/{prefix}"),
            None if self.lease.dhcp => "dhcp".to_owned(),
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
    name: String,
    spec: NetSpec,
    dir: PathBuf,
    shared: Arc<Shared>,
    watcher: Mutex<Option<JoinHandle<()>>>,
    ports: Mutex<BTreeMap<String, (Value, Lease)>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    process: Option<(Handle, u32)>,
    starts: u32,
    over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Network {
    /// Starts the switch of network `name` with a port for each of its VMs, and waits until it answers. `dir` is the
    /// project's folder.
    ///
    /// # Errors
    /// The switch's own words where it can't have its uplink or a port.
    pub fn start(name: &str, project: &Project, dir: &Path) -> anyhow::Result<Network> {
        let spec = project.compose.net.get(name).cloned().unwrap_or_default();
        let network = Network {
            name: name.to_owned(),
            spec,
            dir: dir.to_owned(),
            shared: Arc::default(),
            watcher: Mutex::new(None),
            ports: Mutex::default(),
        };
        network.plan(project)?;
        network.write_config()?;
        let (config, log, shared) = (network.config(), network.log(), network.shared.clone());
        let spawned = std::thread::Builder::new().name(format!("net-{name}"));
        let watcher = spawned.spawn(move || watch(&shared, &config, &log))?;
        *network.watcher.lock().unwrap_or_else(PoisonError::into_inner) = Some(watcher);
        network.wait_ready()?;
        Ok(network)
    }

    /// What the compose file said of it.
    pub fn spec(&self) -> &NetSpec {
        &self.spec
    }

    /// The control socket of its switch.
    pub fn control(&self) -> PathBuf {
        self.dir.join(format!("{}.net", self.name))
    }

    fn config(&self) -> PathBuf {
        self.dir.join(format!("{}.switch.toml", self.name))
    }

    /// What its switch said.
    pub fn log(&self) -> PathBuf {
        self.dir.join(format!("{}.switch", self.name))
    }

    /// Process of the switch, and how often it has been started.
    pub fn process(&self) -> (Option<u32>, u32) {
        let state = self.shared.lock();
        (state.process.as_ref().map(|(_, pid)| *pid), state.starts)
    }

    fn ports(&self) -> MutexGuard<'_, BTreeMap<String, (Value, Lease)>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// MACs and addresses by VM.
    pub fn leases(&self) -> BTreeMap<String, Lease> {
        self.ports().iter().map(|(vm, (_, lease))| (vm.clone(), lease.clone())).collect()
    }

    fn plan(&self, project: &Project) -> anyhow::Result<Vec<Value>> {
        let id = project.file.to_string_lossy();
        let leases = netspec::leases(&project.compose, &id, &self.name, &self.leases());
        let mut new = Vec::new();
        for (vm, lease) in leases.map_err(|(_, message)| anyhow::anyhow!(message))? {
            if self.ports().contains_key(&vm) {
                continue;
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
            let port = netspec::port(&vm, &socket, &project.compose.vm[&vm].networks.0[&self.name], &lease);
            new.push(port.clone());
            self.ports().insert(vm, (port, lease));
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
        if let Some(address) = spec.metrics {
            switch["metrics"] = address.to_string().into();
        }
        let ports: Vec<Value> = self.ports().values().map(|(port, _)| port.clone()).collect();
        let mut config = json!({ "switch": switch, "port": ports });
        if let Some(uplink) = &spec.uplink {
            let mut way = match uplink {
                netspec::Uplink::User => json!({ "user": "passt" }),
                netspec::Uplink::Tap(name) => json!({ "tap": name }),
                netspec::Uplink::Interface(name) => json!({ "interface": name }),
            };
            way["name"] = "uplink".into();
            config["uplink"] = json!([way]);
        }
        Ok(crate::state::write_atomically(&self.config(), toml::to_string(&config)?.as_bytes())?)
    }

    /// Waits until the switch answers and has all that it was told to have.
    fn wait_ready(&self) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        let answer = loop {
            match self.ask(&json!({ "do": "ports" })) {
                Ok(answer) => break answer,
                // It is starting, or has ended: the second start tells.
                Err(e) if self.shared.lock().starts > 1 || Instant::now() > end => {
                    return Err(self.failure(&format!("its switch does not start: {e:#}")));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let there: Vec<&str> =
            answer["ports"].as_array().into_iter().flatten().filter_map(|p| p["name"].as_str()).collect();
        let uplink = self.spec.uplink.as_ref().map(|_| "uplink".to_owned());
        for wanted in self.ports().keys().cloned().chain(uplink) {
            if !there.contains(&wanted.as_str()) {
                return Err(self.failure(&format!("its switch can't have '{wanted}'")));
            }
        }
        Ok(())
    }

    fn failure(&self, what: &str) -> anyhow::Error {
        let mut text = format!("the network '{}' failed: {what}", self.name);
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        for line in &lines[lines.len().saturating_sub(LAST_LINES)..] {
            text.push_str("\n  | ");
            text.push_str(line);
        }
        anyhow::anyhow!(text)
    }

    fn ask(&self, request: &Value) -> anyhow::Result<Value> {
        let mut stream = UnixStream::connect(self.control())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        writeln!(stream, "{request}")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        let answer: Value = serde_json::from_str(&line).context("the switch's answer")?;
        match answer["error"].as_str() {
            Some(error) => Err(anyhow::anyhow!("net.{}: {error}", self.name)),
            None => Ok(answer),
        }
    }

    /// Makes ports for VMs that the compose file has now and had not before.
    ///
    /// # Errors
    /// The switch's own words.
    pub fn extend(&self, project: &Project) -> anyhow::Result<()> {
        let new = self.plan(project)?;
        if new.is_empty() {
            return Ok(());
        }
        self.write_config()?;
        for port in new {
            self.ask(&json!({ "do": "add", "port": port }))?;
        }
        Ok(())
    }

    /// What a VM needs to join; `None` where it has no port here.
    pub fn plug(&self, vm: &str, project: &Project) -> Option<Plug> {
        let ports = self.ports();
        let (port, lease) = ports.get(vm)?;
        let names = ports.iter().filter_map(|(vm, (_, lease))| Some((vm.clone(), lease.address?.0)));
        Some(Plug {
            net: self.name.clone(),
            socket: port["socket"].as_str()?.into(),
            lease: lease.clone(),
            queues: port["queues"].as_u64().and_then(|q| u32::try_from(q).ok())?,
            mtu: self.spec.mtu.unwrap_or(1500),
            gateway: project.compose.net.get(&self.name).and_then(|n| n.gateway),
            names: names.collect(),
        })
    }

    /// Ends the switch; its sockets are gone afterwards.
    fn stop(&self) {
        let mut state = self.shared.lock();
        state.over = true;
        if let Some((process, _)) = &state.process {
            process.signal(Signal::TERM);
        }
        self.shared.changed.notify_all();
        let (mut state, late) = self
            .shared
            .changed
            .wait_timeout_while(state, PATIENCE, |s| s.process.is_some())
            .unwrap_or_else(PoisonError::into_inner);
        if late.timed_out() {
            if let Some((process, pid)) = state.process.take() {
                eprintln!(
                    "tombolo: the switch of '{}' (process {pid}) does not end and is killed",
                    self.name
                );
                process.kill();
            }
        }
        drop(state);
        if let Some(watcher) = self.watcher.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // One that panicked has ended too.
            let _ended = watcher.join();
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_file(self.config());
    }
}

/// Keeps a switch running until it is told that it is over. The switch is told to end when this thread ends.
fn watch(shared: &Shared, config: &Path, log: &Path) {
    let mut pause = Duration::ZERO;
    loop {
        let mut state = shared.lock();
        if !pause.is_zero() {
            (state, _) = shared
                .changed
                .wait_timeout_while(state, pause, |s| !s.over)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.over {
            return;
        }
        state.starts += 1;
        let begun = Instant::now();
        match spawn(config, log) {
            Ok((mut switch, handle)) => {
                state.process = Some((handle, switch.pid()));
                drop(state);
                let how = switch.wait();
                state = shared.lock();
                state.process = None;
                if !state.over {
                    eprintln!(
                        "tombolo: the switch of {} ended: {how:?}; it is started again",
                        config.display()
                    );
                }
            }
            Err(e) => eprintln!("tombolo: {e:#}"),
        }
        shared.changed.notify_all();
        pause = match begun.elapsed() {
            lived if lived > SETTLED => Duration::ZERO,
            _ => (pause * 2).clamp(Duration::from_millis(100), PAUSE_MAX),
        };
    }
}

fn spawn(config: &Path, log: &Path) -> anyhow::Result<(Guarded, Handle)> {
    let log =
        File::options().create(true).append(true).open(log).with_context(|| log.display().to_string())?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["net", "run", "--config"]).arg(config);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    child::tie_to_end(&mut command, Signal::TERM, &[]);
    let switch = Guarded::spawn(&mut command)?;
    let handle = switch.handle()?;
    Ok((switch, handle))
}
