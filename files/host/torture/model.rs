// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The expected file system: plain maps and vectors. Operations are applied to it and to the real one, and results compared.

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tombolo_files::sys;

use crate::rng::{self, Rng};
use crate::tree::{Result, Spot, first_mode};

pub type Id = usize;

/// The type and contents of an inode.
#[derive(Clone, Debug)]
pub enum Kind {
    File(Vec<u8>),
    Dir { entries: BTreeMap<Vec<u8>, Id>, parent: Id },
    Symlink(Vec<u8>),
    Fifo,
}

/// An inode.
#[derive(Clone, Debug)]
pub struct Node {
    pub ino: u64,
    pub kind: Kind,
    pub perm: u32,
    pub nlink: u32,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub open: bool,
    /// Made without a name, and never had one: can be linked.
    pub nameless: bool,
    /// One of its names, as far as known.
    name: Option<(Id, Vec<u8>)>,
}

/// One operation; numbers of nodes are the model's.
#[derive(Clone, Debug)]
pub enum Op {
    Create {
        dir: Id,
        name: Vec<u8>,
        what: u32,
        open: bool,
    },
    Tmpfile {
        dir: Id,
    },
    Link {
        node: Id,
        dir: Id,
        name: Vec<u8>,
    },
    Unlink {
        dir: Id,
        name: Vec<u8>,
    },
    Rmdir {
        dir: Id,
        name: Vec<u8>,
    },
    Rename {
        from: (Id, Vec<u8>),
        to: (Id, Vec<u8>),
        flags: u32,
    },
    Write {
        node: Id,
        at: u64,
        len: usize,
        seed: u64,
    },
    Append {
        node: Id,
        len: usize,
        seed: u64,
    },
    Truncate {
        node: Id,
        size: u64,
    },
    Falloc {
        node: Id,
        mode: u32,
        at: u64,
        len: u64,
    },
    SetXattr {
        node: Id,
        name: Vec<u8>,
        len: usize,
        seed: u64,
    },
    DropXattr {
        node: Id,
        name: Vec<u8>,
    },
    Chmod {
        node: Id,
        perm: u32,
    },
    Open {
        node: Id,
    },
    Close {
        node: Id,
    },
    /// By stores to a shared mapping; within the file.
    MapWrite {
        node: Id,
        at: u64,
        len: usize,
        seed: u64,
    },
    /// By loads from a mapping; beyond the end the access must fault.
    MapRead {
        node: Id,
        at: u64,
        len: usize,
    },
    Read {
        node: Id,
        at: u64,
        len: usize,
    },
    List {
        dir: Id,
    },
    Stat {
        node: Id,
    },
    Seek {
        node: Id,
        at: u64,
    },
}

impl Op {
    /// Returns the operation's node, unless it has a name instead.
    pub fn node(&self) -> Option<Id> {
        match self {
            Op::Link { node, .. }
            | Op::Write { node, .. }
            | Op::Append { node, .. }
            | Op::Truncate { node, .. }
            | Op::Falloc { node, .. }
            | Op::SetXattr { node, .. }
            | Op::DropXattr { node, .. }
            | Op::Chmod { node, .. }
            | Op::Open { node }
            | Op::Close { node }
            | Op::MapWrite { node, .. }
            | Op::MapRead { node, .. }
            | Op::Read { node, .. }
            | Op::Stat { node }
            | Op::Seek { node, .. } => Some(*node),
            _ => None,
        }
    }
}

/// The way to the file system, which limits the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Reach {
    /// The core itself, by inode number, without the VFS's rules.
    Core,
    /// A mount without shared mappings.
    Mount,
    /// A mount with them.
    Mapped,
}

