// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Frames: the messages between the host, the nodes of a job, the ranks' wrappers and the seats. A frame is a kind, a number whose meaning depends on the
//! kind, a length and that many bytes; all numbers are little endian.

use std::io::{self, Read};

/// The longest body. A command line with its environment takes 2 MiB at most (Linux's limit of a quarter of the stack).
const LONGEST: usize = 4 << 20;
/// Bytes before the body.
const HEADER: usize = 9;
/// The number of the job's launcher where others have that of a rank.
pub const LAUNCHER: u32 = u32::MAX;
/// Bytes of a stream in one frame; the sender of a stream has one frame on its way until it is [`Kind::Taken`].
pub const PIECE: usize = 64 << 10;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Host to node: fields of a question about the guest.
    Ask = 1,
    /// The answer: fields.
    Facts,
    /// Host to node: the fields of a job.
    Prepare,
    /// The node is ready for its ranks.
    Ready,
    /// The node can't take the job; the body says why.
    Refused,
    /// Another process has one of the job's process numbers.
    Collides,
    /// Start the program of a rank or the launcher: a [`Program`].
    Start,
    /// Input for a rank; an empty one is its end.
    Input,
    /// Standard output of a rank; an empty one is its end.
    Out,
    /// Error output of a rank; an empty one is its end.
    Err,
    /// The last frame of a stream was passed on. The body is the stream: 0, 1 or 2.
    Taken,
    /// Send a rank the signal that is the body.
    Signal,
    /// A rank ended: the body is its status as of waitpid(2), four bytes, and a fifth if it was told to end.
    Exit,
    /// A rank runs: the body is its process number in text.
    Began,
    /// Open a connection to the address that is the body.
    Connect,
    /// Bytes of a connection; none is the end of this direction.
    Data,
    /// The last bytes of a connection were passed on.
    Sent,
    /// Host to node: end everything. Node to host: what the user should know.
    End,
}

impl Kind {
    const ALL: [Kind; 18] = [
        Kind::Ask,
        Kind::Facts,
        Kind::Prepare,
        Kind::Ready,
        Kind::Refused,
        Kind::Collides,
        Kind::Start,
        Kind::Input,
        Kind::Out,
        Kind::Err,
        Kind::Taken,
        Kind::Signal,
        Kind::Exit,
        Kind::Began,
        Kind::Connect,
        Kind::Data,
        Kind::Sent,
        Kind::End,
    ];

    fn of(byte: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it says.
    pub kind: Kind,
    /// A rank, [`LAUNCHER`], or the number of a connection.
    pub id: u32,
    /// The rest.
    pub body: Vec<u8>,
}

impl Frame {
    /// A frame with a body.
    pub fn new(kind: Kind, id: u32, body: impl Into<Vec<u8>>) -> Frame {
        Frame { kind, id, body: body.into() }
    }

    /// The bytes that [`read`] and [`Decoder`] understand.
    pub fn encode(&self) -> Vec<u8> {
        let length = u32::try_from(self.body.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEADER + self.body.len());
        bytes.push(self.kind as u8);
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(&self.body);
        bytes
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the other side of a job sent {what}"))
}

/// Reads one frame; `None` at the end.
///
/// # Errors
/// It can't be read, ends in the middle, or is none.
pub fn read(from: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut decoder = Decoder::default();
    let mut header = [0; HEADER];
    let mut have = 0;
    while have < HEADER {
        match from.read(&mut header[have..]) {
            Ok(0) if have == 0 => return Ok(None),
            Ok(0) => return Err(broken("half of a message")),
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    decoder.push(&header);
    let mut body = vec![0; decoder.length()?.unwrap_or(0)];
    from.read_exact(&mut body)?;
    decoder.push(&body);
    decoder.next()
}

/// Parts a stream of bytes into frames.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    /// Adds bytes as they arrive.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// The length of the next frame's body, once it is known.
    fn length(&self) -> io::Result<Option<usize>> {
        let Some(bytes) = self.bytes.get(5..HEADER).and_then(|bytes| bytes.try_into().ok()) else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX);
        if length > LONGEST { Err(broken("a message that is too long")) } else { Ok(Some(length)) }
    }

    /// The next frame; `None` until all of it has arrived.
    ///
    /// # Errors
    /// What has arrived is no frame.
    #[allow(clippy::should_implement_trait, reason = "an iterator could not fail")]
    pub fn next(&mut self) -> io::Result<Option<Frame>> {
        let Some(length) = self.length()? else { return Ok(None) };
        if self.bytes.len() < HEADER + length {
            return Ok(None);
        }
        let rest = self.bytes.split_off(HEADER + length);
        let whole = std::mem::replace(&mut self.bytes, rest);
        let kind = Kind::of(whole[0]).ok_or_else(|| broken("a message of an unknown kind"))?;
        let id = u32::from_le_bytes([whole[1], whole[2], whole[3], whole[4]]);
        Ok(Some(Frame::new(kind, id, &whole[HEADER..])))
    }
}

/// Names and values, as a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields(Vec<(String, String)>);

impl Fields {
    /// Adds a value. A name may have several.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Fields {
        self.0.push((name.to_owned(), value.to_string()));
        self
    }

