// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The doorbell server and its clients, natively: well-behaved ones, ones that send garbage, ones that don't read.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tombolo_zone::doorbell::store::{Kept, Store};
use tombolo_zone::doorbell::{Bell, DoorbellServer, Event, wire};
use tombolo_zone::{MemberId, Rights, Role, Zone, ZoneConfig};

/// Longer than any operation here takes; a test that waits for it has failed.
const LONG: Duration = Duration::from_secs(300);

struct Bench {
    zone: Arc<Zone>,
    server: DoorbellServer,
    events: Receiver<Event>,
    store: Memory,
    dir: tempfile::TempDir,
}

/// What a server has had kept. The server stands still when it comes to keep something while this is locked.
#[derive(Clone, Default)]
struct Memory {
    kept: Arc<Mutex<(Option<u16>, Clients)>>,
    /// The server is at it.
    inside: Arc<AtomicBool>,
}

type Clients = BTreeMap<u16, (Kept, Vec<OwnedFd>)>;

impl Memory {
    fn change(&self, change: impl FnOnce(&mut (Option<u16>, Clients))) {
        self.inside.store(true, Ordering::SeqCst);
        let mut kept = self.kept.lock().unwrap();
        change(&mut kept);
        self.inside.store(false, Ordering::SeqCst);
    }
}

impl Store for Memory {
    fn next_peer(&mut self, next: Option<u16>) {
        self.change(|kept| kept.0 = next);
    }

    fn joined(&mut self, client: &Kept, fds: &[BorrowedFd<'_>]) {
        let fds = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        self.change(|kept| drop(kept.1.insert(client.peer, (*client, fds))));
    }

    fn left(&mut self, peer: u16) {
        self.change(|kept| drop(kept.1.remove(&peer)));
    }
}

impl Bench {
    fn new() -> Bench {
        let zone = Arc::new(Zone::create(&ZoneConfig::new("bells", 8 << 20)).unwrap());
        let store = Memory::default();
        let (server, events) =
            DoorbellServer::start_with(Arc::clone(&zone), Box::new(store.clone())).unwrap();
        Bench { zone, server, events, store, dir: tempfile::tempdir().unwrap() }
    }

    /// Lets the server stand still, as it waits to note that another member gets an id; that one stays connected.
    fn pause(&self, name: &str) -> (MutexGuard<'_, (Option<u16>, Clients)>, UnixStream) {
        let paused = self.store.kept.lock().unwrap();
        let stream = self.server.connect(self.member(name).0).unwrap();
        while !self.store.inside.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        (paused, stream)
    }

    fn member(&self, name: &str) -> (MemberId, PathBuf) {
        let id = self.zone.invite(name, Role::Vm, Rights::READ_WRITE).unwrap();
        let path = self.dir.path().join(name);
        self.server.listen(id, &path).unwrap();
        (id, path)
    }

    fn event(&self) -> Event {
        self.events.recv_timeout(LONG).unwrap()
    }

