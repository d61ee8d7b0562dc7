// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decodes branches, calls and barriers, and finds out which functions a kernel may call.

use super::decode::{Decoder, Result, Symbol};
use super::link::Loaded;
use super::program::{Barrier, Builtin, Call, Combine, Op, SINK, Target};
use crate::ptx::ast::{Function, Init, Instruction, Operand, Statement};
use crate::ptx::types::Ty;
use std::collections::{HashMap, HashSet};

/// Who calls whom; an indirect call may reach every function whose address is taken.
pub(super) struct CallGraph<'a> {
    loaded: &'a Loaded,
    edges: HashMap<String, Vec<String>>,
    root: String,
}

impl<'a> CallGraph<'a> {
    pub fn of(loaded: &'a Loaded, root: &str) -> CallGraph<'a> {
        let mut taken: Vec<String> = Vec::new();
        let inits = loaded.ast.variables.iter().flat_map(|variable| &variable.init);
        taken.extend(
            inits.filter_map(
                |init| if let Init::Symbol { name, .. } = init { Some(name.clone()) } else { None },
            ),
        );
        let (mut direct, mut indirect) = (HashMap::new(), HashSet::new());
        for function in &loaded.ast.functions {
            let mut calls = Vec::new();
            for statement in function.body.iter().flatten() {
                let Statement::Instruction(instruction) = statement else { continue };
                let target = (instruction.name == "call").then(|| call_target(instruction)).flatten();
                match target {
                    Some(name) if loaded.functions.contains_key(name) => calls.push(name.to_owned()),
                    Some(_) => drop(indirect.insert(function.name.clone())),
                    None => taken.extend(instruction.operands.iter().filter_map(|operand| {
                        if let Operand::Name(name) = operand { Some(name.clone()) } else { None }
                    })),
                }
            }
            direct.insert(function.name.clone(), calls);
        }
        taken.retain(|name| loaded.functions.contains_key(name));
        for name in indirect {
            direct.entry(name).or_default().extend(taken.iter().cloned());
        }
        CallGraph { loaded, edges: direct, root: root.to_owned() }
    }

    fn function(&self, name: &str) -> Option<&'a Function> {
        self.loaded.functions.get(name).map(|&number| &self.loaded.ast.functions[number])
    }

    pub fn callees(&self, name: &str) -> impl Iterator<Item = &String> {
        self.edges.get(name).into_iter().flatten()
    }

    /// Callees first, the kernel last.
    pub fn order(&self) -> Vec<&'a Function> {
        let (mut seen, mut out) = (HashSet::new(), Vec::new());
        self.visit(&self.root, &mut seen, &mut out);
        out
    }

    fn visit<'b>(&'b self, name: &'b str, seen: &mut HashSet<&'b str>, out: &mut Vec<&'a Function>) {
        if !seen.insert(name) {
            return;
        }
        for callee in self.callees(name) {
            self.visit(callee, seen, out);
        }
        out.extend(self.function(name));
    }

    /// Calls (from, to) that may come back to their caller while it runs.
    pub fn cyclic(&self) -> HashSet<(String, String)> {
        let mut out = HashSet::new();
        for function in self.order() {
            for callee in self.callees(&function.name) {
                let (mut seen, mut reached) = (HashSet::new(), Vec::new());
                self.visit(callee, &mut seen, &mut reached);
                if seen.contains(function.name.as_str()) {
                    out.insert((function.name.clone(), callee.clone()));
                }
            }
        }
        out
    }
}

fn call_target(call: &Instruction) -> Option<&str> {
    call.operands
        .iter()
        .find_map(|operand| if let Operand::Name(name) = operand { Some(name.as_str()) } else { None })
}

