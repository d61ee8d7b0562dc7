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

/// The entry point for libFuzzer.
///
/// # Safety
/// `data` points to `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn LLVMFuzzerTestOneInput(data: *const u8, size: usize) -> i32 {
    static CHOSEN: OnceLock<One> = OnceLock::new();
    let input = if size == 0 {
        &[]
    } else {
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts(data, size) }
    };
    // A panic must not unwind into C.
    if std::panic::catch_unwind(|| CHOSEN.get_or_init(chosen)(input)).is_err() {
        std::process::abort();
    }
    0
}

#[cfg(test)]
mod tests {
    /// A stream of bytes from one seed (xorshift), so that a failure can be replayed.
    fn bytes(seed: u64) -> impl Iterator<Item = u8> {
        std::iter::successors(Some(seed), |n| {
            let n = n ^ n << 13;
            let n = n ^ n >> 7;
            Some(n ^ n << 17)
        })
        .map(|n| (n >> 32) as u8)
    }

    #[test]
    fn every_target_takes_bytes_without_meaning() {
        for (name, one) in super::TARGETS {
            for seed in 1..=50u64 {
                let input: Vec<u8> =
                    bytes(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)).take(4 * seed as usize).collect();
                assert!(std::panic::catch_unwind(|| one(&input)).is_ok(), "{name}, seed {seed}");
            }
        }
    }
}