/// The file system below some directories that only this model's member changes.
#[derive(Clone, Debug)]
pub struct Model {
    pub nodes: Vec<Option<Node>>,
    /// Directories that exist from the start and stay.
    pub bases: Vec<Id>,
    /// Their paths.
    roots: Vec<Vec<u8>>,
    /// Names in these have this prefix; the others' names there are ignored.
    pub prefix: Vec<u8>,
    pub shared: Option<Id>,
    /// Largest file, bytes.
    pub largest: u64,
    /// The way to the file system.
    pub reach: Reach,
    /// Numbers of freed nodes.
    free: Vec<Id>,
    /// Bytes of all files, beyond which the largest is cut off.
    pub limit: u64,
}

/// Paths from here on are not made longer.
const LONG_PATH: usize = 2000;

impl Model {
    /// `own`: a directory that only this member uses, `shared`: one with other users.
    pub fn new(own: Spot, shared: Option<Spot>, prefix: &str, reach: Reach) -> Model {
        let has_shared = shared.is_some();
        let (mut nodes, mut roots) = (Vec::new(), Vec::new());
        for (id, base) in std::iter::once(own).chain(shared).enumerate() {
            nodes.push(Some(Node {
                ino: base.ino,
                kind: Kind::Dir { entries: BTreeMap::new(), parent: id },
                perm: 0o755,
                nlink: 2,
                xattrs: BTreeMap::new(),
                open: false,
                nameless: false,
                name: None,
            }));
            roots.push(base.path.unwrap_or_default());
        }
        Model {
            bases: (0..nodes.len()).collect(),
            nodes,
            roots,
            prefix: prefix.as_bytes().to_vec(),
            shared: has_shared.then_some(1),
            largest: 300 << 10,
            reach,
            limit: 20 << 20,
            free: Vec::new(),
        }
    }

    pub fn node(&self, id: Id) -> &Node {
        self.nodes[id].as_ref().expect("a node that exists")
    }

    pub fn node_mut(&mut self, id: Id) -> &mut Node {
        self.nodes[id].as_mut().expect("a node that exists")
    }

    pub fn entries(&self, dir: Id) -> &BTreeMap<Vec<u8>, Id> {
        match &self.node(dir).kind {
            Kind::Dir { entries, .. } => entries,
            _ => unreachable!("directories only"),
        }
    }

    fn entries_mut(&mut self, dir: Id) -> &mut BTreeMap<Vec<u8>, Id> {
        match &mut self.node_mut(dir).kind {
            Kind::Dir { entries, .. } => entries,
            _ => unreachable!("directories only"),
        }
    }

    pub fn data(&self, id: Id) -> Option<&Vec<u8>> {
        match &self.node(id).kind {
            Kind::File(data) => Some(data),
            _ => None,
        }
    }

    pub fn data_mut(&mut self, id: Id) -> &mut Vec<u8> {
        match &mut self.node_mut(id).kind {
            Kind::File(data) => data,
            _ => unreachable!("files only"),
        }
    }

    fn is_dir(&self, id: Id) -> bool {
        matches!(self.node(id).kind, Kind::Dir { .. })
    }

    pub fn ids(&self, test: impl Fn(&Node) -> bool) -> Vec<Id> {
        (0..self.nodes.len()).filter(|id| self.nodes[*id].as_ref().is_some_and(&test)).collect()
    }

    /// Returns the place of a node.
    pub fn spot(&self, id: Id) -> Spot {
        Spot { ino: self.node(id).ino, path: self.path(id) }
    }

