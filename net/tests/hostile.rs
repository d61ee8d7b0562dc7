// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests that lie. Each known attack on a vhost back-end has its test here by its name; the sender or receiver at
//! fault is stopped or loses its frame, and a bystander continues.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{Rig, frame};
use tombolo_net::forwarding::forward::Pass;
use tombolo_net::frames::frame::{NEEDS_CSUM, NetHeader};
use tombolo_net::ports::counters::Reason;
use tombolo_net::vring::features::OFFLOADS;
use tombolo_net::vring::features::bit;
use tombolo_net::vring::memory::{GuestMemory, Region};
use tombolo_net::vring::ring::{Broken, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, MAX_CHAIN};
use tombolo_net_driver::{NicConfig, Queue};

fn config(packed: bool) -> NicConfig {
    NicConfig { packed, ..NicConfig::default() }
}

/// Makes descriptor 0 of guest 0's transmit queue available, split or packed, as written by the caller.
fn offer(rig: &Rig, packed: bool, addr: u64, len: u32, flags: u16, next_or_id: u16) {
    let (nic, q) = (&rig.nics[0], &rig.nics[0].tx);
    if packed {
        Queue::write_desc(&nic.ram, q.desc, 0, addr, len, [next_or_id, flags | 1 << 7]);
    } else {
        Queue::write_desc(&nic.ram, q.desc, 0, addr, len, [flags, next_or_id]);
        nic.ram.word(q.avail + 4).store(0, Ordering::Relaxed);
        nic.ram.word(q.avail + 2).store(1, Ordering::Release);
    }
}

/// Guest 2 still reaches guest 1, and guest 0 is stopped for `why`.
fn assert_only_zero_is_down(rig: &mut Rig, got: Pass, why: Broken) {
    assert_eq!(got, Pass::Broken(why));
    assert_eq!(rig.ports[0].tx(0).lock().broken, Some(why));
    assert!(!rig.ports[0].tx(0).lock().is_active());
    let sent = frame(Rig::mac(1), Rig::mac(2), 300, 9);
    assert!(rig.nics[2].send(&sent));
    rig.pass(2);
    assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent));
}

#[test]
fn cve_2022_2132_a_header_spread_over_descriptors_is_read_whole() {
    for packed in [false, true] {
        for indirect in [false, true] {
            let config = NicConfig { indirect, ..config(packed) };
            let mut rig = Rig::new(&[config, config]);
            let sent = frame(Rig::mac(1), Rig::mac(0), 100, 1);
            for cuts in [&[1][..], &[5], &[11], &[13], &[12, 20], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]] {
                assert!(rig.nics[0].send_cut(&NetHeader::default(), &sent, cuts));
                rig.pass(0);
                assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent.clone()), "cuts {cuts:?}");
            }
        }
    }
}

#[test]
fn cve_2022_2132_a_chain_of_the_header_alone_is_dropped_and_the_ring_goes_on() {
    for packed in [false, true] {
        let mut rig = Rig::new(&[config(packed); 2]);
        for len in [0, 1, 13] {
            assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 14, 1)[..len]));
        }
        assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, 1)));
        rig.pass(0);
        assert_eq!(rig.ports[0].sent().dropped_for(Reason::Short), 3);
        assert!(rig.nics[1].receive().is_some());
        rig.nics[0].reap();
        assert_eq!(rig.nics[0].unsent(), 0);
    }
}

#[test]
fn cve_2020_10725_a_receive_buffer_outside_of_memory_stops_the_receiver_only() {
    for packed in [false, true] {
        let mut rig = Rig::new(&[config(packed); 3]);
        let (nic, at) = (&rig.nics[0], rig.nics[0].rx.desc);
        nic.ram.write(at, &0xdead_beef_0000u64.to_le_bytes());
        for n in 0..8 {
            assert!(rig.nics[2].send(&frame(Rig::mac(0), Rig::mac(2), 60, n)));
        }
        rig.pass(2);
        let broken = rig.ports[0].rx(0).lock().broken;
        assert!(matches!(broken, Some(Broken::Address { .. })) || rig.nics[0].receive().is_some());
        let sent = frame(Rig::mac(1), Rig::mac(2), 60, 9);
        assert!(rig.nics[2].send(&sent));
        rig.pass(2);
        assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent));
    }
}

#[test]
fn cve_2018_1059_a_buffer_that_runs_beyond_its_region_is_refused() {
    for packed in [false, true] {
        let mut rig = Rig::new(&[config(packed); 3]);
        let end = rig.nics[0].ram.gpa() + rig.nics[0].ram.size();
        offer(&rig, packed, end - 100, 200, 0, 0);
        let got = rig.pass(0);
        assert_only_zero_is_down(&mut rig, got, Broken::Address { gpa: end - 100, len: 200 });
    }
}

