// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Device memory of a client against its limit, or against that of its VM, whose processes have it together ([`crate::account`]).

use crate::account::{Account, Good};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tombolo_calls::say;

/// Bytes that a client has, of so many that it may have.
pub struct Quota {
    limit: u64,
    own: AtomicU64,
    /// Set if all processes of its VM have the limit together.
    account: Option<Arc<Account>>,
}

impl Quota {
    pub fn new(limit: u64, account: Option<Arc<Account>>) -> Quota {
        Quota { limit, own: AtomicU64::new(0), account }
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes of this client.
    pub fn own(&self) -> u64 {
        self.own.load(Ordering::Relaxed)
    }

    /// Bytes that count against the limit.
    pub fn used(&self) -> u64 {
        self.account.as_ref().map_or_else(|| self.own(), |account| account.sum(Good::Memory))
    }

    /// Counts bytes; `refusal`, and a line in the log, beyond the limit.
    pub fn charge(&self, bytes: u64, refusal: i32) -> Result<(), i32> {
        let limit = self.limit;
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= limit);
        let refused = |whose: &str, used: u64| {
            say!(
                "tombolo accel: {whose} quota is reached: {used} of {limit} bytes of device memory are used, {bytes} more were asked for; raise its limit of memory"
            );
            refusal
        };
        self.own
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|used| refused("a client's", used))?;
        let Some(account) = &self.account else { return Ok(()) };
        account.charge(Good::Memory, bytes, limit).map_err(|used| {
            self.own.fetch_sub(bytes, Ordering::Relaxed);
            refused("a VM's", used)
        })
    }

    pub fn uncharge(&self, bytes: u64) {
        self.own.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(account) = &self.account {
            account.give_back(Good::Memory, bytes);
        }
    }
}