    /// Returns one of its paths; none when it has no name.
    pub fn path(&self, id: Id) -> Option<Vec<u8>> {
        if let Some(base) = self.bases.iter().position(|b| *b == id) {
            return Some(self.roots[base].clone());
        }
        let node = self.node(id);
        if node.nlink == 0 {
            return None;
        }
        let (dir, name) = node.name.clone().or_else(|| self.search(id))?;
        let mut path = self.path(dir)?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&name);
        Some(path)
    }

    fn search(&self, id: Id) -> Option<(Id, Vec<u8>)> {
        self.dirs().into_iter().find_map(|dir| {
            let name = self.entries(dir).iter().find(|entry| *entry.1 == id)?.0;
            Some((dir, name.clone()))
        })
    }

    fn enter(&mut self, dir: Id, name: &[u8], id: Id) {
        self.entries_mut(dir).insert(name.to_vec(), id);
        self.node_mut(id).name = Some((dir, name.to_vec()));
    }

    fn leave(&mut self, dir: Id, name: &[u8]) {
        let Some(id) = self.entries_mut(dir).remove(name) else { return };
        let node = self.node_mut(id);
        if node.name.as_ref().is_some_and(|n| n.0 == dir && n.1 == name) {
            node.name = None;
        }
    }

    /// Returns the directories that can be used.
    fn dirs(&self) -> Vec<Id> {
        self.ids(|n| matches!(n.kind, Kind::Dir { .. }) && n.nlink > 0)
    }

    fn random_name(&self, rng: &mut Rng, dir: Id) -> Vec<u8> {
        let existing = self.entries(dir);
        if !existing.is_empty() && rng.one_in(2) {
            return existing
                .keys()
                .nth(rng.below(existing.len() as u64) as usize)
                .expect("one of them")
                .clone();
        }
        let mut name = if Some(dir) == self.shared { self.prefix.clone() } else { Vec::new() };
        name.extend_from_slice(format!("n{}", rng.below(40)).as_bytes());
        if rng.one_in(6) {
            let longer = name.len() + rng.below(200) as usize;
            name.resize(longer, b'x');
        }
        name
    }

    /// Returns the directory, or, if names are reached by paths, one with a shorter path.
    fn near(&self, dir: Id) -> Id {
        let far = self.reach != Reach::Core && self.path(dir).is_some_and(|path| path.len() > LONG_PATH);
        if far { 0 } else { dir }
    }

    /// Chooses the next operation.
    pub fn random_op(&self, rng: &mut Rng) -> Op {
        let dirs = self.dirs();
        let files = self.ids(|n| matches!(n.kind, Kind::File(_)));
        let alive: Vec<Id> =
            self.ids(|n| n.nlink > 0).into_iter().filter(|id| !self.bases.contains(id)).collect();
        let sizes = || files.iter().map(|id| (self.data(*id).map_or(0, Vec::len), *id));
        if sizes().map(|s| s.0 as u64).sum::<u64>() > self.limit {
            let node = sizes().max().expect("some file").1;
            return Op::Truncate { node, size: rng.below(5000) };
        }
        let dir = self.near(rng.pick(&dirs));
        let name = self.random_name(rng, dir);
        let size_of = |rng: &mut Rng| match rng.below(10) {
            0 => rng.below(self.largest) as usize,
            1..=3 => rng.below(40_000) as usize,
            _ => rng.below(6000) as usize,
        };
        if !files.is_empty() && rng.below(100) < 45 {
            let node = rng.pick(&files);
            let size = self.data(node).map_or(0, Vec::len) as u64;
            let at = if rng.one_in(3) { rng.below(self.largest) } else { rng.below(size + 1) };
            let mapped = self.reach == Reach::Mapped && rng.one_in(5);
            if mapped && size > 0 && rng.one_in(2) {
                let at = rng.below(size);
                return Op::MapWrite { node, at, len: 1 + rng.below(size - at) as usize, seed: rng.next() };
            }
            if mapped {
                return Op::MapRead { node, at, len: size_of(rng) };
            }
            return match rng.below(9) {
                0..=2 => Op::Write { node, at, len: 1 + size_of(rng), seed: rng.next() },
                3 => Op::Append { node, len: 1 + size_of(rng), seed: rng.next() },
                4 => Op::Truncate {
                    node,
                    size: if rng.one_in(2) { rng.below(size + 1) } else { rng.below(self.largest) },
                },
                5 => {
                    let (punch, keep, zero) =
                        (sys::TFS_FALLOC_PUNCH, sys::TFS_FALLOC_KEEP_SIZE, sys::TFS_FALLOC_ZERO);
                    let mode = rng.pick(&[0, keep, punch | keep, punch | keep, zero, zero | keep]);
                    // Blocks past the size are ignored here: they are few.
                    let beyond = mode == keep || mode == (zero | keep);
                    let len = 1 + if beyond { rng.below(9000) } else { size_of(rng) as u64 };
                    Op::Falloc { node, mode, at: if beyond { at.min(size) } else { at }, len }
                }
                6 => Op::Seek { node, at },
                _ => Op::Read { node, at, len: size_of(rng) },
            };
        }
        if alive.len() > 300 && rng.one_in(2) {
            return Op::Unlink { dir, name };
        }
        if alive.is_empty() {
            return Op::Create { dir, name, what: libc::S_IFREG, open: false };
        }
        let node = rng.pick(&alive);
        let attr = || [&b"user.a"[..], b"user.bb", b"trusted.c", b"user.a-longer-name"];
        match rng.below(32) {
            0..=6 => {
                let what = rng.pick(&[
                    libc::S_IFREG,
                    libc::S_IFREG,
                    libc::S_IFREG,
                    libc::S_IFDIR,
                    libc::S_IFLNK,
                    libc::S_IFIFO,
                ]);
                let open = what == libc::S_IFREG && rng.one_in(4);
                Op::Create { dir, name, what, open }
            }
            7 => Op::Tmpfile { dir },
            8..=9 => {
                let nameless = self.ids(|n| n.nameless);
                let node = if nameless.is_empty() || rng.one_in(2) { node } else { rng.pick(&nameless) };
                Op::Link { node, dir, name }
            }
            10..=13 => Op::Unlink { dir, name },
            14..=15 => Op::Rmdir { dir, name },
            16..=20 => {
                let to = self.near(rng.pick(&dirs));
                let new = self.random_name(rng, to);
                let flags = rng.pick(&[0, 0, 0, sys::TFS_RENAME_NOREPLACE, sys::TFS_RENAME_EXCHANGE]);
                Op::Rename { from: (dir, name), to: (to, new), flags }
            }
            21..=22 => {
                let len = if rng.one_in(8) { rng.below(20_000) } else { rng.below(300) } as usize;
                Op::SetXattr { node, name: rng.pick(&attr()).to_vec(), len, seed: rng.next() }
            }
            23 => Op::DropXattr { node, name: rng.pick(&attr()).to_vec() },
            // A path can't name a symbolic link for this.
            24..=26 if self.reach != Reach::Core && matches!(self.node(node).kind, Kind::Symlink(_)) => {
                Op::Stat { node }
            }
            // Kernels open pipes without calling their file system.
            25..=26 if self.reach != Reach::Core && matches!(self.node(node).kind, Kind::Fifo) => {
                Op::Stat { node }
            }
            24 => Op::Chmod { node, perm: rng.below(0o10000) as u32 },
            25..=26 => Op::Open { node },
            27 => {
                let open = self.ids(|n| n.open);
                if open.is_empty() { Op::Stat { node } } else { Op::Close { node: rng.pick(&open) } }
            }
            28..=29 => Op::List { dir },
            _ => Op::Stat { node },
        }
    }

    fn above(&self, above: Id, mut id: Id) -> bool {
        loop {
            if id == above {
                return true;
            }
            match &self.node(id).kind {
                Kind::Dir { parent, .. } if *parent != id => id = *parent,
                _ => return false,
            }
        }
    }

    fn drop_link(&mut self, id: Id) {
        let dir = self.is_dir(id);
        let node = self.node_mut(id);
        node.nlink = if dir { 0 } else { node.nlink - 1 };
        if node.nlink == 0 && !node.open {
            self.drop_node(id);
        }
    }

    pub fn drop_node(&mut self, id: Id) {
        self.nodes[id] = None;
        self.free.push(id);
    }

    fn add(&mut self, kind: Kind, perm: u32, nlink: u32, open: bool) -> Id {
        let (xattrs, nameless) = (BTreeMap::new(), nlink == 0);
        let node = Some(Node { ino: 0, kind, perm, nlink, xattrs, open, nameless, name: None });
        match self.free.pop() {
            Some(id) => {
                self.nodes[id] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    fn overwrite(&mut self, node: Id, at: u64, bytes: &[u8]) {
        let data = self.data_mut(node);
        let (at, end) = (at as usize, at as usize + bytes.len());
        if data.len() < end {
            data.resize(end, 0);
        }
        data[at..end].copy_from_slice(bytes);
    }

    /// Returns the operation's expected result, and applies it to the model. A new node's number is returned.
    pub fn apply(&mut self, op: &Op) -> Result<Option<Id>> {
        match op {
            Op::Create { dir, name, what, open } => {
                if self.entries(*dir).contains_key(name) {
                    return Err(Errno::EXIST);
                }
                let (kind, nlink) = match *what {
                    libc::S_IFDIR => (Kind::Dir { entries: BTreeMap::new(), parent: *dir }, 2),
                    libc::S_IFLNK => (Kind::Symlink(name.clone()), 1),
                    libc::S_IFIFO => (Kind::Fifo, 1),
                    _ => (Kind::File(Vec::new()), 1),
                };
                // The VFS hands the set-group-id bit on to directories.
                let inherited = self.reach != Reach::Core && *what == libc::S_IFDIR;
                let more = if inherited { self.node(*dir).perm & libc::S_ISGID } else { 0 };
                let id = self.add(kind, first_mode(*what) | more, nlink, *open);
                self.enter(*dir, name, id);
                if *what == libc::S_IFDIR {
                    self.node_mut(*dir).nlink += 1;
                }
                return Ok(Some(id));
            }
            Op::Tmpfile { .. } => return Ok(Some(self.add(Kind::File(Vec::new()), 0o640, 0, true))),
            Op::Link { node, dir, name } => {
                // The VFS looks at the name first, the core at the kind.
                let (directory, taken) = (self.is_dir(*node), self.entries(*dir).contains_key(name));
                if directory && (!taken || self.reach == Reach::Core) {
                    return Err(Errno::PERM);
                }
                if taken {
                    return Err(Errno::EXIST);
                }
                self.enter(*dir, name, *node);
                let node = self.node_mut(*node);
                node.nlink += 1;
                node.nameless = false;
            }
            Op::Unlink { dir, name } => {
                let id = *self.entries(*dir).get(name).ok_or(Errno::NOENT)?;
                if self.is_dir(id) {
                    return Err(Errno::ISDIR);
                }
                self.leave(*dir, name);
                self.drop_link(id);
            }
            Op::Rmdir { dir, name } => {
                let id = *self.entries(*dir).get(name).ok_or(Errno::NOENT)?;
                if !self.is_dir(id) {
                    return Err(Errno::NOTDIR);
                }
                if !self.entries(id).is_empty() {
                    return Err(Errno::NOTEMPTY);
                }
                self.leave(*dir, name);
                self.node_mut(*dir).nlink -= 1;
                self.drop_link(id);
            }
            Op::Rename { from, to, flags } => self.rename(from, to, *flags)?,
            Op::Write { node, at, len, seed } | Op::MapWrite { node, at, len, seed } => {
                self.overwrite(*node, *at, &rng::bytes(*seed, *len));
            }
            Op::Append { node, len, seed } => {
                let at = self.data(*node).map_or(0, Vec::len) as u64;
                self.overwrite(*node, at, &rng::bytes(*seed, *len));
            }
            Op::Truncate { node, size } => self.data_mut(*node).resize(*size as usize, 0),
            Op::Falloc { node, mode, at, len } => {
                let keep = mode & sys::TFS_FALLOC_KEEP_SIZE != 0;
                let data = self.data_mut(*node);
                let (at, end) = (*at as usize, (*at + *len) as usize);
                if !keep && data.len() < end {
                    data.resize(end, 0);
                }
                if mode & (sys::TFS_FALLOC_PUNCH | sys::TFS_FALLOC_ZERO) != 0 {
                    let size = data.len();
                    data[at.min(size)..end.min(size)].fill(0);
                }
            }
            Op::SetXattr { node, name, .. } | Op::DropXattr { node, name } if self.denied(*node, name) => {
                return Err(Errno::PERM);
            }
            Op::SetXattr { node, name, len, seed } => {
                let value = rng::bytes(*seed, *len);
                self.node_mut(*node).xattrs.insert(name.clone(), value);
            }
            Op::DropXattr { node, name } => {
                self.node_mut(*node).xattrs.remove(name).ok_or(Errno::NODATA)?;
            }
            Op::Chmod { node, perm } => self.node_mut(*node).perm = *perm,
            Op::Open { node } => self.node_mut(*node).open = true,
            Op::Close { node } => {
                self.node_mut(*node).open = false;
                if self.node(*node).nlink == 0 {
                    self.drop_node(*node);
                }
            }
            Op::Read { .. } | Op::MapRead { .. } | Op::List { .. } | Op::Stat { .. } | Op::Seek { .. } => {}
        }
        Ok(None)
    }

    /// The VFS allows user attributes on files and directories only.
    fn denied(&self, node: Id, name: &[u8]) -> bool {
        let plain = matches!(self.node(node).kind, Kind::File(_) | Kind::Dir { .. });
        self.reach != Reach::Core && name.starts_with(b"user.") && !plain
    }

    fn rename(&mut self, from: &(Id, Vec<u8>), to: &(Id, Vec<u8>), flags: u32) -> Result<()> {
        let source = *self.entries(from.0).get(&from.1).ok_or(Errno::NOENT)?;
        let target = self.entries(to.0).get(&to.1).copied();
        let exchange = flags & sys::TFS_RENAME_EXCHANGE != 0;
        if target.is_some() && flags & sys::TFS_RENAME_NOREPLACE != 0 {
            return Err(Errno::EXIST);
        }
        if target.is_none() && exchange {
            return Err(Errno::NOENT);
        }
        if self.is_dir(source) && self.above(source, to.0) {
            return Err(Errno::INVAL);
        }
        if let Some(target) = target {
            if self.is_dir(target) && self.above(target, from.0) {
                return Err(if exchange { Errno::INVAL } else { Errno::NOTEMPTY });
            }
            if target == source && !exchange {
                return Ok(());
            }
            if !exchange && self.is_dir(source) != self.is_dir(target) {
                return Err(if self.is_dir(source) { Errno::NOTDIR } else { Errno::ISDIR });
            }
            if !exchange && self.is_dir(target) && !self.entries(target).is_empty() {
                return Err(Errno::NOTEMPTY);
            }
        }
        let moves = |model: &mut Model, id: Id, old: Id, new: Id| {
            if let Kind::Dir { parent, .. } = &mut model.node_mut(id).kind {
                *parent = new;
                model.node_mut(old).nlink -= 1;
                model.node_mut(new).nlink += 1;
            }
        };
        self.leave(from.0, &from.1);
        moves(self, source, from.0, to.0);
        if let Some(target) = target {
            if exchange {
                moves(self, target, to.0, from.0);
                self.leave(to.0, &to.1);
                self.enter(from.0, &from.1, target);
            } else {
                self.leave(to.0, &to.1);
                if self.is_dir(target) {
                    self.node_mut(to.0).nlink -= 1;
                }
                self.drop_link(target);
            }
        }
        self.enter(to.0, &to.1, source);
        Ok(())
    }
}
