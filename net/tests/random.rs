// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fuzzer's hostile guest with random actions for a few seconds; `net/fuzz/run.sh SECONDS rings` continues this, guided by
//! coverage.

#[path = "common/guest.rs"]
mod guest;

use guest::{Act, Input, Place, play};
use proptest::prelude::*;

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![
        6 => any::<u32>().prop_map(Place::Inside),
        2 => any::<u8>().prop_map(Place::NearEnd),
        2 => Just(Place::Table),
        1 => any::<u64>().prop_map(Place::Anywhere),
    ]
}

/// Mostly valid lengths and flags.
fn desc() -> impl Strategy<Value = Act> {
    let len = prop_oneof![4 => 0u32..4096, 1 => (1u32..40).prop_map(|n| 16 * n), 1 => any::<u32>()];
    let flags = prop_oneof![4 => 0u16..8, 2 => (0u16..8).prop_map(|f| f | 1 << 7), 2 => (0u16..8).prop_map(|f| f | 1 << 15), 1 => any::<u16>()];
    let next = prop_oneof![4 => 0u16..18, 1 => any::<u16>()];
    (any::<bool>(), any::<bool>(), 0u8..40, place(), len, flags, next).prop_map(
        |(rx, table, index, place, len, flags, next)| Act::Desc { rx, table, index, place, len, flags, next },
    )
}

fn act() -> impl Strategy<Value = Act> {
    let send = (
        any::<(u8, u16, [u16; 3])>(),
        0u8..4,
        prop_oneof![Just(0u8), Just(1), Just(4), any::<u8>()],
        any::<(u16, u16, u16)>(),
    )
        .prop_map(|((to, len, cuts), flags, gso_type, (gso_size, start, offset))| Act::Send {
            to,
            len,
            cuts,
            flags,
            gso_type,
            gso_size,
            start: start % 2048,
            offset,
        });
    let avail = (
        any::<bool>(),
        prop_oneof![4 => 0u16..20, 1 => any::<u16>()],
        prop_oneof![4 => 0u16..18, 1 => any::<u16>()],
        any::<u8>(),
    )
        .prop_map(|(rx, index, head, slot)| Act::Avail { rx, index, head, slot });
    let poke = any::<(u32, [u8; 8])>().prop_map(|(at, value)| Act::Poke { at, value });
    prop_oneof![
        5 => desc(),
        3 => avail,
        1 => poke,
        4 => send,
        5 => any::<u16>().prop_map(|time| Act::Pass { time }),
        1 => Just(Act::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_guest_that_does_anything_harms_nobody(
        packed in any::<bool>(),
        features in any::<u8>(),
        acts in prop::collection::vec(act(), 1..120),
    ) {
        play(Input { packed, features, acts });
    }
}
