// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The socket by which host processes that do not own the zone (mounts, tools) get a doorbell. It is a [`Door`] named for the zone, so only
//! processes of this user and of root can connect. A process sends one message, the number of its member slot, then speaks the ivshmem
//! protocol as QEMU does.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use tombolo_brief::Brief;
use uuid::Uuid;

use super::wire;
use crate::door::{self, Door};
use crate::{Error, MemberId, Result};

/// Timeout for a server to accept a process.
const ACCEPT: Duration = Duration::from_secs(10);

fn name(zone: Uuid) -> String {
    format!("tombolo-doorbells-{zone}")
}

/// Opens the server's socket. A zone has one owner, and the owner has one doorbell server.
pub(super) fn listen(zone: Uuid) -> Result<Door> {
    let listen = || {
        let folder = std::env::temp_dir().join(format!(".tombolo-{}", Uuid::new_v4()));
        std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
        let door = Door::open(&folder, &name(zone));
        std::fs::remove_dir(&folder)?;
        let door = door?;
        door.listener().set_nonblocking(true)?;
        Ok(door)
    };
    listen().map_err(|e| Error::io("making the host's doorbell socket", e))
}

/// Accepts a process of this user or of root.
pub(super) fn accept(listener: &UnixListener) -> io::Result<Brief<UnixStream>> {
    let stream = Brief::from(listener.accept()?.0);
    let user = tombolo_listen::peer::of(&*stream)?.user;
    if ![rustix::process::geteuid().as_raw(), 0].contains(&user) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "a process of another user"));
    }
    stream.set_nonblocking(true)?;
    Ok(stream)
}

/// Reads the first message of a process: the member that it is.
pub(super) fn member_of(stream: &UnixStream) -> io::Result<MemberId> {
    let unnamed = || io::Error::new(io::ErrorKind::InvalidData, "it named no member");
    let member = wire::take(stream)?.ok_or_else(unnamed)?;
    u32::try_from(member).ok().and_then(MemberId::new).ok_or_else(unnamed)
}

/// Connects a process to the zone's doorbell server; the ivshmem protocol follows on the connection. `None`: the zone has no doorbell server.
pub(super) fn connect(zone: Uuid, member: MemberId) -> Result<Option<UnixStream>> {
    let failed = |e| Error::io("connecting to the zone's doorbells", e);
    let name = name(zone);
    for found in door::find(|n| n == name).map_err(failed)? {
        match found.connect(Some(ACCEPT)) {
            Ok(stream) => match wire::send(&stream, i64::from(member.index()), None) {
                Err(e) if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
                sent => return sent.map(|()| Some(stream)).map_err(failed),
            },
            // It ended meanwhile, or is a copy that a process has on its way from fork to exec.
            Err(e) if e.kind() != io::ErrorKind::TimedOut => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(None)
}
