// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a process's calls cost, for `tombolo accel trace`.

use crate::connection::{Connection, Count};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use tombolo_calls::say;

/// Names the file that each process adds a line to when it ends.
const VARIABLE: &str = "TOMBOLO_ACCEL_TRACE";

/// Has a function called when the process ends, if somebody wants to know. It is one of a library that is never unloaded.
pub fn at_end(write: extern "C" fn()) {
    if std::env::var_os(VARIABLE).is_some() {
        // SAFETY: registers a function that stays, as the caller says.
        unsafe { libc::atexit(write) };
    }
}

/// Adds this process's counts to the file that TOMBOLO_ACCEL_TRACE names, a line of JSON. `functions`: the API's ids and names.
pub fn write(connection: &Connection, functions: &[(u32, &str)]) {
    let Some(path) = std::env::var_os(VARIABLE) else { return };
    let mut rows: Vec<_> = functions
        .iter()
        .copied()
        .chain([(1, "ping"), (2, "snapshot"), (3, "release")])
        .map(|(id, name)| (name, connection.count(id)))
        .filter(|(_, c)| c.calls.load(Ordering::Relaxed) > 0)
        .collect();
    rows.sort_by_key(|(_, c)| std::cmp::Reverse(c.waited_ns.load(Ordering::Relaxed)));
    let row = |(name, c): &(&str, &Count)| {
        let [calls, waits, bytes, ns] =
            [&c.calls, &c.waits, &c.bytes, &c.waited_ns].map(|n| n.load(Ordering::Relaxed));
        format!(r#"{{"name":"{name}","calls":{calls},"waits":{waits},"bytes":{bytes},"waited_ns":{ns}}}"#)
    };
    let rows: Vec<String> = rows.iter().map(row).collect();
    let program = std::env::args_os().next().unwrap_or_default();
    let program = Path::new(&program).file_name().unwrap_or_default().to_string_lossy();
    let program: String = program.chars().filter(|c| !c.is_control() && !"\"\\".contains(*c)).collect();
    let line = format!(
        "{{\"pid\":{},\"program\":\"{program}\",\"functions\":[{}]}}\n",
        std::process::id(),
        rows.join(",")
    );
    // The file goes with the 'trace' that made it; what another user puts in its place afterwards is not written to.
    let file =
        std::fs::File::options().append(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path);
    if let Err(e) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        say!("tombolo: {VARIABLE}={}: {e}", Path::new(&path).display());
    }
}
