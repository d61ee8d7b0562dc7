// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo top`: the parts' own tables, again and again.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tombolo_net::control::top as net;
use tombolo_vm::commands::top as vm;

/// `tombolo top`
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Only the project of this compose file [default: all that this user runs]
    #[arg(short, long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// A switch that belongs to no project, by its control socket
    #[arg(long, value_name = "SOCKET")]
    control: Vec<PathBuf>,
    /// Seconds between two tables
    #[arg(short, long, default_value_t = 1.0, value_parser = seconds)]
    interval: f64,
    /// End after so many tables
    #[arg(short = 'n', long)]
    count: Option<u64>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let wrong = || format!("'{text}' is no time; write seconds from 0.1 to 3600");
    text.parse().ok().filter(|s| (0.1..=3600.0).contains(s)).ok_or_else(wrong)
}

/// Projects, and switches by name.
struct Look {
    vm: vm::Look,
    switches: BTreeMap<String, net::Look>,
}

impl Look {
    fn new(options: &Options) -> anyhow::Result<Self> {
        let vm = vm::look(options.file.as_deref())?;
        let mut switches = BTreeMap::new();
        for project in &vm.projects {
            for network in &project.networks {
                // A switch that is being started again is missing from one table.
                if let Ok(look) = net::look(&network.control) {
                    switches.insert(format!("{}/{}", project.project, network.name), look);
                }
            }
        }
        for control in &options.control {
            switches.insert(control.display().to_string(), net::look(control)?);
        }
        Ok(Self { vm, switches })
    }
}

/// Shows what happens, until told to end.
///
/// # Errors
/// A named project or switch does not run.
pub(crate) fn run(options: &Options, json: bool) -> anyhow::Result<ExitCode> {
    let mut before = Look::new(options)?;
    let mut out = std::io::stdout();
    let mut shown = 0;
    while options.count.is_none_or(|count| shown < count) {
        std::thread::sleep(Duration::from_secs_f64(options.interval));
        let now = Look::new(options)?;
        let switches: Vec<_> = now
            .switches
            .iter()
            .filter_map(|(name, look)| Some(net::rates(name, before.switches.get(name)?, look)))
            .collect();
        let (vms, zones) = (vm::vms(&before.vm, &now.vm), vm::zones(&now.vm));
        if json {
            writeln!(out, "{}", serde_json::json!({ "switches": switches, "vms": vms, "zones": zones }))?;
        } else {
            let mut text = vm::table(&vms, &zones);
            if !switches.is_empty() {
                text.push_str(&net::table(&switches));
            }
            if text.is_empty() {
                text.push_str("nothing runs\n");
            }
            // On a terminal each table takes the place of the last.
            let clear = if out.is_terminal() { "\x1b[H\x1b[2J" } else { "" };
            write!(out, "{clear}{text}")?;
        }
        out.flush()?;
        before = now;
        shown += 1;
    }
    Ok(ExitCode::SUCCESS)
}
