// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How NVIDIA's runtime finds its functions in a libcuda.so.1. Everything here is the same for any such library: the one that forwards, and the
//! device for tests.
//!
//! - [`find`]: which symbol a name stands for, by version and by default stream (cuGetProcAddress).
//! - [`tables`]: the export tables (cuGetExportTable) that the runtimes of CUDA 12 and 13 ask for. What is known of them comes from observing these
//!   runtimes, and from ZLUDA's description.
//! - [`storage`]: values that the runtime keeps with a context.
//! - [`proof`]: the number by which a runtime makes sure that tables and devices are the driver's.

pub mod proof;
pub mod storage;
pub mod tables;

use tombolo_accel_spec::cuda::{SYMBOLS, cu};

/// The symbol that a program means with a name, which it wrote for a version of the API. `threaded`: the one whose default stream is the calling thread's, where
/// there is one.
///
/// # Errors
/// A value of CUdriverProcAddressQueryResult.
pub fn find(name: &str, version: u32, threaded: bool) -> Result<&'static str, u32> {
    let named = SYMBOLS.iter().filter(|(_, base, ..)| *base == name);
    let fitting =
        named.clone().filter(|(_, _, since, of_thread)| *since <= version && (threaded || !of_thread));
    match fitting.max_by_key(|(_, _, since, of_thread)| (*of_thread, *since)) {
        Some((symbol, ..)) => Ok(symbol),
        None if named.count() > 0 => Err(cu::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT),
        None => Err(cu::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_the_newest_symbol_that_its_program_knows() {
        assert_eq!(find("cuMemAlloc", 12090, false), Ok("cuMemAlloc_v2"));
        assert_eq!(find("cuMemAlloc", 2000, false), Ok("cuMemAlloc"));
        assert_eq!(find("cuCtxCreate", 12000, false), Ok("cuCtxCreate_v3"));
        assert_eq!(find("cuCtxCreate", 13050, false), Ok("cuCtxCreate_v4"));
        assert_eq!(find("cuMemcpyHtoD", 12090, true), Ok("cuMemcpyHtoD_v2_ptds"));
        assert_eq!(find("cuStreamSynchronize", 12090, true), Ok("cuStreamSynchronize_ptsz"));
        assert_eq!(find("cuMemAlloc", 12090, true), Ok("cuMemAlloc_v2"));
    }

    #[test]
    fn a_name_that_is_newer_or_unknown_is_told_apart() {
        let newer = cu::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        assert_eq!(find("cuLibraryLoadData", 11000, false), Err(newer));
        assert_eq!(find("cuNothing", 13050, false), Err(cu::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND));
    }
}
