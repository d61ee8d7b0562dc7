// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Load for the switch (`net/`): measurements beside its peers, and a soak that accounts for every frame. `tombolo bench net` runs both.
//!
//! - [`load`]: the switch and its peers under the same load, without VMs
//! - [`soak`]: two cards that send to each other through a switch that is killed again and again

pub mod load;
mod peer;
pub mod soak;
