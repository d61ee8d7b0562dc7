// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One block. Its lanes stand in groups, one for each program counter; the group at the lowest runs, and groups that meet become one. A lane waits at a
//! barrier or at a warp-wide instruction until the lanes that it names are there too. A group that runs long while others could is interrupted, so a lane
//! may spin on what another lane does.

mod waits;

use super::memory::Memory;
use super::program::{Builtin, Call, Instruction, Op, Program, Special, Target};
use super::rows::Rows;
use super::space::{Arena, CODE_WINDOW};
use super::warp::WARP;
use std::collections::BTreeMap;

/// Why a kernel ended early.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    pub kind: FaultKind,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    IllegalAddress,
    Misaligned,
    Trap,
    Assert,
    StackOverflow,
    /// Lanes wait for each other.
    Deadlock,
    Unsupported,
}

/// The program, memory and shape that all blocks of a launch share.
pub struct Launch<'a> {
    pub program: &'a Program,
    pub arena: &'a Arena,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_shared: usize,
    pub parameters: &'a [u8],
    pub grid_id: u64,
    /// Eight bytes, zero at first, for the barrier among blocks of a cooperative launch; 0 for others.
    pub workspace: u64,
    /// Gets what printf wrote.
    pub print: &'a (dyn Fn(Vec<u8>) + Sync),
}

/// Steps after which a group lets others run.
const TURN: u32 = 20_000;

/// How a call will end.
struct Return {
    pc: u32,
    /// The call's own program counter.
    call: u32,
    callee: u32,
    frame: u32,
    saved: Box<[u64]>,
}

#[derive(Default)]
struct Waiting {
    lanes: Vec<(u16, u32)>,
    arrived: usize,
    expected: Option<usize>,
}

pub struct Block<'a> {
    launch: &'a Launch<'a>,
    memory: Memory<'a>,
    stacks: Vec<Vec<Return>>,
    pc: u32,
    lanes: Vec<u16>,
    /// Other groups that could run.
    pending: BTreeMap<u32, Vec<u16>>,
    /// The lowest of their program counters.
    next: u32,
    /// At warp-wide instructions, until the others come.
    parked: BTreeMap<u32, Vec<u16>>,
    barriers: Vec<Waiting>,
    /// Lanes that have not exited, by warp.
    alive: Vec<u32>,
    steps: u32,
    /// A group of a higher program counter has its turn.
    out_of_order: bool,
    scratch: Vec<u16>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Progress {
    Done,
    /// The budget is used up.
    Running,
}

