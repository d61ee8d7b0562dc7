// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Any bytes as a frame for the switch's own services, and as a message about multicast groups: the parsers neither panic nor
//! answer with more than a frame.

use std::sync::OnceLock;

use tombolo_net::frames::frame::Mac;
use tombolo_net::frames::headers::{Headers, LOOK};
use tombolo_net::frames::membership::{self, Message};
use tombolo_net::service::dhcp::Dhcp;
use tombolo_net::service::ipv6::Ipv6;
use tombolo_net::service::{Lease, Leases, Responder};

const GUEST: Mac = Mac([2, 0, 0, 0, 0, 1]);
/// Bytes of the longest Ethernet frame.
const LONGEST: usize = 1514;

fn services() -> &'static [Box<dyn Responder>; 2] {
    static SERVICES: OnceLock<[Box<dyn Responder>; 2]> = OnceLock::new();
    SERVICES.get_or_init(|| {
        let (four, six) = (Leases::default(), Leases::default());
        let name = String::from("web");
        let address = "10.0.0.5".parse().expect("an address");
        four.put(GUEST, Lease { address, name: name.clone() }).expect("a lease");
        let address = "fd00::5".parse().expect("an address");
        six.put(GUEST, Lease { address, name }).expect("a lease");
        let dhcp =
            serde_json::from_str(r#"{ "address": "10.0.0.1/24", "dns": ["10.0.0.2"], "domain": "lan" }"#);
        let ipv6 = serde_json::from_str(r#"{ "prefix": "fd00::/64", "managed": true, "dns": ["fd00::53"] }"#);
        [
            Box::new(Dhcp::new(dhcp.expect("a configuration"), four)),
            Box::new(Ipv6::new(ipv6.expect("a configuration"), six)),
        ]
    })
}

/// One input: a byte that chooses the frame's headers, and the frame's rest.
pub fn one(data: &[u8]) {
    // Mutation does not find valid sums and lengths, so a byte chooses the headers.
    let Some((choice, rest)) = data.split_first() else { return };
    let mut frame = vec![0xff; 6];
    frame.extend(GUEST.0);
    match choice % 4 {
        0 => frame.extend(rest),
        1 => {
            // UDP from port 68 to 67.
            let total = (28 + rest.len()) as u16;
            frame.extend([8, 0, 0x45, 0]);
            frame.extend(total.to_be_bytes());
            frame.extend([0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 68, 0, 67]);
            frame.extend((total - 20).to_be_bytes());
            frame.extend([0, 0]);
            frame.extend(rest);
        }
        kind => {
            // UDP from port 546 to 547, or ICMPv6.
            let udp = kind == 2;
            let length = (rest.len() + if udp { 8 } else { 0 }) as u16;
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(length.to_be_bytes());
            frame.extend([if udp { 17 } else { 58 }, 255, 0xfe, 0x80, 0, 0, 0, 0, 0, 0]);
            frame.extend([0, 0, 0xff, 0xff, 0xfe, 0, 0, 1]);
            frame.extend([0xff; 16]);
            if udp {
                frame.extend([2, 34, 2, 35]);
                frame.extend(length.to_be_bytes());
                frame.extend([0, 0]);
            }
            frame.extend(rest);
        }
    }
    frame.truncate(LONGEST);
    for service in services() {
        if let Some(reply) = service.answer(&frame) {
            assert_eq!(reply[..6], GUEST.0);
            assert!(reply.len() <= LONGEST);
        }
    }
    let headers = Headers::parse(&frame[..frame.len().min(LOOK)], frame.len() as u32);
    if let Some(Message::Report(report)) = membership::read(&headers, &frame) {
        let mut changes = 0;
        report.each(|_| changes += 1);
        assert!(changes <= 1 + frame.len() / 8);
    }
}
