// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes what services and the kernels' modules agree on from its only definitions, the C headers.

use std::path::PathBuf;

fn main() {
    for header in ["include/tombolo/service.h", "linux/visit.h"] {
        println!("cargo::rerun-if-changed={header}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("format.rs");
    bindgen::Builder::default()
        .header("include/tombolo/service.h")
        .header("linux/visit.h")
        .allowlist_type("tombolo_visit|tmb_(visit|service)_.*")
        .allowlist_var("TMB_(VISIT|SERVICE)_.*")
        .allowlist_function("nothing")
        .derive_default(false)
        .clang_macro_fallback()
        .generate_comments(false)
        .use_core()
        .generate()
        .expect("bindgen reads the headers (package libclang-dev)")
        .write_to_file(out)
        .expect("OUT_DIR is writable");
}
