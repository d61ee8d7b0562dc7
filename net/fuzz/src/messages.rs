// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A front-end that sends any messages and descriptors: the session ends or continues, and the port can be served
//! again.

use std::sync::{Arc, Mutex};

use arbitrary::{Arbitrary, Unstructured};
use tombolo_net::forwarding::switch::Switch;
use tombolo_net::ports::port::Port;
use tombolo_net::ports::protocol::Session;
use tombolo_net::vring::driver::Ram;
use tombolo_net::vring::features::OFFERED;
use vhost::vhost_user::VhostUserBackendReqHandlerMut;
use vhost::vhost_user::message::*;

#[derive(Arbitrary, Debug)]
enum Say {
    Features(u64),
    Memory { gpa: u64, size: u64, user: u64, offset: u64 },
    Add { gpa: u64, size: u64, user: u64, offset: u64 },
    Remove { gpa: u64, size: u64, user: u64 },
    Num { index: u8, num: u32 },
    Addr { index: u8, desc: u32, used: u32, avail: u32, log: u64 },
    Base { index: u8, base: u32 },
    Stop { index: u8 },
    Kick { index: u8, with: bool },
    Enable { index: u8, on: bool },
    Log { size: u64, offset: u64 },
    Inflight { size: u64, offset: u64, queues: u16, entries: u16 },
    Reset,
}

/// One input: what the front-end says, in order.
pub fn one(data: &[u8]) {
    let Ok(acts) = Vec::<Say>::arbitrary_take_rest(Unstructured::new(data)) else { return };
    let switch = Arc::new(Switch::new(1, 0, true).expect("a switch"));
    let port = Arc::new(Port::new("p", 2));
    let ram = Ram::new(1 << 20, 0).expect("memory");
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
        };
    }
    drop(session);
    assert!(port.active_rx(0).is_none(), "a port without a front-end is down");
}
