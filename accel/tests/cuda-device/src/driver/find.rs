// SPDX-License-Identifier: Apache-2.0 OR MIT
//! cuGetProcAddress, cuGetExportTable, names of errors. What NVIDIA's runtime asks of any libcuda.so.1 is in `accel/cuda/tables`.

use super::exports::{cuDevicePrimaryCtxRetain, cuModuleLoadData, symbols};
use super::{Handle, INVALID_VALUE, NOT_FOUND, Result, context, device, put};
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::sync::LazyLock;
use tombolo_accel_spec::cuda::CODES;
use tombolo_cuda_tables::{proof, tables};

const SYMBOL_NOT_FOUND: i32 = 1;
const VERSION_NOT_SUFFICIENT: i32 = 2;
const PER_THREAD_DEFAULT_STREAM: u64 = 2;

struct Symbol {
    since: i32,
    /// Its default stream is the calling thread's.
    own_default: bool,
    address: usize,
}

/// All functions by their names without suffixes.
static SYMBOLS: LazyLock<HashMap<&str, Vec<Symbol>>> = LazyLock::new(|| {
    let mut out: HashMap<&str, Vec<Symbol>> = HashMap::new();
    for (name, since, address) in symbols() {
        let plain = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
        let own_default = plain.len() < name.len();
        let base = match plain.rsplit_once("_v") {
            Some((base, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => base,
            _ => plain,
        };
        out.entry(base).or_default().push(Symbol { since, own_default, address });
    }
    out
});

/// The newest function of this name that a program of this version knows.
fn find(name: &str, version: i32, own_default: bool) -> std::result::Result<usize, i32> {
    let named = SYMBOLS.get(name).ok_or(SYMBOL_NOT_FOUND)?;
    let fitting =
        named.iter().filter(|symbol| symbol.since <= version && (own_default || !symbol.own_default));
    fitting
        .max_by_key(|symbol| (symbol.own_default, symbol.since))
        .map(|symbol| symbol.address)
        .ok_or(VERSION_NOT_SUFFICIENT)
}

/// With `status` a missing function is no error.
pub fn proc_address(name: &str, to: *mut usize, version: i32, flags: u64, status: *mut i32) -> Result {
    let found = find(name, version, flags & PER_THREAD_DEFAULT_STREAM != 0);
    if let (Err(_), Ok(log)) = (found, std::env::var("TOMBOLO_CUDA_DEVICE_MISSING")) {
        missing(&log, name, version);
    }
    put(to, found.unwrap_or(0))?;
    super::offer(status, found.err().unwrap_or(0));
    if found.is_ok() || !status.is_null() { Ok(()) } else { Err(NOT_FOUND) }
}

/// A line in the file that the variable names, for who extends this device.
fn missing(log: &str, name: &str, version: i32) {
    use std::io::Write as _;
    let file = std::fs::OpenOptions::new().create(true).append(true).open(log);
    if let Err(error) = file.and_then(|mut file| writeln!(file, "{name} {version}")) {
        eprintln!("{log}: {error}");
    }
}

fn version() -> u32 {
    device::VERSION as u32
}

fn devices() -> Vec<proof::Device> {
    (0..device::count()).map(|_| proof::Device { uuid: device::UUID, place: [0, 1, 0] }).collect()
}

unsafe extern "C" fn retain(to: *mut *mut c_void, number: i32) -> i32 {
    cuDevicePrimaryCtxRetain(to.cast::<Handle>(), number)
}

unsafe extern "C" fn load(to: *mut *mut c_void, image: *const c_void) -> i32 {
    cuModuleLoadData(to.cast::<Handle>(), image.cast())
}

pub fn export_table(to: *mut *const c_void, uuid: *const [u8; 16]) -> Result {
    let uuid = super::array(uuid, 1).first().copied().ok_or(INVALID_VALUE)?;
    let driver = tables::Driver { version, devices, context: context::current_handle, retain, load };
    let found = tables::find(uuid, driver);
    put(to, found)?;
    if found.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
}

/// The name of a code, or its words.
pub fn error_text(code: i32, to: *mut *const c_char, words: bool) -> Result {
    static TEXTS: LazyLock<HashMap<i32, [CString; 2]>> = LazyLock::new(|| {
        let both = |name: &str| {
            [name.to_owned(), name.trim_start_matches("CUDA_ERROR_").to_lowercase().replace('_', " ")]
        };
        CODES
            .iter()
            .map(|&(code, name)| (code, both(name).map(|text| CString::new(text).unwrap_or_default())))
            .collect()
    });
    let found = TEXTS.get(&code);
    put(to, found.map_or(std::ptr::null(), |both| both[usize::from(words)].as_ptr()))?;
    if found.is_some() { Ok(()) } else { Err(INVALID_VALUE) }
}
