// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bench of waking a process in another guest: a semaphore's round trip through doorbells next to a byte's over TCP, between the same two
//! guests at the same time (a socket between their QEMUs joins their network cards). JSON lines on standard output, round trips in ns, back
//! to back and (wake-up) with a rest of 1 ms before each, after which the other side is asleep. An argument other than cargo's is the number
//! of repetitions; `TOMBOLO_KERNELS` names the guests' kernel.

#[path = "../../zone/tests/common/mod.rs"]
mod common;

use std::sync::Arc;

use common::{Guest, GuestConfig, image, series};
use tombolo_sync::{Agent, Semaphore};
use tombolo_zone::doorbell::DoorbellServer;
use tombolo_zone::{Backing, Rights, Role, Zone, ZoneConfig};

const SIZE: u64 = 16 << 20;
const TRIPS: u32 = 500;
const DEVICE: &str = "/dev/tombolo-sync-test";

/// Cases: microseconds of rest before each round trip.
const CASES: [(&str, u32); 2] = [("guest-round-trip", 0), ("guest-wake-up", 1000)];

fn line(case: &str, system: &str, nanoseconds: &str) {
    let value: f64 = nanoseconds.trim().parse().expect("a number of ns");
    let sample = serde_json::json!({
        "bench": "sync", "case": case, "system": system, "value": value, "unit": "ns", "better": "lower"
    });
    println!("{sample}");
}

fn main() {
    let repetitions: u32 = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(5);
    let series = series().pop().expect("a kernel series");
    let dir = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let path = dir.path().join("zone");
    let config = ZoneConfig::new("guests", SIZE).backing(Backing::File(path.clone()));
    let zone = Arc::new(Zone::create(&config).expect("a zone"));
    let (server, _events) = DoorbellServer::start(Arc::clone(&zone)).expect("doorbells");
    let server = Arc::new(server);
    let agent = Agent::start(Arc::clone(&zone), Some(Arc::clone(&server))).expect("an agent");
    let wire = dir.path().join("wire");
    let guest = |name: &str, net: &str, address: &str| {
        let id = zone.invite(name, Role::Vm, Rights::READ_WRITE).expect("a slot");
        let socket = dir.path().join(format!("{name}.bell"));
        server.listen(id, &socket).expect("a doorbell");
        let mut guest = Guest::start(GuestConfig {
            series: &series,
            image: &image(&series),
            zone: &path,
            zone_size: SIZE,
            bell: Some(&socket),
            net: Some(net),
            console: dir.path().join(format!("{name}.console")),
        });
        guest.run("insmod /modules/tmbtest.ko $ZONE");
        guest.run("echo 1 > /sys/module/tmbtest/parameters/join");
        guest.run(&format!("ifconfig eth0 {address} netmask 255.255.255.0 up"));
        guest
    };
    let stream = |server: &str| format!("stream,server={server},addr.type=unix,addr.path={}", wire.display());
    let mut a = guest("a", &stream("on"), "10.0.0.1");
    let mut b = guest("b", &stream("off"), "10.0.0.2");
    let _semaphores =
        ["ping", "pong"].map(|name| Semaphore::create(agent.sync(), name, 0).expect("a semaphore"));
    for _ in 0..repetitions {
        for (case, rest) in CASES {
            for (system, what) in [("tombolo", DEVICE), ("tcp-socket", "tcp")] {
                a.send(&format!("synctest {what} pong {TRIPS}"));
                line(case, system, &b.run(&format!("synctest {what} ping {TRIPS} {rest}")));
                assert_eq!(a.finish(), (0, String::new()));
            }
        }
    }
    a.kill();
    b.kill();
}
