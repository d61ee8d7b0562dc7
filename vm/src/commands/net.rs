// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net` for the networks of running projects.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use tombolo_control::{net as wire, socket};

use crate::commands::cli::{File, say};
use crate::commands::{client, ps};
use crate::compose::{self, Project};
use crate::project::control::NetStatus;
use crate::project::network::uplink_name;

/// Time for the answer of a switch to `net ls`.
const ANSWER: Duration = Duration::from_secs(1);

/// Commands for the networks of running projects.
#[derive(Subcommand, Debug)]
pub enum NetCommand {
    /// List the networks of a running project: switch, uplink, who has which address, and what is down
    Ls {
        /// The compose file
        #[command(flatten)]
        file: File,
    },
}

/// Runs one of [`NetCommand`].
///
/// # Errors
/// The project is not up, or its supervisor does not answer.
pub fn run(command: NetCommand, json: bool) -> anyhow::Result<ExitCode> {
    let NetCommand::Ls { file } = command;
    let mut status = client::status(&file.identify()?)?;
    note_up(&mut status.networks, ANSWER);
    if json {
        say(&serde_json::to_string_pretty(&status.networks)?)?;
    } else if status.networks.is_empty() {
        crate::say!(
            "the project '{}' has no network; add [net.NAME] and networks = [\"NAME\"] to a VM",
            status.project
        );
    } else {
        say(ps::networks(&status.networks).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks the switches, all at once, which ports and uplinks are up. What one doesn't tell within `limit` stays unknown.
pub(super) fn note_up<'a>(networks: impl IntoIterator<Item = &'a mut NetStatus>, limit: Duration) {
    let jobs = networks.into_iter().filter(|net| net.trouble.is_none()).map(|net| {
        move || {
            let request = wire::Request::<(), ()>::Ports;
            let who = ("switch", "it may be starting");
            let asked = socket::ask::<wire::Answer<wire::Ports>>(&net.control, &request, Some(limit), who);
            if let Ok((answer, _)) = asked {
                note(net, &answer);
            }
        }
    });
    crate::thread::all("ask", jobs);
}

fn note(net: &mut NetStatus, answer: &wire::Ports) {
    let up = |name: &str| answer.ports.iter().find(|port| port.name == name).map(|port| port.up);
    net.uplink_up = up(&uplink_name(&net.name));
    for port in &mut net.ports {
        (port.up, port.uplink_up) = (up(&port.vm), up(&uplink_name(&port.vm)));
    }
}

/// The control socket of the switch of network `name` in the running project of this folder (or one above); without a
/// name, of the only one. `None`: there is no such project, or it is not up, or has no such network.
///
/// # Errors
/// When the compose file is malformed, the supervisor does not answer, or there are several networks and no name.
pub fn find_switch(name: Option<&str>) -> anyhow::Result<Option<PathBuf>> {
    let Ok(file) = compose::find(None) else { return Ok(None) };
    let Some(status) = client::status_if_up(&Project::load(&file)?)? else {
        return Ok(None);
    };
    let networks = status.networks;
    if let (None, [_, _, ..]) = (name, &networks[..]) {
        let names: Vec<&str> = networks.iter().map(|n| n.name.as_str()).collect();
        anyhow::bail!("there are several networks; say which with --control: {}", names.join(", "));
    }
    Ok(networks.into_iter().find(|n| name.is_none_or(|wanted| n.name == wanted)).map(|n| n.control))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::project::control::PortStatus;

    fn port(name: &str, up: bool) -> serde_json::Value {
        let nothing = serde_json::to_value(wire::Flow::default()).unwrap();
        serde_json::json!({
            "name": name, "kind": "guest", "up": up, "connected": up, "macs": [], "workers": [], "sent": nothing, "received": nothing
        })
    }

    #[test]
    fn what_a_switch_says_is_down_is_told_at_the_vm_or_at_the_network_and_what_it_does_not_say_is_not() {
        let ports: Vec<_> = [("lan.uplink", false), ("a", true), ("a.uplink", false), ("b", false)]
            .map(|(name, up)| port(name, up))
            .into();
        let answer: wire::Ports =
            serde_json::from_value(serde_json::json!({ "ports": ports, "cpu_ns": 0 })).unwrap();
        let vm = |name: &str| PortStatus {
            vm: name.into(),
            mac: "52:54:00:00:00:01".into(),
            address: None,
            address6: None,
            up: None,
            uplink_up: None,
        };
        let mut net = NetStatus {
            name: "lan".into(),
            uplink: Some("tap0".into()),
            uplink_up: None,
            subnet: None,
            pid: Some(7),
            starts: 1,
            trouble: None,
            control: PathBuf::new(),
            ports: ["a", "b", "c"].map(vm).into(),
        };
        note(&mut net, &answer);
        let json = serde_json::to_value(&net).unwrap();
        let told =
            |of: &serde_json::Value| ["up", "uplink_up"].map(|key| of.get(key).and_then(|v| v.as_bool()));
        assert_eq!(told(&json), [None, Some(false)]);
        let ports: Vec<_> = json["ports"].as_array().unwrap().iter().map(told).collect();
        assert_eq!(ports, [[Some(true), Some(false)], [Some(false), None], [None, None]]);
        let text = ps::networks(&[net]);
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split("  ").map(str::trim).filter(|c| !c.is_empty()).collect())
            .collect();
        assert_eq!(rows[1][..5], ["lan", "7", "tap0 (down)", "-", "a (uplink down)"]);
        assert_eq!((rows[2][0], rows[3][0]), ("b (down)", "c"));
    }
}
