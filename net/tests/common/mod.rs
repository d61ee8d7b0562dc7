// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Common code of the tests: guests on a switch.
#![allow(dead_code, missing_docs, unreachable_pub)]

pub mod lab;
#[path = "../../../zone/tests/common/namespace.rs"]
pub mod namespace;
pub mod network;
#[path = "../../../zone/tests/common/never.rs"]
pub mod never;
pub mod offloads;
pub mod outlet;
pub mod passt;
pub mod program;
pub mod talk;
pub mod wire;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tombolo_net::forwarding::forward::{Forwarder, Pass};
use tombolo_net::forwarding::view::{Attached, View};
use tombolo_net::frames::frame::Mac;
use tombolo_net::policy::port::Policy;
use tombolo_net::ports::port::Port;
use tombolo_net::uplink::{Link, Uplink};
use tombolo_net_driver::{Nic, NicConfig};

/// Waits for an event that must come; the limit only ends a test that has failed.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(300);
    while Instant::now() < end {
        if let Some(found) = look() {
            return found;
        }
        std::thread::yield_now();
    }
    panic!("{what} never came");
}

/// Guests and their ports on one view.
pub struct Rig {
    pub nics: Vec<Nic>,
    pub ports: Vec<Arc<Port>>,
    pub view: View,
    pub forwarder: Forwarder,
    time: u64,
}

impl Rig {
    /// One guest per configuration, attached, each owning [`Rig::mac`] of its number.
    pub fn new(configs: &[NicConfig]) -> Self {
        Self::with_policies(configs, |_| Policy::default())
    }

    /// The same with policies (their MACs are set here).
    pub fn with_policies(configs: &[NicConfig], policy: impl Fn(usize) -> Policy) -> Self {
        let nics: Vec<Nic> = configs.iter().map(|c| Nic::new(*c).expect("a guest")).collect();
        let ports: Vec<Arc<Port>> =
            (0..nics.len()).map(|i| Arc::new(Port::new(&format!("vm{i}"), 1))).collect();
        for (nic, port) in nics.iter().zip(&ports) {
            nic.attach(port).expect("attached");
        }
        let view = View::new(
            ports
                .iter()
                .enumerate()
                .map(|(i, port)| {
                    let policy = Policy { macs: vec![Self::mac(i)], ..policy(i) };
                    Attached::guest(port.clone(), policy)
                })
                .collect(),
        )
        .expect("a view")
        .snooping(Some(Arc::default()));
        Self { nics, ports, view, forwarder: Forwarder::default(), time: 0 }
    }

    pub fn mac(n: usize) -> Mac {
        Mac([0x52, 0x54, 0, 0, 0, n as u8])
    }

    /// Gives the guests an uplink over `link`, as their last port.
    pub fn add_link(&mut self, link: Box<dyn Link>) {
        let port = Arc::new(Port::new("up", 1));
        self.ports.push(port.clone());
        let uplink = Some(Arc::new(Uplink::new(link)));
        let policy = Policy { uplink: true, ..Policy::default() };
        let mut ports = self.view.ports().to_vec();
        ports.push(Attached { uplink, ..Attached::guest(port, policy) });
        self.view = View::new(ports).unwrap();
    }

    /// Passes over the transmit queue of guest `n` until nothing moves; returns the last pass that was not idle.
    pub fn pass(&mut self, n: usize) -> Pass {
        self.time += 1;
        self.pass_at(n, self.time)
    }

    /// The same at a given time.
    pub fn pass_at(&mut self, n: usize, now: u64) -> Pass {
        let mut last = Pass::Idle;
        for _ in 0..1000 {
            match self.forwarder.pass(&self.view, n, 0, now) {
                Pass::Worked(frames) if frames > 0 => last = Pass::Worked(frames),
                Pass::Held(frames) if frames > 0 => last = Pass::Held(frames),
                Pass::Broken(why) => return Pass::Broken(why),
                _ => return last,
            }
        }
        panic!("a pass that never ends");
    }
}

/// A frame of `len` bytes with contents that depend on `seed`.
pub fn frame(to: Mac, from: Mac, len: usize, seed: u8) -> Vec<u8> {
    let mut f = Vec::with_capacity(len);
    f.extend(to.0);
    f.extend(from.0);
    f.extend([0x88, 0xb5]);
    f.extend((0..len.saturating_sub(14)).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)));
    f.truncate(len);
    f
}
