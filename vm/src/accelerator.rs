// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server of an accelerator: `tombolo accel serve --overseen`, a child of the supervisor that is started again when it dies.
//!
//! Each VM that uses it has a zone of its own for that, which the supervisor keeps with its doorbells, as it keeps other zones. So a server's
//! death takes no VM along: the next one enters the same zones, and what programs start then works; those that were at it get their
//! API's own error. The server is told what to serve over a socket that is its standard input, a line of JSON each way, and
//! ends with that socket.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::accelspec::{AccelSpec, AccelUse};
use crate::child::{self, Guarded, Handle};
use crate::compose::Project;
use crate::control::{AccelStatus, AccelVm, Peer};
use crate::exec;
use crate::machine::Machine;
use crate::mount;
use crate::zones::{HostZone, Invitation};

/// How long a server may take to answer, or to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest pause before a server that died is started again.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A server that lived so long starts again at once.
const SETTLED: Duration = Duration::from_secs(2);
/// Lines of the server's log in an error.
const LAST_LINES: usize = 8;

/// An accelerator of a running project.
#[derive(Debug)]
pub struct Accelerator {
    name: String,
    spec: AccelSpec,
    dir: PathBuf,
    shared: Arc<Shared>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// A VM's place at the server.
#[derive(Debug)]
struct Seat {
    zone: Arc<HostZone>,
    used: AccelUse,
    /// Whether its guest had the client library when it came up.
    library: Option<bool>,
}

#[derive(Debug)]
struct Shared {
    /// What a server is started with.
    server: Server,
    /// Locked before `state`, and while a server is told of them.
    seats: Mutex<BTreeMap<String, Seat>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct Server {
    log: PathBuf,
    /// Where its workers compile: gone with it.
    scratch: PathBuf,
    metrics: Option<String>,
}

#[derive(Debug, Default)]
struct State {
    process: Option<(Handle, u32)>,
    /// It serves every seat.
    link: Option<Arc<Mutex<Peer>>>,
    starts: u32,
    /// Why the last one was given up.
    trouble: Option<String>,
    over: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks a server; it answers in the order of the questions.
fn ask(link: &Mutex<Peer>, request: &Value) -> anyhow::Result<Value> {
    let mut link = lock(link);
    let sent = link.send(request).map_err(anyhow::Error::from);
    let answer = sent.and_then(|()| link.receive::<Value>()?.context("the server has ended"));
    let answer = answer.inspect_err(|_| {
        // A late answer would be taken for the next one's: without its link this server ends.
        if let Ok(socket) = link.writer() {
            let _gone_already = socket.shutdown(std::net::Shutdown::Both);
        }
    })?;
    match answer["error"].as_str() {
        Some(error) => Err(anyhow::anyhow!("{error}")),
        None => Ok(answer["ok"].clone()),
    }
}

impl Seat {
    fn request(&self, vm: &str) -> Value {
        let (channels, window) = self.used.geometry();
        json!({ "do": "vm", "vm": vm, "zone": self.zone.path(), "channels": channels, "window": window,
            "memory": self.used.memory.map(|m| m.0), "objects": self.used.objects, "rate": self.used.rate,
            "weight": self.used.weight })
    }
}

impl Accelerator {
    /// Starts the server of accelerator `name` and waits until it serves each of its VMs. `dir` is the project's folder.
    ///
    /// # Errors
    /// When this host has no device for it; the server's own words.
    pub fn start(name: &str, project: &Project, dir: &Path) -> anyhow::Result<Accelerator> {
        let spec = project.compose.accel.get(name).cloned().unwrap_or_default();
        devices().with_context(|| format!("accel.{name}"))?;
        let of = format!("{}\n{name}", project.file.display());
        let scratch = std::env::temp_dir()
            .join(format!("tombolo-accel-{:08x}", crate::state::hash(of.as_bytes()) & 0xffff_ffff));
        // A supervisor that was killed has left it.
        remove(&scratch);
        crate::state::make_private(&scratch)?;
        let server = Server {
            log: dir.join(format!("{name}.accel")),
            scratch,
            metrics: spec.metrics.map(|address| address.to_string()),
        };
        let accelerator = Accelerator {
            name: name.to_owned(),
            spec,
            dir: dir.to_owned(),
            shared: Arc::new(Shared {
                server,
                seats: Mutex::default(),
                state: Mutex::default(),
                changed: Condvar::new(),
            }),
            watcher: Mutex::new(None),
        };
        accelerator.seat(project)?;
        let shared = accelerator.shared.clone();
        let spawned = std::thread::Builder::new().name(format!("accel-{name}"));
        *lock(&accelerator.watcher) = Some(spawned.spawn(move || watch(&shared))?);
        accelerator.wait_ready()?;
        Ok(accelerator)
    }

    /// What the compose file said of it.
    pub fn spec(&self) -> &AccelSpec {
        &self.spec
    }

