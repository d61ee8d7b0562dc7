// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo zone`: works on zones in files; [`describe`] also serves callers with the zones of a running project.

use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde::Serialize;
use tombolo_control::Size;
use uuid::Uuid;

use crate::header::Header;
use crate::numa::{self, Memory};
use crate::serve::invitation::Invitation;
use crate::serve::log::Log;
use crate::serve::start;
use crate::{Backing, Member, MemberState, Rights, Zone, ZoneConfig};

/// Memory that virtual machines and their host share.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Make a zone in a file; it persists, and `tombolo.toml` or `tombolo files` can use it
    Create {
        /// The file; it must not exist yet
        path: PathBuf,
        /// Size, a multiple of 2 MiB, at least 8M (suffixes K, M, G, T)
        #[arg(long, value_parser = Size::bytes_of)]
        size: u64,
        /// Name; the file's name unless given
        #[arg(long)]
        name: Option<String>,
        /// Identity, by which guests mount it: that of a zone that is no more; a new one unless given
        #[arg(long)]
        uuid: Option<Uuid>,
    },
    /// List the zones among files and in folders
    Ls {
        /// Files or folders (not searched further down)
        #[arg(default_value = ".")]
        paths: Vec<PathBuf>,
    },
    /// Show a zone: identity, areas, members
    Inspect {
        /// The file
        path: PathBuf,
    },
    /// Let a VM join that tombolo does not start: prints QEMU's arguments and libvirt's XML
    #[command(
        after_help = "The zone gets a server in the background if it has none ('tombolo zone serve'). A VM is known by the socket \
                            that is printed; the zone's file and this socket must be open to the VM's user. docs/qemu.md tells more."
    )]
    Invite {
        /// The zone's file
        zone: PathBuf,
        /// The VM's name in the zone, 1 to 31 bytes; the same name is the same member after each start
        name: String,
        /// Give it read access only
        #[arg(long)]
        read_only: bool,
        /// Print only this
        #[arg(long, value_enum)]
        only: Option<Form>,
    },
    /// Revoke a VM's invitation; the VM must have ended
    Expel {
        /// The zone's file
        zone: PathBuf,
        /// The VM's name in the zone
        name: String,
        /// Also a VM that no lock tells of, where it is certain that it has ended
        #[arg(long)]
        force: bool,
    },
    /// Serve a zone to invited VMs until no VM is invited ('invite' does this in the background)
    Serve {
        /// The zone's file
        zone: PathBuf,
    },
    /// Remove an unused zone and its contents
    Rm {
        /// The files
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
}

/// A form of an invitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    /// QEMU's arguments, one per line
    Qemu,
    /// Elements for the devices of a libvirt domain
    Libvirt,
    /// The guest's mount command
    Mount,
}

/// The description of a zone.
#[derive(Debug, Serialize)]
pub struct Description {
    /// Its file, if it has one.
    pub path: Option<PathBuf>,
    /// Identity and areas.
    #[serde(flatten)]
    pub header: Header,
    /// A process owns it.
    pub owned: bool,
    /// The owner's heartbeat, Unix time in ns; 0: never.
    pub heartbeat_ns: u64,
    /// Members whose slots are not empty, by slot.
    pub members: Vec<Member>,
    /// The places of its memory, where they were looked at.
    pub memory: Option<Memory>,
}

/// Collects the description of a zone.
pub fn describe(zone: &Zone, path: Option<&Path>) -> crate::Result<Description> {
    Ok(Description {
        path: path.map(Path::to_owned),
        header: zone.header().clone(),
        owned: zone.has_owner()?,
        heartbeat_ns: zone.pulse()?.0,
        members: zone.members()?,
        memory: None,
    })
}

/// Runs a command; output goes to standard output, as JSON if asked for.
pub fn run(command: Command, json: bool) -> anyhow::Result<ExitCode> {
    run_to(command, json, &mut std::io::stdout().lock())
}

