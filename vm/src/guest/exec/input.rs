// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The input of a command: a virtio-serial port that the VM has for as long as the command runs. The port's end is the input's.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use super::Input;

/// The pause between two checks whether the command has ended.
const LOOK: Duration = Duration::from_millis(100);

/// Writes a command's input to its port: a line for which [`super::RUN`] waits, then what the client sends. Returns when all is written, or
/// `over` is set.
///
/// # Errors
/// The VM has ended.
pub(super) fn feed(mut port: &UnixStream, input: &Receiver<Input>, over: &AtomicBool) -> io::Result<()> {
    port.set_write_timeout(Some(LOOK))?;
    let mut data = b"\n".to_vec();
    loop {
        let mut left = &data[..];
        while !left.is_empty() {
            match port.write(left) {
                Ok(n) => left = &left[n..],
                _ if over.load(Ordering::Acquire) => return Ok(()),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(e) => return Err(e),
            }
        }
        data = loop {
            match input.recv_timeout(LOOK) {
                Ok(Input::Data(data)) => break data,
                // QEMU reads what is left, and closes the port in the guest.
                Ok(Input::End) => return port.shutdown(Shutdown::Write),
                Err(RecvTimeoutError::Timeout) if !over.load(Ordering::Acquire) => {}
                // The command has ended, or its client has gone: the caller of `run` notices that by itself.
                Err(_) => return Ok(()),
            }
        };
    }
}
