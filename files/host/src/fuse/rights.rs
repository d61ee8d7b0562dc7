// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Permission checks that the kernel does not make. It checks a caller's rights on the inodes that it looked up, but another member may have
//! changed the meaning of a name since. So where a right depends on the inode of a name, it is checked here once more, for the inode that the
//! operation then names to the core.

use std::fs::{read_link, read_to_string};

use rustix::io::Errno;

use super::abi::Header;
use super::ops::Server;
use crate::fs::{Attr, Expect, Handle, Result};
use crate::sys;

/// Bits of a process's capabilities (capabilities(7)).
const CAP_CHOWN: u32 = 0;
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
const CAP_LINUX_IMMUTABLE: u32 = 9;
/// After so many changes of an inode, or of what a name means, between its check and the operation, the caller gets ESTALE.
const TRIES: usize = 100;

/// Returns what the kernel says of the caller's process (proc_pid_status(5)). `None`: it is in a PID namespace that this one can't see, or has ended.
fn status(h: &Header) -> Option<String> {
    read_to_string(format!("/proc/{}/status", h.pid)).ok().filter(|_| h.pid != 0)
}

/// Returns whether the caller has a capability on this host. If its process is in a PID namespace that this one can't see: whether it is root.
fn capable(h: &Header, capability: u32) -> bool {
    let of_process = || {
        let status = status(h)?;
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        u64::from_str_radix(effective.trim(), 16).ok()
    };
    of_process().map_or(h.uid == 0, |all| all >> capability & 1 == 1 && is_in_own_user_namespace(h.pid))
}

/// Any user has all capabilities in a user namespace of its own, which mean nothing for files of this one. A namespace that may not be looked at is known by
/// its mapping of users, which no user without privileges can make equal to this one's.
fn is_in_own_user_namespace(process: u32) -> bool {
    let namespace = |process: &str| read_link(format!("/proc/{process}/ns/user")).ok();
    let users = |process: &str| read_to_string(format!("/proc/{process}/uid_map")).ok();
    let process = process.to_string();
    match namespace(&process) {
        Some(its) => Some(its) == namespace("self"),
        None => users(&process).is_some_and(|its| Some(its) == users("self")),
    }
}

fn is_in_group(h: &Header, gid: u32) -> bool {
    let status = status(h).unwrap_or_default();
    let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    h.gid == gid || groups.split_whitespace().any(|group| group.parse() == Ok(gid))
}

/// Returns the mode without S_ISGID if the caller may not give that to a file of this group. The kernel has checked the group that it knew; if the caller
/// has the file open, another member may have changed that since.
pub(super) fn allowed_mode(h: &Header, mode: u32, gid: u32) -> u32 {
    let allowed = mode & libc::S_ISGID == 0 || is_in_group(h, gid) || capable(h, CAP_FSETID);
    if allowed { mode } else { mode & !libc::S_ISGID }
}

/// Returns what a caller without CAP_FSETID takes from a file that it changes (`TFS_KILL_*`): as Linux does it since 6.2, S_ISGID without group execution
/// stays for members of the file's group alone.
pub(super) fn lost_set_id(h: &Header, attr: &Attr) -> u32 {
    let keeps = attr.mode & libc::S_ISGID == 0 || is_in_group(h, attr.gid) || capable(h, CAP_FSETID);
    sys::TFS_KILL_SET_ID | if keeps { 0 } else { sys::TFS_KILL_SGID }
}

/// Returns whether set-id bits of a file may stay when this caller changes its data.
pub(super) fn keeps_set_id(h: &Header) -> bool {
    capable(h, CAP_FSETID)
}

impl Server {
    /// Refuses what only the owner of an inode may do. The kernel has checked the owner that it knew; if the caller has the file open, another member may
    /// have changed that since.
    pub(super) fn require_owner(&self, h: &Header, inode: &Attr) -> Result<()> {
        if h.uid == inode.uid || capable(h, CAP_FOWNER) { Ok(()) } else { Err(Errno::PERM) }
    }

