// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Doorbells between the members of a zone: an ivshmem server and its client (QEMU, `docs/specs/ivshmem-spec`).
//!
//! Each member has a socket of its own, which tells the server which member connects. A connection gets a peer id that is never
//! used again (a QEMU that sees an id come back aborts), the page that names the zone, and an eventfd per peer. A member rings
//! another by writing to that one's eventfd, without the server. The server writes the peer id into the member's slot before the
//! handshake is complete. Doorbells keep working after the server's end.
//!
//! - [`mod@wire`]: messages, with and without a descriptor; eventfds; the page.
//! - [`mod@server`]: the server, [`DoorbellServer`].
//! - [`mod@client`]: [`Bell`], a host process's own doorbell.
//! - [`mod@process`]: the process at the other end of a connection.
//! - [`store`]: where a server's clients are kept, for a server that goes on when it has died.
//! - `host`: the socket at which host processes other than the owner connect.

mod allowance;
pub mod client;
mod host;
pub mod process;
pub mod server;
pub mod store;
pub mod wire;

pub use client::Bell;
pub use server::{DoorbellServer, Event, Knock};

/// Interrupt vectors of a doorbell device: `-device ivshmem-doorbell,vectors=1`.
pub const VECTORS: usize = 1;
