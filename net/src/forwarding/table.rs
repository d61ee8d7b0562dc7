// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The selection: MAC address to the port that owns it. Filled from the configuration, never from traffic; read-only
//! once built, an open-addressed table at most half full.

use crate::frames::frame::Mac;

/// A MAC that two ports are to own.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("MAC {mac} belongs to two ports; give one of them another")]
pub struct Duplicate {
    pub mac: Mac,
    /// Position of the port that has it.
    pub first: usize,
    /// Position of the port that is to have it too.
    pub second: usize,
}

/// MAC address → position of the port that owns it.
#[derive(Clone, Debug)]
pub struct MacTable {
    slots: Box<[(u64, u32)]>,
    shift: u32,
}

const EMPTY: u64 = u64::MAX;

impl Default for MacTable {
    fn default() -> Self {
        Self { slots: vec![(EMPTY, 0); 2].into_boxed_slice(), shift: 63 }
    }
}

impl MacTable {
    /// Makes a table of all the pairs.
    ///
    /// # Errors
    /// A MAC that occurs for two different ports.
    pub fn new(pairs: &[(Mac, usize)]) -> Result<Self, Duplicate> {
        let size = (pairs.len() * 2).next_power_of_two().max(2);
        let mut table =
            Self { slots: vec![(EMPTY, 0); size].into_boxed_slice(), shift: 64 - size.trailing_zeros() };
        for &(mac, port) in pairs {
            let mut at = table.start(mac.key());
            while table.slots[at].0 != EMPTY && table.slots[at].0 != mac.key() {
                at = (at + 1) & (size - 1);
            }
            let slot = &mut table.slots[at];
            if slot.0 != EMPTY && slot.1 as usize != port {
                return Err(Duplicate { mac, first: slot.1 as usize, second: port });
            }
            *slot = (mac.key(), port as u32);
        }
        Ok(table)
    }

    #[inline(always)]
    fn start(&self, key: u64) -> usize {
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// Returns the port that owns the address whose [`Mac::key`] is `key`.
    #[inline(always)]
    #[must_use]
    pub fn find(&self, key: u64) -> Option<usize> {
        let mask = self.slots.len() - 1;
        let mut at = self.start(key);
        loop {
            let (k, port) = self.slots[at];
            if k == key {
                return Some(port as usize);
            }
            if k == EMPTY {
                return None;
            }
            at = (at + 1) & mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn mac(n: u64) -> Mac {
        let b = (n << 1).to_le_bytes();
        Mac([b[0], b[1], b[2], b[3], b[4], b[5]])
    }

    #[test]
    fn an_empty_table_knows_nobody() {
        assert_eq!(MacTable::default().find(mac(7).key()), None);
        assert_eq!(MacTable::new(&[]).unwrap().find(0), None);
    }

    #[test]
    fn a_mac_of_two_ports_is_refused_with_its_name() {
        let err = MacTable::new(&[(mac(1), 0), (mac(2), 1), (mac(1), 2)]).unwrap_err();
        assert_eq!((err.first, err.second), (0, 2));
        assert!(err.to_string().contains("02:00:00:00:00:00"), "{err}");
    }

    proptest! {
        #[test]
        fn finds_what_a_hash_map_finds(pairs in prop::collection::hash_map(0u64..400, 0usize..64, 0..200)) {
            let list: Vec<_> = pairs.iter().map(|(&m, &p)| (mac(m), p)).collect();
            let table = MacTable::new(&list).unwrap();
            let model: HashMap<u64, usize> = list.iter().map(|(m, p)| (m.key(), *p)).collect();
            for n in 0..400 {
                prop_assert_eq!(table.find(mac(n).key()), model.get(&mac(n).key()).copied());
            }
        }
    }
}
