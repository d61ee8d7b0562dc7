// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Servers of root and of an ordinary user, and hostile clients of theirs.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tombolo_accel_client::connection::Connection;
use tombolo_accel_server::control::{self, Listing, Request};
use tombolo_accel_server::tenants::Status;
use tombolo_accel_spec::common::Ping;
use tombolo_accel_spec::opencl as wire;
use tombolo_calls::hello::Hello;
use tombolo_calls::process;

/// Longer than anything here takes, also on a machine that others keep busy.
pub const TIMEOUT: Duration = Duration::from_secs(300);
/// A user that owns nothing.
pub const NOBODY: u32 = 65534;

/// The user of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// The one that runs the tests.
    Own,
    /// Of root's tests, an ordinary one.
    Nobody,
}

pub fn is_root() -> bool {
    // SAFETY: takes nothing.
    unsafe { libc::geteuid() == 0 }
}

pub fn users() -> &'static [User] {
    if is_root() { &[User::Own, User::Nobody] } else { &[User::Own] }
}

/// Where all users may look, with the server's program, the hostile one and the client library in it.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = tempfile::Builder::new().prefix("tombolo-escape-").tempdir().expect("a folder").keep();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).expect("its mode");
        let server = Path::new(env!("CARGO_BIN_EXE_tombolo-accel"));
        // By another process: a child that a thread starts meanwhile would keep this one's descriptor, and the copy could not be run (ETXTBSY).
        done(Command::new("cp").arg(server).arg(folder.join("tombolo-accel")));
        for name in ["escape", "svm", "waits"] {
            let source = format!("{}/../tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
            let mut cc = Command::new("cc");
            done(cc.args(["-O1", &source, "-o"]).arg(folder.join(name)).args(["-lOpenCL", "-lpthread"]));
        }
        let beside = server.parent().expect("a program lies in a folder");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "-q", "--locked", "--workspace", "--target-dir"]);
        build.arg(beside.parent().expect("target"));
        if beside.ends_with("release") {
            build.arg("--release");
        }
        done(&mut build);
        let library = beside.join("libtombolo_opencl.so");
        std::fs::create_dir(folder.join("vendors")).expect("a folder");
        std::fs::write(folder.join("vendors/tombolo.icd"), library.to_str().expect("a plain path"))
            .expect("written");
        // The folder is in use until this process ends, and no other process knows its name.
        // SAFETY: the function lives as long as the program and takes nothing.
        unsafe { libc::atexit(remove_folder) };
        folder
    })
}

extern "C" fn remove_folder() {
    // A folder that can't be removed stays in the system's folder for temporary files.
    let _left = std::fs::remove_dir_all(folder());
}

pub fn done(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn server_command(user: User) -> Command {
    let mut command = Command::new(folder().join("tombolo-accel"));
    if user == User::Nobody {
        command.uid(NOBODY).gid(NOBODY);
    }
    // Folders that these name would be the worker's too; cargo sets the last one.
    for name in ["OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
    command.arg("serve");
    command
}

pub struct Server {
    pub child: Child,
    pub socket: PathBuf,
    /// Where it listens too, over TCP.
    tcp: std::net::SocketAddr,
    control: PathBuf,
}

impl Server {
    pub fn start(user: User, name: &str, options: &[&str]) -> Server {
        Server::with(user, name, options, |_| {})
    }

    pub fn with(user: User, name: &str, options: &[&str], prepare: impl FnOnce(&mut Command)) -> Server {
        let socket = folder().join(format!("{name}-{user:?}.sock"));
        let control = socket.with_extension("control");
        let mut command = server_command(user);
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
        let tcp = free.expect("a free port");
        command.arg("--listen").arg(format!("unix:{}", socket.display()));
        command.arg("--listen").arg(format!("tcp:{tcp}"));
        command.arg("--control").arg(&control).args(options);
        // A file that a client must not be able to read.
        command.env("SECRET_OF_THE_SERVER", "it");
        prepare(&mut command);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the server starts");
        wait_until("the server listens", || {
            if let Some(status) = child.try_wait().expect("a child") {
                panic!("the server ended with {status}: {}", said(&mut child));
            }
            // A socket has its name before it listens; the control socket is the last one.
            control::ask::<Listing>(&control, &Request::Ls).is_ok()
        });
        Server { child, socket, tcp, control }
    }

    /// The addresses of one server, of each kind.
    pub fn addresses(&self) -> [String; 2] {
        [format!("unix:{}", self.socket.display()), format!("tcp:{}", self.tcp)]
    }

    /// The hostile program.
    pub fn escape(&self, arguments: &[&str]) -> Command {
        let mut command = self.program("escape");
        command.args(arguments);
        command
    }

    pub fn program(&self, name: &str) -> Command {
        let mut command = Command::new(folder().join(name));
        command
            .env("TOMBOLO_ACCEL", format!("unix:{}", self.socket.display()))
            .env("OCL_ICD_VENDORS", folder().join("vendors"));
        command
    }

    /// A client that does nothing by itself.
    pub fn client(&self) -> Arc<Connection> {
        let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "neighbour".into() };
        Connection::new(process::connect(&self.socket, &hello).expect("connects")).expect("a connection")
    }

    pub fn tenants(&self) -> Vec<Status> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-accel"));
        let output = done(command.args(["ls", "--json", "--control"]).arg(&self.control));
        let mut servers: Vec<Listing> = serde_json::from_slice(&output.stdout).expect("a list in JSON");
        servers.remove(0).tenants
    }

    /// The worker of the first client, which may be served before it is listed.
    pub fn worker(&self) -> u32 {
        wait_until("a client is listed", || !self.tenants().is_empty());
        self.tenants()[0].pid
    }

    pub fn tenant(&self, name: &str) -> Option<Status> {
        self.tenants().into_iter().find(|t| t.name.starts_with(name))
    }

    /// Ends the server; what it logged.
    pub fn end(mut self) -> String {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ran");
        said(&mut self.child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already, unless the test failed.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

pub fn said(child: &mut Child) -> String {
    let mut log = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut log).expect("a log in UTF-8");
    }
    log
}

/// A hostile client that runs until it is told to end.
pub struct Hostile {
    child: Child,
    _out: BufReader<ChildStdout>,
}

impl Hostile {
    pub fn start(server: &Server, what: &str, says: &str) -> Hostile {
        let mut command = server.escape(&[what]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), says);
        Hostile { child, _out: out }
    }

    pub fn end(mut self) -> ExitStatus {
        drop(self.child.stdin.take());
        self.child.wait().expect("it ends")
    }
}

/// The lines 'what: number' that a hostile program says.
pub fn numbers(output: &Output) -> Vec<(String, i64)> {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = |line: &str| {
        let (what, number) = line.rsplit_once(": ").unwrap_or_else(|| panic!("{line}"));
        (what.to_owned(), number.parse().unwrap_or_else(|_| panic!("{line}")))
    };
    text.lines().map(line).collect()
}

pub fn ping(client: &Connection) {
    client.call(&Ping {}, |_, _| ()).expect("an answer");
}
