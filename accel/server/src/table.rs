// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A client's ids and what they stand for. The client chooses ids: a slot number and a generation. Every use is checked: the number is
//! within the limit, the slot is in use, generation and kind fit. An object whose creation failed keeps its error as its answer.

use crate::account::{Account, Good};
use std::sync::Arc;

/// The object that an id stands for.
#[derive(Debug)]
pub struct Entry<X> {
    generation: u32,
    kind: u32,
    native: Result<usize, i32>,
    /// The API's own state of the object.
    pub extra: X,
}

/// Why an id can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It names no object of this kind.
    Invalid,
    /// It names an object whose creation failed with this code.
    Failed(i32),
    /// The number is beyond the limit of objects.
    TooMany,
    /// It names an object that lives.
    InUse,
}

/// All objects of a client.
pub struct Table<X> {
    slots: Vec<Option<Entry<X>>>,
    limit: usize,
    live: usize,
    /// Set if several tables have the limit together.
    account: Option<Arc<Account>>,
}

impl<X> Table<X> {
    /// An empty table for at most `limit` objects.
    pub fn new(limit: usize) -> Self {
        Table { slots: Vec::new(), limit, live: 0, account: None }
    }

    /// The same, where all who share the account may have `limit` objects together.
    pub fn shared(limit: usize, account: Option<Arc<Account>>) -> Self {
        Table { account, ..Table::new(limit) }
    }

    /// Objects that live.
    pub fn live(&self) -> usize {
        self.live
    }

    fn give_back(&self, n: u64) {
        if let Some(account) = &self.account {
            account.give_back(Good::Objects, n);
        }
    }

    fn entry(&self, kind: u32, id: u64) -> Result<&Entry<X>, Fault> {
        match self.slots.get(id as u32 as usize) {
            Some(Some(e)) if e.kind == kind && e.generation == (id >> 32) as u32 => Ok(e),
            _ => Err(Fault::Invalid),
        }
    }

    /// The native handle of an object.
    pub fn get(&self, kind: u32, id: u64) -> Result<usize, Fault> {
        self.entry(kind, id)?.native.map_err(Fault::Failed)
    }

    /// The id that stands for a native handle.
    pub fn id_of(&self, kind: u32, native: usize) -> Option<u64> {
        let is = |e: &Entry<X>| e.kind == kind && e.native == Ok(native);
        let at = self.slots.iter().position(|slot| slot.as_ref().is_some_and(is))?;
        self.slots[at].as_ref().map(|e| u64::from(e.generation) << 32 | at as u64)
    }

    /// The server's own facts about an object.
    pub fn extra(&self, kind: u32, id: u64) -> Result<&X, Fault> {
        Ok(&self.entry(kind, id)?.extra)
    }

    /// The same, to change it.
    pub fn extra_mut(&mut self, kind: u32, id: u64) -> Result<&mut X, Fault> {
        self.entry(kind, id)?;
        match &mut self.slots[id as u32 as usize] {
            Some(e) => Ok(&mut e.extra),
            None => Err(Fault::Invalid),
        }
    }

    /// Refuses an id that a new object can't have.
    pub fn vacant(&self, id: u64) -> Result<(), Fault> {
        let index = id as u32 as usize;
        if index == 0 || index > self.limit {
            return Err(Fault::TooMany);
        }
        match self.slots.get(index) {
            Some(Some(_)) => Err(Fault::InUse),
            _ => Ok(()),
        }
    }

    /// Gives an id to a native handle, or to a creation that failed.
    pub fn put(&mut self, kind: u32, id: u64, native: Result<usize, i32>, extra: X) -> Result<(), Fault> {
        self.vacant(id)?;
        if let Some(account) = &self.account {
            account.charge(Good::Objects, 1, self.limit as u64).map_err(|_| Fault::TooMany)?;
        }
        let index = id as u32 as usize;
        if index >= self.slots.len() {
            self.slots.resize_with(index + 1, || None);
        }
        self.slots[index] = Some(Entry { generation: (id >> 32) as u32, kind, native, extra });
        self.live += 1;
        Ok(())
    }

    /// Takes an object out: its native handle, if it had one, and what was kept.
    pub fn take(&mut self, kind: u32, id: u64) -> Result<(Option<usize>, X), Fault> {
        self.entry(kind, id)?;
        let entry = self.slots[id as u32 as usize].take().ok_or(Fault::Invalid)?;
        self.live -= 1;
        self.give_back(1);
        Ok((entry.native.ok(), entry.extra))
    }

