// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creates a zone in a file, which has its name only once the zone is complete.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{AtFlags, CWD};
use rustix::io::Errno;

use super::{Zone, ZoneConfig};
use crate::Error;
use crate::backing::{Backing, reserve};

impl Zone {
    /// Makes a zone in a file, and gives the file the name `path` when `fill` has succeeded. Until then `fill` alone knows the zone, by the path that it
    /// gets. A process that dies meanwhile leaves nothing. Returns `false` if there is a file at `path` already, which stays as it is.
    ///
    /// # Errors
    /// Those of [`Zone::create`] and of `fill`, and a file system without O_TMPFILE.
    pub fn create_whole(
        config: &ZoneConfig,
        path: &Path,
        fill: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<bool> {
        let config = config.clone().backing(Backing::File(path.to_owned()));
        let areas = config.layout()?;
        let what = path.display().to_string();
        let folder = path.parent().with_context(|| format!("{what} is in no folder"))?;
        let length = libc::off_t::try_from(config.size).context("the zone's size")?;
        let mut nameless = OpenOptions::new();
        nameless.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
        let file = nameless
            .open(folder)
            .map_err(|e| Error::io(format!("making a file in {}", folder.display()), e))?;
        reserve(&file, length, &what)?;
        // The zone has no owner any more when it is dropped; the file lives on in this descriptor.
        drop(Zone::format(file.try_clone()?, &config, areas)?);
        let own = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
        fill(&own)?;
        match rustix::fs::linkat(CWD, &own, CWD, path, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(e) => Err(Error::io(format!("creating {what}"), e.into()).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;
    use uuid::Uuid;

    fn config() -> ZoneConfig {
        ZoneConfig::new("own", 16 << 20).uuid(Uuid::from_u128(7))
    }

    #[test]
    fn a_zone_has_its_name_once_it_is_filled_and_then_the_identity_that_was_asked_for() -> crate::Result<()> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.zone");
        let made = Zone::create_whole(&config(), &path, |inside| {
            assert!(!path.exists());
            assert_eq!(Zone::open(inside, true)?.name(), "own");
            Ok(())
        });
        assert!(made.unwrap());
        let zone = Zone::take_over(&path)?;
        assert_eq!((zone.uuid(), zone.size()), (Uuid::from_u128(7), 16 << 20));
        Ok(())
    }

    #[test]
    fn a_file_that_is_there_stays_as_it_is_also_if_it_comes_at_the_last_moment() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.zone");
        let made = Zone::create_whole(&config(), &path, |_| Ok(std::fs::write(&path, "another's")?));
        assert!(!made.unwrap());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "another's");
    }

    #[test]
    fn what_could_not_be_filled_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.zone");
        let refused = Zone::create_whole(&config(), &path, |_| bail!("no file system"));
        assert!(refused.unwrap_err().to_string().contains("no file system"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
