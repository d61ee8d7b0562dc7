// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Interfaces in a test's own network namespace.

use std::process::Command;

use super::wait_for;

pub fn sh(text: &str) -> String {
    let output = Command::new("sh").args(["-ec", text]).output().unwrap();
    assert!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Two interfaces, v0 and v1, each the other's far end, over which nobody else says anything.
pub fn cable() {
    sh("ip link add v0 type veth peer name v1; for d in v0 v1; do
        echo 1 >/proc/sys/net/ipv6/conf/$d/disable_ipv6; ip link set $d up; done");
    for end in ["v0", "v1"] {
        // Until the kernel has noticed that the other end is up too, the interface drops what it is to send.
        wait_for("the cable", || {
            let said = sh(&format!("ip link show {end}"));
            (said.contains("state UP") && !said.contains("qdisc noop ")).then_some(())
        });
    }
}
