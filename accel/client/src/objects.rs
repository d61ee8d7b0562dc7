// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handles that programs hold. A handle is the address of a slot in an arena that is mapped for the life of the process, so any value
//! can be checked without a crash: it lies in the arena, at the start of a slot, and the slot holds the right kind.
//!
//! A slot's number and generation are also the id that client and server know the object by. References are counted here: those of
//! the program, and those of objects that need it (a queue its context). When none is left, the server is told.

use crate::connection::Connection;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use tombolo_accel_spec::common::Release;

/// Handles that may live at once in a process; the server's own limit comes first.
const SLOTS: usize = 1 << 20;

/// One object of a program. The first word is the API's (a dispatch table).
#[repr(C, align(64))]
pub struct Slot<B> {
    user: AtomicPtr<c_void>,
    kind: AtomicU32,
    generation: AtomicU32,
    refs: AtomicU32,
    api_refs: AtomicU32,
    body: UnsafeCell<Option<Box<B>>>,
    connection: UnsafeCell<Option<Arc<Connection>>>,
}

/// A live object, not counted: for the length of a call, during which its caller keeps it alive.
pub struct Obj<B: 'static>(&'static Slot<B>);

impl<B> Clone for Obj<B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B> Copy for Obj<B> {}
impl<B> PartialEq for Obj<B> {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

// SAFETY: a slot's counters are atomic; its body is only read while the object lives, and replaced by the thread that counted it to zero.
unsafe impl<B: Send + Sync> Send for Obj<B> {}
// SAFETY: as above.
unsafe impl<B: Send + Sync> Sync for Obj<B> {}

/// A counted reference to an object.
pub struct Ref<B: Send + Sync + 'static>(Obj<B>, &'static Arena<B>);

/// The slots of one API in this process.
pub struct Arena<B: 'static> {
    base: OnceLock<usize>,
    free: Mutex<(u32, Vec<u32>)>,
    bodies: std::marker::PhantomData<fn() -> B>,
}

impl<B: Send + Sync> Default for Arena<B> {
    fn default() -> Self {
        Arena::new()
    }
}

impl<B: Send + Sync> Arena<B> {
    /// An empty arena, for a static.
    pub const fn new() -> Self {
        assert!(size_of::<Slot<B>>() == 64);
        Arena { base: OnceLock::new(), free: Mutex::new((1, Vec::new())), bodies: std::marker::PhantomData }
    }

    fn base(&self) -> usize {
        *self.base.get_or_init(|| {
            // SAFETY: a fresh private mapping; zero bytes are valid slots (kind 0, no body: None of a Box is zero).
            let p = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    SLOTS * size_of::<Slot<B>>(),
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if p == libc::MAP_FAILED { 0 } else { p as usize }
        })
    }

