// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compiles the C core, which is also libtombolo-sync.

fn main() {
    for file in [
        "sync.c",
        "libtombolo-sync.h",
        "../format/tombolo_sync.h",
        "../format/tombolo_zone.h",
        "../format/tombolo_atomic.h",
    ] {
        println!("cargo::rerun-if-changed={file}");
    }
    cc::Build::new()
        .file("sync.c")
        .include(".")
        .include("../format")
        .flag("-std=gnu11")
        .opt_level(2)
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .compile("tombolo-sync");
}
