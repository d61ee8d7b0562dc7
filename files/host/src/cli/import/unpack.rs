// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unpacks tar archives, and the layers of an image on top of each other, into a directory of a mounted zone. Every path is resolved with that directory as the
//! root, so links of the archive, and those that a guest makes meanwhile, lead to nothing of the host.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, bail};
use rustix::fs::{
    AtFlags, Dir, FallocateFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps,
    UTIME_OMIT, Uid, XattrFlags,
};
use rustix::io::Errno;
use tar::EntryType;

use crate::cli::Meter;
use crate::cli::rsync::Done;
use crate::shown::shown_path;

/// Files of at least this size get their blocks before their data, in aligned runs, which mappings show by one large page each.
const LARGE: u64 = 2 << 20;
/// Begins the names of an image layer's entries that hide what lower layers have (OCI image specification, layer.md, 'Whiteouts').
const WHITEOUT: &[u8] = b".wh.";
/// Hides all that lower layers have in its directory.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Begins the names of records of AUFS, which mean nothing elsewhere.
const AUFS: &[u8] = b".wh..wh.";
/// Begins the keys of PAX records with extended attributes.
const XATTR: &str = "SCHILY.xattr.";
/// The most bytes of headers of one entry: long names, attributes, a sparse file's map. They are kept in memory, and a few compressed bytes can stand for any number.
const MAX_HEADERS: u64 = 16 << 20;
/// The most tries to open a path with `..`, which the kernel refuses (EAGAIN) where any process of the host renames something at that moment.
const MAX_OPENS: u32 = 1000;
/// The label of the host's own security module, which has no meaning elsewhere.
const LABEL: &str = "security.selinux";

/// Owner, mode, time and extended attributes of an entry.
struct Attributes {
    owner: (u32, u32),
    mode: Mode,
    modified: i64,
    xattrs: Vec<(String, Vec<u8>)>,
}

impl Attributes {
    fn of(entry: &mut tar::Entry<'_, impl Read>) -> anyhow::Result<Attributes> {
        let mut xattrs = Vec::new();
        for record in entry.pax_extensions()?.into_iter().flatten() {
            let record = record?;
            let name = record.key().ok().and_then(|key| key.strip_prefix(XATTR));
            xattrs.extend(
                name.filter(|name| *name != LABEL)
                    .map(|name| (name.to_owned(), record.value_bytes().to_owned())),
            );
        }
        let header = entry.header();
        let [user, group] = [header.uid()?, header.gid()?].map(u32::try_from);
        let modified = i64::try_from(header.mtime()?)?;
        let mode = Mode::from_raw_mode(header.mode()? & 0o7777);
        Ok(Attributes { owner: (user?, group?), mode, modified, xattrs })
    }

    fn times(&self) -> Timestamps {
        Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec: self.modified, tv_nsec: 0 },
        }
    }

    fn ids(&self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.owner.0)), Some(Gid::from_raw(self.owner.1)))
    }

    fn foreign(&self, error: Errno) -> anyhow::Error {
        let (user, group) = self.owner;
        match error {
            Errno::PERM => {
                anyhow::anyhow!("it belongs to {user}:{group}, which root alone can set: import as root")
            }
            error => anyhow::Error::from(error).context(format!("setting its owner {user}:{group}")),
        }
    }

    /// Sets them on an open file or directory. The mode last: a new owner clears set-id bits and capabilities.
    fn set(&self, file: impl AsFd) -> anyhow::Result<()> {
        let file = file.as_fd();
        let (user, group) = self.ids();
        rustix::fs::fchown(file, user, group).map_err(|e| self.foreign(e))?;
        rustix::fs::fchmod(file, self.mode).context("setting its mode")?;
        for (name, value) in &self.xattrs {
            rustix::fs::fsetxattr(file, name.as_str(), value, XattrFlags::empty())
                .with_context(|| format!("setting its attribute {name}"))?;
        }
        rustix::fs::futimens(file, &self.times()).context("setting its time")
    }

    /// Sets owner and time of an entry that can't be opened.
    fn set_by_name(&self, folder: &OwnedFd, name: &OsStr) -> anyhow::Result<()> {
        let (user, group) = self.ids();
        rustix::fs::chownat(folder, name, user, group, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| self.foreign(e))?;
        rustix::fs::utimensat(folder, name, &self.times(), AtFlags::SYMLINK_NOFOLLOW)
            .context("setting its time")
    }
}

/// A reader that fails after `left` bytes.
struct Limited<'a, R> {
    from: R,
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Limited<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = buffer.len().min(usize::try_from(self.left.get()).unwrap_or(usize::MAX));
        if most == 0 && !buffer.is_empty() {
            let message = format!("the headers of an entry have more than {} MiB", MAX_HEADERS >> 20);
            return Err(std::io::Error::other(message));
        }
        let length = self.from.read(&mut buffer[..most])?;
        self.left.set(self.left.get() - length as u64);
        Ok(length)
    }
}

