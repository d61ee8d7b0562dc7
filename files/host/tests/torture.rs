// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Short forms of the random tests; `tombolo-files-torture --help` has the long ones. A failure names its seed.

use std::process::Command;

fn torture(args: &[&str]) {
    let out = Command::new(env!("CARGO_BIN_EXE_tombolo-files-torture"))
        .args(args)
        .output()
        .expect("torture starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{args:?}: {}{}", text(&out.stdout), text(&out.stderr));
}

#[test]
fn three_members_that_take_turns_see_what_the_model_says() {
    for seed in ["1", "2"] {
        torture(&["--seed", seed, "members", "--operations", "4000"]);
    }
}

#[test]
fn appends_are_whole_and_a_name_has_one_creator() {
    torture(&["threads", "--seconds", "2"]);
}

#[test]
fn members_killed_at_any_instant_lose_nothing_and_block_nobody() {
    torture(&["--seed", "3", "kill", "--kills", "20"]);
}

#[test]
fn members_that_die_or_stop_in_line_for_a_lock_hold_up_nobody_and_two_never_hold_it() {
    torture(&["--seed", "5", "queue", "--kills", "60"]);
}

#[test]
fn fsck_repairs_what_was_overwritten() {
    torture(&["--seed", "7", "damage", "--rounds", "150"]);
}
