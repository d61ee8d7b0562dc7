// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The devices of uplinks at their limits and after their end.

mod common;

use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Rig, frame};
use tombolo_net::event::Event;
use tombolo_net::forwarding::forward::Pass;
use tombolo_net::frames::frame::{MAX_FRAME, Mac};
use tombolo_net::ports::counters::Reason;
use tombolo_net::uplink::Link;
use tombolo_net::uplink::passt::Passt;
use tombolo_net::vring::driver::NicConfig;
use tombolo_net::vring::queue::Negotiated;

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
    let cases: [(fn() -> io::Error, bool); 4] = [
        (|| io::ErrorKind::UnexpectedEof.into(), true),
        (|| io::ErrorKind::BrokenPipe.into(), true),
        // A TAP device that was removed, and an interface that is down.
        (|| io::Error::from_raw_os_error(libc::EBADFD), true),
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
