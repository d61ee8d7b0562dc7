// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The same claims for every transport.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;
use tombolo_calls::hello::{Geometry, Hello};
use tombolo_calls::memory::{Mapping, sealed_memfd};
use tombolo_calls::zone::{Area, Channel, Device, State};
use tombolo_calls::{Error, Link, process, send, stream, zone};

const GEOMETRY: Geometry = Geometry { ring: 64 << 10, window: 4 << 20 };

/// Longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(300);

fn hello() -> Hello {
    Hello { api: "test".into(), identity: [7; 16], name: "transports".into() }
}

fn by_memory() -> (Link, Link) {
    process::pair(GEOMETRY).expect("memfd and eventfds")
}

fn by_tcp() -> (Link, Link) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    let server = thread::spawn(move || {
        let socket = OwnedFd::from(listener.accept().expect("a client comes").0);
        assert_eq!(stream::hello(&socket, TIMEOUT).expect("a hello"), hello());
        stream::accept(socket, GEOMETRY).expect("accepted")
    });
    let client = stream::connect(stream::tcp(&address).expect("connects"), &hello()).expect("welcomed");
    (client, server.join().expect("no panic"))
}

fn by_unix_stream() -> (Link, Link) {
    let (a, b) = UnixStream::pair().expect("a pair");
    let server = thread::spawn(move || {
        let socket = OwnedFd::from(b);
        stream::hello(&socket, TIMEOUT).expect("a hello");
        stream::accept(socket, GEOMETRY).expect("accepted")
    });
    let client = stream::connect(a.into(), &hello()).expect("welcomed");
    (client, server.join().expect("no panic"))
}

/// The driver of a guest's device, without a guest: it counts rings of the VM's doorbell, and rings the server's bell.
struct Driver {
    count: Mutex<u64>,
    changed: Condvar,
    server: File,
}

impl Driver {
    fn note(&self) {
        *self.count.lock().expect("no panics") += 1;
        self.changed.notify_all();
    }
}

impl Device for Driver {
    fn wait(&self, seen: u64) -> Result<u64, Error> {
        let count = self.count.lock().expect("no panics");
        Ok(*self.changed.wait_while(count, |c| *c == seen).expect("no panics"))
    }
    fn ring(&self) {
        (&self.server).write_all(&1u64.to_ne_bytes()).expect("an eventfd takes it");
    }
    fn wake(&self) {
        self.note();
    }
}

fn eventfd() -> File {
    // SAFETY: takes no memory; the result is checked; the descriptor is fresh.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC);
        assert!(fd >= 0, "an eventfd");
        File::from(OwnedFd::from_raw_fd(fd))
    }
}

fn by_zone() -> (Link, Link) {
    let zone = sealed_memfd(c"zone", 2 * 4096 + Area::bytes(2, GEOMETRY)).expect("memory");
    let len = zone.metadata().expect("a size").len();
    let area = Area::make(zone, 2 * 4096, len - 2 * 4096, 2, GEOMETRY, 0).expect("it fits");
    let (bell, doorbell) = (eventfd(), eventfd());
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let driver = Arc::new(Driver {
        count: Mutex::new(0),
        changed: Condvar::new(),
        server: bell.try_clone().expect("a descriptor"),
    });
    let (rings, counting) = (doorbell.try_clone().expect("a descriptor"), driver.clone());
    // Ends with the process: as the interrupt of a device does.
    thread::spawn(move || {
        while (&rings).read_exact(&mut [0; 8]).is_ok() {
            counting.note();
        }
    });
    let at = area.offset(1);
    let mapped = (area.offset(1) - area.offset(0)) as usize;
    let mapping = Arc::new(Mapping::of_file(area.memory(), at, mapped).expect("mapped"));
    let channel = Channel {
        memory: area.memory().try_clone().expect("a descriptor"),
        at,
        geometry: GEOMETRY,
        bell: bell.into(),
        doorbell: doorbell.into(),
        gone: theirs.into(),
    };
    let server = thread::spawn(move || {
        let greeted = zone::greet(channel).expect("a hello");
        assert_eq!(greeted.hello, hello());
        greeted.accept().expect("accepted")
    });
    let client = zone::connect_over(mapping, GEOMETRY, driver, ours.into(), &hello()).expect("welcomed");
    (client, server.join().expect("no panic"))
}

