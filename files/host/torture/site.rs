// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A zone with a file system, its owner, and members that reach it by mounts: guests under QEMU with the kernel module, and a FUSE mount of
//! the host. The owner acts like `tombolo up`: it keeps slots, serves doorbells, declares a guest dead when its QEMU has ended, and once a
//! second the host's processes that have ended without leaving.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tombolo_files::area::{Area, Incarnation};
use tombolo_files::fs::{self, Filesystem, Mkfs};
use tombolo_files::fsck;
use tombolo_zone::doorbell::DoorbellServer;
use tombolo_zone::{AreaType, Membership, Rights, Role, Zone, ZoneConfig};

use crate::remote::{Remote, accept, listen};

/// Interval at which the owner looks for members that ended, as `tombolo up` does.
const TEND: Duration = Duration::from_secs(1);

/// The guests' kernel and image, made by files/linux/tests/members.py.
#[derive(Clone, Debug, clap::Args)]
pub struct Boot {
    /// Kernel image
    #[arg(long)]
    pub kernel: PathBuf,
    /// Initramfs with the module, this program and the rig's shell
    #[arg(long)]
    pub initrd: PathBuf,
    /// The program tombolo-rig, which starts QEMU
    #[arg(long)]
    pub rig: PathBuf,
    /// Folder for sockets, mount points and consoles
    #[arg(long)]
    pub work: PathBuf,
}

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// The zone, and its owner's threads.
pub struct Site {
    pub boot: Boot,
    pub zone: Arc<Zone>,
    area: tombolo_zone::Area,
    pub bells: Arc<DoorbellServer>,
    over: Arc<AtomicBool>,
    tender: Option<JoinHandle<()>>,
}

/// A member of this process, by the core itself.
pub struct Own {
    /// Dropped before it leaves.
    pub fs: Option<Filesystem>,
    zone: Arc<Zone>,
    membership: Option<Membership>,
}

impl Own {
    pub fn fs(&self) -> &Filesystem {
        self.fs.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.fs = None;
        if let Some(membership) = self.membership.take() {
            let id = membership.id();
            if let Err(e) = self.zone.leave(membership).and_then(|()| self.zone.remove(id)) {
                eprintln!("leaving the zone: {e}");
            }
        }
    }
}

impl Site {
    pub fn new(boot: &Boot, mib: u64) -> Result<Site, String> {
        let zone = Arc::new(Zone::create(&ZoneConfig::new("torture", mib << 20)).map_err(text)?);
        let area = zone.area(AreaType::Files, None).map_err(text)?;
        let (bells, events) = DoorbellServer::start(Arc::clone(&zone)).map_err(text)?;
        let bells = Arc::new(bells);
        std::thread::spawn(move || events.iter().for_each(drop));
        let over = Arc::new(AtomicBool::new(false));
        let (own, tended, bell) = (Arc::clone(&over), Arc::clone(&zone), Arc::clone(&bells));
        let tender = std::thread::spawn(move || {
            while !own.load(Ordering::Acquire) {
                if let Err(e) = tend(&tended, &bell) {
                    eprintln!("looking after the zone: {e}");
                }
                std::thread::park_timeout(TEND);
            }
        });
        let site = Site { boot: boot.clone(), zone, area, bells, over, tender: Some(tender) };
        site.mkfs()?;
        Ok(site)
    }

