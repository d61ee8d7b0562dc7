// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Archives in the `newc` format that the kernel unpacks as an initramfs
//! (Linux `Documentation/driver-api/early-userspace/buffer-format.rst`).

use std::io::{self, Write};

/// Writes entries one after another; [`Archive::finish`] closes the archive.
pub struct Archive<W: Write> {
    out: W,
    inode: u32,
}

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const PLAIN: u32 = 0o100_644;
const CHARACTER_DEVICE: u32 = 0o020_600;

impl<W: Write> Archive<W> {
    /// An empty archive on `out`.
    pub fn new(out: W) -> Self {
        Self { out, inode: 1 }
    }

    /// A folder; its parents must have been added before.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, DIRECTORY, (0, 0), &[])
    }

    /// A file that may be executed.
    pub fn program(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        self.entry(path, PROGRAM, (0, 0), content)
    }

    /// A plain file.
    pub fn file(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        self.entry(path, PLAIN, (0, 0), content)
    }

    /// A character device with these numbers, major and minor.
    pub fn device(&mut self, path: &str, numbers: (u32, u32)) -> io::Result<()> {
        self.entry(path, CHARACTER_DEVICE, numbers, &[])
    }

    /// Writes the trailer and gives the writer back.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let size = u32::try_from(content.len())
            .map_err(|_| io::Error::other(format!("{path}: too large for a cpio archive")))?;
        let name_size = u32::try_from(path.len() + 1).map_err(io::Error::other)?;
        // inode, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.inode += 1;
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08X}")?;
        }
        self.out.write_all(path.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(110 + path.len() + 1)?;
        self.out.write_all(content)?;
        self.pad(content.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..(4 - written % 4) % 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn entries_begin_on_four_bytes_and_end_with_the_trailer() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("bin").unwrap();
        archive.program("bin/x", b"12345").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let starts: Vec<usize> =
            bytes.windows(6).enumerate().filter(|(_, w)| w == b"070701").map(|(i, _)| i).collect();
        assert_eq!(starts.len(), 3);
        assert!(starts.iter().all(|s| s % 4 == 0));
        assert!(bytes.windows(10).any(|w| w == b"TRAILER!!!"));
    }

    #[test]
    fn busybox_unpacks_what_was_packed() {
        let folder = tempfile::tempdir().unwrap();
        let mut archive = Archive::new(Vec::new());
        archive.directory("a").unwrap();
        archive.file("a/empty", b"").unwrap();
        archive.program("a/run", b"#!/bin/sh\n").unwrap();
        let bytes = archive.finish().unwrap();
        let mut child = Command::new("busybox")
            .args(["cpio", "-i"])
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("busybox (package busybox-static) is needed");
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(std::fs::read(folder.path().join("a/empty")).unwrap(), b"");
        assert_eq!(std::fs::read(folder.path().join("a/run")).unwrap(), b"#!/bin/sh\n");
    }
}
