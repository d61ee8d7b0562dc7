// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests to a switch, its answers, and its [configuration](config).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Mac;

pub mod address;
pub mod config;

/// A request to a switch. `P` is a port and `U` an uplink, as the switch's configuration has them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub enum Request<P, U> {
    /// List all ports with their counters: the answer is [`Ports`].
    Ports,
    /// Make a port.
    Add {
        /// The configuration of the new port, as in the switch's file.
        port: P,
    },
    /// Make an uplink.
    #[serde(rename = "add-uplink")]
    AddUplink {
        /// The configuration of the new uplink, as in the switch's file.
        uplink: U,
    },
    /// Remove a port or an uplink.
    Remove {
        /// The name of the port or the uplink.
        name: String,
    },
    /// Send a port's frames, which follow the answer.
    Capture {
        /// The port's name.
        name: String,
        /// Bytes of each frame that are kept.
        snap: u32,
    },
}

/// The answer to the request `ports`: all ports and uplinks at one moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ports {
    /// Ports and uplinks.
    pub ports: Vec<PortStatus>,
    /// The multicast queriers that the switch has heard; with one, multicast goes only to the ports that have joined
    /// the group.
    #[serde(default)]
    pub queriers: Vec<Querier>,
    /// Nanoseconds of processor time that the switch has used.
    pub cpu_ns: u64,
}

/// A multicast querier that the switch hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Querier {
    /// Its VLAN; 0: none.
    pub vlan: u16,
    /// The version of IP that it asks for.
    pub ip: u8,
}

/// The thing that a port connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A guest.
    Guest,
    /// A network outside of the switch.
    Uplink,
}

/// A port at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PortStatus {
    /// The port's name.
    pub name: String,
    /// The thing that it connects.
    pub kind: Kind,
    /// A front-end is connected and its driver receives.
    pub up: bool,
    /// A front-end is connected.
    pub connected: bool,
    /// The MACs that the port owns.
    pub macs: Vec<Mac>,
    /// The worker that carries what the guest sends, by queue in use.
    pub workers: Vec<usize>,
    /// The multicast groups that the port has joined, with their VLANs; `all` if it gets every group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// The port's rules, each with the number of frames that it matched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<(String, u64)>,
    /// From the guest into the switch.
    pub sent: Flow,
    /// From the switch to the guest.
    pub received: Flow,
}

impl PortStatus {
    /// "up", "connected" or "down".
    #[must_use]
    pub fn state(&self) -> &'static str {
        match (self.up, self.connected) {
            (true, _) => "up",
            (false, true) => "connected",
            (false, false) => "down",
        }
    }
}

/// One direction of a port, since the switch began.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Flow {
    /// Frames.
    pub packets: u64,
    /// Bytes of these frames.
    pub bytes: u64,
    /// Frames that went to several receivers.
    pub flooded: u64,
    /// Frames that flooding and segmentation added.
    pub copies: u64,
    /// Interrupts sent to the guest.
    pub signals: u64,
    /// Frames lost, by reason; a reason that never occurred is left out.
    pub drops: BTreeMap<String, u64>,
}

impl Flow {
    /// Returns the frames lost for all reasons.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.drops.values().sum()
    }
}

/// The answer to a request that returns nothing.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Done {
    /// Always true.
    pub ok: bool,
}

/// An answer: the value's own fields, or `{"error": "…"}`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Answer<T> {
    /// The switch's reason for refusing.
    Error {
        /// In words.
        error: String,
    },
    /// The switch's answer to the request.
    Value(T),
}

impl<T: serde::de::DeserializeOwned> crate::socket::Answer for Answer<T> {
    type Value = T;

    fn into_result(self) -> Result<T, String> {
        match self {
            Answer::Value(value) => Ok(value),
            Answer::Error { error } => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::Answer as _;

    #[test]
    fn a_refusal_and_an_answer_are_told_apart() {
        let read = |text: &str| serde_json::from_str::<Answer<Done>>(text).unwrap().into_result();
        assert!(read("{\"ok\":true}").unwrap().ok);
        assert_eq!(read("{\"error\":\"no such port\"}").unwrap_err(), "no such port");
        assert!(serde_json::from_str::<Answer<Done>>("{\"ports\":[]}").is_err());
    }
}