    /// The next event is that a doorbell for `member` has connected.
    fn joined(&self, member: MemberId, peer: u16) {
        match self.event() {
            Event::Joined { member: who, peer: number } => assert_eq!((who, number), (member, peer)),
            other => panic!("{other:?}"),
        }
    }
}

/// A bell whose rings go to a channel; the one at the start is taken.
fn bell(path: &PathBuf) -> (Bell, Receiver<()>) {
    let (sender, rings) = channel();
    let bell = Bell::connect(path, move || sender.send(()).unwrap()).unwrap();
    rings.recv_timeout(LONG).unwrap();
    (bell, rings)
}

/// Rings until the peer is known: another member's announcement takes a moment to arrive.
fn ring_soon(bell: &Bell, peer: u16) {
    let start = Instant::now();
    while !bell.ring(peer).unwrap() {
        assert!(start.elapsed() < LONG, "peer {peer} was never announced");
        std::thread::yield_now();
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn members_ring_each_other_and_find_themselves_in_the_table() {
    let bench = Bench::new();
    let (a, a_path) = bench.member("a");
    let (b, b_path) = bench.member("b");
    let (a_bell, a_rings) = bell(&a_path);
    let (b_bell, b_rings) = bell(&b_path);
    bench.joined(a, a_bell.peer());
    bench.joined(b, b_bell.peer());
    assert_eq!(a_bell.zone(), bench.zone.uuid());
    assert_eq!(bench.zone.member(a).unwrap().doorbell, Some(a_bell.peer()));
    for _ in 0..100 {
        ring_soon(&a_bell, b_bell.peer());
        b_rings.recv_timeout(LONG).unwrap();
        ring_soon(&b_bell, a_bell.peer());
        a_rings.recv_timeout(LONG).unwrap();
    }
    assert!(bench.server.ring(a_bell.peer()).unwrap());
    a_rings.recv_timeout(LONG).unwrap();
    assert!(!bench.server.ring(999).unwrap(), "an unknown peer is harmless");
    assert!(!a_bell.ring(999).unwrap());
}

#[test]
fn the_slot_names_the_peer_before_the_handshake_is_complete() {
    let bench = Bench::new();
    let (a, a_path) = bench.member("a");
    let stream = UnixStream::connect(&a_path).unwrap();
    let mut doorbell_at_own_vector = None;
    for n in 0.. {
        let (value, fd) = wire::receive(&stream).unwrap().unwrap();
        match n {
            0 => assert_eq!(value, wire::VERSION),
            1 => assert_eq!(value, 0),
            2 => assert!(value == wire::SHARED_MEMORY && fd.is_some()),
            _ => {
                doorbell_at_own_vector = bench.zone.member(a).unwrap().doorbell;
                break;
            }
        }
    }
    assert_eq!(doorbell_at_own_vector, Some(0));
}

#[test]
fn a_peer_id_never_comes_back_and_who_is_gone_is_forgotten_everywhere() {
    let bench = Bench::new();
    let (a, a_path) = bench.member("a");
    let (b, b_path) = bench.member("b");
    let (b_bell, _rings) = bell(&b_path);
    bench.joined(b, 0);
    for peer in 1..20 {
        let (a_bell, _rings) = bell(&a_path);
        assert_eq!(a_bell.peer(), peer);
        bench.joined(a, peer);
        ring_soon(&b_bell, peer);
        drop(a_bell);
        assert!(
            matches!(bench.event(), Event::Left { member, peer: left, .. } if member == a && left == peer)
        );
        assert_eq!(bench.zone.member(a).unwrap().doorbell, None);
        until("the other member still knows a peer that left", || !b_bell.peers().contains(&peer));
    }
}

#[test]
fn a_member_has_one_doorbell_at_a_time() {
    let bench = Bench::new();
    let (a, a_path) = bench.member("a");
    let (first, rings) = bell(&a_path);
    let refused = Bell::connect(&a_path, || ()).unwrap_err().to_string();
    assert!(refused.contains("connected already"), "{refused}");
    bench.event();
    assert!(matches!(bench.event(), Event::Refused { member, .. } if member == Some(a)));
    first.ring(first.peer()).unwrap();
    rings.recv_timeout(LONG).unwrap();
}

#[test]
fn garbage_takes_down_its_sender_only() {
    let bench = Bench::new();
    let (a, a_path) = bench.member("a");
    let (_b, b_path) = bench.member("b");
    let mut noise = UnixStream::connect(&a_path).unwrap();
    assert!(matches!(bench.event(), Event::Joined { .. }));
    noise.write_all(&[0xff; 64]).unwrap();
    let Event::Left { member, why, .. } = bench.event() else { panic!("it stayed") };
    assert_eq!(member, a);
    assert!(why.contains("sent something"), "{why}");
    let mut one = UnixStream::connect(&a_path).unwrap();
    one.write_all(&[1, 2, 3]).unwrap();
    assert!(matches!(bench.event(), Event::Joined { .. }));
    let Event::Left { why, .. } = bench.event() else { panic!("it stayed") };
    assert!(why.contains("cut short"), "{why}");
    // The messages sent before it was dropped, then the end.
    let _ = one.read_to_end(&mut Vec::new());
    let (b_bell, rings) = bell(&b_path);
    b_bell.ring(b_bell.peer()).unwrap();
    rings.recv_timeout(LONG).unwrap();
}

/// A VM that is stopped for long, say.
#[test]
fn a_client_that_does_not_read_holds_up_nobody_and_finds_the_others_as_they_are() {
    let bench = Bench::new();
    let (a, a_path) = bench.member("a");
    let (b, b_path) = bench.member("b");
    let deaf = UnixStream::connect(&a_path).unwrap();
    bench.joined(a, 0);
    // More joins and leaves than a socket holds.
    for round in 0..1500 {
        if round % 200 == 0 {
            bench.server.listen(b, b_path.with_extension(round.to_string())).unwrap();
        }
        let (b_bell, _rings) = bell(&b_path.with_extension((round / 200 * 200).to_string()));
        bench.joined(b, b_bell.peer());
        drop(b_bell);
        assert!(matches!(bench.event(), Event::Left { member, .. } if member == b));
    }
    let (b_bell, rings) = bell(&b_path.with_extension("1400"));
    let mut heard = 0;
    let mut doorbells = std::collections::BTreeMap::new();
    while !doorbells.contains_key(&i64::from(b_bell.peer())) {
        heard += 1;
        match wire::receive(&deaf).unwrap().expect("it was disconnected") {
            (peer, Some(doorbell)) => drop(doorbells.insert(peer, doorbell)),
            (peer, None) => drop(doorbells.remove(&peer)),
        }
    }
    assert!(heard < 1500, "{heard} messages pile up");
    // The page that names the zone, its own and the one that is left.
    let known = [wire::SHARED_MEMORY, 0, i64::from(b_bell.peer())];
    assert_eq!(doorbells.keys().copied().collect::<Vec<_>>(), known);
    rustix::io::write(&doorbells[&known[2]], &1u64.to_ne_bytes()).unwrap();
    rings.recv_timeout(LONG).unwrap();
}

/// The server finds one of them gone while it tells that one of the other, which it finds gone then.
#[test]
fn of_two_clients_that_are_gone_at_once_the_others_keep_none() {
    let bench = Bench::new();
    let [(a, _), (b, _), (c, _), (d, _)] = ["a", "b", "c", "d"].map(|name| bench.member(name));
    let first = bench.server.connect(a).unwrap();
    bench.joined(a, 0);
    let stays = bench.server.connect(b).unwrap();
    bench.joined(b, 1);
    // So that the second one comes before the server hears of the first one's end.
    let (paused, _stays_too) = bench.pause("another");
    drop(first);
    drop(bench.server.connect(c).unwrap());
    let _last = bench.server.connect(d).unwrap();
    drop(paused);
    let mut doorbells = std::collections::BTreeMap::new();
    while !doorbells.contains_key(&4) {
        match wire::receive(&stays).unwrap().expect("it was disconnected") {
            (peer, Some(doorbell)) => drop(doorbells.insert(peer, doorbell)),
            (peer, None) => drop(doorbells.remove(&peer)),
        }
    }
    assert_eq!(doorbells.keys().copied().collect::<Vec<_>>(), [wire::SHARED_MEMORY, 1, 2, 4]);
}

#[test]
fn a_flood_of_connections_ends_in_one_report_and_others_are_served() {
    let bench = Bench::new();
    let (a, a_path) = bench.member("a");
    let (_b, b_path) = bench.member("b");
    for _ in 0..600 {
        drop(UnixStream::connect(&a_path).unwrap());
    }
    let (b_bell, rings) = bell(&b_path);
    assert!(b_bell.peer() <= 256, "a flood uses up peer ids");
    b_bell.ring(b_bell.peer()).unwrap();
    rings.recv_timeout(LONG).unwrap();
    // Refused after all that came before.
    let mut said = Vec::new();
    UnixStream::connect(&a_path).unwrap().read_to_end(&mut said).unwrap();
    assert_eq!(said, wire::REFUSED.to_le_bytes());
    drop(bench.server);
    let is_end = |e: &Event| matches!(e, Event::Refused { member, why } if *member == Some(a) && why.contains("more than"));
    assert_eq!(bench.events.iter().filter(is_end).count(), 1, "the server's log is as long as the flood");
}

#[test]
fn doorbells_go_on_when_the_server_is_gone_and_its_sockets_are_removed() {
    let bench = Bench::new();
    let (_a, a_path) = bench.member("a");
    let (_b, b_path) = bench.member("b");
    let (a_bell, _a_rings) = bell(&a_path);
    let (b_bell, b_rings) = bell(&b_path);
    ring_soon(&a_bell, b_bell.peer());
    b_rings.recv_timeout(LONG).unwrap();
    drop(bench.server);
    assert!(!a_path.exists() && !b_path.exists());
    assert!(a_bell.ring(b_bell.peer()).unwrap());
    b_rings.recv_timeout(LONG).unwrap();
}

#[test]
fn a_host_process_that_owns_the_zone_has_a_bell_without_a_socket() {
    let bench = Bench::new();
    let host = bench.zone.invite("host", Role::Host, Rights::READ_WRITE).unwrap();
    let (sender, rings) = channel();
    let own = bench.server.bell(host, move || sender.send(()).unwrap()).unwrap();
    rings.recv_timeout(LONG).unwrap();
    assert_eq!(bench.zone.member(host).unwrap().doorbell, Some(own.peer()));
    let (_a, a_path) = bench.member("a");
    let (a_bell, _rings) = bell(&a_path);
    ring_soon(&a_bell, own.peer());
    rings.recv_timeout(LONG).unwrap();
    bench.server.unlisten(host).unwrap();
    until("unlisten does not end the connection", || bench.zone.member(host).unwrap().doorbell.is_none());
}

#[test]
fn a_host_process_that_does_not_own_the_zone_enters_by_its_membership_alone() {
    let bench = Bench::new();
    let id = bench.zone.invite("mount", Role::Host, Rights::READ_WRITE).unwrap();
    assert!(Bell::enter(&bench.zone, id, || {}).is_err(), "that slot has no member yet");
    let membership = bench.zone.join(id).unwrap();
    let (sender, rings) = channel();
    let own = Bell::enter(&bench.zone, id, move || sender.send(()).unwrap()).unwrap().unwrap();
    rings.recv_timeout(LONG).unwrap();
    assert_eq!(bench.zone.member(id).unwrap().doorbell, Some(own.peer()));
    let (_a, a_path) = bench.member("a");
    let (a_bell, a_rings) = bell(&a_path);
    ring_soon(&a_bell, own.peer());
    rings.recv_timeout(LONG).unwrap();
    ring_soon(&own, a_bell.peer());
    a_rings.recv_timeout(LONG).unwrap();
    drop(own);
    until("leaving does not end the doorbell", || bench.zone.member(id).unwrap().doorbell.is_none());
    bench.zone.leave(membership).unwrap();
    drop(bench.server);
    assert!(Bell::enter(&bench.zone, id, || {}).unwrap().is_none(), "the server has ended");
}

#[test]
fn no_other_user_can_come_near_the_doorbells_or_take_their_name() {
    let bench = Bench::new();
    let uuid = bench.zone.uuid().to_string();
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    // An abstract address begins with '@'. A door is known by the path where it was bound, which is gone.
    let named: Vec<&str> = sockets.lines().filter(|line| line.contains(&uuid)).collect();
    let [line] = named[..] else { panic!("{named:?}") };
    let path = line.split_whitespace().last().unwrap();
    assert!(!path.starts_with('@') && !std::path::Path::new(path).exists(), "{line}");
}

#[test]
fn a_host_process_that_watches_hears_of_peers_that_come_and_go_and_passes_their_doorbells_on() {
    let bench = Bench::new();
    let id = bench.zone.invite("server", Role::Host, Rights::READ_WRITE).unwrap();
    let _membership = bench.zone.join(id).unwrap();
    let (sender, looks) = channel();
    // The receiver is dropped first at the end.
    let look = move || {
        let _gone = sender.send(());
    };
    let own = Bell::enter_and_watch(&bench.zone, id, look).unwrap().unwrap();
    let wait = |peers: &[u16]| {
        while own.peers() != peers {
            looks.recv_timeout(LONG).unwrap();
        }
    };
    let (_a, a_path) = bench.member("a");
    let (a_bell, a_rings) = bell(&a_path);
    wait(&[a_bell.peer()]);
    let passed_on = own.descriptor(a_bell.peer()).unwrap().expect("it is there");
    std::io::Write::write_all(&mut std::fs::File::from(passed_on), &1u64.to_ne_bytes()).unwrap();
    a_rings.recv_timeout(LONG).unwrap();
    let gone = a_bell.peer();
    drop(a_bell);
    wait(&[]);
    assert!(own.descriptor(gone).unwrap().is_none());
}

#[test]
fn doorbells_that_a_member_wrote_over_are_rung_by_the_owner_and_restored() {
    let bench = Bench::new();
    let ((a, a_path), (b, b_path)) = (bench.member("a"), bench.member("b"));
    let ((a_bell, a_rings), (b_bell, b_rings)) = (bell(&a_path), bell(&b_path));
    for wrong in [None, Some(b_bell.peer()), Some(u16::MAX)] {
        for id in MemberId::all() {
            bench.zone.set_doorbell(id, wrong).unwrap();
        }
        bench.server.ring_member(a).unwrap();
        a_rings.recv_timeout(LONG).unwrap();
        assert!(b_rings.try_recv().is_err());
        bench.server.ring_all().unwrap();
        a_rings.recv_timeout(LONG).unwrap();
        b_rings.recv_timeout(LONG).unwrap();
        bench.server.restore(&bench.zone).unwrap();
        for id in MemberId::all() {
            let own = [(a, a_bell.peer()), (b, b_bell.peer())].into_iter().find(|(member, _)| *member == id);
            assert_eq!(bench.zone.doorbell(id).unwrap(), own.map(|(_, peer)| peer));
        }
    }
}

#[test]
fn a_socket_left_behind_by_a_crash_is_replaced_and_one_in_use_is_not() {
    let bench = Bench::new();
    let id = bench.zone.invite("a", Role::Vm, Rights::READ_WRITE).unwrap();
    let path = bench.dir.path().join("sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    bench.server.listen(id, &path).unwrap();
    let other = Bench::new();
    let said = other.server.listen(id, &path).unwrap_err().to_string();
    assert!(said.contains("sock: another server listens there already"), "{said}");
    let file = bench.dir.path().join("file");
    std::fs::write(&file, b"precious").unwrap();
    assert!(bench.server.listen(id, &file).is_err());
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}

#[test]
fn of_owners_that_make_a_members_socket_at_one_path_at_once_one_has_it() {
    let benches: Vec<Bench> = (0..4).map(|_| Bench::new()).collect();
    let of = |bench| {
        let Bench { zone, server, .. }: &Bench = bench;
        (zone.invite("a", Role::Vm, Rights::READ_WRITE).unwrap(), server)
    };
    let members: Vec<(MemberId, &DoorbellServer)> = benches.iter().map(of).collect();
    for round in 0..100 {
        let path = &benches[0].dir.path().join(round.to_string());
        // A killed server leaves its socket's file.
        drop(std::os::unix::net::UnixListener::bind(path).unwrap());
        let made = std::thread::scope(|scope| {
            let listen =
                |&(id, server)| scope.spawn(move || DoorbellServer::listen(server, id, path).is_ok());
            let threads: Vec<_> = members.iter().map(listen).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap().then_some(())).count()
        });
        assert_eq!(made, 1, "round {round}");
    }
}

#[test]
fn a_client_refuses_servers_that_speak_nonsense() {
    for messages in [vec![7i64], vec![0, -5], vec![0, 70000], vec![0, 3, 3], vec![0, 3, -1], vec![0, 3]] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        for value in &messages {
            wire::send(&theirs, *value, None).unwrap();
        }
        drop(theirs);
        let said = Bell::over(ours, || ()).unwrap_err().to_string();
        assert!(said.contains("doorbell handshake"), "{said}");
    }
}

#[test]
fn files_that_a_member_passes_along_and_whose_end_takes_hours_hold_up_no_other_member() {
    let bench = Bench::new();
    let (a, a_path) = bench.member("a");
    let (b, b_path) = bench.member("b");
    let mut others = Vec::new();
    let mut pass = |to: &UnixStream| {
        let (passed, other) = tombolo_brief::endless::lingering().unwrap();
        others.push(other);
        tombolo_brief::endless::pass(to, &[0; 8], passed).unwrap();
    };
    let name = format!("tombolo-doorbells-{}", bench.zone.uuid());
    let door = tombolo_zone::door::find(|n| n == name).unwrap().remove(0);
    let knock = || door.connect(None).unwrap();
    let connect = || UnixStream::connect(&a_path).unwrap();
    let joined = connect();
    bench.joined(a, 0);
    // So that they are passed before the server looks, and end with it.
    let (paused, _stays) = bench.pause("another");
    pass(&joined);
    let (waiting, unnamed) = (connect(), knock());
    pass(&waiting);
    pass(&unnamed);
    for gone in [connect(), knock()] {
        pass(&gone);
    }
    drop(paused);
    let (b_bell, b_rings) = bell(&b_path);
    until(
        "the other member has joined",
        || matches!(bench.event(), Event::Joined { member, .. } if member == b),
    );
    assert!(bench.server.ring(b_bell.peer()).unwrap());
    b_rings.recv_timeout(LONG).unwrap();
    // The server ends without reading these messages.
    let (paused, _stays) = bench.pause("one more");
    let last = [connect(), knock()];
    last.iter().for_each(&mut pass);
    drop(paused);
    drop(bench);
}

/// As after the death of the server's process: its clients go on with the next one, which tells them of each other, and no id comes back.
#[test]
fn a_server_goes_on_with_the_clients_of_one_that_has_died() {
    let bench = Bench::new();
    let [(a, a_path), (b, b_path), (c, _), (d, _)] = ["a", "b", "c", "d"].map(|name| bench.member(name));
    let (a_bell, a_rings) = bell(&a_path);
    bench.joined(a, 0);
    let (b_bell, b_rings) = bell(&b_path);
    bench.joined(b, 1);
    let gone = bench.server.connect(c).unwrap();
    bench.joined(c, 2);
    until("the third one is kept", || bench.store.kept.lock().unwrap().1.len() == 3);
    let (next, kept) = std::mem::take(&mut *bench.store.kept.lock().unwrap());
    let Bench { zone, server, .. } = bench;
    // It is killed: what it has open stays open elsewhere.
    std::mem::forget(server);
    drop(gone);
    let store = Memory::default();
    let (server, events) =
        DoorbellServer::resume(zone, kept.into_values().collect(), next, Box::new(store.clone())).unwrap();
    match events.recv_timeout(LONG).unwrap() {
        Event::Left { member, peer, .. } => assert_eq!((member, peer), (c, 2)),
        other => panic!("{other:?}"),
    }
    let _last = server.connect(d).unwrap();
    match events.recv_timeout(LONG).unwrap() {
        Event::Joined { member, peer } => assert_eq!((member, peer), (d, 3)),
        other => panic!("{other:?}"),
    }
    until("both know the new one", || [&a_bell, &b_bell].iter().all(|bell| bell.peers().contains(&3)));
    assert!(a_bell.is_served() && a_bell.ring(1).unwrap() && b_bell.ring(0).unwrap());
    b_rings.recv_timeout(LONG).unwrap();
    a_rings.recv_timeout(LONG).unwrap();
    assert!(server.ring(0).unwrap());
    a_rings.recv_timeout(LONG).unwrap();
}
