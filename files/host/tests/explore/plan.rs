// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides which thread runs and which dies, and when: by a given plan, or at random from a seed.

/// The decisions of one schedule. A failure prints it, and it repeats the schedule.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Thread and the number of its access before which another one goes on.
    pub switches: Vec<(usize, usize)>,
    /// Thread and the number of its store before which it dies.
    pub deaths: Vec<(usize, usize)>,
    /// Deaths are known at once, not only when no other thread can run.
    pub at_once: bool,
    /// One of so many accesses is a random switch; 0: none.
    pub rate: u64,
    pub random: u64,
    /// The running thread; another one runs only when it switches, waits or ends.
    last: usize,
    switched: bool,
}

impl Plan {
    /// From `first` on, with these switches and deaths.
    pub fn new(
        first: usize,
        switches: Vec<(usize, usize)>,
        deaths: Vec<(usize, usize)>,
        at_once: bool,
    ) -> Plan {
        Plan { switches, deaths, at_once, rate: 0, random: 0, last: first, switched: false }
    }

    /// Makes a random plan: switches, and the deaths of some of `mortal`, within the stores that they made before.
    pub fn by_chance(seed: u64, mortal: &[usize], stores: &[usize]) -> Plan {
        let mut plan = Plan::new(0, Vec::new(), Vec::new(), false);
        plan.random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        plan.rate = 2 << (plan.next() % 8);
        plan.at_once = plan.next() % 2 == 0;
        for thread in mortal {
            if plan.next() % 4 != 0 {
                let at = 1 + plan.next() as usize % (stores[*thread] + 1);
                plan.deaths.push((*thread, at));
            }
        }
        plan.last = plan.next() as usize;
        plan
    }

    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11
    }

    pub fn dies(&self, thread: usize, step: usize) -> bool {
        self.deaths.contains(&(thread, step))
    }

    pub fn switches(&mut self, thread: usize, step: usize) -> bool {
        let by_chance = self.rate > 0 && self.next() % self.rate == 0;
        self.switched = by_chance || self.switches.contains(&(thread, step));
        self.switched
    }

    pub fn is_known(&mut self, _dead: usize) -> bool {
        self.at_once || (self.rate > 0 && self.next() % 16 == 0)
    }

    /// Chooses among the threads that can run: the same as before, or another one after a switch.
    pub fn pick(&mut self, ready: &[usize]) -> usize {
        if self.rate > 0 {
            self.last = ready[self.next() as usize % ready.len()];
        } else if self.switched || !ready.contains(&self.last) {
            let after = ready.iter().find(|i| **i > self.last);
            self.last = *after.unwrap_or(&ready[0]);
        }
        self.switched = false;
        self.last
    }
}
