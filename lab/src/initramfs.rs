// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The archives that kernels start from: the lab's own, which ends in the agent, and small guests for use inside the lab,
//! which run one shell script.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};

use crate::agent::TOKEN;
use crate::bochs::GUEST_ADDRESS;
use crate::cache::Kernel;
use crate::config::{Config, Iommu};
use crate::protocol::Nonce;
use tombolo_qemu::cpio::Archive;
use tombolo_rig::image::busybox;
use tombolo_rig::kernel::unpacked;

/// The folder inside the lab for files that come back.
pub const OUT: &str = "/run/tombolo-lab/out";

/// Modules the lab needs before it has a root file system.
const BOOT_MODULES: [&str; 3] = ["9pnet_virtio", "9p", "overlay"];
/// Modules the lab loads from its root file system.
const HOST_MODULES: &str = "kvm-amd vfio-pci vfio_iommu_type1";
/// All modules of a lab with VMX: its root file system holds none.
const VMX_MODULES: [&str; 7] = ["ata_piix", "sr_mod", "isofs", "overlay", "e1000", "msr", "kvm-intel"];

/// Writes the lab's initramfs to `target`.
pub fn write_lab(target: &Path, kernel: &Kernel, config: &Config) -> Result<()> {
    write(target, kernel, &BOOT_MODULES, &lab_init(kernel, config), None)
}

/// Writes the initramfs of a lab with VMX to `target`; its root file system is on a CD, and clients must know `token`.
pub fn write_vmx_lab(target: &Path, kernel: &Kernel, config: &Config, token: &Nonce) -> Result<()> {
    write(target, kernel, &VMX_MODULES, &vmx_init(config), Some(token))
}

/// Writes a guest's initramfs to `target`: it loads `modules` and what they need, then runs `script` with busybox' sh. The
/// script finds busybox as `$B`, and /proc, /sys and /dev mounted; when it ends the guest powers off.
pub fn write_guest(target: &Path, kernel: &Kernel, modules: &[&str], script: &str) -> Result<()> {
    let init = format!("{PREAMBLE}{script}\necho o > /proc/sysrq-trigger\nwhile :; do $B sleep 60; done\n");
    write(target, kernel, modules, &init, None)
}

const PREAMBLE: &str = "#!/bin/busybox sh\n\
    B=/bin/busybox\n\
    $B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev\n\
    for m in $($B cat /modules/order); do $B insmod /modules/$m || echo \"cannot load $m\"; done\n";

fn write(target: &Path, kernel: &Kernel, modules: &[&str], init: &str, token: Option<&Nonce>) -> Result<()> {
    let file = File::create(target).with_context(|| format!("creating {}", target.display()))?;
    let mut archive = Archive::new(BufWriter::new(file));
    for folder in ["bin", "modules", "proc", "sys", "dev", "host", "up", "root", "tmp"] {
        archive.directory(folder)?;
    }
    archive.program("bin/busybox", &fs::read(busybox()?).context("reading busybox")?)?;
    let mut order = String::new();
    for path in kernel.with_modules().files_of(modules)? {
        let (name, content) = unpacked(&path)?;
        archive.file(&format!("modules/{name}.ko"), &content)?;
        order.push_str(&format!("{name}.ko\n"));
    }
    archive.file("modules/order", order.as_bytes())?;
    archive.program("init", init.as_bytes())?;
    if let Some(token) = token {
        archive.file("token", token)?;
    }
    archive.finish()?.flush()?;
    Ok(())
}

/// Ends the lab when it cannot get at its root file system.
const DIE: &str = "die() { echo \"lab: cannot mount $1\"; echo o > /proc/sysrq-trigger; $B sleep 60; }\n";

/// Lays a RAM overlay over /host, as /root.
const OVERLAY: &str = "\
    $B mount -t tmpfs -o size=50% up /up && $B mkdir /up/u /up/w\n\
    $B mount -t overlay -o lowerdir=/host,upperdir=/up/u,workdir=/up/w root /root || die overlay\n\
    $B mount -t tmpfs -o mode=755 run /root/run\n";

/// Makes /root a whole system and goes there.
const SYSTEM: &str = "\
    for d in proc sys dev; do $B mount --move /$d /root/$d; done\n\
    cd /root/dev && $B mkdir -p pts shm hugepages\n\
    $B ln -sf /proc/self/fd fd; $B ln -sf fd/0 stdin; $B ln -sf fd/1 stdout; $B ln -sf fd/2 stderr\n\
    $B mount -t devpts -o ptmxmode=666 pts pts; $B mount -t tmpfs shm shm; $B mount -t hugetlbfs huge hugepages\n\
    $B mount -t cgroup2 cgroup /root/sys/fs/cgroup\n\
    $B hostname tombolo-lab; $B ip link set lo up\n\
    cd /root\n";

