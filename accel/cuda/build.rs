// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generates the C functions from the declarations.

use std::{env, fs, path::Path};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let api = tombolo_accel_gen::parse::parse(tombolo_accel_spec::CUDA_API)
        .unwrap_or_else(|e| panic!("accel/spec/cuda.api: {e}"));
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("stubs.rs"), tombolo_accel_gen::client::emit(&api))
        .expect("OUT_DIR can be written");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