impl Decoder<'_> {
    /// Branches, calls and barriers. False for other instructions.
    pub(super) fn control(&mut self, instruction: &Instruction) -> Result<bool> {
        let operands = &instruction.operands;
        let has = |what: &str| instruction.modifiers.iter().any(|modifier| modifier == what);
        match instruction.name.as_str() {
            "bra" => {
                let Some(Operand::Name(label)) = operands.first() else {
                    return self.fail("bra needs a label");
                };
                self.branches.push((self.program.code.len() as u32, vec![label.clone()], self.chain.clone()));
                self.emit(Op::Branch(0), 0, [0; 3], 0);
            }
            "brx" => {
                let [index, Operand::Name(list)] = operands.as_slice() else {
                    return self.fail("brx.idx needs an index and a list");
                };
                let a = self.source(index, Ty::U32)?;
                let Some(labels) = self.targets.get(list).cloned() else {
                    return self.fail(format!("unknown list {list}"));
                };
                self.branches.push((self.program.code.len() as u32, labels, self.chain.clone()));
                self.emit(Op::BranchIndex(Box::default()), 0, [a, 0, 0], 0);
            }
            "call" => self.call(operands)?,
            "ret" => self.emit(if self.entry { Op::Exit } else { Op::Return }, 0, [0; 3], 0),
            "exit" => self.emit(Op::Exit, 0, [0; 3], 0),
            "trap" => self.emit(Op::Trap, 0, [0; 3], 0),
            "bar" | "barrier" if has("warp") => {
                let a = self.source(operands.first().unwrap_or(&Operand::Integer(u64::MAX)), Ty::U32)?;
                self.emit(Op::WarpBarrier, 0, [a, 0, 0], 0);
            }
            "barrier" if has("cluster") => match has("wait") {
                true => self.cluster_wait(),
                false => self.emit(Op::Nop, 0, [0; 3], 0),
            },
            "bar" | "barrier" => self.barrier(instruction)?,
            "membar" | "fence" | "nanosleep" | "prefetch" | "prefetchu" | "pmevent" | "brkpt"
            | "griddepcontrol" | "setmaxnreg" | "discard" | "applypriority" => {
                self.emit(Op::Nop, 0, [0; 3], 0);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A cluster is one block here, so its barrier is a block's, of a number that programs can't name.
    fn cluster_wait(&mut self) {
        let a = self.constant(16);
        self.emit(Op::Barrier(Barrier::Sync { arrive: false }), 0, [a, SINK, 0], 0);
    }

    fn barrier(&mut self, instruction: &Instruction) -> Result<()> {
        let has = |what: &str| instruction.modifiers.iter().any(|modifier| modifier == what);
        let mut operands = instruction.operands.as_slice();
        if !has("red") {
            let a = self.source(operands.first().unwrap_or(&Operand::Integer(0)), Ty::U32)?;
            let b = operands.get(1).map_or(Ok(SINK), |count| self.source(count, Ty::U32))?;
            self.emit(Op::Barrier(Barrier::Sync { arrive: has("arrive") }), 0, [a, b, 0], 0);
            return Ok(());
        }
        let how = if has("popc") {
            Combine::Count
        } else if has("and") {
            Combine::And
        } else {
            Combine::Or
        };
        let Some((to, rest)) = operands.split_first() else { return self.fail("bar.red needs operands") };
        operands = rest;
        let (Some(id), Some(predicate)) = (operands.first(), operands.last()) else {
            return self.fail("bar.red needs operands");
        };
        let a = self.source(id, Ty::U32)?;
        let b = if operands.len() == 3 { self.source(&operands[1], Ty::U32)? } else { SINK };
        let (predicate, negated) = match predicate {
            Operand::Not(name) => (Operand::Name(name.clone()), true),
            other => (other.clone(), false),
        };
        let c = self.source(&predicate, Ty::Pred)?;
        let (d, _) = self.destination(to)?;
        self.emit(Op::Barrier(Barrier::Reduce { how, negated }), d, [a, b, c], 0);
        Ok(())
    }

    /// call (result), function, (arguments), prototype.
    fn call(&mut self, operands: &[Operand]) -> Result<()> {
        let (mut result, mut operands) = (None, operands);
        if let [Operand::List(results), rest @ ..] = operands {
            result = self.places(results)?.first().copied();
            operands = rest;
        }
        let Some((Operand::Name(name), rest)) = operands.split_first() else {
            return self.fail("call needs a function");
        };
        let arguments = match rest.first() {
            Some(Operand::List(arguments)) => self.places(arguments)?,
            _ => Vec::new(),
        };
        let builtin = match name.as_str() {
            "vprintf" => Some(Builtin::Printf),
            "malloc" => Some(Builtin::Malloc),
            "free" => Some(Builtin::Free),
            "__assertfail" => Some(Builtin::AssertFail),
            _ => None,
        };
        let body = self
            .loaded
            .functions
            .get(name)
            .is_some_and(|&number| self.loaded.ast.functions[number].body.is_some());
        let mut save = None;
        let rows = (self.first_row, u32::MAX);
        let target = match (builtin, self.lookup(name)) {
            (Some(builtin), None) if !body => Target::Builtin(builtin),
            (_, Some(Symbol::Register { row, .. })) => {
                save = self.cyclic.iter().any(|(from, _)| *from == self.current).then_some(rows);
                Target::Indirect(row)
            }
            _ if body => {
                save = self.cyclic.contains(&(self.current.clone(), name.clone())).then_some(rows);
                Target::Function(self.numbers[name])
            }
            _ => return self.fail(format!("{name} is called, and is not in the module")),
        };
        let frame = self.frame.next_multiple_of(16);
        self.emit(Op::Call(Box::new(Call { target, arguments, result, frame, save })), 0, [0; 3], 0);
        Ok(())
    }

    fn places(&mut self, operands: &[Operand]) -> Result<Vec<(u32, u32)>> {
        let mut out = Vec::new();
        for operand in operands {
            let Operand::Name(name) = operand else {
                return self.fail("arguments in registers are not supported: use .param");
            };
            match self.lookup(name) {
                Some(Symbol::Frame { offset, size }) => out.push((offset, size)),
                _ => return self.fail(format!("{name} is not a .param variable")),
            }
        }
        Ok(out)
    }
}
