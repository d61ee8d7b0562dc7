// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the commands and the supervisor say to each other: one JSON object per line over a Unix socket. A connection
//! carries one request; its answer is a row of events that ends with `done` or `failed`. Closing it cancels the request.

use std::io::{BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::accelspec::Api;
use crate::compose::{Project, Rights};
use crate::state::StateDir;

/// What a command asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Start what is missing.
    Up {
        /// The compose file.
        project: Box<Project>,
        /// These VMs only; empty: all.
        vms: Vec<String>,
    },
    /// Stop VMs; all of them and the supervisor where the list is empty.
    Down {
        /// Names.
        vms: Vec<String>,
    },
    /// What runs.
    Ps,
    /// Run a command in a guest; [`Feed`] lines follow.
    Exec {
        /// The VM.
        vm: String,
        /// Program and arguments.
        argv: Vec<String>,
        /// "NAME=VALUE".
        env: Vec<String>,
        /// Working folder.
        dir: Option<String>,
        /// Whether input follows.
        input: bool,
    },
    /// The serial console: after `done` the connection is the console itself.
    Console {
        /// The VM.
        vm: String,
    },
    /// Make a running VM a member of a zone.
    ZoneAttach {
        /// The zone.
        zone: String,
        /// The VM.
        vm: String,
        /// Its rights.
        rights: Rights,
        /// Where to mount the zone's file system.
        mount: Option<String>,
    },
    /// End a VM's membership.
    ZoneDetach {
        /// The zone.
        zone: String,
        /// The VM.
        vm: String,
    },
}

/// What follows an `exec` with input.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feed {
    /// Bytes, base64.
    Input(String),
    /// No more.
    End,
}

/// What the supervisor answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A VM has come to a stage.
    Stage {
        /// The VM.
        vm: String,
        /// Where it is.
        stage: Stage,
        /// More about it.
        detail: String,
    },
    /// Something to tell the user.
    Note {
        /// One sentence.
        text: String,
    },
    /// The answer to `ps`.
    Status(Box<Status>),
    /// Output of a command, base64.
    Out {
        /// The bytes.
        data: String,
    },
    /// Error output of a command, base64.
    Err {
        /// The bytes.
        data: String,
    },
    /// The command's end.
    Exit {
        /// Its code.
        code: i32,
    },
    /// It is done.
    Done,
    /// It is not done, and nothing of it is left behind.
    Failed {
        /// What, where, and what to do.
        message: String,
    },
    /// Another supervisor was faster.
    Taken,
}

/// Stages of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// QEMU is being started.
    Starting,
    /// The guest boots.
    Booting,
    /// The guest is being set up (mounts).
    Preparing,
    /// It is up.
    Up,
    /// It was up before.
    AlreadyUp,
    /// It is being stopped.
    Stopping,
    /// It is stopped.
    Stopped,
    /// It failed.
    Failed,
}

/// The answer to `ps`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// The project.
    pub project: String,
    /// Its compose file.
    pub file: std::path::PathBuf,
    /// The supervisor's process, if the project is up.
    pub supervisor: Option<u32>,
    /// The accelerator and why.
    pub accel: String,
    /// VMs.
    pub vms: Vec<VmStatus>,
    /// Zones.
    pub zones: Vec<ZoneStatus>,
    /// Networks.
    pub networks: Vec<NetStatus>,
    /// Accelerators.
    pub accelerators: Vec<AccelStatus>,
}

impl Status {
    /// Of a project that is not up.
    pub fn down(project: &Project) -> Status {
        Status {
            project: project.name.clone(),
            file: project.file.clone(),
            supervisor: None,
            accel: String::new(),
            vms: Vec::new(),
            zones: Vec::new(),
            networks: Vec::new(),
            accelerators: Vec::new(),
        }
    }
}

/// One VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VmStatus {
    /// Name.
    pub name: String,
    /// "booting", "up", "rebooting", "stopping", "failed: …" or "ended: …".
    pub state: String,
    /// QEMU's process, while it runs.
    pub pid: Option<u32>,
    /// "kvm" or "tcg".
    pub accel: crate::qemu::kvm::Accel,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// Zones it is a member of.
    pub zones: Vec<String>,
    /// Seconds since its start, or since its last reboot.
    pub uptime: f64,
    /// How often the guest has rebooted since 'up'.
    pub reboots: u32,
    /// When it reached what, in seconds from its start.
    pub timeline: Vec<(String, f64)>,
    /// How far its memory is, where it grows.
    #[serde(default)]
    pub growth: Option<tombolo_start::progress::Progress>,
}

