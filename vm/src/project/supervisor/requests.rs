// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of clients: each is read, carried out and answered on a thread of its own.

use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::reception::Connection;
use super::{Supervisor, turn};
use crate::guest::exec::Exec;
use crate::log;
use crate::machine::Machine;
use crate::project::control::{Event, Request, Stage};
use crate::project::journal::{self, Since};
use crate::project::peer::{self, Peer};
use crate::project::session;

/// The pause between two looks whether new requests are held.
const HELD: Duration = Duration::from_millis(10);

/// Time for a client to send its request.
const REQUEST: Duration = Duration::from_secs(5);
/// Time for a client to read an event.
const READ: Duration = Duration::from_secs(2);
/// Time that a request waits for its turn before the client is told.
pub(super) const SILENT: Duration = Duration::from_secs(1);
/// The pause between two checks whether the client of a waiting request has gone.
pub(super) const LOOK: Duration = Duration::from_millis(200);
/// Bytes of earlier output that a new reader of the console gets.
const RECENT: usize = 2048;
/// The answer to a request that needs descriptors, from a process that has none.
const NO_DESCRIPTOR: &str = "it has no file descriptor left; 'ps' and 'down' still work. Close consoles and commands, or take the project \
                            down and start it with a higher limit (ulimit -n)";

/// Sends the events of one request. A client that has gone is no error here: the end of its connection cancels the request.
pub(super) struct Reporter {
    /// `None`: the client has gone, or does not read.
    socket: Mutex<Option<Arc<UnixStream>>>,
    /// The VM whose command's output waits for its reader.
    machine: OnceLock<Arc<Machine>>,
}

impl Reporter {
    pub(super) fn of(peer: &Peer, request: &Request) -> Reporter {
        let socket = peer.socket();
        let limit = if matches!(request, Request::Exec { .. }) { LOOK } else { READ };
        // It fails for a limit of zero only.
        let _never = socket.set_write_timeout(Some(limit));
        Reporter { socket: Mutex::new(Some(socket)), machine: OnceLock::new() }
    }

    /// From here on events wait for their reader as long as this VM runs: they are the output of a command in it.
    fn wait_while_runs(&self, machine: &Arc<Machine>) {
        let _only_once = self.machine.set(machine.clone());
    }

    /// Sends an event. A client that is stopped is waited for at most for [`READ`], or until so long after the VM's end.
    pub(super) fn send(&self, event: &Event) {
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let mut late = None;
        let mut goes_on = || {
            let runs = self.machine.get().is_some_and(|machine| !machine.has_ended());
            runs || late.get_or_insert_with(Instant::now).elapsed() < READ
        };
        if socket.as_ref().is_some_and(|socket| peer::send_while(socket, event, &mut goes_on).is_err()) {
            // A part of the message may have been sent: nothing can follow it.
            if let Some(socket) = socket.take() {
                let _gone_already = socket.shutdown(std::net::Shutdown::Both);
            }
        }
    }

    pub(super) fn stage(&self, vm: &str, stage: Stage, detail: &str) {
        self.send(&Event::Stage { vm: vm.to_owned(), stage, detail: detail.to_owned() });
    }
}

/// The last message to the client of a request that succeeded.
#[derive(Debug)]
enum Sequel {
    Answer,
    /// The connection was a console.
    Nothing,
}

/// Does the work of a request. A panic in it is the request's error, and the project goes on; its words are in `dir`.
///
/// # Errors
/// Those of the work.
fn unpanicked<T>(dir: &Path, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        anyhow::bail!(
            "a fault of tombolo ended this command, and the project runs on; {} has the words for a report",
            log::panics(dir).display()
        )
    })
}

impl Supervisor {
    /// Serves the command that started this process.
    pub(super) fn begin(self: &Arc<Self>, mut peer: Peer, number: u64) {
        match peer.receive::<Request>() {
            Ok(Some(request)) => {
                let reporter = Reporter::of(&peer, &request);
                self.lock().requests.insert(number, request.what());
                self.serve(request, peer, reporter, number);
            }
            // The command has ended.
            Ok(None) | Err(_) => {
                if self.leave(number) {
                    super::end();
                }
            }
        }
    }

    /// Serves a command that has connected to this process.
    pub(super) fn admit(self: &Arc<Self>, connection: Connection) {
        let mut peer = Peer::new(connection.socket);
        peer.set_end(Some(Instant::now() + REQUEST));
        let request = peer.receive::<Request>();
        peer.set_end(None);
        let request = match request {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(e) => {
                let _ = peer.send(&Event::Failed { message: format!("{e:#}") });
                return;
            }
        };
        let reporter = Reporter::of(&peer, &request);
        if connection.scarce && !matches!(request, Request::Ps | Request::Down { .. }) {
            reporter.send(&Event::Failed { message: NO_DESCRIPTOR.into() });
            return;
        }
        match request {
            Request::Attend => {
                reporter.send(&Event::Heard);
                // Nothing is said on it: what comes is its end.
                let _end = peer.receive::<Request>();
                return;
            }
            Request::Events { since } => {
                reporter.send(&Event::Heard);
                return tell(&peer.socket(), since, &reporter);
            }
            _ => {}
        }
        // One whose connection ends without 'heard' starts another supervisor.
        if let Some(number) = self.enter_unless_withdrawn(&request, &peer.socket()) {
            self.serve(request, peer, reporter, number);
        }
    }

