// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses of servers: `unix:/path`, `zone:/dev/tombolo-calls-NAME` (in a VM), `tcp:host:port`, `vsock:cid:port`.

use std::path::Path;
use tombolo_calls::hello::Hello;
use tombolo_calls::{Error, Link, process, stream, zone};

/// Where a server listens if nothing else is said.
pub const DEFAULT: &str = "unix:/run/tombolo/accel.sock";
/// The environment variable that says where the server is.
pub const VARIABLE: &str = "TOMBOLO_ACCEL";

/// Connects to the server at an address. The error says what to do.
pub fn connect(address: &str, api: &str, identity: [u8; 16]) -> Result<Link, Error> {
    let program = std::env::args_os().next().unwrap_or_default();
    let program = Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let hello = Hello { api: api.into(), identity, name: format!("{program}:{}", std::process::id()) };
    let unknown = || {
        Error::Refused(format!(
            "{VARIABLE}={address}: expected unix:/path, zone:/dev/tombolo-calls-NAME, tcp:host:port or vsock:cid:port"
        ))
    };
    let (scheme, rest) = address.split_once(':').ok_or_else(unknown)?;
    match scheme {
        "unix" => process::connect(Path::new(rest), &hello),
        "zone" => zone::connect(Path::new(rest), &hello),
        "tcp" => stream::connect(stream::tcp(rest)?, &hello),
        "vsock" => {
            let (cid, port) = rest.split_once(':').ok_or_else(unknown)?;
            let (cid, port) = (cid.parse().map_err(|_| unknown())?, port.parse().map_err(|_| unknown())?);
            stream::connect(stream::vsock(cid, port)?, &hello)
        }
        _ => Err(unknown()),
    }
}
