// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices that come to a running VM: the memory and the doorbell of a zone.
//!
//! The two are functions 0 and 1 of one port. A guest sees a port's functions when function 0 comes, so that is the last step: whatever
//! fails before it is undone without the guest's help. A step whose undoing has to wait, because the monitor owes a reply, is undone before
//! the next attachment. Stock QEMU can't unplug virtio-pmem; a VM that has left a zone keeps the memory device, and only needs another doorbell
//! to be a member again.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::PoisonError;
use std::time::Duration;

use qapi::qmp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Machine;
use crate::compose::ZoneUse;
use crate::project::zones::Invitation;
use crate::qemu::cmdline;
use crate::qemu::qmp::{Error, Qmp};

/// Time for QEMU to carry out one step.
const STEP: Duration = Duration::from_secs(60);

/// The result of an attachment that failed, for the VM's membership.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The VM got nothing of the zone's memory.
    #[error("{0}")]
    Undone(String),
    /// QEMU may still carry out the last step: the VM counts as a member until it ends.
    #[error("{0}; it may still happen, so the VM counts as a member until it is stopped")]
    Open(Error),
}

/// The ports of one VM for devices that come while it runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ports {
    vm: String,
    count: u32,
    free: Vec<u32>,
    /// The number of attachments. It makes names that this QEMU has never had.
    #[serde(alias = "plugs")]
    attached: i64,
    /// The steps to undo before the next attachment, the last first.
    undo: Vec<Undo>,
    /// Zones whose memory device is in the VM, and whether that device is read-only.
    memory: BTreeMap<String, bool>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Undo {
    command: Command,
    arguments: Value,
}

/// A command that undoes another one, by QEMU's name for it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Command {
    Closefd,
    ChardevRemove,
    RemoveFd,
    ObjectDel,
    #[serde(rename = "device_del")]
    DeviceDel,
}

impl Command {
    fn name(self) -> &'static str {
        match self {
            Command::Closefd => "closefd",
            Command::ChardevRemove => "chardev-remove",
            Command::RemoveFd => "remove-fd",
            Command::ObjectDel => "object-del",
            Command::DeviceDel => "device_del",
        }
    }
}

impl Ports {
    /// The `count` ports of a VM that was started as a member of the zones in `memory`.
    pub fn new(vm: &str, count: u32, memory: BTreeMap<String, bool>) -> Ports {
        let free = (0..count).rev().collect();
        Ports { vm: vm.to_owned(), count, free, attached: 0, undo: Vec::new(), memory }
    }

    /// Adds a zone's devices, or only a new doorbell where its memory is there since an earlier membership. `save` gets the state before each step.
    ///
    /// # Errors
    /// See [`Failure`].
    pub(super) fn attach(
        &mut self,
        qmp: &Qmp,
        zone: &str,
        invitation: &Invitation,
        save: &dyn Fn(&Ports),
    ) -> Result<(), Failure> {
        let undone = |e: Error| Failure::Undone(e.to_string());
        let has_memory = match self.memory.get(zone) {
            Some(read_only) if *read_only != invitation.read_only => {
                return Err(Failure::Undone(format!(
                    "the VM '{vm}' still has the memory of the zone '{zone}' from an earlier membership, {}; stock QEMU can't unplug it. \
                     Attach it with the same rights, or stop the VM and start it: tombolo down {vm} && tombolo up",
                    if *read_only { "read-only" } else { "writable" },
                    vm = self.vm,
                )));
            }
            known => known.is_some(),
        };
        self.settle(qmp).map_err(undone)?;
        let Some(&port) = self.free.last() else {
            return Err(Failure::Undone(format!(
                "the VM '{vm}' has no free port for another zone; raise vm.{vm}.hotplug_ports (now {}) and start it again",
                self.count,
                vm = self.vm,
            )));
        };
        self.attached += 1;
        let attached = self
            .liveness(qmp, zone, invitation, save)
            .and_then(|()| self.doorbell(qmp, zone, port, has_memory, invitation, save))
            .and_then(|()| if has_memory { Ok(()) } else { self.memory(qmp, zone, port, invitation, save) });
        let attached = match attached {
            Err((e, false)) => {
                // A step that can't be undone now is undone before the next attachment.
                let _later = self.settle(qmp);
                Err(undone(e))
            }
            done => {
                self.undo.clear();
                self.free.pop();
                self.memory.insert(zone.to_owned(), invitation.read_only);
                done.map_err(|(e, _)| Failure::Open(e))
            }
        };
        save(self);
        attached
    }

