// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program that `tombolo bench` executes.

use std::process::ExitCode;

use tombolo_bench::cli::{Arguments, run};

fn main() -> ExitCode {
    tombolo_program::run(run as fn(Arguments) -> _)
}