fn agent_command(config: &Config) -> String {
    let words: Vec<String> = config.agent.iter().map(|word| format!("'{word}'")).collect();
    words.join(" ")
}

fn lab_init(kernel: &Kernel, config: &Config) -> String {
    let release = &kernel.release;
    let modules = kernel.modules();
    let modules = modules.display();
    let agent = agent_command(config);
    let huge_pages = config.huge_pages;
    // AMD-Vi has no interrupt remapping here, without which VFIO refuses every device.
    let unsafe_interrupts = if config.iommu == Iommu::Amd {
        "echo 1 > sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts\n"
    } else {
        ""
    };
    let fresh = config.fresh.as_ref().map_or(String::new(), |folder| {
        let folder = folder.display();
        format!(
            "$B mkdir -p /fresh /up/fu /up/fw '/root{folder}'\n\
             $B mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=mmap,msize=524288 fresh /fresh || die fresh\n\
             $B mount -t overlay -o lowerdir=/fresh,upperdir=/up/fu,workdir=/up/fw fresh '/root{folder}' || die fresh\n"
        )
    });
    format!(
        "{PREAMBLE}{DIE}\
         $B mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=524288 root /host || die root\n\
         {OVERLAY}{fresh}\
         $B mkdir -p /root{OUT} /root/run/lock '/root/lib/modules/{release}'\n\
         $B mount -t 9p -o trans=virtio,version=9p2000.L,cache=mmap,msize=524288 out /root{OUT} || die out\n\
         $B mount --bind '/root{modules}' '/root/lib/modules/{release}' || die modules\n\
         {SYSTEM}\
         echo {huge_pages} > proc/sys/vm/nr_hugepages\n\
         $B chroot . /sbin/modprobe -a {HOST_MODULES} || echo 'lab: some modules did not load'\n\
         {unsafe_interrupts}\
         exec $B chroot . {agent}\n"
    )
}

fn vmx_init(config: &Config) -> String {
    let agent = agent_command(config);
    let huge_pages = config.huge_pages;
    let cwd = config.cwd.display();
    // The kernel finds the drive some time after its driver was loaded.
    format!(
        "{PREAMBLE}{DIE}\
         for i in $($B seq 100); do [ -b /dev/sr0 ] && break; $B sleep 0.1; done\n\
         $B mount -t iso9660 -o ro /dev/sr0 /host || die root\n\
         {OVERLAY}\
         $B mkdir -p /root{OUT} /root/run/lock '/root{cwd}' /root/root\n\
         $B cp /token /root{TOKEN}\n\
         {SYSTEM}\
         $B ip addr add {GUEST_ADDRESS}/24 dev eth0; $B ip link set eth0 up\n\
         echo {huge_pages} > proc/sys/vm/nr_hugepages\n\
         exec $B chroot . {agent}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::process::Command;

    #[test]
    fn the_init_script_is_valid_shell_with_and_without_a_fresh_folder() {
        let kernel = Kernel { release: "6.12.1".into(), image: "/k/boot/x".into(), root: "/k".into() };
        for fresh in [None, Some(PathBuf::from("/src/with space"))] {
            let config =
                Config { fresh, agent: vec!["/bin/agent".into(), "lab".into()], ..Config::default() };
            assert_valid(&lab_init(&kernel, &config));
        }
    }

    #[test]
    fn only_the_lab_without_interrupt_remapping_allows_unsafe_interrupts() {
        let kernel = Kernel { release: "6.12.1".into(), image: "/k/boot/x".into(), root: "/k".into() };
        let allows = |iommu| {
            lab_init(&kernel, &Config { iommu, ..Config::default() }).contains("allow_unsafe_interrupts")
        };
        assert_eq!([Iommu::Intel, Iommu::Amd, Iommu::None].map(allows), [false, true, false]);
    }

    #[test]
    fn the_init_script_of_a_lab_with_vmx_is_valid_shell() {
        let config =
            Config { cwd: "/src/with space".into(), agent: vec!["/bin/agent".into()], ..Config::default() };
        assert_valid(&vmx_init(&config));
    }

    fn assert_valid(script: &str) {
        let mut child =
            Command::new("sh").args(["-n"]).stdin(std::process::Stdio::piped()).spawn().expect("sh exists");
        child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success(), "{script}");
    }
}
