// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Streams of bytes in pieces: a thread reads a stream and passes a piece on when the one before has arrived, another writes what arrives. So no stream fills
//! the memory of whoever passes it on.

use std::io::{Read, Write};
use std::sync::mpsc::{self, Sender};
use std::thread;

use crate::frame::PIECE;

/// The ends of a stream that this process passes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// A rank's standard stream: 0, 1 or 2.
    Rank(u32, u8),
    /// A connection's.
    Connection(u32),
}

/// News of a stream.
#[derive(Debug)]
pub enum News {
    /// It was read; no bytes are its end.
    Read(Vec<u8>),
    /// The last piece was written.
    Written,
}

/// Reads a stream to its end: news go to `tell`, and each word in what is returned asks for the next piece.
pub fn read(mut from: impl Read + Send + 'static, tell: impl Fn(News) + Send + 'static) -> Sender<()> {
    let (ask, asked) = mpsc::channel();
    thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        loop {
            let n = match from.read(&mut piece) {
                Ok(n) => n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                // A pseudo terminal whose other side has closed gives an error.
                Err(_) => 0,
            };
            tell(News::Read(piece[..n].to_vec()));
            if n == 0 || asked.recv().is_err() {
                return;
            }
        }
    });
    ask
}

/// Writes what is sent to what is returned, and calls `end` after an empty piece. A reader that has gone misses the rest.
pub fn write<T: Write + Send + 'static>(
    mut to: T,
    end: impl FnOnce(T) + Send + 'static,
    tell: impl Fn(News) + Send + 'static,
) -> Sender<Vec<u8>> {
    let (send, pieces) = mpsc::channel::<Vec<u8>>();
    thread::spawn(move || {
        while let Some(piece) = pieces.recv().ok().filter(|piece| !piece.is_empty()) {
            let _gone = to.write_all(&piece).and_then(|()| to.flush());
            tell(News::Written);
        }
        end(to);
    });
    send
}