    /// Undoes the steps that an earlier attachment has left.
    fn settle(&mut self, qmp: &Qmp) -> Result<(), Error> {
        while let Some(undo) = self.undo.last() {
            match qmp.execute_value(undo.command.name(), &undo.arguments) {
                // QEMU refuses to undo a step that it did not do.
                Ok(_) | Err(Error::Refused { .. }) => drop(self.undo.pop()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// One step: noted as to be undone before it is done.
    fn step(
        &mut self,
        undo: Command,
        arguments: Value,
        save: &dyn Fn(&Ports),
        step: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), (Error, bool)> {
        self.undo.push(Undo { command: undo, arguments });
        save(self);
        step().map_err(|e| (e, false))
    }

    /// Gives QEMU a copy of the descriptor by which the VM is held. It keeps it until its end; once the VM has left the zone, that holds nothing.
    fn liveness(
        &mut self,
        qmp: &Qmp,
        zone: &str,
        invitation: &Invitation,
        save: &dyn Fn(&Ports),
    ) -> Result<(), (Error, bool)> {
        let Some(liveness) = &invitation.liveness else { return Ok(()) };
        let name = format!("alive-{zone}.{}", self.attached);
        self.step(Command::Closefd, json!({ "fdname": name }), save, || {
            let getfd = qmp::getfd { fdname: name.clone() };
            qmp.execute_with(getfd, Some(liveness.as_fd()), STEP).map(drop)
        })
    }

    fn doorbell(
        &mut self,
        qmp: &Qmp,
        zone: &str,
        port: u32,
        alone: bool,
        invitation: &Invitation,
        save: &dyn Fn(&Ports),
    ) -> Result<(), (Error, bool)> {
        let name = format!("bell-{zone}.{}", self.attached);
        let id = format!("doorbell-{zone}.{}", self.attached);
        self.step(Command::Closefd, json!({ "fdname": name }), save, || {
            let getfd = qmp::getfd { fdname: name.clone() };
            qmp.execute_with(getfd, Some(invitation.doorbell.as_fd()), STEP).map(drop)
        })?;
        let chardev = json!({
            "id": name, "backend": { "type": "socket", "data": {
                "addr": { "type": "fd", "data": { "str": name } }, "server": false,
            } },
        });
        self.step(Command::ChardevRemove, json!({ "id": name }), save, || {
            qmp.execute_value("chardev-add", &chardev).map(drop)
        })?;
        let device = json!({
            "driver": "ivshmem-doorbell", "id": id, "chardev": name, "vectors": cmdline::DOORBELL_VECTORS,
            "bus": format!("hp{port}"), "addr": if alone { "0.0" } else { "0.1" }, "multifunction": !alone,
        });
        if alone {
            return last(qmp, &device);
        }
        self.step(Command::DeviceDel, json!({ "id": id }), save, || {
            qmp.execute_value("device_add", &device).map(drop)
        })
    }

    fn memory(
        &mut self,
        qmp: &Qmp,
        zone: &str,
        port: u32,
        invitation: &Invitation,
        save: &dyn Fn(&Ports),
    ) -> Result<(), (Error, bool)> {
        let set = self.attached;
        let object = format!("zone-{zone}.{}", self.attached);
        let mut number = 0;
        self.step(Command::RemoveFd, json!({ "fdset-id": set }), save, || {
            let add = qmp::add_fd { fdset_id: Some(set), opaque: None };
            number = qmp.execute_with(add, Some(invitation.memory.as_fd()), STEP)?.fd;
            Ok(())
        })?;
        let backend = json!({
            "qom-type": "memory-backend-file", "id": object, "share": true, "readonly": invitation.read_only,
            "mem-path": format!("/proc/self/fd/{number}"), "size": invitation.size,
        });
        self.step(Command::ObjectDel, json!({ "id": object }), save, || {
            qmp.execute_value("object-add", &backend).map(drop)
        })?;
        // QEMU has mapped it; the descriptor itself is not needed any more.
        let removed = qmp.execute_value("remove-fd", &json!({ "fdset-id": set }));
        removed.map_err(|e| (e, false))?;
        let device = json!({
            "driver": "virtio-pmem-pci", "id": format!("pmem-{zone}.{}", self.attached), "memdev": object,
            "bus": format!("hp{port}"), "addr": "0.0", "multifunction": true,
        });
        last(qmp, &device)
    }
}

/// The last step: from it on the guest sees the devices. Whether it may still happen goes with its error.
fn last(qmp: &Qmp, device: &Value) -> Result<(), (Error, bool)> {
    qmp.execute_value("device_add", device).map(drop).map_err(|e| {
        let open = !matches!(e, Error::Refused { .. } | Error::Behind { .. });
        (e, open)
    })
}

impl Machine {
    /// Adds the devices of a zone of the compose file. The VM is a member then, also after [`Failure::Open`].
    ///
    /// # Errors
    /// No port is free, or QEMU refuses or does not answer.
    pub fn attach_zone(
        &self,
        zone: &str,
        zone_use: &ZoneUse,
        invitation: &Invitation,
    ) -> Result<(), Failure> {
        let attached = self.attach_device(zone, invitation);
        if !matches!(attached, Err(Failure::Undone(_))) {
            self.lock().zones.insert(zone.to_owned(), zone_use.clone());
            self.save();
            if let Some(Err(e)) =
                invitation.liveness.as_ref().map(|held| self.keep_liveness(zone, held.as_fd()))
            {
                crate::say!("{e:#}");
            }
        }
        attached
    }

    /// Adds the devices of a zone under this name. Users of the VM don't see the membership: the zone is an accelerator's.
    ///
    /// # Errors
    /// As [`Machine::attach_zone`].
    pub fn attach_device(&self, name: &str, invitation: &Invitation) -> Result<(), Failure> {
        let qmp = self.qmp().map_err(|e| Failure::Undone(e.to_string()))?;
        let save = |ports: &Ports| self.save_ports(ports);
        self.ports.lock().unwrap_or_else(PoisonError::into_inner).attach(qmp, name, invitation, &save)
    }

    /// The VM's memberships in zones of the compose file, those attached later included.
    pub fn zones(&self) -> BTreeMap<String, ZoneUse> {
        self.lock().zones.clone()
    }

    /// Notes that the VM is no longer a member of `zone`.
    pub fn forget_zone(&self, zone: &str) {
        self.lock().zones.remove(zone);
        self.save();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::{Arc, Mutex};

    /// A QEMU that does what it is told and notes it, except that it refuses the commands for which `refuses` says so.
    fn qemu(refuses: impl Fn(&str, &Value) -> bool + Send + 'static) -> (Qmp, Arc<Mutex<Vec<String>>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let done = Arc::new(Mutex::new(Vec::new()));
        let told = done.clone();
        std::thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            writeln!(writer, r#"{{"QMP": {{}}}}"#).unwrap();
            for line in BufReader::new(theirs).lines().map_while(Result::ok) {
                let command: Value = serde_json::from_str(&line).unwrap();
                let (name, arguments) = (command["execute"].as_str().unwrap(), &command["arguments"]);
                let mut reply = json!({ "id": command["id"] });
                if refuses(name, arguments) {
                    reply["error"] = json!({ "class": "GenericError", "desc": "no" });
                } else {
                    let what = arguments["id"].as_str().or(arguments["fdname"].as_str());
                    let what = what.map_or_else(|| arguments["fdset-id"].to_string(), str::to_owned);
                    told.lock().unwrap().push(format!("{name} {what}"));
                    reply["return"] = json!({});
                    if name == "add-fd" {
                        reply["return"] = json!({ "fdset-id": arguments["fdset-id"], "fd": 9 });
                    }
                }
                if writeln!(writer, "{reply}").is_err() {
                    return;
                }
            }
        });
        let qmp = Qmp::connect(ours, |_, _| ()).unwrap();
        done.lock().unwrap().clear();
        (qmp, done)
    }

    fn invitation(read_only: bool) -> Invitation {
        let (doorbell, _) = UnixStream::pair().unwrap();
        let memory = crate::child::memory_file("zone", b"x").unwrap();
        Invitation { uuid: "u".into(), memory, size: 1 << 20, read_only, doorbell, liveness: None }
    }

    #[test]
    fn an_attachment_that_fails_at_any_step_leaves_nothing_and_its_port_is_free_again() {
        let steps = [
            "getfd",
            "chardev-add",
            "ivshmem-doorbell",
            "add-fd",
            "object-add",
            "remove-fd",
            "virtio-pmem-pci",
        ];
        for failing in steps {
            let first = Mutex::new(true);
            let (qmp, done) = qemu(move |name, arguments| {
                let it = name == failing || name == "device_add" && arguments["driver"] == failing;
                it && std::mem::take(&mut *first.lock().unwrap())
            });
            let mut ports = Ports::new("a", 1, BTreeMap::new());
            let failed = ports.attach(&qmp, "z", &invitation(false), &|_| ());
            assert!(matches!(failed, Err(Failure::Undone(_))), "{failing}: {failed:?}");
            let mut left: Vec<String> = Vec::new();
            for line in done.lock().unwrap().drain(..) {
                let (command, what) = line.split_once(' ').unwrap();
                match command {
                    "getfd" | "chardev-add" | "device_add" | "add-fd" | "object-add" => {
                        left.push(what.to_owned())
                    }
                    _ => left.retain(|l| l != what),
                }
            }
            assert_eq!(left, Vec::<String>::new(), "after {failing}");
            // The only port takes the next one.
            ports.attach(&qmp, "z", &invitation(false), &|_| ()).unwrap();
            assert!(
                ports
                    .attach(&qmp, "y", &invitation(false), &|_| ())
                    .unwrap_err()
                    .to_string()
                    .contains("no free port")
            );
        }
    }

    #[test]
    fn the_guest_sees_the_memory_last() {
        let (qmp, done) = qemu(|_, _| false);
        Ports::new("a", 1, BTreeMap::new()).attach(&qmp, "z", &invitation(false), &|_| ()).unwrap();
        assert_eq!(done.lock().unwrap().last().unwrap(), "device_add pmem-z.1");
    }

    #[test]
    fn a_zone_that_was_left_comes_back_with_a_doorbell_alone_and_with_the_rights_it_had() {
        let (qmp, done) = qemu(|_, _| false);
        let mut ports = Ports::new("a", 2, BTreeMap::from([("z".to_owned(), true)]));
        let refused = ports.attach(&qmp, "z", &invitation(false), &|_| ()).unwrap_err();
        assert!(refused.to_string().contains("read-only; stock QEMU can't unplug it"), "{refused}");
        ports.attach(&qmp, "z", &invitation(true), &|_| ()).unwrap();
        assert_eq!(
            *done.lock().unwrap(),
            ["getfd bell-z.1", "chardev-add bell-z.1", "device_add doorbell-z.1"]
        );
    }
}
