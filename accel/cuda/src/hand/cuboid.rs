// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies of rectangles and cuboids. Device memory and pinned memory go to the server as they are; what ordinary memory has goes through the window, so many rows at a
//! time as a piece has.

use super::copy::{PIECE, Where, at_once, device_to_host, host_to_device, in_stream, is_sure, send};
use super::device::read;
use crate::rt::{self, Handle};
use crate::state::ranges;
use std::ffi::c_void;
use tombolo_accel_client::connection::Connection;
use tombolo_accel_client::staging::Place;
use tombolo_accel_spec::cuda::{self as wire, cu};

/// The memory that one side of a copy lies in, and the address or the window's offset of its first byte.
#[derive(Clone, Copy, PartialEq)]
enum At {
    Device(u64),
    Window(u64),
    Ordinary(usize),
}

/// One side of a copy. `rows`: of a slice.
#[derive(Clone, Copy)]
struct Side {
    at: At,
    pitch: usize,
    rows: usize,
}

/// Bytes in three dimensions.
#[derive(Clone, Copy)]
struct Cuboid {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
    depth: usize,
}

/// A side as the API describes it: coordinates, memory, address there, pitch and rows of a slice, of which 0 means that there are none between.
struct Described {
    x: usize,
    y: usize,
    z: usize,
    memory: u32,
    host: usize,
    device: u64,
    pitch: usize,
    rows: usize,
}

/// The bytes between the first and the last; None: more than a number holds, or rows or slices that overlap.
fn span(side: &Side, width: usize, height: usize, depth: usize) -> Option<usize> {
    if width == 0 || height == 0 || depth == 0 {
        return Some(0);
    }
    if (height > 1 && side.pitch < width) || (depth > 1 && side.rows < height) {
        return None;
    }
    let slices = side.pitch.checked_mul(side.rows)?.checked_mul(depth - 1)?;
    slices.checked_add(side.pitch.checked_mul(height - 1)?)?.checked_add(width)
}

impl Described {
    fn side(&self, width: usize, height: usize, depth: usize) -> Result<Side, i32> {
        let pitch = if self.pitch == 0 { width } else { self.pitch };
        let rows = if self.rows == 0 { height } else { self.rows };
        let start = || {
            let before = self.z.checked_mul(rows)?.checked_add(self.y)?.checked_mul(pitch)?;
            before.checked_add(self.x)
        };
        let start = start().ok_or(cu::CUDA_ERROR_INVALID_VALUE)?;
        let placed = |base: usize| base.checked_add(start).ok_or(cu::CUDA_ERROR_INVALID_VALUE);
        let is_device = |address: u64| ranges().find(address).is_some_and(|range| range.window.is_none());
        let mut side = Side { at: At::Device(0), pitch, rows };
        let len = span(&side, width, height, depth).ok_or(cu::CUDA_ERROR_INVALID_VALUE)?;
        let host = |address: usize| match rt::connection()?.window.offset_of(address, len as u64) {
            Some(offset) => Ok(At::Window(offset)),
            None if address == 0 => Err(cu::CUDA_ERROR_INVALID_VALUE),
            None => Ok(At::Ordinary(address)),
        };
        side.at = match self.memory {
            cu::CU_MEMORYTYPE_HOST => host(placed(self.host)?)?,
            cu::CU_MEMORYTYPE_DEVICE => At::Device(placed(self.device as usize)? as u64),
            cu::CU_MEMORYTYPE_UNIFIED if is_device(self.device) => {
                At::Device(placed(self.device as usize)? as u64)
            }
            cu::CU_MEMORYTYPE_UNIFIED => host(placed(self.device as usize)?)?,
            cu::CU_MEMORYTYPE_ARRAY => return Err(wire::UNSUPPORTED),
            _ => return Err(cu::CUDA_ERROR_INVALID_VALUE),
        };
        Ok(side)
    }
}

impl Side {
    /// The same side from a row of a slice on.
    fn at_row(self, slice: usize, row: usize) -> Side {
        let more = (slice * self.rows + row) * self.pitch;
        let at = match self.at {
            At::Device(address) => At::Device(address.wrapping_add(more as u64)),
            At::Window(offset) => At::Window(offset.wrapping_add(more as u64)),
            At::Ordinary(address) => At::Ordinary(address.wrapping_add(more)),
        };
        Side { at, ..self }
    }

    /// Memory type, address of host memory, address of device memory.
    fn on_wire(self) -> (u32, usize, u64) {
        match self.at {
            At::Device(address) => (cu::CU_MEMORYTYPE_DEVICE, 0, address),
            At::Window(offset) => (cu::CU_MEMORYTYPE_HOST, offset as usize, 0),
            At::Ordinary(_) => unreachable!("ordinary memory goes through the window"),
        }
    }
}

