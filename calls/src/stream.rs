// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The transport without shared memory: records as frames on a byte stream (TCP, vsock). Each side has a window of its own; a range that
//! one side pushes is copied to the same place in the other's window, in order with the records.
//!
//! A frame is 8 bytes, length and kind, and its bytes. Sockets are non-blocking. Bytes that the kernel doesn't take wait here: records as bytes,
//! parts of the window as ranges, which are copied when the socket takes them, so that a peer that doesn't read costs no memory. A thread that
//! sleeps on a bell also writes them when the socket has room. Incoming bytes wake one sleeper, once (edge-triggered epoll): otherwise
//! all threads of a server would wake, again and again, until one of them has read them.

use crate::children::NotInChildren;
use crate::hello::{Geometry, Hello, welcome, welcomed};
use crate::memory::Mapping;
use crate::process::EventFd;
use crate::{Bell, Error, Link, Rx, Tx, Window};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const RECORD: u32 = 1;
const WINDOW: u32 = 2;
const MAX_RECORD: usize = 512 << 10;
const CHUNK: u64 = 256 << 10;
/// A sender waits when more than this is unsent.
const HIGH_WATER: u64 = 1 << 20;
/// Parts of the window that may wait for a peer to read them.
const MAX_PARTS: usize = 1 << 20;

/// An entry of the queue behind the bytes of [`Out`].
enum Waiting {
    /// Whole frames.
    Frames(Vec<u8>),
    /// A part of the window.
    Part(Range<u64>),
}

/// Frames that the kernel hasn't taken yet.
#[derive(Default)]
struct Out {
    /// Bytes of frames, from the index on.
    bytes: Vec<u8>,
    done: usize,
    waiting: VecDeque<Waiting>,
    /// Bytes that wait, of frames and of the window.
    waits: u64,
    parts: usize,
}

impl Out {
    fn unsent(&self) -> u64 {
        (self.bytes.len() - self.done) as u64 + self.waits
    }

    /// The buffer that a new frame is appended to: the end of the queue.
    fn end(&mut self) -> &mut Vec<u8> {
        if self.waiting.is_empty() {
            // A peer that is always a little behind: drop what it has.
            if self.done as u64 > HIGH_WATER {
                self.bytes.drain(..self.done);
                self.done = 0;
            }
            return &mut self.bytes;
        }
        if !matches!(self.waiting.back(), Some(Waiting::Frames(_))) {
            self.waiting.push_back(Waiting::Frames(Vec::new()));
        }
        match self.waiting.back_mut() {
            Some(Waiting::Frames(bytes)) => bytes,
            _ => &mut self.bytes,
        }
    }

    fn frame(&mut self, kind: u32, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        let waits = !self.waiting.is_empty();
        let end = self.end();
        end.extend_from_slice(&(len as u32).to_le_bytes());
        end.extend_from_slice(&kind.to_le_bytes());
        for part in parts {
            end.extend_from_slice(part);
        }
        if waits {
            self.waits += 8 + len as u64;
        }
    }

    /// Makes bytes of what waits, once those before are sent; `false`: nothing waits.
    fn refill(&mut self, window: &Window) -> Result<bool, Error> {
        self.bytes.clear();
        self.done = 0;
        match self.waiting.pop_front() {
            None => return Ok(false),
            Some(Waiting::Frames(frames)) => {
                self.waits -= frames.len() as u64;
                self.bytes = frames;
            }
            Some(Waiting::Part(Range { start, end })) => {
                let next = end.min(start + CHUNK);
                self.bytes.extend_from_slice(&(8 + (next - start) as u32).to_le_bytes());
                self.bytes.extend_from_slice(&WINDOW.to_le_bytes());
                self.bytes.extend_from_slice(&start.to_le_bytes());
                let at = self.bytes.len();
                self.bytes.resize(at + (next - start) as usize, 0);
                window.read(start, &mut self.bytes[at..])?;
                self.waits -= next - start;
                if next < end {
                    self.waiting.push_front(Waiting::Part(next..end));
                } else {
                    self.parts -= 1;
                }
            }
        }
        Ok(true)
    }
}

struct Shared {
    socket: NotInChildren,
    window: Arc<Window>,
    out: Mutex<Out>,
    pending: AtomicBool,
    kick: EventFd,
}

