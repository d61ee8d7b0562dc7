// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Services: code that a client calls where it runs. A service is one position-independent object ([`image`]) with its own data; a call has an
//! index, three numbers, and a window of memory that client and service share, and returns a number. What a service may do is what every way offers:
//! it computes on its data and the window, and asks no kernel.
//!
//! - [`image`]: the object, and what it may not contain.
//! - [`ring`]: the way that is everywhere: the server's process executes the calls, requests and answers go through rings ([`tombolo_calls`]).
//! - [`loaded`]: an image in this process' memory, for the server of a ring.
//! - [`vmfunc`]: the way without an exit: the client VM's CPU enters the service's own context by VMFUNC; the client's side in the guest.
//! - [`host`]: the server's side of that: a service at the host's module, and the VMs that it is open to.
//!
//! [`bind`] takes the best way that there is.

#![deny(missing_docs)]

pub mod host;
pub mod image;
pub mod loaded;
pub mod ring;
pub mod vmfunc;

use std::io;
use std::path::{Path, PathBuf};

#[allow(missing_docs, non_camel_case_types, dead_code, clippy::all)]
mod format {
    include!(concat!(env!("OUT_DIR"), "/format.rs"));
}

/// The longest name of a service.
pub const NAME_MAX: usize = format::TMB_VISIT_NAME as usize - 1;

/// The reason why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The service has no call of this index.
    #[error("the service has no call {0}")]
    NoSuchCall(u32),
    /// The call was begun and ended before it returned. What the service had stored by then stays.
    #[error("the call ended before it returned: {0}")]
    Ended(Ended),
    /// The server has ended or withdrawn the service; binding again may find it again.
    #[error("the service is gone")]
    Gone,
    /// The rings failed.
    #[error(transparent)]
    Ring(#[from] tombolo_calls::Error),
    /// The kernel said no; the text says to what.
    #[error("{0}: {1}")]
    Io(String, io::Error),
    /// No way leads to the service.
    #[error("{0}")]
    Refused(String),
}

/// What ended a visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    /// It lasted longer than the host allows.
    #[error("it took too long")]
    TooLong,
    /// It touched memory that isn't in its context, or caused an exception.
    #[error("it caused a fault")]
    Fault,
    /// It executed an instruction that leaves its context: VMX's basic exit reason (SDM, appendix C).
    #[error("it executed an instruction that leaves its context (exit reason {0})")]
    Exit(u32),
}

/// A way to a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The client's CPU enters the service's context.
    Vmfunc,
    /// The server's process executes the call.
    Ring,
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Way::Vmfunc => "vmfunc",
            Way::Ring => "ring",
        })
    }
}

/// A service that this client is bound to, for one thread at a time.
pub trait Service: Send {
    /// Calls a function of the service.
    ///
    /// # Errors
    /// [`Error::NoSuchCall`]; [`Error::Ended`], after which the binding stays good; [`Error::Gone`], after which it is of no use.
    fn call(&mut self, call: u32, arguments: [u64; 3]) -> Result<u64, Error>;
    /// The memory that the service sees, too.
    fn window(&self) -> &tombolo_calls::Window;
    /// The way that calls take.
    fn way(&self) -> Way;
}

/// Where [`bind`] looks for a service.
#[derive(Debug, Clone)]
pub struct Places {
    /// The guest module's device.
    pub device: PathBuf,
    /// The folder of the rings' sockets, each with the name of its service.
    pub sockets: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Places { device: vmfunc::DEVICE.into(), sockets: "/run/tombolo/services".into() }
    }
}

/// Binds to a service by name: by VMFUNC where this is a VM whose host offers the service so, or else by a ring.
pub fn bind(places: &Places, name: &str) -> Result<Box<dyn Service>, Error> {
    check_name(name)?;
    if places.device.exists() {
        match vmfunc::Bound::new(&places.device, name) {
            Ok(bound) => return Ok(Box::new(bound)),
            Err(e) if !socket(places, name).exists() => return Err(e),
            Err(_) => {}
        }
    }
    Ok(Box::new(ring::Client::connect(&socket(places, name), name)?))
}

fn socket(places: &Places, name: &str) -> PathBuf {
    Path::join(&places.sockets, name)
}

/// Checks a service's name: letters, digits, `-`, `_` and `.`, the first a letter or digit.
pub fn check_name(name: &str) -> Result<(), Error> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.len() > NAME_MAX
        || !name.starts_with(|c: char| c.is_ascii_alphanumeric())
        || !name.chars().all(good)
    {
        return Err(Error::Refused(format!(
            "{name:?} is no name of a service: up to {NAME_MAX} letters, digits, '-', '_' and '.', the first a letter or digit"
        )));
    }
    Ok(())
}
