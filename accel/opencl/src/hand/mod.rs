// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Functions of OpenCL that are written by hand: those that touch a program's memory or callbacks, or that the client answers.
//!
//! - [`platform`]: platforms, devices, the loader's entry points.
//! - [`context`]: contexts and queues.
//! - [`memory`]: buffers, images, pipes.
//! - [`transfer`]: reads and writes of buffers.
//! - `map`: mapping.
//! - [`program`]: programs; [`kernel`]: kernels.
//! - [`event`]: events and waiting.
//! - [`svm`]: shared virtual memory.
#![allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

pub mod context;
pub mod event;
pub mod kernel;
pub mod map;
pub mod memory;
pub mod platform;
pub mod program;
pub mod svm;
pub mod transfer;

pub use context::*;
pub use event::*;
pub use kernel::*;
pub use map::*;
pub use memory::*;
pub use platform::*;
pub use program::*;
pub use svm::*;
pub use transfer::*;
