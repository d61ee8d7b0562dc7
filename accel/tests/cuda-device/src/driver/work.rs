// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a stream carries out and a graph's node stands for.

use super::launch::Kernel;
use super::{Result, memory};
use std::sync::Arc;

#[derive(Clone)]
pub enum Work {
    Nothing,
    Copy(Copy),
    Fill(Fill),
    Kernel(Arc<Kernel>),
    Host(Host),
    Free(u64),
    Graph(Arc<Vec<Work>>),
}

/// Bytes in up to three dimensions.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    pub to: u64,
    pub from: u64,
    pub to_pitch: usize,
    pub from_pitch: usize,
    pub to_slice: usize,
    pub from_slice: usize,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

/// Elements of 1, 2 or 4 bytes; `width` counts elements.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    pub to: u64,
    pub pitch: usize,
    pub value: u32,
    pub element: usize,
    pub width: usize,
    pub height: usize,
}

/// A function of the program; CUDA_HOST_NODE_PARAMS.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Host {
    pub function: extern "C" fn(*mut std::ffi::c_void),
    pub data: usize,
}

impl Work {
    pub fn execute(&self) -> Result {
        match self {
            Work::Nothing => Ok(()),
            Work::Copy(copy) => {
                copy.execute();
                Ok(())
            }
            Work::Fill(fill) => {
                fill.execute();
                Ok(())
            }
            Work::Kernel(kernel) => kernel.execute(),
            Work::Host(host) => {
                (host.function)(host.data as *mut std::ffi::c_void);
                Ok(())
            }
            Work::Free(address) => memory::give_back(*address),
            Work::Graph(nodes) => nodes.iter().try_for_each(Work::execute),
        }
    }
}

impl Copy {
    fn execute(&self) {
        for z in 0..self.depth {
            for y in 0..self.height {
                let to = self.to as usize + z * self.to_slice + y * self.to_pitch;
                let from = self.from as usize + z * self.from_slice + y * self.from_pitch;
                // SAFETY: device memory was checked when the copy was asked for; host memory is the program's word.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, self.width) };
            }
        }
    }
}

impl Fill {
    fn execute(&self) {
        for y in 0..self.height {
            let to = self.to as usize + y * self.pitch;
            // SAFETY: checked when the work was asked for; `to` is aligned to the element.
            unsafe {
                match self.element {
                    1 => std::slice::from_raw_parts_mut(to as *mut u8, self.width).fill(self.value as u8),
                    2 => std::slice::from_raw_parts_mut(to as *mut u16, self.width).fill(self.value as u16),
                    _ => std::slice::from_raw_parts_mut(to as *mut u32, self.width).fill(self.value),
                }
            }
        }
    }
}
