// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The receivers of an admitted frame: which ports get it (selection), in which form each of them may have it, and the
//! result if one doesn't take it.

use crate::forwarding::capture::Direction;
use crate::forwarding::deliver::{Frame, Put, put};
use crate::forwarding::fallback;
use crate::forwarding::forward::{Done, Sender, addresses};
use crate::forwarding::multicast::Audience;
use crate::forwarding::opens::{self, NotOpen};
use crate::frames::frame::{Mac, NEEDS_CSUM};
use crate::frames::headers::{Headers, LOOK, TPID_VLAN};
use crate::frames::vlan::{self, Edit, VlanTag};
use crate::policy::rules::{self, Way};
use crate::ports::counters::Reason;

impl Sender<'_, '_> {
    /// Chooses the receiver of an admitted frame and gives it the frame.
    #[inline(always)]
    pub fn deliver(&mut self, frame: &Frame<'_>, tag: VlanTag) -> Done {
        let (to, _) = addresses(frame.prefix);
        // Most frames of a pass are for the same port.
        if to == self.recent.0 {
            return self.hand(self.recent.1, frame);
        }
        if to & 1 != 0 {
            return self.flood(frame, tag);
        }
        match self.view.owner(to) {
            Some(dest) if dest != self.src => {
                if self.view.is_open() {
                    self.recent = (to, dest);
                }
                self.give(dest, frame, tag)
            }
            Some(_) => Done::Dropped(Reason::Loop),
            None => match self.view.learned(to, self.now) {
                Some(dest) if dest != self.src => self.give(dest, frame, tag),
                Some(_) => Done::Dropped(Reason::Loop),
                None => self.upward(frame, tag),
            },
        }
    }

    /// Gives a frame to an uplink: no port owns its destination.
    #[inline(never)]
    fn upward(&mut self, frame: &Frame<'_>, tag: VlanTag) -> Done {
        // The first uplink that it may leave by; one uplink never feeds another.
        for &dest in self.view.uplinks() {
            if dest == self.src || self.policy.uplink {
                continue;
            }
            match self.give(dest, frame, tag) {
                Done::Dropped(Reason::Vlan | Reason::Isolated) => {}
                done => return done,
            }
        }
        Done::Dropped(Reason::Unknown)
    }

    /// Gives a frame to one port.
    #[inline(always)]
    fn give(&mut self, dest: usize, frame: &Frame<'_>, tag: VlanTag) -> Done {
        if !self.view.is_open() {
            let to = &*self.view.ports()[dest].policy;
            if self.policy.isolated && !to.uplink || to.isolated && !self.policy.uplink {
                return Done::Dropped(Reason::Isolated);
            }
            if self.view.are_apart(self.src, dest) {
                return Done::Dropped(Reason::Isolated);
            }
            let Some(edit) = vlan::leave(to, tag) else { return Done::Dropped(Reason::Vlan) };
            if self.view.filters(dest) {
                return self.give_filtered(dest, frame, edit);
            }
            if edit != Edit::Keep {
                return self.give_edited(dest, frame, edit);
            }
        }
        self.hand(dest, frame)
    }

    /// Gives a frame to a port that filters its frames.
    #[inline(never)]
    fn give_filtered(&mut self, dest: usize, frame: &Frame<'_>, edit: Edit) -> Done {
        let mut buffer = [0; LOOK];
        let frame = frame.deepened(&mut buffer);
        let to = &self.view.ports()[dest];
        let (rate, limiter) = (&to.policy.receive_rate, &to.port.receive_limiter);
        let headers = Headers::parse(frame.prefix, frame.len);
        let decision = rules::decide(&to.policy.rules, Way::In, &headers, frame.prefix);
        let done = if !decision.passes() || !limiter.is_open(rate, self.now) {
            Done::Dropped(Reason::ReceiveRate)
        } else {
            self.give_edited(dest, &frame, edit)
        };
        // A waiting frame is decided again, and counted when it has ended.
        match done {
            Done::Again => {}
            Done::Dropped(reason) => return Done::Dropped(decision.count().unwrap_or(reason)),
            Done::Taken | Done::Ended => {
                decision.count();
                limiter.pay(rate, frame.len.into(), self.now);
            }
        }
        done
    }

