// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Functions written by hand.
//!
//! - [`find`]: names, versions, codes, export tables.
//! - [`device`]: devices, from the snapshot.
//! - [`context`]: primary contexts, and each thread's stack of contexts.
//! - [`module`]: modules, libraries, functions and kernels.
//! - [`memory`]: allocations, and what is known of an address.
//! - [`copy`]: copies between the program's memory and the device's.
//! - [`cuboid`]: copies of rectangles and cuboids.
//! - [`graph`]: graphs, their nodes, and what can be launched of them.
//! - [`host`]: functions of the program that streams and graphs call.
//! - [`pool`]: pools, and memory in the order of a stream.
//! - [`occupancy`]: the block size that fills a multiprocessor.
//! - [`launch`]: launches, whose parameters' sizes are known since their function was found.

mod context;
mod copy;
mod cuboid;
mod device;
mod find;
mod graph;
mod host;
mod launch;
mod memory;
mod module;
mod occupancy;
mod pool;

pub use context::*;
pub use copy::*;
pub use cuboid::*;
pub use device::*;
pub use find::*;
pub use graph::*;
pub use host::*;
pub use launch::*;
pub use memory::*;
pub use module::*;
pub use occupancy::*;
pub use pool::*;

/// Exported functions whose bodies are results: `?` leads to their code.
macro_rules! exported {
    ($(fn $name:ident($($parameter:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            /// As the API describes it.
            ///
            /// # Safety
            /// Pointers lead to what the API says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($parameter: $ty),*) -> i32 {
                $crate::rt::status(move || $body)
            }
        )*
    };
}
use exported;

/// The result of an exported function.
fn result(code: i32) -> Result<(), i32> {
    if code == tombolo_accel_spec::cuda::SUCCESS { Ok(()) } else { Err(code) }
}
