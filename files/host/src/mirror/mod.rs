// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes one directory tree equal to another. Equal entries are left alone, so a second run copies only the changes.
//!
//! It keeps contents (holes stay holes), modes, owners, times, extended attributes (ACLs among them), symbolic links, hard links within the
//! tree, and special files. A file appears whole or not at all: it is written under a name of its own beside its place and renamed when
//! it has its owner and mode (`unfinished`), also when several runs copy into one directory. No other user can read of a copy what is not readable in the
//! source, also while it is made or when it ends in the middle.
//!
//! Both trees may change meanwhile: what is gone from the source when its turn comes is left out, and a file that is replaced while it is copied is copied
//! again. Either may belong to a guest: entries are reached below the trees' open roots only (`tree`).

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, SeekFrom, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;

use crate::shown::shown_path;

#[cfg(test)]
mod tests;
mod tree;
mod unfinished;

pub use tree::Tree;

/// Bytes copied at a time.
const PIECE: usize = 1 << 20;

/// How often a name is made that other runs make meanwhile, and an entry is copied that others replace meanwhile.
const TRIES: u32 = 100;

/// The attribute that holds the rights of further users.
const ACCESS_LIST: &CStr = c"system.posix_acl_access";

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Done {
    /// Files, directories and other inodes that were made or replaced.
    pub copied: u64,
    /// Entries that were equal already.
    pub same: u64,
    /// Entries that were removed, since the source no longer has them.
    pub removed: u64,
    /// Bytes of files that were written.
    pub bytes: u64,
    /// Device nodes of the source that were left out.
    pub devices_left_out: u64,
}

/// Which rights that lie in the files themselves are copied. What comes from a guest is made by a stranger, who would get these rights on the host.
#[derive(Clone, Copy, Debug)]
pub struct Rights {
    /// Set-id bits of files, and the attributes of security modules, capabilities among them.
    pub suid: bool,
    /// Device nodes.
    pub devices: bool,
}

impl Rights {
    /// All of them.
    pub const ALL: Rights = Rights { suid: true, devices: true };

    /// The permission bits that a copy has.
    fn mode(self, meta: &Metadata) -> u32 {
        let lost = if self.suid || meta.is_dir() { 0 } else { 0o6000 };
        meta.mode() & 0o7777 & !lost
    }
}

/// Makes the directory `to` equal to `from`, but for `rights` that are not copied. Entries that only `to` has are removed with `delete` and stay
/// otherwise. Calls `progress` for each entry.
///
/// # Errors
/// Names the first path that can't be read or written.
pub fn mirror(
    from: &Tree,
    to: &Tree,
    rights: Rights,
    delete: bool,
    progress: &mut dyn FnMut(&Done),
) -> anyhow::Result<Done> {
    let mut copy = Copy {
        from,
        to,
        rights,
        links: BTreeMap::new(),
        kept: BTreeMap::new(),
        swept: None,
        done: Done::default(),
    };
    if delete {
        // First, since what is copied may need the room.
        copy.remove_others()?;
    }
    let mut folders = Vec::new();
    for inside in from.walk(false) {
        let inside = inside?;
        if is_unfinished(from, &inside)? {
            continue;
        }
        let meta = copy.entry(&inside).with_context(|| shown_path(&to.name().join(&inside)).to_string())?;
        let Some(meta) = meta else { continue };
        if meta.is_dir() {
            folders.push((inside, meta));
        }
        progress(&copy.done);
    }
    // Last, since changes in a directory change its time; the innermost first.
    for (inside, meta) in folders.iter().rev() {
        match copy.folder(inside, meta) {
            Err(_) if copy.source(inside)?.is_none() => {}
            done => done.with_context(|| shown_path(&to.name().join(inside)).to_string())?,
        }
    }
    Ok(copy.done)
}

/// A file's device and inode number.
type Id = (u64, u64);

fn id(meta: &Metadata) -> Id {
    (meta.dev(), meta.ino())
}

struct Copy<'a> {
    from: &'a Tree,
    to: &'a Tree,
    rights: Rights,
    /// Files with several names: the name that was copied, and what the file was then. Its number may be another file's since.
    links: BTreeMap<Id, (PathBuf, Metadata)>,
    /// Files of the target that have several names and needed no copy: the file of the source that each is.
    kept: BTreeMap<Id, Id>,
    /// The directory, from the root, in which this run has removed last what dead runs left; `None`: in none yet.
    swept: Option<PathBuf>,
    done: Done,
}

