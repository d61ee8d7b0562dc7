// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMs that use one directory of a system at once. Weights: a file of safetensors is there before they start; the first VM maps it, then each further one
//! maps it and touches every page. A cache: the first VM fills it and uses it again, then all fill another one at once, with flock, rename and hard links.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use tempfile::TempDir;
use tombolo_bench_project::Project;

use super::{Part, Plan, Record, folder, memory, of_files, zone};
use crate::files::guest::build_tool;
use crate::files::servers::Servers;
use crate::files::systems::{Needs, System};
use crate::record::{Better, Group};

/// A copy of the weights in each VM.
static COPY: System = System {
    name: "copy",
    group: Group::Cached,
    setup: "a copy in each guest's tmpfs, made from a folder of the host over 9p with cache=none, msize=524288",
    gives_up: Some("a change by another VM, and as much memory in each"),
    needs: Needs::P9,
    mount: "-t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=none copy",
    io: &[],
};

/// The systems that share weights, Tombolo first; tmpfs has them already.
const WEIGHTS: [&str; 4] = ["tombolo", "tmpfs", "9p-loose", "virtiofs-auto"];

/// The systems that share a cache.
const CACHE: [&str; 4] = ["tombolo", "virtiofs-auto", "virtiofs", "nfs"];

/// All systems, Tombolo first.
pub fn systems() -> Vec<&'static System> {
    let only_cache = CACHE.iter().filter(|name| !WEIGHTS.contains(name));
    let mut all: Vec<&System> = WEIGHTS.iter().chain(only_cache).map(|name| of_files(name)).collect();
    all.insert(2, &COPY);
    all
}

/// Returns whether a system takes part in this part.
fn takes(plan: &Plan, part: Part, system: &System) -> bool {
    plan.has(part)
        && match part {
            Part::Root => false,
            Part::Weights => WEIGHTS.contains(&system.name) || system.name == COPY.name,
            Part::Cache => CACHE.contains(&system.name),
        }
}

/// What all systems' guests are given.
pub struct Kit {
    tools: TempDir,
    initrd: PathBuf,
}

impl Kit {
    /// Compiles the guests' programs.
    pub fn new(plan: &Plan, kit: &Path) -> Result<Kit> {
        let initrd = kit.join(&plan.kernel).join("initrd-bench.img");
        ensure!(
            initrd.exists(),
            "{} is not there: 'guest/build --kernel {} --flavour bench' makes it",
            initrd.display(),
            plan.kernel
        );
        let tools = folder()?;
        for tool in ["weights", "cache"] {
            build_tool(tool, tools.path())?;
        }
        Ok(Kit { tools, initrd })
    }
}

