// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Why a program or a thread can't be started, with the remedy that fits.

use std::io;
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

#[cfg(test)]
mod tests {
    use super::*;

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
