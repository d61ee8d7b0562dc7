// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ports that compete for a worker: each gets as many turns as another.

mod common;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use common::lab::Lab;
use common::{Rig, frame, wait_for};
use tombolo_net::event::Event;
use tombolo_net::forwarding::forward::BATCH;
use tombolo_net::forwarding::view::Attached;
use tombolo_net::frames::frame::Mac;
use tombolo_net::policy::port::Policy;
use tombolo_net::ports::port::Port;
use tombolo_net::uplink::{Link, Uplink};
use tombolo_net::vring::driver::{Nic, NicConfig};
use tombolo_net::vring::features::negotiated;
use tombolo_net::vring::memory::GuestMemory;
use tombolo_net::vring::queue::Negotiated;

/// An uplink that notes which guest each frame came from.
struct Order {
    guests: Arc<Mutex<Vec<u8>>>,
    silence: Event,
}

impl Link for Order {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()> {
        // SAFETY: the switch's promise: the first piece has the addresses.
        let guest = unsafe { pieces[0].iov_base.cast::<u8>().add(11).read() };
        self.guests.lock().unwrap().push(guest);
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
    const FRAMES: usize = 256;
    let lab = Lab::with(2, 1, |config, _| config.port[0].queues = QUEUES);
    let switch = lab.daemon.switch();
    // The worker looks for queues again when the uplink comes, and then finds all of them full.
    switch.settle(|| false);
    let _nics: Vec<Nic> = (0..=QUEUES)
        .map(|n| {
            let (guest, pair) = if n < QUEUES { (0, n) } else { (1, 0) };
            let mut nic = Nic::new(NicConfig { size: FRAMES as u16, ..NicConfig::default() }).unwrap();
            attach(&nic, &switch.view().ports()[guest].port, pair);
            for _ in 0..FRAMES {
                assert!(nic.send(&frame(Mac([2, 9, 9, 9, 9, 9]), Rig::mac(guest), 60, 0)));
            }
            nic
        })
        .collect();
    let guests: Arc<Mutex<Vec<u8>>> = Arc::default();
    let link = Order { guests: guests.clone(), silence: Event::new().unwrap() };
    let mut out =
        Attached::guest(Arc::new(Port::new("out", 1)), Policy { uplink: true, ..Policy::default() });
    out.uplink = Some(Arc::new(Uplink::new(Box::new(link))));
    switch.attach(out).unwrap();
    let all = (QUEUES + 1) * FRAMES;
    wait_for("every frame", || (guests.lock().unwrap().len() == all).then_some(()));
    let guests = guests.lock().unwrap();
    let last = guests.iter().rposition(|guest| *guest == 1).unwrap();
    let others = last + 1 - FRAMES;
    assert!(others <= FRAMES + BATCH, "{others} frames of the other before the last of {FRAMES}");
}
