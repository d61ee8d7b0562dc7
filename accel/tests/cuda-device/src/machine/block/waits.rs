// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where lanes wait for each other: barriers of a block, and instructions of a warp.

use super::{Block, Fault, FaultKind, merge};
use crate::machine::program::{Barrier, Combine, Instruction, Op, SINK};
use crate::machine::warp::{self, WARP};
use std::collections::BTreeMap;

impl Block<'_> {
    pub(super) fn barrier(
        &mut self,
        instruction: &Instruction,
        barrier: &Barrier,
        lanes: Vec<u16>,
    ) -> Result<(), Fault> {
        let pc = self.pc;
        let id = self.memory.get(instruction.a, lanes[0]) as usize;
        if id >= self.barriers.len() {
            return Err(self.fault(FaultKind::Trap, format!("barrier {id} does not exist")));
        }
        let expected =
            (instruction.b != SINK).then(|| self.memory.get(instruction.b, lanes[0]) as u32 as usize);
        self.barriers[id].expected = expected;
        self.leave(&lanes);
        if let Barrier::Sync { arrive: true } = barrier {
            self.barriers[id].arrived += lanes.len();
            self.put(pc + 1, lanes);
        } else {
            self.barriers[id].lanes.extend(lanes.into_iter().map(|lane| (lane, pc)));
        }
        self.complete(id);
        self.resume(pc, Vec::new());
        Ok(())
    }

    /// Lets the lanes at a barrier go on, if all are there.
    pub(super) fn complete(&mut self, id: usize) {
        let alive = self.alive.iter().map(|warp| warp.count_ones() as usize).sum::<usize>();
        let waiting = &self.barriers[id];
        let there = waiting.lanes.len() + waiting.arrived;
        if there == 0 || there < waiting.expected.unwrap_or(alive) {
            return;
        }
        let waiting = std::mem::take(&mut self.barriers[id]);
        let code = &self.launch.program.code;
        let mut set = 0usize;
        for &(lane, pc) in &waiting.lanes {
            let instruction = &code[pc as usize];
            if let Op::Barrier(Barrier::Reduce { negated, .. }) = instruction.op {
                set += usize::from((self.memory.get(instruction.c, lane) & 1 != 0) != negated);
            }
        }
        let mut groups: BTreeMap<u32, Vec<u16>> = BTreeMap::new();
        for &(lane, pc) in &waiting.lanes {
            let instruction = &code[pc as usize];
            if let Op::Barrier(Barrier::Reduce { how, .. }) = instruction.op {
                let value = match how {
                    Combine::Count => set as u64,
                    Combine::And => u64::from(set == waiting.lanes.len()),
                    Combine::Or => u64::from(set > 0),
                };
                self.memory.set(instruction.d, lane, value);
            }
            groups.entry(pc + 1).or_default().push(lane);
        }
        for (pc, mut lanes) in groups {
            lanes.sort_unstable();
            self.put(pc, lanes);
        }
    }

    /// Carries a warp-wide instruction out for the lanes whose mask is complete; the others wait here.
    pub(super) fn warp_wide(&mut self, instruction: &Instruction, lanes: Vec<u16>) {
        let pc = self.pc;
        let mut here = lanes.clone();
        if let Some(parked) = self.parked.remove(&pc) {
            merge(&mut here, parked);
        }
        let whole = lanes.len() == self.lanes.len() && here.len() == lanes.len();
        let (mut ready, mut wait) = (Vec::with_capacity(here.len()), Vec::new());
        for warp in here.chunk_by(|a, b| usize::from(*a) / WARP == usize::from(*b) / WARP) {
            let alive = self.alive[usize::from(warp[0]) / WARP];
            let present = warp.iter().fold(0u32, |bits, lane| bits | 1 << (usize::from(*lane) % WARP));
            let mut go = 0u32;
            for &lane in warp {
                let mask = self.member_mask(instruction, lane);
                let complete = mask & alive & !present == 0;
                go |= u32::from(complete) << (usize::from(lane) % WARP);
                if complete { ready.push(lane) } else { wait.push(lane) }
            }
            if go != 0 {
                self.exchange(instruction, usize::from(warp[0]) / WARP * WARP, go, present);
            }
        }
        if whole && wait.is_empty() {
            self.pc += 1;
            return;
        }
        self.leave(&lanes);
        if !wait.is_empty() {
            self.parked.insert(pc, wait);
        }
        self.resume(pc + 1, ready);
    }

    fn member_mask(&self, instruction: &Instruction, lane: u16) -> u32 {
        match instruction.op {
            Op::Shuffle(_) => self.memory.get(instruction.p as u32, lane) as u32,
            Op::WarpBarrier => self.memory.get(instruction.a, lane) as u32,
            Op::ActiveMask => 0,
            Op::Matrix(_) => u32::MAX,
            _ => self.memory.get(instruction.b, lane) as u32,
        }
    }

    /// `go` are the lanes that take part, of the warp whose first lane is `base`; `present` are all that are here.
    fn exchange(&mut self, instruction: &Instruction, base: usize, go: u32, present: u32) {
        let each = |bits: u32| (0..WARP).filter(move |lane| bits >> lane & 1 != 0);
        let lane_of = |lane: usize| (base + lane) as u16;
        let mut values = [0u64; WARP];
        for lane in each(present) {
            values[lane] = self.memory.get(instruction.a, lane_of(lane));
        }
        let second = (instruction.p >> 32) as u32;
        let mut results = [(0u64, 0u64); WARP];
        for lane in each(go) {
            let mask = self.member_mask(instruction, lane_of(lane));
            results[lane] = match &instruction.op {
                Op::Shuffle(how) => {
                    let (operand, control) = (
                        self.memory.get(instruction.b, lane_of(lane)),
                        self.memory.get(instruction.c, lane_of(lane)),
                    );
                    let (from, inside) = warp::source(*how, lane as u32, operand as u32, control as u32);
                    // A lane that is not there gives its reader's own value: the result is undefined.
                    (
                        if present >> from & 1 != 0 { values[from as usize] } else { values[lane] },
                        u64::from(inside),
                    )
                }
                Op::Vote(vote) => {
                    let bits = each(present).fold(0, |bits, lane| bits | (values[lane] as u32 & 1) << lane);
                    (u64::from(warp::vote(*vote, mask & present, bits)), 0)
                }
                Op::Match(how) => {
                    let equal = warp::matching(*how, mask & present, &values, values[lane]);
                    (u64::from(equal), u64::from(equal != 0))
                }
                Op::Reduce(how) => (u64::from(warp::reduce(*how, mask & present, &values)), 0),
                Op::Elect => {
                    let leader = (mask & present).trailing_zeros();
                    (u64::from(leader), u64::from(leader == lane as u32))
                }
                _ => (u64::from(present), 0),
            };
        }
        match &instruction.op {
            Op::WarpBarrier => {}
            Op::Matrix(matrix) => self.memory.matrix(matrix, base),
            _ => {
                for lane in each(go) {
                    self.memory.set(instruction.d, lane_of(lane), results[lane].0);
                    if second != SINK && second != 0 {
                        self.memory.set(second, lane_of(lane), results[lane].1);
                    }
                }
            }
        }
    }

    /// __syncwarp() may be reached at several places: the lanes of a warp go on when together they are all.
    pub(super) fn release_warp_barriers(&mut self) {
        let at_barrier = |pc: &u32| matches!(self.launch.program.code[*pc as usize].op, Op::WarpBarrier);
        let mut there = vec![0u32; self.alive.len()];
        for (_, lanes) in self.parked.iter().filter(|(pc, _)| at_barrier(pc)) {
            lanes.iter().for_each(|&lane| there[usize::from(lane) / WARP] |= 1 << (usize::from(lane) % WARP));
        }
        let mut released = Vec::new();
        for (&pc, lanes) in self.parked.iter().filter(|(pc, _)| at_barrier(pc)) {
            let instruction = &self.launch.program.code[pc as usize];
            for &lane in lanes {
                let warp = usize::from(lane) / WARP;
                if self.member_mask(instruction, lane) & self.alive[warp] & !there[warp] == 0 {
                    released.push((pc, lane));
                }
            }
        }
        for (pc, lane) in released {
            if let Some(lanes) = self.parked.get_mut(&pc) {
                lanes.retain(|&other| other != lane);
            }
            self.put(pc + 1, vec![lane]);
        }
        self.parked.retain(|_, lanes| !lanes.is_empty());
    }
}
