// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's side: a guest's memory, the driver's half of virtqueues and a small network card made of them. Tests,
//! the fuzzer and the bench use it to talk to a switch as a guest does, over a socket or directly.
//!
//! Any part can be written wrongly on purpose: [`Ram`] gives raw access, and queues give the addresses of their parts.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};

use tombolo_net::event::Event;
use tombolo_net::frames::frame::{NET_HEADER, NetHeader};
use tombolo_net::ports::port::Port;
use tombolo_net::vring::features::{bit, negotiated};
use tombolo_net::vring::memory::{GuestMemory, MemoryError, Region};
use tombolo_net::vring::ring::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, RingAddress};

/// A guest's memory: one memfd, mapped here, with a bump allocator.
pub struct Ram {
    file: File,
    base: *mut u8,
    size: u64,
    gpa: u64,
    free: u64,
}

// SAFETY: plain shared memory; threads that share it act like a guest's processors.
unsafe impl Send for Ram {}

impl Ram {
    /// Makes `size` bytes at guest-physical address `gpa`.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn new(size: u64, gpa: u64) -> io::Result<Self> {
        // SAFETY: a new descriptor, and a new mapping of it.
        unsafe {
            let fd = libc::memfd_create(c"tombolo-guest".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let file = File::from_raw_fd(fd);
            file.set_len(size)?;
            let base = libc::mmap(
                std::ptr::null_mut(),
                size as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            );
            if base == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            Ok(Self { file, base: base.cast(), size, gpa, free: 0 })
        }
    }

    /// The file behind it.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its first guest-physical address.
    #[must_use]
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Its first address in the front-end.
    #[must_use]
    pub fn user(&self) -> u64 {
        self.base as u64
    }

    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the guest-physical address of `len` unused bytes.
    ///
    /// # Panics
    /// The memory is used up.
    pub fn alloc(&mut self, len: u64, align: u64) -> u64 {
        let at = self.free.next_multiple_of(align);
        assert!(at + len <= self.size, "guest memory of {} bytes is used up", self.size);
        self.free = at + len;
        self.gpa + at
    }

    /// Returns the address in this process.
    ///
    /// # Panics
    /// It isn't in this memory.
    #[must_use]
    pub fn at(&self, gpa: u64, len: u64) -> *mut u8 {
        let off = gpa.checked_sub(self.gpa).filter(|off| off + len <= self.size);
        let off = off.unwrap_or_else(|| panic!("{gpa:#x}+{len:#x} is not in guest memory"));
        // SAFETY: within the mapping.
        unsafe { self.base.add(off as usize) }
    }

    pub fn write(&self, gpa: u64, bytes: &[u8]) {
        // SAFETY: at() checks the range.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(gpa, bytes.len() as u64), bytes.len());
        }
    }

    /// Reads bytes.
    #[must_use]
    pub fn read(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: at() checks the range.
        unsafe { std::ptr::copy_nonoverlapping(self.at(gpa, len as u64), bytes.as_mut_ptr(), len) };
        bytes
    }

    /// Reads the first `N` bytes there.
    #[must_use]
    pub fn array<const N: usize>(&self, gpa: u64) -> [u8; N] {
        let mut bytes = [0; N];
        // SAFETY: at() checks the range.
        unsafe { std::ptr::copy_nonoverlapping(self.at(gpa, N as u64), bytes.as_mut_ptr(), N) };
        bytes
    }

    /// Reads bytes and appends them to `to`.
    pub fn append(&self, gpa: u64, len: usize, to: &mut Vec<u8>) {
        to.reserve(len);
        // SAFETY: at() checks the range, there is room for it, and it is written before the length says so.
        unsafe {
            std::ptr::copy_nonoverlapping(self.at(gpa, len as u64), to.as_mut_ptr().add(to.len()), len);
            to.set_len(to.len() + len);
        }
    }

    /// Returns a 16-bit word as an atomic.
    #[must_use]
    pub fn word(&self, gpa: u64) -> &AtomicU16 {
        let at = self.at(gpa, 2);
        assert!(gpa % 2 == 0, "words are aligned");
        // SAFETY: two mapped, aligned bytes.
        unsafe { AtomicU16::from_ptr(at.cast()) }
    }

    /// Maps the same memory as the switch does.
    ///
    /// # Errors
    /// As [`Region::map`].
    pub fn region(&self) -> Result<Region, MemoryError> {
        Region::map(&self.file, self.gpa, self.size, self.user(), 0)
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.base.cast(), self.size as usize) };
    }
}