/// A directory that is being filled.
pub(in crate::cli) struct Unpacker {
    root: OwnedFd,
    /// What the present layer has made, and the folders above it.
    made: BTreeSet<PathBuf>,
    /// Folders of the present layer, which get their attributes at its end.
    folders: BTreeMap<PathBuf, Attributes>,
    meter: Meter,
    pub done: Done,
}

impl Unpacker {
    pub(in crate::cli) fn new(root: OwnedFd, meter: Meter) -> Unpacker {
        let (made, folders) = (BTreeSet::new(), BTreeMap::new());
        Unpacker { root, made, folders, meter, done: Done::default() }
    }

    /// Unpacks one archive over what is there; `whiteouts`: it is a layer of an image.
    pub(in crate::cli) fn archive(&mut self, from: impl Read, whiteouts: bool) -> anyhow::Result<()> {
        self.made.clear();
        let left = Cell::new(MAX_HEADERS);
        for entry in tar::Archive::new(Limited { from, left: &left }).entries()? {
            let mut entry = entry.context("not a whole tar archive")?;
            left.set(u64::MAX);
            let path = PathBuf::from(OsString::from_vec(entry.path_bytes().into_owned()));
            self.entry(&mut entry, &path, whiteouts).with_context(|| format!("'{}'", shown_path(&path)))?;
            std::io::copy(&mut entry, &mut std::io::sink()).context("not a whole tar archive")?;
            left.set(MAX_HEADERS);
        }
        for (path, attributes) in std::mem::take(&mut self.folders).into_iter().rev() {
            let folder = self.open(&path, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW);
            let set = folder.map_err(anyhow::Error::from).and_then(|folder| attributes.set(folder));
            set.with_context(|| format!("'{}'", shown_path(&path)))?;
        }
        Ok(())
    }

    fn open(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let open = || rustix::fs::openat2(&self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), within);
        let again = |opened: &rustix::io::Result<OwnedFd>| opened.as_ref().err() == Some(&Errno::AGAIN);
        (1..MAX_OPENS).map(|_| open()).find(|opened| !again(opened)).unwrap_or_else(open)
    }

    /// Opens a folder; makes what is missing of it.
    fn folder(&self, path: &Path) -> anyhow::Result<OwnedFd> {
        let open = || self.open(path, OFlags::DIRECTORY | OFlags::RDONLY);
        match (open(), path.file_name(), path.parent()) {
            (Err(Errno::NOENT), Some(name), Some(above)) => {
                rustix::fs::mkdirat(self.folder(above)?, name, Mode::from_raw_mode(0o755))
                    .with_context(|| format!("making the folder '{}'", shown_path(path)))?;
                Ok(open()?)
            }
            (opened, ..) => opened.with_context(|| format!("the folder '{}'", shown_path(path))),
        }
    }

    fn entry(
        &mut self,
        entry: &mut tar::Entry<'_, impl Read>,
        path: &Path,
        whiteouts: bool,
    ) -> anyhow::Result<()> {
        if entry.header().entry_type() == EntryType::XGlobalHeader {
            return Ok(());
        }
        let path = relative(path)?;
        let Some(name) = path.file_name() else {
            self.folders.insert(path, Attributes::of(entry)?);
            return Ok(());
        };
        let above = path.parent().unwrap_or(Path::new(""));
        let folder = self.folder(above)?;
        if let Some(hidden) = name.as_bytes().strip_prefix(WHITEOUT).filter(|_| whiteouts) {
            return match name.as_bytes() {
                OPAQUE => self.hide_all(&folder, above),
                name if name.starts_with(AUFS) => Ok(()),
                _ if matches!(hidden, b"" | b"." | b"..") => bail!("a whiteout of nothing"),
                _ => self.hide(&folder, &above.join(OsStr::from_bytes(hidden))),
            };
        }
        self.make(entry, &folder, name, &path)?;
        self.made.extend(path.ancestors().map(Path::to_owned));
        self.done.copied += 1;
        self.meter.count("unpacked", self.done.copied);
        Ok(())
    }

    fn make(
        &mut self,
        entry: &mut tar::Entry<'_, impl Read>,
        folder: &OwnedFd,
        name: &OsStr,
        path: &Path,
    ) -> anyhow::Result<()> {
        let attributes = Attributes::of(entry)?;
        let kind = entry.header().entry_type();
        let was = match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => None,
            was => Some(FileType::from_raw_mode(was?.st_mode)),
        };
        if was.is_some() && !(kind.is_dir() && was == Some(FileType::Directory)) {
            remove(folder, name)?;
        } else if was.is_some() {
            self.folders.insert(path.to_owned(), attributes);
            return Ok(());
        }
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.done.bytes += write_file(entry, folder, name, &attributes)?;
            }
            EntryType::Directory => {
                rustix::fs::mkdirat(folder, name, Mode::RWXU)?;
                self.folders.insert(path.to_owned(), attributes);
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().context("a link to nothing")?;
                rustix::fs::symlinkat(OsStr::from_bytes(&target), folder, name)?;
                attributes.set_by_name(folder, name)?;
            }
            EntryType::Link => {
                let target = entry.link_name_bytes().context("a link to nothing")?;
                let target = relative(Path::new(OsStr::from_bytes(&target)))?;
                let (above, last) = (target.parent(), target.file_name().context("a link to the root")?);
                let from = self.folder(above.unwrap_or(Path::new("")))?;
                rustix::fs::linkat(from, last, folder, name, AtFlags::empty())
                    .with_context(|| format!("linking it to '{}'", shown_path(&target)))?;
            }
            EntryType::Fifo | EntryType::Char | EntryType::Block => {
                make_node(entry, folder, name, &attributes)?;
            }
            other => bail!("an entry of the type {other:?}, which no file system has"),
        }
        Ok(())
    }

    /// Removes an entry of lower layers.
    fn hide(&self, folder: &OwnedFd, path: &Path) -> anyhow::Result<()> {
        let Some(name) = path.file_name().filter(|_| !self.made.contains(path)) else { return Ok(()) };
        match remove(folder, name) {
            // It hides something that was never there.
            Err(Errno::NOENT) => Ok(()),
            removed => Ok(removed?),
        }
    }

    /// Removes all of a folder that the present layer has not made.
    fn hide_all(&self, folder: &OwnedFd, path: &Path) -> anyhow::Result<()> {
        for name in names(folder)? {
            let path = path.join(&name);
            if !self.made.contains(&path) {
                remove(folder, &name)?;
            } else if let Ok(below) = rustix::fs::openat(folder, &*name, FOLDER, Mode::empty()) {
                self.hide_all(&below, &path)?;
            }
        }
        Ok(())
    }
}

