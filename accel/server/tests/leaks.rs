// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients come and go, well or badly: nothing of them stays in the server. `TOMBOLO_CLIENTS` says how many come (120).

mod rig;

use rig::{Server, compiled, folder};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tombolo_accel_client::connection::Connection;
use tombolo_accel_spec::common::Ping;
use tombolo_accel_spec::opencl as wire;
use tombolo_calls::hello::Hello;
use tombolo_calls::send;

/// Longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Bytes that a server may have more for as many clients as came before: its allocator's fragments. A page for each client would be more.
const FRAGMENTS: u64 = 256 << 10;

/// The resources of a server, beside its memory.
#[derive(Debug)]
struct Has {
    descriptors: usize,
    threads: usize,
    /// Children, zombies among them.
    children: usize,
    groups: usize,
    /// The entries of the server's folder for temporary files.
    scratch: Vec<String>,
}

impl Has {
    /// Returns whether there are no more descriptors and threads than in `other`. A connection that is just ending may still have some.
    fn is_within(&self, other: &Has) -> bool {
        self.descriptors <= other.descriptors && self.threads <= other.threads
    }
}

fn entries(folder: impl AsRef<Path>) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn children(pid: u32) -> Vec<u32> {
    let of = |thread: String| std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/children"));
    let lists = entries(format!("/proc/{pid}/task")).into_iter().filter_map(|thread| of(thread).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<_>>())
        .collect()
}

fn has(pid: u32, scratch: &Path) -> Has {
    // Where the server is root it has made a group of its own; else there may be none.
    let groups = entries(format!("/sys/fs/cgroup/tombolo-accel-{pid}"));
    Has {
        descriptors: entries(format!("/proc/{pid}/fd")).len(),
        threads: entries(format!("/proc/{pid}/task")).len(),
        children: children(pid).len(),
        groups: groups.iter().filter(|name| name.starts_with("worker-")).count(),
        scratch: entries(scratch),
    }
}

/// Bytes of memory that the server has, without pages of files: another process may begin and end to share those.
fn memory(pid: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it runs");
    let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

fn kill(pid: u32) {
    // SAFETY: integers only. It fails where the worker has ended.
    let _ended = unsafe { libc::kill(pid as i32, libc::SIGKILL) };
}

/// One client, which ends as number `n` says.
fn client(server: &Server, n: usize) {
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: format!("leak {n}") };
    let mut said = Vec::new();
    hello.send(&mut said).expect("written to memory");
    let plain = || UnixStream::connect(&server.socket).expect("it listens");
    // The server may be faster, and hang up.
    let _hung_up = match n % 8 {
        // Before it has said who it is, in the middle of that, with nonsense, and as one of another build.
        0 => plain().write_all(&[]),
        1 => plain().write_all(&said[..said.len() / 2]),
        2 => plain().write_all(b"GET / HTTP/1.1\r\n\r\n"),
        3 => {
            let other = Hello { identity: [1; 16], ..hello };
            assert!(tombolo_calls::process::connect(&server.socket, &other).is_err());
            Ok(())
        }
        // Before it takes what it is given.
        4 => plain().write_all(&said),
        // Its worker is killed.
        5 => {
            let link = server.connect();
            children(server.child.id()).into_iter().for_each(kill);
            drop(link);
            Ok(())
        }
        // It breaks the protocol.
        6 => {
            let mut link = server.connect();
            let sent = send(&mut *link.tx, &*link.room, &[&[0xff; 64]]).and_then(|()| link.tx.publish());
            sent.map_err(std::io::Error::other)
        }
        _ => {
            let client = Connection::new(server.connect()).expect("a connection");
            client.call(&Ping {}, |_, _| ()).expect("an answer");
            Ok(())
        }
    };
}

fn clients(server: &Server, count: usize) {
    for n in 0..count {
        client(server, n);
        // One at a time, so that the server's memory is that of one.
        let begun = Instant::now();
        while !children(server.child.id()).is_empty() {
            assert!(begun.elapsed() < TIMEOUT, "the worker of client {n} lives on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let begun = Instant::now();
    while !server.ls()[0].tenants.is_empty() {
        assert!(begun.elapsed() < TIMEOUT, "clients that left are still served");
    }
}

#[test]
fn clients_that_come_and_go_however_leave_no_memory_descriptor_thread_group_or_file() {
    let count = std::env::var("TOMBOLO_CLIENTS").map_or(120, |n| n.parse().expect("a number"));
    let scratch = folder().join(format!("leaks-{}", std::process::id()));
    std::fs::create_dir(&scratch).expect("a folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-accel"));
    command.env_remove("OCL_ICD_VENDORS").env("TMPDIR", &scratch);
    // Its log is not read meanwhile: it leaves out the lines that have no room.
    let server = Server::run(command, "leaks", &[]);
    let pid = server.child.id();
    clients(&server, count / 2);
    let (before, had) = (has(pid, &scratch), memory(pid));
    clients(&server, count - count / 2);
    let mut after = has(pid, &scratch);
    // The threads that answered the last client and the last question end after their answers.
    let begun = Instant::now();
    while !after.is_within(&before) && begun.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(1));
        after = has(pid, &scratch);
    }
    let got = memory(pid);
    println!("{count} clients: {had} bytes of private memory at half, {got} at the end; {after:?}");
    assert!(after.is_within(&before), "{before:?}, then {after:?}");
    assert_eq!((after.children, after.groups, after.scratch.len()), (0, 0, 0));
    assert!(got <= had + FRAGMENTS, "{had} bytes, then {got}");
    server.end();
    std::fs::remove_dir(&scratch).expect("it is empty");
}