/// The features and sizes of a [`Nic`].
#[derive(Clone, Copy, Debug)]
pub struct NicConfig {
    /// Packed instead of split.
    pub packed: bool,
    /// Entries per queue.
    pub size: u16,
    /// Feature bits that it acknowledges beyond VERSION_1 and RING_PACKED.
    pub features: u64,
    /// Use indirect tables.
    pub indirect: bool,
    /// Bytes of a receive buffer.
    pub rx_buffer: u32,
    /// Bytes of a transmit buffer.
    pub tx_buffer: u32,
}

impl Default for NicConfig {
    fn default() -> Self {
        Self {
            packed: false,
            size: 64,
            features: 1 << bit::MRG_RXBUF | 1 << bit::INDIRECT_DESC,
            indirect: false,
            rx_buffer: 2048,
            tx_buffer: 2048,
        }
    }
}

/// Values by the id of a chain.
struct Slots<T> {
    slots: Vec<Option<T>>,
    len: usize,
}

impl<T> Slots<T> {
    fn new(size: u16) -> Self {
        Self { slots: (0..size).map(|_| None).collect(), len: 0 }
    }

    fn put(&mut self, id: u16, value: T) {
        self.len += usize::from(self.slots[usize::from(id)].replace(value).is_none());
    }

    fn take(&mut self, id: u16) -> Option<T> {
        let taken = self.slots.get_mut(usize::from(id))?.take();
        self.len -= usize::from(taken.is_some());
        taken
    }
}

/// The driver's half of a virtqueue. Addresses are guest-physical.
pub struct Queue {
    /// Packed instead of split.
    pub packed: bool,
    /// Entries.
    pub size: u16,
    /// Descriptor table or packed ring.
    pub desc: u64,
    /// Available ring or driver event.
    pub avail: u64,
    /// Used ring or device event.
    pub used: u64,
    event_idx: bool,
    next: u16,
    wrap: bool,
    seen: u16,
    seen_wrap: bool,
    free: Vec<u16>,
    /// For each entry in use, the next one of its chain.
    follows: Vec<u16>,
    /// The number of entries of a chain.
    held: Slots<u16>,
    /// With in-order completion: the chains in use, oldest first.
    order: Option<VecDeque<u16>>,
    /// The last chain of a batch that is being taken back.
    batch: Option<u16>,
}

impl Queue {
    /// Makes a queue in `ram`; of `features`, EVENT_IDX and IN_ORDER matter.
    pub fn new(ram: &mut Ram, packed: bool, size: u16, features: u64) -> Self {
        let event_idx = features & 1 << bit::EVENT_IDX != 0;
        let n = u64::from(size);
        let (desc, avail, used) = if packed {
            (ram.alloc(16 * n, 4096), ram.alloc(4, 64), ram.alloc(4, 64))
        } else {
            (ram.alloc(16 * n, 4096), ram.alloc(6 + 2 * n, 64), ram.alloc(6 + 8 * n, 4096))
        };
        Self {
            packed,
            size,
            desc,
            avail,
            used,
            event_idx,
            next: 0,
            wrap: true,
            seen: 0,
            seen_wrap: true,
            free: (0..size).rev().collect(),
            follows: vec![0; usize::from(size)],
            held: Slots::new(size),
            order: (features & 1 << bit::IN_ORDER != 0).then(VecDeque::new),
            batch: None,
        }
    }

    /// Returns the queue's addresses, as the front-end sends them.
    #[must_use]
    pub fn address(&self, ram: &Ram) -> RingAddress {
        let user = |gpa: u64| gpa - ram.gpa() + ram.user();
        RingAddress { desc: user(self.desc), avail: user(self.avail), used: user(self.used) }
    }