impl Shared {
    fn out(&self) -> MutexGuard<'_, Out> {
        // A panic elsewhere can't leave the buffer half changed in a way that matters more than the lost connection.
        self.out.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn flush(&self) -> Result<(), Error> {
        let mut out = self.out();
        loop {
            let rest = &out.bytes[out.done..];
            if rest.is_empty() {
                if out.refill(&self.window)? {
                    continue;
                }
                break;
            }
            // SAFETY: the slice lives during the call.
            let n = unsafe {
                libc::send(
                    self.socket.as_raw_fd(),
                    rest.as_ptr().cast(),
                    rest.len(),
                    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                )
            };
            match usize::try_from(n) {
                Ok(n) => out.done += n,
                Err(_) => {
                    let e = io::Error::last_os_error();
                    match e.kind() {
                        io::ErrorKind::WouldBlock => {
                            self.pending.store(true, Ordering::SeqCst);
                            return Ok(());
                        }
                        io::ErrorKind::Interrupted => {}
                        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                            return Err(Error::Closed);
                        }
                        _ => return Err(e.into()),
                    }
                }
            }
        }
        self.pending.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn unsent(&self) -> u64 {
        self.out().unsent()
    }

    /// Sleeps until the socket takes more, and gives it more.
    fn await_room(&self) -> Result<(), Error> {
        let mut fd = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: the structure lives during the call.
        if unsafe { libc::poll(&mut fd, 1, -1) } < 0 {
            let e = io::Error::last_os_error();
            return if e.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(e.into()) };
        }
        self.flush()
    }

    /// Returns whether the kernel has unread bytes, or the end of the stream.
    fn has_unread(&self) -> bool {
        let mut byte = 0u8;
        // SAFETY: room for the one byte.
        let n = unsafe {
            libc::recv(
                self.socket.as_raw_fd(),
                (&raw mut byte).cast(),
                1,
                libc::MSG_PEEK | libc::MSG_DONTWAIT,
            )
        };
        n >= 0
    }
}

struct StreamBell {
    shared: Arc<Shared>,
    epoll: OwnedFd,
}

impl StreamBell {
    fn new(shared: Arc<Shared>, readable: bool) -> io::Result<StreamBell> {
        // SAFETY: takes no memory; the result is checked.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: epoll is fresh.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        let of_socket = libc::EPOLLOUT | if readable { libc::EPOLLIN } else { 0 };
        let watched = [(shared.socket.as_raw_fd(), of_socket), (shared.kick.as_raw_fd(), libc::EPOLLIN)];
        for (fd, events) in watched {
            let mut event = libc::epoll_event { events: (events | libc::EPOLLET) as u32, u64: fd as u64 };
            // SAFETY: the event lives during the call.
            if unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(StreamBell { shared, epoll })
    }
}

impl Bell for StreamBell {
    fn wait(&self) -> Result<(), Error> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for the one event. Another event stays for the next sleeper.
        if unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), &mut event, 1, -1) } < 0 {
            let e = io::Error::last_os_error();
            return if e.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(e.into()) };
        }
        let (events, fd) = (event.events as i32, event.u64);
        if fd != self.shared.socket.as_raw_fd() as u64 {
            // A ring; the counter is never read, each ring wakes.
            return Ok(());
        }
        if events & libc::EPOLLOUT != 0 {
            // Flushes whatever is pending: the socket may have had room before a sender asked to be told.
            self.shared.flush()?;
        }
        if events & (libc::EPOLLHUP | libc::EPOLLERR) != 0 && events & libc::EPOLLIN == 0 {
            return Err(Error::Closed);
        }
        Ok(())
    }
    fn ring(&self) {
        self.shared.kick.ring();
    }
}

struct StreamTx {
    shared: Arc<Shared>,
    window: Arc<Window>,
    /// Set if sending waits until the kernel has taken everything. A server must go on reading instead.
    waits: bool,
}

