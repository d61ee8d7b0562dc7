// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The protocol of commands and supervisor: one JSON object per line over a Unix socket (see [`crate::project::peer`]). A
//! connection carries one request; the supervisor answers `heard` at once, then a row of events that ends with `done` or `failed`. A
//! request without `heard` was not begun. Closing the connection cancels the request.

use serde::{Deserialize, Serialize};

use crate::compose::accelerator::Api;
use crate::compose::{Project, Rights};
use crate::guest::health::Health;
use crate::guest::terminal::{Size, Terminal};
use crate::project::changes::{Action, Wish};
use crate::project::journal;

/// A request of a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Start what is missing.
    Up {
        /// The compose file.
        project: Box<Project>,
        wish: Wish,
        /// Wait until the VMs are healthy.
        #[serde(default)]
        wait: bool,
    },
    /// Answer with the actions of `up`, and carry out none.
    Plan {
        /// The compose file.
        project: Box<Project>,
        wish: Wish,
    },
    /// Send state changes: those since a time, and those to come.
    Events {
        /// Unix time in seconds; none: from now on.
        since: Option<f64>,
    },
    /// Stop VMs; all of them and the supervisor where the list is empty.
    Down {
        /// Names.
        vms: Vec<String>,
    },
    /// Answer with the state of the project.
    Ps,
    /// Keep the connection open for as long as the supervisor lives.
    Attend,
    /// Run a command in a guest; [`Feed`] lines follow.
    Exec {
        vm: String,
        /// Program and arguments.
        argv: Vec<String>,
        /// "NAME=VALUE".
        env: Vec<String>,
        /// Working folder.
        dir: Option<String>,
        /// Input follows.
        input: bool,
        /// Run it on a terminal like this one.
        #[serde(default)]
        terminal: Option<Terminal>,
    },
    /// The serial console: after `done` the connection is the console itself.
    Console { vm: String },
    /// Make a running VM a member of a zone.
    ZoneAttach {
        zone: String,
        vm: String,
        rights: Rights,
        /// The mount point of the zone's file system.
        mount: Option<String>,
    },
    /// End a VM's membership.
    ZoneDetach { zone: String, vm: String },
    /// End, and leave all that runs to the next supervisor.
    Leave {
        /// Time for running requests to end.
        seconds: u64,
    },
}

impl Request {
    /// The name of the request, for another one that waits for its end.
    pub fn what(&self) -> String {
        match self {
            Request::Up { .. } => "up".into(),
            Request::Plan { .. } => "up --dry-run".into(),
            Request::Events { .. } => "events".into(),
            Request::Down { .. } => "down".into(),
            Request::Ps => "ps".into(),
            Request::Attend => "up --attach".into(),
            Request::Exec { vm, argv, .. } => {
                format!("exec {vm} -- {}", argv.first().map_or("", String::as_str))
            }
            Request::Console { vm } => format!("console {vm}"),
            Request::ZoneAttach { zone, vm, .. } => format!("zone attach {zone} {vm}"),
            Request::ZoneDetach { zone, vm } => format!("zone detach {zone} {vm}"),
            Request::Leave { .. } => "upgrade".into(),
        }
    }
}

/// A message that follows an `exec` with input.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feed {
    /// Bytes, base64.
    Input(String),
    /// The terminal's new size.
    Size(Size),
    /// No more.
    End,
}

/// A part of the supervisor's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The request has arrived and is carried out now.
    Heard,
    /// A VM has come to a stage.
    Stage {
        vm: String,
        stage: Stage,
        /// More about it.
        detail: String,
    },
    /// Something to tell the user.
    Note {
        /// One sentence.
        text: String,
    },
    /// Something that those want to know who ask for more (`-v`).
    Detail {
        /// One sentence.
        text: String,
    },
    /// An action of `up`.
    Action(Action),
    /// The answer to `plan`.
    Plan {
        /// In the order in which they would be done.
        actions: Vec<Action>,
        /// Why it would be refused.
        #[serde(default)]
        refused: Option<String>,
    },
    /// A part came to a state.
    Happened(journal::Entry),
    /// The answer to `ps`.
    Status(Box<Status>),
    /// Output of a command, base64.
    Out {
        data: String,
    },
    /// Error output of a command, base64.
    Err {
        data: String,
    },
    /// The command's end.
    Exit {
        code: i32,
    },
    Done,
    /// It is not done, and nothing of it is left behind.
    Failed {
        /// The reason and the remedy.
        message: String,
    },
    /// Another supervisor was faster.
    Taken,
}

/// Stages of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// It waits for another VM, or for its own health check.
    Waiting,
    /// QEMU is being started.
    Starting,
    /// The guest boots.
    Booting,
    /// The guest is being set up (mounts).
    Preparing,
    Up,
    /// It was up before.
    AlreadyUp,
    /// It is being stopped.
    Stopping,
    Stopped,
    Failed,
}

