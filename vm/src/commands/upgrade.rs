// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo upgrade`

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
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
    tell_of_others()?;
    let (found, elsewhere) = (state::supervisors()?, state::supervisors_elsewhere()?);
    // A package that is installed in a chroot or a container must not replace the host's programs.
    if elsewhere > 0 {
        crate::say!(
            "projects that run under another root folder go on as they did: {elsewhere}; to upgrade them: 'tombolo upgrade --all' there"
        );
    }
    let mut code = ExitCode::SUCCESS;
    let hidden = state::hidden()?;
    for hidden in &hidden {
        crate::say!("{hidden}");
        code = ExitCode::FAILURE;
    }
    if found.is_empty() && elsewhere == 0 && hidden.is_empty() && !json {
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

/// Names the users whose projects only they can upgrade, to root, who has installed the program for all.
fn tell_of_others() -> anyhow::Result<()> {
    let number = |path: &str| fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    let own = number("/proc/self/exe")?;
    let mut projects: BTreeMap<u32, usize> = BTreeMap::new();
    for found in state::supervisors_of_others()? {
        // One that has ended meanwhile needs none.
        if number(&format!("/proc/{}/exe", found.process)).is_ok_and(|program| program != own) {
            *projects.entry(found.user).or_default() += 1;
        }
    }
    for (user, count) in projects {
        crate::say!(
            "user {user} has running projects under another program: {count}; only that user can upgrade them: tombolo upgrade --all"
        );
    }
    Ok(())
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
