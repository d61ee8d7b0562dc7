// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses of servers: `unix:/path`, `zone:/dev/tombolo-calls-NAME` (in a VM), `tcp:host:port`, `vsock:cid:port`.

use std::path::Path;
use tombolo_calls::hello::Hello;
use tombolo_calls::{Error, Link, process, stream, zone};

/// The address of a server unless the variable names another.
const DEFAULT: &str = "unix:/run/tombolo/accel.sock";
/// The environment variable that says where the server is.
pub const VARIABLE: &str = "TOMBOLO_ACCEL";
/// The names of the devices of a VM's channels begin so; the zone's name follows.
const CHANNELS: &str = "tombolo-calls-";

/// The address of this process's server: the variable's value; else, in a VM that has channels to a server, their device (of several the first by
/// name); else the default address.
pub fn address() -> String {
    std::env::var(VARIABLE).ok().or_else(|| channels_in(Path::new("/dev"))).unwrap_or_else(|| DEFAULT.into())
}

fn channels_in(folder: &Path) -> Option<String> {
    let names = folder.read_dir().ok()?.flatten().map(|entry| entry.file_name());
    let names = names.filter_map(|name| name.into_string().ok().filter(|n| n.starts_with(CHANNELS)));
    names.min().map(|name| format!("zone:{}", folder.join(name).display()))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_devices_a_program_takes_the_first_by_name() {
        let folder = std::env::temp_dir().join(format!("tombolo-connect-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("a folder of its own");
        assert_eq!(channels_in(&folder), None);
        for name in ["tombolo-calls-gpu", "tombolo-calls-cpu", "tombolo-calls", "null"] {
            std::fs::write(folder.join(name), "").expect("written");
        }
        assert_eq!(channels_in(&folder), Some(format!("zone:{}/tombolo-calls-cpu", folder.display())));
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
