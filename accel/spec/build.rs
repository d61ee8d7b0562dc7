// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generates the records from the declarations.

use std::{env, fs, path::Path};

fn main() {
    println!("cargo::rerun-if-changed=opencl.api");
    let text = fs::read_to_string("opencl.api").expect("accel/spec/opencl.api can be read");
    let api = tombolo_accel_gen::parse::parse(&text).unwrap_or_else(|e| panic!("accel/spec/opencl.api: {e}"));
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("opencl.rs"), tombolo_accel_gen::wire::emit(&api))
        .expect("OUT_DIR can be written");
}
