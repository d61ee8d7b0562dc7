// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Identifies the process at the other end of a doorbell's connection. A program of its own: its children have copies of descriptors for a moment,
//! which tests beside it could see.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use tombolo_zone::doorbell::process::Process;

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
    assert_eq!(process.number(), Some(child.id()));
    assert!(!process.has_ended());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(process.has_ended() && Process::of(&stream).unwrap().is_none());
}

#[test]
fn the_descriptors_by_which_a_process_has_a_file_open_are_copied_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, path) = (dir.path().join("s"), dir.path().join("file"));
    let file = std::fs::File::create_new(&path).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let script = "import socket,sys; f=open(sys.argv[2]); g=open(sys.argv[3]); s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()";
    let mut child = Command::new("python3")
        .args(["-c", script])
        .args([&socket, &path])
        .arg("/dev/null")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let (stream, _) = listener.accept().unwrap();
    let process = Process::of(&stream).unwrap().unwrap();
    assert_eq!(process.descriptors_of(file.as_fd()).unwrap().len(), 1);
    let other = tempfile::tempfile_in(dir.path()).unwrap();
    assert_eq!(process.descriptors_of(other.as_fd()).unwrap().len(), 0);
    child.kill().unwrap();
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