impl Copy<'_> {
    /// Copies an entry, again if another came in its place meanwhile; of a directory, only that it is there. Returns what it is in the source; `None`: it
    /// is gone from there.
    fn entry(&mut self, inside: &Path) -> anyhow::Result<Option<Metadata>> {
        let mut before = self.source(inside)?;
        for left in (0..TRIES).rev() {
            if before.is_none() {
                break;
            }
            match self.entry_once(inside) {
                Ok(meta) => return Ok(Some(meta)),
                Err(e) => {
                    let now = self.source(inside)?;
                    if left == 0 || now.as_ref().map(id) == before.as_ref().map(id) {
                        return Err(e);
                    }
                    before = now;
                }
            }
        }
        Ok(None)
    }

    fn entry_once(&mut self, inside: &Path) -> anyhow::Result<Metadata> {
        let (source, target) = (self.from.place(inside)?, self.to.place(inside)?);
        let meta = fs::symlink_metadata(&source.path)?;
        let there = present(&target.path)?;
        if meta.is_dir() {
            if let Some(there) = there.as_ref().filter(|there| there.is_dir()) {
                self.narrow(&source.path, &target.path, &meta, there)?;
                self.done.same += 1;
            } else {
                clear(&target.path, there.as_ref())?;
                // What is in it may be readable: its own mode comes last.
                match DirBuilder::new().mode(0o700).create(&target.path) {
                    Ok(()) => self.done.copied += 1,
                    // Another run has made it meanwhile.
                    Err(_) if present(&target.path)?.is_some_and(|there| there.is_dir()) => {
                        self.done.same += 1;
                    }
                    Err(e) => return Err(e.into()),
                }
            }
        } else if !self.rights.devices && is_device(&meta) {
            self.done.devices_left_out += 1;
        } else {
            self.file(inside, &source.path, &target.path, &meta, there.as_ref())?;
        }
        Ok(meta)
    }

    /// Takes from a directory that is there already the rights that the source does not give, before anything is put into it.
    fn narrow(&self, source: &Path, target: &Path, meta: &Metadata, there: &Metadata) -> anyhow::Result<()> {
        let same_owner = (there.uid(), there.gid()) == (meta.uid(), meta.gid());
        let same_list = || -> anyhow::Result<bool> {
            Ok(attributes_of(source)?.get(ACCESS_LIST) == attributes_of(target)?.get(ACCESS_LIST))
        };
        // The owner's rights let this run write.
        let kept = if same_owner && same_list()? { self.rights.mode(meta) | 0o7700 } else { 0o7700 };
        let mode = there.mode() & 0o7777;
        if mode & kept != mode {
            set_mode(target, mode & kept)?;
        }
        if !same_owner {
            std::os::unix::fs::lchown(target, Some(meta.uid()), Some(meta.gid()))?;
        }
        Ok(())
    }

    /// Copies what is no directory.
    fn file(
        &mut self,
        inside: &Path,
        source: &Path,
        target: &Path,
        meta: &Metadata,
        there: Option<&Metadata>,
    ) -> anyhow::Result<()> {
        if meta.nlink() > 1 {
            match self.links.get(&id(meta)) {
                Some((first, then)) if has_contents_of(meta, then) => {
                    let first = self.to.place(first)?;
                    return self.link(&first.path, target, there);
                }
                _ => self.links.insert(id(meta), (inside.to_owned(), meta.clone())),
            };
        }
        if let Some(there) = there.filter(|t| is_same(meta, t, source, target)) {
            if there.nlink() > 1 && !self.is_alone(meta, there) {
                return self.replace(inside, source, target, meta, Some(there));
            }
            self.done.same += 1;
            return self.attributes(source, target, meta);
        }
        self.replace(inside, source, target, meta, there)
    }

    /// Returns whether a file with several names can be the copy of this one: another of its names may belong to a different file of the source.
    fn is_alone(&mut self, meta: &Metadata, there: &Metadata) -> bool {
        meta.nlink() > 1 && *self.kept.entry(id(there)).or_insert(id(meta)) == id(meta)
    }

    /// Makes a further name of a copied file.
    fn link(&mut self, first: &Path, target: &Path, there: Option<&Metadata>) -> anyhow::Result<()> {
        let mut there = there.cloned();
        for left in (0..TRIES).rev() {
            let wanted = fs::symlink_metadata(first)?;
            if there.as_ref().is_some_and(|t| id(t) == id(&wanted)) {
                self.done.same += 1;
                break;
            }
            clear(target, there.as_ref())?;
            match fs::hard_link(first, target) {
                Ok(()) => {
                    self.done.copied += 1;
                    break;
                }
                // Another run has made the name meanwhile, or has replaced the first one.
                Err(e)
                    if matches!(e.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound)
                        && left > 0 =>
                {
                    there = present(target)?;
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn replace(
        &mut self,
        inside: &Path,
        source: &Path,
        target: &Path,
        meta: &Metadata,
        there: Option<&Metadata>,
    ) -> anyhow::Result<()> {
        if there.is_some_and(Metadata::is_dir) {
            clear(target, there)?;
        }
        self.sweep(inside, target)?;
        let kind = meta.file_type();
        if kind.is_file() {
            // Open until it has its place: another run takes it for a dead one's otherwise.
            let (new, file) = unfinished::create(target)?;
            let written = contents(source, meta, &file);
            let done = written.and_then(|bytes| {
                self.done.bytes += bytes;
                self.finish(source, &new, target, meta)
            });
            return gone_if_failed(done, &new);
        }
        let new = unfinished::beside(target);
        if kind.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(source)?, &new)?;
        } else {
            let what = if kind.is_fifo() {
                FileType::Fifo
            } else if kind.is_socket() {
                FileType::Socket
            } else if kind.is_block_device() {
                FileType::BlockDevice
            } else {
                FileType::CharacterDevice
            };
            rustix::fs::mknodat(CWD, &new, what, Mode::from_raw_mode(meta.mode() & 0o700), meta.rdev())?;
        }
        let done = self.finish(source, &new, target, meta);
        gone_if_failed(done, &new)
    }

    /// Gives a new entry its attributes and its place.
    fn finish(&mut self, source: &Path, new: &Path, target: &Path, meta: &Metadata) -> anyhow::Result<()> {
        self.attributes(source, new, meta)?;
        fs::rename(new, target)?;
        self.done.copied += 1;
        Ok(())
    }

    /// Removes what dead runs left in the directory of `inside`, whose place is `target`, once for its entries in a row.
    fn sweep(&mut self, inside: &Path, target: &Path) -> anyhow::Result<()> {
        let (Some(folder), Some(there)) = (inside.parent(), target.parent()) else { return Ok(()) };
        if self.swept.as_deref() != Some(folder) {
            unfinished::sweep(there)?;
            self.swept = Some(folder.to_owned());
        }
        Ok(())
    }

    /// Removes entries that only the target has.
    fn remove_others(&mut self) -> anyhow::Result<()> {
        for inside in self.to.walk(true) {
            let inside = inside?;
            let is_unfinished = is_unfinished(self.to, &inside)?;
            if inside.as_os_str().is_empty() || (!is_unfinished && self.has_source(&inside)?) {
                continue;
            }
            let remove = || {
                let place = self.to.place(&inside)?;
                let meta = fs::symlink_metadata(&place.path)?;
                if is_unfinished {
                    // A living run's is not this one's to remove.
                    return unfinished::remove_if_dead(&place.path);
                }
                let done =
                    if meta.is_dir() { fs::remove_dir(&place.path) } else { fs::remove_file(&place.path) };
                done.map(|()| true)
            };
            match remove() {
                Ok(removed) => self.done.removed += u64::from(removed),
                // By another run.
                Err(e) if is_missing(&e) => {}
                // Another run has made something in it, or an entry of a run that may be alive is in it.
                Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => {}
                Err(e) => {
                    return Err(e)
                        .with_context(|| format!("removing {}", shown_path(&self.to.name().join(&inside))));
                }
            }
        }
        Ok(())
    }

    /// Returns whether the source has an entry; it has none where a directory on the way is a link by now.
    fn has_source(&self, inside: &Path) -> anyhow::Result<bool> {
        match self.from.place(inside) {
            Err(e) if e.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => Ok(false),
            _ => Ok(self.source(inside)?.is_some()),
        }
    }

    /// Returns what an entry is in the source; `None`: it is gone.
    fn source(&self, inside: &Path) -> anyhow::Result<Option<Metadata>> {
        match self.from.place(inside) {
            Ok(place) => present(&place.path),
            Err(e) if is_missing(&e) => Ok(None),
            Err(e) => Err(e).with_context(|| shown_path(&self.from.name().join(inside)).to_string()),
        }
    }

    /// Copies the attributes of a directory.
    fn folder(&self, inside: &Path, meta: &Metadata) -> anyhow::Result<()> {
        self.attributes(&self.from.place(inside)?.path, &self.to.place(inside)?.path, meta)
    }

    /// Copies owner, mode, extended attributes and times that differ.
    fn attributes(&self, source: &Path, target: &Path, meta: &Metadata) -> anyhow::Result<()> {
        let there = fs::symlink_metadata(target)?;
        if (there.uid(), there.gid()) != (meta.uid(), meta.gid()) {
            std::os::unix::fs::lchown(target, Some(meta.uid()), Some(meta.gid()))?;
        }
        extended(source, target, self.rights)?;
        // After the owner, whose change clears set-id bits, and the ACL, which is a part of the mode.
        let (mode, wanted) = (fs::symlink_metadata(target)?.mode() & 0o7777, self.rights.mode(meta));
        if !meta.is_symlink() && mode != wanted {
            set_mode(target, wanted)?;
        }
        if (there.mtime(), there.mtime_nsec()) != (meta.mtime(), meta.mtime_nsec()) {
            let times = Timestamps {
                last_access: Timespec { tv_sec: meta.atime(), tv_nsec: meta.atime_nsec() },
                last_modification: Timespec { tv_sec: meta.mtime(), tv_nsec: meta.mtime_nsec() },
            };
            rustix::fs::utimensat(CWD, target, &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }
}

fn is_device(meta: &Metadata) -> bool {
    meta.file_type().is_block_device() || meta.file_type().is_char_device()
}

/// Removes the entry at a path, a directory with all that is in it. Another run may do the same.
fn clear(path: &Path, there: Option<&Metadata>) -> io::Result<()> {
    let removed = match there {
        None => Ok(()),
        Some(there) if there.is_dir() => fs::remove_dir_all(path),
        Some(_) => fs::remove_file(path),
    };
    match removed {
        Err(e) if !is_missing(&e) => Err(e),
        _ => Ok(()),
    }
}

/// Removes an entry that did not become whole: where a disk is full it would keep its room. The first error is the one to tell.
fn gone_if_failed(done: anyhow::Result<()>, new: &Path) -> anyhow::Result<()> {
    if done.is_err() {
        let _left_to_the_next_run = fs::remove_file(new);
    }
    done
}

/// Returns whether an entry is one that a run has not finished. They are no directories: one of such a name is the user's.
fn is_unfinished(tree: &Tree, inside: &Path) -> anyhow::Result<bool> {
    if !inside.file_name().is_some_and(unfinished::is_named) {
        return Ok(false);
    }
    match tree.place(inside) {
        Ok(place) => Ok(!present(&place.path)?.is_some_and(|there| there.is_dir())),
        Err(e) if is_missing(&e) => Ok(true),
        Err(e) => Err(e).with_context(|| shown_path(&tree.name().join(inside)).to_string()),
    }
}

/// Sets the mode of what is at a path, which is changed through no link.
fn set_mode(path: &Path, mode: u32) -> anyhow::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let entry = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&entry)?.st_mode) == FileType::Symlink {
        bail!("it became a link while it was copied");
    }
    Ok(fs::set_permissions(tree::through(&entry), fs::Permissions::from_mode(mode))?)
}

