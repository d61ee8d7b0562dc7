// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The model's requests to a file system: [`Call`]s by inode number on the core itself (here), by name through a mount
//! ([`crate::mounted`]), or in another machine ([`crate::remote`]).

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tombolo_files::fs::{Attr, Create, Filesystem};
use tombolo_files::sys;

use crate::rng;

pub type Result<T> = std::result::Result<T, Errno>;

/// The place of a node: its number, and one of its names below the root (none: it is open, and has no name).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Spot {
    pub ino: u64,
    pub path: Option<Vec<u8>>,
}

/// One call. A seed determines the bytes to be written.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Call {
    /// Without a name: unlinked, and open. A symbolic link points to its own name.
    Create {
        dir: Spot,
        name: Option<Vec<u8>>,
        what: u32,
        open: bool,
    },
    Link {
        node: Spot,
        dir: Spot,
        name: Vec<u8>,
    },
    Unlink {
        dir: Spot,
        name: Vec<u8>,
    },
    Rmdir {
        dir: Spot,
        name: Vec<u8>,
    },
    Rename {
        from: (Spot, Vec<u8>),
        to: (Spot, Vec<u8>),
        flags: u32,
    },
    /// `mapped`: by stores to a shared mapping.
    Write {
        node: Spot,
        at: u64,
        len: usize,
        seed: u64,
        mapped: bool,
    },
    Append {
        node: Spot,
        len: usize,
        seed: u64,
    },
    Truncate {
        node: Spot,
        size: u64,
    },
    Falloc {
        node: Spot,
        mode: u32,
        at: u64,
        len: u64,
    },
    SetXattr {
        node: Spot,
        name: Vec<u8>,
        len: usize,
        seed: u64,
    },
    DropXattr {
        node: Spot,
        name: Vec<u8>,
    },
    Chmod {
        node: Spot,
        perm: u32,
    },
    Open {
        node: Spot,
    },
    Close {
        node: Spot,
    },
    Read {
        node: Spot,
        at: u64,
        len: usize,
        mapped: bool,
    },
    /// As `Read`, with a digest in place of the bytes.
    Digest {
        node: Spot,
        at: u64,
        len: usize,
        mapped: bool,
    },
    /// A load from the page at `at` through a mapping: EFAULT where there is none.
    Probe {
        node: Spot,
        at: u64,
    },
    List {
        dir: Spot,
    },
    Lookup {
        dir: Spot,
        name: Vec<u8>,
    },
    Parent {
        dir: Spot,
    },
    Stat {
        node: Spot,
    },
    Xattrs {
        node: Spot,
    },
    Readlink {
        node: Spot,
    },
    Seek {
        node: Spot,
        at: u64,
        hole: bool,
    },
}

/// The number of bytes, and a number that follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest {
    pub len: u64,
    pub hash: u64,
}

impl Digest {
    pub fn of(bytes: &[u8]) -> Digest {
        let mut hash = 0xcbf2_9ce4_8422_2325 ^ bytes.len() as u64;
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
        Digest { len: bytes.len() as u64, hash }
    }
}

/// The result of `stat`. Times are nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    pub ino: u64,
    pub mode: u32,
    pub nlink: u32,
    pub owner: (u32, u32),
    pub size: u64,
    pub blocks: u64,
    pub mtime: i64,
    pub ctime: i64,
}

/// The result of a call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    Done,
    /// An inode, a position, or how many bytes.
    Number(u64),
    Bytes(Vec<u8>),
    Digest(Digest),
    /// Name, inode number, `DT_*`.
    Names(Vec<(Vec<u8>, u64, u8)>),
    Stat(Stat),
    Xattrs(Vec<(Vec<u8>, Digest)>),
}

/// A file system, as one member sees it.
pub trait Tree {
    /// EPIPE: the worker has ended.
    fn call(&self, call: &Call) -> Result<Answer>;

    /// Returns whether bytes are better compared there than fetched.
    fn far(&self) -> bool {
        false
    }
}

/// Permissions of what is created.
pub fn first_mode(what: u32) -> u32 {
    if what == libc::S_IFLNK { 0o777 } else { 0o640 }
}

