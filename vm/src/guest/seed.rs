// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The seed from which cloud-init in a guest configures it: a FAT volume with the label CIDATA, as its data source NoCloud looks for.
//! It exists in memory only.

use std::io::{Cursor, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::Context;
use fatfs::{FileSystem, FormatVolumeOptions, FsOptions};
use serde_json::{Value, json};

use crate::compose::cloud_init::CloudInit;
use crate::project::network::Nic;
use crate::project::state::hash;

/// Volumes are multiples of this many bytes.
const UNIT: usize = 1 << 20;
/// Room for tables and directories, in bytes.
const OVERHEAD: usize = 256 << 10;

/// Makes the seed of a VM; `origin` is the compose file's path when the project was started, which gives its VMs their identity.
///
/// # Errors
/// Names the file that can't be read.
pub fn make(origin: &Path, vm: &str, given: &CloudInit, nics: &[Nic]) -> anyhow::Result<OwnedFd> {
    let files = files(origin, vm, given, nics).with_context(|| format!("vm.{vm}"))?;
    Ok(crate::child::memory_file("cidata", &volume(&files)?)?)
}

/// The seed's files. What is made here is JSON, which is YAML too.
fn files(
    origin: &Path,
    vm: &str,
    given: &CloudInit,
    nics: &[Nic],
) -> anyhow::Result<Vec<(&'static str, Vec<u8>)>> {
    let default_id = || format!("{vm}-{:016x}", hash(format!("{}\n{vm}", origin.display()).as_bytes()));
    let mut meta = json!({
        "instance-id": given.instance_id.clone().unwrap_or_else(default_id),
        "local-hostname": given.hostname.as_deref().unwrap_or(vm),
    });
    let keys = given.read_keys()?;
    if !keys.is_empty() {
        meta["public-keys"] = json!(keys);
    }
    let user_data = given.read_user_data()?.unwrap_or_else(|| b"#cloud-config\n".to_vec());
    let mut files = vec![("meta-data", format!("{meta:#}\n").into_bytes()), ("user-data", user_data)];
    match given.read_network()? {
        Some(network) => files.push(("network-config", network)),
        None if nics.is_empty() => {}
        None => files.push(("network-config", format!("{:#}\n", network(nics)).into_bytes())),
    }
    Ok(files)
}

/// The VM's devices as a network configuration, version 2.
fn network(nics: &[Nic]) -> Value {
    let mut ethernets = serde_json::Map::new();
    for (n, nic) in nics.iter().enumerate() {
        let mut device = json!({
            "match": { "macaddress": nic.lease.mac }, "mtu": nic.mtu, "dhcp4": nic.lease.dhcp,
        });
        if let (false, Some((ip, prefix))) = (nic.lease.dhcp, nic.lease.address) {
            device["addresses"] = json!([format!("{ip}/{prefix}")]);
            if let Some(gateway) = nic.gateway {
                device["routes"] = json!([{ "to": "0.0.0.0/0", "via": gateway }]);
            }
        }
        ethernets.insert(format!("nic{n}"), device);
    }
    json!({ "version": 2, "ethernets": ethernets })
}

/// A FAT volume with these files.
fn volume(files: &[(&str, Vec<u8>)]) -> anyhow::Result<Vec<u8>> {
    let size: usize = files.iter().map(|(_, content)| content.len().next_multiple_of(4096)).sum();
    let mut image = Cursor::new(vec![0; (size + OVERHEAD).next_multiple_of(UNIT)]);
    fatfs::format_volume(&mut image, FormatVolumeOptions::new().volume_label(*b"CIDATA     "))?;
    {
        let volume = FileSystem::new(&mut image, FsOptions::new())?;
        for (name, content) in files {
            volume.root_dir().create_file(name)?.write_all(content)?;
        }
        volume.unmount()?;
    }
    Ok(image.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::network::{Lease, Mac};
    use std::io::Read;

    fn read(image: Vec<u8>) -> Vec<(String, String)> {
        let volume = FileSystem::new(Cursor::new(image), FsOptions::new()).unwrap();
        assert_eq!(volume.volume_label(), "CIDATA");
        let files = volume.root_dir().iter().map(|entry| {
            let entry = entry.unwrap();
            let mut text = String::new();
            entry.to_file().read_to_string(&mut text).unwrap();
            (entry.file_name(), text)
        });
        files.collect()
    }

    fn seed(given: &str, nics: &[Nic]) -> Vec<(String, String)> {
        let origin = Path::new("/somewhere/demo/tombolo.toml");
        read(volume(&files(origin, "a", &toml::from_str(given).unwrap(), nics).unwrap()).unwrap())
    }

    fn file<'a>(files: &'a [(String, String)], name: &str) -> &'a str {
        &files.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}")).1
    }

    #[test]
    fn a_seed_has_what_cloud_init_reads_byte_for_byte() {
        let long = format!("#!/bin/sh\necho {}\n", "x".repeat(3 << 20));
        let files = seed(&format!("user_data = '''{long}'''\nssh_keys = [\"ssh-rsa AAAA\"]"), &[]);
        assert_eq!(file(&files, "user-data"), long);
        let meta: Value = serde_json::from_str(file(&files, "meta-data")).unwrap();
        assert_eq!((&meta["local-hostname"], &meta["public-keys"][0]), (&json!("a"), &json!("ssh-rsa AAAA")));
        assert_eq!(files.len(), 2, "no network-config where there is no network");
    }

    #[test]
    fn a_machine_stays_the_same_over_starts_unless_the_file_says_otherwise() {
        let id =
            |given: &str| -> Value { serde_json::from_str(file(&seed(given, &[]), "meta-data")).unwrap() };
        assert_eq!(id("")["instance-id"], id("user_data = \"#cloud-config\\n\"")["instance-id"]);
        assert_eq!(id("instance_id = \"second\"\nhostname = \"web\"")["instance-id"], "second");
        assert_eq!(id("hostname = \"web\"")["local-hostname"], "web");
    }

    #[test]
    fn the_vms_networks_are_configured_by_their_macs() {
        let nic = |last: u8, address, dhcp| Nic {
            net: "lan".into(),
            socket: "/s".into(),
            lease: Lease { mac: Mac([0x52, 0x54, 0, 0, 0, last]), address, address6: None, dhcp },
            queues: 1,
            mtu: 1400,
            gateway: Some([10, 0, 0, 254].into()),
            names: Vec::new(),
        };
        let files = seed("", &[nic(1, Some(([10, 0, 0, 5].into(), 24)), false), nic(2, None, true)]);
        let config: Value = serde_json::from_str(file(&files, "network-config")).unwrap();
        let (fixed, dhcp) = (&config["ethernets"]["nic0"], &config["ethernets"]["nic1"]);
        assert_eq!(fixed["match"]["macaddress"], "52:54:00:00:00:01");
        assert_eq!((&fixed["addresses"][0], &fixed["dhcp4"]), (&json!("10.0.0.5/24"), &json!(false)));
        assert_eq!(fixed["routes"][0]["via"], "10.0.0.254");
        assert_eq!((&dhcp["dhcp4"], &dhcp["addresses"]), (&json!(true), &Value::Null));
        let own = seed("network = \"version: 1\\n\"", &[nic(1, None, true)]);
        assert_eq!(file(&own, "network-config"), "version: 1\n");
    }
}
