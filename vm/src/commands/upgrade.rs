// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo upgrade`: the supervisor of a running project ends, and another program's supervisor goes on with what runs. VMs, switches, servers and their shims
//! run on; those that are started again later are the new program's.

use std::fs::File as OpenFile;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;

use crate::commands::cli::File;
use crate::commands::client::{self, OnInterrupt, Outcome, Progress};
use crate::project::control::Request;
use crate::project::peer::{self, Peer};
use crate::project::revival;
use crate::project::state::{self, Found, StateDir};

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

/// Has other programs' supervisors go on with projects.
///
/// # Errors
/// Why one does not; its project runs on as it did.
pub fn run(options: Options, json: bool) -> anyhow::Result<ExitCode> {
    let path = options.program.unwrap_or_else(|| "/proc/self/exe".into());
    // A pipe without a writer is not waited for.
    let program = OpenFile::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
    let program = program.with_context(|| format!("the program {} can't be opened", path.display()))?;
    anyhow::ensure!(program.metadata()?.is_file(), "{} is no program: it is no regular file", path.display());
    let found = if options.all {
        state::supervisors()?
    } else {
        let project = options.file.identify()?;
        let not_up = || {
            format!(
                "the project '{}' ({}) is not up; start it with 'tombolo up'",
                project.name,
                project.file.display()
            )
        };
        vec![state::supervisor(&project.file)?.with_context(not_up)?]
    };
    if found.is_empty() && !json {
        crate::say!("nothing runs");
    }
    let mut code = ExitCode::SUCCESS;
    for found in found {
        match upgrade(&found, &program, options.wait, json) {
            Ok(Outcome::Done) => {}
            Ok(_) => {
                crate::say!("interrupted; the project runs on as it did");
                return Ok(ExitCode::from(130));
            }
            Err(e) if options.all => {
                crate::say!("{e:#}");
                code = ExitCode::FAILURE;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(code)
}

fn upgrade(found: &Found, program: &OpenFile, seconds: u64, json: bool) -> anyhow::Result<Outcome> {
    // From the end of this supervisor on no other command starts one.
    let _turn = revival::turn(found.dir())?;
    let project = revival::noted(found.dir())?;
    let name = &project.name;
    // It is gone with its supervisor where it has been replaced on the disk.
    let before =
        OpenFile::open(format!("/proc/{}/exe", found.process)).context("the supervisor has ended")?;
    let (own, running) = (program.metadata()?, before.metadata()?);
    if (own.dev(), own.ino()) == (running.dev(), running.ino()) {
        crate::say!("the project '{name}' is run by this program already");
        return Ok(Outcome::Done);
    }
    revival::examine(program, found.dir()).with_context(|| {
        format!("the project '{name}' runs on as it did: the program can't go on with it")
    })?;
    // One that has ended meanwhile needs no end.
    if let Some(mut peer) = peer::ask_found(found, &Request::Leave { seconds })? {
        let outcome = client::follow(&mut peer, &mut Progress::new(json), OnInterrupt::Cancel)?;
        if outcome != Outcome::Done {
            return Ok(outcome);
        }
        peer.wait_ended(client::STATUS)?;
    }
    let dir = StateDir::at(found.dir().to_owned());
    let start = |program: &OpenFile| -> anyhow::Result<Option<Peer>> {
        let path = format!("/proc/{}/fd/{}", std::process::id(), program.as_raw_fd());
        revival::start(Some(Path::new(&path)), &project, &dir)
    };
    if let Err(e) = start(program) {
        start(&before)?;
        anyhow::bail!(
            "the project '{name}' is run by the program before: the other one's supervisor does not begin: {e:#}"
        );
    }
    crate::say!(
        "the project '{name}' is run by this program now; VMs and switches that are started again are the new program's"
    );
    Ok(Outcome::Done)
}
