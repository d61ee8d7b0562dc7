// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares a model with a file system: operations are run on both, and everything there is compared.

use std::collections::BTreeMap;

use rustix::io::Errno;

use crate::model::{Id, Kind, Model, Op};
use crate::tree::{Answer, Call, Digest, Result, Spot, Stat, Tree};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// A difference, as text, or the value.
pub type Found<T> = std::result::Result<T, String>;

fn difference<T>(what: impl std::fmt::Display) -> Found<T> {
    Err(what.to_string())
}

/// The answer's value, if it has the call's type.
macro_rules! given {
    ($tree:expr, $call:expr, $shape:path) => {{
        match $tree.call(&$call) {
            Ok($shape(value)) => Ok(Ok(value)),
            Err(e) => Ok(Err(e)),
            Ok(other) => difference(format!("{:?}: answered {other:?}", $call)),
        }
    }};
}

/// Returns the result of `stat`.
pub fn stat(tree: &dyn Tree, node: &Spot) -> Found<Stat> {
    given!(tree, Call::Stat { node: node.clone() }, Answer::Stat)?
        .map_err(|e| format!("{}: stat: {e}", name(node)))
}

/// For messages.
pub fn name(spot: &Spot) -> String {
    match &spot.path {
        Some(path) => format!("inode {} ({:?})", spot.ino, String::from_utf8_lossy(path)),
        None => format!("inode {}", spot.ino),
    }
}

fn read(tree: &dyn Tree, node: &Spot, at: u64, len: usize, mapped: bool) -> Found<Vec<u8>> {
    let call = Call::Read { node: node.clone(), at, len, mapped };
    given!(tree, call, Answer::Bytes)?.map_err(|e| format!("{}: read: {e}", name(node)))
}

/// Reads `len` bytes at `at`, which must be `want`; that ends where the file does.
pub fn check_data(tree: &dyn Tree, node: &Spot, at: u64, len: usize, want: &[u8], mapped: bool) -> Found<()> {
    if tree.far() {
        let call = Call::Digest { node: node.clone(), at, len, mapped };
        let got = given!(tree, call, Answer::Digest)?.map_err(|e| format!("{}: read: {e}", name(node)))?;
        if got == Digest::of(want) {
            return Ok(());
        }
    }
    let real = read(tree, node, at, len, mapped)?;
    if real == want {
        return if tree.far() {
            difference(format!("{}: right at the second look", name(node)))
        } else {
            Ok(())
        };
    }
    let differ = real.iter().zip(want).position(|(a, b)| a != b);
    let how = differ.map_or(String::new(), |i| format!(": {} instead of {}", real[i], want[i]));
    difference(format!(
        "{}: {} bytes from {at}, should be {}, differ at {differ:?}{how}",
        name(node),
        real.len(),
        want.len()
    ))
}

impl Model {
    /// Returns the call of an operation, unless it compares.
    fn call(&self, op: &Op) -> Option<Call> {
        let spot = |id: &Id| self.spot(*id);
        Some(match op.clone() {
            Op::Create { dir, name, what, open } => {
                Call::Create { dir: spot(&dir), name: Some(name), what, open }
            }
            Op::Tmpfile { dir } => {
                Call::Create { dir: spot(&dir), name: None, what: libc::S_IFREG, open: true }
            }
            Op::Link { node, dir, name } => Call::Link { node: spot(&node), dir: spot(&dir), name },
            Op::Unlink { dir, name } => Call::Unlink { dir: spot(&dir), name },
            Op::Rmdir { dir, name } => Call::Rmdir { dir: spot(&dir), name },
            Op::Rename { from, to, flags } => {
                Call::Rename { from: (spot(&from.0), from.1), to: (spot(&to.0), to.1), flags }
            }
            Op::Write { node, at, len, seed } => {
                Call::Write { node: spot(&node), at, len, seed, mapped: false }
            }
            Op::MapWrite { node, at, len, seed } => {
                Call::Write { node: spot(&node), at, len, seed, mapped: true }
            }
            Op::Append { node, len, seed } => Call::Append { node: spot(&node), len, seed },
            Op::Truncate { node, size } => Call::Truncate { node: spot(&node), size },
            Op::Falloc { node, mode, at, len } => Call::Falloc { node: spot(&node), mode, at, len },
            Op::SetXattr { node, name, len, seed } => Call::SetXattr { node: spot(&node), name, len, seed },
            Op::DropXattr { node, name } => Call::DropXattr { node: spot(&node), name },
            Op::Chmod { node, perm } => Call::Chmod { node: spot(&node), perm },
            Op::Open { node } => Call::Open { node: spot(&node) },
            Op::Close { node } => Call::Close { node: spot(&node) },
            Op::Read { .. } | Op::MapRead { .. } | Op::List { .. } | Op::Stat { .. } | Op::Seek { .. } => {
                return None;
            }
        })
    }

