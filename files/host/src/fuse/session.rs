// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A mount's life: opens the device, mounts, negotiates with the kernel, answers requests on several threads, unmounts.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use super::abi::{self, Header, OUT_HEADER, Out, init, op};
use super::locks::Request;
use super::ops::{Piece, Reply, Server};
use super::options::MountOptions;
use crate::caller;

/// Largest write the kernel sends at once.
const MAX_WRITE: u32 = 1 << 20;
/// Reads of more pieces than this are copied together.
const MAX_PIECES: usize = 1000;
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// The largest number of threads beyond those at the start.
const MOST_MORE: usize = 4096;

/// A file system mounted at a directory.
pub struct Mounted {
    device: Arc<File>,
    place: Place,
}

/// Where a file system is mounted.
pub struct Place {
    target: PathBuf,
    number: DeviceNumber,
}

/// The threads of a mount. A request may wait for another member, which may be suspended. So when the last idle thread takes one, another
/// thread is started, and ends when enough are idle again.
pub struct Threads {
    device: Arc<File>,
    server: Arc<Server>,
    /// A counter: threads that found the file system over.
    over: Arc<OwnedFd>,
    /// So many threads stay.
    keep: usize,
    idle: AtomicUsize,
    more: Mutex<Vec<JoinHandle<io::Result<()>>>>,
}

/// Opens the device and mounts it. Ordinary users go through fusermount3 (package fuse3).
pub fn mount(target: &Path, options: &MountOptions) -> io::Result<Mounted> {
    let target = target.canonicalize()?;
    let device = if rustix::process::geteuid().is_root() {
        mount_as_root(&target, options)?
    } else {
        mount_as_user(&target, options)?
    };
    Ok(Mounted { device: Arc::new(device), place: Place::of(target)? })
}

fn mount_as_root(target: &Path, options: &MountOptions) -> io::Result<File> {
    let device = File::options().read(true).write(true).open("/dev/fuse").map_err(|e| {
        io::Error::new(e.kind(), format!("/dev/fuse: {e}; load the kernel's module: modprobe fuse"))
    })?;
    let data = CString::new(format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    ))?;
    let source = CString::new(options.source.as_str())?;
    let path = CString::new(target.as_os_str().as_bytes())?;
    // SAFETY: terminated strings that live across the call.
    let ret = unsafe {
        libc::mount(
            source.as_ptr(),
            path.as_ptr(),
            c"fuse.tombolo".as_ptr(),
            options.flags(),
            data.as_ptr().cast(),
        )
    };
    if ret != 0 { Err(io::Error::last_os_error()) } else { Ok(device) }
}

fn mount_as_user(target: &Path, options: &MountOptions) -> io::Result<File> {
    let (ours, theirs) = UnixStream::pair()?;
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())?;
    let mut opts = format!("fsname={},subtype=tombolo,default_permissions", options.source.replace(',', "_"));
    opts += &options.text();
    if options.allow_other {
        opts += ",allow_other";
    }
    let out = Command::new("fusermount3")
        .args(["-o", &opts, "--"])
        .arg(target)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .output()
        .map_err(|e| io::Error::new(e.kind(), format!("fusermount3: {e}; install the package fuse3")))?;
    drop(theirs);
    if !out.status.success() {
        let text = String::from_utf8_lossy(&out.stderr).trim().to_owned();
        return Err(io::Error::other(format!("fusermount3: {text}")));
    }
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(
        &ours,
        &mut [io::IoSliceMut::new(&mut byte)],
        &mut control,
        rustix::net::RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in control.drain() {
        if let rustix::net::RecvAncillaryMessage::ScmRights(mut fds) = message {
            if let Some(fd) = fds.next() {
                return Ok(File::from(fd));
            }
        }
    }
    Err(io::Error::other("fusermount3 passed no descriptor of /dev/fuse"))
}

impl Mounted {
    pub fn target(&self) -> &Path {
        &self.place.target
    }

