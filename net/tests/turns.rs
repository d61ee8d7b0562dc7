// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ports that compete for a worker: each gets as many turns as another.

mod common;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::lab::Lab;
use common::{Rig, frame, wait_for};
use tombolo_net::event::Event;
use tombolo_net::forwarding::view::Attached;
use tombolo_net::frames::frame::Mac;
use tombolo_net::policy::port::Policy;
use tombolo_net::ports::port::Port;
use tombolo_net::uplink::{Link, Uplink};
use tombolo_net::vring::driver::{Nic, NicConfig};
use tombolo_net::vring::features::negotiated;
use tombolo_net::vring::memory::GuestMemory;
use tombolo_net::vring::queue::Negotiated;

/// An uplink on which each frame takes a while, and that counts the frames of guests 0 and 1.
struct Slow {
    sent: Arc<[AtomicU64; 2]>,
    silence: Event,
}

impl Link for Slow {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()> {
        // SAFETY: the switch's promise: the first piece has the addresses.
        let guest = unsafe { pieces[0].iov_base.cast::<u8>().add(11).read() };
        self.sent[usize::from(guest)].fetch_add(1, Ordering::Relaxed);
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(20) {
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn receive(&self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn fd(&self) -> RawFd {
        self.silence.as_raw_fd()
    }
}

/// Attaches `nic` to a port as its queue pair number `pair`.
fn attach(nic: &Nic, port: &Port, pair: usize) {
    let mem = Arc::new(GuestMemory::new(vec![nic.ram.region().unwrap()]).unwrap());
    for (i, queue) in [&nic.rx, &nic.tx].into_iter().enumerate() {
        let mut vring = port.vrings()[2 * pair + i].lock();
        vring.set_memory(mem.clone()).unwrap();
        vring.negotiated = negotiated(nic.features());
        (vring.size, vring.address, vring.enabled) = (queue.size, queue.address(&nic.ram), true);
        vring.kick = Some(Arc::new(nic.kicks[i].to_file().unwrap()));
        vring.start().unwrap();
    }
    port.note_active();
}

#[test]
fn a_port_with_many_queues_gets_no_more_turns_than_one_with_a_single_queue() {
    const QUEUES: usize = 8;
    let lab = Lab::with(2, 1, |config, _| config.port[0].queues = QUEUES);
    let sent: Arc<[AtomicU64; 2]> = Arc::default();
    let link = Slow { sent: sent.clone(), silence: Event::new().unwrap() };
    let mut out =
        Attached::guest(Arc::new(Port::new("out", 1)), Policy { uplink: true, ..Policy::default() });
    out.uplink = Some(Arc::new(Uplink::new(Box::new(link))));
    let switch = lab.daemon.switch();
    switch.attach(out).unwrap();
    let mut nics: Vec<(usize, Nic)> = (0..=QUEUES)
        .map(|n| {
            let (guest, pair) = if n < QUEUES { (0, n) } else { (1, 0) };
            let nic = Nic::new(NicConfig { size: 256, ..NicConfig::default() }).unwrap();
            attach(&nic, &switch.view().ports()[guest].port, pair);
            (guest, nic)
        })
        .collect();
    switch.changed();
    let mut load = || {
        for (guest, nic) in &mut nics {
            while nic.send(&frame(Mac([2, 9, 9, 9, 9, 9]), Rig::mac(*guest), 60, 0)) {}
        }
        [0, 1].map(|n: usize| sent[n].load(Ordering::Relaxed))
    };
    let begun = wait_for("both", || Some(load()).filter(|sent| sent.iter().all(|n| *n > 0)));
    let now = wait_for("many frames", || Some(load()).filter(|now| now[1] >= begun[1] + 2000));
    let shares = [0, 1].map(|n: usize| now[n] - begun[n]);
    assert!(shares[0] < 2 * shares[1], "{shares:?} frames");
}
