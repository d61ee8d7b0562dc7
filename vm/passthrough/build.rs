// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes the interfaces of the IOMMU bypass from their only definition, the C header.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=linux/bypass.h");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("bypass.rs");
    bindgen::Builder::default()
        .header("linux/bypass.h")
        .allowlist_type("tbp_.*")
        .allowlist_var("TBP_.*")
        .prepend_enum_name(false)
        .derive_default(false)
        .generate_comments(false)
        .use_core()
        .generate()
        .expect("bindgen reads linux/bypass.h (package libclang-dev)")
        .write_to_file(out)
        .expect("OUT_DIR is writable");
}
