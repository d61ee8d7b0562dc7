// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo files mount`: one process per mount, which serves it (FUSE) or stands beside it (`kernel`). In the background by default: the command starts itself again with --foreground and
//! waits until that process serves.

use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::ValueEnum;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::pipe::PipeFlags;
use serde_json::json;
use tombolo_zone::Unburied;

use super::{LOST, open_error};
use crate::fs::Filesystem;
use crate::fuse::ops::Server;
use crate::fuse::options::MountOptions;
use crate::fuse::session::{self, Mounted};
use crate::log;
use crate::sys;
use crate::target::{self, Joined, Name, Target};

mod kernel;

/// The line that a mount in the foreground prints when it serves; the next one says by what.
const READY: &str = "serving";
/// Interval at which a member without a doorbell polls its pending bits.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The threads of a mount that is gone end within this time.
const ENDS: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// Interval at which it looks whether other members live, in place of an owner of the zone that does not, since there is none or it is suspended.
const REAP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Why a mount ends whose member was declared dead: the host's mistake, or a store of another member.
const EXPELLED: &str = "this member of the zone was declared dead";

/// Interval at which it asks again whether its readers of removed blocks have finished.
const LET_GO_AGAIN: Duration = Duration::from_millis(50);

/// The file system driver of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Backend {
    /// The kernel where it can, else FUSE
    Auto,
    /// The module tombolo.ko, with shared mappings, for root: the zone's memory is taken up as a whole
    Kernel,
    /// A process, without shared mappings
    Fuse,
}

/// Arguments of `tombolo files mount`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A zone of the running project (tombolo.toml here or above) by name, or a file with a zone or a file system; in a guest without the
    /// kernel module pci:NAME, the zone in an ivshmem device
    zone: PathBuf,
    /// Directory to mount it at
    directory: PathBuf,
    /// Name of the FILES area, where the zone has several
    #[arg(long)]
    area: Option<String>,
    /// Name of this member in the zone; in a guest without a doorbell the VM's name
    #[arg(long)]
    member: Option<String>,
    /// The driver that mounts it
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    backend: Backend,
    /// Stay in the foreground; prints "serving" once it serves
    #[arg(long, short)]
    foreground: bool,
    /// Mount read-only
    #[arg(long)]
    read_only: bool,
    /// Threads that answer requests; more are started while these wait for other members
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: u16,
    /// Mount options: ro, noexec, noatime …; nosuid and nodev hold unless suid and dev are asked for
    #[arg(short, long, value_delimiter = ',')]
    options: Vec<String>,
    /// Honour set-id bits and capabilities of programs: for zones whose members' administrators may become any user here
    #[arg(long)]
    suid: bool,
    /// Allow opening device nodes: for zones whose members' administrators may use this machine's devices
    #[arg(long)]
    dev: bool,
    /// For mounts of ordinary users: allow access by other users
    #[arg(long)]
    allow_other: bool,
}

impl Args {
    pub(super) fn zone_mut(&mut self) -> &mut PathBuf {
        &mut self.zone
    }

    fn mount_options(&self) -> anyhow::Result<MountOptions> {
        let mut options = MountOptions {
            source: self.zone.display().to_string(),
            read_only: self.read_only,
            allow_other: self.allow_other,
            suid: self.suid,
            dev: self.dev,
            ..MountOptions::default()
        };
        self.options.iter().try_for_each(|option| options.set(option)).map_err(anyhow::Error::msg)?;
        Ok(options)
    }
}

/// Runs the command.
pub fn run(args: &Args, json: bool) -> anyhow::Result<()> {
    if args.foreground { foreground(args, json) } else { background(args, json) }
}

