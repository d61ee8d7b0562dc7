// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The systems that are compared: each is a declaration of what it needs, how a guest mounts it, and what it gives up.

use crate::record::{About, Group};
use crate::report::BUFFERED;

/// The system that the others are compared with, and without which there is no bench.
pub const TOMBOLO: &str = "tombolo";

/// How fio opens its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// With O_DIRECT: past the guest's page cache.
    Direct,
    /// Without: through the page cache where the system has one.
    Buffered,
}

impl Io {
    /// The end of the names of such cases.
    pub fn suffix(self) -> &'static str {
        match self {
            Io::Direct => "",
            Io::Buffered => BUFFERED,
        }
    }
}

/// The servers and devices that a system needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// The project's zone, which `tombolo up` mounts.
    Zone,
    /// The guest's own memory.
    Nothing,
    /// A virtio-pmem device, which one VM has.
    Pmem,
    /// A 9p device of QEMU's whose tag is the system's name.
    P9,
    /// A virtiofsd of its own for each VM, whose tag is the system's name.
    Virtiofs {
        /// As QEMU's virtiofsd and the one in Rust call it.
        cache: [&'static str; 2],
        /// The guest's page cache may hold written data back.
        writeback: bool,
    },
    /// The NFS server.
    Nfs,
    /// A zone in a file of the guest's own tmpfs, which the guest mounts as a host does, by `tombolo files mount --backend` with this word.
    OwnZone(&'static str),
}

/// One system.
#[derive(Debug)]
pub struct System {
    /// Its name in results.
    pub name: &'static str,
    /// What it shares.
    pub group: Group,
    /// How it is set up, for readers of the results.
    pub setup: &'static str,
    /// The drawback that its users accept for its speed; `None`: there is none.
    pub gives_up: Option<&'static str>,
    /// What is there before it is mounted.
    pub needs: Needs,
    /// Arguments of mount(8) before the folder; empty: it is mounted already.
    pub mount: &'static str,
    /// How fio's jobs use it.
    pub io: &'static [Io],
}

/// All systems, Tombolo first. The page cache of the guest is in play only for those that [`Io::Buffered`] and [`Group::Cached`] name.
pub static ALL: [System; 9] = [
    System {
        name: TOMBOLO,
        group: Group::Coherent,
        setup: "a zone in memory; its files bypass the page cache with O_DIRECT and without",
        gives_up: None,
        needs: Needs::Zone,
        mount: "",
        io: &[Io::Direct, Io::Buffered],
    },
    System {
        name: "ext4-dax",
        group: Group::Local,
        setup: "ext4 with dax=always on a virtio-pmem device; it bypasses the page cache with O_DIRECT and without",
        gives_up: Some("sharing: one VM has it"),
        needs: Needs::Pmem,
        mount: "-t ext4 -o dax=always $dev",
        io: &[Io::Direct, Io::Buffered],
    },
    System {
        name: "tmpfs",
        group: Group::Local,
        setup: "the guest's own memory",
        gives_up: Some("sharing: one VM has it, and it ends with the VM"),
        needs: Needs::Nothing,
        mount: "-t tmpfs -o size=90% tmpfs",
        io: &[Io::Direct, Io::Buffered],
    },
    System {
        name: "9p",
        group: Group::Coherent,
        setup: "QEMU's 9p with cache=none, msize=524288",
        gives_up: None,
        needs: Needs::P9,
        mount: "-t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=none 9p",
        io: &[Io::Direct],
    },
    System {
        name: "virtiofs",
        group: Group::Coherent,
        setup: "virtiofsd with cache=none (never), no DAX",
        gives_up: None,
        needs: Needs::Virtiofs { cache: ["none", "never"], writeback: false },
        mount: "-t virtiofs virtiofs",
        io: &[Io::Direct],
    },
    System {
        name: "nfs",
        group: Group::Cached,
        setup: "NFS 4.1, nconnect=4, rsize and wsize 1 MiB, the client's usual caches",
        gives_up: Some(
            "an open file shows another VM's writes, and a directory new names, up to a minute later; written data reaches the server when the file is \
             closed",
        ),
        needs: Needs::Nfs,
        mount: "-t nfs4 -o port=$nfs_port,vers=4.1,sec=sys,proto=tcp,nconnect=4,rsize=1048576,wsize=1048576 $nfs_host:/bench",
        io: &[Io::Direct, Io::Buffered],
    },
    System {
        name: "9p-loose",
        group: Group::Cached,
        setup: "QEMU's 9p with cache=loose, msize=524288",
        gives_up: Some(
            "another VM's and the host's changes of files and names that it knows are not seen until it is mounted again, and written data reaches the \
             host up to half a minute later",
        ),
        needs: Needs::P9,
        mount: "-t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose 9p-loose",
        io: &[Io::Buffered],
    },
    System {
        name: "virtiofs-auto",
        group: Group::Cached,
        setup: "virtiofsd with cache=auto, no DAX",
        gives_up: Some(
            "another VM's changes of an open file and of names that it knows are seen up to a second later",
        ),
        needs: Needs::Virtiofs { cache: ["auto", "auto"], writeback: false },
        mount: "-t virtiofs virtiofs-auto",
        io: &[Io::Buffered],
    },
    System {
        name: "virtiofs-always",
        group: Group::Cached,
        setup: "virtiofsd with cache=always and writeback, no DAX",
        gives_up: Some(
            "another VM's and the host's changes of files and names that it knows are not seen until it is mounted again, and written data reaches the \
             host up to half a minute later",
        ),
        needs: Needs::Virtiofs { cache: ["always", "always"], writeback: true },
        mount: "-t virtiofs virtiofs-always",
        io: &[Io::Buffered],
    },
];

/// The mounts of a host, for which the guest stands: measured when they are named.
pub static HOST: [System; 2] = [
    System {
        name: "host-kernel",
        group: Group::Local,
        setup: "a zone in a file of the guest's tmpfs, mounted by the guest's kernel as a host's kernel mounts one",
        gives_up: Some("memory: the mount takes up all of the zone"),
        needs: Needs::OwnZone("kernel"),
        mount: "",
        io: &[Io::Direct, Io::Buffered],
    },
    System {
        name: "host-fuse",
        group: Group::Local,
        setup: "a zone in a file of the guest's tmpfs, mounted by FUSE as on a host without the module",
        gives_up: Some("shared mappings, and a message to a process for each call"),
        needs: Needs::OwnZone("fuse"),
        mount: "",
        io: &[Io::Direct, Io::Buffered],
    },
];

impl System {
    /// Its line in the results.
    pub fn about(&self) -> About {
        About {
            system: self.name.into(),
            group: self.group,
            setup: self.setup.into(),
            gives_up: self.gives_up.map(str::to_owned),
        }
    }

    /// Several VMs use it.
    pub fn is_shared(&self) -> bool {
        self.group != Group::Local
    }

    /// The folder to work in: one of its own, since the systems with a server export the same folder.
    pub fn dir(&self) -> String {
        format!("/mnt/{0}/{0}", self.name)
    }

    /// The script that makes [`System::dir`] usable in a guest; `setup` sets the variables in `mount`.
    pub fn mount_script(&self, setup: &str) -> String {
        let at = format!("/mnt/{}", self.name);
        let mount = match self.mount {
            // The project, or what comes before, has it mounted.
            "" => format!("grep -q ' {at} ' /proc/mounts"),
            arguments => format!("mkdir -p {at} && mount {arguments} {at}"),
        };
        format!("set -e\n{setup}\n{mount}\nmkdir -p {}", self.dir())
    }
}

/// The systems with these names, and Tombolo; all but those of [`HOST`] where there are no names. An error names those that don't exist.
pub fn chosen(names: &[String]) -> Result<Vec<&'static System>, String> {
    let known = || ALL.iter().chain(&HOST);
    let unknown = names.iter().find(|name| known().all(|system| system.name != name.as_str()));
    if let Some(name) = unknown {
        let all: Vec<&str> = known().map(|system| system.name).collect();
        return Err(format!("there is no system '{name}'; there are {}", all.join(", ")));
    }
    if names.is_empty() {
        return Ok(ALL.iter().collect());
    }
    let wanted = |system: &System| system.name == TOMBOLO || names.iter().any(|n| n == system.name);
    Ok(known().filter(|system| wanted(system)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_system_is_measured_buffered_and_says_what_it_gives_up() {
        for system in &ALL {
            assert_eq!(system.gives_up.is_none(), system.group == Group::Coherent, "{}", system.name);
            if system.group == Group::Cached {
                assert!(system.io.contains(&Io::Buffered), "{}", system.name);
            }
        }
    }

    #[test]
    fn whatever_a_peer_is_measured_with_the_systems_that_bypass_the_cache_are_measured_with_too() {
        for peer in &ALL {
            for io in peer.io {
                assert!(ALL[..3].iter().all(|system| system.io.contains(io)), "{} {io:?}", peer.name);
            }
        }
    }

    #[test]
    fn no_two_systems_work_in_one_folder_or_mount_one_device() {
        for (at, one) in ALL.iter().enumerate() {
            for other in &ALL[at + 1..] {
                assert_ne!(one.dir(), other.dir());
                assert!(one.mount != other.mount, "{} and {}", one.name, other.name);
            }
            if matches!(one.needs, Needs::P9 | Needs::Virtiofs { .. }) {
                assert_eq!(one.mount.split(' ').next_back(), Some(one.name), "the tag is the name");
            }
        }
    }

    #[test]
    fn tombolo_is_always_among_the_chosen_and_an_unknown_name_is_told_with_the_known() {
        let names = |systems: Vec<&System>| systems.iter().map(|system| system.name).collect::<Vec<_>>();
        assert_eq!(names(chosen(&["9p".into()]).unwrap()), [TOMBOLO, "9p"]);
        assert_eq!(names(chosen(&["host-fuse".into()]).unwrap()), [TOMBOLO, "host-fuse"]);
        assert_eq!(chosen(&[]).unwrap().len(), ALL.len());
        let error = chosen(&["smb".into()]).unwrap_err();
        assert!(error.contains("'smb'") && error.contains("virtiofs-auto"), "{error}");
    }

    #[test]
    fn a_mount_is_made_with_its_variables_and_the_zone_is_there_already() {
        let nfs =
            ALL.iter().find(|system| system.name == "nfs").unwrap().mount_script("nfs_port=1 nfs_host=h");
        assert!(nfs.find("nfs_host=h").unwrap() < nfs.find("$nfs_host:/bench /mnt/nfs\n").unwrap(), "{nfs}");
        let zone = ALL[0].mount_script("");
        assert!(zone.contains("grep -q ' /mnt/tombolo '") && !zone.contains("mount -t"), "{zone}");
    }
}
