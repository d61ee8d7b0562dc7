// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reports the changes of requests to watchers in other members. The kernel notifies watchers on this host by itself.

use super::abi::{Cursor, Header, fattr, op};
use super::flags;
use super::ops::Server;
use crate::change::Change;
use crate::fs::Handle;

/// The fields that make a SETATTR a change of attributes.
const ATTRIBUTES: u32 = fattr::MODE | fattr::UID | fattr::GID | fattr::ATIME | fattr::MTIME;

/// The inode of a name.
#[derive(Clone, Copy, Default)]
struct Found {
    /// 0: there is none.
    ino: u64,
    /// `IN_ISDIR` of a directory.
    kind: u32,
}

/// Facts about a request's inodes that can't be found any more once it is done.
#[derive(Default)]
pub(super) struct Subject {
    named: Found,
    /// Of a rename: what has the new name.
    target: Found,
}

fn named(what: Found, dir: u64, name: &[u8], mask: u32) -> Change {
    Change::new(what.ino, Some((dir, name.to_vec())), mask | what.kind)
}

impl Server {
    /// Called before a request is carried out.
    pub(super) fn subject(&self, h: &Header, mut c: Cursor<'_>) -> Subject {
        let find = |number: u64, name: Option<&[u8]>| {
            name.map_or(Found::default(), |name| self.find(self.nodes.handle(number), name))
        };
        match h.opcode {
            op::UNLINK | op::RMDIR => Subject { named: find(h.node, c.name()), target: Found::default() },
            op::RENAME | op::RENAME2 => {
                let dir = c.u64().unwrap_or(0);
                c.bytes(if h.opcode == op::RENAME2 { 8 } else { 0 });
                Subject { named: find(h.node, c.name()), target: find(dir, c.name()) }
            }
            _ => Subject::default(),
        }
    }

    /// Called after a request was carried out. Its body was valid, so a missing part here is empty.
    pub(super) fn tell(&self, h: &Header, mut c: Cursor<'_>, subject: &Subject) {
        let ino = self.nodes.handle(h.node).ino;
        let created = |skip: usize, mut c: Cursor<'_>| {
            c.bytes(skip);
            let name = c.name().unwrap_or_default();
            vec![named(self.find(ino, name), ino, name, libc::IN_CREATE)]
        };
        let mut changes = match h.opcode {
            op::SYMLINK => created(0, c),
            op::MKDIR | op::LINK => created(8, c),
            op::MKNOD | op::CREATE => created(16, c),
            op::UNLINK | op::RMDIR => {
                let mask = libc::IN_DELETE | self.is_gone(subject.named.ino);
                vec![named(subject.named, ino, c.name().unwrap_or_default(), mask)]
            }
            op::RENAME | op::RENAME2 => return self.tell_rename(h, c, subject),
            op::SETATTR => {
                let valid = c.u32().unwrap_or(0);
                let size = if valid & fattr::SIZE != 0 { libc::IN_MODIFY } else { 0 };
                let rest = if valid & ATTRIBUTES != 0 { libc::IN_ATTRIB } else { 0 };
                vec![self.by_node(h.node, size), self.by_node(h.node, rest)]
            }
            op::WRITE | op::FALLOCATE => return self.tell_modified(h.node),
            op::COPY_FILE_RANGE => {
                c.bytes(16);
                return self.tell_modified(c.u64().unwrap_or(0));
            }
            op::RELEASE => {
                c.bytes(8);
                let writer = c.u32().unwrap_or(0) & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
                vec![self.by_node(h.node, if writer { libc::IN_CLOSE_WRITE } else { 0 })]
            }
            op::SETXATTR | op::REMOVEXATTR => vec![self.by_node(h.node, libc::IN_ATTRIB)],
            op::IOCTL => {
                let mask = if flags::changes(c) { libc::IN_ATTRIB } else { 0 };
                vec![self.by_node(h.node, mask)]
            }
            _ => return,
        };
        changes.retain(|change| change.mask & !libc::IN_ISDIR != 0 && change.ino != 0);
        if !changes.is_empty() {
            self.fs.tell(&mut changes);
        }
    }

    /// Posts one event for repeated writes until a watcher has read it.
    pub(super) fn tell_modified(&self, number: u64) {
        if !self.fs.change_unheard(self.nodes.modify_told(number)) {
            let end = self.fs.tell(&mut [self.by_node(number, libc::IN_MODIFY)]);
            self.nodes.set_modify_told(number, end);
        }
    }

    fn tell_rename(&self, h: &Header, mut c: Cursor<'_>, subject: &Subject) {
        let (old_dir, new_dir) = (self.nodes.handle(h.node).ino, self.nodes.handle(c.u64().unwrap_or(0)).ino);
        let flags = if h.opcode == op::RENAME2 { c.u64().unwrap_or(0) as u32 } else { 0 };
        let (Some(old), Some(new)) = (c.name(), c.name()) else { return };
        let moved = |what, from: (u64, &[u8]), to: (u64, &[u8])| {
            self.fs.tell(&mut [
                named(what, from.0, from.1, libc::IN_MOVED_FROM),
                named(what, to.0, to.1, libc::IN_MOVED_TO),
            ]);
        };
        let target = subject.target;
        moved(subject.named, (old_dir, old), (new_dir, new));
        if target.ino != 0 && flags & libc::RENAME_EXCHANGE != 0 {
            moved(target, (new_dir, new), (old_dir, old));
        } else if target.ino != 0 {
            let mask = libc::IN_ATTRIB | target.kind | self.is_gone(target.ino);
            self.fs.tell(&mut [Change::new(target.ino, None, mask)]);
        }
    }

    fn find(&self, dir: impl Into<Handle>, name: &[u8]) -> Found {
        self.fs.lookup(dir, name).map_or(Found::default(), |(handle, kind)| Found {
            ino: handle.ino,
            kind: if kind == libc::DT_DIR { libc::IN_ISDIR } else { 0 },
        })
    }

    /// Uses the name of the kernel's last lookup, if the inode still has it.
    fn by_node(&self, number: u64, mask: u32) -> Change {
        let ino = self.nodes.handle(number).ino;
        let place = self
            .nodes
            .place(number)
            .filter(|(dir, name)| self.fs.lookup(*dir, name).is_ok_and(|f| f.0.ino == ino));
        Change::new(ino, place, mask | self.is_dir(ino))
    }

    /// The inode lost its last name.
    fn is_gone(&self, ino: u64) -> u32 {
        if self.fs.getattr(ino).map_or(0, |a| a.nlink) == 0 { libc::IN_DELETE_SELF } else { 0 }
    }

    fn is_dir(&self, ino: u64) -> u32 {
        let dir = self.fs.getattr(ino).is_ok_and(|a| a.mode & libc::S_IFMT == libc::S_IFDIR);
        if dir { libc::IN_ISDIR } else { 0 }
    }
}