#[test]
fn cve_2018_1059_an_address_that_wraps_around_is_refused() {
    for packed in [false, true] {
        let mut rig = Rig::new(&[config(packed); 3]);
        offer(&rig, packed, u64::MAX - 10, 2000, 0, 0);
        let got = rig.pass(0);
        assert_only_zero_is_down(&mut rig, got, Broken::Address { gpa: u64::MAX - 10, len: 2000 });
    }
}

#[test]
fn cve_2024_11614_a_checksum_beyond_the_frame_is_never_written() {
    for packed in [false, true] {
        // The receiver lacks checksum offload, so that the switch has to do it.
        let features = NicConfig::default().features | OFFLOADS;
        let mut rig = Rig::new(&[NicConfig { features, ..config(packed) }, config(packed)]);
        let sent = frame(Rig::mac(1), Rig::mac(0), 60, 1);
        let headers = [(14, 45), (59, 0), (60, 0), (65535, 65535), (0, 65535), (58, 1)].map(
            |(csum_start, csum_offset)| NetHeader {
                flags: NEEDS_CSUM,
                csum_start,
                csum_offset,
                ..NetHeader::default()
            },
        );
        for header in &headers {
            assert!(rig.nics[0].send_cut(header, &sent, &[]));
        }
        rig.pass(0);
        assert_eq!(rig.ports[0].sent().dropped_for(Reason::Header), 6);
        assert_eq!(rig.nics[1].receive(), None);

        // The header of a driver without offloads is ignored, and the receiver gets an empty one.
        let mut rig = Rig::new(&[config(packed); 2]);
        for header in &headers {
            assert!(rig.nics[0].send_cut(header, &sent, &[]));
            rig.pass(0);
            assert_eq!(rig.nics[1].receive(), Some((NetHeader::default(), sent.clone())));
        }
    }
}

#[test]
fn cve_2020_14375_descriptors_changed_after_the_check_are_not_looked_at_again() {
    for packed in [false, true] {
        let mut rig = Rig::new(&[config(packed); 2]);
        // A receive buffer is fetched and checked with the first frame, then its descriptor is made bad.
        assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 60, 1)));
        rig.pass(0);
        assert!(rig.nics[1].receive().is_some());
        let (nic, q) = (&rig.nics[1], &rig.nics[1].rx);
        for i in 1..8 {
            nic.ram.write(q.desc + 16 * i, &0xffff_ffff_ffff_0000u64.to_le_bytes());
        }
        let sent = frame(Rig::mac(1), Rig::mac(0), 60, 2);
        assert!(rig.nics[0].send(&sent));
        rig.pass(0);
        let broken = rig.ports[1].rx(0).lock().broken;
        assert_eq!(broken, None, "the copy was used, not what the guest wrote later");
        assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent));
    }
}

#[test]
fn a_circular_chain_ends_with_its_table() {
    let mut rig = Rig::new(&[config(false); 3]);
    let (at, size) = (rig.nics[0].ram.gpa(), rig.nics[0].tx.size);
    offer(&rig, false, at, 8, DESC_NEXT, 0);
    let got = rig.pass(0);
    assert_only_zero_is_down(&mut rig, got, Broken::Loop { size: size.into() });
}

#[test]
fn a_packed_chain_without_end_is_a_loop() {
    let mut rig = Rig::new(&[config(true); 3]);
    let (nic, q) = (&rig.nics[0], &rig.nics[0].tx);
    for i in 0..q.size {
        Queue::write_desc(&nic.ram, q.desc, i, nic.ram.gpa(), 8, [i, DESC_NEXT | 1 << 7]);
    }
    let size = u32::from(q.size);
    let got = rig.pass(0);
    assert_only_zero_is_down(&mut rig, got, Broken::Loop { size });
}

#[test]
fn a_circular_indirect_table_is_a_loop() {
    let mut rig = Rig::new(&[config(false); 3]);
    let table = rig.nics[0].ram.alloc(64, 16);
    let at = rig.nics[0].ram.gpa();
    for i in 0..4 {
        Queue::write_desc(&rig.nics[0].ram, table, i, at, 8, [DESC_NEXT, (i + 1) % 4]);
    }
    offer(&rig, false, table, 64, DESC_INDIRECT, 0);
    let got = rig.pass(0);
    assert_only_zero_is_down(&mut rig, got, Broken::Loop { size: 4 });
}

