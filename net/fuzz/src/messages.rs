// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A front-end that sends any messages and descriptors, while a worker carries what its rings say: the session ends or
//! continues, and the port can be served again.

use std::sync::{Arc, Mutex};

use arbitrary::{Arbitrary, Unstructured};
use tombolo_net::forwarding::forward::Forwarder;
use tombolo_net::forwarding::switch::Switch;
use tombolo_net::forwarding::view::{Attached, View};
use tombolo_net::frames::frame::Mac;
use tombolo_net::policy::port::Policy;
use tombolo_net::ports::port::Port;
use tombolo_net::ports::protocol::Session;
use tombolo_net::vring::features::OFFERED;
use tombolo_net_driver::Ram;
use vhost::vhost_user::message::*;
use vhost::vhost_user::{Result, VhostUserBackendReqHandlerMut};

#[derive(Arbitrary, Debug)]
enum Say {
    Features(u64),
    Memory {
        gpa: u64,
        size: u64,
        user: u64,
        offset: u64,
    },
    Add {
        gpa: u64,
        size: u64,
        user: u64,
        offset: u64,
    },
    Remove {
        gpa: u64,
        size: u64,
        user: u64,
    },
    Num {
        index: u8,
        num: u32,
    },
    Addr {
        index: u8,
        desc: u32,
        used: u32,
        avail: u32,
        log: u64,
    },
    Base {
        index: u8,
        base: u32,
    },
    Stop {
        index: u8,
    },
    Kick {
        index: u8,
        with: bool,
    },
    Enable {
        index: u8,
        on: bool,
    },
    Log {
        size: u64,
        offset: u64,
    },
    Inflight {
        size: u64,
        offset: u64,
        queues: u16,
        entries: u16,
    },
    Reset,
    /// Memory and ring `index` at places that fit, and whether the used ring is logged at `log`.
    Start {
        index: u8,
        features: u64,
        log: Option<u64>,
    },
    /// Write into the memory.
    Poke {
        at: u16,
        value: [u8; 8],
    },
    /// A worker's pass over all queues.
    Pass,
}

/// Bytes of the front-end's memory, and where it has it.
const RAM: u64 = 1 << 20;
const USER: u64 = 1 << 40;

/// Starts ring `index` in memory that holds all of its areas.
fn start(s: &mut Session, ram: &Ram, index: u32, log: Option<u64>) -> Result<()> {
    let file = || ram.file().try_clone().expect("a descriptor");
    s.set_mem_table(&[VhostUserMemoryRegion::new(0, RAM, USER, 0)], vec![file()])?;
    s.set_log_base(&VhostUserLog::new(4096, 0), file())?;
    s.set_vring_num(index, 16)?;
    let logged = VhostUserVringAddrFlags::from_bits_truncate(log.is_some().into());
    let at = USER + 0x4000 * u64::from(index % 4);
    s.set_vring_addr(index, logged, at, at + 0x1000, at + 0x2000, log.unwrap_or(0))?;
    s.set_vring_kick(index as u8, None)?;
    s.set_vring_enable(index, true)
}

/// One input: what the front-end says, in order.
pub fn one(data: &[u8]) {
    let Ok(acts) = Vec::<Say>::arbitrary_take_rest(Unstructured::new(data)) else { return };
    let switch = Arc::new(Switch::new(1, 0, true).expect("a switch"));
    let port = Arc::new(Port::new("p", 2));
    let ram = Ram::new(RAM, 0).expect("memory");
    let policy = Policy { macs: vec![Mac([2, 0, 0, 0, 0, 1])], ..Policy::default() };
    let view = View::new(vec![Attached::guest(port.clone(), policy)]).expect("a view");
    let mut forwarder = Forwarder::default();
    let session = Arc::new(Mutex::new(Session::new(switch, port.clone(), OFFERED)));
    for say in acts.into_iter().take(100) {
        let file = || ram.file().try_clone().expect("a descriptor");
        let mut s = session.lock().expect("no panic before");
        // Errors are allowed.
        let _answer = match say {
            Say::Features(f) => s.set_features(f & OFFERED),
            Say::Memory { gpa, size, user, offset } => {
                s.set_mem_table(&[VhostUserMemoryRegion::new(gpa, size, user, offset)], vec![file()])
            }
            Say::Add { gpa, size, user, offset } => {
                s.add_mem_region(&VhostUserSingleMemoryRegion::new(gpa, size, user, offset), file())
            }
            Say::Remove { gpa, size, user } => {
                s.remove_mem_region(&VhostUserSingleMemoryRegion::new(gpa, size, user, 0))
            }
            Say::Num { index, num } => s.set_vring_num(index.into(), num),
            Say::Addr { index, desc, used, avail, log } => s.set_vring_addr(
                index.into(),
                VhostUserVringAddrFlags::from_bits_truncate((log & 1) as u32),
                desc.into(),
                used.into(),
                avail.into(),
                log,
            ),
            Say::Base { index, base } => s.set_vring_base(index.into(), base),
            Say::Stop { index } => s.get_vring_base(index.into()).map(drop),
            Say::Kick { index, with } => s.set_vring_kick(index, with.then(file)),
            Say::Enable { index, on } => s.set_vring_enable(index.into(), on),
            Say::Log { size, offset } => s.set_log_base(&VhostUserLog::new(size, offset), file()),
            Say::Inflight { size, offset, queues, entries } => {
                s.set_inflight_fd(&VhostUserInflight::new(size, offset, queues % 8, entries), file())
            }
            Say::Reset => s.reset_device(),
            Say::Start { index, features, log } => {
                s.set_features(features & OFFERED).and_then(|()| start(&mut s, &ram, (index % 4).into(), log))
            }
            Say::Poke { at, value } => {
                ram.write(ram.gpa() + u64::from(at), &value);
                Ok(())
            }
            Say::Pass => {
                for queue in 0..port.pairs() {
                    forwarder.pass(&view, 0, queue, 1);
                }
                Ok(())
            }
        };
    }
    drop(session);
    assert!(port.active_rx(0).is_none(), "a port without a front-end is down");
}
