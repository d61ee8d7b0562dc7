// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The log of a process of this part: standard error, and the host's system log once nobody reads that any more. A mount in the background has lost the
//! command that started it.

use std::ffi::CString;
use std::io::Write;

/// Says a line. Unlike `eprintln!` it never panics: some callers are called by the core.
pub(crate) fn say(text: &str) {
    let line = format!("tombolo: {text}\n");
    if std::io::stderr().write_all(line.as_bytes()).is_ok() {
        return;
    }
    let Ok(text) = CString::new(text.replace('\0', " ")) else { return };
    // SAFETY: a format for one string, and that string, terminated; both live across the call.
    unsafe { libc::syslog(libc::LOG_DAEMON | libc::LOG_WARNING, c"%s".as_ptr(), text.as_ptr()) }
}
