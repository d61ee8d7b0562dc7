// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The first and last steps of `tombolo` and of the programs that it executes for some of its commands: completion, manual pages, the
//! message of an error, and the end when the reader of the output has gone.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::Mode;

/// The variable by which a shell's completion script asks a program for candidates.
pub const COMPLETE: &str = "COMPLETE";

/// The variable by which a program that `tombolo` executes learns the path of that `tombolo`.
pub const EXECUTED_BY: &str = "TOMBOLO_PROGRAM";

/// The `main` of a program that `tombolo` executes: answers a shell's completion script, or parses the arguments and calls `act`.
pub fn run<Arguments: Parser>(act: impl FnOnce(Arguments) -> anyhow::Result<ExitCode>) -> ExitCode {
    clap_complete::CompleteEnv::with_factory(Arguments::command).var(COMPLETE).complete();
    end_where_no_output_is_possible();
    begin_as_usual();
    end(act(Arguments::parse()), |error| drop(writeln!(io::stderr(), "tombolo: {error:#}")))
}

/// Returns the exit code of a program; `complain` prints an error. An output whose reader has gone is no failure: that has what it wanted
/// ('| head'). The same error of another connection is one: the process at its other end has died.
pub fn end(result: anyhow::Result<ExitCode>, complain: impl FnOnce(&anyhow::Error)) -> ExitCode {
    end_with(&io::stdout(), result, complain)
}

fn end_with(
    output: &impl AsFd,
    result: anyhow::Result<ExitCode>,
    complain: impl FnOnce(&anyhow::Error),
) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(e) if is_broken_pipe(&e) && reader_has_gone(output) => ExitCode::SUCCESS,
        Err(e) => {
            complain(&e);
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Returns whether no process reads any more what is written to this pipe, socket or terminal.
fn reader_has_gone(output: &impl AsFd) -> bool {
    let mut watched = [PollFd::new(output, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let polled = rustix::event::poll(&mut watched, Some(&now));
    polled.is_ok() && watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

/// `println!` panics if the standard output can't be written. This makes such a panic end the program: quietly if the output's reader has gone, as a
/// broken pipe does, else with the error.
pub fn end_where_no_output_is_possible() {
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let words = panic.payload().downcast_ref::<String>().map_or("", String::as_str);
        let Some(why) = words.strip_prefix("failed printing to stdout: ") else { return others(panic) };
        if why.contains("Broken pipe") {
            std::process::exit(0);
        }
        // It may be on the same full disk.
        let _ = writeln!(io::stderr(), "tombolo: the output can't be written: {why}");
        std::process::exit(1);
    }));
}

/// Undoes what this process has inherited from an unusual parent, and what would end it for the sake of a log:
/// - A write beyond the limit on the size of files (`ulimit -f`, `LimitFSIZE=`) fails from here on, where it would end this process by SIGXFSZ.
///   Programs that are started afterwards inherit that.
/// - A parent that ignores SIGCHLD would have the kernel forget this process's children when they end: their exit codes would be lost, and their
///   numbers another process's before this one has waited for them.
/// - A umask that takes rights from the owner would make files and folders that this process could not open itself.
pub fn begin_as_usual() {
    // SAFETY: the calls change the dispositions of two signals, which no other part of the program has a handler for.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
    }
    let others = Mode::RWXG | Mode::RWXO;
    let inherited = rustix::process::umask(others);
    rustix::process::umask(inherited & others);
}

/// Writes a manual page of `command` and of each of its commands into `dir`.
///
/// # Errors
/// The folder or a page can't be written.
pub fn write_manual(command: clap::Command, dir: &Path) -> anyhow::Result<()> {
    let write = || {
        std::fs::create_dir_all(dir)?;
        clap_mangen::generate_to(command, dir)
    };
    write().with_context(|| format!("the manual pages can't be written to {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_whose_reader_has_gone_is_no_failure_and_another_error_is_one() {
        let closed = || Err(anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)));
        let said = std::cell::Cell::new(0);
        let complain = |_: &anyhow::Error| said.set(said.get() + 1);
        let (reader, pipe) = rustix::pipe::pipe().unwrap();
        let (socket, other) = std::os::unix::net::UnixStream::pair().unwrap();
        // It was another connection's.
        assert_eq!(end_with(&pipe, closed(), complain), ExitCode::FAILURE);
        assert_eq!(end_with(&socket, closed(), complain), ExitCode::FAILURE);
        assert_eq!(
            end_with(&std::fs::File::open("/dev/null").unwrap(), closed(), complain),
            ExitCode::FAILURE
        );
        assert_eq!(said.get(), 3);
        drop((reader, other));
        assert_eq!(end_with(&pipe, closed(), complain), ExitCode::SUCCESS);
        assert_eq!(end_with(&socket, closed(), complain), ExitCode::SUCCESS);
        assert_eq!(said.get(), 3);
        assert_eq!(end_with(&pipe, Err(anyhow::anyhow!("no room")), complain), ExitCode::FAILURE);
        assert_eq!(said.get(), 4);
    }

    #[test]
    fn a_manual_page_that_cannot_be_written_is_an_error_that_names_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = write_manual(clap::Command::new("x"), &file).unwrap_err();
        assert!(error.to_string().contains(file.to_str().unwrap()), "{error:#}");
        write_manual(clap::Command::new("x"), dir.path()).unwrap();
        assert!(dir.path().join("x.1").is_file());
    }
}
