// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The life of one worker: it shakes hands with its client, gives up what it doesn't need, loads the driver, and serves until the
//! client is gone.

use crate::limits::Limits;
use crate::opencl::OpenCl;
use crate::session::Session;
use anyhow::{Context, bail};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use tombolo_accel_spec::opencl as wire;
use tombolo_calls::hello::Geometry;
use tombolo_calls::{Error, process, stream};

/// The descriptor a worker finds its client's socket at.
pub const SOCKET_FD: i32 = 3;

/// Serves the client whose socket was passed.
pub fn run(limits: &Limits) -> anyhow::Result<()> {
    // A panic in any thread ends this client's worker: nobody works on with a half-changed value.
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
    // SAFETY: the supervisor put the client's socket there; nobody else in this process owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(SOCKET_FD) };
    // A client that says nothing must not keep a process for ever.
    let timeout = libc::timeval { tv_sec: 10, tv_usec: 0 };
    set_timeout(&socket, timeout)?;
    let hello = stream::hello(&socket).context("handshake")?;
    if let Err(why) = hello.fits(wire::API, wire::IDENTITY) {
        stream::refuse(&socket, &why.to_string()).context("refusing")?;
        bail!("{}: {why}", hello.name);
    }
    set_timeout(&socket, libc::timeval { tv_sec: 0, tv_usec: 0 })?;
    let (scratch, own) = scratch()?;
    crate::sandbox::enter(&scratch).context("sandbox")?;
    let api = match OpenCl::load(limits.clone()) {
        Ok(api) => Arc::new(api),
        Err(e) => {
            stream::refuse(&socket, &format!("the server can't load OpenCL: {e}")).context("refusing")?;
            bail!("{e}");
        }
    };
    let geometry = Geometry { window: limits.window, ..Geometry::default() };
    let link = if is_unix(&socket)? {
        process::accept(UnixStream::from(socket), geometry)
    } else {
        stream::accept(socket, geometry)
    }
    .context("handshake")?;
    let session = Session::new(link, limits);
    api.attach(&session);
    match session.run(api.clone()) {
        Error::Closed => {}
        why => eprintln!("tombolo accel: client {}: {why}", hello.name),
    }
    if own {
        if let Err(e) = std::fs::remove_dir_all(&scratch) {
            eprintln!("tombolo accel: {}: {e}", scratch.display());
        }
    }
    // The process ends here; the kernel takes back its memory and devices. Running the driver's own exit handlers with
    // threads still inside of it would only risk a hang.
    // SAFETY: ends the process.
    unsafe { libc::_exit(0) }
}

/// A folder of this worker's own, where the driver compiles kernels. With a cache folder given (POCL_CACHE_DIR), that is it: clients
/// then share compiled kernels, which only clients that trust each other should.
fn scratch() -> anyhow::Result<(std::path::PathBuf, bool)> {
    let given = std::env::var_os("POCL_CACHE_DIR").map(std::path::PathBuf::from);
    let own = given.is_none();
    let path =
        given.unwrap_or_else(|| std::env::temp_dir().join(format!("tombolo-accel-{}", std::process::id())));
    std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
    // SAFETY: this process has one thread yet.
    unsafe {
        std::env::set_var("POCL_CACHE_DIR", &path);
        std::env::set_var("TMPDIR", &path);
    }
    Ok((path, own))
}

fn set_timeout(socket: &OwnedFd, timeout: libc::timeval) -> anyhow::Result<()> {
    // SAFETY: the value lives during the call, and its size is given.
    let r = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO,
            (&raw const timeout).cast(),
            size_of_val(&timeout) as libc::socklen_t,
        )
    };
    if r < 0 { Err(std::io::Error::last_os_error()).context("SO_RCVTIMEO") } else { Ok(()) }
}

fn is_unix(socket: &OwnedFd) -> anyhow::Result<bool> {
    let mut domain: libc::c_int = 0;
    let mut len = size_of_val(&domain) as libc::socklen_t;
    // SAFETY: room for an int, as its size says.
    let r = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &mut len,
        )
    };
    if r < 0 {
        return Err(std::io::Error::last_os_error()).context("SO_DOMAIN");
    }
    Ok(domain == libc::AF_UNIX)
}
