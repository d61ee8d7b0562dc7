// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two guests on one switch, without sockets and threads: the passes are called by the test.

mod common;

use std::sync::atomic::Ordering;

use common::{Rig, frame};
use proptest::prelude::*;
use tombolo_net::frames::frame::{Mac, NetHeader};
use tombolo_net::ports::counters::Reason;
use tombolo_net::vring::features::bit;
use tombolo_net_driver::NicConfig;

fn kinds() -> Vec<NicConfig> {
    let mut all = Vec::new();
    for packed in [false, true] {
        for indirect in [false, true] {
            for event_idx in [false, true] {
                let mut config = NicConfig { packed, indirect, ..NicConfig::default() };
                config.features |= u64::from(event_idx) << bit::EVENT_IDX | 1 << bit::IN_ORDER;
                all.push(config);
            }
        }
    }
    all
}

#[test]
fn a_frame_arrives_as_it_was_sent_between_all_kinds_of_rings() {
    for a in kinds() {
        for b in kinds() {
            let mut rig = Rig::new(&[a, b]);
            let sent = frame(Rig::mac(1), Rig::mac(0), 200, 7);
            assert!(rig.nics[0].send(&sent));
            rig.pass(0);
            assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent), "{a:?} to {b:?}");
            assert_eq!(rig.nics[1].receive(), None);
            rig.nics[0].reap();
            assert_eq!(rig.nics[0].unsent(), 0);
        }
    }
}

#[test]
fn frames_of_every_length_come_through_in_order_for_many_laps() {
    for config in kinds() {
        let mut rig = Rig::new(&[config, config]);
        let mut expect = std::collections::VecDeque::new();
        for n in 0..1500u32 {
            let sent = frame(Rig::mac(1), Rig::mac(0), 14 + n as usize % 1500, n as u8);
            assert!(rig.nics[0].send(&sent), "frame {n}");
            expect.push_back(sent);
            if n % 7 == 0 {
                rig.pass(0);
                while let Some((_, got)) = rig.nics[1].receive() {
                    assert_eq!(Some(got), expect.pop_front(), "{config:?}");
                }
            }
        }
        rig.pass(0);
        while let Some((_, got)) = rig.nics[1].receive() {
            assert_eq!(Some(got), expect.pop_front());
        }
        assert!(expect.is_empty(), "{} frames are missing with {config:?}", expect.len());
    }
}

#[test]
fn a_large_frame_takes_several_mergeable_buffers_and_says_how_many() {
    for packed in [false, true] {
        let sender = NicConfig { packed, tx_buffer: 70000, ..NicConfig::default() };
        let receiver = NicConfig { packed, rx_buffer: 1024 + 500, ..NicConfig::default() };
        let mut rig = Rig::new(&[sender, receiver]);
        for len in [1600, 9014, 30000, 65549] {
            let sent = frame(Rig::mac(1), Rig::mac(0), len, 3);
            assert!(rig.nics[0].send(&sent));
            rig.pass(0);
            let (_, got) = rig.nics[1].receive().expect("a frame");
            assert!(got == sent, "{len} bytes came as {}", got.len());
        }
    }
}

#[test]
fn a_frame_too_large_for_unmergeable_buffers_is_dropped_and_counted() {
    let sender = NicConfig { tx_buffer: 9100, ..NicConfig::default() };
    let receiver = NicConfig { features: 0, ..NicConfig::default() };
    let mut rig = Rig::new(&[sender, receiver]);
    assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 9000, 1)));
    assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 100, 2)));
    rig.pass(0);
    assert_eq!(rig.nics[1].receive().map(|f| f.1.len()), Some(100));
    assert_eq!(rig.ports[1].received().dropped_for(Reason::BufferSize), 1);
}