    /// Gives a frame to one port with its tag changed. The frame has one tag at most, unless it is kept as it is.
    #[inline(never)]
    fn give_edited(&mut self, dest: usize, frame: &Frame<'_>, edit: Edit) -> Done {
        let tag = match edit {
            Edit::Keep => return self.hand(dest, frame),
            Edit::Bare => None,
            Edit::Tag(tci) => Some(tci),
        };
        const MACS: usize = 12;
        let old = frame.prefix;
        let tail = match old.get(MACS..MACS + 2) {
            Some(tpid) if tpid == TPID_VLAN.to_be_bytes() => &old[MACS + 4..],
            _ => &old[MACS..],
        };
        let mut buffer = [0u8; LOOK + 4];
        buffer[..MACS].copy_from_slice(&old[..MACS]);
        let at = match tag {
            Some(tci) => {
                buffer[MACS..MACS + 2].copy_from_slice(&TPID_VLAN.to_be_bytes());
                buffer[MACS + 2..MACS + 4].copy_from_slice(&tci.to_be_bytes());
                MACS + 4
            }
            None => MACS,
        };
        let end = at + tail.len();
        buffer[at..end].copy_from_slice(tail);
        let delta = end as i32 - old.len() as i32;
        let mut header = frame.header;
        let layers = frame.layers.shifted(delta);
        if header.flags & NEEDS_CSUM != 0 {
            header.csum_start = layers.l4;
        }
        if header.gso_type != 0 {
            header.hdr_len = layers.payload;
        }
        let len = frame.len.saturating_add_signed(delta);
        self.hand(dest, &Frame { header, layers, prefix: &buffer[..end], len, ..*frame })
    }

    /// Hands a frame to one port as it is, or in a form that the port can take.
    #[inline(always)]
    fn hand(&mut self, dest: usize, frame: &Frame<'_>) -> Done {
        let open = match self.opens.get(self.view, dest, self.flow) {
            Ok(open) => open,
            Err(NotOpen::Uplink) => {
                let done = crate::uplink::hand(self, dest, frame);
                if matches!(done, Done::Taken | Done::Ended) {
                    self.watch(dest, frame);
                }
                return done;
            }
            Err(NotOpen::Busy) => return self.wait(dest, Reason::Busy),
            Err(NotOpen::Down) => return Done::Dropped(Reason::Down),
        };
        if !frame.header.is_plain() && !fallback::takes(&open.guard.negotiated, &frame.header) {
            return fallback::hand(self, dest, frame);
        }
        match put(&mut open.guard, frame) {
            Put::Done => {
                open.packets += 1;
                open.bytes += u64::from(frame.len);
                if open.watched {
                    self.watch(dest, frame);
                }
                Done::Taken
            }
            other => self.not_put(dest, other),
        }
    }

    /// Returns whether the present frame waits for the port at `dest` or is dropped for `reason`.
    #[cold]
    pub fn wait(&mut self, dest: usize, reason: Reason) -> Done {
        self.receiver = opens::key(self.view, dest);
        let may = self.opens.credits.wait(self.receiver, 0, self.now);
        if may { Done::Again } else { Done::Dropped(reason) }
    }

    /// Returns the result of a frame that the receiver's ring didn't take.
    #[cold]
    pub fn not_put(&mut self, dest: usize, why: Put) -> Done {
        let Ok(open) = self.opens.get(self.view, dest, self.flow) else {
            return Done::Dropped(Reason::Down);
        };
        match why {
            Put::Done => Done::Taken,
            Put::Full if !self.flooding => self.wait(dest, Reason::NoBuffer),
            Put::Full => {
                open.guard.counters().drop_one(Reason::NoBuffer);
                Done::Taken
            }
            Put::TooLarge => {
                open.guard.counters().drop_one(Reason::BufferSize);
                Done::Taken
            }
            Put::Broken(why) => {
                open.guard.fail(why);
                self.opens.close(dest);
                self.broken.push((dest, why));
                Done::Dropped(Reason::Down)
            }
        }
    }