    /// Carries out a request, and sends its result.
    fn serve(self: &Arc<Self>, request: Request, peer: Peer, reporter: Reporter, number: u64) {
        reporter.send(&Event::Heard);
        let result = unpanicked(self.dir.path(), || self.carry_out(request, peer, &reporter));
        // A client that has its answer must find no trace of a supervisor that has nothing left to do.
        let idle = self.leave(number);
        match result {
            Ok(Sequel::Answer) => reporter.send(&Event::Done),
            Ok(Sequel::Nothing) => {}
            Err(e) => reporter.send(&Event::Failed { message: format!("{e:#}") }),
        }
        if idle {
            super::end();
        }
    }

    /// Does the work of a request.
    fn carry_out(
        self: &Arc<Self>,
        request: Request,
        peer: Peer,
        reporter: &Reporter,
    ) -> anyhow::Result<Sequel> {
        let done = match request {
            Request::Up { project, wish, wait } => self.up(*project, &wish, wait, peer, reporter),
            Request::Plan { project, wish } => {
                reporter.send(&self.planned(*project, &wish));
                Ok(())
            }
            Request::Down { vms } => self.down(&vms, reporter),
            Request::Ps => {
                reporter.send(&Event::Status(Box::new(self.status())));
                Ok(())
            }
            Request::Exec { vm, argv, env, dir, input, terminal } => self.running(&vm).and_then(|machine| {
                reporter.wait_while_runs(&machine);
                let exec = Exec { argv, env, dir };
                let report = |event: &Event| reporter.send(event);
                match terminal {
                    Some(terminal) => session::exec_on_terminal(&machine, &exec, &terminal, peer, &report),
                    None => session::exec(&machine, &exec, input, peer, &report),
                }
            }),
            Request::Console { vm } => {
                session::watch(&*self.machine(&vm)?, peer, RECENT)?;
                return Ok(Sequel::Nothing);
            }
            Request::Leave { seconds } => self.leave_all(seconds, &peer, reporter),
            Request::Attend | Request::Events { .. } => Ok(()),
            Request::ZoneAttach { zone, vm, rights, mount } => {
                self.attach(&zone, &vm, rights, mount.as_deref(), &peer.socket(), reporter)
            }
            Request::ZoneDetach { zone, vm } => self.detach(&zone, &vm, &peer.socket(), reporter),
        };
        done.map(|()| Sequel::Answer)
    }

    /// Counts a request that begins, once new requests are held no more: its number. `ps` and `down` are never held. `None`: this supervisor is about to end, or
    /// the client has gone, as one does whose request stays unheard for too long.
    fn enter_unless_withdrawn(&self, request: &Request, client: &UnixStream) -> Option<u64> {
        let waits = !matches!(request, Request::Ps | Request::Down { .. });
        while !session::has_gone(client) {
            let mut inner = self.lock();
            if !waits || !inner.held {
                return (!inner.withdrawn).then(|| inner.enter(request.what()));
            }
            drop(inner);
            std::thread::sleep(HELD);
        }
        None
    }

    /// Counts a request that has ended. Returns whether the caller must end this process: a supervisor without requests and VMs has nothing
    /// to do. It has then closed its zones and its socket.
    pub(super) fn leave(&self, number: u64) -> bool {
        let mut inner = self.lock();
        inner.requests.remove(&number);
        inner.withdrawn |= inner.requests.is_empty() && inner.machines.is_empty();
        if !inner.withdrawn {
            return false;
        }
        let beside = inner.clear();
        drop(inner);
        beside.end();
        self.end_shims();
        self.dir.withdraw(self.endpoint().lock());
        true
    }

    /// Waits for the turn to start and stop VMs.
    ///
    /// # Errors
    /// The client has gone.
    pub(super) fn turn(&self, client: &UnixStream, reporter: &Reporter) -> anyhow::Result<turn::Turn<'_>> {
        if let Some(turn) = self.changing.take_within(turn::Of::All, SILENT) {
            return Ok(turn);
        }
        let text = "another command is starting or stopping VMs; this one waits for its end";
        reporter.send(&Event::Note { text: text.into() });
        loop {
            if let Some(turn) = self.changing.take_within(turn::Of::All, LOOK) {
                return Ok(turn);
            }
            anyhow::ensure!(
                !session::has_gone(client),
                "cancelled while it waited for another command; nothing was begun"
            );
        }
    }
}

/// Sends what happens until the client goes, or this process ends.
fn tell(socket: &UnixStream, since: Option<f64>, reporter: &Reporter) {
    let time = |seconds| {
        let since = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        SystemTime::UNIX_EPOCH.checked_add(since).unwrap_or(SystemTime::UNIX_EPOCH)
    };
    let since = since.map_or(Since::Now, |seconds| Since::Time(time(seconds)));
    journal::follow(since, &|entry| {
        if let Some(entry) = entry {
            reporter.send(&Event::Happened(entry.clone()));
        }
        !session::has_gone(socket)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_panics_has_an_error_that_names_the_place_of_the_words() {
        let done = unpanicked::<()>(Path::new("/run/p"), || panic!("on purpose"));
        assert!(done.unwrap_err().to_string().contains("; /run/p/supervisor.panic has the words"));
        assert_eq!(unpanicked(Path::new("/run/p"), || Ok(3)).unwrap(), 3);
    }
}