/// On a mount, ESTALE tells that another member has removed what the kernel had found there.
fn is_missing(e: &io::Error) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound, StaleNetworkFileHandle};
    matches!(e.kind(), NotFound | NotADirectory | StaleNetworkFileHandle)
}

fn present(path: &Path) -> anyhow::Result<Option<Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta)),
        Err(e) if is_missing(&e) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn has_contents_of(meta: &Metadata, other: &Metadata) -> bool {
    (meta.len(), meta.mtime(), meta.mtime_nsec()) == (other.len(), other.mtime(), other.mtime_nsec())
}

/// Returns whether contents need no copy: for files by size and modification time, as rsync does it.
fn is_same(meta: &Metadata, there: &Metadata, source: &Path, target: &Path) -> bool {
    if meta.file_type() != there.file_type() {
        return false;
    }
    if meta.is_file() {
        return has_contents_of(meta, there);
    }
    if meta.is_symlink() {
        return fs::read_link(source).ok() == fs::read_link(target).ok();
    }
    meta.rdev() == there.rdev()
}

/// Copies a file's data; holes stay holes. Returns the bytes written.
fn contents(source: &Path, meta: &Metadata, to: &File) -> anyhow::Result<u64> {
    // A pipe in its place would not be waited for.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let from = File::options().read(true).custom_flags(flags.bits().try_into()?).open(source)?;
    let opened = from.metadata()?;
    if (id(&opened), opened.is_file()) != (id(meta), true) {
        bail!("another file came in its place while it was copied");
    }
    let mut size = opened.len();
    let mut buffer = vec![0; PIECE];
    let (mut at, mut written) = (0, 0);
    'data: while let Some((start, end)) = next_data(&from, at, size)? {
        at = start;
        while at < end {
            let piece = usize::try_from(end - at).map_or(PIECE, |n| n.min(PIECE));
            let n = rustix::io::pread(&from, &mut buffer[..piece], at)?;
            if n == 0 {
                // The source was truncated meanwhile.
                size = at;
                break 'data;
            }
            let mut put = 0;
            while put < n {
                put += rustix::io::pwrite(to, &buffer[put..n], at + put as u64)?;
            }
            (at, written) = (at + n as u64, written + n as u64);
        }
    }
    // The size comes after the data, also on the disk: should the host fail, the next run tells by the size that data is missing.
    if to.metadata()?.len() < size {
        if written > 0 {
            to.sync_data()?;
        }
        to.set_len(size)?;
    }
    Ok(written)
}

