// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses that clients connect to, and their peers: a peer is a user of this machine, by a Unix socket, or an address, by TCP.

use anyhow::{Context, bail};
use rustix::net::{Shutdown, sockopt};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;
use tombolo_brief::Brief;
use tombolo_listen::Name;

/// A TCP peer that has said nothing for so long is asked whether it is still there, …
const QUIET: Duration = Duration::from_secs(15);
/// … again and again after so long, …
const AGAIN: Duration = Duration::from_secs(5);
/// … and has gone when it has not answered so often.
const UNANSWERED: u32 = 3;

/// The user and process at the other end of a connection, as far as the kernel knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// A user of this machine, by number.
    User(u32),
    /// A machine. Of IPv6 the network of 64 bits that it is in, as a machine takes addresses there as it likes.
    Machine(IpAddr),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::User(uid) => write!(f, "user {uid}"),
            Peer::Machine(IpAddr::V4(address)) => write!(f, "{address}"),
            Peer::Machine(IpAddr::V6(network)) => write!(f, "{network}/64"),
        }
    }
}

impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Peer {
        Peer::Machine(match address.to_canonical() {
            IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
            v4 => v4,
        })
    }
}

/// A socket that clients find.
pub enum Listener {
    /// Of processes of this machine.
    Unix(UnixListener, Name),
    /// Of other machines.
    Tcp(TcpListener),
}

impl Listener {
    /// Listens at `unix:/path` or `tcp:host:port`.
    ///
    /// # Errors
    /// Another process listens there, or it can't be had. Names the address.
    pub fn bind(address: &str) -> anyhow::Result<Listener> {
        match address.split_once(':') {
            Some(("unix", path)) => {
                let (listener, name) = listen(Path::new(path), 0o660)?;
                Ok(Listener::Unix(listener, name))
            }
            Some(("tcp", rest)) => {
                Ok(Listener::Tcp(TcpListener::bind(rest).with_context(|| address.to_string())?))
            }
            _ => bail!("{address}: expected unix:/path or tcp:host:port"),
        }
    }

    /// Waits for the next client.
    ///
    /// # Errors
    /// There are no descriptors, or the client has gone meanwhile.
    pub fn accept(&self) -> io::Result<(Brief, Peer)> {
        match self {
            Listener::Unix(listener, _) => {
                let (socket, _) = listener.accept()?;
                let socket = Brief::from(OwnedFd::from(socket));
                let user = tombolo_listen::peer::of(&*socket)?.user;
                Ok((socket, Peer::User(user)))
            }
            Listener::Tcp(listener) => {
                let (socket, address) = listener.accept()?;
                socket.set_nodelay(true)?;
                notice_silence(&socket)?;
                Ok((OwnedFd::from(socket).into(), address.ip().into()))
            }
        }
    }

    /// Gives the address up for a successor. Who has connected already is in [`Listener::accept`], which fails when there are no more.
    ///
    /// # Errors
    /// The socket's name can't be removed.
    pub fn give_up(&self) -> io::Result<()> {
        let removed = match self {
            Listener::Unix(_, name) => name.remove(),
            Listener::Tcp(_) => Ok(()),
        };
        rustix::io::ioctl_fionbio(self.fd(), true)?;
        removed
    }

    /// Refuses who connects from now on, and wakes the thread that waits for them.
    pub fn close(&self) {
        // It listens, so that can't fail.
        let _never = rustix::net::shutdown(self.fd(), Shutdown::Both);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(l, _) => l.as_fd(),
            Listener::Tcp(l) => l.as_fd(),
        }
    }
}

/// Listens at a path, with this mode of its file; makes the folder if it is missing.
///
/// # Errors
/// Another process listens there, or it can't be had. Names the path.
pub fn listen(path: &Path, mode: u32) -> anyhow::Result<(UnixListener, Name)> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    Ok(tombolo_listen::listen(path, Some(mode))?)
}

/// Has the kernel end a connection whose peer went without a word: it was switched off, or the way to it was cut.
fn notice_silence(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, QUIET)?;
    sockopt::set_tcp_keepintvl(&socket, AGAIN)?;
    Ok(sockopt::set_tcp_keepcnt(&socket, UNANSWERED)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_one_peer_by_whichever_of_its_addresses_it_comes() {
        let peer = |text: &str| Peer::from(text.parse::<IpAddr>().expect("an address"));
        assert_eq!(peer("2001:db8:0:7::1"), peer("2001:db8:0:7:ffff::2"));
        assert_ne!(peer("2001:db8:0:7::1"), peer("2001:db8:0:8::1"));
        // As a socket for both kinds shows those of the older one.
        assert_eq!(peer("::ffff:192.0.2.1"), peer("192.0.2.1"));
        assert_ne!(peer("192.0.2.1"), peer("192.0.2.2"));
        let shown = ["2001:db8:0:7::1", "192.0.2.1"].map(|text| peer(text).to_string());
        assert_eq!(shown, ["2001:db8:0:7::/64", "192.0.2.1"]);
    }
}
