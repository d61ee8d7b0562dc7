// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Executes kernels. A kernel is decoded once (`decode`) to instructions on rows (`program`, `rows`); a block runs as one vector of lanes, always those at
//! the lowest program counter (`block`), so that lanes meet again where their paths join and a barrier costs nothing.
//!
//! - `space`: device memory and the address windows
//! - `int`, `float`, `halves`, `convert`, `compare`: arithmetic as functions on rows
//! - `atomics`, `warp`, `matrix`: instructions that look beyond one lane
//! - `link`: the addresses of a module's variables and functions
//! - `decode`: names to rows, labels to program counters, state spaces to addresses
//! - `block`: the scheduler of one block; `memory`: what its lanes read and write
//! - `grid`: blocks over the host's processors
//! - `print`: the format strings of the device's printf

pub mod atomics;
pub mod block;
pub mod compare;
pub mod convert;
pub mod decode;
mod decode_arithmetic;
mod decode_control;
mod decode_memory;
mod decode_warp;
pub mod float;
pub mod grid;
pub mod halves;
pub mod int;
pub mod link;
pub mod matrix;
mod memory;
pub mod print;
pub mod program;
pub mod rows;
pub mod space;
pub mod warp;
