// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench topology`, run once on one CPU under whatever hypervisor there is. Needs hpcc (scripts/bootstrap bench).

use std::path::Path;
use std::process::Command;

use tombolo_record::Results;

#[test]
fn hpc_programs_and_noise_are_measured_on_the_host_and_in_both_vms() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let cache = std::env::var_os("TOMBOLO_CACHE").map_or_else(|| root.join(".cache"), Into::into);
    let output = Command::new(env!("CARGO_BIN_EXE_tombolo-bench"))
        .args(["topology", "--part", "close", "--cpus", "1", "--memory", "768", "--order", "160"])
        .args(["--rounds", "1", "--noise", "0.5", "--results"])
        .arg(folder.path())
        .arg("--kit")
        .arg(cache.join("guest"))
        .current_dir(root)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let recorded = Results::read(&folder.path().join("topology.jsonl")).unwrap();
    let figures = |system: &str| {
        let of = recorded.samples.iter().filter(|sample| sample.system == system);
        of.map(|sample| sample.case.as_str()).collect::<Vec<_>>()
    };
    // A rank alone has no latency to another one.
    assert_eq!(figures("tombolo").len(), 11, "{:?}", figures("tombolo"));
    assert_eq!(figures("host"), figures("tombolo"));
    assert_eq!(figures("vm"), figures("tombolo"));
    assert!(figures("vm").contains(&"topology-stream-triad-each"), "{:?}", figures("vm"));
}
