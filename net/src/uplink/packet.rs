// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An interface of the host, through a packet socket with virtio-net headers (packet(7)).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::Link;
use super::tap::write_frame;
use crate::vring::queue::Negotiated;

const PACKET_AUXDATA: libc::c_int = 8;
const PACKET_VNET_HDR: libc::c_int = 15;
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
/// The header of a packet socket has no `num_buffers`.
const HEADER: usize = 10;
/// Bytes of a VLAN tag.
const TAG: usize = 4;

/// A packet socket bound to one interface.
pub struct Packet {
    socket: OwnedFd,
}

impl Packet {
    /// Opens interface `name`, promiscuous until it is closed (needs CAP_NET_RAW).
    ///
    /// # Errors
    /// There is no such interface, or the kernel refuses.
    pub fn open(name: &str) -> io::Result<OwnedFd> {
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
            // Protocol 0 receives nothing. With another one the socket would receive from all interfaces until it is bound.
            let fd = libc::socket(libc::AF_PACKET, kind, 0);
            if fd < 0 {
                return Err(named("no packet socket (needs CAP_NET_RAW)"));
            }
            let socket = OwnedFd::from_raw_fd(fd);
            let mut member: libc::packet_mreq = std::mem::zeroed();
            member.mr_ifindex = index as i32;
            member.mr_type = libc::PACKET_MR_PROMISC as u16;
            let one: libc::c_int = 1;
            let set = |option, value: *const libc::c_void, len: usize| {
                libc::setsockopt(fd, libc::SOL_PACKET, option, value, len as u32) == 0
            };
            let int = size_of::<libc::c_int>();
            if !set(PACKET_VNET_HDR, (&raw const one).cast(), int)
                || !set(PACKET_AUXDATA, (&raw const one).cast(), int)
                || !set(PACKET_IGNORE_OUTGOING, (&raw const one).cast(), int)
                || !set(
                    libc::PACKET_ADD_MEMBERSHIP,
                    (&raw const member).cast(),
                    size_of::<libc::packet_mreq>(),
                )
            {
                return Err(named("can't be set up"));
            }
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_protocol = all;
            address.sll_ifindex = index as i32;
            let len = size_of::<libc::sockaddr_ll>() as u32;
            if libc::bind(fd, (&raw const address).cast(), len) != 0 {
                return Err(named("can't be bound"));
            }
            Ok(socket)
        }
    }

    /// Makes the link of an open socket, maybe from another process.
    #[must_use]
    pub fn over(socket: OwnedFd) -> Self {
        Self { socket }
    }
}

/// Restores the VLAN tag that the kernel strips from every frame; returns the new length.
fn put_tag(buffer: &mut [u8], len: usize, aux: &libc::tpacket_auxdata) -> usize {
    const MACS: usize = HEADER + 12;
    if len < MACS || len + TAG > buffer.len() {
        return len;
    }
    buffer.copy_within(MACS..len, MACS + TAG);
    let ethertype =
        if aux.tp_status & libc::TP_STATUS_VLAN_TPID_VALID != 0 { aux.tp_vlan_tpid } else { 0x8100 };
    buffer[MACS..MACS + 2].copy_from_slice(&ethertype.to_be_bytes());
    buffer[MACS + 2..MACS + TAG].copy_from_slice(&aux.tp_vlan_tci.to_be_bytes());
    // hdr_len and csum_start, if they are set.
    for at in [2, 6] {
        let value = u16::from_le_bytes([buffer[at], buffer[at + 1]]);
        if value != 0 {
            buffer[at..at + 2].copy_from_slice(&value.saturating_add(TAG as u16).to_le_bytes());
        }
    }
    len + TAG
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
        let mut piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // Aligned for control messages, with room for the one that is requested.
        let mut control = [0u64; 8];
        // SAFETY: all-zero is a valid msghdr; its pointers outlive the call. Control messages are read at the kernel's
        // offsets, and the auxiliary data within its length.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut piece;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&control) as _;
            let n = libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, 0);
            let Ok(len) = usize::try_from(n) else { return Err(io::Error::last_os_error()) };
            let found = libc::CMSG_FIRSTHDR(&raw const message);
            if found.is_null()
                || (*found).cmsg_level != libc::SOL_PACKET
                || (*found).cmsg_type != PACKET_AUXDATA
                || (*found).cmsg_len < libc::CMSG_LEN(size_of::<libc::tpacket_auxdata>() as u32) as usize
            {
                return Ok(len);
            }
            let aux = libc::CMSG_DATA(found).cast::<libc::tpacket_auxdata>().read_unaligned();
            Ok(if aux.tp_status & libc::TP_STATUS_VLAN_VALID == 0 { len } else { put_tag(buffer, len, &aux) })
        }
    }

    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
