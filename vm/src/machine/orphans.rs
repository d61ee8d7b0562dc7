// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices, isolated CPUs and cgroups of VMs that have died, and whether the host has them back.

use std::path::{Path, PathBuf};

use tombolo_passthrough::address::Address;

use super::{cgroup, growth, partition};

/// Things of dead VMs. One that can't be given back keeps no other, and no VM that does not need it.
#[derive(Debug)]
pub struct GivenBack<T> {
    /// Those that the host has again.
    pub given: Vec<T>,
    /// Why it has not the others; each names the thing.
    pub failures: Vec<String>,
}

impl<T> Default for GivenBack<T> {
    fn default() -> Self {
        Self { given: Vec::new(), failures: Vec::new() }
    }
}

impl<T> GivenBack<T> {
    /// Adds what became of one thing. `None`: another process was faster.
    pub fn add(&mut self, result: anyhow::Result<Option<T>>) {
        match result {
            Ok(thing) => self.given.extend(thing),
            Err(e) => self.failures.push(format!("{e:#}")),
        }
    }
}

/// What dead VMs had of the host.
#[derive(Debug, Default)]
pub struct OfHost {
    pub devices: GivenBack<Address>,
    /// Cgroups of VMs whose CPUs were isolated.
    pub partitions: GivenBack<PathBuf>,
    /// Cgroups of VMs with limits.
    pub groups: GivenBack<PathBuf>,
}

impl OfHost {
    /// Gives devices and CPUs of all dead VMs back, and removes the cgroups of those of this project, which has no supervisor.
    #[must_use]
    pub fn give_back(project: Option<&str>) -> OfHost {
        // A cgroup whose CPUs are its own has a child; both go with that.
        let partitions = partition::give_back_orphans();
        let devices = growth::give_back_orphans();
        let mut groups = GivenBack::default();
        for path in project.iter().flat_map(|name| cgroup::of_project(Path::new(cgroup::ROOT), name)) {
            groups.add(cgroup::remove(&path).map(|()| Some(path)));
        }
        OfHost { devices, partitions, groups }
    }

    /// One sentence for each thing that the host has again.
    pub fn given(&self) -> impl Iterator<Item = String> {
        let devices = self.devices.given.iter().map(|address| format!("{address} given back: its VM died"));
        let partitions = self.partitions.given.iter();
        let partitions =
            partitions.map(|path| format!("the CPUs of {} given back: their VM died", path.display()));
        let groups = self.groups.given.iter();
        devices.chain(partitions).chain(groups.map(|path| format!("{} removed: its VM died", path.display())))
    }

    /// Why the host has not the other things again; each names the thing and the remedy.
    pub fn failures(&self) -> impl Iterator<Item = &String> {
        self.devices.failures.iter().chain(&self.partitions.failures).chain(&self.groups.failures)
    }
}
