// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ports that compete for a worker: each gets as many turns as another.

mod common;

use std::net::Ipv4Addr;
use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::lab::Lab;
use common::network::{datagrams_of, ethernet, ipv4};
use common::outlet::Outlet;
use common::{Rig, frame, talk, wait_for};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tombolo_net::forwarding::forward::{BATCH, Pass};
use tombolo_net::forwarding::switch::Switch;
use tombolo_net::forwarding::view::Attached;
use tombolo_net::forwarding::worker::{Pace, Worker};
use tombolo_net::frames::frame::Mac;
use tombolo_net::policy::port::Policy;
use tombolo_net::ports::port::Port;
use tombolo_net::uplink::Uplink;
use tombolo_net::vring::features::{OFFLOADS, negotiated};
use tombolo_net::vring::memory::GuestMemory;
use tombolo_net::vring::ring::MAX_CHAIN;
use tombolo_net_driver::{Nic, NicConfig};

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
    let seen = guests.clone();
    let link = Outlet::new(move |pieces| {
        // SAFETY: the switch's promise: the first piece has the addresses.
        let guest = unsafe { pieces[0].iov_base.cast::<u8>().add(11).read() };
        seen.lock().unwrap().push(guest);
        Ok(())
    });
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

#[test]
fn a_pass_ends_before_a_port_that_floods_or_has_much_cut_takes_the_time_of_others() {
    const PORTS: usize = 40;
    let big = NicConfig {
        size: 256,
        tx_buffer: 66_000,
        features: NicConfig::default().features | OFFLOADS,
        ..NicConfig::default()
    };
    let mut configs = [NicConfig { size: 64, ..NicConfig::default() }; PORTS];
    configs[0] = big;
    let mut rig = Rig::new(&configs);
    let sent = frame(Mac::BROADCAST, Rig::mac(0), 1514, 1);
    (0..BATCH).for_each(|_| assert!(rig.nics[0].send(&sent)));
    let got = |rig: &mut Rig| -> usize {
        (1..PORTS).map(|n| std::iter::from_fn(|| rig.nics[n].receive()).count()).sum()
    };
    rig.forwarder.pass(&rig.view, 0, 0, 1);
    let first = got(&mut rig);
    assert!((1..=16 * PORTS).contains(&first), "{first} frames in one turn");
    // Nothing of it is lost.
    let mut all = first;
    while rig.forwarder.pass(&rig.view, 0, 0, 2) != Pass::Idle {
        all += got(&mut rig);
    }
    assert_eq!(all, BATCH * (PORTS - 1));
}

/// The frames that guest `n` has got.
fn received(rig: &mut Rig, n: usize) -> usize {
    std::iter::from_fn(|| rig.nics[n].receive()).count()
}

/// Passes until the guests but the first have received `wanted` frames, and in each turn one to `most`; how many they received.
fn copies_in_turns(rig: &mut Rig, wanted: usize, most: usize) -> usize {
    let mut all = 0;
    while all < wanted {
        let done = rig.forwarder.pass(&rig.view, 0, 0, 1);
        let got: usize = (1..rig.nics.len()).map(|n| received(rig, n)).sum();
        assert!((1..=most).contains(&got), "{got} copies in a turn: {done:?}");
        all += got;
    }
    all
}

#[test]
fn a_frame_for_many_ports_is_given_to_them_in_many_turns() {
    const GUESTS: usize = 40;
    const FRAMES: usize = 32;
    let mut rig = Rig::new(&[NicConfig::default(); GUESTS]);
    for n in 0..FRAMES {
        assert!(rig.nics[0].send(&frame(Mac::BROADCAST, Rig::mac(0), 60, n as u8)));
    }
    let all = copies_in_turns(&mut rig, FRAMES * (GUESTS - 1), 150);
    let sent = rig.ports[0].sent();
    assert_eq!((sent.packets, sent.flooded), (FRAMES as u64, FRAMES as u64));
    assert_eq!((sent.packets + sent.copies) as usize, all);
}

