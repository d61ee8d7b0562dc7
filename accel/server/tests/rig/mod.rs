// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rig of tests with processes: a server, programs beside it, natively and forwarded.
#![allow(dead_code, missing_docs, unreachable_pub)] // Each test takes what it needs.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tombolo_accel_client::connection::Connection;
use tombolo_accel_server::control::{self, Listing, Request};
use tombolo_accel_spec::opencl as wire;
use tombolo_calls::hello::Hello;
use tombolo_calls::{Link, process};

#[path = "../../../tests/kernels.rs"]
mod kernels;

/// A folder for this test run: programs and sockets.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("accel");
        std::fs::create_dir_all(&path).expect("a folder under target");
        path
    })
}

pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The client library, built beside the server.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let bin = Path::new(env!("CARGO_BIN_EXE_tombolo-accel"));
        let beside = bin.parent().expect("a program lies in a folder");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "-q", "--locked", "--workspace", "--target-dir"]);
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

/// A C program of accel/tests, compiled.
pub fn compiled(name: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let source = format!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/{}.c"), name);
    let program = folder().join(name);
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    compile(Path::new(&source), &program);
    program
}

/// Compiles a program beside its name and then gives it that: another test may run an older one.
pub fn compile(source: &Path, program: &Path) {
    compile_with(source, program, &[]);
}

/// The same, with further options.
pub fn compile_with(source: &Path, program: &Path, options: &[&str]) {
    compile_for(program, |fresh| {
        let mut command = Command::new("cc");
        command.args(["-O1", "-Wno-deprecated-declarations"]).args(options).arg(source).arg("-o");
        command.arg(fresh).args(["-lOpenCL", "-lpthread"]);
        command
    });
}

/// The same by any compiler, which is told where its output goes.
pub fn compile_for(program: &Path, compiler: impl FnOnce(&Path) -> Command) {
    let fresh = program.with_extension(format!("{}", std::process::id()));
    run(&mut compiler(&fresh));
    std::fs::rename(&fresh, program).expect("renamed");
}

/// GiB that the native driver may use: without it, what it reports follows the memory that happens to be free.
pub const MEMORY: &str = "2";

/// Longer than anything here takes, also on a machine that others keep busy.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// A stream of numbers from one seed (xorshift), so that a failure can be replayed.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

pub struct Server {
    pub child: Child,
    pub socket: PathBuf,
    pub control: PathBuf,
}

impl Server {
    pub fn start(name: &str, options: &[&str]) -> Server {
        Server::of(Path::new(env!("CARGO_BIN_EXE_tombolo-accel")), name, options)
    }

    pub fn of(program: &Path, name: &str, options: &[&str]) -> Server {
        let mut command = Command::new(program);
        command.env_remove("OCL_ICD_VENDORS");
        Server::run(command, name, options)
    }

    /// Runs a server with what was said of its environment.
    pub fn run(mut command: Command, name: &str, options: &[&str]) -> Server {
        let socket = folder().join(format!("{name}-{}.sock", std::process::id()));
        let control = socket.with_extension("control");
        if command.get_envs().all(|(name, _)| name != "POCL_CACHE_DIR") {
            command.env("POCL_CACHE_DIR", kernels::folder());
        }
        let child = command
            .args(["serve", "--listen", &format!("unix:{}", socket.display()), "--control"])
            .arg(&control)
            .args(options)
            .env("POCL_MEMORY_LIMIT", MEMORY)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let begun = Instant::now();
        // A socket has its name before it listens. The control socket is the last one, and who answers there has limits and threads as well.
        while control::ask::<Listing>(&control, &Request::Ls).is_err() {
            assert!(begun.elapsed() < TIMEOUT, "the server doesn't listen");
            std::thread::sleep(Duration::from_millis(1));
        }
        Server { child, socket, control }
    }

    pub fn program(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("TOMBOLO_ACCEL", format!("unix:{}", self.socket.display()))
            .env("OCL_ICD_VENDORS", library());
        command
    }

    pub fn connect(&self) -> Link {
        let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "test".into() };
        process::connect(&self.socket, &hello).expect("connects")
    }

    /// A client that does nothing by itself.
    pub fn client(&self) -> Arc<Connection> {
        Connection::new(self.connect()).expect("a connection")
    }

    /// The servers at this one's control socket.
    pub fn ls(&self) -> Vec<Listing> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-accel"));
        let output = run(command.args(["ls", "--json", "--control"]).arg(&self.control));
        serde_json::from_slice(&output.stdout).expect("a list in JSON")
    }

    /// Ends the server; what it logged.
    pub fn end(mut self) -> String {
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

pub fn native(program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env("POCL_CACHE_DIR", kernels::folder())
        .env("POCL_MEMORY_LIMIT", MEMORY)
        .env_remove("OCL_ICD_VENDORS");
    command
}
