// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks before a start, which change nothing on the host.

use std::path::Path;
use std::sync::Arc;

use crate::compose::network::Uplink;
use crate::compose::ports;
use crate::compose::{Backing, Project, VmSpec};
use crate::guest::kit;
use crate::host;
use crate::machine::growth;
use crate::project::changes::{Action, Kind, Side};
use crate::qemu::version::Qemu;

/// QEMU and kernels for the VMs of a plan.
#[derive(Debug)]
pub struct Ready {
    pub qemu: Arc<Qemu>,
    /// The VMs that the plan starts, with what they boot.
    pub vms: Vec<(String, VmSpec, Option<kit::Boot>)>,
}

/// Looks whether what a plan starts can be had; `promised` is the memory that running VMs may still take, in bytes;
/// `has_ports` tells whether a VM that runs has its ports of the host.
///
/// # Errors
/// Names the key, what is wrong with it, and the remedy.
pub fn examine(
    project: &Project,
    running: &Side,
    actions: &[Action],
    promised: impl FnOnce() -> u64,
    has_ports: impl Fn(&str) -> bool,
) -> anyhow::Result<Ready> {
    let qemu = Arc::new(Qemu::find(project.compose.qemu.as_deref())?);
    let near = project.file.parent().unwrap_or(Path::new("/"));
    let mut vms = Vec::new();
    // Those of VMs that are started go from one to another. One that a VM could not keep is another program's, or nobody's.
    let started = |vm: &String| actions.iter().any(|action| action.starts(vm));
    let own =
        running.forwards.iter().filter(|(vm, forwards)| started(vm) && !forwards.is_empty() && has_ports(vm));
    let own: Vec<_> = own.flat_map(|(_, forwards)| forwards.clone()).collect();
    for action in actions {
        let (Action::Start { kind: Kind::Vm, name } | Action::Restart { name, .. }) = action else {
            continue;
        };
        let Some(spec) = project.compose.vm.get(name) else { continue };
        vms.push((name.clone(), spec.clone(), kit::boot(name, spec, near)?));
        host::check_files(name, spec)?;
        growth::check(name, spec)?;
        kit::check_memory(name, spec, growth::layout(name, spec)?.boot)?;
        ports::try_out(name, spec, &own)?;
    }
    for action in actions {
        if let Action::Start { kind: Kind::Network, name }
        | Action::Replace { kind: Kind::Network, name, .. } = action
        {
            let uplink = project.compose.net.get(name).and_then(|net| net.uplink.as_ref());
            check_uplink(name, uplink, Path::new("/sys/class/net"))?;
        }
    }
    if !project.compose.overcommit {
        check_memory(project, running, actions, &vms, promised())?;
    }
    Ok(Ready { qemu, vms })
}

fn check_memory(
    project: &Project,
    running: &Side,
    actions: &[Action],
    vms: &[(String, VmSpec, Option<kit::Boot>)],
    promised: u64,
) -> anyhow::Result<()> {
    // A VM that is restarted gives its memory back first.
    let before = |name: &str| -> u64 {
        let size = running.vms.get(name).and_then(|settings| settings["memory"].as_str()?.parse().ok());
        size.map_or(0, |size: crate::compose::Size| size.0)
    };
    let vms = vms.iter().map(|(name, spec, _)| (name.as_str(), spec.memory.0.saturating_sub(before(name))));
    let zones = actions.iter().filter_map(|action| {
        let Action::Start { kind: Kind::Zone, name } = action else { return None };
        let spec = project.compose.zone.get(name).filter(|spec| spec.backing == Backing::Memfd)?;
        Some((name.as_str(), spec.size.0))
    });
    host::check_memory(promised, vms, zones)
}

/// Refuses an uplink over a device that is not there; `devices` has a folder for each.
fn check_uplink(net: &str, uplink: Option<&Uplink>, devices: &Path) -> anyhow::Result<()> {
    let (name, is_tap) = match uplink {
        Some(Uplink::Tap(name)) => (name, true),
        Some(Uplink::Interface(name)) => (name, false),
        Some(Uplink::User) | None => return Ok(()),
    };
    let device = devices.join(name);
    if device.exists() {
        anyhow::ensure!(
            !is_tap || device.join("tun_flags").exists(),
            "net.{net}.uplink: '{name}' is no TAP device; write {{ interface = \"{name}\" }}, or name a TAP device"
        );
        return Ok(());
    }
    let there = std::fs::read_dir(devices).into_iter().flatten().filter_map(Result::ok);
    let there: Vec<String> = there.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let remedy = match crate::compose::nearest(name, there.iter().map(String::as_str)) {
        Some(near) => format!("did you mean '{near}'?"),
        None if is_tap => {
            format!("make it: ip tuntap add {name} mode tap user $USER && ip link set {name} up")
        }
        None => format!("there are: {}", there.join(", ")),
    };
    anyhow::bail!("net.{net}.uplink: there is no device '{name}'; {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_uplink_over_a_device_that_is_not_there_is_refused_with_the_remedy() {
        let devices = tempfile::tempdir().unwrap();
        for name in ["eth0", "tap0"] {
            std::fs::create_dir(devices.path().join(name)).unwrap();
        }
        std::fs::write(devices.path().join("tap0/tun_flags"), "0x1002\n").unwrap();
        let check =
            |uplink: Uplink| check_uplink("lan", Some(&uplink), devices.path()).map_err(|e| e.to_string());
        check(Uplink::Tap("tap0".into())).unwrap();
        check(Uplink::Interface("eth0".into())).unwrap();
        check(Uplink::User).unwrap();
        let typed = check(Uplink::Tap("tpa0".into())).unwrap_err();
        assert_eq!(typed, "net.lan.uplink: there is no device 'tpa0'; did you mean 'tap0'?");
        let missing = check(Uplink::Tap("uplink9".into())).unwrap_err();
        assert!(
            missing.ends_with("make it: ip tuntap add uplink9 mode tap user $USER && ip link set uplink9 up"),
            "{missing}"
        );
        let other = check(Uplink::Tap("eth0".into())).unwrap_err();
        assert!(other.contains("'eth0' is no TAP device; write { interface = \"eth0\" }"), "{other}");
    }
}