fn background(args: &Args, json: bool) -> anyhow::Result<()> {
    let mut command = Command::new(std::env::current_exe().context("finding this program's file")?);
    command.args(["files", "mount", "--foreground", "--threads", &args.threads.to_string()]);
    for (flag, on) in [
        ("--read-only", args.read_only),
        ("--suid", args.suid),
        ("--dev", args.dev),
        ("--allow-other", args.allow_other),
    ] {
        command.args(on.then_some(flag));
    }
    let backend = args.backend.to_possible_value().map(|value| value.get_name().to_owned());
    for (option, value) in [("--area", &args.area), ("--member", &args.member), ("--backend", &backend)] {
        if let Some(value) = value {
            command.args([option, value]);
        }
    }
    for option in &args.options {
        command.args(["--options", option]);
    }
    command.arg("--").arg(target::from_anywhere(&args.zone)?).arg(std::path::absolute(&args.directory)?);
    // It would keep the caller's folder busy.
    command.current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    tombolo_zone::daemon::detach(&mut command, &[]);
    let mut child = command.spawn().context("starting the mount's process")?;
    let (mut line, mut by) = (String::new(), String::new());
    if let Some(out) = child.stdout.take() {
        let mut out = BufReader::new(out);
        out.read_line(&mut line)?;
        out.read_line(&mut by)?;
    }
    if line.trim_end() != READY {
        let out = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&out.stderr);
        bail!("{}", text.trim().trim_start_matches("Error: "));
    }
    let (by, pid) = (by.trim_end(), child.id());
    if json {
        let (backend, why) = by.split_once(": ").map_or((by, None), |(backend, why)| (backend, Some(why)));
        println!("{}", json!({"pid": pid, "directory": args.directory, "backend": backend, "why": why}));
    } else {
        let (zone, directory) = (args.zone.display(), args.directory.display());
        println!("{zone} is mounted at {directory} by process {pid} ({by})");
    }
    Ok(())
}

fn foreground(args: &Args, json: bool) -> anyhow::Result<()> {
    let signals = session::end_signals().context("taking over signals")?;
    let options = args.mount_options()?;
    let why = match by_kernel(args, &options, json, &signals)? {
        ControlFlow::Break(()) => return Ok(()),
        ControlFlow::Continue(why) => why,
    };
    let target = Target::open(&args.zone, !options.read_only, args.area.as_deref())?;
    let member = args.member.as_deref();
    let (area, joined) = if options.read_only {
        (target.area_to_read(member)?, None)
    } else {
        target.join(member.map_or(Name::Process("mount"), Name::Member))?
    };
    let _watched = joined.as_ref().filter(|_| target.is_inside()).map(watch_over).transpose()?;
    let mut fs = Filesystem::open(area).map_err(|e| open_error(&args.zone, e))?;
    fs.ring_by(joined.as_ref().and_then(Joined::ringer));
    if let Err(rustix::io::Errno::STALE) = fs.getattr(fs.root()) {
        bail!("{}: the directory that this VM is confined to is gone", args.zone.display());
    }
    if !options.read_only {
        fs.recover_all().with_context(|| format!("{}: recovering dead members", args.zone.display()))?;
    }
    let server = Arc::new(Server {
        access_times: options.access_times,
        nodiratime: options.nodiratime,
        device_memory: target.is_inside(),
        ..Server::new(fs)
    });
    let mounted = session::mount(&args.directory, &options)
        .with_context(|| format!("mounting at {}", args.directory.display()))?;
    let waiting = {
        let server = Arc::clone(&server);
        let name = std::thread::Builder::new().name("file-locks".into());
        name.spawn(move || server.locks.serve(&server.fs)).context("starting threads")?
    };
    let mounting = Mounting { mounted: &mounted, why: why.as_deref(), json };
    let served = serve(args, &mounting, &server, joined.as_ref(), &signals);
    // On every path: nothing stays mounted, references are dropped, the slot becomes free.
    let unmounted = mounted.unmount().with_context(|| format!("unmounting {}", args.directory.display()));
    if session::is_over(&server) {
        let why = if server.fs.area().is_lost() { LOST } else { EXPELLED };
        log::say(&format!(
            "{}: {why}; the mount at {} has ended",
            args.zone.display(),
            args.directory.display()
        ));
        // Without leaving: a zone that other members still have is recovered.
        std::process::exit(1);
    }
    target.stop_serving().context("unlocking the file")?;
    server.locks.stop();
    if waiting.join().is_err() {
        bail!("the thread that waits for file locks panicked");
    }
    server.nodes.close_all(&server.fs);
    if server.fs.area().writable() {
        server.fs.area().sync().context("syncing the zone")?;
    }
    // Threads that still answer for a detached mount end with the process; they must not find the file system closed.
    let lone = Arc::try_unwrap(server);
    match (lone, joined) {
        (Ok(server), Some(joined)) => {
            drop(server);
            joined.leave().context("leaving the zone")?;
        }
        (Ok(server), None) => drop(server),
        // References remain: the zone's owner finds this member dead and has it recovered.
        (Err(server), _) => std::mem::forget(server),
    }
    served?;
    unmounted?;
    Ok(())
}

