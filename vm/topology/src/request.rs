// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of VMs for parts of the host.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;

/// The part of the host that a VM lies on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// All free CPUs.
    Host,
    /// All free CPUs of one NUMA node.
    Node(u32),
    /// So many CPUs as the VM has, close together.
    Close,
    /// These CPUs.
    Cpus(CpuSet),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Host => f.write_str("host"),
            Part::Node(node) => write!(f, "node:{node}"),
            Part::Close => f.write_str("close"),
            Part::Cpus(cpus) => write!(f, "cpus:{cpus}"),
        }
    }
}

/// A text that names no part of a host.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "'{0}' is no part of a host; write \"host\" (all that is free), \"node:0\" (a NUMA node), \"close\" (so many CPUs as \
     'cpus' says, close together) or \"cpus:0-3,8\""
)]
pub struct NoPart(String);

impl FromStr for Part {
    type Err = NoPart;

    fn from_str(text: &str) -> Result<Self, NoPart> {
        let no = || NoPart(text.to_owned());
        Ok(match text.split_once(':') {
            None if text == "host" => Part::Host,
            None if text == "close" => Part::Close,
            Some(("node", node)) => Part::Node(node.parse().map_err(|_| no())?),
            Some(("cpus", cpus)) => match cpus.parse::<CpuSet>() {
                Ok(cpus) if !cpus.is_empty() => Part::Cpus(cpus),
                _ => return Err(no()),
            },
            _ => return Err(no()),
        })
    }
}

impl Serialize for Part {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The pages of a VM's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pages {
    /// The largest that are reserved and free on all of the VM's nodes, transparent huge pages where none are.
    #[default]
    Auto,
    /// Reserved pages of 1 GiB.
    #[serde(rename = "1G")]
    Gigantic,
    /// Reserved pages of 2 MiB.
    #[serde(rename = "2M")]
    Huge,
    /// Ordinary pages, which the kernel joins to huge ones where it can.
    Transparent,
}

/// A VM that is to lie on a part of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The VM's name.
    pub name: String,
    /// The part of the host.
    pub part: Part,
    /// The number of CPUs, for [`Part::Close`].
    pub cpus: u32,
    /// Bytes, a multiple of 2 MiB.
    pub memory: u64,
    /// The size of the pages that hold the VM's memory.
    pub pages: Pages,
    /// Addresses of the host's PCI functions that it gets.
    pub devices: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_written_as_it_is_read() {
        for text in ["host", "node:3", "close", "cpus:0-3,8"] {
            assert_eq!(text.parse::<Part>().unwrap().to_string(), text);
        }
        for text in ["", "node", "node:x", "cpus:", "cpus:b", "socket:1"] {
            let error = text.parse::<Part>().unwrap_err().to_string();
            assert!(error.contains("node:0") && error.contains("close"), "{error}");
        }
    }
}
