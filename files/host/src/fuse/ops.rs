// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The operations: each takes a request's body and gives a reply. The kernel checks permissions (`default_permissions`) with the
//! attributes that it just asked for; no result is cached beyond one call, so another member's changes show at once.

use rustix::io::Errno;

use super::abi::{self, Cursor, Header, Out, fattr, op};
use super::acl::{self, Acl};
use super::kept::Kept;
use super::locks::{Locks, Request};
use super::nodes::Nodes;
use super::rights;
use crate::fs::{self, Attr, Filesystem, Handle, Pin, Result};
use crate::sys;

const S_IFMT: u32 = libc::S_IFMT;
const S_IFDIR: u32 = libc::S_IFDIR;
const S_IFLNK: u32 = libc::S_IFLNK;
const S_ISUID: u32 = libc::S_ISUID;
const S_ISGID: u32 = libc::S_ISGID;
const CAPABILITY: &[u8] = b"security.capability";
const NS: i64 = 1_000_000_000;
/// Each further try means that the file that was found has been removed or replaced.
const TRIES: usize = 100;
/// One copy_file_range call copies this much at most; the kernel asks again.
const COPY_LIMIT: u64 = 16 << 20;

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
    /// Reads don't update access times.
    pub noatime: bool,
    /// The zone is a device's memory, which has no pages: the kernel can't read it by itself.
    pub device_memory: bool,
}

pub(super) type Answer<'a> = Result<Reply<'a>>;

