// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mounts by the kernel (`files/linux`). The process takes a slot of the zone and hands the descriptor that holds it to the module, which keeps it until the
//! mount's end: whatever becomes of the process, the slot is held as long as the file system is mounted somewhere, and no longer. The process stays to
//! declare other members dead where the zone has no owner, to unmount at SIGTERM, and to free the slot after an unmount. It also has the zone's doorbells: the module
//! asks for rings by one eventfd, and is told of rings by another. Once the process has ended, the mount and the guests poll.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::pipe::PipeFlags;
use tombolo_zone::doorbell::Bell;
use tombolo_zone::{Liveness, MemberId, MemberState, Unburied, Zone};

use super::{ENDS, REAP};
use crate::fuse::options::MountOptions;
use crate::fuse::session::Place;

const FSOPEN_CLOEXEC: libc::c_uint = 1;
const FSMOUNT_CLOEXEC: libc::c_uint = 1;
const FSCONFIG_SET_STRING: libc::c_uint = 1;
const FSCONFIG_SET_FD: libc::c_uint = 5;
const FSCONFIG_CMD_CREATE: libc::c_uint = 6;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
const CAP_SYS_ADMIN: u32 = 21;

/// Returns why this process can't have any zone mounted by the kernel; `None`: it can.
pub(super) fn hindrance() -> Option<&'static str> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    if !read("/proc/filesystems").lines().any(|line| line == "nodev\ttombolo") {
        return Some("the kernel's module tombolo is not loaded");
    }
    let status = read("/proc/self/status");
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let may = capabilities
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|all| all >> CAP_SYS_ADMIN & 1 != 0);
    let is_first_namespace = read("/proc/self/uid_map").split_whitespace().eq(["0", "0", "4294967295"]);
    (!may || !is_first_namespace)
        .then_some("the kernel mounts it for processes with CAP_SYS_ADMIN on the host alone")
}

/// Returns the directory where this kernel has the zone mounted already.
pub(super) fn place_of(zone: &Zone) -> Option<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let uuid = format!("zone={}", zone.uuid());
    let is_its = |line: &&str| {
        line.split_once(" - ").is_some_and(|(_, of)| {
            of.starts_with("tombolo ")
                && of.rsplit(' ').next().is_some_and(|o| o.split(',').any(|o| o == uuid))
        })
    };
    table.lines().find(is_its)?.split(' ').nth(4).map(str::to_owned)
}

/// A zone that the kernel has mounted.
pub(super) struct Mounted {
    zone: Arc<Zone>,
    id: MemberId,
    place: Place,
    /// Readable when members with pending bits are to be rung.
    rings: OwnedFd,
    /// `None`: the mount only reads, or no process serves the zone's doorbells.
    bell: Option<Bell>,
}

/// Mounts the zone as the member whose slot `alive` holds. On failure the slot is free again.
pub(super) fn mount(
    zone: &Arc<Zone>,
    (id, alive): (MemberId, Liveness),
    target: &Path,
    options: &MountOptions,
) -> anyhow::Result<Mounted> {
    let new = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let (rings, rung) = (new()?, new()?);
    let mounted = hand_over(id, [&alive.as_fd(), &rings.as_fd(), &rung.as_fd()], target, options);
    drop(alive);
    let place = match mounted {
        Ok(place) => place,
        Err(e) => {
            zone.remove_left(id)?;
            return Err(e).with_context(|| format!("mounting at {} by the kernel", target.display()));
        }
    };
    let bell = match bell_of(zone, id, rung) {
        Ok(bell) => bell,
        Err(e) => {
            place.detach()?;
            zone.remove_left(id)?;
            return Err(e);
        }
    };
    Ok(Mounted { zone: Arc::clone(zone), id, place, rings, bell })
}

/// Enters the doorbells of the zone that the kernel has mounted, and has `rung` signalled when the member is rung. `None`: it stores nothing, or no process
/// serves them.
fn bell_of(zone: &Zone, id: MemberId, rung: OwnedFd) -> anyhow::Result<Option<Bell>> {
    let member = zone.member(id)?;
    if !member.alive {
        // The kernel has one file system for a zone, which keeps the slot that it was mounted with.
        bail!(
            "zone {}: the kernel has it mounted in another mount namespace; mount it there with mount --bind, or here with --backend fuse",
            zone.name()
        );
    }
    if member.state != MemberState::Active {
        return Ok(None);
    }
    Ok(Bell::enter(zone, id, move || {
        // A full counter is rung already.
        let _full = rustix::io::write(&rung, &1u64.to_ne_bytes());
    })?)
}