    /// Whether a file says something else of it than what holds.
    pub fn differs(&self, project: &Project) -> bool {
        let Some(spec) = project.compose.accel.get(&self.name) else { return true };
        let used = |vm: &str| project.compose.vm.get(vm)?.accelerators.0.get(&self.name).map(|u| u.of(spec));
        *spec != self.spec
            || lock(&self.shared.seats).iter().any(|(vm, seat)| used(vm).is_some_and(|u| u != seat.used))
    }

    /// Makes places for VMs that the compose file has now and had not before, and waits until they are served.
    ///
    /// # Errors
    /// The server's own words.
    pub fn extend(&self, project: &Project) -> anyhow::Result<()> {
        self.seat(project)?;
        self.wait_ready()
    }

    fn seat(&self, project: &Project) -> anyhow::Result<()> {
        let mut seats = lock(&self.shared.seats);
        for (vm, spec) in &project.compose.vm {
            let Some(used) = spec.accelerators.0.get(&self.name) else { continue };
            if seats.contains_key(vm) {
                continue;
            }
            let used = used.of(&self.spec);
            let zone = HostZone::for_calls(&self.name, used.zone_bytes(), &self.dir)
                .with_context(|| format!("the zone of vm.{vm} for accel.{}", self.name))?;
            let seat = Seat { zone: Arc::new(zone), used, library: None };
            let link = lock(&self.shared.state).link.clone();
            if let Some(link) = link {
                ask(&link, &seat.request(vm)).map_err(|e| self.failure(&format!("{e:#}")))?;
            }
            // A server that is about to be started is told of it then.
            seats.insert(vm.clone(), seat);
        }
        Ok(())
    }

    /// Waits until there is a server that serves every place; one that has just died may be followed by one that lives.
    fn wait_ready(&self) -> anyhow::Result<()> {
        let state = lock(&self.shared.state);
        let last = state.starts + 1;
        let waits = |s: &mut State| s.link.is_none() && (s.trouble.is_none() || s.starts <= last);
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, PATIENCE, waits)
            .unwrap_or_else(PoisonError::into_inner);
        match (&state.link, &state.trouble) {
            (Some(_), _) => Ok(()),
            (None, Some(trouble)) => Err(self.failure(trouble)),
            (None, None) => {
                Err(self.failure(&format!("its server does not answer within {} s", PATIENCE.as_secs())))
            }
        }
    }

