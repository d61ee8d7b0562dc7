// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A CUDA device for tests on hosts without a GPU: `libcuda.so.1` that executes PTX on the CPU ([README](../README.md)).
//!
//! - `ptx`: PTX text to a tree
//! - `machine`: decodes kernels and executes them
//! - `image`: fat binaries and what else holds device code
//! - `driver`: the API

#![allow(clippy::precedence, reason = "fields of words are written as in the ISA: a << 16 | b & 0xffff")]
#![allow(clippy::cast_lossless, reason = "lanes are bit patterns: a cast says to which width they are cut")]

pub mod driver;
pub mod image;
pub mod machine;
pub mod ptx;
