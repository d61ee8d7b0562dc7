// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Virtio-serial ports that a running VM has for a while: the guest finds one by its name in /sys/class/virtio-ports, and what it writes to it
//! waits until this side has read it.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use qapi::qmp;
use serde_json::json;

use super::Machine;
use crate::qemu::qmp::{Error, Qmp};

/// Begins the name of each port that is added to a running VM.
pub const PREFIX: &str = "org.tombolo.";

/// Time for QEMU for each step.
const STEP: Duration = Duration::from_secs(20);

/// A port, until it is dropped.
#[derive(Debug)]
pub struct Port<'a> {
    qmp: &'a Qmp,
    name: String,
    socket: UnixStream,
}

impl Machine {
    /// Adds a port that the guest sees under this name, which was never used before in this VM.
    ///
    /// # Errors
    /// When QEMU refuses or does not answer.
    pub fn add_port(&self, name: &str) -> anyhow::Result<Port<'_>> {
        let qmp = self.qmp()?;
        self.old_ports.call_once(|| remove_old(qmp));
        let (socket, theirs) = UnixStream::pair()?;
        let getfd = qmp::getfd { fdname: name.to_owned() };
        qmp.execute_with(getfd, Some(theirs.as_fd()), STEP)?;
        let backend = json!({
            "id": name, "backend": { "type": "socket", "data": {
                "addr": { "type": "fd", "data": { "str": name } }, "server": false,
            } },
        });
        if let Err(e) = qmp.execute_value("chardev-add", &backend) {
            // The descriptor goes with QEMU at the latest.
            let _gone_already = qmp.execute_value("closefd", &json!({ "fdname": name }));
            return Err(e.into());
        }
        let port = Port { qmp, name: name.to_owned(), socket };
        let device = json!({
            "driver": "virtserialport", "id": name, "chardev": name, "name": name, "bus": "ports.0",
        });
        qmp.execute_value("device_add", &device).map_err(|e| self.explain(e))?;
        Ok(port)
    }

    /// A device for ports has 30 of them beside the one that Linux keeps for a console, and the agent has one.
    fn explain(&self, refused: Error) -> anyhow::Error {
        match refused {
            Error::Refused { message, .. } if message.contains("Out-of-range port id") => anyhow::anyhow!(
                "the VM '{}' has no port for another terminal or input: 29 are the most at a time; end one of them, or run the command without -t and -i",
                self.name()
            ),
            other => other.into(),
        }
    }
}

impl Port<'_> {
    /// The name by which the guest finds it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This side of the port.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }
}

impl Drop for Port<'_> {
    fn drop(&mut self) {
        remove(self.qmp, &self.name);
    }
}

fn remove(qmp: &Qmp, name: &str) {
    let id = json!({ "id": name });
    // A QEMU that has ended has neither; one that has refused the device has the back-end alone.
    let _none = qmp.execute_value("device_del", &id);
    if let Err(e) = qmp.execute_value("chardev-remove", &id) {
        crate::say!("the port {name} stays in QEMU: {e}");
    }
}

/// Removes the ports that a supervisor has left which was killed, or became another program: their other sides are gone, and a VM has few.
fn remove_old(qmp: &Qmp) {
    match qmp.execute(qmp::query_chardev {}) {
        Ok(all) => {
            let old = all.iter().filter(|chardev| chardev.label.starts_with(PREFIX));
            old.for_each(|chardev| remove(qmp, &chardev.label));
        }
        Err(e) => crate::say!("ports of an earlier supervisor may stay in QEMU: {e}"),
    }
}
