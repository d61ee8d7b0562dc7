// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Child processes that never outlive this one, and the file descriptors they inherit.
//!
//! A child is told to die when the *thread* that started it ends, so whoever starts one stays until it is gone.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus};

use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal};

/// Makes `command`'s process die with the calling thread and inherit `fds` at the numbers they have here.
pub fn tie(command: &mut Command, fds: &[OwnedFd]) {
    tie_to_end(command, Signal::KILL, fds);
}

/// As [`tie`], with the signal that the process gets then: one that it can catch lets it put its things away.
pub fn tie_to_end(command: &mut Command, signal: Signal, fds: &[OwnedFd]) {
    let parent = rustix::process::getpid();
    let fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    // SAFETY: between fork and exec only async-signal-safe system calls are made: prctl, getppid, fcntl; no allocation.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(signal))?;
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

/// Makes `command`'s process enter a cgroup before it begins; `entrance` is the group's cgroup.procs, open for writing.
///
/// # Errors
/// When no descriptor can be had.
pub fn enter(command: &mut Command, entrance: &File) -> io::Result<()> {
    let entrance = entrance.try_clone()?;
    // SAFETY: between fork and exec only one system call is made that is async-signal-safe; nothing allocates.
    unsafe {
        command.pre_exec(move || (&entrance).write_all(b"0"));
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
pub struct Guarded {
    child: Child,
}

impl Guarded {
    /// Starts `command`.
    ///
    /// # Errors
    /// Names the program.
    pub fn spawn(command: &mut Command) -> anyhow::Result<Guarded> {
        let child = command.spawn().map_err(|e| {
            anyhow::anyhow!("{} can't be started: {e}", command.get_program().to_string_lossy())
        })?;
        Ok(Guarded { child })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its standard output, once.
    ///
    /// # Errors
    /// When it was not piped or has been taken.
    pub fn take_stdout(&mut self) -> anyhow::Result<ChildStdout> {
        self.child.stdout.take().ok_or_else(|| anyhow::anyhow!("the child's output is not piped"))
    }

    /// Its standard error, once.
    ///
    /// # Errors
    /// When it was not piped or has been taken.
    pub fn take_stderr(&mut self) -> anyhow::Result<ChildStderr> {
        self.child.stderr.take().ok_or_else(|| anyhow::anyhow!("the child's errors are not piped"))
    }

    /// Kills it, if it still runs, and reaps it.
    pub fn kill(&mut self) {
        // Both fail only when it has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// None in practice (waitpid of an own child).
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }

    /// A handle by which another thread can kill it without the risk of hitting another process.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn handle(&self) -> io::Result<Handle> {
        let pid = Pid::from_child(&self.child);
        Ok(Handle { pidfd: rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())? })
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Refers to one process, never to another one that got its number.
#[derive(Debug)]
pub struct Handle {
    pidfd: OwnedFd,
}

impl Handle {
    /// Kills the process; nothing happens if it is gone.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends the process a signal; nothing happens if it is gone.
    pub fn signal(&self, signal: Signal) {
        // ESRCH: it is gone, which is what was wanted.
        let _ = rustix::process::pidfd_send_signal(self.pidfd.as_fd(), signal);
    }
}
