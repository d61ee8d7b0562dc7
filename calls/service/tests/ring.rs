// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A service by the way that is everywhere.

mod common;

use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use tombolo_calls::process;
use tombolo_service::image::Image;
use tombolo_service::loaded::Loaded;
use tombolo_service::{Error, Places, Service, Way, bind, ring};

const PUT: u32 = 0;
const GET: u32 = 1;
const FORGET: u32 = 2;
const NOTHING: u32 = 3;

/// The example, served at a socket of a fresh folder for the rest of the test's process.
fn served() -> (tempfile::TempDir, Places) {
    let folder = tempfile::tempdir().expect("a folder");
    let image = Image::read(&common::service("examples/kv.c", folder.path())).expect("a service");
    let listener = UnixListener::bind(folder.path().join("kv")).expect("bound");
    let service = Arc::new(Loaded::new(&image).expect("loaded"));
    thread::spawn(move || ring::serve(&listener, "kv", &service));
    let places = Places { device: "/nowhere".into(), sockets: folder.path().into() };
    (folder, places)
}

fn put(service: &mut dyn Service, key: &[u8], value: &[u8]) -> u64 {
    service.window().write(0, key).expect("it fits");
    service.window().write(key.len() as u64, value).expect("it fits");
    service.call(PUT, [key.len() as u64, value.len() as u64, 0]).expect("called")
}

fn get(service: &mut dyn Service, key: &[u8]) -> Option<Vec<u8>> {
    service.window().write(0, key).expect("it fits");
    let len = service.call(GET, [key.len() as u64, 0, 0]).expect("called");
    let mut value = vec![0; usize::try_from(len).ok().filter(|len| *len < 4096)?];
    service.window().read(key.len() as u64, &mut value).expect("inside");
    Some(value)
}

#[test]
fn what_one_client_stores_another_finds() {
    let (_folder, places) = served();
    let [mut a, mut b] = [(); 2].map(|()| bind(&places, "kv").expect("bound"));
    assert_eq!(a.way(), Way::Ring);
    assert_eq!(get(&mut *b, b"colour"), None);
    assert_eq!(put(&mut *a, b"colour", b"blue"), 0);
    assert_eq!(get(&mut *b, b"colour").as_deref(), Some(&b"blue"[..]));
    assert_eq!(put(&mut *b, b"colour", b"green"), 0);
    assert_eq!(get(&mut *a, b"colour").as_deref(), Some(&b"green"[..]));
    a.window().write(0, b"colour").expect("it fits");
    assert_eq!(a.call(FORGET, [6, 0, 0]).expect("called"), 1);
    assert_eq!(get(&mut *b, b"colour"), None);
}

#[test]
fn clients_that_call_at_the_same_time_lose_nothing() {
    let (_folder, places) = served();
    let clients: Vec<_> = (0..4u32)
        .map(|n| {
            let places = places.clone();
            thread::spawn(move || {
                let mut service = bind(&places, "kv").expect("bound");
                for i in 0..200u32 {
                    let key = format!("{n} {i}");
                    assert_eq!(put(&mut *service, key.as_bytes(), &(i * n).to_le_bytes()), 0);
                }
                for i in 0..200u32 {
                    let key = format!("{n} {i}");
                    assert_eq!(
                        get(&mut *service, key.as_bytes()).as_deref(),
                        Some(&(i * n).to_le_bytes()[..])
                    );
                }
            })
        })
        .collect();
    for client in clients {
        client.join().expect("no client fails");
    }
}

#[test]
fn a_call_that_does_not_exist_and_lengths_that_lie_are_errors_and_the_binding_stays_good() {
    let (_folder, places) = served();
    let mut service = bind(&places, "kv").expect("bound");
    for call in [5, 1000, u32::MAX] {
        assert!(matches!(service.call(call, [0; 3]), Err(Error::NoSuchCall(c)) if c == call));
    }
    assert_eq!(service.call(PUT, [u64::MAX, 1, 0]).expect("called"), 1);
    assert_eq!(service.call(PUT, [8, u64::MAX, 0]).expect("called"), 1);
    assert_eq!(service.call(GET, [u64::MAX, 0, 0]).expect("called"), u64::MAX);
    assert_eq!(service.call(NOTHING, [77, 0, 0]).expect("called"), 77);
}

#[test]
fn a_name_that_nobody_serves_or_that_is_no_name_is_refused() {
    let (_folder, places) = served();
    assert!(bind(&places, "other").is_err());
    for name in ["", "../kv", ".kv", "a b", &"x".repeat(48)] {
        let why = bind(&places, name).err().expect("refused").to_string();
        assert!(why.contains("no name of a service"), "{why}");
    }
}

#[test]
fn a_server_of_another_service_at_the_same_socket_refuses() {
    let (folder, places) = served();
    std::fs::rename(folder.path().join("kv"), folder.path().join("hash")).expect("renamed");
    let why = bind(&places, "hash").err().expect("refused").to_string();
    assert!(why.contains("service kv"), "{why}");
}

#[test]
fn a_client_hears_that_its_server_has_died() {
    let folder = tempfile::tempdir().expect("a folder");
    let object = common::service("examples/kv.c", folder.path());
    let mut server = spawn(&folder, &object);
    let places = Places { device: "/nowhere".into(), sockets: folder.path().into() };
    let mut service = bind(&places, "kv").expect("bound");
    assert_eq!(service.call(NOTHING, [1, 0, 0]).expect("called"), 1);
    server.kill().expect("killed");
    server.wait().expect("ended");
    assert!(matches!(service.call(NOTHING, [1, 0, 0]), Err(Error::Gone)));
}

/// The program serves the object; returns when it says so.
fn spawn(folder: &tempfile::TempDir, object: &std::path::Path) -> Child {
    let mut server = Command::new(env!("CARGO_BIN_EXE_tombolo-service"))
        .args(["serve", "kv"])
        .arg(object)
        .arg("--ring")
        .arg(folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    let mut line = String::new();
    let mut said = std::io::BufReader::new(server.stdout.as_mut().expect("a pipe"));
    std::io::BufRead::read_line(&mut said, &mut line).expect("a line");
    assert!(line.contains("served at"), "{line}");
    server
}

#[test]
fn the_program_checks_serves_and_calls() {
    let folder = tempfile::tempdir().expect("a folder");
    let object = common::service("examples/kv.c", folder.path());
    let mut server = spawn(&folder, &object);
    let run = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_tombolo-service")).args(arguments).output().expect("run");
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    let ring = folder.path().to_str().expect("a path");
    assert!(run(&["check", object.to_str().expect("a path")]).contains("5 calls"));
    assert_eq!(run(&["call", "kv", "3", "42", "--ring", ring]), "42\n");
    assert!(run(&["call", "kv", "9", "--ring", ring]).contains("no call 9"));
    server.kill().expect("killed");
    server.wait().expect("ended");
}

#[test]
fn a_request_of_another_length_takes_its_own_client_down_and_nobody_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = Image::read(&common::service("examples/kv.c", folder.path())).expect("a service");
    let service = Loaded::new(&image).expect("loaded");
    let (mut client, server) = process::pair(ring::GEOMETRY).expect("a pair");
    let serving = thread::spawn(move || ring::serve_link(server, &service, 1).map(|()| service));
    tombolo_calls::send(&mut *client.tx, &*client.room, &[&[0; 9]]).expect("sent");
    client.tx.publish().expect("published");
    assert!(matches!(serving.join().expect("no panic"), Err(Error::Ring(tombolo_calls::Error::Broken(_)))));
}
