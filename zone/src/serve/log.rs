// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lines of a server, whose VMs must not wait for a reader that has stopped.

use std::io::Write;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

/// Writes lines as long as there is room for them, and leaves out the others. The next one that is written says how many are missing.
pub struct Log<'a> {
    out: &'a mut dyn Write,
    /// What `out` writes to.
    fd: BorrowedFd<'a>,
    missing: u64,
}

impl<'a> Log<'a> {
    /// A log that is written by `out`, which writes to `fd`.
    pub fn new(out: &'a mut dyn Write, fd: BorrowedFd<'a>) -> Log<'a> {
        Log { out, fd, missing: 0 }
    }

    /// Writes a line, if that is possible without waiting.
    pub fn say(&mut self, line: &str) {
        // A pipe that is said to be writable has room for PIPE_BUF bytes; a line has fewer.
        let mut there = [PollFd::from_borrowed_fd(self.fd, PollFlags::OUT)];
        if !poll(&mut there, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            self.missing += 1;
            return;
        }
        let missing = std::mem::take(&mut self.missing);
        let gap = if missing > 0 { format!("[{missing} lines are missing here]\n") } else { String::new() };
        // Its reader may have ended.
        let _ = self.out.write_all(format!("{gap}{line}\n").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsFd;

    #[test]
    fn a_reader_that_has_stopped_holds_nobody_up_and_is_told_what_is_missing() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut reader = std::fs::File::from(reader);
        let mut out = std::fs::File::from(writer.try_clone().unwrap());
        let mut log = Log::new(&mut out, writer.as_fd());
        let line = "x".repeat(1023);
        (0..100).for_each(|_| log.say(&line));
        let missing = log.missing;
        assert!((1..100).contains(&missing), "{missing}");
        reader.read_exact(&mut vec![0; 1024 * (100 - missing as usize)]).unwrap();
        log.say("again");
        drop((out, writer));
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, format!("[{missing} lines are missing here]\nagain\n"));
    }
}
