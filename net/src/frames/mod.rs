// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a frame is: [`frame`] has the Ethernet and virtio-net headers, [`headers`] reads a frame once into a description;
//! by it, [`vlan`] tags and [`offload`] computes checksums and segments. [`membership`] reads what hosts say of multicast groups.

pub mod frame;
pub mod headers;
pub mod membership;
pub mod offload;
pub mod vlan;
