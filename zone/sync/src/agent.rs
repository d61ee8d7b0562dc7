// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The part of a zone's server that semaphores and locks need. Processes on the host wake each other by futex, and guests ring each
//! other; the agent is needed only if a host process wakes a guest, or a guest wakes the host.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tombolo_zone::doorbell::{Bell, DoorbellServer};
use tombolo_zone::{AreaType, MemberId, MemberState, Membership, Pending, Rights, Role, Zone};

use crate::{Error, Sync, checked, raw};

/// Interval at which the agent looks for sessions whose process has died. Locks of a dead process are free after this time.
const REAP: Duration = Duration::from_millis(250);

/// The host's member in a zone, named `host`, serving its SYNC area. Dropping it ends the service.
pub struct Agent {
    member: Option<Membership>,
    zone: Arc<Zone>,
    sync: Arc<Sync>,
    stop: Arc<AtomicBool>,
    bell: Option<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Agent {
    /// Joins the zone as `host` and starts serving. Without a doorbell server, processes of the host can use the area among themselves,
    /// and guests notice changes at the next slice of their sleep (250 ms).
    pub fn start(zone: Arc<Zone>, server: Option<Arc<DoorbellServer>>) -> Result<Agent, tombolo_zone::Error> {
        let area = zone.area(AreaType::Sync, None)?;
        let failed = |what: &str, error: Error| tombolo_zone::Error::Config {
            zone: zone.name().to_owned(),
            why: format!("{what}: {error}"),
        };
        let (id, liveness) = zone.claim("host", Role::Host, Rights::READ_WRITE)?;
        let member = zone.join_claimed(id, liveness)?;
        // The area fits an usize: it is mapped.
        let (base, len) = (zone.area_ptr(&area)?, area.len as usize);
        // SAFETY: the area is mapped for writing as long as `zone` lives, which is beyond this call.
        let made = unsafe { raw::tmb_sync_serve(base.cast(), len, member.id().index(), member.epoch()) };
        checked(made).map_err(|e| failed("making its SYNC area ready", e))?;
        let sync = Sync::open(format!("/proc/self/fd/{}", zone.as_fd().as_raw_fd()));
        let sync = Arc::new(sync.map_err(|e| failed("opening its SYNC area", e))?);
        let bell = match &server {
            Some(server) => {
                let (zone, sync, own) = (Arc::clone(&zone), Arc::clone(&sync), member.id());
                Some(server.bell(own, move || rang(&zone, &sync, own))?)
            }
            None => None,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let work = Work { zone: Arc::clone(&zone), sync: Arc::clone(&sync), server, stop: Arc::clone(&stop) };
        let thread = std::thread::Builder::new()
            .name("sync-agent".to_owned())
            .spawn(move || work.run())
            .map_err(|e| tombolo_zone::Error::io("starting the thread that serves semaphores", e))?;
        Ok(Agent { member: Some(member), zone, sync, stop, bell, thread: Some(thread) })
    }

    /// The host's member.
    pub fn member(&self) -> Option<MemberId> {
        self.member.as_ref().map(Membership::id)
    }

    /// The session of this process, to use objects in it.
    pub fn sync(&self) -> &Sync {
        &self.sync
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // SAFETY: an open session.
        unsafe { raw::tmb_sync_interrupt(self.sync.raw.as_ptr()) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.bell = None;
        if let Some(member) = self.member.take() {
            // Declared dead meanwhile: then there is nothing to leave.
            let _ = self.zone.leave(member);
        }
    }
}

fn rang(zone: &Zone, sync: &Sync, own: MemberId) {
    if let Err(error) = zone.take_pending(own) {
        tracing::error!(%error, "semaphores");
    }
    // SAFETY: an open session.
    unsafe { raw::tmb_sync_rang(sync.raw.as_ptr()) };
}

struct Work {
    zone: Arc<Zone>,
    sync: Arc<Sync>,
    server: Option<Arc<DoorbellServer>>,
    stop: Arc<AtomicBool>,
}

impl Work {
    fn run(self) {
        let mut reaped = Instant::now();
        while !self.stop.load(Ordering::SeqCst) {
            let mut mask = 0;
            let slice = i64::try_from(REAP.as_nanos()).unwrap_or(i64::MAX);
            // SAFETY: an open session and a valid place for the result.
            let asked = unsafe { raw::tmb_sync_requests(self.sync.raw.as_ptr(), slice, &mut mask) };
            if let Err(error) = checked(asked) {
                tracing::error!(%error, "semaphores");
                return;
            }
            for id in MemberId::all().filter(|id| mask >> id.index() & 1 != 0) {
                if let Err(error) = self.ring(id) {
                    tracing::warn!(%error, member = %id, "ringing for a semaphore");
                }
            }
            if reaped.elapsed() >= REAP {
                reaped = Instant::now();
                // SAFETY: an open session.
                unsafe { raw::tmb_sync_reap(self.sync.raw.as_ptr()) };
            }
        }
    }

    fn ring(&self, id: MemberId) -> tombolo_zone::Result<()> {
        let member = self.zone.member(id)?;
        if member.state != MemberState::Active {
            return Ok(());
        }
        // Rings also if the bit was set: other services may take a member's bits without knowing of semaphores.
        self.zone.pend(id, Pending::Sync)?;
        if let (Some(server), Some(peer)) = (&self.server, member.doorbell) {
            server.ring(peer)?;
        }
        Ok(())
    }
}