    /// The first value of a name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.all(name).next()
    }

    /// The first value of a name, as a number or whatever else has a text form.
    pub fn parsed<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.get(name)?.parse().ok()
    }

    /// All values of a name.
    pub fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The body of a frame: `name=value`, each ended by a zero byte.
    pub fn encode(&self) -> Vec<u8> {
        self.0.iter().flat_map(|(name, value)| format!("{name}={value}\0").into_bytes()).collect()
    }

    /// What [`Fields::encode`] made. What is no field is left out.
    pub fn decode(body: &[u8]) -> Fields {
        let text = String::from_utf8_lossy(body);
        let pairs = text.split_terminator('\0').filter_map(|field| field.split_once('='));
        Fields(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }
}

/// A program to start: words are bytes, as the kernel has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// The working folder.
    pub dir: Vec<u8>,
    /// Program and arguments.
    pub argv: Vec<Vec<u8>>,
    /// "NAME=VALUE".
    pub env: Vec<Vec<u8>>,
}

impl Program {
    /// The body of a frame: folder, number of words, words, variables, each ended by a zero byte.
    pub fn encode(&self) -> Vec<u8> {
        let count = self.argv.len().to_string().into_bytes();
        let words = [&self.dir, &count].into_iter().chain(&self.argv).chain(&self.env);
        words.flat_map(|word| word.iter().copied().chain([0])).collect()
    }

    /// What [`Program::encode`] made; `None`: it is something else.
    pub fn decode(body: &[u8]) -> Option<Program> {
        let mut words = body.strip_suffix(&[0])?.split(|byte| *byte == 0).map(<[u8]>::to_vec);
        let dir = words.next()?;
        let count: usize = String::from_utf8(words.next()?).ok()?.parse().ok()?;
        let argv: Vec<_> = words.by_ref().take(count).collect();
        (argv.len() == count && count > 0).then(|| Program { dir, argv, env: words.collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_arrive_whole_however_their_bytes_come() {
        let frames = [
            Frame::new(Kind::Start, 7, "program"),
            Frame::new(Kind::Out, LAUNCHER, vec![0xff; 3000]),
            Frame::new(Kind::End, 0, ""),
        ];
        let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
        for size in [1, 2, 8, 9, 10, 5000] {
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            for piece in bytes.chunks(size) {
                decoder.push(piece);
                while let Some(frame) = decoder.next().unwrap() {
                    seen.push(frame);
                }
            }
            assert_eq!(seen, frames);
        }
        let mut stream = &bytes[..];
        for frame in &frames {
            assert_eq!(read(&mut stream).unwrap().as_ref(), Some(frame));
        }
        assert_eq!(read(&mut stream).unwrap(), None);
        assert!(read(&mut &bytes[..4]).is_err() && read(&mut &bytes[..12]).is_err());
    }

    #[test]
    fn what_is_no_frame_is_an_error_and_takes_no_memory() {
        let mut decoder = Decoder::default();
        decoder.push(&[1, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
        assert!(decoder.next().is_err());
        let mut decoder = Decoder::default();
        decoder.push(&[99, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert!(decoder.next().is_err());
    }

    #[test]
    fn programs_and_fields_keep_every_word() {
        let words = |list: &[&str]| list.iter().map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>();
        for env in [words(&[]), words(&["A=b\nc", "EMPTY="])] {
            let program = Program { dir: b"/mnt".to_vec(), argv: words(&["./a", "", "x y"]), env };
            assert_eq!(Program::decode(&program.encode()), Some(program));
        }
        assert_eq!(Program::decode(b"/\x003\0a\0"), None);
        assert_eq!(Program::decode(b""), None);
        let fields = Fields::default().with("a", 1).with("b", "x=y").with("a", 2);
        assert_eq!(Fields::decode(&fields.encode()), fields);
        assert_eq!(fields.all("a").collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(
            (fields.parsed::<u8>("a"), fields.get("b"), fields.get("c")),
            (Some(1), Some("x=y"), None)
        );
    }
}
