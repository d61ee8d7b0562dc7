// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A whole switch with its threads in the test's own process, and guests that connect to it as a VMM does.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tombolo_net::control::config::{Config, PortConfig};
use tombolo_net::control::daemon::Daemon;
use tombolo_net_driver::{Nic, NicConfig};

use super::{Rig, frame, wait_for};

/// A switch without sandbox, whose ports belong to [`Rig::mac`] of their numbers.
pub struct Lab {
    pub daemon: Arc<Daemon>,
    pub dir: tempfile::TempDir,
}

impl Lab {
    pub fn new(ports: usize, workers: usize) -> Self {
        Self::with(ports, workers, |_, _| ())
    }

    /// The same, with more in its configuration; its folder is given too.
    pub fn with(ports: usize, workers: usize, more: impl FnOnce(&mut Config, &Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.switch.sandbox = false;
        config.switch.workers = workers;
        config.switch.control = Some(dir.path().join("control"));
        config.switch.metrics = Some("127.0.0.1:0".parse().unwrap());
        config.port = (0..ports).map(|i| port(dir.path(), i)).collect();
        more(&mut config, dir.path());
        Self { daemon: Daemon::start(&config).unwrap(), dir }
    }

    pub fn socket(&self, n: usize) -> PathBuf {
        self.dir.path().join(format!("vm{n}"))
    }

    pub fn control(&self) -> PathBuf {
        self.dir.path().join("control")
    }

    pub fn connect(&self, n: usize, config: NicConfig) -> Nic {
        let mut nic = Nic::new(config).unwrap();
        nic.connect(&self.socket(n)).unwrap();
        nic
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.daemon.stop();
    }
}

/// The configuration of port `n`, with its socket in `dir`.
pub fn port(dir: &Path, n: usize) -> PortConfig {
    let text =
        format!("name='vm{n}'\nsocket='{}'\nmacs=['{}']", dir.join(format!("vm{n}")).display(), Rig::mac(n));
    toml::from_str(&text).unwrap()
}

/// Guests 0 and 1 send each other frames.
pub fn exchange(a: &mut Nic, b: &mut Nic, rounds: u32, seed: u8) {
    for n in 0..rounds {
        let there = frame(Rig::mac(1), Rig::mac(0), 60 + n as usize % 1400, seed.wrapping_add(n as u8));
        wait_for("room", || a.send(&there).then_some(()));
        let (_, got) = wait_for("a frame", || b.receive());
        assert_eq!(got, there);
        let back = frame(Rig::mac(0), Rig::mac(1), 60, seed);
        wait_for("room", || b.send(&back).then_some(()));
        assert_eq!(wait_for("the way back", || a.receive()).1, back);
    }
}

/// A raw vhost-user message with descriptors.
pub fn message(stream: &UnixStream, request: u32, payload: &[u8], fds: &[i32]) {
    let mut bytes = Vec::new();
    bytes.extend(request.to_ne_bytes());
    bytes.extend(1u32.to_ne_bytes());
    bytes.extend((payload.len() as u32).to_ne_bytes());
    bytes.extend(payload);
    let mut control = [0u64; 64];
    // SAFETY: a message of our own buffers, its control part as long as said.
    unsafe {
        let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut msg: libc::msghdr = std::mem::zeroed();
        msg.msg_iov = &mut iov;
        msg.msg_iovlen = 1;
        if !fds.is_empty() {
            let len = size_of_val(fds) as u32;
            msg.msg_control = control.as_mut_ptr().cast();
            msg.msg_controllen = libc::CMSG_SPACE(len) as usize;
            let c = libc::CMSG_FIRSTHDR(&msg);
            (*c).cmsg_level = libc::SOL_SOCKET;
            (*c).cmsg_type = libc::SCM_RIGHTS;
            (*c).cmsg_len = libc::CMSG_LEN(len) as usize;
            std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(c).cast(), fds.len());
        }
        libc::sendmsg(stream.as_raw_fd(), &msg, libc::MSG_NOSIGNAL);
    }
}

/// Waits until the switch has hung up on a peer.
pub fn hung_up(stream: &UnixStream) {
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut bytes = [0u8; 4096];
    while !matches!((&mut &*stream).read(&mut bytes), Ok(0) | Err(_)) {}
}
