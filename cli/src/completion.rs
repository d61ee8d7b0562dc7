// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Completion: the shell's script asks this program, which knows the compose file's VMs, zones, networks and accelerators.

use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::Shells;
use tombolo_program::COMPLETE;
use tombolo_vm::commands::names::{Names, names};

use crate::{Cli, external};

/// Answers a shell's script and ends the process, where one asks.
pub(crate) fn answer() {
    if std::env::var_os(COMPLETE).is_some_and(|shell| !shell.is_empty() && shell != "0") {
        let words: Vec<_> = std::env::args_os().collect();
        if external::complete(&words).is_some() {
            // A shell shows no message while it completes.
            std::process::exit(0);
        }
    }
    clap_complete::CompleteEnv::with_factory(command).var(COMPLETE).complete();
}

pub(crate) fn script(shell: Shell, to: &mut dyn Write) -> anyhow::Result<()> {
    let shells = Shells::builtins();
    let script =
        shells.completer(&shell.to_string()).with_context(|| format!("no completion for {shell}"))?;
    script.write_registration(COMPLETE, "tombolo", "tombolo", "tombolo", to)?;
    Ok(())
}

/// The command line, with completers for names.
fn command() -> Command {
    with_names(Cli::command())
}

fn with_names(command: Command) -> Command {
    let is_net = command.get_name() == "net";
    let command = command.mut_args(|arg| {
        let which: Option<fn(Names) -> Vec<String>> = match arg.get_id().as_str() {
            "vm" | "vms" => Some(|names| names.vms),
            "zone" => Some(|names| names.zones),
            "net" | "network" => Some(|names| names.networks),
            "accelerator" => Some(|names| names.accelerators),
            _ => None,
        };
        match which {
            Some(which) => arg.add(ArgValueCompleter::new(move |typed: &OsStr| candidates(typed, which))),
            None => arg,
        }
    });
    let command = command.mut_subcommands(with_names);
    if !is_net {
        return command;
    }
    // A running project's switch is named by its network.
    command.mut_subcommands(|subcommand| {
        subcommand.mut_args(|arg| match arg.get_id().as_str() {
            "control" => {
                arg.add(ArgValueCompleter::new(|typed: &OsStr| candidates(typed, |names| names.networks)))
            }
            _ => arg,
        })
    })
}

/// Names that begin with what was typed. A compose file that can't be read has none.
fn candidates(typed: &OsStr, which: fn(Names) -> Vec<String>) -> Vec<CompletionCandidate> {
    let words: Vec<_> = std::env::args_os().skip_while(|word| word != "--").collect();
    let typed = typed.to_string_lossy();
    let known = names(named_file(&words).as_deref()).map(which).unwrap_or_default();
    known.into_iter().filter(|name| name.starts_with(&*typed)).map(CompletionCandidate::new).collect()
}

/// The compose file that the words of a command line name.
fn named_file(words: &[std::ffi::OsString]) -> Option<PathBuf> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "-f" || word == "--file" {
            return words.next().map(PathBuf::from);
        }
        if let Some(file) = word.to_str().and_then(|word| word.strip_prefix("--file=")) {
            return Some(file.into());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_with_completers_is_well_formed_and_every_shell_has_a_script() {
        command().debug_assert();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let mut script = Vec::new();
            super::script(shell, &mut script).unwrap();
            assert!(String::from_utf8(script).unwrap().contains(COMPLETE), "{shell}");
        }
    }

    #[test]
    fn the_file_that_a_command_line_names_is_found() {
        let words = |text: &str| text.split(' ').map(Into::into).collect::<Vec<_>>();
        assert_eq!(named_file(&words("tombolo exec -f a/b.toml web")), Some("a/b.toml".into()));
        assert_eq!(named_file(&words("tombolo exec --file=b.toml web")), Some("b.toml".into()));
        assert_eq!(named_file(&words("tombolo exec web")), None);
    }
}