    /// Writes descriptor `index` of the table at `table`.
    pub fn write_desc(ram: &Ram, table: u64, index: u16, addr: u64, len: u32, last: [u16; 2]) {
        let at = table + 16 * u64::from(index);
        ram.write(at, &addr.to_le_bytes());
        ram.write(at + 8, &len.to_le_bytes());
        ram.write(at + 12, &last[0].to_le_bytes());
        ram.word(at + 14).store(last[1], Ordering::Release);
    }

    /// Makes `buffers` available as one chain; `table` is room for an indirect table, if wanted. Returns the chain's
    /// id; None: the queue is full.
    pub fn add(&mut self, ram: &Ram, buffers: &[(u64, u32)], write: bool, table: Option<u64>) -> Option<u16> {
        let direction = if write { DESC_WRITE } else { 0 };
        let more = |i: usize| if i + 1 < buffers.len() { DESC_NEXT } else { 0 };
        let single;
        let (list, indirect) = match table {
            Some(table) => {
                for (i, (addr, len)) in buffers.iter().enumerate() {
                    // Packed: id, then flags; NEXT is reserved there.
                    let last = if self.packed { [0, direction] } else { [direction | more(i), i as u16 + 1] };
                    Self::write_desc(ram, table, i as u16, *addr, *len, last);
                }
                single = [(table, 16 * buffers.len() as u32)];
                (&single[..], DESC_INDIRECT)
            }
            None => (buffers, 0),
        };
        if self.free.len() < list.len() {
            return None;
        }
        let added = if self.packed {
            self.add_packed(ram, list, direction | indirect)
        } else {
            self.add_split(ram, list, direction | indirect)
        };
        if let Some(order) = &mut self.order {
            order.extend(added);
        }
        added
    }

    /// Takes so many free entries, which exist; returns the first, whose number is the chain's id.
    fn take_free(&mut self, count: usize) -> Option<u16> {
        let mut first = None;
        for _ in 0..count {
            let entry = self.free.pop()?;
            self.follows[usize::from(entry)] = first.unwrap_or(0);
            first = Some(entry);
        }
        self.held.put(first?, count as u16);
        first
    }

