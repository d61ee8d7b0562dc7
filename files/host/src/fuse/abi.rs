// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The wire format of /dev/fuse (Linux `include/uapi/linux/fuse.h`, protocol 7.31 and later): numbers, a cursor over a
//! request's bytes and a builder for replies. Requests come from the kernel, but nothing here trusts their lengths.

/// Protocol version spoken; the kernel speaks the lower of both minors.
pub const MAJOR: u32 = 7;
/// Minor version.
pub const MINOR: u32 = 39;
/// The oldest minor version that has all the features used (Linux 5.11: HANDLE_KILLPRIV_V2 is 7.33).
pub const MINOR_MIN: u32 = 33;

/// Size of `fuse_in_header`.
pub const IN_HEADER: usize = 40;
/// Size of `fuse_out_header`.
pub const OUT_HEADER: usize = 16;

/// Operations.
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
}

/// INIT flags, 64 bits.
pub mod init {
    pub const ASYNC_READ: u64 = 1;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const SETXATTR_EXT: u64 = 1 << 29;
    pub const INIT_EXT: u64 = 1 << 30;
}

/// `fuse_setattr_in.valid`.
pub mod fattr {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// `fuse_create_in.open_flags`: the file loses its set-id bits if O_TRUNC cuts it.
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// `fuse_open_out.open_flags`: no page cache, the kernel passes every read and write on.
pub const FOPEN_DIRECT_IO: u32 = 1;
/// `fuse_open_out.open_flags`: several writes to one file at a time.
pub const FOPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
/// `fuse_write_in.write_flags`: the writer may not keep set-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// `fuse_setxattr_in.setxattr_flags`: setting this ACL clears the set-group-id bit.
pub const SETXATTR_ACL_KILL_SGID: u32 = 1;
/// `fuse_lk_in.lk_flags`: flock(2), not fcntl(2).
pub const LK_FLOCK: u32 = 1;
/// `FS_IOC_GETFLAGS`.
pub const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
/// `FS_IOC_SETFLAGS`.
pub const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
/// `FS_IOC_FSGETXATTR`.
pub const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
/// `FS_IOC_FSSETXATTR`.
pub const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;
/// `FUSE_DEV_IOC_CLONE`.
pub const DEV_IOC_CLONE: libc::c_ulong = 0x8004_e500;

/// Reads a request from front to back; None: it is too short.
#[derive(Clone, Copy)]
pub struct Cursor<'a>(pub &'a [u8]);

impl<'a> Cursor<'a> {
    /// The next `n` bytes.
    pub fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    /// A little-endian (native) number.
    pub fn u32(&mut self) -> Option<u32> {
        Some(u32::from_ne_bytes(self.bytes(4)?.try_into().ok()?))
    }

    /// A number.
    pub fn u64(&mut self) -> Option<u64> {
        Some(u64::from_ne_bytes(self.bytes(8)?.try_into().ok()?))
    }

    /// A string up to its NUL.
    pub fn name(&mut self) -> Option<&'a [u8]> {
        let len = self.0.iter().position(|b| *b == 0)?;
        let name = self.bytes(len)?;
        self.bytes(1)?;
        Some(name)
    }
}

/// `fuse_in_header`.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// Operation.
    pub opcode: u32,
    /// Names the request in its reply.
    pub unique: u64,
    /// Inode number.
    pub node: u64,
    /// Caller.
    pub uid: u32,
    /// Caller.
    pub gid: u32,
    /// The caller's thread; 0: it is in a PID namespace that this process can't see.
    pub pid: u32,
}

impl Header {
    /// Parses the header of a request; the cursor then is at the body, without extensions.
    pub fn parse(request: &[u8]) -> Option<(Header, Cursor<'_>)> {
        let mut c = Cursor(request);
        let len = c.u32()? as usize;
        let (opcode, unique, node, uid, gid) = (c.u32()?, c.u64()?, c.u64()?, c.u32()?, c.u32()?);
        let (pid, ext) = (c.u32()?, c.u32()? & 0xffff);
        let end = len.checked_sub(ext as usize * 8)?;
        let body = request.get(IN_HEADER..end)?;
        Some((Header { opcode, unique, node, uid, gid, pid }, Cursor(body)))
    }
}

/// Builds a reply's body.
#[derive(Default)]
pub struct Out(pub Vec<u8>);

impl Out {
    /// An empty body.
    pub fn new() -> Out {
        Out::default()
    }

    /// Appends a number.
    pub fn u16(&mut self, v: u16) -> &mut Out {
        self.bytes(&v.to_ne_bytes())
    }

    /// Appends a number.
    pub fn u32(&mut self, v: u32) -> &mut Out {
        self.bytes(&v.to_ne_bytes())
    }

    /// Appends a number.
    pub fn u64(&mut self, v: u64) -> &mut Out {
        self.bytes(&v.to_ne_bytes())
    }

    /// Appends bytes.
    pub fn bytes(&mut self, v: &[u8]) -> &mut Out {
        self.0.extend_from_slice(v);
        self
    }

    /// Appends `n` zero bytes.
    pub fn zeros(&mut self, n: usize) -> &mut Out {
        self.0.resize(self.0.len() + n, 0);
        self
    }
}

/// A device number as the kernel packs it into 32 bits (`new_encode_dev`), from major << 20 | minor.
pub fn encode_dev(rdev: u64) -> u32 {
    let (major, minor) = (rdev as u32 >> 20, rdev as u32 & 0xf_ffff);
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The reverse of [`encode_dev`].
pub fn decode_dev(dev: u32) -> u64 {
    let (major, minor) = ((dev & 0xf_ff00) >> 8, (dev & 0xff) | ((dev >> 12) & 0xf_ff00));
    u64::from(major) << 20 | u64::from(minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_the_kernels_packing() {
        for (major, minor) in [(0, 0), (1, 3), (8, 255), (4095, 0xf_ffff), (259, 256)] {
            let rdev = major << 20 | minor;
            assert_eq!(decode_dev(encode_dev(rdev)), rdev);
        }
    }

    #[test]
    fn a_request_shorter_than_it_says_is_refused() {
        let mut bytes = vec![0u8; IN_HEADER];
        bytes[0..4].copy_from_slice(&100u32.to_ne_bytes());
        assert!(Header::parse(&bytes).is_none());
        bytes[0..4].copy_from_slice(&(IN_HEADER as u32).to_ne_bytes());
        assert!(Header::parse(&bytes).is_some());
        bytes[36] = 255;
        assert!(Header::parse(&bytes).is_none(), "extensions longer than the request");
        assert!(Cursor(b"abc").name().is_none());
    }
}
