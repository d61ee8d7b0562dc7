// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program behind `tombolo bench`: its words, its manual and its completion are those of the command.

use std::process::{Command, Output};

fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-bench"));
    command.args(args);
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn usage_is_that_of_the_command() {
    let help = said(&bench(&["net", "--help"]).output().unwrap());
    assert!(help.contains("Usage: tombolo bench net [OPTIONS]"), "{help}");
}

#[test]
fn every_bench_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    assert!(bench(&["man"]).arg(dir.path()).status().unwrap().success());
    for page in [
        "tombolo-bench",
        "tombolo-bench-files",
        "tombolo-bench-share",
        "tombolo-bench-accel",
        "tombolo-bench-topology",
        "tombolo-bench-start-run",
    ] {
        assert!(dir.path().join(format!("{page}.1")).is_file(), "{page}");
    }
    assert!(!dir.path().join("tombolo-bench-man.1").exists());
}

#[test]
fn a_shell_is_told_the_benches_and_their_options() {
    let complete = |index: &str, words: &[&str]| {
        let mut command = bench(&["--", "bench"]);
        said(&command.args(words).env("COMPLETE", "zsh").env("_CLAP_COMPLETE_INDEX", index).output().unwrap())
    };
    let benches = complete("1", &[""]);
    assert!(
        ["files", "share", "net", "accel", "start", "topology"].iter().all(|name| benches.contains(name)),
        "{benches}"
    );
    assert!(complete("2", &["files", "--hand"]).starts_with("--handover"), "an option");
}

#[test]
fn results_that_are_not_there_are_an_error_with_the_command_that_makes_some() {
    let dir = tempfile::tempdir().unwrap();
    let output = bench(&["report", "--results"]).arg(dir.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        err.starts_with("tombolo: ") && err.contains("'tombolo bench files --quick' makes some"),
        "{err}"
    );
}

#[test]
fn the_page_of_results_makes_its_folder_as_results_do() {
    let dir = tempfile::tempdir().unwrap();
    let results = concat!(env!("CARGO_MANIFEST_DIR"), "/results");
    let page = dir.path().join("a/b/index.html");
    let output = bench(&["report", "--results", results, "--html"]).arg(&page).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(std::fs::read_to_string(&page).unwrap().contains("</html>"));
}
