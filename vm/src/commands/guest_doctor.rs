// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo doctor VM`: what a guest has of tombolo's, each line with its remedy; looked at through its agent.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

use crate::commands::client;
use crate::commands::doctor::{Finding, Grade, finding};
use crate::compose::Project;
use crate::project::accelerator::CUDA_LIBRARY;
use crate::project::control::{Event, Request};

/// Prints what there is, a word that names it in front of each line.
const LOOK: &str = r#"library=$(cuda_library)
[ -z "$library" ] || echo "cuda $library"
echo "kernel $(uname -r)"
if grep -qw tombolo /proc/filesystems; then
	echo "module loaded"
elif modprobe -n -q tombolo || [ -e /lib/modules/tombolo.ko ]; then
	echo "module there, and loaded when a zone is mounted"
fi
for device in /dev/pmem*; do [ ! -b "$device" ] || echo "memory $device"; done
for device in /dev/tombolo-calls-*; do [ ! -c "$device" ] || echo "calls $device"; done
awk '$3 == "tombolo" { print "mount " $2 " (" $4 ")" }' /proc/mounts
if [ -d /sys/bus/virtio/drivers/virtio_mem ] || modprobe -n -q virtio_mem; then echo "grows driver virtio_mem"; fi"#;

/// Asks a running VM's guest.
///
/// # Errors
/// The project or the VM does not run. A guest whose agent does not answer is a finding.
pub fn examine(project: &Project, vm: &str) -> anyhow::Result<Vec<Finding>> {
    let request = Request::Exec {
        vm: vm.to_owned(),
        argv: ["/bin/sh", "-c", &format!("{CUDA_LIBRARY}{LOOK}")].map(str::to_owned).to_vec(),
        env: Vec::new(),
        dir: None,
        input: false,
        terminal: None,
    };
    let mut peer = client::living(project, &request)?;
    let mut said = Vec::new();
    loop {
        match peer.receive::<Event>()? {
            Some(Event::Out { data }) => said.extend(BASE64.decode(data)?),
            Some(Event::Done) => return Ok(findings(&String::from_utf8_lossy(&said))),
            Some(Event::Failed { message }) => {
                let remedy = "install qemu-guest-agent in the guest (package tombolo-guest brings it); tombolo logs VM shows its console";
                return Ok(vec![finding("agent", Grade::Bad, message, Some(remedy))]);
            }
            Some(_) => {}
            None => anyhow::bail!("the supervisor ended while the guest was asked"),
        }
    }
}

fn findings(said: &str) -> Vec<Finding> {
    let of = |key: &str| -> Vec<&str> {
        said.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix(' ')).collect()
    };
    let line = |name: &'static str, key: &str, none: &str, grade: Grade, remedy: &str| {
        let there = of(key);
        if there.is_empty() {
            finding(name, grade, none.to_owned(), Some(remedy))
        } else {
            finding(name, Grade::Good, there.join(", "), None)
        }
    };
    vec![
        finding("agent", Grade::Good, "answers".to_owned(), None),
        line("kernel", "kernel", "unknown", Grade::Less, "the guest has no uname"),
        line(
            "module",
            "module",
            "the guest's kernel has no tombolo.ko",
            Grade::Bad,
            "in the guest: apt install tombolo-dkms linux-headers-$(uname -r), kernel 6.1 or later; or use the guest kit",
        ),
        line(
            "zones",
            "memory",
            "no zone's memory",
            Grade::Less,
            "add 'zones' to the VM, or: tombolo zone attach ZONE VM",
        ),
        line(
            "mounts",
            "mount",
            "no zone is mounted",
            Grade::Less,
            "give the zone 'mount' in the compose file, or mount it in the guest",
        ),
        line(
            "accelerators",
            "calls",
            "none",
            Grade::Less,
            "add 'accelerators' to the VM (only for OpenCL and CUDA)",
        ),
        line(
            "cuda",
            "cuda",
            "no libcuda.so.1 of Tombolo",
            Grade::Less,
            "put it where docs/cuda.md says (only for CUDA programs)",
        ),
        line(
            "growing memory",
            "grows",
            "no driver virtio_mem",
            Grade::Less,
            "a kernel with CONFIG_VIRTIO_MEM (only for memory that arrives after the start)",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_with_everything_needs_nothing() {
        let all = "kernel 6.1.0\nmodule loaded\ncuda /usr/lib/libcuda.so.1\nmemory /dev/pmem0\ncalls /dev/tombolo-calls-cl\nmount /mnt (rw)\ngrows driver virtio_mem\n";
        let found = findings(all);
        assert!(found.iter().all(|f| f.grade == Grade::Good && f.remedy.is_none()), "{found:?}");
        assert!(found.iter().any(|f| f.found == "/mnt (rw)"));
    }

    #[test]
    fn a_guest_without_the_module_is_told_where_to_get_it() {
        let found = findings("kernel 5.10.0\n");
        let module = found.iter().find(|f| f.name == "module").unwrap();
        assert_eq!(module.grade, Grade::Bad);
        assert!(module.remedy.as_ref().unwrap().contains("tombolo-dkms"));
    }
}
