// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server's side of visits: a service at the host's module (linux/host.c), and the VMs that may bind to it.

use crate::format::{self, TMB_VISIT_NAME, tmb_service_register, tmb_service_segment, tmb_service_stat};
use crate::image::Image;
use crate::{Error, check_name};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// The device of the host's module.
pub const DEVICE: &str = "/dev/tombolo-services";

/// A name as the modules have it.
pub(crate) fn name_bytes(name: &str) -> [libc::c_char; TMB_VISIT_NAME as usize] {
    let mut bytes = [0; TMB_VISIT_NAME as usize];
    for (to, from) in bytes.iter_mut().zip(name.bytes().take(crate::NAME_MAX)) {
        *to = from as libc::c_char;
    }
    bytes
}

/// A service that VMs can bind to, until it is dropped: then visits in it end, and calls of clients return [`Error::Gone`].
pub struct Offered {
    device: File,
    name: String,
}

impl Offered {
    /// Gives a copy of the image to the host's module.
    pub fn new(name: &str, image: &Image) -> Result<Offered, Error> {
        check_name(name)?;
        let device = File::options().read(true).write(true).open(DEVICE).map_err(|e| {
            Error::Io(format!("{DEVICE}: load the module tombolo_service_host, which needs kvm_intel and a processor with VMFUNC"), e)
        })?;
        let segment = |s: &crate::image::Segment| tmb_service_segment {
            at: s.at,
            size: s.bytes.len() as u64,
            bytes: s.bytes.as_ptr() as u64,
            flags: if s.write { format::TMB_SERVICE_WRITE } else { 0 }
                | if s.execute { format::TMB_SERVICE_EXECUTE } else { 0 },
            pad: 0,
        };
        let segments: Vec<tmb_service_segment> = image.segments.iter().map(segment).collect();
        let mut request = tmb_service_register {
            version: format::TMB_VISIT_VERSION,
            n_segments: segments.len() as u32,
            n_calls: image.calls.len() as u32,
            pad: 0,
            segments: segments.as_ptr() as u64,
            calls: image.calls.as_ptr() as u64,
            name: name_bytes(name),
        };
        let offered = Offered { device, name: name.into() };
        offered.ioctl(format::TMB_SERVICE_IOC_REGISTER, (&raw mut request).cast())?;
        Ok(offered)
    }

    fn ioctl(&self, request: u32, argument: *mut libc::c_void) -> Result<(), Error> {
        // SAFETY: every caller passes memory of the kind that the request wants, or a number; it lives during the call.
        let r = unsafe { libc::ioctl(self.device.as_raw_fd(), libc::Ioctl::from(request), argument) };
        if r < 0 {
            Err(Error::Io(format!("the service {}", self.name), io::Error::last_os_error()))
        } else {
            Ok(())
        }
    }

    /// Lets a VM of this machine bind to the service; `vm` is KVM's descriptor of it.
    pub fn admit(&self, vm: &OwnedFd) -> Result<(), Error> {
        self.ioctl(format::TMB_SERVICE_IOC_ADMIT, vm.as_raw_fd() as usize as *mut libc::c_void)
    }

    /// Bindings of the moment, and visits that ended early.
    pub fn stat(&self) -> Result<(u64, u64), Error> {
        let mut stat = tmb_service_stat { bindings: 0, ended: 0 };
        self.ioctl(format::TMB_SERVICE_IOC_STAT, (&raw mut stat).cast())?;
        Ok((stat.bindings, stat.ended))
    }
}

/// KVM's descriptor of the VM of a process such as QEMU; needs the right to trace it.
pub fn vm_of(pid: i32) -> Result<OwnedFd, Error> {
    let failed = |e: io::Error| Error::Io(format!("the VM of process {pid}"), e);
    let process = Pid::from_raw(pid).ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
    let process = pidfd_open(process, PidfdFlags::empty()).map_err(|e| failed(e.into()))?;
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:kvm-vm") {
            let number = entry
                .file_name()
                .to_string_lossy()
                .parse()
                .map_err(|_| failed(io::ErrorKind::InvalidData.into()))?;
            return pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).map_err(|e| failed(e.into()));
        }
    }
    Err(Error::Refused(format!("process {pid} has no VM")))
}
