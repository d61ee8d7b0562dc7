// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Property lists. The value of a property may be an address, a descriptor or a handle, which a client must not choose: only those go to the
//! driver that are known to be plain numbers. A list that doesn't end where the driver would stop reading is refused, too.

use std::ffi::c_void;
use std::ptr::null;

/// CL_QUEUE_PROPERTIES, CL_QUEUE_SIZE; CL_QUEUE_PRIORITY_KHR, CL_QUEUE_THROTTLE_KHR
pub const OF_QUEUES: &[i64] = &[0x1093, 0x1094, 0x1096, 0x1097];
/// CL_SAMPLER_NORMALIZED_COORDS, _ADDRESSING_MODE, _FILTER_MODE; CL_SAMPLER_MIP_FILTER_MODE_KHR, _LOD_MIN_KHR, _LOD_MAX_KHR
pub const OF_SAMPLERS: &[i64] = &[0x1152, 0x1153, 0x1154, 0x1155, 0x1156, 0x1157];
/// Buffers, images and pipes have no property whose value is a plain number.
pub const NONE: &[i64] = &[];

/// A list of pairs that ends with 0, for the driver: null when it is empty. A property that isn't `known` is answered with `unknown`.
pub fn pairs(given: &[i64], known: &[i64], unknown: i32) -> Result<*const c_void, i32> {
    let (last, pairs) = match given.split_last() {
        None => return Ok(null()),
        Some((last, pairs)) => (last, pairs),
    };
    let plain = pairs.chunks(2).all(|pair| pair.len() == 2 && known.contains(&pair[0]));
    if *last == 0 && plain { Ok(given.as_ptr().cast()) } else { Err(unknown) }
}

/// How a device is partitioned: a property and a number, or counts and the end of their list; then the end.
pub fn partition(given: &[i64]) -> bool {
    const EQUALLY: i64 = 0x1086;
    const BY_COUNTS: i64 = 0x1087;
    const BY_AFFINITY: i64 = 0x1088;
    match given {
        [EQUALLY | BY_AFFINITY, _, 0] => true,
        [BY_COUNTS, counts @ .., 0, 0] => !counts.contains(&0),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_properties_in_a_list_that_ends_reach_the_driver() {
        assert_eq!(pairs(&[], OF_QUEUES, -30), Ok(null()));
        for good in [&[0][..], &[0x1093, 1, 0], &[0x1093, 1, 0x1094, 4096, 0]] {
            assert_eq!(pairs(good, OF_QUEUES, -30), Ok(good.as_ptr().cast()), "{good:?}");
        }
        // The last would be read beyond its end.
        for bad in [&[0x2063, 5, 0][..], &[0x1093, 1, 0x2063, 5, 0], &[0x1093, 0], &[0x1093, 1], &[0, 0]] {
            assert_eq!(pairs(bad, OF_QUEUES, -30), Err(-30), "{bad:?}");
        }
        // CL_EXTERNAL_MEMORY_HANDLE_OPAQUE_FD_KHR: a descriptor of the worker.
        assert_eq!(pairs(&[0x2060, 0, 0], NONE, -64), Err(-64));
    }

    #[test]
    fn a_partition_has_the_shape_that_the_driver_reads() {
        for good in [&[0x1086, 1, 0][..], &[0x1088, 8, 0], &[0x1087, 1, 2, 0, 0], &[0x1087, 0, 0]] {
            assert!(partition(good), "{good:?}");
        }
        for bad in [&[][..], &[0], &[0x1086, 1], &[0x1087, 1, 0], &[0x1087, 1, 0, 2, 0, 0], &[0x4050, 1, 0]] {
            assert!(!partition(bad), "{bad:?}");
        }
    }
}