    /// As [`Server::require_owner`], for a change to this owner. None: only the group changes, which the kernel has checked.
    pub(super) fn require_chown(&self, h: &Header, inode: &Attr, to: Option<u32>) -> Result<()> {
        let is_owner = h.uid == inode.uid && to.is_none_or(|uid| uid == inode.uid);
        if is_owner || capable(h, CAP_CHOWN) { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Refuses a change of an inode's flags (chattr).
    pub(super) fn require_chattr(&self, h: &Header, inode: &Attr, to: u32) -> Result<()> {
        self.require_owner(h, inode)?;
        if inode.flags == to || capable(h, CAP_LINUX_IMMUTABLE) { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Returns the inode of a name if the caller may remove it from the directory. ESTALE: it may not, which the kernel finds out when it looks
    /// again.
    fn removable(&self, h: &Header, dir: &Attr, name: &[u8]) -> Result<Expect> {
        if dir.flags & sys::TFS_FL_IMMUTABLE != 0 {
            return Err(Errno::PERM);
        }
        let victim = match self.fs.lookup(dir, name) {
            Err(Errno::NOENT) => return Ok(Expect::Nothing),
            found => match self.fs.getattr(found?.0) {
                Err(Errno::STALE) => return Err(Errno::AGAIN), // removed between lookup and getattr
                victim => victim?,
            },
        };
        let protected = sys::TFS_FL_IMMUTABLE | sys::TFS_FL_APPEND;
        if victim.flags & protected != 0 || dir.flags & sys::TFS_FL_APPEND != 0 {
            return Err(Errno::PERM);
        }
        let sticky = dir.mode & libc::S_ISVTX != 0 && h.uid != victim.uid && h.uid != dir.uid;
        if sticky && !capable(h, CAP_FOWNER) {
            return Err(Errno::STALE);
        }
        Ok(Expect::This(Handle::from(&victim)))
    }

    /// Runs `change`, which checks rights and then changes what it has checked, and again if that changes in between (EAGAIN).
    pub(super) fn checked<T>(&self, mut change: impl FnMut() -> Result<T>) -> Result<T> {
        for _ in 0..TRIES {
            match change() {
                Err(Errno::AGAIN) => {}
                done => return done,
            }
        }
        Err(Errno::STALE)
    }

    /// UNLINK and RMDIR.
    pub(super) fn remove(&self, h: &Header, name: &[u8], directory: bool) -> Result<()> {
        self.checked(|| {
            let dir = self.fs.getattr(self.nodes.handle(h.node))?;
            let Expect::This(victim) = self.removable(h, &dir, name)? else { return Err(Errno::NOENT) };
            let at = Handle::from(&dir);
            let done = match directory {
                true => self.fs.rmdir(at, name, Some(victim)),
                false => self.fs.unlink(at, name, Some(victim)),
            };
            self.changed_meanwhile(done, &[at])
        })
    }

    pub(super) fn rename(&self, h: &Header, old: (u64, &[u8]), new: (u64, &[u8]), flags: u32) -> Result<()> {
        self.checked(|| {
            let old_dir = self.fs.getattr(self.nodes.handle(old.0))?;
            let new_dir = self.fs.getattr(self.nodes.handle(new.0))?;
            let expect = [self.removable(h, &old_dir, old.1)?, self.removable(h, &new_dir, new.1)?];
            if matches!(expect[0], Expect::Nothing) {
                return Err(Errno::NOENT);
            }
            let (from, to) = (Handle::from(&old_dir), Handle::from(&new_dir));
            let done = self.fs.rename_expecting((from, old.1), (to, new.1), expect, flags);
            self.changed_meanwhile(done, &[from, to])
        })
    }

    /// An ESTALE that comes from a name, not from one of the directories, is returned as EAGAIN.
    fn changed_meanwhile(&self, done: Result<()>, dirs: &[Handle]) -> Result<()> {
        match done {
            Err(Errno::STALE) if dirs.iter().all(|dir| self.fs.getattr(*dir).is_ok()) => Err(Errno::AGAIN),
            done => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::sync::Arc;

    use super::super::abi::{self, Cursor, Out, fattr, op};
    use super::super::ops::Reply;
    use super::*;
    use crate::area::{Area, Incarnation, Map};
    use crate::fs::{self, Create, Filesystem, Mkfs, ROOT};

    fn server() -> Server {
        let area = Area::whole(Map::memfd("rights", 8 << 20).expect("memory")).expect("an area");
        fs::mkfs(&area, &Mkfs { mode: 0o1777, ..Mkfs::default() }).expect("mkfs");
        let fs = Filesystem::open(area.lone()).expect("open");
        Server::new(fs)
    }

    fn ask(server: &Server, uid: u32, opcode: u32, body: &[u8]) -> Result<()> {
        let h = Header { opcode, unique: 1, node: ROOT, uid, gid: uid, pid: 0 };
        server.answer(&h, Cursor(body)).map(drop)
    }

    fn make(server: &Server, name: &str, uid: u32) {
        let what = Create { uid, ..Create::mode(libc::S_IFREG | 0o666) };
        server.fs.create(ROOT, Some(name.as_bytes()), &what).expect("create");
    }

    /// Such requests arrive when the kernel has checked another file, or none, at the name.
    #[test]
    fn a_sticky_directory_protects_a_file_that_came_since_the_kernel_looked() {
        let server = server();
        make(&server, "his", 1000);
        make(&server, "own", 1001);
        let mut over = Out::new();
        over.u64(ROOT).bytes(b"own\0his\0");
        assert_eq!(ask(&server, 1001, op::UNLINK, b"his\0"), Err(Errno::STALE));
        assert_eq!(ask(&server, 1001, op::RENAME, &over.0), Err(Errno::STALE));
        let mut away = Out::new();
        away.u64(ROOT).bytes(b"his\0mine\0");
        assert_eq!(ask(&server, 1001, op::RENAME, &away.0), Err(Errno::STALE));
        assert_eq!(ask(&server, 1001, op::UNLINK, b"own\0"), Ok(()));
        assert_eq!(ask(&server, 1000, op::UNLINK, b"his\0"), Ok(()));
        assert_eq!(ask(&server, 1000, op::UNLINK, b"his\0"), Err(Errno::NOENT));
        make(&server, "any", 1000);
        assert_eq!(ask(&server, 0, op::UNLINK, b"any\0"), Ok(()));
    }

    /// Such requests arrive for an open file that another member has given to another user.
    #[test]
    fn who_does_not_own_a_file_any_more_changes_neither_its_mode_nor_owner_nor_times_nor_acl() {
        let server = server();
        make(&server, "given", 1000);
        let file = server.fs.lookup(ROOT, b"given").expect("lookup").0;
        let node = server.nodes.number(file);
        let to = |uid: u32, opcode: u32, fill: &dyn Fn(&mut Out)| {
            let mut body = Out::new();
            fill(&mut body);
            // No process of the test's PID namespace, so its user counts.
            let h = Header { opcode, unique: 1, node, uid, gid: uid, pid: 0 };
            server.answer(&h, Cursor(&body.0)).map(drop)
        };
        let set = |uid: u32, valid: u32| {
            to(uid, op::SETATTR, &|b| {
                b.u32(valid).u32(0).zeros(6 * 8 + 3 * 4).u32(0o6777).u32(0).u32(1001).u32(1001).u32(0);
            })
        };
        let acl: &[u8] = &[
            2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 7, 0, 233, 3, 0, 0, 4, 0, 7, 0, 255, 255, 255,
            255, 16, 0, 7, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
        ];
        let set_acl = |uid: u32| {
            to(uid, op::SETXATTR, &|b| {
                b.u32(acl.len() as u32).u32(0).u32(0).u32(0).bytes(b"system.posix_acl_access\0").bytes(acl);
            })
        };
        let drop_acl = |uid: u32| {
            to(uid, op::REMOVEXATTR, &|b| {
                b.bytes(b"system.posix_acl_access\0");
            })
        };
        let no = Err(Errno::PERM);
        for valid in [fattr::MODE, fattr::UID, fattr::GID, fattr::ATIME, fattr::MTIME] {
            assert_eq!(set(1001, valid), no, "{valid:#x}");
        }
        assert_eq!([set_acl(1001), drop_acl(1001)], [no; 2]);
        let now = fattr::ATIME | fattr::ATIME_NOW | fattr::MTIME | fattr::MTIME_NOW;
        assert_eq!([set(1001, now), set(1001, fattr::SIZE)], [Ok(()); 2], "who may write may do this");
        let attr = server.fs.getattr(file).expect("attributes");
        assert_eq!((attr.mode & 0o7777, attr.uid, attr.gid, attr.has_xattr), (0o666, 1000, 0, false));
        assert_eq!([set(1000, fattr::MODE), set_acl(1000), drop_acl(1000)], [Ok(()); 3]);
        assert_eq!([set(1000, fattr::UID), set(1000, fattr::GID)], [no, Ok(())]);
        assert_eq!([set(0, fattr::UID), set(0, fattr::MODE), set_acl(0)], [Ok(()); 3]);
    }

    /// Such a request arrives for an open file that another member has given to another group: the kernel knows the former one.
    #[test]
    fn who_is_not_in_a_files_group_does_not_set_its_set_group_id_bit() {
        let server = server();
        make(&server, "own", 1001);
        let file = server.fs.lookup(ROOT, b"own").expect("lookup").0;
        let node = server.nodes.number(file);
        let group = Attr { gid: 50, ..Attr::default() };
        server.fs.setattr(file, sys::TFS_SET_GID, &group).expect("chgrp");
        for (uid, gid, wanted) in [(1001, 1001, 0o755), (1001, 50, 0o2755), (0, 0, 0o2755)] {
            let mut body = Out::new();
            body.u32(fattr::MODE).u32(0).zeros(6 * 8 + 3 * 4).u32(0o2755).u32(0).u32(0).u32(0).u32(0);
            let h = Header { opcode: op::SETATTR, unique: 1, node, uid, gid, pid: 0 };
            server.answer(&h, Cursor(&body.0)).map(drop).expect("chmod");
            let mode = server.fs.getattr(file).expect("attributes").mode & 0o7777;
            assert_eq!(mode, wanted, "{uid}:{gid}");
        }
        // A directory that gives its group to what is made in it, since the kernel looked.
        let (set_id, dir) = (libc::S_ISGID | libc::S_IXGRP | 0o750, libc::S_IFDIR | libc::S_ISGID | 0o777);
        let shared = server.fs.create(ROOT, Some(b"shared"), &Create::mode(dir)).expect("mkdir");
        server.fs.setattr(shared, sys::TFS_SET_GID, &group).expect("chgrp");
        for (uid, name, wanted) in [(1001, "a", 0o750), (0, "b", 0o2750)] {
            let mut body = Out::new();
            body.u32(libc::S_IFREG | set_id).u32(0).u32(0).u32(0).bytes(name.as_bytes()).bytes(&[0]);
            let node = server.nodes.number(shared);
            let h = Header { opcode: op::MKNOD, unique: 1, node, uid, gid: uid, pid: 0 };
            server.answer(&h, Cursor(&body.0)).map(drop).expect("mknod");
            let made = server.fs.lookup(shared, name.as_bytes()).expect("lookup").0;
            let made = server.fs.getattr(made).expect("attributes");
            assert_eq!((made.mode & 0o7777, made.gid), (wanted, 50), "{name}");
        }
    }

    /// Memory with a member table and a new file system; what it returns gives each member its area.
    fn shared(name: &str) -> impl Fn(u32) -> Area {
        let map = Arc::new(Map::memfd(name, 34 << 20).expect("memory"));
        let area = move |member| {
            let incarnation = Some((4096, Incarnation { member, epoch: 1 }));
            let table = Area::in_map(&map, 4096, 64 * 256, None).expect("a table");
            assert!(table.store_word(u64::from(member) * 256, 1 << 32 | u64::from(sys::TMB_MEMBER_ACTIVE)));
            Area::in_map(&map, 2 << 20, 32 << 20, incarnation).expect("an area")
        };
        fs::mkfs(&area(0), &Mkfs::default()).expect("mkfs");
        area
    }

    /// A mount and another member, which has the lock of a file.
    #[test]
    fn a_right_counts_when_the_change_is_made_and_not_when_it_began_to_wait_for_another_member() {
        let area = shared("waits");
        let (other, memory) = (Filesystem::open(area(0)).expect("open"), area(0));
        let fs = Filesystem::open(area(5)).expect("open");
        let server = Server::new(fs);
        make(&server, "given", 1001);
        let file = server.fs.lookup(ROOT, b"given").expect("lookup").0;
        let node = server.nodes.number(file);
        let inode = memory.word(offset_of!(sys::tfs_super, data_start) as u64).expect("a super block")
            * u64::from(sys::TFS_BLOCK)
            + 256 * file.ino;
        let field = |offset: usize| inode + offset as u64;
        let (lock, version) =
            (field(offset_of!(sys::tfs_inode, lock)), field(offset_of!(sys::tfs_inode, version)));
        let mut chmod = Out::new();
        chmod.u32(fattr::MODE).u32(0).zeros(6 * 8 + 3 * 4).u32(0o4777).u32(0).zeros(3 * 4);
        let mut chattr = Out::new();
        chattr.u64(0).u32(0).u32(abi::FS_IOC_SETFLAGS).u64(0).u32(4).u32(0).u32(0);
        for (opcode, body, at, becomes) in [
            (op::SETATTR, chmod, offset_of!(sys::tfs_inode, owner), 0),
            (op::IOCTL, chattr, offset_of!(sys::tfs_inode, flags), u64::from(sys::TFS_FL_IMMUTABLE)),
        ] {
            let owner = offset_of!(sys::tfs_inode, owner);
            assert!(memory.store_word(field(owner), 1001 | 1001 << 32));
            let h = Header { opcode, unique: 1, node, uid: 1001, gid: 1001, pid: 0 };
            // SAFETY: an open handle.
            assert_eq!(unsafe { sys::tfs_lock_inode(other.raw(), file.into()) }, 0);
            std::thread::scope(|threads| {
                let asked = threads.spawn(|| server.answer(&h, Cursor(&body.0)).map(drop));
                while memory.word(lock + 8) == Some(0) && !asked.is_finished() {
                    std::thread::yield_now();
                }
                // As a chown to root, or a chattr +i, by the other member stores it.
                assert!(memory.store_word(field(at), becomes));
                assert!(memory.store_word(version, memory.word(version).expect("an inode") + 1));
                // SAFETY: as above.
                unsafe { sys::tfs_unlock_inode(other.raw(), file.ino) };
                assert_eq!(asked.join().expect("an answer"), Err(Errno::PERM), "{opcode}");
            });
            assert_eq!(memory.word(field(at)), Some(becomes), "{opcode}");
            assert_eq!(server.fs.getattr(file).expect("attributes").mode & 0o7777, 0o666, "{opcode}");
        }
    }

    /// As local file systems do by the kernel's checks, which need flags that a FUSE inode does not have.
    #[test]
    fn immutable_and_append_only_inodes_stay_as_they_are() {
        let server = server();
        let (immutable, append) = (sys::TFS_FL_IMMUTABLE, sys::TFS_FL_APPEND);
        let node = |name: &str, kind: u32, flags: u32| {
            let made =
                server.fs.create(ROOT, Some(name.as_bytes()), &Create::mode(kind | 0o777)).expect("create");
            server.fs.create(made, Some(b"in"), &Create::mode(libc::S_IFREG | 0o666)).ok();
            server.fs.setattr(made, sys::TFS_SET_FLAGS, &Attr { flags, ..Attr::default() }).expect("chattr");
            server.nodes.number(made)
        };
        let [fixed, log] = [("fixed", immutable), ("log", append)].map(|(n, f)| node(n, libc::S_IFREG, f));
        let [shut, grows] = [("shut", immutable), ("grows", append)].map(|(n, f)| node(n, libc::S_IFDIR, f));
        make(&server, "plain", 0);
        let plain = server.nodes.number(server.fs.lookup(ROOT, b"plain").expect("lookup").0);
        let to = |node: u64, opcode: u32, body: Out| {
            let h = Header { opcode, unique: 1, node, uid: 0, gid: 0, pid: 0 };
            server.answer(&h, Cursor(&body.0)).map(drop)
        };
        let body = |fill: &dyn Fn(&mut Out)| {
            let mut body = Out::new();
            fill(&mut body);
            body
        };
        let no = Err(Errno::PERM);
        let link = |what: u64, dir: u64| {
            to(
                dir,
                op::LINK,
                body(&|b| {
                    b.u64(what).bytes(b"link\0");
                }),
            )
        };
        assert_eq!([link(fixed, ROOT), link(log, ROOT), link(plain, shut)], [no; 3]);
        assert_eq!(link(plain, grows), Ok(()));
        let rename = |from: u64, name: &str, dir: u64| {
            let names = format!("{name}\0new\0");
            to(
                from,
                op::RENAME,
                body(&|b| {
                    b.u64(dir).bytes(names.as_bytes());
                }),
            )
        };
        for (from, name, dir) in
            [(ROOT, "fixed", ROOT), (ROOT, "log", ROOT), (shut, "in", ROOT), (grows, "in", ROOT)]
        {
            assert_eq!(rename(from, name, dir), no, "{name}");
        }
        assert_eq!(rename(ROOT, "plain", shut), no);
        let unlink = |dir: u64, name: &[u8]| {
            to(
                dir,
                op::UNLINK,
                body(&|b| {
                    b.bytes(name);
                }),
            )
        };
        assert_eq!(
            [(ROOT, "fixed\0"), (ROOT, "log\0"), (shut, "in\0"), (grows, "in\0")]
                .map(|(dir, n)| unlink(dir, n.as_bytes())),
            [no; 4]
        );
        let make_in = |dir: u64| {
            to(
                dir,
                op::MKDIR,
                body(&|b| {
                    b.u32(0o755).u32(0).bytes(b"made\0");
                }),
            )
        };
        assert_eq!([make_in(shut), make_in(grows)], [no, Ok(())]);
        let open = |node: u64, flags: i32| {
            to(
                node,
                op::OPEN,
                body(&|b| {
                    b.u32(flags as u32).u32(0);
                }),
            )
        };
        for (node, flags, done) in [
            (fixed, libc::O_RDONLY, Ok(())),
            (fixed, libc::O_WRONLY, no),
            (fixed, libc::O_RDWR | libc::O_APPEND, no),
            (log, libc::O_WRONLY, no),
            (log, libc::O_WRONLY | libc::O_APPEND, Ok(())),
            (log, libc::O_WRONLY | libc::O_APPEND | libc::O_TRUNC, no),
        ] {
            assert_eq!(open(node, flags), done, "{node} {flags:o}");
        }
        let write = |node: u64, flags: i32| {
            let fill = |b: &mut Out| {
                b.u64(0).u64(0).u32(1).u32(0).u64(0).u32(flags as u32).u32(0).bytes(b"x");
            };
            to(node, op::WRITE, body(&fill))
        };
        assert_eq!(
            [write(fixed, libc::O_APPEND), write(log, 0), write(log, libc::O_APPEND)],
            [no, no, Ok(())]
        );
        let set = |node: u64, valid: u32| {
            let fill = |b: &mut Out| {
                b.u32(valid).u32(0).zeros(6 * 8 + 3 * 4 + 5 * 4);
            };
            to(node, op::SETATTR, body(&fill))
        };
        let touch = fattr::ATIME | fattr::ATIME_NOW | fattr::MTIME | fattr::MTIME_NOW;
        for valid in [fattr::SIZE, fattr::MODE, fattr::UID, fattr::GID, fattr::MTIME, fattr::ATIME, touch] {
            assert_eq!(set(fixed, valid), no, "{valid:#x}");
            assert_eq!(set(log, valid), if valid == touch { Ok(()) } else { no }, "{valid:#x}");
        }
        for node in [fixed, log, shut, grows] {
            let put = |b: &mut Out| {
                b.u32(1).u32(0).u32(0).u32(0).bytes(b"user.x\0v");
            };
            assert_eq!(to(node, op::SETXATTR, body(&put)), no);
            assert_eq!(
                to(
                    node,
                    op::REMOVEXATTR,
                    body(&|b| {
                        b.bytes(b"user.x\0");
                    })
                ),
                no
            );
        }
        let fallocate = |node: u64, mode: i32| {
            to(
                node,
                op::FALLOCATE,
                body(&|b| {
                    b.u64(0).u64(0).u64(4096).u32(mode as u32).u32(0);
                }),
            )
        };
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        assert_eq!([fallocate(fixed, 0), fallocate(log, punch), fallocate(log, 0)], [no, no, Ok(())]);
        let copy = |to_node: u64| {
            let fill = |b: &mut Out| {
                b.u64(0).u64(0).u64(to_node).u64(0).u64(0).u64(1).u64(0);
            };
            to(plain, op::COPY_FILE_RANGE, body(&fill))
        };
        assert_eq!([copy(fixed), copy(log)], [no; 2]);
    }

    /// A mount of a member that is confined to `/mine`, beside `/secret`.
    #[test]
    fn a_mount_of_a_confined_member_has_its_directory_for_a_root_and_no_way_out() {
        let area = shared("confined");
        let host = Filesystem::open(area(0)).expect("open");
        let mkdir = |dir: fs::Handle, name: &str| {
            host.create(dir, Some(name.as_bytes()), &Create::mode(libc::S_IFDIR | 0o777)).expect("mkdir")
        };
        let (mine, _) = (mkdir(ROOT.into(), "mine"), mkdir(ROOT.into(), "secret"));
        let inner = mkdir(mine, "inner");
        host.create(inner, Some(b"a"), &Create::mode(libc::S_IFREG | 0o600)).expect("create");
        host.grant(5, "tenant", 0, 0, Some(mine)).expect("grant");
        let fs = Filesystem::open(area(5)).expect("open");
        let server = Server::new(fs);
        let found = |node: u64, name: &str| {
            let h = Header { opcode: op::LOOKUP, unique: 1, node, uid: 0, gid: 0, pid: 0 };
            server.answer(&h, Cursor(&[name.as_bytes(), &[0]].concat())).map(|reply| match reply {
                Reply::Body(out) => u64::from_ne_bytes(out.0[..8].try_into().expect("eight bytes")),
                _ => panic!("no entry"),
            })
        };
        const TOP: u64 = 1;
        assert_eq!(found(TOP, "secret"), Err(Errno::NOENT));
        assert_eq!(found(TOP, ".."), Ok(TOP));
        let node = found(TOP, "inner").expect("it is there");
        assert_eq!(server.nodes.handle(node), inner);
        assert_eq!(found(node, ".."), Ok(TOP));
        ask(&server, 0, op::MKDIR, &[0o755u32.to_ne_bytes().as_slice(), &[0; 4], b"made\0"].concat())
            .expect("mkdir");
        assert!(host.lookup(mine, b"made").is_ok(), "it is made in the member's directory");
        // Whatever the client names: the core has no way to the root.
        assert_eq!(server.fs.lookup(ROOT, b"secret").err(), Some(Errno::STALE));
        assert_eq!(server.fs.getattr(ROOT).err(), Some(Errno::STALE));
        assert_eq!(server.fs.readdir(ROOT, 0, |_, _, _, _| true).err(), Some(Errno::STALE));
        assert!(server.fs.create(ROOT, Some(b"x"), &Create::mode(libc::S_IFREG)).is_err());
        assert!(server.fs.rename((inner, b"a"), (ROOT, b"b"), 0).is_err());
        for name in [b"x", b"b"] {
            assert_eq!(host.lookup(ROOT, name).err(), Some(Errno::NOENT));
        }
    }

    fn create(server: &Server, uid: u32, flags: i32, name: &str) -> Result<()> {
        let mut body = Out::new();
        body.u32(flags as u32).u32(0o600).u32(0).u32(0).bytes(name.as_bytes()).bytes(&[0]);
        ask(server, uid, op::CREATE, &body.0)
    }

    /// In such directories the kernel may refuse to open what another user has put there (fs.protected_regular), if it has found it.
    #[test]
    fn what_another_user_puts_into_a_sticky_directory_at_that_moment_is_not_opened_unseen() {
        let server = server();
        make(&server, "his", 1000);
        make(&server, "own", 1001);
        make(&server, "of-the-owner", 0);
        let set = |mode: u32| {
            let attr = Attr { mode: libc::S_IFDIR | mode, ..Attr::default() };
            server.fs.setattr(ROOT, sys::TFS_SET_MODE, &attr).expect("chmod");
        };
        for (mode, his) in
            [(0o1777, Err(Errno::STALE)), (0o1775, Err(Errno::STALE)), (0o1755, Ok(())), (0o777, Ok(()))]
        {
            set(mode);
            assert_eq!(create(&server, 1001, libc::O_WRONLY, "his"), his, "{mode:o}");
            assert_eq!(create(&server, 1001, libc::O_WRONLY, "own"), Ok(()), "{mode:o}");
            assert_eq!(create(&server, 1001, libc::O_WRONLY, "of-the-owner"), Ok(()), "{mode:o}");
        }
    }

    /// Such requests arrive when another member has made the name since the kernel looked.
    #[test]
    fn a_file_that_came_since_the_kernel_looked_is_opened_for_who_may_open_it() {
        let server = server();
        make(&server, "open", 1000);
        make(&server, "shut", 1000);
        server.fs.create(ROOT, Some(b"folder"), &Create::mode(libc::S_IFDIR | 0o777)).expect("create");
        let shut = server.fs.lookup(ROOT, b"shut").expect("lookup").0;
        server.fs.pwrite(shut, b"text", 0, false).expect("write");
        server
            .fs
            .setattr(shut, sys::TFS_SET_MODE, &Attr { mode: libc::S_IFREG | 0o460, ..Attr::default() })
            .expect("chmod");
        // Nobody puts files there for others to write into.
        let attr = Attr { mode: libc::S_IFDIR | 0o777, ..Attr::default() };
        server.fs.setattr(ROOT, sys::TFS_SET_MODE, &attr).expect("chmod");
        assert_eq!(create(&server, 1001, libc::O_RDWR, "open"), Ok(()));
        assert_eq!(create(&server, 1000, libc::O_RDONLY, "shut"), Ok(()));
        for (uid, flags, name, why) in [
            (1000, libc::O_RDWR | libc::O_EXCL, "open", Errno::EXIST),
            (1000, libc::O_RDWR, "shut", Errno::STALE),
            (1000, libc::O_RDONLY | libc::O_TRUNC, "shut", Errno::STALE),
            (1001, libc::O_RDONLY, "shut", Errno::STALE),
            (1000, libc::O_RDONLY, "folder", Errno::STALE),
        ] {
            assert_eq!(create(&server, uid, flags, name), Err(why), "{name} {flags:o} by {uid}");
        }
        assert_eq!(server.fs.size(shut), 4);
        server
            .fs
            .setattr(shut, sys::TFS_SET_MODE, &Attr { mode: libc::S_IFREG | 0o600, ..Attr::default() })
            .expect("chmod");
        assert_eq!(create(&server, 1000, libc::O_WRONLY | libc::O_TRUNC, "shut"), Ok(()));
        assert_eq!(server.fs.size(shut), 0);
    }
}
