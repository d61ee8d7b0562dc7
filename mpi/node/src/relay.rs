// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The launcher's TCP ports, for ranks of other VMs: a rank's library connects to a port of its own VM, and the first VM's node connects to the launcher.

use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::Sender;
use std::thread;

use crate::job::Event;
use crate::stream::{self, Key};

/// Bits of a connection's number below that of its node.
const NUMBER: u32 = 16;

/// The connections of one node.
#[derive(Debug, Default)]
pub struct Relay {
    /// The port here that stands for an address in the first VM.
    ports: HashMap<String, u16>,
    connections: HashMap<u32, Connection>,
    next: u32,
}

/// The two directions of a connection.
#[derive(Debug)]
struct Connection {
    ask: Sender<()>,
    /// `None`: the other side sends no more.
    write: Option<Sender<Vec<u8>>>,
    reads: bool,
}

/// The node whose rank has opened a connection.
pub fn node_of(connection: u32) -> u32 {
    connection >> NUMBER
}

impl Relay {
    /// The port of this VM that stands for `address` in the first one.
    ///
    /// # Errors
    /// No port can be had.
    pub fn port(&mut self, address: &str, events: &Sender<Event>) -> io::Result<u16> {
        if let Some(port) = self.ports.get(address) {
            return Ok(*port);
        }
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let (to, events) = (address.to_owned(), events.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if events.send(Event::Accepted(stream, to.clone())).is_err() {
                    return;
                }
            }
        });
        self.ports.insert(address.to_owned(), port);
        Ok(port)
    }

    /// Takes up a connection of node `node` that a rank has opened: its number.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn accept(&mut self, node: u32, stream: TcpStream, events: &Sender<Event>) -> io::Result<u32> {
        self.next = (self.next + 1) & ((1 << NUMBER) - 1);
        let number = node << NUMBER | self.next;
        self.add(number, stream, events)?;
        Ok(number)
    }

    /// Connects to the launcher for a connection of another node.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(&mut self, number: u32, address: &str, events: &Sender<Event>) -> io::Result<()> {
        self.add(number, TcpStream::connect(address)?, events)
    }

    fn add(&mut self, number: u32, stream: TcpStream, events: &Sender<Event>) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let (reader, writer) = (stream.try_clone()?, stream);
        let key = Key::Connection(number);
        let tell = |events: &Sender<Event>| {
            let events = events.clone();
            move |news| drop(events.send(Event::Stream(key, news)))
        };
        let ask = stream::read(reader, tell(events));
        let shut = |stream: TcpStream| drop(stream.shutdown(Shutdown::Write));
        let write = Some(stream::write(writer, shut, tell(events)));
        self.connections.insert(number, Connection { ask, write, reads: true });
        Ok(())
    }

    /// Writes bytes that the other side has sent; none are the end of that direction.
    pub fn write(&mut self, number: u32, bytes: Vec<u8>) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let over = bytes.is_empty();
        if let Some(write) = &connection.write {
            let _ended = write.send(bytes);
        }
        if over {
            connection.write = None;
            self.forget(number);
        }
    }

    /// The other side has passed on what was read last.
    pub fn sent(&mut self, number: u32) {
        if let Some(connection) = self.connections.get(&number) {
            let _ended = connection.ask.send(());
        }
    }

    /// Nothing more will be read.
    pub fn read_all(&mut self, number: u32) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.reads = false;
            self.forget(number);
        }
    }

    /// Forgets a connection that has ended in both directions.
    fn forget(&mut self, number: u32) {
        if self.connections.get(&number).is_some_and(|c| c.write.is_none() && !c.reads) {
            self.connections.remove(&number);
        }
    }
}

/// Replaces the launcher's addresses in a variable of a rank by what `port` says stands for them: hydra's PMI_PORT, and each `tcp4://` in a variable of PMIx.
///
/// # Errors
/// Those of `port`.
pub fn redirect(variable: &[u8], port: &mut dyn FnMut(&str) -> io::Result<u16>) -> io::Result<Vec<u8>> {
    let Ok(text) = std::str::from_utf8(variable) else { return Ok(variable.to_vec()) };
    let Some((name, value)) = text.split_once('=') else { return Ok(variable.to_vec()) };
    let mut replaced = String::new();
    if name == "PMI_PORT" {
        let Some(number) = value.rsplit(':').next().filter(|number| number.parse::<u16>().is_ok()) else {
            return Ok(variable.to_vec());
        };
        // Hydra listens on all addresses, and its own host name may have none.
        replaced = format!("127.0.0.1:{}", port(&format!("127.0.0.1:{number}"))?);
    } else if name.starts_with("PMIX_") {
        const SCHEME: &str = "tcp4://";
        let mut rest = value;
        while let Some((before, after)) = rest.split_once(SCHEME) {
            let end =
                after.find(|c: char| !c.is_ascii_digit() && c != '.' && c != ':').unwrap_or(after.len());
            let (address, more) = after.split_at(end);
            replaced += &format!("{before}{SCHEME}127.0.0.1:{}", port(address)?);
            rest = more;
        }
        replaced += rest;
    } else {
        return Ok(variable.to_vec());
    }
    Ok(format!("{name}={replaced}").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launchers_addresses_become_ports_of_the_ranks_own_vm() {
        let mut asked = Vec::new();
        let mut changed = |variable: &str| {
            let mut port = |address: &str| {
                asked.push(address.to_owned());
                Ok(7)
            };
            String::from_utf8(redirect(variable.as_bytes(), &mut port).unwrap()).unwrap()
        };
        assert_eq!(changed("PMI_PORT=vm-a:40001"), "PMI_PORT=127.0.0.1:7");
        assert_eq!(
            changed("PMIX_SERVER_URI2=a.0;tcp4://127.0.0.1:38415"),
            "PMIX_SERVER_URI2=a.0;tcp4://127.0.0.1:7"
        );
        assert_eq!(
            changed("PMIX_SERVER_URI4=x;tcp4://10.0.2.15:1;y"),
            "PMIX_SERVER_URI4=x;tcp4://127.0.0.1:7;y"
        );
        assert_eq!(changed("HTTP=tcp4://1.2.3.4:80"), "HTTP=tcp4://1.2.3.4:80");
        assert_eq!(changed("PMIX_RANK=1"), "PMIX_RANK=1");
        assert_eq!(asked, ["127.0.0.1:40001", "127.0.0.1:38415", "10.0.2.15:1"]);
    }
}
