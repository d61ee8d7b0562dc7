// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The devices of uplinks at their limits and after their end.

mod common;

use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::lab::Lab;
use common::network::{datagrams_of, ethernet, ipv4};
use common::outlet::Outlet;
use common::wire::with_uplink;
use common::{Rig, frame, wait_for};
use tombolo_net::event::Event;
use tombolo_net::forwarding::forward::{BATCH, Pass};
use tombolo_net::forwarding::switch::Switch;
use tombolo_net::forwarding::view::Attached;
use tombolo_net::forwarding::worker::{Pace, Worker};
use tombolo_net::frames::frame::{MAX_FRAME, Mac};
use tombolo_net::policy::port::Policy;
use tombolo_net::ports::counters::Reason;
use tombolo_net::ports::port::Port;
use tombolo_net::uplink::passt::Passt;
use tombolo_net::uplink::{Link, Uplink};
use tombolo_net::vring::features::OFFLOADS;
use tombolo_net::vring::queue::{Guard, Negotiated};
use tombolo_net_driver::{Nic, NicConfig};

const OUTSIDE: Mac = Mac([2, 9, 9, 9, 9, 9]);

/// A device whose calls all fail in the same way, and are counted.
struct Failing {
    error: fn() -> io::Error,
    calls: Arc<AtomicUsize>,
    silence: Event,
}

impl Link for Failing {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, _: &[libc::iovec]) -> io::Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Err((self.error)())
    }

    fn receive(&self, _: &mut [u8]) -> io::Result<usize> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Err((self.error)())
    }

    fn fd(&self) -> RawFd {
        self.silence.as_raw_fd()
    }
}

#[test]
fn a_device_that_is_gone_is_tried_once_and_one_that_is_down_for_a_while_again() {
    let cases: [(fn() -> io::Error, bool); 5] = [
        (|| io::ErrorKind::UnexpectedEof.into(), true),
        (|| io::ErrorKind::BrokenPipe.into(), true),
        // A TAP device and an interface that were removed, and an interface that is down.
        (|| io::Error::from_raw_os_error(libc::EBADFD), true),
        (|| io::Error::from_raw_os_error(libc::ENXIO), true),
        (|| io::Error::from_raw_os_error(libc::ENETDOWN), false),
    ];
    for (error, gone) in cases {
        let calls: Arc<AtomicUsize> = Arc::default();
        let mut rig = Rig::new(&[NicConfig::default()]);
        rig.add_link(Box::new(Failing { error, calls: calls.clone(), silence: Event::new().unwrap() }));
        for _ in 0..10 {
            assert_eq!(rig.pass(1), Pass::Idle);
            assert!(rig.nics[0].send(&frame(OUTSIDE, Rig::mac(0), 60, 0)));
            assert_eq!(rig.pass(0), Pass::Worked(1));
        }
        let calls = calls.load(Ordering::Relaxed);
        assert_eq!(calls == 1, gone, "{calls} calls: {}", error());
        let (sent, received) = (rig.ports[0].sent(), rig.ports[1].received());
        let lost = if gone { sent.dropped_for(Reason::Down) } else { received.dropped_for(Reason::Uplink) };
        assert_eq!(lost, 10, "{}", error());
        assert_eq!(rig.view.ports()[1].uplink.as_ref().unwrap().is_up(), !gone);
    }
}

#[test]
fn passt_gets_no_frame_that_is_longer_than_it_takes() {
    // passt (since 2024) closes the connection over which a longer one comes, and with it the uplink of all guests.
    const LONGEST: usize = 65_535;
    let (own, mut theirs) = UnixStream::pair().unwrap();
    let mut rig = Rig::new(&[NicConfig { tx_buffer: 70_000, ..NicConfig::default() }]);
    rig.add_link(Box::new(Passt::over(own.into()).unwrap()));
    for len in [LONGEST + 1, MAX_FRAME, LONGEST] {
        assert!(rig.nics[0].send(&frame(OUTSIDE, Rig::mac(0), len, 0)));
        assert_eq!(rig.pass(0), Pass::Worked(1));
    }
    let mut head = [0; 4];
    theirs.read_exact(&mut head).unwrap();
    assert_eq!(u32::from_be_bytes(head) as usize, LONGEST);
    assert_eq!(rig.ports[1].received().dropped_for(Reason::Uplink), 2);
}

