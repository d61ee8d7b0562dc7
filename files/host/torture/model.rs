// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file system as it should be: plain maps and vectors. Operations are applied to it and to the real one, and results compared.

use std::collections::BTreeMap;

use rustix::io::Errno;
use tombolo_files::fs::{Create, Filesystem};
use tombolo_files::sys;

use crate::rng::{self, Rng};

pub type Id = usize;
type Result<T> = std::result::Result<T, Errno>;

/// What an inode is.
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
}

/// One operation; numbers of nodes are the model's.
#[derive(Clone, Debug)]
pub enum Op {
    Create { dir: Id, name: Vec<u8>, what: u32, open: bool },
    Tmpfile { dir: Id },
    Link { node: Id, dir: Id, name: Vec<u8> },
    Unlink { dir: Id, name: Vec<u8> },
    Rmdir { dir: Id, name: Vec<u8> },
    Rename { from: (Id, Vec<u8>), to: (Id, Vec<u8>), flags: u32 },
    Write { node: Id, at: u64, len: usize, seed: u64 },
    Append { node: Id, len: usize, seed: u64 },
    Truncate { node: Id, size: u64 },
    Falloc { node: Id, mode: u32, at: u64, len: u64 },
    SetXattr { node: Id, name: Vec<u8>, len: usize, seed: u64 },
    DropXattr { node: Id, name: Vec<u8> },
    Chmod { node: Id, perm: u32 },
    Open { node: Id },
    Close { node: Id },
    Read { node: Id, at: u64, len: usize },
    List { dir: Id },
    Stat { node: Id },
    Seek { node: Id, at: u64 },
}

/// The file system below some directories that only this model's user changes.
#[derive(Clone, Debug)]
pub struct Model {
    pub nodes: Vec<Option<Node>>,
    /// Directories that exist from the start and stay.
    pub bases: Vec<Id>,
    /// Names in these have this prefix; others' names there are not looked at.
    pub prefix: Vec<u8>,
    pub shared: Option<Id>,
    /// Largest file, bytes.
    pub largest: u64,
    /// Numbers of nodes that are gone.
    free: Vec<Id>,
    /// Bytes of all files, beyond which the largest is cut off.
    pub limit: u64,
}

const MIB: u64 = 1 << 20;

fn difference<T>(what: impl std::fmt::Display) -> std::result::Result<T, String> {
    Err(what.to_string())
}

impl Model {
    /// `own`: the inode of a directory of one's own, `shared`: of one with other users.
    pub fn new(own: u64, shared: Option<u64>, prefix: &str) -> Model {
        let dir = |ino, id| {
            Some(Node {
                ino,
                kind: Kind::Dir { entries: BTreeMap::new(), parent: id },
                perm: 0o755,
                nlink: 2,
                xattrs: BTreeMap::new(),
                open: false,
            })
        };
        let mut nodes = vec![dir(own, 0)];
        if let Some(shared) = shared {
            nodes.push(dir(shared, 1));
        }
        let bases = (0..nodes.len()).collect();
        let prefix = prefix.as_bytes().to_vec();
        Model {
            nodes,
            bases,
            prefix,
            shared: shared.map(|_| 1),
            largest: 300 << 10,
            limit: 20 << 20,
            free: Vec::new(),
        }
    }

    pub fn node(&self, id: Id) -> &Node {
        self.nodes[id].as_ref().expect("a node that exists")
    }

