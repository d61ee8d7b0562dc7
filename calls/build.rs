// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes the format of a zone's CALLS area from its only definition, the C header.

use std::path::PathBuf;

fn main() {
    for header in ["tombolo_calls.h", "tombolo_zone.h", "tombolo_atomic.h"] {
        println!("cargo::rerun-if-changed=../zone/format/{header}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("format.rs");
    bindgen::Builder::default()
        .header("../zone/format/tombolo_calls.h")
        .allowlist_type("tmb_calls_(header|channel|info)")
        .allowlist_var("TMB_CALLS_.*")
        .derive_default(false)
        .generate_comments(false)
        .use_core()
        .generate()
        .expect("bindgen reads zone/format/tombolo_calls.h (package libclang-dev)")
        .write_to_file(out)
        .expect("OUT_DIR is writable");
}
