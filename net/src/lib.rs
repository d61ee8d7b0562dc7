// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch: packets between VMs through memory.
//!
//! A VM's virtio-net device is a *port*, reached over a vhost-user socket. Workers poll the ports' transmit queues;
//! each frame is given to the port that owns its destination MAC, by one copy from the sender's buffers into the
//! receiver's; what nobody owns goes to an uplink. Control threads, one per port, speak the vhost-user protocol and
//! change a port's queues under their locks, which workers only try.
//!
//! - [`ports`]: a VM's network card: its vhost-user socket, its queues, its counters
//! - [`vring`]: virtqueues in guest memory, split and packed
//! - [`frames`]: what a frame is, read once; tags, checksums, segments
//! - [`policy`]: what a port may send and receive
//! - [`forwarding`]: the way of a frame, and the threads that carry it
//! - [`uplink`]: ports that aren't a guest; [`service`]: what the switch answers itself
//! - [`control`]: the running switch, its configuration, and the ways to talk to it
//! - [`mod@bench`]: the switch beside its peers; [`soak`]: every frame accounted for
//! - [`event`]: eventfds; [`cpu`]: prefetching

pub mod bench;
pub mod control;
pub mod cpu;
pub mod event;
pub mod forwarding;
pub mod frames;
pub mod policy;
pub mod ports;
pub mod service;
pub mod soak;
pub mod uplink;
pub mod vring;