impl Tx for StreamTx {
    fn try_send(&mut self, parts: &[&[u8]]) -> Result<bool, Error> {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        if len > MAX_RECORD {
            return Err(Error::TooLong { len, max: MAX_RECORD });
        }
        if self.shared.unsent() > HIGH_WATER {
            self.shared.flush()?;
            if self.shared.unsent() > HIGH_WATER {
                return Ok(false);
            }
        }
        self.shared.out().frame(RECORD, parts);
        Ok(true)
    }
    fn publish(&mut self) -> Result<(), Error> {
        self.shared.flush()?;
        // A client may not come back for long after a posted call, so nothing is left behind; its server always reads.
        while self.waits && self.shared.pending.load(Ordering::SeqCst) {
            self.shared.await_room()?;
        }
        Ok(())
    }
    fn arm_room(&mut self) -> Result<bool, Error> {
        self.shared.flush()?;
        Ok(self.shared.unsent() > HIGH_WATER)
    }
    fn max_record(&self) -> usize {
        MAX_RECORD
    }
    fn push_window(&mut self, offset: u64, len: u64) -> Result<(), Error> {
        self.window.at(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        {
            let mut out = self.shared.out();
            if out.parts == MAX_PARTS {
                return Err(Error::Broken("the peer doesn't read what it asked for"));
            }
            out.parts += 1;
            out.waits += len;
            out.waiting.push_back(Waiting::Part(offset..offset + len));
        }
        // A client's memory is its own again when this returns, so by then it is sent.
        self.publish()
    }
    fn shares_window(&self) -> bool {
        false
    }
}

struct StreamRx {
    shared: Arc<Shared>,
    window: Arc<Window>,
    bytes: Vec<u8>,
    at: usize,
    /// The buffer that the kernel reads into.
    incoming: Box<[u8]>,
}

impl StreamRx {
    fn frame(&mut self, into: &mut Vec<u8>) -> Result<bool, Error> {
        loop {
            let rest = &self.bytes[self.at..];
            let Some((header, rest)) = rest.split_first_chunk::<8>() else { return Ok(false) };
            let (len, kind) =
                (u64::from_le_bytes(*header) as u32 as usize, (u64::from_le_bytes(*header) >> 32) as u32);
            let max = if kind == RECORD { MAX_RECORD } else { CHUNK as usize + 8 };
            if len > max {
                return Err(Error::Broken("a frame is too long"));
            }
            let Some(frame) = rest.get(..len) else { return Ok(false) };
            match kind {
                RECORD => {
                    into.clear();
                    into.extend_from_slice(frame);
                    self.at += 8 + len;
                    return Ok(true);
                }
                WINDOW => {
                    let Some((offset, data)) = frame.split_first_chunk::<8>() else {
                        return Err(Error::Broken("a window frame without an offset"));
                    };
                    self.window.write(u64::from_le_bytes(*offset), data)?;
                    self.at += 8 + len;
                }
                _ => return Err(Error::Broken("a frame of an unknown kind")),
            }
        }
    }
}

impl Rx for StreamRx {
    fn try_recv(&mut self, into: &mut Vec<u8>) -> Result<bool, Error> {
        loop {
            if self.frame(into)? {
                return Ok(true);
            }
            self.bytes.drain(..self.at);
            self.at = 0;
            // SAFETY: the slice lives during the call.
            let n = unsafe {
                libc::recv(
                    self.shared.socket.as_raw_fd(),
                    self.incoming.as_mut_ptr().cast(),
                    self.incoming.len(),
                    libc::MSG_DONTWAIT,
                )
            };
            let error = io::Error::last_os_error();
            self.bytes.extend_from_slice(&self.incoming[..usize::try_from(n).unwrap_or(0)]);
            match n {
                0 => return Err(Error::Closed),
                1.. => {}
                _ => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(false),
                    io::ErrorKind::ConnectionReset => return Err(Error::Closed),
                    _ => return Err(error.into()),
                },
            }
        }
    }
    fn arm(&mut self) -> Result<bool, Error> {
        let rest = &self.bytes[self.at..];
        let whole =
            rest.first_chunk::<8>().is_some_and(|h| rest.len() >= 8 + u64::from_le_bytes(*h) as u32 as usize);
        // Edge-triggered epoll does not report bytes that came before.
        Ok(!whole && !self.shared.has_unread())
    }
    fn disarm(&mut self) {}
}

