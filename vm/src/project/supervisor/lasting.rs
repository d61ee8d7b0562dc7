// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections that last until their client closes them: clients that wait for the project's end, read events, or use a console. Other requests
//! don't wait for them, and after an upgrade the new program serves them.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tombolo_zone::keep::{Keep, Kept};

use super::Reporter;
use crate::machine::Machine;
use crate::project::barrier::{BACKGROUND, Inside};
use crate::project::control::{Event, Request};
use crate::project::journal::{self, Since};
use crate::project::peer::Peer;
use crate::project::session;

/// The connections that last.
#[derive(Debug, Default)]
pub(super) struct Lasting {
    all: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    entered: u64,
    connections: BTreeMap<u64, (Arc<UnixStream>, What)>,
}

/// The purpose of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum What {
    /// Its end tells of the supervisor's.
    Attend,
    /// State changes; the number of the next one.
    Events(u64),
    /// The console of this VM.
    Console(String),
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Attend => f.write_str("an 'up --attach'"),
            What::Events(_) => f.write_str("an 'events'"),
            What::Console(vm) => write!(f, "a 'console {vm}'"),
        }
    }
}

impl Lasting {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, socket: Arc<UnixStream>, what: What) -> u64 {
        let mut table = self.lock();
        table.entered += 1;
        let number = table.entered;
        table.connections.insert(number, (socket, what));
        number
    }

    fn remove(&self, number: u64) {
        self.lock().connections.remove(&number);
    }

    /// Keeps the connection until the client goes, or this process ends.
    pub(super) fn attend(&self, mut peer: Peer, inside: Inside) {
        let number = self.add(peer.socket(), What::Attend);
        drop(inside);
        // Nothing is said on it: what comes is its end.
        let _end = peer.receive::<Request>();
        self.remove(number);
    }

    /// Sends what happens until the client goes, or this process ends.
    pub(super) fn tell(&self, socket: &Arc<UnixStream>, since: Since, reporter: &Reporter, inside: Inside) {
        let next = journal::number_of(since);
        let number = self.add(socket.clone(), What::Events(next));
        drop(inside);
        journal::follow(Since::Number(next), &|entry| {
            let _inside = BACKGROUND.enter("an event for a client");
            if let Some((entry, next)) = entry {
                reporter.send(&Event::Happened(entry.clone()));
                if let Some((_, what)) = self.lock().connections.get_mut(&number) {
                    *what = What::Events(next);
                }
            }
            !session::has_gone(socket)
        });
        self.remove(number);
    }

    /// Types what the client of a console sends, until either side ends.
    pub(super) fn type_all(&self, machine: &Machine, socket: &Arc<UnixStream>, inside: Option<Inside>) {
        let number = self.add(socket.clone(), What::Console(machine.name().to_owned()));
        drop(inside);
        if let Err(e) = session::type_all(machine, socket) {
            crate::say!("the console of '{}': {e:#}", machine.name());
        }
        self.remove(number);
    }

    /// Notes the connections for the next program of this process. The caller has closed `BACKGROUND`.
    pub(super) fn hand_over(&self, keep: &mut Keep) -> Vec<(Kept, What)> {
        let table = self.lock();
        table.connections.values().map(|(socket, what)| (keep.add(&**socket), what.clone())).collect()
    }
}

/// The first event for a client that has named a time, in seconds since 1970.
pub(super) fn since(seconds: Option<f64>) -> Since {
    let time = |seconds| {
        let since = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        SystemTime::UNIX_EPOCH.checked_add(since).unwrap_or(SystemTime::UNIX_EPOCH)
    };
    seconds.map_or(Since::Now, |seconds| Since::Time(time(seconds)))
}
