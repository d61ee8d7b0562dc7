// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo init`: a compose file to begin with.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;

/// The compose file that is written.
const TEXT: &str = include_str!("init.toml");

/// Options of `tombolo init`.
#[derive(clap::Args)]
pub struct Options {
    /// The folder
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Print it instead
    #[arg(long)]
    print: bool,
}

/// Writes a compose file; one that is there stays.
pub fn run(options: &Options) -> anyhow::Result<ExitCode> {
    if options.print {
        std::io::stdout().write_all(TEXT.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    write(&options.dir)?;
    println!(
        "{} is written; look through it, then: tombolo doctor && tombolo up",
        options.dir.join("tombolo.toml").display()
    );
    Ok(ExitCode::SUCCESS)
}

fn write(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("making the folder {}", dir.display()))?;
    let path = dir.join("tombolo.toml");
    let file = std::fs::File::options().write(true).create_new(true).open(&path);
    let mut file = file.map_err(|e| match e.kind() {
        std::io::ErrorKind::AlreadyExists => {
            anyhow::anyhow!(
                "{} is there already and stays; print another with: tombolo init --print",
                path.display()
            )
        }
        _ => anyhow::anyhow!("{}: {e}", path.display()),
    })?;
    file.write_all(TEXT.as_bytes()).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_a_valid_compose_file_and_is_never_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("new");
        write(&at).unwrap();
        let project = tombolo_vm::compose::Project::load(&at.join("tombolo.toml")).unwrap();
        assert_eq!(project.compose.vm.len(), 2);
        std::fs::write(at.join("tombolo.toml"), "# mine\n").unwrap();
        let said = write(&at).unwrap_err().to_string();
        assert!(said.contains("stays") && said.contains("--print"), "{said}");
        assert_eq!(std::fs::read_to_string(at.join("tombolo.toml")).unwrap(), "# mine\n");
    }

    #[test]
    fn every_line_that_is_commented_out_is_valid_too() {
        let dir = tempfile::tempdir().unwrap();
        let all: String =
            TEXT.lines().map(|line| format!("{}\n", line.strip_prefix("#! ").unwrap_or(line))).collect();
        let path = dir.path().join("tombolo.toml");
        std::fs::write(&path, all.replace("debian.qcow2", "disk")).unwrap();
        std::fs::write(dir.path().join("disk"), "").unwrap();
        let project = tombolo_vm::compose::Project::load(&path).unwrap();
        assert_eq!((project.compose.vm.len(), project.compose.net.len()), (3, 1));
    }
}
