// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What accelerator clients and servers say to each other.
//!
//! - [`wire`]: encoding, decoding with all length checks, the headers of requests and replies; the same for every API.
//! - [`common`]: records that every API has: the snapshot, releases, pings.
//! - [`opencl`]: the records of OpenCL, generated from `opencl.api`.

#![deny(missing_docs)]

pub mod common;
pub mod wire;

/// The declarations of OpenCL, for those who generate from them.
pub const OPENCL_API: &str = include_str!("../opencl.api");

/// OpenCL's records, kinds, codes and identity, generated.
#[allow(clippy::too_many_lines)]
pub mod opencl {
    use crate::wire::{Decoder, Encoder, Maker, Malformed, Record, again};
    use std::borrow::Cow;
    include!(concat!(env!("OUT_DIR"), "/opencl.rs"));
}
