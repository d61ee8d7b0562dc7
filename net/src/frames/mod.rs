// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The formats of frames: [`frame`] has the Ethernet and virtio-net headers, [`headers`] parses a frame once into a description;
//! with it [`vlan`] handles tags and [`offload`] computes checksums and segments. [`membership`] parses messages about multicast
//! groups.

pub mod frame;
pub mod headers;
pub mod membership;
pub mod offload;
pub mod vlan;
