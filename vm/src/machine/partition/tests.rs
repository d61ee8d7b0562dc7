// SPDX-License-Identifier: Apache-2.0 OR MIT
use super::*;
use std::collections::BTreeMap;

/// A kernel that keeps cgroups in folders, and fails or dies at a chosen step.
#[derive(Default)]
struct Fake {
    steps: usize,
    fails_at: Option<usize>,
    killed_at: Option<usize>,
    refuses: bool,
}

impl Fake {
    fn step(&mut self) -> io::Result<()> {
        let number = self.steps;
        self.steps += 1;
        assert!(self.killed_at != Some(number), "killed");
        let failed = || io::Error::from(io::ErrorKind::InvalidInput);
        if self.fails_at == Some(number) { Err(failed()) } else { Ok(()) }
    }
}

impl Cgroups for Fake {
    fn make(&mut self, path: &Path) -> io::Result<()> {
        self.step()?;
        fs::create_dir(path)?;
        fs::write(path.join("cgroup.type"), "domain")
    }

    fn remove(&mut self, path: &Path) -> io::Result<()> {
        self.step()?;
        fs::remove_dir_all(path)
    }

    fn write(&mut self, path: &Path, text: &str) -> io::Result<()> {
        self.step()?;
        let text =
            if self.refuses && text == "isolated" { "isolated invalid (Parent is taken)" } else { text };
        fs::write(path, text.trim())
    }
}

/// A hierarchy with a unit in which another VM has CPU 4, and the cgroup of a VM there.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new(unit: &str) -> Tree {
        let tree = Tree(tempfile::tempdir().unwrap());
        fs::create_dir_all(tree.group()).unwrap();
        for (folder, cpus) in [(tree.unit(), unit), (tree.group(), "")] {
            fs::write(folder.join("cgroup.type"), "domain").unwrap();
            fs::write(folder.join("cgroup.subtree_control"), "+cpuset").unwrap();
            fs::write(folder.join(EXCLUSIVE), cpus).unwrap();
            fs::write(folder.join(OWNERS), "").unwrap();
        }
        tree
    }

    fn unit(&self) -> PathBuf {
        self.0.path().join("cgroup/unit")
    }

    fn group(&self) -> PathBuf {
        self.unit().join("tombolo-p-a")
    }

    fn store(&self) -> Store {
        Store { folder: self.0.path().join("partitions") }
    }

    fn make(&self, kernel: &mut Fake, owner: &Owner) -> anyhow::Result<Partition> {
        let (cpus, group) = ("2-3".parse().unwrap(), self.group());
        Partition::make(kernel, &self.store(), owner.clone(), &group, &cpus, &[70, 71])
    }

    /// All files with their content.
    fn files(&self) -> BTreeMap<PathBuf, String> {
        let (mut files, mut folders) = (BTreeMap::new(), vec![self.0.path().to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => folders.push(path),
                    false => drop(files.insert(path.clone(), fs::read_to_string(path).unwrap())),
                }
            }
        }
        files
    }
}

fn living() -> Owner {
    Owner::new("a", std::process::id()).unwrap()
}

fn dead() -> Owner {
    let mut process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let owner = Owner::new("a", process.id()).unwrap();
    process.kill().unwrap();
    process.wait().unwrap();
    owner
}

#[test]
fn a_partition_has_its_cpus_and_threads_and_gives_all_of_it_back() {
    // CPUs that an administrator has handed down stay with the unit.
    for (unit, with) in [("4", "2-4"), ("0-7", "0-7")] {
        let tree = Tree::new(unit);
        let before = tree.files();
        let made = tree.make(&mut Fake::default(), &living()).unwrap();
        let read = |folder: PathBuf, file: &str| fs::read_to_string(folder.join(file)).unwrap();
        assert_eq!(read(tree.unit(), EXCLUSIVE), with);
        assert_eq!(read(tree.group(), EXCLUSIVE), "2-3");
        let files = ["cgroup.type", "cpuset.cpus", EXCLUSIVE, KIND, "cgroup.threads"];
        let values = files.map(|file| read(made.path(), file));
        assert_eq!(values, ["threaded", "2-3", "2-3", "isolated", "71"]);
        let again = Partition::take_over(&tree.store(), &tree.group()).unwrap();
        assert_eq!(again.record, made.record);
        assert_eq!(tree.store().orphans(), [], "its owner lives");
        again.give_back(&mut Fake::default(), &tree.store()).unwrap();
        let mut after = tree.files();
        // Threads that still run are in the VM's cgroup.
        assert_eq!(after.remove(&tree.group().join("cgroup.threads")).as_deref(), Some("71"));
        assert_eq!(after, before);
    }
}

