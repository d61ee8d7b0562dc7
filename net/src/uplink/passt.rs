// SPDX-License-Identifier: Apache-2.0 OR MIT
//! User-mode networking through passt: its stream socket carries frames with a 32-bit big-endian length before each.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
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
                    // The next frame can't be found. The keeper sees the end, and makes another connection.
                    let _gone = self.stream.shutdown(Shutdown::Both);
                    let text = format!("passt sent a frame of {len} bytes");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
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
