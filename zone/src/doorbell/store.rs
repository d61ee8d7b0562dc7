// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A place outside of the server's process in which its clients are kept, so that another process can go on as the server when this one has died.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use super::host;
use super::server::{Bells, Client, Doorbell, DoorbellServer, Event};
use crate::{MemberId, Result, Zone};

/// Keeps a server's clients. It is called on the server's thread.
pub trait Store: Send {
    /// Ids of peers below `next` have been used; `None`: all have. Called before an id is told to anybody: a QEMU that sees one come back aborts.
    fn next_peer(&mut self, next: Option<u16>);

    /// A client has been told all that it must know. Its connection and its doorbell's vectors are to be kept.
    fn joined(&mut self, client: &Kept, fds: &[BorrowedFd<'_>]);

    /// A client has gone, and the others have been told so.
    fn left(&mut self, peer: u16);
}

/// Keeps nothing: the doorbells of a zone whose server ends are not served any more.
#[derive(Debug)]
pub struct NoStore;

impl Store for NoStore {
    fn next_peer(&mut self, _: Option<u16>) {}
    fn joined(&mut self, _: &Kept, _: &[BorrowedFd<'_>]) {}
    fn left(&mut self, _: u16) {}
}

/// A client that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Its ivshmem peer id.
    pub peer: u16,
    /// The slot that the doorbell belongs to.
    pub member: MemberId,
}

impl DoorbellServer {
    /// Goes on as a server that has died, with its clients: the descriptors of each are as [`Store::joined`] got them. Who has gone meanwhile is found now.
    /// What the server had not told a client yet is told again.
    ///
    /// # Errors
    /// When there is no thread for it, or no door for processes of the host.
    pub fn resume(
        zone: Arc<Zone>,
        kept: Vec<(Kept, Vec<OwnedFd>)>,
        next_peer: Option<u16>,
        store: Box<dyn Store>,
    ) -> Result<(DoorbellServer, Receiver<Event>)> {
        let hosts = host::listen(zone.uuid())?;
        let (mut bells, mut clients) = (BTreeMap::new(), BTreeMap::new());
        for (Kept { peer, member }, fds) in kept {
            let mut fds = fds.into_iter();
            let Some(stream) = fds.next() else { continue };
            let vectors: Vec<Arc<OwnedFd>> = fds.map(Arc::new).collect();
            bells.insert(peer, Doorbell { member, vectors });
            let stream = UnixStream::from(stream).into();
            clients.insert(peer, Client { member, stream, backlog: VecDeque::new(), is_kept: true });
        }
        for (own, client) in &mut clients {
            // A client drops what it knows already.
            let others = bells.iter().filter(|(peer, _)| *peer != own);
            let messages = others
                .flat_map(|(peer, bell)| bell.vectors.iter().map(|v| (i64::from(*peer), Some(v.clone()))));
            client.backlog.extend(messages);
        }
        let bells: Bells = Arc::new(Mutex::new(bells));
        Self::begin(zone, hosts, bells, store, |work| (work.clients, work.next_peer) = (clients, next_peer))
    }
}

/// The descriptors of a client, its connection first.
pub(super) fn descriptors<'a>(stream: &'a UnixStream, vectors: &'a [Arc<OwnedFd>]) -> Vec<BorrowedFd<'a>> {
    std::iter::once(stream.as_fd()).chain(vectors.iter().map(|vector| vector.as_fd())).collect()
}