    fn add_split(&mut self, ram: &Ram, list: &[(u64, u32)], flags: u16) -> Option<u16> {
        let head = self.take_free(list.len())?;
        let mut entry = head;
        for (i, (addr, len)) in list.iter().enumerate() {
            let next = self.follows[usize::from(entry)];
            let flags = flags | if i + 1 < list.len() { DESC_NEXT } else { 0 };
            Self::write_desc(ram, self.desc, entry, *addr, *len, [flags, next]);
            entry = next;
        }
        let slot = u64::from(self.next % self.size);
        ram.word(self.avail + 4 + 2 * slot).store(head, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
        ram.word(self.avail + 2).store(self.next, Ordering::Release);
        Some(head)
    }

    fn add_packed(&mut self, ram: &Ram, list: &[(u64, u32)], flags: u16) -> Option<u16> {
        // Each entry in use takes one from the free list; the first names the chain.
        let id = self.take_free(list.len())?;
        let (first, first_wrap) = (self.next, self.wrap);
        for (i, (addr, len)) in list.iter().enumerate() {
            let state = if self.wrap { 1 << 7 } else { 1 << 15 };
            let next = if i + 1 < list.len() { DESC_NEXT } else { 0 };
            // The first becomes available last.
            let state = if i == 0 { if first_wrap { 1 << 15 } else { 1 << 7 } } else { state };
            Self::write_desc(ram, self.desc, self.next, *addr, *len, [id, flags | next | state]);
            self.next += 1;
            if self.next == self.size {
                (self.next, self.wrap) = (0, !self.wrap);
            }
        }
        let word = ram.word(self.desc + 16 * u64::from(first) + 14);
        word.fetch_xor(1 << 7 | 1 << 15, Ordering::AcqRel);
        Some(id)
    }

    /// Takes a used chain back; returns its id and the bytes written.
    pub fn take_used(&mut self, ram: &Ram) -> Option<(u16, u32)> {
        let (mut id, mut len) = if let Some(last) = self.batch {
            (last, 0)
        } else if self.packed {
            let at = self.desc + 16 * u64::from(self.seen);
            let flags = ram.word(at + 14).load(Ordering::Acquire);
            let both = [flags & (1 << 7) != 0, flags & (1 << 15) != 0];
            if both != [self.seen_wrap; 2] {
                return None;
            }
            let b: [u8; 6] = ram.array(at + 8);
            (u16::from_le_bytes([b[4], b[5]]), u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        } else {
            if ram.word(self.used + 2).load(Ordering::Acquire) == self.seen {
                return None;
            }
            let b: [u8; 8] = ram.array(self.used + 4 + 8 * u64::from(self.seen % self.size));
            (u16::from_le_bytes([b[0], b[1]]), u32::from_le_bytes([b[4], b[5], b[6], b[7]]))
        };
        if let Some(order) = &mut self.order {
            // All chains up to the named one.
            let oldest = order.pop_front()?;
            self.batch = (oldest != id).then_some(id);
            if oldest != id {
                (id, len) = (oldest, 0);
            }
        }
        let count = self.held.take(id)?;
        if self.packed {
            self.seen += count;
            if self.seen >= self.size {
                self.seen -= self.size;
                self.seen_wrap = !self.seen_wrap;
            }
        } else {
            self.seen = self.seen.wrapping_add(1);
        }
        let mut entry = id;
        for _ in 0..count {
            self.free.push(entry);
            entry = self.follows[usize::from(entry)];
        }
        Some((id, len))
    }

    /// Asks for an interrupt at the next used chain; true: there is one already.
    #[must_use]
    pub fn want_signal(&self, ram: &Ram) -> bool {
        match (self.packed, self.event_idx) {
            (false, true) => {
                ram.word(self.avail + 4 + 2 * u64::from(self.size)).store(self.seen, Ordering::Relaxed);
            }
            (false, false) => ram.word(self.avail).store(0, Ordering::Relaxed),
            (true, true) => {
                let wrap = if self.seen_wrap { 1 << 15 } else { 0 };
                ram.word(self.avail).store(self.seen | wrap, Ordering::Relaxed);
                ram.word(self.avail + 2).store(2, Ordering::Release);
            }
            (true, false) => ram.word(self.avail + 2).store(0, Ordering::Relaxed),
        }
        fence(Ordering::SeqCst);
        self.has_used(ram)
    }

    /// Returns whether there is a used chain that was not taken back yet.
    #[must_use]
    pub fn has_used(&self, ram: &Ram) -> bool {
        if self.batch.is_some() {
            true
        } else if self.packed {
            let flags = ram.word(self.desc + 16 * u64::from(self.seen) + 14).load(Ordering::Acquire);
            (flags & (1 << 7) != 0) == self.seen_wrap && (flags & (1 << 15) != 0) == self.seen_wrap
        } else {
            ram.word(self.used + 2).load(Ordering::Acquire) != self.seen
        }
    }

    /// Suppresses interrupts.
    pub fn want_none(&self, ram: &Ram) {
        match (self.packed, self.event_idx) {
            (false, true) => ram
                .word(self.avail + 4 + 2 * u64::from(self.size))
                .store(self.seen.wrapping_sub(1), Ordering::Relaxed),
            (false, false) => ram.word(self.avail).store(1, Ordering::Relaxed),
            (true, _) => ram.word(self.avail + 2).store(1, Ordering::Relaxed),
        }
    }

    /// Returns whether the device wants a kick after chains were added since `old` (the value of [`Queue::position`]
    /// then).
    #[must_use]
    pub fn should_kick(&self, ram: &Ram, old: u16) -> bool {
        fence(Ordering::SeqCst);
        let passed =
            |event: u16, new: u16, old: u16| new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old);
        if self.packed {
            match ram.word(self.used + 2).load(Ordering::Relaxed) & 3 {
                1 => false,
                2 => {
                    let event = ram.word(self.used).load(Ordering::Relaxed);
                    let (mut at, wrap) = (event & 0x7fff, event >> 15 != 0);
                    if wrap != self.wrap {
                        at = at.wrapping_sub(self.size);
                    }
                    let old = if old > self.next { old.wrapping_sub(self.size) } else { old };
                    passed(at, self.next, old)
                }
                _ => true,
            }
        } else if self.event_idx {
            let event = ram.word(self.used + 4 + 8 * u64::from(self.size)).load(Ordering::Relaxed);
            passed(event, self.next, old)
        } else {
            ram.word(self.used).load(Ordering::Relaxed) & 1 == 0
        }
    }

    /// Returns the place of the next chain.
    #[must_use]
    pub fn position(&self) -> u16 {
        self.next
    }

    /// Returns the number of free entries.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }
}

/// A network card with one queue pair.
pub struct Nic {
    pub ram: Ram,
    /// Its receive queue.
    pub rx: Queue,
    /// Its transmit queue.
    pub tx: Queue,
    /// Its interrupts: receive, transmit.
    pub calls: [Event; 2],
    /// Its kicks: receive, transmit.
    pub kicks: [Event; 2],
    config: NicConfig,
    features: u64,
    rx_buffers: Slots<u64>,
    tx_buffers: Vec<(u64, u64)>,
    tx_busy: Slots<(u64, u64)>,
    front: Option<Frontend>,
}

impl Nic {
    /// Makes a card with all receive buffers available, not connected yet.
    ///
    /// # Errors
    /// The kernel has no memory or descriptors.
    pub fn new(config: NicConfig) -> io::Result<Self> {
        let n = u64::from(config.size);
        let bytes = n * (u64::from(config.rx_buffer) + u64::from(config.tx_buffer) + 1024) + (1 << 20);
        let mut ram = Ram::new(bytes.next_multiple_of(1 << 20), 0x1_0000_0000)?;
        let mut features = config.features | 1 << bit::VERSION_1 | 1 << bit::PROTOCOL_FEATURES;
        if config.packed {
            features |= 1 << bit::RING_PACKED;
        }
        let rx = Queue::new(&mut ram, config.packed, config.size, features);
        let tx = Queue::new(&mut ram, config.packed, config.size, features);
        let tx_buffers =
            (0..n).map(|_| (ram.alloc(u64::from(config.tx_buffer), 64), ram.alloc(16 * 64, 16))).collect();
        let mut nic = Self {
            rx,
            tx,
            calls: [Event::new()?, Event::new()?],
            kicks: [Event::new()?, Event::new()?],
            config,
            features,
            rx_buffers: Slots::new(config.size),
            tx_buffers,
            tx_busy: Slots::new(config.size),
            front: None,
            ram,
        };
        for _ in 0..config.size {
            let at = nic.ram.alloc(u64::from(config.rx_buffer).next_multiple_of(16) + 32, 64);
            nic.give_buffer(at);
        }
        Ok(nic)
    }