/// Mounts by the kernel, and stays until the mount's end. Continue: FUSE is to do it, because of this.
fn by_kernel(
    args: &Args,
    options: &MountOptions,
    json: bool,
    signals: &std::fs::File,
) -> anyhow::Result<ControlFlow<(), Option<String>>> {
    if args.backend == Backend::Fuse {
        return Ok(ControlFlow::Continue(None));
    }
    let refuse = |why: String| match args.backend {
        Backend::Kernel => Err(anyhow::anyhow!("{}: {why}; --backend fuse mounts it", args.zone.display())),
        _ => Ok(ControlFlow::Continue(Some(why))),
    };
    if let Some(why) = kernel::hindrance() {
        return refuse(why.to_owned());
    }
    // For writing also where the mount only reads: it holds a slot.
    let target = Target::open(&args.zone, true, args.area.as_deref())?;
    let zone = match target.for_kernel() {
        Ok(zone) => zone,
        Err(why) => return refuse(why.to_owned()),
    };
    if let Some(place) = kernel::place_of(zone) {
        return refuse(format!("the kernel has it mounted at {place}, for mount --bind"));
    }
    let slot = target.claim(zone, args.member.as_deref().map_or(Name::Process("mount"), Name::Member))?;
    let mounted = kernel::mount(zone, slot, &args.directory, options)?;
    announce(&args.directory, "kernel", None, json)?;
    mounted.watch_over(signals)?;
    Ok(ControlFlow::Break(()))
}

/// Starts a process that declares this one dead should it end without leaving. Returns the pipe end that it watches; no other process may
/// inherit it.
fn watch_over(joined: &Joined) -> anyhow::Result<OwnedFd> {
    let (alive, held) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: this process has one thread yet, so the child may call any function.
    match unsafe { libc::fork() } {
        -1 => {
            Err(std::io::Error::last_os_error()).context("starting the process that watches over the mount")
        }
        0 => {
            drop(held);
            if let Some(alive) = joined.liveness() {
                // SAFETY: this process's copy, which nothing here uses: the slot becomes free as soon as the mount's process ends.
                unsafe { libc::close(alive.as_raw_fd()) };
            }
            // Nothing is written to the pipe: the read returns when this process ends.
            let _end = rustix::io::read(&alive, &mut [0; 1]);
            let declared = joined.declare_dead();
            if let Err(e) = &declared {
                log::say(&format!("the mount's process ended, and can't be declared dead: {e}"));
            }
            std::process::exit(i32::from(declared.is_err()));
        }
        _ => Ok(held),
    }
}

/// A FUSE mount that is being made.
struct Mounting<'a> {
    mounted: &'a Mounted,
    why: Option<&'a str>,
    json: bool,
}

