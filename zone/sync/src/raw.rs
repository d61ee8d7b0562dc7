// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The C functions, as `libtombolo-sync.h` declares and explains them.

#![allow(missing_docs)]

use std::ffi::{c_char, c_int, c_void};

/// `tmb_sync`.
#[repr(C)]
pub struct TmbSync {
    private: [u8; 0],
}

/// `tmb_object`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TmbObject {
    pub index: u32,
    pub generation: u32,
}

/// `enum tmb_sync_type`.
pub type Kind = c_int;
pub const SEMAPHORE: Kind = 1;
pub const MUTEX: Kind = 2;
pub const RWLOCK: Kind = 3;
pub const EVENT: Kind = 4;

unsafe extern "C" {
    pub fn tmb_sync_open(path: *const c_char, out: *mut *mut TmbSync) -> c_int;
    pub fn tmb_sync_close(s: *mut TmbSync);
    pub fn tmb_sync_create(
        s: *mut TmbSync,
        kind: Kind,
        name: *const c_char,
        initial: u64,
        out: *mut TmbObject,
    ) -> c_int;
    pub fn tmb_sync_lookup(s: *mut TmbSync, kind: Kind, name: *const c_char, out: *mut TmbObject) -> c_int;
    pub fn tmb_sync_destroy(s: *mut TmbSync, name: *const c_char) -> c_int;
    pub fn tmb_sem_post(s: *mut TmbSync, o: TmbObject) -> c_int;
    pub fn tmb_sem_wait(s: *mut TmbSync, o: TmbObject, timeout_ns: i64) -> c_int;
    pub fn tmb_sem_value(s: *mut TmbSync, o: TmbObject, value: *mut u32) -> c_int;
    pub fn tmb_mutex_lock(s: *mut TmbSync, o: TmbObject, timeout_ns: i64) -> c_int;
    pub fn tmb_mutex_unlock(s: *mut TmbSync, o: TmbObject) -> c_int;
    pub fn tmb_rwlock_rdlock(s: *mut TmbSync, o: TmbObject, timeout_ns: i64) -> c_int;
    pub fn tmb_rwlock_wrlock(s: *mut TmbSync, o: TmbObject, timeout_ns: i64) -> c_int;
    pub fn tmb_rwlock_rdunlock(s: *mut TmbSync, o: TmbObject) -> c_int;
    pub fn tmb_rwlock_wrunlock(s: *mut TmbSync, o: TmbObject) -> c_int;
    pub fn tmb_event_advance(s: *mut TmbSync, o: TmbObject, by: u64) -> c_int;
    pub fn tmb_event_read(s: *mut TmbSync, o: TmbObject, count: *mut u64) -> c_int;
    pub fn tmb_event_await(s: *mut TmbSync, o: TmbObject, at_least: u64, timeout_ns: i64) -> c_int;
    pub fn tmb_sync_serve(area: *mut c_void, len: usize, member: u32, epoch: u32) -> c_int;
    pub fn tmb_sync_requests(s: *mut TmbSync, timeout_ns: i64, mask: *mut u64) -> c_int;
    pub fn tmb_sync_interrupt(s: *mut TmbSync);
    pub fn tmb_sync_rang(s: *mut TmbSync);
    pub fn tmb_sync_reap(s: *mut TmbSync) -> c_int;
}
