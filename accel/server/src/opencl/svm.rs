// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared virtual memory of a client.

/// Ranges that a client allocated.
#[derive(Debug, Default)]
pub struct Svm {
    _ranges: Vec<(u64, u64)>,
}
