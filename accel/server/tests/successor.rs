// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A server and its successor at the same addresses, and what stands in a server's way when it begins.

mod rig;

use rig::{Server, TIMEOUT, folder, run};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use tombolo_accel_client::connection::Connection;
use tombolo_accel_spec::common::Ping;
use tombolo_accel_spec::opencl as wire;
use tombolo_calls::hello::{Hello, welcomed};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tombolo-accel");

fn ping(client: &Connection) {
    client.call(&Ping {}, |_, _| ()).expect("an answer");
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn drain(server: &Server) {
    run(Command::new(PROGRAM).args(["drain", "--control"]).arg(&server.control));
}

fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port")
}

/// Asks the address for the figures, as Prometheus does. `None`: no process answers there.
fn figures(address: &SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

#[test]
fn the_successor_of_a_server_that_drains_begins_with_the_same_settings_as_that_metrics_and_all() {
    let (address, tcp) = (free_port(), free_port());
    let options = ["--metrics", &address.to_string(), "--listen", &format!("tcp:{tcp}")];
    let mut old = Server::start("metrics-drain", &options);
    let client = old.client();
    ping(&client);
    assert!(figures(&address).expect("it answers").contains("tombolo_accel_tenants 1\n"));
    drain(&old);
    assert!(figures(&address).is_none(), "its address is free");
    let new = Server::start("metrics-drain", &options);
    ping(&client);
    assert!(figures(&address).expect("it answers").contains("tombolo_accel_tenants 0\n"));
    drop(client);
    assert!(old.child.wait().expect("it ends").success());
    ping(&new.client());
    assert!(TcpStream::connect(tcp).is_ok());
    new.end();
}

fn signal(server: &Server, signal: libc::c_int) {
    // SAFETY: integers only; the child has not been waited for.
    assert_eq!(unsafe { libc::kill(server.child.id() as libc::pid_t, signal) }, 0);
}

#[test]
fn who_has_connected_when_a_server_is_told_to_drain_is_answered() {
    let tcp = free_port();
    let mut server = Server::start("waiting", &["--clients", "200", "--listen", &format!("tcp:{tcp}")]);
    // They and the command wait at its sockets together.
    signal(&server, libc::SIGSTOP);
    let connect = |path: &Path| UnixStream::connect(path).expect("it listens");
    // Of another build: they get an answer and no worker.
    let hello = Hello { api: wire::API.into(), identity: [7; 16], name: "waits".into() };
    let mut waiting: Vec<UnixStream> = (0..60).map(|_| connect(&server.socket)).collect();
    waiting.iter_mut().for_each(|client| hello.send(client).expect("sent"));
    let mut by_tcp: Vec<TcpStream> = (0..60).map(|_| TcpStream::connect(tcp).expect("it listens")).collect();
    by_tcp.iter_mut().for_each(|client| hello.send(client).expect("sent"));
    let mut command = connect(&server.control);
    command.write_all(b"{\"do\":\"drain\"}\n").expect("sent");
    signal(&server, libc::SIGCONT);
    let answers = waiting.iter_mut().map(welcomed).chain(by_tcp.iter_mut().map(welcomed));
    for answer in answers {
        let why = answer.expect_err("it is of another build").to_string();
        assert!(why.contains("different declarations"), "{why}");
    }
    let mut answer = String::new();
    command.read_to_string(&mut answer).expect("an answer");
    assert!(answer.contains("ok"), "{answer}");
    assert!(UnixStream::connect(&server.socket).is_err(), "its address is free");
    assert!(TcpListener::bind(tcp).is_ok(), "its address is free");
    assert!(server.child.wait().expect("it ends").success());
}

#[test]
fn nothing_is_left_of_a_server_that_is_killed_while_it_drains_once_another_begins() {
    let above = tempfile::tempdir().expect("a folder");
    let path = |name: &str| above.path().join(name);
    let address = format!("unix:{}", path("s").display());
    let begin = || {
        let control = path("c").display().to_string();
        let server = start(&["--listen", &address, "--control", &control], Stdio::null());
        wait_until("it listens", || UnixStream::connect(path("c")).is_ok());
        server
    };
    let entries = || {
        let entries = std::fs::read_dir(above.path()).expect("read").flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    let (mut killed, mut drains);
    killed = begin();
    let client = UnixStream::connect(path("s")).expect("it listens");
    let drain = || run(Command::new(PROGRAM).args(["drain", "--control"]).arg(path("c")));
    drain();
    killed.kill().expect("it runs");
    killed.wait().expect("it ends");
    assert_eq!(entries(), [format!("c.draining-{}", killed.id())]);
    drains = begin();
    assert_eq!(entries(), ["c", "s"]);
    // One that lives keeps what it has.
    let other = UnixStream::connect(path("s")).expect("it listens");
    drain();
    let mut last = begin();
    assert_eq!(entries(), ["c".to_owned(), format!("c.draining-{}", drains.id()), "s".to_owned()]);
    drop((client, other));
    assert!(drains.wait().expect("it ends").success());
    assert_eq!(entries(), ["c", "s"]);
    last.kill().expect("it runs");
    last.wait().expect("it ends");
}

#[test]
fn a_server_that_drains_leaves_the_sockets_of_another_that_has_its_addresses_alone() {
    let mut old = Server::start("taken", &[]);
    let by_another_name = old.control.with_extension("other");
    std::fs::hard_link(&old.control, &by_another_name).expect("another name");
    // As an administrator does who takes it for dead.
    for path in [&old.socket, &old.control] {
        std::fs::remove_file(path).expect("removed");
    }
    let new = Server::start("taken", &[]);
    run(Command::new(PROGRAM).args(["drain", "--control"]).arg(&by_another_name));
    assert!(old.child.wait().expect("it ends").success());
    ping(&new.client());
    assert_eq!(new.ls()[0].pid, new.child.id());
    new.end();
    std::fs::remove_file(&by_another_name).expect("removed");
}

/// Starts a server that is not waited for.
fn start(options: &[&str], log: Stdio) -> Child {
    let mut command = Command::new(PROGRAM);
    command.env_remove("OCL_ICD_VENDORS").arg("serve").args(options).stderr(log).spawn().expect("it starts")
}

#[test]
fn of_servers_that_begin_at_one_address_at_once_one_serves_and_the_others_say_why() {
    let socket = folder().join(format!("once-{}.sock", std::process::id()));
    let address = format!("unix:{}", socket.display());
    let begin = |_| start(&["--listen", &address], Stdio::piped());
    let mut servers: Vec<Child> = (0..4).map(begin).collect();
    let mut refused = 0;
    wait_until("three have ended", || {
        servers.retain_mut(|server| {
            let Some(status) = server.try_wait().expect("a child") else { return true };
            let mut said = String::new();
            let read = server.stderr.take().expect("piped").read_to_string(&mut said);
            assert!(
                read.is_ok() && !status.success() && said.contains("a server listens there already"),
                "{said}"
            );
            refused += 1;
            false
        });
        refused == 3
    });
    wait_until("the last one listens", || UnixStream::connect(&socket).is_ok());
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "test".into() };
    let link = tombolo_calls::process::connect(&socket, &hello).expect("it serves");
    ping(&Connection::new(link).expect("a connection"));
    servers[0].kill().expect("it runs");
    servers[0].wait().expect("it ends");
    std::fs::remove_file(&socket).expect("it was its server's");
}

#[test]
fn a_vm_that_cannot_be_served_and_a_log_that_takes_nothing_keep_no_server_from_others() {
    let above = folder().join(format!("no-log-{}", std::process::id()));
    let guests = above.join("guests");
    std::fs::create_dir_all(&guests).expect("a folder");
    // As it is where a VM has damaged its zone.
    let guest = r#"{"vm":"damaged","zone":"/nonexistent/zone","channels":2,"window":1048576,"memory":null,"objects":null,"rate":null,"weight":null}"#;
    std::fs::write(guests.join("damaged"), guest).expect("written");
    let (socket, control) = (above.join("s"), above.join("c"));
    let full = std::fs::File::options().write(true).open("/dev/full").expect("/dev/full");
    let path = |path: &PathBuf| path.display().to_string();
    let listen = format!("unix:{}", socket.display());
    let options = ["--listen", &listen, "--control", &path(&control), "--guests", &path(&guests)];
    let mut server = start(&options, full.into());
    wait_until("it listens", || {
        assert!(server.try_wait().expect("a child").is_none(), "it has ended");
        control.exists()
    });
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "test".into() };
    let link = tombolo_calls::process::connect(&socket, &hello).expect("it serves");
    ping(&Connection::new(link).expect("a connection"));
    server.kill().expect("it runs");
    server.wait().expect("it ends");
    std::fs::remove_dir_all(&above).expect("removed");
}

