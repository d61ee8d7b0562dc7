// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A TAP device, with virtio-net headers and the kernel's segmentation.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use serde::{Deserialize, Serialize};

use super::Link;
use crate::vring::queue::Negotiated;

const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const IFF_TAP: i16 = 0x0002;
const IFF_NO_PI: i16 = 0x1000;
const IFF_VNET_HDR: i16 = 0x4000;
const TUN_F_CSUM: libc::c_ulong = 1;
const TUN_F_TSO4: libc::c_ulong = 2;
const TUN_F_TSO6: libc::c_ulong = 4;
const TUN_F_ECN: libc::c_ulong = 8;
const TUN_F_USO4: libc::c_ulong = 0x20;
const TUN_F_USO6: libc::c_ulong = 0x40;

/// The offloads of a TAP device.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Offloads {
    /// Checksums and TCP segments.
    tso: bool,
    /// UDP segments.
    uso: bool,
}

/// A TAP device.
pub struct Tap {
    file: File,
    offloads: Offloads,
}

impl Tap {
    /// Opens the TAP device `name`, and makes it if it does not exist (needs CAP_NET_ADMIN).
    ///
    /// # Errors
    /// The name is no interface name, or the kernel refuses.
    pub fn open(name: &str) -> io::Result<(Offloads, OwnedFd)> {
        let named = |err: io::Error| {
            let text =
                format!("TAP device {name}: {err} (make it with: ip tuntap add {name} mode tap user $USER)");
            io::Error::new(err.kind(), text)
        };
        if name.is_empty() || name.len() > 15 || name.contains(['/', ' ', '\0']) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("'{name}' is no interface name"),
            ));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(named)?;
        // SAFETY: an all-zero ifreq is valid, and the name fits with its zero.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
        let fd = file.as_raw_fd();
        let size: libc::c_int = 12;
        // SAFETY: each ioctl gets an argument of its type.
        unsafe {
            if libc::ioctl(fd, TUNSETIFF, &request) != 0 || libc::ioctl(fd, TUNSETVNETHDRSZ, &size) != 0 {
                return Err(named(io::Error::last_os_error()));
            }
        }
        let tso = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_ECN;
        // SAFETY: takes a number.
        let set = |flags: libc::c_ulong| unsafe { libc::ioctl(fd, TUNSETOFFLOAD, flags) == 0 };
        let uso = set(tso | TUN_F_USO4 | TUN_F_USO6);
        let offloads = Offloads { tso: uso || set(tso), uso };
        if let Err(err) = bring_up(&request) {
            tracing::warn!("TAP device {name} is not up: {err} (do it with: ip link set {name} up)");
        }
        Ok((offloads, file.into()))
    }

    /// Makes the link of an open device, maybe from another process.
    #[must_use]
    pub fn over(offloads: Offloads, device: OwnedFd) -> Self {
        Self { file: device.into(), offloads }
    }
}

/// Brings the device of `request` up, unless it is.
fn bring_up(request: &libc::ifreq) -> io::Result<()> {
    let mut request = *request;
    // SAFETY: a new descriptor of our own, and requests that take an ifreq, whose flags were just filled in.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = OwnedFd::from_raw_fd(socket);
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &mut request) != 0 {
            return Err(io::Error::last_os_error());
        }
        if request.ifr_ifru.ifru_flags & libc::IFF_UP as i16 != 0 {
            return Ok(());
        }
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as i16;
        match libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Writes pieces to a descriptor that takes whole frames.
pub(super) fn write_frame(fd: RawFd, pieces: &[libc::iovec]) -> io::Result<()> {
    // SAFETY: the pieces are mapped; a guest that changes them changes its own frame.
    let n = unsafe { libc::writev(fd, pieces.as_ptr(), pieces.len() as libc::c_int) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Link for Tap {
    fn header(&self) -> usize {
        12
    }

    fn offloads(&self) -> Negotiated {
        let Offloads { tso, uso } = self.offloads;
        Negotiated { csum: tso, tso4: tso, tso6: tso, ecn: tso, uso, header: 12, ..Negotiated::default() }
    }

    fn send(&self, pieces: &[libc::iovec]) -> io::Result<()> {
        write_frame(self.file.as_raw_fd(), pieces)
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(buffer)
    }

    fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
