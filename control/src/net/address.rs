// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses and prefixes of a network, as users write them.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Mac;

/// An IPv4 address with the length of its subnet's prefix: `10.86.0.1/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SubnetAddress {
    /// An address of a host in the subnet, neither the subnet's own nor its broadcast address.
    pub address: Ipv4Addr,
    /// The length of the subnet's prefix, 1 to 30.
    pub prefix: u32,
}

impl SubnetAddress {
    /// Returns the subnet's mask.
    #[must_use]
    pub fn mask(self) -> u32 {
        u32::MAX << (32 - self.prefix)
    }

    /// Returns whether this is an address of the same subnet that a guest can have.
    #[must_use]
    pub fn has(self, ip: Ipv4Addr) -> bool {
        let (own, ip, mask) = (u32::from(self.address), u32::from(ip), self.mask());
        own & mask == ip & mask && ip & !mask != 0 && ip | mask != u32::MAX
    }
}

impl FromStr for SubnetAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("'{text}' is no address with its subnet; write one such as 10.86.0.1/24");
        let (address, prefix) = text.split_once('/').ok_or_else(bad)?;
        let (address, prefix) = (address.parse().map_err(|_| bad())?, prefix.parse().map_err(|_| bad())?);
        let own = Self { address, prefix };
        if (1..=30).contains(&prefix) && own.has(address) { Ok(own) } else { Err(bad()) }
    }
}

impl TryFrom<String> for SubnetAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<SubnetAddress> for String {
    fn from(own: SubnetAddress) -> Self {
        format!("{}/{}", own.address, own.prefix)
    }
}

/// An IPv6 network's prefix of 64 bits: `fd00:86::/64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Prefix64(Ipv6Addr);

impl Prefix64 {
    /// Returns the prefix as an address, whose last 64 bits are zero.
    #[must_use]
    pub fn base(self) -> Ipv6Addr {
        self.0
    }

    /// Returns whether this is an address of the network that a guest can have.
    #[must_use]
    pub fn has(self, ip: Ipv6Addr) -> bool {
        let (own, ip) = (u128::from(self.0), u128::from(ip));
        own >> 64 == ip >> 64 && ip << 64 != 0
    }

    /// Returns the address that the owner of `mac` makes for itself (RFC 4291, appendix A).
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

impl TryFrom<String> for Prefix64 {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Prefix64> for String {
    fn from(prefix: Prefix64) -> Self {
        prefix.to_string()
    }
}
