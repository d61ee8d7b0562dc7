// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that need a network or mounts of their own.

use std::process::Command;

/// Runs `body` in a network and a mount namespace of its own, which an ordinary user has in a user namespace.
pub fn alone(test: &str, body: impl FnOnce()) {
    const INSIDE: &str = "TOMBOLO_TEST_NAMESPACE";
    // SAFETY: asks for a number.
    if unsafe { libc::geteuid() } == 0 {
        // SAFETY: moves this thread, and its children, into a new namespace.
        let moved = unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) };
        assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
        // Mounts made here must not be seen elsewhere.
        let (none, flags) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
        // SAFETY: a string with its zero; a change of flags takes no others.
        let private = unsafe { libc::mount(none, c"/".as_ptr(), none, flags, none.cast()) };
        assert_eq!(private, 0, "{}", std::io::Error::last_os_error());
    } else if std::env::var_os(INSIDE).is_none() {
        let own = std::env::current_exe().unwrap();
        let mut command = Command::new("unshare");
        command.args(["--map-current-user", "--keep-caps", "--net", "--mount", "--"]).arg(own);
        command.args(["--exact", test, "--nocapture"]).env(INSIDE, "1");
        assert!(command.status().unwrap().success(), "{test} failed in its namespaces");
        return;
    }
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
    assert!(up.success());
    body();
}
