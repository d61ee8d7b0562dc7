// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Launches: a function with all of its parameters, of the sizes that the driver said.

use super::{Cx, Handle, Parameters, lock};
use tombolo_accel_spec::cuda::{self as wire, cu, kind};

/// A function or a kernel of the client.
pub(super) struct Callable {
    native: Handle,
    is_kernel: bool,
    parameters: Parameters,
}

/// A function, the sizes of grid and block, and where each parameter is.
pub(super) struct Launch {
    pub native: Handle,
    pub is_kernel: bool,
    pub shape: [u32; 6],
    pub each: Vec<*const u8>,
}

/// The function or kernel of an id.
pub(super) fn callable(cx: &Cx<'_>, id: u64) -> Result<Callable, i32> {
    let table = lock(&cx.cuda.table);
    let as_kind = |kind, is_kernel| {
        let parameters = table.extra(kind, id).ok()?.parameters.clone();
        Some(Callable { native: table.get(kind, id).ok()? as Handle, is_kernel, parameters })
    };
    let found = as_kind(kind::FUNCTION, false).or_else(|| as_kind(kind::KERNEL, true));
    found.ok_or(cu::CUDA_ERROR_INVALID_HANDLE)
}

impl Callable {
    /// Its launch with these bytes as parameters, which must live as long as the result.
    pub(super) fn with(&self, shape: &[u32], bytes: &[u8]) -> Result<Launch, i32> {
        let shape = shape.try_into().map_err(|_| cu::CUDA_ERROR_INVALID_VALUE)?;
        let size = self.parameters.iter().map(|(at, len)| at + len).max().unwrap_or(0);
        if bytes.len() != size {
            return Err(cu::CUDA_ERROR_INVALID_VALUE);
        }
        let each = self.parameters.iter().map(|(at, _)| bytes[*at..].as_ptr()).collect();
        Ok(Launch { native: self.native, is_kernel: self.is_kernel, shape, each })
    }
}

pub(super) fn launch_kernel(cx: &mut Cx<'_>, r: &wire::LaunchKernel<'_>) -> Result<(), i32> {
    let (plain, cooperative) = (cx.native().cuLaunchKernel, cx.native().cuLaunchCooperativeKernel);
    let stream = cx.maybe(kind::STREAM, r.hStream)?;
    let Launch { native: function, shape, each, .. } = callable(cx, r.f)?.with(&r.shape, r.parameters)?;
    let ([gx, gy, gz, bx, by, bz], each) = (shape, each.as_ptr().cast());
    if r.cooperative != 0 {
        let f = cooperative.ok_or(wire::UNSUPPORTED)?;
        // SAFETY: a live function, and all of its parameters with the sizes that the driver said.
        return cx.status(unsafe { f(function, gx, gy, gz, bx, by, bz, r.sharedMemBytes, stream, each) });
    }
    let f = plain.ok_or(wire::UNSUPPORTED)?;
    let none = std::ptr::null();
    // SAFETY: as above.
    cx.status(unsafe { f(function, gx, gy, gz, bx, by, bz, r.sharedMemBytes, stream, each, none) })
}