#[test]
fn a_server_answers_commands_on_after_one_that_makes_no_sense() {
    let server = Server::start("senseless", &[]);
    let vm = |more: &str| format!(r#"{{"do":"vm","vm":"a","zone":"/dev/null",{more}}}"#);
    let requests = [
        vm(r#""channels":4294967295,"window":18446744073709551615"#),
        vm(r#""channels":0,"window":0"#),
        vm(r#""channels":2,"window":-1"#),
        format!(r#"{{"do":"vm","vm":{}"#, "[".repeat(4000)),
        r#"{"do":"ls"}"#.repeat(100),
        "x".repeat(1 << 20),
        r#"{"do":"#.into(),
        String::new(),
    ];
    for request in requests {
        let mut command = UnixStream::connect(&server.control).expect("it listens");
        // It may hang up before it has read all of that.
        let _hung_up = writeln!(command, "{request}");
        let mut answer = String::new();
        let read = command.read_to_string(&mut answer);
        assert!(read.is_err() || !answer.contains("{\"ok\""), "{request:.60}: {answer}");
        assert_eq!(server.ls()[0].pid, server.child.id(), "{request:.60}");
    }
    ping(&server.client());
    server.end();
}

#[test]
fn a_list_of_servers_waits_for_none_that_drains_and_is_stopped() {
    let mut old = Server::start("stopped", &[]);
    let client = old.client();
    ping(&client);
    drain(&old);
    let new = Server::start("stopped", &[]);
    signal(&old, libc::SIGSTOP);
    let output = run(Command::new(PROGRAM).args(["ls", "--control"]).arg(&new.control));
    signal(&old, libc::SIGCONT);
    let [listed, said] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(listed.contains(&format!("server {}", new.child.id())), "{listed}");
    assert!(said.contains(&format!("draining-{}", old.child.id())) && said.contains("stopped"), "{said}");
    drop(client);
    assert!(old.child.wait().expect("it ends").success());
    new.end();
}
