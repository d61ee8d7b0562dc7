// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests with OpenCL: folders, programs and images that tests of accelerators make once per run.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The test binary's own folder for programs and images; `vendors` in it names OpenCL drivers.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME"));
        std::fs::create_dir_all(path.join("vendors")).unwrap();
        path
    })
}

/// Runs a command that must succeed.
pub fn done(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The kit's guest of this kernel with these items of `guest/add`.
pub fn image(name: &str, kernel: &str, items: &[String]) -> PathBuf {
    let places = tombolo_vm::guest::kit::places(Path::new(env!("CARGO_MANIFEST_DIR")));
    let kit = tombolo_vm::guest::kit::kit(&places, Some(kernel)).expect("the guest kit");
    let image = folder().join(name);
    let mut add = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../guest/add"));
    add.arg("--base").arg(kit.initrd.unwrap()).arg("-o").arg(&image).args(items);
    done(&mut add);
    image
}

/// A copy of a program or library without debug information, in the folder.
pub fn stripped(program: &Path, name: &str) -> String {
    let to = folder().join(name);
    done(Command::new("strip").arg("-o").args([&to, program]));
    to.display().to_string()
}

/// A program of the accelerators' tests.
pub fn program(name: &str) -> PathBuf {
    let source = format!("{}/../accel/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let program = folder().join(name);
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wno-deprecated-declarations", &source, "-o"]).arg(&program);
    done(cc.args(["-lOpenCL", "-lpthread"]));
    program
}

/// Builds the client libraries; the folder that has them.
pub fn built() -> &'static Path {
    let programs = Path::new(env!("CARGO_BIN_EXE_tombolo")).parent().unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "-q", "--locked", "--workspace", "--target-dir"]);
    build.arg(programs.parent().unwrap());
    if programs.ends_with("release") {
        build.arg("--release");
    }
    done(&mut build);
    programs
}

/// The items of `guest/add` that install the client library and make it the guest's OpenCL driver.
pub fn client_library() -> [String; 2] {
    let library = stripped(&built().join("libtombolo_opencl.so"), "libtombolo-opencl.so");
    std::fs::write(folder().join("vendors/tombolo.icd"), "/usr/lib/libtombolo-opencl.so\n").unwrap();
    let vendors = folder().join("vendors");
    [format!("{library}:/usr/lib/libtombolo-opencl.so"), format!("{}:/etc/OpenCL/vendors", vendors.display())]
}
