// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The connection to the node in a VM: frames over the input and output of a program that the guest agent runs.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use tombolo_mpi_node::frame::{Decoder, Frame};
use tombolo_vm::commands::carried::Carried;
use tombolo_vm::commands::client;
use tombolo_vm::compose::Project;
use tombolo_vm::project::control::{Event, Feed};
use tombolo_vm::project::peer::{self, Peer};

/// The program that runs in each VM of a job.
pub const NODE: Carried =
    Carried { name: "tombolo-mpi", bytes: include_bytes!(concat!(env!("OUT_DIR"), "/node")) };
/// The longest text that a node's error output is kept of.
const WORDS: usize = 4096;

/// What is heard of a node.
#[derive(Debug)]
pub enum Heard {
    /// It says something.
    Frame(Frame),
    /// It has ended, or its VM has; the text says why where that is known.
    Ended(Option<String>),
}

/// The node of one VM.
#[derive(Debug)]
pub struct Node {
    socket: Arc<UnixStream>,
}

impl Node {
    /// Starts the node in a VM. What is heard of it goes to `tell`.
    ///
    /// # Errors
    /// The project is not up, or no thread can be had.
    pub fn start(project: &Project, vm: &str, tell: impl Fn(Heard) + Send + 'static) -> anyhow::Result<Node> {
        let mut peer = client::living(project, &NODE.request(vm, &[], Vec::new()))?;
        let socket = peer.socket();
        tombolo_vm::thread::start("mpi-node", move || {
            let ended = hear(&mut peer, &tell);
            tell(Heard::Ended(ended.unwrap_or_else(|e| Some(format!("{e:#}")))));
        })?;
        NODE.send(&socket).ok();
        Ok(Node { socket })
    }

    /// Sends a frame. A node that has gone is heard of otherwise.
    pub fn send(&self, frame: &Frame) {
        let _gone = peer::send(&self.socket, &Feed::Input(BASE64.encode(frame.encode())));
    }
}

/// Passes on what a node says, until it ends: why, where that is known.
fn hear(peer: &mut Peer, tell: &impl Fn(Heard)) -> anyhow::Result<Option<String>> {
    let mut decoder = Decoder::default();
    let mut words = Vec::new();
    loop {
        match peer.receive::<Event>()? {
            Some(Event::Out { data }) => {
                decoder.push(&BASE64.decode(data)?);
                while let Some(frame) = decoder.next().context("the VM's node can't be understood")? {
                    tell(Heard::Frame(frame));
                }
            }
            Some(Event::Err { data }) => {
                words.extend(BASE64.decode(data)?);
                words.truncate(WORDS);
            }
            Some(Event::Failed { message }) => return Ok(Some(message)),
            Some(Event::Done) | None => break,
            Some(_) => {}
        }
    }
    Ok(Some(plain(&words)).filter(|said| !said.is_empty()))
}

/// Runs the node's program in a VM with these arguments to its end: its output.
///
/// # Errors
/// The project is not up, or the program fails.
pub fn output(project: &Project, vm: &str, arguments: &[String]) -> anyhow::Result<String> {
    let mut peer = client::living(project, &NODE.request(vm, arguments, Vec::new()))?;
    NODE.send_meanwhile(peer.socket())?;
    let (mut out, mut words, mut code) = (Vec::new(), Vec::new(), None);
    loop {
        match peer.receive::<Event>()? {
            Some(Event::Out { data }) => out.extend(BASE64.decode(data)?),
            Some(Event::Err { data }) => words.extend(BASE64.decode(data)?),
            Some(Event::Exit { code: ended }) => code = Some(ended),
            Some(Event::Failed { message }) => anyhow::bail!("{message}"),
            Some(Event::Done) | None => break,
            Some(_) => {}
        }
    }
    anyhow::ensure!(code == Some(0), "in the VM '{vm}': {}", plain(&words));
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// What a guest has written, without what would change a terminal.
fn plain(bytes: &[u8]) -> String {
    let said = String::from_utf8_lossy(bytes);
    said.trim().chars().filter(|c| !c.is_control() || *c == '\n').collect()
}
