// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The test device as a server's driver, and the library that forwards, each under the name that programs load.

use super::rig::{Server, folder, library};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A folder with a library of the build under the name that programs load. A copy: a confined worker sees the folder, and not where a link leads.
fn driver(which: &str, built: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let beside = std::fs::read_to_string(library().join("tombolo.icd")).expect("written by the rig");
    let folder = folder().join(which);
    std::fs::create_dir_all(&folder).expect("a folder");
    let fresh = folder.join(format!("fresh-{}", std::process::id()));
    std::fs::copy(Path::new(&beside).with_file_name(built), &fresh).expect("copied");
    std::fs::rename(&fresh, folder.join("libcuda.so.1")).expect("renamed");
    folder
}

/// The test device.
pub fn device() -> &'static Path {
    static DEVICE: OnceLock<PathBuf> = OnceLock::new();
    DEVICE.get_or_init(|| driver("cuda-device", "libtombolo_cuda_device.so"))
}

/// The library that forwards.
#[allow(dead_code, reason = "a test that speaks the wire itself needs none")]
pub fn client() -> &'static Path {
    static CLIENT: OnceLock<PathBuf> = OnceLock::new();
    CLIENT.get_or_init(|| driver("cuda-client", "libtombolo_cuda.so"))
}

/// A server whose driver is the test device.
pub fn serve(name: &str, options: &[&str]) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-accel"));
    command.env("LD_LIBRARY_PATH", device());
    Server::run(command, name, options)
}
