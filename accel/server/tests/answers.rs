// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Answers to a program in cases where native and forwarded calls could differ, and refusals of a hostile one.

mod rig;

use rig::{Server, TIMEOUT, compiled, folder, native, run};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use tombolo_accel_spec::common::Snapshot;
use tombolo_accel_spec::opencl as wire;
use tombolo_accel_spec::wire::{Encoder, Record, Request, WANTS_REPLY};
use tombolo_calls::hello::Hello;
use tombolo_calls::{Link, send, stream};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn is_same(expected: &[u8], forwarded: &[u8]) {
    let (expected, forwarded) = (text(expected), text(forwarded));
    for (e, f) in expected.lines().zip(forwarded.lines()) {
        assert_eq!(e, f);
    }
    assert_eq!(expected.lines().count(), forwarded.lines().count());
}

#[test]
fn maps_shared_memory_printing_and_properties_answer_as_on_the_native_driver() {
    let (server, program) = (Server::start("answers", &[]), compiled("answers"));
    is_same(&run(&mut native(&program)).stdout, &run(&mut server.program(&program)).stdout);
    let own = run(server.program(&program).arg("own"));
    let natively = native(&program).arg("own").output().expect("it runs");
    // The PoCL of Debian 13 dies of a fill of a program's own memory.
    if natively.status.signal() != Some(libc::SIGSEGV) {
        is_same(&natively.stdout, &own.stdout);
    }
    server.end();
}

#[test]
fn each_access_by_the_host_is_allowed_and_refused_as_on_the_native_driver() {
    // Of a MiB, no buffer fits the window of the second server.
    for (name, window, size) in [("access", "256", "4096"), ("access-small", "1", "1048576")] {
        let (server, program) = (Server::start(name, &["--window", window]), compiled("access"));
        let natively = run(native(&program).arg(size)).stdout;
        is_same(&natively, &run(server.program(&program).arg(size)).stdout);
        server.end();
    }
}

#[test]
fn no_property_offers_what_is_refused() {
    let (server, program) = (Server::start("offers", &[]), compiled("offers"));
    for mut command in [native(&program), server.program(&program)] {
        assert_eq!(text(&run(&mut command).stdout), "some extensions\n", "{command:?}");
    }
    server.end();
}

#[test]
fn what_is_no_object_never_reaches_the_driver_as_one() {
    let server = Server::start("hostile-arguments", &[]);
    let out = text(&run(&mut server.program(&compiled("hostile"))).stdout);
    let each = "built 0\n\
        argument 0: -38 -38 -38 -38 -38 0\n\
        argument 1: -38 -38 -38 -38 -38 0\n\
        argument 2: -41 -41 -41 0 -41 0\n\
        argument 3: 0 0 0 0 0 0\n\
        argument 4: -38 -38 -38 -38 -38 0\n\
        argument 5: -38 -38 -38 -38 -38 0\n\
        finish 0\n";
    assert_eq!(out, each.repeat(2));
    server.end();
}

#[test]
fn a_process_that_forks_keeps_its_connection_whatever_its_child_does() {
    let (server, program) = (Server::start("fork", &[]), compiled("fork"));
    for does in ["releases", "exits", "uses", "asks again"] {
        let output = run(server.program(&program).arg(does));
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(out, "before 0\nchild 0\nafter 0\nafter 0\nafter 0\n", "a child that {does}: {err}");
        assert_eq!(err.contains("was forked from"), does == "uses", "a child that {does}: {err}");
    }
    server.end();
}

#[test]
fn a_value_is_not_read_beyond_what_the_kernel_takes() {
    let (server, program) = (Server::start("sizes", &[]), compiled("sizes"));
    let expected = text(&run(&mut native(&program)).stdout);
    assert!(expected.contains("argument 4: -51 -51 -51 0 -51 -51\n"), "{expected}");
    assert_eq!(text(&run(&mut server.program(&program)).stdout), expected);
    server.end();
}

#[test]
fn what_one_thread_frees_of_shared_memory_another_can_have_at_once() {
    let (server, program) = (Server::start("svmfree", &[]), compiled("svmfree"));
    assert_eq!(text(&run(&mut server.program(&program)).stdout), "missed 0\n");
    server.end();
}

#[test]
fn shared_memory_is_announced_where_there_is_some() {
    let tcp = format!("tcp:{}", free_address());
    let (server, program) = (Server::start("svm", &["--listen", &tcp]), compiled("svm"));
    let expected = text(&run(&mut native(&program)).stdout);
    assert!(expected.contains("allocated 1 1\n"), "{expected}");
    assert_eq!(text(&run(&mut server.program(&program)).stdout), expected);
    let by_tcp = server.program(&program).env("TOMBOLO_ACCEL", &tcp).output().expect("it runs");
    let told = text(&by_tcp.stdout);
    assert!(told.starts_with("announced 0\n") && told.ends_with("allocated 0 0\n"), "{told}");
    server.end();
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port")
}

