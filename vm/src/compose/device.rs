// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `devices` of a VM: PCI devices of the host, and whether their DMA goes past the IOMMU's translation.

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use tombolo_passthrough::address::Address;
use tombolo_passthrough::bypass::DEVICES;
use tombolo_topology::request::Pages;

use super::VmSpec;

/// One entry of `devices`: an address, or a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpec {
    pub address: Address,
    /// Its DMA goes untranslated.
    pub bypass: bool,
}

/// The entry as a table.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DeviceTable {
    /// `"0000:01:00.0"`: The device, as 'tombolo passthrough list' shows it. Required.
    address: Address,
    /// `false`: Its DMA is not translated by the IOMMU: the guest's module tombolo_bypass does that. The device then reaches all of the host's memory. It
    /// needs trust, pages = "2M" or "1G", the module tombolo_bypass_host on the host, and a device that is alone in its IOMMU group and can be reset.
    #[serde(default)]
    bypass: bool,
}

impl Serialize for DeviceSpec {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        if self.bypass {
            DeviceTable { address: self.address, bypass: true }.serialize(s)
        } else {
            self.address.serialize(s)
        }
    }
}

impl<'de> Deserialize<'de> for DeviceSpec {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entry;
        impl<'de> Visitor<'de> for Entry {
            type Value = DeviceSpec;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a PCI address, or a table such as { address = \"0000:01:00.0\", bypass = true }")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<DeviceSpec, E> {
                let address = text.parse().map_err(E::custom)?;
                Ok(DeviceSpec { address, bypass: false })
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DeviceSpec, A::Error> {
                let DeviceTable { address, bypass } =
                    DeviceTable::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(DeviceSpec { address, bypass })
            }
        }
        d.deserialize_any(Entry)
    }
}

impl VmSpec {
    /// The addresses of its devices.
    #[must_use]
    pub fn addresses(&self) -> Vec<Address> {
        self.devices.iter().map(|device| device.address).collect()
    }

    /// The addresses of its devices whose DMA goes untranslated.
    #[must_use]
    pub fn bypassed(&self) -> Vec<Address> {
        self.devices.iter().filter(|device| device.bypass).map(|device| device.address).collect()
    }
}

/// Checks a VM's `bypass` as far as nothing of the host is needed: the key that is wrong, and the message.
pub(super) fn check(name: &str, vm: &VmSpec) -> Result<(), (&'static str, String)> {
    let bypassed = vm.bypassed();
    let Some(first) = bypassed.first() else { return Ok(()) };
    if !vm.trust {
        return Err((
            "devices",
            format!(
                "vm.{name}.devices: with bypass the guest tells {first} where to read and write, in all of the host's memory: who is root in this VM can then read and change everything on the host. Add trust = true to [vm.{name}] if that may be, or leave out bypass"
            ),
        ));
    }
    if !matches!(vm.pages, Pages::Huge | Pages::Gigantic) {
        return Err((
            "pages",
            format!(
                "vm.{name}.devices: bypass needs memory in reserved huge pages; add topology = \"close\" or another part, and pages = \"2M\" or \"1G\""
            ),
        ));
    }
    if bypassed.len() > DEVICES {
        return Err((
            "devices",
            format!(
                "vm.{name}.devices: {} have bypass; {DEVICES} devices of a VM can have it",
                bypassed.len()
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> VmSpec {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn a_device_is_an_address_or_a_table() {
        let vm = spec("devices = [\"01:00.0\", { address = \"02:00.0\", bypass = true }]");
        assert_eq!(vm.addresses().len(), 2);
        assert_eq!(vm.bypassed(), ["02:00.0".parse().unwrap()]);
        let again: VmSpec = toml::from_str(&toml::to_string(&vm).unwrap()).unwrap();
        assert_eq!(again, vm);
        for (wrong, said) in [
            ("devices = [\"x\"]", "no PCI address"),
            ("devices = [1]", "a PCI address, or a table"),
            ("devices = [{ bypass = true }]", "address"),
            ("devices = [{ address = \"01:00.0\", by = 1 }]", "unknown field"),
        ] {
            let error = toml::from_str::<VmSpec>(wrong).unwrap_err().to_string();
            assert!(error.contains(said), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_bypass_is_for_a_trusted_vm_in_huge_pages() {
        let devices = "devices = [{ address = \"01:00.0\", bypass = true }]\n";
        let (key, said) = check("a", &spec(devices)).unwrap_err();
        assert!(
            key == "devices" && said.contains("all of the host's memory") && said.contains("trust = true")
        );
        let (key, said) = check("a", &spec(&format!("{devices}trust = true"))).unwrap_err();
        assert!(key == "pages" && said.contains("pages = \"2M\""), "{said}");
        for pages in ["2M", "1G"] {
            let whole = format!("{devices}trust = true\ntopology = \"close\"\npages = \"{pages}\"");
            assert_eq!(check("a", &spec(&whole)), Ok(()));
        }
        assert_eq!(check("a", &spec("devices = [\"01:00.0\"]")), Ok(()));
    }
}
