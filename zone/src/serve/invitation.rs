// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The settings that a VM which tombolo does not start needs to join a zone: QEMU's arguments, libvirt's XML, the guest's mount command.

use std::path::PathBuf;

use serde::Serialize;
use uuid::Uuid;

use crate::Rights;
use crate::doorbell::VECTORS;

/// Address space for hot-plugged memory beside the zone that the advice adds, in bytes.
const GRANULE: u64 = 1 << 30;

/// Digits of a zone's uuid behind its name in ids: the first field of a uuid.
const UUID: usize = 8;

/// The prefix of ids in a libvirt domain: libvirt leaves those with `ua-` to users.
const LIBVIRT: &str = "ua-tombolo-";

/// A kept slot, and the paths of zone and doorbell for the VM.
#[derive(Clone, Debug, Serialize)]
pub struct Invitation {
    /// The VM's name in the member table.
    pub member: String,
    /// The VM's rights.
    pub rights: Rights,
    /// The zone's name.
    pub zone: String,
    /// The zone's identity, by which a guest mounts it.
    pub uuid: Uuid,
    /// The zone's file, absolute.
    pub path: PathBuf,
    /// The zone's size in bytes.
    pub size: u64,
    /// The socket of this VM's doorbell.
    pub socket: PathBuf,
}

impl Invitation {
    /// Returns the part of QEMU's ids that stands for the zone: its uuid, of which the beginning is enough behind the zone's name, where that
    /// can be a QEMU id (letters, digits, '-', '_' and '.'). A VM may have several zones of one name.
    pub fn id(&self) -> String {
        let fits = self.zone.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        let uuid = self.uuid.simple().to_string();
        if fits { format!("{}-{}", self.zone, &uuid[..UUID]) } else { uuid }
    }

    /// Returns the bytes by which `maxmem` of `-m` (or `<maxMemory>`) must exceed the VM's own memory.
    pub fn room(&self) -> u64 {
        self.size.next_multiple_of(GRANULE) + GRANULE
    }

    /// The arguments for the zone's memory; ids begin with `prefix`.
    fn memory(&self, prefix: &str) -> Vec<String> {
        let (id, path, size) = (self.id(), option(&self.path), self.size);
        let read_only = if self.rights.write { "" } else { ",readonly=on" };
        vec![
            "-object".to_owned(),
            format!(
                "memory-backend-file,id={prefix}zone-{id},mem-path={path},size={size},share=on{read_only}"
            ),
            "-device".to_owned(),
            format!("virtio-pmem-pci,id={prefix}pmem-{id},memdev={prefix}zone-{id}"),
        ]
    }

    /// QEMU's arguments. `-m` must name a `maxmem` with [`Self::room`] besides.
    pub fn qemu(&self) -> Vec<String> {
        let (id, socket) = (self.id(), option(&self.socket));
        let mut arguments = self.memory("");
        arguments.extend([
            "-chardev".to_owned(),
            format!("socket,id=bell-{id},path={socket}"),
            "-device".to_owned(),
            format!("ivshmem-doorbell,id=doorbell-{id},chardev=bell-{id},vectors={VECTORS}"),
        ]);
        arguments
    }

    /// QEMU's arguments as one line for a shell.
    pub fn qemu_line(&self) -> String {
        let words: Vec<String> = self.qemu().iter().map(|word| shell(word)).collect();
        words.join(" ")
    }

    /// The element for `<devices>` of a libvirt domain: the doorbell.
    pub fn libvirt_devices(&self) -> String {
        format!(
            "<shmem name='tombolo-{}'>\n  <model type='ivshmem-doorbell'/>\n  <server path='{}'/>\n  <msi vectors='{VECTORS}'/>\n</shmem>\n",
            self.id(),
            xml(&self.socket.to_string_lossy())
        )
    }

    /// Returns the zone's memory for `<qemu:commandline>`: libvirt 9.0 has an element for virtio-pmem, but starts no domain with it ("memory
    /// device info is not handled yet").
    pub fn libvirt_arguments(&self) -> Vec<String> {
        self.memory(LIBVIRT)
    }

    /// The guest's command.
    pub fn mount(&self) -> String {
        let read_only = if self.rights.write { "" } else { ",ro" };
        format!("mount -t tombolo -o nosuid,nodev{read_only} {} /mnt", self.uuid)
    }

