// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A mounted file system, by system calls: the view of a program in a guest, or on the host.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::NonNull;

use rustix::fs::{self, AtFlags, CWD, Mode, OFlags, XattrFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use tombolo_files::sys;

use crate::rng;
use crate::tree::{Answer, Call, Digest, Result, Spot, Stat, Tree, first_mode};

/// Large enough for the largest file.
const MAPPED: usize = 8 << 20;

/// The tree below a mount point.
pub struct Mounted {
    root: PathBuf,
    /// Files kept open, by inode number; their mappings are made at the first use and stay.
    open: RefCell<BTreeMap<u64, Handle>>,
    /// The target of loads from a mapping that may fault.
    scratch: OwnedFd,
}

struct Handle {
    file: OwnedFd,
    map: Option<Mapping>,
}

struct Mapping(NonNull<u8>);

impl Mapping {
    fn new(file: &OwnedFd) -> Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), MAPPED, prot, MapFlags::SHARED, file, 0)? };
        NonNull::new(at.cast()).map(Mapping).ok_or(Errno::NOMEM)
    }

    fn at(&self, at: u64, len: usize) -> Result<*mut u8> {
        let at = usize::try_from(at).map_err(|_| Errno::INVAL)?;
        if at.checked_add(len).is_none_or(|end| end > MAPPED) {
            return Err(Errno::INVAL);
        }
        Ok(self.0.as_ptr().wrapping_add(at))
    }

    /// Plain loads; beyond the file's end they raise SIGBUS.
    fn load(&self, at: u64, len: usize) -> Result<Vec<u8>> {
        let from = self.at(at, len)?;
        let mut bytes = vec![0; len];
        // SAFETY: within the mapping; no other worker stores there meanwhile: the file is this worker's, or it is this worker's
        // turn.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
        Ok(bytes)
    }

    fn store(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let to = self.at(at, bytes.len())?;
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in new() with this length; nothing borrows from it.
        unsafe {
            let _ = rustix::mm::munmap(self.0.as_ptr().cast(), MAPPED);
        }
    }
}

fn nanoseconds(seconds: i64, nanoseconds: u64) -> i64 {
    seconds * 1_000_000_000 + nanoseconds as i64
}

fn in_dir(dir: &Spot, name: &[u8]) -> Result<PathBuf> {
    let mut path = dir.path.clone().ok_or(Errno::NOENT)?;
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    Ok(OsStr::from_bytes(&path).into())
}

impl Mounted {
    pub fn new(root: PathBuf) -> Result<Mounted> {
        let scratch = fs::memfd_create("scratch", fs::MemfdFlags::CLOEXEC)?;
        Ok(Mounted { root, open: RefCell::new(BTreeMap::new()), scratch })
    }

    /// Closes all that is open.
    pub fn close_all(&self) {
        self.open.borrow_mut().clear();
    }

    fn path(&self, node: &Spot) -> Result<PathBuf> {
        Ok(self.root.join(OsStr::from_bytes(node.path.as_ref().ok_or(Errno::STALE)?)))
    }

    fn name(&self, dir: &Spot, name: &[u8]) -> Result<PathBuf> {
        Ok(self.root.join(in_dir(dir, name)?))
    }

