// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A doorbell server that goes on in the next program of its process: the connections of its clients, and who is whom.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use super::host;
use super::server::{Bells, Client, Doorbell, DoorbellServer, Event};
use crate::door::DoorState;
use crate::keep::{Keep, Kept};
use crate::{MemberId, Result, Zone};

/// The state of the server that goes over to the next program.
#[derive(Debug, Serialize, Deserialize)]
pub struct ServerState {
    pub(super) hosts: DoorState,
    pub(super) unnamed: Vec<Kept>,
    pub(super) bells: BTreeMap<u16, Vec<Kept>>,
    pub(super) clients: Vec<ClientState>,
    pub(super) next_peer: Option<u16>,
}

/// A client's connection.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ClientState {
    pub peer: u16,
    pub member: MemberId,
    pub stream: Kept,
    /// Messages that were not sent to it yet.
    pub backlog: Vec<(i64, Option<Kept>)>,
}

/// A client that has no connection any more, as a descriptor of it could not be taken over.
#[derive(Debug)]
pub struct Lost {
    /// Whose doorbell it was.
    pub member: MemberId,
    /// The system's words.
    pub why: io::Error,
}

impl DoorbellServer {
    /// Goes on as the server that the program before has left. A client whose connection can't be taken over counts as gone, and the others are
    /// told so; they are served on.
    ///
    /// # Errors
    /// When there is no thread for it, or neither the door for processes of the host nor a new one can be had.
    pub fn resume(
        zone: Arc<Zone>,
        state: ServerState,
    ) -> Result<(DoorbellServer, Receiver<Event>, Vec<Lost>)> {
        let hosts = state.hosts.resume().or_else(|_| host::listen(zone.uuid()))?;
        let (mut bells, mut clients, mut lost) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let mut vectors = state.bells;
        for client in state.clients {
            let (peer, member) = (client.peer, client.member);
            match client.resume(vectors.remove(&peer).unwrap_or_default()) {
                Ok((bell, client)) => {
                    bells.insert(peer, bell);
                    clients.insert(peer, client);
                }
                Err(why) => lost.push((peer, Lost { member, why })),
            }
        }
        // One that can't be taken over connects again.
        let unnamed =
            state.unnamed.into_iter().filter_map(|stream| Some(UnixStream::from(stream.take().ok()?).into()));
        let unnamed = unnamed.collect();
        let bells: Bells = Arc::new(Mutex::new(bells));
        let (server, events) = Self::begin(zone, hosts, bells, |work| {
            (work.clients, work.unnamed, work.next_peer) = (clients, unnamed, state.next_peer);
            for (peer, Lost { member, why }) in &lost {
                let why = format!("its connection could not be taken over: {why}");
                // Who has not read for too long is found when more is sent.
                work.announce_end(*member, *peer, why);
            }
        })?;
        Ok((server, events, lost.into_iter().map(|(_, lost)| lost).collect()))
    }
}

impl ClientState {
    /// The client with its doorbell.
    ///
    /// # Errors
    /// When a descriptor is not open.
    fn resume(self, vectors: Vec<Kept>) -> io::Result<(Doorbell, Client)> {
        let take = |kept: Kept| kept.take().map(Arc::new);
        let ClientState { member, stream, backlog, .. } = self;
        let vectors = vectors.into_iter().map(take).collect::<io::Result<Vec<_>>>()?;
        let backlog = backlog.into_iter().map(|(value, fd)| Ok((value, fd.map(take).transpose()?)));
        let backlog = backlog.collect::<io::Result<VecDeque<_>>>()?;
        Ok((
            Doorbell { member, vectors },
            Client { member, stream: UnixStream::from(stream.take()?).into(), backlog },
        ))
    }
}

/// A server that stands still until this is dropped.
#[derive(Debug)]
pub struct Paused {
    /// The server goes on when the channel's end is seen.
    pub(super) _resume: Sender<()>,
    /// Copies of descriptors that clients have not been sent yet.
    pub(super) _copies: Vec<OwnedFd>,
}

/// The thread's answer to a pause.
pub(super) struct Taken {
    pub state: ServerState,
    pub keep: Keep,
    pub copies: Vec<OwnedFd>,
}
