// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones and doorbells in real guests (feature `vm-tests`; the guest kit must have been built).

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::{Guest, GuestConfig, image, series};
use tombolo_zone::doorbell::{Bell, DoorbellServer, Event};
use tombolo_zone::{Backing, MemberId, Pending, Rights, Role, Zone, ZoneConfig};

const SIZE: u64 = 16 << 20;
/// The counter's offset in the zone (tmbtest.c).
const COUNTER: u64 = 1 << 20;
const TIMES: u64 = 2_000_000;
const LONG: Duration = Duration::from_secs(300);
const TEST: &str = "/sys/module/tmbtest/parameters";

struct World {
    dir: tempfile::TempDir,
    zone: Arc<Zone>,
    server: DoorbellServer,
    events: Receiver<Event>,
    series: String,
    image: PathBuf,
}

impl World {
    fn new(series: &str) -> World {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let backing = Backing::File(dir.path().join("zone"));
        let zone = Arc::new(Zone::create(&ZoneConfig::new("guests", SIZE).backing(backing)).unwrap());
        let (server, events) = DoorbellServer::start(Arc::clone(&zone)).unwrap();
        let image = image(series);
        World { dir, zone, server, events, series: series.to_owned(), image }
    }

    fn guest(&self, name: &str) -> (MemberId, Guest) {
        let id = self.zone.invite(name, Role::Vm, Rights::READ_WRITE).unwrap();
        let socket = self.dir.path().join(format!("{name}.bell"));
        self.server.listen(id, &socket).unwrap();
        let guest = Guest::start(GuestConfig {
            series: &self.series,
            image: &self.image,
            zone: &self.dir.path().join("zone"),
            zone_size: SIZE,
            bell: Some(&socket),
            net: None,
            console: self.dir.path().join(format!("{name}.console")),
        });
        (id, guest)
    }

    fn host(&self) -> (MemberId, Bell, Receiver<()>) {
        let id = self.zone.invite("host", Role::Host, Rights::READ_WRITE).unwrap();
        let (sender, rings) = channel();
        let bell = self.server.bell(id, move || sender.send(()).unwrap()).unwrap();
        rings.recv_timeout(LONG).unwrap();
        (id, bell, rings)
    }
}

/// Two one-CPU guests that hammer one counter.
struct Hammers<'a> {
    world: &'a World,
    guests: [Guest; 2],
    struck: u64,
}

impl Hammers<'_> {
    fn new<'a>(world: &'a World, module: &str) -> Hammers<'a> {
        let mut guests = [world.guest("a").1, world.guest("b").1];
        for guest in &mut guests {
            guest.run(&format!("insmod /modules/{module}.ko $ZONE"));
            assert_eq!(guest.run("nproc"), "1");
        }
        Hammers { world, guests, struck: 0 }
    }

    /// Runs one more round and returns how many updates were lost so far.
    fn round(&mut self) -> u64 {
        for guest in &mut self.guests {
            guest.send(&format!("echo {TIMES} > {TEST}/hammer"));
        }
        for guest in &mut self.guests {
            let (status, output) = guest.finish();
            assert_eq!(status, 0, "{output}");
        }
        self.struck += 2 * TIMES;
        self.struck - self.world.zone.mem().load_u64(COUNTER).unwrap()
    }
}

#[test]
fn one_cpu_guests_lose_no_update_of_a_shared_counter() {
    for series in series() {
        let world = World::new(&series);
        let mut hammers = Hammers::new(&world, "tmbtest");
        for _ in 0..2 {
            assert_eq!(hammers.round(), 0, "kernel {series}");
        }
    }
}

/// If this fails, the test above proves nothing: the guests never ran at the same time, or their kernel kept its LOCK. On a busy machine they
/// may run one after the other for a while.
#[test]
fn the_same_guests_lose_updates_with_the_kernels_own_atomics() {
    for series in series() {
        let world = World::new(&series);
        let mut hammers = Hammers::new(&world, "ordinary");
        let lost = (0..100).map(|_| hammers.round()).find(|lost| *lost > 0);
        let lost = lost.unwrap_or_else(|| panic!("kernel {series}: nothing was lost in 100 rounds"));
        println!("kernel {series}: {lost} of {} updates lost", hammers.struck);
    }
}

#[test]
fn doorbells_ring_between_guests_and_host() {
    for series in series() {
        let world = World::new(&series);
        let (host, bell, rings) = world.host();
        let (a_id, mut a) = world.guest("a");
        let (b_id, mut b) = world.guest("b");
        for guest in [&mut a, &mut b] {
            guest.run("insmod /modules/tmbtest.ko $ZONE");
        }
        assert_eq!(
            a.run(&format!("cat {TEST}/self")),
            a_id.to_string(),
            "a guest finds its slot by its peer id"
        );
        assert_eq!(b.run(&format!("cat {TEST}/self")), b_id.to_string());

        // Host to guest and back: the guest answers each ring.
        a.run(&format!("echo {host} > {TEST}/echo_to"));
        for _ in 0..100 {
            let peer = world.zone.pend(a_id, Pending::Sync).unwrap().expect("the guest took the last one");
            assert!(bell.ring(peer).unwrap());
            rings.recv_timeout(LONG).unwrap();
            assert_eq!(world.zone.take_pending(host).unwrap(), Pending::Sync as u64);
        }

        // Guest to guest and back.
        a.run(&format!("echo {b_id} > {TEST}/echo_to"));
        b.run(&format!("echo -1 > {TEST}/echo_to"));
        b.run(&format!("echo {a_id} 300 > {TEST}/ping"));
        println!(
            "kernel {series}: guest to guest and back {} ns",
            b.run(&format!("cat {TEST}/round_trip_ns"))
        );

        // A guest is killed: the host notices, its slot shows it, and ringing it is harmless.
        let peer = world.zone.member(b_id).unwrap().doorbell.unwrap();
        b.kill();
        loop {
            match world.events.recv_timeout(LONG).unwrap() {
                Event::Left { member, .. } if member == b_id => break,
                Event::Left { member, why, .. } => panic!("member {member} left: {why}"),
                _ => {}
            }
        }
        assert_eq!(world.zone.member(b_id).unwrap().doorbell, None);
        let _ = bell.ring(peer).unwrap();
        a.run("true");
    }
}

#[test]
fn a_doorbell_that_is_unplugged_while_it_rings_and_comes_back_hurts_nobody() {
    for series in series() {
        let world = World::new(&series);
        let (_, bell, _rings) = world.host();
        let (a_id, mut a) = world.guest("a");
        a.run("insmod /modules/tmbtest.ko $ZONE");
        let peer = world.zone.member(a_id).unwrap().doorbell.unwrap();
        let device = "$(dirname $(grep -l 0x1110 /sys/bus/pci/devices/*/device))";
        for _ in 0..5 {
            a.send(&format!("echo 1 > {device}/remove"));
            for _ in 0..1000 {
                bell.ring(peer).unwrap();
            }
            let (status, output) = a.finish();
            assert_eq!(status, 0, "{output}");
            assert_eq!(a.run(&format!("cat {TEST}/self")), "-1");
            a.run("echo 1 > /sys/bus/pci/rescan");
            assert_eq!(a.run(&format!("cat {TEST}/self")), a_id.to_string());
        }
        a.run("rmmod tmbtest");
        a.run("insmod /modules/tmbtest.ko $ZONE");
    }
}
