// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes of memory.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// A size in bytes, written "512M" or as a number of bytes. A unit is a power of 1024: K, M, G or T in either case, also as KB or KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

impl Size {
    /// The bytes of a size in text, for a command's option.
    ///
    /// # Errors
    /// It is no size.
    pub fn bytes_of(text: &str) -> Result<u64, String> {
        text.parse().map(|Size(bytes)| bytes)
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is not a size; write a number of bytes, or one with K, M, G or T, such as \"512M\""
            )
        };
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let number: u64 = trimmed[..digits].parse().map_err(|_| wrong())?;
        let unit = trimmed[digits..].trim().to_ascii_uppercase();
        let shift = match unit.as_str() {
            "" | "B" => 0,
            _ => {
                let letter = unit.strip_suffix("IB").or_else(|| unit.strip_suffix('B')).unwrap_or(&unit);
                let known = UNITS.iter().find(|(name, _)| letter.len() == 1 && letter.starts_with(*name));
                known.ok_or_else(wrong)?.1
            }
        };
        number.checked_mul(1 << shift).map(Size).ok_or_else(|| format!("'{text}' is too large"))
    }
}

/// The largest unit that divides it.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().find(|(_, shift)| self.0 != 0 && self.0 % (1 << shift) == 0);
        match unit {
            Some((name, shift)) => f.pad(&format!("{}{name}", self.0 >> shift)),
            None => f.pad(&self.0.to_string()),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"512M\"")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_i64<E: de::Error>(self, n: i64) -> Result<Size, E> {
                u64::try_from(n).map(Size).map_err(|_| E::custom("a size can't be negative"))
            }
            fn visit_u64<E: de::Error>(self, n: u64) -> Result<Size, E> {
                Ok(Size(n))
            }
        }
        d.deserialize_any(V)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_a_size_is_read() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4096B", 4096),
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("2gib", 2 << 30),
            ("2GiB", 2 << 30),
            ("3 KB", 3 << 10),
            (" 1T ", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "M", "1.5G", "5X", "5XB", "-1", "1GG"] {
            let error = text.parse::<Size>().unwrap_err();
            assert!(error.contains("K, M, G or T"), "{error}");
        }
        assert!("99999999999T".parse::<Size>().unwrap_err().contains("too large"));
    }

    #[test]
    fn a_size_is_written_with_the_largest_unit_that_divides_it() {
        for (bytes, text) in [(0, "0"), (1 << 30, "1G"), (1536 << 20, "1536M"), (4097, "4097")] {
            assert_eq!(Size(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>5}", Size(1 << 20)), "   1M");
        for (json, bytes) in [("\"1M\"", 1 << 20), ("\"4097\"", 4097)] {
            assert_eq!(serde_json::to_string(&Size(bytes)).unwrap(), json);
            assert_eq!(serde_json::from_str::<Size>(json).unwrap(), Size(bytes));
        }
    }
}