    /// Returns the path by which other processes open the zone.
    pub fn zone_path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.zone.as_fd().as_raw_fd())
    }

    fn area_of(&self, incarnation: Option<Incarnation>) -> Result<Area, String> {
        Area::of_zone(&self.zone, &self.area, incarnation, None).map_err(text)
    }

    fn mkfs(&self) -> Result<(), String> {
        let options = Mkfs { hash_seed: 12345, mode: 0o777, ..Mkfs::default() };
        fs::mkfs(&self.area_of(None)?, &options).map_err(|e| format!("mkfs: {e}"))
    }

    /// Makes this process a member.
    pub fn join(&self, name: &str) -> Result<Own, String> {
        let id = self.zone.invite(name, Role::Host, Rights::READ_WRITE).map_err(text)?;
        let membership = self.zone.join(id).map_err(text)?;
        let incarnation = Incarnation { member: id.index(), epoch: membership.epoch() };
        let fs = Filesystem::open(self.area_of(Some(incarnation))?).map_err(text)?;
        Ok(Own { fs: Some(fs), zone: Arc::clone(&self.zone), membership: Some(membership) })
    }

    /// fsck finds nothing; no member may use the file system.
    pub fn check(&self) -> Result<(), String> {
        fsck::expect_clean(&self.area_of(None)?, &mut |_, _, _| {}).map(|_| ())
    }

    /// Returns the active members.
    pub fn present(&self) -> Result<Vec<String>, String> {
        let members = self.zone.members().map_err(text)?;
        let active = members.into_iter().filter(|m| m.state == tombolo_zone::MemberState::Active);
        Ok(active.map(|m| m.name).collect())
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(tender) = self.tender.take() {
            tender.thread().unpark();
            // The thread's panic has been printed.
            let _ = tender.join();
        }
    }
}

/// Tells all members that the member table has changed.
pub fn announce(zone: &Zone, bells: &DoorbellServer) -> tombolo_zone::Result<()> {
    for peer in zone.announce()? {
        bells.ring(peer)?;
    }
    Ok(())
}

fn tend(zone: &Zone, bells: &DoorbellServer) -> tombolo_zone::Result<()> {
    zone.beat()?;
    if !zone.reap()?.is_empty() {
        announce(zone, bells)?;
    }
    Ok(())
}

/// The child dies with the thread that starts it.
pub fn tie(command: &mut Command) -> &mut Command {
    // SAFETY: prctl is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    }
}

/// A FUSE mount of the host and a worker there.
pub struct Mount {
    directory: PathBuf,
    daemon: Child,
    worker: Child,
    ended: bool,
}

impl Mount {
    pub fn new(site: &Site, name: &str) -> Result<(Mount, Remote), String> {
        let directory = site.boot.work.join(name);
        std::fs::create_dir_all(&directory).map_err(text)?;
        let own = std::env::current_exe().map_err(text)?;
        let mut daemon = Command::new(&own);
        daemon
            .args(["files", "mount", "--foreground", "--member", name])
            .arg(site.zone_path())
            .arg(&directory);
        let mut daemon = tie(daemon.stdin(Stdio::null()).stdout(Stdio::piped())).spawn().map_err(text)?;
        let mut line = String::new();
        if let Some(out) = daemon.stdout.take() {
            BufReader::new(out).read_line(&mut line).map_err(text)?;
        }
        let channel = site.boot.work.join(format!("{name}.line"));
        let _ = std::fs::remove_file(&channel);
        let listener = listen(&channel)?;
        let mut worker = Command::new(own);
        worker.arg("worker").arg(&directory).arg(&channel).stdin(Stdio::null()).stdout(Stdio::null());
        let worker = tie(&mut worker).spawn().map_err(text)?;
        let mount = Mount { directory, daemon, worker, ended: false };
        if line.trim() != "serving" {
            return Err(format!("{name}: the mount says {line:?}"));
        }
        Ok((mount, Remote::new(name, accept(&listener, name)?)?))
    }

    /// Kills the process that serves it, and no other.
    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.daemon.kill();
    }
}

impl Mount {
    /// Unmounts it, if it still serves; else detaches it.
    pub fn end(&mut self) {
        self.ended = true;
        // In this order: a worker that holds a file open would keep the mount.
        let _ = self.worker.kill();
        let _ = self.worker.wait();
        if let Err(e) = Command::new("umount").arg(&self.directory).status() {
            eprintln!("umount {}: {e}", self.directory.display());
        }
        let _ = self.daemon.wait();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.ended {
            self.end();
        }
    }
}
