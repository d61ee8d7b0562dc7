// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMs that start from one root file system. The first starts alone, then the others at once; in each, after its start, every file of the root is
//! read once. A peer's root is mounted by a first process that does what that of a zone's root does (`peer_init`).

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use tempfile::TempDir;
use tombolo_bench_project::Project;
use tombolo_bench_project::kit::Kit;

use super::{Plan, Record, folder, memory, of_files, zone};
use crate::files::servers::Servers;
use crate::files::systems::{Needs, System, TOMBOLO};
use crate::record::{Better, Group};

/// A disk image.
static QCOW2: System = System {
    name: "qcow2",
    group: Group::Cached,
    setup: "a qcow2 overlay for each VM on one raw image with ext4; as QEMU's disks are, through the host's page cache",
    gives_up: Some("a copy of what it reads in each guest's page cache"),
    needs: Needs::Nothing,
    mount: "-t ext4 /dev/vda",
    io: &[],
};

/// All systems, Tombolo first.
pub fn systems() -> Vec<&'static System> {
    vec![of_files(TOMBOLO), &QCOW2, of_files("9p-loose"), of_files("virtiofs-auto")]
}

/// The end of the first process of VMs with a root: from the line on at which the root is mounted at /new.
const GUEST_INIT: &str = include_str!("../../../guest/root/init");
const GOES_ON: &str = "if [ -e /new/sbin/init ]";

/// Reads every file of a guest's root.
const READ: &str = "find / -xdev -type f -exec cat {} + >/dev/null";

/// The root in each system's form, in the host's memory.
pub struct Image {
    folder: TempDir,
    kit: PathBuf,
    plan: Plan,
}

impl Image {
    /// Makes the tree, the zone and the disk image.
    pub fn new(plan: &Plan, kit: &Path) -> Result<Image> {
        let image = Image { folder: folder()?, kit: kit.to_owned(), plan: plan.clone() };
        let tree = image.path("tree");
        if let Some(root) = &plan.root {
            sh("cp -a \"$1/.\" \"$2\"", &[root, &tree])?;
        } else {
            let base = kit.join(&plan.kernel).join("initrd.img");
            ensure!(
                base.exists(),
                "{} is not there: 'guest/build --kernel {}' makes it",
                base.display(),
                plan.kernel
            );
            // Without its own first process, which is that of an initramfs.
            sh("mkdir \"$2\" && cd \"$2\" && cpio -idm --quiet <\"$1\" && rm init", &[&base, &tree])?;
        }
        let size = format!("{}M", image.mib()?);
        zone(image.folder.path(), "base.zone", image.mib()?, "tree", "root")?;
        sh(
            &format!("truncate -s {size} \"$2\" && PATH=$PATH:/sbin mkfs.ext4 -q -d \"$1\" \"$2\""),
            &[&tree, &image.path("base.img")],
        )?;
        Ok(image)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// MiB of a zone or an image for the tree.
    fn mib(&self) -> Result<u64> {
        let output =
            Command::new("du").args(["-sk"]).arg(self.path("tree")).output().context("can't run du")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let kib: u64 = text
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok())
            .context("du printed no size")?;
        Ok((kib / 1024 * 3 / 2 + 64).next_multiple_of(2))
    }

    /// The VMs' part of a compose file, in `folder`.
    fn compose(&self, system: &System, folder: &Path, servers: &Servers) -> Result<String> {
        let kernel = &self.plan.kernel;
        let mut text = format!("name = \"tombolo-bench-{}\"\n", std::process::id());
        let boot = if system.name == TOMBOLO {
            let backing = self.path("base.zone");
            let _ = write!(
                text,
                "[zone.base]\nsize = \"{}M\"\nbacking = {backing:?}\nfiles = true\n",
                self.mib()?
            );
            format!("kernel = \"{kernel}\"\nroot = {{ zone = \"base\", path = \"/root\" }}\n")
        } else {
            let (kit, init, initrd) =
                (Kit::new(&self.kit, kernel)?, folder.join("init"), folder.join("initrd"));
            fs::write(&init, peer_init(system)?)?;
            fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
            kit.add(&[format!("{}:/init", init.display())], &initrd)?;
            format!("kernel = {:?}\ninitrd = {initrd:?}\n", kit.kernel())
        };
        let own = match system.needs {
            Needs::P9 => {
                format!(
                    "share = [{{ tag = \"{}\", path = {:?}, readonly = true }}]\n",
                    system.name,
                    self.path("tree")
                )
            }
            _ if system.name == QCOW2.name => {
                format!(
                    "disks = [{{ path = {:?}, format = \"raw\", overlay = true }}]\n",
                    self.path("base.img")
                )
            }
            _ => String::new(),
        };
        for vm in self.plan.vms() {
            let _ = write!(
                text,
                "[vm.{vm}]\n{boot}{own}memory = \"512M\"\ncpus = 1\nready_timeout = 600\nqemu_args = {:?}\n",
                servers.qemu_args(&vm)
            );
        }
        Ok(text)
    }
}

