// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The client's own state of each object: enough to answer properties that never change, and to tell which commands can't fail.

use crate::deferred::{self, Counted};
use crate::rt::{self, Handle, Obj, Ref};
use std::alloc::Layout;
use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::AtomicI32;
use std::sync::{Arc, Mutex};
use tombolo_accel_spec::opencl::cl;

/// A destructor callback of a program: called with the handle as it was, and its user data.
pub type Destructor = (unsafe extern "C" fn(Handle, *mut c_void), usize);

/// The state of an object, by its kind.
pub enum Body {
    Platform,
    Device(Device),
    Context(Context),
    Queue(Queue),
    /// A buffer, image or pipe.
    Mem(Box<Mem>),
    Program(Program),
    Kernel(Kernel),
    Event(Event),
    /// An object of which only its context is known.
    Plain(Obj),
    /// The same, counted.
    Child(Ref),
}

pub struct Device {
    pub platform: Obj,
    /// The device it is a part of.
    pub parent: Option<Ref>,
}

pub struct Context {
    pub devices: Vec<Ref>,
    /// The properties it was created with, as the program gave them, with the final 0.
    pub properties: Vec<isize>,
    /// Callbacks of the program for the context's end.
    pub destructors: Mutex<Vec<Destructor>>,
    /// The smallest of its devices' largest buffers; 0: not known.
    pub max_alloc: u64,
    /// Images that the driver made.
    pub images: Mutex<HashSet<Image>>,
}

pub struct Queue {
    pub context: Ref,
    pub device: Ref,
    /// CL_QUEUE_PROPERTIES.
    pub properties: u64,
    _counted: Counted,
}

impl Queue {
    /// The state of a queue that is about to be made.
    pub fn new(context: Obj, device: Obj, properties: u64) -> Result<Queue, i32> {
        let _counted = deferred::new_queue()?;
        Ok(Queue { context: rt::hold(context), device: rt::hold(device), properties, _counted })
    }
}

/// Memory of this process, for a program.
pub struct Pages(NonNull<u8>, Layout);

// SAFETY: memory that only its address names here; the program says who writes it when.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Room for this many bytes, at least one. None: there is no memory.
    pub fn new(len: u64) -> Option<Arc<Pages>> {
        let layout = Layout::from_size_align(usize::try_from(len).ok()?.max(1), 4096).ok()?;
        // SAFETY: a layout of at least one byte.
        let start = NonNull::new(unsafe { std::alloc::alloc(layout) })?;
        Some(Arc::new(Pages(start, layout)))
    }

    /// The address of the first byte.
    pub fn pointer(&self) -> usize {
        self.0.as_ptr() as usize
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: from alloc() with this layout.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), self.1) };
    }
}

/// The memory in which a program sees a mapped region.
pub enum Backing {
    /// In the window, where the buffer itself lies: nothing is copied.
    Home,
    /// In a range of the window, by offset and length.
    Staging(u64, u64),
    /// In pages of this process: the window had no room.
    Pages(Arc<Pages>),
    /// In the program's own memory, its host pointer.
    Program,
}

pub struct Map {
    /// The pointer that the program got.
    pub pointer: usize,
    pub backing: Backing,
    pub region: Region,
    /// CL_MAP_*.
    pub flags: u64,
    /// The row pitch and the slice pitch that the program sees.
    pub pitches: (usize, usize),
}

/// A part of a memory object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// Offset and size.
    Bytes(u64, u64),
    /// Origin and region.
    Pixels([u64; 3], [u64; 3]),
}

/// A buffer, image or pipe.
pub struct Mem {
    pub context: Ref,
    /// CL_MEM_OBJECT_*.
    pub object_type: u32,
    /// CL_MEM_* as the program gave them.
    pub flags: u64,
    /// Bytes of a buffer.
    pub size: u64,
    /// CL_MEM_HOST_PTR.
    pub host_ptr: usize,
    /// Its memory in the window.
    pub home: Option<u64>,
    /// Its host pointer is shared virtual memory.
    pub shared: bool,
    /// The buffer it is a part of, or the buffer of an image.
    pub parent: Option<Ref>,
    /// Offset in the parent.
    pub origin: u64,
    /// Bytes of a pixel.
    pub pixel: u64,
    /// The order and type of an image's channels.
    pub format: (u32, u32),
    /// Pitches of the host pointer of an image.
    pub pitches: (usize, usize),
    /// Width, height (or layers of a 1D array), depth (or layers).
    pub extent: [u64; 3],
    /// The regions that are mapped now.
    pub maps: Mutex<Vec<Map>>,
    /// Callbacks of the program for the object's end; the last registered is called first.
    pub destructors: Mutex<Vec<Destructor>>,
    /// The properties it was created with.
    pub properties: Vec<i64>,
    /// Its handle, for destructors.
    pub handle: std::sync::atomic::AtomicUsize,
}

impl Mem {
    /// Returns whether it is an image, not a buffer or a pipe.
    pub fn is_image(&self) -> bool {
        !matches!(self.object_type, cl::MEM_OBJECT_BUFFER | cl::MEM_OBJECT_PIPE)
    }
}

