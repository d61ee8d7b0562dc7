// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Why a program or a thread can't be started, with the remedy that fits.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::Path;

/// The error of a process or a thread that can't be started, with the remedy where a limit is the cause.
#[must_use]
pub fn no_process(error: &io::Error) -> io::Error {
    let is_limit = error.raw_os_error() == Some(rustix::io::Errno::AGAIN.raw_os_error());
    let remedy = "; a limit on processes and threads is reached: raise it (ulimit -u, TasksMax= of the unit or of the user's slice)";
    io::Error::new(error.kind(), format!("{error}{}", if is_limit { remedy } else { "" }))
}

/// The error of a program of a package that can't be started.
#[must_use]
pub fn no_program(program: &Path, package: &str, error: &io::Error) -> io::Error {
    let (name, why) = (program.display(), no_process(error));
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => format!("; install the package {package}"),
        _ => String::new(),
    };
    io::Error::new(error.kind(), format!("{name} can't be run: {why}{remedy}"))
}

/// Reads what a program that has ended has left in a pipe, at most `most` bytes. A process that it has started may still have the pipe open, so its
/// end is not waited for.
///
/// # Errors
/// Those of the system.
pub fn left_in(mut pipe: impl Read + AsFd, most: usize) -> io::Result<Vec<u8>> {
    rustix::io::ioctl_fionbio(&pipe, true)?;
    let mut said = vec![0; most];
    let mut length = 0;
    while length < most {
        match pipe.read(&mut said[length..]) {
            Ok(0) => break,
            Ok(n) => length += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
    }
    said.truncate(length);
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_has_said_is_read_though_another_process_has_its_pipe() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(left_in(&ours, 10).unwrap(), b"");
        io::Write::write_all(&mut &theirs, b"one two").unwrap();
        assert_eq!(left_in(&ours, 3).unwrap(), b"one");
        assert_eq!(left_in(&ours, 10).unwrap(), b" two");
    }

    #[test]
    fn a_program_that_can_not_be_started_has_the_remedy_of_its_cause() {
        let said = |error: rustix::io::Errno| {
            no_program(Path::new("qemu"), "qemu-system-x86", &error.into()).to_string()
        };
        assert!(said(rustix::io::Errno::NOENT).ends_with("; install the package qemu-system-x86"));
        let limit = said(rustix::io::Errno::AGAIN);
        assert!(limit.contains("ulimit -u") && !limit.contains("install"), "{limit}");
        assert!(!said(rustix::io::Errno::ACCESS).contains(';'));
    }
}