const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn make_node(
    entry: &tar::Entry<'_, impl Read>,
    folder: &OwnedFd,
    name: &OsStr,
    attributes: &Attributes,
) -> anyhow::Result<()> {
    let header = entry.header();
    let kind = match header.entry_type() {
        EntryType::Fifo => FileType::Fifo,
        EntryType::Char => FileType::CharacterDevice,
        _ => FileType::BlockDevice,
    };
    let device: rustix::fs::Dev = match kind {
        FileType::Fifo => 0,
        _ => rustix::fs::makedev(
            header.device_major()?.unwrap_or_default(),
            header.device_minor()?.unwrap_or_default(),
        ),
    };
    match rustix::fs::mknodat(folder, name, kind, attributes.mode, device) {
        Err(Errno::PERM) => bail!("a device node, which root alone can make: import as root"),
        made => made?,
    }
    attributes.set_by_name(folder, name)?;
    // The umask has no say.
    set_mode(folder, name, attributes.mode)
}

/// Sets the mode of an entry that can't be opened for reading. A link that a guest has put in its place meanwhile is not followed.
pub(super) fn set_mode(folder: &OwnedFd, name: &OsStr, mode: Mode) -> anyhow::Result<()> {
    let found =
        rustix::fs::openat(folder, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let found = format!("/proc/self/fd/{}", found.as_raw_fd());
    rustix::fs::chmod(found, mode).context("setting its mode")
}

/// Returns a path of an archive below its root.
fn relative(path: &Path) -> anyhow::Result<PathBuf> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir | Component::RootDir => {}
            _ => bail!("'{}' leads out of the archive", shown_path(path)),
        }
    }
    Ok(clean)
}

fn write_file(
    entry: &mut tar::Entry<'_, impl Read>,
    folder: &OwnedFd,
    name: &OsStr,
    attributes: &Attributes,
) -> anyhow::Result<u64> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = std::fs::File::from(rustix::fs::openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?);
    let size = entry.size();
    if size >= LARGE && entry.header().entry_type() != EntryType::GNUSparse {
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size).context("making room for it")?;
    }
    let mut buffer = vec![0; 1 << 20];
    let mut written = 0;
    loop {
        let length = entry.read(&mut buffer).context("not a whole tar archive")?;
        if length == 0 {
            break;
        }
        file.write_all(&buffer[..length]).context("writing it")?;
        written += length as u64;
    }
    if written != size {
        bail!("it has {written} bytes of {size}: the archive is cut short");
    }
    attributes.set(&file)?;
    Ok(written)
}

/// Returns the names of a folder's entries.
pub(super) fn names(folder: &OwnedFd) -> rustix::io::Result<Vec<OsString>> {
    // Of a descriptor for paths alone (O_PATH) the kernel lists nothing.
    let listed = rustix::fs::openat(folder, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut names = Vec::new();
    for entry in Dir::new(listed)? {
        let name = OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    Ok(names)
}

/// Removes an entry with all that is below it.
pub(super) fn remove(folder: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(folder, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        done => return done,
    }
    let below = rustix::fs::openat(folder, name, FOLDER, Mode::empty())?;
    for name in names(&below)? {
        remove(&below, &name)?;
    }
    rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)
}
