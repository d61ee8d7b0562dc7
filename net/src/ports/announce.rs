// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The announcement after a migration (SEND_RARP) for a guest that can't send it itself (VIRTIO_NET_F_GUEST_ANNOUNCE):
//! it has come from another host, and the network's switches must learn its new place.
//!
//! The frame is treated like one of the guest's: it passes the port's policy, leaves on the port's VLAN and is counted
//! as sent.

use std::sync::Arc;
use std::time::Duration;

use crate::forwarding::credit::Credits;
use crate::forwarding::deliver::Frame;
use crate::forwarding::forward::{Forwarder, Sender};
use crate::forwarding::switch::Switch;
use crate::frames::frame::{Mac, NetHeader};
use crate::frames::offload::Layers;
use crate::policy::limit::Rate;
use crate::ports::port::Port;
use crate::vring::ring::Segment;

/// Bytes of the shortest Ethernet frame, without its checksum.
const SHORTEST: usize = 60;
/// The announcements of a port that are sent, in a second; a VMM sends a few after a migration. Its front-end's thread sends them,
/// not a worker that has other ports to serve.
const RATE: Rate = Rate { bytes: 0, packets: 20 };
/// Time between two tries of a receiver's lock.
const PAUSE: Duration = Duration::from_micros(50);

/// Makes a broadcast RARP request of `mac` for its own address (RFC 903).
fn request(mac: Mac) -> [u8; SHORTEST] {
    let mut frame = [0; SHORTEST];
    frame[..6].copy_from_slice(&Mac::BROADCAST.0);
    frame[6..12].copy_from_slice(&mac.0);
    // RARP; Ethernet and IPv4 with their lengths; the request.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac.0);
    frame[32..38].copy_from_slice(&mac.0);
    frame
}

/// Sends an announcement of `mac` from `port` to all ports that may receive it, unless it has sent too many. With a MAC from which the
/// port may not send it is dropped and counted.
///
/// # Errors
/// The port has been removed.
pub fn announce(switch: &Switch, port: &Arc<Port>, mac: Mac) -> Result<(), String> {
    let view = switch.view();
    let at = view.ports().iter().position(|a| Arc::ptr_eq(&a.port, port));
    let src = at.ok_or("the port was removed")?;
    if !port.announcements.admit(&RATE, SHORTEST as u64, switch.now()) {
        return Ok(());
    }
    let frame = request(mac);
    let rest = [Segment { ptr: frame.as_ptr().cast_mut(), len: SHORTEST as u32 }];
    let mut forwarder = Forwarder::default();
    let (mut credits, mut held) = (Credits::default(), None);
    loop {
        {
            // The holder of the queue's lock may write its counters.
            let counted = port.tx(0).lock();
            let mut sender = Sender::new(&mut forwarder, &view, src, 0, switch.now(), credits);
            let done = match held.take() {
                Some(held) => sender.again(&held, &rest, counted.counters()),
                None => {
                    let (header, layers, len) = (NetHeader::default(), Layers::default(), SHORTEST as u32);
                    let frame = Frame { header, layers, prefix: &frame, rest: &rest, skip: len, len };
                    let done = sender.described(frame, 0);
                    sender.end(done, len, counted.counters())
                }
            };
            held = sender.held.take();
            credits = sender.opens.finish();
            sender.tally.count(counted.counters());
            if done {
                break;
            }
        }
        // A receiver is busy: try again until the sender's credit with it is used up.
        std::thread::sleep(PAUSE);
    }
    for (broken, why) in forwarder.take_broken() {
        tracing::warn!(port = view.ports()[broken].port.name(), %why, "port is stopped until its front-end starts it anew");
        view.ports()[broken].port.fail();
    }
    Ok(())
}
