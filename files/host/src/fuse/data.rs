// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data of files: READ, WRITE, FALLOCATE and COPY_FILE_RANGE.

use rustix::io::Errno;

use super::abi::{self, Cursor, Header, Out};
use super::ops::{Answer, Piece, Reply, Server, empty, short, u32s, u64s};
use crate::fs::{self, Attr};
use crate::sys;

/// One copy_file_range call copies this much at most; the kernel asks again.
const COPY_LIMIT: u64 = 16 << 20;

impl Server {
    pub(super) fn read<'a>(&'a self, h: &Header, mut c: Cursor<'_>) -> Answer<'a> {
        let (_fh, offset, len) = (u64s(&mut c)?, u64s(&mut c)?, u64::from(u32s(&mut c)?));
        let (_read_flags, _owner, flags) = (u32s(&mut c)?, u64s(&mut c)?, u32s(&mut c)? as i32);
        let touches = flags & libc::O_NOATIME == 0;
        let direct = self.fs.area().writable() && !self.device_memory;
        let pin = if direct { self.fs.pin(self.nodes.handle(h.node)).ok() } else { None };
        let Some(pin) = pin else {
            let mut buf = tombolo_heap::zeroed(len as usize).ok_or(Errno::NOMEM)?;
            let got = self.fs.pread(self.nodes.handle(h.node), &mut buf, offset)?;
            buf.truncate(got);
            if touches {
                self.note_read(h.node);
            }
            return Ok(Reply::Body(Out(buf)));
        };
        let end = self.fs.size(self.nodes.handle(h.node)).min(offset.saturating_add(len));
        let block = u64::from(sys::TFS_BLOCK);
        let mut pieces = Vec::new();
        let mut at = offset;
        while at < end {
            let (fblock, within) = (at / block, at % block);
            let want = end.div_ceil(block) - fblock;
            let run = self.fs.map(self.nodes.handle(h.node), fblock, want)?;
            let bytes = (run.count.clamp(1, want) * block - within).min(end - at);
            let from = if run.block == 0 {
                std::ptr::null()
            } else {
                let at = run.block.saturating_mul(block).saturating_add(within);
                if at.checked_add(bytes).is_none_or(|end| end > self.fs.area().size()) {
                    return Err(Errno::from_raw_os_error(libc::EUCLEAN));
                }
                // SAFETY: the run lies in the area, checked above.
                unsafe { self.fs.area().base().add(at as usize).cast_const() }
            };
            pieces.push(Piece { from, len: bytes as usize });
            at += bytes;
        }
        // Where another member has cut the file meanwhile there are holes.
        let mut left = self.fs.still_there(self.nodes.handle(h.node), offset, at - offset)? as usize;
        for piece in &mut pieces {
            piece.len = piece.len.min(left);
            left -= piece.len;
        }
        pieces.retain(|piece| piece.len > 0);
        if touches {
            self.note_read(h.node);
        }
        Ok(Reply::Zone(pieces, pin))
    }

    /// Stores the time of an access that has been answered, where the mount's options want that.
    pub(super) fn note_read(&self, number: u64) {
        let (file, now) = (self.nodes.handle(number), fs::now());
        let is_due = |attr: &Attr| {
            !(self.nodiratime && attr.mode & libc::S_IFMT == libc::S_IFDIR)
                && self.access_times.is_due(attr, now)
        };
        if self.fs.area().writable() && self.fs.getattr(file).is_ok_and(|attr| is_due(&attr)) {
            // The file may have been freed meanwhile.
            let _ = self.fs.touch_atime(file, now);
        }
    }

    pub(super) fn write(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (_fh, offset, size, write_flags) = (u64s(&mut c)?, u64s(&mut c)?, u32s(&mut c)?, u32s(&mut c)?);
        let (_owner, flags, _) = (u64s(&mut c)?, u32s(&mut c)? as i32, u32s(&mut c)?);
        let data = c.bytes(size as usize).ok_or_else(short)?;
        let kill = write_flags & abi::WRITE_KILL_SUIDGID != 0;
        let attr = self.fs.getattr(self.nodes.handle(h.node))?;
        self.refuse_protected(&attr, flags & libc::O_APPEND == 0)?;
        self.drop_capability(&attr)?;
        self.drop_group_mark(h, &attr, kill)?;
        let written = if flags & libc::O_APPEND != 0 {
            self.fs.append(self.nodes.handle(h.node), data, kill)?.0
        } else {
            self.fs.pwrite(self.nodes.handle(h.node), data, offset, kill)?
        };
        // Also a part of O_SYNC; the kernel sets it for RWF_DSYNC and RWF_SYNC, too.
        if flags & libc::O_DSYNC != 0 {
            self.sync()?;
        }
        self.nodes.wrote(h.node, offset.saturating_add(written as u64), flags & libc::O_DIRECT != 0);
        let mut out = Out::new();
        out.u32(written as u32).u32(0);
        Ok(Reply::Body(out))
    }

