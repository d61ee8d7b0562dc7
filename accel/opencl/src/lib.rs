// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An OpenCL driver whose devices belong to a server. The ICD loader finds [`hand::clIcdGetPlatformIDsKHR`], and from then on every
//! function by the dispatch table that is the first word of every handle.
//!
//! Most functions are generated from `accel/spec/opencl.api` ([`stubs`]); what needs a program's memory or what the client knows by
//! itself is written by hand ([`hand`]). A call is posted where it is sure to succeed ([`sure`]); where it isn't, it
//! waits, and the native driver's own code comes back.
//!
//! - [`rt`]: what stubs need: handles, wait lists, posting and waiting, answers to queries; the connection.
//! - [`state`]: what is known of each object.
//! - [`local`]: queries that are answered from that.
//! - [`sure`]: commands that can't fail, judged by what the client knows.
//! - [`deferred`]: blocking writes that return before the device has the data.
//! - [`transfer`]: the program's memory, the window, and the bytes between them.
//! - [`hand`]: functions written by hand, by topic.

pub mod deferred;
pub mod hand;
pub mod local;
pub mod rt;
pub mod state;
pub mod sure;
pub mod transfer;

/// The generated functions and the dispatch table.
#[allow(non_snake_case, missing_docs, unused_imports, clippy::all)]
pub mod stubs {
    use crate::rt::{self, Handle, Id};
    use crate::transfer::{self, Direction};
    use std::ffi::{c_char, c_void};
    use tombolo_accel_spec::opencl::{self as wire, cl, kind};
    use tombolo_accel_spec::wire::Decoder;
    include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
}
