// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a block's lanes read and write: registers, shared and local memory, and the arena with every address checked.

use super::atomics::{self, Atomic};
use super::block::{FaultKind, Launch};
use super::matrix::Matrix;
use super::program::{Access, Instruction, SINK};
use super::rows::Rows;
use super::space::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::ptx::ast::Space;

type Outcome<T> = Result<T, (FaultKind, String)>;

pub struct Memory<'a> {
    launch: &'a Launch<'a>,
    pub lanes: usize,
    pub registers: Vec<u64>,
    /// In words, so that it is aligned.
    shared: Vec<u128>,
    shared_bytes: usize,
    local: Vec<u128>,
    /// Local memory of one lane.
    local_bytes: usize,
    /// Where each lane's frame begins in its local memory.
    pub frames: Vec<u32>,
    started: std::time::Instant,
}

impl<'a> Memory<'a> {
    pub fn new(launch: &'a Launch<'a>, lanes: usize) -> Memory<'a> {
        let program = launch.program;
        let shared_bytes = program.shared_bytes.next_multiple_of(16) + launch.dynamic_shared;
        let mut memory = Memory {
            launch,
            lanes,
            registers: vec![0; program.rows as usize * lanes],
            shared: vec![0; shared_bytes.div_ceil(16)],
            shared_bytes,
            local: vec![0; program.local_bytes.div_ceil(16) * lanes],
            local_bytes: program.local_bytes,
            frames: vec![0; lanes],
            started: std::time::Instant::now(),
        };
        for &(row, value) in &program.constants {
            memory.registers[row as usize * lanes..][..lanes].fill(value);
        }
        memory
    }

    /// For the next block. Shared memory has no defined contents, so it is the same for each: zero.
    pub fn clear(&mut self) {
        self.shared.fill(0);
        self.frames.fill(0);
    }

    pub fn dynamic_start(&self) -> usize {
        self.launch.program.shared_bytes.next_multiple_of(16)
    }

    pub fn get(&self, row: u32, lane: u16) -> u64 {
        self.registers[row as usize * self.lanes + usize::from(lane)]
    }

    pub fn set(&mut self, row: u32, lane: u16, value: u64) {
        self.registers[row as usize * self.lanes + usize::from(lane)] = value;
    }

    /// The host's address of `len` bytes, at most 16 of one access or 32 of a vector.
    #[inline(always)]
    fn pointer(&self, space: Space, address: u64, len: usize, lane: u16) -> Outcome<*mut u8> {
        if address & (len as u64 - 1) != 0 && len.is_power_of_two() {
            return Err((FaultKind::Misaligned, format!("an access of {len} bytes at {address:#x}")));
        }
        let inside =
            |address: u64, size: usize| address.checked_add(len as u64).is_some_and(|end| end <= size as u64);
        let found = match space {
            Space::Global | Space::Const => self.global(address, len),
            Space::Shared => inside(address, self.shared_bytes)
                .then(|| self.shared.as_ptr().cast::<u8>().wrapping_add(address as usize).cast_mut()),
            Space::Local => inside(address, self.local_bytes).then(|| {
                self.local
                    .as_ptr()
                    .cast::<u8>()
                    .wrapping_add(
                        usize::from(lane) * self.local_bytes.next_multiple_of(16) + address as usize,
                    )
                    .cast_mut()
            }),
            Space::Param => inside(address, self.launch.parameters.len())
                .then(|| self.launch.parameters.as_ptr().wrapping_add(address as usize).cast_mut()),
            Space::Generic => {
                let offset = address & (SHARED_WINDOW - 1);
                return match address & !(SHARED_WINDOW - 1) {
                    0 => self.global(address, len).ok_or_else(|| illegal(space, address, len)),
                    SHARED_WINDOW => self.pointer(Space::Shared, offset, len, lane),
                    LOCAL_WINDOW => self.pointer(Space::Local, offset, len, lane),
                    PARAM_WINDOW => self.pointer(Space::Param, offset, len, lane),
                    _ => Err(illegal(space, address, len)),
                };
            }
        };
        found.ok_or_else(|| illegal(space, address, len))
    }

    #[inline(always)]
    fn global(&self, address: u64, len: usize) -> Option<*mut u8> {
        let valid = self.launch.arena.valid(address, len.min(16))
            && (len <= 16 || self.launch.arena.valid(address + 16, len - 16));
        valid.then_some(address as *mut u8)
    }

    fn address(&self, row: u32, offset: i64, frame: bool, lane: u16) -> u64 {
        let base = if frame { u64::from(self.frames[usize::from(lane)]) } else { self.get(row, lane) };
        base.wrapping_add_signed(offset)
    }

    pub fn load(&mut self, row: u32, access: &Access, lanes: &[u16]) -> Outcome<()> {
        let size = usize::from(access.bytes);
        for &lane in lanes {
            let address = self.address(row, access.offset, access.frame, lane);
            let mut at = self.pointer(access.space, address, size * access.rows.len(), lane)?;
            for &to in &access.rows {
                if to != SINK {
                    // SAFETY: `pointer` has checked the bytes of all elements; another block may write them meanwhile, as on a GPU.
                    let value = unsafe { read(at, access.bytes, access.signed) };
                    self.set(to, lane, value & access.mask);
                }
                at = at.wrapping_add(size);
            }
        }
        Ok(())
    }

    pub fn store(&mut self, row: u32, access: &Access, lanes: &[u16]) -> Outcome<()> {
        let size = usize::from(access.bytes);
        for &lane in lanes {
            let address = self.address(row, access.offset, access.frame, lane);
            let mut at = self.pointer(access.space, address, size * access.rows.len(), lane)?;
            for &from in &access.rows {
                // SAFETY: as in `load`.
                unsafe { write(at, access.bytes, self.get(from, lane)) };
                at = at.wrapping_add(size);
            }
        }
        Ok(())
    }

    pub fn atomic(&mut self, instruction: &Instruction, atomic: &Atomic, lanes: &[u16]) -> Outcome<()> {
        let size = atomic.ty.size();
        let scalar = [(instruction.d, instruction.b)];
        let elements = if atomic.elements.is_empty() { &scalar[..] } else { &atomic.elements };
        for &lane in lanes {
            let address = self.address(instruction.a, atomic.offset, atomic.frame, lane);
            let at = self.pointer(atomic.space, address, size * elements.len(), lane)?;
            for (number, &(d, b)) in elements.iter().enumerate() {
                let at = at.wrapping_add(number * size);
                // SAFETY: `pointer` has checked bytes and alignment.
                let old = unsafe {
                    atomics::update(
                        at,
                        atomic.update,
                        atomic.ty,
                        self.get(b, lane),
                        self.get(instruction.c, lane),
                    )
                };
                if d != SINK {
                    self.set(d, lane, old);
                }
            }
        }
        Ok(())
    }

    pub fn copy_async(&mut self, instruction: &Instruction, size: Option<u32>, lanes: &[u16]) -> Outcome<()> {
        let len = instruction.p as usize;
        for &lane in lanes {
            let count = size.map_or(len, |row| (self.get(row, lane) as u32 as usize).min(len));
            let to = self.pointer(Space::Shared, self.get(instruction.a, lane), len, lane)?;
            let from = if count == 0 {
                to
            } else {
                self.pointer(Space::Global, self.get(instruction.b, lane), len, lane)?
            };
            // SAFETY: both ranges were checked; shared memory and the arena don't overlap.
            unsafe {
                if count > 0 {
                    std::ptr::copy(from, to, count);
                }
                std::ptr::write_bytes(to.add(count), 0, len - count);
            }
        }
        Ok(())
    }

    pub fn frame_address(&mut self, row: u32, offset: u64, lanes: &[u16]) {
        for &lane in lanes {
            self.set(row, lane, u64::from(self.frames[usize::from(lane)]) + offset);
        }
    }

    pub fn is_space(&mut self, instruction: &Instruction, space: Space, lanes: &[u16]) {
        for &lane in lanes {
            let window = self.get(instruction.a, lane) & !(SHARED_WINDOW - 1);
            let expected = match space {
                Space::Shared => SHARED_WINDOW,
                Space::Local => LOCAL_WINDOW,
                Space::Param => PARAM_WINDOW,
                _ => 0,
            };
            self.set(instruction.d, lane, u64::from(window == expected));
        }
    }

    pub fn clock(&mut self, instruction: &Instruction, lanes: &[u16]) {
        let nanoseconds = self.started.elapsed().as_nanos() as u64;
        for &lane in lanes {
            self.set(instruction.d, lane, if instruction.p != 0 { nanoseconds >> 32 } else { nanoseconds });
        }
    }

    /// Is there room for a frame that begins here?
    pub fn fits(&self, frame: u32) -> bool {
        !self.launch.program.recursive || (frame as usize) + 4096 < self.local_bytes
    }

    fn frame_pointer(&self, lane: u16, at: u32, len: usize) -> Option<*mut u8> {
        let end = at as usize + len;
        let start = usize::from(lane) * self.local_bytes.next_multiple_of(16);
        (end <= self.local_bytes)
            .then(|| self.local.as_ptr().cast::<u8>().wrapping_add(start + at as usize).cast_mut())
    }

    /// Copies an argument or a result. False beyond the end of local memory.
    pub fn copy_frame(&mut self, lane: u16, from: u32, to: u32, len: u32) -> bool {
        let len = len as usize;
        let (Some(from), Some(to)) = (self.frame_pointer(lane, from, len), self.frame_pointer(lane, to, len))
        else {
            return false;
        };
        // SAFETY: both ranges lie in the lane's local memory.
        unsafe { std::ptr::copy(from, to, len) };
        true
    }

    pub fn frame_value(&self, lane: u16, at: u32, len: u32) -> u64 {
        // SAFETY: `frame_pointer` has checked the range.
        self.frame_pointer(lane, at, len as usize)
            .map_or(0, |at| unsafe { read(at, len.min(8) as u8, false) })
    }

    pub fn set_frame_value(&mut self, lane: u16, at: u32, len: u32, value: u64) {
        if let Some(at) = self.frame_pointer(lane, at, len as usize) {
            // SAFETY: `frame_pointer` has checked the range.
            unsafe { write(at, len.min(8) as u8, value) };
        }
    }

    /// Bytes at a generic address; zero where nothing is.
    pub fn peek(&self, lane: u16, address: u64, len: usize) -> u64 {
        // SAFETY: `pointer` has checked the range.
        self.pointer(Space::Generic, address, len, lane).map_or(0, |at| unsafe { read(at, len as u8, false) })
    }

    /// A string at a generic address, without its end.
    pub fn text(&self, lane: u16, address: u64) -> Vec<u8> {
        let mut out = Vec::new();
        for at in address..address.saturating_add(1 << 20) {
            match self.peek(lane, at, 1) as u8 {
                0 => break,
                byte => out.push(byte),
            }
        }
        out
    }

    pub fn matrix(&mut self, matrix: &Matrix, base: usize) {
        let lanes: Vec<u16> = (base..base + super::warp::WARP)
            .map(|lane| lane as u16)
            .filter(|&lane| usize::from(lane) < self.lanes)
            .collect();
        match matrix {
            Matrix::Multiply(multiply) => {
                multiply.run(&Rows::new(&mut self.registers, self.lanes, &lanes), &lanes)
            }
            Matrix::Load { rows, address, transposed } => {
                let starts: Vec<u64> =
                    lanes.iter().map(|&lane| self.get(*address, lane) & (SHARED_WINDOW - 1)).collect();
                for (number, &to) in rows.iter().enumerate() {
                    for &lane in &lanes {
                        let (y, x) = ((usize::from(lane) % 32) / 4, usize::from(lane) % 4 * 2);
                        let element = |y: usize, x: usize| {
                            let at =
                                starts.get(number * 8 + y).map_or(u64::MAX, |start| start + 2 * x as u64);
                            self.peek(lane, SHARED_WINDOW + at, 2)
                        };
                        let (low, high) = if *transposed {
                            (element(x, y), element(x + 1, y))
                        } else {
                            (element(y, x), element(y, x + 1))
                        };
                        self.set(to, lane, low | high << 16);
                    }
                }
            }
        }
    }
}

