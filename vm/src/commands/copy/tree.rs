// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A folder of this host as a tar, for a guest.
//!
//! Files may change while they are read. What the tar's header says of a file's length holds: of one that grows the rest is left out, and one that
//! shrinks is an error. Sparse files are sent with their zeroes, since BusyBox' tar knows no others.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A tar of a folder's content, as it is made; an error of its making is one of reading it.
///
/// # Errors
/// When no socket or thread can be had.
pub(super) fn tar_of(folder: PathBuf) -> anyhow::Result<Box<dyn Read + Send>> {
    let (reader, writer) = UnixStream::pair()?;
    let failed = Arc::new(Mutex::new(None));
    let outcome = failed.clone();
    crate::thread::start("tar", move || {
        let mut tar = tar::Builder::new(writer);
        tar.follow_symlinks(false);
        let made = pack(&mut tar, &folder);
        // Before its end of the socket is closed.
        *outcome.lock().unwrap_or_else(PoisonError::into_inner) = made.err();
    })?;
    Ok(Box::new(Tar { reader, failed, over: false }))
}

struct Tar {
    reader: UnixStream,
    failed: Arc<Mutex<Option<io::Error>>>,
    over: bool,
}

impl Read for Tar {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.over {
            let n = self.reader.read(buffer)?;
            if n > 0 {
                return Ok(n);
            }
            self.over = true;
        }
        match self.failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(e) => Err(e),
            None => Ok(0),
        }
    }
}

/// Appends all that is in `folder`, under "." and in no particular order but folders before their content.
fn pack<W: Write>(tar: &mut tar::Builder<W>, folder: &Path) -> io::Result<()> {
    let mut left = vec![PathBuf::new()];
    while let Some(inside) = left.pop() {
        let source = folder.join(&inside);
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", source.display()));
        let kind = fs::symlink_metadata(&source).map_err(named)?.file_type();
        let name = Path::new(".").join(&inside);
        if kind.is_dir() {
            tar.append_dir(&name, &source).map_err(named)?;
            for entry in fs::read_dir(&source).map_err(named)? {
                left.push(inside.join(entry.map_err(named)?.file_name()));
            }
        } else if kind.is_file() {
            append_file(tar, &name, &source).map_err(named)?;
        } else if kind.is_socket() {
            crate::say!("{} is a socket and is left out", source.display());
        } else {
            append_special(tar, &name, &source).map_err(named)?;
        }
    }
    tar.finish()
}

fn append_file<W: Write>(tar: &mut tar::Builder<W>, name: &Path, source: &Path) -> io::Result<()> {
    // Something else may have come to its place.
    let file =
        OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(source)?;
    let meta = file.metadata()?;
    let mut header = tar::Header::new_gnu();
    header.set_metadata(&meta);
    tar.append_data(&mut header, name, Content::of(file, &meta))
}

/// Appends a link, a FIFO or a device.
fn append_special<W: Write>(tar: &mut tar::Builder<W>, name: &Path, source: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(source)?;
    let mut header = tar::Header::new_gnu();
    header.set_metadata(&meta);
    header.set_size(0);
    if meta.is_symlink() {
        return tar.append_link(&mut header, name, fs::read_link(source)?);
    }
    if !meta.file_type().is_fifo() {
        header.set_device_major(rustix::fs::major(meta.rdev()))?;
        header.set_device_minor(rustix::fs::minor(meta.rdev()))?;
    }
    tar.append_data(&mut header, name, io::empty())
}

/// A file's bytes, as many as it had when it was opened.
struct Content {
    file: io::Take<File>,
}

impl Content {
    fn of(file: File, meta: &Metadata) -> Content {
        Content { file: file.take(meta.len()) }
    }
}

impl Read for Content {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(buffer)?;
        if n == 0 && !buffer.is_empty() && self.file.limit() > 0 {
            return Err(io::Error::other("it has become shorter while it was read; copy it again"));
        }
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom};

    #[test]
    fn a_file_that_grows_is_cut_at_its_first_length_and_one_that_shrinks_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"begun").unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let meta = file.metadata().unwrap();
        let mut content = Content::of(file.try_clone().unwrap(), &meta);
        file.seek(SeekFrom::End(0)).unwrap();
        file.write_all(b", and more").unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let mut read = String::new();
        content.read_to_string(&mut read).unwrap();
        assert_eq!(read, "begun");
        file.seek(SeekFrom::Start(0)).unwrap();
        let meta = file.metadata().unwrap();
        file.set_len(3).unwrap();
        let error = Content::of(file, &meta).read_to_string(&mut read).unwrap_err();
        assert!(error.to_string().contains("has become shorter"), "{error}");
    }

    /// A folder's tar, unpacked by the BusyBox of small guests or by GNU tar.
    fn unpacked(folder: &Path, tar: &[&str]) -> tempfile::TempDir {
        let to = tempfile::tempdir().unwrap();
        let mut command = std::process::Command::new(tar[0]);
        command.args(&tar[1..]).args(["-x", "-f", "-", "-C"]).arg(to.path());
        let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let mut from = tar_of(folder.to_owned()).unwrap();
        io::copy(&mut from, &mut child.stdin.take().unwrap()).unwrap();
        assert!(child.wait().unwrap().success(), "{tar:?}");
        to
    }

    #[test]
    fn files_with_holes_sockets_and_files_of_the_kernel_make_a_tar_that_each_guest_reads() {
        let dir = tempfile::tempdir().unwrap();
        let sparse = File::create(dir.path().join("sparse")).unwrap();
        sparse.set_len(8 << 20).unwrap();
        fs::write(dir.path().join("z"), "last").unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        fs::create_dir(dir.path().join("special")).unwrap();
        std::os::unix::fs::symlink("l".repeat(200), dir.path().join("special/link")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.path().join("special/fifo"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        let long = "l".repeat(200);
        fs::write(dir.path().join(&long), "long").unwrap();
        for tar in [&["tar"][..], &["busybox", "tar"]] {
            let to = unpacked(dir.path(), tar);
            assert_eq!(fs::metadata(to.path().join("sparse")).unwrap().len(), 8 << 20);
            assert_eq!(fs::read_to_string(to.path().join("z")).unwrap(), "last");
            assert_eq!(fs::read_to_string(to.path().join(&long)).unwrap(), "long");
            assert!(!to.path().join("socket").exists());
            assert_eq!(fs::read_link(to.path().join("special/link")).unwrap(), Path::new(&"l".repeat(200)));
            let fifo = fs::symlink_metadata(to.path().join("special/fifo")).unwrap();
            assert!(fifo.file_type().is_fifo() && fifo.mode() & 0o777 == 0o400);
            // The kernel says 0 bytes of files that have some.
            unpacked(Path::new("/proc/sys/fs/inotify"), tar);
        }
    }
}
