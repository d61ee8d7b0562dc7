// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The soak of `tombolo bench net --soak-frames` without the rest of that program: `soak SWITCH FRAMES SEED`, where SWITCH is
//! the `tombolo-switch` that is killed under load.

use std::process::ExitCode;
use std::time::Duration;

use tombolo_net_load::soak::{Plan, Until, run};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [program, frames, seed] = &args[..] else {
        eprintln!("usage: soak SWITCH FRAMES SEED");
        return ExitCode::FAILURE;
    };
    let (Ok(frames), Ok(seed)) = (frames.parse(), seed.parse()) else {
        eprintln!("FRAMES and SEED are numbers");
        return ExitCode::FAILURE;
    };
    let plan = Plan {
        program: program.into(),
        arguments: vec!["run".into()],
        until: Until::Frames(frames),
        round: Duration::from_secs(10),
        seed,
    };
    let told = run(&plan, |tally| {
        println!("{tally}");
        Ok(())
    });
    match told {
        Ok(tally) if tally.unexplained() == 0 => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(err) => {
            eprintln!("{err:#}");
            ExitCode::FAILURE
        }
    }
}
