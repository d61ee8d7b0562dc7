// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that are programs of their own. Here a script stands for the program, so that what reaches it is seen.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::write_program;

/// Prints the variables and the arguments that it gets, and ends with 7.
const SCRIPT: &str = "#!/bin/sh\n\
    echo \"index=$_CLAP_COMPLETE_INDEX shell=$COMPLETE\"\n\
    [ \"$TOMBOLO_PROGRAM\" -ef \"$(dirname \"$0\")/../bin/tombolo\" ] && echo named\n\
    for word; do echo \"<$word>\"; done\n\
    exit 7\n";

/// An installation: `bin/tombolo`, and folders for programs.
struct Installation(tempfile::TempDir);

impl Installation {
    fn new() -> Installation {
        // A folder in which the program can be a link.
        let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        std::fs::create_dir(root.path().join("bin")).unwrap();
        std::fs::hard_link(env!("CARGO_BIN_EXE_tombolo"), root.path().join("bin/tombolo")).unwrap();
        Installation(root)
    }

    fn with(folder: &str, program: &str) -> Installation {
        let installation = Installation::new();
        let file = installation.path(folder).join(program);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        write_program(&file, SCRIPT);
        installation
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.path("bin/tombolo"));
        command.args(args).env("PATH", format!("{}:/usr/bin:/bin", self.path("elsewhere").display()));
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }
}

fn lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn the_program_gets_the_arguments_as_they_are_and_its_exit_code_is_the_commands() {
    let installed = Installation::with("bin", "tombolo-lab");
    let output = installed.run(&["--json", "lab", "--vmx", "run", "--json", "--", "sh", "-c", "a b"]);
    assert_eq!(output.status.code(), Some(7));
    let expected = ["<--json>", "<--vmx>", "<run>", "<--json>", "<-->", "<sh>", "<-c>", "<a b>"];
    assert_eq!(lines(&output)[2..], expected);
    assert_eq!(lines(&output)[1], "named", "the program is not told which tombolo runs it");
}

#[test]
fn the_program_is_found_beside_tombolo_in_the_packages_folder_and_in_path() {
    for folder in ["bin", "libexec/tombolo", "elsewhere"] {
        let installed = Installation::with(folder, "tombolo-bench");
        let output = installed.run(&["bench", "files"]);
        assert_eq!(output.status.code(), Some(7), "{folder}");
        assert_eq!(lines(&output).last().map(String::as_str), Some("<files>"), "{folder}");
    }
}

#[test]
fn a_program_that_is_not_installed_is_named_with_the_package_that_has_it() {
    let installed = Installation::new();
    for args in [&["bench", "files"][..], &["bench", "--help"], &["help", "bench"]] {
        let output = installed.run(args);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(
            err.contains("needs the program tombolo-bench") && err.contains("install the package"),
            "{err}"
        );
    }
    let help = lines(&installed.run(&["--help"])).join("\n");
    assert!(help.contains("\n  bench ") && help.contains("\n  lab "), "{help}");
    let pages = installed.path("pages");
    assert!(installed.run(&["man", pages.to_str().unwrap()]).status.success());
    assert!(pages.join("tombolo-bench.1").is_file());
}

#[test]
fn help_is_the_programs_own() {
    let installed = Installation::with("bin", "tombolo-bench");
    assert_eq!(lines(&installed.run(&["bench", "--help"]))[2..], ["<--help>"]);
    assert_eq!(lines(&installed.run(&["bench", "net", "-h"]))[2..], ["<net>", "<-h>"]);
    assert_eq!(lines(&installed.run(&["help", "bench", "net"]))[2..], ["<help>", "<net>"]);
}

#[test]
fn a_shells_completion_is_answered_by_the_program_from_its_first_word_on() {
    let installed = Installation::with("bin", "tombolo-lab");
    let complete = |index: &str, words: &[&str]| {
        let mut command = installed.command(&["--", "tombolo"]);
        lines(
            &command.args(words).env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", index).output().unwrap(),
        )
    };
    let answer = complete("4", &["--json", "lab", "run", "--o"]);
    assert_eq!(answer, ["index=2 shell=bash", "named", "<-->", "<lab>", "<run>", "<--o>"]);
    // The command's own name is completed here.
    assert_eq!(complete("1", &["la"]), ["lab"]);
    assert_eq!(complete("1", &["lab"]), ["lab"]);
    let fish = installed.command(&["--", "tombolo", "lab", "u"]).env("COMPLETE", "fish").output().unwrap();
    assert_eq!(lines(&fish), ["index= shell=fish", "named", "<-->", "<lab>", "<u>"]);
}

#[test]
fn the_manual_has_the_pages_of_the_programs() {
    let installed = Installation::with("bin", "tombolo-lab");
    let output = installed.run(&["man", installed.path("pages").to_str().unwrap()]);
    let dir = installed.path("pages");
    assert!(lines(&output).contains(&format!("<{}>", dir.display())), "{output:?}");
    assert!(Path::new(&dir).join("tombolo.1").is_file());
    // The script ends with 7: its pages are missing.
    assert_eq!(output.status.code(), Some(1));
}