fn link(socket: OwnedFd, window: u64, waits: bool) -> Result<Link, Error> {
    let mapping = Arc::new(Mapping::private((window as usize).max(4096))?);
    let window = Arc::new(Window::new(mapping, 0, window).ok_or(Error::Broken("the window doesn't fit"))?);
    let socket = NotInChildren::new(socket)?;
    let gone = socket.try_clone()?;
    let shared = Arc::new(Shared {
        socket,
        window: window.clone(),
        out: Mutex::default(),
        pending: AtomicBool::new(false),
        kick: EventFd::new()?,
    });
    Ok(Link {
        tx: Box::new(StreamTx { shared: shared.clone(), window: window.clone(), waits }),
        rx: Box::new(StreamRx {
            shared: shared.clone(),
            window: window.clone(),
            bytes: Vec::new(),
            at: 0,
            incoming: vec![0; CHUNK as usize].into(),
        }),
        bell: Arc::new(StreamBell::new(shared.clone(), true)?),
        room: Arc::new(StreamBell::new(shared, !waits)?),
        window,
        gone,
    })
}

/// A connected stream socket as something to read and write in the handshake. A peer that is gone is an error, and no signal.
pub(crate) struct Plain<'a>(pub &'a dyn AsRawFd);

impl Read for Plain<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the slice lives during the call.
        let n = unsafe { libc::read(self.0.as_raw_fd(), into.as_mut_ptr().cast(), into.len()) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

impl Write for Plain<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        // SAFETY: the slice lives during the call.
        let n =
            unsafe { libc::send(self.0.as_raw_fd(), from.as_ptr().cast(), from.len(), libc::MSG_NOSIGNAL) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes a link of a connected stream, as its client.
pub fn connect(socket: OwnedFd, hello: &Hello) -> Result<Link, Error> {
    let geometry = hello.greet(&mut Plain(&socket), || welcomed(&mut Plain(&socket)))?;
    link(socket, geometry.window, true)
}

/// Makes a link of a connected stream, as its server, whose client's [`Hello`] was accepted.
pub fn accept(socket: OwnedFd, geometry: Geometry) -> Result<Link, Error> {
    Plain(&socket).write_all(&welcome(Ok(geometry.check()?)))?;
    link(socket, geometry.window, false)
}

/// Reads from a socket until a moment, however slowly its bytes come.
struct Until<'s> {
    socket: &'s OwnedFd,
    end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // No time at all would mean for ever.
        set_read_timeout(self.socket, left.max(Duration::from_micros(1)))?;
        Plain(self.socket).read(into)
    }
}

/// Sets the longest time that a read of a socket waits; zero: for ever.
fn set_read_timeout(socket: &OwnedFd, timeout: Duration) -> io::Result<()> {
    let time = libc::timeval {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_usec: libc::suseconds_t::from(timeout.subsec_micros()),
    };
    // SAFETY: the value lives during the call, and its size is given.
    let r = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO,
            (&raw const time).cast(),
            size_of_val(&time) as libc::socklen_t,
        )
    };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives a [`Hello`] from any stream socket. All of it has to be there within this time: who says nothing, or a byte now and then, must not
/// keep a process for ever.
pub fn hello(socket: &OwnedFd, within: Duration) -> Result<Hello, Error> {
    let hello = Hello::receive(&mut Until { socket, end: Instant::now() + within });
    set_read_timeout(socket, Duration::ZERO)?;
    hello
}

/// Tells a client that it can't be served, and why.
pub fn refuse(socket: &OwnedFd, why: &str) -> io::Result<()> {
    Plain(socket).write_all(&welcome(Err(why)))
}

/// Connects by TCP, without delay for small frames.
pub fn tcp(address: &str) -> Result<OwnedFd, Error> {
    let socket = TcpStream::connect(address)?;
    socket.set_nodelay(true)?;
    Ok(socket.into())
}

/// Connects by vsock to a context id (2: the host) and port.
pub fn vsock(cid: u32, port: u32) -> Result<OwnedFd, Error> {
    // SAFETY: takes no memory; the result is checked.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: fd is fresh.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_vm is plain data; zero is valid.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    // SAFETY: the address lives during the call and its size is given.
    let r = unsafe {
        libc::connect(fd.as_raw_fd(), (&raw const address).cast(), size_of_val(&address) as libc::socklen_t)
    };
    if r < 0 {
        return Err(io::Error::last_os_error().into());
    }
    Ok(fd)
}
