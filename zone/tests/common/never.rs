// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file of a FUSE file system whose pages never come: each read, and if wanted each close or each poll but the first, waits until
//! the file system ends.

#![allow(dead_code)]

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Kinds of requests (fuse.h).
const FLUSH: u32 = 25;
const POLL: u32 = 40;

/// The file system. Dropping it ends it, and waiting processes get an error.
pub struct Never {
    closing: Arc<AtomicBool>,
    folder: tempfile::TempDir,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Never {
    /// A file system with one file of `size` bytes. Needs the right to mount.
    pub fn new(size: u64) -> Self {
        Self::start(size, None)
    }

    /// The same, and closing the file waits as well.
    pub fn not_even_closed(size: u64) -> Self {
        Self::start(size, Some(FLUSH))
    }

    /// The same, and a poll of the file says the first time that it is readable, and waits later.
    pub fn polled_once(size: u64) -> Self {
        Self::start(size, Some(POLL))
    }

    /// Returns whether a process waits in a close or a poll.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    fn start(size: u64, waits: Option<u32>) -> Self {
        let closing = Arc::new(AtomicBool::new(false));
        let folder = tempfile::tempdir().unwrap();
        let mut device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        // SAFETY: asks for numbers.
        let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
        let fd = device.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id={user},group_id={group},allow_other");
        let target = CString::new(folder.path().as_os_str().as_bytes()).unwrap();
        let options = CString::new(options).unwrap();
        // SAFETY: strings with their zeros.
        let mounted = unsafe {
            let flags = libc::MS_NODEV | libc::MS_NOSUID;
            libc::mount(c"never".as_ptr(), target.as_ptr(), c"fuse".as_ptr(), flags, options.as_ptr().cast())
        };
        assert_eq!(mounted, 0, "{}", std::io::Error::last_os_error());
        let (stop, ended) = UnixStream::pair().unwrap();
        let seen = closing.clone();
        let thread = std::thread::spawn(move || {
            let mut request = vec![0; 1 << 20];
            let mut polled = false;
            loop {
                let wait = |fd: &dyn AsFd| libc::pollfd {
                    fd: fd.as_fd().as_raw_fd(),
                    events: libc::POLLIN,
                    revents: 0,
                };
                let mut both = [wait(&device), wait(&ended)];
                // SAFETY: two descriptors of ours that are open.
                if unsafe { libc::poll(both.as_mut_ptr(), 2, -1) } < 1 || both[1].revents != 0 {
                    // The device is closed: waiting processes get an error.
                    return;
                }
                let Ok(len) = device.read(&mut request) else { return };
                let kind = u32::from_ne_bytes(request[4..8].try_into().unwrap());
                if waits == Some(kind) && (kind != POLL || std::mem::replace(&mut polled, true)) {
                    seen.store(true, Ordering::Release);
                    continue;
                }
                if let Some(reply) = answer(&request[..len], size) {
                    // The asking process may have ended.
                    let _gone = device.write(&reply);
                }
            }
        });
        Self { closing, folder, stop: Some(stop), thread: Some(thread) }
    }

    /// The file's path.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("memory")
    }

    /// The file, opened.
    pub fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(self.path()).unwrap()
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Never {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        let target = CString::new(self.folder().as_os_str().as_bytes()).unwrap();
        // SAFETY: a string with its zero.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

/// struct fuse_attr, of the folder (1) or of the file (2).
fn attributes(node: u64, size: u64) -> Vec<u8> {
    let (mode, size) = if node == 1 { (libc::S_IFDIR | 0o755, 0) } else { (libc::S_IFREG | 0o666, size) };
    let long = [node, size, size / 512, 0, 0, 0];
    let short = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
    [long.map(u64::to_ne_bytes).concat(), short.map(u32::to_ne_bytes).concat()].concat()
}

/// The answer to a request (fuse.h, protocol 7.31), if it gets one.
fn answer(request: &[u8], size: u64) -> Option<Vec<u8>> {
    let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
    let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap());
    let valid = |seconds: u64| [seconds.to_ne_bytes(), [0; 8]].concat();
    let done = |body: Vec<u8>| (0, body);
    // Node, generation, how long name and attributes are valid.
    let entry = || [valid(2), 9u64.to_ne_bytes().repeat(2), vec![0; 8], attributes(2, size)].concat();
    let (error, body) = match word(4) {
        POLL => done([libc::POLLIN as u32, 0].map(u32::to_ne_bytes).concat()),
        // LOOKUP
        1 if &request[40..] == b"memory\0" => done(entry()),
        1 => (-libc::ENOENT, Vec::new()),
        // CREATE
        35 => done([entry(), vec![0; 16]].concat()),
        // UNLINK
        10 => done(Vec::new()),
        // STATFS
        17 => done(vec![0; 80]),
        // GETATTR
        3 => done([valid(9), attributes(long(16), size)].concat()),
        // OPEN
        14 => done(vec![0; 16]),
        // INIT: major and minor version, sizes.
        26 => {
            let mut init = [7u32.to_ne_bytes(), 31u32.to_ne_bytes()].concat();
            init.resize(20, 0);
            init.extend((1u32 << 16).to_ne_bytes());
            init.resize(64, 0);
            done(init)
        }
        // READ is never answered; FORGET, INTERRUPT and BATCH_FORGET have no answer.
        15 | 2 | 36 | 42 => return None,
        _ => (-libc::ENOSYS, Vec::new()),
    };
    let len = (16 + body.len()) as u32;
    Some([&len.to_ne_bytes()[..], &error.to_ne_bytes(), &long(8).to_ne_bytes(), &body].concat())
}
