// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Inode flags, as chattr(1) and lsattr(1) use them. The kernel checks the caller's rights by the flags and the owner that it
//! knows; they are checked again here. Before it sets flags it asks for them by
//! `FS_IOC_FSGETXATTR` (since 5.13), also for a program that sets them by `FS_IOC_SETFLAGS`.

use rustix::io::Errno;

use super::abi::{self, Cursor, Header, Out};
use super::ops::{Answer, Reply, Server, u32s, u64s};
use crate::fs::{Attr, Result};
use crate::sys;

/// The flags that an inode can have, with their bits in `fsx_xflags`.
const FLAGS: [(u32, u32); 2] = [(sys::TFS_FL_IMMUTABLE, 0x8), (sys::TFS_FL_APPEND, 0x10)];
/// Bytes of `struct fsxattr` behind `fsx_xflags`.
const FSXATTR_REST: usize = 24;

/// Returns the flags of these bits; OPNOTSUPP: some are of other flags.
fn flags_of(bits: u32, bit: impl Fn((u32, u32)) -> u32) -> Result<u32> {
    let known = FLAGS.into_iter().filter(|flag| bits & bit(*flag) != 0);
    let (flags, seen) = known.fold((0, 0), |(flags, seen), flag| (flags | flag.0, seen | bit(flag)));
    if seen == bits { Ok(flags) } else { Err(Errno::OPNOTSUPP) }
}

/// Returns whether the request sets flags.
pub(super) fn changes(mut c: Cursor<'_>) -> bool {
    c.bytes(12);
    matches!(c.u32(), Some(abi::FS_IOC_SETFLAGS | abi::FS_IOC_FSSETXATTR))
}

impl Server {
    pub(super) fn ioctl(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (_fh, _flags, cmd, _arg) = (u64s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?, u64s(&mut c)?);
        let (_in_size, _out_size) = (u32s(&mut c)?, u32s(&mut c)?);
        let file = self.nodes.handle(h.node);
        let mut out = Out::new();
        out.u32(0).u32(0).u32(0).u32(0);
        let set = match cmd {
            abi::FS_IOC_GETFLAGS => {
                out.u32(self.fs.getattr(file)?.flags);
                return Ok(Reply::Body(out));
            }
            abi::FS_IOC_FSGETXATTR => {
                let flags = self.fs.getattr(file)?.flags;
                let bits = FLAGS.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, bit)| bit);
                out.u32(bits.fold(0, |all, bit| all | bit)).zeros(FSXATTR_REST);
                return Ok(Reply::Body(out));
            }
            abi::FS_IOC_SETFLAGS => flags_of(u32s(&mut c)?, |(flag, _)| flag)?,
            abi::FS_IOC_FSSETXATTR => {
                let flags = flags_of(u32s(&mut c)?, |(_, bit)| bit)?;
                let rest = c.bytes(FSXATTR_REST).ok_or(Errno::INVAL)?;
                if rest.iter().any(|byte| *byte != 0) {
                    return Err(Errno::OPNOTSUPP);
                }
                flags
            }
            _ => return Err(Errno::NOTTY),
        };
        self.checked(|| {
            let attr = self.fs.getattr(file)?;
            self.require_chattr(h, &attr, set)?;
            self.fs.setattr_as(&attr, sys::TFS_SET_FLAGS, &Attr { flags: set, ..Attr::default() })
        })?;
        Ok(Reply::Body(out))
    }
}
