// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes the zone's format from its only definition, the C header.

use std::path::PathBuf;

fn main() {
    for header in ["format/tombolo_zone.h", "format/tombolo_atomic.h"] {
        println!("cargo::rerun-if-changed={header}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("format.rs");
    bindgen::Builder::default()
        .header("format/tombolo_zone.h")
        .allowlist_type("tmb_(zone_header|area|member|lock|doorbell_page)")
        .allowlist_var("TMB_.*")
        .derive_default(false)
        .generate_comments(false)
        .use_core()
        .generate()
        .expect("bindgen reads format/tombolo_zone.h (package libclang-dev)")
        .write_to_file(out)
        .expect("OUT_DIR is writable");
}