    fn slot(&'static self, index: u32) -> Option<&'static Slot<B>> {
        let base = self.base();
        if base == 0 || index as usize >= SLOTS {
            return None;
        }
        // SAFETY: inside the arena, which is never unmapped; fields that change are atomics or cells.
        Some(unsafe { &*((base + index as usize * size_of::<Slot<B>>()) as *const Slot<B>) })
    }

    /// The live object of this kind that a program's value names. None: it names no such object.
    pub fn find(&'static self, handle: *const c_void, kind: u32) -> Option<Obj<B>> {
        let offset = (handle as usize).checked_sub(self.base())?;
        if offset % size_of::<Slot<B>>() != 0 || offset >= SLOTS * size_of::<Slot<B>>() || self.base() == 0 {
            return None;
        }
        let slot = self.slot((offset / size_of::<Slot<B>>()) as u32)?;
        (slot.kind.load(Ordering::Acquire) == kind).then_some(Obj(slot))
    }

    /// A new object with one reference, which belongs to the program. None: too many.
    pub fn create(
        &'static self,
        kind: u32,
        user: *const c_void,
        connection: Arc<Connection>,
        body: B,
    ) -> Option<Obj<B>> {
        let index = {
            let mut free = self.free.lock().unwrap_or_else(|e| e.into_inner());
            match free.1.pop() {
                Some(index) => index,
                None => {
                    let next = free.0;
                    free.0 += 1;
                    next
                }
            }
        };
        let slot = self.slot(index)?;
        // SAFETY: the slot is free: no other thread has its number, and its kind is 0, so no thread reads its body.
        unsafe {
            *slot.body.get() = Some(Box::new(body));
            *slot.connection.get() = Some(connection);
        }
        slot.user.store(user.cast_mut(), Ordering::Relaxed);
        slot.refs.store(1, Ordering::Relaxed);
        slot.api_refs.store(1, Ordering::Relaxed);
        slot.kind.store(kind, Ordering::Release);
        Some(Obj(slot))
    }

    fn index(&self, slot: &Slot<B>) -> u32 {
        ((std::ptr::from_ref(slot) as usize - self.base()) / size_of::<Slot<B>>()) as u32
    }

    /// The id client and server know an object by: never 0.
    pub fn id(&self, object: Obj<B>) -> u64 {
        u64::from(object.0.generation.load(Ordering::Relaxed)) << 32 | u64::from(self.index(object.0))
    }

    /// The object of an id, if it lives.
    pub fn by_id(&'static self, id: u64) -> Option<Obj<B>> {
        let slot = self.slot(id as u32)?;
        let lives = slot.kind.load(Ordering::Acquire) != 0
            && slot.generation.load(Ordering::Relaxed) == (id >> 32) as u32;
        lives.then_some(Obj(slot))
    }

    /// A counted reference.
    pub fn hold(&'static self, object: Obj<B>) -> Ref<B> {
        object.0.refs.fetch_add(1, Ordering::Relaxed);
        Ref(object, self)
    }

    /// The program counts one more.
    pub fn retain(&self, object: Obj<B>) {
        object.0.api_refs.fetch_add(1, Ordering::Relaxed);
    }

    /// The program counts one less. `true`: that was its last; other objects may still need it.
    pub fn release(&'static self, object: Obj<B>) -> bool {
        let slot = object.0;
        let last = slot
            .api_refs
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| n.checked_sub(1))
            .is_ok_and(|before| before == 1);
        if last {
            self.unref(slot, true);
        }
        last
    }

    /// Forgets an object that the server never heard of (its creation failed).
    pub fn forget(&'static self, object: Obj<B>) {
        self.unref(object.0, false);
    }

    fn unref(&'static self, slot: &'static Slot<B>, tell: bool) {
        if slot.refs.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let id = self.id(Obj(slot));
        let kind = slot.kind.swap(0, Ordering::AcqRel);
        // SAFETY: the last reference is gone and the kind is 0: no other thread reads or writes these.
        let (body, connection) = unsafe { ((*slot.body.get()).take(), (*slot.connection.get()).take()) };
        if let Some(connection) = connection {
            if tell {
                // A lost server has no object to release.
                let _lost = connection.post(&Release { kind, id });
            }
        }
        slot.generation.fetch_add(1, Ordering::Relaxed);
        // Only now may the number be used again: the release is in the ring before any new creation.
        self.free.lock().unwrap_or_else(|e| e.into_inner()).1.push(self.index(slot));
        drop(body);
    }
}

impl<B> Obj<B> {
    /// The API's own state of the object.
    pub fn body(&self) -> &'static B {
        // SAFETY: Obj comes from find() or create() of a live slot, and the program keeps its object alive during a call; the body stays
        // until the last reference is gone.
        unsafe { (*self.0.body.get()).as_deref() }.expect("a live object has a body")
    }

    /// The connection to the server on which the object was made.
    pub fn connection(&self) -> &'static Arc<Connection> {
        // SAFETY: as in body().
        unsafe { (*self.0.connection.get()).as_ref() }.expect("a live object has a connection")
    }

    /// The handle for the program.
    pub fn handle(&self) -> *mut c_void {
        std::ptr::from_ref(self.0).cast_mut().cast()
    }

    /// The number of the program's references.
    pub fn api_refs(&self) -> u32 {
        self.0.api_refs.load(Ordering::Relaxed)
    }
}

impl<B: Send + Sync> Ref<B> {
    /// The object without the reference: the caller must keep another one for as long as it uses it.
    pub fn obj(&self) -> Obj<B> {
        self.0
    }
}

impl<B: Send + Sync> Drop for Ref<B> {
    fn drop(&mut self) {
        self.1.unref(self.0.0, true);
    }
}