    pub(super) fn fallocate(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (_fh, offset, len, mode) = (u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?, u32s(&mut c)? as i32);
        let attr = self.fs.getattr(self.nodes.handle(h.node))?;
        self.refuse_protected(&attr, mode & !libc::FALLOC_FL_KEEP_SIZE != 0)?;
        let mut core = 0;
        let mut left = mode;
        for (flag, tfs) in [
            (libc::FALLOC_FL_KEEP_SIZE, sys::TFS_FALLOC_KEEP_SIZE),
            (libc::FALLOC_FL_PUNCH_HOLE, sys::TFS_FALLOC_PUNCH),
            (libc::FALLOC_FL_ZERO_RANGE, sys::TFS_FALLOC_ZERO),
        ] {
            if mode & flag != 0 {
                core |= tfs;
                left &= !flag;
            }
        }
        if left != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        self.drop_privileges(h, &attr)?;
        self.fs.fallocate(self.nodes.handle(h.node), core, offset, len)?;
        if mode & libc::FALLOC_FL_KEEP_SIZE == 0 {
            self.nodes.wrote(h.node, offset.saturating_add(len), false);
        }
        empty()
    }

    pub(super) fn copy_file_range(&self, h: &Header, mut c: Cursor<'_>) -> Answer<'_> {
        let (_fh_in, from) = (u64s(&mut c)?, u64s(&mut c)?);
        let (out_node, _fh_out, to, len) = (u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?, u64s(&mut c)?);
        let to_file = self.nodes.handle(out_node);
        let attr = self.fs.getattr(to_file)?;
        self.refuse_protected(&attr, true)?;
        self.drop_privileges(h, &attr)?;
        let len = len.min(COPY_LIMIT);
        let mut buf = tombolo_heap::zeroed(len.min(1 << 20) as usize).ok_or(Errno::NOMEM)?;
        let mut done = 0;
        while done < len {
            let want = (len - done).min(buf.len() as u64) as usize;
            let got = self.fs.pread(self.nodes.handle(h.node), &mut buf[..want], from + done)?;
            if got == 0 {
                break;
            }
            match self.fs.pwrite(to_file, &buf[..got], to + done, false) {
                Ok(put) => done += put as u64,
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        self.nodes.wrote(out_node, to.saturating_add(done), false);
        let mut out = Out::new();
        out.u32(done as u32).u32(0);
        Ok(Reply::Body(out))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::abi::op;
    use super::*;
    use crate::area::Area;
    use crate::fs::{Create, Filesystem, Mkfs, ROOT};

    /// The server of a mount whose zone has a file that can't be synced: one end of a pipe.
    fn unable_to_sync() -> Server {
        let zone =
            tombolo_zone::Zone::create(&tombolo_zone::ZoneConfig::new("ops", 16 << 20)).expect("a zone");
        let area = zone.area(tombolo_zone::AreaType::Files, None).expect("an area");
        let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
        let area = Area::of_zone(&Arc::new(zone), &area, None, Some(pipe)).expect("an area");
        fs::mkfs(&area, &Mkfs::default()).expect("mkfs");
        let fs = Filesystem::open(area.lone()).expect("open");
        Server::new(fs)
    }

    #[test]
    fn a_write_with_o_dsync_syncs_as_fsync_does() {
        let server = unable_to_sync();
        let file =
            server.fs.create(ROOT, Some(b"file"), &Create::mode(libc::S_IFREG | 0o600)).expect("create");
        let ask = |opcode, body: &Out| {
            let node = server.nodes.number(file);
            let h = Header { opcode, unique: 1, node, uid: 0, gid: 0, pid: 0 };
            server.answer(&h, Cursor(&body.0)).map(drop)
        };
        let write = |flags: i32| {
            let mut body = Out::new();
            body.u64(1).u64(0).u32(4).u32(0).u64(0).u32(flags as u32).u32(0).bytes(b"data");
            ask(op::WRITE, &body)
        };
        let mut fsync = Out::new();
        fsync.u64(1).u32(0).u32(0);
        let refused = ask(op::FSYNC, &fsync);
        assert_eq!(refused, Err(Errno::INVAL), "no pipe can be synced");
        assert_eq!(write(libc::O_WRONLY), Ok(()));
        for flags in [libc::O_DSYNC, libc::O_SYNC] {
            assert_eq!(write(libc::O_WRONLY | flags), refused);
        }
    }

    #[test]
    fn a_read_with_o_noatime_leaves_the_time_of_the_last_access() {
        let server = unable_to_sync();
        let file =
            server.fs.create(ROOT, Some(b"file"), &Create::mode(libc::S_IFREG | 0o600)).expect("create");
        server.fs.pwrite(file, b"data", 0, false).expect("a write");
        let before = Attr { atime: 1, ..Attr::default() };
        server.fs.setattr(file, sys::TFS_SET_ATIME, &before).expect("a time");
        let time_after_read = |flags: i32| {
            let mut body = Out::new();
            body.u64(1).u64(0).u32(4).u32(0).u64(0).u32(flags as u32).u32(0);
            let node = server.nodes.number(file);
            let h = Header { opcode: op::READ, unique: 1, node, uid: 0, gid: 0, pid: 0 };
            server.answer(&h, Cursor(&body.0)).map(drop).expect("a read");
            server.fs.getattr(file).expect("attributes").atime
        };
        assert_eq!(time_after_read(libc::O_NOATIME), 1);
        assert!(time_after_read(0) > 1);
    }
}
