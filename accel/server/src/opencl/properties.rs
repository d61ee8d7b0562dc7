// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Property lists. The value of a property may be an address, a descriptor or a handle, which a client must not choose: only those go to the
//! driver that are known to be plain numbers. A list that doesn't end where the driver would stop reading is refused, too.

use std::ffi::c_void;
use std::ptr::null;
use tombolo_accel_spec::opencl::cl;

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

/// Returns whether a list partitions a device: a property and a number, or counts and the end of their list; then the end.
pub fn partition(given: &[i64]) -> bool {
    match given {
        [cl::DEVICE_PARTITION_EQUALLY | cl::DEVICE_PARTITION_BY_AFFINITY_DOMAIN, _, 0] => true,
        [cl::DEVICE_PARTITION_BY_COUNTS, counts @ .., 0, 0] => !counts.contains(&0),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_properties_in_a_list_that_ends_reach_the_driver() {
        let of_queues = [cl::QUEUE_PROPERTIES, cl::QUEUE_SIZE];
        assert_eq!(pairs(&[], &of_queues, -30), Ok(null()));
        for good in [&[0][..], &[0x1093, 1, 0], &[0x1093, 1, 0x1094, 4096, 0]] {
            assert_eq!(pairs(good, &of_queues, -30), Ok(good.as_ptr().cast()), "{good:?}");
        }
        // The last would be read beyond its end.
        for bad in [&[0x2063, 5, 0][..], &[0x1093, 1, 0x2063, 5, 0], &[0x1093, 0], &[0x1093, 1], &[0, 0]] {
            assert_eq!(pairs(bad, &of_queues, -30), Err(-30), "{bad:?}");
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
