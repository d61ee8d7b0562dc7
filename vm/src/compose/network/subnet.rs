// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IPv4 subnets.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

/// An IPv4 subnet, "10.0.0.0/24".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    /// Its first address.
    pub base: Ipv4Addr,
    /// Bits of it that are the network's.
    pub prefix: u8,
}

impl Subnet {
    fn mask(self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0)
    }

    /// The first address, which VMs have only where the file says so.
    pub(crate) fn first(self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.base) + 1)
    }

    /// Can a VM have this address?
    #[must_use]
    pub fn has(self, ip: Ipv4Addr) -> bool {
        let (base, ip) = (u32::from(self.base), u32::from(ip));
        ip & self.mask() == base && ip != base && ip != base | !self.mask()
    }

    /// All addresses that VMs can have.
    pub(super) fn hosts(self) -> impl Iterator<Item = Ipv4Addr> {
        let base = u32::from(self.base);
        (base + 1..base | !self.mask()).map(Ipv4Addr::from)
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

impl FromStr for Subnet {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no subnet; write one such as \"10.0.0.0/24\", of 8 to 30 bits");
        let (base, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let base: Ipv4Addr = base.parse().map_err(|_| wrong())?;
        let prefix: u8 = prefix.parse().ok().filter(|p| (8..=30).contains(p)).ok_or_else(wrong)?;
        let subnet = Subnet { base, prefix };
        let first = Ipv4Addr::from(u32::from(base) & subnet.mask());
        if first != base {
            return Err(format!(
                "'{text}' is no subnet, {base} is in the midst of one; write \"{first}/{prefix}\""
            ));
        }
        Ok(subnet)
    }
}

impl Serialize for Subnet {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Subnet {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(de::Error::custom)
    }
}
