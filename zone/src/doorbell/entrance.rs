// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where host processes that are not the zone's owner (mounts, tools) get a doorbell: an abstract socket named for the zone, so that
//! nothing is left behind in a folder. Who comes says which member it is, one message, then speaks ivshmem like QEMU. Abstract names
//! belong to nobody, so each side looks whose process the other is: the same user's, or root's.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use rustix::net::sockopt::socket_peercred;
use uuid::Uuid;

use super::wire;
use crate::{Error, MemberId, Result};

fn address(zone: Uuid) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("tombolo-doorbells-{zone}"))
}

fn is_own(stream: &UnixStream) -> io::Result<bool> {
    let peer = socket_peercred(stream)?.uid;
    Ok(peer == rustix::process::geteuid() || peer.is_root())
}

/// The server's side. The name is taken while another process serves the zone.
pub(super) fn listen(zone: Uuid) -> Result<UnixListener> {
    let listen = || {
        let listener = UnixListener::bind_addr(&address(zone)?)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().map_err(|e| Error::io("making the host's doorbell socket", e))
}

/// A process at the door, if it is one of ours.
pub(super) fn accept(listener: &UnixListener) -> io::Result<UnixStream> {
    let (stream, _) = listener.accept()?;
    if !is_own(&stream)? {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "a process of another user"));
    }
    stream.set_nonblocking(true)?;
    Ok(stream)
}

/// Who a process at the door says it is.
pub(super) fn greeting(stream: &UnixStream) -> io::Result<MemberId> {
    let nobody = || io::Error::new(io::ErrorKind::InvalidData, "it named no member");
    let (member, _) = wire::receive(stream)?.ok_or_else(nobody)?;
    u32::try_from(member).ok().and_then(MemberId::new).ok_or_else(nobody)
}

/// The process's side: a connection on which ivshmem follows. `None`: nobody serves doorbells for this zone.
pub(super) fn enter(zone: Uuid, member: MemberId) -> Result<Option<UnixStream>> {
    let failed = |e| Error::io("connecting to the zone's doorbells", e);
    let stream = match UnixStream::connect_addr(&address(zone).map_err(failed)?) {
        Ok(stream) => stream,
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    if !is_own(&stream).map_err(failed)? {
        return Err(failed(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "served by another user's process",
        )));
    }
    wire::send(&stream, i64::from(member.index()), None).map_err(failed)?;
    Ok(Some(stream))
}
