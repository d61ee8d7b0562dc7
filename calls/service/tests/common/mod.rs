// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Objects for tests, compiled as <tombolo/service.h> says.

use std::path::{Path, PathBuf};
use std::process::Command;

const FLAGS: &str = "-O2 -Wall -Wextra -Werror -ffreestanding -fPIC -fvisibility=hidden -fno-stack-protector -fcf-protection=none -mno-avx -shared -nostdlib \
     -Wl,-Bsymbolic -Wl,--no-undefined";

/// Compiles a service of this crate.
pub fn service(source: &str, folder: &Path) -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    compile(&crate_folder.join(source), folder, &[])
}

/// Compiles one source, with more flags for the compiler.
pub fn compile(source: &Path, folder: &Path, more: &[&str]) -> PathBuf {
    let object = folder.join(source.file_stem().expect("a name")).with_extension("service");
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let output = Command::new("cc")
        .args(FLAGS.split_whitespace())
        .arg("-I")
        .arg(include)
        .args(more)
        .arg("-o")
        .args([&object, source])
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    object
}
