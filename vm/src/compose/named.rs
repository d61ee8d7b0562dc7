// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM's networks and accelerators, by name: written as a table, or as a list of names.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

struct Named<T> {
    thing: &'static str,
    example: &'static str,
    entries: PhantomData<T>,
}

/// Reads such a key. `thing` is what the names are of, `example` a table's entry.
///
/// # Errors
/// Those of the format; a name that stands twice.
pub fn deserialize<'de, D, T>(
    d: D,
    thing: &'static str,
    example: &'static str,
) -> Result<BTreeMap<String, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    d.deserialize_any(Named { thing, example, entries: PhantomData })
}

impl<'de, T: Deserialize<'de> + Default> Visitor<'de> for Named<T> {
    type Value = BTreeMap<String, T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "names of {}s, such as [\"one\"], or a table, such as {{ {} }}", self.thing, self.example)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(name) = seq.next_element::<String>()? {
            if entries.insert(name.clone(), T::default()).is_some() {
                return Err(de::Error::custom(format!("the {} '{name}' is named twice", self.thing)));
            }
        }
        Ok(entries)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        BTreeMap::deserialize(de::value::MapAccessDeserializer::new(map))
    }
}
