// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernels given as PTX text, run on a small device memory.

use std::sync::Mutex;
use tombolo_cuda_device::machine::block::{Fault, Launch};
use tombolo_cuda_device::machine::link::Loaded;
use tombolo_cuda_device::machine::space::Arena;
use tombolo_cuda_device::machine::{decode::decode, grid};
use tombolo_cuda_device::ptx;

pub struct Device {
    pub arena: Arena,
    pub printed: Mutex<Vec<u8>>,
}

pub struct Shape {
    pub grid: u32,
    pub block: u32,
    pub shared: usize,
    pub cooperative: bool,
}

pub const fn shape(grid: u32, block: u32) -> Shape {
    Shape { grid, block, shared: 0, cooperative: false }
}

impl Device {
    pub fn new() -> Device {
        Device { arena: Arena::new(64 << 20).expect("address space"), printed: Mutex::default() }
    }

    /// Device memory that holds these values.
    pub fn put<T: Copy>(&self, values: &[T]) -> u64 {
        let address = self.arena.allocate(size_of_val(values), 256).expect("device memory");
        // SAFETY: fresh memory of this size; T is plain data.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), address as *mut T, values.len()) };
        address
    }

    pub fn get<T: Copy>(&self, address: u64, count: usize) -> Vec<T> {
        // SAFETY: the test asks for what it has put there.
        unsafe { std::slice::from_raw_parts(address as *const T, count) }.to_vec()
    }

    /// Runs the only kernel of a module, named `k`. `head` precedes it, `parameters` are 64-bit words.
    pub fn run(&self, text: &str, shape: &Shape, parameters: &[u64]) -> Result<(), Fault> {
        let module = ptx::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let loaded = Loaded::new(module, &self.arena).expect("a module that links");
        let program = decode(&loaded, "k").unwrap_or_else(|error| panic!("{error}\n{text}"));
        let bytes: Vec<u8> = parameters.iter().flat_map(|value| value.to_le_bytes()).collect();
        let print = |text: Vec<u8>| self.printed.lock().expect("no panic").extend(text);
        let launch = Launch {
            program: &program,
            arena: &self.arena,
            grid: [shape.grid, 1, 1],
            block: [shape.block, 1, 1],
            dynamic_shared: shape.shared,
            parameters: &bytes,
            grid_id: 1,
            workspace: 0,
            print: &print,
        };
        grid::run(&launch, shape.cooperative)
    }
}

/// A kernel `k` of `count` 64-bit parameters p0, p1 …; `%tid.x` is in %t, and 8 × the thread's number in the grid in %o.
pub fn kernel(count: usize, body: &str) -> String {
    let parameters: Vec<String> = (0..count).map(|at| format!(".param .u64 p{at}")).collect();
    format!(
        ".version 8.8\n.target sm_90\n.address_size 64\n.visible .entry k({})\n{{\n.reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<40>; .reg .b64 %d<40>; .reg .f32 %f<20>; .reg .f64 %g<20>; \
         .reg .b32 %t, %n, %c; .reg .b64 %o;\nmov.u32 %t, %tid.x; mov.u32 %n, %ntid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %c, %c, %n, %t; mul.wide.u32 %o, %c, 8;\n{body}\nret;\n}}\n",
        parameters.join(", ")
    )
}
