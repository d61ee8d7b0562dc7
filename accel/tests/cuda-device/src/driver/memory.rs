// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Allocations, copies, and what an address is. Device memory is host memory, so every copy is a move of bytes; device addresses are checked first.

use super::stream::resolve;
use super::work::{Copy, Fill, Work};
use super::{
    ALREADY_REGISTERED, Handle, INVALID_VALUE, NOT_REGISTERED, OUT_OF_MEMORY, Result, context, device, lock,
};
use std::collections::BTreeMap;
use std::sync::Mutex;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    Device,
    /// Pinned: cuMemHostAlloc.
    Host,
    Managed,
}

/// The living allocations: kind and size by address.
static ALLOCATIONS: Mutex<BTreeMap<u64, (Kind, usize)>> = Mutex::new(BTreeMap::new());

/// Bytes of device memory in use.
pub fn used() -> usize {
    lock(&ALLOCATIONS).values().filter(|(kind, _)| *kind != Kind::Host).map(|(_, bytes)| bytes).sum()
}

pub fn allocate(bytes: usize, kind: Kind) -> Result<u64> {
    context::current()?.healthy()?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    if kind != Kind::Host && used().saturating_add(bytes) > device::MEMORY {
        return Err(OUT_OF_MEMORY);
    }
    let address = device::arena()?.allocate(bytes, 0).ok_or(OUT_OF_MEMORY)?;
    lock(&ALLOCATIONS).insert(address, (kind, bytes));
    Ok(address)
}

/// Work that uses the memory ends first, as with NVIDIA's driver.
pub fn free(address: u64, host: bool) -> Result {
    let context = context::current()?;
    if address == 0 {
        return Ok(());
    }
    let known = lock(&ALLOCATIONS).get(&address).is_some_and(|(kind, _)| (*kind == Kind::Host) == host);
    if !known {
        return Err(INVALID_VALUE);
    }
    context.synchronize()?;
    release(address)
}

fn release(address: u64) -> Result {
    lock(&ALLOCATIONS).remove(&address).ok_or(INVALID_VALUE)?;
    give_back(address)
}

/// Ends the bytes of an allocation that is known no more.
pub fn give_back(address: u64) -> Result {
    lock(&ALLOCATIONS).remove(&address);
    device::arena()?.release(address).map(drop).ok_or(INVALID_VALUE)
}

/// Kind, start and size of the allocation that holds an address.
pub fn find(address: u64) -> Option<(Kind, u64, usize)> {
    let (start, size) = device::arena().ok()?.find(address)?;
    let kind = lock(&ALLOCATIONS).get(&start).map_or(Kind::Device, |(kind, _)| *kind);
    Some((kind, start, size))
}