#[test]
fn a_frame_of_many_segments_for_many_ports_is_given_to_one_of_them_in_each_turn() {
    const GUESTS: usize = 8;
    const SEGMENTS: usize = 200;
    const SIZE: usize = 300;
    let sender = NicConfig { tx_buffer: 70_000, ..NicConfig::default() };
    let sender = NicConfig { features: sender.features | OFFLOADS, ..sender };
    let mut configs = [NicConfig { size: 256, ..NicConfig::default() }; GUESTS];
    configs[0] = sender;
    let mut rig = Rig::new(&configs);
    let udp = [&[0x20, 0, 0x20, 0, 0, 0, 0, 0][..], &[1; SEGMENTS * SIZE]].concat();
    let packet = ipv4([10, 0, 0, 255], [10, 0, 0, 1], 17, &udp);
    let header = datagrams_of(SIZE);
    assert!(rig.nics[0].send_cut(&header, &ethernet(Mac::BROADCAST, Rig::mac(0), 0x0800, &packet), &[]));
    for turn in 1..GUESTS {
        let done = rig.forwarder.pass(&rig.view, 0, 0, turn as u64 * 1_000_000);
        assert_eq!(done, if turn + 1 < GUESTS { Pass::Held(0) } else { Pass::Worked(1) });
        for n in 1..GUESTS {
            assert_eq!(received(&mut rig, n), if n == turn { SEGMENTS } else { 0 }, "guest {n}, turn {turn}");
        }
    }
    let sent = rig.ports[0].sent();
    assert_eq!((sent.packets, sent.flooded), (1, 1));
    assert_eq!((sent.packets + sent.copies) as usize, (GUESTS - 1) * SEGMENTS);
}

#[test]
fn a_port_that_joins_many_groups_again_and_again_gets_no_longer_turns() {
    const REPORTS: usize = 32;
    const CHANGES: u8 = 64;
    let mut rig = Rig::new(&[NicConfig::default(); 2]);
    let routers = Ipv4Addr::new(224, 0, 0, 22);
    for _ in 0..REPORTS {
        let mut report = vec![0x22, 0, 0, 0, 0, 0, 0, CHANGES];
        (0..CHANGES).for_each(|n| report.extend([4, 0, 0, 0, 239, 1, 2, n]));
        let addresses = [Ipv4Addr::new(10, 0, 0, 1), routers];
        assert!(rig.nics[0].send(&talk::ipv4(talk::group4(routers), Rig::mac(0), addresses, 2, &report)));
    }
    let mut all = 0;
    while all < REPORTS {
        let done = rig.forwarder.pass(&rig.view, 0, 0, 1);
        let got = received(&mut rig, 1);
        assert!((1..=4).contains(&got), "{got} reports in a turn: {done:?}");
        all += got;
    }
}

#[test]
fn a_receiver_whose_chains_have_a_thousand_buffers_gives_its_sender_no_longer_turns() {
    const ALL: usize = 30;
    const SIZE: usize = 300;
    let udp = [&[0x20, 0, 0x20, 0, 0, 0, 0, 0][..], &[1; ALL * SIZE]].concat();
    let large = ethernet(Rig::mac(1), Rig::mac(0), 0x0800, &ipv4([10, 0, 0, 2], [10, 0, 0, 1], 17, &udp));
    let cut = datagrams_of(SIZE);
    let small = frame(Rig::mac(1), Rig::mac(0), 60, 1);
    for (packed, segmented) in [(false, false), (false, true), (true, false), (true, true)] {
        let size = 64;
        let config = NicConfig { packed, size, tx_buffer: 70_000, ..NicConfig::default() };
        let sender = NicConfig { features: config.features | OFFLOADS, ..config };
        let mut rig = Rig::new(&[sender, config]);
        // The receiver gives its first buffers away, and then chains with empty ones, which may lie anywhere.
        for _ in 0..size {
            assert!(rig.nics[0].send(&small));
        }
        rig.pass(0);
        rig.nics[0].reap();
        let nic = &mut rig.nics[1];
        assert_eq!(std::iter::from_fn(|| nic.rx.take_used(&nic.ram)).count(), usize::from(size));
        let (table, room) = (nic.ram.alloc(16 * MAX_CHAIN as u64, 16), nic.ram.alloc(2048, 16));
        let mut buffers = vec![(u64::MAX, 0); MAX_CHAIN];
        buffers[MAX_CHAIN - 1] = (room, 2048);
        for _ in 0..size {
            assert!(nic.rx.add(&nic.ram, &buffers, true, Some(table)).is_some());
        }
        if segmented {
            assert!(rig.nics[0].send_cut(&cut, &large, &[]));
        } else {
            (0..ALL).for_each(|_| assert!(rig.nics[0].send(&small)));
        }
        let mut all = 0;
        while all < ALL {
            let done = rig.forwarder.pass(&rig.view, 0, 0, 1);
            let nic = &mut rig.nics[1];
            let got = std::iter::from_fn(|| nic.rx.take_used(&nic.ram)).count();
            assert!((1..=10).contains(&got), "{got} in a turn: {done:?}, packed {packed} {segmented}");
            all += got;
        }
        let (sent, received) = (rig.ports[0].sent(), rig.ports[1].received());
        assert_eq!(sent.packets + sent.copies, received.packets);
        assert_eq!(received.packets as usize, usize::from(size) + ALL);
    }
}

