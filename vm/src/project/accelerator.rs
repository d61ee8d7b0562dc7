// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server of an accelerator: `tombolo accel serve --overseen`, which is started again when it dies, and lives on when the supervisor does.
//!
//! Each VM that uses it has a zone of its own for that, which the supervisor keeps with its doorbells, as it keeps other zones. So a server's
//! death takes no VM along: the next one enters the same zones, and what programs start then works; those that were at it get their
//! API's own error. The server is told what to serve over a socket that is its standard input, a line of JSON each way, and
//! ends with that socket.
//!
//! If a VM owns the accelerator there is no such process: the VM is a member of its clients' zones and serves them ([`crate::project::owner`]).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use tombolo_brief::child::leave_sockets;
use tombolo_control::accel::Tenant;

use crate::child::{self, halted};
use crate::compose::accelerator::Api;
use crate::compose::{Compose, Project, VmSpec};
use crate::guest::exec;
use crate::guest::mount;
use crate::machine::{Machine, hotplug};
use crate::project::changes::{self, Kind};
use crate::project::control::{AccelStatus, AccelVm};
use crate::project::keeper::{Keeper, Names, Part};
use crate::project::owner::{Client, Owner};
use crate::project::zones::{HostZone, Invitation};
use crate::qemu::start::no_process;

use crate::shim::handle::Safe;
use server::{Server, lock, look};
use slot::{Reach, Slot};

/// An accelerator of a running project.
#[derive(Debug)]
pub struct Accelerator {
    server: Arc<Server>,
    runs: Runs,
}

/// The place in which the server runs.
#[derive(Debug)]
enum Runs {
    /// On the host.
    Here(Keeper),
    /// In the VM that owns the accelerator.
    In(Arc<Owner>),
}

impl Accelerator {
    /// Its settings, as [`crate::project::changes`] compares them: its table, and what it grants each VM that has a place. Those that hold, or
    /// those of a file.
    pub fn settings(&self, project: Option<&Project>) -> Value {
        let compose = project.map(|project| &project.compose);
        let name = &self.server.name;
        let spec = compose.and_then(|c| c.accel.get(name)).unwrap_or(&self.server.spec);
        let mut settings = changes::value(spec);
        for (vm, slot) in &*lock(&self.server.slots) {
            // The file says nothing of a VM that no longer uses the accelerator.
            let said = compose.and_then(|c| Some(c.vm.get(vm)?.accelerators.0.get(name)?.of(spec)));
            settings[format!("vm.{vm}")] = changes::value(said.as_ref().unwrap_or(&slot.used));
        }
        settings
    }

    /// The VM that owns it, where one does.
    pub fn owner(&self) -> Option<&str> {
        match &self.runs {
            Runs::Here(_) => None,
            Runs::In(owner) => Some(owner.vm()),
        }
    }

    /// Zones for a VM that is about to be started, each with the name of its devices: its own, or those of its clients where it owns the
    /// accelerator.
    ///
    /// # Errors
    /// Those of the zones.
    pub fn invite(&self, vm: &str) -> anyhow::Result<Vec<(String, Invitation)>> {
        let name = &self.server.name;
        let mut slots = lock(&self.server.slots);
        if self.owner() != Some(vm) {
            let invitation =
                slots.get(vm).map(|slot| slot.zone.invite(vm, &Default::default())).transpose()?;
            return Ok(invitation.map(|i| (name.clone(), i)).into_iter().collect());
        }
        let invite = |(client, slot): (&String, &mut Slot)| {
            let invitation = slot.zone.invite(vm, &Default::default())?;
            slot.set_reach(Reach::There);
            Ok((format!("{name}.{client}"), invitation))
        };
        slots.iter_mut().map(invite).collect()
    }

    /// A VM's QEMU has ended.
    pub fn gone(&self, vm: &str) {
        if self.owner() != Some(vm) {
            let zone = lock(&self.server.slots).get(vm).map(|slot| slot.zone.clone());
            if let Some(zone) = zone {
                zone.gone(vm);
            }
            return;
        }
        for (client, slot) in &mut *lock(&self.server.slots) {
            // From here on it can't write to the zone.
            slot.zone.gone(vm);
            if let Some(channels) = &mut slot.channels {
                channels.reach = Reach::Apart;
                channels.area.abandon();
                slot.ring(client);
            }
        }
    }

