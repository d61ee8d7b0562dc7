// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Attributes of inodes, and extended ones.

use libc::{S_IFDIR, S_IFMT, S_ISGID, S_ISUID, S_IXGRP};
use rustix::io::Errno;

use super::abi::{self, Cursor, Header, Out, fattr};
use super::acl::{self, Acl};
use super::ops::{Answer, Reply, Server, empty, short, u32s, u64s};
use super::replies::{NS, attr_out};
use super::rights;
use crate::fs::{self, Attr, Handle, Result};
use crate::sys;

const CAPABILITY: &[u8] = b"security.capability";
/// The last and the first second of a time, as in guests (`files/linux/super.c`).
const LAST: i64 = i64::MAX / NS - 1;
const FIRST: i64 = i64::MIN / NS + 1;

/// Returns the nanoseconds since 1970 of a time of the kernel; one that a zone can't store becomes the nearest second that it can.
fn time(secs: u64, ns: u32) -> i64 {
    let secs = secs as i64;
    if secs <= FIRST || secs >= LAST { secs.clamp(FIRST, LAST) * NS } else { secs * NS + i64::from(ns) }
}

impl Server {
    pub(super) fn setattr(&self, h: &Header, c: Cursor<'_>) -> Answer<'_> {
        let mut cut = false;
        let ino = self.nodes.handle(h.node);
        self.checked(|| self.set_attributes(h, c, &self.fs.getattr(ino)?, &mut cut))?;
        Ok(Reply::Body(attr_out(&self.attributes(h.node)?)))
    }

    /// Returns the attributes of an inode, which the kernel is told.
    pub(super) fn attributes(&self, number: u64) -> Result<Attr> {
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
            let kill = valid & fattr::KILL_SUIDGID != 0;
            self.drop_group_mark(h, old, kill)?;
            self.fs.truncate(Handle::from(old), size, kill)?;
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
            what |= if valid & fattr::MODE == 0 { rights::lost_set_id(h, old) } else { 0 };
            self.drop_capability(old)?;
        }
        let now = fs::now();
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
    pub(super) fn drop_privileges(&self, h: &Header, attr: &Attr) -> Result<()> {
        if attr.mode & (S_ISUID | S_ISGID) != 0 && !rights::keeps_set_id(h) {
            self.fs.setattr(Handle::from(attr), rights::lost_set_id(h, attr), &Attr::default())?;
        }
        self.drop_capability(attr)
    }

    /// Called before a write or truncation by which set-id bits go (`kill`): the core keeps S_ISGID of a file that its group may not execute.
    pub(super) fn drop_group_mark(&self, h: &Header, attr: &Attr, kill: bool) -> Result<()> {
        if !kill || attr.mode & (S_ISGID | S_IXGRP) != S_ISGID {
            return Ok(());
        }
        match rights::lost_set_id(h, attr) & sys::TFS_KILL_SGID {
            0 => Ok(()),
            what => self.fs.setattr(Handle::from(attr), what, &Attr::default()),
        }
    }

    /// Returns EPERM if chattr +i or +a forbids the change.
    pub(super) fn refuse_protected(&self, attr: &Attr, append_too: bool) -> Result<()> {
        let mask = sys::TFS_FL_IMMUTABLE | if append_too { sys::TFS_FL_APPEND } else { 0 };
        if attr.flags & mask != 0 { Err(Errno::PERM) } else { Ok(()) }
    }

    pub(super) fn getxattr(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (size, _) = (u32s(&mut c)?, u32s(&mut c)?);
        let name = c.name().ok_or_else(short)?;
        check_xattr_name(name)?;
        sized(self.fs.xattr_get(self.nodes.handle(h.node), name)?, size)
    }

    pub(super) fn listxattr(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
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

    pub(super) fn setxattr(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
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

    pub(super) fn removexattr(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
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