fn illegal(space: Space, address: u64, len: usize) -> (FaultKind, String) {
    (FaultKind::IllegalAddress, format!("an access of {len} bytes at {address:#x} in {space:?} memory"))
}

/// # Safety
/// `at` is valid for this many bytes.
#[inline(always)]
unsafe fn read(at: *const u8, bytes: u8, signed: bool) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        match (bytes, signed) {
            (1, false) => u64::from(*at),
            (1, true) => i64::from(at.cast::<i8>().read()) as u64,
            (2, false) => u64::from(at.cast::<u16>().read_unaligned()),
            (2, true) => i64::from(at.cast::<i16>().read_unaligned()) as u64,
            (4, false) => u64::from(at.cast::<u32>().read_unaligned()),
            (4, true) => i64::from(at.cast::<i32>().read_unaligned()) as u64,
            _ => at.cast::<u64>().read_unaligned(),
        }
    }
}

/// # Safety
/// `at` is valid for this many bytes.
#[inline(always)]
unsafe fn write(at: *mut u8, bytes: u8, value: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        match bytes {
            1 => at.write(value as u8),
            2 => at.cast::<u16>().write_unaligned(value as u16),
            4 => at.cast::<u32>().write_unaligned(value as u32),
            _ => at.cast::<u64>().write_unaligned(value),
        }
    }
}
