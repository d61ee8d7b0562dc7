// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state of a mount, and which function answers a request: each takes the request's body and gives a reply. The kernel checks permissions (`default_permissions`) with the
//! attributes that it just asked for; no result is cached beyond one call, so another member's changes show at once.

use libc::{S_IFDIR, S_IFLNK, S_IFMT};
use rustix::io::Errno;

use super::abi::{self, Cursor, Header, Out, op};
use super::kept::Kept;
use super::locks::{Locks, Request};
use super::nodes::Nodes;
use super::options::AccessTimes;
use super::replies::{attr_out, entry_out, open_out, statx_out};
use crate::fs::{Filesystem, Handle, Pin, Result};
use crate::sys;

/// Each further try means that the file that was found has been removed or replaced.
const TRIES: usize = 100;

/// A piece of a reply that is not copied: `len` bytes of zone memory, or zeros.
#[derive(Clone, Copy)]
pub struct Piece {
    /// The memory; null: zeros.
    pub from: *const u8,
    pub len: usize,
}

/// A reply to the kernel.
pub enum Reply<'a> {
    /// No reply, not even an error (FORGET).
    None,
    Body(Out),
    /// As `Body`, of a CREATE whose name was there: watchers have nothing to hear.
    Found(Out),
    /// Bytes of the zone's memory, which the pin keeps from being reused.
    Zone(Vec<Piece>, Pin<'a>),
}

/// The state of one mount.
pub struct Server {
    /// The file system.
    pub fs: Filesystem,
    /// The kernel's references.
    pub nodes: Nodes,
    /// Files that were looked up a moment ago.
    pub(crate) kept: Kept,
    /// File locks.
    pub locks: Locks,
    /// When reads store the time of the access.
    pub access_times: AccessTimes,
    /// Reads of directories store none.
    pub nodiratime: bool,
    /// The zone is a device's memory, which has no pages: the kernel can't read it by itself.
    pub device_memory: bool,
}

pub(super) type Answer<'a> = Result<Reply<'a>>;

pub(super) fn empty<'a>() -> Answer<'a> {
    Ok(Reply::Body(Out::new()))
}

pub(super) fn short() -> Errno {
    Errno::INVAL
}

impl Server {
    /// Serves a file system in ordinary memory, with access times.
    pub fn new(fs: Filesystem) -> Server {
        let nodes = Nodes::new(fs.root());
        Server {
            fs,
            nodes,
            kept: Kept::default(),
            locks: Locks::default(),
            access_times: AccessTimes::default(),
            nodiratime: false,
            device_memory: false,
        }
    }

    /// Answers one request, and reports its changes to watchers.
    pub fn answer<'a>(&'a self, h: &Header, c: Cursor<'_>) -> Answer<'a> {
        if !self.fs.change_wanted() {
            return self.tried(h, c);
        }
        let subject = self.subject(h, c);
        let answer = self.tried(h, c);
        if answer.as_ref().is_ok_and(|reply| !matches!(reply, Reply::Found(_))) {
            self.tell(h, c, &subject);
        }
        answer
    }

    fn tried<'a>(&'a self, h: &Header, c: Cursor<'_>) -> Answer<'a> {
        let answer = self.carry_out(h, c);
        match answer {
            Err(Errno::STALE) => self.kept.met_stale(),
            // Removed files that are kept take room. A request that found none has changed nothing.
            Err(Errno::NOSPC | Errno::DQUOT) if self.kept.let_removed_go(&self.fs, &self.nodes) => {
                return self.carry_out(h, c);
            }
            _ => {}
        }
        answer
    }

