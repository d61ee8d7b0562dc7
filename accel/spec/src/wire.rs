// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encoding and decoding: little-endian integers, counted arrays and bytes. A decoder works on a private copy, never on shared memory, and
//! every length is checked against what is left before anything is taken or allocated.

use std::borrow::Cow;

/// A record that doesn't decode: its sender doesn't follow the declarations, and is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// A request as the declarations describe it.
pub trait Record<'a>: Sized {
    /// The function's number.
    const ID: u32;
    /// Set if it may stay in the batch until a later call.
    const LAZY: bool;
    /// Appends its fields.
    fn encode(&self, to: &mut Encoder<'_>);
    /// Takes its fields.
    fn decode(from: &mut Decoder<'a>) -> Result<Self, Malformed>;
}

/// Decodes a whole body.
pub fn decode<'a, R: Record<'a>>(body: &'a [u8]) -> Result<R, Malformed> {
    let mut from = Decoder::new(body);
    let record = R::decode(&mut from)?;
    from.end()?;
    Ok(record)
}

/// Decodes a body and encodes it again, for tests and fuzzers.
pub fn again<'a, R: Record<'a>>(body: &'a [u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
    decode::<R>(body)?.encode(&mut Encoder::new(out));
    Ok(())
}

/// Appends values to a buffer.
pub struct Encoder<'b>(&'b mut Vec<u8>);

macro_rules! integers {
    ($($t:ident $many:ident),*) => {
        impl Encoder<'_> {
            $(
                /// Appends an integer.
                pub fn $t(&mut self, value: $t) {
                    self.0.extend_from_slice(&value.to_le_bytes());
                }
                /// Appends a count and integers.
                pub fn $many(&mut self, values: &[$t]) {
                    self.u32(values.len() as u32);
                    for v in values {
                        self.$t(*v);
                    }
                }
            )*
        }
        impl<'a> Decoder<'a> {
            $(
                /// Takes an integer.
                pub fn $t(&mut self) -> Result<$t, Malformed> {
                    let (head, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
                    self.0 = rest;
                    Ok($t::from_le_bytes(*head))
                }
                /// Takes counted integers.
                pub fn $many<'c>(&mut self) -> Result<Cow<'c, [$t]>, Malformed> {
                    let count = self.u32()? as usize;
                    let bytes = self.take(count.checked_mul(size_of::<$t>()).ok_or(Malformed)?)?;
                    Ok(bytes
                        .chunks_exact(size_of::<$t>())
                        .filter_map(|c| c.first_chunk().map(|c| $t::from_le_bytes(*c)))
                        .collect::<Vec<$t>>()
                        .into())
                }
            )*
        }
    };
}
integers!(u8 u8s, u16 u16s, u32 u32s, i32 i32s, u64 u64s, i64 i64s, f32 f32s);

impl<'b> Encoder<'b> {
    /// Appends to `to`.
    pub fn new(to: &'b mut Vec<u8>) -> Self {
        Encoder(to)
    }
    /// Appends three integers.
    pub fn triple(&mut self, values: &[u64; 3]) {
        values.iter().for_each(|v| self.u64(*v));
    }
    /// Appends a count and bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.0.extend_from_slice(bytes);
    }
    /// Appends bytes that may be absent.
    pub fn maybe(&mut self, bytes: Option<&[u8]>) {
        self.u32(u32::from(bytes.is_some()));
        self.bytes(bytes.unwrap_or_default());
    }
    /// Appends several byte strings.
    pub fn strs(&mut self, strings: &[&[u8]]) {
        self.u32(strings.len() as u32);
        strings.iter().for_each(|s| self.bytes(s));
    }
}

/// Encodes values that a source of numbers chooses: a fuzzer's requests, which decode whatever their values are.
pub struct Maker<'m> {
    next: &'m mut dyn FnMut() -> u64,
    out: &'m mut Vec<u8>,
}

macro_rules! made {
    ($($t:ident $many:ident),*) => {
        $(
            /// An integer.
            pub fn $t(&mut self) {
                let value = (self.next)() as $t;
                Encoder::new(self.out).$t(value);
            }
            /// A few integers.
            pub fn $many(&mut self) {
                let count = (self.next)() % 5;
                let values: Vec<$t> = (0..count).map(|_| (self.next)() as $t).collect();
                Encoder::new(self.out).$many(&values);
            }
        )*
    };
}