/// Returns the next range of data at or after `at`; on a file system without SEEK_DATA all of the file is data.
fn next_data(file: &File, at: u64, size: u64) -> anyhow::Result<Option<(u64, u64)>> {
    if at >= size {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file.as_fd(), SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((at, size))),
        Err(e) => return Err(e.into()),
    };
    match rustix::fs::seek(file.as_fd(), SeekFrom::Hole(start)) {
        Ok(end) => Ok(Some((start, end.min(size)))),
        // The source was truncated meanwhile.
        Err(Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Returns all extended attributes of a path; none if the file system has none.
fn attributes_of(path: &Path) -> anyhow::Result<BTreeMap<CString, Vec<u8>>> {
    let mut names = vec![0; 64 << 10];
    let len = match rustix::fs::llistxattr(path, &mut names) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => return Ok(BTreeMap::new()),
        Err(e) => return Err(e).context("its attributes"),
    };
    let mut all = BTreeMap::new();
    for name in names[..len].split_inclusive(|&b| b == 0) {
        let name = CStr::from_bytes_with_nul(name).context("an attribute's name ends with a zero")?;
        // Labels of the host's own security module have no meaning elsewhere.
        if name.to_bytes() == b"security.selinux" {
            continue;
        }
        let mut value = vec![0; 64 << 10];
        let len = rustix::fs::lgetxattr(path, name, &mut value)
            .with_context(|| format!("attribute {}", name.to_string_lossy()))?;
        value.truncate(len);
        all.insert(name.to_owned(), value);
    }
    Ok(all)
}

fn extended(source: &Path, target: &Path, rights: Rights) -> anyhow::Result<()> {
    let (mut wanted, there) = (attributes_of(source)?, attributes_of(target)?);
    if !rights.suid {
        wanted.retain(|name, _| !name.to_bytes().starts_with(b"security."));
    }
    for (name, value) in wanted.iter().filter(|(name, value)| there.get(*name) != Some(value)) {
        rustix::fs::lsetxattr(target, name.as_c_str(), value, XattrFlags::empty())
            .with_context(|| format!("attribute {}", name.to_string_lossy()))?;
    }
    for name in there.keys().filter(|name| !wanted.contains_key(*name)) {
        rustix::fs::lremovexattr(target, name.as_c_str())
            .with_context(|| format!("attribute {}", name.to_string_lossy()))?;
    }
    Ok(())
}
