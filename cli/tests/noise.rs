// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo noise host` on this machine: quanta are measured whatever the kernel offers, and what can't be measured is refused by name.

use common::Lab;
use serde_json::Value;

mod common;

#[test]
fn this_host_is_measured_shown_modelled_drawn_and_compared() {
    let lab = Lab::new("");
    let json = lab.good(&["noise", "host", "--seconds", "0.3", "--json", "--svg", "noise.svg"]);
    let report: Value = serde_json::from_str(&json).unwrap();
    let cpus = report["cpus"].as_array().unwrap();
    assert!(!cpus.is_empty());
    assert!(cpus.iter().all(|cpu| cpu["work_us"]["count"].as_u64() > Some(0)), "{json}");
    // Without tracefs the causes are unknown, and a note says what is missing.
    let notes = report["notes"].to_string();
    assert_eq!(report["traced"].as_bool().unwrap(), !notes.contains("no cause can be named"), "{notes}");
    let picture = std::fs::read_to_string(lab.dir.path().join("noise.svg")).unwrap();
    assert!(picture.contains("host: interruptions by their largest source"), "{picture}");

    std::fs::write(lab.dir.path().join("before.json"), json).unwrap();
    let first = cpus[0]["cpu"].to_string();
    let more = ["--cpus", first.as_str(), "--compare", "before.json", "--model-ranks", "1000000"];
    let text = lab.good(&[&["noise", "host", "--seconds", "0.3"], &more[..]].concat());
    let begin = format!("before: host: {} CPUs for ", cpus.len());
    for words in
        ["host: 1 CPUs for", &format!("\nCPU {first} "), "a bulk-synchronous program", "\n  1000000 ", &begin]
    {
        assert!(text.contains(words), "{words} is not in {text}");
    }
}

#[test]
fn what_can_not_be_measured_is_refused_by_name() {
    let lab = Lab::new("[vm.a]\n");
    let refused = |args: &[&str], code: i32, words: &str| {
        let output = lab.run(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(words), "{words} is not in {said}");
    };
    refused(&["noise", "host", "--cpus", "65000"], 1, "there is no CPU 65000; this machine has the CPUs 0");
    refused(&["noise", "host", "--cpus", "x"], 1, "'x' is no list of CPUs; write it like 0-3,8");
    refused(&["noise", "host", "--seconds", "0"], 2, "it is a number from 0.1 to 600");
    refused(&["noise", "host", "--threshold", "x"], 2, "it is a number from 0.1 to 1000000");
    refused(&["noise", "host", "--model-ranks", "1000001"], 2, "1000001 is not in 1..=1000000");
    refused(&["noise", "host", "--compare", "tombolo.toml"], 1, "'tombolo noise --json' writes one");
    refused(&["noise", "a"], 1, "start it with 'tombolo up'");
}

#[test]
fn a_cpu_outside_of_the_cpuset_is_named() {
    let lab = Lab::new("");
    let json = lab.good(&["noise", "host", "--seconds", "0.1", "--json"]);
    let report: Value = serde_json::from_str(&json).unwrap();
    let [first, second, ..] = &report["cpus"].as_array().unwrap()[..] else {
        panic!("this test needs two CPUs: {json}");
    };
    let measure = lab.command(&["noise", "host", "--cpus", &second["cpu"].to_string()]);
    let mut command = std::process::Command::new("taskset");
    command.args(["-c", &first["cpu"].to_string()]).arg(measure.get_program()).args(measure.get_args());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("is outside of this process's cpuset"), "{said}");
}