impl Tree for Filesystem {
    fn call(&self, call: &Call) -> Result<Answer> {
        let done = |()| Answer::Done;
        let bytes = |len: usize, seed: u64| rng::bytes(seed, len);
        let read = |node: &Spot, at: u64, len: usize| {
            let mut got = vec![0xaa; len];
            let n = self.pread(node.ino, &mut got, at)?;
            got.truncate(n);
            Ok(got)
        };
        match call {
            Call::Create { dir, name, what, open } => {
                let target = (*what == libc::S_IFLNK).then_some(name.as_deref()).flatten();
                let create = Create {
                    target,
                    open: *open || name.is_none(),
                    ..Create::mode(what | first_mode(*what))
                };
                self.create(dir.ino, name.as_deref(), &create).map(|made| Answer::Number(made.ino))
            }
            Call::Link { node, dir, name } => self.link(dir.ino, name, node.ino).map(done),
            Call::Unlink { dir, name } => self.unlink(dir.ino, name, None).map(done),
            Call::Rmdir { dir, name } => self.rmdir(dir.ino, name, None).map(done),
            Call::Rename { from, to, flags } => {
                self.rename((from.0.ino, &from.1), (to.0.ino, &to.1), *flags).map(done)
            }
            Call::Write { node, at, len, seed, .. } => {
                self.pwrite(node.ino, &bytes(*len, *seed), *at, false).map(|n| Answer::Number(n as u64))
            }
            Call::Append { node, len, seed } => {
                self.append(node.ino, &bytes(*len, *seed), false).map(|r| Answer::Number(r.0 as u64))
            }
            Call::Truncate { node, size } => self.truncate(node.ino, *size, false).map(done),
            Call::Falloc { node, mode, at, len } => self.fallocate(node.ino, *mode, *at, *len).map(done),
            Call::SetXattr { node, name, len, seed } => {
                self.xattr_set(node.ino, name, Some(&bytes(*len, *seed)), 0, None).map(done)
            }
            Call::DropXattr { node, name } => self.xattr_set(node.ino, name, None, 0, None).map(done),
            Call::Chmod { node, perm } => {
                let attr = Attr { mode: *perm, ..Default::default() };
                self.setattr(node.ino, sys::TFS_SET_MODE, &attr).map(done)
            }
            Call::Open { node } => self.open_ref(node.ino).map(done),
            Call::Close { node } => self.close_ref(node.ino).map(done),
            Call::Read { node, at, len, .. } => read(node, *at, *len).map(Answer::Bytes),
            Call::Digest { node, at, len, .. } => {
                read(node, *at, *len).map(|got| Answer::Digest(Digest::of(&got)))
            }
            Call::Probe { .. } => Err(Errno::NODEV),
            Call::List { dir } => {
                let entries = self.list(dir.ino)?;
                Ok(Answer::Names(entries.into_iter().map(|e| (e.name, e.ino, e.kind)).collect()))
            }
            Call::Lookup { dir, name } => self.lookup(dir.ino, name).map(|found| Answer::Number(found.0.ino)),
            Call::Parent { dir } => self.parent(dir.ino).map(Answer::Number),
            Call::Stat { node } => {
                let a = self.getattr(node.ino)?;
                Ok(Answer::Stat(Stat {
                    ino: a.ino,
                    mode: a.mode,
                    nlink: a.nlink,
                    owner: (a.uid, a.gid),
                    size: a.size,
                    blocks: a.blocks,
                    mtime: a.mtime,
                    ctime: a.ctime,
                }))
            }
            Call::Xattrs { node } => {
                let list = self.xattr_list(node.ino)?;
                let names = list.split(|b| *b == 0).filter(|n| !n.is_empty());
                let all = names.map(|n| Ok((n.to_vec(), Digest::of(&self.xattr_get(node.ino, n)?))));
                all.collect::<Result<_>>().map(Answer::Xattrs)
            }
            Call::Readlink { node } => self.readlink(node.ino).map(Answer::Bytes),
            Call::Seek { node, at, hole } => self.seek(node.ino, *at, *hole).map(Answer::Number),
        }
    }
}
