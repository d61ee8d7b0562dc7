// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Child processes that never outlive this one, and the file descriptors they inherit.
//!
//! A child is told to die when the *thread* that started it ends. Children that last are therefore started by the main thread
//! ([`main_thread`]); a thread that starts another one stays until that one is gone.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ChildStderr, ChildStdout, Command, ExitStatus, Output};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};
use tombolo_brief::child::leave_sockets;

use crate::qemu::start::no_process;

pub mod halted;
pub mod leash;
pub mod main_thread;

/// The variable by which a process of this program learns to which process it is tied, and by which signal.
const TIED: &str = "TOMBOLO_TIED_TO";

/// Time for a child to become its program. It enters its cgroup before, and the program's file may be far away.
const BEGIN: Duration = Duration::from_secs(20);

/// Makes `command`'s process die with the thread that starts it and inherit `fds` at the numbers they have here.
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

/// As [`tie_to_end`], for [this program](own_program), whose process [stays tied](stay_tied) also where its file has capabilities.
pub fn tie_own(command: &mut Command, signal: Signal, fds: &[OwnedFd]) {
    command.env(TIED, format!("{} {}", std::process::id(), signal.as_raw()));
    tie_to_end(command, signal, fds);
}

/// Ties this process again to the one that has started it by [`tie_own`]: the kernel unties a process that becomes a program whose file has
/// capabilities. The first call of `main`, as there must be no other thread.
pub fn stay_tied() {
    let Some(text) = std::env::var_os(TIED) else { return };
    // SAFETY: there is no other thread, which could read the environment.
    unsafe { std::env::remove_var(TIED) };
    let words = text.to_str().and_then(|text| text.split_once(' '));
    let numbers =
        words.and_then(|(parent, signal)| Some((parent.parse::<u32>().ok()?, signal.parse::<i32>().ok()?)));
    let Some((parent, signal)) = numbers else { return };
    // SAFETY: the call changes an attribute of this process and reads no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) };
    // The parent may have died before the line above.
    if std::os::unix::process::parent_id() != parent {
        std::process::exit(1);
    }
}

/// Makes `command`'s process the leader of a process group, which is killed when it ends ([`Guarded::end_group`]), and lets it not hear the signals by which a
/// service manager ends all processes of a session or a unit at once: this process hears them, too, and ends it in good order.
pub fn shield(command: &mut Command) {
    // SAFETY: between fork and exec only async-signal-safe system calls are made: setpgid, sigprocmask; no allocation. The set is initialized
    // before it is used.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setpgid(None, None)?;
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGTERM, libc::SIGHUP] {
                libc::sigaddset(&raw mut set, signal);
            }
            match libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
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
pub struct Guarded {
    pid: Pid,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    /// The exit status, once it has been reaped.
    ended: Option<ExitStatus>,
}

impl Guarded {
    /// Starts `command` on the [main thread](main_thread). Until the child has become its program that thread can start no other one, so
    /// a child that does not get so far is killed.
    ///
    /// # Errors
    /// Names the program, and why it has not begun.
    pub fn spawn(mut command: Command) -> anyhow::Result<Guarded> {
        let program = command.get_program().to_string_lossy().into_owned();
        leave_sockets(&mut command);
        let mut why_late = None;
        let mut late = || {
            for child in Unbegun::all() {
                why_late.get_or_insert_with(|| child.why());
                child.handle.kill();
            }
        };
        // The parent's copies of the child's sockets must be closed after the start, or the parent never sees their end.
        let spawned = main_thread::run_watched(move || command.spawn(), BEGIN, &mut late);
        let spawned = spawned.ok_or_else(|| anyhow::anyhow!("{program} is not started: the project ends"))?;
        let mut child =
            spawned.map_err(|e| anyhow::anyhow!("{program} can't be started: {}", no_process(&e)))?;
        let pid = Pid::from_child(&child);
        let child = Guarded { pid, stdout: child.stdout.take(), stderr: child.stderr.take(), ended: None };
        match why_late {
            None => Ok(child),
            Some(why) => anyhow::bail!("{program} has not begun within {} s: {why}", BEGIN.as_secs()),
        }
    }

    /// A child that an earlier program of this process has started and not reaped.
    ///
    /// # Errors
    /// When this process has no such child.
    pub fn resume(pid: u32) -> io::Result<Guarded> {
        let none = || io::Error::from_raw_os_error(rustix::io::Errno::CHILD.raw_os_error());
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(none)?;
        let there = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        rustix::process::waitid(WaitId::Pid(pid), there)?;
        Ok(Guarded { pid, stdout: None, stderr: None, ended: None })
    }

    /// Children of the main thread beside these, which no part of this program has taken over from the one before.
    ///
    /// # Errors
    /// When /proc can't be read.
    pub fn others(known: &BTreeSet<u32>) -> io::Result<Vec<Guarded>> {
        let main = std::process::id();
        let children = std::fs::read_to_string(format!("/proc/self/task/{main}/children"))?;
        let others = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        Ok(others.filter(|pid| !known.contains(pid)).filter_map(|pid| Guarded::resume(pid).ok()).collect())
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_pid().unsigned_abs()
    }

    /// Its standard output, once.
    ///
    /// # Errors
    /// When it was not piped or has been taken.
    pub fn take_stdout(&mut self) -> anyhow::Result<ChildStdout> {
        self.stdout.take().ok_or_else(|| anyhow::anyhow!("the child's output is not piped"))
    }

