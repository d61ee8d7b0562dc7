// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The receivers of an admitted frame: which ports get it (selection), in which form each of them may have it, and the
//! result if one doesn't take it.

use crate::forwarding::capture::Direction;
use crate::forwarding::deliver::{Frame, Put, put};
use crate::forwarding::fallback;
use crate::forwarding::forward::{Done, Sender, addresses};
use crate::forwarding::learn;
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
            None => match self.learned(to, tag, frame.prefix) {
                Some(dest) if dest != self.src => self.give(dest, frame, tag),
                Some(_) => Done::Dropped(Reason::Loop),
                None => self.upward(frame, tag),
            },
        }
    }

    /// Returns the position of the port that has learned this address where a frame on `tag` that starts with `head` goes.
    fn learned(&self, to: u64, tag: VlanTag, head: &[u8]) -> Option<usize> {
        let mut stations = learn::stations(to, tag, head);
        stations.find_map(|station| self.view.learned(station, self.now))
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
        // Each receiver's copy is made of all of the sender's buffers.
        self.read(frame.rest.len());
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
        let put = put(&mut open.guard, frame);
        let read = open.guard.window.take_effort();
        match put {
            Put::Done => {
                open.packets += 1;
                open.bytes += u64::from(frame.len);
                if open.watched {
                    self.watch(dest, frame);
                }
                self.read(read);
                Done::Taken
            }
            other => {
                self.read(read);
                self.not_put(dest, other)
            }
        }
    }

    /// Lets the present frame go on at the port at `dest` in the sender's next turn.
    #[cold]
    pub fn pause(&mut self, dest: usize) -> Done {
        self.receiver = opens::key(self.view, dest);
        self.progress.paused = true;
        Done::Again
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
    /// receiver whose ring another worker holds, but for no buffers: without buffers it is counted as dropped. Receivers for which the pass
    /// has no time left get it in the sender's next turn.
    #[inline(never)]
    fn flood(&mut self, frame: &Frame<'_>, tag: VlanTag) -> Done {
        if frame.prefix.first_chunk().is_some_and(|b| Mac(*b).is_reserved()) {
            return Done::Dropped(Reason::Reserved);
        }
        let view = self.view;
        let counters = &view.ports()[self.src].port.tx(self.flow).counters;
        let audience = match view.queriers() {
            Some(queriers) => {
                let mut changes = 0;
                let audience = queriers.audience(view, self.src, frame, tag, self.now, &mut changes);
                self.reported(changes);
                audience
            }
            None => Audience::All,
        };
        let mut unwanted = false;
        let mut receivers = 0;
        self.flooding = true;
        for dest in self.next_receiver()..view.ports().len() {
            if dest == self.src || self.policy.uplink && view.ports()[dest].policy.uplink {
                continue;
            }
            if !audience.has(view, dest, self.now) {
                unwanted = true;
                continue;
            }
            if receivers > 0 && !self.may_flood(receivers, frame.len) {
                self.pause(dest);
                return self.flood_again(dest, receivers);
            }
            let ends = self.progress.ends;
            match self.give(dest, frame, tag) {
                Done::Taken => self.progress.ends += 1,
                Done::Ended | Done::Dropped(Reason::Vlan | Reason::Isolated | Reason::Down) => {}
                Done::Dropped(reason) => {
                    counters.drop_one(reason);
                    self.progress.ends += 1;
                }
                Done::Again => return self.flood_again(dest, receivers),
            }
            self.progress.resume = 0;
            receivers += u64::from(self.progress.ends > ends);
        }
        self.flooding = false;
        self.flooded(receivers);
        counters.flooded();
        if self.progress.ends == 0 && !self.progress.counted {
            return Done::Dropped(if unwanted { Reason::Unwanted } else { Reason::Unknown });
        }
        Done::Ended
    }

    /// Returns the position of the first port that has not had the flooded frame. Ports may have come and gone since it waited; the
    /// remaining ones keep their order, which is that of their numbers.
    fn next_receiver(&self) -> usize {
        let all = 0..self.view.ports().len();
        if !self.progress.begun {
            return all.start;
        }
        let here = |at: &usize| opens::key(self.view, *at) == self.receiver;
        let later = |at: &usize| opens::key(self.view, *at) > self.receiver;
        all.clone().find(here).or_else(|| all.clone().find(later)).unwrap_or(all.end)
    }

    /// Lets a flooded frame go on at the port at `dest`, which it waits for, when it is tried again.
    fn flood_again(&mut self, dest: usize, receivers: u64) -> Done {
        self.progress.begun = dest > 0;
        self.flooding = false;
        self.flooded(receivers);
        Done::Again
    }

    /// Returns whether the uplink at `dest` gets the frame itself, if it takes it.
    #[cold]
    fn leaves_by(&self, dest: usize, frame: &Frame<'_>, tag: VlanTag) -> bool {
        let may = |up: usize| {
            let to = &self.view.ports()[up].policy;
            up != self.src
                && !self.policy.uplink
                && !self.view.are_apart(self.src, up)
                && vlan::leave(to, tag).is_some()
        };
        let (to, _) = addresses(frame.prefix);
        if to & 1 != 0 {
            return may(dest);
        }
        let owned = self.view.owner(to).or_else(|| self.learned(to, tag, frame.prefix));
        owned.is_none() && self.view.uplinks().iter().copied().find(|up| may(*up)) == Some(dest)
    }

    /// Gives a copy of a frame that the sender sends to the port that mirrors it, if there is one; not to the uplink by which the frame
    /// itself leaves.
    #[cold]
    pub fn mirror_sent(&mut self, frame: &Frame<'_>, tag: VlanTag) {
        let by = self.view.mirror(self.src).filter(|to| self.view.uplinks().contains(to));
        if by.is_none_or(|to| !self.leaves_by(to, frame, tag)) {
            self.mirror(self.src, frame);
        }
    }

    /// Gives a copy of a frame that the port at `of` sends or receives to the port that mirrors it, if there is one, but no uplink one
    /// of its own frames. Copies never wait, and end in counters like other frames.
    #[cold]
    pub fn mirror(&mut self, of: usize, frame: &Frame<'_>) {
        let own = |to: usize| to == self.src && self.policy.uplink;
        let Some(to) = self.view.mirror(of).filter(|to| !self.mirroring && !own(*to)) else { return };
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
