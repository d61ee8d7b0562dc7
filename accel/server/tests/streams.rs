// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long transfers, piece by piece: as on the native driver, and with clients and workers that end, or stop, in the middle of one.

mod rig;

use rig::{Server, compiled, native, run};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};
use tombolo_accel_spec::opencl as wire;

/// Longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(300);

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: integers only; the process is a child of this one, or of a server that is, and was not waited for.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0, "{}", std::io::Error::last_os_error());
}

/// A client in the middle of its transfers.
fn busy(server: &Server) -> (Child, BufReader<ChildStdout>) {
    let mut command = server.program(&compiled("streams"));
    let piped = command.arg("forever").stdout(Stdio::piped()).stderr(Stdio::null());
    let mut client = piped.spawn().expect("it starts");
    let mut line = String::new();
    let mut out = BufReader::new(client.stdout.take().expect("piped"));
    out.read_line(&mut line).expect("a line");
    assert_eq!(line, "begun\n");
    let calls = server.ls()[0].tenants[0].calls;
    wait_until("transfers", || server.ls()[0].tenants[0].calls > calls + 100);
    (client, out)
}

/// Ticks of processor time of a process.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    [11, 12].iter().map(|i| fields[*i].parse::<u64>().expect("a number")).sum()
}

#[test]
fn long_transfers_answer_as_on_the_native_driver_and_go_piece_by_piece() {
    let program = compiled("streams");
    let server = Server::start("streams", &[]);
    let text = |output: &std::process::Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = text(&run(&mut native(&program)));
    assert!(expected.starts_with("in order -1\n") && expected.ends_with("beyond -30 -30\n"), "{expected}");
    assert_eq!(text(&run(&mut server.program(&program))), expected);
    let mut trace = server.program(env!("CARGO_BIN_EXE_tombolo-accel").as_ref());
    let trace =
        trace.args(["--json", "trace", "--", "sh", "-c", "exec \"$0\" >/dev/null"]).arg(&program).output();
    let trace: serde_json::Value = serde_json::from_slice(&trace.expect("it runs").stdout).expect("JSON");
    let functions = trace[0]["functions"].as_array().expect("functions");
    let calls = |name: &str| {
        functions.iter().find(|f| f["name"] == name).map_or(0, |f| f["calls"].as_u64().unwrap_or(0))
    };
    assert!(calls("tomboloStreamPiece") > 3 * calls("tomboloEnqueueStream"), "{trace}");
    server.end();
}

#[test]
fn a_client_that_is_killed_in_a_transfer_leaves_no_worker() {
    let server = Server::start("streams-killed", &[]);
    for _ in 0..5 {
        let (mut client, _out) = busy(&server);
        client.kill().expect("it runs");
        client.wait().expect("it ran");
        wait_until("its worker ends", || server.ls()[0].tenants.is_empty());
    }
    server.end();
}

#[test]
fn a_client_that_is_suspended_in_a_transfer_costs_nothing_and_goes_on_later() {
    let server = Server::start("streams-suspended", &[]);
    let (mut client, _out) = busy(&server);
    let worker = server.ls()[0].tenants[0].pid;
    for _ in 0..5 {
        signal(client.id(), libc::SIGSTOP);
        let mut before = ticks(worker);
        wait_until("its worker rests", || {
            std::thread::sleep(Duration::from_millis(100));
            std::mem::replace(&mut before, ticks(worker)) == ticks(worker)
        });
        let calls = server.ls()[0].tenants[0].calls;
        signal(client.id(), libc::SIGCONT);
        wait_until("it goes on", || server.ls()[0].tenants[0].calls > calls + 100);
    }
    assert!(client.try_wait().expect("a child").is_none(), "it goes on until it is killed");
    client.kill().expect("it runs");
    client.wait().expect("it ran");
    server.end();
}

#[test]
fn a_client_whose_worker_is_killed_in_a_transfer_is_told_so() {
    let server = Server::start("streams-orphan", &[]);
    for _ in 0..5 {
        let (mut client, _out) = busy(&server);
        signal(server.ls()[0].tenants[0].pid, libc::SIGKILL);
        assert_eq!(client.wait().expect("it ends").code(), Some(1));
    }
    server.end();
}

#[test]
fn a_transfer_behind_a_kernel_that_fails_comes_back() {
    let server = Server::start("streams-failing", &[]);
    let mut client =
        server.program(&compiled("streams")).arg("failing").stdout(Stdio::null()).spawn().expect("it starts");
    // PoCL 3.1 dies of it where the client is the driver's own process, and so may its worker.
    wait_until("the program ends", || client.try_wait().expect("a child").is_some());
    server.end();
}

#[test]
fn a_piece_of_no_transfer_is_refused_and_its_ticket_says_so() {
    let server = Server::start("streams-pieces", &[]);
    let client = server.client();
    for (data, size) in [(4096, 4096), (0, 4096), (u64::MAX, 1), (4096, u64::MAX)] {
        let status = Arc::new(AtomicI32::new(0));
        let told = status.clone();
        let (ticket, redeemed) = client.awaited(Box::new(move |_, code| told.store(code, Ordering::Relaxed)));
        client.post(&wire::StreamPiece { stream: 7, data, at: 0, size, ticket }).expect("sent");
        client.redeemed(&redeemed).expect("an answer");
        assert_eq!(status.load(Ordering::Relaxed), -30);
    }
    server.end();
}
