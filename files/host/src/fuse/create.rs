// SPDX-License-Identifier: Apache-2.0 OR MIT
//! New inodes: CREATE, TMPFILE, MKNOD, MKDIR and SYMLINK.
//!
//! The kernel sends a CREATE when it has found no file at the name. Another member may have made one since. Without O_EXCL that file is opened, as
//! open(2) has it. The kernel checks no permission then, so this is done here for what is certain. Anything else gets ESTALE, on which the kernel
//! walks the path a second time; another ESTALE it returns to the program.

use rustix::io::Errno;

use super::abi::{self, Cursor, Header, Out, op};
use super::acl::{self, Acl};

use super::ops::{Answer, Reply, Server, short, u32s};
use super::replies::{entry_out, open_out};
use super::rights;
use crate::fs::{self, Attr, Create, Handle, Result};
use crate::sys;

const S_IFMT: u32 = libc::S_IFMT;
const S_IFDIR: u32 = libc::S_IFDIR;
const S_IFREG: u32 = libc::S_IFREG;
const S_ISGID: u32 = libc::S_ISGID;
/// Each further try means that other members have removed the name and made it.
const TRIES: usize = 100;

/// Returns whether the caller surely may open the file so. Groups, ACLs and capabilities are left to the kernel.
fn may_open(h: &Header, file: &Attr, flags: i32) -> bool {
    let asked = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => 4,
        libc::O_WRONLY => 2,
        _ => 6,
    };
    let asked = asked | if flags & libc::O_TRUNC != 0 { 2 } else { 0 };
    let grants = |shift: u32| file.mode >> shift & asked == asked;
    let protected = file.flags & (sys::TFS_FL_IMMUTABLE | sys::TFS_FL_APPEND) != 0;
    let allowed = if h.uid == file.uid { grants(6) } else { !file.has_xattr && grants(3) && grants(0) };
    file.mode & S_IFMT == S_IFREG && !protected && allowed
}

/// Returns whether the kernel may refuse an open with O_CREAT of this file because its directory is sticky (proc_sys_fs(5), protected_regular): another
/// user has put the file there, to read what the caller is going to write.
fn may_be_a_trap(h: &Header, dir: &Attr, file: &Attr) -> bool {
    let shared = dir.mode & libc::S_ISVTX != 0 && dir.mode & (libc::S_IWGRP | libc::S_IWOTH) != 0;
    shared && file.uid != dir.uid && file.uid != h.uid
}