#[test]
fn a_frame_of_a_thousand_buffers_for_many_ports_is_given_to_few_of_them_in_each_turn() {
    const GUESTS: usize = 40;
    const FRAMES: usize = 4;
    let mut rig = Rig::new(&[NicConfig::default(); GUESTS]);
    let sent = frame(Mac::BROADCAST, Rig::mac(0), 60, 1);
    let nic = &mut rig.nics[0];
    let (table, bytes) = (nic.ram.alloc(16 * MAX_CHAIN as u64, 16), nic.ram.alloc(72, 16));
    nic.ram.write(bytes + 12, &sent);
    let mut buffers = vec![(u64::MAX, 0); MAX_CHAIN];
    buffers[0] = (bytes, 72);
    for _ in 0..FRAMES {
        assert!(nic.tx.add(&nic.ram, &buffers, false, Some(table)).is_some());
    }
    copies_in_turns(&mut rig, FRAMES * (GUESTS - 1), 10);
}

/// Set while a thread has lost its processor.
static AWAY: AtomicBool = AtomicBool::new(false);
const ABSENCE: Duration = Duration::from_millis(500);

/// A signal's handler that keeps the thread from going on, as a busy host does.
extern "C" fn stay_away(_: libc::c_int) {
    AWAY.store(true, Ordering::Release);
    std::thread::sleep(ABSENCE);
}

#[test]
fn a_worker_that_loses_its_processor_amid_a_change_takes_up_the_next_change_at_once() {
    let switch = Arc::new(Switch::new(1, 0, false).unwrap());
    let port = Arc::new(Port::new("vm", 1));
    let nic = Nic::new(NicConfig::default()).unwrap();
    attach(&nic, &port, 0);
    switch.attach(Attached::guest(port.clone(), Policy::default())).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    // It doesn't sleep, and so waits for no queue but in a change.
    let pace = Pace { poll: Duration::from_secs(3600), cpu: None };
    let worker = Worker::new(switch.clone(), 0, pace, stop.clone()).unwrap();
    let worker = std::thread::spawn(move || worker.run().unwrap());
    switch.settle(|| false);
    // SAFETY: the handler sets a flag and sleeps; the thread is joined below.
    unsafe { libc::signal(libc::SIGUSR1, stay_away as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    let held = port.tx(0).lock();
    switch.changed();
    // The worker has begun with the change, and waits for the queue.
    wait_for("the change's beginning", || {
        let mut wake = [PollFd::new(switch.wake(0), PollFlags::IN)];
        (poll(&mut wake, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 0).then_some(())
    });
    // SAFETY: as above.
    assert_eq!(unsafe { libc::pthread_kill(worker.as_pthread_t(), libc::SIGUSR1) }, 0);
    wait_for("the worker's absence", || AWAY.load(Ordering::Acquire).then_some(()));
    drop(held);
    switch.settle(|| false);
    let begun = Instant::now();
    switch.changed();
    switch.settle(|| false);
    assert!(begun.elapsed() < 4 * ABSENCE, "{:?} for a change", begun.elapsed());
    stop.store(true, Ordering::Release);
    switch.changed();
    worker.join().unwrap();
}
