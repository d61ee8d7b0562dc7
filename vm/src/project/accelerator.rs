// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server of an accelerator: `tombolo accel serve --overseen`, a child of the supervisor that is started again when it dies.
//!
//! Each VM that uses it has a zone of its own for that, which the supervisor keeps with its doorbells, as it keeps other zones. So a server's
//! death takes no VM along: the next one enters the same zones, and what programs start then works; those that were at it get their
//! API's own error. The server is told what to serve over a socket that is its standard input, a line of JSON each way, and
//! ends with that socket.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tombolo_control::accel::{Answer, Guest, Listing, Request, Tenant};
use tombolo_control::socket::Answer as _;

use crate::child::{self, Guarded};
use crate::compose::accelerator::{AccelSpec, AccelUse};
use crate::compose::{Project, VmSpec};
use crate::guest::exec;
use crate::guest::mount;
use crate::machine::Machine;
use crate::project::changes::{self, Kind};
use crate::project::control::{AccelStatus, AccelVm};
use crate::project::keeper::{Keeper, Names, PATIENCE, Part, Service};
use crate::project::peer::Peer;
use crate::project::zones::{HostZone, Invitation};

/// An accelerator of a running project.
#[derive(Debug)]
pub struct Accelerator {
    server: Arc<Server>,
    keeper: Keeper,
}

/// A VM's place at the server.
#[derive(Debug)]
struct Seat {
    zone: Arc<HostZone>,
    used: AccelUse,
    /// The server is in its zone; `None`: none has ever been.
    served: Option<bool>,
    /// Whether its guest had the client library when it came up.
    library: Option<bool>,
}

#[derive(Debug)]
struct Server {
    name: String,
    spec: AccelSpec,
    /// Where its workers compile: gone with the accelerator.
    scratch: PathBuf,
    /// Locked before `link`, and while a server is told of them.
    seats: Mutex<BTreeMap<String, Seat>>,
    /// It serves every seat.
    link: Mutex<Option<Arc<Mutex<Peer>>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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

/// How long `ps` waits for a server.
const LOOK: Duration = Duration::from_millis(300);

/// What a server says of itself, where it answers soon: nobody waits long for what is only looked at. One that doesn't answer at all ends by
/// [`ask`].
fn look(link: Arc<Mutex<Peer>>) -> Option<Listing> {
    let (sender, answer) = mpsc::channel();
    let asking = std::thread::Builder::new().name("look".into()).spawn(move || {
        // Nobody hears a late answer.
        let _late = sender.send(ask(&link, &Request::Ls));
    });
    asking.ok()?;
    answer.recv_timeout(LOOK).ok()?.ok()?.ok()
}

impl Seat {
    fn request(&self, vm: &str) -> Request {
        let (channels, window) = self.used.geometry();
        Request::Vm(Guest {
            vm: vm.to_owned(),
            zone: self.zone.path().into(),
            channels,
            window,
            memory: self.used.memory.map(|m| m.0),
            objects: self.used.objects,
            rate: self.used.rate,
            weight: self.used.weight,
        })
    }
}

impl Accelerator {
    /// Its settings, as [`crate::project::changes`] compares them: its table, and what it grants each VM that has a place. Those that hold, or
    /// those of a file.
    pub fn settings(&self, project: Option<&Project>) -> Value {
        let compose = project.map(|project| &project.compose);
        let name = &self.server.name;
        let spec = compose.and_then(|c| c.accel.get(name)).unwrap_or(&self.server.spec);
        let mut settings = changes::value(spec);
        for (vm, seat) in &*lock(&self.server.seats) {
            // The place of a VM that no longer uses it is nobody's.
            let said = compose.and_then(|c| Some(c.vm.get(vm)?.accelerators.0.get(name)?.of(spec)));
            settings[format!("vm.{vm}")] = changes::value(said.as_ref().unwrap_or(&seat.used));
        }
        settings
    }

    /// The zone's devices for a VM that is about to be started; `None` where it has no place here.
    ///
    /// # Errors
    /// Those of the zone.
    pub fn invite(&self, vm: &str) -> anyhow::Result<Option<Invitation>> {
        let zone = lock(&self.server.seats).get(vm).map(|seat| seat.zone.clone());
        zone.map(|zone| zone.invite(vm, &Default::default())).transpose()
    }

    /// A VM's QEMU has ended.
    pub fn gone(&self, vm: &str) {
        let zone = lock(&self.server.seats).get(vm).map(|seat| seat.zone.clone());
        if let Some(zone) = zone {
            zone.gone(vm);
        }
    }

