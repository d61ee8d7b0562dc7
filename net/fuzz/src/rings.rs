// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest that writes anything into its rings: see `net/tests/common/guest.rs`.

use arbitrary::{Arbitrary, Unstructured};

#[path = "../../tests/common/guest.rs"]
mod guest;

/// One input: the acts of the hostile guest and of its neighbours.
pub fn one(data: &[u8]) {
    if let Ok(input) = guest::Input::arbitrary_take_rest(Unstructured::new(data)) {
        guest::play(input);
    }
}
