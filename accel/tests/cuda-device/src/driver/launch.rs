// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Launches: arguments are read when a kernel is launched, its fault is the context's. What kernels print goes to the program's standard output when
//! somebody waits for them.

use super::module::{FUNCTIONS, Function};
use super::stream::resolve;
use super::work::Work;
use super::{
    ASSERT, Code, Handle, ILLEGAL_ADDRESS, INVALID_VALUE, LAUNCH_FAILED, MISALIGNED_ADDRESS, NOT_SUPPORTED,
    OUT_OF_MEMORY, Result, STACK_ERROR, context, device, lock,
};
use crate::machine::block::{Fault, FaultKind, Launch};
use crate::machine::grid;
use crate::machine::program::Program;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A kernel with everything that it needs.
#[derive(Clone)]
pub struct Kernel {
    pub function: Handle,
    pub program: Arc<Program>,
    pub shape: Shape,
    pub parameters: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub cooperative: bool,
}

/// What printf of all kernels wrote since the last flush.
static PRINTED: Mutex<Vec<u8>> = Mutex::new(Vec::new());

unsafe extern "C" {
    static stdout: *mut libc::FILE;
}

/// Writes what kernels have printed to the program's own stdout, so that it mixes with the program's words in order.
pub fn flush() {
    let text = std::mem::take(&mut *lock(&PRINTED));
    if !text.is_empty() {
        // SAFETY: C's own stream, which is always open or safely broken.
        unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stdout) };
    }
}

/// Reads the arguments, from pointers to each or from a buffer.
///
/// # Safety
/// `arguments` and `extra` are as cuLaunchKernel says.
unsafe fn arguments(
    program: &Program,
    arguments: *const *const c_void,
    extra: *const *const c_void,
) -> Result<Vec<u8>> {
    let mut out = vec![0u8; program.parameter_bytes];
    if !extra.is_null() {
        let (mut buffer, mut size, mut at) = (std::ptr::null::<u8>(), 0usize, extra);
        // SAFETY: pairs of a key (1: buffer, 2: pointer to its size) and a value, up to a key of 0.
        unsafe {
            while !(*at).is_null() {
                match *at as usize {
                    1 => buffer = (*at.add(1)).cast(),
                    2 => size = *(*at.add(1)).cast::<usize>(),
                    _ => return Err(INVALID_VALUE),
                }
                at = at.add(2);
            }
            if buffer.is_null() && size > 0 {
                return Err(INVALID_VALUE);
            }
            if !buffer.is_null() {
                std::ptr::copy_nonoverlapping(buffer, out.as_mut_ptr(), size.min(out.len()));
            }
        }
        return Ok(out);
    }
    if arguments.is_null() && !program.parameters.is_empty() {
        return Err(INVALID_VALUE);
    }
    for (at, parameter) in program.parameters.iter().enumerate() {
        // SAFETY: one pointer for each parameter, to as many bytes as it has.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (*arguments.add(at)).cast::<u8>(),
                out.as_mut_ptr().add(parameter.offset),
                parameter.size,
            )
        };
    }
    Ok(out)
}

/// Checks shape and arguments.
///
/// # Safety
/// As `arguments`.
pub unsafe fn prepare(
    handle: Handle,
    shape: Shape,
    values: *const *const c_void,
    extra: *const *const c_void,
) -> Result<Kernel> {
    let function: Arc<Function> = FUNCTIONS.get(handle)?;
    let program = function.program()?;
    let threads = shape.block.iter().map(|&size| u64::from(size)).product::<u64>();
    if shape.grid.contains(&0)
        || threads == 0
        || threads > u64::from(program.max_threads)
        || shape.block[2] > 64
    {
        return Err(INVALID_VALUE);
    }
    if program.required_threads.is_some_and(|required| required != shape.block) {
        return Err(INVALID_VALUE);
    }
    if i64::from(shape.shared) > i64::from(function.attribute(8)?) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let parameters = unsafe { arguments(&program, values, extra) }?;
    Ok(Kernel { function: handle, program, shape, parameters })
}

/// # Safety
/// As `arguments`.
pub unsafe fn launch(
    handle: Handle,
    shape: Shape,
    stream: Handle,
    values: *const *const c_void,
    extra: *const *const c_void,
) -> Result {
    let (context, stream) = resolve(stream)?;
    context.healthy()?;
    // SAFETY: the caller's promise.
    let kernel = unsafe { prepare(handle, shape, values, extra) }?;
    stream.submit(&context, Work::Kernel(Arc::new(kernel)))
}

fn code(fault: &Fault) -> Code {
    match fault.kind {
        FaultKind::IllegalAddress => ILLEGAL_ADDRESS,
        FaultKind::Misaligned => MISALIGNED_ADDRESS,
        FaultKind::Trap | FaultKind::Deadlock => LAUNCH_FAILED,
        FaultKind::Assert => ASSERT,
        FaultKind::StackOverflow => STACK_ERROR,
        FaultKind::Unsupported => NOT_SUPPORTED,
    }
}

/// Kernels end at once where TOMBOLO_CUDA_DEVICE_COMPUTE is `off`: what is left of a program's time is that of its calls.
fn computes_nothing() -> bool {
    static OFF: OnceLock<bool> = OnceLock::new();
    *OFF.get_or_init(|| std::env::var_os("TOMBOLO_CUDA_DEVICE_COMPUTE").is_some_and(|mode| mode == "off"))
}

impl Kernel {
    pub fn execute(&self) -> Result {
        if computes_nothing() {
            return Ok(());
        }
        static GRIDS: AtomicU64 = AtomicU64::new(1);
        let print = |text: Vec<u8>| lock(&PRINTED).extend(text);
        let arena = device::arena()?;
        let workspace = if self.shape.cooperative { arena.allocate(8, 8).ok_or(OUT_OF_MEMORY)? } else { 0 };
        let launch = Launch {
            program: &self.program,
            arena,
            grid: self.shape.grid,
            block: self.shape.block,
            dynamic_shared: self.shape.shared as usize,
            parameters: &self.parameters,
            grid_id: GRIDS.fetch_add(1, Ordering::Relaxed),
            workspace,
            print: &print,
        };
        let outcome = grid::run(&launch, self.shape.cooperative);
        if workspace != 0 {
            arena.release(workspace);
        }
        outcome.map_err(|fault| {
            eprintln!("{}: {}", device::NAME, fault.message);
            code(&fault)
        })
    }
}

/// How many blocks of a function run at once on a processor.
pub fn occupancy(handle: Handle, block: i32, shared: usize) -> Result<i32> {
    context::current()?;
    let function = FUNCTIONS.get(handle)?;
    if block <= 0 {
        return Err(INVALID_VALUE);
    }
    if block > function.attribute(0)? {
        return Ok(0);
    }
    let bytes = function.attribute(1)? as usize + shared + 1024;
    let by_threads = device::THREADS_PER_PROCESSOR / (block as u32).next_multiple_of(32) as i32;
    Ok(by_threads.min(((228 << 10) / bytes) as i32).min(32))
}
