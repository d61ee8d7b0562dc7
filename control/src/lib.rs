// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The requests and answers on the control sockets of switches and accelerator servers, as types. Servers and clients use the same structs,
//! so a field that changes on one side does not compile on the other.
//!
//! A request is a line of JSON, and so is its answer.
//!
//! - [`socket`]: sends one request over a new connection.
//! - [`accel`]: requests and answers of accelerator servers.
//! - [`net`]: requests and answers of switches, and their configuration.
//! - [`Mac`] and [`Size`]: as users write them.

#![deny(missing_docs)]

pub mod accel;
mod mac;
pub mod net;
mod size;
pub mod socket;

pub use mac::{BadMac, Mac};
pub use size::Size;
