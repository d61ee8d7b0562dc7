// SPDX-License-Identifier: Apache-2.0 OR MIT
//! PCI addresses: domain:bus:device.function.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The address of a PCI function; ordered as sysfs lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Address {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl Address {
    /// The domain, the bus, and device and function in one byte.
    #[must_use]
    pub fn parts(self) -> (u32, u8, u8) {
        (self.domain, self.bus, self.device << 3 | self.function)
    }
}

/// Text that is no PCI address.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is no PCI address: write it like 0000:01:00.0 or 01:00.0, as `lspci -D` shows it")]
pub struct AddressError(String);

impl FromStr for Address {
    type Err = AddressError;

    /// Takes an address with or without a domain (then 0).
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let parse = || {
            let (place, function) = text.rsplit_once('.')?;
            let mut parts = place.rsplit(':');
            let device = hex(parts.next()?, 2)?;
            let bus = hex(parts.next()?, 2)?;
            let domain = parts.next().map_or(Some(0), |d| hex(d, 8))?;
            let function = hex(function, 1)?;
            let valid = parts.next().is_none() && device < 32 && function < 8;
            valid.then_some(Self {
                domain,
                bus: u8::try_from(bus).ok()?,
                device: u8::try_from(device).ok()?,
                function: u8::try_from(function).ok()?,
            })
        };
        parse().ok_or_else(|| AddressError(text.to_owned()))
    }
}

fn hex(text: &str, most: usize) -> Option<u32> {
    let good = (1..=most).contains(&text.len()) && text.chars().all(|c| c.is_ascii_hexdigit());
    good.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl TryFrom<String> for Address {
    type Error = AddressError;
    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.to_string()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_common_spellings_are_one_address() {
        let long: Address = "0000:81:00.1".parse().unwrap();
        assert_eq!("81:00.1".parse(), Ok(long));
        assert_eq!(long.to_string(), "0000:81:00.1");
        assert_eq!("10000:e1:00.0".parse::<Address>().unwrap().to_string(), "10000:e1:00.0");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for bad in
            ["", "1", "01:00", "01:20.0", "01:00.8", "0:0:0:0.0", "../..", "01:00.0/..", "+1:00.0", "zz:00.0"]
        {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
