// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests to an accelerator server, and its answers.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A request to an accelerator server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub enum Request {
    /// List the clients that are served: the answer is a [`Listing`].
    Ls,
    /// Take no new client, and end when the last one has ended.
    Drain,
    /// Serve one more VM.
    Vm(Guest),
}

/// A VM to serve through a zone that another process owns. Missing limits are those of the server's options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guest {
    /// The VM's name.
    pub vm: String,
    /// The zone's memory.
    pub zone: PathBuf,
    /// The number of the VM's processes that may use the accelerator at once.
    pub channels: u32,
    /// Bytes of each process' window.
    pub window: u64,
    /// Bytes of device memory, of all processes together.
    pub memory: Option<u64>,
    /// Objects, of all processes together.
    pub objects: Option<u32>,
    /// Requests a second, of all processes together; 0: no limit.
    pub rate: Option<u32>,
    /// Share of processor time of all processes together, 1 to 100.
    pub weight: Option<u32>,
}

/// A server and the clients that it serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Listing {
    /// The server's process.
    pub pid: u32,
    /// The VM that it runs in, unless that is this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The addresses where clients connect; for VMs their folders.
    pub listens: Vec<String>,
    /// It takes no new client.
    pub draining: bool,
    /// Why nothing else is known of it: it gives no answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// The clients that are connected now, one for each worker.
    pub tenants: Vec<Tenant>,
}

/// A client at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tenant {
    /// The process of its worker.
    pub pid: u32,
    /// Program and process, as the client claims.
    pub name: String,
    /// The address that it connected to, or `vm:` and the VM's name.
    pub via: String,
    /// Of one that connected to an address: the user of the server's machine, or the machine, that it came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Its share of processor time beside other clients.
    pub weight: u32,
    /// Bytes of device memory in use.
    pub memory: u64,
    /// The most device memory that it may use, in bytes.
    pub memory_limit: u64,
    /// Objects that exist.
    pub objects: u64,
    /// The most objects that it may have.
    pub objects_limit: u32,
    /// Requests so far.
    pub calls: u64,
    /// Requests whose result the client waited for.
    pub waits: u64,
    /// Bytes in records.
    pub bytes: u64,
    /// Seconds from requests that the client waited for to their replies.
    pub busy_seconds: f64,
    /// Seconds for which its rate limit delayed its requests.
    pub held_seconds: f64,
    /// Seconds of processor time that its worker has used; with a control group, also those of the processes that it started.
    pub cpu_seconds: f64,
    /// Seconds since its worker was started.
    pub seconds: f64,
}

/// An answer: `{"ok": …}` or `{"error": "…"}`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer<T> {
    /// The server's answer to the request.
    Ok(T),
    /// The server's reason for refusing.
    Error(String),
}

impl<T: serde::de::DeserializeOwned> crate::socket::Answer for Answer<T> {
    type Value = T;

    fn into_result(self) -> Result<T, String> {
        match self {
            Answer::Ok(value) => Ok(value),
            Answer::Error(why) => Err(why),
        }
    }
}
