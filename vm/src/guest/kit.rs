// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel and initramfs that a VM boots: the guest kit's, by version, or the user's own files.

use std::path::{Path, PathBuf};

use crate::compose::{Size, VmSpec};
use crate::host;

/// The least memory of a guest of the kit at its start, in bytes: the kernel lets the programs fill half of what it finds free.
const MEMORY_MIN: u64 = 192 << 20;
/// With devices of the host the guest also reserves 64 MiB of bounce buffers.
const MEMORY_MIN_WITH_DEVICES: u64 = 256 << 20;

/// The kernel that a VM boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The kernel image.
    pub kernel: PathBuf,
    /// The initramfs, if any.
    pub initrd: Option<PathBuf>,
}

/// Folders that may hold the guest kit, a folder per kernel version in each: `$TOMBOLO_CACHE/guest`, `.cache/guest` beside the compose file
/// or above it, `.cache/guest` above the program itself, and where a package puts it.
pub fn places(near: &Path) -> Vec<PathBuf> {
    let cache = std::env::var_os("TOMBOLO_CACHE").map(|cache| PathBuf::from(cache).join("guest"));
    let mut places: Vec<PathBuf> = cache.into_iter().collect();
    places.extend(near.ancestors().map(|a| a.join(".cache/guest")));
    if let Ok(program) = std::env::current_exe() {
        places.extend(program.ancestors().map(|a| a.join(".cache/guest")));
    }
    places.push("/usr/lib/tombolo/guest".into());
    places
}

/// The kit's kernel of this name or version ("6.1", "6.12", "general-6.12"), or the newest of those named by a version.
pub fn kit(places: &[PathBuf], version: Option<&str>) -> Option<Boot> {
    places.iter().find_map(|place| {
        let complete = |dir: &PathBuf| dir.join("vmlinuz").is_file() && dir.join("initrd.img").is_file();
        let named = version.map(|v| place.join(v)).filter(complete);
        if let Some(dir) = named {
            return Some(boot_of(&dir));
        }
        let mut versions: Vec<(Vec<u32>, PathBuf)> = std::fs::read_dir(place)
            .ok()?
            .filter_map(|e| e.ok().map(|e| e.path()))
            .filter(complete)
            .filter_map(|p| Some((numbers(p.file_name()?.to_str()?)?, p)))
            .collect();
        versions.sort();
        let wanted = version.and_then(numbers);
        let found = match &wanted {
            Some(w) => versions.into_iter().rfind(|(v, _)| v.starts_with(w)),
            None if version.is_none() => versions.pop(),
            None => None,
        };
        found.map(|(_, dir)| boot_of(&dir))
    })
}

fn boot_of(dir: &Path) -> Boot {
    Boot { kernel: dir.join("vmlinuz"), initrd: Some(dir.join("initrd.img")) }
}

fn numbers(version: &str) -> Option<Vec<u32>> {
    version.split('-').next()?.split('.').map(|n| n.parse().ok()).collect()
}

/// The kernel that `vm` boots; `None`: it boots from its disk.
///
/// # Errors
/// Names the missing file or version, and the remedy.
pub fn boot(name: &str, vm: &VmSpec, near: &Path) -> anyhow::Result<Option<Boot>> {
    let places = places(near);
    match &vm.kernel {
        Some(path) if path.contains('/') => {
            let kernel = PathBuf::from(path);
            exists(&kernel, name, "kernel")?;
            if let Some(initrd) = &vm.initrd {
                exists(initrd, name, "initrd")?;
            }
            Ok(Some(Boot { kernel, initrd: vm.initrd.clone() }))
        }
        None if vm.has_disk() => Ok(None),
        version => {
            let Some(mut boot) = kit(&places, version.as_deref()) else {
                let what = version.as_deref().map_or("no guest kit".to_owned(), |v| {
                    format!("no file '{v}' beside the compose file, and no guest kit with kernel {v}")
                });
                anyhow::bail!(
                    "vm.{name}.kernel: {what} in {}; build it (make guest), set TOMBOLO_CACHE to the folder that has guest/ in it, or name a kernel image's path",
                    places[0].display()
                );
            };
            if let Some(initrd) = &vm.initrd {
                exists(initrd, name, "initrd")?;
                boot.initrd = Some(initrd.clone());
            }
            Ok(Some(boot))
        }
    }
}

