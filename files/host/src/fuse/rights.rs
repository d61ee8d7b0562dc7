// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Permission checks that the kernel does not make. It checks a caller's rights on the inodes that it looked up, but another member may have
//! changed the meaning of a name since. So where a right depends on the inode of a name, it is checked here once more, for the inode that the
//! operation then names to the core.

use std::fs::read_to_string;

use rustix::io::Errno;

use super::abi::Header;
use super::ops::Server;
use crate::fs::{Attr, Expect, Handle, Result};
use crate::sys;

/// Bits of a process's capabilities (capabilities(7)).
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
/// After so many changes of a name between its lookup and the operation, the caller gets ESTALE.
const TRIES: usize = 100;

/// Returns whether the caller has a capability. If its process is in a PID namespace that this one can't see: whether it is root.
fn capable(h: &Header, capability: u32) -> bool {
    let of_process = || {
        let status = read_to_string(format!("/proc/{}/status", h.pid)).ok().filter(|_| h.pid != 0)?;
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        u64::from_str_radix(effective.trim(), 16).ok()
    };
    of_process().map_or(h.uid == 0, |all| all >> capability & 1 == 1)
}

/// Returns whether set-id bits of a file may stay when this caller changes its data.
pub(super) fn keeps_set_id(h: &Header) -> bool {
    capable(h, CAP_FSETID)
}

impl Server {
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

    /// Runs `remove` with the present inodes of its names, and again if they change meanwhile.
    fn checked(&self, mut remove: impl FnMut() -> Result<()>) -> Result<()> {
        for _ in 0..TRIES {
            match remove() {
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
    use super::super::abi::{Cursor, Out, op};
    use super::super::locks::Locks;
    use super::super::nodes::Nodes;
    use super::*;
    use crate::area::{Area, Map};
    use crate::fs::{self, Create, Filesystem, Mkfs, ROOT};

    fn server() -> Server {
        let area = Area::whole(Map::memfd("rights", 8 << 20).expect("memory")).expect("an area");
        fs::mkfs(&area, &Mkfs { mode: 0o1777, ..Mkfs::default() }).expect("mkfs");
        let fs = Filesystem::open(area.lone()).expect("open");
        Server { fs, nodes: Nodes::default(), locks: Locks::default(), noatime: false, device_memory: false }
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
}
