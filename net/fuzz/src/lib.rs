// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fuzz targets for the switch's parsers of guest memory and messages, for libFuzzer: `run.sh`.
//!
//! - [`frames`]: the description of a frame, its checks, its checksums and its segments.
//! - [`answers`]: the switch's own services, and messages about multicast groups.
//! - [`messages`]: the vhost-user session.
//! - [`rings`]: descriptors and indices of both kinds of ring.

pub mod answers;
pub mod frames;
pub mod messages;
pub mod rings;

use std::sync::OnceLock;

/// A function that reads one input.
type One = fn(&[u8]);

/// The targets by name.
pub const TARGETS: [(&str, One); 4] =
    [("answers", answers::one), ("frames", frames::one), ("messages", messages::one), ("rings", rings::one)];

/// Returns the target that the environment variable `TOMBOLO_FUZZ_TARGET` names.
fn chosen() -> One {
    let name = std::env::var("TOMBOLO_FUZZ_TARGET").unwrap_or_default();
    let Some((_, one)) = TARGETS.iter().find(|(known, _)| *known == name) else {
        panic!("TOMBOLO_FUZZ_TARGET is '{name}'; targets: {}", TARGETS.map(|(name, _)| name).join(", "));
    };
    *one
}

/// Reads one input of the chosen target.
fn one(input: &[u8]) {
    static CHOSEN: OnceLock<One> = OnceLock::new();
    CHOSEN.get_or_init(chosen)(input);
}

tombolo_fuzz::entry!(one);

#[cfg(test)]
mod tests {
    use tombolo_fuzz::bytes;

    #[test]
    fn every_target_takes_bytes_without_meaning() {
        for (name, one) in super::TARGETS {
            for seed in 1..=50u64 {
                let input: Vec<u8> = bytes(seed).take(4 * seed as usize).collect();
                assert!(std::panic::catch_unwind(|| one(&input)).is_ok(), "{name}, seed {seed}");
            }
        }
    }
}
