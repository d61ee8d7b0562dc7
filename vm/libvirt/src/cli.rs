// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo libvirt`: what a domain can have, shown, added and taken away.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use tombolo_zone::serve::{room, start};
use tombolo_zone::{MemberState, Zone, backing};
use uuid::Uuid;

use crate::domain::{self, Domain};
use crate::identity::Identity;
use crate::want::{Port, Want, ZoneWant};
use crate::{devices, hook, kubevirt, virsh};

/// The longest name of a member.
const NAME: usize = 31;

/// Domains of libvirt.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the XML to add to a domain
    Xml {
        /// The domain's name, a file with its XML, or '-' for the standard input
        domain: String,
        /// Parts to add
        #[command(flatten)]
        what: What,
        /// Print the whole domain with the additions
        #[arg(long)]
        whole: bool,
    },
    /// Define a domain anew with what it shall have; it has it from its next start on
    Attach {
        /// The domain's name
        domain: String,
        /// Parts to add
        #[command(flatten)]
        what: What,
    },
    /// Take from a domain what it has
    Detach {
        /// The domain's name
        domain: String,
        /// Parts to remove
        #[command(flatten)]
        what: What,
    },
    /// Run by libvirt when a domain starts or has ended (/etc/libvirt/hooks/qemu.d/tombolo)
    #[command(hide = true)]
    Hook {
        /// The domain's name
        domain: String,
        /// prepare, start, started, stopped, release …
        operation: String,
        /// begin or end
        phase: String,
        /// Unused
        extra: Option<String>,
    },
    /// Run by KubeVirt's hook sidecar as onDefineDomain
    #[command(hide = true)]
    Kubevirt {
        /// The VirtualMachineInstance as JSON
        #[arg(long)]
        vmi: String,
        /// The domain's XML
        #[arg(long)]
        domain: String,
    },
}

/// Parts of a domain.
#[derive(Args, Debug)]
pub struct What {
    /// A zone's file: the domain becomes its member under its own name
    #[arg(long, value_name = "FILE")]
    zone: Vec<PathBuf>,
    /// The guest's mount point of the zone (one --zone); the line for its /etc/fstab is printed
    #[arg(long, value_name = "DIR", requires = "zone")]
    mount: Option<String>,
    /// The domain may only read the zones
    #[arg(long, requires = "zone")]
    read_only: bool,
    /// The control socket of a switch (tombolo net run --control SOCKET)
    #[arg(long, value_name = "SOCKET")]
    network: Vec<PathBuf>,
    /// The address of the domain's card (one --network) [default: made from the names of domain and switch]
    #[arg(long, requires = "network")]
    mac: Option<String>,
    /// A folder of 'tombolo accel serve --vm FOLDER'
    #[arg(long, value_name = "FOLDER")]
    accel: Vec<PathBuf>,
    /// Memory that arrives after the start ('tombolo grow DOMAIN')
    #[arg(long)]
    grow: bool,
}

/// A member's name from any other: the end of a long one gives way to a sum of all of it.
pub fn member_name(name: &str) -> String {
    let clean: String = name.chars().map(|c| if c == '/' || c.is_control() { '-' } else { c }).collect();
    if clean.len() <= NAME {
        return clean;
    }
    let sum = Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes()).simple().to_string();
    let mut short = String::new();
    for c in clean.chars() {
        if short.len() + c.len_utf8() > NAME - 9 {
            break;
        }
        short.push(c);
    }
    format!("{short}-{}", &sum[..8])
}

/// An address of one's own for a card: locally administered, the same for the same names.
fn mac_of(domain: &str, control: &Path) -> String {
    let name = format!("{domain}\n{}", control.display());
    let bytes = *Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes()).as_bytes();
    format!("52:54:00:{:02x}:{:02x}:{:02x}", bytes[0], bytes[1], bytes[2])
}

/// A path that means the same everywhere; that of a file that has gone stays as it is.
fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    match path.canonicalize() {
        Ok(path) => Ok(path),
        Err(_) => std::path::absolute(path).with_context(|| path.display().to_string()),
    }
}

impl What {
    /// The parts for a domain that gets them, with the identities of zones.
    fn new_wants(&self, domain: &str) -> anyhow::Result<Vec<Want>> {
        let mut wants = self.wants(domain)?;
        for want in &mut wants {
            if let Want::Zone(zone) = want {
                zone.identity = Some(Identity::of(&zone.path)?);
            }
        }
        Ok(wants)
    }

