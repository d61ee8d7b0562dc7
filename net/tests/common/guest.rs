// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest that writes anything into its rings, beside honest ones: for all that it does, passes end, no memory outside of
//! its own is touched, and frames between honest guests arrive. The fuzzer and `random.rs` choose its actions.
#![allow(unreachable_pub)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use arbitrary::Arbitrary;
use tombolo_net::forwarding::forward::{Forwarder, Pass};
use tombolo_net::forwarding::view::{Attached, View};
use tombolo_net::frames::frame::{Mac, NetHeader};
use tombolo_net::policy::port::Policy;
use tombolo_net::ports::port::Port;
use tombolo_net::vring::features::bit;
use tombolo_net_driver::{Nic, NicConfig, Queue};

#[derive(Arbitrary, Clone, Debug)]
pub enum Act {
    /// Write a descriptor into a ring's table or, with `table`, into memory where indirect tables are sought.
    Desc { rx: bool, table: bool, index: u8, place: Place, len: u32, flags: u16, next: u16 },
    /// Set the available index, split.
    Avail { rx: bool, index: u16, head: u16, slot: u8 },
    /// Write anywhere in memory.
    Poke { at: u32, value: [u8; 8] },
    /// Send an honest frame.
    Send { to: u8, len: u16, cuts: [u16; 3], flags: u8, gso_type: u8, gso_size: u16, start: u16, offset: u16 },
    /// Let the switch work.
    Pass { time: u16 },
    /// Stop and start the rings.
    Restart,
}

#[derive(Arbitrary, Clone, Debug)]
pub enum Place {
    Inside(u32),
    NearEnd(u8),
    Table,
    Anywhere(u64),
}

#[derive(Arbitrary, Clone, Debug)]
pub struct Input {
    pub packed: bool,
    pub features: u8,
    pub acts: Vec<Act>,
}

fn mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, n])
}

fn frame(to: u8, from: u8, len: usize) -> Vec<u8> {
    let mut f = Vec::new();
    f.extend(mac(to).0);
    f.extend(mac(from).0);
    f.resize(len.max(14), from);
    f
}

/// Runs the actions.
pub fn play(input: Input) {
    let mut features = 1 << bit::INDIRECT_DESC;
    let chosen =
        [bit::MRG_RXBUF, bit::EVENT_IDX, bit::GUEST_CSUM, bit::GUEST_TSO4, bit::CSUM, bit::HOST_TSO4];
    for (i, b) in chosen.into_iter().enumerate() {
        features |= u64::from(input.features >> i & 1) << b;
    }
    let hostile =
        NicConfig { packed: input.packed, features, size: 16, tx_buffer: 4096, ..NicConfig::default() };
    let honest = NicConfig { size: 16, ..NicConfig::default() };
    let mut nics = [hostile, honest, honest].map(|c| Nic::new(c).expect("a guest"));
    let ports: Vec<_> = (0..3).map(|i| Arc::new(Port::new(&format!("p{i}"), 1))).collect();
    for (nic, port) in nics.iter().zip(&ports) {
        nic.attach(port).expect("attached");
    }
    let attached = ports.iter().enumerate().map(|(i, port)| {
        Attached::guest(port.clone(), Policy { macs: vec![mac(i as u8)], ..Policy::default() })
    });
    let view = View::new(attached.collect()).expect("a view");
    let mut forwarder = Forwarder::default();
    let table = nics[0].ram.alloc(4096, 16);
    let mut now = 0u64;
    for act in input.acts.into_iter().take(200) {
        match act {
            Act::Desc { rx, table: indirect, index, place, len, flags, next } => {
                let ram = &nics[0].ram;
                let addr = match place {
                    Place::Inside(at) => ram.gpa() + u64::from(at) % ram.size(),
                    Place::NearEnd(n) => ram.gpa() + ram.size() - u64::from(n),
                    Place::Table => table,
                    Place::Anywhere(at) => at,
                };
                let queue = if rx { &nics[0].rx } else { &nics[0].tx };
                let (at, index) = if indirect { (table, index) } else { (queue.desc, index % 16) };
                let last = if input.packed { [next, flags] } else { [flags, next] };
                Queue::write_desc(ram, at, index.into(), addr, len, last);
            }
            Act::Avail { rx, index, head, slot } => {
                let (ram, queue) = (&nics[0].ram, if rx { &nics[0].rx } else { &nics[0].tx });
                if !input.packed {
                    ram.word(queue.avail + 4 + 2 * u64::from(slot % 16)).store(head, Ordering::Relaxed);
                    ram.word(queue.avail + 2).store(index, Ordering::Release);
                }
            }
            Act::Poke { at, value } => {
                let ram = &nics[0].ram;
                ram.write(ram.gpa() + u64::from(at) % (ram.size() - 8), &value);
            }
            Act::Send { to, len, cuts, flags, gso_type, gso_size, start, offset } => {
                let header = NetHeader {
                    flags,
                    gso_type,
                    hdr_len: 0,
                    gso_size,
                    csum_start: start,
                    csum_offset: offset,
                };
                let mut cuts = cuts.map(usize::from);
                cuts.sort_unstable();
                nics[0].send_cut(&header, &frame(to % 3, 0, usize::from(len) % 4000), &cuts);
            }
            Act::Pass { time } => {
                now += u64::from(time) * 1000;
                for src in 0..3 {
                    forwarder.pass(&view, src, 0, now);
                }
                forwarder.take_broken().for_each(drop);
                nics[1].receive();
                nics[2].receive();
            }
            Act::Restart => {
                for vring in ports[0].vrings() {
                    let mut vring = vring.lock();
                    vring.stop();
                    vring.start().expect("the same place as before");
                }
                ports[0].note_active();
            }
        }
    }
    // The neighbours still work.
    while nics[1].receive().is_some() {}
    let honest = frame(1, 2, 100);
    for n in 0..64 {
        now += 1_000_000_000;
        if n == 0 {
            assert!(nics[2].send(&honest));
        }
        if forwarder.pass(&view, 2, 0, now) == Pass::Idle {
            break;
        }
    }
    let mut got = false;
    while let Some((_, f)) = nics[1].receive() {
        got |= f == honest;
    }
    assert!(got, "a frame between honest guests was lost");
}
