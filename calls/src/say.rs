// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lines on the standard error, of processes that live long and of libraries in programs of others. Unlike `eprintln!`, [`say!`](crate::say!) never panics
//! and never waits: on a full disk, or a pipe without a reader, it leaves lines out, and the next line that is written says how much is missing.

use std::fmt::Arguments;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// A log that this process has for itself begins anew when it has grown to this many bytes.
const LIMIT: u64 = 4 << 20;
/// A pipe that poll(2) calls writable has room for this many bytes (PIPE_BUF), and takes them as a whole.
const PIECE: usize = 4096;
/// A thread that finds another one writing looks again so often, and leaves its line out then: the other may have been stopped.
const LOOKS: u32 = 1000;

/// A descriptor that lines are written to.
struct Sink {
    fd: RawFd,
    /// Bytes that were left out since the last line that was taken.
    lost: AtomicU64,
    /// Set for a file that only this process writes to.
    own: AtomicBool,
    /// The number of the process of which a thread writes; 0: none does. Of two threads that see the same room, the second would wait for more.
    writer: AtomicU32,
}

static STDERR: Sink = Sink::of(libc::STDERR_FILENO, false);

impl Sink {
    const fn of(fd: RawFd, own: bool) -> Sink {
        Sink { fd, lost: AtomicU64::new(0), own: AtomicBool::new(own), writer: AtomicU32::new(0) }
    }

