// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo events`: the state changes of VMs, networks and accelerators, a line each, until the project is down.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::Args;

use crate::commands::cli::{File, say};
use crate::commands::client;
use crate::project::control::{Event, Request};
use crate::project::state::StateDir;

/// `tombolo events`
#[derive(Args, Debug)]
pub struct Options {
    /// The compose file
    #[command(flatten)]
    file: File,
    /// Begin with those since then: a time such as 2026-01-31T12:00:00Z, or so long ago, such as 10m
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<SystemTime>,
}

fn parse_time(text: &str) -> Result<SystemTime, String> {
    if let Ok(time) = humantime::parse_rfc3339_weak(text) {
        return Ok(time);
    }
    let ago: Duration = humantime::parse_duration(text).map_err(|_| {
        format!("'{text}' is no time; write one such as 2026-01-31T12:00:00Z, or so long ago, such as 10m")
    })?;
    Ok(SystemTime::now().checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH))
}

/// Prints events until the project is down.
///
/// # Errors
/// When the project is not up, or this command is too slow for it.
pub fn run(options: &Options, json: bool) -> anyhow::Result<ExitCode> {
    let since =
        options.since.map(|t| t.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64());
    let project = options.file.identify()?;
    let dir = StateDir::of(&project.file)?;
    let mut peer = client::living(&project, &Request::Events { since })?;
    loop {
        while let Some(event) = peer.receive::<Event>()? {
            if let Event::Happened(entry) = event {
                say(&if json { serde_json::to_string(&entry)? } else { entry.to_string() })?;
            }
        }
        // A supervisor that was told to end takes its folder along; one that has died is followed by another, which knows of nothing before.
        if !dir.path().exists() {
            return Ok(ExitCode::SUCCESS);
        }
        peer = client::living(&project, &Request::Events { since: Some(0.0) })?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_moment_or_so_long_ago() {
        let moment = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        assert_eq!(parse_time("2023-11-14T22:13:20Z"), Ok(moment));
        let ago = parse_time("10m").unwrap().elapsed().unwrap();
        assert!(ago >= Duration::from_secs(600));
        assert!(parse_time("yesterday").unwrap_err().contains("such as 10m"));
    }
}
