// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prints the topology that the files of /sys below `$HWLOC_FSROOT` describe, as JSON: the reader of this crate's tests. The product's reader
//! is `tombolo topology read`.

use std::process::ExitCode;

fn main() -> ExitCode {
    match tombolo_topology::read::answer() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("tombolo-topology: {e:#}");
            ExitCode::FAILURE
        }
    }
}
