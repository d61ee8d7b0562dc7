// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The format of a zone, generated from `format/tombolo_zone.h`, its only definition. The C side asserts sizes and
//! offsets too; the assertions here catch a binding that disagrees with the compiler that made the kernel module.

#![allow(missing_docs, non_camel_case_types, non_upper_case_globals, clippy::all)]

include!(concat!(env!("OUT_DIR"), "/format.rs"));

use core::mem::{align_of, offset_of, size_of};

const _: () = {
    assert!(size_of::<tmb_zone_header>() == 4096);
    assert!(size_of::<tmb_area>() == 64);
    assert!(size_of::<tmb_member>() == 256);
    assert!(size_of::<tmb_lock>() == 16);
    assert!(size_of::<tmb_doorbell_page>() == 4096);
    assert!(align_of::<tmb_zone_header>() == 8 && align_of::<tmb_member>() == 8);
    assert!(offset_of!(tmb_zone_header, version) == 8);
    assert!(offset_of!(tmb_zone_header, uuid) == 16);
    assert!(offset_of!(tmb_zone_header, size) == 32);
    assert!(offset_of!(tmb_zone_header, incompat) == 48);
    assert!(offset_of!(tmb_zone_header, name) == 64);
    assert!(offset_of!(tmb_zone_header, created_ns) == 96);
    assert!(offset_of!(tmb_zone_header, members_off) == 112);
    assert!(offset_of!(tmb_zone_header, session) == 128);
    assert!(offset_of!(tmb_zone_header, heartbeat_ns) == 136);
    assert!(offset_of!(tmb_zone_header, areas) == 256);
    assert!(offset_of!(tmb_area, offset) == 8);
    assert!(offset_of!(tmb_area, length) == 16);
    assert!(offset_of!(tmb_area, name) == 24);
    assert!(offset_of!(tmb_member, doorbell) == 8);
    assert!(offset_of!(tmb_member, role) == 12);
    assert!(offset_of!(tmb_member, rights) == 16);
    assert!(offset_of!(tmb_member, boot) == 20);
    assert!(offset_of!(tmb_member, name) == 24);
    assert!(offset_of!(tmb_member, pending) == 64);
    assert!(offset_of!(tmb_member, heartbeat_ns) == 128);
    assert!(offset_of!(tmb_member, recovered_epoch) == 192);
    assert!(offset_of!(tmb_doorbell_page, zone_uuid) == 8);
    // Slots that members write must not share a cache line with their neighbours'.
    assert!(offset_of!(tmb_member, pending) % 64 == 0);
    assert!(offset_of!(tmb_member, heartbeat_ns) % 64 == 0);
};

/// Offset of the member table.
pub const MEMBERS_OFF: u64 = 4096;
/// Bytes of a member slot.
pub const MEMBER_SIZE: u64 = size_of::<tmb_member>() as u64;
/// First byte after the member table: where areas may begin.
pub const AREAS_START: u64 = MEMBERS_OFF + MEMBER_SIZE * TMB_MAX_MEMBERS as u64;

/// Packs state and epoch of a member slot (`tmb_state_epoch`).
pub const fn state_epoch(state: u32, epoch: u32) -> u64 {
    (epoch as u64) << 32 | (state & 0xff) as u64
}

/// The state in a slot's word (`tmb_state`).
pub const fn state_of(word: u64) -> u32 {
    (word & 0xff) as u32
}

/// The epoch in a slot's word (`tmb_epoch`).
pub const fn epoch_of(word: u64) -> u32 {
    (word >> 32) as u32
}
