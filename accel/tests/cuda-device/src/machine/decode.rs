// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decodes a kernel and all functions that it may call. Callees come before their callers, so that lanes inside of a call have lower program counters than
//! those that wait behind it.

use super::link::Loaded;
use super::program::{Callee, Guard, Instruction, Op, Parameter, Program, SINK, Special};
use super::rows::{RowFn, row};
use crate::ptx::Error;
use crate::ptx::ast::{self, Function, Operand, Space, Statement};
use crate::ptx::types::Ty;
use std::collections::{HashMap, HashSet};

/// The start of shared memory is the system's, as on NVIDIA's devices since compute capability 9.0.
const SHARED_START: usize = 1024;
/// Local memory of a lane in kernels that recurse.
const RECURSION: usize = 64 << 10;

#[derive(Clone, Copy, Debug)]
pub(super) enum Symbol {
    Register {
        row: u32,
        ty: Ty,
    },
    /// .local, and .param of calls and of functions.
    Frame {
        offset: u32,
        size: u32,
    },
    /// A kernel's parameter.
    Parameter {
        offset: u32,
    },
    Shared {
        offset: u32,
    },
}

#[derive(Default)]
struct Scope {
    names: HashMap<String, Symbol>,
    /// `%r<10>`: a prefix, how many, of which type.
    families: HashMap<String, (u32, Ty)>,
    /// The frame's end where the scope began.
    frame: u32,
}

pub(super) struct Decoder<'a> {
    pub(super) loaded: &'a Loaded,
    pub(super) program: Program,
    constants: HashMap<u64, u32>,
    specials: Vec<(u32, Special)>,
    shared: HashMap<String, u32>,
    /// Numbers of functions among the program's callees, and the one that is being decoded.
    pub(super) numbers: HashMap<String, u32>,
    pub(super) current: String,
    /// Of the function that is being decoded.
    scopes: Vec<Scope>,
    pub(super) entry: bool,
    pub(super) frame: u32,
    frame_max: u32,
    /// Branches whose labels come later: instruction, name, number of the scope chain.
    pub(super) branches: Vec<(u32, Vec<String>, Vec<usize>)>,
    /// All scopes' labels of this function, by the scope's number; and the chain of open scopes' numbers.
    labels: Vec<HashMap<String, u32>>,
    pub(super) chain: Vec<usize>,
    pub(super) targets: HashMap<String, Vec<String>>,
    pub(super) line: u32,
    pub(super) guard: Option<Guard>,
    depths: HashMap<String, u32>,
    pub(super) cyclic: HashSet<(String, String)>,
    pub(super) first_row: u32,
}

pub(super) type Result<T> = std::result::Result<T, Error>;

/// Decodes a kernel of a loaded module.
pub fn decode(loaded: &Loaded, name: &str) -> Result<Program> {
    let number = loaded.functions.get(name).copied().filter(|&number| loaded.ast.functions[number].entry);
    let Some(number) = number else { return Err(Error { line: 0, what: format!("no kernel {name}") }) };
    let entry = &loaded.ast.functions[number];
    let graph = super::decode_control::CallGraph::of(loaded, name);
    let mut decoder = Decoder::new(loaded, entry);
    decoder.cyclic = graph.cyclic();
    let callees = graph.order().into_iter().filter(|function| !function.entry && function.body.is_some());
    decoder.numbers =
        callees.enumerate().map(|(number, function)| (function.name.clone(), number as u32)).collect();
    for function in graph.order() {
        decoder.function(function, &graph)?;
    }
    let mut program = decoder.program;
    let recursive = !decoder.cyclic.is_empty();
    program.recursive = recursive;
    program.local_bytes = (decoder.depths.get(name).copied().unwrap_or(0) as usize
        + if recursive { RECURSION } else { 0 })
    .next_multiple_of(16);
    program.constants = decoder.constants.iter().map(|(&value, &row)| (row, value)).collect();
    program.specials = decoder.specials;
    for (number, callee) in program.callees.iter().enumerate() {
        if let Some(address) = loaded.address(&callee.name) {
            program.addresses.push((address, number as u32));
        }
    }
    Ok(program)
}