/// A server whose drivers write to folders in `scratch`.
fn unconfined(name: &str, scratch: &Path) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-accel"));
    command.env_remove("OCL_ICD_VENDORS").env_remove("POCL_CACHE_DIR").env("TMPDIR", scratch);
    Server::run(command, name, &["--unconfined"])
}

#[test]
fn the_folder_of_an_unconfined_worker_is_its_users_alone_and_goes_with_it_however_it_ends() {
    let above = tempfile::tempdir().expect("a folder");
    let scratch = above.path();
    let wait_for = |count: usize| {
        let begun = Instant::now();
        while entries(scratch).len() != count {
            assert!(begun.elapsed() < TIMEOUT, "{:?}", entries(scratch));
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let ping = |client: &Connection| client.call(&Ping {}, |_, _| ()).expect("an answer");
    let living = unconfined("living", scratch);
    let stays = living.client();
    ping(&stays);
    let of_living = entries(scratch);
    assert_eq!(of_living.len(), 1);
    let mode = std::fs::metadata(scratch.join(&of_living[0])).expect("it is there").mode() & 0o7777;
    assert_eq!(mode, 0o700);
    children(living.child.id()).into_iter().for_each(kill);
    wait_for(0);
    living.end();
}

#[test]
fn a_build_that_fails_for_want_of_room_is_explained_in_the_servers_log() {
    let scratch = tempfile::tempdir().expect("a folder");
    // A file system of a MiB, which only this server sees, and which has no room.
    let fill = "mount -t tmpfs -o size=1m none \"$TMPDIR\" && ! head -c 2M /dev/zero 2>/dev/null >\"$TMPDIR/all\" && exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", fill, env!("CARGO_BIN_EXE_tombolo-accel")]);
    command.env_remove("OCL_ICD_VENDORS").env_remove("POCL_CACHE_DIR").env("TMPDIR", scratch.path());
    let server = Server::run(command, "full", &["--unconfined"]);
    let output = server.program(&compiled("late")).output().expect("it runs");
    let log = server.end();
    let line = log.lines().find(|line| line.contains("was not built"));
    let line = line.unwrap_or_else(|| panic!("{log}\n{}", String::from_utf8_lossy(&output.stdout)));
    assert!(line.contains("No space left") && line.contains("TMPDIR"), "{line}");
}

#[test]
fn a_server_without_descriptors_for_a_worker_says_so() {
    let socket = folder().join(format!("few-{}.sock", std::process::id()));
    let serve = "ulimit -n 12; exec \"$0\" serve --listen \"unix:$1\"";
    let mut command = Command::new("sh");
    command.args(["-c", serve, env!("CARGO_BIN_EXE_tombolo-accel")]).arg(&socket);
    let output = command.env_remove("OCL_ICD_VENDORS").output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("ulimit -n"), "{said}");
    assert!(!said.contains("user.max_user_namespaces"), "{said}");
}

#[test]
fn a_client_for_which_no_worker_can_be_started_is_told_so_and_others_compute_on() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 64; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tombolo-accel")]);
    command.env_remove("OCL_ICD_VENDORS");
    let server = Server::run(command, "descriptors", &["--clients", "64", "--clients-per-peer", "64"]);
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "one more".into() };
    let mut clients = Vec::new();
    // Each takes some descriptors of the server's.
    let why = loop {
        match tombolo_calls::process::connect(&server.socket, &hello) {
            Ok(link) => clients.push(Connection::new(link).expect("a connection")),
            Err(why) => break why.to_string(),
        }
        assert!(clients.len() < 64, "the server has descriptors for all");
    };
    assert!(why.contains("could not start a worker") && clients.len() > 1, "{why}");
    clients.iter().for_each(|client| client.call(&Ping {}, |_, _| ()).expect("an answer"));
    clients.clear();
    let begun = Instant::now();
    while tombolo_calls::process::connect(&server.socket, &hello).is_err() {
        assert!(begun.elapsed() < TIMEOUT, "no worker can be started though all have gone");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(server.end().contains("no worker could be started"));
}

#[test]
fn a_server_that_may_write_no_files_tells_its_clients_and_lives_on() {
    let mut command = Command::new("prlimit");
    command.args(["--fsize=100", env!("CARGO_BIN_EXE_tombolo-accel")]).env_remove("OCL_ICD_VENDORS");
    let server = Server::run(command, "no-files", &[]);
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "test".into() };
    for _ in 0..2 {
        let why = tombolo_calls::process::connect(&server.socket, &hello).err().expect("refused").to_string();
        assert!(why.contains("could not start a worker"), "{why}");
    }
    assert!(server.ls()[0].tenants.is_empty());
    assert!(server.end().contains("File too large"));
}