    /// Clears the channels that an owner's server is done with; called once a second.
    pub fn tend(&self) {
        self.save();
        for (client, slot) in &*lock(&self.server.slots) {
            match slot.channels.as_ref().map(|channels| channels.area.clear_done()) {
                Some(Ok(true)) => slot.ring(client),
                Some(Err(e)) => crate::say!("a channel of '{client}' can't be cleared: {e}"),
                None | Some(Ok(false)) => {}
            }
        }
    }

    /// Has the owner VM, which has just booted, serve its clients.
    ///
    /// # Errors
    /// The guest lacks something. Names it.
    pub fn serve(&self, machine: &Arc<Machine>) -> anyhow::Result<()> {
        let Runs::In(owner) = &self.runs else { return Ok(()) };
        let clients: Vec<Client> = lock(&self.server.slots)
            .iter()
            .filter(|(_, slot)| slot.reach().is_some_and(|reach| reach != Reach::Apart))
            .map(|(vm, slot)| slot.client(vm))
            .collect();
        let refused = owner.serve(&self.server.name, self.server.spec.unconfined, &clients, machine)?;
        for client in clients {
            if !refused.contains(&client.uuid) {
                self.set_reach(&client.vm, Reach::Served);
                continue;
            }
            crate::say!(
                "the VM '{}' can't have the zone of '{}', whose programs have no accelerator until tombolo down && tombolo up",
                owner.vm(),
                client.vm
            );
        }
        Ok(())
    }

    /// Has the owner VM, where it runs, serve those of `starting` that have come since: it gets the zone of each while it runs.
    ///
    /// # Errors
    /// Names the client, what the owner lacks, and the remedy.
    fn join(&self, owner: &Owner, starting: &BTreeSet<&String>) -> anyhow::Result<()> {
        // One that doesn't run gets all zones when it is started.
        let Some(machine) = owner.serving() else { return Ok(()) };
        // The slots stay unlocked during the wait for the guest, since the zones are tended meanwhile.
        let waiting: Vec<String> = lock(&self.server.slots)
            .iter()
            .filter(|(vm, slot)| starting.contains(vm) && slot.reach().is_some_and(|r| r != Reach::Served))
            .map(|(vm, _)| vm.clone())
            .collect();
        for vm in waiting {
            self.add_devices(owner.vm(), &vm, &machine)?;
            let Some(client) = lock(&self.server.slots).get(&vm).map(|slot| slot.client(&vm)) else {
                continue;
            };
            owner.join(&self.server.name, &client, &machine)?;
            self.set_reach(&vm, Reach::Served);
        }
        Ok(())
    }

    /// Brings the zone of a client to the owner VM, unless it has come already.
    fn add_devices(&self, owner: &str, vm: &str, machine: &Machine) -> anyhow::Result<()> {
        let name = &self.server.name;
        let (zone, invitation) = {
            let mut slots = lock(&self.server.slots);
            let Some(slot) = slots.get_mut(vm).filter(|slot| slot.reach() == Some(Reach::Apart)) else {
                return Ok(());
            };
            let invitation = slot.zone.invite(owner, &Default::default())?;
            // Before it comes: if the owner ends meanwhile, that is told afterwards.
            slot.set_reach(Reach::There);
            (slot.zone.clone(), invitation)
        };
        let plugged = machine.attach_device(&format!("accel.{name}.{vm}"), &invitation);
        if let Err(hotplug::Failure::Undone(_)) = &plugged {
            self.set_reach(vm, Reach::Apart);
            zone.gone(owner);
        }
        plugged.with_context(|| {
            format!("the VM '{owner}', which owns accel.{name}, can't get the zone of '{vm}'")
        })
    }

    fn set_reach(&self, vm: &str, reach: Reach) {
        if let Some(slot) = lock(&self.server.slots).get_mut(vm) {
            slot.set_reach(reach);
        }
        self.save();
    }

    /// Gives its shims their sockets again, where the project's folder has vanished.
    ///
    /// # Errors
    /// See [`Shim::listen_again`](crate::shim::Shim::listen_again).
    pub fn listen_again(&self) -> anyhow::Result<()> {
        if let Runs::Here(keeper) = &self.runs {
            keeper.listen_again()?;
        }
        self.server.safe.shim().listen_again()
    }

    /// Has the shim keep what has changed; one that has died is followed by another one within a second.
    fn save(&self) {
        if let Err(e) = self.server.save() {
            crate::say!("the accelerator '{}': {e:#}", self.server.name);
        }
    }

