// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counts the instructions for a frame of 64 bytes in the switch, without threads and other processes: two guests, one of which
//! sends bursts of frames to the other, by default of 32; bursts of 1 are what a round trip consists of. Under callgrind only the passes
//! are counted:
//!
//! ```text
//! cargo build --release -p tombolo-net-load --example per_frame
//! valgrind --tool=callgrind --cache-sim=yes --toggle-collect='*Forwarder*pass*' --callgrind-out-file=/dev/null \
//!     target/release/examples/per_frame packed 1000 32
//! ```
//! Counts divided by 32,000 (here) are those of a frame. Kinds of rings: `split`, `packed`, `split-inorder` and `packed-inorder` (as
//! testpmd has them); with `-policy` behind it the sender has addresses, a rule and a limit.

use std::process::ExitCode;
use std::sync::Arc;

use tombolo_net::forwarding::forward::Forwarder;
use tombolo_net::forwarding::view::{Attached, View};
use tombolo_net::frames::frame::Mac;
use tombolo_net::policy::limit::Rate;
use tombolo_net::policy::port::Policy;
use tombolo_net::ports::port::Port;
use tombolo_net::vring::features::bit;
use tombolo_net_driver::{Nic, NicConfig};

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let kind = args.next().unwrap_or_default();
    let (Some(rounds), Some(burst), Some(packed)) = (
        args.next().and_then(|n| n.parse::<u32>().ok()),
        args.next().map_or(Some(32), |n| n.parse::<usize>().ok()).filter(|n| (1..=32).contains(n)),
        kind.strip_prefix("packed").map(|_| true).or(kind.strip_prefix("split").map(|_| false)),
    ) else {
        eprintln!("usage: per_frame split|packed[-inorder][-policy] ROUNDS [FRAMES OF A BURST, 1 to 32]");
        return ExitCode::FAILURE;
    };
    let mut config = NicConfig { packed, size: 256, ..NicConfig::default() };
    if kind.contains("-inorder") {
        config.features |= 1 << bit::IN_ORDER;
    }
    let mut nics = [config; 2].map(|c| Nic::new(c).expect("a guest"));
    let ports = ["a", "b"].map(|name| Arc::new(Port::new(name, 1)));
    for (nic, port) in nics.iter().zip(&ports) {
        nic.attach(port).expect("attached");
    }
    let mac = |n: usize| Mac([0x52, 0x54, 0, 0, 0, n as u8]);
    let policy = |n: usize| {
        let plain = Policy { macs: vec![mac(n)], check_mac: true, ..Policy::default() };
        if n > 0 || !kind.ends_with("-policy") {
            return plain;
        }
        let rule = r#"{ "action": "drop", "direction": "out", "protocol": "tcp", "destination-port": 25 }"#;
        Policy {
            ips: vec!["10.0.0.1".parse().expect("an address")],
            rate: Rate { bytes: 1 << 40, packets: 1 << 40 },
            rules: vec![serde_json::from_str(rule).expect("a rule")],
            ..plain
        }
    };
    let attached = ports.iter().enumerate().map(|(n, port)| Attached::guest(port.clone(), policy(n)));
    let view = View::new(attached.collect()).expect("a view").snooping(Some(Arc::default()));
    let mut frame = [&mac(1).0[..], &mac(0).0, &[8, 0, 0x45, 0, 0, 50, 0, 0, 0, 0, 64, 17, 0, 0]].concat();
    frame.extend([10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 7, 0, 30]);
    frame.resize(64, 0);
    let mut forwarder = Forwarder::default();
    let mut received = 0;
    for round in 0..rounds {
        for _ in 0..burst {
            assert!(nics[0].send(&frame), "no room");
        }
        forwarder.pass(&view, 0, 0, u64::from(round) * 1_000_000);
        received += std::iter::from_fn(|| nics[1].receive()).count();
    }
    assert_eq!(received, rounds as usize * burst);
    println!("{received} frames");
    ExitCode::SUCCESS
}