/// The answer to `ps`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    pub project: String,
    /// Its compose file.
    pub file: std::path::PathBuf,
    /// The supervisor's process, if the project is up.
    pub supervisor: Option<u32>,
    /// KVM or TCG, and the reason for it.
    #[serde(alias = "accel")]
    pub hypervisor: String,
    pub vms: Vec<VmStatus>,
    pub zones: Vec<ZoneStatus>,
    pub networks: Vec<NetStatus>,
    pub accelerators: Vec<AccelStatus>,
    /// The CPUs of the switches and servers of VMs with `topology`.
    #[serde(default)]
    pub services: Vec<crate::project::services::Service>,
}

impl Status {
    /// Of a project that is not up.
    pub fn down(project: &Project) -> Status {
        Status {
            project: project.name.clone(),
            file: project.file.clone(),
            supervisor: None,
            hypervisor: String::new(),
            vms: Vec::new(),
            zones: Vec::new(),
            networks: Vec::new(),
            accelerators: Vec::new(),
            services: Vec::new(),
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VmStatus {
    pub name: String,
    /// "booting", "up", "rebooting", "stopping", "failed: …" or "ended: …".
    pub state: String,
    /// QEMU's process, while it runs.
    pub pid: Option<u32>,
    /// "kvm" or "tcg".
    #[serde(alias = "accel")]
    pub hypervisor: crate::qemu::Hypervisor,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// Zones it is a member of.
    pub zones: Vec<String>,
    /// Seconds since its start, or since its last reboot.
    pub uptime: f64,
    /// Reboots of the guest since 'up'.
    pub reboots: u32,
    /// Starts by the restart policy since 'up'.
    #[serde(default)]
    pub restarts: u32,
    /// The result of the health check; `None`: the VM has none.
    #[serde(default)]
    pub health: Option<Health>,
    /// The process of the VM that does not answer, and the remedy.
    #[serde(default)]
    pub trouble: Option<String>,
    /// When it reached what, in seconds from its start.
    pub timeline: Vec<(String, f64)>,
    /// Folders of the host that it is offered; empty until its guest was asked.
    #[serde(default)]
    pub shares: Vec<ShareStatus>,
    /// Progress of memory that grows.
    #[serde(default)]
    pub growth: Option<tombolo_start::progress::Progress>,
    /// The part of the host that it lies on, with `topology`.
    #[serde(default)]
    pub placement: Option<crate::machine::placement::Placement>,
}

/// A folder of the host in a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareStatus {
    /// Its mount tag.
    pub tag: String,
    pub path: std::path::PathBuf,
    /// The guest can use it.
    pub there: bool,
    /// "mounted on PATH", "offered" (the guest mounts it itself), or why not.
    pub state: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ZoneStatus {
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// "memfd", "hugetlb" or a path.
    pub backing: String,
    pub uuid: String,
    /// The path at which other processes of this host open its memory.
    pub path: String,
    /// The same under the zone's own name, for as long as the project's folder is there.
    #[serde(default)]
    pub link: std::path::PathBuf,
    /// Its members: VMs, and processes of the host.
    pub members: Vec<String>,
    /// Its file was cut short while it was in use.
    #[serde(default)]
    pub lost: bool,
}

/// One network.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NetStatus {
    pub name: String,
    /// The network outside.
    pub uplink: Option<String>,
    /// Frames can pass at the uplink of all VMs; none: there is no such uplink, or the switch was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink_up: Option<bool>,
    /// Addresses of its VMs.
    pub subnet: Option<String>,
    /// Process of its switch; none while that is being started again.
    pub pid: Option<u32>,
    /// The number of starts of the switch.
    pub starts: u32,
    /// That the switch does not answer, and what to do.
    #[serde(default)]
    pub trouble: Option<String>,
    /// The switch's control socket.
    pub control: std::path::PathBuf,
    pub ports: Vec<PortStatus>,
}

/// One VM in a network.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PortStatus {
    pub vm: String,
    pub mac: String,
    /// Its address, where that was chosen here.
    pub address: Option<String>,
    /// Its IPv6 address, where the network has a prefix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address6: Option<String>,
    /// The VM's driver receives; none: the switch was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up: Option<bool>,
    /// Frames can pass at the VM's own uplink; none: it has none, or the switch was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink_up: Option<bool>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AccelStatus {
    pub name: String,
    pub api: Api,
    /// "serving", "starting", "does not answer" and what to do, or that the VM that owns it is not up.
    pub state: String,
    /// The VM that owns it and runs its server.
    #[serde(default)]
    pub owner: Option<String>,
    /// Process of its server on this host; none while that is being started again.
    pub pid: Option<u32>,
    /// The number of starts of the server.
    pub starts: u32,
    /// The VMs that may use it.
    pub vms: Vec<AccelVm>,
    /// The server's listing, as in `tombolo accel ls`.
    pub server: Option<tombolo_control::accel::Listing>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AccelVm {
    pub vm: String,
    /// Processes that use it now.
    pub clients: usize,
    /// Bytes of device memory that they have.
    pub memory: u64,
    /// Objects that they have.
    pub objects: u64,
    /// Its programs are served.
    pub served: bool,
    /// The guest had the client library when it came up; `None`: not known.
    pub library: Option<bool>,
}
