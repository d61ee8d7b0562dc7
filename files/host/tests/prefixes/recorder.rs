// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Records every store that the core makes to a region, in program order, and can undo stores and repeat them.
//!
//! build.rs compiles the core a second time with the compiler's instrumentation for thread sanitizers, which calls a function before each
//! plain store and in place of each atomic access. Those functions are here instead of a sanitizer's. memcpy and memset are renamed to
//! ours. A plain store is announced before it happens, so its value is read when the next one is announced.
//!
//! Each thread has a recorder of its own. Stores are kept as changes of aligned words; a store without a change is dropped.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::SeqCst};

// The instrumented core is linked before the plain one that comes with the crate, so its functions are taken.
#[link(name = "tfs_recorded", kind = "static", modifiers = "+whole-archive")]
unsafe extern "C" {}

/// A changed word of the region.
#[derive(Clone, Copy, Debug)]
pub struct Store {
    /// Bytes from the start of the region.
    pub at: usize,
    pub old: u64,
    pub new: u64,
}

/// The core's orders to write stores back to persistent memory.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// Flushes the cache lines of `len` bytes from `at` on.
    Flush { at: usize, len: usize },
    /// Waits for all flushes before it.
    Drain,
}

#[derive(Default)]
struct Recorder {
    base: usize,
    len: usize,
    log: Vec<Store>,
    /// Each with the number of stores before it.
    orders: Vec<(usize, Order)>,
    /// Of all words, against those at the start.
    hash: u64,
    /// Announced: first word and the words before.
    announced: Option<(usize, [u64; 3], usize)>,
}

/// The number of an access, and a function to call before it.
type Interrupt = (usize, *mut dyn FnMut());

thread_local! {
    static RECORDER: RefCell<Recorder> = RefCell::default();
    /// Atomic accesses so far, and the function to call before a certain one.
    static ACCESSES: Cell<usize> = const { Cell::new(0) };
    static INTERRUPT: RefCell<Option<Interrupt>> = const { RefCell::new(None) };
}

/// Returns how many atomic accesses the core has made on this thread.
pub fn accesses() -> usize {
    ACCESSES.get()
}

