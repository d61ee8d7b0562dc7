// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that need a network or mounts of their own.

use std::process::Command;

/// Runs `body` in a process, a network and a mount namespace of its own, which an ordinary user has in a user namespace. What other tests of this process start
/// begins with copies of its descriptors, which may be of files that are never closed.
pub fn alone(test: &str, body: impl FnOnce()) {
    const INSIDE: &str = "TOMBOLO_TEST_NAMESPACE";
    if std::env::var_os(INSIDE).is_none() {
        let own = std::env::current_exe().unwrap();
        let mut command = Command::new("unshare");
        // SAFETY: asks for a number.
        if unsafe { libc::geteuid() } != 0 {
            command.args(["--map-current-user", "--keep-caps"]);
        }
        command.args(["--net", "--mount", "--"]).arg(own);
        command.args(["--exact", test, "--nocapture"]).env(INSIDE, "1");
        assert!(command.status().unwrap().success(), "{test} failed in its namespaces");
        return;
    }
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
    assert!(up.success());
    body();
}
