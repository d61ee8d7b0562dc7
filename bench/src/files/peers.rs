// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The systems that are compared, and how each is mounted in the guest.

use super::servers::{NFS_PORT, Servers};

/// The system that the others are compared with, and without which there is no bench.
pub const TOMBOLO: &str = "tombolo";

/// One system in the guest.
pub struct Peer {
    /// Its name in results.
    pub system: &'static str,
    /// The folder to work in.
    pub dir: String,
    /// The script that makes `dir` usable.
    pub mount: String,
    /// Another VM sees the same files.
    pub shared: bool,
}

impl Peer {
    /// All that can run here, Tombolo first.
    pub fn all(servers: &Servers) -> Vec<Peer> {
        let mut peers = vec![
            Peer {
                system: TOMBOLO,
                dir: "/mnt/tombolo".into(),
                mount: "grep -q ' /mnt/tombolo tombolo ' /proc/mounts".into(),
                shared: true,
            },
            Peer {
                system: "ext4-dax",
                dir: "/mnt/dax".into(),
                // The virtio-pmem device that is no zone.
                mount: "set -e; dev=; for d in /dev/pmem*; do \
                        if [ \"$(dd if=$d bs=8 count=1 2>/dev/null | tr -d '\\0')\" != TOMBZONE ]; then dev=$d; fi; done; \
                        mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0,lazy_journal_init=0 $dev; \
                        mkdir -p /mnt/dax; mount -t ext4 -o dax=always $dev /mnt/dax"
                    .into(),
                shared: false,
            },
            Peer {
                system: "tmpfs",
                dir: "/mnt/tmpfs".into(),
                mount: "mkdir -p /mnt/tmpfs && mount -t tmpfs -o size=90% tmpfs /mnt/tmpfs".into(),
                shared: false,
            },
            Peer {
                system: "9p",
                dir: "/mnt/9p/9p".into(),
                mount: "mkdir -p /mnt/9p && mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 export /mnt/9p && mkdir -p /mnt/9p/9p"
                    .into(),
                shared: true,
            },
        ];
        if servers.virtiofs.is_ok() {
            peers.push(Peer {
                system: "virtiofs",
                dir: "/mnt/virtiofs/virtiofs".into(),
                mount: "mkdir -p /mnt/virtiofs && mount -t virtiofs virtiofs /mnt/virtiofs && mkdir -p /mnt/virtiofs/virtiofs".into(),
                shared: true,
            });
        }
        if servers.nfs.is_ok() {
            peers.push(Peer {
                system: "nfs",
                dir: "/mnt/nfs/nfs".into(),
                mount: format!(
                    "set -e; ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; mkdir -p /mnt/nfs; \
                     mount -t nfs4 -o port={NFS_PORT},vers=4.1,sec=sys,proto=tcp 10.0.2.2:/bench /mnt/nfs; mkdir -p /mnt/nfs/nfs"
                ),
                shared: true,
            });
        }
        peers
    }
}
