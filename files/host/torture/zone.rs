// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory with a member table and a file system, and the host's part of a real zone: admits members, declares them dead.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tombolo_files::area::{Area, Incarnation, Map};
use tombolo_files::fs::{self, Filesystem, Mkfs};
use tombolo_files::fsck;
use tombolo_files::sys;

const MEMBERS_AT: u64 = 4096;
const AREA_AT: u64 = 2 << 20;

/// Shared memory; children made by fork see the same.
pub struct Zone {
    map: Arc<Map>,
    area: Area,
}

impl Zone {
    pub fn new(mib: u64) -> Result<Zone, String> {
        let text = |e: std::io::Error| e.to_string();
        let map = Arc::new(Map::memfd("torture", AREA_AT + (mib << 20)).map_err(text)?);
        let area = Area::in_map(&map, AREA_AT, mib << 20, None).map_err(text)?;
        fs::mkfs(&area, &Mkfs { hash_seed: 12345, ..Mkfs::default() }).map_err(|e| format!("mkfs: {e}"))?;
        Ok(Zone { map, area })
    }

    fn table(&self) -> Result<Area, String> {
        Area::in_map(&self.map, MEMBERS_AT, 64 * 256, None).map_err(|e| e.to_string())
    }

    fn word(&self, member: u32) -> Result<u64, String> {
        self.table()?.word(u64::from(member) * 256).ok_or_else(|| "no such member".to_owned())
    }

    fn set(&self, member: u32, epoch: u32, state: u32) -> Result<(), String> {
        let value = u64::from(epoch) << 32 | u64::from(state);
        let done = self.table()?.store_word(u64::from(member) * 256, value);
        done.then_some(()).ok_or_else(|| "no such member".to_owned())
    }

    /// Admits a member, in a new epoch.
    pub fn join(&self, member: u32) -> Result<Incarnation, String> {
        let epoch = (self.word(member)? >> 32) as u32 + 1;
        self.set(member, epoch, sys::TMB_MEMBER_ACTIVE)?;
        Ok(Incarnation { member, epoch })
    }

    /// Declares a member dead.
    pub fn declare_dead(&self, member: u32) -> Result<(), String> {
        let epoch = (self.word(member)? >> 32) as u32 + 1;
        self.set(member, epoch, sys::TMB_MEMBER_DEAD)
    }

    /// Returns the member, dead or alive, that has locked this member's recovery.
    pub fn recoverer(&self, member: u32) -> Result<Option<u32>, String> {
        let at = u64::from(member) * 256 + core::mem::offset_of!(sys::tmb_member, recovery_lock) as u64;
        let lock = self.table()?.word(at).ok_or_else(|| "no such member".to_owned())?;
        Ok((lock as u32 & 0xff).checked_sub(1))
    }

    /// Returns a handle for an incarnation.
    pub fn open(&self, incarnation: Incarnation) -> Result<Filesystem, String> {
        let area = Area::in_map(&self.map, AREA_AT, self.area.size(), Some((MEMBERS_AT, incarnation)));
        let area = area.map_err(|e| e.to_string())?;
        Filesystem::open(area).map_err(|e| format!("opening as member {}: {e}", incarnation.member))
    }

    /// Tells all other members that the member table changed, as the host does.
    pub fn tell_of(&self, member: u32) -> Result<(), String> {
        for other in (0..sys::TFS_MEMBERS).filter(|other| *other != member) {
            if self.word(other)? as u32 & 0xff == sys::TMB_MEMBER_ACTIVE {
                self.pending(other)?.fetch_or(u64::from(sys::TMB_PENDING_MEMBERS), Ordering::SeqCst);
            }
        }
        Ok(())
    }

    /// Returns the pending bits since the last call.
    pub fn take_pending(&self, member: u32) -> Result<u64, String> {
        let pending = self.pending(member)?;
        Ok(if pending.load(Ordering::Relaxed) == 0 { 0 } else { pending.swap(0, Ordering::SeqCst) })
    }

    fn pending(&self, member: u32) -> Result<&AtomicU64, String> {
        if member >= sys::TFS_MEMBERS {
            return Err("no such member".into());
        }
        let at = u64::from(member) * 256 + core::mem::offset_of!(sys::tmb_member, pending) as u64;
        // SAFETY: an aligned word of the member's slot, which is accessed by atomics only; the mapping lives as long as self.
        Ok(unsafe { AtomicU64::from_ptr(self.table()?.base().add(at as usize).cast()) })
    }

    /// Returns a word outside the file system that processes count in.
    pub fn counter(&self, index: u64) -> &AtomicU64 {
        let at = Area::in_map(&self.map, 1 << 20, 4096, None).expect("room for counters").base();
        assert!(index < 512);
        // SAFETY: an aligned word of a page that only these counters use; the mapping lives as long as self.
        unsafe { AtomicU64::from_ptr(at.cast::<u64>().add(index as usize)) }
    }

    /// fsck finds nothing; no member may use the file system.
    pub fn check(&self) -> Result<(), String> {
        fsck::expect_clean(&self.area, &mut |_, _, _| {}).map(|_| ())
    }
}

/// Adds to a maximum.
pub fn raise(max: &AtomicU64, value: u64) {
    max.fetch_max(value, Ordering::Relaxed);
}
