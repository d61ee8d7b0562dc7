// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The block size that fills a multiprocessor: the program's own function says how much shared memory a block of each size needs, so the search runs here.

use super::device::device;
use super::module::callable;
use crate::rt::{self, Handle, Id, Out};
use tombolo_accel_spec::cuda::{self as wire, cu};
use tombolo_accel_spec::wire::Decoder;

/// CUoccupancyB2DSize: bytes of shared memory for a block of this size.
type SharedMemory = Option<unsafe extern "C" fn(i32) -> usize>;

/// The arguments of an occupancy query.
struct Question {
    function: Handle,
    shared: SharedMemory,
    /// Bytes of shared memory where there is no function.
    bytes: usize,
    /// The largest block; 0: the device's.
    limit: i32,
    flags: u32,
}

/// A number that a waiting call answers.
fn number(reply: &[u8]) -> Result<i32, i32> {
    Decoder::new(reply).i32().map_err(|_| wire::LOST)
}

fn search(question: &Question, grid: &Out<i32>, block: &Out<i32>) -> Result<(), i32> {
    let (object, _) = callable(question.function)?;
    let (func, current) = (object.id(), rt::current());
    let mut ordinal = 0;
    // SAFETY: room for a number.
    super::result(unsafe { super::cuCtxGetDevice(Out::of(&raw mut ordinal)) })?;
    let warp = device(ordinal)?.attribute(cu::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?.max(1);
    let processors = device(ordinal)?.attribute(cu::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let most =
        wire::FuncGetAttribute { attrib: cu::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, hfunc: func, current };
    let most = number(&rt::call(&most)?)?;
    let most = if question.limit > 0 { most.min(question.limit) } else { most };
    let (mut best, mut best_blocks, mut best_size) = (0, 0, 0);
    let sizes = (1..=most / warp).rev().map(|warps| warps * warp);
    for size in (most % warp != 0).then_some(most).into_iter().chain(sizes) {
        let bytes = match question.shared {
            // SAFETY: the program passed this function for this purpose.
            Some(shared) => unsafe { shared(size) },
            None => question.bytes,
        };
        let record = wire::OccupancyMaxActiveBlocksPerMultiprocessorWithFlags {
            func,
            blockSize: size,
            dynamicSMemSize: bytes as u64,
            flags: question.flags,
            current,
        };
        let blocks = number(&rt::call(&record)?)?;
        if blocks * size > best {
            (best, best_blocks, best_size) = (blocks * size, blocks, size);
        }
    }
    grid.set(best_blocks * processors)?;
    block.set(best_size)
}

super::exported! {
    fn cuOccupancyMaxPotentialBlockSize(grid: Out<i32>, block: Out<i32>, function: Handle, shared: SharedMemory, bytes: usize, limit: i32) {
        search(&Question { function, shared, bytes, limit, flags: 0 }, &grid, &block)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(grid: Out<i32>, block: Out<i32>, function: Handle, shared: SharedMemory, bytes: usize, limit: i32, flags: u32) {
        search(&Question { function, shared, bytes, limit, flags }, &grid, &block)
    }
}
