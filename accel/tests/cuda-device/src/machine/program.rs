// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A kernel, decoded: instructions whose operands are rows of the register file, with the functions that it may call.

use super::atomics::Atomic;
use super::rows::RowFn;
use super::warp::{Match, Shuffle, Vote};
use crate::ptx::ast::Space;

/// No row: an operand that is `_`.
pub const SINK: u32 = u32::MAX;

pub struct Instruction {
    pub op: Op,
    pub guard: Option<Guard>,
    pub d: u32,
    pub a: u32,
    pub b: u32,
    pub c: u32,
    pub p: u64,
    /// In the PTX text.
    pub line: u32,
}

/// The lanes that carry the instruction out: those whose predicate is set, or is not.
#[derive(Clone, Copy)]
pub struct Guard {
    pub row: u32,
    pub negated: bool,
}

pub enum Op {
    Nop,
    Rows(RowFn),
    /// d = the frame's start + p: a variable of .local, or a function's .param.
    FrameAddress,
    Load(Box<Access>),
    Store(Box<Access>),
    Atomic(Box<Atomic>),
    /// cp.async: to shared (a) from global (b), `p` bytes, of which c are copied and the others zero.
    CopyAsync {
        size: Option<u32>,
    },
    Branch(u32),
    /// By the index in a.
    BranchIndex(Box<[u32]>),
    Call(Box<Call>),
    Return,
    Exit,
    Trap,
    Barrier(Barrier),
    Shuffle(Shuffle),
    Vote(Vote),
    Match(Match),
    /// d = the mask of the warp's lanes that are here.
    ActiveMask,
    /// A barrier among the warp's lanes in mask a.
    WarpBarrier,
    /// redux.sync of a, membership mask b.
    Reduce(Reduce),
    /// elect.sync: d = the leader, b's predicate row says who it is.
    Elect,
    Matrix(Box<super::matrix::Matrix>),
    /// d = nanoseconds or cycles since an arbitrary start.
    Clock,
    /// Is a in this state space?
    IsSpace(Space),
    Unsupported(Box<str>),
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Reduce {
    Add,
    Min(bool),
    Max(bool),
    And,
    Or,
    Xor,
}

pub struct Access {
    pub space: Space,
    /// Of one element.
    pub bytes: u8,
    pub signed: bool,
    /// Where the elements come from or go to; the address is row a plus `offset`.
    pub rows: Box<[u32]>,
    /// The destination registers' bits.
    pub mask: u64,
    pub offset: i64,
    /// The address is relative to the lane's frame.
    pub frame: bool,
}

pub enum Target {
    Function(u32),
    /// The row holds the function's address.
    Indirect(u32),
    Builtin(Builtin),
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Builtin {
    Printf,
    Malloc,
    Free,
    AssertFail,
}

pub struct Call {
    pub target: Target,
    /// Offsets in the caller's frame, and sizes.
    pub arguments: Vec<(u32, u32)>,
    pub result: Option<(u32, u32)>,
    /// The caller's frame ends here; the callee's begins.
    pub frame: u32,
    /// Rows of the caller that a recursive call would overwrite: saved for each lane.
    pub save: Option<(u32, u32)>,
}

pub enum Barrier {
    /// a: which barrier; b: how many threads, or SINK for all. `arrive` does not wait.
    Sync { arrive: bool },
    /// And d = how many, whether any, whether all of the lanes' predicates c.
    Reduce { how: Combine, negated: bool },
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Combine {
    Count,
    And,
    Or,
}

/// A function that may be called.
pub struct Callee {
    pub name: String,
    pub start: u32,
    /// Offsets of its parameters in its frame.
    pub parameters: Vec<u32>,
    pub result: u32,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Lane,
    Warp,
    Warps,
    MaskEqual,
    MaskLess,
    MaskLessEqual,
    MaskGreater,
    MaskGreaterEqual,
    GridId,
    DynamicShared,
    TotalShared,
    Zero,
    One,
    /// Halves of the address where a cooperative grid keeps its barrier.
    WorkspaceLow,
    WorkspaceHigh,
    /// The block's number, for %smid and the like.
    Block,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Parameter {
    pub offset: usize,
    pub size: usize,
}

pub struct Program {
    pub name: String,
    pub code: Vec<Instruction>,
    pub start: u32,
    pub rows: u32,
    /// Rows whose lanes all hold a constant.
    pub constants: Vec<(u32, u64)>,
    pub specials: Vec<(u32, Special)>,
    pub callees: Vec<Callee>,
    /// Addresses of functions and their numbers among the callees.
    pub addresses: Vec<(u64, u32)>,
    pub parameters: Vec<Parameter>,
    pub parameter_bytes: usize,
    /// Static shared memory with the reserved start; dynamic memory begins here.
    pub shared_bytes: usize,
    /// Local memory of a lane along the deepest chain of calls, or enough for recursion.
    pub local_bytes: usize,
    pub recursive: bool,
    pub max_threads: u32,
    pub required_threads: Option<[u32; 3]>,
    pub version: (u32, u32),
}
