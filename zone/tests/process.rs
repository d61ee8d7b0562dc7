// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Identifies the process at the other end of a doorbell's connection. A program of its own: its children have copies of descriptors for a moment,
//! which tests beside it could see.

use std::os::unix::net::UnixListener;
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
