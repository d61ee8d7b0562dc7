// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest that writes anything into its rings: see `tests/common/guest.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/guest.rs"]
mod guest;

fuzz_target!(|input: guest::Input| guest::play(input));
