// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Interfaces in a test's own network namespace.

use std::process::Command;

use super::wait_for;

pub fn sh(text: &str) -> String {
    let output = Command::new("sh").args(["-ec", text]).output().unwrap();
    assert!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Makes two interfaces, v0 and v1, connected to each other and without other traffic.
pub fn cable() {
    sh("ip link add v0 type veth peer name v1; for d in v0 v1; do
        echo 1 >/proc/sys/net/ipv6/conf/$d/disable_ipv6; ip link set $d up; done");
    for end in ["v0", "v1"] {
        // Until the kernel has noticed that its peer is up too, the interface drops packets.
        wait_for("the cable", || {
            let said = sh(&format!("ip link show {end}"));
            (said.contains("state UP") && !said.contains("qdisc noop ")).then_some(())
        });
    }
}
