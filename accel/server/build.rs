// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generates the decoders and the table of native functions from the declarations.

use std::{env, fs, path::Path};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    for name in ["opencl", "cuda"] {
        // Not by the crate of records: a fuzzer instruments that, and no program that runs while it builds.
        let declarations = format!("../spec/{name}.api");
        println!("cargo::rerun-if-changed={declarations}");
        let text = fs::read_to_string(&declarations).unwrap_or_else(|e| panic!("{declarations}: {e}"));
        let api = tombolo_accel_gen::parse::parse(&text).unwrap_or_else(|e| panic!("{declarations}: {e}"));
        fs::write(Path::new(&out).join(format!("{name}_server.rs")), tombolo_accel_gen::server::emit(&api))
            .expect("OUT_DIR can be written");
    }
}
