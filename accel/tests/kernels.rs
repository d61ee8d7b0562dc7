// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The native driver's folder for compiled kernels, of all tests that run it.

use std::path::{Path, PathBuf};

/// PoCL's linker takes a path with a space for two. The project's cache has none once its links are resolved (`guest/cache.sh`); the checkout's path
/// may have one.
pub fn folder() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let checkout = package.ancestors().find(|folder| folder.join("Cargo.lock").exists()).expect("a checkout");
    let cache = std::env::var_os("TOMBOLO_CACHE").map_or_else(|| checkout.join(".cache"), PathBuf::from);
    let kernels = cache.join("accel/kernels");
    std::fs::create_dir_all(&kernels).expect("a folder in the cache");
    kernels.canonicalize().expect("a folder in the cache")
}
