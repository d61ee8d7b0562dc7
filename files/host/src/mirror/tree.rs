// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A directory tree that is used below its open root. Another member of a zone may put a link in the place of any directory at any time; no path of
//! this module leads through one.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use walkdir::WalkDir;

use crate::shown::shown_path;

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::PATH).union(OFlags::CLOEXEC);
const BELOW: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// The path that leads to what a descriptor has open.
pub(super) fn through(open: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", open.as_raw_fd()).into()
}

/// An open directory with all that is below it.
#[derive(Debug)]
pub struct Tree {
    root: OwnedFd,
    /// The root's path in messages.
    name: PathBuf,
}

/// The place of an entry: its directory is held open, so the path leads to the entry whatever happens above. Only the entry itself may be a link.
#[derive(Debug)]
pub(super) struct Place {
    /// A path through the open directory.
    pub path: PathBuf,
    _directory: Option<OwnedFd>,
}

impl Tree {
    /// Opens the directory at a path that the user of this process has given.
    ///
    /// # Errors
    /// Names the path.
    pub fn open(path: &Path) -> anyhow::Result<Tree> {
        let root = rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty());
        Ok(Tree { root: root.with_context(|| path.display().to_string())?, name: path.to_owned() })
    }

    /// Gives the root another name in messages.
    #[must_use]
    pub fn named(self, name: PathBuf) -> Tree {
        Tree { name, ..self }
    }

    /// Opens a directory of this tree. No part of its path may be a link; `make`: what is missing of it is made.
    ///
    /// # Errors
    /// Names the path and the part that is no directory.
    pub fn below(&self, path: &Path, make: bool) -> anyhow::Result<Tree> {
        let name = self.name.join(path);
        let mut root = self.root.as_fd().try_clone_to_owned()?;
        for part in path {
            let open = || rustix::fs::openat2(&root, part, DIRECTORY, Mode::empty(), BELOW);
            let opened = match open() {
                Err(Errno::NOENT) if make => {
                    match rustix::fs::mkdirat(&root, part, Mode::from_raw_mode(0o777)) {
                        Ok(()) | Err(Errno::EXIST) => open(),
                        Err(e) => Err(e),
                    }
                }
                opened => opened,
            };
            let part = shown_path(Path::new(part));
            root = match opened {
                Err(Errno::LOOP | Errno::NOTDIR) => {
                    anyhow::bail!("{}: '{part}' is a link or a file, not a directory", name.display())
                }
                opened => opened.with_context(|| format!("{}: '{part}'", name.display()))?,
            };
        }
        Ok(Tree { root, name })
    }

    /// Writes everything on the tree's file system to its disk.
    ///
    /// # Errors
    /// Names the path.
    pub fn sync(&self) -> anyhow::Result<()> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let synced = match rustix::fs::openat(&self.root, ".", flags, Mode::empty()) {
            Ok(root) => rustix::fs::syncfs(root),
            // The user may write to it, and not read it.
            Err(Errno::ACCESS) => {
                rustix::fs::sync();
                Ok(())
            }
            Err(e) => Err(e),
        };
        synced.with_context(|| format!("syncing {}", self.name.display()))
    }

    /// The root's path in messages.
    pub(super) fn name(&self) -> &Path {
        &self.name
    }

    /// Returns the paths of the root and of all entries below it, from the root; `contents_first`: a directory comes after what is in it.
    pub(super) fn walk(
        &self,
        contents_first: bool,
    ) -> impl Iterator<Item = anyhow::Result<PathBuf>> + use<'_> {
        let root = self.through_root();
        let walk = WalkDir::new(&root).sort_by_file_name().contents_first(contents_first);
        // Another process may remove an entry between its listing and its turn: the walk leaves it out. The root is held open.
        let is_gone = |e: &walkdir::Error| e.depth() > 0 && e.io_error().is_some_and(super::is_missing);
        let walk = walk.into_iter().filter(move |entry| !entry.as_ref().is_err_and(is_gone));
        walk.map(move |entry| {
            let entry = entry.map_err(|e| {
                let inside = e.path().and_then(|path| path.strip_prefix(&root).ok()).unwrap_or(Path::new(""));
                anyhow::anyhow!("reading {}: {}", shown_path(&self.name.join(inside)), io::Error::from(e))
            })?;
            Ok(entry.path().strip_prefix(&root).context("a walk stays below its root")?.to_owned())
        })
    }

    /// With a last '.', so that it is the directory, and not the link in /proc.
    fn through_root(&self) -> PathBuf {
        through(&self.root).join(".")
    }

    /// Returns the place of the entry at `inside`; an empty path is the root.
    ///
    /// # Errors
    /// When its directory is missing, or a link is on the way to it.
    pub(super) fn place(&self, inside: &Path) -> io::Result<Place> {
        let (Some(above), Some(name)) = (inside.parent(), inside.file_name()) else {
            return Ok(Place { path: self.through_root(), _directory: None });
        };
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        let directory = rustix::fs::openat2(&self.root, above, DIRECTORY, Mode::empty(), BELOW)?;
        Ok(Place { path: through(&directory).join(name), _directory: Some(directory) })
    }
}
