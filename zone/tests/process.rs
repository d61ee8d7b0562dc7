// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Identifies the process at the other end of a doorbell's connection. A program of its own: its children have copies of descriptors for a moment,
//! which tests beside it could see.

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use tombolo_zone::doorbell::process::{Process, started};

#[test]
fn the_process_at_the_other_end_is_known_and_its_end_is_seen() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("s")).unwrap();
    let script =
        "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()";
    let mut child = Command::new("python3")
        .args(["-c", script])
        .arg(dir.path().join("s"))
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let (stream, _) = listener.accept().unwrap();
    let process = Process::of(&stream).unwrap().unwrap();
    let name = process.name().unwrap();
    assert_eq!((name.pid, Some(name.started)), (child.id(), started(child.id())));
    assert!(!process.has_ended());
    child.kill().unwrap();
    process.wait_ended();
    assert!(process.has_ended());
    child.wait().unwrap();
    assert_eq!(started(name.pid), None);
    assert_eq!(Process::of(&stream).unwrap(), None);
}

#[test]
fn a_process_that_waits_for_its_parent_has_ended() {
    let mut child = Command::new("true").spawn().unwrap();
    while started(child.id()).is_some() {
        std::thread::yield_now();
    }
    child.wait().unwrap();
}

/// Its number is another process's by then, which is not at the other end.
#[test]
fn the_process_that_connected_and_left_its_connection_to_another_one_has_ended() {
    let inside = "TOMBOLO_TEST_NAMESPACE";
    if std::env::var_os(inside).is_none() {
        let mut own = Command::new("unshare");
        own.arg(if rustix::process::geteuid().is_root() { "-pf" } else { "-rpf" }).arg("--mount-proc");
        own.arg(std::env::current_exe().unwrap()).args(["--exact", "--nocapture"]);
        own.arg("the_process_that_connected_and_left_its_connection_to_another_one_has_ended");
        assert!(own.env(inside, "yes").status().unwrap().success());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("s")).unwrap();
    let script = "import os,socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); os.fork() or sys.stdin.read()";
    let mut first = Command::new("python3");
    let mut first =
        first.args(["-c", script]).arg(dir.path().join("s")).stdin(Stdio::piped()).spawn().unwrap();
    let _goes_on = first.stdin.take();
    first.wait().unwrap();
    let (stream, _) = listener.accept().unwrap();
    let begin = || {
        std::fs::write("/proc/sys/kernel/ns_last_pid", (first.id() - 1).to_string()).unwrap();
        Command::new("sleep").arg("300").spawn().unwrap()
    };
    let end = |mut other: std::process::Child| {
        other.kill().unwrap();
        other.wait().unwrap();
    };
    let mut other = begin();
    while other.id() != first.id() {
        end(std::mem::replace(&mut other, begin()));
    }
    let found = Process::of(&stream).unwrap();
    // Before Linux 6.5 the kernel tells a number only.
    let tells_processes = tombolo_listen::peer::pidfd(&UnixStream::pair().unwrap().0).is_ok();
    assert_eq!(found.is_none(), tells_processes);
    end(other);
}
