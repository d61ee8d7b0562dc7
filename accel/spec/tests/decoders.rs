// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The decoder of every function, generated from the same declarations, fed with anything.

use proptest::prelude::*;
use tombolo_accel_spec::opencl::{FUNCTIONS, recode};
use tombolo_accel_spec::wire::{Reply, Request};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_bytes_make_a_decoder_panic_and_what_it_takes_it_gives_back(body in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut out = Vec::new();
        for (id, name) in FUNCTIONS {
            out.clear();
            if let Some(Ok(())) = recode(*id, &body, &mut out) {
                // Only 'absent or not' has more than one encoding, and it is the same length.
                prop_assert_eq!(out.len(), body.len(), "{}", name);
            }
        }
    }

    #[test]
    fn counts_that_lie_are_refused_before_anything_is_allocated(count in 1000u32.., id in prop::sample::select(FUNCTIONS)) {
        // Small integers up to the place where a count may stand, then the lie.
        for front in 0..8usize {
            let mut body = vec![0; front * 8];
            body.extend_from_slice(&count.to_le_bytes());
            let mut out = Vec::new();
            if let Some(Ok(())) = recode(id.0, &body, &mut out) {
                prop_assert!(out.len() <= body.len());
            }
        }
    }

    #[test]
    fn headers_take_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        if let Ok((request, rest)) = Request::split(&bytes) {
            prop_assert_eq!(&[&request.to_bytes()[..], rest].concat(), &bytes);
        }
        if let Ok((reply, rest)) = Reply::split(&bytes) {
            prop_assert_eq!(&[&reply.to_bytes()[..], rest].concat(), &bytes);
        }
    }
}