/// Runs a command with its output going to `out`.
pub fn run_to(command: Command, json: bool, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    match command {
        Command::Create { path, size, name, uuid } => {
            let name = match name {
                Some(name) => name,
                None => default_name(&path)?,
            };
            let mut config = ZoneConfig::new(name, size).backing(Backing::File(path.clone()));
            config.uuid = uuid;
            let zone = Zone::create(&config)?;
            show(&describe(&zone, Some(&path))?, json, out)?;
        }
        Command::Inspect { path } => {
            let zone = Zone::open(&path, false)?;
            let memory = numa::look(zone.as_fd(), zone.size()).context("its memory can't be looked at")?;
            show(&Description { memory, ..describe(&zone, Some(&path))? }, json, out)?;
        }
        Command::Invite { zone, name, read_only, only } => {
            let rights = if read_only { Rights::READ_ONLY } else { Rights::READ_WRITE };
            let invitation = start::invite(&zone, &name, rights, &start::own_program()?)?;
            show_invitation(&invitation, only, json, out)?;
        }
        Command::Expel { zone, name, force } => {
            start::expel(&zone, &name, force)?;
            if !json {
                writeln!(out, "'{name}' has no slot in {} any more", zone.display())?;
            }
        }
        Command::Serve { zone } => {
            let stdout = std::io::stdout();
            let mut log = Log::new(out, stdout.as_fd());
            start::run(&zone, &mut |line| log.say(&line))?;
        }
        Command::Ls { paths } => list(&paths, json, out)?,
        Command::Rm { paths } => remove(&paths, json, out)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes zones without an owner. Where the words about one can't be written, the others are removed all the same.
fn remove(paths: &[PathBuf], json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut told = Ok(());
    for path in paths {
        // Taking it over makes sure that it is a zone without an owner.
        let zone = Zone::take_over(path)?;
        // A member that comes by now is seen, or refused.
        let _kept_out = zone.keep_members_out()?;
        if let Some(member) = zone.members()?.into_iter().find(|m| m.alive) {
            bail!("{}: in use by {}; unmount there first", path.display(), member.described());
        }
        std::fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
        drop(zone);
        if !json {
            told = told.and(writeln!(out, "removed {}", path.display()));
        }
    }
    Ok(told?)
}

/// An invitation as text, or in one of its forms.
fn show_invitation(
    invitation: &Invitation,
    only: Option<Form>,
    json: bool,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    match only {
        _ if json => {
            let mut value = serde_json::to_value(invitation)?;
            value["qemu"] = serde_json::to_value(invitation.qemu())?;
            value["libvirt"] = invitation.libvirt_devices().into();
            value["libvirt_arguments"] = serde_json::to_value(invitation.libvirt_arguments())?;
            value["room"] = invitation.room().into();
            value["mount"] = invitation.mount().into();
            writeln!(out, "{}", serde_json::to_string_pretty(&value)?)?;
        }
        None => write!(out, "{}", invitation.text())?,
        Some(Form::Qemu) => writeln!(out, "{}", invitation.qemu().join("\n"))?,
        Some(Form::Libvirt) => write!(out, "{}", invitation.libvirt_devices())?,
        Some(Form::Mount) => writeln!(out, "{}", invitation.mount())?,
    }
    Ok(())
}

/// A zone as text.
pub fn show(zone: &Description, json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(zone)?)?;
        return Ok(());
    }
    writeln!(out, "{}  {}", zone.header.name, zone.header.uuid)?;
    if let Some(path) = &zone.path {
        writeln!(out, "file     {}", path.display())?;
    }
    writeln!(out, "size     {}", Size(zone.header.size))?;
    writeln!(out, "owner    {}", if zone.owned { "running" } else { "none" })?;
    if let Some(memory) = &zone.memory {
        writeln!(out, "memory   {}", places(memory, zone.header.size))?;
    }
    for area in &zone.header.areas {
        let kind = area.kind.to_string();
        writeln!(out, "area     {kind:<8} {:<16} {:>10} at {:#x}", area.name, Size(area.len), area.offset)?;
    }
    for m in &zone.members {
        let role = m.role.map_or("?", |r| if r == crate::Role::Vm { "vm" } else { "host" });
        let rights = if m.rights.write { "rw" } else { "ro" };
        let bell = m.doorbell.map_or_else(|| "-".to_owned(), |p| p.to_string());
        let state = state_word(m);
        writeln!(
            out,
            "member   {:>2} {:<16} {role:<4} {rights} {state:<8} epoch {:<4} doorbell {bell}",
            m.id, m.name, m.epoch
        )?;
    }
    Ok(())
}

/// The places of a zone's memory in words.
fn places(memory: &Memory, size: u64) -> String {
    let on = |(node, bytes): (&u32, &u64)| format!("{} KiB on node {node}", bytes >> 10);
    let mut parts: Vec<String> = memory.bytes.iter().map(on).collect();
    if parts.is_empty() {
        parts.push("no page exists yet".into());
    }
    if memory.looked_at < size {
        parts.push(format!("{} of {} looked at", Size(memory.looked_at), Size(size)));
    }
    let new = memory.nodes.as_ref().map_or("to the node that touches them first".into(), ToString::to_string);
    format!("{}; new pages: {new}", parts.join(", "))
}

fn state_word(member: &Member) -> &'static str {
    if member.assumed {
        return "assumed";
    }
    match (member.state, member.alive) {
        (MemberState::Active, false) => "lost",
        (MemberState::Active, true) => "active",
        (MemberState::Invited, _) => "invited",
        (MemberState::Dead, _) => "dead",
        (MemberState::Empty, _) => "empty",
        (MemberState::Damaged, _) => "damaged",
    }
}

