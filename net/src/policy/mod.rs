// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The frames that a port may send and receive: [`port`] the policy of a port, [`spoof`] forged senders, [`rules`] by
//! addresses and ports, [`limit`] rates.

pub mod limit;
pub mod port;
pub mod rules;
pub mod spoof;