impl Server {
    /// Makes an inode with a name and answers with its attributes, also if another member removes the name at once.
    pub(super) fn make_closed(
        &self,
        h: &Header,
        name: &[u8],
        mode: u32,
        umask: u32,
        rdev: u64,
        target: Option<&[u8]>,
    ) -> Answer<'_> {
        let made = self.make(h, h.node, Some(name), mode, umask, rdev, target)?;
        self.nodes.open(&self.fs, made)?;
        let answer = self.entry(made, h.node, name);
        self.nodes.release(&self.fs, self.nodes.number(made))?;
        answer
    }

    /// Makes an inode by the rules of POSIX: group and set-group-id bit from the directory, mode and ACLs from its default ACL or the
    /// umask. The inode is open: it stays until the caller has closed it.
    #[allow(clippy::too_many_arguments)]
    fn make(
        &self,
        h: &Header,
        dir: u64,
        name: Option<&[u8]>,
        mode: u32,
        umask: u32,
        rdev: u64,
        target: Option<&[u8]>,
    ) -> Result<Handle> {
        let parent = self.fs.getattr(self.nodes.handle(dir))?;
        let dir = Handle::from(&parent);
        if parent.flags & sys::TFS_FL_IMMUTABLE != 0 {
            return Err(Errno::PERM);
        }
        let (mut mode, mut gid) = (mode, h.gid);
        if parent.mode & S_ISGID != 0 {
            gid = parent.gid;
            if mode & S_IFMT == S_IFDIR {
                mode |= S_ISGID;
            } else if mode & libc::S_IXGRP != 0 {
                mode = rights::allowed_mode(h, mode, gid);
            }
        }
        let default = match self.xattr_if(&parent, acl::DEFAULT)? {
            Some(value) if target.is_none() => Acl::parse(&value),
            _ => None,
        };
        let mut attrs: Vec<(&[u8], Vec<u8>)> = Vec::new();
        match default {
            Some(default) => {
                let mut access = default.clone();
                mode = access.create(mode);
                if !access.is_only_mode() {
                    attrs.push((acl::ACCESS, access.value()));
                }
                if mode & S_IFMT == S_IFDIR {
                    attrs.push((acl::DEFAULT, default.value()));
                }
            }
            None if target.is_none() => mode &= !(umask & 0o777),
            None => {}
        }
        let attrs: Vec<(&[u8], &[u8])> =
            attrs.iter().map(|(name, value)| (*name, value.as_slice())).collect();
        let xattrs = fs::xattr_image(&attrs);
        self.fs.create(
            dir,
            name,
            &Create { mode, uid: h.uid, gid, rdev, target, xattrs: &xattrs, open: true },
        )
    }

    pub(super) fn create(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (flags, mode, umask, open_flags) = (u32s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?);
        let name = c.name().ok_or_else(short)?;
        let mode = (mode & !S_IFMT) | S_IFREG;
        let flags = flags as i32;
        if h.opcode == op::TMPFILE {
            let made = self.make(h, h.node, None, mode, umask, 0, None)?;
            return self.opened(h, made, name, flags).map(Reply::Body);
        }
        for _ in 0..TRIES {
            match self.make(h, h.node, Some(name), mode, umask, 0, None) {
                Err(Errno::EXIST) if flags & libc::O_EXCL == 0 => {}
                made => return self.opened(h, made?, name, flags).map(Reply::Body),
            }
            match self.open_found(h, name, flags, open_flags & abi::OPEN_KILL_SUIDGID != 0) {
                Err(Errno::NOENT) => {} // removed meanwhile
                found => return found.map(Reply::Found),
            }
        }
        Err(Errno::STALE)
    }

    /// Counts an open of an inode that was made open, and replies.
    fn opened(&self, h: &Header, made: Handle, name: &[u8], flags: i32) -> Result<Out> {
        let attr = match self.fs.getattr(made) {
            Ok(attr) => attr,
            Err(e) => {
                self.fs.close_ref(made)?;
                return Err(e);
            }
        };
        self.nodes.open(&self.fs, made)?;
        Ok(self.open_reply(h, &attr, name, flags))
    }

    fn open_reply(&self, h: &Header, attr: &Attr, name: &[u8], flags: i32) -> Out {
        self.nodes.looked_up(attr, self.nodes.handle(h.node).ino, name);
        if flags & libc::O_DIRECT != 0 {
            self.nodes.set_direct(self.nodes.number(Handle::from(attr)));
        }
        let mut out = entry_out(&self.nodes, attr);
        out.bytes(&open_out(self.locks.open()).0);
        out
    }

    /// Opens the file that another member has made. NOENT: it is gone.
    fn open_found(&self, h: &Header, name: &[u8], flags: i32, kill_suid: bool) -> Result<Out> {
        let gone = |e| if e == Errno::STALE { Errno::NOENT } else { e };
        let dir = self.fs.getattr(self.nodes.handle(h.node))?;
        let found = self.fs.lookup(&dir, name)?.0;
        self.nodes.open(&self.fs, found).map_err(gone)?;
        let allowed = |attr: &Attr| may_open(h, attr, flags) && !may_be_a_trap(h, &dir, attr);
        let opened = self.fs.getattr(found).and_then(|attr| match allowed(&attr) {
            true if flags & libc::O_TRUNC == 0 => Ok(attr),
            true => {
                self.drop_group_mark(h, &attr, kill_suid)?;
                self.fs.truncate(found, 0, kill_suid)?;
                self.drop_capability(&attr)?;
                if self.fs.change_wanted() {
                    self.tell_modified(self.nodes.number(found));
                }
                self.fs.getattr(found)
            }
            false => Err(Errno::STALE),
        });
        match opened {
            Ok(attr) => Ok(self.open_reply(h, &attr, name, flags)),
            Err(e) => {
                self.nodes.release(&self.fs, self.nodes.number(found))?;
                Err(e)
            }
        }
    }
}