#[test]
fn a_full_receiver_holds_its_sender_up_and_then_loses_frames_that_are_counted() {
    let receiver = NicConfig { size: 16, ..NicConfig::default() };
    let mut rig = Rig::new(&[NicConfig::default(), receiver]);
    for n in 0..20 {
        assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, n)));
    }
    rig.pass_at(0, 1_000);
    rig.nics[0].reap();
    assert_eq!(rig.nics[0].unsent(), 4, "four frames wait in the sender's ring");
    assert_eq!(rig.ports[0].sent().dropped(), 0);
    // Longer than any credit: the rest is dropped, and counted.
    rig.pass_at(0, 10_000_000_000);
    rig.pass_at(0, 20_000_000_000);
    rig.nics[0].reap();
    assert_eq!(rig.nics[0].unsent(), 0);
    let lost = rig.ports[0].sent().dropped_for(Reason::NoBuffer)
        + rig.ports[1].received().dropped_for(Reason::NoBuffer);
    assert_eq!(lost, 4);
    let mut got = 0;
    while rig.nics[1].receive().is_some() {
        got += 1;
    }
    assert_eq!(got, 16);
}

#[test]
fn broadcast_goes_to_all_but_its_sender_and_unknown_unicast_to_nobody() {
    let mut rig = Rig::new(&[NicConfig::default(); 4]);
    let to_all = frame(Mac::BROADCAST, Rig::mac(2), 60, 1);
    assert!(rig.nics[2].send(&to_all));
    assert!(rig.nics[2].send(&frame(Mac([2, 9, 9, 9, 9, 9]), Rig::mac(2), 60, 2)));
    assert!(rig.nics[2].send(&frame(Rig::mac(2), Rig::mac(2), 60, 3)));
    rig.pass(2);
    for (i, nic) in rig.nics.iter_mut().enumerate() {
        assert_eq!(nic.receive().map(|f| f.1), (i != 2).then(|| to_all.clone()));
        assert_eq!(nic.receive(), None);
    }
    assert_eq!(rig.ports[2].sent().dropped_for(Reason::Unknown), 1);
    assert_eq!(rig.ports[2].sent().dropped_for(Reason::Loop), 1);
    assert_eq!(rig.ports[2].sent().flooded, 1);
}

#[test]
fn frames_for_a_guest_that_is_not_there_are_dropped_at_once() {
    let mut rig = Rig::new(&[NicConfig::default(); 2]);
    rig.ports[1].rx(0).lock().stop();
    rig.ports[1].note_active();
    assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, 1)));
    rig.pass(0);
    rig.nics[0].reap();
    assert_eq!(rig.nics[0].unsent(), 0);
    assert_eq!(rig.ports[0].sent().dropped_for(Reason::Down), 1);
}

#[test]
fn a_receiver_is_interrupted_when_it_wants_to_be_and_only_then() {
    for config in kinds() {
        let mut rig = Rig::new(&[config, config]);
        for n in 0..40u8 {
            let wants = n % 2 == 0;
            if wants {
                assert!(!rig.nics[1].rx.want_signal(&rig.nics[1].ram));
            } else {
                rig.nics[1].rx.want_none(&rig.nics[1].ram);
            }
            rig.nics[1].calls[0].clear();
            assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, n)));
            rig.pass(0);
            let called = rig.nics[1].calls[0].clear();
            // The first signal of a ring may come unasked.
            assert!(called == wants || n == 0 || called && n == 1, "frame {n}, {config:?}");
            assert!(rig.nics[1].receive().is_some());
        }
    }
}

#[test]
fn a_stopped_ring_goes_on_where_it_was() {
    for config in kinds() {
        let mut rig = Rig::new(&[config, config]);
        for n in 0..300u32 {
            let sent = frame(Rig::mac(1), Rig::mac(0), 100, n as u8);
            assert!(rig.nics[0].send(&sent));
            rig.pass(0);
            for port in &rig.ports {
                for vring in port.vrings() {
                    let mut vring = vring.lock();
                    let base = vring.stop();
                    vring.base = base;
                    vring.start().unwrap();
                }
            }
            assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent), "frame {n}, {config:?}");
        }
    }
}

#[test]
fn a_packed_ring_whose_place_was_forgotten_in_a_crash_says_it_itself() {
    let config = NicConfig { packed: true, ..NicConfig::default() };
    for frames in [1usize, 5, 63, 64, 65, 100, 127, 128, 129, 500] {
        let mut rig = Rig::new(&[config, config]);
        for n in 0..frames {
            assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, n as u8)));
            rig.pass(0);
            assert!(rig.nics[1].receive().is_some());
        }
        for port in &rig.ports {
            for vring in port.vrings() {
                let mut vring = vring.lock();
                vring.stop();
                // A value from the guest's start, which is old now.
                vring.base = 0x8000_8000;
                vring.start().unwrap();
            }
        }
        for n in 0..200 {
            let sent = frame(Rig::mac(1), Rig::mac(0), 60, n);
            assert!(rig.nics[0].send(&sent));
            rig.pass(0);
            assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent), "after {frames} frames");
        }
    }
}

