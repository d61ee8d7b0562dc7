// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A doorbell server that goes on in the next program of its process: the connections of its clients, and who is whom.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

use serde::{Deserialize, Serialize};

use crate::MemberId;
use crate::door::DoorState;
use crate::keep::{Keep, Kept};

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