    /// Runs an operation on the real file system. Returns a new inode's number.
    pub fn execute(&self, tree: &dyn Tree, op: &Op) -> Found<Result<Option<u64>>> {
        let checked = |found: Found<()>| found.map(|()| Ok(None)).map_err(|e| format!("{op:?}: {e}"));
        match op {
            Op::Read { node, at, len } => {
                return checked(self.check_range(tree, *node, *at, *len, false));
            }
            Op::MapRead { node, at, len } => {
                let data = self.data(*node).expect("a file");
                if *at >= (data.len() as u64).next_multiple_of(PAGE) {
                    let call = Call::Probe { node: self.spot(*node), at: *at };
                    return match tree.call(&call) {
                        Err(Errno::FAULT) => Ok(Ok(None)),
                        other => difference(format!("{op:?}: gave {other:?}, should be a fault")),
                    };
                }
                return checked(self.check_range(tree, *node, *at, *len, true));
            }
            Op::List { dir } => return self.compare_names(tree, *dir, &self.spot(*dir)).map(|_| Ok(None)),
            Op::Stat { node } => return self.compare_node(tree, *node).map(|()| Ok(None)),
            Op::Seek { node, at } => {
                let data = self.data(*node).expect("a file");
                return checked(check_seek(tree, &self.spot(*node), data, *at));
            }
            // A second open would be the same one.
            Op::Open { node } if self.node(*node).open => return Ok(Ok(None)),
            _ => {}
        }
        let call = self.call(op).expect("all others are above");
        let whole = match op {
            Op::Write { len, .. } | Op::MapWrite { len, .. } | Op::Append { len, .. } => Some(*len as u64),
            _ => None,
        };
        Ok(match (tree.call(&call), whole) {
            (Ok(Answer::Number(n)), Some(len)) if n == len => Ok(None),
            (Ok(Answer::Number(n)), Some(len)) => {
                return difference(format!("{op:?}: {n} of {len} bytes"));
            }
            (Ok(Answer::Number(ino)), None) => Ok(Some(ino)),
            (Ok(Answer::Done), None) => Ok(None),
            (Ok(other), _) => return difference(format!("{op:?}: answered {other:?}")),
            (Err(e), _) => Err(e),
        })
    }

    fn check_range(&self, tree: &dyn Tree, node: Id, at: u64, len: usize, mapped: bool) -> Found<()> {
        let data = self.data(node).expect("a file");
        let (from, to) = ((at as usize).min(data.len()), (at as usize + len).min(data.len()));
        // A mapping does not end with the file.
        let len = if mapped { to - from } else { len };
        check_data(tree, &self.spot(node), at, len, &data[from..to], mapped)
    }

    /// Applies an operation to both; a difference is an error. Returns a new node's number.
    pub fn step(&mut self, tree: &dyn Tree, op: &Op) -> Found<Option<Id>> {
        let real = self.execute(tree, op)?;
        self.settle(op, real)
    }

