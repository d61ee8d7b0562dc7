// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A claim on the ports of the host that a passt forwards. The keeper of a killed switch ends its passt a moment after the
//! switch, while the keeper of the successor starts one that wants the same ports: the successor waits for the claim first.
//!
//! A claim is a socket that listens on an abstract name, which belongs to a network namespace like the ports. A keeper that finds
//! the name taken connects, and sees the holder's end by the end of the connection. Nobody accepts the connections.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;

/// The longest wait for a holder. One that takes longer is no keeper that ends, but a running switch with the same ports.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A claim, held until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim(#[expect(dead_code, reason = "the open socket is the claim")] UnixListener);

impl Claim {
    /// Waits for the claim on these ports. None: this user has no such claim within a few seconds.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn wait(tcp: &[String], udp: &[String]) -> io::Result<Option<Self>> {
        let mut hasher = DefaultHasher::new();
        (tcp, udp).hash(&mut hasher);
        let name = format!("tombolo-net-{}-{:016x}", geteuid().as_raw(), hasher.finish());
        let address = SocketAddr::from_abstract_name(&name)?;
        let end = Instant::now() + TIMEOUT;
        loop {
            match UnixListener::bind_addr(&address) {
                Err(err) if err.kind() == io::ErrorKind::AddrInUse => {}
                bound => return bound.map(|listener| Some(Self(listener))),
            }
            if !outlast(&name, end)? {
                return Ok(None);
            }
        }
    }
}

/// Waits for the end of the holder of `name`. False: it is another user's, or it has not ended until `end`.
fn outlast(name: &str, end: Instant) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?) {
        Ok(()) => {}
        Err(rustix::io::Errno::CONNREFUSED) => return Ok(true),
        // More than a hundred wait already.
        Err(rustix::io::Errno::AGAIN) => return Ok(false),
        Err(err) => return Err(err.into()),
    }
    if socket_peercred(&socket)?.uid != geteuid() {
        return Ok(false);
    }
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    let left = end.saturating_duration_since(Instant::now());
    match poll(&mut fds, Some(&Timespec::try_from(left).map_err(io::Error::other)?)) {
        Ok(0) => Ok(false),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(true),
        Err(err) => Err(err.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(port: &str) -> Option<Claim> {
        Claim::wait(&[format!("{}/{port}", std::process::id())], &[]).unwrap()
    }

    #[test]
    fn of_several_that_want_the_same_ports_one_has_the_claim_at_a_time() {
        let first = claim("8080:80").unwrap();
        let _other = claim("8081:80").unwrap();
        let holders = std::sync::atomic::AtomicUsize::new(1);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    let claim = claim("8080:80").unwrap();
                    assert_eq!(holders.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                    holders.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    drop(claim);
                });
            }
            holders.store(0, std::sync::atomic::Ordering::SeqCst);
            drop(first);
        });
    }

    #[test]
    fn a_claim_that_a_running_switch_holds_is_given_up_after_a_while() {
        let _held = claim("9090:90").unwrap();
        assert!(claim("9090:90").is_none());
    }
}
