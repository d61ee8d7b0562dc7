// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Turns to start and stop VMs. A request has the turn for all VMs while it decides what to do, and then only for those that it starts: one that
//! reboots meanwhile, or that its policy starts again, needs no turn but its own. A wait can have a limit, which a mutex's can't.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Debug, Default)]
pub struct Turns {
    taken: Mutex<Taken>,
    freed: Condvar,
}

/// The commands that have a turn.
#[derive(Debug, Default)]
struct Taken {
    all: bool,
    /// Turns for all VMs that have become turns for some: until they end there is no other one for all.
    narrowed: usize,
    vms: BTreeSet<String>,
}

/// The VMs of a turn.
#[derive(Clone, Copy, Debug)]
pub enum Of<'a> {
    All,
    /// The one of this name.
    Vm(&'a str),
    /// Those of these names.
    Vms(&'a BTreeSet<String>),
}

impl Taken {
    fn meets(&self, of: Of<'_>) -> bool {
        match of {
            Of::All => self.all || self.narrowed > 0 || !self.vms.is_empty(),
            Of::Vm(name) => self.all || self.vms.contains(name),
            Of::Vms(names) => self.all || !self.vms.is_disjoint(names),
        }
    }
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    turns: &'a Turns,
    held: Mutex<Taken>,
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn. The command that has it is ended by `down` at the latest.
    pub fn take(&self, of: Of<'_>) -> Turn<'_> {
        let taken = self.freed.wait_while(self.lock(), |taken| taken.meets(of));
        self.begin(taken.unwrap_or_else(PoisonError::into_inner), of)
    }

    /// Waits at most `limit` for a turn.
    pub fn take_within(&self, of: Of<'_>, limit: Duration) -> Option<Turn<'_>> {
        let waited = self.freed.wait_timeout_while(self.lock(), limit, |taken| taken.meets(of));
        let (taken, late) = waited.unwrap_or_else(PoisonError::into_inner);
        (!late.timed_out()).then(|| self.begin(taken, of))
    }

    fn begin(&self, mut taken: MutexGuard<'_, Taken>, of: Of<'_>) -> Turn<'_> {
        let mut held = Taken::default();
        match of {
            Of::All => held.all = true,
            Of::Vm(name) => drop(held.vms.insert(name.to_owned())),
            Of::Vms(names) => held.vms.clone_from(names),
        }
        taken.all |= held.all;
        taken.vms.extend(held.vms.iter().cloned());
        Turn { turns: self, held: Mutex::new(held) }
    }
}

impl Turn<'_> {
    /// From here on it is a turn for these VMs only.
    pub fn narrow(&self, vms: BTreeSet<String>) {
        self.change(|held, taken| {
            taken.all &= !held.all;
            taken.narrowed += 1;
            taken.vms.extend(vms.iter().cloned());
            *held = Taken { all: false, narrowed: 1, vms };
        });
    }

    /// It is not for this VM any more.
    pub fn release(&self, vm: &str) {
        self.change(|held, taken| {
            if held.vms.remove(vm) {
                taken.vms.remove(vm);
            }
        });
    }

    /// It is for this VM again, which it was released for. Returns whether that was possible within `limit`.
    pub fn reclaim(&self, vm: &str, limit: Duration) -> bool {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.vms.contains(vm) {
            return true;
        }
        let of = Of::Vm(vm);
        let waited = self.turns.freed.wait_timeout_while(self.turns.lock(), limit, |taken| taken.meets(of));
        let (mut taken, late) = waited.unwrap_or_else(PoisonError::into_inner);
        if late.timed_out() {
            return false;
        }
        taken.vms.insert(vm.to_owned());
        held.vms.insert(vm.to_owned())
    }

    fn change(&self, how: impl FnOnce(&mut Taken, &mut Taken)) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        how(&mut held, &mut self.turns.lock());
        drop(held);
        self.turns.freed.notify_all();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.change(|held, taken| {
            taken.all &= !held.all;
            taken.narrowed -= held.narrowed;
            taken.vms.retain(|vm| !held.vms.contains(vm));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn a_turn_for_some_vms_leaves_the_others_theirs() {
        let turns = Turns::default();
        let up = turns.take(Of::All);
        assert!(turns.take_within(Of::Vm("a"), NOW).is_none());
        up.narrow(BTreeSet::from(["b".to_owned(), "c".to_owned()]));
        let reboot = turns.take_within(Of::Vm("a"), NOW).unwrap();
        assert!(turns.take_within(Of::Vm("a"), NOW).is_none());
        assert!(turns.take_within(Of::Vm("b"), NOW).is_none());
        for vm in ["b", "c"] {
            up.release(vm);
        }
        let other = turns.take_within(Of::Vm("b"), NOW).unwrap();
        assert!(!up.reclaim("b", NOW));
        drop(other);
        assert!(turns.take_within(Of::All, NOW).is_none(), "it may take back what it has started");
        assert!(up.reclaim("b", NOW) && up.reclaim("b", NOW));
        assert!(turns.take_within(Of::Vm("b"), NOW).is_none());
        drop(up);
        assert!(turns.take_within(Of::All, NOW).is_none(), "the reboot goes on");
        drop(turns.take_within(Of::Vm("c"), NOW).unwrap());
        drop(reboot);
        drop(turns.take_within(Of::All, NOW).unwrap());
        let [ab, bc, c] =
            [&["a", "b"][..], &["b", "c"], &["c"]].map(|vms| vms.iter().map(|vm| vm.to_string()).collect());
        let down = turns.take_within(Of::Vms(&ab), NOW).unwrap();
        assert!(
            turns.take_within(Of::Vms(&bc), NOW).is_none() && turns.take_within(Of::Vm("b"), NOW).is_none()
        );
        drop(turns.take_within(Of::Vms(&c), NOW).unwrap());
        drop(down);
        drop(turns.take_within(Of::Vms(&bc), NOW).unwrap());
    }

    #[test]
    fn whoever_waits_gets_the_turn_when_it_is_given_back() {
        let turns = &Turns::default();
        let up = turns.take(Of::All);
        std::thread::scope(|scope| {
            let waits = [Of::Vm("a"), Of::All].map(|of| scope.spawn(move || drop(turns.take(of))));
            drop(up);
            for wait in waits {
                wait.join().unwrap();
            }
        });
    }
}
