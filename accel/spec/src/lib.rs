// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The protocol between accelerator clients and servers.
//!
//! - [`wire`]: encoding, decoding with all length checks, the headers of requests and replies; the same for every API.
//! - [`common`]: records that every API has: the snapshot, releases, pings.
//! - [`opencl`]: the constants, structures and records of OpenCL, generated from `opencl.api`.
//! - [`cuda`]: those of the CUDA driver API, from `cuda.api`, and the names under which it exports its functions.
//! - [`code`]: images of device code, as CUDA programs have them.
//! - [`image`], [`rectangle`]: the arithmetic of OpenCL's images and rectangles.

#![deny(missing_docs)]

pub mod code;
pub mod common;
pub mod image;
pub mod rectangle;
pub mod wire;

/// In a list of results, one that the driver has not written.
pub const UNWRITTEN: i32 = i32::MIN;

/// The declarations of OpenCL, for build scripts.
pub const OPENCL_API: &str = include_str!("../opencl.api");

/// OpenCL's constants, structures, records, kinds and identity, generated. What a field means stands in the declaration.
#[allow(missing_docs, non_upper_case_globals, clippy::too_many_lines)]
pub mod opencl {
    use crate::wire::{Decoder, Encoder, Maker, Malformed, Record, again};
    use std::borrow::Cow;
    include!(concat!(env!("OUT_DIR"), "/opencl.rs"));
}

/// The declarations of the CUDA driver API, for build scripts.
pub const CUDA_API: &str = include_str!("../cuda.api");

/// CUDA's constants, records, kinds, exported names and identity, generated. What a field means stands in the declaration.
#[allow(missing_docs, non_snake_case, clippy::too_many_lines)]
pub mod cuda {
    use crate::wire::{Decoder, Encoder, Maker, Malformed, Record, again};
    use std::borrow::Cow;
    include!(concat!(env!("OUT_DIR"), "/cuda.rs"));
}