    /// Opens a file of any type that isn't kept open.
    fn open(&self, node: &Spot, flags: OFlags) -> Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        match fs::open(self.path(node)?, flags | OFlags::RDWR, Mode::empty()) {
            Err(Errno::ISDIR) => fs::open(self.path(node)?, flags | OFlags::RDONLY, Mode::empty()),
            other => other,
        }
    }

    /// Runs `f` with a descriptor: the one that is kept open, if any.
    fn with<T>(&self, node: &Spot, f: impl FnOnce(BorrowedFd<'_>) -> Result<T>) -> Result<T> {
        if let Some(handle) = self.open.borrow().get(&node.ino) {
            return f(handle.file.as_fd());
        }
        f(self.open(node, OFlags::empty())?.as_fd())
    }

    fn with_map<T>(&self, node: &Spot, f: impl FnOnce(&Mapping) -> Result<T>) -> Result<T> {
        if let Some(handle) = self.open.borrow_mut().get_mut(&node.ino) {
            if handle.map.is_none() {
                handle.map = Some(Mapping::new(&handle.file)?);
            }
            return f(handle.map.as_ref().ok_or(Errno::NOMEM)?);
        }
        f(&Mapping::new(&self.open(node, OFlags::empty())?)?)
    }

    /// Returns a path: by name if there is one, else by descriptor.
    fn by_path(&self, node: &Spot) -> Result<PathBuf> {
        match self.open.borrow().get(&node.ino) {
            Some(handle) if node.path.is_none() => Ok(proc_path(handle.file.as_fd())),
            _ => self.path(node),
        }
    }

    fn keep(&self, ino: u64, file: OwnedFd) {
        self.open.borrow_mut().insert(ino, Handle { file, map: None });
    }

    fn create(&self, dir: &Spot, name: Option<&[u8]>, what: u32, open: bool) -> Result<Answer> {
        let mode = Mode::from_raw_mode(first_mode(what));
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = match name {
            None => fs::open(self.path(dir)?, flags | OFlags::TMPFILE, mode)?,
            Some(name) => {
                let path = self.name(dir, name)?;
                match what {
                    libc::S_IFDIR => fs::mkdir(&path, mode)?,
                    libc::S_IFLNK => fs::symlink(OsStr::from_bytes(name), &path)?,
                    libc::S_IFIFO => fs::mknodat(CWD, &path, fs::FileType::Fifo, mode, 0)?,
                    _ => {
                        let file = fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
                        let ino = fs::fstat(&file)?.st_ino;
                        if open {
                            self.keep(ino, file);
                        }
                        return Ok(Answer::Number(ino));
                    }
                }
                return Ok(Answer::Number(fs::lstat(&path)?.st_ino));
            }
        };
        let ino = fs::fstat(&file)?.st_ino;
        self.keep(ino, file);
        Ok(Answer::Number(ino))
    }

    fn link(&self, node: &Spot, dir: &Spot, name: &[u8]) -> Result<()> {
        let to = self.name(dir, name)?;
        match (&node.path, self.open.borrow().get(&node.ino)) {
            (None, Some(handle)) => {
                fs::linkat(CWD, proc_path(handle.file.as_fd()), CWD, to, AtFlags::SYMLINK_FOLLOW)
            }
            _ => fs::linkat(CWD, self.path(node)?, CWD, to, AtFlags::empty()),
        }
    }

    fn append(&self, node: &Spot, bytes: &[u8]) -> Result<usize> {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
        rustix::io::write(fs::open(self.by_path(node)?, flags, Mode::empty())?, bytes)
    }

    fn read(&self, node: &Spot, at: u64, len: usize, mapped: bool) -> Result<Vec<u8>> {
        if mapped {
            return self.with_map(node, |map| map.load(at, len));
        }
        self.with(node, |file| {
            let mut got = vec![0xaa; len];
            let mut n = 0;
            while n < len {
                match rustix::io::pread(file, &mut got[n..], at + n as u64)? {
                    0 => break,
                    more => n += more,
                }
            }
            got.truncate(n);
            Ok(got)
        })
    }

    fn list(&self, dir: &Spot) -> Result<Vec<(Vec<u8>, u64, u8)>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = fs::open(self.path(dir)?, flags, Mode::empty())?;
        let mut names = Vec::new();
        for entry in fs::Dir::read_from(dir)? {
            let entry = entry?;
            let kind = match entry.file_type() {
                fs::FileType::RegularFile => libc::DT_REG,
                fs::FileType::Directory => libc::DT_DIR,
                fs::FileType::Symlink => libc::DT_LNK,
                fs::FileType::Fifo => libc::DT_FIFO,
                _ => libc::DT_UNKNOWN,
            };
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push((name.to_vec(), entry.ino(), kind));
            }
        }
        Ok(names)
    }

    fn stat(&self, node: &Spot) -> Result<Stat> {
        let st = match (&node.path, self.open.borrow().get(&node.ino)) {
            (None, Some(handle)) => fs::fstat(&handle.file)?,
            _ => fs::lstat(self.path(node)?)?,
        };
        Ok(Stat {
            ino: st.st_ino,
            mode: st.st_mode,
            nlink: u32::try_from(st.st_nlink).unwrap_or(u32::MAX),
            owner: (st.st_uid, st.st_gid),
            size: st.st_size as u64,
            blocks: st.st_blocks as u64,
            mtime: nanoseconds(st.st_mtime, st.st_mtime_nsec),
            ctime: nanoseconds(st.st_ctime, st.st_ctime_nsec),
        })
    }

    fn xattrs(&self, node: &Spot) -> Result<Vec<(Vec<u8>, Digest)>> {
        let follow = node.path.is_none();
        let path = self.by_path(node)?;
        let mut buf = vec![0; 64 << 10];
        let n = if follow { fs::listxattr(&path, &mut buf)? } else { fs::llistxattr(&path, &mut buf)? };
        let list = buf[..n].to_vec();
        let mut all = Vec::new();
        for name in list.split(|b| *b == 0).filter(|n| !n.is_empty()) {
            let key = OsStr::from_bytes(name);
            let n = if follow {
                fs::getxattr(&path, key, &mut buf)?
            } else {
                fs::lgetxattr(&path, key, &mut buf)?
            };
            all.push((name.to_vec(), Digest::of(&buf[..n])));
        }
        Ok(all)
    }

    fn set_xattr(&self, node: &Spot, name: &[u8], value: Option<&[u8]>) -> Result<()> {
        let (key, path) = (OsStr::from_bytes(name), self.by_path(node)?);
        match (value, node.path.is_none()) {
            (Some(value), true) => fs::setxattr(path, key, value, XattrFlags::empty()),
            (Some(value), false) => fs::lsetxattr(path, key, value, XattrFlags::empty()),
            (None, true) => fs::removexattr(path, key),
            (None, false) => fs::lremovexattr(path, key),
        }
    }

    fn fallocate(&self, node: &Spot, mode: u32, at: u64, len: u64) -> Result<()> {
        let mut flags = fs::FallocateFlags::empty();
        for (bit, flag) in [
            (sys::TFS_FALLOC_KEEP_SIZE, fs::FallocateFlags::KEEP_SIZE),
            (sys::TFS_FALLOC_PUNCH, fs::FallocateFlags::PUNCH_HOLE),
            (sys::TFS_FALLOC_ZERO, fs::FallocateFlags::ZERO_RANGE),
        ] {
            flags.set(flag, mode & bit != 0);
        }
        self.with(node, |file| fs::fallocate(file, flags, at, len))
    }

    fn rename(&self, from: (&Spot, &[u8]), to: (&Spot, &[u8]), flags: u32) -> Result<()> {
        let mut how = fs::RenameFlags::empty();
        how.set(fs::RenameFlags::NOREPLACE, flags & sys::TFS_RENAME_NOREPLACE != 0);
        how.set(fs::RenameFlags::EXCHANGE, flags & sys::TFS_RENAME_EXCHANGE != 0);
        let (from, to) = (self.name(from.0, from.1)?, self.name(to.0, to.1)?);
        match fs::renameat_with(CWD, &from, CWD, &to, how) {
            // A directory in use below a name that another member changed has to be looked up first (files/linux/README.md, 'Not
            // there'). The second call shows whether the names exist.
            Err(Errno::STALE) => {
                let _ = (fs::lstat(&from), fs::lstat(&to));
                fs::renameat_with(CWD, &from, CWD, &to, how)
            }
            other => other,
        }
    }

    /// Has the kernel load a byte: an error where a load of this process would end it.
    fn probe(&self, node: &Spot, at: u64) -> Result<()> {
        self.with_map(node, |map| {
            let from = map.at(at, 1)?;
            // SAFETY: one byte within the mapping; the kernel reads it, and answers EFAULT if it can't.
            let n = unsafe { libc::pwrite(self.scratch.as_raw_fd(), from.cast(), 1, 0) };
            if n == 1 {
                Ok(())
            } else {
                Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
            }
        })
    }
}

