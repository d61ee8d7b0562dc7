// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench files` with all systems, a few cells of each, under whatever hypervisor there is. Needs what `scripts/bootstrap bench` installs and the guest
//! kit's image for benches.

use std::path::Path;
use std::process::Command;

use tombolo_record::{Group, Results};

#[test]
fn every_system_is_measured_with_its_io_and_those_that_share_at_once_are_coherent() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let cache = std::env::var_os("TOMBOLO_CACHE").map_or_else(|| root.join(".cache"), Into::into);
    let output = Command::new(env!("CARGO_BIN_EXE_tombolo-bench"))
        .args(["files", "--rounds", "1", "--blocks", "4k", "--jobs", "1", "--seconds", "0.2", "--size", "16"])
        .args(["--names", "50", "--coherence", "3", "--handover", "4"])
        .args(["--only", "randread-4k,meta,coherence,handover", "--results"])
        .arg(folder.path())
        .arg("--kit")
        .arg(cache.join("guest"))
        .current_dir(root)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let recorded = Results::read(&folder.path().join("files.jsonl")).unwrap();
    assert_eq!(recorded.left_out, [], "all of them run on this machine");
    assert_eq!(recorded.abouts.len(), 9);
    assert!(recorded.machines[0].settings.as_ref().is_some_and(|said| said.contains("0.2 s each")));
    let find = |case: &str, system: &str| {
        recorded.samples.iter().find(|sample| sample.case == case && sample.system == system)
    };
    for about in &recorded.abouts {
        let system = about.system.as_str();
        let has = |case: &str| find(case, system).is_some_and(|sample| sample.value > 0.0);
        let direct = about.group != Group::Cached || system == "nfs";
        let buffered = !["9p", "virtiofs"].contains(&system);
        let shared = about.group != Group::Local;
        assert_eq!(has("fio-randread-4k-j1"), direct, "{system}");
        assert_eq!(has("fio-randread-4k-j1-buffered"), buffered, "{system}");
        assert_eq!(has("fio-randread-4k-vms2"), direct && shared, "{system}");
        assert_eq!(has("fio-randread-4k-vms2-buffered"), buffered && shared, "{system}");
        assert_eq!(has("handover-4k"), direct && shared, "{system}");
        assert!(has("meta-create"), "{system}");
        for what in ["coherence-read", "coherence-open", "coherence-name", "coherence-gone"] {
            let sample = find(what, system);
            assert_eq!(sample.is_some(), shared, "{system}: {what}");
            if about.group == Group::Coherent {
                let seen = sample.map(|sample| (sample.value, sample.at_least));
                assert_eq!(seen, Some((0.0, false)), "{system}: {what}");
            }
        }
    }
    let late = find("coherence-read", "virtiofs-always").unwrap();
    assert!(late.at_least, "a cache for ever shows no change: {late}");
}
