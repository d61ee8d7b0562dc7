// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server of accelerators.
//!
//! A supervisor listens; for each client it starts a worker, a sandboxed process that alone touches that client's memory, loads the
//! real driver and carries out what the client asks. A worker that crashes, or is killed, takes one client with it.
//!
//! - [`supervisor`]: admits clients, starts workers; drains. [`listen`]: addresses, and the peers that connect by them.
//! - [`tenants`]: who is served now; [`figures`]: what their workers say of them.
//! - [`account`]: what the processes of one VM use together.
//! - [`control`]: commands from outside: who is served, drain.
//! - [`metrics`]: the same for Prometheus.
//! - [`trace`]: what one program's calls cost.
//! - [`vm`]: a VM's zone and doorbells; channels that its processes take.
//! - [`owner`]: the same where the server runs in a VM itself.
//! - [`workers`]: starts workers, and looks after them.
//! - [`worker`]: the life of one worker, from the handshake to the end of its client.
//! - [`wall`]: what a worker is kept from, and by what.
//! - [`session`]: decodes requests, whatever the API; threads, replies, sleeping.
//! - [`table`]: ids of the client and native handles, with kinds, owners and limits.
//! - [`limits`]: what a client may use.
//! - [`device`]: a device, as people are told of it.
//! - [`opencl`]: OpenCL: generated decoders, hand-written handlers.
//! - [`cuda`]: the CUDA driver API: the same.
//! - [`cli`]: `tombolo accel`.

pub mod account;
pub mod cli;
pub mod control;
pub mod cuda;
pub mod device;
pub mod figures;
pub mod limits;
pub mod listen;
pub mod metrics;
pub mod opencl;
pub mod output;
pub mod owner;
pub mod quota;
pub mod session;
pub mod signals;
pub mod supervisor;
pub mod table;
pub mod tenants;
pub mod trace;
pub mod vm;
pub mod wall;
pub mod worker;
pub mod workers;
