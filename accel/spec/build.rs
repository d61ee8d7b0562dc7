// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generates the records from the declarations.

use std::{env, fs, path::Path};

fn main() {
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    for name in ["opencl", "cuda"] {
        let declarations = format!("{name}.api");
        println!("cargo::rerun-if-changed={declarations}");
        let text =
            fs::read_to_string(&declarations).unwrap_or_else(|e| panic!("accel/spec/{declarations}: {e}"));
        let api = tombolo_accel_gen::parse::parse(&text)
            .unwrap_or_else(|e| panic!("accel/spec/{declarations}: {e}"));
        fs::write(Path::new(&out).join(format!("{name}.rs")), tombolo_accel_gen::wire::emit(&api))
            .expect("OUT_DIR can be written");
    }
}