impl<'a> Decoder<'a> {
    fn new(loaded: &'a Loaded, entry: &Function) -> Decoder<'a> {
        let max_threads = entry
            .max_threads
            .or(entry.required_threads)
            .map_or(1024, |sizes| sizes.iter().product::<u32>().clamp(1, 1024));
        let program = Program {
            name: entry.name.clone(),
            code: Vec::new(),
            start: 0,
            rows: 0,
            constants: Vec::new(),
            specials: Vec::new(),
            callees: Vec::new(),
            addresses: Vec::new(),
            parameters: Vec::new(),
            parameter_bytes: 0,
            shared_bytes: SHARED_START,
            local_bytes: 0,
            recursive: false,
            max_threads,
            required_threads: entry.required_threads,
            version: loaded.ast.version,
        };
        let mut decoder = Decoder {
            loaded,
            program,
            constants: HashMap::new(),
            specials: Vec::new(),
            shared: HashMap::new(),
            numbers: HashMap::new(),
            current: String::new(),
            scopes: Vec::new(),
            entry: false,
            frame: 0,
            frame_max: 0,
            branches: Vec::new(),
            labels: Vec::new(),
            chain: Vec::new(),
            targets: HashMap::new(),
            line: 0,
            guard: None,
            depths: HashMap::new(),
            cyclic: HashSet::new(),
            first_row: 0,
        };
        // Row 0 is zero: the operand of instructions that have fewer than three.
        decoder.constant(0);
        decoder
    }

    pub(super) fn fail<T>(&self, what: impl Into<String>) -> Result<T> {
        Err(Error { line: self.line, what: what.into() })
    }

    pub(super) fn new_row(&mut self) -> u32 {
        self.program.rows += 1;
        self.program.rows - 1
    }

    pub(super) fn constant(&mut self, value: u64) -> u32 {
        if let Some(&row) = self.constants.get(&value) {
            return row;
        }
        let row = self.new_row();
        self.constants.insert(value, row);
        row
    }

    fn special(&mut self, special: Special) -> u32 {
        if let Some((row, _)) = self.specials.iter().find(|(_, known)| *known == special) {
            return *row;
        }
        let row = self.new_row();
        self.specials.push((row, special));
        row
    }

    fn function(
        &mut self,
        function: &'a Function,
        graph: &super::decode_control::CallGraph<'a>,
    ) -> Result<()> {
        let Some(body) = &function.body else { return Ok(()) };
        self.line = function.line;
        self.current.clone_from(&function.name);
        let first_instruction = self.program.code.len();
        (self.entry, self.frame, self.frame_max) = (function.entry, 0, 0);
        self.scopes = vec![Scope::default()];
        self.branches.clear();
        self.targets.clear();
        (self.labels, self.chain) = (vec![HashMap::new()], vec![0]);
        self.first_row = self.program.rows;
        self.formals(function);
        for statement in body {
            self.statement(statement)?;
        }
        // A body may end without ret.
        self.guard = None;
        self.emit(if function.entry { Op::Exit } else { Op::Return }, 0, [0; 3], 0);
        self.resolve()?;
        let end = self.program.rows;
        for instruction in &mut self.program.code[first_instruction..] {
            if let Op::Call(call) = &mut instruction.op {
                call.save = call.save.map(|(first, _)| (first, end));
            }
        }
        let below = graph
            .callees(&function.name)
            .filter_map(|callee| self.depths.get(callee))
            .max()
            .copied()
            .unwrap_or(0);
        self.depths.insert(function.name.clone(), self.frame_max.next_multiple_of(16) + below);
        Ok(())
    }

    /// Parameters and results get their places.
    fn formals(&mut self, function: &Function) {
        if function.entry {
            self.program.start = self.program.code.len() as u32;
            let mut end = 0usize;
            for variable in &function.parameters {
                let offset = end.next_multiple_of(variable.align.max(1));
                end = offset + variable.size;
                self.program.parameters.push(Parameter { offset, size: variable.size });
                self.scopes[0]
                    .names
                    .insert(variable.name.clone(), Symbol::Parameter { offset: offset as u32 });
            }
            self.program.parameter_bytes = end;
            return;
        }
        let parameters = function.parameters.iter().map(|variable| self.frame_variable(variable)).collect();
        let result = function.results.first().map_or(0, |variable| self.frame_variable(variable));
        let start = self.program.code.len() as u32;
        self.program.callees.push(Callee { name: function.name.clone(), start, parameters, result });
    }

    fn frame_variable(&mut self, variable: &ast::Variable) -> u32 {
        let offset = self.frame.next_multiple_of(variable.align.max(1) as u32);
        self.frame = offset + variable.size as u32;
        self.frame_max = self.frame_max.max(self.frame);
        let symbol = Symbol::Frame { offset, size: variable.size as u32 };
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(variable.name.clone(), symbol);
        }
        offset
    }

