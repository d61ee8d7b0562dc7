// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who runs where. Everything that a job needs is checked here, from what the guests say; what is missing is one message, and nothing has begun.

use anyhow::{Context, bail, ensure};
use tombolo_mpi_node::frame::Fields;

use crate::launcher::Library;

/// The kernel gives process numbers below this one only at the boot.
const LOWEST: i32 = 300;

/// What the user wants.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Ranks of the job.
    pub ranks: u32,
    /// Ranks of each VM; none: as even as possible.
    pub ppn: Option<u32>,
    /// The launcher: a library's word, a path, or any.
    pub launcher: Option<String>,
    /// Program and arguments.
    pub command: Vec<String>,
}

/// A VM of the job.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// What its guest says of itself.
    pub facts: Fields,
    /// Its CPUs are the host's, in the host's order.
    pub placed: bool,
}

/// The whole job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The library.
    pub library: Library,
    /// The path of its launcher in the first VM.
    pub launcher: String,
    /// The library's version.
    pub version: String,
    /// The ranks of each VM, in the order of their numbers.
    pub shares: Vec<u32>,
    /// The process number of rank 0, in all VMs.
    pub base: i32,
    /// The working folder of each VM's ranks.
    pub dir: String,
    /// The mount point of the job's zone in each VM.
    pub mounts: Vec<String>,
    /// The CPUs of each rank, by VM; none: any.
    pub cpus: Vec<Vec<Vec<usize>>>,
    /// Some VM has more ranks than CPUs.
    pub crowded: bool,
}

/// Plans a job on these VMs over the zone of this name; process numbers lie below `below`.
///
/// # Errors
/// The first thing that is missing, with its remedy.
pub fn plan(wish: &Wish, vms: &[Vm], zone: &str, below: i32) -> anyhow::Result<Plan> {
    let shares = shares(wish, vms.len())?;
    for vm in vms {
        let root = vm.facts.get("root") == Some("true");
        ensure!(root, "the guest agent of the VM '{}' is not root's, who alone can arrange a job", vm.name);
    }
    let mounts = mounts(vms, zone)?;
    programs(wish, vms)?;
    let (library, launcher, version) = launcher(wish, vms)?;
    let need = library.space(wish.ranks);
    for vm in vms {
        let free: u64 = vm.facts.parsed("free").unwrap_or(0);
        ensure!(
            free >= need,
            "the zone '{zone}' has {} MiB free in the VM '{}', and {} ranks of {library} need {} MiB; make it larger, or remove files",
            free >> 20,
            vm.name,
            wish.ranks,
            need >> 20
        );
    }
    let base = process_numbers(wish.ranks, vms, below)?;
    let cpus = vms.iter().zip(&shares).map(|(vm, share)| bound(vm, *share)).collect();
    let crowded = vms.iter().zip(&shares).any(|(vm, share)| cpus_of(vm).len() < usize_of(*share));
    let dir = vms[0].facts.get("dir").unwrap_or("/").to_owned();
    Ok(Plan { library, launcher, version, shares, base, dir, mounts, cpus, crowded })
}