    fn wants(&self, domain: &str) -> anyhow::Result<Vec<Want>> {
        if self.mount.is_some() && self.zone.len() > 1 || self.mac.is_some() && self.network.len() > 1 {
            bail!("--mount and --mac are for one zone and one network: use a command for each");
        }
        let member = member_name(domain);
        let mut wants = Vec::new();
        for path in &self.zone {
            let (member, mount) = (member.clone(), self.mount.clone());
            wants.push(Want::Zone(ZoneWant {
                path: absolute(path)?,
                member,
                read_only: self.read_only,
                mount,
                identity: None,
            }));
        }
        for control in &self.network {
            let control = absolute(control)?;
            let mac = self.mac.clone().unwrap_or_else(|| mac_of(domain, &control));
            let socket = room::port(&mac)?;
            wants.push(Want::Port(Port { control, name: member.clone(), socket, mac }));
        }
        for folder in &self.accel {
            wants.push(Want::Accel(absolute(folder)?));
        }
        wants.extend(self.grow.then_some(Want::Grow));
        if wants.is_empty() {
            bail!("say what: --zone, --network, --accel or --grow");
        }
        Ok(wants)
    }
}

/// Runs a command.
///
/// # Errors
/// One message that says what, where and what to do.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    let out = &mut std::io::stdout().lock();
    match command {
        Command::Xml { domain, what, whole } => {
            let mut domain = read(&domain)?;
            let wants = what.new_wants(&domain.name())?;
            for want in &wants {
                domain.attach(want)?;
            }
            if whole {
                write!(out, "{}", domain.text()?)?;
            } else {
                write!(out, "{}", domain.additions(&wants)?)?;
                advise(&wants, out)?;
            }
        }
        Command::Attach { domain, what } => attach(&domain, &what, out)?,
        Command::Detach { domain, what } => detach(&domain, &what, out)?,
        Command::Hook { operation, phase, .. } => {
            let mut xml = String::new();
            std::io::stdin().read_to_string(&mut xml).context("reading the domain's XML from libvirt")?;
            hook::run(&operation, &phase, &xml)?;
        }
        Command::Kubevirt { vmi, domain } => write!(out, "{}", kubevirt::define(&vmi, &domain)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A domain by name, from a file or from the standard input.
fn read(domain: &str) -> anyhow::Result<Domain> {
    if domain == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("reading the standard input")?;
        return Domain::parse(&text);
    }
    if domain.contains('/') {
        return Domain::parse(&std::fs::read_to_string(domain).with_context(|| domain.to_owned())?);
    }
    virsh::load(domain)
}

fn attach(name: &str, what: &What, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut domain = virsh::load(name)?;
    let wants = what.new_wants(name)?;
    for want in &wants {
        domain.attach(want)?;
    }
    virsh::define(&domain)?;
    for want in &wants {
        writeln!(out, "{name}: {} attached", want.label())?;
    }
    advise(&wants, out)?;
    note_running(name, out)
}

fn detach(name: &str, what: &What, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut domain = virsh::load(name)?;
    let wants = what.wants(name)?;
    let there = domain.wants()?;
    domain.detach(&wants)?;
    virsh::define(&domain)?;
    let running = virsh::is_running(name)?;
    for want in &wants {
        writeln!(out, "{name}: {} detached", want.label())?;
        match there.iter().find(|t| t.is_same_thing(want)) {
            Some(Want::Zone(zone)) if !running => expel(zone)?,
            Some(Want::Zone(zone)) => {
                writeln!(
                    out,
                    "once it has ended: tombolo zone expel {} {}",
                    crate::word(&zone.path),
                    zone.member
                )?;
            }
            _ => {}
        }
    }
    note_running(name, out)
}

/// Takes a domain's invitation back, where the zone is still there and the domain was ever invited.
fn expel(want: &ZoneWant) -> anyhow::Result<()> {
    if !want.path.exists() {
        return Ok(());
    }
    let members = Zone::open(&want.path, false)?.members()?;
    if members.iter().any(|m| m.name == want.member && m.state != MemberState::Empty) {
        start::expel(&want.path, &want.member, false)?;
    }
    Ok(())
}

fn note_running(name: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    if virsh::is_running(name)? {
        writeln!(
            out,
            "{name} runs: the change counts from its next start on (virsh shutdown, then virsh start)"
        )?;
    }
    Ok(())
}

/// Prints the steps that are left for the user.
fn advise(wants: &[Want], out: &mut dyn Write) -> anyhow::Result<()> {
    for want in wants {
        match want {
            Want::Zone(zone) => {
                let invitation = zone.invitation()?;
                if backing::lies_in_memory(zone.path.parent().unwrap_or(Path::new("/")))? {
                    writeln!(
                        out,
                        "{} lies in memory: after a reboot of this host the domain's next start makes it anew, empty",
                        zone.path.display()
                    )?;
                }
                if let Some(dir) = &zone.mount {
                    let read_only = if zone.read_only { ",ro" } else { "" };
                    writeln!(
                        out,
                        "in the guest's /etc/fstab (package tombolo-guest):\n{} {dir} tombolo nosuid,nodev,nofail{read_only} 0 0",
                        invitation.uuid
                    )?;
                }
                if Path::new("/sys/kernel/security/apparmor").is_dir() {
                    writeln!(out, "{}", apparmor(&zone.path))?;
                }
            }
            Want::Grow => writeln!(
                out,
                "the guest needs the kernel argument {} or the package tombolo-guest; once it runs: tombolo grow DOMAIN",
                tombolo_start::guest::KERNEL_ARGUMENTS
            )?,
            Want::Port(_) | Want::Accel(_) => {}
        }
    }
    Ok(())
}

/// The rule for AppArmor: libvirt allows a domain its sockets, but not the file of a virtio-pmem device.
fn apparmor(zone: &Path) -> String {
    let shipped = zone.starts_with("/var/lib/tombolo")
        || zone.parent() == Some(Path::new("/dev/shm")) && zone.extension().is_some_and(|e| e == "zone");
    let rule = if shipped {
        "#include <abstractions/tombolo-zones>".to_owned()
    } else {
        format!("\"{}\" rw,", zone.display())
    };
    format!("AppArmor needs this line in /etc/apparmor.d/local/abstractions/libvirt-qemu, once:\n  {rule}")
}

impl Domain {
    /// The XML that was added for `wants`, each part with its place in a comment.
    ///
    /// # Errors
    /// As [`devices::of`].
    pub fn additions(&self, wants: &[Want]) -> anyhow::Result<String> {
        let mut text = String::new();
        let mut part = |place: &str, element: Option<&xmltree::Element>| -> anyhow::Result<()> {
            if let Some(element) = element {
                text.push_str(&format!("<!-- {place} -->\n{}", domain::render(element)?));
            }
            Ok(())
        };
        part("in <domain>, in place of the one that is there", self.part("maxMemory"))?;
        if wants.iter().any(|w| matches!(w, Want::Port(_) | Want::Grow)) {
            part("in <domain>, in place of the one that is there", self.part("memoryBacking"))?;
        }
        if wants.contains(&Want::Grow) {
            part("in <domain>, in place of the one that is there", self.part("cpu"))?;
        }
        part("in <domain>; what tombolo's hook reads", self.part("metadata"))?;
        part("in <domain>", self.qemu_part("commandline"))?;
        part("in <domain>", self.qemu_part("override"))?;
        for device in self.devices(devices::MARK) {
            part("in <devices>", Some(device))?;
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_stay_different() {
        assert_eq!(member_name("web"), "web");
        assert_eq!(member_name("a/b"), "a-b");
        let (one, two) =
            (member_name(&format!("{}1", "x".repeat(40))), member_name(&format!("{}2", "x".repeat(40))));
        assert!(one != two && one.len() == NAME && two.len() == NAME, "{one} {two}");
        assert!(member_name(&"ä".repeat(30)).len() <= NAME);
    }

    #[test]
    fn apparmor_is_told_of_a_zone_by_the_rules_of_the_package_or_by_its_own_line() {
        let shipped = "#include <abstractions/tombolo-zones>";
        assert!(apparmor(Path::new("/dev/shm/own.zone")).ends_with(shipped));
        assert!(apparmor(Path::new("/var/lib/tombolo/a/own")).ends_with(shipped));
        assert!(apparmor(Path::new("/srv/own.zone")).ends_with("\"/srv/own.zone\" rw,"));
    }

    #[test]
    fn a_card_has_the_same_address_each_time_and_another_at_another_switch() {
        let of = |domain, control| mac_of(domain, Path::new(control));
        assert_eq!(of("a", "/x"), of("a", "/x"));
        assert_ne!(of("a", "/x"), of("a", "/y"));
        assert_ne!(of("a", "/x"), of("b", "/x"));
    }
}