impl Drop for Mem {
    fn drop(&mut self) {
        let handle = *self.handle.get_mut() as Handle;
        for (f, user) in self.destructors.get_mut().unwrap_or_else(|e| e.into_inner()).drain(..).rev() {
            // SAFETY: the program registered this function for this moment.
            unsafe { f(handle, user as *mut c_void) };
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        for (f, user) in self.destructors.get_mut().unwrap_or_else(|e| e.into_inner()).drain(..).rev() {
            // SAFETY: as above; the context is gone, its handle only names it.
            unsafe { f(std::ptr::null_mut(), user as *mut c_void) };
        }
    }
}

pub struct Program {
    pub context: Ref,
    /// The devices it was created for.
    pub devices: Vec<Ref>,
    /// Its source, if that includes files.
    pub source: Vec<u8>,
    /// The options it was built with, if files went along: the server's driver had others.
    pub options: Mutex<Option<Vec<u8>>>,
}

/// An argument of a kernel, as far as a driver's answer may depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Argument {
    /// A value of this size that names no object.
    Value(usize),
    /// No value: local memory of this size, or no buffer.
    Null(usize),
    /// An object of this context: its kind, its type, and where in its parent it begins.
    Object(u32, u32, u64),
    /// An address of shared memory.
    Shared,
    /// Anything else: such calls always wait.
    Doubtful,
}

/// A launch: dimensions, local sizes (0: none), device.
pub type Launch = (u32, [u64; 3], u64);

/// What a driver judges an image by: flags, type, channels, extent and pitches.
pub type Image = (u64, u32, (u32, u32), [u64; 3], (u64, u64));

/// The most combinations of arguments that are remembered of a kernel.
const COMBINATIONS: usize = 64;

/// The arguments and launches of a kernel that the driver accepted before, so that the same can be posted.
#[derive(Default)]
pub struct Learned {
    /// Arguments by index.
    accepted: HashSet<(u32, Argument)>,
    /// The arguments that the kernel has now.
    current: Vec<Argument>,
    /// Launches that were accepted with such arguments.
    launches: HashSet<Launch>,
    /// Launches that were accepted with others.
    others: HashMap<Vec<Argument>, HashSet<Launch>>,
}

impl Learned {
    /// Returns whether the driver accepted such an argument before.
    pub fn accepts(&self, index: u32, argument: Argument) -> bool {
        // Mostly an argument is like the one before it.
        argument != Argument::Doubtful
            && (self.current.get(index as usize) == Some(&argument)
                || self.accepted.contains(&(index, argument)))
    }

    /// Remembers an argument that the driver accepted.
    pub fn accept(&mut self, index: u32, argument: Argument) {
        self.accepted.insert((index, argument));
    }

    /// Notes that an argument was set.
    pub fn set(&mut self, index: u32, argument: Argument) {
        let index = index as usize;
        if self.current.get(index) == Some(&argument) {
            return;
        }
        let before = std::mem::take(&mut self.launches);
        if !before.is_empty() {
            if self.others.len() >= COMBINATIONS {
                self.others.clear();
            }
            self.others.insert(self.current.clone(), before);
        }
        if index >= self.current.len() {
            self.current.resize(index + 1, Argument::Doubtful);
        }
        self.current[index] = argument;
        self.launches = self.others.remove(&self.current).unwrap_or_default();
    }

    /// Returns whether a launch like this was accepted with arguments like the present ones.
    pub fn launched(&self, like: &Launch) -> bool {
        self.launches.contains(like)
    }

    /// Remembers a launch that the driver accepted.
    pub fn launch(&mut self, like: Launch) {
        if !self.current.contains(&Argument::Doubtful) {
            self.launches.insert(like);
        }
    }
}

pub struct Kernel {
    pub program: Ref,
    /// Arguments and launches that the driver accepted.
    pub learned: Mutex<Learned>,
}

pub struct Event {
    pub context: Ref,
    /// Its queue; None: a user event.
    pub queue: Option<Ref>,
    /// CL_COMMAND_*.
    pub command: u32,
    /// The last status known: CL_COMPLETE or an error is final.
    pub status: AtomicI32,
    /// Set for an event that the program completes.
    pub counted: Option<Counted>,
}

impl Body {
    /// The context of an object that has one.
    pub fn context(&self) -> Option<Obj> {
        Some(match self {
            Body::Queue(q) => q.context.obj(),
            Body::Mem(m) => m.context.obj(),
            Body::Program(p) => p.context.obj(),
            Body::Kernel(k) => return k.program.obj().body().context(),
            Body::Event(e) => e.context.obj(),
            Body::Plain(c) => *c,
            Body::Child(c) => c.obj(),
            Body::Platform | Body::Device(_) | Body::Context(_) => return None,
        })
    }
}

macro_rules! accessors {
    ($($name:ident $variant:ident $ty:ty),*) => {
        /// Access to the body of an object whose kind was checked.
        pub trait As {
            $(
                /// The body as this kind.
                fn $name(&self) -> Result<&'static $ty, i32>;
            )*
        }
        impl As for Obj {
            $(
                fn $name(&self) -> Result<&'static $ty, i32> {
                    match self.body() {
                        Body::$variant(b) => Ok(b),
                        _ => Err(tombolo_accel_spec::opencl::LOST),
                    }
                }
            )*
        }
    };
}
accessors!(device Device Device, context Context Context, queue Queue Queue, mem Mem Mem, program Program Program, kernel Kernel Kernel, event Event Event);
