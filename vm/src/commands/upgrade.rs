// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo upgrade`

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;

use crate::commands::cli::File;
use crate::commands::client::{self, OnInterrupt, Outcome, Progress};
use crate::project::control::Request;
use crate::project::peer::{self, Peer};
use crate::project::state;

/// `tombolo upgrade`
#[derive(Args, Debug)]
pub struct Options {
    /// The compose file
    #[command(flatten)]
    file: File,
    /// All projects of this user that are up
    #[arg(short, long)]
    all: bool,
    /// Go on as this program [default: the one that this command is]
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    /// Time for running commands in VMs, and for starts and stops of VMs, to end
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    wait: u64,
}

/// Has supervisors go on as another program.
///
/// # Errors
/// Why one did not; its project runs on as it did.
pub fn run(options: Options, json: bool) -> anyhow::Result<ExitCode> {
    let program = options.program.map(|path| {
        path.canonicalize().with_context(|| format!("the program {} can't be opened", path.display()))
    });
    let request = Request::Upgrade { program: program.transpose()?, seconds: options.wait };
    if !options.all {
        let peer = client::living(&options.file.identify()?, &request)?;
        return Ok(exit_code(follow(peer, json)?));
    }
    let found = state::supervisors()?;
    let mut code = ExitCode::SUCCESS;
    if found.is_empty() && !json {
        crate::say!("nothing runs");
    }
    for found in found {
        // One that has ended meanwhile needs none.
        let asked =
            peer::ask_found(&found, &request).and_then(|peer| peer.map(|p| follow(p, json)).transpose());
        match asked {
            Ok(None | Some(Outcome::Done)) => {}
            Ok(Some(outcome)) => return Ok(exit_code(outcome)),
            Err(e) => {
                crate::say!("{e:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

fn follow(mut peer: Peer, json: bool) -> anyhow::Result<Outcome> {
    client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Cancel)
}

fn exit_code(outcome: Outcome) -> ExitCode {
    if outcome == Outcome::Done {
        return ExitCode::SUCCESS;
    }
    crate::say!("interrupted; the project runs on as it did");
    ExitCode::from(130)
}