    fn failure(&self, what: &str) -> anyhow::Error {
        let mut text = format!("the accelerator '{}' failed: {what}", self.name);
        let log = std::fs::read_to_string(&self.shared.server.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        for line in &lines[lines.len().saturating_sub(LAST_LINES)..] {
            text.push_str("\n  | ");
            text.push_str(line);
        }
        anyhow::anyhow!(text)
    }

    /// The zone's devices for a VM that is about to be started; `None` where it has no place here.
    ///
    /// # Errors
    /// Those of the zone.
    pub fn invite(&self, vm: &str) -> anyhow::Result<Option<Invitation>> {
        let zone = lock(&self.shared.seats).get(vm).map(|seat| seat.zone.clone());
        zone.map(|zone| zone.invite(vm, &Default::default())).transpose()
    }

    /// A VM's QEMU has ended.
    pub fn gone(&self, vm: &str) {
        let zone = lock(&self.shared.seats).get(vm).map(|seat| seat.zone.clone());
        if let Some(zone) = zone {
            zone.gone(vm);
        }
    }

    /// The zones of its VMs.
    pub fn zones(&self) -> Vec<Arc<HostZone>> {
        lock(&self.shared.seats).values().map(|seat| seat.zone.clone()).collect()
    }

    /// Makes the device in a guest through its agent. False: the guest has no client library.
    ///
    /// # Errors
    /// Says whether the module or the device is missing.
    pub fn set_up(&self, machine: &Machine) -> anyhow::Result<bool> {
        const SET_UP: &str = r#"need_module
await_zone "$3"
[ -c "/dev/tombolo-calls-$2" ] || echo "$1" >/sys/module/tombolo/parameters/calls || { module_said; exit 4; }
for icd in /etc/OpenCL/vendors/*.icd; do
	[ -r "$icd" ] || continue
	library=$(head -n 1 "$icd")
	case $library in
		/*libtombolo[-_]opencl*) [ -e "$library" ] || continue ;;
		*libtombolo[-_]opencl*) ;;
		*) continue ;;
	esac
	echo yes
	break
done"#;
        let vm = machine.name();
        let uuid = lock(&self.shared.seats).get(vm).map(|seat| seat.zone.uuid());
        let uuid = uuid.with_context(|| format!("the VM '{vm}' has no place at '{}'", self.name))?;
        let identity = uuid.replace('-', "");
        let output = exec::script(
            machine.agent(),
            &format!("{}{SET_UP}", mount::FUNCTIONS),
            &[&uuid, &self.name, &identity],
            Duration::from_secs(120),
        )?;
        match output.code {
            0 => {}
            3 => anyhow::bail!(
                "the VM '{vm}' is a guest without the module: its kernel {} can't have the device of the accelerator '{}'; use the guest \
                 kit, install tombolo-dkms in the image, or leave it out of vm.{vm}.accelerators",
                output.out.trim(),
                self.name
            ),
            code => anyhow::bail!(
                "the VM '{vm}' can't have the device of the accelerator '{}' (code {code}): {}",
                self.name,
                output.err.trim().replace('\n', "; ")
            ),
        }
        let library = output.out.trim() == "yes";
        if let Some(seat) = lock(&self.shared.seats).get_mut(vm) {
            seat.library = Some(library);
        }
        Ok(library)
    }

    /// For `ps`.
    pub fn status(&self) -> AccelStatus {
        let (pid, starts, link) = {
            let state = lock(&self.shared.state);
            (state.process.as_ref().map(|(_, pid)| *pid), state.starts, state.link.clone())
        };
        // One that doesn't answer is about to end.
        let server = link.and_then(|link| ask(&link, &json!({ "do": "ls" })).ok());
        let tenants = server.as_ref().and_then(|s| s["tenants"].as_array()).cloned().unwrap_or_default();
        let vms = lock(&self.shared.seats)
            .iter()
            .map(|(vm, seat)| {
                let via = format!("vm:{vm}");
                let own: Vec<&Value> = tenants.iter().filter(|t| t["via"] == via.as_str()).collect();
                let sum = |key: &str| own.iter().filter_map(|t| t[key].as_u64()).sum();
                AccelVm {
                    vm: vm.clone(),
                    clients: own.len(),
                    memory: sum("memory"),
                    objects: sum("objects"),
                    library: seat.library,
                }
            })
            .collect();
        AccelStatus {
            name: self.name.clone(),
            api: self.spec.api,
            state: if server.is_some() { "serving" } else { "starting" }.into(),
            pid,
            starts,
            vms,
            server,
        }
    }

    /// Ends the server, and whoever works for it.
    fn stop(&self) {
        let mut state = lock(&self.shared.state);
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
                    "tombolo: the server of '{}' (process {pid}) does not end and is killed",
                    self.name
                );
                process.kill();
            }
        }
        drop(state);
        if let Some(watcher) = lock(&self.watcher).take() {
            // One that panicked has ended too.
            let _ended = watcher.join();
        }
    }
}

impl Drop for Accelerator {
    fn drop(&mut self) {
        self.stop();
        remove(&self.shared.server.scratch);
    }
}

/// What the host's OpenCL has to offer, a line each.
///
/// # Errors
/// That there is nothing, and what to do.
pub fn devices() -> anyhow::Result<Vec<String>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["accel", "devices"]).stdin(Stdio::null());
    child::tie(&mut command, &[]);
    let output = command.output().context("'tombolo accel devices' can't be run")?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        anyhow::bail!("{}", words.trim().trim_start_matches("tombolo: "));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

fn remove(folder: &Path) {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            eprintln!("tombolo: {}: {e}", folder.display());
        }
        _ => {}
    }
}

/// Keeps a server running until it is told that it is over. The server dies with this thread.
fn watch(shared: &Shared) {
    let mut pause = Duration::ZERO;
    loop {
        let mut state = lock(&shared.state);
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
        match shared.server.spawn() {
            Ok((mut server, handle, link)) => {
                state.process = Some((handle, server.pid()));
                drop(state);
                let trouble = shared.introduce(link).err();
                if trouble.is_some() {
                    server.kill();
                }
                let how = server.wait();
                // The zones are free for the next one when its membership has ended.
                for seat in lock(&shared.seats).values() {
                    if let Err(e) = seat.zone.tend() {
                        eprintln!("tombolo: {e:#}");
                    }
                }
                state = lock(&shared.state);
                (state.process, state.link) = (None, None);
                if !state.over {
                    let why = trouble.map_or_else(|| format!("it ended: {how:?}"), |e| format!("{e:#}"));
                    eprintln!("tombolo: {}: the server is started again: {why}", shared.server.log.display());
                    state.trouble = Some(why);
                }
            }
            Err(e) => state.trouble = Some(format!("{e:#}")),
        }
        shared.changed.notify_all();
        pause = match begun.elapsed() {
            lived if lived > SETTLED => Duration::ZERO,
            _ => (pause * 2).clamp(Duration::from_millis(100), PAUSE_MAX),
        };
    }
}

impl Shared {
    /// Tells a new server whom it serves.
    fn introduce(&self, link: Peer) -> anyhow::Result<()> {
        let seats = lock(&self.seats);
        let link = Arc::new(Mutex::new(link));
        for (vm, seat) in seats.iter() {
            ask(&link, &seat.request(vm))?;
        }
        let mut state = lock(&self.state);
        (state.link, state.trouble) = (Some(link), None);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }
}

impl Server {
    fn spawn(&self) -> anyhow::Result<(Guarded, Handle, Peer)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(PATIENCE))?;
        let log = File::options().create(true).append(true).open(&self.log);
        let log = log.with_context(|| self.log.display().to_string())?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["accel", "serve", "--overseen"]).env("TMPDIR", &self.scratch);
        if let Some(metrics) = &self.metrics {
            command.args(["--metrics", metrics]);
        }
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(log);
        child::tie(&mut command, &[]);
        let server = Guarded::spawn(&mut command)?;
        let handle = server.handle()?;
        Ok((server, handle, Peer::new(ours)?))
    }
}
