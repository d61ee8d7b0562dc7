// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The actions at the start and at the end of a domain: libvirt runs `/etc/libvirt/hooks/qemu.d/tombolo DOMAIN OPERATION PHASE EXTRA`
//! with the domain's XML on the standard input, and refuses the start if the hook fails.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tombolo_zone::serve::{access, room, start};
use tombolo_zone::{Rights, Zone};

use crate::domain::Domain;
use crate::want::{Port, Want, ZoneWant};

/// Time for a zone's server to learn that a domain's QEMU has ended.
const ENDING: Duration = Duration::from_secs(5);

/// Runs the hook.
///
/// # Errors
/// A want in the domain's XML can't be met. libvirt shows the error to the user who starts the domain.
pub fn run(operation: &str, phase: &str, xml: &str) -> anyhow::Result<()> {
    let prepares = match (operation, phase) {
        ("prepare", "begin") => true,
        ("release", "end") => false,
        _ => return Ok(()),
    };
    let domain = Domain::parse(xml)?;
    let wants = domain.wants()?;
    let done = if prepares { wants.iter().try_for_each(prepare) } else { release_all(&wants) };
    done.with_context(|| format!("tombolo, for the domain '{}'", domain.name()))
}

/// Gives everything back, whatever fails; an error names all failures.
fn release_all(wants: &[Want]) -> anyhow::Result<()> {
    let failures: Vec<String> =
        wants.iter().filter_map(|want| release(want).err()).map(|e| format!("{e:#}")).collect();
    if !failures.is_empty() {
        bail!("{}", failures.join("; "));
    }
    Ok(())
}

/// Makes what a domain connects to.
fn prepare(want: &Want) -> anyhow::Result<()> {
    match want {
        Want::Zone(zone) => {
            let there = zone.path.symlink_metadata().is_ok();
            match &zone.identity {
                Some(identity) if !there => identity.make(&zone.path)?,
                None if !there => {
                    let path = zone.path.display();
                    bail!(
                        "{path} is not there: make the zone anew (tombolo zone create {path} --size SIZE, tombolo files mkfs {path}), \
                         then detach and attach it; one in /dev/shm goes when the host reboots"
                    );
                }
                _ => {}
            }
            if let Some(identity) = &zone.identity {
                identity.check(&zone.path)?;
            }
            let rights = if zone.read_only { Rights::READ_ONLY } else { Rights::READ_WRITE };
            start::invite(&zone.path, &zone.member, rights, &start::own_program()?)?;
            // libvirt does not know the zone's file, so its QEMU must be let in.
            Ok(access::give(&zone.path)?)
        }
        Want::Port(port) => add(port),
        Want::Accel(folder) => {
            let bell = folder.join("bell");
            if !bell.exists() {
                bail!(
                    "{} is not there: the accelerator's server does not run; start it: tombolo accel serve --vm {}",
                    bell.display(),
                    crate::word(folder)
                );
            }
            Ok(())
        }
        Want::Grow => Ok(()),
    }
}

/// Gives back what is of no use without the domain. A zone stays with all that is in it, and the domain's slot in it for its next start.
fn release(want: &Want) -> anyhow::Result<()> {
    match want {
        Want::Zone(zone) => await_end(zone),
        Want::Port(port) => remove(port),
        Want::Accel(_) | Want::Grow => Ok(()),
    }
}

/// Waits until the zone's server has ended the domain's epoch.
fn await_end(want: &ZoneWant) -> anyhow::Result<()> {
    // A zone that was removed meanwhile holds nothing.
    if !want.path.exists() {
        return Ok(());
    }
    let zone = Zone::open(&want.path, false)?;
    let began = Instant::now();
    while let Some(member) = zone.members()?.into_iter().find(|m| m.name == want.member && m.alive) {
        if began.elapsed() > ENDING {
            bail!("{}: still a member: {}", want.path.display(), member.described());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn net(arguments: &[&str], control: &Path) -> anyhow::Result<()> {
    let mut command = Command::new(start::own_program()?);
    command.arg("net").args(arguments).arg("--control").arg(control);
    let output = command.output().context("starting tombolo net")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim().trim_start_matches("tombolo: "));
    }
    Ok(())
}

/// Adds the domain's port to its switch.
pub(crate) fn add(port: &Port) -> anyhow::Result<()> {
    if !port.control.exists() {
        bail!(
            "{} is not there: the switch does not run; start it: tombolo net run --control {}",
            port.control.display(),
            crate::word(&port.control)
        );
    }
    if let Some(folder) = port.socket.parent() {
        room::make_folder(folder)?;
    }
    let words = format!("{},{},{}", port.name, port.socket.display(), port.mac);
    net(&["add", &words], &port.control)
}

/// Removes the domain's port from its switch.
pub(crate) fn remove(port: &Port) -> anyhow::Result<()> {
    // A switch that has ended has no ports.
    if !port.control.exists() {
        return Ok(());
    }
    net(&["remove", &port.name], &port.control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_that_has_gone_is_named_with_the_commands_that_make_it() {
        let path = std::path::PathBuf::from("/nowhere/own.zone");
        let want = Want::Zone(ZoneWant {
            path,
            member: "web".into(),
            read_only: false,
            mount: None,
            identity: None,
        });
        let said = prepare(&want).unwrap_err().to_string();
        assert!(said.contains("tombolo zone create /nowhere/own.zone") && said.contains("reboots"), "{said}");
    }

    #[test]
    fn what_fails_to_be_released_keeps_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let broken = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, "no zone").unwrap();
            Want::Zone(ZoneWant { path, member: "web".into(), read_only: false, mount: None, identity: None })
        };
        let said = release_all(&[broken("one"), Want::Grow, broken("two")]).unwrap_err().to_string();
        assert!(said.contains("/one") && said.contains("/two"), "{said}");
    }
}