#[test]
fn indirect_tables_of_odd_nested_or_huge_shape_are_refused() {
    for packed in [false, true] {
        for (len, nested, why) in [
            (24, false, Broken::IndirectLength { len: 24 }),
            (0, false, Broken::IndirectLength { len: 0 }),
            (16, true, Broken::Indirect { flags: DESC_INDIRECT }),
        ] {
            let mut rig = Rig::new(&[config(packed); 3]);
            let table = rig.nics[0].ram.alloc(64, 16);
            let flags = if nested { DESC_INDIRECT } else { 0 };
            let last = if packed { [0, flags] } else { [flags, 0] };
            Queue::write_desc(&rig.nics[0].ram, table, 0, table, 16, last);
            offer(&rig, packed, table, len, DESC_INDIRECT, 0);
            let got = rig.pass(0);
            assert_only_zero_is_down(&mut rig, got, why);
        }
    }
}

#[test]
fn an_indirect_table_outside_of_memory_is_refused() {
    for packed in [false, true] {
        let mut rig = Rig::new(&[config(packed); 3]);
        let end = rig.nics[0].ram.gpa() + rig.nics[0].ram.size();
        offer(&rig, packed, end - 16, 0xffff_fff0, DESC_INDIRECT, 0);
        let got = rig.pass(0);
        assert!(matches!(got, Pass::Broken(_)), "{got:?}");
    }
}

#[test]
fn indirect_descriptors_that_were_not_negotiated_are_refused() {
    for packed in [false, true] {
        let config = NicConfig { features: 1 << bit::MRG_RXBUF, ..config(packed) };
        let mut rig = Rig::new(&[config; 3]);
        let at = rig.nics[0].ram.gpa();
        offer(&rig, packed, at, 64, DESC_INDIRECT, 0);
        let got = rig.pass(0);
        let flags = if packed { DESC_INDIRECT | 1 << 7 } else { DESC_INDIRECT };
        assert_only_zero_is_down(&mut rig, got, Broken::Indirect { flags });
    }
}

#[test]
fn a_head_or_next_index_beyond_the_table_is_refused() {
    let mut rig = Rig::new(&[config(false); 3]);
    let (at, size) = (rig.nics[0].ram.gpa(), rig.nics[0].tx.size);
    offer(&rig, false, at, 64, DESC_NEXT, size);
    let got = rig.pass(0);
    assert_only_zero_is_down(&mut rig, got, Broken::Index { index: size.into(), size: size.into() });

    let mut rig = Rig::new(&[config(false); 3]);
    let (nic, q) = (&rig.nics[0], &rig.nics[0].tx);
    nic.ram.word(q.avail + 4).store(40_000, Ordering::Relaxed);
    nic.ram.word(q.avail + 2).store(1, Ordering::Release);
    let got = rig.pass(0);
    assert_only_zero_is_down(&mut rig, got, Broken::Index { index: 40_000, size: size.into() });
}

#[test]
fn more_requests_than_the_ring_holds_are_refused() {
    let mut rig = Rig::new(&[config(false); 3]);
    let (nic, q) = (&rig.nics[0], &rig.nics[0].tx);
    nic.ram.word(q.avail + 2).store(q.size + 1, Ordering::Release);
    let why = Broken::MoreThanRing { pending: q.size + 1, size: q.size };
    let got = rig.pass(0);
    assert_only_zero_is_down(&mut rig, got, why);
}

#[test]
fn a_packed_ring_that_claims_to_be_available_for_ever_is_taken_once_around() {
    let mut rig = Rig::new(&[config(true); 3]);
    let (nic, q) = (&rig.nics[0], &rig.nics[0].tx);
    let at = nic.ram.gpa();
    for i in 0..q.size {
        Queue::write_desc(&nic.ram, q.desc, i, at, 100, [0, 1 << 7]);
    }
    let size = u64::from(q.size);
    rig.pass(0);
    assert_eq!(rig.ports[0].sent().packets, size, "each descriptor counts once");
}

#[test]
fn a_buffer_for_the_other_direction_is_refused() {
    for packed in [false, true] {
        let mut rig = Rig::new(&[config(packed); 3]);
        let at = rig.nics[0].ram.gpa();
        offer(&rig, packed, at, 64, DESC_WRITE, 0);
        let got = rig.pass(0);
        let flags = if packed { DESC_WRITE | 1 << 7 } else { DESC_WRITE };
        assert_only_zero_is_down(&mut rig, got, Broken::Direction { flags });
    }
}

