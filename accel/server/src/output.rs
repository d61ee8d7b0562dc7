// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The output of kernels (`printf`), which belongs on the program's standard output. A driver writes it to its own process's, which is a pipe
//! here: a thread reads the pipe and sends the bytes to the client. The output of a kernel is sent before any reply that says that the
//! kernel has ended.

use crate::session::Session;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tombolo_accel_spec::wire::ReplyKind;

unsafe extern "C" {
    static stdout: *mut libc::FILE;
}

/// Bytes of a record; all transports carry more.
const CHUNK: usize = 4096;
/// A reply doesn't wait for more than a pipe holds.
const AT_ONCE: usize = 64 << 10;

/// The end of the pipe that is read, and by whom it is.
struct Pipe {
    end: File,
    session: Arc<Session>,
    /// Held from reading to sending, so that what was printed stays in order.
    order: Mutex<()>,
}

/// The worker's standard output.
#[derive(Default)]
pub struct Output {
    pipe: OnceLock<Arc<Pipe>>,
    /// Some kernel may print: until then no reply looks.
    used: AtomicBool,
}

impl Pipe {
    /// Sends what is there, at most [`CHUNK`]; `false`: nothing is.
    fn forward(&self) -> bool {
        let mut bytes = [0; CHUNK];
        let _in_order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        match (&self.end).read(&mut bytes) {
            Ok(n) if n > 0 => {
                self.session.notify(ReplyKind::Output, 0, 0, &bytes[..n]);
                true
            }
            // Nothing now; this process holds the other end as long as it lives.
            _ => false,
        }
    }

    fn serve(&self) {
        loop {
            let mut fd = libc::pollfd { fd: self.end.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: the structure lives during the call.
            unsafe { libc::poll(&mut fd, 1, -1) };
            // A kernel that prints more than its client reads waits in its write.
            if !self.session.wait_for_room() {
                return;
            }
            self.forward();
        }
    }
}

impl Output {
    /// From now on, what this process writes to its standard output goes to the client.
    pub fn capture(&self, session: &Arc<Session>) -> io::Result<()> {
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors.
        if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: both are fresh.
        let [end, write] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        // SAFETY: descriptors of this process; the standard output is replaced.
        let done = unsafe {
            libc::fcntl(end.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) == 0
                && libc::dup2(write.as_raw_fd(), libc::STDOUT_FILENO) >= 0
        };
        if !done {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: C's own stream, which lives as long as the process. A driver that prints by it would keep the bytes otherwise.
        unsafe { libc::setvbuf(stdout, std::ptr::null_mut(), libc::_IONBF, 0) };
        let pipe = Arc::new(Pipe { end: end.into(), session: session.clone(), order: Mutex::default() });
        let served = pipe.clone();
        std::thread::Builder::new().name("output".into()).spawn(move || served.serve())?;
        self.pipe.get_or_init(|| pipe);
        Ok(())
    }

    /// A program came whose kernels print, if its text says so.
    pub fn expect_of(&self, text: &[u8]) {
        if text.windows(6).any(|word| word == b"printf") {
            self.expect();
        }
    }

    /// A program came that doesn't show whether its kernels print.
    pub fn expect(&self) {
        self.used.store(true, Ordering::Release);
    }

    /// Sends what was printed so far.
    pub fn settle(&self) {
        if !self.used.load(Ordering::Acquire) {
            return;
        }
        if let Some(pipe) = self.pipe.get() {
            let mut left = AT_ONCE / CHUNK;
            while left > 0 && pipe.forward() {
                left -= 1;
            }
        }
    }
}
