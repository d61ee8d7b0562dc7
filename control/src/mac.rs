// SPDX-License-Identifier: Apache-2.0 OR MIT
//! MAC addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A MAC address, in the order of the wire. Parsed from text it is a unicast address, which a port can own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// ff:ff:ff:ff:ff:ff.
    pub const BROADCAST: Mac = Mac([0xff; 6]);

    /// Returns whether bridges keep frames to this address and don't forward them (IEEE 802.1Q §8.6.3).
    #[must_use]
    pub fn is_reserved(self) -> bool {
        self.0[..5] == [1, 0x80, 0xc2, 0, 0] && self.0[5] < 0x10
    }

    /// Returns whether it addresses several receivers (broadcast included).
    #[must_use]
    pub fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// The six bytes as the low 48 bits of a little-endian number, first byte lowest.
    #[inline(always)]
    #[must_use]
    pub fn key(self) -> u64 {
        let m = self.0;
        u64::from_le_bytes([m[0], m[1], m[2], m[3], m[4], m[5], 0, 0])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = self.0;
        write!(f, "{:02x}:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}", m[0], m[1], m[2], m[3], m[4], m[5])
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Text that is no unicast MAC address.
#[derive(Debug)]
pub struct BadMac(String);

impl fmt::Display for BadMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is no unicast MAC address; write six bytes, such as \"52:54:00:12:34:56\"", self.0)
    }
}

impl std::error::Error for BadMac {}

impl FromStr for Mac {
    type Err = BadMac;

    fn from_str(text: &str) -> Result<Self, BadMac> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for b in &mut bytes {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(|| BadMac(text.into()))?;
            *b = u8::from_str_radix(part, 16).map_err(|_| BadMac(text.into()))?;
        }
        let mac = Mac(bytes);
        if parts.next().is_some() || mac.is_multicast() || mac.key() == 0 {
            return Err(BadMac(text.into()));
        }
        Ok(mac)
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_is_written() {
        let mac: Mac = "52:54:00:00:00:0b".parse().unwrap();
        assert_eq!(mac.0, [0x52, 0x54, 0, 0, 0, 0x0b]);
        assert_eq!(mac.to_string(), "52:54:00:00:00:0b");
        assert_eq!(serde_json::to_string(&mac).unwrap(), "\"52:54:00:00:00:0b\"");
        assert_eq!(mac.key(), 0x0b00_0000_5452);
    }

    #[test]
    fn what_no_port_can_own_is_refused() {
        for text in [
            "01:00:00:00:00:00",
            "00:00:00:00:00:00",
            "52:54:00:00:00",
            "52:54:00:00:00:00:00",
            "5:4:0:0:0:1",
            "",
        ] {
            let error = text.parse::<Mac>().unwrap_err().to_string();
            assert!(error.contains("is no unicast MAC"), "{error}");
        }
    }
}
