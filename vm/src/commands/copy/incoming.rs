// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file or folder that a guest sends, until it is complete and gets its final name. The guest may send anything: it decides on the contents of the
//! file or folder, and on nothing else of this host.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;

use anyhow::Context;

use super::{MODE, SET_ID};

/// The longest first line of what a guest sends, in bytes.
const HEAD: usize = 64;

/// The rights of a folder's owner.
const OWNER: u32 = 0o700;

/// A file or folder that comes from a guest.
pub(super) struct Incoming<'a> {
    /// Where it gets its final name.
    folder: &'a Path,
    /// A folder may come.
    recursive: bool,
    state: State,
}

enum State {
    Head(Vec<u8>),
    File {
        file: tempfile::NamedTempFile,
        mode: u32,
    },
    Tree {
        dir: Scratch,
        mode: u32,
        writer: UnixStream,
        /// None: it has been waited for.
        unpacked: Option<JoinHandle<io::Result<()>>>,
    },
}

impl<'a> Incoming<'a> {
    pub(super) fn new(folder: &'a Path, recursive: bool) -> Incoming<'a> {
        Incoming { folder, recursive, state: State::Head(Vec::new()) }
    }

    /// Takes the next bytes.
    pub(super) fn take(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.state {
            State::File { file, .. } => file.write_all(bytes).map_err(|e| in_folder(self.folder, &e)),
            // The thread that unpacks has ended, and knows why.
            State::Tree { writer, unpacked, .. } => writer.write_all(bytes).map_err(|e| {
                let why = unpacked.take().and_then(|thread| thread.join().ok()?.err());
                in_folder(self.folder, &why.unwrap_or(e))
            }),
            State::Head(head) => {
                head.extend_from_slice(bytes);
                let Some(end) = head.iter().position(|&b| b == b'\n') else {
                    return if head.len() > HEAD {
                        Err(io::Error::other("the guest sends something else"))
                    } else {
                        Ok(())
                    };
                };
                let rest = head.split_off(end + 1);
                let (kind, mode) = parse_head(head)
                    .filter(|(kind, _)| self.recursive || *kind == 'f')
                    .ok_or_else(|| io::Error::other("the guest sends something else"))?;
                self.state = self.begin(kind, mode)?;
                self.take(&rest)
            }
        }
    }

    fn begin(&self, kind: char, mode: u32) -> io::Result<State> {
        let mut name = tempfile::Builder::new();
        let name = name.prefix(".tombolo-cp-");
        if kind == 'f' {
            return Ok(State::File { file: name.tempfile_in(self.folder)?, mode });
        }
        let dir = Scratch(Some(name.tempdir_in(self.folder)?));
        let (reader, writer) = UnixStream::pair()?;
        let into = dir.path().to_owned();
        let unpacked = crate::thread::start("tar", move || {
            let mut tar = tar::Archive::new(reader);
            tar.set_preserve_permissions(true);
            tar.set_mask(SET_ID);
            tar.unpack(into)?;
            // Padding follows the tar's end.
            io::copy(&mut tar.into_inner(), &mut io::sink()).map(drop)
        })?;
        Ok(State::Tree { dir, mode, writer, unpacked: Some(unpacked) })
    }

    /// Gives it its final name.
    pub(super) fn settle(self, target: &Path) -> anyhow::Result<()> {
        match self.state {
            State::Head(_) => anyhow::bail!("the guest sent nothing"),
            State::File { file, mode } => {
                file.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
                file.persist(target)?;
            }
            State::Tree { dir, mode, writer, unpacked } => {
                drop(writer);
                let unpacked = unpacked.and_then(|thread| thread.join().ok());
                unpacked.context("the thread that unpacks failed")??;
                if target.symlink_metadata().is_ok() {
                    return merge(dir.path(), target);
                }
                fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode))?;
                fs::rename(dir.path(), target)?;
                dir.has_moved();
            }
        }
        Ok(())
    }
}

/// A folder that goes with all that is in it, unless it has another name by then.
struct Scratch(Option<tempfile::TempDir>);

impl Scratch {
    fn path(&self) -> &Path {
        self.0.as_ref().map_or(Path::new(""), tempfile::TempDir::path)
    }

    /// It has another name now.
    fn has_moved(mut self) {
        if let Some(dir) = self.0.take() {
            let _moved = dir.keep();
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(dir) = &self.0 {
            open_all(dir.path());
        }
    }
}

/// Lets this user remove what is in a folder: a guest's folders may refuse their owner. What fails here is told of by the removal.
fn open_all(folder: &Path) {
    let _not_own = open(folder);
    for entry in fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            open_all(&entry.path());
        }
    }
}

/// Gives the owner of a folder all rights to it. Returns its mode before.
fn open(folder: &Path) -> io::Result<u32> {
    let mode = fs::symlink_metadata(folder)?.permissions().mode() & MODE;
    if mode & OWNER != OWNER {
        fs::set_permissions(folder, fs::Permissions::from_mode(mode | OWNER))?;
    }
    Ok(mode)
}

/// An error that says where what came could not be written.
fn in_folder(folder: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("what comes can't be written in {}: {error}", folder.display()))
}

fn parse_head(head: &[u8]) -> Option<(char, u32)> {
    let (kind, mode) = std::str::from_utf8(head).ok()?.trim().split_once(' ')?;
    let kind = kind.chars().next().filter(|k| "fd".contains(*k))?;
    Some((kind, u32::from_str_radix(mode, 8).ok()? & MODE & !SET_ID))
}

/// Moves what is in `from` into the folder `to`; files of the same name are replaced.
fn merge(from: &Path, to: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(fs::symlink_metadata(to)?.is_dir(), "{} is there and is no folder", to.display());
    open(from)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let named = || target.display().to_string();
        if !entry.file_type()?.is_dir() {
            fs::rename(&source, &target).with_context(named)?;
        } else if target.symlink_metadata().is_ok() {
            merge(&source, &target)?;
        } else {
            // A folder moves only if its owner may write to it.
            let mode = open(&source)?;
            fs::rename(&source, &target).with_context(named)?;
            fs::set_permissions(&target, fs::Permissions::from_mode(mode)).with_context(named)?;
        }
    }
    Ok(())
}
