// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch as its users run it, sandboxed, with uplinks: TAP and an interface. Each test has a network namespace of its
//! own, which ends with it. Needs iproute2 and util-linux.

mod common;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};

use common::namespace::alone;
use common::network::{arp, cable, ethernet, ipv4, sh, sum};
use common::program::Switch;
use common::{Rig, frame, wait_for};
use tombolo_control::net::Done;
use tombolo_net::control::socket::{Request, ask};
use tombolo_net::frames::frame::{GSO_TCPV4, Mac, NEEDS_CSUM, NetHeader};
use tombolo_net::uplink::Link;
use tombolo_net::uplink::packet::Packet;
use tombolo_net::vring::features::OFFLOADS;
use tombolo_net_driver::Nic;

const HOST: [u8; 4] = [10, 9, 0, 1];
const GUEST: [u8; 4] = [10, 9, 0, 2];

/// Returns the next frame for the guest that is not its neighbours' own traffic; answers ARP requests for its MAC.
fn next(nic: &mut Nic, own: Mac) -> Vec<u8> {
    wait_for("a frame from outside", || {
        let (_, f) = nic.receive()?;
        let kind = u16::from_be_bytes([f[12], f[13]]);
        if kind == 0x806 && f[21] == 1 && f[38..42] == GUEST {
            let asker = Mac(f[22..28].try_into().unwrap());
            let body = arp(2, own, GUEST, asker, f[28..32].try_into().unwrap());
            assert!(nic.send(&ethernet(asker, own, 0x806, &body)));
            return None;
        }
        (kind != 0x86dd && f[..6] == own.0).then_some(f)
    })
}

#[test]
fn host_and_guest_talk_through_a_tap() {
    alone("host_and_guest_talk_through_a_tap", || {
        sh("ip tuntap add tap0 mode tap && ip addr add 10.9.0.1/24 dev tap0");
        let switch = Switch::start(1, &["--uplink", "tap=tap0"]);
        let own = Rig::mac(1);
        let mut guest = switch.guest(OFFLOADS);

        // The guest finds the host, which answers its echo.
        assert!(guest.send(&ethernet(Mac::BROADCAST, own, 0x806, &arp(1, own, GUEST, Mac([0; 6]), HOST))));
        let reply = next(&mut guest, own);
        let host = Mac(reply[22..28].try_into().unwrap());
        let mut echo = [&[8, 0, 0, 0, 0, 7, 0, 1][..], &[0x5a; 1000]].concat();
        let check = sum(&echo);
        echo[2..4].copy_from_slice(&check);
        assert!(guest.send(&ethernet(host, own, 0x800, &ipv4(HOST, GUEST, 1, &echo))));
        let reply = next(&mut guest, own);
        assert_eq!((&reply[34..36], &reply[38..]), (&[0, 0][..], &echo[4..]));

        // Data from the host's programs to the guest, and back.
        let socket = UdpSocket::bind("10.9.0.1:4000").unwrap();
        for n in 0..50u8 {
            let data = vec![n; 20 + 28 * usize::from(n)];
            socket.send_to(&data, "10.9.0.2:5000").unwrap();
            let got = next(&mut guest, own);
            assert_eq!((&got[34..38], &got[42..]), (&[15, 160, 19, 136][..], &data[..]));
            let udp = [&[19, 136, 15, 160][..], &((8 + data.len()) as u16).to_be_bytes(), &[0, 0], &data];
            assert!(guest.send(&ethernet(host, own, 0x800, &ipv4(HOST, GUEST, 17, &udp.concat()))));
            let mut buffer = [0; 2000];
            let (len, from) = socket.recv_from(&mut buffer).unwrap();
            assert_eq!((&buffer[..len], from), (&data[..], "10.9.0.2:5000".parse().unwrap()));
        }

        // Every frame is counted at the uplink too.
        let (vm, up) = (switch.port("vm").unwrap(), switch.port("uplink0").unwrap());
        assert_eq!(vm["sent"]["packets"], up["received"]["packets"]);
        assert!(up["sent"]["packets"].as_u64() >= Some(52), "{up}");
    });
}

/// A TCP segment that is to be cut.
fn large(payload: usize) -> (NetHeader, Vec<u8>) {
    let tcp = [0x10, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0x50, 0x18, 1, 0, 0, 0, 0, 0];
    let data: Vec<u8> = (0..payload).map(|i| (i / 3) as u8).collect();
    let packet = ipv4([10, 0, 0, 2], [10, 0, 0, 1], 6, &[&tcp[..], &data].concat());
    let header = NetHeader {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };
    (header, ethernet(Rig::mac(1), Rig::mac(0), 0x800, &packet))
}

