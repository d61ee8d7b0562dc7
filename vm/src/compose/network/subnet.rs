// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Subnets and prefixes of networks.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use super::Mac;

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
    pub(super) fn first(self) -> Ipv4Addr {
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

/// An IPv6 network's prefix of 64 bits, "fd00:86::/64".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix64(Ipv6Addr);

impl Prefix64 {
    /// The address that a guest's kernel makes of the prefix and its MAC (RFC 4291, appendix A).
    #[must_use]
    pub fn of(self, mac: Mac) -> Ipv6Addr {
        let [a, b, c, d, e, f] = mac.0;
        let [p, q, r, s, ..] = self.0.segments();
        let own = [[a ^ 2, b], [c, 0xff], [0xfe, d], [e, f]].map(u16::from_be_bytes);
        Ipv6Addr::new(p, q, r, s, own[0], own[1], own[2], own[3])
    }
}

impl fmt::Display for Prefix64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/64", self.0)
    }
}

impl FromStr for Prefix64 {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let base = text.strip_suffix("/64").and_then(|t| t.parse::<Ipv6Addr>().ok());
        let plain = |ip: &Ipv6Addr| {
            !ip.is_multicast()
                && !ip.is_unspecified()
                && !ip.is_unicast_link_local()
                && ip.segments()[4..] == [0; 4]
        };
        match base.filter(plain) {
            Some(base) => Ok(Prefix64(base)),
            None => Err(format!("'{text}' is no IPv6 prefix of 64 bits; write one such as \"fd00:86::/64\"")),
        }
    }
}

macro_rules! as_text {
    ($($name:ident)*) => {$(
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                String::deserialize(d)?.parse().map_err(de::Error::custom)
            }
        }
    )*};
}
as_text! { Subnet Prefix64 }
