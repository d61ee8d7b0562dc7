// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo config`: the compose file as it is understood, with defaults and absolute paths.

use std::process::ExitCode;

use clap::Args;
use serde_json::Value;

use crate::commands::cli::{File, say};
use crate::compose::{Project, network};

/// `tombolo config`
#[derive(Args, Debug)]
pub struct Options {
    /// The compose file
    #[command(flatten)]
    file: File,
    /// Only check it
    #[arg(short, long)]
    quiet: bool,
}

/// Checks the file and prints it.
///
/// # Errors
/// The file is wrong: the error names line and key.
pub fn run(options: &Options, json: bool) -> anyhow::Result<ExitCode> {
    let project = options.file.load()?;
    if options.quiet {
        return Ok(ExitCode::SUCCESS);
    }
    let config = understood(project)?;
    if json {
        say(&serde_json::to_string_pretty(&config)?)?;
    } else {
        say(toml::to_string(&config)?.trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The file with what it leaves to defaults and conventions. What has no value is left out: TOML has no word for it.
fn understood(mut project: Project) -> anyhow::Result<Value> {
    network::settle(&mut project.compose, &std::collections::BTreeMap::new());
    project.compose.name = Some(project.name);
    let mut config = serde_json::to_value(&project.compose)?;
    let counted = project.compose.vm.iter().filter(|(_, vm)| vm.is_counted_by_topology());
    counted.for_each(|(name, _)| config["vm"][name]["cpus"] = Value::Null);
    prune(&mut config);
    Ok(config)
}

fn prune(value: &mut Value) {
    match value {
        Value::Object(entries) => {
            entries.retain(|_, value| !value.is_null());
            entries.values_mut().for_each(prune);
        }
        Value::Array(values) => values.iter_mut().for_each(prune),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn what_is_printed_is_a_compose_file_that_says_the_same() {
        let text = "[zone.z]\nsize = \"8M\"\nfiles = true\n[net.lan]\n[net.out]\nuplink = { tap = \"tap0\" }\n[accel.cl]\n\
                    [vm.a]\nkernel = \"./k\"\nnetworks = [\"lan\", \"out\"]\naccelerators = [\"cl\"]\n\
                    zones = { z = { mount = \"/mnt\", rights = \"ro\" } }\nshare = [{ tag = \"s\", path = \".\" }]\n\
                    [vm.b]\nmemory = \"1G\"\nready = \"console:login\"\ntopology = \"host\"\n";
        let first = Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text).unwrap();
        let printed = toml::to_string(&understood(first.clone()).unwrap()).unwrap();
        assert!(
            printed.contains("memory = \"512M\"") && printed.contains("subnet = \"10.86.0.0/24\""),
            "{printed}"
        );
        let mut second = Project::parse(Path::new("/elsewhere/tombolo.toml"), &printed).unwrap();
        let mut first = first;
        network::settle(&mut first.compose, &std::collections::BTreeMap::new());
        (second.compose.name, first.compose.name) = (None, None);
        assert_eq!(second.compose, first.compose, "{printed}");
        assert_eq!(second.name, "demo");
    }
}
