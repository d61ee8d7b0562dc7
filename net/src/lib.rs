// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch: packets between VMs through memory.
//!
//! A VM's virtio-net device is a *port*, reached over a vhost-user socket. Workers poll the ports' transmit queues and
//! give each frame to the port that owns its destination MAC, by one copy from the sender's buffers into the
//! receiver's; frames without an owner go to an uplink. Control threads, one per port, speak the vhost-user protocol
//! and change a port's queues under their locks, which workers only try.
//!
//! - [`ports`]: a VM's network card: its vhost-user socket, its queues, its counters
//! - [`vring`]: virtqueues in guest memory, split and packed
//! - [`frames`]: parsing of frames; tags, checksums, segments
//! - [`policy`]: the frames that a port may send and receive
//! - [`forwarding`]: the path of a frame, and the worker threads
//! - [`uplink`]: ports that aren't a guest; [`service`]: the switch's own DHCP, router advertisements and queries
//! - [`control`]: the running switch, its configuration and its interfaces
//! - [`event`]: eventfds; [`cpu`]: prefetching

pub mod control;
pub mod cpu;
pub mod event;
pub mod forwarding;
pub mod frames;
pub mod policy;
pub mod ports;
pub mod service;
pub mod uplink;
pub mod vring;
