// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Settings that would be ignored for what another one says. They are refused.

use tombolo_topology::request::Part;
use toml::{Table, Value};

use super::check::Fault;
use super::{Compose, HypervisorChoice, Rights, VmSpec};
use crate::machine::growth;

/// Refuses such settings; `written` is the file that `compose` was made of.
pub(super) fn check(compose: &Compose, written: &Table) -> Result<(), Fault> {
    for (name, net) in &compose.net {
        let threads = net.workers.unwrap_or(1);
        if net.cpus.len() > threads {
            let message = format!(
                "net.{name}.cpus names {} processors for workers = {threads}; write as many, one each",
                net.cpus.len()
            );
            return Err((format!("net.{name}"), "cpus".into(), message));
        }
    }
    let vms = written.get("vm").and_then(Value::as_table);
    for (name, vm) in &compose.vm {
        let counts = vms.is_some_and(|vms| vms.get(name).is_some_and(|vm| vm.get("cpus").is_some()));
        if let Some((key, _, why)) = of_vm(vm, counts).into_iter().find(|(_, is_void, _)| *is_void) {
            return Err((format!("vm.{name}"), key.into(), format!("vm.{name}.{key}: {why}")));
        }
        check_zones(name, vm)?;
    }
    Ok(())
}

impl VmSpec {
    /// Whether `topology` says how many CPUs the VM has, in place of `cpus`.
    pub fn is_counted_by_topology(&self) -> bool {
        matches!(self.topology, Some(Part::Host | Part::Node(_) | Part::Cpus(_)))
    }
}

/// Keys of a VM, whether each is set to what is void, and why. `counts`: the file says `cpus`.
fn of_vm(vm: &VmSpec, counts: bool) -> [(&'static str, bool, &'static str); 6] {
    let comes_at_once = !growth::is_fast(vm);
    [
        (
            "cpus",
            counts && vm.is_counted_by_topology(),
            "topology says which processors the VM has, and so how many; leave out cpus, or write topology = \"close\"",
        ),
        (
            "boot_memory",
            vm.boot_memory.is_some() && comes_at_once,
            "the VM has all of its memory at the start; leave out boot_memory, or write start = \"fast\"",
        ),
        (
            "growth_share",
            vm.growth_share.is_some() && comes_at_once,
            "the VM has all of its memory at the start; leave out growth_share, or write start = \"fast\"",
        ),
        (
            "cmdline",
            vm.cmdline.is_some() && vm.kernel.is_none() && vm.has_disk(),
            "the VM boots from its disk, whose boot loader has the command line; leave out cmdline, or name a kernel",
        ),
        (
            "whole_group",
            vm.whole_group && vm.devices.is_empty(),
            "the VM has no devices, whose IOMMU groups it is about; leave out whole_group, or add devices",
        ),
        (
            "cpu_pm",
            vm.cpu_pm == Some(true) && vm.hypervisor == HypervisorChoice::Tcg,
            "an emulated guest can't idle by itself; leave out cpu_pm or hypervisor = \"tcg\"",
        ),
    ]
}

fn check_zones(name: &str, vm: &VmSpec) -> Result<(), Fault> {
    for (zone, used) in &vm.zones {
        let is_limited = used.bytes.is_some() || used.inodes.is_some();
        let why = if is_limited && used.rights == Rights::ReadOnly {
            "bytes and inodes limit what the guest makes, which makes nothing with rights = \"ro\"; leave out one of them"
        } else if !used.options.is_empty() && used.mount.is_none() {
            "options are those of a mount; add mount = \"/mnt\", or leave them out"
        } else {
            continue;
        };
        return Err((format!("vm.{name}"), "zones".into(), format!("vm.{name}.zones.{zone}: {why}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::compose::Project;

    #[test]
    fn a_key_that_another_one_makes_void_is_refused_by_name_and_line() {
        let zone = "[zone.z]\nsize = \"16M\"\nfiles = true\n";
        for (text, refused) in [
            ("[vm.a]\ntopology = \"host\"\ncpus = 3\n", ":3: vm.a.cpus: topology says"),
            ("[vm.a]\ncpus = 3\ntopology = \"node:0\"\n", ":2: vm.a.cpus: topology says"),
            ("[vm.a]\ntopology = \"cpus:0\"\ncpus = 2\n", ":3: vm.a.cpus: topology says"),
            ("[vm.a]\nboot_memory = \"256M\"\n", ":2: vm.a.boot_memory: the VM has all"),
            ("[vm.a]\nstart = \"slow\"\ngrowth_share = 10\n", ":3: vm.a.growth_share: the VM has all"),
            (
                "[vm.a]\ndisk = \"a.img\"\ncmdline = \"quiet\"\n",
                ":3: vm.a.cmdline: the VM boots from its disk",
            ),
            ("[vm.a]\nwhole_group = true\n", ":2: vm.a.whole_group: the VM has no devices"),
            (
                "[vm.a]\ntopology = \"close\"\ncpu_pm = true\nhypervisor = \"tcg\"\n",
                ":3: vm.a.cpu_pm: an emulated guest",
            ),
            ("[net.lan]\ncpus = [0, 1]\n", ":2: net.lan.cpus names 2 processors for workers = 1"),
            (
                &format!("{zone}[vm.a]\nzones = {{ z = {{ rights = \"ro\", bytes = \"1M\" }} }}\n"),
                ":5: vm.a.zones.z: bytes and inodes",
            ),
            (
                &format!("{zone}[vm.a]\nzones = {{ z = {{ options = [\"noatime\"] }} }}\n"),
                ":5: vm.a.zones.z: options are those of a mount",
            ),
        ] {
            let error = Project::parse(Path::new("/demo/tombolo.toml"), text).unwrap_err().to_string();
            assert!(error.contains(refused), "{text}: {error}");
        }
        for text in [
            "[vm.a]\ntopology = \"close\"\ncpus = 3\n",
            "[vm.a]\nstart = \"fast\"\nboot_memory = \"256M\"\ngrowth_share = 10\n",
            "[vm.a]\ndevices = [\"0000:01:00.0\"]\nboot_memory = \"256M\"\nwhole_group = true\n",
            "[vm.a]\ndisk = \"a.img\"\nkernel = \"6.1\"\ncmdline = \"quiet\"\n",
            "[net.lan]\nworkers = 2\ncpus = [0, 1]\n",
        ] {
            Project::parse(Path::new("/demo/tombolo.toml"), text).unwrap();
        }
    }
}
