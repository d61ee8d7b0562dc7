// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The handshake: the client names itself, its API and the declarations it was built from; the server answers.
//!
//! Client: `magic, version, api, identity, name`. Server: accepted with a [`Geometry`], or refused with a text for people.
//! All integers are little endian; both messages have a fixed size limit.

use crate::Error;
use std::io::{ErrorKind, Read, Write};

const MAGIC: [u8; 8] = *b"TMBLCALL";
/// Version of handshake and transport. Records have an identity of their own ([`Hello::identity`]).
pub const VERSION: u32 = 1;
const MAX_TEXT: usize = 512;

/// The first message of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The API, by name ("opencl").
    pub api: String,
    /// Identity of the declarations that this side was built from.
    pub identity: [u8; 16],
    /// Program and process id of the client, for logs and `ls`. The client chooses them, so no decision rests on them.
    pub name: String,
}

/// Sizes of a channel, chosen by the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Data bytes of each ring; a power of two.
    pub ring: u64,
    /// Bytes of the window; a multiple of the page size, or 0.
    pub window: u64,
}

impl Default for Geometry {
    fn default() -> Self {
        Geometry { ring: 2 << 20, window: 1 << 30 }
    }
}

impl Geometry {
    /// Checks a geometry that came from outside.
    pub fn check(self) -> Result<Geometry, Error> {
        let ring_ok = self.ring.is_power_of_two() && (4096..=1 << 30).contains(&self.ring);
        if !ring_ok || self.window % 4096 != 0 || self.window > 1 << 40 {
            return Err(Error::Broken("the server offers rings or a window of an impossible size"));
        }
        Ok(self)
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&(end as u32).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

fn get<const N: usize>(from: &mut impl Read) -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => Error::Closed,
        _ => Error::Io(e),
    })?;
    Ok(bytes)
}

fn get_text(from: &mut impl Read) -> Result<String, Error> {
    let len = u32::from_le_bytes(get(from)?) as usize;
    if len > MAX_TEXT {
        return Err(Error::Broken("a text in the handshake is too long"));
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).chars().map(|c| if c.is_control() { '?' } else { c }).collect())
}

impl Hello {
    /// Sends it.
    pub fn send(&self, to: &mut impl Write) -> Result<(), Error> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&VERSION.to_le_bytes());
        put_text(&mut out, &self.api);
        out.extend_from_slice(&self.identity);
        put_text(&mut out, &self.name);
        Ok(to.write_all(&out)?)
    }

    /// Sends it and returns what `answer` receives. A server may refuse a client before it has read anything, and hang up: the refusal is
    /// received, too, although the hello could not be sent.
    ///
    /// # Errors
    /// Those of `answer`; the server hung up without a word.
    pub fn greet<T>(
        &self,
        to: &mut impl Write,
        answer: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let unsent = match self.send(to) {
            Err(Error::Io(e)) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => e,
            sent => return sent.and_then(|()| answer()),
        };
        match answer() {
            Err(Error::Refused(why)) => Err(Error::Refused(why)),
            _ => Err(unsent.into()),
        }
    }

    /// Receives one.
    pub fn receive(from: &mut impl Read) -> Result<Hello, Error> {
        if get::<8>(from)? != MAGIC {
            return Err(Error::Refused("the peer doesn't speak Tombolo's calls".into()));
        }
        let version = u32::from_le_bytes(get(from)?);
        if version != VERSION {
            return Err(Error::Refused(format!(
                "the client speaks version {version} of the transport, this server {VERSION}; install the same release on both sides"
            )));
        }
        let api = get_text(from)?;
        let identity = get(from)?;
        let name = get_text(from)?;
        Ok(Hello { api, identity, name })
    }

    /// Compares what a client says with what this server was built from.
    pub fn fits(&self, api: &str, identity: [u8; 16]) -> Result<(), Error> {
        if self.api != api {
            return Err(Error::Refused(format!(
                "this server serves {api}, the client asked for {}",
                self.api
            )));
        }
        if self.identity != identity {
            return Err(Error::Refused(format!(
                "client and server were built from different declarations of {api} (client {}, server {}); install the same release on both sides",
                hex(&self.identity[..4]),
                hex(&identity[..4])
            )));
        }
        Ok(())
    }
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The server's answer as bytes.
pub fn welcome(answer: Result<Geometry, &str>) -> Vec<u8> {
    let mut out = Vec::new();
    match answer {
        Ok(g) => {
            out.extend_from_slice(&0u32.to_le_bytes());
            out.extend_from_slice(&g.ring.to_le_bytes());
            out.extend_from_slice(&g.window.to_le_bytes());
        }
        Err(why) => {
            out.extend_from_slice(&1u32.to_le_bytes());
            put_text(&mut out, why);
        }
    }
    out
}

/// Receives the server's answer.
pub fn welcomed(from: &mut impl Read) -> Result<Geometry, Error> {
    match u32::from_le_bytes(get(from)?) {
        0 => {
            let ring = u64::from_le_bytes(get(from)?);
            let window = u64::from_le_bytes(get(from)?);
            Geometry { ring, window }.check()
        }
        1 => Err(Error::Refused(get_text(from)?)),
        _ => Err(Error::Broken("an unknown answer to the handshake")),
    }
}
