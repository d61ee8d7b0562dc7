// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the device says of itself. Compute capability 9.0: NVIDIA's compilers emit PTX for it that this device executes.

use super::{INVALID_DEVICE, INVALID_VALUE, NOT_INITIALIZED, OUT_OF_MEMORY, Result};
use crate::machine::space::Arena;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

pub const NAME: &str = "Tombolo test device (CPU)";
pub const UUID: [u8; 16] = *b"tombolo-cuda-dev";
/// Of the API: 13.0's functions and what 12.x programs use.
pub const VERSION: i32 = 13050;
pub const MEMORY: usize = 8 << 30;
/// Address space: device memory and host memory that kernels reach.
const RESERVED: usize = 32 << 30;
pub const SHARED_PER_BLOCK: i32 = 48 << 10;
pub const SHARED_OPTIN: i32 = 227 << 10;
pub const PROCESSORS: i32 = 4;
pub const THREADS_PER_PROCESSOR: i32 = 2048;

static INITIALIZED: AtomicBool = AtomicBool::new(false);

pub fn init(flags: u32) -> Result {
    if flags != 0 {
        return Err(INVALID_VALUE);
    }
    arena()?;
    INITIALIZED.store(true, Ordering::Relaxed);
    Ok(())
}

pub fn initialized() -> Result {
    if INITIALIZED.load(Ordering::Relaxed) { Ok(()) } else { Err(NOT_INITIALIZED) }
}

pub fn arena() -> Result<&'static Arena> {
    static ARENA: OnceLock<Option<Arena>> = OnceLock::new();
    ARENA.get_or_init(|| Arena::new(RESERVED).ok()).as_ref().ok_or(OUT_OF_MEMORY)
}

/// CUDA_VISIBLE_DEVICES hides the device as NVIDIA's driver would.
pub fn count() -> i32 {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => {
            let first = list.split(',').next().unwrap_or_default().trim();
            i32::from(first == "0" || first.starts_with("GPU-"))
        }
        Err(_) => 1,
    }
}

pub fn check(device: i32) -> Result {
    initialized()?;
    if (0..count()).contains(&device) { Ok(()) } else { Err(INVALID_DEVICE) }
}

/// CUdevice_attribute by number (cuda.h); 0 for what the device does not have.
pub fn attribute(number: i32) -> Result<i32> {
    Ok(match number {
        1 => 1024,      // threads per block
        2 | 3 => 1024,  // block x, y
        4 => 64,        // block z
        5 => i32::MAX,  // grid x
        6 | 7 => 65535, // grid y, z
        8 => SHARED_PER_BLOCK,
        9 => 64 << 10,       // constant memory
        10 => 32,            // warp
        11 => i32::MAX,      // pitch
        12 | 82 => 64 << 10, // registers per block, per processor
        13 => 1_000_000,     // clock in kHz
        14 | 51 => 512,      // alignment of textures and surfaces
        15 | 31 => 1,        // overlap, concurrent kernels
        16 => PROCESSORS,
        17 | 18 | 20 | 35 => 0, // no timeout, not integrated, default compute mode, no TCC
        19 | 41 | 99 => 1,      // maps host memory, unified addressing, host registration
        33 => 1,                // PCI bus
        34 | 50 => 0,           // PCI device and domain
        36 => 1_000_000,        // memory clock
        37 => 64,               // bus width
        38 => 1 << 20,          // second-level cache
        39 => THREADS_PER_PROCESSOR,
        40 => 2, // copy engines
        75 => 9,
        76 => 0,
        78 => 1,         // stream priorities
        79 | 80 => 1,    // caches for global and local memory
        81 => 228 << 10, // shared memory per processor
        83 | 89 => 1,    // managed memory, from host and device at once
        85 => 0,
        86 => 1,      // native host atomics
        91 | 90 => 1, // host pointers of registered memory, compute preemption
        95 => 1,      // cooperative launches
        97 => SHARED_OPTIN,
        101 => 1,    // direct access from the host
        106 => 32,   // blocks per processor
        111 => 1024, // reserved shared memory per block
        115 => 1,    // pools
        129 => 1,    // unified function pointers
        known if (1..=160).contains(&known) => 0,
        _ => return Err(INVALID_VALUE),
    })
}