    fn node_mut(&mut self, id: Id) -> &mut Node {
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

    fn data_mut(&mut self, id: Id) -> &mut Vec<u8> {
        match &mut self.node_mut(id).kind {
            Kind::File(data) => data,
            _ => unreachable!("files only"),
        }
    }

    fn is_dir(&self, id: Id) -> bool {
        matches!(self.node(id).kind, Kind::Dir { .. })
    }

    fn ids(&self, test: impl Fn(&Node) -> bool) -> Vec<Id> {
        (0..self.nodes.len()).filter(|id| self.nodes[*id].as_ref().is_some_and(&test)).collect()
    }

    /// Directories one can do something in.
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

    /// The next operation.
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
        let dir = rng.pick(&dirs);
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
                    // Blocks past the size are not counted here: few of them.
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
            8..=9 => Op::Link { node, dir, name },
            10..=13 => Op::Unlink { dir, name },
            14..=15 => Op::Rmdir { dir, name },
            16..=20 => {
                let to = rng.pick(&dirs);
                let new = self.random_name(rng, to);
                let flags = rng.pick(&[0, 0, 0, sys::TFS_RENAME_NOREPLACE, sys::TFS_RENAME_EXCHANGE]);
                Op::Rename { from: (dir, name), to: (to, new), flags }
            }
            21..=22 => {
                let len = if rng.one_in(8) { rng.below(20_000) } else { rng.below(300) } as usize;
                Op::SetXattr { node, name: rng.pick(&attr()).to_vec(), len, seed: rng.next() }
            }
            23 => Op::DropXattr { node, name: rng.pick(&attr()).to_vec() },
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

    fn drop_node(&mut self, id: Id) {
        self.nodes[id] = None;
        self.free.push(id);
    }

    fn add(&mut self, kind: Kind, perm: u32, nlink: u32, open: bool) -> Id {
        let node = Some(Node { ino: 0, kind, perm, nlink, xattrs: BTreeMap::new(), open });
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

    /// What the operation must give, and does to the model. A new node's number comes back.
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
                let perm = if *what == libc::S_IFLNK { 0o777 } else { 0o640 };
                let id = self.add(kind, perm, nlink, *open);
                self.entries_mut(*dir).insert(name.clone(), id);
                if *what == libc::S_IFDIR {
                    self.node_mut(*dir).nlink += 1;
                }
                return Ok(Some(id));
            }
            Op::Tmpfile { .. } => return Ok(Some(self.add(Kind::File(Vec::new()), 0o640, 0, true))),
            Op::Link { node, dir, name } => {
                if self.is_dir(*node) {
                    return Err(Errno::PERM);
                }
                if self.entries(*dir).contains_key(name) {
                    return Err(Errno::EXIST);
                }
                self.entries_mut(*dir).insert(name.clone(), *node);
                self.node_mut(*node).nlink += 1;
            }
            Op::Unlink { dir, name } => {
                let id = *self.entries(*dir).get(name).ok_or(Errno::NOENT)?;
                if self.is_dir(id) {
                    return Err(Errno::ISDIR);
                }
                self.entries_mut(*dir).remove(name);
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
                self.entries_mut(*dir).remove(name);
                self.node_mut(*dir).nlink -= 1;
                self.drop_link(id);
            }
            Op::Rename { from, to, flags } => self.rename(from, to, *flags)?,
            Op::Write { node, at, len, seed } => self.overwrite(*node, *at, &rng::bytes(*seed, *len)),
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
            Op::Read { .. } | Op::List { .. } | Op::Stat { .. } | Op::Seek { .. } => {}
        }
        Ok(None)
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
        self.entries_mut(from.0).remove(&from.1);
        moves(self, source, from.0, to.0);
        if let Some(target) = target {
            if exchange {
                moves(self, target, to.0, from.0);
                self.entries_mut(from.0).insert(from.1.clone(), target);
            } else {
                if self.is_dir(target) {
                    self.node_mut(to.0).nlink -= 1;
                }
                self.drop_link(target);
            }
        }
        self.entries_mut(to.0).insert(to.1.clone(), source);
        Ok(())
    }

    /// Does it to the real file system. A new inode's number comes back.
    pub fn execute(&self, fs: &Filesystem, op: &Op) -> std::result::Result<Result<Option<u64>>, String> {
        let ino = |id: &Id| self.node(*id).ino;
        let unit = |r: Result<()>| r.map(|()| None);
        let whole = |r: Result<usize>, len: usize| match r {
            Ok(n) if n == len => Ok(Ok(None)),
            Ok(n) => difference(format!("{op:?}: {n} of {len} bytes")),
            Err(e) => Ok(Err(e)),
        };
        Ok(match op {
            Op::Create { dir, name, what, open } => {
                let target = (*what == libc::S_IFLNK).then_some(name.as_slice());
                let perm = if target.is_some() { 0o777 } else { 0o640 };
                let create = Create { target, open: *open, ..Create::mode(what | perm) };
                fs.create(ino(dir), Some(name), &create).map(Some)
            }
            Op::Tmpfile { dir } => fs
                .create(ino(dir), None, &Create { open: true, ..Create::mode(libc::S_IFREG | 0o640) })
                .map(Some),
            Op::Link { node, dir, name } => unit(fs.link(ino(dir), name, ino(node))),
            Op::Unlink { dir, name } => unit(fs.unlink(ino(dir), name, 0)),
            Op::Rmdir { dir, name } => unit(fs.rmdir(ino(dir), name, 0)),
            Op::Rename { from, to, flags } => {
                unit(fs.rename((ino(&from.0), &from.1), (ino(&to.0), &to.1), *flags))
            }
            Op::Write { node, at, len, seed } => {
                return whole(fs.pwrite(ino(node), &rng::bytes(*seed, *len), *at, false), *len);
            }
            Op::Append { node, len, seed } => {
                return whole(fs.append(ino(node), &rng::bytes(*seed, *len), false).map(|r| r.0), *len);
            }
            Op::Truncate { node, size } => unit(fs.truncate(ino(node), *size, false)),
            Op::Falloc { node, mode, at, len } => unit(fs.fallocate(ino(node), *mode, *at, *len)),
            Op::SetXattr { node, name, len, seed } => {
                unit(fs.xattr_set(ino(node), name, Some(&rng::bytes(*seed, *len)), 0, None))
            }
            Op::DropXattr { node, name } => unit(fs.xattr_set(ino(node), name, None, 0, None)),
            Op::Chmod { node, perm } => {
                let attr = tombolo_files::fs::Attr { mode: *perm, ..Default::default() };
                unit(fs.setattr(ino(node), sys::TFS_SET_MODE, &attr))
            }
            Op::Open { node } => unit(if self.node(*node).open { Ok(()) } else { fs.open_ref(ino(node), 0) }),
            Op::Close { node } => unit(fs.close_ref(ino(node))),
            Op::Read { node, at, len } => {
                let data = self.data(*node).expect("a file");
                let (from, to) = ((*at as usize).min(data.len()), (*at as usize + len).min(data.len()));
                let mut got = vec![0xaa; *len];
                let n = fs.pread(ino(node), &mut got, *at).map_err(|e| format!("{op:?}: {e}"))?;
                if got[..n] != data[from..to] {
                    let at = got.iter().zip(&data[from..to]).position(|(a, b)| a != b);
                    return difference(format!(
                        "{op:?}: {n} bytes, should be {}, differ at {at:?}",
                        to - from
                    ));
                }
                Ok(None)
            }
            Op::List { dir } => return self.compare_names(fs, *dir, ino(dir)).map(|_| Ok(None)),
            Op::Stat { node } => return self.compare_node(fs, *node).map(|()| Ok(None)),
            Op::Seek { node, at } => {
                let data = self.data(*node).expect("a file");
                self.check_seek(fs, ino(node), data, *at).map_err(|e| format!("{op:?}: {e}"))?;
                Ok(None)
            }
        })
    }

    /// Holes read as zeros; so what seek calls a hole must be zeros, and what is not zeros must be data.
    fn check_seek(&self, fs: &Filesystem, ino: u64, data: &[u8], at: u64) -> std::result::Result<(), String> {
        let expected = |r: Result<u64>| match r {
            Ok(v) if v >= at && v <= data.len() as u64 => Ok(Some(v)),
            Err(Errno::NXIO) => Ok(None),
            other => Err(format!("{other:?}")),
        };
        let (next_data, next_hole) = (expected(fs.seek(ino, at, false))?, expected(fs.seek(ino, at, true))?);
        if at >= data.len() as u64 {
            return if next_data.is_none() && next_hole.is_none() {
                Ok(())
            } else {
                difference("beyond the end")
            };
        }
        let zeros = &data[at as usize..next_data.unwrap_or(data.len() as u64) as usize];
        match (zeros.iter().all(|b| *b == 0), next_hole) {
            (true, Some(_)) => Ok(()),
            other => difference(format!("data at {next_data:?}, hole at {next_hole:?}: {other:?}")),
        }
    }

    /// Applies an operation to both; a difference is an error. A new node's number comes back.
    pub fn step(&mut self, fs: &Filesystem, op: &Op) -> std::result::Result<Option<Id>, String> {
        let real = self.execute(fs, op)?;
        self.settle(op, real)
    }

    /// Compares what the real one gave with what the model gives.
    pub fn settle(&mut self, op: &Op, real: Result<Option<u64>>) -> std::result::Result<Option<Id>, String> {
        let model = self.apply(op);
        match (real, model) {
            (Ok(Some(ino)), Ok(Some(id))) => {
                self.node_mut(id).ino = ino;
                Ok(Some(id))
            }
            (Ok(None), Ok(None)) => Ok(None),
            (Err(a), Err(b)) if a == b => Ok(None),
            (real, model) => difference(format!("{op:?}: gave {real:?}, should give {model:?}")),
        }
    }

    fn compare_names(
        &self,
        fs: &Filesystem,
        dir: Id,
        at: u64,
    ) -> std::result::Result<Vec<(Id, u64)>, String> {
        let list = fs.list(at).map_err(|e| format!("listing inode {}: {e}", at))?;
        let mine = |name: &[u8]| Some(dir) != self.shared || name.starts_with(&self.prefix);
        let mut real: BTreeMap<&[u8], (u64, u8)> = BTreeMap::new();
        for entry in list.iter().filter(|e| mine(&e.name)) {
            if real.insert(&entry.name, (entry.ino, entry.kind)).is_some() {
                return difference(format!("inode {}: {:?} is listed twice", at, entry.name));
            }
        }
        let entries = self.entries(dir);
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        if let Some(extra) = real.keys().find(|name| !entries.contains_key(**name)) {
            return difference(format!("inode {}: has {:?}, which was not made", at, text(extra)));
        }
        let mut pairs = Vec::new();
        for (name, id) in entries {
            let Some((ino, kind)) = real.get(name.as_slice()) else {
                return difference(format!("inode {}: {:?} is lost", at, text(name)));
            };
            let want = self.node(*id);
            let want_kind = match want.kind {
                Kind::File(_) => libc::DT_REG,
                Kind::Dir { .. } => libc::DT_DIR,
                Kind::Symlink(_) => libc::DT_LNK,
                Kind::Fifo => libc::DT_FIFO,
            };
            if (want.ino != 0 && *ino != want.ino) || *kind != want_kind {
                return difference(format!(
                    "{:?} is inode {ino} of type {kind}, should be {}",
                    text(name),
                    want.ino
                ));
            }
            match fs.lookup(at, name) {
                Ok((found, _)) if found == *ino => {}
                other => {
                    return difference(format!("{:?}: is listed, but a lookup gives {other:?}", text(name)));
                }
            }
            pairs.push((*id, *ino));
        }
        Ok(pairs)
    }

    fn compare_attr(&self, fs: &Filesystem, ino: u64, id: Id) -> std::result::Result<u64, String> {
        let want = self.node(id);
        let attr = fs.getattr(ino, 0).map_err(|e| format!("inode {ino}: {e}"))?;
        let base = self.bases.contains(&id);
        if attr.mode & 0o7777 != want.perm && !base {
            return difference(format!("inode {ino}: mode {:o}, should be {:o}", attr.mode, want.perm));
        }
        if attr.nlink != want.nlink && !(base && Some(id) == self.shared) {
            return difference(format!("inode {ino}: {} links, should be {}", attr.nlink, want.nlink));
        }
        let mut names: Vec<Vec<u8>> = fs
            .xattr_list(ino)
            .map_err(|e| format!("inode {ino}: attributes: {e}"))?
            .split(|b| *b == 0)
            .filter(|n| !n.is_empty())
            .map(<[u8]>::to_vec)
            .collect();
        names.sort();
        if names != want.xattrs.keys().cloned().collect::<Vec<_>>() {
            return difference(format!("inode {ino}: attributes {names:?}"));
        }
        for (name, value) in &want.xattrs {
            if fs.xattr_get(ino, name).as_ref() != Ok(value) {
                return difference(format!("inode {ino}: attribute {name:?} has another value"));
            }
        }
        Ok(attr.size)
    }

    fn compare_node(&self, fs: &Filesystem, id: Id) -> std::result::Result<(), String> {
        let node = self.node(id);
        let size = self.compare_attr(fs, node.ino, id)?;
        match &node.kind {
            Kind::File(data) if size != data.len() as u64 => {
                difference(format!("inode {}: {size} bytes, should be {}", node.ino, data.len()))
            }
            _ => Ok(()),
        }
    }

    /// Compares all there is, file contents too but for `except`. Gives the real inode numbers of all nodes.
    pub fn compare(
        &self,
        fs: &Filesystem,
        except: Option<Id>,
    ) -> std::result::Result<Vec<(Id, u64)>, String> {
        let mut found = Vec::new();
        let mut queue: Vec<(Id, u64)> = self.bases.iter().map(|id| (*id, self.node(*id).ino)).collect();
        while let Some((id, ino)) = queue.pop() {
            found.push((id, ino));
            let size = self.compare_attr(fs, ino, id)?;
            match &self.node(id).kind {
                Kind::File(data) if Some(id) != except => {
                    let real = read_all(fs, ino, size)?;
                    if real != *data {
                        let at = real.iter().zip(data).position(|(a, b)| a != b);
                        return difference(format!(
                            "inode {ino}: {} bytes, should be {}, contents differ at {at:?}",
                            real.len(),
                            data.len()
                        ));
                    }
                }
                Kind::Symlink(target) => {
                    let real = fs.readlink(ino).map_err(|e| format!("inode {ino}: readlink: {e}"))?;
                    if real != *target {
                        return difference(format!("inode {ino}: points to {real:?}"));
                    }
                }
                Kind::Dir { parent, .. } => {
                    let up = self.node(*parent).ino;
                    if !self.bases.contains(&id) && up != 0 && fs.parent(ino) != Ok(up) {
                        return difference(format!(
                            "inode {ino}: \"..\" is {:?}, should be {up}",
                            fs.parent(ino)
                        ));
                    }
                    queue.extend(self.compare_names(fs, id, ino)?);
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Opens end with the process that had them; what only they kept is gone.
    pub fn close_all(&mut self) {
        for id in self.ids(|n| n.open || n.nlink == 0) {
            self.node_mut(id).open = false;
            if self.node(id).nlink == 0 {
                self.drop_node(id);
            }
        }
    }

    /// After a death in the middle of `op`: it happened, or not, or (data) in part. Makes the model what is there.
    pub fn adopt(&mut self, fs: &Filesystem, op: Option<&Op>) -> std::result::Result<(), String> {
        let mut before = self.clone();
        before.close_all();
        let not_done = match before.compare(fs, None) {
            Ok(numbers) => {
                for (id, ino) in numbers {
                    before.node_mut(id).ino = ino;
                }
                *self = before;
                return Ok(());
            }
            Err(why) => why,
        };
        let Some(op) = op else { return Err(not_done) };
        let mut after = self.clone();
        let done = after.apply(op);
        // A file that was unlinked while open and had the operation under way is gone either way.
        after.close_all();
        let why = match after.compare(fs, None) {
            Ok(numbers) => {
                for (id, ino) in numbers {
                    after.node_mut(id).ino = ino;
                }
                *self = after;
                return Ok(());
            }
            Err(why) => why,
        };
        let why =
            format!("in the middle of {op:?}: as if not done: {not_done}; as if done ({done:?}): {why}");
        let (Op::Write { node, .. }
        | Op::Append { node, .. }
        | Op::Truncate { node, .. }
        | Op::Falloc { node, .. }) = op
        else {
            return Err(why);
        };
        let node = *node;
        let numbers =
            before.compare(fs, Some(node)).map_err(|e| format!("{why}; apart from its file: {e}"))?;
        for (id, ino) in numbers {
            before.node_mut(id).ino = ino;
        }
        let (old, new) =
            (before.data(node).cloned().unwrap_or_default(), after.data(node).cloned().unwrap_or_default());
        let ino = before.node(node).ino;
        let real = read_all(fs, ino, fs.size(ino))?;
        let sizes = old.len().min(new.len())..=old.len().max(new.len());
        let byte = |of: &[u8], i: usize| of.get(i).copied().unwrap_or(0);
        let bad =
            real.iter().enumerate().position(|(i, b)| *b != byte(&old, i) && *b != byte(&new, i) && *b != 0);
        if !sizes.contains(&real.len()) || bad.is_some() {
            return Err(format!("{why}; in part: {} bytes, of {sizes:?}, wrong at {bad:?}", real.len()));
        }
        *before.data_mut(node) = real;
        *self = before;
        Ok(())
    }
}

fn read_all(fs: &Filesystem, ino: u64, size: u64) -> std::result::Result<Vec<u8>, String> {
    if size > 64 * MIB {
        return difference(format!("inode {ino}: {size} bytes"));
    }
    let mut data = vec![0; size as usize];
    let n = fs.pread(ino, &mut data, 0).map_err(|e| format!("inode {ino}: {e}"))?;
    data.truncate(n);
    Ok(data)
}
