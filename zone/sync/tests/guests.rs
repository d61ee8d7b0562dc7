// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Semaphores and mutexes between processes of real guests and of the host (feature `vm-tests`).

#[path = "../../tests/common/mod.rs"]
mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Guest, GuestConfig, image, series};
use tombolo_sync::{Agent, Locked, Mutex, Semaphore};
use tombolo_zone::doorbell::DoorbellServer;
use tombolo_zone::{Backing, MemberId, Rights, Role, Zone, ZoneConfig};

const SIZE: u64 = 16 << 20;
const LONG: Option<Duration> = Some(Duration::from_secs(60));
const DEVICE: &str = "/dev/tombolo-sync-test";

struct World {
    dir: tempfile::TempDir,
    zone: Arc<Zone>,
    server: Arc<DoorbellServer>,
    agent: Agent,
    series: String,
    image: PathBuf,
}

impl World {
    fn new(series: &str) -> World {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let backing = Backing::File(dir.path().join("zone"));
        let zone = Arc::new(Zone::create(&ZoneConfig::new("guests", SIZE).backing(backing)).unwrap());
        let (server, _events) = DoorbellServer::start(Arc::clone(&zone)).unwrap();
        let server = Arc::new(server);
        let agent = Agent::start(Arc::clone(&zone), Some(Arc::clone(&server))).unwrap();
        World { dir, zone, server, agent, series: series.to_owned(), image: image(series) }
    }

    /// A guest that has joined the zone and has its device.
    fn guest(&self, name: &str) -> (MemberId, Guest) {
        let id = self.zone.invite(name, Role::Vm, Rights::READ_WRITE).unwrap();
        let socket = self.dir.path().join(format!("{name}.bell"));
        self.server.listen(id, &socket).unwrap();
        let mut guest = Guest::start(GuestConfig {
            series: &self.series,
            image: &self.image,
            zone: &self.dir.path().join("zone"),
            zone_size: SIZE,
            bell: Some(&socket),
            net: None,
            console: self.dir.path().join(format!("{name}.console")),
        });
        guest.run("insmod /modules/tmbtest.ko $ZONE");
        guest.run("echo 1 > /sys/module/tmbtest/parameters/join");
        (id, guest)
    }
}

#[test]
fn semaphores_and_mutexes_work_across_guests_and_host_and_survive_deaths() {
    for series in series() {
        let world = World::new(&series);
        let sync = world.agent.sync();
        let (a_id, mut a) = world.guest("a");
        let (_b_id, mut b) = world.guest("b");

        // A guest's process sleeps until the host posts; the host sleeps until a guest posts.
        let (ping, pong) =
            (Semaphore::create(sync, "ping", 0).unwrap(), Semaphore::create(sync, "pong", 0).unwrap());
        a.send(&format!("synctest {DEVICE} pong 50"));
        let start = Instant::now();
        for _ in 0..50 {
            ping.post().unwrap();
            pong.wait(LONG).unwrap();
        }
        println!("kernel {series}: host to guest and back {} us", start.elapsed().as_micros() / 50);
        assert_eq!(a.finish(), (0, String::new()));

        // Guest to guest.
        a.send(&format!("synctest {DEVICE} pong 200"));
        println!(
            "kernel {series}: guest to guest and back {} ns",
            b.run(&format!("synctest {DEVICE} ping 200"))
        );
        assert_eq!(a.finish(), (0, String::new()));

        // Names of other guests' and the host's processes are one name space.
        a.send(&format!("synctest {DEVICE} lock nothing"));
        assert_eq!(a.finish().0, 2, "ENOENT");

        // A process dies with a mutex: its kernel ends its session, and a waiter elsewhere is told.
        let mutex = Mutex::create(sync, "m").unwrap();
        a.run(&format!("synctest {DEVICE} hold m > /held & while ! grep -q held /held; do :; done"));
        assert!(mutex.lock(Some(Duration::ZERO)).is_err());
        b.send(&format!("synctest {DEVICE} lock m"));
        a.run("killall -9 synctest");
        assert_eq!(b.finish().0, 130, "EOWNERDEAD");
        assert_eq!(mutex.lock(LONG), Ok(Locked::OwnerDied), "that process ended without unlocking it, too");
        mutex.unlock().unwrap();

        // A whole guest dies with it: the host declares it dead, and a waiter in another guest gets it.
        a.run(&format!(
            "rm /held; synctest {DEVICE} hold m > /held & while ! grep -q held /held; do :; done"
        ));
        b.send(&format!("synctest {DEVICE} lock m"));
        a.kill();
        let start = Instant::now();
        assert!(world.zone.declare_dead(a_id).unwrap());
        assert_eq!(b.finish().0, 130, "EOWNERDEAD");
        println!(
            "kernel {series}: a dead guest's mutex was taken over after {} ms",
            start.elapsed().as_millis()
        );
        b.run("rmmod tmbtest");
    }
}

#[test]
fn a_process_that_outlives_its_guests_mount_takes_no_lock() {
    for series in series() {
        let world = World::new(&series);
        let mutex = Mutex::create(world.agent.sync(), "m").unwrap();
        let (_id, mut guest) = world.guest("a");
        // Its session has ended: as the owner of a lock it would count as dead, and another process would take the lock from it.
        guest.run(&format!(
            "synctest {DEVICE} later m > /ready & later=$!; while ! grep -q ready /ready; do :; done; \
             echo leave > /sys/module/tmbtest/parameters/join; touch /go; wait $later; [ $? = 135 ]"
        ));
        assert_eq!(mutex.lock(Some(Duration::ZERO)), Ok(Locked::Clean), "no process had taken it");
        guest.run("rmmod tmbtest");
    }
}