impl<'m> Maker<'m> {
    /// Appends to `out`.
    pub fn new(next: &'m mut dyn FnMut() -> u64, out: &'m mut Vec<u8>) -> Self {
        Maker { next, out }
    }
    made!(u8 u8s, u16 u16s, u32 u32s, i32 i32s, u64 u64s, i64 i64s, f32 f32s);
    /// Three integers.
    pub fn triple(&mut self) {
        (0..3).for_each(|_| self.u64());
    }
    fn some(&mut self) -> Vec<u8> {
        let len = (self.next)() % 40;
        (0..len).map(|_| (self.next)() as u8).collect()
    }
    /// A few bytes.
    pub fn bytes(&mut self) {
        let bytes = self.some();
        Encoder::new(self.out).bytes(&bytes);
    }
    /// A few bytes, or none.
    pub fn maybe(&mut self) {
        let there = (self.next)() % 2 == 1;
        let bytes = self.some();
        Encoder::new(self.out).maybe(there.then_some(&bytes[..]));
    }
    /// A few byte strings.
    pub fn strs(&mut self) {
        let count = (self.next)() % 4;
        let strings: Vec<Vec<u8>> = (0..count).map(|_| self.some()).collect();
        let strings: Vec<&[u8]> = strings.iter().map(Vec::as_slice).collect();
        Encoder::new(self.out).strs(&strings);
    }
}

/// Takes values from bytes.
#[derive(Clone, Copy)]
pub struct Decoder<'a>(&'a [u8]);

impl<'a> Decoder<'a> {
    /// Reads `from`.
    pub fn new(from: &'a [u8]) -> Self {
        Decoder(from)
    }
    /// An error unless all was taken.
    pub fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
    /// The bytes that were not taken yet.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }
    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }
    /// Takes three integers.
    pub fn triple(&mut self) -> Result<[u64; 3], Malformed> {
        Ok([self.u64()?, self.u64()?, self.u64()?])
    }
    /// Takes counted bytes.
    pub fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u32()? as usize;
        self.take(len)
    }
    /// Takes bytes that may be absent.
    pub fn maybe(&mut self) -> Result<Option<&'a [u8]>, Malformed> {
        let there = self.u32()? != 0;
        let bytes = self.bytes()?;
        Ok(there.then_some(bytes))
    }
    /// Takes several byte strings.
    pub fn strs(&mut self) -> Result<Vec<&'a [u8]>, Malformed> {
        let count = self.u32()? as usize;
        // Each string takes at least its length; so a lie about the count can't make us allocate.
        if count > self.0.len() / 4 {
            return Err(Malformed);
        }
        (0..count).map(|_| self.bytes()).collect()
    }
}

/// Header of a request: function, flags, and the tag under which the reply is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The function's number.
    pub call: u32,
    /// [`WANTS_REPLY`].
    pub flags: u32,
    /// Chosen by the client.
    pub tag: u64,
}

/// The client waits for the result of this request.
pub const WANTS_REPLY: u32 = 1;
/// Bytes of a [`Request`] or [`Reply`].
pub const HEADER: usize = 16;

impl Request {
    /// As bytes.
    pub fn to_bytes(self) -> [u8; HEADER] {
        head(self.call, self.flags, self.tag)
    }
    /// Of the front of a record; the rest is the body.
    pub fn split(record: &[u8]) -> Result<(Request, &[u8]), Malformed> {
        let mut d = Decoder::new(record);
        let request = Request { call: d.u32()?, flags: d.u32()?, tag: d.u64()? };
        Ok((request, d.rest()))
    }
}

fn head(a: u32, b: u32, c: u64) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    out[..4].copy_from_slice(&a.to_le_bytes());
    out[4..8].copy_from_slice(&b.to_le_bytes());
    out[8..].copy_from_slice(&c.to_le_bytes());
    out
}

/// The kinds of records to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyKind {
    /// The result of a request; the tag is the request's.
    Result = 1,
    /// A part of the window was read or filled; the tag is the ticket.
    Ticket = 2,
    /// A callback; the tag is the one registered.
    Notify = 3,
    /// The front of a result that is longer than a record; more follows.
    Part = 4,
    /// Bytes that a kernel printed, for the program's standard output.
    Output = 5,
}

/// Number of a request that only carries the front of the next one's body, which is longer than a record.
pub const PART: u32 = 4;

/// Header of a record to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The kind of the record.
    pub kind: ReplyKind,
    /// A code of the API.
    pub status: i32,
    /// The request, the ticket or the callback that it belongs to.
    pub tag: u64,
}

impl Reply {
    /// As bytes.
    pub fn to_bytes(self) -> [u8; HEADER] {
        head(self.kind as u32, self.status as u32, self.tag)
    }
    /// Of the front of a record; the rest is the body.
    pub fn split(record: &[u8]) -> Result<(Reply, &[u8]), Malformed> {
        let mut d = Decoder::new(record);
        let kind = match d.u32()? {
            1 => ReplyKind::Result,
            2 => ReplyKind::Ticket,
            3 => ReplyKind::Notify,
            4 => ReplyKind::Part,
            5 => ReplyKind::Output,
            _ => return Err(Malformed),
        };
        Ok((Reply { kind, status: d.i32()?, tag: d.u64()? }, d.rest()))
    }
}