    /// The process of its server on this host, while it runs.
    pub fn process(&self) -> Option<u32> {
        match &self.runs {
            Runs::Here(keeper) => keeper.process().0,
            Runs::In(_) => None,
        }
    }

    /// The zones of its VMs.
    pub fn zones(&self) -> Vec<Arc<HostZone>> {
        lock(&self.server.slots).values().map(|slot| slot.zone.clone()).collect()
    }

    /// The API of its programs.
    pub fn api(&self) -> Api {
        self.server.spec.api
    }

    /// Makes the device in a guest through its agent. False: the guest has no client library.
    ///
    /// # Errors
    /// Says whether the module or the device is missing.
    pub fn set_up(&self, machine: &Machine) -> anyhow::Result<bool> {
        const SET_UP: &str = r#"need_module
await_zone "$3"
[ -c "/dev/tombolo-calls-$2" ] || echo "$1" >/sys/module/tombolo/parameters/calls || { module_said; exit 4; }
if [ "$4" = cuda ]; then
	[ -z "$(cuda_library)" ] || echo yes
	exit
fi
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
        let uuid = lock(&self.server.slots).get(vm).map(|slot| slot.zone.uuid());
        let uuid = uuid.with_context(|| format!("the VM '{vm}' has no place at '{}'", self.server.name))?;
        let identity = uuid.replace('-', "");
        let output = exec::script(
            machine.agent(),
            &format!("{}{CUDA_LIBRARY}{SET_UP}", mount::FUNCTIONS),
            &[&uuid, &self.server.name, &identity, self.api().name()],
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
        if let Some(slot) = lock(&self.server.slots).get_mut(vm) {
            slot.library = Some(library);
        }
        Ok(library)
    }

    /// For `ps`.
    pub fn status(&self) -> AccelStatus {
        let (pid, starts, server, absence) = match &self.runs {
            Runs::Here(keeper) => {
                let (pid, starts) = keeper.process();
                let link = lock(&self.server.link).clone();
                let answer = link.zip(pid).map(|(link, pid)| look(link, pid));
                let (server, silent) = answer.map_or((None, None), |a| (a.as_ref().ok().cloned(), a.err()));
                let trouble = pid.and_then(halted::sentence).or(silent.map(str::to_owned));
                (pid, starts, server, trouble)
            }
            Runs::In(owner) => {
                let server = owner.look(&self.server.name);
                (None, owner.starts(), server, owner.absence().or_else(|| owner.silence()))
            }
        };
        let tenants = server.as_ref().map(|s| s.tenants.as_slice()).unwrap_or_default();
        let vms = lock(&self.server.slots)
            .iter()
            .map(|(vm, slot)| {
                let via = format!("vm:{vm}");
                let own: Vec<&Tenant> = tenants.iter().filter(|t| t.via == via).collect();
                AccelVm {
                    vm: vm.clone(),
                    clients: own.len(),
                    memory: own.iter().map(|t| t.memory).sum(),
                    objects: own.iter().map(|t| t.objects).sum(),
                    served: match &slot.channels {
                        Some(channels) => channels.area.is_served(),
                        None => slot.served == Some(true),
                    },
                    library: slot.library,
                }
            })
            .collect::<Vec<AccelVm>>();
        // A guest may answer too late to be listed, and serve all the same.
        let serving = server.is_some() || self.owner().is_some() && vms.iter().any(|vm| vm.served);
        let state = if serving { "serving" } else { "starting" };
        AccelStatus {
            name: self.server.name.clone(),
            api: self.server.spec.api,
            state: absence.unwrap_or_else(|| state.into()),
            owner: self.owner().map(str::to_owned),
            pid,
            starts,
            vms,
            server,
        }
    }
}

impl Part for Accelerator {
    fn used_by<'a>(name: &str, vm: &'a VmSpec, compose: &'a Compose) -> Vec<&'a String> {
        let owned = compose.accel.iter().find(|(_, spec)| spec.vm.as_deref() == Some(name));
        vm.accelerators.0.keys().chain(owned.map(|(accelerator, _)| accelerator)).collect()
    }