#[test]
fn an_uplinks_frames_behind_an_error_are_taken_at_once_and_an_uplink_that_only_fails_lets_its_worker_sleep() {
    // An interface that was down for a moment says so once, before it hands out its next frame.
    let mut rig = Rig::new(&[NicConfig::default()]);
    let wire = with_uplink(&mut rig);
    let sent = frame(Rig::mac(0), Mac([2, 9, 9, 9, 9, 9]), 80, 1);
    wire.inward.lock().unwrap().extend([vec![], sent.clone()]);
    assert_eq!(rig.forwarder.pass(&rig.view, 1, 0, 1), Pass::Worked(1));
    assert_eq!(rig.nics[0].receive().map(|f| f.1), Some(sent));
    wire.inward.lock().unwrap().extend(vec![vec![]; 10 * BATCH]);
    assert_eq!(rig.forwarder.pass(&rig.view, 1, 0, 2), Pass::Idle);
    assert!(wire.inward.lock().unwrap().len() >= 9 * BATCH);
}

/// A device that keeps the first byte of each datagram, as long as it has room.
fn narrow(datagrams: Arc<Mutex<Vec<u8>>>, room: usize) -> Box<dyn Link> {
    Box::new(Outlet::new(move |pieces| {
        // SAFETY: the switch's promise: the pieces are mapped.
        let bytes =
            |p: &libc::iovec| unsafe { std::slice::from_raw_parts(p.iov_base.cast::<u8>(), p.iov_len) };
        let frame: Vec<u8> = pieces.iter().flat_map(bytes).copied().collect();
        let mut datagrams = datagrams.lock().unwrap();
        if datagrams.len() == room {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        datagrams.push(frame[14 + 20 + 8]);
        Ok(())
    }))
}

#[test]
fn a_frame_of_many_segments_is_given_to_a_device_in_many_turns_that_use_up_no_credit() {
    const SEGMENTS: usize = 1000;
    const SIZE: usize = 48;
    // The time from one turn to the next, in which other ports have theirs: more than a pair's credit.
    const ROUND: u64 = 1_000_000;
    for to in [OUTSIDE, Mac::BROADCAST] {
        let datagrams: Arc<Mutex<Vec<u8>>> = Arc::default();
        let features = NicConfig::default().features | OFFLOADS;
        let config = NicConfig { tx_buffer: 70_000, features, ..NicConfig::default() };
        let mut rig = Rig::new(&[config]);
        rig.add_link(narrow(datagrams.clone(), SEGMENTS));
        let data = (0..SEGMENTS).flat_map(|n| [n as u8; SIZE]);
        let udp: Vec<u8> = [0x20, 0, 0x20, 0, 0, 0, 0, 0].into_iter().chain(data).collect();
        let sent = ethernet(to, Rig::mac(0), 0x0800, &ipv4([10, 0, 0, 2], [10, 0, 0, 1], 17, &udp));
        let header = datagrams_of(SIZE);
        assert!(rig.nics[0].send_cut(&header, &sent, &[]));
        let mut now = 0;
        let mut given = 0;
        while given < SEGMENTS {
            now += ROUND;
            rig.forwarder.pass(&rig.view, 0, 0, now);
            let all = datagrams.lock().unwrap().len();
            assert!((given + 1..=given + 100).contains(&all), "{given} segments, and {all} a turn later");
            given = all;
        }
        assert!(datagrams.lock().unwrap().iter().copied().eq((0..SEGMENTS).map(|n| n as u8)));
        assert_eq!((rig.ports[0].sent().packets, rig.ports[0].sent().copies), (1, SEGMENTS as u64 - 1));
        assert_eq!(rig.ports[1].received().packets, SEGMENTS as u64);
        // The device is full: a frame may wait for it.
        assert!(rig.nics[0].send(&frame(OUTSIDE, Rig::mac(0), 60, 0)));
        assert_eq!(rig.forwarder.pass(&rig.view, 0, 0, now), Pass::Held(0));
    }
}

/// A device that hands out what `receive` does, and says by `event` when there may be something.
struct Inlet<F> {
    receive: F,
    event: Arc<Event>,
}

impl<F: Fn() -> Option<Vec<u8>> + Send + Sync> Link for Inlet<F> {
    fn header(&self) -> usize {
        0
    }

    fn offloads(&self) -> Negotiated {
        Negotiated::default()
    }

    fn send(&self, _: &[libc::iovec]) -> io::Result<()> {
        Ok(())
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let f = (self.receive)().ok_or(io::ErrorKind::WouldBlock)?;
        buffer[..f.len()].copy_from_slice(&f);
        Ok(f.len())
    }

    fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

#[test]
fn a_worker_that_finds_an_uplink_in_the_hands_of_another_looks_again_before_it_sleeps() {
    const ROUNDS: u8 = 20;
    let switch = Arc::new(Switch::new(1, 0, false).unwrap());
    let (guest, event) = (Arc::new(Port::new("vm", 1)), Arc::new(Event::new().unwrap()));
    let mut nic = Nic::new(NicConfig::default()).unwrap();
    nic.attach(&guest).unwrap();
    switch.attach(Attached::guest(guest, Policy { macs: vec![Rig::mac(0)], ..Policy::default() })).unwrap();
    let attach = |port: Arc<Port>, link: Box<dyn Link>| {
        let (uplink, policy) =
            (Some(Arc::new(Uplink::new(link))), Policy { uplink: true, ..Policy::default() });
        switch.attach(Attached { uplink, ..Attached::guest(port, policy) }).unwrap();
    };
    let port = |name| Arc::new(Port::new(name, 1));
    let silent = || Arc::new(Event::new().unwrap());
    // The lock outlives the test: the worker's thread takes and releases it, in the turns before and after the uplink's.
    let up: &'static Arc<Port> = Box::leak(Box::new(port("up")));
    let other_worker: Arc<Mutex<Option<Guard<'static>>>> = Arc::default();
    let interferes = Arc::new(AtomicBool::new(false));
    let (held, now) = (other_worker.clone(), interferes.clone());
    let before = move || {
        if now.swap(false, Ordering::AcqRel) {
            *held.lock().unwrap() = up.tx(0).try_lock();
        }
        None
    };
    attach(port("before"), Box::new(Inlet { receive: before, event: silent() }));
    let inward: Arc<Mutex<VecDeque<Vec<u8>>>> = Arc::default();
    let frames = inward.clone();
    let receive = move || frames.lock().unwrap().pop_front();
    attach(up.clone(), Box::new(Inlet { receive, event: event.clone() }));
    let after = move || {
        other_worker.lock().unwrap().take();
        None
    };
    attach(port("after"), Box::new(Inlet { receive: after, event: silent() }));
    let stop = Arc::new(AtomicBool::new(false));
    let pace = Pace { poll: Duration::ZERO, cpu: None };
    let worker = Worker::new(switch.clone(), 0, pace, stop.clone()).unwrap();
    let worker = std::thread::spawn(move || worker.run().unwrap());
    for round in 0..ROUNDS {
        inward.lock().unwrap().push_back(frame(Rig::mac(0), OUTSIDE, 60, round));
        interferes.store(true, Ordering::Release);
        event.raise();
        wait_for("the frame", || nic.receive());
    }
    stop.store(true, Ordering::Release);
    switch.changed();
    worker.join().unwrap();
}

#[test]
fn a_switch_whose_worker_panics_ends() {
    const NAME: &str = "a_switch_whose_worker_panics_ends";
    const INSIDE: &str = "TOMBOLO_TEST_PANIC";
    if std::env::var_os(INSIDE).is_none() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let status =
            command.args(["--exact", NAME, "--nocapture"]).env(INSIDE, "1").stderr(Stdio::null()).status();
        assert_eq!(status.unwrap().signal(), Some(libc::SIGABRT));
        return;
    }
    // SAFETY: takes a number; no file of the process that ends on purpose is kept.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
    let lab = Lab::new(0, 1);
    let link = Outlet::new(|_| panic!("as a defect of the switch would"));
    let mut out =
        Attached::guest(Arc::new(Port::new("out", 1)), Policy { uplink: true, ..Policy::default() });
    out.uplink = Some(Arc::new(Uplink::new(Box::new(link))));
    let mut nic = Nic::new(NicConfig::default()).unwrap();
    let guest = Arc::new(Port::new("vm", 1));
    nic.attach(&guest).unwrap();
    let switch = lab.daemon.switch();
    switch.attach(out).unwrap();
    switch.attach(Attached::guest(guest, Policy { macs: vec![Rig::mac(0)], ..Policy::default() })).unwrap();
    assert!(nic.send(&frame(OUTSIDE, Rig::mac(0), 60, 0)));
    switch.changed();
    wait_for("the end", || None::<()>);
}