/// Receives one record, sleeping when there is none.
fn receive(link: &mut Link, into: &mut Vec<u8>) -> Result<(), Error> {
    while !link.rx.try_recv(into)? {
        if link.rx.arm()? {
            link.bell.wait()?;
        }
        link.rx.disarm();
    }
    Ok(())
}

/// Answers every record with itself, until the client is gone.
fn echo(mut link: Link) -> Error {
    let mut record = Vec::new();
    loop {
        let step = receive(&mut link, &mut record)
            .and_then(|()| send(&mut *link.tx, &*link.room, &[&record]))
            .and_then(|()| link.tx.publish());
        if let Err(e) = step {
            return e;
        }
    }
}

fn every_record_comes_back_in_order((mut client, server): (Link, Link)) {
    let server = thread::spawn(move || echo(server));
    let mut record = Vec::new();
    for i in 0..3_000u32 {
        let body = vec![i as u8; i as usize % 700];
        send(&mut *client.tx, &*client.room, &[&i.to_le_bytes(), &body]).expect("sent");
        client.tx.publish().expect("published");
        // Up to thirty are in flight: fewer than the ring holds, as neither side reads while it waits for room.
        if i % 30 == 29 {
            for j in i - 29..=i {
                receive(&mut client, &mut record).expect("answered");
                assert_eq!(record[..4], j.to_le_bytes());
                assert_eq!(record.len(), 4 + j as usize % 700);
            }
        }
    }
    drop(client);
    assert!(matches!(server.join().expect("no panic"), Error::Closed), "the end of a client is told");
}

fn a_batch_arrives_as_it_was_sent((mut client, mut server): (Link, Link)) {
    let sender = thread::spawn(move || {
        for i in 0..20_000u32 {
            send(&mut *client.tx, &*client.room, &[&i.to_le_bytes()]).expect("sent");
            if i % 64 == 63 {
                client.tx.publish().expect("published");
            }
        }
        client.tx.publish().expect("published");
        client
    });
    let mut record = Vec::new();
    for i in 0..20_000u32 {
        receive(&mut server, &mut record).expect("arrives");
        assert_eq!(record, i.to_le_bytes());
    }
    drop(sender.join().expect("no panic"));
}

fn a_pushed_range_of_the_window_is_there_before_the_next_record((mut client, mut server): (Link, Link)) {
    let bytes: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
    let (expected, at) = (bytes.clone(), 4096);
    let sender = thread::spawn(move || {
        client.window.write(at, &bytes).expect("inside");
        client.tx.push_window(at, bytes.len() as u64).expect("pushed");
        send(&mut *client.tx, &*client.room, &[b"look"]).expect("sent");
        client.tx.publish().expect("published");
        client
    });
    let mut record = Vec::new();
    receive(&mut server, &mut record).expect("arrives");
    assert_eq!(record, b"look");
    let mut seen = vec![0; expected.len()];
    server.window.read(at, &mut seen).expect("inside");
    assert!(seen == expected);
    drop(sender.join().expect("no panic"));
}

fn nothing_outside_of_the_window_can_be_named((client, server): (Link, Link)) {
    for link in [&client, &server] {
        let len = link.window.len();
        assert_eq!(len, GEOMETRY.window);
        for (at, n) in [(len, 1), (len - 1, 2), (u64::MAX, 1), (1, u64::MAX), (0, len + 1)] {
            assert!(matches!(link.window.at(at, n), Err(Error::Broken(_))), "{at} {n}");
        }
        assert!(link.window.at(len - 1, 1).is_ok());
    }
}