/// Is this range device memory, or host memory that the device reaches?
pub fn check(address: u64, bytes: usize) -> Result {
    if bytes == 0 {
        return Ok(());
    }
    let end = address.checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
    let inside = find(address).is_some_and(|(_, start, size)| end <= start + size as u64)
        || device::arena()?.registered(address).is_some_and(|(_, registered)| end <= registered);
    if inside { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Neither pinned nor registered nor the device's.
fn pageable(address: u64) -> bool {
    find(address).is_none() && device::arena().is_ok_and(|arena| arena.registered(address).is_none())
}

pub fn register(address: u64, bytes: usize) -> Result {
    context::current()?;
    let arena = device::arena()?;
    if address == 0 || bytes == 0 {
        return Err(INVALID_VALUE);
    }
    if arena.registered(address).is_some() {
        return Err(ALREADY_REGISTERED);
    }
    arena.register(address, bytes as u64);
    Ok(())
}

pub fn unregister(address: u64) -> Result {
    context::current()?.synchronize()?;
    if device::arena()?.unregister(address) { Ok(()) } else { Err(NOT_REGISTERED) }
}

/// Which end of a copy is device memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Way {
    ToDevice,
    ToHost,
    OnDevice,
    /// Both addresses say themselves what they are.
    Any,
}

impl Copy {
    /// One piece of memory.
    pub fn linear(to: u64, from: u64, bytes: usize) -> Copy {
        Copy {
            to,
            from,
            to_pitch: bytes,
            from_pitch: bytes,
            to_slice: bytes,
            from_slice: bytes,
            width: bytes,
            height: 1,
            depth: 1,
        }
    }

    /// Bytes between the first and the last of one side.
    fn span(&self, pitch: usize, slice: usize) -> Result<usize> {
        if self.is_empty() {
            return Ok(0);
        }
        let slices = (self.depth - 1).checked_mul(slice);
        let rows = (self.height - 1).checked_mul(pitch);
        let sum =
            slices.zip(rows).and_then(|(slices, rows)| slices.checked_add(rows)?.checked_add(self.width));
        sum.ok_or(INVALID_VALUE)
    }

    fn is_empty(&self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    /// Device memory must be there; host memory is the program's word, unless its address is one of the device's.
    pub fn check(&self, way: Way) -> Result {
        let (to, from) =
            (self.span(self.to_pitch, self.to_slice)?, self.span(self.from_pitch, self.from_slice)?);
        let is_device = |address, bytes| device::arena().is_ok_and(|arena| arena.reaches(address, bytes));
        if matches!(way, Way::ToDevice | Way::OnDevice) || is_device(self.to, to) {
            check(self.to, to)?;
        }
        if matches!(way, Way::ToHost | Way::OnDevice) || is_device(self.from, from) {
            check(self.from, from)?;
        }
        if to > 0 && (self.to == 0 || self.from == 0) {
            return Err(INVALID_VALUE);
        }
        Ok(())
    }
}

impl Fill {
    pub fn check(&self) -> Result {
        if ![1, 2, 4].contains(&self.element) || self.to % self.element as u64 != 0 {
            return Err(INVALID_VALUE);
        }
        if self.width == 0 || self.height == 0 {
            return Ok(());
        }
        let row = self.width.checked_mul(self.element);
        let rows = (self.height - 1).checked_mul(self.pitch);
        let sum = row.zip(rows).and_then(|(row, rows)| row.checked_add(rows));
        check(self.to, sum.ok_or(INVALID_VALUE)?)
    }
}

/// A copy that has ended when the call returns.
pub fn copy(copy: Copy, way: Way) -> Result {
    let (context, stream) = resolve(0)?;
    copy.check(way)?;
    stream.run(&context, || Work::Copy(copy).execute())
}

/// A copy in a stream. Pageable memory is read before the call returns, or written.
pub fn copy_async(mut copy: Copy, way: Way, handle: Handle) -> Result {
    let (context, stream) = resolve(handle)?;
    copy.check(way)?;
    let capturing = lock(&stream.capture).is_some();
    if capturing || copy.is_empty() {
        return stream.submit(&context, Work::Copy(copy));
    }
    if pageable(copy.to) {
        return stream.run(&context, || Work::Copy(copy).execute());
    }
    if !pageable(copy.from) {
        return stream.submit(&context, Work::Copy(copy));
    }
    let mut staged = vec![0u8; copy.width * copy.height * copy.depth];
    let packed = Copy {
        to: staged.as_mut_ptr() as u64,
        to_pitch: copy.width,
        to_slice: copy.width * copy.height,
        ..copy
    };
    Work::Copy(packed).execute()?;
    (copy.from_pitch, copy.from_slice) = (packed.to_pitch, packed.to_slice);
    stream
        .queue(&context, Vec::new(), move || {
            Work::Copy(Copy { from: staged.as_ptr() as u64, ..copy }).execute()
        })
        .map(drop)
}

pub fn fill(fill: Fill, handle: Option<Handle>) -> Result {
    let (context, stream) = resolve(handle.unwrap_or(0))?;
    fill.check()?;
    match handle {
        Some(_) => stream.submit(&context, Work::Fill(fill)),
        None => stream.run(&context, || Work::Fill(fill).execute()),
    }
}

/// Memory that a stream may use from now on: here, at once.
pub fn allocate_async(bytes: usize, handle: Handle) -> Result<u64> {
    resolve(handle)?;
    allocate(bytes, Kind::Device)
}

pub fn free_async(address: u64, handle: Handle) -> Result {
    let (context, stream) = resolve(handle)?;
    let captured = lock(&stream.capture).is_some();
    let mut allocations = lock(&ALLOCATIONS);
    // Freed once; its bytes are there until it is the stream's turn. A graph frees what each launch of it allocates.
    let known = if captured { allocations.get(&address).copied() } else { allocations.remove(&address) };
    drop(allocations);
    known.filter(|(kind, _)| *kind != Kind::Host).ok_or(INVALID_VALUE)?;
    stream.submit(&context, Work::Free(address))
}

/// CUpointer_attribute by number, as 64 bits; none for an address that is no allocation's.
pub fn attribute(number: i32, address: u64) -> Result<u64> {
    let found = find(address);
    let registered = device::arena()?.registered(address);
    let host = registered.is_some() || matches!(found, Some((Kind::Host, ..)));
    if found.is_none() && registered.is_none() {
        return Err(INVALID_VALUE);
    }
    Ok(match number {
        1 => context::current_handle() as u64,
        2 => {
            if host {
                1
            } else {
                2
            }
        }
        3 => address,
        4 if host || matches!(found, Some((Kind::Managed, ..))) => address,
        4 => return Err(INVALID_VALUE),
        7 => found.map_or(0, |(_, start, _)| start),
        8 => u64::from(matches!(found, Some((Kind::Managed, ..)))),
        9 => 0,
        11 => found.map_or(address, |(_, start, _)| start),
        12 => found.map_or(0, |(_, _, size)| size as u64),
        13 => 1,
        6 | 10 | 14 | 15 | 17 => 0,
        16 => 3,
        _ => return Err(INVALID_VALUE),
    })
}

/// Bytes of an attribute's value.
pub fn attribute_size(number: i32) -> usize {
    match number {
        1 | 3 | 4 | 5 | 7 | 11 | 12 | 14 | 16 | 17 => 8,
        6 | 8 | 10 | 13 | 15 => 1,
        _ => 4,
    }
}