#[test]
fn whoever_can_only_look_at_a_cgroup_keeps_nobody_from_its_cpus() {
    let tree = Tree::new("4");
    let folder = File::open(tree.unit()).unwrap();
    lock::take(&folder, &tree.unit(), Duration::ZERO).unwrap();
    let made = tree.make(&mut Fake::default(), &living()).unwrap();
    made.give_back(&mut Fake::default(), &tree.store()).unwrap();
}

#[test]
fn a_step_that_the_kernel_refuses_leaves_nothing_of_the_attempt() {
    let mut refused = 0;
    for step in 0.. {
        let tree = Tree::new("4");
        let before = tree.files();
        let mut kernel = Fake { fails_at: Some(step), ..Fake::default() };
        let Err(error) = tree.make(&mut kernel, &living()) else { break };
        let text = format!("{error:#}");
        assert!(text.contains("cgroup/unit") || text.contains("thread 7"), "{text}");
        let mut after = tree.files();
        after.remove(&tree.group().join("cgroup.threads"));
        assert_eq!(after, before, "step {step}");
        refused += 1;
    }
    assert!(refused > 8, "{refused}");
}

#[test]
fn the_kernels_reason_is_told() {
    let tree = Tree::new("");
    let mut kernel = Fake { refuses: true, ..Fake::default() };
    let error = tree.make(&mut kernel, &living()).unwrap_err().to_string();
    assert!(error.contains("the kernel says 'isolated invalid (Parent is taken)'"), "{error}");
    assert!(!tree.group().join(VCPUS).exists());
}

#[test]
fn a_supervisor_that_dies_at_any_step_loses_no_cpu() {
    let owner = dead();
    let mut killed = 0;
    for step in 0.. {
        let tree = Tree::new("4");
        let mut before = tree.files();
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            tree.make(&mut Fake { killed_at: Some(step), ..Fake::default() }, &owner).map(drop).unwrap();
        }));
        // So does one that takes it back for the dead one.
        for later in 0..3 {
            let mut kernel = Fake { killed_at: Some(later), ..Fake::default() };
            let _killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                reclaim(&mut kernel, &tree.store());
            }));
        }
        assert!(reclaim(&mut Fake::default(), &tree.store()).failures.is_empty());
        let group = tree.group();
        before.retain(|path, _| !path.starts_with(&group));
        let mut after = tree.files();
        after.retain(|path, _| !path.starts_with(&group));
        assert_eq!(after, before, "killed at step {step}");
        assert!(!group.join(VCPUS).exists() && tree.store().orphans().is_empty());
        if made.is_ok() {
            break;
        }
        killed += 1;
    }
    assert!(killed > 8, "{killed}");
}

#[test]
fn what_is_missing_is_said_with_the_remedy_before_anything_is_changed() {
    let tree = Tree::new("4");
    let (unit, cpus) = (tree.unit(), "2-3".parse().unwrap());
    let said = |linux| format!("{:#}", check_on(linux, &unit, &cpus).unwrap_err());
    assert!(said((6, 1)).contains("Linux 6.1 can't isolate") && said((6, 1)).contains("isolcpus=2-3"));
    assert!(said((6, 12)).contains("is no cgroup"), "{}", said((6, 12)));
    fs::write(unit.join("cgroup.controllers"), "cpu memory\n").unwrap();
    assert!(said((6, 12)).contains("lacks the controller cpuset; as root: echo +cpuset >"));
    fs::write(unit.join("cgroup.controllers"), "cpu cpuset memory\n").unwrap();
    check_on((6, 12), &unit, &cpus).unwrap();
    fs::remove_file(unit.join(EXCLUSIVE)).unwrap();
    let text = said((6, 12));
    assert!(text.contains("the CPUs 2-3 must be in") && text.contains("as root: echo 2-3 >"), "{text}");
}