#[test]
fn guests_of_two_hosts_talk_through_their_interfaces() {
    alone("guests_of_two_hosts_talk_through_their_interfaces", || {
        cable();
        let (here, there) = (
            Switch::start(0, &["--uplink", "interface=v0"]),
            Switch::start(1, &["--uplink", "interface=v1"]),
        );
        let (mut a, mut b) = (here.guest(OFFLOADS), there.guest(OFFLOADS));
        for len in [60, 61, 500, 1513, 1514] {
            for to in [Rig::mac(1), Mac::BROADCAST] {
                let sent = frame(to, Rig::mac(0), len, len as u8);
                assert!(a.send(&sent));
                assert_eq!(wait_for("the frame", || b.receive()).1, sent);
            }
        }

        // A tag is the guests' own, though the kernel strips it on the way.
        let mut tagged = frame(Rig::mac(1), Rig::mac(0), 200, 3);
        tagged.splice(12..12, [0x81, 0, 0x60, 5]);
        assert!(a.send(&tagged));
        assert_eq!(wait_for("the tagged frame", || b.receive()).1, tagged);

        // A large segment passes whole between guests that can take it, tagged or not, and in pieces for one that can't.
        let (header, whole) = large(20_000);
        assert!(a.send_cut(&header, &whole, &[12]));
        let (got, bytes) = wait_for("the segment", || b.receive());
        assert_eq!((got.gso_type, got.gso_size, got.csum_start, &bytes), (GSO_TCPV4, 1448, 34, &whole));
        let mut tagged = whole.clone();
        tagged.splice(12..12, [0x81, 0, 0, 5]);
        let shifted = NetHeader { hdr_len: 58, csum_start: 38, ..header };
        assert!(a.send_cut(&shifted, &tagged, &[12]));
        let (got, bytes) = wait_for("the tagged segment", || b.receive());
        assert_eq!((got.gso_type, got.csum_start, &bytes), (GSO_TCPV4, 38, &tagged));
        drop(b);
        let mut b = there.guest(0);
        assert!(a.send_cut(&header, &whole, &[12]));
        let mut data = Vec::new();
        while data.len() < 20_000 {
            let (_, piece) = wait_for("a piece", || b.receive());
            assert!(piece.len() <= 1514);
            data.extend_from_slice(&piece[54..]);
        }
        assert!(data == whole[54..]);

        // A frame without an owner goes to the uplink, and does not come back in.
        assert!(a.send(&frame(Rig::mac(7), Rig::mac(0), 60, 0)));
        wait_for("the drop", || {
            let up = there.port("uplink0")?;
            (up["sent"]["drops"]["unknown"].as_u64()? == 1).then_some(())
        });
        assert!(a.receive().is_none());
    });
}

#[test]
fn an_uplink_that_cannot_be_had_is_named_and_the_ports_go_on() {
    alone("an_uplink_that_cannot_be_had_is_named_and_the_ports_go_on", || {
        for (way, words) in [
            ("interface=nosuch0", "interface nosuch0: not there"),
            ("tap=much-too-long-a-name", "'much-too-long-a-name' is no interface name"),
            ("tap=lo", "TAP device lo: "),
            ("passt=/nonexistent", "start it with: passt -s /nonexistent"),
            ("user=/nonexistent", "install the package passt"),
        ] {
            let switch = Switch::start(1, &["--uplink", way]);
            // The switch's threads that write its log have their own time.
            wait_for(words, || switch.log().contains(words).then_some(()));
            assert!(switch.port("uplink0").is_none());
            drop(switch.guest(0));
        }
    });
}

#[test]
fn an_interface_opened_as_uplink_brings_no_frames_of_other_interfaces() {
    alone("an_interface_opened_as_uplink_brings_no_frames_of_other_interfaces", || {
        cable();
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
                while !over.load(Ordering::Relaxed) {
                    socket.send_to(&[0x5a; 100], "127.0.0.1:9").unwrap();
                }
            });
            let mut buffer = vec![0; 70_000];
            let mut foreign = 0;
            for _ in 0..50 {
                let packet = Packet::over(Packet::open("v0").unwrap());
                while packet.receive(&mut buffer).is_ok() {
                    foreign += 1;
                }
            }
            over.store(true, Ordering::Relaxed);
            assert_eq!(foreign, 0);
        });
    });
}

#[test]
fn an_uplink_whose_device_is_removed_is_down_until_it_is_added_again() {
    alone("an_uplink_whose_device_is_removed_is_down_until_it_is_added_again", || {
        for (made, device) in
            [("ip link add x0 type veth peer name x1", "interface"), ("ip tuntap add x0 mode tap", "tap")]
        {
            sh(made);
            let switch = Switch::start(1, &["--uplink", &format!("{device}=x0")]);
            let mut guest = switch.guest(0);
            assert!(switch.is_up("uplink0"), "{device}");
            sh("ip link del x0");
            wait_for(&format!("the {device} to be down"), || {
                // The switch hears of it when it sends a frame.
                let _full = guest.send(&ethernet(Mac([2, 9, 9, 9, 9, 9]), Rig::mac(1), 0x88b5, &[0; 46]));
                (!switch.is_up("uplink0")).then_some(())
            });
            wait_for("a warning", || switch.log().contains("its device is gone").then_some(()));
            sh(made);
            let again = serde_json::json!({ "name": "uplink0", device: "x0" });
            ask::<Done>(&switch.control(), &Request::Remove { name: "uplink0".into() }).unwrap();
            let uplink = serde_json::from_value(again).unwrap();
            ask::<Done>(&switch.control(), &Request::AddUplink { uplink }).unwrap();
            assert!(switch.is_up("uplink0"), "{device}");
            sh("ip link del x0");
        }
    });
}
