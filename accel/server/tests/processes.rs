// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A server, its workers and programs as processes of this machine, with PoCL as the native driver (packages/accel.list).

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tombolo_accel_spec::opencl as wire;
use tombolo_calls::hello::Hello;
use tombolo_calls::{Error, Link, process, send};

/// A folder for this test run: programs, sockets, the driver's cache.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("accel");
        std::fs::create_dir_all(path.join("cache")).expect("a folder under target");
        path
    })
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The client library, built beside the server.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let bin = Path::new(env!("CARGO_BIN_EXE_tombolo-accel"));
        let beside = bin.parent().expect("a program lies in a folder");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "-q", "-p", "tombolo-opencl", "--target-dir"]);
        build.arg(beside.parent().expect("target"));
        if beside.ends_with("release") {
            build.arg("--release");
        }
        run(&mut build);
        let vendors = folder().join("vendors");
        std::fs::create_dir_all(&vendors).expect("a folder");
        let library = beside.join("libtombolo_opencl.so");
        std::fs::write(vendors.join("tombolo.icd"), library.to_str().expect("a plain path"))
            .expect("written");
        vendors
    })
}

/// The program that makes calls and prints what they answer.
fn calls() -> &'static Path {
    static CALLS: OnceLock<PathBuf> = OnceLock::new();
    CALLS.get_or_init(|| {
        let (source, program) =
            (concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/calls.c"), folder().join("calls"));
        run(Command::new("cc")
            .args(["-O1", "-Wno-deprecated-declarations", source, "-o"])
            .arg(&program)
            .args(["-lOpenCL", "-lpthread"]));
        program
    })
}

/// GiB that the native driver may use: without it, what it reports follows the memory that happens to be free.
const MEMORY: &str = "2";

struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(name: &str, options: &[&str]) -> Server {
        let socket = folder().join(format!("{name}-{}.sock", std::process::id()));
        let child = Command::new(env!("CARGO_BIN_EXE_tombolo-accel"))
            .args(["serve", "--listen", &format!("unix:{}", socket.display())])
            .args(options)
            .env("POCL_CACHE_DIR", folder().join("cache"))
            .env("POCL_MEMORY_LIMIT", MEMORY)
            .env_remove("OCL_ICD_VENDORS")
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let begun = Instant::now();
        // The socket's appearance says that the server listens.
        while !socket.exists() {
            assert!(begun.elapsed() < Duration::from_secs(30), "the server doesn't listen");
            std::thread::yield_now();
        }
        Server { child, socket }
    }

    fn program(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("TOMBOLO_ACCEL", format!("unix:{}", self.socket.display()))
            .env("OCL_ICD_VENDORS", library());
        command
    }

    fn connect(&self) -> Link {
        let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "test".into() };
        process::connect(&self.socket, &hello).expect("connects")
    }

    /// Ends the server; what it logged.
    fn end(mut self) -> String {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ran");
        let mut log = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut log).expect("a log in UTF-8");
        }
        log
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already, unless the test failed.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn native(program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env("POCL_CACHE_DIR", folder().join("cache"))
        .env("POCL_MEMORY_LIMIT", MEMORY)
        .env_remove("OCL_ICD_VENDORS");
    command
}

#[test]
fn every_call_answers_as_on_the_native_driver() {
    let server = Server::start("calls", &[]);
    let expected = run(&mut native(calls()));
    let forwarded = run(&mut server.program(calls()));
    let (expected, forwarded) =
        (String::from_utf8_lossy(&expected.stdout), String::from_utf8_lossy(&forwarded.stdout));
    for (e, f) in expected.lines().zip(forwarded.lines()) {
        assert_eq!(e, f);
    }
    assert_eq!(expected.lines().count(), forwarded.lines().count());
    server.end();
}

