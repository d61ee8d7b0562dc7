// SPDX-License-Identifier: Apache-2.0 OR MIT
//! PTX text, as nvcc, NVRTC and clang write it, to a tree of statements.
//!
//! - `lex`: tokens
//! - `instructions`: their names
//! - `ast`: the tree
//! - `parse`: directives, declarations and instructions
//! - `types`: the fundamental types

pub mod ast;
mod instructions;
mod lex;
mod parse;
pub mod types;

pub use parse::parse;

/// An error in a PTX text, with its line.
#[derive(Debug, Clone, PartialEq)]
pub struct Error {
    pub line: u32,
    pub what: String,
}

impl std::fmt::Display for Error {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "line {}: {}", self.line, self.what)
    }
}