#[test]
fn a_worker_ends_with_its_client_though_a_child_of_that_lives_on() {
    let server = Server::start("lingers", &[]);
    let tcp = format!("tcp:{}", free_address());
    let by_tcp = Server::start("lingers-tcp", &["--listen", &tcp]);
    for (server, address) in [(&server, None), (&by_tcp, Some(&tcp))] {
        let mut program = server.program(&compiled("fork"));
        program.args(["lingers"]).stdin(Stdio::piped()).stdout(Stdio::null());
        if let Some(address) = address {
            program.env("TOMBOLO_ACCEL", address);
        }
        let mut client = program.spawn().expect("it starts");
        // Its child reads this until it ends.
        let child_lives = client.stdin.take().expect("piped");
        assert!(client.wait().expect("it ends").success());
        let begun = Instant::now();
        while !server.ls()[0].tenants.is_empty() {
            assert!(begun.elapsed() < TIMEOUT, "the worker outlives its client");
        }
        drop(child_lives);
    }
    server.end();
    by_tcp.end();
}

#[test]
fn whatever_waits_tells_of_a_command_that_failed_before() {
    let server = Server::start("late", &["--memory", "1"]);
    let out = text(&run(&mut server.program(&compiled("late"))).stdout);
    assert_eq!(
        out,
        "warm then 0 7\n\
         blocking read -4 then 0 7\n\
         finish -4 then 0 7\n\
         its event -4 then 0 7\n\
         its status -4, finish -4 then 0 7\n\
         read 0, waited -4, data -1 then 0 7\n\
         marker 0, waited -4 then 0 7\n\
         map 0 -4 then 0 7\n\
         fill 0, finish -4 then 0 7\n"
    );
    server.end();
}

/// Resident bytes of a process.
fn resident(pid: u32) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{pid}/statm")).expect("it lives");
    pages.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).expect("a number") * 4096
}

fn post<'a, R: Record<'a>>(link: &mut Link, record: &R, flags: u32) {
    let mut bytes = Request { call: R::ID, flags, tag: 1 }.to_bytes().to_vec();
    record.encode(&mut Encoder::new(&mut bytes));
    send(&mut *link.tx, &*link.room, &[&bytes]).and_then(|()| link.tx.publish()).expect("sent");
}

#[test]
fn a_client_that_reads_nothing_over_tcp_costs_no_more_memory_than_its_window() {
    const BUFFER: u64 = 32 << 20;
    const READS: u64 = 60;
    let address = free_address();
    let server = Server::start("greedy", &["--listen", &format!("tcp:{address}")]);
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "greedy".into() };
    let socket = stream::tcp(&address.to_string()).expect("it listens");
    let mut link = stream::connect(socket, &hello).expect("connects");
    // A platform and its device come first; then what the client makes.
    let [device, context, queue, buffer] = [2, 3, 4, 5];
    post(&mut link, &Snapshot {}, WANTS_REPLY);
    let devices = vec![device];
    let made = wire::CreateContext {
        platform: 0,
        properties: vec![].into(),
        devices: devices.into(),
        notify: 0,
        new: context,
    };
    post(&mut link, &made, 0);
    post(&mut link, &wire::CreateCommandQueue { context, device, properties: 0, new: queue }, 0);
    let properties = vec![];
    let made = wire::CreateBuffer {
        context,
        flags: 0,
        size: BUFFER,
        properties: properties.into(),
        home: 0,
        svm: 0,
        data: 0,
        ticket: 0,
        new: buffer,
    };
    post(&mut link, &made, 0);
    for ticket in 1..=READS {
        let read = wire::EnqueueReadBuffer {
            command_queue: queue,
            buffer,
            blocking_read: 0,
            offset: 0,
            size: BUFFER,
            data: 4096,
            ticket,
            waits: vec![].into(),
            event: 0,
        };
        post(&mut link, &read, 0);
    }
    post(&mut link, &wire::Finish { command_queue: queue }, WANTS_REPLY);
    let begun = Instant::now();
    let tenant = loop {
        let tenant = server.ls().remove(0).tenants.remove(0);
        // The last request has been carried out, so all reads have ended.
        if tenant.waits >= 2 {
            break tenant;
        }
        assert!(begun.elapsed() < TIMEOUT, "{tenant:?}");
    };
    // The buffer, the window as far as it was used, the driver and its compiler: not the two gigabytes that were read.
    let resident = resident(tenant.pid);
    assert!(resident < 512 << 20, "{} MiB", resident >> 20);
    assert!(server.ls()[0].tenants[0].memory >= BUFFER);
    drop(link);
    server.end();
}

#[test]
fn a_server_that_finds_no_driver_says_where_it_looked() {
    let vendors = folder().join(format!("no-vendors-{}", std::process::id()));
    std::fs::create_dir_all(&vendors).expect("a folder");
    let mut server = Command::new(env!("CARGO_BIN_EXE_tombolo-accel"));
    server.env("OCL_ICD_VENDORS", &vendors);
    let server = Server::run(server, "nowhere", &[]);
    let output = server.program(Path::new("clinfo")).output().expect("it runs");
    assert!(text(&output.stderr).contains("no usable OpenCL (code -1001); see its log"), "{output:?}");
    // A worker's lines are in the log by the time that it is off the list.
    let begun = Instant::now();
    while !server.ls()[0].tenants.is_empty() {
        assert!(begun.elapsed() < TIMEOUT, "the worker of a client that left");
    }
    let log = server.end();
    let (why, place) = ("no OpenCL platform", vendors.display().to_string());
    assert!(log.contains(why) && log.contains(&place), "{log}");
    std::fs::remove_dir_all(&vendors).expect("removed");
}
