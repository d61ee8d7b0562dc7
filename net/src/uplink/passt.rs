// SPDX-License-Identifier: Apache-2.0 OR MIT
//! User-mode networking through passt: its stream socket carries frames with a 32-bit big-endian length before each.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use super::Link;
use crate::frames::frame::MAX_FRAME;
use crate::vring::queue::Negotiated;

/// Bytes of the longest frame that passt takes. It closes the connection over which a longer one comes (versions since 2024).
const LONGEST: usize = 65_535;

/// Data in flight in each direction.
#[derive(Default)]
struct Buffered {
    /// Bytes of frames that the socket has not taken yet.
    out: Vec<u8>,
    /// Received bytes that make no whole frame yet.
    input: Vec<u8>,
}

/// A connection to passt.
pub struct Passt {
    stream: UnixStream,
    buffered: Mutex<Buffered>,
}

impl Passt {
    /// Connects to passt's socket.
    ///
    /// # Errors
    /// No process listens there.
    pub fn connect(path: &Path) -> io::Result<OwnedFd> {
        UnixStream::connect(path)
            .map_err(|err| {
                let text = format!("passt at {}: {err} (start it with: passt -s {0})", path.display());
                io::Error::new(err.kind(), text)
            })
            .map(Into::into)
    }

    /// Starts `program`, which ends with the connection and forwards these ports of the host.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start(program: &Path, tcp: &[String], udp: &[String]) -> io::Result<OwnedFd> {
        let (own, theirs) = UnixStream::pair()?;
        let theirs = OwnedFd::from(theirs);
        let number = theirs.as_raw_fd();
        let mut command = Command::new(program);
        command.args(["--foreground", "--quiet", "--fd", &number.to_string()]).stdin(Stdio::null());
        for (option, ports) in [("-t", tcp), ("-u", udp)] {
            for port in ports {
                command.args([option, port]);
            }
        }
        // SAFETY: between fork and exec, one system call that is safe there.
        unsafe {
            command.pre_exec(move || match libc::fcntl(number, libc::F_SETFD, 0) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let mut child = command.spawn().map_err(|err| {
            let text = format!("{} can't be started: {err}; install the package passt", program.display());
            io::Error::new(err.kind(), text)
        })?;
        std::thread::Builder::new().name("net-passt".into()).spawn(move || {
            // passt ended with the switch, or failed: then the uplink is dead, and the guests still reach each other.
            match child.wait() {
                Ok(status) => {
                    tracing::error!("passt ended: {status}; start the switch again to have the uplink again")
                }
                Err(err) => tracing::error!("waiting for passt failed: {err}"),
            }
        })?;
        Ok(own.into())
    }

    /// Makes the link of a connection, maybe from another process.
    ///
    /// # Errors
    /// It can't be made non-blocking.
    pub fn over(connection: OwnedFd) -> io::Result<Self> {
        let stream = UnixStream::from(connection);
        stream.set_nonblocking(true)?;
        Ok(Self { stream, buffered: Mutex::default() })
    }
}

impl Buffered {
    /// Sends the rest of an earlier frame.
    ///
    /// # Errors
    /// `WouldBlock`: there is no room for all of it.
    fn flush(&mut self, mut stream: &UnixStream) -> io::Result<()> {
        while !self.out.is_empty() {
            let n = stream.write(&self.out)?;
            self.out.drain(..n);
        }
        Ok(())
    }
}

impl Link for Passt {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()> {
        let len: usize = pieces.iter().map(|p| p.iov_len).sum();
        if len > LONGEST {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut buffered = self.buffered.lock().unwrap_or_else(PoisonError::into_inner);
        buffered.flush(&self.stream)?;
        let mut bytes = Vec::with_capacity(4 + len);
        bytes.extend((len as u32).to_be_bytes());
        for p in pieces {
            // SAFETY: the piece is mapped; copied through a raw pointer, as a guest may be writing to it.
            unsafe {
                let at = bytes.len();
                std::ptr::copy_nonoverlapping(p.iov_base.cast::<u8>(), bytes.as_mut_ptr().add(at), p.iov_len);
                bytes.set_len(at + p.iov_len);
            }
        }
        match (&self.stream).write(&bytes) {
            Ok(n) => {
                buffered.out.extend_from_slice(&bytes[n..]);
                Ok(())
            }
            Err(err) => Err(err),
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut buffered = self.buffered.lock().unwrap_or_else(PoisonError::into_inner);
        // Without room the next event tries again; a dead connection shows when it is read.
        let _later = buffered.flush(&self.stream);
        loop {
            if let Some(&head) = buffered.input.first_chunk::<4>() {
                let len = u32::from_be_bytes(head) as usize;
                if len > MAX_FRAME || len > buffer.len() {
                    return Err(io::Error::other(format!("passt sent a frame of {len} bytes")));
                }
                if buffered.input.len() >= 4 + len {
                    buffer[..len].copy_from_slice(&buffered.input[4..4 + len]);
                    buffered.input.drain(..4 + len);
                    return Ok(len);
                }
            }
            let mut chunk = [0u8; 16384];
            match (&self.stream).read(&mut chunk)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => buffered.input.extend_from_slice(&chunk[..n]),
            }
        }
    }

    fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    fn keeps_rest(&self) -> bool {
        true
    }
}
