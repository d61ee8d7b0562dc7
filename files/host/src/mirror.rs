// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes one directory tree equal to another. Equal entries are left alone, so a second run copies only the changes.
//!
//! It keeps contents (holes stay holes), modes, owners, times, extended attributes (ACLs among them), symbolic links, hard links within the
//! tree, and special files. A file appears whole or not at all: it is written under a name of its own beside its place and renamed.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{AtFlags, CWD, FileType, Mode, SeekFrom, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use walkdir::WalkDir;

/// The name under which a file is written until it is whole.
const UNFINISHED: &str = ".tombolo-unfinished";
/// Bytes copied at a time.
const PIECE: usize = 1 << 20;

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
}

/// Makes the directory `to` equal to `from`. Entries that only `to` has are removed with `delete` and stay otherwise. Calls `progress` for
/// each entry.
///
/// # Errors
/// Names the first path that can't be read or written.
pub fn mirror(from: &Path, to: &Path, delete: bool, progress: &mut dyn FnMut(&Done)) -> anyhow::Result<Done> {
    let mut copy = Copy { from, to, links: BTreeMap::new(), done: Done::default() };
    let mut folders = Vec::new();
    for entry in WalkDir::new(from).sort_by_file_name() {
        let entry = entry.with_context(|| format!("reading {}", from.display()))?;
        let inside = entry.path().strip_prefix(from).context("a walk stays below its root")?.to_owned();
        if entry.file_name() == UNFINISHED {
            continue;
        }
        let meta = fs::symlink_metadata(entry.path()).with_context(|| entry.path().display().to_string())?;
        copy.entry(&inside, &meta).with_context(|| to.join(&inside).display().to_string())?;
        if meta.is_dir() {
            folders.push((inside, meta));
        }
        progress(&copy.done);
    }
    if delete {
        copy.remove_others()?;
    }
    // Last, since changes in a directory change its time; the innermost first.
    for (inside, meta) in folders.iter().rev() {
        copy.attributes(inside, meta).with_context(|| to.join(inside).display().to_string())?;
    }
    Ok(copy.done)
}

struct Copy<'a> {
    from: &'a Path,
    to: &'a Path,
    /// Files with several names, by device and inode: the name that was copied.
    links: BTreeMap<(u64, u64), PathBuf>,
    done: Done,
}