    /// The zones of its VMs.
    pub fn zones(&self) -> Vec<Arc<HostZone>> {
        lock(&self.server.seats).values().map(|seat| seat.zone.clone()).collect()
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
        let uuid = lock(&self.server.seats).get(vm).map(|seat| seat.zone.uuid());
        let uuid = uuid.with_context(|| format!("the VM '{vm}' has no place at '{}'", self.server.name))?;
        let identity = uuid.replace('-', "");
        let output = exec::script(
            machine.agent(),
            &format!("{}{SET_UP}", mount::FUNCTIONS),
            &[&uuid, &self.server.name, &identity],
            Duration::from_secs(120),
        )?;
        match output.code {
            0 => {}
            3 => anyhow::bail!(
                "the VM '{vm}' is a guest without the module: its kernel {} can't have the device of the accelerator '{}'; use the guest \
                 kit, install tombolo-dkms in the image, or leave it out of vm.{vm}.accelerators",
                output.out.trim(),
                self.server.name
            ),
            code => anyhow::bail!(
                "the VM '{vm}' can't have the device of the accelerator '{}' (code {code}): {}",
                self.server.name,
                output.err.trim().replace('\n', "; ")
            ),
        }
        let library = output.out.trim() == "yes";
        if let Some(seat) = lock(&self.server.seats).get_mut(vm) {
            seat.library = Some(library);
        }
        Ok(library)
    }

    /// For `ps`.
    pub fn status(&self) -> AccelStatus {
        let (pid, starts) = self.keeper.process();
        let link = lock(&self.server.link).clone();
        let server = link.and_then(look);
        let tenants = server.as_ref().map(|s| s.tenants.as_slice()).unwrap_or_default();
        let vms = lock(&self.server.seats)
            .iter()
            .map(|(vm, seat)| {
                let via = format!("vm:{vm}");
                let own: Vec<&Tenant> = tenants.iter().filter(|t| t.via == via).collect();
                AccelVm {
                    vm: vm.clone(),
                    clients: own.len(),
                    memory: own.iter().map(|t| t.memory).sum(),
                    objects: own.iter().map(|t| t.objects).sum(),
                    served: seat.served == Some(true),
                    library: seat.library,
                }
            })
            .collect();
        AccelStatus {
            name: self.server.name.clone(),
            api: self.server.spec.api,
            state: if server.is_some() { "serving" } else { "starting" }.into(),
            pid,
            starts,
            vms,
            server,
        }
    }
}

impl Part for Accelerator {
    fn used_by(vm: &VmSpec) -> impl Iterator<Item = &String> {
        vm.accelerators.0.keys()
    }

    /// Starts the server of accelerator `name` and waits until it serves each of its VMs. `dir` is the project's folder.
    ///
    /// # Errors
    /// When this host has no device for it; the server's own words.
    fn start(name: &str, project: &Project, dir: &Path) -> anyhow::Result<Accelerator> {
        let spec = project.compose.accel.get(name).cloned().unwrap_or_default();
        devices().with_context(|| format!("accel.{name}"))?;
        let scratch = scratch(&project.file, name);
        // A supervisor that was killed has left it.
        remove(&scratch);
        crate::project::state::make_private(&scratch)?;
        let server = Arc::new(Server {
            name: name.to_owned(),
            spec,
            scratch,
            seats: Mutex::default(),
            link: Mutex::default(),
        });
        server.seat(project)?;
        let names = Names {
            kind: Kind::Accelerator,
            name: name.to_owned(),
            process: "server",
            log: dir.join(format!("{name}.accel")),
        };
        let keeper = Keeper::start(names, server.clone())?;
        let accelerator = Accelerator { server, keeper };
        accelerator.keeper.wait_ready()?;
        Ok(accelerator)
    }

    /// Makes places for VMs that the compose file has now and had not before, and waits until they are served.
    ///
    /// # Errors
    /// The server's own words.
    fn extend(&self, project: &Project, _starting: &BTreeSet<&String>) -> anyhow::Result<()> {
        self.server.seat(project).map_err(|why| self.keeper.failure(&format!("{why:#}")))?;
        self.keeper.wait_ready()
    }
}

impl Drop for Accelerator {
    fn drop(&mut self) {
        self.keeper.stop();
        remove(&self.server.scratch);
    }
}

/// Where the workers of an accelerator compile.
pub fn scratch(file: &Path, name: &str) -> PathBuf {
    let of = format!("{}\n{name}", file.display());
    let hash = crate::project::state::hash(of.as_bytes()) & 0xffff_ffff;
    std::env::temp_dir().join(format!("tombolo-accel-{hash:08x}"))
}

/// What the host's OpenCL has to offer, a line each.
///
/// # Errors
/// That there is nothing, and what to do.
pub fn devices() -> anyhow::Result<Vec<String>> {
    let mut command = crate::child::own_program();
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
            crate::say!("{}: {e}", folder.display());
        }
        _ => {}
    }
}