    /// Compares the real result with the model's.
    pub fn settle(&mut self, op: &Op, real: Result<Option<u64>>) -> Found<Option<Id>> {
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

    fn compare_names(&self, tree: &dyn Tree, dir: Id, at: &Spot) -> Found<Vec<(Id, u64)>> {
        let place = name(at);
        let list = given!(tree, Call::List { dir: at.clone() }, Answer::Names)?
            .map_err(|e| format!("{place}: list: {e}"))?;
        let mine = |name: &[u8]| Some(dir) != self.shared || name.starts_with(&self.prefix);
        let mut real: BTreeMap<&[u8], (u64, u8)> = BTreeMap::new();
        for (name, ino, kind) in list.iter().filter(|e| mine(&e.0)) {
            if real.insert(name, (*ino, *kind)).is_some() {
                return difference(format!("{place}: {:?} is listed twice", String::from_utf8_lossy(name)));
            }
        }
        let entries = self.entries(dir);
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        if let Some(extra) = real.keys().find(|name| !entries.contains_key(**name)) {
            return difference(format!("{place}: has {:?}, which was not made", text(extra)));
        }
        let mut pairs = Vec::new();
        for (name, id) in entries {
            let Some((ino, kind)) = real.get(name.as_slice()) else {
                return difference(format!("{place}: {:?} is lost", text(name)));
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
            let call = Call::Lookup { dir: at.clone(), name: name.clone() };
            match given!(tree, call, Answer::Number)? {
                Ok(found) if found == *ino => {}
                other => {
                    return difference(format!("{:?}: is listed, but a lookup gives {other:?}", text(name)));
                }
            }
            pairs.push((*id, *ino));
        }
        Ok(pairs)
    }

    fn compare_attr(&self, tree: &dyn Tree, at: &Spot, id: Id) -> Found<u64> {
        let (want, place) = (self.node(id), name(at));
        let attr = stat(tree, at)?;
        let base = self.bases.contains(&id);
        if at.ino != 0 && attr.ino != at.ino {
            return difference(format!("{place}: is inode {}", attr.ino));
        }
        if attr.mode & 0o7777 != want.perm && !base {
            return difference(format!("{place}: mode {:o}, should be {:o}", attr.mode, want.perm));
        }
        if attr.owner != (0, 0) {
            return difference(format!("{place}: belongs to {:?}", attr.owner));
        }
        if attr.nlink != want.nlink && !(base && Some(id) == self.shared) {
            return difference(format!("{place}: {} links, should be {}", attr.nlink, want.nlink));
        }
        let mut real = given!(tree, Call::Xattrs { node: at.clone() }, Answer::Xattrs)?
            .map_err(|e| format!("{place}: attributes: {e}"))?;
        real.sort_by(|a, b| a.0.cmp(&b.0));
        if !real.iter().map(|a| &a.0).eq(want.xattrs.keys()) {
            let names: Vec<_> = real.iter().map(|a| String::from_utf8_lossy(&a.0)).collect();
            return difference(format!("{place}: attributes {names:?}"));
        }
        for (name, got) in &real {
            if *got != Digest::of(&want.xattrs[name]) {
                let name = String::from_utf8_lossy(name);
                return difference(format!("{place}: attribute {name:?} has another value"));
            }
        }
        Ok(attr.size)
    }

    fn compare_node(&self, tree: &dyn Tree, id: Id) -> Found<()> {
        let at = self.spot(id);
        let size = self.compare_attr(tree, &at, id)?;
        match &self.node(id).kind {
            Kind::File(data) if size != data.len() as u64 => {
                difference(format!("{}: {size} bytes, should be {}", name(&at), data.len()))
            }
            _ => Ok(()),
        }
    }

    /// Compares everything, file contents too but for `except`. Returns the real inode numbers of all nodes.
    pub fn compare(&self, tree: &dyn Tree, except: Option<Id>) -> Found<Vec<(Id, u64)>> {
        let mut found = Vec::new();
        let mut queue: Vec<(Id, u64)> = self.bases.iter().map(|id| (*id, self.node(*id).ino)).collect();
        while let Some((id, ino)) = queue.pop() {
            found.push((id, ino));
            let at = Spot { ino, path: self.path(id) };
            let size = self.compare_attr(tree, &at, id)?;
            match &self.node(id).kind {
                Kind::File(data) if Some(id) != except => {
                    if size != data.len() as u64 {
                        return difference(format!("{}: {size} bytes, should be {}", name(&at), data.len()));
                    }
                    check_data(tree, &at, 0, data.len(), data, false)?;
                }
                Kind::Symlink(target) => {
                    let real = given!(tree, Call::Readlink { node: at.clone() }, Answer::Bytes)?;
                    if real.as_ref() != Ok(target) {
                        return difference(format!("{}: points to {real:?}", name(&at)));
                    }
                }
                Kind::Dir { parent, .. } => {
                    let up = self.node(*parent).ino;
                    if !self.bases.contains(&id) && up != 0 {
                        let real = given!(tree, Call::Parent { dir: at.clone() }, Answer::Number)?;
                        if real != Ok(up) {
                            return difference(format!("{}: \"..\" is {real:?}, should be {up}", name(&at)));
                        }
                    }
                    queue.extend(self.compare_names(tree, id, &at)?);
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Closes all files, as the end of a process does, and drops unlinked ones.
    pub fn close_all(&mut self) {
        for id in self.ids(|n| n.open || n.nlink == 0) {
            self.node_mut(id).open = false;
            if self.node(id).nlink == 0 {
                self.drop_node(id);
            }
        }
    }

    /// Stores the inode numbers that a comparison found.
    fn learn(&mut self, numbers: Vec<(Id, u64)>) {
        for (id, ino) in numbers {
            self.node_mut(id).ino = ino;
        }
    }

    /// After a death during `op`: it happened, or not, or (data) in part. Changes the model to the state found.
    pub fn adopt(&mut self, tree: &dyn Tree, op: Option<&Op>) -> Found<()> {
        let mut before = self.clone();
        before.close_all();
        let not_done = match before.compare(tree, None) {
            Ok(numbers) => {
                before.learn(numbers);
                *self = before;
                return Ok(());
            }
            Err(why) => why,
        };
        let Some(op) = op else { return Err(not_done) };
        let mut after = self.clone();
        let done = after.apply(op);
        // An unlinked open file that the operation was changing is freed in any case.
        after.close_all();
        let why = match after.compare(tree, None) {
            Ok(numbers) => {
                after.learn(numbers);
                *self = after;
                return Ok(());
            }
            Err(why) => why,
        };
        let why =
            format!("in the middle of {op:?}: as if not done: {not_done}; as if done ({done:?}): {why}");
        let (Op::Write { node, .. }
        | Op::MapWrite { node, .. }
        | Op::Append { node, .. }
        | Op::Truncate { node, .. }
        | Op::Falloc { node, .. }) = op
        else {
            return Err(why);
        };
        let node = *node;
        let numbers =
            before.compare(tree, Some(node)).map_err(|e| format!("{why}; apart from its file: {e}"))?;
        before.learn(numbers);
        let (old, new) =
            (before.data(node).cloned().unwrap_or_default(), after.data(node).cloned().unwrap_or_default());
        let real = read_all(tree, &before.spot(node))?;
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

/// Holes read as zeros: so a hole that seek reports must be zeros, and other bytes must be data.
pub fn check_seek(tree: &dyn Tree, node: &Spot, data: &[u8], at: u64) -> Found<()> {
    let seek = |hole| -> Found<Option<u64>> {
        match given!(tree, Call::Seek { node: node.clone(), at, hole }, Answer::Number)? {
            Ok(v) if v >= at && v <= data.len() as u64 => Ok(Some(v)),
            Err(Errno::NXIO) => Ok(None),
            other => difference(format!("{other:?}")),
        }
    };
    let (next_data, next_hole) = (seek(false)?, seek(true)?);
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

fn read_all(tree: &dyn Tree, node: &Spot) -> Found<Vec<u8>> {
    let size = stat(tree, node)?.size;
    if size > 64 * MIB {
        return difference(format!("{}: {size} bytes", name(node)));
    }
    read(tree, node, 0, size as usize, false)
}
