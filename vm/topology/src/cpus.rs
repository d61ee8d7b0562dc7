// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sets of CPUs, written as Linux writes them: `0-3,8`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// CPUs by the numbers that the kernel gives them.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    /// The numbers in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// The number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether `cpu` is one of them.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Adds `cpu`; false where it was there already.
    pub fn insert(&mut self, cpu: u32) -> bool {
        self.0.insert(cpu)
    }

    /// The lowest number.
    pub fn first(&self) -> Option<u32> {
        self.0.first().copied()
    }

    /// The CPUs in both.
    #[must_use]
    pub fn and(&self, other: &CpuSet) -> CpuSet {
        CpuSet(&self.0 & &other.0)
    }

    /// The CPUs in this set that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &CpuSet) -> CpuSet {
        CpuSet(&self.0 - &other.0)
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        CpuSet(cpus.into_iter().collect())
    }
}

impl Extend<u32> for CpuSet {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, cpus: I) {
        self.0.extend(cpus);
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        let mut cpus = self.iter().peekable();
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

/// A list of CPUs that can't be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("'{0}' is no list of CPUs; write one such as \"0-3,8\", with numbers below 65536")]
pub struct NoCpus(String);

/// CPU numbers end here, so that a range such as "0-4000000000" costs nothing.
const MOST: u32 = 1 << 16;

impl FromStr for CpuSet {
    type Err = NoCpus;

    fn from_str(text: &str) -> Result<Self, NoCpus> {
        let mut set = BTreeSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (first.trim().parse::<u32>(), last.trim().parse::<u32>()) {
                (Ok(first), Ok(last)) if first <= last && last < MOST => set.extend(first..=last),
                _ => return Err(NoCpus(text.to_owned())),
            }
        }
        Ok(CpuSet(set))
    }
}

impl TryFrom<String> for CpuSet {
    type Error = NoCpus;

    fn try_from(text: String) -> Result<Self, NoCpus> {
        text.parse()
    }
}

impl From<CpuSet> for String {
    fn from(set: CpuSet) -> String {
        set.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_written_and_read_as_the_kernel_does() {
        let set: CpuSet = "8,0-3,5".parse().unwrap();
        assert_eq!(set.to_string(), "0-3,5,8");
        assert_eq!(CpuSet::default().to_string(), "");
        assert_eq!("\n".parse::<CpuSet>().unwrap(), CpuSet::default());
    }

    #[test]
    fn what_is_no_list_is_refused_with_an_example() {
        for text in ["a", "3-1", "1-", "0-4000000000", "-1"] {
            let error = text.parse::<CpuSet>().unwrap_err().to_string();
            assert!(error.contains("0-3,8"), "{error}");
        }
    }
}
