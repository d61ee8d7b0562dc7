// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replies that say what an inode is. Their attributes and names are valid for no time.

use super::abi::{self, Out};
use super::nodes::Nodes;
use crate::fs::{Attr, Handle};
use crate::sys;

pub(super) const NS: i64 = 1_000_000_000;

pub(super) fn open_out(handle: u64) -> Out {
    let mut out = Out::new();
    out.u64(handle).u32(abi::FOPEN_DIRECT_IO | abi::FOPEN_PARALLEL_DIRECT_WRITES).u32(0);
    out
}

fn attr_body(out: &mut Out, a: &Attr) {
    out.u64(a.ino).u64(a.size).u64(a.blocks.saturating_mul(u64::from(sys::TFS_BLOCK / 512)));
    let times = [a.atime, a.mtime, a.ctime];
    for t in times {
        out.u64(t.div_euclid(NS) as u64);
    }
    for t in times {
        out.u32(t.rem_euclid(NS) as u32);
    }
    out.u32(a.mode)
        .u32(a.nlink)
        .u32(a.uid)
        .u32(a.gid)
        .u32(abi::encode_dev(a.rdev))
        .u32(sys::TFS_BLOCK)
        .u32(0);
}

/// `fuse_attr_out`, valid for no time.
pub(super) fn attr_out(a: &Attr) -> Out {
    let mut out = Out::new();
    out.zeros(16);
    attr_body(&mut out, a);
    out
}

/// `fuse_entry_out`, valid for no time.
pub(super) fn entry_out(nodes: &Nodes, a: &Attr) -> Out {
    let mut out = Out::new();
    out.u64(nodes.number(Handle::from(a))).u64(u64::from(a.generation)).zeros(24);
    attr_body(&mut out, a);
    out
}

/// `fuse_statx_out`, valid for no time.
pub(super) fn statx_out(a: &Attr) -> Out {
    let attributes = |flags: u32| u64::from(flags & (sys::TFS_FL_IMMUTABLE | sys::TFS_FL_APPEND));
    let mut out = Out::new();
    out.zeros(32);
    out.u32(libc::STATX_BASIC_STATS | libc::STATX_BTIME).u32(sys::TFS_BLOCK).u64(attributes(a.flags));
    out.u32(a.nlink).u32(a.uid).u32(a.gid).u16(a.mode as u16).zeros(2);
    out.u64(a.ino)
        .u64(a.size)
        .u64(a.blocks.saturating_mul(u64::from(sys::TFS_BLOCK / 512)))
        .u64(attributes(!0));
    for t in [a.atime, a.btime, a.ctime, a.mtime] {
        out.u64(t.div_euclid(NS) as u64).u32(t.rem_euclid(NS) as u32).zeros(4);
    }
    out.u32(a.rdev as u32 >> 20).u32(a.rdev as u32 & 0xf_ffff).zeros(8 + 14 * 8);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_have_the_sizes_that_the_kernel_expects() {
        let a = Attr { atime: -1, ..Attr::default() };
        assert_eq!(attr_out(&a).0.len(), 104);
        assert_eq!(entry_out(&Nodes::new(Handle::from(&a)), &a).0.len(), 128);
        assert_eq!(statx_out(&a).0.len(), 288);
        assert_eq!(open_out(0).0.len(), 16);
    }

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        let out = attr_out(&Attr { atime: -1, ..Attr::default() });
        assert_eq!(out.0[40..48], (-1i64).to_ne_bytes());
        assert_eq!(out.0[64..68], 999_999_999u32.to_ne_bytes());
    }
}
