// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks of a compose file that need nothing from the host.

use tombolo_topology::request::Pages;

use super::vm::{MEMORY_MIN, Share};
use super::zone::{ZONE_ALIGN, ZONE_MIN, ZoneUse};
use super::{Compose, Ready, Size, VmSpec, ZoneSpec};
use super::{accelerator, depends, device, disks, nearest, network, ports, sanitize};
use crate::machine::growth::StartKind;

/// A wrong setting: its table, its key and the message.
pub(super) type Fault = (String, String, String);

/// A wrong setting of one table: its key and the message.
type Wrong = (&'static str, String);

/// Checks everything that the file declares.
pub(super) fn check(compose: &Compose) -> Result<(), Fault> {
    let in_table = |table: String| move |(key, message): Wrong| (table, key.to_owned(), message);
    if let Some(name) = &compose.name {
        check_project_name(name).map_err(in_table(String::new()))?;
    }
    for (name, zone) in &compose.zone {
        check_zone(name, zone).map_err(in_table(format!("zone.{name}")))?;
    }
    for (name, vm) in &compose.vm {
        check_vm(compose, name, vm).map_err(in_table(format!("vm.{name}")))?;
    }
    network::check(compose)?;
    ports::check(compose)?;
    disks::check(compose)?;
    depends::check(compose)?;
    accelerator::check(compose)
}

/// Refuses a setting unless it is `good`.
fn ensure(good: bool, key: &'static str, message: impl FnOnce() -> String) -> Result<(), Wrong> {
    if good { Ok(()) } else { Err((key, message())) }
}

/// The names that are allowed.
pub(super) const NAMES: &str =
    "write up to 31 characters of a-z, A-Z, 0-9, '-' and '_', the first a letter or a digit";

/// Returns why `name` can't name a `kind` ("a VM"), if it can't.
pub(super) fn bad_name(kind: &str, name: &str) -> Option<String> {
    let good = !name.is_empty()
        && name.len() < 32
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    (!good).then(|| format!("'{name}' can't name {kind}: {NAMES}"))
}

fn check_name(kind: &str, name: &str) -> Result<(), Wrong> {
    bad_name(kind, name).map_or(Ok(()), |message| Err(("", message)))
}

fn check_project_name(name: &str) -> Result<(), Wrong> {
    ensure(!name.is_empty() && *name == sanitize(name), "name", || {
        format!("name '{name}': use up to 40 letters, digits, '-', '_' and '.'")
    })
}

fn check_zone(name: &str, zone: &ZoneSpec) -> Result<(), Wrong> {
    check_name("a zone", name)?;
    let size = zone.size.0;
    ensure(size >= ZONE_MIN && size % ZONE_ALIGN == 0, "size", || {
        let better = Size(size.max(ZONE_MIN).next_multiple_of(ZONE_ALIGN));
        format!(
            "zone.{name}.size is {}; a zone is a multiple of 2M and at least 8M: write \"{better}\"",
            zone.size
        )
    })
}

fn check_vm(compose: &Compose, name: &str, vm: &VmSpec) -> Result<(), Wrong> {
    check_name("a VM", name)?;
    check_resources(name, vm)?;
    check_placement(compose, name, vm)?;
    device::check(name, vm)?;
    check_limits(name, vm)?;
    check_boot(name, vm)?;
    for share in &vm.share {
        check_share(name, vm, share)?;
    }
    for (zone, zone_use) in &vm.zones {
        check_membership(compose, name, vm, (zone, zone_use))?;
    }
    Ok(())
}

fn check_resources(name: &str, vm: &VmSpec) -> Result<(), Wrong> {
    ensure(vm.memory.0 >= MEMORY_MIN, "memory", || {
        format!("vm.{name}.memory is {}; a guest needs at least {}", vm.memory, Size(MEMORY_MIN))
    })?;
    ensure(vm.memory.0 % (2 << 20) == 0, "memory", || {
        format!("vm.{name}.memory is {}; it must be a multiple of 2M", vm.memory)
    })?;
    ensure((1..=255).contains(&vm.cpus), "cpus", || {
        format!("vm.{name}.cpus is {}; write 1 to 255", vm.cpus)
    })?;
    ensure(vm.hotplug_ports <= 16, "hotplug_ports", || {
        format!("vm.{name}.hotplug_ports is {}; write 0 to 16", vm.hotplug_ports)
    })
}

fn check_placement(compose: &Compose, name: &str, vm: &VmSpec) -> Result<(), Wrong> {
    ensure(vm.topology.is_some() || !vm.isolate, "isolate", || {
        format!("vm.{name}.isolate needs topology = \"close\" or another part")
    })?;
    ensure(vm.topology.is_some() || vm.cpu_pm.is_none(), "cpu_pm", || {
        format!("vm.{name}.cpu_pm needs topology = \"close\" or another part")
    })?;
    ensure(compose.reserve > 0 || !vm.isolate, "isolate", || {
        format!(
            "vm.{name}.isolate: QEMU's own threads can't run on isolated CPUs; add reserve = 1 or more at the top of the file"
        )
    })?;
    ensure(vm.topology.is_some() || vm.pages == Pages::Auto, "pages", || {
        format!("vm.{name}.pages needs topology = \"close\" or another part")
    })?;
    for (grows, key) in
        [(vm.start == Some(StartKind::Fast), "start"), (vm.boot_memory.is_some(), "boot_memory")]
    {
        ensure(vm.topology.is_none() || !grows, key, || {
            format!(
                "vm.{name}.{key}: memory that is bound to nodes is there at the start; leave out {key} or topology"
            )
        })?;
    }
    Ok(())
}

fn check_limits(name: &str, vm: &VmSpec) -> Result<(), Wrong> {
    ensure(vm.cpu_limit.is_none_or(|limit| (0.01..=10_000.0).contains(&limit)), "cpu_limit", || {
        format!("vm.{name}.cpu_limit: write a number of processors, such as 1.5")
    })?;
    match vm.memory_limit.filter(|limit| *limit < vm.memory) {
        None => Ok(()),
        Some(limit) => Err((
            "memory_limit",
            format!(
                "vm.{name}.memory_limit is {limit}, less than the guest's memory of {}; QEMU needs that and some 200M more",
                vm.memory
            ),
        )),
    }
}

fn check_boot(name: &str, vm: &VmSpec) -> Result<(), Wrong> {
    ensure(vm.initrd.is_none() || vm.kernel.is_some(), "initrd", || {
        format!("vm.{name} has an initrd but no kernel; add kernel = \"PATH\"")
    })?;
    if let Some(root) = &vm.root {
        let own = vm.initrd.is_some() || vm.kernel.as_ref().is_some_and(|kernel| kernel.contains('/'));
        ensure(!own && (vm.kernel.is_some() || !vm.has_disk()), "root", || {
            format!(
                "vm.{name}.root is for kernels of the guest kit, whose initramfs mounts it; leave out initrd, and write a version as kernel, such as \"6.12\""
            )
        })?;
        let good = root.path.starts_with('/')
            && !root.path.contains(|c: char| c.is_whitespace() || ":,\\".contains(c));
        ensure(good, "root", || {
            format!(
                "vm.{name}.root.path is '{}'; write an absolute path without blanks, ':', ',' and '\\'",
                root.path
            )
        })?;
    }
    ensure(!vm.snapshot || vm.disk.is_some(), "snapshot", || {
        format!("vm.{name}.snapshot is set, but there is no disk")
    })
}

fn check_share(name: &str, vm: &VmSpec, share: &Share) -> Result<(), Wrong> {
    let Some(mount) = &share.mount else { return Ok(()) };
    ensure(mount.starts_with('/'), "share", || {
        format!("vm.{name}.share: mount is '{mount}'; write an absolute path")
    })?;
    check_has_agent(vm, || format!("vm.{name} mounts the share '{}'", share.tag))
}

fn check_membership(
    compose: &Compose,
    name: &str,
    vm: &VmSpec,
    (zone, zone_use): (&String, &ZoneUse),
) -> Result<(), Wrong> {
    let Some(spec) = compose.zone.get(zone) else {
        let hint = match nearest(zone, compose.zone.keys().map(String::as_str)) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!("add [zone.{zone}] with a size"),
        };
        let message = format!("vm.{name}.zones names the zone '{zone}', which is not declared; {hint}");
        return Err(("zones", message));
    };
    ensure(zone_use.bytes != Some(Size(0)) && zone_use.inodes != Some(0), "zones", || {
        format!(
            "vm.{name}.zones.{zone}: bytes and inodes are 1 at least; for a guest that is to make nothing write rights = \"ro\""
        )
    })?;
    let is_root = vm.root.as_ref().is_some_and(|root| root.zone == *zone);
    let Some(mount) = zone_use.mount.as_deref().or(is_root.then_some("/")) else { return Ok(()) };
    ensure(spec.files, "zones", || {
        format!(
            "vm.{name} mounts the zone '{zone}', which has no file system; add files = true to [zone.{zone}]"
        )
    })?;
    ensure(mount.starts_with('/'), "zones", || {
        format!("vm.{name}.zones.{zone}.mount is '{mount}'; write an absolute path")
    })?;
    if zone_use.mount.is_none() {
        return Ok(());
    }
    check_has_agent(vm, || format!("vm.{name} mounts the zone '{zone}'"))
}

/// Refuses what needs the guest agent in a VM that counts as up without it.
fn check_has_agent(vm: &VmSpec, what: impl FnOnce() -> String) -> Result<(), Wrong> {
    ensure(vm.ready == Ready::Agent, "ready", || {
        format!("{}, which is done through the guest agent: ready must be \"agent\"", what())
    })
}
