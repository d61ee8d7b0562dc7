// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Boots labs and checks claims in them. `short` is one lab with the short claims; the others are for `make test-lab`.

use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use tombolo_bench_start::cli::{in_lab, lab};
use tombolo_lab::config::Iommu;

const PROGRAM: &str = env!("CARGO_BIN_EXE_tombolo-bench");

/// A lab takes every CPU there is: one at a time.
static ONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Boots a lab, runs the claims, and returns how many held.
fn claims(iommu: Iommu, arguments: &[&str]) -> usize {
    let _alone = alone();
    let program = Path::new(PROGRAM);
    let lab = lab(program, iommu, 6144, None, None).unwrap_or_else(|e| panic!("{e:#}"));
    let mut all = vec!["claims".to_owned()];
    all.extend(arguments.iter().map(|a| (*a).to_owned()));
    let output = in_lab(&lab, program, &all).unwrap_or_else(|e| panic!("{e:#}"));
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.code, 0, "{text}");
    text.lines().filter(|l| l.starts_with("claim ") && l.contains(": ok")).count()
}

#[test]
fn short() {
    assert_eq!(claims(Iommu::Intel, &["--short"]), 4);
}

#[test]
fn long() {
    assert_eq!(claims(Iommu::Intel, &[]), 10);
}

#[test]
fn long_with_an_amd_iommu() {
    assert_eq!(claims(Iommu::Amd, &["--short"]), 4);
}

#[test]
fn long_without_an_iommu_passthrough_is_refused_with_the_remedy() {
    let _alone = alone();
    let program = Path::new(PROGRAM);
    let lab = lab(program, Iommu::None, 2048, None, None).unwrap_or_else(|e| panic!("{e:#}"));
    let output =
        in_lab(&lab, program, &["inside".into(), "--sizes=512".into()]).unwrap_or_else(|e| panic!("{e:#}"));
    assert_ne!(output.code, 0);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("intel_iommu=on"), "{said}");
}