    /// The ids of the objects of which this is true.
    pub fn ids(&self, is: impl Fn(&X) -> bool) -> Vec<u64> {
        let id =
            |(at, e): (usize, &Entry<X>)| is(&e.extra).then(|| u64::from(e.generation) << 32 | at as u64);
        let there = self.slots.iter().enumerate().filter_map(|(at, slot)| Some((at, slot.as_ref()?)));
        there.filter_map(id).collect()
    }

    /// Takes the objects out of which this is true: their ids, and what was kept.
    pub fn take_if(&mut self, is: impl Fn(&X) -> bool) -> Vec<(u64, X)> {
        let ids = self.ids(is);
        let taken = ids.iter().filter_map(|id| self.slots[*id as u32 as usize].take());
        let all: Vec<(u64, X)> = ids.iter().copied().zip(taken.map(|e| e.extra)).collect();
        self.live -= all.len();
        self.give_back(all.len() as u64);
        all
    }

    /// Takes everything out: kind, native handle, and what was kept; last created first within a kind.
    pub fn drain(&mut self) -> Vec<(u32, usize, X)> {
        self.give_back(self.live as u64);
        self.live = 0;
        let slots = std::mem::take(&mut self.slots);
        slots.into_iter().rev().flatten().filter_map(|e| Some((e.kind, e.native.ok()?, e.extra))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_good_only_for_its_kind_and_generation() {
        let mut t = Table::new(10);
        t.put(1, 7 << 32 | 3, Ok(42), ()).expect("vacant");
        assert_eq!(t.get(1, 7 << 32 | 3), Ok(42));
        assert_eq!((t.id_of(1, 42), t.id_of(2, 42), t.id_of(1, 41)), (Some(7 << 32 | 3), None, None));
        assert_eq!(t.get(2, 7 << 32 | 3), Err(Fault::Invalid));
        assert_eq!(t.get(1, 8 << 32 | 3), Err(Fault::Invalid));
        assert_eq!(t.get(1, 7 << 32 | 4), Err(Fault::Invalid));
        assert_eq!(t.get(1, u64::MAX), Err(Fault::Invalid));
    }

    #[test]
    fn a_live_id_is_not_given_again_and_the_limit_holds() {
        let mut t = Table::new(2);
        assert_eq!(t.put(1, 0, Ok(1), ()), Err(Fault::TooMany));
        t.put(1, 1, Ok(1), ()).expect("vacant");
        assert_eq!(t.put(1, 1 << 32 | 1, Ok(2), ()), Err(Fault::InUse));
        assert_eq!(t.put(1, 3, Ok(1), ()), Err(Fault::TooMany));
        assert_eq!(t.take(1, 1), Ok((Some(1), ())));
        assert_eq!(t.take(1, 1), Err(Fault::Invalid));
        assert_eq!(t.live(), 0);
    }

    #[test]
    fn tables_with_one_account_have_their_objects_together() {
        let (account, files) = Account::new(2).expect("pages");
        let copies = files.fds().map(|fd| std::fs::File::from(fd.try_clone_to_owned().expect("a copy")));
        let other = Account::of([&copies[0], &copies[1]], 1).expect("the same pages");
        let [mut a, mut b] = [account, other].map(|account| Table::shared(3, Some(Arc::new(account))));
        a.put(1, 1, Ok(1), ()).expect("vacant");
        a.put(1, 2, Ok(2), ()).expect("vacant");
        b.put(1, 1, Ok(3), ()).expect("vacant");
        assert_eq!(b.put(1, 2, Ok(4), ()), Err(Fault::TooMany));
        a.take(1, 1).expect("there");
        b.put(1, 2, Ok(4), ()).expect("one has gone");
        b.drain();
        a.put(1, 1, Ok(1), ()).expect("two have gone");
    }

    #[test]
    fn objects_are_taken_out_by_what_was_kept_of_them() {
        let mut t = Table::new(4);
        for (id, extra) in [(1, 'a'), (5 << 32 | 2, 'b'), (3, 'a')] {
            t.put(1, id, Ok(1), extra).expect("vacant");
        }
        assert_eq!(t.ids(|extra| *extra == 'b'), [5 << 32 | 2]);
        assert_eq!(t.take_if(|extra| *extra == 'a'), [(1, 'a'), (3, 'a')]);
        assert_eq!((t.live(), t.get(1, 1), t.get(1, 5 << 32 | 2)), (1, Err(Fault::Invalid), Ok(1)));
    }

    #[test]
    fn a_failed_creation_answers_with_its_error() {
        let mut t = Table::new(2);
        t.put(1, 1, Err(-4), ()).expect("vacant");
        assert_eq!(t.get(1, 1), Err(Fault::Failed(-4)));
        assert_eq!(t.take(1, 1), Ok((None, ())));
    }
}
