// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo topology show`, as far as it needs no project: the machine, and what is free of it.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::model::Topology;
use crate::picture::{self, Users};
use crate::read;

/// The options of `show`.
#[derive(clap::Args, Debug)]
pub struct ShowOptions {
    /// Draw it into this file, as SVG
    #[arg(long, value_name = "PATH")]
    pub svg: Option<PathBuf>,
    /// Show a machine of this description of hwloc's, such as "package:2 core:4 pu:2", instead of this host
    #[arg(long, value_name = "DESCRIPTION")]
    pub synthetic: Option<String>,
}

impl ShowOptions {
    /// The machine that is shown.
    ///
    /// # Errors
    /// There is none.
    pub fn machine(&self) -> Result<Topology> {
        match &self.synthetic {
            Some(description) => read::synthetic(description),
            None => read::host(),
        }
    }
}

/// The output of `show --json`.
#[derive(Serialize)]
struct Shown<'a> {
    machine: &'a Topology,
    users: &'a Users,
}

/// Shows `machine`, and who has which CPUs.
///
/// # Errors
/// The picture or the output can't be written.
pub fn show(options: &ShowOptions, machine: &Topology, users: &Users, json: bool) -> Result<ExitCode> {
    if let Some(path) = &options.svg {
        std::fs::write(path, picture::svg(machine, users))
            .with_context(|| format!("the picture can't be written to {}", path.display()))?;
    }
    let text = match (json, &options.svg) {
        (true, _) => format!("{}\n", serde_json::to_string_pretty(&Shown { machine, users })?),
        (false, Some(_)) => return Ok(ExitCode::SUCCESS),
        (false, None) => picture::text(machine, users),
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