    /// Its standard error, once.
    ///
    /// # Errors
    /// When it was not piped or has been taken.
    pub fn take_stderr(&mut self) -> anyhow::Result<ChildStderr> {
        self.stderr.take().ok_or_else(|| anyhow::anyhow!("the child's errors are not piped"))
    }

    /// Kills it, if it still runs, and reaps it.
    pub fn kill(&mut self) {
        if self.ended.is_none() {
            // It has not been reaped, so its number is its own. Both fail only when it is not there.
            let _ = rustix::process::kill_process(self.pid, Signal::KILL);
            let _ = self.wait();
        }
    }

    /// Kills what is left of the process group that it leads, if it leads one. It has ended and has not been reaped, so the group's number is its own.
    pub fn end_group(&self) {
        // There may be no such group.
        let _none = rustix::process::kill_process_group(self.pid, Signal::KILL);
    }

    /// Waits for its end, and leaves it to be reaped.
    pub fn wait_end(&self) {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let interrupted = || {
            let waited = rustix::process::waitid(WaitId::Pid(self.pid), options);
            waited.is_err_and(|e| e == rustix::io::Errno::INTR)
        };
        while self.ended.is_none() && interrupted() {}
    }

    /// Waits for its end and reaps it.
    ///
    /// # Errors
    /// None in practice (waitpid of an own child).
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.ended {
            return Ok(status);
        }
        loop {
            match rustix::process::waitpid(Some(self.pid), WaitOptions::empty()) {
                Ok(Some((_, status))) => {
                    return Ok(*self.ended.insert(ExitStatus::from_raw(status.as_raw())));
                }
                Ok(None) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Waits for its end for at most `limit`, and reaps it; `None`: it still runs.
    ///
    /// # Errors
    /// Those of the system.
    pub fn wait_within(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let pidfd = rustix::process::pidfd_open(self.pid, rustix::process::PidfdFlags::empty())?;
            let until = Instant::now() + limit;
            loop {
                let left = Timespec::try_from(until.saturating_duration_since(Instant::now()));
                let left = left.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
                match rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&left)) {
                    Ok(0) => return Ok(None),
                    Ok(_) => break,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            }
        }
        self.wait().map(Some)
    }

    /// A handle by which another thread can kill it without the risk of hitting another process.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn handle(&self) -> io::Result<Handle> {
        let pidfd = rustix::process::pidfd_open(self.pid, rustix::process::PidfdFlags::empty())?;
        Ok(Handle { pidfd: Some(pidfd) })
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A child of the main thread that is still a copy of this process: it has not become its program.
struct Unbegun {
    pid: u32,
    handle: Handle,
}

impl Unbegun {
    /// All of them; none where the kernel does not tell of children.
    fn all() -> Vec<Unbegun> {
        let main = std::process::id();
        let children = std::fs::read_to_string(format!("/proc/self/task/{main}/children"));
        let own = std::fs::read("/proc/self/cmdline").unwrap_or_default();
        let unbegun = |pid: u32| {
            let number = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
            // The handle is opened first: if another process gets the number before the command line is read, a kill meets the dead child.
            let pidfd = rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty()).ok()?;
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            (line == own).then_some(Unbegun { pid, handle: Handle { pidfd: Some(pidfd) } })
        };
        let children = children.unwrap_or_default();
        children.split_whitespace().filter_map(|pid| unbegun(pid.parse().ok()?)).collect()
    }

    /// Why it has not begun, and the remedy.
    fn why(&self) -> String {
        match halted::of(self.pid) {
            Some(halted) => format!("its process {halted}"),
            None => "its file does not answer; look at the file system on which it lies".into(),
        }
    }
}

/// Refers to one process, never to another one that got its number.
#[derive(Debug)]
pub struct Handle {
    /// None: it was gone when this was made.
    pidfd: Option<OwnedFd>,
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::process::Stdio;

    use tombolo_brief::{Brief, endless};

    use super::*;

    #[test]
    fn a_member_that_goes_while_a_program_starts_keeps_it_from_beginning_with_no_file_that_it_has_passed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (passed, other) = endless::lingering().unwrap();
        endless::pass(&theirs, b"T", passed).unwrap();
        let member = Brief::from(ours);
        let (here, there) = UnixStream::pair().unwrap();
        let at = there.as_raw_fd();
        let mut command = Command::new("cat");
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        tie(&mut command, &[]);
        // SAFETY: between fork and exec only async-signal-safe system calls are made: write, read.
        unsafe {
            command.pre_exec(move || {
                let mut byte = 0_u8;
                libc::write(at, (&raw const byte).cast(), 1);
                // Until the member has gone.
                libc::read(at, (&raw mut byte).cast(), 1);
                Ok(())
            });
        }
        let begun = Instant::now();
        let going = std::thread::spawn(move || {
            (&here).read_exact(&mut [0]).unwrap();
            drop(member);
            (&here).write_all(&[1]).unwrap();
        });
        let mut started = Guarded::spawn(command).unwrap();
        let ended = started.wait_within(BEGIN).unwrap();
        assert!(ended.is_some_and(|status| status.success()), "{ended:?} after {:?}", begun.elapsed());
        going.join().unwrap();
        drop((there, other));
    }
}