/// One turn of each system.
pub fn round(plan: &Plan, kit: &Kit, record: &mut Record<'_>) -> Result<()> {
    for system in systems() {
        let parts = [Part::Weights, Part::Cache].map(|part| takes(plan, part, system));
        if parts == [false, false] {
            continue;
        }
        record.turn("members", system, |record| {
            let vms = Vms::start(plan, kit, system)?;
            record.begin(system, &vms.project, vms.servers.versions())?;
            if parts[0] {
                vms.weights(plan, record)?;
            }
            if parts[1] {
                vms.cache(plan, record)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// The VMs of one system. Fields are dropped in this order: VMs, servers, their folder.
struct Vms {
    system: &'static System,
    names: Vec<String>,
    project: Project,
    servers: Servers,
    _folder: TempDir,
}

impl Vms {
    fn start(plan: &Plan, kit: &Kit, system: &'static System) -> Result<Vms> {
        let folder = folder()?;
        let export = folder.path().join("export");
        fs::create_dir(&export)?;
        if takes(plan, Part::Weights, system) {
            fill(plan, kit, system, folder.path())?;
        }
        let names = plan.vms();
        let words: Vec<&str> = names.iter().map(String::as_str).collect();
        let servers = Servers::start(folder.path(), &export, &[system], &words);
        if let Some((_, reason)) = servers.left_out().next() {
            return Err(anyhow!("{reason}"));
        }
        let compose = compose(plan, kit, system, folder.path(), &servers);
        let project = Project::up(folder.path(), &compose)?;
        let vms = Vms { system, names, project, servers, _folder: folder };
        for vm in &vms.names {
            let tools = "mkdir -p /bench && mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,ro tools /bench";
            vms.project.exec(vm, tools)?;
            vms.project.exec(vm, &system.mount_script(vms.servers.setup(system, vm)))?;
        }
        Ok(vms)
    }

    /// MiB of the host that the VMs and what serves them take up.
    fn memory(&self) -> Result<f64> {
        let mut processes = self.servers.processes();
        for vm in &self.names {
            processes.push(self.project.process(vm)?);
        }
        memory::mib(&processes)
    }

    fn weights(&self, plan: &Plan, record: &mut Record<'_>) -> Result<()> {
        let file = format!("{}/weights", self.system.dir());
        let make = format!("/bench/weights make {file} {}", plan.weights_mib);
        let read = match self.system.name {
            // The guest's clock counts 10 ms; a copy takes longer.
            "copy" => format!(
                "s=$(cut -d' ' -f1 /proc/uptime); cp {file} /tmp/weights; e=$(cut -d' ' -f1 /proc/uptime); \
                 r=$(/bench/weights read /tmp/weights) && echo $s $e $r | awk '{{ print $2 - $1 + $3 }}'"
            ),
            _ => format!("/bench/weights read {file}"),
        };
        if self.system.is_shared() {
            self.project.exec(&self.names[0], &read)?;
        }
        for vm in &self.names[1..] {
            let before = self.memory()?;
            if !self.system.is_shared() {
                self.project.exec(vm, &make)?;
            }
            let seconds = self.project.exec(vm, &read)?;
            record.add(self.system, "weights-touch", seconds.trim().parse()?, "s", Better::Lower)?;
            record.add(self.system, "weights-memory", self.memory()? - before, "MiB", Better::Lower)?;
            // The next reading in this VM begins with what the kernel keeps of the file, as a program does that is started again.
            let copied = if self.system.name == COPY.name { "/tmp/weights" } else { file.as_str() };
            let again = self.project.exec(vm, &format!("/bench/weights read {copied}"))?;
            record.add(self.system, "weights-again", again.trim().parse()?, "s", Better::Lower)?;
        }
        Ok(())
    }

    fn cache(&self, plan: &Plan, record: &mut Record<'_>) -> Result<()> {
        let entries = plan.entries;
        let used = |output: &str| {
            let word =
                |name: &str| output.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
            let both: Option<(f64, f64)> = word("entries").zip(word("made"));
            both.with_context(|| format!("the cache's program printed '{output}'"))
        };
        let first = &self.names[0];
        for (case, dir) in [("cache-cold", "own"), ("cache-warm", "own")] {
            let dir = format!("{}/{dir}", self.system.dir());
            let (rate, _) = used(&self.project.exec(first, &format!("/bench/cache use {dir} {entries} 0"))?)?;
            record.add(self.system, case, rate, "1/s", Better::Higher)?;
        }
        let dir = format!("{}/at-once", self.system.dir());
        let (mut rates, mut made) = (0.0, 0.0);
        for output in self.at_once(|number| format!("/bench/cache use {dir} {entries} {number}"))? {
            let (rate, own) = used(&output)?;
            (rates, made) = (rates + rate, made + own);
        }
        self.project.exec(first, &format!("/bench/cache check {dir} {entries} {}", self.names.len()))?;
        record.add(self.system, "cache-at-once", rates, "1/s", Better::Higher)?;
        // 1: what one VM has locked no other makes. More: flock(2) holds in each VM alone.
        record.add(self.system, "cache-made-of-each", made / f64::from(entries), "times", Better::Lower)
    }

    /// Runs a script in each VM at the same time and returns what they printed.
    fn at_once(&self, script: impl Fn(usize) -> String) -> Result<Vec<String>> {
        thread::scope(|scope| {
            let scripts = self.names.iter().enumerate().map(|(number, vm)| (vm, script(number)));
            let threads: Vec<_> =
                scripts.map(|(vm, script)| scope.spawn(move || self.project.exec(vm, &script))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().map_err(|_| anyhow!("a VM's thread panicked"))?)
                .collect()
        })
    }
}

/// Puts the weights where a system's VMs find them: in the zone, whose aligned blocks an import chooses, or in the folder that is exported.
fn fill(plan: &Plan, kit: &Kit, system: &System, folder: &Path) -> Result<()> {
    let source = match system.needs {
        Needs::Zone => "models".to_owned(),
        Needs::Nothing => return Ok(()),
        _ => format!("export/{}", system.name),
    };
    fs::create_dir(folder.join(&source))?;
    let made = Command::new(kit.tools.path().join("weights"))
        .arg("make")
        .arg(folder.join(&source).join("weights"))
        .arg(plan.weights_mib.to_string())
        .status();
    ensure!(
        made.context("can't run the program that makes weights")?.success(),
        "the weights can't be made in {source}"
    );
    if system.needs == Needs::Zone {
        zone(folder, ZONE, zone_mib(plan).into(), &source, system.name)
    } else {
        Ok(())
    }
}

/// The file of Tombolo's zone.
const ZONE: &str = "files.zone";

/// MiB of that. A file of the cache takes two blocks of 4 KiB and an inode at least, and the parts fill two caches.
fn zone_mib(plan: &Plan) -> u32 {
    even(plan.weights_mib + plan.entries / 10 + 64)
}

fn compose(plan: &Plan, kit: &Kit, system: &System, folder: &Path, servers: &Servers) -> String {
    let zone = match system.needs {
        // Without weights 'up' makes the file.
        Needs::Zone => format!(
            "[zone.files]\nsize = \"{}M\"\nbacking = {:?}\nfiles = true\n",
            zone_mib(plan),
            folder.join(ZONE)
        ),
        _ => String::new(),
    };
    let mut text = format!("name = \"tombolo-bench-{}\"\n{zone}", std::process::id());
    for vm in plan.vms() {
        let mut shares =
            vec![format!("{{ tag = \"tools\", path = {:?}, readonly = true }}", kit.tools.path())];
        if system.needs == Needs::P9 {
            shares.push(format!("{{ tag = \"{}\", path = {:?} }}", system.name, folder.join("export")));
        }
        let zones = if zone.is_empty() { "" } else { "zones = { files = { mount = \"/mnt/tombolo\" } }\n" };
        text += &format!(
            "[vm.{vm}]\nkernel = {:?}\ninitrd = {:?}\nmemory = \"{}M\"\ncpus = 1\nready_timeout = 600\nshare = [{}]\nqemu_args = {:?}\n{zones}",
            kit.initrd.with_file_name("vmlinuz"),
            kit.initrd,
            even(plan.weights_mib * 2 + 512),
            shares.join(", "),
            servers.qemu_args(&vm),
        );
    }
    text
}

/// Memory and zones have sizes of whole 2 MiB.
fn even(mib: u32) -> u32 {
    mib.next_multiple_of(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_takes_part_where_it_shares_what_the_part_is_about() {
        let of = |part: Part| {
            let systems = systems();
            let taking = systems.iter().filter(|system| takes(&Plan::full(), part, system));
            taking.map(|system| system.name).collect::<Vec<_>>()
        };
        assert_eq!(of(Part::Weights), ["tombolo", "tmpfs", "copy", "9p-loose", "virtiofs-auto"]);
        assert_eq!(of(Part::Cache), ["tombolo", "virtiofs-auto", "virtiofs", "nfs"]);
        assert!(of(Part::Root).is_empty());
    }

    #[test]
    fn only_tombolos_vms_have_a_zone_and_only_9p_has_a_folder() {
        let (plan, dir) = (Plan::quick(), tempfile::tempdir().unwrap());
        let kit = Kit { tools: tempfile::tempdir().unwrap(), initrd: "/kit/initrd-bench.img".into() };
        let text = |system: &'static System| {
            compose(
                &plan,
                &kit,
                system,
                Path::new("/folder"),
                &Servers::start(dir.path(), dir.path(), &[], &[]),
            )
        };
        let (own, copy, tmpfs) = (text(of_files("tombolo")), text(&COPY), text(of_files("tmpfs")));
        assert!(own.contains("[zone.files]") && own.matches("/mnt/tombolo").count() == 2, "{own}");
        assert!(copy.matches("tag = \"copy\"").count() == 2 && !copy.contains("zone"), "{copy}");
        assert!(!tmpfs.contains("/folder") && !tmpfs.contains("zone"), "{tmpfs}");
    }
}