    fn statement(&mut self, statement: &'a Statement) -> Result<()> {
        match statement {
            Statement::Open => {
                self.scopes.push(Scope { frame: self.frame, ..Scope::default() });
                self.chain.push(self.labels.len());
                self.labels.push(HashMap::new());
            }
            Statement::Close => {
                if let Some(scope) = self.scopes.pop() {
                    self.frame = scope.frame;
                }
                self.chain.pop();
            }
            Statement::Label(name) => {
                let here = self.program.code.len() as u32;
                let scope = *self.chain.last().unwrap_or(&0);
                self.labels[scope].insert(name.clone(), here);
            }
            Statement::Registers { name, count, ty } => {
                let row = if count.is_none() { self.new_row() } else { 0 };
                let Some(scope) = self.scopes.last_mut() else { return Ok(()) };
                match count {
                    Some(count) => drop(scope.families.insert(name.clone(), (*count, *ty))),
                    None => drop(scope.names.insert(name.clone(), Symbol::Register { row, ty: *ty })),
                }
            }
            Statement::Variable(variable) if variable.space == Space::Shared => {
                let offset = self.shared_variable(variable);
                if let Some(scope) = self.scopes.last_mut() {
                    scope.names.insert(variable.name.clone(), Symbol::Shared { offset });
                }
            }
            Statement::Variable(variable) => drop(self.frame_variable(variable)),
            Statement::Targets { name, labels } => drop(self.targets.insert(name.clone(), labels.clone())),
            Statement::Instruction(instruction) => self.instruction(instruction)?,
        }
        Ok(())
    }

    fn shared_variable(&mut self, variable: &ast::Variable) -> u32 {
        // Dynamic shared memory: behind everything else, at an offset that is known at the launch.
        if variable.size == 0 {
            return u32::MAX;
        }
        let offset = self.program.shared_bytes.next_multiple_of(variable.align.max(1));
        self.program.shared_bytes = offset + variable.size;
        offset as u32
    }

    pub(super) fn lookup(&mut self, name: &str) -> Option<Symbol> {
        for at in (0..self.scopes.len()).rev() {
            if let Some(&symbol) = self.scopes[at].names.get(name) {
                return Some(symbol);
            }
            let prefix = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
            if let Some(&(count, ty)) = self.scopes[at].families.get(prefix) {
                if name[prefix.len()..].parse::<u32>().is_ok_and(|number| number < count) {
                    let row = self.new_row();
                    let symbol = Symbol::Register { row, ty };
                    self.scopes[at].names.insert(name.to_owned(), symbol);
                    return Some(symbol);
                }
            }
        }
        if let Some(&offset) = self.shared.get(name) {
            return Some(Symbol::Shared { offset });
        }
        let variable = self
            .loaded
            .ast
            .variables
            .iter()
            .find(|variable| variable.space == Space::Shared && variable.name == name)?;
        let offset = self.shared_variable(variable);
        self.shared.insert(name.to_owned(), offset);
        Some(Symbol::Shared { offset })
    }

