// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the client knows of each object, and of the memory that it has.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// An object of a program.
pub struct Body {
    /// The context that it belongs to, as the program sees it; 0: none.
    pub context: usize,
    pub detail: Detail,
}

/// The state of an object, by its kind.
pub enum Detail {
    /// Nothing more is known of it.
    Plain,
    Context(Context),
    /// A function, or a kernel.
    Function(Box<Function>),
    Node(Node),
    /// A launchable graph: the graph that it was made of, as the program sees it.
    Exec(usize),
}

/// A node of a graph.
pub struct Node {
    /// Its graph, as the program sees it.
    pub graph: usize,
    /// The id of the function that it was last told to launch; 0: none.
    pub function: AtomicU64,
}

pub struct Context {
    /// The place of its device among those that the program sees.
    pub device: i32,
    pub flags: u32,
    pub is_primary: bool,
}

/// The shape of a launch that a driver judges: the sizes of a block, its shared memory, and whether it is cooperative.
pub type Shape = ([u32; 3], u32, bool);

pub struct Function {
    /// Its name, with the zero that ends it.
    pub name: Vec<u8>,
    /// The module or library that it came from, as the program sees it.
    pub from: usize,
    /// The offset and the size of each parameter, once the server has told them.
    pub parameters: OnceLock<Vec<(u64, u64)>>,
    accepted: Mutex<Accepted>,
}

/// Shapes that the driver accepted before: the same can be posted.
#[derive(Default)]
struct Accepted {
    all: HashSet<Shape>,
    /// The one that was asked for last: mostly it is asked for again.
    last: Option<Shape>,
}

impl Function {
    /// A function that was found under a name, with the zero that ends it, in a module or a library.
    pub fn new(name: Vec<u8>, from: usize) -> Function {
        Function { name, from, parameters: OnceLock::new(), accepted: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Accepted> {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the driver took a launch of this shape before.
    pub fn accepts(&self, shape: &Shape) -> bool {
        let mut accepted = self.lock();
        if accepted.last.as_ref() == Some(shape) {
            return true;
        }
        let known = accepted.all.contains(shape);
        if known {
            accepted.last = Some(*shape);
        }
        known
    }

    /// The driver took one.
    pub fn accept(&self, shape: Shape) {
        self.lock().all.insert(shape);
    }

    /// The offset and the size of each parameter.
    pub fn parameters(&self) -> &[(u64, u64)] {
        self.parameters.get().map_or(&[], Vec::as_slice)
    }

    /// The bytes of all parameters.
    pub fn size(&self) -> u64 {
        self.parameters().iter().map(|(at, len)| at + len).max().unwrap_or(0)
    }
}

/// An allocation.
#[derive(Clone, Copy)]
pub struct Range {
    pub start: u64,
    pub len: u64,
    /// The context that it belongs to, as the program sees it.
    pub context: usize,
    /// Of pinned memory: its offset in the window.
    pub window: Option<u64>,
    /// Of pinned memory: the flags that it was asked for with.
    pub flags: u32,
}

/// Allocations by their addresses.
#[derive(Default)]
pub struct Ranges(BTreeMap<u64, Range>);

impl Ranges {
    pub fn insert(&mut self, range: Range) {
        self.0.insert(range.start, range);
    }

    /// Takes out the allocation that begins at an address.
    pub fn remove(&mut self, start: u64) -> Option<Range> {
        self.0.remove(&start)
    }

    /// The allocation that an address lies in.
    pub fn find(&self, address: u64) -> Option<Range> {
        let (_, range) = self.0.range(..=address).next_back()?;
        (address - range.start < range.len).then_some(*range)
    }

    /// Forgets the device memory of a context.
    pub fn end(&mut self, context: usize) {
        self.0.retain(|_, range| range.context != context || range.window.is_some());
    }
}

static RANGES: Mutex<Ranges> = Mutex::new(Ranges(BTreeMap::new()));

/// The memory of this process: on devices, and pinned.
pub fn ranges() -> MutexGuard<'static, Ranges> {
    RANGES.lock().unwrap_or_else(PoisonError::into_inner)
}