/// Refuses less memory at a VM's start than the kit's kernel and its programs, which are unpacked into memory, need.
///
/// # Errors
/// Names the key and the least.
pub fn check_memory(name: &str, vm: &VmSpec, at_start: u64) -> anyhow::Result<()> {
    let own = vm.initrd.is_some() || vm.kernel.as_ref().is_some_and(|kernel| kernel.contains('/'));
    if own || vm.kernel.is_none() && vm.has_disk() {
        return Ok(());
    }
    let least = if vm.devices.is_empty() { MEMORY_MIN } else { MEMORY_MIN_WITH_DEVICES };
    let key = if at_start < vm.memory.0 { "boot_memory" } else { "memory" };
    anyhow::ensure!(
        at_start >= least,
        "vm.{name}.{key} is {}; a guest of the guest kit needs at least {} at its start, since its programs are unpacked into memory",
        Size(at_start),
        Size(least)
    );
    Ok(())
}

fn exists(path: &Path, vm: &str, key: &str) -> anyhow::Result<()> {
    match host::open(path, host::Kind::File, false) {
        Ok(_) => Ok(()),
        Err(e) => anyhow::bail!("vm.{vm}.{key}: {} can't be read: {e}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers_and_found_by_prefix() {
        let dir = tempfile::tempdir().unwrap();
        for version in ["6.1", "6.12", "6.2", "general-6.12"] {
            std::fs::create_dir(dir.path().join(version)).unwrap();
            std::fs::write(dir.path().join(version).join("vmlinuz"), "").unwrap();
            std::fs::write(dir.path().join(version).join("initrd.img"), "").unwrap();
        }
        let places = [dir.path().join("missing"), dir.path().to_owned()];
        let kernel = |v| kit(&places, v).map(|b| b.kernel.strip_prefix(dir.path()).unwrap().to_owned());
        assert_eq!(kernel(None), Some("6.12/vmlinuz".into()));
        assert_eq!(kernel(Some("6.1")), Some("6.1/vmlinuz".into()));
        assert_eq!(kernel(Some("general-6.12")), Some("general-6.12/vmlinuz".into()));
        assert_eq!(kernel(Some("6.3")), None);
        assert_eq!(kernel(Some("latest")), None);
    }

    #[test]
    fn a_missing_kernel_is_named_with_its_key() {
        let vm: VmSpec = toml::from_str("kernel = \"/nonexistent/vmlinuz\"").unwrap();
        let e = boot("a", &vm, Path::new("/")).unwrap_err().to_string();
        assert!(e.starts_with("vm.a.kernel: /nonexistent/vmlinuz can't be read"), "{e}");
        let vm: VmSpec = toml::from_str("kernel = \"5.99\"").unwrap();
        let e = boot("a", &vm, Path::new("/")).unwrap_err().to_string();
        assert!(e.contains("no guest kit with kernel 5.99") && e.contains("make guest"), "{e}");
    }

    #[test]
    fn a_guest_of_the_kit_has_room_for_its_programs_and_others_are_the_users_own() {
        let check = |spec: &str| {
            let vm: VmSpec = toml::from_str(spec).unwrap();
            check_memory("a", &vm, vm.boot_memory.unwrap_or(vm.memory).0).map_err(|e| e.to_string())
        };
        let e = check("memory = \"128M\"").unwrap_err();
        assert!(
            e.starts_with("vm.a.memory is 128M; a guest of the guest kit needs at least 192M at its start"),
            "{e}"
        );
        let e = check("kernel = \"6.1\"\nmemory = \"1G\"\nboot_memory = \"128M\"").unwrap_err();
        assert!(e.starts_with("vm.a.boot_memory is 128M"), "{e}");
        assert!(
            check("memory = \"192M\"\ndevices = [\"0000:01:00.0\"]").unwrap_err().contains("at least 256M")
        );
        for good in [
            "memory = \"192M\"",
            "memory = \"128M\"\nkernel = \"./k\"",
            "memory = \"128M\"\ndisk = \"d.img\"",
        ] {
            check(good).unwrap();
        }
    }
}
