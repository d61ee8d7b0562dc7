// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a PTX text says, before any name is resolved.

use super::types::Ty;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Const,
    Param,
}

#[derive(Default, Debug)]
pub struct Module {
    pub version: (u32, u32),
    pub target: String,
    pub variables: Vec<Variable>,
    pub functions: Vec<Function>,
    /// Name, and what it stands for.
    pub aliases: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
pub struct Variable {
    pub name: String,
    pub space: Space,
    pub align: usize,
    /// In bytes; 0 for an array of unknown length, such as dynamic shared memory.
    pub size: usize,
    pub init: Vec<Init>,
    pub external: bool,
    pub managed: bool,
    /// The element's size, for initializers and for parameters of 1 to 8 bytes.
    pub element: usize,
}

#[derive(Clone, Debug)]
pub enum Init {
    Bits(u64),
    /// The address of a symbol and an offset; `mask` takes one byte of it, as in `0xff00(name)`.
    Symbol {
        name: String,
        generic: bool,
        offset: i64,
        mask: Option<u64>,
    },
}

#[derive(Default, Debug)]
pub struct Function {
    pub name: String,
    pub entry: bool,
    pub parameters: Vec<Variable>,
    pub results: Vec<Variable>,
    /// None for a declaration.
    pub body: Option<Vec<Statement>>,
    pub max_threads: Option<[u32; 3]>,
    pub required_threads: Option<[u32; 3]>,
    pub line: u32,
}

#[derive(Debug)]
pub enum Statement {
    Open,
    Close,
    Label(String),
    /// `count` registers NAME0, NAME1 …, or one of this very name.
    Registers {
        name: String,
        count: Option<u32>,
        ty: Ty,
    },
    Variable(Variable),
    /// Of `.branchtargets`.
    Targets {
        name: String,
        labels: Vec<String>,
    },
    Instruction(Instruction),
}

#[derive(Clone, Debug)]
pub struct Guard {
    pub name: String,
    pub negated: bool,
}

#[derive(Clone, Debug)]
pub struct Instruction {
    pub line: u32,
    pub guard: Option<Guard>,
    pub name: String,
    pub modifiers: Vec<String>,
    pub operands: Vec<Operand>,
}

#[derive(Clone, Debug)]
pub enum Operand {
    /// A register, symbol, label or special register.
    Name(String),
    /// A name plus an offset: `variable+4`.
    Offset(String, i64),
    Not(String),
    Negative(String),
    /// An integer, as 64-bit two's complement.
    Integer(u64),
    Single(u32),
    Double(u64),
    /// `{a, b}`.
    Vector(Vec<Operand>),
    /// `[base+offset]`; the base is a register, a symbol or an integer. More than one part for textures.
    Memory {
        base: Box<Operand>,
        offset: i64,
        more: Vec<Operand>,
    },
    /// `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    /// `(a, b)`, of calls.
    List(Vec<Operand>),
    /// `_`.
    Sink,
}