    /// Starts the server of accelerator `name` and waits until it serves each of its VMs; one that a VM owns is started when that has
    /// booted. `dir` is the project's folder.
    ///
    /// # Errors
    /// When this host has no device for it; the server's own words.
    fn start(name: &str, project: &Project, dir: &Path) -> anyhow::Result<Accelerator> {
        let spec = project.compose.accel.get(name).cloned().unwrap_or_default();
        let safe = Arc::new(Safe::start(dir, &safe_of(name))?);
        if let Some(owner) = spec.vm.clone() {
            let server = Server {
                name: name.to_owned(),
                spec,
                scratch: None,
                safe,
                telling: Mutex::default(),
                slots: Mutex::default(),
                link: Mutex::default(),
                started: Mutex::default(),
            };
            server.add_slots(project)?;
            return Ok(Accelerator {
                server: Arc::new(server),
                runs: Runs::In(Arc::new(Owner::new(&owner))),
            });
        }
        devices(spec.api).with_context(|| format!("accel.{name}"))?;
        let scratch = scratch(dir, name);
        // A supervisor that was killed has left it.
        remove(&scratch);
        crate::project::state::make_private(&scratch)?;
        let server = Arc::new(Server {
            name: name.to_owned(),
            spec,
            scratch: Some(scratch),
            safe,
            telling: Mutex::default(),
            slots: Mutex::default(),
            link: Mutex::default(),
            started: Mutex::default(),
        });
        server.add_slots(project)?;
        let keeper = Keeper::start(names(name, dir), server.clone())?;
        keeper.wait_ready()?;
        Ok(Accelerator { server, runs: Runs::Here(keeper) })
    }

    /// Adds slots for VMs that the compose file has now and had not before, and waits until they are served.
    ///
    /// # Errors
    /// The server's own words.
    fn extend(&self, project: &Project, starting: &BTreeSet<&String>) -> anyhow::Result<()> {
        let added = self.server.add_slots(project);
        match &self.runs {
            Runs::Here(keeper) => {
                added.map_err(|why| keeper.failure(&format!("{why:#}")))?;
                keeper.wait_ready()
            }
            Runs::In(owner) => added.and_then(|()| self.join(owner, starting)),
        }
    }
}

impl Drop for Accelerator {
    fn drop(&mut self) {
        if let Runs::Here(keeper) = &self.runs {
            keeper.stop();
        }
        if let Some(scratch) = &self.server.scratch {
            remove(scratch);
        }
        self.server.safe.shim().end();
    }
}

/// The folder in which the workers of an accelerator compile; `dir` is the folder of the project's logs.
pub fn scratch(dir: &Path, name: &str) -> PathBuf {
    let of = format!("{}\n{name}", dir.display());
    let hash = crate::project::state::hash(of.as_bytes()) & 0xffff_ffff;
    std::env::temp_dir().join(format!("tombolo-accel-{hash:08x}"))
}

/// Returns whether a file's name is that of such a folder.
pub fn is_scratch(name: &str) -> bool {
    let hash = name.strip_prefix("tombolo-accel-").unwrap_or_default();
    hash.len() == 8 && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A function of a guest's shell: the path of the client library where a program finds it as NVIDIA's own, or nothing.
pub const CUDA_LIBRARY: &str = r#"cuda_library() {
	for library in /usr/local/lib /lib/*-linux-gnu /usr/lib/*-linux-gnu /lib64 /usr/lib64 /lib /usr/lib; do
		library=$library/libcuda.so.1
		if grep -qs TOMBOLO_ACCEL "$library"; then
			echo "$library"
			break
		fi
	done
}
"#;

/// The host's devices of an API, a line each.
///
/// # Errors
/// That there is nothing, and what to do.
pub fn devices(api: Api) -> anyhow::Result<Vec<String>> {
    let mut command = crate::child::own_program();
    command.args(["accel", "devices", "--api", api.name()]).stdin(Stdio::null());
    child::tie(&mut command, &[]);
    leave_sockets(&mut command);
    let output =
        command.output().map_err(|e| no_process(&e)).context("'tombolo accel devices' can't be run")?;
    anyhow::ensure!(output.status.success(), "{}", child::words(&output));
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

fn names(name: &str, dir: &Path) -> Names {
    let log = dir.join(format!("{name}.accel"));
    Names { kind: Kind::Accelerator, name: name.to_owned(), process: "server", log }
}

fn remove(folder: &Path) {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            crate::say!("{}: {e}", folder.display());
        }
        _ => {}
    }
}

mod adopt;
mod server;
mod slot;
pub use adopt::Record;
pub use server::safe_of;

#[cfg(test)]
mod tests;
