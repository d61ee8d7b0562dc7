// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch: packets between VMs through memory.
//!
//! A VM's virtio-net device is a *port*, reached over a vhost-user socket. Workers poll the ports' transmit queues;
//! each frame is given to the port that owns its destination MAC, by one copy from the sender's buffers into the
//! receiver's; what nobody owns goes to an uplink. Control threads, one per port, speak the vhost-user protocol and
//! change a port's queues under their locks, which workers only try.
//!
//! From the wire to the bytes:
//! - [`endpoint`] a port's socket; [`protocol`] what is said on it; [`features`] what is offered there
//! - [`memory`] guest memory and address translation; [`fault`] memory taken away; [`dirty`] the log of a migration;
//!   [`inflight`] what a successor needs
//! - [`ring`] the device's side of split and packed virtqueues
//! - [`vring`] a queue with its lock; [`port`] a port's queues; [`counters`] what is counted
//! - [`frame`] Ethernet and virtio-net headers; [`table`] who owns a MAC, [`learn`] who uses one; [`policy`] what a port may do; [`view`] all
//!   ports at one moment
//! - [`headers`] what a frame is, read once; by that description: [`lane`] VLANs; [`spoof`] false senders; [`rules`] by addresses and ports; [`offload`]
//!   checksums and segments in software, and [`fallback`] when to make them. [`limit`] rates; [`uplink`] what isn't a guest
//! - [`deliver`] the copy; [`held`] a frame that waits, and [`credit`] how long it may; [`forward`] a pass over a queue, and `route` the ways of its frames; [`worker`] the thread that polls and sleeps; [`balance`] which
//!   worker carries which queue; [`switch`] changes on their way to the workers
//! - [`config`] what a user says; [`daemon`] the running whole; [`cli`] and [`control`] the ways to talk to it;
//!   [`metrics`] counters for Prometheus, [`top`] for people; [`capture`] frames for Wireshark; [`sandbox`] what is given up
//! - [`mod@bench`] the switch beside its peers; [`soak`] every frame accounted for
//! - [`keeper`] the part that keeps the rights to open things, at the other end of a [`link`]; [`access`] who may connect
//! - [`dhcp`] addresses for guests that ask for one
//! - [`announce`] a guest that has come from another host
//! - [`event`] eventfds; [`cpu`] prefetching; [`driver`] the guest's side, for tests and the bench

pub mod access;
mod announce;
pub mod balance;
pub mod bench;
pub mod capture;
pub mod cli;
pub mod config;
pub mod control;
pub mod counters;
pub mod cpu;
pub mod credit;
pub mod daemon;
pub mod deliver;
pub mod dhcp;
pub mod dirty;
pub mod driver;
pub mod endpoint;
pub mod event;
pub mod fallback;
pub mod fault;
pub mod features;
pub mod forward;
pub mod frame;
pub mod headers;
pub mod held;
pub mod inflight;
mod keeper;
pub mod lane;
pub mod learn;
pub mod limit;
mod link;
pub mod memory;
pub mod metrics;
pub mod offload;
mod opens;
pub mod policy;
pub mod port;
pub mod protocol;
pub mod ring;
mod route;
pub mod rules;
pub mod sandbox;
pub mod soak;
pub mod spoof;
pub mod switch;
pub mod table;
pub mod top;
pub mod uplink;
pub mod view;
pub mod vring;
pub mod worker;