impl Copy<'_> {
    fn entry(&mut self, inside: &Path, meta: &Metadata) -> anyhow::Result<()> {
        let (source, target) = (self.from.join(inside), self.to.join(inside));
        let there = present(&target)?;
        if meta.is_dir() {
            if there.as_ref().is_some_and(Metadata::is_dir) {
                self.done.same += 1;
            } else {
                self.clear(&target, there.as_ref())?;
                fs::create_dir(&target)?;
                self.done.copied += 1;
            }
            return Ok(());
        }
        if meta.nlink() > 1 {
            if let Some(first) = self.links.get(&(meta.dev(), meta.ino())).cloned() {
                return self.link(&first, &target, there.as_ref());
            }
            self.links.insert((meta.dev(), meta.ino()), target.clone());
        }
        if let Some(there) = there.as_ref().filter(|t| is_same(meta, t, &source, &target)) {
            if there.nlink() > 1 && meta.nlink() == 1 {
                // Its other name may belong to a different file of the source.
                self.replace(&source, &target, meta, Some(there))?;
            } else {
                self.done.same += 1;
            }
        } else {
            self.replace(&source, &target, meta, there.as_ref())?;
        }
        self.attributes(inside, meta)
    }

    /// Makes a further name of a copied file.
    fn link(&mut self, first: &Path, target: &Path, there: Option<&Metadata>) -> anyhow::Result<()> {
        let wanted = fs::symlink_metadata(first)?;
        if there.is_some_and(|t| (t.dev(), t.ino()) == (wanted.dev(), wanted.ino())) {
            self.done.same += 1;
            return Ok(());
        }
        self.clear(target, there)?;
        fs::hard_link(first, target)?;
        self.done.copied += 1;
        Ok(())
    }

    fn replace(
        &mut self,
        source: &Path,
        target: &Path,
        meta: &Metadata,
        there: Option<&Metadata>,
    ) -> anyhow::Result<()> {
        if there.is_some_and(Metadata::is_dir) {
            self.clear(target, there)?;
        }
        let new = target.with_file_name(UNFINISHED);
        self.clear(&new, present(&new)?.as_ref())?;
        let kind = meta.file_type();
        if kind.is_file() {
            self.done.bytes += contents(source, &new)?;
        } else if kind.is_symlink() {
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
            rustix::fs::mknodat(CWD, &new, what, Mode::from_raw_mode(meta.mode() & 0o777), meta.rdev())?;
        }
        fs::rename(&new, target)?;
        self.done.copied += 1;
        Ok(())
    }

    /// Removes the entry at a path.
    fn clear(&mut self, path: &Path, there: Option<&Metadata>) -> anyhow::Result<()> {
        match there {
            None => {}
            Some(there) if there.is_dir() => fs::remove_dir_all(path)?,
            Some(_) => fs::remove_file(path)?,
        }
        Ok(())
    }

    /// Removes entries that only the target has.
    fn remove_others(&mut self) -> anyhow::Result<()> {
        for entry in WalkDir::new(self.to).min_depth(1).contents_first(true) {
            let entry = entry.with_context(|| format!("reading {}", self.to.display()))?;
            let inside = entry.path().strip_prefix(self.to).context("a walk stays below its root")?;
            if present(&self.from.join(inside))?.is_some() {
                continue;
            }
            let removed = if entry.file_type().is_dir() {
                fs::remove_dir(entry.path())
            } else {
                fs::remove_file(entry.path())
            };
            removed.with_context(|| format!("removing {}", entry.path().display()))?;
            self.done.removed += 1;
        }
        Ok(())
    }

    /// Copies owner, mode, extended attributes and times that differ.
    fn attributes(&self, inside: &Path, meta: &Metadata) -> anyhow::Result<()> {
        let (source, target) = (self.from.join(inside), self.to.join(inside));
        let there = fs::symlink_metadata(&target)?;
        if (there.uid(), there.gid()) != (meta.uid(), meta.gid()) {
            std::os::unix::fs::lchown(&target, Some(meta.uid()), Some(meta.gid()))?;
        }
        extended(&source, &target)?;
        // After the owner, whose change clears set-id bits, and the ACL, which is a part of the mode.
        let mode = fs::symlink_metadata(&target)?.mode() & 0o7777;
        if !meta.is_symlink() && mode != meta.mode() & 0o7777 {
            fs::set_permissions(&target, fs::Permissions::from_mode(meta.mode() & 0o7777))?;
        }
        if (there.mtime(), there.mtime_nsec()) != (meta.mtime(), meta.mtime_nsec()) {
            let times = Timestamps {
                last_access: Timespec { tv_sec: meta.atime(), tv_nsec: meta.atime_nsec() },
                last_modification: Timespec { tv_sec: meta.mtime(), tv_nsec: meta.mtime_nsec() },
            };
            rustix::fs::utimensat(CWD, &target, &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }
}

fn present(path: &Path) -> anyhow::Result<Option<Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

/// Returns whether contents need no copy: for files by size and modification time, as rsync does it.
fn is_same(meta: &Metadata, there: &Metadata, source: &Path, target: &Path) -> bool {
    if meta.file_type() != there.file_type() {
        return false;
    }
    if meta.is_file() {
        return (meta.len(), meta.mtime(), meta.mtime_nsec())
            == (there.len(), there.mtime(), there.mtime_nsec());
    }
    if meta.is_symlink() {
        return fs::read_link(source).ok() == fs::read_link(target).ok();
    }
    meta.rdev() == there.rdev()
}

/// Copies a file's data; holes stay holes. Returns the bytes written.
fn contents(source: &Path, new: &Path) -> anyhow::Result<u64> {
    let from = File::open(source).with_context(|| source.display().to_string())?;
    let to = File::options().write(true).create_new(true).open(new)?;
    let size = from.metadata()?.len();
    to.set_len(size)?;
    let mut buffer = vec![0; PIECE];
    let (mut at, mut written) = (0, 0);
    while let Some((start, end)) = next_data(&from, at, size)? {
        at = start;
        while at < end {
            let piece = usize::try_from(end - at).map_or(PIECE, |n| n.min(PIECE));
            let n = rustix::io::pread(&from, &mut buffer[..piece], at)?;
            if n == 0 {
                // The source was truncated meanwhile.
                to.set_len(at)?;
                return Ok(written);
            }
            let mut put = 0;
            while put < n {
                put += rustix::io::pwrite(&to, &buffer[put..n], at + put as u64)?;
            }
            (at, written) = (at + n as u64, written + n as u64);
        }
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
    Ok(Some((start, rustix::fs::seek(file.as_fd(), SeekFrom::Hole(start))?.min(size))))
}

/// Returns all extended attributes of a path; none if the file system has none.
fn attributes_of(path: &Path) -> anyhow::Result<BTreeMap<CString, Vec<u8>>> {
    let mut names = vec![0; 64 << 10];
    let len = match rustix::fs::llistxattr(path, &mut names) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => return Ok(BTreeMap::new()),
        Err(e) => return Err(e).with_context(|| format!("attributes of {}", path.display())),
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
            .with_context(|| format!("attribute {} of {}", name.to_string_lossy(), path.display()))?;
        value.truncate(len);
        all.insert(name.to_owned(), value);
    }
    Ok(all)
}

fn extended(source: &Path, target: &Path) -> anyhow::Result<()> {
    let (wanted, there) = (attributes_of(source)?, attributes_of(target)?);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Describes all that a copy must keep, as text, without the times of directories that the copy itself changes.
    fn picture(root: &Path) -> Vec<String> {
        let mut numbers = BTreeMap::new();
        let mut lines = Vec::new();
        for entry in WalkDir::new(root).sort_by_file_name() {
            let entry = entry.unwrap();
            let meta = fs::symlink_metadata(entry.path()).unwrap();
            let inside = entry.path().strip_prefix(root).unwrap();
            let next = numbers.len();
            let inode = *numbers.entry(meta.ino()).or_insert(next);
            let held = if meta.is_file() { fs::read(entry.path()).unwrap() } else { Vec::new() };
            let link = fs::read_link(entry.path()).ok();
            let size = if meta.is_dir() { 0 } else { meta.len() };
            let attributes = attributes_of(entry.path()).unwrap();
            lines.push(format!(
                "{inside:?} {:o} {} {} {size} {} {} {inode} {link:?} {attributes:?} {:x?}",
                meta.mode(),
                meta.uid(),
                meta.gid(),
                meta.mtime(),
                meta.mtime_nsec(),
                held.iter().fold(0u64, |sum, b| sum.wrapping_mul(31).wrapping_add(u64::from(*b)))
            ));
        }
        lines
    }

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("folder")).unwrap();
        fs::write(at("folder/file"), "contents").unwrap();
        fs::set_permissions(at("folder/file"), fs::Permissions::from_mode(0o4711)).unwrap();
        fs::hard_link(at("folder/file"), at("second name")).unwrap();
        std::os::unix::fs::symlink("nowhere", at("link")).unwrap();
        rustix::fs::mknodat(CWD, at("pipe"), FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
        let sparse = File::create(at("sparse")).unwrap();
        sparse.set_len(64 << 20).unwrap();
        rustix::io::pwrite(&sparse, b"in the middle", 32 << 20).unwrap();
        rustix::fs::setxattr(at("sparse"), c"user.note", b"kept", XattrFlags::empty()).unwrap();
        fs::set_permissions(at("folder"), fs::Permissions::from_mode(0o1755)).unwrap();
        dir
    }

    fn run(from: &Path, to: &Path, delete: bool) -> Done {
        mirror(from, to, delete, &mut |_| {}).unwrap()
    }

    #[test]
    fn a_copy_has_everything_and_a_second_run_copies_nothing() {
        let (from, to) = (tree(), tempfile::tempdir().unwrap());
        let first = run(from.path(), to.path(), false);
        assert_eq!(picture(from.path()), picture(to.path()));
        assert!(fs::metadata(to.path().join("sparse")).unwrap().blocks() < 1 << 10, "the hole was filled");
        assert!(first.bytes < 1 << 20, "{first:?}");
        let second = run(from.path(), to.path(), true);
        assert_eq!((second.copied, second.removed, second.bytes), (0, 0, 0), "{second:?}");
        assert_eq!(picture(from.path()), picture(to.path()));
    }

    #[test]
    fn changes_of_every_kind_arrive_and_only_they_are_copied() {
        let (from, to) = (tree(), tempfile::tempdir().unwrap());
        run(from.path(), to.path(), false);
        let at = |name: &str| from.path().join(name);
        // A file becomes a directory, a directory a file, a link another, a second name a file of its own.
        fs::remove_file(at("pipe")).unwrap();
        fs::create_dir(at("pipe")).unwrap();
        fs::write(at("pipe/inside"), "x").unwrap();
        fs::remove_file(at("link")).unwrap();
        std::os::unix::fs::symlink("elsewhere", at("link")).unwrap();
        fs::remove_file(at("second name")).unwrap();
        fs::write(at("second name"), "contents").unwrap();
        rustix::fs::removexattr(at("sparse"), c"user.note").unwrap();
        fs::write(to.path().join("only there"), "y").unwrap();
        let kept = run(from.path(), to.path(), false);
        assert!(to.path().join("only there").exists() && kept.removed == 0, "{kept:?}");
        let done = run(from.path(), to.path(), true);
        assert_eq!((done.removed, done.bytes), (1, 0), "{done:?}");
        assert_eq!(picture(from.path()), picture(to.path()));
    }

    #[test]
    fn what_an_interrupted_run_left_is_no_part_of_the_tree() {
        let (from, to) = (tree(), tempfile::tempdir().unwrap());
        fs::write(to.path().join(UNFINISHED), "half").unwrap();
        run(from.path(), to.path(), true);
        assert_eq!(picture(from.path()), picture(to.path()));
    }

    #[test]
    fn what_can_not_be_written_is_named() {
        let from = tree();
        let said = mirror(from.path(), Path::new("/proc/nowhere"), false, &mut |_| {}).unwrap_err();
        assert!(said.to_string().contains("/proc/nowhere"), "{said:#}");
    }
}
