// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guest kit (guest/README.md) as benches use it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// A kernel of the guest kit and its base image.
pub struct Kit {
    folder: PathBuf,
    series: String,
}

impl Kit {
    /// The kernel `series` ("6.12") of the kit in `folder`.
    ///
    /// # Errors
    /// The kit has no image for it.
    pub fn new(folder: &Path, series: &str) -> Result<Self> {
        let kit = Self { folder: std::path::absolute(folder)?, series: series.to_owned() };
        let base = kit.base();
        ensure!(base.exists(), "{} is not there: 'make guest' makes it", base.display());
        Ok(kit)
    }

    fn base(&self) -> PathBuf {
        self.folder.join(&self.series).join("initrd.img")
    }

    /// The kernel's file.
    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.folder.join(&self.series).join("vmlinuz")
    }

    /// Writes the base image with `items` added, as `guest/add` takes them, to `image`.
    ///
    /// # Errors
    /// An item is missing, or the image can't be written.
    pub fn add(&self, items: &[String], image: &Path) -> Result<()> {
        let status = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/add"))
            .arg("--base")
            .arg(self.base())
            .arg("-o")
            .arg(image)
            .args(items)
            .env("TOMBOLO_CACHE", self.folder.parent().unwrap_or(&self.folder))
            .stdout(Stdio::null())
            .status()
            .context("can't run guest/add of the project's folder")?;
        ensure!(status.success(), "guest/add failed ({status})");
        Ok(())
    }
}
