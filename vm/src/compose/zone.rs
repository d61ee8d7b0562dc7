// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `[zone.NAME]`, and a VM's membership in zones.

use std::path::PathBuf;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

use super::Size;

/// Zones are multiples of this many bytes: a virtio-pmem device of another size breaks the devices after it.
pub const ZONE_ALIGN: u64 = 2 << 20;
/// The smallest zone, in bytes.
pub const ZONE_MIN: u64 = 8 << 20;

/// `[zone.NAME]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneSpec {
    /// `"512M"`: A multiple of 2M, at least 8M. Required.
    pub size: Size,
    /// `"memfd"`: "memfd"; "hugetlb": huge pages that are reserved; or the path of a file, with a '/' in it, which persists.
    #[serde(default)]
    pub backing: Backing,
    /// `false`: Make a file system in it when it is new.
    #[serde(default)]
    pub files: bool,
}

/// The source of a zone's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Anonymous memory, gone with the project.
    #[default]
    Memfd,
    /// Huge pages that the host's administrator has reserved.
    Hugetlb,
    /// A file that persists.
    File(PathBuf),
}

impl Serialize for Backing {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Backing::Memfd => s.serialize_str("memfd"),
            Backing::Hugetlb => s.serialize_str("hugetlb"),
            Backing::File(path) => path.serialize(s),
        }
    }
}

impl<'de> Deserialize<'de> for Backing {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        match text.as_str() {
            "memfd" => Ok(Backing::Memfd),
            "hugetlb" => Ok(Backing::Hugetlb),
            path if path.contains('/') => Ok(Backing::File(path.into())),
            other => Err(de::Error::custom(format!(
                "'{other}' is no backing; write \"memfd\", \"hugetlb\", or a file's path with a '/' in it"
            ))),
        }
    }
}

/// One entry of a VM's `zones`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneUse {
    /// `none`: Where the guest mounts the zone's file system.
    #[serde(default)]
    pub mount: Option<String>,
    /// `[]`: Options of that mount, which is nosuid and nodev unless "suid" and "dev" are among them.
    #[serde(default)]
    pub options: Vec<String>,
    /// `"rw"`: "ro": it may only read.
    #[serde(default)]
    pub rights: Rights,
    /// `none`: The directory that the guest is confined to; made where it is missing.
    #[serde(default)]
    pub subtree: Option<String>,
    /// `none`: What the files that the guest makes may take up together.
    #[serde(default)]
    pub bytes: Option<Size>,
    /// `none`: How many files and directories it may make.
    #[serde(default)]
    pub inodes: Option<u64>,
}

/// Rights of a member of a zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rights {
    #[default]
    #[serde(rename = "rw")]
    ReadWrite,
    #[serde(rename = "ro")]
    ReadOnly,
}
