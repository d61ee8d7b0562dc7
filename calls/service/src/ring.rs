// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The way that is everywhere: a request and its answer are records of a [`Link`]; the server's process executes the call.
//!
//! A request is `call, 0, a, b, c`, an answer `status, 0, result`, all little endian: 32 bits each for the first two, then 64.

use crate::loaded::Loaded;
use crate::{Error, Service, Way, check_name};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tombolo_calls::hello::{Geometry, Hello};
use tombolo_calls::spin::Spin;
use tombolo_calls::{Link, Window, process, send, stream};

/// The window of a client and its rings.
pub const GEOMETRY: Geometry = Geometry { ring: 4096, window: crate::vmfunc::WINDOW };
/// How long a side polls before it sleeps.
const POLL: Duration = Duration::from_micros(20);
/// How long a client may take to say who it is.
const GREETING: Duration = Duration::from_secs(5);

const DONE: u32 = 0;
const NO_SUCH_CALL: u32 = 1;

fn hello(name: &str) -> Hello {
    let client = format!("process {}", std::process::id());
    Hello { api: format!("service {name}"), identity: *b"tombolo-service1", name: client }
}

/// A client's side.
pub struct Client {
    link: Link,
    answer: Vec<u8>,
}

impl Client {
    /// Connects to a server on this machine.
    pub fn connect(socket: &Path, name: &str) -> Result<Client, Error> {
        Ok(Client::over(process::connect(socket, &hello(name))?))
    }

    /// The client's side of a link to a server.
    pub fn over(link: Link) -> Client {
        Client { link, answer: Vec::new() }
    }
}

fn field<const N: usize>(record: &[u8], at: usize) -> Result<[u8; N], tombolo_calls::Error> {
    let bytes = record.get(at..at + N).and_then(|b| b.try_into().ok());
    bytes.ok_or(tombolo_calls::Error::Broken("a record of another length"))
}

/// Receives a record: polls a little, then sleeps.
fn receive(link: &mut Link, record: &mut Vec<u8>) -> Result<(), tombolo_calls::Error> {
    let mut spin = Spin::new(POLL);
    loop {
        if link.rx.try_recv(record)? {
            return Ok(());
        }
        if !spin.turn() {
            if link.rx.arm()? {
                link.bell.wait()?;
            }
            link.rx.disarm();
        }
    }
}

fn gone(e: tombolo_calls::Error) -> Error {
    if matches!(e, tombolo_calls::Error::Closed) { Error::Gone } else { Error::Ring(e) }
}

impl Service for Client {
    fn call(&mut self, call: u32, arguments: [u64; 3]) -> Result<u64, Error> {
        let [a, b, c] = arguments.map(u64::to_le_bytes);
        send(&mut *self.link.tx, &*self.link.room, &[&call.to_le_bytes(), &[0; 4], &a, &b, &c])
            .map_err(gone)?;
        self.link.tx.publish().map_err(gone)?;
        receive(&mut self.link, &mut self.answer).map_err(gone)?;
        match u32::from_le_bytes(field(&self.answer, 0)?) {
            DONE => Ok(u64::from_le_bytes(field(&self.answer, 8)?)),
            NO_SUCH_CALL => Err(Error::NoSuchCall(call)),
            _ => Err(Error::Ring(tombolo_calls::Error::Broken("an answer of an unknown kind"))),
        }
    }

    fn window(&self) -> &Window {
        &self.link.window
    }

    fn way(&self) -> Way {
        Way::Ring
    }
}

/// Executes a client's requests until it goes.
pub fn serve_link(mut link: Link, service: &Loaded, client: u64) -> Result<(), Error> {
    let window = link.window.clone();
    let mut record = Vec::new();
    loop {
        match receive(&mut link, &mut record) {
            Err(tombolo_calls::Error::Closed) => return Ok(()),
            other => other?,
        }
        let call = u32::from_le_bytes(field(&record, 0)?);
        let mut arguments = [0; 3];
        for (i, argument) in arguments.iter_mut().enumerate() {
            *argument = u64::from_le_bytes(field(&record, 8 + 8 * i)?);
        }
        let (status, result) = match service.call(client, &window, call, arguments) {
            Ok(result) => (DONE, result),
            Err(Error::NoSuchCall(_)) => (NO_SUCH_CALL, 0),
            Err(e) => return Err(e),
        };
        send(&mut *link.tx, &*link.room, &[&status.to_le_bytes(), &[0; 4], &result.to_le_bytes()])?;
        link.tx.publish()?;
    }
}

/// Serves clients of this machine at a listening socket, each by a thread of its own, until accepting fails.
pub fn serve(listener: &UnixListener, name: &str, service: &Arc<Loaded>) -> Result<(), Error> {
    static CLIENTS: AtomicU64 = AtomicU64::new(1);
    check_name(name)?;
    loop {
        let (socket, _) = listener.accept().map_err(|e| Error::Io("accepting a client".into(), e))?;
        let (service, name) = (service.clone(), name.to_owned());
        std::thread::spawn(move || {
            let client = CLIENTS.fetch_add(1, Ordering::Relaxed);
            if let Err(e) = greet(socket, &name).and_then(|link| serve_link(link, &service, client)) {
                tombolo_calls::say!("tombolo-service: client {client} of {name}: {e}");
            }
        });
    }
}

fn greet(socket: std::os::unix::net::UnixStream, name: &str) -> Result<Link, Error> {
    let ours = hello(name);
    let fd = std::os::fd::OwnedFd::from(socket);
    let fits = stream::hello(&fd, GREETING).and_then(|hello| hello.fits(&ours.api, ours.identity));
    let socket = std::os::unix::net::UnixStream::from(fd);
    if let Err(e) = fits {
        let _told = process::refuse(&socket, &e.to_string());
        return Err(e.into());
    }
    Ok(process::accept(socket, GEOMETRY)?)
}
