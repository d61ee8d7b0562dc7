// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a server has to offer.

/// A device, for people.
#[derive(Debug, serde::Serialize)]
pub struct Device {
    /// `opencl` or `cuda`.
    pub api: &'static str,
    /// The name of its OpenCL platform; of others `CUDA`.
    pub platform: String,
    pub name: String,
    /// Set if it is the host's processors: its kernels run in the process that has the driver.
    pub is_processor: bool,
}
