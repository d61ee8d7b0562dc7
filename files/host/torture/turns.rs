// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Members that take turns: a random member runs each operation, then another one checks it. A seed determines all of it.

use std::collections::VecDeque;

use crate::compare::{name, stat};
use crate::model::{Id, Model, Op, Reach};
use crate::rng::Rng;
use crate::tree::Tree;

/// Operations that a message about a difference names.
const RECENT: usize = 15;

/// A member that takes turns.
pub struct Taker<'a> {
    pub name: String,
    pub tree: &'a dyn Tree,
    /// It can map files shared.
    pub maps: bool,
}

/// The run's state.
pub struct Turns<'a> {
    pub rng: Rng,
    pub model: Model,
    pub takers: Vec<Taker<'a>>,
    /// A file that one member has open stays that member's.
    openers: Vec<(Id, usize)>,
    recent: VecDeque<String>,
}

impl<'a> Turns<'a> {
    pub fn new(seed: u64, model: Model, takers: Vec<Taker<'a>>) -> Turns<'a> {
        Turns { rng: Rng(seed), model, takers, openers: Vec::new(), recent: VecDeque::new() }
    }

    /// Runs so many operations, and compares everything now and then.
    pub fn run(&mut self, operations: u64) -> Result<(), String> {
        for n in 0..operations {
            if n % 5000 == 4999 {
                self.model.largest = if self.model.largest > 1 << 20 { 300 << 10 } else { 5 << 20 };
            }
            self.turn(n).map_err(|e| {
                let recent: Vec<&str> = self.recent.iter().map(String::as_str).collect();
                format!("operation {n}: {e}\nthe last ones:\n  {}", recent.join("\n  "))
            })?;
            if n % 1000 == 999 || n + 1 == operations {
                let other = self.rng.below(self.takers.len() as u64) as usize;
                let taker = &self.takers[other];
                self.model
                    .compare(taker.tree, None)
                    .map_err(|e| format!("after operation {n}, as {}: {e}", taker.name))?;
            }
        }
        // Members close their open files.
        for (node, who) in std::mem::take(&mut self.openers) {
            self.model.step(self.takers[who].tree, &Op::Close { node })?;
        }
        for taker in &self.takers {
            self.model
                .compare(taker.tree, None)
                .map_err(|e| format!("at the end, as {}: {e}", taker.name))?;
        }
        Ok(())
    }

    /// Returns a member that can run it; none, if it needs a mapping of a file that is open elsewhere.
    fn who(&mut self, op: &Op) -> Result<Option<usize>, String> {
        let members = self.takers.len() as u64;
        let mut who = self.rng.below(members) as usize;
        let mapped = matches!(op, Op::MapWrite { .. } | Op::MapRead { .. });
        while mapped && !self.takers[who].maps {
            who = self.rng.below(members) as usize;
        }
        let nameless = |node: Id| self.model.node(node).nlink == 0;
        let opener = match op {
            Op::Close { node } => Some(*node),
            // Only a member that has a nameless file open can link it.
            Op::Link { node, .. } if nameless(*node) => Some(*node),
            _ => op.node().filter(|node| self.model.reach != Reach::Core && nameless(*node)),
        };
        if let Some(node) = opener {
            let found = self.openers.iter().find(|o| o.0 == node);
            who = found.ok_or("a file without a name that no member has open")?.1;
        }
        Ok((!mapped || self.takers[who].maps).then_some(who))
    }

    fn turn(&mut self, n: u64) -> Result<(), String> {
        let op = self.model.random_op(&mut self.rng);
        let Some(who) = self.who(&op)? else { return Ok(()) };
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        let place = op.node().map_or(String::new(), |node| format!(" {}", name(&self.model.spot(node))));
        self.recent.push_back(format!("{n} {}: {op:?}{place}", self.takers[who].name));
        let opens = matches!(&op, Op::Open { node } if !self.model.node(*node).open);
        let new = self.model.step(self.takers[who].tree, &op)?;
        match (&op, new) {
            (Op::Create { open: true, .. } | Op::Tmpfile { .. }, Some(id)) => self.openers.push((id, who)),
            (Op::Open { node }, _) if opens => self.openers.push((*node, who)),
            (Op::Close { node }, _) => self.openers.retain(|o| o.0 != *node),
            _ => {}
        }
        if self.rng.one_in(2) {
            self.look(&op, new)?;
        }
        Ok(())
    }

    /// Has another member check the changes, and compares all members' views.
    fn look(&mut self, op: &Op, new: Option<Id>) -> Result<(), String> {
        let there = |node: Id| self.model.nodes[node].as_ref().is_some_and(|n| n.nlink > 0);
        let other = self.rng.below(self.takers.len() as u64) as usize;
        let look = match op {
            Op::Create { dir, .. }
            | Op::Link { dir, .. }
            | Op::Unlink { dir, .. }
            | Op::Rmdir { dir, .. } => Some(Op::List { dir: *dir }),
            Op::Rename { to, .. } => Some(Op::List { dir: to.0 }),
            Op::Write { node, at, len, .. } | Op::MapWrite { node, at, len, .. } => {
                Some(Op::Read { node: *node, at: at.saturating_sub(100), len: len + 5000 })
            }
            Op::Append { node, .. } | Op::Truncate { node, .. } | Op::Falloc { node, .. } => {
                Some(Op::Read { node: *node, at: 0, len: self.model.data(*node).map_or(0, Vec::len) + 1 })
            }
            _ => None,
        };
        let taker = &self.takers[other];
        let fails = |e: String| format!("{op:?}, then looked at by {}: {e}", taker.name);
        if let Some(look) = look.filter(|l| l.node().is_none_or(there)) {
            self.model.execute(taker.tree, &look).map_err(fails)?.map_err(|e| fails(e.to_string()))?;
        }
        let Some(node) = new.or(op.node()).filter(|node| there(*node)) else { return Ok(()) };
        self.model
            .execute(taker.tree, &Op::Stat { node })
            .map_err(fails)?
            .map_err(|e| fails(e.to_string()))?;
        let spot = self.model.spot(node);
        let first = stat(self.takers[0].tree, &spot)?;
        for taker in &self.takers[1..] {
            let found = stat(taker.tree, &spot)?;
            if found != first {
                return Err(format!(
                    "{op:?}: {}: to {} it is {first:?}, to {} {found:?}",
                    name(&spot),
                    self.takers[0].name,
                    taker.name
                ));
            }
        }
        Ok(())
    }
}
