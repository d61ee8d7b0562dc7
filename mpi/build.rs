// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds the node as a static program, which the library carries: it runs in guests of any distribution. rustc is asked directly because cargo can't link one
//! package of a workspace statically and the others not.

use std::path::Path;
use std::process::Command;

fn main() {
    let source = Path::new("node/src");
    println!("cargo::rerun-if-changed={}", source.display());
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let rustc = std::env::var_os("RUSTC").expect("cargo sets RUSTC");
    let target = std::env::var("TARGET").expect("cargo sets TARGET");
    let mut command = Command::new(&rustc);
    command.arg(source.join("main.rs")).args(["--edition", "2024", "--crate-name", "node", "--target"]);
    command.arg(target).args(["-C", "target-feature=+crt-static", "-C", "opt-level=2", "-C", "panic=abort"]);
    command.args(["-C", "strip=symbols", "-o"]).arg(Path::new(&out).join("node"));
    let status = command.status().expect("rustc can be run");
    assert!(status.success(), "the node can't be linked statically; install the package libc6-dev");
}
