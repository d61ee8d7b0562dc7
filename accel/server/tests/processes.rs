// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A server, its workers and programs as processes of this machine, with PoCL as the native driver (packages/accel.list).

mod rig;

use rig::{Numbers, Server, TIMEOUT, compiled, folder, library, native, run};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tombolo_accel_client::connection::Connection;
use tombolo_accel_spec::common::Ping;
use tombolo_accel_spec::opencl as wire;
use tombolo_calls::hello::Hello;
use tombolo_calls::{Error, Link, process, send};

/// The program that makes calls and prints what they answer.
fn calls() -> &'static Path {
    static CALLS: OnceLock<PathBuf> = OnceLock::new();
    CALLS.get_or_init(|| compiled("calls"))
}

fn calls_answer_as_on_the_native_driver(server: Server) {
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
fn every_call_answers_as_on_the_native_driver() {
    calls_answer_as_on_the_native_driver(Server::start("calls", &[]));
}

#[test]
fn what_a_window_has_no_room_for_is_mapped_and_copied_all_the_same() {
    // The program maps 9 MB, and its longest transfers have 40.
    calls_answer_as_on_the_native_driver(Server::start("narrow", &["--window", "8"]));
}

#[test]
fn odd_but_legal_programs_print_what_they_print_natively() {
    let (server, program) = (Server::start("odd", &[]), compiled("odd"));
    let expected = run(&mut native(&program)).stdout;
    let forwarded = run(&mut server.program(&program)).stdout;
    assert!(expected.ends_with(b"\nends\n"), "{}", String::from_utf8_lossy(&expected));
    assert_eq!(String::from_utf8_lossy(&forwarded), String::from_utf8_lossy(&expected));
    server.end();
}

#[test]
fn clinfo_says_the_same_but_for_what_only_a_program_beside_the_driver_can_use() {
    let server = Server::start("clinfo", &[]);
    let said = |mut command: Command| {
        String::from_utf8_lossy(&run(&mut command).stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let (mut expected, forwarded) =
        (said(native(Path::new("clinfo"))), said(server.program(Path::new("clinfo"))));
    // PoCL of Debian 13 has fine-grained system memory. Functions of the program, and extensions with functions that have no declaration, are offered
    // natively only (accel/README.md).
    for line in expected.iter_mut() {
        if ["Fine-grained system sharing", "Run native kernels"].iter().any(|of| line.contains(of)) {
            *line = line.replace("Yes", "No");
        }
    }
    // With three lines of what they can.
    if let Some(at) = expected.iter().position(|line| line.contains("Command buffer capabilities")) {
        expected.drain(at..at + 4);
    }
    let withheld = ["cl_khr_command_buffer", "cl_pocl_content_size"];
    let rest = |lines: Vec<String>| -> Vec<String> {
        let words = |line: &String| {
            line.split_whitespace().filter(|w| !w.starts_with("cl_")).collect::<Vec<_>>().join(" ")
        };
        lines.iter().filter(|l| !withheld.iter().any(|w| l.trim_start().starts_with(w))).map(words).collect()
    };
    assert_eq!(rest(expected), rest(forwarded));
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
    let program = compiled("stale");
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
    assert!(out.contains("5000003 bytes the same: 1"), "{out}");
    let log = server.end();
    assert!(log.contains("a client's quota is reached"), "{log}");
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

fn ping(client: &Connection) {
    client.call(&Ping {}, |_, _| ()).expect("an answer");
}

#[test]
fn ls_tells_who_is_served_and_what_each_uses() {
    let server = Server::start("ls", &[]);
    let (busy, idle) = (server.client(), server.client());
    (0..5).for_each(|_| ping(&busy));
    busy.post(&Ping {}).expect("sent");
    (0..2).for_each(|_| ping(&idle));
    ping(&busy);
    let mut listing = server.ls().remove(0);
    assert_eq!(listing.pid, server.child.id());
    assert!(!listing.draining);
    listing.tenants.sort_by_key(|t| t.calls);
    let found: Vec<_> =
        listing.tenants.iter().map(|t| (t.name.as_str(), t.calls, t.waits, t.weight)).collect();
    assert_eq!(found, [("test", 2, 2, 100), ("test", 7, 6, 100)]);
    drop(idle);
    let begun = Instant::now();
    while server.ls()[0].tenants.len() != 1 {
        assert!(begun.elapsed() < TIMEOUT, "a client that left is still listed");
    }
    server.end();
}

#[test]
fn a_client_beyond_its_rate_waits_for_its_turn_and_no_other_does() {
    let free = folder().join(format!("free-{}.sock", std::process::id()));
    let server =
        Server::start("rate", &["--rate", "100", "--listen", &format!("unix:{},rate=0", free.display())]);
    let slow = server.client();
    let held = |name: &str| {
        let tenants = server.ls().remove(0).tenants;
        tenants.iter().find(|t| t.name == name).expect("listed").held_seconds
    };
    // On a busy machine it may wait so long for a processor between two requests that none is beyond its rate; so until one is.
    let begun = Instant::now();
    while held("test") == 0.0 {
        assert!(begun.elapsed() < TIMEOUT, "a client beyond its rate is never held");
        let begun = Instant::now();
        (0..40).for_each(|_| slow.post(&Ping {}).expect("sent"));
        ping(&slow);
        // A tenth of a second's worth is there at once.
        assert!(begun.elapsed() > Duration::from_millis(280), "{:?}", begun.elapsed());
    }
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "free".into() };
    let fast = Connection::new(process::connect(&free, &hello).expect("connects")).expect("a connection");
    (0..40).for_each(|_| ping(&fast));
    assert_eq!(held("free"), 0.0);
    server.end();
}

/// The niceness of a process.
fn niceness(pid: u32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    fields[16].parse().expect("a number")
}

#[test]
fn a_client_of_a_quarter_of_the_weight_is_scheduled_with_a_quarter_of_the_weight() {
    let server = Server::start("weight", &["--weight", "25"]);
    let client = server.client();
    ping(&client);
    let tenant = server.ls().remove(0).tenants.remove(0);
    // 1.25 to the power of 6 is 3.8.
    assert_eq!((tenant.weight, niceness(tenant.pid) - niceness(server.child.id())), (25, 6));
    server.end();
}

/// Does with a socket what a hostile client could do.
fn misbehave(mut stream: impl Read + Write, half_close: impl Fn(), n: u64) {
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: format!("crowd {n}") };
    let mut said = Vec::new();
    hello.send(&mut said).expect("written to memory");
    let mut numbers = Numbers(n + 1);
    // The server may be faster, and hang up.
    let _hung_up = match n % 6 {
        0 => Ok(()),
        1 => stream.write_all(&said[..said.len() / 2]),
        2 => stream.write_all(&(0..200).map(|_| numbers.next() as u8).collect::<Vec<u8>>()),
        3 => stream.write_all(&said).map(|()| half_close()),
        4 => stream.write_all(&said).and_then(|()| stream.read(&mut [0; 8]).map(drop)),
        _ => stream
            .write_all(&said)
            .and_then(|()| stream.write_all(&(0..5000).map(|_| numbers.next() as u8).collect::<Vec<u8>>())),
    };
}

#[test]
fn two_hundred_clients_at_once_however_they_behave_leave_nothing() {
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
    let server = Server::start("crowd", &["--listen", &format!("tcp:{tcp}")]);
    std::thread::scope(|scope| {
        for n in 0..100 {
            scope.spawn(move || {
                let socket = std::net::TcpStream::connect(tcp).expect("it listens");
                misbehave(&socket, || drop(socket.shutdown(std::net::Shutdown::Write)), n);
            });
            let path = &server.socket;
            scope.spawn(move || {
                let socket = std::os::unix::net::UnixStream::connect(path).expect("it listens");
                misbehave(&socket, || drop(socket.shutdown(std::net::Shutdown::Write)), n);
            });
        }
    });
    let begun = Instant::now();
    while !server.ls()[0].tenants.is_empty() {
        assert!(begun.elapsed() < TIMEOUT, "clients that left are still served");
        std::thread::sleep(Duration::from_millis(20));
    }
    ping(&server.client());
    let log = server.end();
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn a_server_without_descriptors_rests_and_serves_when_it_has_some_again() {
    let server = Server::start("descriptors", &[]);
    let pid = server.child.id();
    let limit = |n: u64| {
        let limit = libc::rlimit { rlim_cur: n, rlim_max: 1024 };
        // SAFETY: the structure lives during the call; nothing is asked for.
        let r = unsafe { libc::prlimit(pid as i32, libc::RLIMIT_NOFILE, &limit, std::ptr::null_mut()) };
        assert_eq!(r, 0, "{}", std::io::Error::last_os_error());
    };
    // It has the standard ones already.
    limit(3);
    let connect = |path: &Path| std::os::unix::net::UnixStream::connect(path).expect("it listens");
    let socket = connect(&server.socket);
    drop(connect(&server.control));
    // A server that doesn't rest says so some hundred thousand times meanwhile.
    std::thread::sleep(Duration::from_millis(2500));
    limit(1024);
    drop(socket);
    ping(&server.client());
    let log = server.end();
    for lost in ["a connection was lost before it began", "a command could not be answered"] {
        let times = log.matches(lost).count();
        assert!((1..20).contains(&times), "{times}: {log}");
    }
}

#[test]
fn a_server_whose_program_was_replaced_while_it_runs_still_serves_who_comes() {
    let program = folder().join(format!("tombolo-accel-{}", std::process::id()));
    // Another name, not a copy: what was open for writing while another test forked can't be executed.
    std::fs::hard_link(env!("CARGO_BIN_EXE_tombolo-accel"), &program).expect("another name");
    let server = Server::of(&program, "replaced", &[]);
    let newer = program.with_extension("new");
    std::fs::write(&newer, "of another release").expect("written");
    std::fs::rename(&newer, &program).expect("replaced");
    ping(&server.client());
    server.end();
    std::fs::remove_file(&program).expect("removed");
}

#[test]
fn a_server_that_drains_keeps_its_clients_and_its_successor_listens_at_once() {
    let mut old = Server::start("drain", &[]);
    let client = old.client();
    ping(&client);
    run(Command::new(env!("CARGO_BIN_EXE_tombolo-accel")).arg("drain").arg("--control").arg(&old.control));
    let new = Server::start("drain", &[]);
    let newcomer = new.client();
    (0..3).for_each(|_| ping(&newcomer));
    ping(&client);
    let servers = new.ls();
    let seen: Vec<_> = servers.iter().map(|s| (s.pid, s.draining, s.tenants.len())).collect();
    assert_eq!(seen, [(new.child.id(), false, 1), (old.child.id(), true, 1)]);
    // A stopped server is listed without its tenants, and the list doesn't wait for it.
    let signal = |number| {
        // SAFETY: numbers.
        assert_eq!(unsafe { libc::kill(old.child.id() as i32, number) }, 0);
    };
    signal(libc::SIGSTOP);
    let mut ls = Command::new(env!("CARGO_BIN_EXE_tombolo-accel"));
    let asked = Instant::now();
    let table = ls.arg("ls").arg("--control").arg(&new.control).output().expect("it runs");
    let (servers, took) = (new.ls(), asked.elapsed());
    signal(libc::SIGCONT);
    let (table, line) =
        (String::from_utf8_lossy(&table.stdout), format!("server {}, draining: ", old.child.id()));
    assert!(table.contains(&line) && table.contains("gives no answer"), "{table}");
    let seen: Vec<_> = servers.iter().map(|s| (s.pid, s.draining, s.trouble.is_some())).collect();
    assert_eq!(seen, [(new.child.id(), false, false), (old.child.id(), true, true)]);
    assert!(took < TIMEOUT, "{took:?}");
    drop(client);
    let ended = old.child.wait().expect("it ends when its last client has gone");
    assert!(ended.success(), "{ended}");
    ping(&newcomer);
    assert_eq!(new.ls().len(), 1);
    new.end();
}

/// A server that is the first process of its PID namespace, as in a container without an init.
fn in_container(name: &str) -> Server {
    let mut container = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        container.args(["--user", "--map-current-user"]);
    }
    container.args(["--pid", "--fork", "--kill-child", "--mount-proc", env!("CARGO_BIN_EXE_tombolo-accel")]);
    container.env_remove("OCL_ICD_VENDORS");
    Server::run(container, name, &[])
}

#[test]
fn a_server_in_a_container_serves_clients_outside_of_it() {
    let server = in_container("container");
    let client = server.client();
    ping(&client);
    drop(client);
    server.end();
}

#[test]
fn a_server_that_is_the_first_process_of_a_container_ends_when_it_is_asked_to() {
    let mut server = in_container("asked");
    let unshare = server.child.id();
    let first =
        std::fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).expect("its child");
    let first = rustix::process::Pid::from_raw(first.trim().parse().expect("one process")).expect("not 0");
    rustix::process::kill_process(first, rustix::process::Signal::TERM).expect("it lives");
    let begun = Instant::now();
    while server.child.try_wait().expect("waited for").is_none() {
        assert!(begun.elapsed() < TIMEOUT, "the server doesn't end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn prometheus_gets_the_figures_of_each_client() {
    let address =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
    let server = Server::start("metrics", &["--metrics", &address.to_string()]);
    let client = server.client();
    (0..4).for_each(|_| ping(&client));
    let mut stream = std::net::TcpStream::connect(address).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    assert!(text.starts_with("HTTP/1.1 200 OK") && text.contains("tombolo_accel_tenants 1\n"), "{text}");
    let pid = server.ls()[0].tenants[0].pid;
    let calls = format!("tombolo_accel_calls_total{{pid=\"{pid}\",name=\"test\",via=\"unix:");
    assert!(text.lines().any(|l| l.starts_with(&calls) && l.ends_with(" 4")), "{text}");
    server.end();
}

#[test]
fn trace_tells_calls_and_waits_per_function_and_passes_the_programs_output_and_code_on() {
    let server = Server::start("trace", &[]);
    let trace = |json: bool, program: &[&str]| {
        let mut command = server.program(Path::new(env!("CARGO_BIN_EXE_tombolo-accel")));
        if json {
            command.arg("--json");
        }
        command.args(["trace", "--"]).args(program).output().expect("it runs")
    };
    let table = trace(false, &["clinfo", "-l"]);
    let (out, err) = (String::from_utf8_lossy(&table.stdout), String::from_utf8_lossy(&table.stderr));
    assert!(out.contains("Platform #0"), "{out}");
    let snapshot = err.lines().find(|l| l.starts_with("snapshot ")).unwrap_or_else(|| panic!("{err}"));
    let numbers: Vec<&str> = snapshot.split_whitespace().collect();
    assert_eq!(numbers[1..3], ["1", "1"], "{err}");
    assert!(err.starts_with("clinfo:") && err.lines().last().is_some_and(|l| l.starts_with("all ")), "{err}");
    let failing = trace(true, &["sh", "-c", "clinfo -l >/dev/null; exit 7"]);
    assert_eq!(failing.status.code(), Some(7));
    let processes: serde_json::Value = serde_json::from_slice(&failing.stdout).expect("JSON");
    assert_eq!(processes[0]["program"], "clinfo");
    let none = trace(false, &["true"]);
    assert!(String::from_utf8_lossy(&none.stderr).contains("sent nothing to an accelerator server"));
    server.end();
}

#[test]
fn trace_writes_to_no_file_or_link_that_is_there_already() {
    let server = Server::start("link", &[]);
    let above = folder().join(format!("link-{}", std::process::id()));
    std::fs::create_dir(&above).expect("a folder");
    let theirs = above.join("theirs");
    std::fs::write(&theirs, "as it was").expect("written");
    let trace = "ln -s theirs tombolo-trace-$$; exec \"$0\" trace -- clinfo -l";
    let mut command = server.program(Path::new("sh"));
    command
        .args(["-c", trace, env!("CARGO_BIN_EXE_tombolo-accel")])
        .env("TMPDIR", &above)
        .current_dir(&above);
    let err = String::from_utf8_lossy(&run(&mut command).stderr).into_owned();
    assert!(err.contains("snapshot "), "{err}");
    // A process that ends after its 'trace' may find anything there.
    let link = above.join("link");
    std::os::unix::fs::symlink(&theirs, &link).expect("a link");
    for path in [&link, &above.join("none")] {
        run(server.program(Path::new("clinfo")).arg("-l").env("TOMBOLO_ACCEL_TRACE", path));
    }
    assert_eq!(std::fs::read_to_string(&theirs).expect("it is there"), "as it was");
    let left = std::fs::read_dir(&above).expect("a folder").count();
    assert_eq!(left, 3, "the file, and two links to it");
    server.end();
    std::fs::remove_dir_all(&above).expect("removed");
}

#[test]
fn commands_without_a_server_and_limits_without_sense_say_what_was_expected() {
    let accel = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_tombolo-accel")).args(arguments).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for command in ["ls", "drain"] {
        let err = accel(&[command, "--control", "/nonexistent/control"]);
        assert!(err.contains("no accelerator server answers at /nonexistent/control"), "{err}");
    }
    let err = accel(&["serve", "--listen", "unix:/nonexistent/s,speed=3"]);
    assert!(err.contains("speed=3: expected memory=MIB"), "{err}");
}
