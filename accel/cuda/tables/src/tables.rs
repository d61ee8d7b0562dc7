// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The export tables: arrays of functions that a runtime finds by a UUID. Most begin with their size in bytes. A place whose function is not known has one that
//! answers CUDA_ERROR_NOT_SUPPORTED.

use crate::proof::{self, Device, Question};
use crate::storage::{self, Destructor};
use std::ffi::c_void;
use std::sync::OnceLock;
use tombolo_accel_spec::cuda::cu;

/// What the tables need of the library that they are in.
#[derive(Clone, Copy)]
pub struct Driver {
    /// cuDriverGetVersion
    pub version: fn() -> u32,
    pub devices: fn() -> Vec<Device>,
    /// The current context of the calling thread, as programs see it; 0: none.
    pub context: fn() -> usize,
    /// cuDevicePrimaryCtxRetain
    pub retain: unsafe extern "C" fn(*mut *mut c_void, i32) -> i32,
    /// cuModuleLoadData
    pub load: unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> i32,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

fn driver() -> &'static Driver {
    DRIVER.get().expect("a table is only found after find() has set it")
}

/// A table whose address is what is asked for.
#[repr(transparent)]
struct Table<const N: usize>([*const c_void; N]);

// SAFETY: addresses of functions, never written.
unsafe impl<const N: usize> Sync for Table<N> {}

/// A table of known functions at their places, which begins with its size.
const fn sized<const N: usize>(known: &[(usize, *const c_void)]) -> Table<N> {
    let mut table = [not_supported as *const c_void; N];
    table[0] = std::ptr::without_provenance(N * size_of::<usize>());
    let mut i = 0;
    while i < known.len() {
        table[known[i].0] = known[i].1;
        i += 1;
    }
    Table(table)
}

extern "C" fn not_supported() -> i32 {
    cu::CUDA_ERROR_NOT_SUPPORTED
}

static RUNTIME: Table<13> = sized(&[
    (1, module_load as *const c_void),
    (2, primary_context as *const c_void),
    (6, module_load as *const c_void),
    (7, nothing as *const c_void),
    (8, module_load_image as *const c_void),
    (12, ready as *const c_void),
]);
static TOOLS_STORAGE: Table<4> = sized(&[]);
static TOOLS_HOOKS: Table<7> =
    sized(&[(2, first_buffer as *const c_void), (6, second_buffer as *const c_void)]);
/// This one has no size.
static STORAGE: Table<4> = Table([
    storage_put as *const c_void,
    storage_delete as *const c_void,
    storage_get as *const c_void,
    not_supported as *const c_void,
]);
static CHECKS: Table<4> = sized(&[(2, context_check as *const c_void), (3, ready as *const c_void)]);
static PROOF: Table<3> = sized(&[(1, prove as *const c_void)]);
/// Of the runtimes of CUDA 13, which look whether it is there, and have called nothing of it so far.
static LATER: Table<95> = sized(&[]);

/// The table of a UUID; null: there is none.
pub fn find(uuid: [u8; 16], driver: Driver) -> *const c_void {
    DRIVER.get_or_init(|| driver);
    match u128::from_be_bytes(uuid) {
        0x6bd5fb6c_5bf4_e74a_8987_d93912fd9df9 => RUNTIME.0.as_ptr().cast(),
        0x42d85a81_23f6_cb47_8298_f6e78a3aecdc => TOOLS_STORAGE.0.as_ptr().cast(),
        0xa094798c_2e74_2e74_93f2_0800200c0a66 => TOOLS_HOOKS.0.as_ptr().cast(),
        0xc693336e_1121_df11_a8c3_68f355d89593 => STORAGE.0.as_ptr().cast(),
        0x263e8860_7cd2_6143_92f6_bbd5006dfa7e => CHECKS.0.as_ptr().cast(),
        0xd4082055_bde6_704b_8d34_ba123c66e1f2 => PROOF.0.as_ptr().cast(),
        0x21318c60_9714_3248_8ca6_41ff7324c8f2 => LATER.0.as_ptr().cast(),
        _ => std::ptr::null(),
    }
}

unsafe extern "C" fn module_load(module: *mut *mut c_void, image: *const c_void) -> i32 {
    // SAFETY: as the runtime says: room for a handle, and a fat binary.
    unsafe { (driver().load)(module, image) }
}

unsafe extern "C" fn module_load_image(image: *const c_void, module: *mut *mut c_void) -> i32 {
    // SAFETY: as above.
    unsafe { (driver().load)(module, image) }
}

unsafe extern "C" fn primary_context(context: *mut *mut c_void, device: i32) -> i32 {
    // SAFETY: room for a handle, as the runtime says.
    unsafe { (driver().retain)(context, device) }
}

extern "C" fn nothing() {}

/// Answers 0 for the entries by which the runtime asks whether something is still to be done.
extern "C" fn ready() -> i32 {
    0
}

/// Room that the runtime tells tools of: none looks at it here.
fn buffer(room: &'static [usize], address: *mut *const c_void, len: *mut usize) {
    if !address.is_null() && !len.is_null() {
        // SAFETY: room for an address and a number, as the runtime says.
        unsafe {
            address.write(room.as_ptr().cast());
            len.write(room.len());
        }
    }
}

static ROOM: [usize; 1024] = [0; 1024];

extern "C" fn first_buffer(address: *mut *const c_void, len: *mut usize) {
    buffer(&ROOM, address, len);
}

extern "C" fn second_buffer(address: *mut *const c_void, len: *mut usize) {
    buffer(&ROOM[..14], address, len);
}

fn or_current(context: usize) -> usize {
    if context == 0 { (driver().context)() } else { context }
}

extern "C" fn storage_put(context: usize, key: usize, value: usize, destructor: Option<Destructor>) -> i32 {
    storage::put(or_current(context), key, value, destructor);
    cu::CUDA_SUCCESS
}

extern "C" fn storage_delete(context: usize, key: usize) -> i32 {
    if storage::delete(or_current(context), key) { cu::CUDA_SUCCESS } else { cu::CUDA_ERROR_INVALID_HANDLE }
}

unsafe extern "C" fn storage_get(value: *mut usize, context: usize, key: usize) -> i32 {
    match storage::get(or_current(context), key) {
        Some(found) if !value.is_null() => {
            // SAFETY: room for a value, as the runtime says.
            unsafe { value.write(found) };
            cu::CUDA_SUCCESS
        }
        _ => cu::CUDA_ERROR_INVALID_HANDLE,
    }
}

unsafe extern "C" fn context_check(_context: usize, result: *mut u32, _more: *mut *const c_void) -> i32 {
    if !result.is_null() {
        // SAFETY: room for a number, as the runtime says.
        unsafe { result.write(0) };
    }
    cu::CUDA_SUCCESS
}

unsafe extern "C" fn prove(version: u32, seconds: u64, result: *mut [u8; 16]) -> i32 {
    if result.is_null() {
        return cu::CUDA_ERROR_INVALID_VALUE;
    }
    let address = |p: *const c_void| p as u64;
    let question = Question {
        version,
        seconds,
        driver_version: (driver().version)(),
        process: std::process::id(),
        // SAFETY: tells this thread's id, of which the lower half counts.
        thread: unsafe { libc::pthread_self() } as u32,
        addresses: [
            address(RUNTIME.0.as_ptr().cast()),
            address(PROOF.0.as_ptr().cast()),
            address(prove as *const c_void),
        ],
    };
    // SAFETY: room for 16 bytes, as the runtime says.
    unsafe { result.write(proof::answer(&question, &(driver().devices)())) };
    cu::CUDA_SUCCESS
}