impl Cuboid {
    fn of(w: &wire::Memcpy3d) -> Result<Cuboid, i32> {
        let (width, height, depth) = (w.WidthInBytes, w.Height, w.Depth);
        let from = Described {
            x: w.srcXInBytes,
            y: w.srcY,
            z: w.srcZ,
            memory: w.srcMemoryType,
            host: w.srcHost,
            device: w.srcDevice,
            pitch: w.srcPitch,
            rows: w.srcHeight,
        };
        let to = Described {
            x: w.dstXInBytes,
            y: w.dstY,
            z: w.dstZ,
            memory: w.dstMemoryType,
            host: w.dstHost,
            device: w.dstDevice,
            pitch: w.dstPitch,
            rows: w.dstHeight,
        };
        let (from, to) = (from.side(width, height, depth)?, to.side(width, height, depth)?);
        Ok(Cuboid { from, to, width, height, depth })
    }

    fn on_wire(&self) -> wire::Memcpy3d {
        let (from, to) = (self.from.on_wire(), self.to.on_wire());
        wire::Memcpy3d {
            srcMemoryType: from.0,
            srcHost: from.1,
            srcDevice: from.2,
            srcPitch: self.from.pitch,
            srcHeight: self.from.rows,
            dstMemoryType: to.0,
            dstHost: to.1,
            dstDevice: to.2,
            dstPitch: self.to.pitch,
            dstHeight: self.to.rows,
            WidthInBytes: self.width,
            Height: self.height,
            Depth: self.depth,
            ..wire::Memcpy3d::default()
        }
    }