impl Server {
    /// Makes places for VMs that have none yet.
    fn seat(&self, project: &Project) -> anyhow::Result<()> {
        let mut seats = lock(&self.seats);
        for (vm, spec) in &project.compose.vm {
            let Some(used) = spec.accelerators.0.get(&self.name) else { continue };
            if seats.contains_key(vm) {
                continue;
            }
            let used = used.of(&self.spec);
            let zone = HostZone::for_calls(&self.name, used.zone_bytes())
                .with_context(|| format!("the zone of vm.{vm} for accel.{}", self.name))?;
            let mut seat = Seat { zone: Arc::new(zone), used, served: None, library: None };
            let link = lock(&self.link).clone();
            if let Some(link) = link {
                ask::<()>(&link, &seat.request(vm))?.map_err(anyhow::Error::msg)?;
                seat.served = Some(true);
            }
            // A server that is about to be started is told of it then.
            seats.insert(vm.clone(), seat);
        }
        Ok(())
    }
}

impl Service for Server {
    type Link = Peer;

    /// The server dies with the thread that starts it.
    fn spawn(&self, log: File) -> anyhow::Result<(Guarded, Peer)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(PATIENCE))?;
        let mut command = crate::child::own_program();
        command.args(["accel", "serve", "--overseen"]).env("TMPDIR", &self.scratch);
        if let Some(metrics) = &self.spec.metrics {
            command.args(["--metrics", &metrics.to_string()]);
        }
        if self.spec.unconfined {
            command.arg("--unconfined");
        }
        if let Some(cgroup) = &self.spec.cgroup {
            command.arg("--cgroup").arg(cgroup);
        }
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(log);
        child::tie(&mut command, &[]);
        Ok((Guarded::spawn(&mut command)?, Peer::new(ours)))
    }

    /// Tells a new server whom it serves. A VM can damage its own zone, so that no server can enter it again; the others are served.
    fn begin(&self, link: Peer) -> anyhow::Result<()> {
        let mut seats = lock(&self.seats);
        let link = Arc::new(Mutex::new(link));
        for (vm, seat) in seats.iter_mut() {
            match ask::<()>(&link, &seat.request(vm))? {
                Ok(()) => seat.served = Some(true),
                Err(why) if seat.served.is_some() => {
                    seat.served = Some(false);
                    crate::say!("{why}; its programs have no accelerator until tombolo down && tombolo up");
                }
                Err(why) => anyhow::bail!("{why}"),
            }
        }
        *lock(&self.link) = Some(link);
        Ok(())
    }

    fn ended(&self) {
        *lock(&self.link) = None;
        // The zones are free for the next one when its membership has ended.
        for seat in lock(&self.seats).values() {
            if let Err(e) = seat.zone.tend() {
                crate::say!("{e:#}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};

    /// Seats of the VMs a and b, and what becomes of them when a server refuses a.
    fn refused(before: Option<bool>) -> (anyhow::Result<()>, Vec<Option<bool>>) {
        let dir = tempfile::tempdir().unwrap();
        let seat = |served| {
            let zone = Arc::new(HostZone::for_calls("cl", 8 << 20).unwrap());
            Seat { zone, used: AccelUse::default(), served, library: None }
        };
        let seats = [("a".to_owned(), seat(before)), ("b".to_owned(), seat(before))];
        let server = Server {
            name: "cl".into(),
            spec: AccelSpec::default(),
            scratch: dir.path().join("scratch"),
            seats: Mutex::new(seats.into()),
            link: Mutex::default(),
        };
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answering = std::thread::spawn(move || {
            for line in BufReader::new(&theirs).lines().map_while(Result::ok) {
                let Request::Vm(guest) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
                let answer = if guest.vm == "a" { Answer::Error("no zone".into()) } else { Answer::Ok(()) };
                writeln!(&theirs, "{}", serde_json::to_string(&answer).unwrap()).unwrap();
            }
        });
        let result = server.begin(Peer::new(ours));
        let served = lock(&server.seats).values().map(|seat| seat.served).collect();
        drop(server);
        answering.join().unwrap();
        (result, served)
    }

    #[test]
    fn a_vm_that_damaged_its_zone_keeps_no_other_from_being_served() {
        let (result, served) = refused(Some(true));
        assert!(result.is_ok());
        assert_eq!(served, [Some(false), Some(true)]);
    }

    #[test]
    fn a_zone_that_no_server_could_ever_enter_is_an_error() {
        let (result, _) = refused(None);
        assert_eq!(result.unwrap_err().to_string(), "no zone");
    }
}