/// Runs `op`, and before its atomic access with this number `other`, as a faster thread of another member.
pub fn interrupt_at<T>(access: usize, mut other: impl FnMut(), op: impl FnOnce() -> T) -> T {
    let other: *mut (dyn FnMut() + '_) = &raw mut other;
    // SAFETY: only the lifetime changes; it is taken out below, before 'other' ends.
    let other: *mut (dyn FnMut() + 'static) = unsafe { std::mem::transmute(other) };
    INTERRUPT.set(Some((access, other)));
    let result = op();
    INTERRUPT.set(None);
    result
}

fn access() {
    let now = ACCESSES.get();
    ACCESSES.set(now + 1);
    let due = INTERRUPT.with_borrow_mut(|i| i.take_if(|(at, _)| *at <= now));
    if let Some((_, other)) = due {
        with(Recorder::settle);
        // SAFETY: set by interrupt_at, which has not returned yet; taken, so it is called once.
        unsafe { (*other)() };
    }
}

fn mix(at: usize, value: u64) -> u64 {
    let mut h = (value ^ (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(at as u64);
    h = (h ^ h >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    h = (h ^ h >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    h ^ h >> 31
}

impl Recorder {
    fn word(&self, at: usize) -> *mut u64 {
        assert!(at % 8 == 0 && at < self.len);
        (self.base + at) as *mut u64
    }

    fn get(&self, at: usize) -> u64 {
        // SAFETY: an aligned word of the region, which attach() was promised.
        unsafe { AtomicU64::from_ptr(self.word(at)) }.load(SeqCst)
    }

    fn put(&mut self, at: usize, value: u64) {
        self.hash ^= mix(at, self.get(at)) ^ mix(at, value);
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.word(at)) }.store(value, SeqCst);
    }

    /// Returns the words that `len` bytes at an address touch; none outside the region.
    fn words(&self, address: usize, len: usize) -> Option<(usize, usize)> {
        let inside = address >= self.base && address < self.base + self.len;
        inside.then(|| ((address - self.base) & !7, (address - self.base + len - 1) / 8 + 1))
    }

    fn note(&mut self, at: usize, old: u64) {
        let new = self.get(at);
        if new != old {
            self.hash ^= mix(at, old) ^ mix(at, new);
            self.log.push(Store { at, old, new });
        }
    }

    fn settle(&mut self) {
        if let Some((first, old, count)) = self.announced.take() {
            for (i, old) in old.iter().take(count).enumerate() {
                self.note(first + 8 * i, *old);
            }
        }
    }

    fn announce(&mut self, address: usize, len: usize) {
        self.settle();
        let Some((first, end)) = self.words(address, len) else { return };
        let count = end - first / 8;
        let mut old = [0; 3];
        assert!(count <= old.len(), "a plain store of {len} bytes");
        for (i, old) in old.iter_mut().take(count).enumerate() {
            *old = self.get(first + 8 * i);
        }
        self.announced = Some((first, old, count));
    }
}

fn with<R>(f: impl FnOnce(&mut Recorder) -> R) -> R {
    RECORDER.with(|r| f(&mut r.borrow_mut()))
}

/// Starts to record this thread's stores to `len` bytes at `base`, which stay mapped, writable and this thread's own while it records.
pub fn attach(base: *mut u8, len: usize) {
    with(|r| *r = Recorder { base: base as usize, len, ..Recorder::default() });
}

/// Returns how many stores were made and not undone.
pub fn count() -> usize {
    with(|r| {
        r.settle();
        r.log.len()
    })
}

/// Returns the stores from number `from` on.
pub fn since(from: usize) -> Vec<Store> {
    with(|r| {
        r.settle();
        r.log[from..].to_vec()
    })
}

/// Returns the orders since `from`, each with the number of stores between `from` and it.
pub fn orders_since(from: usize) -> Vec<(usize, Order)> {
    with(|r| {
        r.settle();
        r.orders.iter().filter(|o| o.0 >= from).map(|o| (o.0 - from, o.1)).collect()
    })
}

/// Undoes all but the first `count` stores.
pub fn undo_to(count: usize) {
    with(|r| {
        r.settle();
        r.orders.retain(|o| o.0 < count);
        while r.log.len() > count {
            let store = r.log.pop().expect("more than count");
            r.put(store.at, store.old);
        }
    });
}

/// Repeats a store that was recorded in this state.
pub fn redo(store: &Store) {
    set(store.at, store.new);
}

/// Stores a word.
pub fn set(at: usize, value: u64) {
    with(|r| {
        r.settle();
        let old = r.get(at);
        if old != value {
            r.put(at, value);
            r.log.push(Store { at, old, new: value });
        }
    });
}

/// A word of the region.
pub fn get(at: usize) -> u64 {
    with(|r| r.get(at))
}

/// Returns a hash of the contents.
pub fn state() -> u64 {
    with(|r| {
        r.settle();
        r.hash
    })
}

/// Runs `op`, which changes at most the `len` bytes at `address`.
fn around<T>(address: usize, len: usize, op: impl FnOnce() -> T) -> T {
    with(|r| {
        r.announce(address, len);
        let result = op();
        r.settle();
        result
    })
}

/// Copies or fills word by word inside the region.
fn pieces(to: usize, len: usize, mut piece: impl FnMut(usize, usize)) {
    if with(|r| r.words(to, len.max(1))).is_none() {
        return piece(0, len);
    }
    let mut done = 0;
    while done < len {
        let n = (8 - (to + done) % 8).min(len - done);
        around(to + done, n, || piece(done, n));
        done += n;
    }
}

fn order(order: Order) {
    with(|r| {
        r.settle();
        r.orders.push((r.log.len(), order));
    });
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_flush(from: usize, len: usize) {
    if let Some(at) = with(|r| r.words(from, len.max(1))).map(|words| words.0) {
        order(Order::Flush { at, len: len + from % 8 });
    }
}

#[unsafe(no_mangle)]
extern "C" fn tfs_os_drain() {
    order(Order::Drain);
}

#[unsafe(no_mangle)]
extern "C" fn recorded_memcpy(to: *mut c_void, from: *const c_void, len: usize) -> *mut c_void {
    pieces(to as usize, len, |at, n| {
        // SAFETY: a part of the range that the caller of memcpy promises.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>().add(at), to.cast::<u8>().add(at), n) };
    });
    to
}

#[unsafe(no_mangle)]
extern "C" fn recorded_memset(to: *mut c_void, byte: c_int, len: usize) -> *mut c_void {
    pieces(to as usize, len, |at, n| {
        // SAFETY: a part of the range that the caller of memset promises.
        unsafe { std::ptr::write_bytes(to.cast::<u8>().add(at), byte as u8, n) };
    });
    to
}

macro_rules! silent {
    ($($name:ident($($arg:ty),*))*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name($(_: $arg),*) {}
    )* };
}
silent! {
    __tsan_init() __tsan_func_entry(usize) __tsan_func_exit() __tsan_atomic_thread_fence(c_int) __tsan_atomic_signal_fence(c_int)
    __tsan_read1(usize) __tsan_read2(usize) __tsan_read4(usize) __tsan_read8(usize) __tsan_read16(usize)
    __tsan_unaligned_read2(usize) __tsan_unaligned_read4(usize) __tsan_unaligned_read8(usize) __tsan_unaligned_read16(usize)
    __tsan_read_range(usize, usize)
}

macro_rules! stores {
    ($($name:ident $len:literal)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name(address: usize) {
            with(|r| r.announce(address, $len));
        }
    )* };
}
stores! {
    __tsan_write1 1 __tsan_write2 2 __tsan_write4 4 __tsan_write8 8 __tsan_write16 16
    __tsan_unaligned_write2 2 __tsan_unaligned_write4 4 __tsan_unaligned_write8 8 __tsan_unaligned_write16 16
}

#[unsafe(no_mangle)]
extern "C" fn __tsan_write_range(address: usize, len: usize) {
    with(|r| r.announce(address, len));
}

/// The access to a shared word that the core asked for; it passes valid, aligned pointers.
macro_rules! atomics {
    ($atomic:ident $ty:ty: load $load:ident $store:ident store $($name:ident $op:ident)*) => {
        #[unsafe(no_mangle)]
        extern "C" fn $load(p: *mut $ty, _: c_int) -> $ty {
            access();
            // SAFETY: the core's own pointer.
            unsafe { $atomic::from_ptr(p) }.load(SeqCst)
        }
        #[unsafe(no_mangle)]
        extern "C" fn $store(p: *mut $ty, value: $ty, _: c_int) {
            access();
            around(p as usize, size_of::<$ty>(), || {
                // SAFETY: the core's own pointer.
                unsafe { $atomic::from_ptr(p) }.store(value, SeqCst);
            });
        }
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name(p: *mut $ty, value: $ty, _: c_int) -> $ty {
                access();
                around(p as usize, size_of::<$ty>(), || {
                    // SAFETY: the core's own pointer.
                    unsafe { $atomic::from_ptr(p) }.$op(value, SeqCst)
                })
            }
        )*
    };
}
atomics!(AtomicU8 u8: load __tsan_atomic8_load __tsan_atomic8_store store);
atomics!(AtomicU16 u16: load __tsan_atomic16_load __tsan_atomic16_store store);
atomics!(AtomicU32 u32: load __tsan_atomic32_load __tsan_atomic32_store store __tsan_atomic32_fetch_add fetch_add);
atomics!(AtomicU64 u64: load __tsan_atomic64_load __tsan_atomic64_store store
    __tsan_atomic64_exchange swap __tsan_atomic64_fetch_add fetch_add __tsan_atomic64_fetch_or fetch_or
    __tsan_atomic64_fetch_and fetch_and);

macro_rules! swaps {
    ($($name:ident $atomic:ident $ty:ty)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name(p: *mut $ty, expected: *mut $ty, value: $ty, _: c_int, _: c_int) -> c_int {
            access();
            around(p as usize, size_of::<$ty>(), || {
                // SAFETY: the core's own pointers; 'expected' is on its stack.
                unsafe {
                    match $atomic::from_ptr(p).compare_exchange(*expected, value, SeqCst, SeqCst) {
                        Ok(_) => 1,
                        Err(now) => {
                            *expected = now;
                            0
                        }
                    }
                }
            })
        }
    )* };
}
swaps! {
    __tsan_atomic32_compare_exchange_strong AtomicU32 u32
    __tsan_atomic64_compare_exchange_strong AtomicU64 u64
}
