// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program that `tombolo lab` executes; also the agent of the labs that it boots.

use std::process::ExitCode;

use tombolo_lab::cli::{Arguments, run};

fn main() -> ExitCode {
    tombolo_program::run(run as fn(Arguments) -> _)
}