    pub(super) fn emit(&mut self, op: Op, d: u32, [a, b, c]: [u32; 3], p: u64) {
        self.program.code.push(Instruction { op, guard: self.guard, d, a, b, c, p, line: self.line });
    }

    pub(super) fn rows(&mut self, function: RowFn, d: u32, abc: [u32; 3], p: u64) {
        self.emit(Op::Rows(function), d, abc, p);
    }

    /// The row of an operand that is read as a value of this type.
    pub(super) fn source(&mut self, operand: &Operand, ty: Ty) -> Result<u32> {
        match operand {
            Operand::Name(name) => self.named(name, 0),
            Operand::Offset(name, offset) => self.named(name, *offset),
            Operand::Integer(value) if ty == Ty::F32 => Ok(self.constant((*value as f32).to_bits().into())),
            Operand::Integer(value) if ty == Ty::F64 => Ok(self.constant((*value as f64).to_bits())),
            Operand::Integer(value) => Ok(self.constant(value & ty.mask())),
            Operand::Single(bits) if ty == Ty::F64 => {
                Ok(self.constant(f64::from(f32::from_bits(*bits)).to_bits()))
            }
            Operand::Single(bits) => Ok(self.constant(u64::from(*bits))),
            Operand::Double(bits) if ty == Ty::F32 => {
                Ok(self.constant(u64::from((f64::from_bits(*bits) as f32).to_bits())))
            }
            Operand::Double(bits) => Ok(self.constant(*bits)),
            Operand::Not(name) => {
                let (a, d) = (self.named(name, 0)?, self.new_row());
                self.rows(row!(|a, _, _, _| a & 1 ^ 1), d, [a, 0, 0], 0);
                Ok(d)
            }
            Operand::Sink => Ok(0),
            other => self.fail(format!("not a value: {other:?}")),
        }
    }

    fn named(&mut self, name: &str, offset: i64) -> Result<u32> {
        match self.lookup(name) {
            Some(Symbol::Register { row, .. }) => return Ok(row),
            Some(Symbol::Frame { offset: at, .. }) => {
                let d = self.new_row();
                self.emit(Op::FrameAddress, d, [0; 3], u64::from(at).wrapping_add_signed(offset));
                return Ok(d);
            }
            Some(Symbol::Parameter { offset: at }) => {
                return Ok(self.constant(u64::from(at).wrapping_add_signed(offset)));
            }
            Some(Symbol::Shared { offset: u32::MAX }) => {
                let start = self.special(Special::DynamicShared);
                if offset == 0 {
                    return Ok(start);
                }
                let (d, add) = (self.new_row(), self.constant(offset as u64));
                self.rows(row!(|a, b, _, _| a.wrapping_add(b)), d, [start, add, 0], 0);
                return Ok(d);
            }
            Some(Symbol::Shared { offset: at }) => {
                return Ok(self.constant(u64::from(at).wrapping_add_signed(offset)));
            }
            None => {}
        }
        if let Some(address) = self.loaded.address(name) {
            return Ok(self.constant(address.wrapping_add_signed(offset)));
        }
        if let Some(special) = special(name) {
            return Ok(self.special(special));
        }
        match name {
            "WARP_SZ" => Ok(self.constant(32)),
            "%clock" | "%clock64" | "%globaltimer" | "%globaltimer_lo" | "%clock_hi" | "%globaltimer_hi" => {
                let d = self.new_row();
                self.emit(Op::Clock, d, [0; 3], u64::from(name.ends_with("hi")));
                Ok(d)
            }
            _ => self.fail(format!("unknown name {name}")),
        }
    }

