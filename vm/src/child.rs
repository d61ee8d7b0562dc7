// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Short-lived children, which die with the thread that starts them, and handles of processes. What lasts is the child of a [shim](crate::shim).

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, Signal};
use tombolo_brief::child::leave_sockets;
use tombolo_zone::daemon;

use crate::qemu::start::no_process;

pub mod halted;

/// The variable by which a process of this program learns to which process it is tied.
const TIED: &str = "TOMBOLO_TIED_TO";

/// Makes `command`'s process die with the thread that starts it and inherit `fds` at the numbers they have here.
pub fn tie(command: &mut Command, fds: &[OwnedFd]) {
    let parent = rustix::process::getpid();
    let fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    // SAFETY: between fork and exec only async-signal-safe system calls are made: prctl, getppid, fcntl; no allocation.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the line above.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::from_raw_os_error(rustix::io::Errno::SRCH.raw_os_error()));
            }
            for &fd in &fds {
                let fd = rustix::fd::BorrowedFd::borrow_raw(fd);
                rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
            }
            Ok(())
        });
    }
}

/// Has [this program](own_program), which is tied to this process, [stay tied](stay_tied) also where its file has capabilities.
pub fn tie_own(command: &mut Command) {
    command.env(TIED, std::process::id().to_string());
}

/// Ties this process again to the one that has started it by [`tie_own`]: the kernel unties a process that becomes a program whose file has
/// capabilities. The first call of `main`, as there must be no other thread.
pub fn stay_tied() {
    let Some(text) = std::env::var_os(TIED) else { return };
    // SAFETY: there is no other thread, which could read the environment.
    unsafe { std::env::remove_var(TIED) };
    let Some(parent) = text.to_str().and_then(|text| text.parse::<u32>().ok()) else { return };
    // SAFETY: the call changes an attribute of this process and reads no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // The parent may have died before the line above.
    if std::os::unix::process::parent_id() != parent {
        std::process::exit(1);
    }
}

/// Makes `command`'s process enter a cgroup before it begins; `procs` is the group's cgroup.procs, open for writing.
///
/// # Errors
/// When no descriptor can be had.
pub fn enter(command: &mut Command, procs: &File) -> io::Result<()> {
    let procs = procs.try_clone()?;
    // SAFETY: between fork and exec only one system call is made that is async-signal-safe; nothing allocates.
    unsafe {
        command.pre_exec(move || (&procs).write_all(b"0"));
    }
    Ok(())
}

/// This program as another process, also when its file has been replaced or removed since (by an upgrade): between fork and exec the link is
/// the new process's, which still is this one's copy.
pub fn own_program() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("tombolo");
    command
}

/// Starts a process that belongs to no other one: its parent, which is started for it, ends at once. It inherits these descriptors alone.
///
/// # Errors
/// When no process can be had.
pub fn start_apart(mut command: Command, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    daemon::detach(&mut command, fds);
    daemon::orphan(&mut command);
    leave_sockets(&mut command);
    command.spawn().map_err(|e| no_process(&e))?.wait().map(drop)
}

/// The message of a program that failed: its standard error, or how it ended if it printed nothing there.
pub fn words(output: &Output) -> String {
    let words = String::from_utf8_lossy(&output.stderr);
    let words = words.trim().trim_start_matches("tombolo: ");
    if words.is_empty() { format!("its process ended: {}", output.status) } else { words.to_owned() }
}

/// The path under which a child that inherited `fd` opens it.
pub fn inherited_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// A nameless file in memory with this content.
///
/// # Errors
/// When memory runs out.
pub fn memory_file(name: &str, content: &[u8]) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(fd);
    file.write_all(content)?;
    Ok(file.into())
}

/// A child that is killed and reaped when this is dropped.
#[derive(Debug)]
pub struct Guarded(Child);

impl Guarded {
    /// Starts `command`, which is [tied](tie): the calling thread stays until this is dropped.
    ///
    /// # Errors
    /// Names the program, and why it has not begun.
    pub fn spawn(mut command: Command) -> anyhow::Result<Guarded> {
        leave_sockets(&mut command);
        let spawned = command.spawn().map_err(|e| no_process(&e));
        Ok(Guarded(
            spawned
                .with_context(|| format!("{} can't be started", command.get_program().to_string_lossy()))?,
        ))
    }

    /// Its standard output and error, once, if they are piped.
    pub fn take_output(&mut self) -> (Option<ChildStdout>, Option<ChildStderr>) {
        (self.0.stdout.take(), self.0.stderr.take())
    }

    /// Waits for its end for at most `limit`; `None`: it still runs.
    ///
    /// # Errors
    /// Those of the system.
    pub fn wait_within(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let pidfd = rustix::process::pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty())?;
        let limit = Timespec::try_from(limit).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let ended = rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit))? > 0;
        ended.then(|| self.0.wait()).transpose()
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // Both fail only when it is not there.
        let _ended = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// Refers to one process, never to another one that got its number.
#[derive(Debug)]
pub struct Handle {
    /// None: it was gone when this was made.
    pidfd: Option<OwnedFd>,
}

impl From<OwnedFd> for Handle {
    fn from(pidfd: OwnedFd) -> Handle {
        Handle { pidfd: Some(pidfd) }
    }
}

impl Handle {
    /// Of a process that is no child of this one.
    pub fn of(pid: u32) -> Handle {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let open = |pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok();
        Handle { pidfd: pid.and_then(open) }
    }

    /// Of a process that has been reaped.
    pub fn gone() -> Handle {
        Handle { pidfd: None }
    }

    /// Returns whether the process has ended. A zombie has.
    pub fn has_ended(&self) -> bool {
        let Some(pidfd) = &self.pidfd else { return true };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|n| n > 0)
    }

    /// Waits for the end of the process.
    pub fn wait_end(&self) {
        let Some(pidfd) = &self.pidfd else { return };
        while rustix::event::poll(&mut [PollFd::new(pidfd, PollFlags::IN)], None)
            == Err(rustix::io::Errno::INTR)
        {}
    }

    /// Kills the process; nothing happens if it is gone.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends the process a signal; nothing happens if it is gone.
    pub fn signal(&self, signal: Signal) {
        let Some(pidfd) = &self.pidfd else { return };
        // ESRCH: it is gone, which is what was wanted.
        let _ = rustix::process::pidfd_send_signal(pidfd.as_fd(), signal);
    }
}