    /// Makes a receive buffer available: in one piece, or as an indirect table of two halves, which lies behind it.
    fn give_buffer(&mut self, at: u64) {
        let len = self.config.rx_buffer;
        let table = at + u64::from(len).next_multiple_of(16);
        let half = len / 2;
        let halves = [(at, half), (at + u64::from(half), len - half)];
        let added = if self.config.indirect {
            self.rx.add(&self.ram, &halves, true, Some(table))
        } else {
            self.rx.add(&self.ram, &[(at, len)], true, None)
        };
        if let Some(id) = added {
            self.rx_buffers.put(id, at);
        }
    }

    /// Connects to `port` without a socket: as the first queue pair.
    ///
    /// # Errors
    /// The switch refuses the memory or the rings.
    pub fn attach(&self, port: &Port) -> anyhow::Result<()> {
        let mem = Arc::new(GuestMemory::new(vec![self.ram.region()?])?);
        for (i, queue) in [&self.rx, &self.tx].into_iter().enumerate() {
            let mut vring = port.vrings()[i].lock();
            vring.set_memory(mem.clone())?;
            vring.negotiated = negotiated(self.features);
            vring.size = queue.size;
            vring.address = queue.address(&self.ram);
            // A card with in-order completion keeps no used places, as DPDK's virtio-user does.
            vring.base = match (queue.packed, queue.order.is_some()) {
                (false, _) => 0,
                (true, false) => 0x8000_8000,
                (true, true) => 0x8000,
            };
            vring.enabled = true;
            vring.call = Some(self.calls[i].to_file()?);
            vring.kick = Some(Arc::new(self.kicks[i].to_file()?));
            vring.start()?;
        }
        port.note_active();
        Ok(())
    }