    /// Negotiates features with the kernel. Called once, before any thread serves.
    pub fn handshake(&self, server: &Server) -> io::Result<()> {
        let mut buf = vec![0; MAX_WRITE as usize + 8192];
        // The kernel may offer a newer major version first; then it asks again with ours.
        for _ in 0..2 {
            let len = (&*self.device).read(&mut buf)?;
            let bad =
                |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("FUSE handshake: {what}"));
            let (h, mut c) = Header::parse(&buf[..len]).ok_or_else(|| bad("a short request"))?;
            if h.opcode != op::INIT {
                return Err(bad("something else than INIT came first"));
            }
            let mut next = || c.u32().ok_or_else(|| bad("a short INIT"));
            let (major, minor, readahead, flags) = (next()?, next()?, next()?, next()?);
            let mut out = Out::new();
            if major != abi::MAJOR {
                out.u32(abi::MAJOR).u32(abi::MINOR).zeros(56);
                send(&self.device, h.unique, &Ok(Reply::Body(out)))?;
                continue;
            }
            if minor < abi::MINOR_MIN {
                send(&self.device, h.unique, &Err(Errno::PROTO))?;
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!(
                        "this kernel speaks FUSE {major}.{minor}; 7.{} is needed (Linux 5.11)",
                        abi::MINOR_MIN
                    ),
                ));
            }
            let mut offered = u64::from(flags);
            if offered & init::INIT_EXT != 0 {
                offered |= u64::from(c.u32().unwrap_or(0)) << 32;
            }
            // Without ASYNC_DIO: the kernel would send the pieces of one large asynchronous append at once, and the threads would append them in any order.
            // AUTO_INVAL_DATA: the kernel drops the pages that sendfile(2) and splice(2) read, once it sees that another member changed the file.
            let mut wanted = init::ASYNC_READ
                | init::EXPORT_SUPPORT
                | init::BIG_WRITES
                | init::DONT_MASK
                | init::AUTO_INVAL_DATA
                | init::PARALLEL_DIROPS
                | init::POSIX_ACL
                | init::MAX_PAGES
                | init::HANDLE_KILLPRIV_V2
                | init::SETXATTR_EXT
                | init::INIT_EXT;
            // A read-only mount keeps its locks in the kernel: in the zone they would be stores.
            if server.fs.area().writable() {
                wanted |= init::POSIX_LOCKS | init::FLOCK_LOCKS;
            }
            let agreed = wanted & offered;
            out.u32(abi::MAJOR).u32(abi::MINOR.min(minor)).u32(readahead).u32(agreed as u32);
            out.u16(64).u16(48).u32(MAX_WRITE).u32(1).u16((MAX_WRITE / 4096) as u16).u16(0);
            out.u32((agreed >> 32) as u32).u32(0).zeros(24);
            return send(&self.device, h.unique, &Ok(Reply::Body(out)));
        }
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the kernel and this program speak different versions of FUSE",
        ))
    }

    /// Makes the threads: `keep` of them and, while those wait, more. One that finds the file system over adds to the counter `over`, and ends.
    pub fn threads(&self, server: Arc<Server>, over: Arc<OwnedFd>, keep: usize) -> Arc<Threads> {
        let (idle, more) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        Arc::new(Threads { device: Arc::clone(&self.device), server, over, keep, idle, more })
    }

    /// Unmounts; a mount in use is detached, so that the directory is free at once. Returns whether it was unused. Another process may have unmounted it
    /// before, and mounted something else here since, which stays.
    ///
    /// # Errors
    /// Another mount covers it; and others.
    pub fn unmount(&self) -> io::Result<bool> {
        if self.has_ended()? {
            return Ok(true);
        }
        if self.place.detach()? { self.has_ended() } else { Ok(true) }
    }

    /// Returns whether the file system has no mount left, in any mount namespace.
    fn has_ended(&self) -> io::Result<bool> {
        let mut device = [PollFd::new(&*self.device, PollFlags::empty())];
        rustix::io::retry_on_intr(|| poll(&mut device, Some(&Timespec::default())))?;
        Ok(device[0].revents().contains(PollFlags::ERR))
    }
}

