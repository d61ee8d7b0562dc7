// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compiles the file system's core for user space and takes its interface and format from its headers.

use std::path::PathBuf;

fn main() {
    let core = PathBuf::from("../core");
    let mut sources: Vec<PathBuf> = std::fs::read_dir(&core)
        .expect("files/core is part of the repository")
        .map(|entry| entry.expect("a readable directory").path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "c"))
        .collect();
    sources.sort();
    println!("cargo::rerun-if-changed=../core");
    println!("cargo::rerun-if-changed=../../zone/format");
    println!("cargo::rerun-if-changed=os");
    let core = || {
        let mut build = cc::Build::new();
        build
            .files(&sources)
            .include("os")
            .include("../core")
            .include("../../zone/format")
            .std("gnu11")
            .opt_level(2)
            .flag("-fno-strict-aliasing")
            .warnings(true)
            .extra_warnings(true)
            .flag("-Wno-unused-parameter");
        build
    };
    core().file("os/os.c").file("os/persist.c").compile("tfs");
    // For tests/prefixes and tests/explore, which record every access: they define the functions of the
    // instrumentation.
    core()
        .flag("-fsanitize=thread")
        .flag_if_supported("-Wno-tsan")
        .define("memcpy", "recorded_memcpy")
        .define("memset", "recorded_memset")
        .cargo_metadata(false)
        .compile("tfs_recorded");
    // The mutator that the random tests share with the fuzzer; programs that don't use it don't link it.
    println!("cargo::rerun-if-changed=../fuzz/mutate.c");
    println!("cargo::rerun-if-changed=../fuzz/mutate.h");
    cc::Build::new()
        .file("../fuzz/mutate.c")
        .include("../core")
        .include("../../zone/format")
        .std("gnu11")
        .compile("tfs_mutate");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("sys.rs");
    bindgen::Builder::default()
        .header("os/host.h")
        .clang_args(["-I../core", "-I../../zone/format", "-Ios"])
        .allowlist_function("tfs_.*")
        .allowlist_type("(tfs|tmb)_.*")
        .allowlist_var("(TFS|TMB)_.*")
        .blocklist_function("tfs_os_.*")
        .derive_default(true)
        .generate_comments(false)
        .layout_tests(true)
        .use_core()
        .generate()
        .expect("bindgen reads files/core/tfs.h (package libclang-dev)")
        .write_to_file(out)
        .expect("OUT_DIR is writable");
}