/// Runs a shell script with paths as its arguments.
fn sh(script: &str, paths: &[&Path]) -> Result<()> {
    let output =
        Command::new("sh").args(["-ec", script, "sh"]).args(paths).output().context("can't run sh")?;
    ensure!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// The first process of a peer's VMs.
fn peer_init(system: &System) -> Result<String> {
    let at = GUEST_INIT.find(GOES_ON).with_context(|| format!("guest/root/init has no line '{GOES_ON}'"))?;
    let over = if system.name == QCOW2.name { "" } else { "yes" };
    let head = include_str!("../../guest/root-init").replace("@MOUNT@", system.mount).replace("@OVER@", over);
    Ok(head + &GUEST_INIT[at..])
}

/// One turn of each system.
pub fn round(plan: &Plan, image: &Image, record: &mut Record<'_>) -> Result<()> {
    for system in systems() {
        record.turn("root", system, |record| turn(plan, image, system, record))?;
    }
    Ok(())
}

fn turn(plan: &Plan, image: &Image, system: &'static System, record: &mut Record<'_>) -> Result<()> {
    let folder = folder()?;
    let names = plan.vms();
    let words: Vec<&str> = names.iter().map(String::as_str).collect();
    let servers = Servers::start(folder.path(), &image.path("tree"), &[system], &words);
    if let Some((_, reason)) = servers.left_out().next() {
        return Err(anyhow!("{reason}"));
    }
    let project = Project::declare(folder.path(), &image.compose(system, folder.path(), &servers)?)?;
    let vms = Vms { system, project, servers: &servers };
    let (first, more) = names.split_at(1);

    let one = vms.start(first)?;
    record.begin(system, &vms.project, servers.versions())?;
    let started = vms.memory(first)?;
    vms.read(first)?;
    let alone = vms.memory(first)?;
    let others = vms.start(more)?;
    let together = vms.memory(&names)?;
    vms.read(more)?;
    let all = vms.memory(&names)?;

    let count = more.len() as f64;
    let mut add = |case: &str, value: f64, unit: &str| record.add(system, case, value, unit, Better::Lower);
    add("root-start-first", one, "s")?;
    add("root-start-others", others, "s")?;
    add("root-memory-first", alone, "MiB")?;
    add("root-memory-each-further", (all - alone) / count, "MiB")?;
    add("root-read-first", alone - started, "MiB")?;
    add("root-read-each-further", (all - together) / count, "MiB")
}

/// The VMs of one system.
struct Vms<'a> {
    system: &'static System,
    project: Project,
    servers: &'a Servers,
}

impl Vms<'_> {
    /// Starts some; returns the seconds until the guest agents of all of them answer.
    fn start(&self, vms: &[String]) -> Result<f64> {
        let begin = Instant::now();
        self.project.start(vms)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Has each read every file of its root.
    fn read(&self, vms: &[String]) -> Result<()> {
        for vm in vms {
            let root = self.project.exec(vm, "grep ' / ' /proc/mounts")?;
            let kind = if self.system.name == QCOW2.name { " ext4 " } else { " overlay " };
            ensure!(root.contains(kind), "the root of {vm} is not the one that was to be measured: {root}");
            self.project.exec(vm, READ)?;
        }
        Ok(())
    }

    /// MiB of the host that these, the only ones which run, and what serves them take up.
    fn memory(&self, vms: &[String]) -> Result<f64> {
        let mut processes = self.servers.processes();
        for vm in vms {
            processes.push(self.project.process(vm)?);
        }
        memory::mib(&processes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_first_process_mounts_its_root_and_goes_on_as_that_of_a_zone() {
        for system in &systems()[1..] {
            let init = peer_init(system).unwrap();
            assert!(
                init.starts_with("#!/bin/sh\n") && !init.contains("@MOUNT@") && !init.contains("@OVER@"),
                "{init}"
            );
            assert!(init.contains(&format!("until mount {} /lower", system.mount)), "{init}");
            assert!(init.ends_with("exec switch_root /new /run/tombolo/bin/init\n"), "{init}");
        }
    }
}