    /// The row and the bits of a destination; a row that nothing reads for `_`.
    pub(super) fn destination(&mut self, operand: &Operand) -> Result<(u32, u64)> {
        match operand {
            Operand::Name(name) => match self.lookup(name) {
                Some(Symbol::Register { row, ty }) => Ok((row, ty.mask())),
                _ => self.fail(format!("{name} is not a register")),
            },
            Operand::Sink => Ok((self.new_row(), u64::MAX)),
            other => self.fail(format!("not a register: {other:?}")),
        }
    }

    fn instruction(&mut self, instruction: &ast::Instruction) -> Result<()> {
        self.line = instruction.line;
        self.guard = None;
        if let Some(guard) = &instruction.guard {
            let row = self.named(&guard.name, 0)?;
            self.guard = Some(Guard { row, negated: guard.negated });
        }
        if self.arithmetic(instruction)?
            || self.memory(instruction)?
            || self.control(instruction)?
            || self.warp(instruction)?
        {
            return Ok(());
        }
        let text = format!("{}.{}", instruction.name, instruction.modifiers.join("."));
        self.emit(Op::Unsupported(text.into()), SINK, [0; 3], 0);
        Ok(())
    }

    /// The row of the function's carry flag.
    pub(super) fn carry_flag(&mut self) -> u32 {
        if let Some(Symbol::Register { row, .. }) = self.lookup("carry flag") {
            return row;
        }
        let row = self.new_row();
        self.scopes[0].names.insert("carry flag".to_owned(), Symbol::Register { row, ty: Ty::Pred });
        row
    }

    fn resolve(&mut self) -> Result<()> {
        for (at, names, chain) in std::mem::take(&mut self.branches) {
            let mut found = Vec::new();
            for name in &names {
                match chain.iter().rev().find_map(|&scope| self.labels[scope].get(name)) {
                    Some(&label) => found.push(label),
                    None => {
                        return Err(Error {
                            line: self.program.code[at as usize].line,
                            what: format!("unknown label {name}"),
                        });
                    }
                }
            }
            self.program.code[at as usize].op = match &self.program.code[at as usize].op {
                Op::BranchIndex(_) => Op::BranchIndex(found.into()),
                _ => Op::Branch(found[0]),
            };
        }
        Ok(())
    }
}

fn special(name: &str) -> Option<Special> {
    let axis = |name: &str| match name.rsplit('.').next() {
        Some("x") => 0,
        Some("y") => 1,
        _ => 2,
    };
    Some(match name.split('.').next()? {
        "%tid" => Special::Tid(axis(name)),
        "%ntid" => Special::Ntid(axis(name)),
        "%ctaid" => Special::Ctaid(axis(name)),
        "%nctaid" => Special::Nctaid(axis(name)),
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%nwarpid" => Special::Warps,
        "%lanemask_eq" => Special::MaskEqual,
        "%lanemask_lt" => Special::MaskLess,
        "%lanemask_le" => Special::MaskLessEqual,
        "%lanemask_gt" => Special::MaskGreater,
        "%lanemask_ge" => Special::MaskGreaterEqual,
        "%gridid" => Special::GridId,
        "%smid" => Special::Block,
        "%envreg1" => Special::WorkspaceHigh,
        "%envreg2" => Special::WorkspaceLow,
        // A cluster is a block.
        "%clusterid" => Special::Ctaid(axis(name)),
        "%nclusterid" => Special::Nctaid(axis(name)),
        "%cluster_nctaid" | "%cluster_nctarank" | "%nsmid" => Special::One,
        "%cluster_ctaid" | "%cluster_ctarank" | "%is_explicit_cluster" => Special::Zero,
        "%dynamic_smem_size" | "%total_smem_size" | "%aggr_smem_size" => Special::TotalShared,
        _ => return None,
    })
}