fn proc_path(file: BorrowedFd<'_>) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

impl Tree for Mounted {
    fn call(&self, call: &Call) -> Result<Answer> {
        let done = |()| Answer::Done;
        let count = |n: usize| Answer::Number(n as u64);
        match call {
            Call::Create { dir, name, what, open } => self.create(dir, name.as_deref(), *what, *open),
            Call::Link { node, dir, name } => self.link(node, dir, name).map(done),
            Call::Unlink { dir, name } => fs::unlink(self.name(dir, name)?).map(done),
            Call::Rmdir { dir, name } => fs::rmdir(self.name(dir, name)?).map(done),
            Call::Rename { from, to, flags } => {
                self.rename((&from.0, &from.1), (&to.0, &to.1), *flags).map(done)
            }
            Call::Write { node, at, len, seed, mapped: true } => {
                self.with_map(node, |map| map.store(*at, &rng::bytes(*seed, *len)))?;
                Ok(count(*len))
            }
            Call::Write { node, at, len, seed, .. } => {
                self.with(node, |file| rustix::io::pwrite(file, &rng::bytes(*seed, *len), *at)).map(count)
            }
            Call::Append { node, len, seed } => self.append(node, &rng::bytes(*seed, *len)).map(count),
            Call::Truncate { node, size } => self.with(node, |file| fs::ftruncate(file, *size)).map(done),
            Call::Falloc { node, mode, at, len } => self.fallocate(node, *mode, *at, *len).map(done),
            Call::SetXattr { node, name, len, seed } => {
                self.set_xattr(node, name, Some(&rng::bytes(*seed, *len))).map(done)
            }
            Call::DropXattr { node, name } => self.set_xattr(node, name, None).map(done),
            Call::Chmod { node, perm } => {
                fs::chmod(self.by_path(node)?, Mode::from_raw_mode(*perm)).map(done)
            }
            Call::Open { node } => {
                let file = self.open(node, OFlags::empty())?;
                self.keep(fs::fstat(&file)?.st_ino, file);
                Ok(Answer::Done)
            }
            Call::Close { node } => {
                self.open.borrow_mut().remove(&node.ino).map(|_| Answer::Done).ok_or(Errno::BADF)
            }
            Call::Read { node, at, len, mapped } => self.read(node, *at, *len, *mapped).map(Answer::Bytes),
            Call::Digest { node, at, len, mapped } => {
                self.read(node, *at, *len, *mapped).map(|got| Answer::Digest(Digest::of(&got)))
            }
            Call::Probe { node, at } => self.probe(node, *at).map(done),
            Call::List { dir } => self.list(dir).map(Answer::Names),
            Call::Lookup { dir, name } => Ok(Answer::Number(fs::lstat(self.name(dir, name)?)?.st_ino)),
            Call::Parent { dir } => Ok(Answer::Number(fs::stat(self.name(dir, b"..")?)?.st_ino)),
            Call::Stat { node } => self.stat(node).map(Answer::Stat),
            Call::Xattrs { node } => self.xattrs(node).map(Answer::Xattrs),
            Call::Readlink { node } => {
                let target = fs::readlink(self.path(node)?, Vec::new())?;
                Ok(Answer::Bytes(target.into_bytes()))
            }
            Call::Seek { node, at, hole } => self
                .with(node, |file| {
                    let to = if *hole { fs::SeekFrom::Hole(*at) } else { fs::SeekFrom::Data(*at) };
                    fs::seek(file, to)
                })
                .map(Answer::Number),
        }
    }
}