    /// Returns whether this thread alone of its process may write until [`Sink::leave`].
    fn enter(&self) -> bool {
        let this = std::process::id();
        for _ in 0..LOOKS {
            let writer = self.writer.load(Ordering::Relaxed);
            // A process that was forked while another thread wrote doesn't have that thread.
            if writer != this
                && self.writer.compare_exchange(writer, this, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }

    fn leave(&self) {
        self.writer.store(0, Ordering::Release);
    }

    /// Returns whether a piece can be written without waiting.
    fn is_ready(&self) -> bool {
        let mut fd = libc::pollfd { fd: self.fd, events: libc::POLLOUT, revents: 0 };
        // SAFETY: the structure lives during the call.
        unsafe { libc::poll(&mut fd, 1, 0) == 1 }
    }

    fn bound(&self) {
        // SAFETY: plain integers, for which zeroes are values.
        let mut found: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the structure lives during the call.
        let known = unsafe { libc::fstat(self.fd, &mut found) } == 0;
        if known && found.st_mode & libc::S_IFMT == libc::S_IFREG && found.st_size as u64 >= LIMIT {
            // If that fails, the log grows until the disk is full.
            // SAFETY: integers only.
            let _as_before = unsafe { libc::ftruncate(self.fd, 0) };
        }
    }

    /// Writes without waiting. Returns the number of bytes written.
    fn put(&self, bytes: &[u8]) -> usize {
        let mut taken = 0;
        for piece in bytes.chunks(PIECE) {
            if !self.is_ready() {
                break;
            }
            // SAFETY: the slice lives during the call.
            let n = unsafe { libc::write(self.fd, piece.as_ptr().cast(), piece.len()) };
            taken += usize::try_from(n).unwrap_or(0);
            if n < piece.len() as isize {
                break;
            }
        }
        taken
    }

    fn write(&self, bytes: &[u8]) {
        if self.enter() {
            self.write_alone(bytes);
            self.leave();
        } else {
            self.lost.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
    }

    fn write_alone(&self, bytes: &[u8]) {
        if self.own.load(Ordering::Relaxed) {
            self.bound();
        }
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let gap = format!("[tombolo: {lost} bytes are missing here]\n");
            if self.put(gap.as_bytes()) == 0 {
                self.lost.fetch_add(lost + bytes.len() as u64, Ordering::Relaxed);
                return;
            }
        }
        let left_out = bytes.len() - self.put(bytes);
        self.lost.fetch_add(left_out as u64, Ordering::Relaxed);
    }
}

/// The standard error is a file that was opened for this process alone, to append: from now on it begins anew at [`LIMIT`].
pub fn log_is_own() {
    STDERR.own.store(true, Ordering::Relaxed);
}

/// Writes to the standard error as many bytes as it has room for.
pub fn write(bytes: &[u8]) {
    STDERR.write(bytes);
}

/// The function behind [`say!`](crate::say!).
pub fn say(text: Arguments<'_>) {
    // One write, so that lines of several threads and processes stay whole.
    write(format!("{text}\n").as_bytes());
}

/// Says a line on the standard error; see [`mod@crate::say`].
#[macro_export]
macro_rules! say {
    ($($argument:tt)*) => { $crate::say::say(::std::format_args!($($argument)*)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::{AsRawFd, FromRawFd};

    fn sink(fd: &impl AsRawFd, own: bool) -> Sink {
        Sink::of(fd.as_raw_fd(), own)
    }

    #[test]
    fn nobody_waits_for_a_pipe_that_is_not_read_and_what_is_missing_is_told() {
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors, which are fresh.
        let [mut reads, writes] = unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
            ends.map(|end| std::fs::File::from_raw_fd(end))
        };
        let sink = sink(&writes, false);
        let line = [b'x'; 4096];
        // More than a pipe takes.
        for _ in 0..100 {
            sink.write(&line);
        }
        let lost = sink.lost.load(Ordering::Relaxed);
        assert!(lost > 0 && lost < 100 * 4096, "{lost}");
        let mut taken = vec![0; 100 * 4096 - lost as usize];
        reads.read_exact(&mut taken).expect("what the pipe took");
        sink.write(b"again\n");
        drop(writes);
        let mut rest = String::new();
        reads.read_to_string(&mut rest).expect("text");
        assert_eq!(rest, format!("[tombolo: {lost} bytes are missing here]\nagain\n"));
    }

    #[test]
    fn threads_that_write_at_once_wait_for_no_pipe_that_is_not_read() {
        for _ in 0..1000 {
            let mut ends = [0; 2];
            // SAFETY: room for two descriptors, which are fresh.
            let [mut reads, writes] = unsafe {
                assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
                ends.map(|end| std::fs::File::from_raw_fd(end))
            };
            let sink = sink(&writes, false);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    // More than a pipe takes.
                    scope.spawn(|| (0..20).for_each(|_| sink.write(&[b'x'; PIECE])));
                }
            });
            drop(writes);
            let mut there = String::new();
            reads.read_to_string(&mut there).expect("text");
            // A thread that did not get its turn while there was room is told of by the next one that did.
            let gaps = there.split("[tombolo: ").skip(1).map(|gap| gap.split_once(' ').expect("a number").0);
            let told: u64 = gaps.map(|lost| lost.parse::<u64>().expect("a number")).sum();
            let written = there.bytes().filter(|byte| *byte == b'x').count() as u64;
            assert_eq!(sink.lost.load(Ordering::Relaxed) + told + written, 4 * 20 * PIECE as u64);
        }
    }

    #[test]
    fn a_full_disk_and_a_closed_descriptor_make_nobody_panic() {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("/dev/full");
        let full = sink(&full, false);
        full.write(b"lost");
        full.write(b"too");
        assert_eq!(full.lost.load(Ordering::Relaxed), 7);
        let closed = Sink::of(-1, true);
        closed.write(b"lost");
        assert_eq!(closed.lost.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn a_log_of_its_own_begins_anew_at_its_limit() {
        let path = std::env::temp_dir().join(format!("tombolo-say-{}", std::process::id()));
        let file = std::fs::File::options().append(true).create(true).open(&path).expect("a file");
        let _removed = std::fs::remove_file(&path);
        let (own, piece) = (sink(&file, true), vec![b'x'; LIMIT as usize / 2]);
        for _ in 0..3 {
            own.write(&piece);
        }
        assert_eq!(file.metadata().expect("open").len(), LIMIT / 2);
        let others = sink(&file, false);
        for _ in 0..2 {
            others.write(&piece);
        }
        assert_eq!(file.metadata().expect("open").len(), LIMIT / 2 * 3);
    }
}
