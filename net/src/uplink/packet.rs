// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An interface of the host, through a packet socket with virtio-net headers (packet(7)).

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use super::Link;
use super::tap::write_frame;
use crate::vring::Negotiated;

const PACKET_VNET_HDR: libc::c_int = 15;
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
/// The header of a packet socket has no `num_buffers`.
const HEADER: usize = 10;

/// A packet socket bound to one interface.
pub struct Packet {
    socket: File,
}

impl Packet {
    /// Opens interface `name`, promiscuous as long as this lives (needs CAP_NET_RAW).
    ///
    /// # Errors
    /// There is no such interface, or the kernel refuses.
    pub fn open(name: &str) -> io::Result<Self> {
        let named = |what: &str| {
            let err = io::Error::last_os_error();
            io::Error::new(err.kind(), format!("interface {name}: {what}: {err}"))
        };
        let c_name = std::ffi::CString::new(name)?;
        // SAFETY: a name with its zero.
        let index = unsafe { libc::if_nametoindex(c_name.as_ptr()) };
        if index == 0 {
            return Err(named("not there (ip link lists those that are)"));
        }
        let all = (libc::ETH_P_ALL as u16).to_be();
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: a new descriptor of our own, and structures of the sizes given.
        unsafe {
            let fd = libc::socket(libc::AF_PACKET, kind, i32::from(all));
            if fd < 0 {
                return Err(named("no packet socket (needs CAP_NET_RAW)"));
            }
            let socket = File::from_raw_fd(fd);
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_protocol = all;
            address.sll_ifindex = index as i32;
            let len = size_of::<libc::sockaddr_ll>() as u32;
            if libc::bind(fd, (&raw const address).cast(), len) != 0 {
                return Err(named("can't be bound"));
            }
            let mut member: libc::packet_mreq = std::mem::zeroed();
            member.mr_ifindex = index as i32;
            member.mr_type = libc::PACKET_MR_PROMISC as u16;
            let one: libc::c_int = 1;
            let set = |option, value: *const libc::c_void, len: usize| {
                libc::setsockopt(fd, libc::SOL_PACKET, option, value, len as u32) == 0
            };
            let int = size_of::<libc::c_int>();
            if !set(PACKET_VNET_HDR, (&raw const one).cast(), int)
                || !set(PACKET_IGNORE_OUTGOING, (&raw const one).cast(), int)
                || !set(
                    libc::PACKET_ADD_MEMBERSHIP,
                    (&raw const member).cast(),
                    size_of::<libc::packet_mreq>(),
                )
            {
                return Err(named("can't be set up"));
            }
            Ok(Self { socket })
        }
    }
}

impl Link for Packet {
    fn header(&self) -> usize {
        HEADER
    }

    fn offloads(&self) -> Negotiated {
        // The kernel segments what the interface can't.
        Negotiated { csum: true, tso4: true, tso6: true, ecn: true, header: 10, ..Negotiated::default() }
    }

    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()> {
        write_frame(self.socket.as_raw_fd(), pieces)
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.socket).read(buffer)
    }

    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
