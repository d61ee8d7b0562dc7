// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A short run of `tombolo bench net --soak`.

use std::time::Duration;

use tombolo_net_load::soak::{Plan, Until, run};

#[test]
fn every_frame_is_explained_and_a_killed_switch_loses_none() {
    let plan = Plan {
        program: env!("CARGO_BIN_EXE_tombolo-switch").into(),
        arguments: vec!["run".into()],
        until: Until::Time(Duration::from_secs(3)),
        round: Duration::from_millis(400),
        seed: 1,
    };
    let tally = run(&plan, |_| Ok(())).unwrap();
    assert_eq!(tally.unexplained(), 0, "{tally}");
    assert!(tally.kills >= 2 && tally.sent > 1000, "{tally:?}");
}