impl<'a> Block<'a> {
    pub fn new(launch: &'a Launch<'a>) -> Block<'a> {
        let lanes = launch.block.iter().product::<u32>() as usize;
        Block {
            launch,
            memory: Memory::new(launch, lanes),
            stacks: (0..lanes).map(|_| Vec::new()).collect(),
            pc: 0,
            lanes: Vec::new(),
            pending: BTreeMap::new(),
            next: u32::MAX,
            parked: BTreeMap::new(),
            barriers: (0..17).map(|_| Waiting::default()).collect(),
            alive: Vec::new(),
            steps: 0,
            out_of_order: false,
            scratch: Vec::new(),
        }
    }

    /// Makes this the block at an index of the grid, about to start.
    pub fn start(&mut self, index: [u32; 3]) {
        let lanes = self.memory.lanes;
        self.memory.clear();
        self.lanes = (0..lanes as u16).collect();
        self.pc = self.launch.program.start;
        self.alive = (0..lanes.div_ceil(WARP))
            .map(|warp| u32::MAX >> (WARP - (lanes - warp * WARP).min(WARP)))
            .collect();
        self.pending.clear();
        self.next = u32::MAX;
        self.specials(index);
    }

    fn specials(&mut self, index: [u32; 3]) {
        let Launch { grid, block, .. } = *self.launch;
        let flat = u64::from(index[0])
            + u64::from(grid[0]) * (u64::from(index[1]) + u64::from(grid[1]) * u64::from(index[2]));
        for &(row, special) in &self.launch.program.specials {
            for lane in 0..self.memory.lanes as u32 {
                let in_warp = lane % WARP as u32;
                let value = match special {
                    Special::Tid(0) => lane % block[0],
                    Special::Tid(1) => lane / block[0] % block[1],
                    Special::Tid(_) => lane / block[0] / block[1],
                    Special::Ntid(axis) => block[usize::from(axis)],
                    Special::Ctaid(axis) => index[usize::from(axis)],
                    Special::Nctaid(axis) => grid[usize::from(axis)],
                    Special::Lane => in_warp,
                    Special::Warp => lane / WARP as u32,
                    Special::Warps => self.memory.lanes.div_ceil(WARP) as u32,
                    Special::MaskEqual => 1 << in_warp,
                    Special::MaskLess => (1 << in_warp) - 1,
                    Special::MaskLessEqual => u32::MAX >> (31 - in_warp),
                    Special::MaskGreater => !(u32::MAX >> (31 - in_warp)),
                    Special::MaskGreaterEqual => !((1 << in_warp) - 1),
                    Special::GridId => self.launch.grid_id as u32,
                    Special::DynamicShared => self.memory.dynamic_start() as u32,
                    Special::TotalShared => self.launch.dynamic_shared as u32,
                    Special::WorkspaceLow => self.launch.workspace as u32,
                    Special::WorkspaceHigh => (self.launch.workspace >> 32) as u32,
                    Special::Zero => 0,
                    Special::One => 1,
                    Special::Block => flat as u32,
                };
                self.memory.set(row, lane as u16, u64::from(value));
            }
        }
    }

    /// Runs until the block ends, or for about so many instructions.
    pub fn run(&mut self, budget: u64) -> Result<Progress, Fault> {
        for _ in 0..budget {
            if self.lanes.is_empty() && !self.pick()? {
                return Ok(Progress::Done);
            }
            if self.pc >= self.next {
                self.meet();
            }
            self.step()?;
        }
        Ok(Progress::Running)
    }

    fn refresh_next(&mut self) {
        self.next = self.pending.keys().next().copied().unwrap_or(u32::MAX);
    }

    /// Takes the group at the lowest program counter. False when all lanes have exited.
    fn pick(&mut self) -> Result<bool, Fault> {
        if self.pending.is_empty() {
            self.release_warp_barriers();
        }
        let Some((pc, lanes)) = self.pending.pop_first() else {
            if self.alive.iter().all(|&warp| warp == 0) {
                return Ok(false);
            }
            return Err(self.fault(
                FaultKind::Deadlock,
                "all threads wait: a barrier or a warp-wide instruction that not all reach".to_owned(),
            ));
        };
        (self.pc, self.lanes, self.out_of_order, self.steps) = (pc, lanes, false, 0);
        self.refresh_next();
        Ok(true)
    }

    /// The running group has reached or passed another one.
    fn meet(&mut self) {
        if let Some(others) = self.pending.remove(&self.pc) {
            merge(&mut self.lanes, others);
        } else if !self.out_of_order {
            self.swap(self.next);
        } else if self.steps > TURN {
            self.swap(self.next);
            self.out_of_order = false;
        }
        self.refresh_next();
    }

    /// Goes on with the pending group at `pc`.
    fn swap(&mut self, pc: u32) {
        if let Some(lanes) = self.pending.remove(&pc) {
            let before = std::mem::replace(&mut self.lanes, lanes);
            self.put(self.pc, before);
            (self.pc, self.steps) = (pc, 0);
        }
        self.refresh_next();
    }

    /// A backward jump while others could run: after a while it is their turn.
    fn maybe_yield(&mut self) {
        if self.pending.is_empty() || self.steps < TURN {
            return;
        }
        let after =
            self.pending.range(self.pc + 1..).next().or(self.pending.iter().next()).map(|(&pc, _)| pc);
        if let Some(pc) = after {
            self.swap(pc);
            self.out_of_order = true;
        }
    }

    fn put(&mut self, pc: u32, lanes: Vec<u16>) {
        if lanes.is_empty() {
            return;
        }
        match self.pending.entry(pc) {
            std::collections::btree_map::Entry::Occupied(mut there) => merge(there.get_mut(), lanes),
            std::collections::btree_map::Entry::Vacant(free) => drop(free.insert(lanes)),
        }
        self.next = self.next.min(pc);
    }

    pub(super) fn fault(&self, kind: FaultKind, message: String) -> Fault {
        let line = self.launch.program.code.get(self.pc as usize).map_or(0, |instruction| instruction.line);
        Fault { kind, message: format!("{}, PTX line {line}: {message}", self.launch.program.name) }
    }

    /// One instruction of the running group.
    fn step(&mut self) -> Result<(), Fault> {
        let launch = self.launch;
        let instruction = &launch.program.code[self.pc as usize];
        self.steps += 1;
        let guarded = self.guard(instruction);
        let lanes = if guarded { &self.scratch } else { &self.lanes };
        if lanes.is_empty() {
            self.pc += 1;
            return Ok(());
        }
        let done = match &instruction.op {
            Op::Rows(function) => {
                let mut rows = Rows::new(&mut self.memory.registers, self.memory.lanes, lanes);
                (rows.d, rows.a, rows.b, rows.c, rows.p) =
                    (instruction.d, instruction.a, instruction.b, instruction.c, instruction.p);
                function(&rows);
                Ok(())
            }
            Op::Nop => Ok(()),
            Op::Load(access) => self.memory.load(instruction.a, access, lanes),
            Op::Store(access) => self.memory.store(instruction.a, access, lanes),
            Op::Atomic(atomic) => self.memory.atomic(instruction, atomic, lanes),
            Op::CopyAsync { size } => self.memory.copy_async(instruction, *size, lanes),
            Op::FrameAddress => {
                self.memory.frame_address(instruction.d, instruction.p, lanes);
                Ok(())
            }
            Op::IsSpace(space) => {
                self.memory.is_space(instruction, *space, lanes);
                Ok(())
            }
            Op::Clock => {
                self.memory.clock(instruction, lanes);
                Ok(())
            }
            _ => {
                let lanes = lanes.clone();
                return self.control(instruction, lanes);
            }
        };
        match done {
            Ok(()) => self.pc += 1,
            Err((kind, message)) => return Err(self.fault(kind, message)),
        }
        Ok(())
    }

    /// Puts the lanes that the guard lets through into `scratch`. False when there is no guard.
    fn guard(&mut self, instruction: &Instruction) -> bool {
        let Some(guard) = instruction.guard else { return false };
        self.scratch.clear();
        for &lane in &self.lanes {
            if (self.memory.get(guard.row, lane) & 1 != 0) != guard.negated {
                self.scratch.push(lane);
            }
        }
        true
    }

    /// Lanes of the running group that are not in `lanes` go on behind the instruction; the group is left empty.
    fn leave(&mut self, lanes: &[u16]) {
        let group = std::mem::take(&mut self.lanes);
        if group.len() > lanes.len() {
            let mut taken = lanes.iter().peekable();
            let rest = group.into_iter().filter(|lane| taken.next_if_eq(&lane).is_none()).collect();
            self.put(self.pc + 1, rest);
        }
    }

    /// Goes on at `pc` with these lanes; the running group is empty.
    fn resume(&mut self, pc: u32, lanes: Vec<u16>) {
        self.put(pc, lanes);
        if let Some((pc, lanes)) = self.pending.pop_first() {
            (self.pc, self.lanes) = (pc, lanes);
        }
        self.refresh_next();
    }

    fn control(&mut self, instruction: &Instruction, lanes: Vec<u16>) -> Result<(), Fault> {
        let pc = self.pc;
        match &instruction.op {
            Op::Branch(target) => {
                if lanes.len() == self.lanes.len() {
                    self.pc = *target;
                } else {
                    self.leave(&lanes);
                    self.resume(*target, lanes);
                }
                if *target <= pc {
                    self.maybe_yield();
                }
            }
            Op::BranchIndex(targets) => {
                self.leave(&lanes);
                for lane in lanes {
                    let index = self.memory.get(instruction.a, lane) as u32 as usize;
                    let Some(&target) = targets.get(index) else {
                        return Err(self.fault(
                            FaultKind::Trap,
                            format!("brx.idx to entry {index} of {}", targets.len()),
                        ));
                    };
                    self.put(target, vec![lane]);
                }
                self.resume(pc, Vec::new());
            }
            Op::Call(call) => self.call(call, lanes)?,
            Op::Return => self.give_back(lanes),
            Op::Exit => self.exit(&lanes),
            Op::Trap => return Err(self.fault(FaultKind::Trap, "trap".to_owned())),
            Op::Barrier(barrier) => self.barrier(instruction, barrier, lanes)?,
            Op::Unsupported(what) => {
                return Err(
                    self.fault(FaultKind::Unsupported, format!("{what} is not supported by this device"))
                );
            }
            _ => self.warp_wide(instruction, lanes),
        }
        Ok(())
    }

    fn call(&mut self, call: &Call, lanes: Vec<u16>) -> Result<(), Fault> {
        if let Target::Builtin(builtin) = call.target {
            for &lane in &lanes {
                self.builtin(builtin, call, lane)?;
            }
            self.pc += 1;
            return Ok(());
        }
        let pc = self.pc;
        self.leave(&lanes);
        let mut groups: BTreeMap<u32, Vec<u16>> = BTreeMap::new();
        for lane in lanes {
            let number = match call.target {
                Target::Indirect(row) => self.callee(self.memory.get(row, lane))?,
                Target::Function(number) => number,
                Target::Builtin(_) => continue,
            };
            let callee = &self.launch.program.callees[number as usize];
            let saved = match call.save {
                Some((first, end)) => (first..end).map(|row| self.memory.get(row, lane)).collect(),
                None => Box::default(),
            };
            let frame = self.memory.frames[usize::from(lane)];
            for (&(from, size), &to) in call.arguments.iter().zip(&callee.parameters) {
                if !self.memory.copy_frame(lane, frame + from, frame + call.frame + to, size) {
                    return Err(self.fault(
                        FaultKind::StackOverflow,
                        format!("calls of {} are nested too deeply", callee.name),
                    ));
                }
            }
            if self.stacks[usize::from(lane)].len() > 10_000 || !self.memory.fits(frame + call.frame) {
                return Err(self.fault(
                    FaultKind::StackOverflow,
                    format!("calls of {} are nested too deeply", callee.name),
                ));
            }
            self.memory.frames[usize::from(lane)] = frame + call.frame;
            self.stacks[usize::from(lane)].push(Return {
                pc: pc + 1,
                call: pc,
                callee: number,
                frame,
                saved,
            });
            groups.entry(callee.start).or_default().push(lane);
        }
        for (pc, lanes) in groups {
            self.put(pc, lanes);
        }
        self.resume(pc, Vec::new());
        Ok(())
    }

    /// The number of the function at an address.
    fn callee(&self, address: u64) -> Result<u32, Fault> {
        let found = self.launch.program.addresses.iter().find(|(at, _)| *at == address);
        match found {
            Some(&(_, number)) => Ok(number),
            None if address >= CODE_WINDOW => {
                Err(self.fault(FaultKind::Unsupported, "a call of a function of another module".to_owned()))
            }
            None => Err(self.fault(
                FaultKind::IllegalAddress,
                format!("a call of address {address:#x}, where no function is"),
            )),
        }
    }

    fn give_back(&mut self, lanes: Vec<u16>) {
        self.leave(&lanes);
        let program = self.launch.program;
        let mut groups: BTreeMap<u32, Vec<u16>> = BTreeMap::new();
        for lane in lanes {
            let Some(back) = self.stacks[usize::from(lane)].pop() else { continue };
            let Op::Call(call) = &program.code[back.call as usize].op else { continue };
            let own = self.memory.frames[usize::from(lane)];
            if let Some((to, size)) = call.result {
                self.memory.copy_frame(
                    lane,
                    own + program.callees[back.callee as usize].result,
                    back.frame + to,
                    size,
                );
            }
            if let Some((first, _)) = call.save {
                for (row, &value) in (first..).zip(back.saved.iter()) {
                    self.memory.set(row, lane, value);
                }
            }
            self.memory.frames[usize::from(lane)] = back.frame;
            groups.entry(back.pc).or_default().push(lane);
        }
        for (pc, lanes) in groups {
            self.put(pc, lanes);
        }
        self.resume(self.pc, Vec::new());
    }

    fn builtin(&mut self, builtin: Builtin, call: &Call, lane: u16) -> Result<(), Fault> {
        let frame = self.memory.frames[usize::from(lane)];
        let argument = |at: usize| {
            call.arguments
                .get(at)
                .map_or(0, |&(offset, size)| self.memory.frame_value(lane, frame + offset, size))
        };
        let result = match builtin {
            Builtin::Printf => {
                let (format, buffer) = (self.memory.text(lane, argument(0)), argument(1));
                let read = |offset: usize, size: usize| self.memory.peek(lane, buffer + offset as u64, size);
                let out = super::print::format(&format, read, |address| self.memory.text(lane, address));
                let len = out.len() as u64;
                (self.launch.print)(out);
                len
            }
            Builtin::Malloc => self.launch.arena.allocate(argument(0) as usize, 16).unwrap_or(0),
            Builtin::Free => {
                self.launch.arena.release(argument(0));
                0
            }
            Builtin::AssertFail => {
                let text = |at| String::from_utf8_lossy(&self.memory.text(lane, argument(at))).into_owned();
                let message = format!(
                    "{}:{}: {}: assertion `{}` failed",
                    text(1),
                    argument(2) as u32,
                    text(3),
                    text(0)
                );
                return Err(self.fault(FaultKind::Assert, message));
            }
        };
        if let Some((offset, size)) = call.result {
            self.memory.set_frame_value(lane, frame + offset, size, result);
        }
        Ok(())
    }

    fn exit(&mut self, lanes: &[u16]) {
        self.leave(lanes);
        for &lane in lanes {
            self.alive[usize::from(lane) / WARP] &= !(1 << (usize::from(lane) % WARP));
            self.stacks[usize::from(lane)].clear();
        }
        // Others may have waited for those that are gone.
        for (pc, lanes) in std::mem::take(&mut self.parked) {
            self.put(pc, lanes);
        }
        for id in 0..self.barriers.len() {
            self.complete(id);
        }
        self.resume(self.pc, Vec::new());
    }
}

/// Both are sorted.
fn merge(into: &mut Vec<u16>, other: Vec<u16>) {
    let sorted = into.last() < other.first();
    into.extend(other);
    if !sorted {
        into.sort_unstable();
    }
}