#[test]
fn clinfo_says_the_same() {
    let server = Server::start("clinfo", &[]);
    let expected = run(&mut native(Path::new("clinfo"))).stdout;
    let forwarded = run(&mut server.program(Path::new("clinfo"))).stdout;
    assert_eq!(String::from_utf8_lossy(&expected), String::from_utf8_lossy(&forwarded));
    server.end();
}

#[test]
fn without_a_server_a_program_gets_the_apis_code_and_one_line_that_says_why() {
    let output = Command::new("clinfo")
        .env("TOMBOLO_ACCEL", "unix:/nonexistent/accel.sock")
        .env("OCL_ICD_VENDORS", library())
        .output()
        .expect("clinfo runs");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(out.contains("Number of platforms") && out.contains(" 0"), "{out}");
    assert_eq!(err.matches("no accelerator server at unix:/nonexistent/accel.sock").count(), 1, "{err}");
}

#[test]
fn memory_of_a_new_object_is_cleared_whatever_was_there_before() {
    let (source, program) =
        (concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/stale.c"), folder().join("stale"));
    run(Command::new("cc").args(["-O1", source, "-o"]).arg(&program).arg("-lOpenCL"));
    let server = Server::start("stale", &[]);
    let out = run(&mut server.program(&program)).stdout;
    assert_eq!(
        String::from_utf8_lossy(&out),
        "4096: 0 stale\n1000000: 0 stale\n1000003: 0 stale\nimage: 0 stale\n"
    );
    server.end();
}

#[test]
fn a_quota_is_told_by_the_apis_code_and_in_the_log() {
    let server = Server::start("quota", &["--memory", "8"]);
    let output = server.program(calls()).output().expect("it runs");
    // The program ends by itself, whatever its large buffers got.
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.contains("9000001 bytes the same: 0"), "{out}");
    assert!(out.contains("1000003 bytes the same: 1"), "{out}");
    let log = server.end();
    assert!(log.contains("a client's quota is reached"), "{log}");
}

/// A stream of numbers from one seed (xorshift), so that a failure can be replayed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Sends requests with ids that exist and bodies that don't make sense, until the server hangs up or a thousand are sent.
fn attack(mut link: Link, seed: u64) {
    let mut numbers = Numbers(seed);
    let mut sink = Vec::new();
    for _ in 0..1000 {
        let (id, _) = wire::FUNCTIONS[numbers.next() as usize % wire::FUNCTIONS.len()];
        let flags = (numbers.next() % 2) as u32;
        let mut record = id.to_le_bytes().to_vec();
        record.extend_from_slice(&flags.to_le_bytes());
        for _ in 0..numbers.next() % 20 {
            let small = numbers.next() % 3 != 0;
            let value = if small { numbers.next() % 4 } else { numbers.next() };
            record.extend_from_slice(&value.to_le_bytes()[..if numbers.next() % 2 == 0 { 4 } else { 8 }]);
        }
        let sent = send(&mut *link.tx, &*link.room, &[&record]).and_then(|()| link.tx.publish());
        if sent.is_err() {
            return;
        }
        loop {
            match link.rx.try_recv(&mut sink) {
                Ok(true) => {}
                Ok(false) => break,
                Err(Error::Closed) => return,
                Err(e) => panic!("the server broke the protocol: {e}"),
            }
        }
    }
}

#[test]
fn a_hostile_client_ends_only_its_own_worker() {
    let server = Server::start("hostile", &[]);
    for seed in 1..=20 {
        attack(server.connect(), 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
    }
    let output = run(&mut server.program(calls()));
    assert!(String::from_utf8_lossy(&output.stdout).contains("9000001 bytes the same: 1"));
    let log = server.end();
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn a_client_of_another_build_is_refused_with_a_reason() {
    let server = Server::start("build", &[]);
    let hello = Hello { api: wire::API.into(), identity: [1; 16], name: "old".into() };
    let why = process::connect(&server.socket, &hello).err().expect("refused").to_string();
    assert!(why.contains("different declarations") && why.contains("same release"), "{why}");
    server.end();
}
