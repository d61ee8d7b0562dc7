// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The shape of images, as client and server both need it.

use crate::opencl::{ImageDesc, ImageFormat, cl};

/// Bytes of a pixel: the channels times the size of one, or the size of all where the type packs them. None: no format of the specification.
pub fn pixel_size(format: &ImageFormat) -> Option<u64> {
    let channels = match format.image_channel_order {
        cl::R | cl::A | cl::INTENSITY | cl::LUMINANCE | cl::DEPTH => 1,
        cl::RG | cl::RA | cl::Rx => 2,
        cl::RGB | cl::RGx | cl::sRGB => 3,
        cl::RGBA | cl::BGRA | cl::ARGB | cl::ABGR | cl::RGBx => 4,
        cl::sRGBx | cl::sRGBA | cl::sBGRA => 4,
        _ => return None,
    };
    Some(match format.image_channel_data_type {
        cl::SNORM_INT8 | cl::UNORM_INT8 | cl::SIGNED_INT8 | cl::UNSIGNED_INT8 => channels,
        cl::SNORM_INT16 | cl::UNORM_INT16 | cl::SIGNED_INT16 | cl::UNSIGNED_INT16 => 2 * channels,
        cl::HALF_FLOAT => 2 * channels,
        cl::SIGNED_INT32 | cl::UNSIGNED_INT32 | cl::FLOAT => 4 * channels,
        cl::UNORM_SHORT_565 | cl::UNORM_SHORT_555 => 2,
        cl::UNORM_INT_101010 | cl::UNORM_INT_101010_2 => 4,
        _ => return None,
    })
}

/// Width, height (or layers of a 1D array), depth (or layers of a 2D array).
pub fn extent(desc: &ImageDesc) -> [u64; 3] {
    match desc.image_type {
        cl::MEM_OBJECT_IMAGE3D => [desc.image_width, desc.image_height, desc.image_depth],
        cl::MEM_OBJECT_IMAGE2D => [desc.image_width, desc.image_height, 1],
        cl::MEM_OBJECT_IMAGE2D_ARRAY => [desc.image_width, desc.image_height, desc.image_array_size],
        cl::MEM_OBJECT_IMAGE1D_ARRAY => [desc.image_width, desc.image_array_size, 1],
        _ => [desc.image_width, 1, 1],
    }
    .map(|v| v as u64)
}

/// Returns whether the image has no rows. The second number of a region then counts the layers of a 1D array.
pub fn is_one_dimensional(object_type: u32) -> bool {
    matches!(
        object_type,
        cl::MEM_OBJECT_IMAGE1D | cl::MEM_OBJECT_IMAGE1D_ARRAY | cl::MEM_OBJECT_IMAGE1D_BUFFER
    )
}

/// Returns whether the image has slices or layers, which lie a slice pitch apart.
pub fn is_layered(object_type: u32) -> bool {
    matches!(
        object_type,
        cl::MEM_OBJECT_IMAGE3D | cl::MEM_OBJECT_IMAGE2D_ARRAY | cl::MEM_OBJECT_IMAGE1D_ARRAY
    )
}

/// Returns whether a region has pixels, all of which lie in an image of this extent.
pub fn contains(extent: [u64; 3], origin: [u64; 3], region: [u64; 3]) -> bool {
    (0..3).all(|i| {
        region[i] != 0 && origin[i].checked_add(region[i]).is_some_and(|end| end <= extent[i].max(1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pixel_is_as_large_as_its_channels_or_as_its_packed_type() {
        let size = |order, data_type| {
            pixel_size(&ImageFormat { image_channel_order: order, image_channel_data_type: data_type })
        };
        assert_eq!(size(cl::RGBA, cl::UNSIGNED_INT8), Some(4));
        assert_eq!(size(cl::sBGRA, cl::UNORM_INT8), Some(4));
        assert_eq!(size(cl::RG, cl::HALF_FLOAT), Some(4));
        assert_eq!(size(cl::DEPTH, cl::FLOAT), Some(4));
        assert_eq!(size(cl::RGB, cl::UNORM_SHORT_565), Some(2));
        assert_eq!(size(cl::RGBA, 0), None);
        assert_eq!(size(0, cl::FLOAT), None);
    }

    #[test]
    fn a_region_that_overflows_or_is_empty_lies_in_no_image() {
        assert!(contains([8, 8, 0], [0; 3], [8, 8, 1]));
        assert!(!contains([8, 8, 1], [1, 0, 0], [8, 8, 1]));
        assert!(!contains([8, 8, 1], [0; 3], [8, 0, 1]));
        assert!(!contains([8, 8, 1], [u64::MAX, 0, 0], [8, 1, 1]));
    }
}