fn hand_over(
    id: MemberId,
    descriptors: [&BorrowedFd<'_>; 3],
    target: &Path,
    options: &MountOptions,
) -> io::Result<Place> {
    let target = target.canonicalize()?;
    // SAFETY: a terminated string.
    let context = owned(unsafe { libc::syscall(libc::SYS_fsopen, c"tombolo".as_ptr(), FSOPEN_CLOEXEC) })?;
    let member = CString::new(id.index().to_string())?;
    let source = CString::new(options.source.as_str())?;
    set(&context, FSCONFIG_SET_STRING, Some(c"source"), source.as_ptr(), 0)?;
    set(&context, FSCONFIG_SET_STRING, Some(c"member"), member.as_ptr(), 0)?;
    for (key, descriptor) in [c"memory", c"rings", c"rung"].into_iter().zip(descriptors) {
        set(&context, FSCONFIG_SET_FD, Some(key), null(), descriptor.as_raw_fd())?;
    }
    if options.read_only {
        set(&context, 0, Some(c"ro"), null(), 0)?;
    }
    set(&context, FSCONFIG_CMD_CREATE, None, null(), 0)?;
    let attributes = options.attributes();
    // SAFETY: an open descriptor and numbers.
    let mount =
        owned(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), FSMOUNT_CLOEXEC, attributes) })?;
    let path = CString::new(target.as_os_str().as_bytes())?;
    // SAFETY: terminated strings that live across the call, and an open descriptor.
    let moved = unsafe {
        let (from, here) = (mount.as_raw_fd(), libc::AT_FDCWD);
        libc::syscall(libc::SYS_move_mount, from, c"".as_ptr(), here, path.as_ptr(), MOVE_MOUNT_F_EMPTY_PATH)
    };
    if moved != 0 {
        return Err(io::Error::last_os_error());
    }
    Place::of(target)
}

fn owned(descriptor: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(descriptor) {
        // SAFETY: a new descriptor without another owner.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// fsconfig(2). An error has the module's own words.
fn set(
    context: &OwnedFd,
    command: libc::c_uint,
    key: Option<&CStr>,
    value: *const libc::c_char,
    number: libc::c_int,
) -> io::Result<()> {
    let key = key.map_or(null(), CStr::as_ptr);
    // SAFETY: an open descriptor, and strings that are null or terminated and live across the call.
    if unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, key, value, number) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    let mut said = [0; 512];
    match File::from(context.try_clone()?).read(&mut said) {
        Ok(len) if len > 2 => {
            let text = String::from_utf8_lossy(&said[2..len]);
            Err(io::Error::new(error.kind(), text.trim_start_matches("tombolo: ").trim_end().to_owned()))
        }
        _ => Err(error),
    }
}

impl Mounted {
    fn ring(&self) -> tombolo_zone::Result<()> {
        let Some(bell) = &self.bell else { return Ok(()) };
        for peer in self.zone.pending_peers()? {
            // A peer that has left meanwhile needs no ring.
            bell.ring(peer)?;
        }
        Ok(())
    }

    /// Stays until the mount has ended, in all mount namespaces; unmounts it when a signal comes.
    pub(super) fn watch_over(self, signals: &File) -> anyhow::Result<()> {
        let (ended, end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (zone, id) = (Arc::clone(&self.zone), self.id);
        let wait = move || {
            let awaited = zone.await_end(id);
            drop(end);
            awaited
        };
        let waiting =
            std::thread::Builder::new().name("mount-end".into()).spawn(wait).context("starting threads")?;
        let (mut unburied, mut reaped) = (Unburied::default(), Instant::now());
        loop {
            let mut fds = [
                PollFd::new(&ended, PollFlags::IN),
                PollFd::new(signals, PollFlags::IN),
                PollFd::new(&self.rings, PollFlags::IN),
            ];
            match poll(&mut fds, Some(&REAP)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e).context("waiting for the mount's end"),
            }
            let [has_ended, is_asked, is_to_ring] = fds.map(|fd| !fd.revents().is_empty());
            if is_to_ring {
                // The counter first: what is pending after it is seen by the look.
                let _asked = rustix::io::read(&self.rings, &mut [0; 8]);
                self.ring()?;
            }
            if is_asked && !has_ended {
                self.place.detach()?;
                // Programs that still use the mount, in another mount namespace say, need this process no more.
                if poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&ENDS))? == 0 {
                    return Ok(());
                }
            }
            if has_ended || is_asked {
                break;
            }
            if reaped.elapsed().as_secs() < REAP.tv_sec.unsigned_abs() {
                continue;
            }
            reaped = Instant::now();
            // The next look tries again.
            let _ = self.zone.reap_without_owner().and_then(|_| self.zone.reap_for_owner(&mut unburied));
        }
        waiting
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that waits for the mount's end panicked"))??;
        self.zone.remove_left(self.id).context("leaving the zone")
    }
}