/// One zone.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ZoneStatus {
    /// Name.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// "memfd", "hugetlb" or a path.
    pub backing: String,
    /// Its identity.
    pub uuid: String,
    /// Where other processes of this host open its memory.
    pub path: String,
    /// Who is in it: VMs, and processes of the host.
    pub members: Vec<String>,
}

/// One network.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NetStatus {
    /// Name.
    pub name: String,
    /// Where frames go that are for no VM.
    pub uplink: Option<String>,
    /// Addresses of its VMs.
    pub subnet: Option<String>,
    /// Process of its switch; none while that is being started again.
    pub pid: Option<u32>,
    /// How often the switch was started.
    pub starts: u32,
    /// The switch's control socket.
    pub control: std::path::PathBuf,
    /// Who has a port.
    pub ports: Vec<PortStatus>,
}

/// One VM in a network.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PortStatus {
    /// The VM.
    pub vm: String,
    /// Its MAC.
    pub mac: String,
    /// Its address, where that was chosen here.
    pub address: Option<String>,
}

/// One accelerator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AccelStatus {
    /// Name.
    pub name: String,
    /// What programs speak.
    pub api: Api,
    /// "serving" or "starting".
    pub state: String,
    /// Process of its server; none while that is being started again.
    pub pid: Option<u32>,
    /// How often the server was started.
    pub starts: u32,
    /// Who may use it.
    pub vms: Vec<AccelVm>,
    /// What the server itself says, as in `tombolo accel ls`.
    pub server: Option<serde_json::Value>,
}

/// One VM at an accelerator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AccelVm {
    /// The VM.
    pub vm: String,
    /// Processes that use it now.
    pub clients: usize,
    /// Bytes of device memory that they have.
    pub memory: u64,
    /// Objects that they have.
    pub objects: u64,
    /// Whether its guest had the client library when it came up, where somebody looked.
    pub library: Option<bool>,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Peer {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

/// The longest line, in bytes: an exec's chunk in base64 with room to spare.
const LINE_MAX: u64 = 16 << 20;

impl Peer {
    /// Wraps a connected socket.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn new(socket: UnixStream) -> std::io::Result<Peer> {
        Ok(Peer { reader: BufReader::new(socket.try_clone()?), writer: socket })
    }

    /// Connects to the supervisor that lives in `dir`: `None` if none does.
    ///
    /// # Errors
    /// When it lives and can't be reached.
    pub fn connect(dir: &StateDir) -> anyhow::Result<Option<Peer>> {
        let Some(address) = dir.address()? else { return Ok(None) };
        let name = SocketAddr::from_abstract_name(&address.socket)?;
        let socket = match UnixStream::connect_addr(&name) {
            Ok(socket) => socket,
            // It ended between the two lines.
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => return Ok(None),
            Err(e) => {
                return Err(e)
                    .with_context(|| format!("the supervisor (process {}) can't be reached", address.pid));
            }
        };
        check_user(&socket)?;
        Ok(Some(Peer::new(socket)?))
    }

    /// Sends one message.
    ///
    /// # Errors
    /// When the other side is gone.
    pub fn send<T: Serialize>(&mut self, message: &T) -> std::io::Result<()> {
        send(&mut self.writer, message)
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// When it can't be read or understood.
    pub fn receive<T: for<'a> Deserialize<'a>>(&mut self) -> anyhow::Result<Option<T>> {
        let mut line = Vec::new();
        let n = std::io::Read::take(&mut self.reader, LINE_MAX).read_until(b'\n', &mut line)?;
        if n == 0 {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            anyhow::bail!("the other side ended in the middle of a message");
        }
        serde_json::from_slice(&line)
            .map(Some)
            .context("the other side is of another version; take the project down and up again")
    }

    /// The socket for writing, for another thread.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn writer(&self) -> std::io::Result<UnixStream> {
        self.writer.try_clone()
    }

    /// What has been read ahead, and the socket.
    pub fn into_raw(self) -> (Vec<u8>, UnixStream) {
        (self.reader.buffer().to_vec(), self.writer)
    }
}

/// Sends one message over `socket`.
///
/// # Errors
/// When the other side is gone.
pub fn send<T: Serialize>(socket: &mut UnixStream, message: &T) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message).map_err(std::io::Error::other)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Abstract addresses have no permissions: both sides look who the other is.
///
/// # Errors
/// When it is neither this user nor root.
pub fn check_user(socket: &UnixStream) -> anyhow::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(socket)?;
    let own = rustix::process::geteuid();
    if peer.uid != own && !peer.uid.is_root() {
        anyhow::bail!("the other side of the control socket belongs to the user {}", peer.uid.as_raw());
    }
    Ok(())
}
