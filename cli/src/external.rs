// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that are programs of their own: `tombolo bench` executes `tombolo-bench`, `tombolo lab` executes `tombolo-lab`. The search is that of git
//! for its commands: the folder of this program, the package's folder, then PATH.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use tombolo_program::EXECUTED_BY;

/// The Debian package of the programs.
const PACKAGE: &str = "tombolo-bench";
/// The package's folder for programs, seen from that of `tombolo`.
const LIBEXEC: &str = "../libexec/tombolo";

/// The arguments of such a command, which its program parses.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Arguments of the program; --help lists its commands
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// A command that is a program of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum External {
    /// `tombolo bench`.
    Bench,
    /// `tombolo lab`.
    Lab,
}

impl External {
    pub(crate) const ALL: [External; 2] = [External::Bench, External::Lab];

    fn command(self) -> &'static str {
        match self {
            External::Bench => "bench",
            External::Lab => "lab",
        }
    }

    fn of(command: &OsStr) -> Option<External> {
        External::ALL.into_iter().find(|external| command == external.command())
    }

    fn program(self) -> String {
        format!("tombolo-{}", self.command())
    }

    /// Returns the program, ready to be started.
    ///
    /// # Errors
    /// It is not installed.
    pub(crate) fn start(self) -> anyhow::Result<Command> {
        let own = std::env::current_exe().context("finding this program's file")?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = find(&self.program(), &own, &path).with_context(|| {
            format!(
                "'tombolo {}' needs the program {}, which is neither beside {}, nor in {LIBEXEC} from there, nor in PATH: install the package \
                 {PACKAGE}, or run 'make build' in a checkout",
                self.command(),
                self.program(),
                own.display(),
            )
        })?;
        let mut command = Command::new(program);
        command.env(EXECUTED_BY, own);
        Ok(command)
    }

    /// Replaces this process by the program. Returns only if that fails.
    pub(crate) fn execute(self, arguments: &Arguments, json: bool) -> anyhow::Error {
        self.replace(json.then(|| "--json".into()).iter().chain(&arguments.arguments))
    }

    fn replace<'a>(self, arguments: impl Iterator<Item = &'a OsString>) -> anyhow::Error {
        match self.start() {
            Ok(mut command) => {
                let error = command.args(arguments).exec();
                anyhow::Error::from(error).context(format!("{} can't be executed", self.program()))
            }
            Err(e) => e,
        }
    }
}

/// Executes the program that the words of a command line ask about by `tombolo help COMMAND…`. Returns its error, or `None` for other words.
pub(crate) fn help(words: &[OsString]) -> Option<anyhow::Error> {
    let [_, help, command, rest @ ..] = words else { return None };
    let external = External::of(command).filter(|_| help == "help")?;
    Some(external.replace([OsString::from("help")].iter().chain(rest)))
}

/// Executes the program that completes the words of a command line, if they stand behind its command. `words` are those of a shell's completion script:
/// `tombolo -- tombolo OPTION… COMMAND WORD…`. A program that is not installed completes nothing.
pub(crate) fn complete(words: &[OsString]) -> Option<anyhow::Error> {
    let line = words.iter().position(|word| word == "--").map(|at| &words[at + 1..])?;
    let at = 1 + line.get(1..)?.iter().position(|word| !word.as_encoded_bytes().starts_with(b"-"))?;
    let external = External::of(&line[at])?;
    let cursor = std::env::var(CURSOR).ok().and_then(|index| index.parse().ok());
    if cursor.unwrap_or(line.len() - 1) <= at {
        return None;
    }
    let mut program = match external.start() {
        Ok(program) => program,
        Err(e) => return Some(e),
    };
    if let Some(cursor) = cursor {
        program.env(CURSOR, (cursor - at).to_string());
    }
    Some(program.arg("--").args(&line[at..]).exec().into())
}

/// The variable by which some shells' scripts say which word is being completed; the others complete the last one.
const CURSOR: &str = "_CLAP_COMPLETE_INDEX";

/// Returns the file of `program`: beside the running program `own`, in the package's folder, or in a folder of `path`.
fn find(program: &str, own: &Path, path: &OsStr) -> Option<PathBuf> {
    let folder = own.parent().unwrap_or(Path::new("/"));
    let near = [folder.to_owned(), folder.join(LIBEXEC)];
    near.into_iter().chain(std::env::split_paths(path)).map(|folder| folder.join(program)).find(|file| {
        use std::os::unix::fs::PermissionsExt;
        file.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_beside_this_one_then_in_libexec_then_in_path_and_only_if_it_is_executable() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = root.path().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            folder
        };
        let put = |folder: &Path, mode: u32| {
            let file = folder.join("tombolo-x");
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let (bin, libexec, first, second) =
            (folder("bin"), folder("libexec/tombolo"), folder("first"), folder("second"));
        let path = std::env::join_paths([&first, &second]).unwrap();
        let found = || {
            let found = find("tombolo-x", &bin.join("tombolo"), &path)?;
            Some(found.parent()?.canonicalize().unwrap())
        };
        assert_eq!(found(), None);
        put(&first, 0o644);
        assert_eq!(found(), None);
        put(&second, 0o755);
        assert_eq!(found(), Some(second.clone()));
        put(&libexec, 0o755);
        assert_eq!(found(), Some(libexec.clone()));
        put(&bin, 0o755);
        assert_eq!(found(), Some(bin.clone()));
    }
}
