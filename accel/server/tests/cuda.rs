// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CUDA programs on the test device itself and forwarded, of which all that they print is compared.

mod rig;
#[path = "rig/cuda.rs"]
mod rig_cuda;

use rig::{Server, compile_for, folder, run};
use rig_cuda::{client, device, serve};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tombolo_accel_server::control::{self, Listing, Request};

/// NVIDIA's compiler and runtime.
fn toolkit() -> &'static Path {
    static TOOLKIT: OnceLock<PathBuf> = OnceLock::new();
    TOOLKIT.get_or_init(|| {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/cuda-toolkit");
        let output = run(Command::new(script).arg("nvcc"));
        PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
    })
}

fn paths(first: &Path) -> String {
    format!("{}:{}", first.display(), toolkit().join("lib").display())
}

/// A program of accel/tests/cuda, compiled.
fn compiled(name: &str) -> PathBuf {
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/cuda")).join(name);
    let program = folder().join(format!("cuda-{name}")).with_extension("");
    let (toolkit, client) = (toolkit(), client());
    let lib = |folder: &Path| format!("-L{}", folder.display());
    compile_for(&program, |fresh| {
        let mut command;
        if name.ends_with(".cu") {
            command = Command::new(toolkit.join("bin/nvcc"));
            command.args(["-std=c++17", "-cudart", "shared", "-arch=compute_80", "-code=compute_80"]);
            command.arg(lib(&toolkit.join("lib")));
        } else {
            command = Command::new("cc");
            command.arg(format!("-I{}", toolkit.join("include").display()));
        }
        command.arg(&source).arg("-o").arg(fresh);
        if !name.ends_with(".cu") {
            command.args([lib(client).as_str(), "-l:libcuda.so.1"]);
        }
        command
    });
    program
}

fn directly(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", paths(device()));
    command
}

fn forwarded(server: &Server, program: &Path) -> Command {
    let mut command = server.program(program);
    command.env("LD_LIBRARY_PATH", paths(client()));
    command
}

fn text(command: &mut Command) -> String {
    String::from_utf8(run(command).stdout).expect("text")
}

#[test]
fn programs_of_nvcc_print_forwarded_what_they_print_on_the_device() {
    let server = serve("cuda-program", &[]);
    for (name, last) in [
        ("vector_add.cu", "done\n"),
        ("gemm.cu", "ok\n"),
        ("reduce.cu", "ok\n"),
        ("groups.cu", "ok\n"),
        ("functions.cu", "ok\n"),
        ("graphs.cu", "ok\n"),
        ("copies.cu", "ok\n"),
        ("streams.cu", "ok\n"),
        ("pools.cu", "ok\n"),
    ] {
        let program = compiled(name);
        let expected = text(&mut directly(&program));
        assert!(expected.ends_with(last), "{name}: {expected}");
        assert_eq!(text(&mut forwarded(&server, &program)), expected, "{name}");
    }
    server.end();
}

#[test]
fn a_client_has_its_quota_and_no_memory_of_others() {
    let (server, program) = (serve("cuda-quota", &["--memory", "64"]), compiled("quota.c"));
    let printed = text(forwarded(&server, &program).arg("16"));
    let expected = "before cuInit: CUDA_ERROR_NOT_INITIALIZED\n\
        without a context: CUDA_ERROR_INVALID_CONTEXT\n\
        64 of 64 MiB\n\
        4 allocations, 0 MiB left, then CUDA_ERROR_OUT_OF_MEMORY\n\
        freed: CUDA_SUCCESS\n\
        freed twice: CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE\n\
        inside: CUDA_ERROR_INVALID_VALUE\n\
        beyond the end: CUDA_ERROR_INVALID_VALUE\n\
        memory of this process: CUDA_ERROR_INVALID_VALUE\n\
        nothing: CUDA_SUCCESS\n\
        found: 1 0\n\
        found: 1 1\n\
        not forwarded: CUDA_ERROR_NOT_SUPPORTED\n\
        released: CUDA_ERROR_INVALID_CONTEXT\n";
    assert_eq!(printed, expected);
    // What it took came back with it.
    assert_eq!(text(forwarded(&server, &program).arg("16")), expected);
    assert!(server.end().contains("a client's quota is reached"));
}

#[test]
fn opencl_and_cuda_are_served_at_once_and_a_server_without_cuda_says_so() {
    let (server, program) = (Server::start("cuda-none", &[]), compiled("quota.c"));
    let output = forwarded(&server, &program).arg("1").output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("libcuda.so.1 was not found"), "{said}");
    server.end();
    let server = serve("cuda-both", &[]);
    let both = [forwarded(&server, &program).arg("1").output(), run_opencl(&server)];
    assert!(both.into_iter().all(|output| output.expect("it runs").status.success()));
    server.end();
}

fn run_opencl(server: &Server) -> std::io::Result<std::process::Output> {
    server.program(&rig::compiled("sizes")).output()
}

/// The processes that serve clients of a server.
fn workers(server: &Server) -> Vec<String> {
    let listing = control::ask::<Listing>(&server.control, &Request::Ls).expect("it answers");
    listing.tenants.iter().map(|tenant| tenant.pid.to_string()).collect()
}

/// Runs a program up to its line `ready`; what it says is read from the second.
fn until_ready(command: &mut Command) -> (Child, BufReader<ChildStdout>) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut said = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    while line != "ready\n" {
        assert!(line.is_empty() || line.ends_with(": CUDA_SUCCESS\n"), "{line}");
        line.clear();
        assert!(said.read_line(&mut line).expect("text") > 0, "it ended");
    }
    (child, said)
}

/// Lets it go on; the codes that its calls answered.
fn rest((mut child, mut said): (Child, BufReader<ChildStdout>)) -> Vec<String> {
    child.stdin.take().expect("a pipe").write_all(b"go\n").expect("it reads");
    let mut text = String::new();
    said.read_to_string(&mut text).expect("text");
    assert!(child.wait().expect("it ends").success());
    text.lines().map(|line| line.rsplit(' ').next().expect("a word").to_owned()).collect()
}

#[test]
fn a_client_whose_worker_died_has_the_error_of_a_fault_from_then_on_and_the_next_one_works() {
    let (server, program) = (serve("cuda-sticky", &[]), compiled("sticky.c"));
    let program = || until_ready(&mut forwarded(&server, &program));
    let client = program();
    run(Command::new("kill").arg("-KILL").args(workers(&server)));
    assert_eq!(rest(client), ["CUDA_ERROR_LAUNCH_FAILED"; 9]);
    assert_eq!(rest(program()), ["CUDA_SUCCESS"; 9]);
    server.end();
}

#[test]
fn a_client_that_dies_in_a_capture_leaves_nothing() {
    let (server, program) = (serve("cuda-capture", &["--memory", "1"]), compiled("sticky.c"));
    let (mut client, _) = until_ready(forwarded(&server, &program).arg("capture"));
    client.kill().expect("it runs");
    client.wait().expect("it ends");
    let begun = Instant::now();
    while !workers(&server).is_empty() {
        assert!(begun.elapsed() < rig::TIMEOUT, "its worker stays");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(rest(until_ready(&mut forwarded(&server, &program))), ["CUDA_SUCCESS"; 9]);
    server.end();
}