#[test]
fn a_chain_of_four_gigabytes_is_refused_or_dropped_without_a_copy() {
    let mut rig = Rig::new(&[config(false); 3]);
    let table = rig.nics[0].ram.alloc(16 * 4096, 16);
    let (at, size) = (rig.nics[0].ram.gpa(), rig.nics[0].ram.size() as u32);
    for i in 0..4096u16 {
        let flags = if i < 4095 { DESC_NEXT } else { 0 };
        Queue::write_desc(&rig.nics[0].ram, table, i, at, size, [flags, i + 1]);
    }
    offer(&rig, false, table, 16 * 4096, DESC_INDIRECT, 0);
    let got = rig.pass(0);
    assert_only_zero_is_down(&mut rig, got, Broken::TooLong);
}

#[test]
fn memory_taken_away_under_the_switch_stops_the_port_and_not_the_process() {
    let mut rig = Rig::new(&[config(false); 3]);
    assert!(rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 1000, 1)));
    // The guest's own mapping must not be touched after this, only the switch's.
    rig.nics[0].ram.file().set_len(0).unwrap();
    rig.forwarder.pass(&rig.view, 0, 0, 1);
    assert!(rig.ports[0].tx(0).lock().translator.memory().is_gone());
    let sent = frame(Rig::mac(1), Rig::mac(2), 60, 9);
    assert!(rig.nics[2].send(&sent));
    rig.pass(2);
    assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent));
}

#[test]
fn a_guest_that_resets_or_remaps_in_the_middle_of_a_burst_harms_nobody() {
    let mut rig = Rig::new(&[config(false), config(true), config(false)]);
    for round in 0..200u32 {
        for n in 0..20u8 {
            rig.nics[0].send(&frame(Rig::mac(1), Rig::mac(0), 200, n));
            rig.nics[2].send(&frame(Rig::mac(1), Rig::mac(2), 200, n));
        }
        rig.forwarder.pass(&rig.view, 0, 0, u64::from(round));
        let vring = rig.ports[0].tx(0);
        match round % 3 {
            0 => {
                let mut state = vring.lock();
                let mem = state.translator.memory().clone();
                state.set_memory(mem).unwrap();
            }
            1 => {
                let mut state = vring.lock();
                state.stop();
                state.start().unwrap();
            }
            _ => {}
        }
        rig.pass_at(0, u64::from(round));
        rig.pass_at(2, u64::from(round));
        while rig.nics[1].receive().is_some() {}
    }
    assert_eq!(rig.ports[0].tx(0).lock().broken, None);
    assert_eq!(rig.ports[2].sent().packets, 4000);
}

/// Shares the memory of guest 0 as two regions that meet at `border`.
fn share_in_two(rig: &Rig, border: u64) {
    let ram = &rig.nics[0].ram;
    let map = |from: u64, to: u64| {
        let at = from - ram.gpa();
        Region::map(ram.file(), from, to - from, ram.user() + at, at).unwrap()
    };
    let regions = vec![map(ram.gpa(), border), map(border, ram.gpa() + ram.size())];
    let memory = Arc::new(GuestMemory::new(regions).unwrap());
    rig.ports[0].vrings().iter().for_each(|vring| vring.lock().set_memory(memory.clone()).unwrap());
}

#[test]
fn chains_with_many_empty_buffers_take_no_longer_turns() {
    const CHAINS: usize = 16;
    for packed in [false, true] {
        // The border of two regions lies nowhere near the table, between two of its descriptors, or within one.
        for border in [None, Some(8192), Some(8200)] {
            let mut rig = Rig::new(&[config(packed); 2]);
            let sent = frame(Rig::mac(1), Rig::mac(0), 60, 1);
            let nic = &mut rig.nics[0];
            let table = nic.ram.alloc(16 * MAX_CHAIN as u64, 16);
            let bytes = nic.ram.alloc(72, 16);
            nic.ram.write(bytes + 12, &sent);
            // Empty buffers may lie anywhere, also outside of the memory.
            let mut buffers = vec![(u64::MAX, 0); MAX_CHAIN];
            buffers[MAX_CHAIN - 1] = (bytes, 72);
            for _ in 0..CHAINS {
                assert!(nic.tx.add(&nic.ram, &buffers, false, Some(table)).is_some());
            }
            if let Some(border) = border {
                share_in_two(&rig, table + border);
            }
            // A turn reads as many descriptors as fit into two of the longest chains.
            assert_eq!(rig.forwarder.pass(&rig.view, 0, 0, 1), Pass::Worked(2), "packed {packed} {border:?}");
            rig.pass(0);
            for n in 0..CHAINS {
                assert_eq!(rig.nics[1].receive().map(|f| f.1), Some(sent.clone()), "{n} of packed {packed}");
            }
        }
    }
}