    /// Connects to the socket at `path`, as a VMM does.
    ///
    /// # Errors
    /// The switch refuses a message.
    pub fn connect(&mut self, path: &Path) -> anyhow::Result<()> {
        self.connect_over(UnixStream::connect(path)?, &mut None)
    }

    /// As [`Nic::connect`], with in-flight state that is kept from one switch to the next.
    ///
    /// # Errors
    /// The switch refuses a message.
    pub fn connect_with(
        &mut self,
        path: &Path,
        inflight: &mut Option<(VhostUserInflight, File)>,
    ) -> anyhow::Result<()> {
        let wanted = VhostUserInflight::new(0, 0, 2, self.config.size);
        let stream = UnixStream::connect(path)?;
        let ask = inflight.is_none();
        if ask {
            *inflight = Some((wanted, self.ram.file().try_clone()?));
        }
        self.handshake(stream, inflight, ask)
    }

    /// As [`Nic::connect_with`], over a connection that the switch has made.
    ///
    /// # Errors
    /// The switch refuses a message.
    pub fn connect_over(
        &mut self,
        stream: UnixStream,
        inflight: &mut Option<(VhostUserInflight, File)>,
    ) -> anyhow::Result<()> {
        self.handshake(stream, inflight, false)
    }

    fn handshake(
        &mut self,
        stream: UnixStream,
        inflight: &mut Option<(VhostUserInflight, File)>,
        ask: bool,
    ) -> anyhow::Result<()> {
        let mut front = Frontend::from_stream(stream, 2);
        front.set_owner()?;
        let offered = front.get_features()?;
        anyhow::ensure!(offered & self.features == self.features, "not all features are offered");
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        let offered = front.get_protocol_features()?;
        front.set_protocol_features(offered & wanted)?;
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        front.set_features(self.features)?;
        if let Some((shape, file)) = inflight {
            if ask {
                (*shape, *file) = front.get_inflight_fd(shape)?;
            }
            front.set_inflight_fd(shape, file.as_raw_fd())?;
        }
        front.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: self.ram.gpa(),
            memory_size: self.ram.size(),
            userspace_addr: self.ram.user(),
            mmap_offset: 0,
            mmap_handle: self.ram.file().as_raw_fd(),
        }])?;
        self.front = Some(front);
        self.start_rings(0)
    }

    /// Returns the features that it acknowledges.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns whether a received frame was not taken yet.
    #[must_use]
    pub fn peek_used(&self) -> bool {
        self.rx.has_used(&self.ram)
    }

    /// Sends the rings' addresses to the switch and starts them; `split_base` is the available index to continue at.
    ///
    /// # Errors
    /// The switch refuses a message.
    pub fn start_rings(&mut self, split_base: u16) -> anyhow::Result<()> {
        let Some(front) = &mut self.front else { anyhow::bail!("not connected") };
        let logged = self.features & 1 << bit::LOG_ALL != 0;
        for (i, queue) in [&self.rx, &self.tx].into_iter().enumerate() {
            let at = queue.address(&self.ram);
            front.set_vring_num(i, queue.size)?;
            front.set_vring_base(i, if queue.packed { 0x8000 } else { split_base })?;
            front.set_vring_addr(
                i,
                &VringConfigData {
                    queue_max_size: queue.size,
                    queue_size: queue.size,
                    flags: u32::from(logged),
                    desc_table_addr: at.desc,
                    used_ring_addr: at.used,
                    avail_ring_addr: at.avail,
                    log_addr: logged.then_some(queue.used),
                },
            )?;
            front.set_vring_call(i, &raw_event(&self.calls[i])?)?;
            front.set_vring_kick(i, &raw_event(&self.kicks[i])?)?;
            front.set_vring_enable(i, true)?;
        }
        Ok(())
    }

    /// Returns the connection, for further messages of a VMM.
    pub fn front(&mut self) -> Option<&mut Frontend> {
        self.front.as_mut()
    }

    /// Sends a frame whose buffer is cut at `cuts` (offsets from the start of the virtio-net header). False: the queue
    /// is full.
    pub fn send_cut(&mut self, header: &NetHeader, frame: &[u8], cuts: &[usize]) -> bool {
        self.reap();
        let Some((at, table)) = self.tx_buffers.pop() else { return false };
        let total = NET_HEADER + frame.len();
        assert!(total <= self.config.tx_buffer as usize, "frame longer than a transmit buffer");
        self.ram.write(at, &header.bytes(0));
        self.ram.write(at + NET_HEADER as u64, frame);
        let whole = [(at, total as u32)];
        let mut parts = Vec::new();
        let mut from = 0;
        for &cut in cuts.iter().filter(|c| **c < total).chain((!cuts.is_empty()).then_some(&total)) {
            if cut > from {
                parts.push((at + from as u64, (cut - from) as u32));
                from = cut;
            }
        }
        let list = if cuts.is_empty() { &whole[..] } else { &parts };
        let old = self.tx.position();
        match self.tx.add(&self.ram, list, false, self.config.indirect.then_some(table)) {
            Some(id) => {
                self.tx_busy.put(id, (at, table));
                if self.tx.should_kick(&self.ram, old) {
                    self.kicks[1].raise();
                }
                true
            }
            None => {
                self.tx_buffers.push((at, table));
                false
            }
        }
    }

    /// Sends a frame in one buffer. False: the queue is full.
    pub fn send(&mut self, frame: &[u8]) -> bool {
        self.send_cut(&NetHeader::default(), frame, &[])
    }

    /// Takes used transmit buffers back; returns how many.
    pub fn reap(&mut self) -> usize {
        let mut n = 0;
        while let Some((id, _)) = self.tx.take_used(&self.ram) {
            if let Some(buffers) = self.tx_busy.take(id) {
                self.tx_buffers.push(buffers);
                n += 1;
            }
        }
        n
    }

    /// Returns the number of frames sent and not taken back.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.tx_busy.len
    }

    /// Returns a received frame, if there is one, and makes its buffers available again.
    pub fn receive(&mut self) -> Option<(NetHeader, Vec<u8>)> {
        let mut frame = Vec::new();
        let header = self.receive_into(&mut frame)?;
        Some((header, frame))
    }

    /// As [`Nic::receive`], into a buffer that is cleared first.
    pub fn receive_into(&mut self, frame: &mut Vec<u8>) -> Option<NetHeader> {
        frame.clear();
        let mut buffers = 1;
        let mut header = NetHeader::default();
        let mut got = 0;
        while got < buffers {
            let (id, len) = match self.rx.take_used(&self.ram) {
                Some(used) => used,
                None if got == 0 => return None,
                None => panic!("a frame of {buffers} buffers came with {got}"),
            };
            let at = self.rx_buffers.take(id)?;
            let mut skip = 0;
            if got == 0 {
                let bytes: [u8; NET_HEADER] = self.ram.array(at);
                header = NetHeader::parse(&bytes);
                buffers = u16::from_le_bytes([bytes[10], bytes[11]]);
                assert!(buffers > 0, "num_buffers is 0");
                skip = NET_HEADER;
            }
            let len = (len as usize).checked_sub(skip)?;
            self.ram.append(at + skip as u64, len, frame);
            got += 1;
            self.give_buffer(at);
        }
        Some(header)
    }
}

/// Converts to the type of the `vhost` crate.
fn raw_event(event: &Event) -> io::Result<vmm_sys_util::eventfd::EventFd> {
    use std::os::fd::IntoRawFd;
    // SAFETY: a descriptor of our own, handed over.
    Ok(unsafe { vmm_sys_util::eventfd::EventFd::from_raw_fd(event.to_file()?.into_raw_fd()) })
}
