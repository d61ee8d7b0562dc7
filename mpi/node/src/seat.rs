// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Seats: processes with the numbers of the job's ranks. A library finds a peer by its process number, and takes an equal number for itself, so rank r has
//! the number `base + r` in every VM: in its own VM the seat becomes the rank, in the others it sleeps for as long as the rank lives (a *shadow*).
//! The launcher has a seat, too, with a number of no meaning. All are started before this process has threads.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::frame::{self, Frame, Kind, Program};
use crate::sys;

/// The descriptor by which a seat hears of its program.
const ORDER: i32 = 3;
/// The exit code of a seat whose program can't be executed, as a shell has it.
const NOT_FOUND: i32 = 127;

/// A process that waits for its program, runs it, or sleeps.
#[derive(Debug)]
pub struct Seat {
    pub pid: i32,
    /// `None`: a shadow, or its program was started.
    order: Option<UnixStream>,
    /// `None`: a shadow, or they were taken.
    pub streams: Option<Streams>,
}

/// This side of a program's standard streams.
#[derive(Debug)]
pub struct Streams {
    pub input: File,
    pub out: File,
    pub err: File,
}

/// Why a seat could not be had.
#[derive(Debug)]
pub enum Trouble {
    /// Another process or thread has the number.
    Collides,
    Other(String),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Trouble {
        const EEXIST: i32 = 17;
        match error.raw_os_error() {
            Some(EEXIST) => Trouble::Collides,
            _ => Trouble::Other(format!("a process can't be prepared: {error}")),
        }
    }
}

/// Starts a process that sleeps until it is ended.
///
/// # Errors
/// Its number is taken, or no process can be had.
pub fn shadow(pid: i32) -> Result<Seat, Trouble> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let pid = start(Some(pid), "mpi-shadow", [null.as_raw_fd(); 4], || {
        loop {
            std::thread::park();
        }
    })?;
    Ok(Seat { pid, order: None, streams: None })
}

/// Starts a process that waits for a program, which then runs on these CPUs (none: on any).
///
/// # Errors
/// Its number is taken, or no process can be had.
pub fn waiting(pid: Option<i32>, cpus: &[usize]) -> Result<Seat, Trouble> {
    let (order, theirs) = UnixStream::pair()?;
    let (read, input) = sys::pipe()?;
    let (out, write) = sys::pipe()?;
    let (err, complain) = sys::pipe()?;
    let fds = [read.as_raw_fd(), write.as_raw_fd(), complain.as_raw_fd(), theirs.as_raw_fd()];
    let pid = start(pid, "mpi-seat", fds, || serve(cpus))?;
    let streams = Streams { input: input.into(), out: out.into(), err: err.into() };
    Ok(Seat { pid, order: Some(order), streams: Some(streams) })
}

/// Starts a process of this name that has these descriptors, all above [`ORDER`], and does this.
fn start(pid: Option<i32>, name: &str, fds: [i32; 4], run: impl FnOnce() -> i32) -> io::Result<i32> {
    // SAFETY: seats are started before this process has threads, and the child ends itself or becomes another program.
    if let Some(child) = unsafe { sys::fork(pid) }? {
        return Ok(child);
    }
    sys::become_seat(name);
    // SAFETY: the child uses these four alone.
    unsafe { sys::keep_only(fds) };
    sys::set_mask(&[]);
    sys::exit_now(run())
}

/// Waits for the program in a seat, and becomes it. Returns an exit code where there is none.
fn serve(cpus: &[usize]) -> i32 {
    // SAFETY: the descriptor is this process' own.
    let mut order = unsafe { UnixStream::from_raw_fd(ORDER) };
    let Ok(Some(Frame { kind: Kind::Start, body, .. })) = frame::read(&mut order) else { return 0 };
    drop(order);
    let Some(program) = Program::decode(&body) else { return NOT_FOUND };
    if !cpus.is_empty() {
        // A CPU that has gone offline since binds nothing.
        let _unbound = sys::bind(cpus);
    }
    let words = |word: &Vec<u8>| OsString::from_vec(word.clone());
    let mut command = Command::new(words(&program.argv[0]));
    command.args(program.argv[1..].iter().map(words)).env_clear().current_dir(words(&program.dir));
    for variable in &program.env {
        let parts = variable.iter().position(|byte| *byte == b'=').map(|at| variable.split_at(at));
        if let Some((name, value)) = parts {
            command.env(words(&name.to_vec()), words(&value[1..].to_vec()));
        }
    }
    let why = command.exec();
    let name = String::from_utf8_lossy(&program.argv[0]).into_owned();
    let dir = String::from_utf8_lossy(&program.dir).into_owned();
    let _nobody_reads = writeln!(io::stderr(), "tombolo: '{name}' can't be run in {dir}: {why}");
    NOT_FOUND
}

impl Seat {
    /// Has a seat become a program. One that has one, or is a shadow, stays as it is.
    ///
    /// # Errors
    /// The process has ended.
    pub fn begin(&mut self, program: &Program) -> io::Result<()> {
        let Some(mut order) = self.order.take() else { return Ok(()) };
        order.write_all(&Frame::new(Kind::Start, 0, program.encode()).encode())
    }
}
