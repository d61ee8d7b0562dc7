// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The wrapper: what the launcher starts in the first VM for a rank of any VM. It has the rank started where it belongs, passes streams and signals on, and
//! ends as the rank ends.

use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::frame::{self, Frame, Kind, PIECE, Program};
use crate::{space, sys};

/// Variables by which launchers tell a process its rank: Open MPI, hydra, PMIx.
const RANK: [&str; 4] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID", "PMIX_RANK"];
/// Set where each line of output is to have its rank before it.
pub const LABEL: &str = "TOMBOLO_MPI_LABEL";

/// The connection to the node, for all threads of the wrapper.
#[derive(Clone)]
struct Node(Arc<Mutex<UnixStream>>);

impl Node {
    fn send(&self, frame: &Frame) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(&frame.encode())
    }
}

/// Runs the program in `words` as the rank that the environment names. Returns the exit code.
///
/// # Errors
/// There is no job here, or it ends.
pub fn run(words: Vec<std::ffi::OsString>) -> Result<i32, String> {
    let rank = RANK.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
    let rank: u32 = rank.ok_or("no launcher of MPI has started this")?;
    let failed = |e: io::Error| format!("rank {rank} has lost its job: {e}");
    let mut socket = UnixStream::connect(space::SOCKET).map_err(failed)?;
    let node = Node(Arc::new(Mutex::new(socket.try_clone().map_err(failed)?)));
    sys::set_mask(&sys::PASSED);
    let program = Program {
        dir: std::env::current_dir().map_err(failed)?.into_os_string().into_vec(),
        argv: words.into_iter().map(OsStringExt::into_vec).collect(),
        env: std::env::vars_os()
            .map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat())
            .collect(),
    };
    node.send(&Frame::new(Kind::Start, rank, program.encode())).map_err(failed)?;
    let to = node.clone();
    thread::spawn(move || {
        loop {
            let number = sys::wait_signal(&sys::PASSED);
            let _gone = to.send(&Frame::new(Kind::Signal, rank, [u8::try_from(number).unwrap_or(15)]));
        }
    });
    let taken = feed(rank, node.clone());
    let mut labels = std::env::var_os(LABEL).map(|_| [Label::default(), Label::default()]);
    loop {
        let frame = frame::read(&mut socket)
            .map_err(failed)?
            .ok_or_else(|| format!("rank {rank}: the job has ended"))?;
        match frame.kind {
            Kind::Taken => drop(taken.send(())),
            Kind::Out | Kind::Err => {
                let is_error = frame.kind == Kind::Err;
                let bytes = match &mut labels {
                    Some(labels) => labels[usize::from(is_error)].label(rank, frame.body),
                    None => frame.body,
                };
                pass(&bytes, is_error);
                node.send(&Frame::new(Kind::Taken, rank, [if is_error { 2 } else { 1 }])).map_err(failed)?;
            }
            Kind::Exit => return Ok(end(&frame.body)),
            _ => {}
        }
    }
}

/// Sends the standard input while the other side takes it, which the sender that is returned tells.
fn feed(rank: u32, node: Node) -> mpsc::Sender<()> {
    let (taken, asked) = mpsc::channel();
    thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        loop {
            let n = match io::stdin().read(&mut piece) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                n => n.unwrap_or(0),
            };
            if node.send(&Frame::new(Kind::Input, rank, &piece[..n])).is_err()
                || n == 0
                || asked.recv().is_err()
            {
                return;
            }
        }
    });
    taken
}

/// Writes output to the launcher. One that does not read any more misses it.
fn pass(bytes: &[u8], is_error: bool) {
    let _gone = if is_error {
        io::stderr().write_all(bytes)
    } else {
        let mut out = io::stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush())
    };
}

/// Ends as a process with this status did: its exit code, or by its signal.
fn end(body: &[u8]) -> i32 {
    let bytes = body.get(..4).and_then(|bytes| bytes.try_into().ok());
    let status = bytes.map_or(1 << 8, i32::from_le_bytes);
    match status & 0x7f {
        0 => (status >> 8) & 0xff,
        number => sys::die_by(number),
    }
}

/// Puts the rank before each line of a stream, whatever pieces the stream comes in.
#[derive(Debug, Default)]
struct Label {
    line: Vec<u8>,
}

impl Label {
    /// The lines that are complete, each with its label; an empty piece completes the last one.
    fn label(&mut self, rank: u32, piece: Vec<u8>) -> Vec<u8> {
        let over = piece.is_empty();
        self.line.extend(piece);
        let complete = if over {
            self.line.len()
        } else {
            self.line.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1)
        };
        let rest = self.line.split_off(complete);
        let lines = std::mem::replace(&mut self.line, rest);
        lines
            .split_inclusive(|byte| *byte == b'\n')
            .flat_map(|line| [format!("{rank}: ").as_bytes(), line].concat())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_its_label_once_however_its_bytes_come() {
        let mut label = Label::default();
        let pieces = ["ab", "c\nd", "\n\ne", ""];
        let labelled: Vec<_> = pieces
            .iter()
            .map(|piece| String::from_utf8(label.label(3, piece.as_bytes().to_vec())).unwrap())
            .collect();
        assert_eq!(labelled, ["", "3: abc\n", "3: d\n3: \n", "3: e"]);
    }
}