/// Takes the mount at `target` away, so that the directory is free at once; what uses the mount keeps it. Returns false if nothing is mounted there, or not
/// the file system `of`.
pub fn detach(target: &Path, of: Option<DeviceNumber>) -> io::Result<bool> {
    let place =
        match rustix::fs::open(target, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(place) => Some(place),
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(false),
            // By name then.
            Err(Errno::MFILE | Errno::NFILE) => None,
            Err(e) => return Err(e.into()),
        };
    let number = || {
        place
            .as_ref()
            .map_or_else(|| DeviceNumber::at(CWD, target), |place| DeviceNumber::at(place, Path::new("")))
    };
    if of.is_some() && of != Some(number()?) {
        return Ok(false);
    }
    if !rustix::process::geteuid().is_root() {
        drop(place);
        // By name: fusermount3 takes no descriptor. What is mounted here between the look above and its own is unmounted, if it is this user's.
        let out = Command::new("fusermount3").args(["-uz", "--"]).arg(target).output()?;
        if out.status.success() {
            return Ok(true);
        }
        let text = String::from_utf8_lossy(&out.stderr).trim().to_owned();
        return Err(io::Error::other(format!("fusermount3 could not unmount {}: {text}", target.display())));
    }
    // The descriptor names this very mount, whatever is mounted here since. By name where /proc is missing.
    let by_descriptor =
        place.as_ref().map(|place| PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd())));
    let detached = by_descriptor.map_or(Err(Errno::NOENT), |name| detach_name(&name));
    match if detached == Err(Errno::NOENT) { detach_name(target) } else { detached } {
        Ok(()) => Ok(true),
        // Not a mount, or not any more: another process has unmounted it.
        Err(Errno::INVAL) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn detach_name(name: &Path) -> Result<(), Errno> {
    let name = CString::new(name.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    // SAFETY: a terminated string.
    match unsafe { libc::umount2(name.as_ptr(), libc::MNT_DETACH) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

impl Place {
    /// Of the file system that is mounted at `target`.
    pub fn of(target: PathBuf) -> io::Result<Place> {
        let number = DeviceNumber::at(CWD, &target)?;
        Ok(Place { target, number })
    }

    /// Detaches it, here or wherever it was moved to. Returns whether it was here.
    ///
    /// # Errors
    /// Another mount covers it; and others.
    pub fn detach(&self) -> io::Result<bool> {
        if detach(&self.target, Some(self.number))? {
            return Ok(true);
        }
        // It was moved, or a directory above it renamed.
        for place in self.all()? {
            if !detach(&place, Some(self.number))? && self.all()?.contains(&place) {
                let place = place.display();
                return Err(io::Error::other(format!(
                    "another mount covers it; umount {place} until both are gone"
                )));
            }
        }
        Ok(false)
    }

    /// All directories where it is mounted, as this process sees it; none without /proc.
    fn all(&self) -> io::Result<Vec<PathBuf>> {
        match std::fs::read("/proc/self/mountinfo") {
            Ok(table) => Ok(self.number.places(&table)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }
}

/// The number of a file system's device, which no other file system has while this one is mounted somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNumber {
    major: u32,
    minor: u32,
}

impl DeviceNumber {
    /// Of the file system that `path`, or `dir` if it is empty, is on. Asks the kernel only, not the file system's process.
    fn at(dir: impl AsFd, path: &Path) -> io::Result<DeviceNumber> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
        let found = rustix::fs::statx(dir, path, flags, StatxFlags::empty())?;
        Ok(DeviceNumber { major: found.stx_dev_major, minor: found.stx_dev_minor })
    }

    /// The directories where its file system is mounted, by a table of mounts (proc(5), /proc/PID/mountinfo); the last mounted first.
    fn places(self, table: &[u8]) -> Vec<PathBuf> {
        let number = format!("{}:{}", self.major, self.minor);
        let place = |line: &[u8]| {
            let mut fields = line.split(|byte| *byte == b' ').skip(2);
            (fields.next()? == number.as_bytes()).then(|| fields.nth(1).map(unescaped)).flatten()
        };
        table.split(|byte| *byte == b'\n').rev().filter_map(place).collect()
    }
}

/// A path of a table of mounts, in which spaces and the like are written as three octal digits.
fn unescaped(text: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        let digits =
            after.get(..3).filter(|_| byte == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        path.push(escaped.unwrap_or(byte));
        rest = if escaped.is_some() { &after[3..] } else { after };
    }
    PathBuf::from(OsString::from_vec(path))
}

/// Another descriptor of the same mount, with a queue of its own.
fn clone_device(device: &File) -> io::Result<File> {
    let clone = File::options().read(true).write(true).open("/dev/fuse")?;
    let source: u32 = device.as_raw_fd() as u32;
    // SAFETY: the ioctl reads one u32.
    let ret = unsafe { libc::ioctl(clone.as_raw_fd(), abi::DEV_IOC_CLONE, &source) };
    if ret != 0 { Err(io::Error::last_os_error()) } else { Ok(clone) }
}

impl Threads {
    /// Starts a thread that answers requests until the mount ends.
    pub fn start(self: &Arc<Self>) -> io::Result<JoinHandle<io::Result<()>>> {
        self.spawn(false)
    }

    fn spawn(self: &Arc<Self>, extra: bool) -> io::Result<JoinHandle<io::Result<()>>> {
        // A user who may not open the device shares the one that fusermount3 opened.
        let device = clone_device(&self.device).map_or_else(|_| Arc::clone(&self.device), Arc::new);
        let buf = tombolo_heap::zeroed(MAX_WRITE as usize + 8192).ok_or(io::ErrorKind::OutOfMemory)?;
        let threads = Arc::clone(self);
        let name = std::thread::Builder::new().name("fuse".into());
        name.spawn(move || threads.serve(&device, buf, extra))
    }

    /// Starts a thread to take the next request. If that fails, the request waits for one of the present threads.
    fn start_another(self: &Arc<Self>) {
        let Ok(mut more) = self.more.lock() else { return };
        more.retain(|thread| !thread.is_finished());
        if more.len() < MOST_MORE {
            more.extend(self.spawn(true));
        }
    }

    /// Waits for the end of all threads started since. The mount has ended.
    pub fn join(&self) -> io::Result<()> {
        let more = self.more.lock().map(|mut more| std::mem::take(&mut *more)).unwrap_or_default();
        more.into_iter()
            .try_for_each(|t| t.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))))
    }

    fn serve(self: &Arc<Self>, device: &Arc<File>, mut buf: Vec<u8>, extra: bool) -> io::Result<()> {
        while !(extra && self.idle.load(Ordering::SeqCst) >= self.keep) {
            self.idle.fetch_add(1, Ordering::SeqCst);
            let read = (&**device).read(&mut buf);
            let idle = self.idle.fetch_sub(1, Ordering::SeqCst) - 1;
            let len = match read {
                Ok(0) => return Ok(()),
                Ok(len) => len,
                Err(e) => match e.raw_os_error() {
                    Some(libc::ENODEV) => return Ok(()),
                    // ENOENT: the request was interrupted before it was read.
                    Some(libc::EINTR | libc::ENOENT | libc::EAGAIN) => continue,
                    _ => return Err(e),
                },
            };
            if idle == 0 {
                self.start_another();
            }
            let goes_on = answer(device, &self.server, &buf[..len]);
            if is_over(&self.server) {
                tell(&self.over);
                return Ok(());
            }
            if !goes_on? {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// The answer to requests whose waits the end of the mount has ended: what programs get of a mount without a process. EINTR would be wrong, since no signal
/// has come: of a lock, the kernel makes an error of it that programs must never see (ERESTARTSYS).
pub(super) const GONE: Errno = Errno::NOTCONN;

/// Answers one request. False: the mount has ended.
fn answer(device: &Arc<File>, server: &Server, request: &[u8]) -> io::Result<bool> {
    let Some((header, body)) = Header::parse(request) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a short FUSE request"));
    };
    let answer = match header.opcode {
        op::DESTROY => Ok(Reply::Body(Out::new())),
        op::SETLKW => {
            let Some(request) = Request::parse(body) else {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a short request for a lock"));
            };
            let asked = (device, header.unique);
            match server.locks.set_or_wait(&server.fs, asked, server.nodes.handle(header.node), &request) {
                None => return Ok(true),
                Some(done) => done.map(|()| Reply::Body(Out::new())),
            }
        }
        // This gives back what a process that ends has left; no process waits for it. It may wait for a suspended member, so it is answered first: the kernel
        // sends no further ones while a number of them is unanswered.
        op::RELEASE | op::RELEASEDIR => {
            let told = send(device, header.unique, &Ok(Reply::Body(Out::new())));
            // An error has no reader any more; the recovery of this member does the rest.
            let _ = server.answer(&header, body);
            return told_of_end(told);
        }
        op::FLUSH => {
            let done = {
                let _working = caller::work_for_last(header.pid);
                server.answer(&header, body)
            };
            if !matches!(done, Err(Errno::INTR)) {
                done
            } else {
                let told = send(device, header.unique, &Ok(Reply::Body(Out::new())));
                // An error has no reader any more; the recovery of this member does the rest.
                let _ = server.finish_flush(&header, body);
                return told_of_end(told);
            }
        }
        _ => {
            let _working = caller::work_for(header.pid);
            server.answer(&header, body)
        }
    };
    let answer = match answer {
        // A request that met lost memory has read or written no file.
        _ if server.fs.area().is_lost() => Err(Errno::IO),
        Err(Errno::INTR) if server.fs.waits_are_over() => Err(GONE),
        answer => answer,
    };
    told_of_end(send(device, header.unique, &answer))
}

/// Returns whether this process can't use the file system any more: its memory is lost, or its member was declared dead.
pub fn is_over(server: &Server) -> bool {
    server.fs.area().is_lost() || server.fs.area().is_expelled()
}

/// Adds to a counter on which another thread waits.
pub fn tell(counter: &OwnedFd) {
    // One that is full wakes that thread, too.
    let _full = rustix::io::write(counter, &1u64.to_ne_bytes());
}

/// Returns whether the mount goes on after an answer was sent.
fn told_of_end(sent: io::Result<()>) -> io::Result<bool> {
    match sent {
        Ok(()) => Ok(true),
        // ENOENT: the caller was killed meanwhile.
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Answers a request that had to wait. An error: the mount has ended.
pub(super) fn answer_late(device: &File, unique: u64, answer: Result<(), Errno>) -> io::Result<()> {
    send(device, unique, &answer.map(|()| Reply::Body(Out::new())))
}

fn header_bytes(unique: u64, error: i32, body: usize) -> [u8; OUT_HEADER] {
    let mut header = [0; OUT_HEADER];
    header[0..4].copy_from_slice(&((OUT_HEADER + body) as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..16].copy_from_slice(&unique.to_ne_bytes());
    header
}

fn send(device: &File, unique: u64, answer: &Result<Reply<'_>, Errno>) -> io::Result<()> {
    let mut device = device;
    match answer {
        Ok(Reply::None) => Ok(()),
        Err(error) => device.write_all(&header_bytes(unique, -error.raw_os_error(), 0)),
        Ok(Reply::Body(out) | Reply::Found(out)) => {
            let header = header_bytes(unique, 0, out.0.len());
            device.write_vectored(&[IoSlice::new(&header), IoSlice::new(&out.0)]).map(|_| ())
        }
        Ok(Reply::Zone(pieces, _pin)) => send_zone(device, unique, pieces),
    }
}

/// Sends a reply with pieces of the zone. The device takes one reply in one writev, which may have 1024 parts at most.
fn send_zone(device: &File, unique: u64, pieces: &[Piece]) -> io::Result<()> {
    let total: usize = pieces.iter().map(|p| p.len).sum();
    let header = header_bytes(unique, 0, total);
    let mut parts = vec![libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: OUT_HEADER }];
    let mut copy: Vec<u8>;
    if pieces.len() > MAX_PIECES || pieces.iter().any(|p| p.from.is_null() && p.len > ZEROS.len()) {
        let Some(memory) = tombolo_heap::zeroed(total) else {
            return send(device, unique, &Err(Errno::NOMEM));
        };
        copy = memory;
        let mut at = 0;
        for piece in pieces {
            if !piece.from.is_null() {
                // SAFETY: the piece lies in the zone's mapping and is held by a pin; copy has room for all pieces.
                unsafe { std::ptr::copy_nonoverlapping(piece.from, copy.as_mut_ptr().add(at), piece.len) };
            }
            at += piece.len;
        }
        parts.push(libc::iovec { iov_base: copy.as_mut_ptr().cast(), iov_len: total });
    } else {
        parts.extend(pieces.iter().map(|p| libc::iovec {
            iov_base: if p.from.is_null() { ZEROS.as_ptr() } else { p.from }.cast_mut().cast(),
            iov_len: p.len,
        }));
    }
    // SAFETY: every part is readable memory for the length it says: the header, the copy, zeros, or the zone's mapping.
    let ret = unsafe { libc::writev(device.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int) };
    if ret >= 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EFAULT) {
        touch(pieces);
    }
    Err(error)
}

/// Loads from each page of the pieces. A kernel that misses one of them answers EFAULT; a load then marks the memory as lost.
fn touch(pieces: &[Piece]) {
    for piece in pieces.iter().filter(|piece| !piece.from.is_null()) {
        for at in (0..piece.len).step_by(4096).chain([piece.len.saturating_sub(1)]) {
            // SAFETY: within the piece, which lies in the zone's mapping; the value is not used.
            unsafe { piece.from.add(at).read_volatile() };
        }
    }
}

/// Signals that end a mount, as a descriptor to wait on. Blocks them in the calling thread: call before any thread starts.
pub fn end_signals() -> io::Result<File> {
    // SAFETY: a plain sigset, made by sigemptyset.
    let fd: RawFd = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor without another owner.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}
