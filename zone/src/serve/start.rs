// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Invites and expels VMs, and starts the server that a zone then needs.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::invitation::Invitation;
use super::room::Room;
use crate::{MemberId, MemberState, Rights, Role, Zone};

/// Timeout for a server to make a socket: it reads the member table once a second.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for an owner that is not known as the zone's server: one that begins, or that was killed and whose threads have not all ended.
const OWNERS: Duration = Duration::from_secs(2);

/// Keeps a slot of the zone in a file for a VM that tombolo does not start, and makes sure that the zone has a server: without one it
/// starts `program` `zone serve FILE` in the background. A VM that has a slot keeps it.
///
/// # Errors
/// The zone is a running project's, the VM is in it with other rights, or no server starts.
pub fn invite(path: &Path, member: &str, rights: Rights, program: &Path) -> anyhow::Result<Invitation> {
    let path = path.canonicalize().with_context(|| format!("the zone's file {}", path.display()))?;
    let zone = Zone::open(&path, true)?;
    let room = Room::of(zone.uuid())?;
    let turn = turn(&room, &path)?;
    room.take_for(&path)?;
    let began = Instant::now();
    while zone.has_owner()? && !room.is_served() {
        if began.elapsed() > OWNERS {
            bail!(
                "{}: the zone belongs to a process that serves no VMs of others (a project that is up, or a mount); \
                 name the VM in that project's compose file, or end it first",
                path.display()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let known = zone.members()?.into_iter().find(|m| m.name == member && m.state != MemberState::Empty);
    match known {
        Some(there)
            if there.rights == rights && there.role == Some(Role::Vm) && there.state != MemberState::Dead => {
        }
        Some(there) if there.alive => bail!(
            "{}: '{member}' is in the zone already, and its rights can't change while it is: stop it first",
            path.display()
        ),
        _ => drop(zone.invite(member, Role::Vm, rights)?),
    }
    let is_new = !is_invited(&room, member)?;
    room.invite(member, rights)?;
    let socket = room.socket(member);
    let (name, uuid, size) = (zone.name().to_owned(), zone.uuid(), zone.size());
    if let Err(error) = serve(&path, &room, &socket, program, turn) {
        // It would get the next slot that is free.
        return Err(match if is_new { withdraw(&path, &room, member) } else { Ok(()) } {
            Ok(()) => error,
            Err(e) => error.context(format!("'{member}' stays invited: {e}")),
        });
    }
    Ok(Invitation { member: member.to_owned(), rights, zone: name, uuid, path, size, socket })
}

/// Takes back an invitation for which the server made no socket, and frees its slot unless a process has taken that.
fn withdraw(path: &Path, room: &Room, member: &str) -> anyhow::Result<()> {
    if room.socket(member).exists() {
        return Ok(());
    }
    room.expel(member)?;
    let zone = Zone::open(path, true)?;
    let there = zone.members()?.into_iter().find(|m| m.name == member && !m.alive);
    Ok(there.map_or(Ok(()), |there| zone.remove(there.id))?)
}

/// Waits until no other process invites a VM to the zone: a server that one of them has just started owns the zone before it is known as its server.
fn turn(room: &Room, path: &Path) -> anyhow::Result<File> {
    let began = Instant::now();
    loop {
        if let Some(turn) = room.turn()? {
            return Ok(turn);
        }
        if began.elapsed() > TIMEOUT {
            bail!(
                "{}: another process has been inviting a VM for more than {} s",
                path.display(),
                TIMEOUT.as_secs()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Forgets the invitation of a VM that is not running, and frees its slot. The zone's server does that, where there is one, and removes the VM's socket: an
/// invitation that it found in place of the former one would get a second slot. `force`: also of one that is only assumed to live.
///
/// # Errors
/// There is no such VM, it is running, or the server does nothing.
pub fn expel(path: &Path, member: &str, force: bool) -> anyhow::Result<()> {
    let zone = Zone::open(path, true)?;
    let room = Room::of(zone.uuid())?;
    let turn = turn(&room, path)?;
    room.take_for(path)?;
    // A server that is starting invites whom the member table has.
    let began = Instant::now();
    while room.is_starting() && began.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(20));
    }
    let members = zone.members()?;
    let there = members.iter().find(|m| m.name == member);
    // A member of the zone may have written another name over its own.
    if there.is_none() && !room.invited()?.contains_key(member) {
        let names: Vec<&str> = members.iter().map(|m| m.name.as_str()).collect();
        bail!("{}: no VM is called '{member}'; the zone has: {}", path.display(), names.join(", "));
    }
    match there {
        Some(there) if there.alive && !there.assumed => {
            bail!("{}: the VM '{member}' lives; stop it first", path.display())
        }
        Some(there) if there.assumed && !force => bail!(
            "{}: the VM '{member}' lives, or has ended unseen: its process holds no lock. Stop it first; if it has ended, use --force",
            path.display()
        ),
        Some(there) if there.assumed => room.expel_assumed(member)?,
        _ => room.expel(member)?,
    }
    if room.is_served() {
        // It looks once a second; others have their turn meanwhile.
        let slot = there.map(|there| there.id);
        drop((zone, turn));
        return forgotten(path, &room, member, slot);
    }
    there.map_or(Ok(()), |there| zone.remove_assumed(there.id))?;
    Ok(room.expel(member)?)
}

/// Waits until the zone's server has seen that a VM is not invited any more, or frees the VM's slot if the server ends before.
fn forgotten(path: &Path, room: &Room, member: &str, slot: Option<MemberId>) -> anyhow::Result<()> {
    let (began, socket) = (Instant::now(), room.socket(member));
    let is_kept = |zone: &Zone| -> crate::Result<bool> {
        let there = slot.map(|id| zone.member(id)).transpose()?;
        Ok(there.is_some_and(|there| there.name == member && there.state != MemberState::Empty))
    };
    while room.is_served() {
        let has_seen = !socket.exists();
        // It frees the slot then, where any member may write a name.
        let is_done = has_seen && (began.elapsed() > OWNERS || !is_kept(&Zone::open(path, false)?)?);
        if is_done || is_invited(room, member)? {
            return Ok(());
        }
        if began.elapsed() > TIMEOUT {
            bail!(
                "{}: '{member}' is expelled, but the zone's server has not removed the socket {} within {} s; its log: {}",
                path.display(),
                socket.display(),
                TIMEOUT.as_secs(),
                room.log().display()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _turn = turn(room, path)?;
    let zone = Zone::open(path, true)?;
    if is_invited(room, member)? {
        return Ok(());
    }
    if let Some(id) = slot.filter(|_| is_kept(&zone).is_ok_and(|kept| kept)) {
        zone.remove_assumed(id)?;
    }
    Ok(room.expel(member)?)
}

/// Returns whether another process has invited the VM again.
fn is_invited(room: &Room, member: &str) -> crate::Result<bool> {
    Ok(!matches!(room.invited()?.get(member), None | Some(Ok(None))))
}

/// Waits until the socket exists, with a server of this program's unless another process serves the zone. The server looks once a second; others have their
/// turn meanwhile.
fn serve(path: &Path, room: &Room, socket: &Path, program: &Path, turn: File) -> anyhow::Result<()> {
    let began = Instant::now();
    let (mut own, mut turn): (Option<Child>, _) = (None, Some(turn));
    while !room.is_served() || room.is_starting() || !socket.exists() {
        if room.is_served() {
            turn = None;
        } else if own.is_none() {
            // One that was there may have ended, after its last VM was expelled.
            turn = turn.map_or_else(|| room.turn(), |turn| Ok(Some(turn)))?;
            let is_ending = began.elapsed() < OWNERS && Zone::open(path, false)?.has_owner()?;
            if turn.is_some() && !room.is_served() && !is_ending {
                own = Some(spawn(path, room, program)?);
            }
        }
        if let Some(status) = own.as_mut().map(Child::try_wait).transpose()?.flatten() {
            let log = std::fs::read_to_string(room.log()).unwrap_or_default();
            bail!("{}: the zone's server ended at once ({status}): {}", path.display(), log.trim());
        }
        if began.elapsed() > TIMEOUT {
            bail!(
                "{}: the zone's server made no socket {} within {} s; its log: {}",
                path.display(),
                socket.display(),
                TIMEOUT.as_secs(),
                room.log().display()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Starts a server in a session of its own, which outlives the command.
fn spawn(path: &Path, room: &Room, program: &Path) -> anyhow::Result<Child> {
    room.make()?;
    let log = File::create(room.log()).with_context(|| format!("writing {}", room.log().display()))?;
    let mut command = Command::new(program);
    command.args(["zone", "serve"]).arg(path).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.current_dir("/");
    crate::daemon::detach(&mut command, &[]);
    command.spawn().with_context(|| format!("starting {}", program.display()))
}

/// Serves the zones in files until no VM is invited to them any more; each line for `say` names its zone.
///
/// # Errors
/// The first error of a zone.
pub fn run(path: &Path, say: &mut dyn FnMut(String)) -> anyhow::Result<()> {
    Ok(super::Server::start(path)?.run(say)?)
}

/// Returns the path of this program, by which a server is started.
///
/// # Errors
/// /proc can't be read.
pub fn own_program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("finding this program's file")
}
