// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A zone as it was when a domain got it. The domain's devices and the guest's /etc/fstab name the zone by its uuid, so a zone that takes the place of
//! one whose file has gone must have the same.
//!
//! Only a zone in memory is made anew: there the reboot of the host takes it, and its files with it. A file on a disk does not go by itself; the disk may
//! not be mounted yet, and an empty zone would stand where the data belongs.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use tombolo_zone::serve::{access, start};
use tombolo_zone::{Zone, ZoneConfig, backing};
use uuid::Uuid;

/// The properties of a zone by which domains and guests find it, and with which it is made anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The zone's name, which the names of its devices begin with.
    pub name: String,
    /// Its uuid.
    pub uuid: Uuid,
    /// Its size in bytes.
    pub size: u64,
    /// It holds a file system.
    pub files: bool,
    /// The user whose file it is.
    pub owner: u32,
}

/// Runs `tombolo files` with these words; what it says where it fails.
fn files(words: &[&str], zone: &Path) -> anyhow::Result<Result<(), String>> {
    let output = Command::new(start::own_program()?).arg("files").args(words).arg(zone).output();
    let output = output.context("starting tombolo files")?;
    let said = String::from_utf8_lossy(&output.stderr).trim().trim_start_matches("tombolo: ").to_owned();
    Ok(if output.status.success() { Ok(()) } else { Err(said) })
}

impl Identity {
    /// Reads the zone in a file.
    ///
    /// # Errors
    /// It is no zone, or its file system is damaged or of a later version.
    pub fn of(path: &Path) -> anyhow::Result<Identity> {
        let zone = Zone::open(path, false)?;
        let owner = path.metadata().with_context(|| path.display().to_string())?.uid();
        let files = match files(&["df"], path)? {
            Ok(()) => true,
            Err(said) if said.contains("there is no file system") => false,
            Err(said) => bail!("{said}"),
        };
        Ok(Identity { name: zone.name().to_owned(), uuid: zone.uuid(), size: zone.size(), files, owner })
    }

    /// The attributes of `<tombolo:zone>`.
    pub(crate) fn attributes(&self) -> Vec<(&'static str, String)> {
        let mut all = vec![
            ("name", self.name.clone()),
            ("uuid", self.uuid.to_string()),
            ("size", self.size.to_string()),
            ("owner", self.owner.to_string()),
        ];
        all.extend(self.files.then(|| ("files", "yes".to_owned())));
        all
    }

    /// Reads the attributes of `<tombolo:zone>`.
    pub(crate) fn read(get: &dyn Fn(&str) -> anyhow::Result<String>) -> anyhow::Result<Identity> {
        fn parse<T: std::str::FromStr>(name: &str, text: &str) -> anyhow::Result<T> {
            let parsed = text.parse().ok();
            parsed.with_context(|| {
                format!("{name}=\"{text}\" of <tombolo:zone> in the domain's metadata can't be read")
            })
        }
        Ok(Identity {
            name: get("name")?,
            uuid: parse("uuid", &get("uuid")?)?,
            size: parse("size", &get("size")?)?,
            files: get("files").is_ok_and(|word| word == "yes"),
            owner: parse("owner", &get("owner")?)?,
        })
    }

    /// The commands by which its owner makes the zone anew.
    fn commands(&self, path: &Path) -> String {
        let path = crate::word(path);
        let create = format!(
            "tombolo zone create {path} --size {} --name {} --uuid {}",
            self.size, self.name, self.uuid
        );
        if self.files { format!("{create} && tombolo files mkfs {path}") } else { create }
    }

    /// Makes the zone anew, empty, at a path where there is none. A domain that starts at the same moment may be faster.
    ///
    /// # Errors
    /// The path is not in memory, or the zone was another user's: neither may be replaced by an empty zone of this user's.
    pub(crate) fn make(&self, path: &Path) -> anyhow::Result<()> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        if !backing::lies_in_memory(folder).with_context(|| format!("{} is not there", path.display()))? {
            bail!(
                "{} is not there, and on a disk a zone does not go by itself: mount the disk, or bring the file back; for an empty zone in its place: {}",
                path.display(),
                self.commands(path)
            );
        }
        if self.owner != access::own_user() {
            bail!(
                "{} is not there: make the zone anew as the user {}, whose it was: {}",
                path.display(),
                self.owner,
                self.commands(path)
            );
        }
        let config = ZoneConfig::new(&self.name, self.size).uuid(self.uuid);
        let made = Zone::create_whole(&config, path, |inside| match self.files {
            true => files(&["mkfs"], inside)?.map_err(|said| anyhow::anyhow!("{said}")),
            false => Ok(()),
        });
        made.map(drop).with_context(|| format!("making {} anew", path.display()))
    }

    /// Refuses a file that is not the zone which was attached.
    ///
    /// # Errors
    /// It is another zone, or another user's file, which that user may have put there.
    pub(crate) fn check(&self, path: &Path) -> anyhow::Result<()> {
        let at = path.display();
        let there = path.symlink_metadata().with_context(|| at.to_string())?;
        if there.is_symlink() || there.uid() != self.owner {
            let what = if there.is_symlink() {
                "is a symbolic link".to_owned()
            } else {
                format!("belongs to the user {}", there.uid())
            };
            bail!(
                "{at} {what}, and was a file of the user {} when it was attached; if that shall be, detach and attach it again",
                self.owner
            );
        }
        let uuid = Zone::open(path, false)?.uuid();
        if uuid != self.uuid {
            bail!(
                "{at} is the zone {uuid}, and the domain has the zone {}, by which its guest mounts it too: detach and attach it again",
                self.uuid
            );
        }
        Ok(())
    }
}