fn serve(
    args: &Args,
    mounting: &Mounting<'_>,
    server: &Arc<Server>,
    joined: Option<&Joined>,
    signals: &std::fs::File,
) -> anyhow::Result<()> {
    let mounted = mounting.mounted;
    mounted.handshake(server)?;
    let (ended_read, ended_write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let ended_write = Arc::new(ended_write);
    let over = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let answering = mounted.threads(Arc::clone(server), Arc::clone(&over), usize::from(args.threads));
    let threads: Vec<_> = (0..args.threads)
        .map(|_| {
            let handle = answering.start()?;
            let ended = Arc::clone(&ended_write);
            std::thread::Builder::new().name("fuse-end".into()).spawn(move || {
                let result = handle.join();
                drop(ended);
                result
            })
        })
        .collect::<Result<_, std::io::Error>>()
        .context("starting threads")?;
    drop(ended_write);
    announce(mounted.target(), "fuse", mounting.why, mounting.json)?;
    if joined.is_some_and(|joined| joined.rung().is_some()) {
        server.locks.has_bell();
    }
    let (asked, asks) = std::sync::mpsc::channel();
    let recovery = {
        // In a thread of its own, since it may wait for locks of a suspended member.
        let (server, name) = (Arc::clone(server), std::thread::Builder::new().name("recovery".into()));
        let over = Arc::clone(&over);
        let recover = move || {
            let mut again = false;
            loop {
                let asked =
                    if again { asks.recv_timeout(LET_GO_AGAIN) } else { asks.recv().map_err(Into::into) };
                let pending = match asked {
                    Ok(pending) => pending,
                    Err(RecvTimeoutError::Timeout) => 0,
                    Err(RecvTimeoutError::Disconnected) => break,
                };
                if again || pending & u64::from(sys::TMB_PENDING_REVOKE) != 0 {
                    again = server.fs.let_go();
                }
                if pending & u64::from(sys::TMB_PENDING_MEMBERS) != 0 {
                    match server.fs.recover_all() {
                        Ok(()) | Err(rustix::io::Errno::INTR) => {}
                        Err(e) => log::say(&format!("recovering dead members: {e}")),
                    }
                }
                server.kept.let_go(&server.fs, &server.nodes);
                if session::is_over(&server) {
                    session::tell(&over);
                    break;
                }
            }
        };
        name.spawn(recover).context("starting threads")?
    };
    let (mut stop, mut reaped, mut unburied) = (false, Instant::now(), Unburied::default());
    while !stop {
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        fds.extend([&ended_read, &*over].map(|ended| PollFd::new(ended, PollFlags::IN)));
        let rung = joined.and_then(Joined::rung);
        fds.extend(rung.map(|rung| PollFd::new(rung, PollFlags::IN)));
        let looks = server.kept.any() || joined.is_some_and(|joined| !joined.is_served());
        match poll(&mut fds, Some(if looks { &LOOK } else { &REAP })) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).context("waiting for the mount's end"),
        }
        stop = fds[..3].iter().any(|fd| !fd.revents().is_empty());
        if server.kept.any() {
            // The receiver ends only at the end of this function.
            let _ = asked.send(0);
        }
        if let Some(joined) = joined {
            if reaped.elapsed().as_secs() >= REAP.tv_sec.unsigned_abs() {
                reaped = Instant::now();
                // The next look tries again.
                let _ = joined.reap(&mut unburied);
            }
            let pending = server.fs.take_pending(|| joined.take_pending())?;
            // A member's death releases locks, too.
            if pending & u64::from(sys::TMB_PENDING_LOCK | sys::TMB_PENDING_MEMBERS) != 0 {
                server.locks.look();
                server.fs.rang();
            }
            if pending & u64::from(sys::TMB_PENDING_REVOKE | sys::TMB_PENDING_MEMBERS) != 0 {
                // The receiver ends only at the end of this function.
                let _ = asked.send(pending);
            }
        }
    }
    // A thread that waits for a suspended member's lock does not delay the end of the mount.
    server.fs.end_waits();
    drop(asked);
    if recovery.join().is_err() {
        bail!("the thread that recovers dead members panicked");
    }
    let unused = mounted.unmount().with_context(|| format!("unmounting {}", mounted.target().display()))?;
    if unused && have_ended(&ended_read)? {
        for thread in threads {
            match thread.join() {
                Ok(Ok(done)) => done.context("answering requests")?,
                _ => bail!("a thread that answers requests panicked"),
            }
        }
        answering.join().context("answering requests")?;
    }
    Ok(())
}

/// Waits for the end of the threads that answer, which comes with that of the mount. False: it does not come, since another mount namespace has a copy of the
/// mount; what uses that finds no process any more, as with a mount in use.
fn have_ended(threads: &OwnedFd) -> anyhow::Result<bool> {
    loop {
        let mut ended = [PollFd::new(threads, PollFlags::IN)];
        match poll(&mut ended, Some(&ENDS)) {
            Err(rustix::io::Errno::INTR) => {}
            done => return Ok(done.context("waiting for the end of the mount's threads")? > 0),
        }
    }
}

/// Prints that the mount serves, and by what; `why`: what keeps the kernel from it.
fn announce(target: &Path, backend: &str, why: Option<&str>, json: bool) -> anyhow::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout();
    if json {
        writeln!(out, "{}", json!({"state": READY, "directory": target, "backend": backend, "why": why}))?;
    } else {
        let why = why.map(|why| format!(": {why}")).unwrap_or_default();
        // At once: who reads the first line alone may close the pipe then.
        out.write_all(format!("{READY}\n{backend}{why}\n").as_bytes())?;
    }
    out.flush()?;
    Ok(())
}