#[test]
fn counters_explain_every_frame() {
    let mut rig = Rig::new(&[NicConfig { size: 32, ..NicConfig::default() }; 3]);
    let mut sent = 0u64;
    for n in 0..5000u32 {
        let to = match n % 5 {
            0 | 1 => Rig::mac(1),
            2 => Rig::mac(2),
            3 => Mac([2, 7, 7, 7, 7, 7]),
            _ => Rig::mac(0),
        };
        sent += u64::from(rig.nics[0].send(&frame(to, Rig::mac(0), 60 + n as usize % 100, n as u8)));
        if n % 3 == 0 {
            rig.pass_at(0, u64::from(n) * 100_000);
        }
        if n % 11 == 0 {
            while rig.nics[1].receive().is_some() {}
        }
        if n % 50 == 0 {
            while rig.nics[2].receive().is_some() {}
        }
    }
    for n in 0..100u64 {
        rig.pass_at(0, 10_000_000_000 * (n + 1));
    }
    let all = rig.ports[0].sent();
    let received: u64 = rig.ports.iter().map(|p| p.received().packets).sum();
    let lost_in: u64 = rig.ports.iter().map(|p| p.received().dropped()).sum();
    assert_eq!(all.packets, sent);
    assert_eq!(received + lost_in + all.dropped(), sent);
    assert!(all.dropped() > 0 && received > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_cut_of_buffers_delivers_the_same_bytes(
        packed in any::<bool>(),
        indirect in any::<bool>(),
        rx_buffer in prop_oneof![Just(128u32), Just(300), Just(1526), Just(2048)],
        frames in prop::collection::vec((14usize..3000, prop::collection::vec(1usize..3000, 0..6)), 1..20),
    ) {
        let config = NicConfig { packed, indirect, rx_buffer, tx_buffer: 4096, ..NicConfig::default() };
        let mut rig = Rig::new(&[config, config]);
        for (n, (len, mut cuts)) in frames.into_iter().enumerate() {
            cuts.sort_unstable();
            let sent = frame(Rig::mac(1), Rig::mac(0), len, n as u8);
            prop_assert!(rig.nics[0].send_cut(&NetHeader::default(), &sent, &cuts));
            rig.pass(0);
            prop_assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent));
        }
    }
}

#[test]
fn a_driver_with_in_order_completion_is_told_of_a_batch_once_and_gets_all_its_buffers_back() {
    for packed in [false, true] {
        let features = NicConfig::default().features | 1 << bit::IN_ORDER;
        let mut rig = Rig::new(&[NicConfig { packed, features, size: 64, ..NicConfig::default() }; 2]);
        for round in 0..60usize {
            let (n, cuts) =
                if round % 3 == 1 { (round % 21 + 1, &[12, 40][..]) } else { (32 - round % 32, &[][..]) };
            let sent = |i: usize| frame(Rig::mac(1), Rig::mac(0), 100, (round + i) as u8);
            for i in 0..n {
                assert!(rig.nics[0].send_cut(&NetHeader::default(), &sent(i), cuts));
            }
            rig.pass(0);
            for i in 0..n {
                assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent(i)), "round {round}, frame {i}");
            }
            if round == 0 {
                let (ram, queue) = (&rig.nics[0].ram, &rig.nics[0].tx);
                let told = |i: &u64| {
                    let packed_flags =
                        || ram.word(queue.desc + 16 * i + 14).load(Ordering::Relaxed) & 0x8080 == 0x8080;
                    if packed { packed_flags() } else { ram.array(queue.used + 4 + 8 * i) != [0u8; 8] }
                };
                assert_eq!((0..32).filter(told).count(), 1, "of 32 frames, packed: {packed}");
            }
            assert_eq!((rig.nics[0].reap(), rig.nics[0].unsent()), (n, 0));
        }
    }
}