/// No thread reads, so a thread that wakes leaves the bytes that woke it.
fn what_comes_in_wakes_sleepers_once_not_again_and_again((mut client, mut server): (Link, Link)) {
    let wakes = Arc::new(AtomicUsize::new(0));
    for _ in 0..4 {
        let (bell, wakes) = (server.bell.clone(), wakes.clone());
        // They sleep on until the process ends.
        thread::spawn(move || {
            while bell.wait().is_ok() {
                wakes.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    assert!(server.rx.arm().expect("whole"));
    send(&mut *client.tx, &*client.room, &[b"a"]).expect("sent");
    client.tx.publish().expect("published");
    while wakes.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    // By then those that wake again and again have done so thousands of times.
    thread::sleep(Duration::from_millis(100));
    let woken = wakes.load(Ordering::SeqCst);
    assert!(woken <= 16, "{woken}");
}

macro_rules! claims {
    ($($transport:ident: $($claim:ident)*;)*) => {
        $(mod $transport {
            $(#[test]
            fn $claim() {
                super::$claim(super::$transport());
            })*
        })*
    };
}
claims! {
    by_memory: every_record_comes_back_in_order a_batch_arrives_as_it_was_sent a_pushed_range_of_the_window_is_there_before_the_next_record nothing_outside_of_the_window_can_be_named what_comes_in_wakes_sleepers_once_not_again_and_again;
    by_zone: every_record_comes_back_in_order a_batch_arrives_as_it_was_sent a_pushed_range_of_the_window_is_there_before_the_next_record nothing_outside_of_the_window_can_be_named what_comes_in_wakes_sleepers_once_not_again_and_again;
    by_tcp: every_record_comes_back_in_order a_batch_arrives_as_it_was_sent a_pushed_range_of_the_window_is_there_before_the_next_record nothing_outside_of_the_window_can_be_named what_comes_in_wakes_sleepers_once_not_again_and_again;
    by_unix_stream: every_record_comes_back_in_order a_batch_arrives_as_it_was_sent a_pushed_range_of_the_window_is_there_before_the_next_record nothing_outside_of_the_window_can_be_named what_comes_in_wakes_sleepers_once_not_again_and_again;
}

#[test]
fn a_client_of_another_build_is_told_what_to_do() {
    let theirs = Hello { identity: [8; 16], ..hello() };
    let why = theirs.fits("test", [7; 16]).expect_err("they differ").to_string();
    assert!(
        why.contains("08080808") && why.contains("07070707") && why.contains("install the same release"),
        "{why}"
    );
    let (a, b) = UnixStream::pair().expect("a pair");
    let server = thread::spawn(move || {
        let socket = OwnedFd::from(b);
        let refusal =
            stream::hello(&socket, TIMEOUT).expect("a hello").fits("test", [9; 16]).expect_err("they differ");
        stream::refuse(&socket, &refusal.to_string()).expect("told");
    });
    let refused = stream::connect(a.into(), &hello()).err().expect("refused").to_string();
    assert!(refused.contains("different declarations"), "{refused}");
    server.join().expect("no panic");
}

#[test]
fn who_says_who_it_is_a_byte_at_a_time_keeps_nobody_for_ever() {
    let (theirs, ours) = UnixStream::pair().expect("a pair");
    let dribbling = std::thread::spawn(move || {
        let mut said = Vec::new();
        Hello { name: "x".repeat(60_000), ..hello() }.send(&mut said).expect("written to memory");
        // Until the other side has gone.
        for byte in said.iter().cycle() {
            if (&theirs).write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let socket = OwnedFd::from(ours);
    let why = stream::hello(&socket, Duration::from_millis(100)).expect_err("too slow");
    assert!(matches!(why, Error::Io(_)), "{why}");
    drop(socket);
    dribbling.join().expect("it ends");
}

#[test]
fn a_stranger_is_recognized() {
    let mut bytes = &b"GET / HTTP/1.1\r\n\r\n"[..];
    assert!(matches!(Hello::receive(&mut bytes), Err(Error::Refused(_))));
    let mut long = b"TMBLCALL\x01\0\0\0\xff\xff\xff\xff".to_vec();
    long.resize(100, 0);
    assert!(matches!(Hello::receive(&mut &long[..]), Err(Error::Broken(_))));
}

/// The word of a channel in the memory of an area that begins with the memory.
fn say(area: &Area, channel: u64, word: u64) {
    area.memory().write_all_at(&word.to_le_bytes(), 2048 + channel * 8).expect("written");
}

#[test]
fn a_channel_goes_from_hand_to_hand_cleared_and_an_impossible_state_counts_as_left() {
    let len = Area::bytes(3, GEOMETRY);
    let zone = sealed_memfd(c"zone", len).expect("memory");
    let area = Area::make(zone, 0, len, 3, GEOMETRY, 5).expect("it fits");
    assert_eq!(area.state(2), State::Free);
    assert!(!area.serve(2), "no client wants it");
    say(&area, 2, 1);
    assert_eq!(area.state(2), State::Wanted);
    assert!(area.serve(2));
    assert_eq!(area.state(2), State::Served);
    area.lose(2);
    assert_eq!(area.state(2), State::Lost);
    for nonsense in [4, 6, 0xff, u64::MAX] {
        say(&area, 2, nonsense);
        assert_eq!(area.state(2), State::Left);
    }
    area.memory().write_all_at(b"a secret", area.offset(2) + 20_000).expect("written");
    area.memory().write_all_at(b"a neighbour's", area.offset(1) + 20_000).expect("written");
    area.free(2).expect("cleared");
    assert_eq!(area.state(2), State::Free);
    let mut left = [1; 8];
    area.memory().read_exact_at(&mut left, area.offset(2) + 20_000).expect("read");
    assert_eq!(left, [0; 8], "what a process left is gone");
    let mut kept = [0; 13];
    area.memory().read_exact_at(&mut kept, area.offset(1) + 20_000).expect("read");
    assert_eq!(&kept, b"a neighbour's");
}

#[test]
fn a_server_that_takes_an_area_over_serves_who_waits_and_loses_who_was_served() {
    let len = Area::bytes(4, GEOMETRY);
    let zone = sealed_memfd(c"zone", len).expect("memory");
    let first = Area::make(zone.try_clone().expect("a descriptor"), 0, len, 4, GEOMETRY, 5).expect("it fits");
    // Wanted, served, left, free; with the secret of one that left.
    for (channel, word) in [(0, 7 << 32 | 1), (1, 7 << 32 | 1), (2, 7 << 32 | 4)] {
        say(&first, channel, word);
    }
    assert!(first.serve(1));
    first.memory().write_all_at(b"a secret", first.offset(2) + 20_000).expect("written");
    drop(first);
    let second = Area::make(zone, 0, len, 4, GEOMETRY, 6).expect("the same");
    let states: Vec<State> = (0..4).map(|i| second.state(i)).collect();
    assert_eq!(states, [State::Wanted, State::Lost, State::Free, State::Free]);
    let rung: Vec<bool> = (0..4).map(|i| second.take_ring(i)).collect();
    assert_eq!(rung, [true, false, false, false]);
    let mut left = [1; 8];
    second.memory().read_exact_at(&mut left, second.offset(2) + 20_000).expect("read");
    assert_eq!(left, [0; 8]);
}

/// Words of five channels: wanted, served, left, free, done; with a secret in the last.
fn five(zone: &File) -> Area {
    let len = Area::bytes(5, GEOMETRY);
    let area = Area::prepare(zone.try_clone().expect("a descriptor"), 0, len, 5, GEOMETRY).expect("it fits");
    for (channel, word) in [(0, 7 << 32 | 1), (1, 7 << 32 | 2), (2, 7 << 32 | 4), (4, 7 << 32 | 5)] {
        say(&area, channel, word);
    }
    area.memory().write_all_at(b"a secret", area.offset(4) + 20_000).expect("written");
    area
}

fn states(area: &Area) -> Vec<State> {
    (0..area.channels()).map(|i| area.state(i)).collect()
}

#[test]
fn what_an_owners_server_is_done_with_the_host_clears_and_nobody_else() {
    let zone = sealed_memfd(c"zone", Area::bytes(5, GEOMETRY)).expect("memory");
    let host = five(&zone);
    // The device of an owner VM is to its server what the memory itself is here.
    let server = Area::of_device(zone, 5, GEOMETRY).expect("the same");
    let taken_over = [State::Wanted, State::Lost, State::Done, State::Free, State::Done];
    assert_eq!(states(&server), taken_over, "who was left is for the host to clear, who waits is served");
    assert!(server.serve(0));
    server.free(0).expect("a word");
    let mut secret = [0; 8];
    host.memory().read_exact_at(&mut secret, host.offset(4) + 20_000).expect("read");
    assert_eq!(&secret, b"a secret");
    assert!(host.clear_done().expect("cleared"));
    assert_eq!(states(&host), [State::Free, State::Lost, State::Free, State::Free, State::Free]);
    host.memory().read_exact_at(&mut secret, host.offset(4) + 20_000).expect("read");
    assert_eq!(secret, [0; 8]);
    assert!(!host.clear_done().expect("nothing to do"));
}

#[test]
fn when_an_owner_dies_who_waits_for_it_is_lost_and_woken_and_nobody_serves() {
    let zone = sealed_memfd(c"zone", Area::bytes(5, GEOMETRY)).expect("memory");
    let host = five(&zone);
    assert!(!host.is_served());
    // As the owner's driver does.
    host.memory().write_all_at(&9u32.to_le_bytes(), 40).expect("written");
    assert!(host.is_served());
    host.abandon();
    assert!(!host.is_served());
    assert_eq!(states(&host), [State::Lost, State::Lost, State::Left, State::Free, State::Done]);
    let mut woken = [0; 8];
    for (channel, rung) in [(0, 1), (1, 1), (2, 0), (4, 0)] {
        host.memory().read_exact_at(&mut woken, host.offset(channel) + 128).expect("read");
        assert_eq!(u64::from_le_bytes(woken), rung, "channel {channel}");
    }
}

#[test]
fn a_client_hears_why_it_is_refused_though_the_server_hung_up_before_it_had_said_who_it_is() {
    let (a, b) = UnixStream::pair().expect("a pair");
    stream::refuse(&OwnedFd::from(b), "no place").expect("told");
    let refused = stream::connect(a.into(), &hello()).err().expect("refused").to_string();
    assert!(refused.contains("no place"), "{refused}");

    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    let server = thread::spawn(move || {
        for _ in 0..500 {
            process::refuse(&listener.accept().expect("a client comes").0, "no place").expect("told");
        }
    });
    for _ in 0..500 {
        let refused = process::connect(&path, &hello()).err().expect("refused").to_string();
        assert!(refused.contains("no place"), "{refused}");
    }
    server.join().expect("no panic");
}

#[test]
fn channels_of_sizes_that_no_memory_has_are_refused() {
    for (channels, size) in [(u32::MAX, u64::MAX), (u32::MAX, 1 << 40), (2, u64::MAX - 4095), (0, 4096)] {
        let geometry = Geometry { ring: GEOMETRY.ring, window: size };
        let zone = sealed_memfd(c"zone", 1 << 20).expect("memory");
        assert!(Area::of_device(zone, channels, geometry).is_err(), "{channels} of {size}");
        assert!(Area::zone_bytes(channels, size) >= size.min(1 << 23));
    }
}