fn empty<'a>() -> Answer<'a> {
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
            noatime: false,
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
            op::READLINK => Ok(Reply::Body(Out(self.fs.readlink(self.nodes.handle(h.node))?))),
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
            op::GETXATTR => {
                let (size, _) = (u32s(&mut c)?, u32s(&mut c)?);
                let name = c.name().ok_or_else(short)?;
                check_xattr_name(name)?;
                sized(self.fs.xattr_get(self.nodes.handle(h.node), name)?, size)
            }
            op::LISTXATTR => {
                let size = u32s(&mut c)?;
                let mut list = self.fs.xattr_list(self.nodes.handle(h.node))?;
                if h.uid != 0 {
                    list = list
                        .split_inclusive(|b| *b == 0)
                        .filter(|n| !n.starts_with(b"trusted."))
                        .flatten()
                        .copied()
                        .collect();
                }
                sized(list, size)
            }
            op::REMOVEXATTR => {
                let name = c.name().ok_or_else(short)?;
                check_xattr_name(name)?;
                let is_acl = name == acl::ACCESS || name == acl::DEFAULT;
                let removed = self.checked(|| {
                    let attr = self.fs.getattr(self.nodes.handle(h.node))?;
                    self.refuse_protected(&attr, true)?;
                    if is_acl {
                        self.require_owner(h, &attr)?;
                    }
                    self.fs.xattr_set_as(&attr, name, None, 0, None)
                });
                match removed {
                    // As in local file systems: no ACL is left.
                    Err(Errno::NODATA) if is_acl => empty(),
                    done => done.and_then(|()| empty()),
                }
            }
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
    fn sync(&self) -> Result<()> {
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

    pub(super) fn xattr_if(&self, attr: &Attr, name: &[u8]) -> Result<Option<Vec<u8>>> {
        if !attr.has_xattr {
            return Ok(None);
        }
        match self.fs.xattr_get(Handle::from(attr), name) {
            Ok(value) => Ok(Some(value)),
            Err(Errno::NODATA) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn setattr(&self, h: &Header, c: Cursor<'_>) -> Answer<'_> {
        let mut cut = false;
        let ino = self.nodes.handle(h.node);
        self.checked(|| self.set_attributes(h, c, &self.fs.getattr(ino)?, &mut cut))?;
        Ok(Reply::Body(attr_out(&self.attributes(h.node)?)))
    }

    /// Returns the attributes of an inode, which the kernel is told.
    fn attributes(&self, number: u64) -> Result<Attr> {
        let attr = self.fs.getattr(self.nodes.handle(number))?;
        self.nodes.set_size(number, attr.size);
        Ok(attr)
    }

    /// Changes what the request names, by the rights that follow from the attributes `old`. cut: the size is changed, which is done once. EAGAIN: the file
    /// has another owner or other flags by now.
    fn set_attributes(&self, h: &Header, mut c: Cursor<'_>, old: &Attr, cut: &mut bool) -> Result<()> {
        let (valid, _) = (u32s(&mut c)?, u32s(&mut c)?);
        let (_fh, size, _owner) = (u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?);
        let (atime, mtime, ctime) = (u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?);
        let (atime_ns, mtime_ns, ctime_ns) = (u32s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?);
        let (mode, _, uid, gid) = (u32s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?);
        // An append-only file takes the present time (utimes without times), and no other attribute.
        let [atime_set, mtime_set] = [(fattr::ATIME, fattr::ATIME_NOW), (fattr::MTIME, fattr::MTIME_NOW)]
            .map(|(set, now)| valid & set != 0 && valid & now == 0);
        let others = fattr::SIZE | fattr::MODE | fattr::UID | fattr::GID;
        self.refuse_protected(old, valid & others != 0 || atime_set || mtime_set)?;
        if valid & fattr::MODE != 0 || atime_set || mtime_set {
            self.require_owner(h, old)?;
        }
        if valid & (fattr::UID | fattr::GID) != 0 {
            self.require_chown(h, old, Some(uid).filter(|_| valid & fattr::UID != 0))?;
        }
        let dir = old.mode & S_IFMT == S_IFDIR;
        let is_clean_up = valid & (fattr::SIZE | fattr::FH | others) == fattr::SIZE | fattr::FH
            && size < old.size
            && self.nodes.is_clean_up(h.node, size);
        if valid & fattr::SIZE != 0 && !*cut && !is_clean_up {
            self.fs.truncate(Handle::from(old), size, valid & fattr::KILL_SUIDGID != 0)?;
            self.drop_capability(old)?;
            *cut = true;
        }
        let mut new = Attr::default();
        let mut what = 0;
        if valid & fattr::MODE != 0 {
            let group = if valid & fattr::GID != 0 { gid } else { old.gid };
            let mode = rights::allowed_mode(h, mode & 0o7777, group);
            what |= sys::TFS_SET_MODE;
            new.mode = (old.mode & S_IFMT) | mode;
        }
        if valid & fattr::UID != 0 {
            what |= sys::TFS_SET_UID;
            new.uid = uid;
        }
        if valid & fattr::GID != 0 {
            what |= sys::TFS_SET_GID;
            new.gid = gid;
        }
        if valid & (fattr::UID | fattr::GID) != 0 && !dir {
            // HANDLE_KILLPRIV_V2: a new owner clears set-id bits and capabilities.
            what |= if valid & fattr::MODE == 0 { sys::TFS_KILL_SET_ID } else { 0 };
            self.drop_capability(old)?;
        }
        let now = fs::now();
        let time = |secs: u64, ns: u32| (secs as i64).saturating_mul(NS).saturating_add(i64::from(ns));
        if valid & fattr::ATIME != 0 {
            what |= sys::TFS_SET_ATIME;
            new.atime = if valid & fattr::ATIME_NOW != 0 { now } else { time(atime, atime_ns) };
        }
        if valid & fattr::MTIME != 0 {
            what |= sys::TFS_SET_MTIME;
            new.mtime = if valid & fattr::MTIME_NOW != 0 { now } else { time(mtime, mtime_ns) };
        }
        if valid & fattr::CTIME != 0 && what != 0 {
            what |= sys::TFS_SET_CTIME;
            new.ctime = time(ctime, ctime_ns);
        }
        if what != 0 {
            self.fs.setattr_as(old, what, &new)?;
        }
        Ok(())
    }

    pub(super) fn drop_capability(&self, attr: &Attr) -> Result<()> {
        match self.xattr_if(attr, CAPABILITY)? {
            Some(_) => match self.fs.xattr_set(Handle::from(attr), CAPABILITY, None, 0, None) {
                Err(Errno::NODATA) => Ok(()),
                done => done,
            },
            None => Ok(()),
        }
    }

    /// Called before an operation that changes data, if the kernel doesn't say whether the caller may keep set-id bits.
    fn drop_privileges(&self, h: &Header, attr: &Attr) -> Result<()> {
        if attr.mode & (S_ISUID | S_ISGID) != 0 && !rights::keeps_set_id(h) {
            self.fs.setattr(Handle::from(attr), sys::TFS_KILL_SET_ID, &Attr::default())?;
        }
        self.drop_capability(attr)
    }

    /// Returns EPERM if chattr +i or +a forbids the change.
    fn refuse_protected(&self, attr: &Attr, append_too: bool) -> Result<()> {
        let mask = sys::TFS_FL_IMMUTABLE | if append_too { sys::TFS_FL_APPEND } else { 0 };
        if attr.flags & mask != 0 { Err(Errno::PERM) } else { Ok(()) }
    }

    fn read<'a>(&'a self, h: &Header, mut c: Cursor<'_>) -> Answer<'a> {
        let (_fh, offset, len) = (u64s(&mut c)?, u64s(&mut c)?, u64::from(u32s(&mut c)?));
        let (_read_flags, _owner, flags) = (u32s(&mut c)?, u64s(&mut c)?, u32s(&mut c)? as i32);
        let touches = !self.noatime && flags & libc::O_NOATIME == 0;
        let direct = self.fs.area().writable() && !self.device_memory;
        let pin = if direct { self.fs.pin(self.nodes.handle(h.node)).ok() } else { None };
        let Some(pin) = pin else {
            let mut buf = tombolo_heap::zeroed(len as usize).ok_or(Errno::NOMEM)?;
            let got = self.fs.pread(self.nodes.handle(h.node), &mut buf, offset)?;
            buf.truncate(got);
            if self.fs.area().writable() && touches {
                self.note_read(h.node);
            }
            return Ok(Reply::Body(Out(buf)));
        };
        let end = self.fs.size(self.nodes.handle(h.node)).min(offset.saturating_add(len));
        let block = u64::from(sys::TFS_BLOCK);
        let mut pieces = Vec::new();
        let mut at = offset;
        while at < end {
            let (fblock, within) = (at / block, at % block);
            let want = end.div_ceil(block) - fblock;
            let run = self.fs.map(self.nodes.handle(h.node), fblock, want)?;
            let bytes = (run.count.clamp(1, want) * block - within).min(end - at);
            let from = if run.block == 0 {
                std::ptr::null()
            } else {
                let at = run.block.saturating_mul(block).saturating_add(within);
                if at.checked_add(bytes).is_none_or(|end| end > self.fs.area().size()) {
                    return Err(Errno::from_raw_os_error(libc::EUCLEAN));
                }
                // SAFETY: the run lies in the area, checked above.
                unsafe { self.fs.area().base().add(at as usize).cast_const() }
            };
            pieces.push(Piece { from, len: bytes as usize });
            at += bytes;
        }
        // Where another member has cut the file meanwhile there are holes.
        let mut left = self.fs.still_there(self.nodes.handle(h.node), offset, at - offset)? as usize;
        for piece in &mut pieces {
            piece.len = piece.len.min(left);
            left -= piece.len;
        }
        pieces.retain(|piece| piece.len > 0);
        if touches {
            self.note_read(h.node);
        }
        Ok(Reply::Zone(pieces, pin))
    }

    fn note_read(&self, ino: u64) {
        // The read was answered; the file may have been freed meanwhile.
        let _ = self.fs.touch_atime(self.nodes.handle(ino), fs::now());
    }

    fn write(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (_fh, offset, size, write_flags) = (u64s(&mut c)?, u64s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?);
        let (_owner, flags, _) = (u64s(&mut c)?, u32s(&mut c)? as i32, u32s(&mut c)?);
        let data = c.bytes(size as usize).ok_or_else(short)?;
        let kill = write_flags & abi::WRITE_KILL_SUIDGID != 0;
        let attr = self.fs.getattr(self.nodes.handle(h.node))?;
        self.refuse_protected(&attr, flags & libc::O_APPEND == 0)?;
        self.drop_capability(&attr)?;
        let written = if flags & libc::O_APPEND != 0 {
            self.fs.append(self.nodes.handle(h.node), data, kill)?.0
        } else {
            self.fs.pwrite(self.nodes.handle(h.node), data, offset, kill)?
        };
        // Also a part of O_SYNC; the kernel sets it for RWF_DSYNC and RWF_SYNC, too.
        if flags & libc::O_DSYNC != 0 {
            self.sync()?;
        }
        self.nodes.wrote(h.node, offset.saturating_add(written as u64), flags & libc::O_DIRECT != 0);
        let mut out = Out::new();
        out.u32(written as u32).u32(0);
        Ok(Reply::Body(out))
    }

    fn fallocate(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (_fh, offset, len, mode) = (u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?, u32s(&mut c)? as i32);
        let attr = self.fs.getattr(self.nodes.handle(h.node))?;
        self.refuse_protected(&attr, mode & !libc::FALLOC_FL_KEEP_SIZE != 0)?;
        let mut core = 0;
        let mut left = mode;
        for (flag, tfs) in [
            (libc::FALLOC_FL_KEEP_SIZE, sys::TFS_FALLOC_KEEP_SIZE),
            (libc::FALLOC_FL_PUNCH_HOLE, sys::TFS_FALLOC_PUNCH),
            (libc::FALLOC_FL_ZERO_RANGE, sys::TFS_FALLOC_ZERO),
        ] {
            if mode & flag != 0 {
                core |= tfs;
                left &= !flag;
            }
        }
        if left != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        self.drop_privileges(h, &attr)?;
        self.fs.fallocate(self.nodes.handle(h.node), core, offset, len)?;
        if mode & libc::FALLOC_FL_KEEP_SIZE == 0 {
            self.nodes.wrote(h.node, offset.saturating_add(len), false);
        }
        empty()
    }

    fn copy_file_range(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (_fh_in, from) = (u64s(&mut c)?, u64s(&mut c)?);
        let (out_node, _fh_out, to, len) = (u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?);
        let to_file = self.nodes.handle(out_node);
        let attr = self.fs.getattr(to_file)?;
        self.refuse_protected(&attr, true)?;
        self.drop_privileges(h, &attr)?;
        let len = len.min(COPY_LIMIT);
        let mut buf = tombolo_heap::zeroed(len.min(1 << 20) as usize).ok_or(Errno::NOMEM)?;
        let mut done = 0;
        while done < len {
            let want = (len - done).min(buf.len() as u64) as usize;
            let got = self.fs.pread(self.nodes.handle(h.node), &mut buf[..want], from + done)?;
            if got == 0 {
                break;
            }
            match self.fs.pwrite(to_file, &buf[..got], to + done, false) {
                Ok(put) => done += put as u64,
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        self.nodes.wrote(out_node, to.saturating_add(done), false);
        let mut out = Out::new();
        out.u32(done as u32).u32(0);
        Ok(Reply::Body(out))
    }

    fn readdir(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (_fh, offset, size) = (u64s(&mut c)?, u64s(&mut c)?, u32s(&mut c)? as usize);
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
        Ok(Reply::Body(out))
    }

    fn statfs(&self) -> Out {
        let s = self.fs.statfs();
        let mut out = Out::new();
        out.u64(s.blocks).u64(s.blocks_free).u64(s.blocks_free).u64(s.inodes).u64(s.inodes_free);
        out.u32(sys::TFS_BLOCK).u32(sys::TFS_NAME_MAX).u32(sys::TFS_BLOCK).zeros(4 + 24);
        out
    }

    fn setxattr(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (size, flags, ext, _) = (u32s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?);
        let name = c.name().ok_or_else(short)?;
        let value = c.bytes(size as usize).ok_or_else(short)?;
        check_xattr_name(name)?;
        self.checked(|| {
            self.set_xattr(h, &self.fs.getattr(self.nodes.handle(h.node))?, name, value, (flags, ext))
        })?;
        empty()
    }

    /// Sets an attribute by the rights that follow from the file's attributes `attr`. EAGAIN: the file has another owner or other flags by now.
    fn set_xattr(
        &self,
        h: &Header,
        attr: &Attr,
        name: &[u8],
        value: &[u8],
        (flags, ext): (u32, u32),
    ) -> Result<()> {
        self.refuse_protected(attr, true)?;
        if name == acl::ACCESS || name == acl::DEFAULT {
            self.require_owner(h, attr)?;
        }
        if name == acl::ACCESS {
            let acl = Acl::parse(value).ok_or(Errno::INVAL)?;
            let kill = if ext & abi::SETXATTR_ACL_KILL_SGID != 0 { sys::TFS_XATTR_KILL_SGID } else { 0 };
            let (value, how) =
                (Some(value).filter(|_| !acl.is_only_mode()), sys::TFS_XATTR_PERMISSIONS | kill);
            return self.fs.xattr_set_as(attr, name, value, how, Some(acl.mode()));
        }
        if name == acl::DEFAULT {
            if attr.mode & S_IFMT != S_IFDIR {
                return Err(Errno::ACCESS);
            }
            Acl::parse(value).ok_or(Errno::INVAL)?;
        }
        self.fs.xattr_set_as(attr, name, Some(value), flags, None)
    }
}

/// Refuses the name of an extended attribute that a guest's kernel would refuse.
fn check_xattr_name(name: &[u8]) -> Result<()> {
    if name == acl::ACCESS || name == acl::DEFAULT {
        return Ok(());
    }
    let rest = [&b"user."[..], b"trusted.", b"security."].iter().find_map(|space| name.strip_prefix(*space));
    match rest {
        None => Err(Errno::OPNOTSUPP),
        Some([]) => Err(Errno::INVAL),
        Some(_) => Ok(()),
    }
}

pub(super) fn u32s(c: &mut Cursor<'_>) -> Result<u32> {
    c.u32().ok_or_else(short)
}

pub(super) fn u64s(c: &mut Cursor<'_>) -> Result<u64> {
    c.u64().ok_or_else(short)
}

fn sized<'a>(value: Vec<u8>, size: u32) -> Answer<'a> {
    if size == 0 {
        let mut out = Out::new();
        out.u32(value.len() as u32).u32(0);
        return Ok(Reply::Body(out));
    }
    if value.len() > size as usize {
        return Err(Errno::RANGE);
    }
    Ok(Reply::Body(Out(value)))
}

pub(super) fn open_out(handle: u64) -> Out {
    let mut out = Out::new();
    out.u64(handle).u32(abi::FOPEN_DIRECT_IO | abi::FOPEN_PARALLEL_DIRECT_WRITES).u32(0);
    out
}

fn attr_body(out: &mut Out, a: &Attr) {
    out.u64(a.ino).u64(a.size).u64(a.blocks.saturating_mul(u64::from(sys::TFS_BLOCK / 512)));
    let times = [a.atime, a.mtime, a.ctime];
    for t in times {
        out.u64(t.div_euclid(NS) as u64);
    }
    for t in times {
        out.u32(t.rem_euclid(NS) as u32);
    }
    out.u32(a.mode)
        .u32(a.nlink)
        .u32(a.uid)
        .u32(a.gid)
        .u32(abi::encode_dev(a.rdev))
        .u32(sys::TFS_BLOCK)
        .u32(0);
}

/// `fuse_attr_out`, valid for no time.
fn attr_out(a: &Attr) -> Out {
    let mut out = Out::new();
    out.zeros(16);
    attr_body(&mut out, a);
    out
}

/// `fuse_entry_out`, valid for no time.
pub(super) fn entry_out(nodes: &Nodes, a: &Attr) -> Out {
    let mut out = Out::new();
    out.u64(nodes.number(Handle::from(a))).u64(u64::from(a.generation)).zeros(24);
    attr_body(&mut out, a);
    out
}

/// `fuse_statx_out`, valid for no time.
fn statx_out(a: &Attr) -> Out {
    let attributes = |flags: u32| u64::from(flags & (sys::TFS_FL_IMMUTABLE | sys::TFS_FL_APPEND));
    let mut out = Out::new();
    out.zeros(32);
    out.u32(libc::STATX_BASIC_STATS | libc::STATX_BTIME).u32(sys::TFS_BLOCK).u64(attributes(a.flags));
    out.u32(a.nlink).u32(a.uid).u32(a.gid).u16(a.mode as u16).zeros(2);
    out.u64(a.ino)
        .u64(a.size)
        .u64(a.blocks.saturating_mul(u64::from(sys::TFS_BLOCK / 512)))
        .u64(attributes(!0));
    for t in [a.atime, a.btime, a.ctime, a.mtime] {
        out.u64(t.div_euclid(NS) as u64).u32(t.rem_euclid(NS) as u32).zeros(4);
    }
    out.u32(a.rdev as u32 >> 20).u32(a.rdev as u32 & 0xf_ffff).zeros(8 + 14 * 8);
    out
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::area::Area;
    use crate::fs::{Create, Mkfs, ROOT};

    /// The server of a mount whose zone has a file that can't be synced: one end of a pipe.
    fn unable_to_sync() -> Server {
        let zone =
            tombolo_zone::Zone::create(&tombolo_zone::ZoneConfig::new("ops", 16 << 20)).expect("a zone");
        let area = zone.area(tombolo_zone::AreaType::Files, None).expect("an area");
        let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
        let area = Area::of_zone(&Arc::new(zone), &area, None, Some(pipe)).expect("an area");
        fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
        let fs = Filesystem::open(area.lone()).expect("open");
        Server::new(fs)
    }

    #[test]
    fn a_write_with_o_dsync_syncs_as_fsync_does() {
        let server = unable_to_sync();
        let file =
            server.fs.create(ROOT, Some(b"file"), &Create::mode(libc::S_IFREG | 0o600)).expect("create");
        let ask = |opcode, body: &Out| {
            let node = server.nodes.number(file);
            let h = Header { opcode, unique: 1, node, uid: 0, gid: 0, pid: 0 };
            server.answer(&h, Cursor(&body.0)).map(drop)
        };
        let write = |flags: i32| {
            let mut body = Out::new();
            body.u64(1).u64(0).u32(4).u32(0).u64(0).u32(flags as u32).u32(0).bytes(b"data");
            ask(op::WRITE, &body)
        };
        let mut fsync = Out::new();
        fsync.u64(1).u32(0).u32(0);
        let refused = ask(op::FSYNC, &fsync);
        assert_eq!(refused, Err(Errno::INVAL), "no pipe can be synced");
        assert_eq!(write(libc::O_WRONLY), Ok(()));
        for flags in [libc::O_DSYNC, libc::O_SYNC] {
            assert_eq!(write(libc::O_WRONLY | flags), refused);
        }
    }

    #[test]
    fn a_read_with_o_noatime_leaves_the_time_of_the_last_access() {
        let server = unable_to_sync();
        let file =
            server.fs.create(ROOT, Some(b"file"), &Create::mode(libc::S_IFREG | 0o600)).expect("create");
        server.fs.pwrite(file, b"data", 0, false).expect("a write");
        let before = Attr { atime: 1, ..Attr::default() };
        server.fs.setattr(file, sys::TFS_SET_ATIME, &before).expect("a time");
        let time_after_read = |flags: i32| {
            let mut body = Out::new();
            body.u64(1).u64(0).u32(4).u32(0).u64(0).u32(flags as u32).u32(0);
            let node = server.nodes.number(file);
            let h = Header { opcode: op::READ, unique: 1, node, uid: 0, gid: 0, pid: 0 };
            server.answer(&h, Cursor(&body.0)).map(drop).expect("a read");
            server.fs.getattr(file).expect("attributes").atime
        };
        assert_eq!(time_after_read(libc::O_NOATIME), 1);
        assert!(time_after_read(0) > 1);
    }

    #[test]
    fn replies_have_the_sizes_that_the_kernel_expects() {
        let a = Attr { atime: -1, ..Attr::default() };
        assert_eq!(attr_out(&a).0.len(), 104);
        assert_eq!(entry_out(&Nodes::new(Handle::from(&a)), &a).0.len(), 128);
        assert_eq!(statx_out(&a).0.len(), 288);
        assert_eq!(open_out(0).0.len(), 16);
    }

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        let out = attr_out(&Attr { atime: -1, ..Attr::default() });
        assert_eq!(out.0[40..48], (-1i64).to_ne_bytes());
        assert_eq!(out.0[64..68], 999_999_999u32.to_ne_bytes());
    }
}