    /// Returns all forms, with explanations.
    pub fn text(&self) -> String {
        let arguments = self.qemu();
        let lines: Vec<String> =
            arguments.chunks(2).map(|pair| format!("  {} {}", pair[0], shell(&pair[1]))).collect();
        let extra = self.libvirt_arguments();
        let raw: String = extra.iter().map(|a| format!("    <qemu:arg value='{}'/>\n", xml(a))).collect();
        let raw = format!(
            "  and in <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>:\n  <qemu:commandline>\n{raw}  </qemu:commandline>\n"
        );
        let devices =
            self.libvirt_devices().lines().fold(String::new(), |text, line| text + "    " + line + "\n");
        let mebibytes = self.room() >> 20;
        format!(
            "The zone '{}' keeps a slot for the VM '{}' ({}).\n\
             QEMU: let maxmem of -m be at least {mebibytes}M more than the VM's memory, and add\n{}\n\
             libvirt: let <maxMemory slots='16'> be at least {mebibytes} MiB more than <memory>, and add\n  <devices>\n{devices}  </devices>\n{raw}\
             In the guest, which needs tombolo.ko (package tombolo-guest):\n  {}\n",
            self.zone,
            self.member,
            if self.rights.write { "reads and writes" } else { "reads only" },
            lines.join(" \\\n"),
            self.mount()
        )
    }
}

/// Escapes a path within one of QEMU's options: a comma would end it.
fn option(path: &std::path::Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// Quotes a word for a shell.
fn shell(word: &str) -> String {
    let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.,=/:+".contains(c));
    if plain { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// Escapes text within XML.
fn xml(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('\'', "&apos;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn invitation(zone: &str, rights: Rights) -> Invitation {
        Invitation {
            member: "a".into(),
            rights,
            zone: zone.into(),
            uuid: Uuid::from_u128(0x1234_5678_0000_0000_0000_0000_0000_0001),
            path: "/dev/shm/a b,c.zone".into(),
            size: 64 << 20,
            socket: "/run/z/it's.sock".into(),
        }
    }

    #[test]
    fn names_with_odd_characters_survive_qemu_the_shell_and_xml() {
        let odd = invitation("my zone", Rights::READ_WRITE);
        let arguments = odd.qemu().join(" ");
        assert!(arguments.contains("mem-path=/dev/shm/a b,,c.zone,size=67108864,share=on"), "{arguments}");
        assert!(arguments.contains("id=zone-12345678000000000000000000000001,"), "{arguments}");
        let text = odd.text();
        assert!(text.contains(r"path=/run/z/it'\''s.sock'"), "{text}");
        assert!(text.contains("<server path='/run/z/it&apos;s.sock'/>"), "{text}");
        assert!(text.contains("mem-path=/dev/shm/a b,,c.zone") && text.contains("2048M"), "{text}");
    }

    #[test]
    fn a_vm_that_may_only_read_maps_the_zone_read_only() {
        let reader = invitation("z", Rights::READ_ONLY);
        assert!(reader.qemu()[1].ends_with(",readonly=on"));
        assert_eq!(
            reader.libvirt_arguments()[3],
            "virtio-pmem-pci,id=ua-tombolo-pmem-z-12345678,memdev=ua-tombolo-zone-z-12345678"
        );
        assert!(reader.mount().contains("ro"), "{}", reader.mount());
        assert!(reader.text().contains("<qemu:arg value='-object'/>"));
    }

    #[test]
    fn zones_of_one_name_have_ids_of_their_own() {
        let one = invitation("own", Rights::READ_WRITE);
        let two =
            Invitation { uuid: Uuid::from_u128(0x9abc_def0_0000_0000_0000_0000_0000_0001), ..one.clone() };
        let ids = |arguments: Vec<String>| -> Vec<String> {
            let ids = arguments.iter().filter_map(|a| a.split(',').find(|part| part.starts_with("id=")));
            ids.map(str::to_owned).collect()
        };
        for (mine, other) in [(one.qemu(), two.qemu()), (one.libvirt_arguments(), two.libvirt_arguments())] {
            let (mine, other) = (ids(mine), ids(other));
            assert!(mine.len() >= 2 && mine.iter().all(|id| !other.contains(id)), "{mine:?} {other:?}");
        }
        assert_ne!(one.libvirt_devices().lines().next(), two.libvirt_devices().lines().next());
    }
}
