// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The processes of a worker beside itself, as its supervisor sees them through the worker's own /proc: the linker, and whatever a client's
//! kernel started. Their processor time is the worker's, and they stop when it does.
//!
//! No time gets lost: a process that has ended stays there until its parent waits for it, which adds its time to the parent's; and the
//! worker can't ask the kernel to forget its children (see [`super::calls`]).

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// So many looks find the same while the worker has no other processes.
const RARELY: u8 = 8;

/// The most processes that a driver could have a use for: linkers of kernels that are built at once.
const MOST: usize = 128;

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The view of one worker's processes.
pub struct Census {
    proc: OwnedFd,
    /// The worker is process 1.
    others: Vec<CString>,
    /// Looks until the next one that looks.
    rest: u8,
    cpu: Duration,
}

/// Returns whether a thread of a process has a processor or waits for one. `task` is the process's folder of threads.
pub fn is_ready_to_run(task: &OwnedFd) -> bool {
    let state = |thread: &CStr| {
        let path = [thread.to_bytes(), b"/stat"].concat();
        let file = rustix::fs::openat(task, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        // Number, name of at most 15 bytes in parentheses, state.
        let mut stat = [0; 64];
        let n = rustix::io::read(&file, &mut stat).ok()?;
        state(&stat[..n])
    };
    // An error: the process, or the thread, has ended.
    let threads = Dir::read_from(task).into_iter().flatten().flatten();
    threads
        .filter(|t| t.file_name() != c"." && t.file_name() != c"..")
        .any(|t| state(t.file_name()) == Some(b'R'))
}

/// The state of a thread, by the beginning of its line in /proc.
fn state(stat: &[u8]) -> Option<u8> {
    // The name before may have any characters.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).copied()
}

/// Clock ticks of processor time: the process's own, and those of its children that it has waited for.
fn ticks(stat: &str) -> Option<(u64, u64)> {
    // The name before may have any characters.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some((number(11)? + number(12)?, number(13)? + number(14)?))
}

fn duration(ticks: u64) -> Duration {
    // SAFETY: takes an integer.
    let a_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
    Duration::from_millis(ticks * 1000 / a_second)
}

impl Census {
    /// None: the worker has no /proc of its own yet, or has ended.
    pub fn of(pid: u32) -> Option<Census> {
        // By any of its threads: the first one may have ended while others run on, and then the process's own folder leads nowhere.
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let proc = |thread: std::fs::DirEntry| {
            rustix::fs::openat(CWD, thread.path().join("root/proc"), FOLDER, Mode::empty()).ok()
        };
        Census::from_folder(threads.filter_map(proc).next()?)
    }

    /// None: it is no /proc, or the host's. While a worker makes its view, its new root lies where the host's /proc was; who took that for the
    /// worker's own would never see what the worker starts.
    fn from_folder(proc: OwnedFd) -> Option<Census> {
        let is_proc = rustix::fs::fstatfs(&proc).ok()?.f_type == rustix::fs::PROC_SUPER_MAGIC;
        let theirs = rustix::fs::fstat(&proc).ok()?;
        let ours = rustix::fs::statat(CWD, "/proc", AtFlags::empty()).ok()?;
        let is_its_own = is_proc && theirs.st_dev != ours.st_dev;
        is_its_own.then(|| Census { proc, others: Vec::new(), rest: 0, cpu: Duration::ZERO })
    }

    fn list(&self) -> io::Result<Vec<CString>> {
        let is_other =
            |name: &[u8]| name.iter().all(u8::is_ascii_digit) && !name.is_empty() && name != b"1".as_slice();
        let mut others = Vec::new();
        for entry in Dir::read_from(&self.proc)? {
            let entry = entry?;
            if is_other(entry.file_name().to_bytes()) {
                others.push(entry.file_name().to_owned());
            }
        }
        Ok(others)
    }

    fn ticks_of(&self, process: &str) -> Option<(u64, u64)> {
        let path = format!("{process}/stat");
        let file =
            rustix::fs::openat(&self.proc, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let mut stat = [0; 1024];
        let n = rustix::io::read(&file, &mut stat).ok()?;
        ticks(&String::from_utf8_lossy(&stat[..n]))
    }

    /// Has the next look look.
    pub fn wake(&mut self) {
        self.rest = 0;
    }

    /// Looks again, though not each time while there were no other processes. Returns the processor time of all but the worker's own threads.
    pub fn look(&mut self) -> Duration {
        if self.rest > 0 {
            self.rest -= 1;
            return self.cpu;
        }
        // An error: the worker has ended, and what it had used stays so.
        let Ok(others) = self.list() else { return self.cpu };
        let ended = self.ticks_of("1").map_or(0, |(_, children)| children);
        let living = others.iter().filter_map(|pid| self.ticks_of(pid.to_str().ok()?));
        self.cpu = duration(living.map(|(own, children)| own + children).sum::<u64>() + ended);
        // Looking at many takes long; so it is done less often.
        self.rest = if others.is_empty() { RARELY } else { (others.len() / 8).min(MOST) as u8 };
        self.others = others;
        self.cpu
    }

    /// Returns whether one of those that the last look found has a processor or waits for one.
    pub fn is_ready_to_run(&self) -> bool {
        let task = |pid: &CString| {
            let path = [pid.to_bytes(), b"/task"].concat();
            rustix::fs::openat(&self.proc, path, FOLDER, Mode::empty()).ok()
        };
        self.others.iter().filter_map(task).any(|task| is_ready_to_run(&task))
    }

    /// Returns whether the last look found other processes.
    pub fn has_others(&self) -> bool {
        !self.others.is_empty()
    }

    /// Returns whether there are more than any driver starts: stopping them again and again would take the time that is to be divided.
    pub fn has_too_many(&self) -> bool {
        self.others.len() > MOST
    }

    /// Sends all of them a signal, also those that they start meanwhile.
    pub fn signal(&self, signal: libc::c_int) {
        let mut before: Vec<CString> = Vec::new();
        // Each round finds at least one more, of which there are not many.
        for _ in 0..super::limits::TASKS {
            let Ok(now) = self.list() else { return };
            if now == before {
                return;
            }
            for pid in now.iter().filter(|pid| !before.contains(pid)) {
                let Ok(process) = rustix::fs::openat(&self.proc, pid, FOLDER, Mode::empty()) else {
                    continue;
                };
                let _ended = super::spawn::signal(process.as_fd(), signal);
            }
            before = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_a_process_are_found_whatever_its_name_is() {
        let stat = "7 (a) b (c) R 1 7 7 0 -1 4194304 1 0 0 0 11 12 13 14 20 0 1 0 5 0 0";
        assert_eq!(ticks(stat), Some((23, 27)));
        assert_eq!(ticks("7 (short) R 1"), None);
    }

    #[test]
    fn a_process_with_a_thread_that_runs_is_ready_and_one_whose_threads_sleep_is_not() {
        let task = |pid: u32| {
            rustix::fs::openat(CWD, format!("/proc/{pid}/task"), FOLDER, Mode::empty()).expect("it lives")
        };
        assert!(is_ready_to_run(&task(std::process::id())));
        let mut sleeps = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let sleeping = task(sleeps.id());
        while is_ready_to_run(&sleeping) {
            std::thread::yield_now();
        }
        sleeps.kill().expect("it sleeps");
        sleeps.wait().expect("its end");
        assert!(!is_ready_to_run(&sleeping));
        assert_eq!((state(b"7 (a) R) S 1"), state(b"7 (a")), (Some(b'S'), None));
    }

    #[test]
    fn a_folder_that_is_no_proc_gives_no_census() {
        let folder = std::fs::File::open("/dev").expect("a folder of another file system");
        assert!(Census::from_folder(folder.into()).is_none());
    }

    #[test]
    fn a_process_with_the_hosts_proc_has_no_census() {
        assert!(Census::of(std::process::id()).is_none());
    }
}