fn usize_of(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The ranks of each VM: consecutive numbers, the first VMs one more where it does not come out even.
fn shares(wish: &Wish, vms: usize) -> anyhow::Result<Vec<u32>> {
    let count = u32::try_from(vms).context("so many VMs")?;
    ensure!(wish.ranks > 0, "a job has one rank at least");
    let Some(ppn) = wish.ppn else {
        ensure!(wish.ranks >= count, "{} ranks are too few for {count} VMs; name fewer VMs", wish.ranks);
        return Ok((0..count).map(|vm| wish.ranks / count + u32::from(vm < wish.ranks % count)).collect());
    };
    let room = u64::from(ppn) * u64::from(count);
    ensure!(
        u64::from(wish.ranks) <= room,
        "{count} VMs with {ppn} ranks each have room for {room}, not for {}; raise --ppn or name more VMs",
        wish.ranks
    );
    let mut left = wish.ranks;
    let shares: Vec<u32> = (0..count)
        .map(|_| {
            let share = left.min(ppn);
            left -= share;
            share
        })
        .collect();
    ensure!(
        !shares.contains(&0),
        "{} ranks at {ppn} a VM leave a VM without any; name fewer VMs",
        wish.ranks
    );
    Ok(shares)
}

fn mounts(vms: &[Vm], zone: &str) -> anyhow::Result<Vec<String>> {
    let of = |vm: &Vm| {
        let mount = vm.facts.get("mount").with_context(|| {
            format!(
                "the VM '{}' has not mounted the file system of the zone '{zone}'; give the zone `files = true` and the VM a 'mount' (docs/files.md)",
                vm.name
            )
        })?;
        ensure!(
            vm.facts.get("writes") == Some("true"),
            "the VM '{}' may only read the zone '{zone}', and its ranks write to the memory they share; give it rights = \"rw\"",
            vm.name
        );
        Ok(mount.to_owned())
    };
    let mounts = vms.iter().map(of).collect::<anyhow::Result<_>>()?;
    for vm in vms {
        ensure!(
            vm.facts.get("tree") == vms[0].facts.get("tree"),
            "the VMs '{}' and '{}' see different directories of the zone '{zone}' (subtree); their ranks need one that both see",
            vms[0].name,
            vm.name
        );
    }
    Ok(mounts)
}

/// The library, and the launcher's path and version, which all VMs have alike.
fn launcher(wish: &Wish, vms: &[Vm]) -> anyhow::Result<(Library, String, String)> {
    let has = |vm: &Vm, library: Library| {
        let (version, path) = vm.facts.get(library.word())?.split_once(' ')?;
        Some((version.to_owned(), path.to_owned()))
    };
    let first = &vms[0];
    let there: Vec<Library> = Library::ALL.into_iter().filter(|l| has(first, *l).is_some()).collect();
    let used = Library::ALL.into_iter().find(|l| first.facts.get("uses") == Some(l.word()));
    let wanted =
        wish.launcher.as_deref().and_then(|word| Library::ALL.into_iter().find(|l| l.word() == word));
    let library = match (wanted, &wish.launcher, used, &there[..]) {
        (Some(library), ..) => library,
        (None, Some(_), _, [library, ..]) => *library,
        (None, Some(path), ..) => {
            bail!("the VM '{}' has no launcher '{path}' of Open MPI or MPICH", first.name)
        }
        (None, None, Some(library), _) => library,
        (None, None, None, [library]) => *library,
        (None, None, None, []) => bail!(
            "the VM '{}' has no MPI library; install {} or {} in it",
            first.name,
            Library::OpenMpi.package(),
            Library::Mpich.package()
        ),
        (None, None, None, _) => {
            bail!(
                "the VM '{}' has Open MPI and MPICH; say --launcher openmpi or --launcher mpich",
                first.name
            )
        }
    };
    let mut found: Vec<(&str, (String, String))> = Vec::new();
    for vm in vms {
        let launcher = has(vm, library).with_context(|| match &wish.launcher {
            Some(path) if path.contains('/') => {
                format!("the VM '{}' has no launcher {path} of {library}", vm.name)
            }
            _ => format!("the VM '{}' has no {library}; install {} in it", vm.name, library.package()),
        })?;
        found.push((&vm.name, launcher));
    }
    let (of, (version, path)) = found[0].clone();
    for (vm, (other, _)) in &found {
        ensure!(
            *other == version,
            "the VM '{of}' has {library} {version}, and '{vm}' has {other}; a job needs one version in all VMs"
        );
    }
    Ok((library, path, version))
}

fn programs(wish: &Wish, vms: &[Vm]) -> anyhow::Result<()> {
    let program = wish.command.first().context("there is no program to run")?;
    for vm in vms {
        let dir = vm.facts.get("dir").unwrap_or("/");
        ensure!(
            vm.facts.get("dir_there") == Some("true"),
            "the VM '{}' has no folder {dir}; -C names another one",
            vm.name
        );
        ensure!(
            vm.facts.get("program").is_some(),
            "the VM '{}' has no program '{program}' in {dir}; put it into the zone, or install it in each VM",
            vm.name
        );
        ensure!(
            dir == vms[0].facts.get("dir").unwrap_or("/"),
            "the zone is mounted on {} in the VM '{}' and on {dir} in '{}'; -C names a folder that all have",
            vms[0].facts.get("dir").unwrap_or("/"),
            vms[0].name,
            vm.name
        );
    }
    Ok(())
}

/// The first of as many process numbers in a row that no VM uses, the highest there are.
fn process_numbers(ranks: u32, vms: &[Vm], below: i32) -> anyhow::Result<i32> {
    let limits = vms.iter().filter_map(|vm| vm.facts.parsed::<i32>("pid_max"));
    let limit = limits.min().context("a guest does not say its kernel.pid_max")?;
    let mut used: Vec<i32> = vms
        .iter()
        .flat_map(|vm| vm.facts.get("ids").unwrap_or_default().split(' '))
        .filter_map(|id| id.parse().ok())
        .collect();
    used.sort_unstable();
    let count = i32::try_from(ranks).unwrap_or(i32::MAX);
    let mut end = limit.min(below);
    for id in used.iter().rev().copied().chain([LOWEST - 1]) {
        if id < end && end - (id + 1) >= count {
            return Ok(end - count);
        }
        end = end.min(id);
    }
    bail!(
        "{ranks} ranks need as many process numbers in a row that are free in all VMs, and there are none below {limit}; \
         raise it in the guests: sysctl kernel.pid_max=4194304"
    )
}

/// The online CPUs of a VM.
fn cpus_of(vm: &Vm) -> Vec<usize> {
    let list = vm.facts.get("cpus").unwrap_or_default();
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// The CPUs of each rank of a VM whose CPUs lie as the host's do: as many neighbours for each.
fn bound(vm: &Vm, share: u32) -> Vec<Vec<usize>> {
    let cpus = cpus_of(vm);
    let each = cpus.len() / usize_of(share).max(1);
    if !vm.placed || each == 0 {
        return Vec::new();
    }
    cpus.chunks(each).take(usize_of(share)).map(<[usize]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str) -> Vm {
        let facts = Fields::default()
            .with("root", true)
            .with("pid_max", 32768)
            .with("cpus", "0-3")
            .with("ids", "1 2 700")
            .with("mount", "/mnt/shared")
            .with("writes", true)
            .with("free", 1u64 << 30)
            .with("openmpi", "4.1.4 /usr/bin/mpirun.openmpi")
            .with("dir", "/mnt/shared")
            .with("dir_there", true)
            .with("program", "/mnt/shared/a");
        Vm { name: name.into(), facts, placed: false }
    }

    fn without(mut vm: Vm, name: &str, value: Option<&str>) -> Vm {
        let bytes = vm.facts.encode();
        let text = String::from_utf8(bytes).unwrap();
        let kept = text.split_terminator('\0').filter(|field| !field.starts_with(&format!("{name}=")));
        let fields = kept.map(|field| field.split_once('=').unwrap());
        vm.facts = fields.fold(Fields::default(), |fields, (n, v)| fields.with(n, v));
        if let Some(value) = value {
            vm.facts = vm.facts.with(name, value);
        }
        vm
    }

    fn wish(ranks: u32) -> Wish {
        Wish { ranks, ppn: None, launcher: None, command: vec!["./a".into()] }
    }

    fn refused(wish: &Wish, vms: &[Vm]) -> String {
        plan(wish, vms, "shared", i32::MAX).unwrap_err().to_string()
    }

    #[test]
    fn ranks_are_parted_evenly_and_process_numbers_lie_high() {
        let plan = plan(&wish(5), &[vm("a"), vm("b")], "shared", i32::MAX).unwrap();
        assert_eq!((plan.shares, plan.base, plan.crowded), (vec![3, 2], 32768 - 5, false));
        assert_eq!((plan.library, plan.version.as_str()), (Library::OpenMpi, "4.1.4"));
        assert_eq!((plan.dir.as_str(), plan.cpus), ("/mnt/shared", vec![vec![], vec![]]));
    }

    #[test]
    fn ranks_of_a_vm_on_the_hosts_topology_have_neighbouring_cpus_of_their_own() {
        let mut placed = vm("a");
        placed.placed = true;
        assert_eq!(bound(&placed, 2), [[0, 1], [2, 3]]);
        assert_eq!(bound(&placed, 3), [[0], [1], [2]]);
        assert_eq!(bound(&placed, 5), Vec::<Vec<usize>>::new());
        assert_eq!(bound(&vm("a"), 2), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn process_numbers_are_free_in_all_vms() {
        let busy = without(vm("b"), "ids", Some("1 32766 32760"));
        let vms = [vm("a"), busy];
        assert_eq!(process_numbers(1, &vms, i32::MAX).unwrap(), 32767);
        assert_eq!(process_numbers(5, &vms, i32::MAX).unwrap(), 32761);
        assert_eq!(process_numbers(6, &vms, i32::MAX).unwrap(), 32754);
        assert_eq!(process_numbers(5, &vms, 32761).unwrap(), 32755);
        let error = process_numbers(40_000, &vms, i32::MAX).unwrap_err().to_string();
        assert!(error.contains("kernel.pid_max"), "{error}");
    }

    #[test]
    fn what_is_missing_is_named_with_its_remedy() {
        let both = |changed: Vm| [vm("a"), changed];
        let b = || vm("b");
        let cases = [
            (without(b(), "openmpi", None), "the VM 'b' has no Open MPI; install openmpi-bin in it"),
            (
                without(b(), "openmpi", Some("5.0.7 /usr/bin/mpirun")),
                "the VM 'a' has Open MPI 4.1.4, and 'b' has 5.0.7",
            ),
            (without(b(), "mount", None), "give the zone `files = true`"),
            (without(b(), "writes", Some("false")), "may only read the zone 'shared'"),
            (without(b(), "free", Some("1048576")), "2 ranks of Open MPI need 20 MiB"),
            (without(b(), "program", None), "the VM 'b' has no program './a' in /mnt/shared"),
            (without(b(), "root", Some("false")), "is not root's"),
            (without(b(), "tree", Some("9")), "see different directories"),
        ];
        for (changed, message) in cases {
            let error = refused(&wish(2), &both(changed));
            assert!(error.contains(message), "{error}");
        }
        assert!(refused(&wish(1), &[vm("a"), vm("b")]).contains("too few"));
        let crowd = Wish { ppn: Some(2), ..wish(5) };
        assert!(refused(&crowd, &[vm("a"), vm("b")]).contains("room for 4"));
    }

    #[test]
    fn the_program_or_the_user_says_which_of_two_libraries_it_is() {
        let two = || vm("a").facts.with("mpich", "4.0.2 /usr/bin/mpiexec.hydra");
        let vms = |facts: Fields| [Vm { facts, ..vm("a") }];
        assert!(refused(&wish(1), &vms(two())).contains("say --launcher"));
        let used = plan(&wish(1), &vms(two().with("uses", "mpich")), "z", i32::MAX).unwrap();
        assert_eq!(used.library, Library::Mpich);
        let said = Wish { launcher: Some("openmpi".into()), ..wish(1) };
        assert_eq!(plan(&said, &vms(two()), "z", i32::MAX).unwrap().library, Library::OpenMpi);
    }
}
