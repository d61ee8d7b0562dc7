// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Frames between a client outside and the agent inside a lab, over one virtio-serial port.
//!
//! A frame is a kind (one byte, never 0), a payload length (32 bits, little endian, at most [`MAX_PAYLOAD`]) and the
//! payload. Zero bytes between frames mean nothing. A port outlives its clients and a client may die in the middle of a
//! frame, so each client first sends [`prelude`]: as many zeros as any unfinished frame can still want, then a
//! [`Frame::Hello`] with a nonce; frames that come back before the same nonce belong to an earlier client and are dropped.

use serde::{Deserialize, Serialize};

/// Largest payload in bytes.
pub const MAX_PAYLOAD: usize = 16 * 1024;
const HEADER: usize = 5;

/// Identifies one session on a port.
pub type Nonce = [u8; 16];

/// A command to run in the lab.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Program and arguments; the program is looked up in the lab's PATH.
    pub argv: Vec<String>,
    /// Environment, all of it.
    pub env: Vec<(String, String)>,
    /// Working directory; where it does not exist the command fails.
    pub cwd: String,
    /// Rows and columns of a terminal to give to the command.
    pub tty: Option<(u16, u16)>,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Opens a session (client) or answers (agent).
    Hello(Nonce),
    /// Client: run this.
    Start(Start),
    /// Client: input for the command; empty at its end.
    Stdin(Vec<u8>),
    /// Agent: output.
    Stdout(Vec<u8>),
    /// Agent: error output.
    Stderr(Vec<u8>),
    /// Agent: the command ended, with its exit code or 128 plus the signal that ended it.
    Exit(i32),
    /// Agent: the command could not be started.
    Failed(String),
    /// Client: the terminal now has these rows and columns.
    Resize(u16, u16),
}

/// The content of a buffer.
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed {
    /// A frame, and how many bytes it took.
    Frame(Frame, usize),
    /// Not yet a whole frame; this many bytes can be dropped.
    More(usize),
    /// No frame can begin like this; why, and how many bytes to drop to go on behind it.
    Broken(&'static str, usize),
}

/// The first frame of a client.
pub fn prelude(nonce: Nonce) -> Vec<u8> {
    let mut bytes = vec![0; MAX_PAYLOAD + HEADER];
    bytes.extend(encode(&Frame::Hello(nonce)));
    bytes
}

/// The bytes of a frame.
///
/// # Panics
/// If the payload is larger than [`MAX_PAYLOAD`]; senders cut data before.
pub fn encode(frame: &Frame) -> Vec<u8> {
    let (kind, payload): (u8, Vec<u8>) = match frame {
        Frame::Hello(nonce) => (1, nonce.to_vec()),
        Frame::Start(start) => (2, serde_json::to_vec(start).expect("strings always serialize")),
        Frame::Stdin(data) => (3, data.clone()),
        Frame::Stdout(data) => (4, data.clone()),
        Frame::Stderr(data) => (5, data.clone()),
        Frame::Exit(code) => (6, code.to_le_bytes().to_vec()),
        Frame::Failed(text) => (7, text.as_bytes().to_vec()),
        Frame::Resize(rows, columns) => (8, [rows.to_le_bytes(), columns.to_le_bytes()].concat()),
    };
    assert!(payload.len() <= MAX_PAYLOAD, "a frame of {} bytes", payload.len());
    let length = u32::try_from(payload.len()).expect("bounded above");
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.push(kind);
    bytes.extend(length.to_le_bytes());
    bytes.extend(payload);
    bytes
}

/// The first frame in `buffer`.
pub fn parse(buffer: &[u8]) -> Parsed {
    let skipped = buffer.iter().take_while(|b| **b == 0).count();
    let rest = &buffer[skipped..];
    let Some(header) = rest.get(..HEADER) else {
        return Parsed::More(skipped);
    };
    let length = u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize;
    if length > MAX_PAYLOAD {
        return Parsed::Broken("a frame longer than the protocol allows", buffer.len());
    }
    let Some(payload) = rest.get(HEADER..HEADER + length) else {
        return Parsed::More(skipped);
    };
    let used = skipped + HEADER + length;
    let frame = match header[0] {
        1 => payload.try_into().ok().map(Frame::Hello),
        2 => serde_json::from_slice(payload).ok().map(Frame::Start),
        3 => Some(Frame::Stdin(payload.to_vec())),
        4 => Some(Frame::Stdout(payload.to_vec())),
        5 => Some(Frame::Stderr(payload.to_vec())),
        6 => payload.try_into().ok().map(|b| Frame::Exit(i32::from_le_bytes(b))),
        7 => Some(Frame::Failed(String::from_utf8_lossy(payload).into_owned())),
        8 => <[u8; 4]>::try_from(payload)
            .ok()
            .map(|b| Frame::Resize(u16::from_le_bytes([b[0], b[1]]), u16::from_le_bytes([b[2], b[3]]))),
        _ => None,
    };
    match frame {
        Some(frame) => Parsed::Frame(frame, used),
        None => Parsed::Broken("a frame of an unknown kind or with a malformed payload", used),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_kind() -> Vec<Frame> {
        vec![
            Frame::Hello([7; 16]),
            Frame::Start(Start {
                argv: vec!["a".into()],
                env: vec![("K".into(), "v".into())],
                cwd: "/".into(),
                tty: Some((25, 80)),
            }),
            Frame::Stdin(vec![]),
            Frame::Stdout(vec![0; MAX_PAYLOAD]),
            Frame::Stderr(b"x".to_vec()),
            Frame::Exit(-1),
            Frame::Failed("no such program".into()),
            Frame::Resize(1, 2),
        ]
    }

    #[test]
    fn every_frame_comes_back_and_none_is_taken_before_it_is_whole() {
        for frame in every_kind() {
            let bytes = encode(&frame);
            for cut in [0, 1, 4, bytes.len() - 1] {
                assert_eq!(parse(&bytes[..cut]), Parsed::More(0), "{frame:?} cut at {cut}");
            }
            assert_eq!(parse(&bytes), Parsed::Frame(frame, bytes.len()));
        }
    }

    #[test]
    fn a_new_client_is_understood_wherever_the_one_before_it_died() {
        for frame in every_kind() {
            let whole = encode(&frame);
            for cut in [0, 1, 3, 5, whole.len() / 2, whole.len() - 1] {
                let mut stream = whole[..cut].to_vec();
                stream.extend(prelude([9; 16]));
                let mut at = 0;
                let found = loop {
                    match parse(&stream[at..]) {
                        Parsed::Frame(Frame::Hello(nonce), _) if nonce == [9; 16] => break true,
                        Parsed::Frame(_, used) | Parsed::Broken(_, used) => at += used,
                        Parsed::More(_) => break false,
                    }
                };
                assert!(found, "{frame:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_it_is_waited_for() {
        let mut bytes = vec![3];
        bytes.extend(u32::MAX.to_le_bytes());
        assert!(matches!(parse(&bytes), Parsed::Broken(_, 5)));
    }
}