    fn is_empty(&self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    /// Returns whether the client knows that what it needs of device memory is its own.
    fn is_sure(&self) -> bool {
        [self.from, self.to].iter().all(|side| match side.at {
            At::Device(address) => {
                span(side, self.width, self.height, self.depth).is_some_and(|len| is_sure(address, len))
            }
            _ => true,
        })
    }

    /// The rows, so many at a time that a piece of the window holds them.
    fn pieces(self) -> impl Iterator<Item = Cuboid> {
        let most = (PIECE / self.width.max(1)).max(1);
        let rows = move |slice: usize| {
            (0..self.height).step_by(most).map(move |row| Cuboid {
                from: self.from.at_row(slice, row),
                to: self.to.at_row(slice, row),
                height: most.min(self.height - row),
                depth: 1,
                ..self
            })
        };
        (0..self.depth).flat_map(rows)
    }

    fn record(&self, place: Where, ticket: u64) -> wire::Memcpy3DAsyncV2 {
        wire::Memcpy3DAsyncV2 { copy: self.on_wire(), hStream: place.id(), ticket, current: rt::current() }
    }

    /// # Safety
    /// Ordinary memory is there.
    unsafe fn copy(self, place: Where) -> Result<(), i32> {
        if self.is_empty() {
            return Ok(());
        }
        match (self.from.at, self.to.at) {
            (At::Ordinary(_), At::Device(_)) => {
                // SAFETY: as the caller promises.
                self.pieces().try_for_each(|piece| unsafe { piece.up(place) })
            }
            (At::Device(_), At::Ordinary(_)) => {
                // SAFETY: as the caller promises.
                self.pieces().try_for_each(|piece| unsafe { piece.down(place) })
            }
            (At::Device(_), _) | (_, At::Device(_)) => self.as_it_is(place),
            // SAFETY: as the caller promises.
            _ => unsafe { self.on_host(place) },
        }
    }

    /// A copy without ordinary memory.
    fn as_it_is(&self, place: Where) -> Result<(), i32> {
        let connection = rt::connection()?;
        if let At::Window(offset) = self.from.at {
            let len = span(&self.from, self.width, self.height, self.depth).unwrap_or(0);
            rt::lost(connection.push_window(offset, len as u64))?;
        }
        send(&self.record(place, 0), self.is_sure() && place.is_async)
    }

    /// The rows of a piece of ordinary memory to or from packed ones at `packed`.
    ///
    /// # Safety
    /// Both are there.
    unsafe fn rows(&self, ordinary: usize, pitch: usize, packed: *mut u8, out: bool) {
        for row in 0..self.height {
            let own = (ordinary + row * pitch) as *mut u8;
            // SAFETY: within both, as the caller promises.
            unsafe {
                let packed = packed.add(row * self.width);
                let (from, to) = if out { (own, packed) } else { (packed, own) };
                std::ptr::copy_nonoverlapping(from, to, self.width);
            }
        }
    }

    /// # Safety
    /// The ordinary memory that it is from is there.
    unsafe fn up(mut self, place: Where) -> Result<(), i32> {
        let (At::Ordinary(from), At::Device(to)) = (self.from.at, self.to.at) else { return Ok(()) };
        if self.width > PIECE {
            // SAFETY: a row, as the caller promises.
            return unsafe { host_to_device(to, from as *const u8, self.width, place) };
        }
        let connection = rt::connection()?;
        let n = (self.width * self.height) as u64;
        let data = rt::staging(n, Place::Beside(from))?;
        let window = connection.window.at(data, n).map_err(|_| wire::LOST)?;
        // SAFETY: the range of the window is this call's own; the rest as the caller promises.
        unsafe { self.rows(from, self.from.pitch, window, true) };
        rt::lost(connection.push_window(data, n))?;
        self.from = Side { at: At::Window(data), pitch: self.width, rows: self.height };
        let ticket = connection.ticket(Box::new(move |c: &Connection, _| c.give_staging(data, n)));
        send(&self.record(place, ticket), self.is_sure())
    }

    /// # Safety
    /// There is room in the ordinary memory that it is to.
    unsafe fn down(mut self, place: Where) -> Result<(), i32> {
        let (At::Device(from), At::Ordinary(to)) = (self.from.at, self.to.at) else { return Ok(()) };
        if self.width > PIECE {
            // SAFETY: a row, as the caller promises.
            return unsafe { device_to_host(to as *mut u8, from, self.width, place) };
        }
        let connection = rt::connection()?;
        let n = (self.width * self.height) as u64;
        let data = rt::staging(n, Place::Beside(to))?;
        let pitch = self.to.pitch;
        self.to = Side { at: At::Window(data), pitch: self.width, rows: self.height };
        let copied = rt::call(&self.record(place, 0)).and_then(|_| {
            let window = connection.window.at(data, n).map_err(|_| wire::LOST)?;
            // SAFETY: the range of the window is this call's own, and the server has filled it; the rest as the caller promises.
            unsafe { self.rows(to, pitch, window, false) };
            Ok(())
        });
        connection.give_staging(data, n);
        copied
    }

    /// A copy in the program's memory, after what the stream did before.
    ///
    /// # Safety
    /// It is there.
    unsafe fn on_host(&self, place: Where) -> Result<(), i32> {
        rt::call(&wire::StreamSynchronize { hStream: place.id(), current: rt::current() })?;
        let window = &rt::connection()?.window;
        for slice in 0..self.depth {
            for row in 0..self.height {
                let address = |side: Side| match side.at_row(slice, row).at {
                    At::Window(offset) => window.at(offset, self.width as u64).map_err(|_| wire::LOST),
                    At::Ordinary(address) => Ok(address as *mut u8),
                    At::Device(_) => Err(cu::CUDA_ERROR_INVALID_VALUE),
                };
                let (from, to) = (address(self.from)?, address(self.to)?);
                // SAFETY: as the caller promises.
                unsafe { std::ptr::copy(from, to, self.width) };
            }
        }
        Ok(())
    }
}

/// What a node of a graph copies: memory that both sides see. `sure`: the client knows that the device memory is its own.
///
/// # Safety
/// `copy` is null or a CUDA_MEMCPY3D.
pub unsafe fn of_node(copy: *const c_void) -> Result<(wire::Memcpy3d, bool), i32> {
    // SAFETY: as the caller promises.
    let cuboid = Cuboid::of(&unsafe { read(copy) }?)?;
    let seen = |side: Side| match side.at {
        At::Device(_) => Ok(true),
        At::Window(_) => rt::connection().map(|connection| connection.shares_window),
        At::Ordinary(_) => Ok(false),
    };
    if !seen(cuboid.from)? || !seen(cuboid.to)? {
        return Err(wire::UNSUPPORTED);
    }
    Ok((cuboid.on_wire(), cuboid.is_sure()))
}

/// CUDA_MEMCPY2D
#[repr(C)]
#[derive(Clone, Copy)]
struct Rectangle {
    from: RectangleSide,
    to: RectangleSide,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RectangleSide {
    x: usize,
    y: usize,
    memory: u32,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

const _: () = assert!(size_of::<Rectangle>() == 128);

impl RectangleSide {
    fn side(&self, width: usize, height: usize) -> Result<Side, i32> {
        let RectangleSide { x, y, memory, host, device, pitch, .. } = *self;
        Described { x, y, z: 0, memory, host, device, pitch, rows: 0 }.side(width, height, 1)
    }
}

/// A rectangle as a cuboid of one slice.
///
/// # Safety
/// `copy` is null or a CUDA_MEMCPY2D.
unsafe fn flat(copy: *const c_void) -> Result<Cuboid, i32> {
    // SAFETY: as the caller promises.
    let Rectangle { from, to, width, height } = unsafe { read(copy) }?;
    let (from, to) = (from.side(width, height)?, to.side(width, height)?);
    Ok(Cuboid { from, to, width, height, depth: 1 })
}

super::exported! {
    fn cuMemcpy2D_v2(copy: *const c_void) {
        // SAFETY: what the API says of the copy and its memory.
        unsafe { flat(copy)?.copy(at_once()?) }
    }

    fn cuMemcpy2DUnaligned_v2(copy: *const c_void) {
        // SAFETY: as above.
        unsafe { flat(copy)?.copy(at_once()?) }
    }

    fn cuMemcpy2DAsync_v2(copy: *const c_void, stream: Handle) {
        // SAFETY: as above.
        unsafe { flat(copy)?.copy(in_stream(stream)?) }
    }

    fn cuMemcpy3D_v2(copy: *const c_void) {
        // SAFETY: as above.
        unsafe { Cuboid::of(&read(copy)?)?.copy(at_once()?) }
    }

    fn cuMemcpy3DAsync_v2(copy: *const c_void, stream: Handle) {
        // SAFETY: as above.
        unsafe { Cuboid::of(&read(copy)?)?.copy(in_stream(stream)?) }
    }
}