    /// Gives a frame to all ports that may have it and, if it is for a multicast group, have joined that. It waits for a
    /// receiver whose ring another worker holds, but for no buffers: without buffers it is counted as dropped.
    #[inline(never)]
    fn flood(&mut self, frame: &Frame<'_>, tag: VlanTag) -> Done {
        if frame.prefix.first_chunk().is_some_and(|b| Mac(*b).is_reserved()) {
            return Done::Dropped(Reason::Reserved);
        }
        let view = self.view;
        let counters = &view.ports()[self.src].port.tx(self.flow).counters;
        let audience = match view.queriers() {
            Some(queriers) => queriers.audience(view, self.src, frame, tag, self.now),
            None => Audience::All,
        };
        let mut unwanted = false;
        self.flooding = true;
        // Ports may have come and gone since it waited; the remaining ones keep their order.
        let cursor = self.progress.cursor;
        let here = |at: &usize| opens::key(view, *at) == self.receiver;
        let next = if cursor == 0 { 0 } else { (0..view.ports().len()).find(here).unwrap_or(cursor) };
        for dest in next..view.ports().len() {
            if dest == self.src || self.policy.uplink && view.ports()[dest].policy.uplink {
                continue;
            }
            if !audience.has(view, dest, self.now) {
                unwanted = true;
                continue;
            }
            match self.give(dest, frame, tag) {
                Done::Taken => self.progress.ends += 1,
                Done::Ended | Done::Dropped(Reason::Vlan | Reason::Isolated | Reason::Down) => {}
                Done::Dropped(reason) => {
                    counters.drop_one(reason);
                    self.progress.ends += 1;
                }
                Done::Again => {
                    self.progress.cursor = dest;
                    self.flooding = false;
                    return Done::Again;
                }
            }
            self.progress.resume = 0;
        }
        self.flooding = false;
        counters.flooded();
        if self.progress.ends == 0 && !self.progress.counted {
            return Done::Dropped(if unwanted { Reason::Unwanted } else { Reason::Unknown });
        }
        Done::Ended
    }

    /// Gives a copy of a frame that the port at `of` sends or receives to the port that mirrors it, if there is one.
    /// Copies never wait, and end in counters like other frames.
    #[cold]
    pub fn mirror(&mut self, of: usize, frame: &Frame<'_>) {
        let Some(to) = self.view.mirror(of).filter(|_| !self.mirroring) else { return };
        let reserved = frame.prefix.first_chunk().is_some_and(|b| Mac(*b).is_reserved());
        if reserved && self.view.ports()[to].policy.uplink {
            return;
        }
        let counters = &self.view.ports()[self.src].port.tx(self.flow).counters;
        let (progress, flooding) = (std::mem::take(&mut self.progress), self.flooding);
        (self.mirroring, self.flooding) = (true, true);
        let ends = match self.hand(to, frame) {
            Done::Taken => self.progress.ends + 1,
            Done::Ended | Done::Dropped(Reason::Down) => self.progress.ends,
            Done::Dropped(reason) => {
                counters.drop_one(reason);
                self.progress.ends + 1
            }
            Done::Again => {
                counters.drop_one(Reason::Busy);
                self.progress.ends + 1
            }
        };
        counters.copied(ends);
        (self.mirroring, self.flooding) = (false, flooding);
        self.progress = progress;
    }

    /// Gives the captures and the mirror of the port at `dest` a frame that it received.
    #[cold]
    fn watch(&mut self, dest: usize, frame: &Frame<'_>) {
        if let Some(capture) = &self.view.ports()[dest].capture {
            capture.take(frame, Direction::ToGuest);
        }
        self.mirror(dest, frame);
    }
}
