// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The reading of a machine that a guest describes, by a process of its own.

use std::process::Command;

use tombolo_topology::gather;

fn read(output: &str) -> anyhow::Result<tombolo_topology::model::Topology> {
    gather::topology(output, Command::new(env!("CARGO_BIN_EXE_tombolo-topology")))
}

/// Returns the output of the script in a guest with these CPUs.
fn guest(cpus: impl Iterator<Item = u32> + Clone) -> String {
    let last = cpus.clone().max().unwrap();
    let of = |cpu: u32| {
        format!(
            "cpu{cpu}/topology/core_id:{cpu}\ncpu{cpu}/topology/physical_package_id:0\ncpu{cpu}/topology/thread_siblings:1\n"
        )
    };
    let lists = format!("online:0-{last}\npossible:0-{last}\npresent:0-{last}\n");
    format!("== /sys/devices/system/cpu\n{lists}{}", cpus.map(of).collect::<String>())
}

#[test]
fn a_guest_whose_cpus_have_numbers_for_gigabytes_of_masks_is_refused() {
    assert_eq!(read(&guest(0..2)).unwrap().cpus.len(), 2);
    let error = format!("{:#}", read(&guest(999_999_960..1_000_000_000)).unwrap_err());
    assert!(error.contains("describe no machine"), "{error}");
}