    /// Finds a name. Another file may be there before the kernel is told of the one that was found.
    fn look_up(&self, dir: Handle, number: u64, name: &[u8]) -> Answer<'_> {
        for _ in 0..TRIES {
            let found = self.fs.lookup(dir, name)?.0;
            match self.kept.keep(&self.fs, &self.nodes, found).and_then(|()| self.entry(found, number, name))
            {
                Err(Errno::STALE | Errno::NOENT) => self.kept.met_stale(),
                done => return done,
            }
        }
        Err(Errno::NOENT)
    }

    fn carry_out<'a>(&'a self, h: &Header, mut c: Cursor<'_>) -> Answer<'a> {
        match h.opcode {
            op::LOOKUP => {
                let name = c.name().ok_or_else(short)?;
                let dir = self.nodes.handle(h.node);
                match name {
                    b"." => self.entry(dir, h.node, name),
                    b".." => self.entry(self.fs.parent(dir)?.into(), h.node, name),
                    _ => self.look_up(dir, h.node, name),
                }
            }
            op::FORGET => {
                self.nodes.forget(h.node, c.u64().ok_or_else(short)?);
                Ok(Reply::None)
            }
            op::BATCH_FORGET => {
                let count = c.u64().ok_or_else(short)? & 0xffff_ffff;
                for _ in 0..count {
                    let (Some(ino), Some(n)) = (c.u64(), c.u64()) else { break };
                    self.nodes.forget(ino, n);
                }
                Ok(Reply::None)
            }
            op::GETATTR => Ok(Reply::Body(attr_out(&self.attributes(h.node)?))),
            op::STATX => Ok(Reply::Body(statx_out(&self.attributes(h.node)?))),
            op::SETATTR => self.setattr(h, c),
            op::READLINK => {
                let target = self.fs.readlink(self.nodes.handle(h.node))?;
                self.note_read(h.node);
                Ok(Reply::Body(Out(target)))
            }
            op::SYMLINK => {
                let (name, target) = (c.name().ok_or_else(short)?, c.name().ok_or_else(short)?);
                self.make_closed(h, name, S_IFLNK | 0o777, 0, 0, Some(target))
            }
            op::MKNOD => {
                let (mode, rdev, umask, _) = (u32s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?);
                let name = c.name().ok_or_else(short)?;
                self.make_closed(h, name, mode, umask, abi::decode_dev(rdev), None)
            }
            op::MKDIR => {
                let (mode, umask) = (u32s(&mut c)?, u32s(&mut c)?);
                let name = c.name().ok_or_else(short)?;
                let mode = (mode & !S_IFMT) | S_IFDIR;
                self.make_closed(h, name, mode, umask, 0, None)
            }
            op::CREATE | op::TMPFILE => self.create(h, c),
            op::UNLINK => {
                self.remove(h, c.name().ok_or_else(short)?, false)?;
                empty()
            }
            op::RMDIR => {
                self.remove(h, c.name().ok_or_else(short)?, true)?;
                empty()
            }
            op::RENAME | op::RENAME2 => {
                let new_dir = c.u64().ok_or_else(short)?;
                let flags = if h.opcode == op::RENAME2 { (u32s(&mut c)?, u32s(&mut c)?).0 } else { 0 };
                let (old, new) = (c.name().ok_or_else(short)?, c.name().ok_or_else(short)?);
                self.rename(h, (h.node, old), (new_dir, new), flags)?;
                empty()
            }
            op::LINK => {
                let ino = c.u64().ok_or_else(short)?;
                let name = c.name().ok_or_else(short)?;
                let linked = self.nodes.handle(ino);
                self.refuse_protected(&self.fs.getattr(linked)?, true)?;
                self.refuse_protected(&self.fs.getattr(self.nodes.handle(h.node))?, false)?;
                self.fs.link(self.nodes.handle(h.node), name, linked)?;
                self.entry(linked, h.node, name)
            }
            op::OPEN | op::OPENDIR => {
                let flags = u32s(&mut c)? as i32;
                let attr = self.fs.getattr(self.nodes.handle(h.node))?;
                if flags & libc::O_ACCMODE != libc::O_RDONLY {
                    let appends = flags & libc::O_APPEND != 0 && flags & libc::O_TRUNC == 0;
                    self.refuse_protected(&attr, !appends)?;
                }
                self.nodes.open(&self.fs, Handle::from(&attr))?;
                if flags & libc::O_DIRECT != 0 {
                    self.nodes.set_direct(h.node);
                }
                Ok(Reply::Body(open_out(self.locks.open())))
            }
            op::RELEASE | op::RELEASEDIR => {
                let unlocked = self.locks.release(&self.fs, u64s(&mut c)?);
                self.nodes.release(&self.fs, h.node)?;
                unlocked?;
                empty()
            }
            op::READ => self.read(h, c),
            op::WRITE => self.write(h, c),
            op::FLUSH => {
                let (handle, _unused, owner) = (u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?);
                self.locks.flush(&self.fs, self.nodes.handle(h.node), handle, owner)?;
                empty()
            }
            op::GETLK => {
                let request = Request::parse(c).ok_or_else(short)?;
                Ok(Reply::Body(self.locks.get(&self.fs, self.nodes.handle(h.node), &request)?))
            }
            op::SETLK => {
                self.locks.set(&self.fs, self.nodes.handle(h.node), &Request::parse(c).ok_or_else(short)?)?;
                empty()
            }
            op::INTERRUPT => {
                self.locks.interrupt(&self.fs, u64s(&mut c)?);
                Ok(Reply::None)
            }
            op::FSYNC | op::FSYNCDIR => {
                if self.fs.area().writable() {
                    self.sync()?;
                }
                empty()
            }
            op::READDIR => self.readdir(h, c),
            op::STATFS => Ok(Reply::Body(self.statfs())),
            op::SETXATTR => self.setxattr(h, c),
            op::GETXATTR => self.getxattr(h, c),
            op::LISTXATTR => self.listxattr(h, c),
            op::REMOVEXATTR => self.removexattr(h, c),
            op::FALLOCATE => self.fallocate(h, c),
            op::LSEEK => {
                let (_fh, offset, whence) =
                    (c.u64().ok_or_else(short)?, c.u64().ok_or_else(short)?, u32s(&mut c)?);
                let hole = match whence as i32 {
                    libc::SEEK_DATA => false,
                    libc::SEEK_HOLE => true,
                    _ => return Err(Errno::INVAL),
                };
                let mut out = Out::new();
                out.u64(self.fs.seek(self.nodes.handle(h.node), offset, hole)?);
                Ok(Reply::Body(out))
            }
            op::COPY_FILE_RANGE => self.copy_file_range(h, c),
            op::IOCTL => self.ioctl(h, c),
            _ => Err(Errno::NOSYS),
        }
    }

    /// Makes all operations durable, as far as the zone's file can.
    pub(super) fn sync(&self) -> Result<()> {
        self.fs.area().sync().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
    }

    /// A FLUSH whose process was killed while it waited.
    pub(super) fn finish_flush(&self, h: &Header, mut c: Cursor<'_>) -> Result<()> {
        let (_fh, _unused, owner) = (u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?);
        self.locks.flush_late(&self.fs, self.nodes.handle(h.node), owner)
    }

    pub(super) fn entry(&self, found: Handle, dir: u64, name: &[u8]) -> Answer<'_> {
        // A name that another member removes meanwhile counts as missing.
        let attr = self.fs.getattr(found).map_err(|e| if e == Errno::STALE { Errno::NOENT } else { e })?;
        self.nodes.looked_up(&attr, self.nodes.handle(dir).ino, name);
        Ok(Reply::Body(entry_out(&self.nodes, &attr)))
    }

    fn readdir(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (_fh, offset, size) = (u64s(&mut c)?, u64s(&mut c)?, u32s(&mut c)? as usize);
        let (_read_flags, _owner, flags) = (u32s(&mut c)?, u64s(&mut c)?, u32s(&mut c)? as i32);
        let mut out = Out::new();
        let mut add = |name: &[u8], ino: u64, kind: u8, next: u64| {
            let len = (24 + name.len()).next_multiple_of(8);
            if out.0.len() + len > size {
                return false;
            }
            out.u64(ino).u64(next).u32(name.len() as u32).u32(u32::from(kind)).bytes(name);
            out.zeros(len - 24 - name.len());
            true
        };
        // Cookies: 1 after ".", 2 after "..", the core's own + 2 from there on.
        let ino = self.nodes.handle(h.node).ino;
        if offset == 0 && !add(b".", ino, libc::DT_DIR, 1) {
            return Err(Errno::INVAL);
        }
        // A directory that was removed while it is open has no parent any more.
        if offset > 1 || add(b"..", self.fs.parent(self.nodes.handle(h.node)).unwrap_or(ino), libc::DT_DIR, 2)
        {
            let pos = offset.max(2) - 2;
            match self.fs.readdir(self.nodes.handle(h.node), pos, |name, ino, kind, next| {
                add(name, ino, kind, next + 2)
            }) {
                Ok(_) | Err(Errno::NOENT) => {}
                Err(e) => return Err(e),
            }
        }
        if flags & libc::O_NOATIME == 0 {
            self.note_read(h.node);
        }
        Ok(Reply::Body(out))
    }

    fn statfs(&self) -> Out {
        let s = self.fs.statfs();
        let mut out = Out::new();
        out.u64(s.blocks).u64(s.blocks_free).u64(s.blocks_free).u64(s.inodes).u64(s.inodes_free);
        out.u32(sys::TFS_BLOCK).u32(sys::TFS_NAME_MAX).u32(sys::TFS_BLOCK).zeros(4 + 24);
        out
    }
}

pub(super) fn u32s(c: &mut Cursor<'_>) -> Result<u32> {
    c.u32().ok_or_else(short)
}

pub(super) fn u64s(c: &mut Cursor<'_>) -> Result<u64> {
    c.u64().ok_or_else(short)
}