fn list(paths: &[PathBuf], json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut zones = Vec::new();
    for path in paths {
        if !path.is_dir() {
            zones.push(describe(&Zone::open(path, false)?, Some(path))?);
            continue;
        }
        let entries = std::fs::read_dir(path).with_context(|| format!("reading {}", path.display()))?;
        let mut files: Vec<PathBuf> = entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
        files.sort();
        for file in files.into_iter().filter(|f| f.is_file()) {
            // Other files in a folder are ignored.
            if let Ok(zone) = Zone::open(&file, false) {
                zones.push(describe(&zone, Some(&file))?);
            }
        }
    }
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(&zones)?)?;
        return Ok(());
    }
    writeln!(out, "{:<20} {:>10} {:>7} {:<8} FILE", "NAME", "SIZE", "MEMBERS", "OWNER")?;
    for z in zones {
        let active = z.members.iter().filter(|m| m.state == MemberState::Active).count();
        let path = z.path.as_deref().unwrap_or(Path::new("")).display().to_string();
        let owner = if z.owned { "running" } else { "none" };
        writeln!(out, "{:<20} {:>10} {active:>7} {owner:<8} {path}", z.header.name, Size(z.header.size))?;
    }
    Ok(())
}

fn default_name(path: &Path) -> anyhow::Result<String> {
    match path.file_stem().and_then(|n| n.to_str()) {
        Some(name) => Ok(name.to_owned()),
        None => bail!("{}: no name can be made of this; give one with --name", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(command: Command, json: bool) -> String {
        let mut out = Vec::new();
        run_to(command, json, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_zone_is_made_listed_shown_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.zone");
        text(Command::Create { path: path.clone(), size: 16 << 20, name: None, uuid: None }, false);
        std::fs::write(dir.path().join("readme"), "no zone").unwrap();
        let listed = text(Command::Ls { paths: vec![dir.path().to_owned()] }, false);
        assert!(listed.contains("data") && listed.contains("16M") && !listed.contains("readme"), "{listed}");
        let shown: serde_json::Value =
            serde_json::from_str(&text(Command::Inspect { path: path.clone() }, true)).unwrap();
        assert_eq!(shown["name"], "data");
        assert_eq!(shown["areas"][0]["kind"], "sync");
        assert_eq!(shown["owned"], false);
        assert!(shown["memory"].is_null() || shown["memory"]["bytes"].is_object(), "{shown}");
        text(Command::Rm { paths: vec![path.clone()] }, false);
        assert!(!path.exists());
    }

    #[test]
    fn the_places_of_a_zones_memory_are_said_in_words() {
        let nodes = crate::numa::Nodes::Bind(vec![1]);
        let bytes = std::collections::BTreeMap::from([(0, 8192), (1, 1 << 30)]);
        let some = Memory { nodes: Some(nodes), bytes, looked_at: 1 << 30 };
        let text = "8 KiB on node 0, 1048576 KiB on node 1, 1G of 4G looked at; new pages: bound to node 1";
        assert_eq!(places(&some, 4 << 30), text);
        let none = Memory { nodes: None, bytes: std::collections::BTreeMap::new(), looked_at: 8 << 20 };
        let text = "no page exists yet; new pages: to the node that touches them first";
        assert_eq!(places(&none, 8 << 20), text);
    }

    #[test]
    fn a_zone_in_use_or_a_foreign_file_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("z");
        let _zone =
            Zone::create(&ZoneConfig::new("z", 8 << 20).backing(Backing::File(path.clone()))).unwrap();
        let foreign = dir.path().join("foreign");
        std::fs::write(&foreign, vec![0; 8192]).unwrap();
        for (path, why) in [(path, "in use"), (foreign, "not a zone")] {
            let said = run_to(Command::Rm { paths: vec![path.clone()] }, false, &mut Vec::new()).unwrap_err();
            assert!(said.to_string().contains(why), "{said}");
            assert!(path.exists());
        }
    }

    #[test]
    fn zones_are_removed_where_the_words_about_them_find_no_room() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        for path in &paths {
            drop(Zone::create(&ZoneConfig::new("z", 8 << 20).backing(Backing::File(path.clone()))).unwrap());
        }
        let mut full: &mut [u8] = &mut [];
        run_to(Command::Rm { paths: paths.to_vec() }, false, &mut full).unwrap_err();
        assert!(paths.iter().all(|path| !path.exists()));
    }

    #[test]
    fn a_zone_that_another_process_keeps_members_out_of_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("z");
        drop(Zone::create(&ZoneConfig::new("z", 8 << 20).backing(Backing::File(path.clone()))).unwrap());
        let other = Zone::open(&path, true).unwrap();
        let kept_out = other.keep_members_out().unwrap();
        let said = run_to(Command::Rm { paths: vec![path.clone()] }, false, &mut Vec::new()).unwrap_err();
        assert!(said.to_string().contains("repairs or removes it"), "{said}");
        assert!(path.exists());
        drop(kept_out);
        text(Command::Rm { paths: vec![path.clone()] }, false);
        assert!(!path.exists());
    }
}
