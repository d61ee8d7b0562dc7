// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A CUDA driver whose devices belong to a server. Programs load it as `libcuda.so.1`; NVIDIA's runtime and libraries stay as they are.
//!
//! Most functions are generated from `accel/spec/cuda.api` ([`stubs`]); what needs a program's memory, or what the client knows by itself, is written by hand
//! ([`hand`]). Device memory has the driver's own addresses; the server looks each up among this client's allocations.
//!
//! - [`rt`]: what stubs need: handles, posting and waiting; the stack of contexts of each thread.
//! - [`system`]: the connection, and the snapshot of devices that CUDA_VISIBLE_DEVICES chooses from.
//! - [`state`]: what is known of each object and of each address.
//! - [`hand`]: functions written by hand, by topic.

pub mod hand;
pub mod rt;
pub mod state;
pub mod system;

/// The generated functions.
#[allow(non_snake_case, missing_docs, unused_imports, unused_unsafe, clippy::all)]
pub mod stubs {
    use crate::rt::{self, Handle, Id};
    use std::ffi::{c_char, c_void};
    use tombolo_accel_spec::cuda::{self as wire, cu, kind};
    use tombolo_accel_spec::wire::Decoder;
    include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
}
