// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The manual page tombolo.toml(5). Its keys are the fields of the file's structures with their doc comments, each of which begins with an example of the
//! value or its default: "`1500`: Largest IP packet.".

use roff::{Roff, bold, italic, roman};

/// A table of the file.
struct Table {
    header: &'static str,
    about: &'static str,
    keys: Vec<Key>,
}

/// A field of a structure.
struct Key {
    name: String,
    /// An example, or the default.
    value: String,
    text: String,
}

/// The fields of the structure `name` in a source text.
fn keys(source: &str, name: &str) -> Vec<Key> {
    let opening = format!("struct {name} {{\n");
    let body = source
        .split_once(&opening)
        .and_then(|(_, rest)| rest.split_once("\n}\n"))
        .map_or("", |(body, _)| body);
    let (mut keys, mut doc) = (Vec::new(), String::new());
    for line in body.lines().map(str::trim).filter(|line| !line.starts_with("#[")) {
        if let Some(more) = line.strip_prefix("///") {
            doc.push_str(more);
            continue;
        }
        let doc = std::mem::take(&mut doc);
        let field = line.strip_prefix("pub ").unwrap_or(line).split_once(": ");
        let described = doc.trim_start().strip_prefix('`').and_then(|doc| doc.split_once("`: "));
        if let (Some((name, _)), Some((value, text))) = (field, described) {
            keys.push(Key { name: name.to_owned(), value: value.to_owned(), text: text.to_owned() });
        }
    }
    keys
}

fn tables() -> [Table; 14] {
    let table = |header, about, source, name| Table { header, about, keys: keys(source, name) };
    [
        table(
            "Top level",
            "Paths are relative to the file. An unknown key is an error.",
            include_str!("mod.rs"),
            "Compose",
        ),
        table("[zone.NAME]", "Memory that VMs and the host share.", include_str!("zone.rs"), "ZoneSpec"),
        table("[net.NAME]", "A network with a switch of its own.", include_str!("network/mod.rs"), "NetSpec"),
        table(
            "[accel.NAME]",
            "A server for the host's accelerators.",
            include_str!("accelerator.rs"),
            "AccelSpec",
        ),
        table("[vm.NAME]", "A virtual machine.", include_str!("vm.rs"), "VmSpec"),
        table("vm.NAME.root", "A VM's root in a zone.", include_str!("vm.rs"), "RootSpec"),
        table("vm.NAME.zones.ZONE", "A VM's use of a zone.", include_str!("zone.rs"), "ZoneUse"),
        table(
            "vm.NAME.networks.NETWORK",
            "A VM's device in a network.",
            include_str!("network/mod.rs"),
            "NicSpec",
        ),
        table(
            "vm.NAME.accelerators.ACCELERATOR",
            "A VM's use of an accelerator. What is not said here is as the accelerator's table says.",
            include_str!("accelerator.rs"),
            "AccelUse",
        ),
        table(
            "vm.NAME.healthcheck",
            "A command that runs in the guest now and then.",
            include_str!("depends.rs"),
            "HealthCheck",
        ),
        table(
            "vm.NAME.devices",
            "A list; an entry is an address, or a table.",
            include_str!("device.rs"),
            "DeviceTable",
        ),
        table("vm.NAME.disks", "A list; each entry is a disk.", include_str!("disks.rs"), "DiskSpec"),
        table(
            "vm.NAME.cloud_init",
            "Each text is the path of a file, or the text itself where it has several lines or begins with '#'.",
            include_str!("cloud_init.rs"),
            "CloudInit",
        ),
        table("vm.NAME.share", "A list; each entry is a folder of the host.", include_str!("vm.rs"), "Share"),
    ]
}

/// The page, in roff.
#[must_use]
pub fn page() -> String {
    let mut page = Roff::new();
    page.control("TH", ["tombolo.toml", "5"]);
    page.control("SH", ["NAME"]);
    page.text([roman("tombolo.toml - zones, networks, accelerators and VMs of a project")]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([
        bold("tombolo up"),
        roman(" starts what this TOML file declares, which it looks for in the current folder and those above. "),
        bold("tombolo config"),
        roman(" checks it and prints it with its defaults. Sizes are written as \"512M\" or \"4G\"."),
    ]);
    for Table { header, about, keys } in tables() {
        page.control("SH", [header]);
        page.text([roman(about)]);
        for Key { name, value, text } in keys {
            page.control("TP", []);
            page.text([bold(name), roman(" = "), italic(value)]);
            page.text([roman(text)]);
        }
    }
    page.control("SH", ["SEE ALSO"]);
    page.text([bold("tombolo"), roman("(1)")]);
    page.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::accelerator::{AccelSpec, AccelUse};
    use crate::compose::cloud_init::CloudInit;
    use crate::compose::depends::HealthCheck;
    use crate::compose::device::DeviceTable;
    use crate::compose::disks::DiskSpec;
    use crate::compose::network::{NetSpec, NicSpec};
    use crate::compose::{Compose, RootSpec, Share, VmSpec, ZoneSpec, ZoneUse};
    use serde::de::DeserializeOwned;

    /// The former key of `hypervisor`, which is still read.
    const FORMER: &str = "accel";

    /// The keys that a table's parser knows. The parser lists them in its error for an unknown key.
    fn known<T: DeserializeOwned>() -> Vec<String> {
        let error = toml::from_str::<T>("no-such-key = 0").err().expect("no table has this key");
        let message = error.message().to_owned();
        assert!(message.starts_with("unknown field `no-such-key`"), "{message}");
        let mut keys: Vec<String> = message.split('`').skip(3).step_by(2).map(str::to_owned).collect();
        keys.sort();
        keys
    }

    #[test]
    fn every_key_that_the_parser_knows_is_described() {
        let parsers = [
            known::<Compose>(),
            known::<ZoneSpec>(),
            known::<NetSpec>(),
            known::<AccelSpec>(),
            known::<VmSpec>(),
            known::<RootSpec>(),
            known::<ZoneUse>(),
            known::<NicSpec>(),
            known::<AccelUse>(),
            known::<HealthCheck>(),
            known::<DeviceTable>(),
            known::<DiskSpec>(),
            known::<CloudInit>(),
            known::<Share>(),
        ];
        for (table, mut known) in tables().iter().zip(parsers) {
            if table.header == "[vm.NAME]" {
                known.retain(|key| key != FORMER);
            }
            let mut described: Vec<String> = table.keys.iter().map(|key| key.name.clone()).collect();
            described.sort();
            assert_eq!(described, known, "{}", table.header);
        }
        let page = page();
        assert!(page.contains("hotplug_ports") && page.contains(".SH [vm.NAME]"), "{page}");
    }
}
