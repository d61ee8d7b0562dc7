// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A hostile client of CUDA that speaks the wire itself, to a confined worker on the test device: records of every function whose numbers are objects of the right and of other
//! kinds, addresses in and around its memory, the window's and numbers' limits. It goes on for TOMBOLO_SECONDS (5), beside a client whose memory must stay as it is and
//! whose bytes must not be in any answer.

mod rig;
#[path = "rig/cuda.rs"]
mod rig_cuda;

use rig::{Numbers, Server, TIMEOUT};
use rig_cuda::serve;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use tombolo_accel_spec::common::{Ping, Release, Snapshot};
use tombolo_accel_spec::cuda::{self as wire, FUNCTIONS, make};
use tombolo_accel_spec::wire::{Decoder, Encoder, Record, Reply, ReplyKind, Request, WANTS_REPLY};
use tombolo_calls::hello::Hello;
use tombolo_calls::{Error, Link, send};

/// MiB of each client's window.
const WINDOW: u64 = 4;
/// Requests of a session.
const REQUESTS: usize = 200;
/// A session that answers no ping for so long stands still: its kernel may run for hours.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of the memory of each client.
const MEMORY: u64 = 64 << 10;
/// What the neighbour's memory is full of, and nobody else's.
const SECRET: u32 = 0x5ec2_e717;

const IMAGE: &[u8] = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f(.param .u64 to, .param .u32 n) {\n\
    .reg .u64 %rd<3>;\n.reg .u32 %r<3>;\nld.param.u64 %rd1, [to];\nld.param.u32 %r1, [n];\nst.global.u32 [%rd1], %r1;\nret;\n}\n\0";

/// The session of a client that says what it likes.
struct Client {
    link: Link,
    tag: u64,
    /// Where its memory begins.
    memory: u64,
    /// An answer had the neighbour's bytes.
    has_seen: bool,
}

/// Connects once there is a place.
fn connect(server: &Server) -> Link {
    let hello = Hello { api: wire::API.into(), identity: wire::IDENTITY, name: "hostile".into() };
    let begun = Instant::now();
    loop {
        match tombolo_calls::process::connect(&server.socket, &hello) {
            Err(Error::Refused(why)) if begun.elapsed() < TIMEOUT => {
                assert!(why.contains("clients of user"), "{why}");
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other.expect("connects"),
        }
    }
}

impl Client {
    fn say(&mut self, call: u32, flags: u32, body: &[u8]) -> Result<(), Error> {
        self.tag += 1;
        let head = Request { call, flags, tag: self.tag }.to_bytes();
        send(&mut *self.link.tx, &*self.link.room, &[&head, body])?;
        self.link.tx.publish()
    }

    /// The answer to what was said last, and its status. `Ok(None)`: it takes longer than it may. An error: the worker is gone.
    fn answer(&mut self) -> Result<Option<(i32, Vec<u8>)>, ()> {
        let (own, begun, mut record, mut whole) = (self.tag, Instant::now(), Vec::new(), Vec::new());
        while begun.elapsed() < PATIENCE {
            match self.link.rx.try_recv(&mut record) {
                Ok(true) => {
                    let (reply, body) = Reply::split(&record).expect("the server speaks the protocol");
                    self.has_seen |= body.windows(4).any(|word| word == SECRET.to_le_bytes());
                    if reply.tag == own && [ReplyKind::Result, ReplyKind::Part].contains(&reply.kind) {
                        whole.extend_from_slice(body);
                        if reply.kind == ReplyKind::Result {
                            return Ok(Some((reply.status, whole)));
                        }
                    }
                }
                Ok(false) if is_gone(&self.link) => return Err(()),
                Ok(false) => std::thread::sleep(Duration::from_micros(200)),
                Err(_) => return Err(()),
            }
        }
        Ok(None)
    }

    fn ask<'a, R: Record<'a>>(&mut self, record: &R) -> (i32, Vec<u8>) {
        let mut body = Vec::new();
        record.encode(&mut Encoder::new(&mut body));
        self.say(R::ID, WANTS_REPLY, &body).expect("sent");
        self.answer().expect("it lives").expect("at once")
    }

    /// A session with objects: context 1, memory, module 2, function 3, stream 4, event 5, graph 6, node 7, launchable graph 8, pool 9.
    fn begin(server: &Server) -> Client {
        let mut own = Client { link: connect(server), tag: 0, memory: 0, has_seen: false };
        own.ask(&Snapshot {});
        let current = 1;
        assert_eq!(own.ask(&wire::DevicePrimaryCtxRetain { dev: 0, new: current }).0, wire::SUCCESS);
        let (status, address) = own.ask(&wire::MemAllocV2 { bytesize: MEMORY, current });
        assert_eq!(status, wire::SUCCESS);
        own.memory = Decoder::new(&address).u64().expect("an address");
        own
    }

    fn make_objects(&mut self) {
        let current = 1;
        let (options, values) = ([][..].into(), [][..].into());
        self.ask(&wire::ModuleLoadDataEx { image: IMAGE, options, values, new: 2, current });
        self.ask(&wire::ModuleGetFunction { hmod: 2, name: b"f", new: 3, current });
        self.ask(&wire::StreamCreate { phStream: 4, Flags: 0, current });
        self.ask(&wire::EventCreate { phEvent: 5, Flags: 0, current });
        self.ask(&wire::GraphCreate { phGraph: 6, flags: 0 });
        let parameters = [self.memory.to_le_bytes().as_slice(), &[1, 0, 0, 0]].concat();
        let made = self.ask(&wire::GraphAddKernelNodeV2 {
            new: 7,
            hGraph: 6,
            after: [][..].into(),
            f: 3,
            shape: [1, 1, 1, 1, 1, 1][..].into(),
            sharedMemBytes: 0,
            parameters: &parameters,
            current,
        });
        assert_eq!(made.0, wire::SUCCESS);
        self.ask(&wire::GraphInstantiateWithFlags { phGraphExec: 8, hGraph: 6, flags: 0, current });
        self.ask(&wire::DeviceGetDefaultMemPool { dev: 0, new: 9 });
    }

    fn fill(&mut self, value: u32) {
        let (to, count) = (self.memory, MEMORY / 4);
        assert_eq!(
            self.ask(&wire::MemsetD32V2 { dstDevice: to, ui: value, N: count, current: 1 }).0,
            wire::SUCCESS
        );
    }

    /// All of its memory.
    fn read(&mut self) -> Vec<u8> {
        let record = wire::MemcpyDtoHAsyncV2 {
            data: 0,
            srcDevice: self.memory,
            ByteCount: MEMORY,
            hStream: 0,
            current: 1,
        };
        self.ask(&record).1
    }
}

fn is_gone(link: &Link) -> bool {
    let mut fd = libc::pollfd { fd: link.gone.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: the structure lives during the call.
    unsafe { libc::poll(&mut fd, 1, 0) > 0 }
}

/// A number as a record may have it: an object, mostly, or an address, a size, a limit.
fn number(numbers: &mut Numbers, memory: u64) -> u64 {
    let some = numbers.next();
    let small = some >> 8 & 0xff;
    match some >> 59 {
        0..=13 => small % 12,
        14..=15 => 12 + small % 40,
        16..=20 => memory + small % 33 * 2048,
        21 => memory.wrapping_sub(small),
        22 => memory + MEMORY - small,
        23 => 1 << (small % 64),
        24 => (WINDOW << 20) + small - 128,
        25 => small << 16,
        26 => u64::MAX - small,
        27 => (1 << 32) - small,
        28 => some << 8,
        _ => small,
    }
}

/// Sends records of any functions; what it was about when its worker ended, or nothing. True: it stood still.
fn session(server: &Server, numbers: &mut Numbers) -> Result<(bool, bool), String> {
    let mut client = Client::begin(server);
    client.make_objects();
    let mut last = String::new();
    for _ in 0..REQUESTS {
        let (mut body, memory) = (Vec::new(), client.memory);
        let which = numbers.next() as usize % (FUNCTIONS.len() + 4);
        let (id, name) = FUNCTIONS.get(which).copied().unwrap_or((Release::ID, "release"));
        if id == Release::ID {
            let (kind, id) = ((numbers.next() % 13) as u32, number(numbers, memory));
            Release { kind, id }.encode(&mut Encoder::new(&mut body));
        } else if !make(id, &mut || number(numbers, memory), &mut body) {
            continue;
        }
        let waits = numbers.next() % 3 > 0;
        last = format!("{name}: {body:02x?}");
        let said = client.say(id, if waits { WANTS_REPLY } else { 0 }, &body);
        let answered =
            said.map_err(drop).and_then(|()| if waits { client.answer() } else { Ok(Some((0, body))) });
        match answered {
            Ok(Some(_)) => {}
            Ok(None) => return Ok((client.has_seen, true)),
            Err(()) => return Err(last),
        }
    }
    if client.say(Ping::ID, WANTS_REPLY, &[]).is_err() {
        return Err(last);
    }
    let stood = client.answer().map_err(|()| last)?.is_none();
    Ok((client.has_seen, stood))
}

#[test]
fn wild_arguments_of_every_function_end_no_worker_and_reach_nothing_of_anothers() {
    let setting =
        |name: &str, usual: u64| std::env::var(name).map_or(usual, |text| text.parse().expect("a number"));
    let (seconds, seed) = (setting("TOMBOLO_SECONDS", 5), setting("TOMBOLO_SEED", 1));
    let server = serve("cuda-wire", &["--window", &WINDOW.to_string(), "--memory", "16"]);
    let mut neighbour = Client::begin(&server);
    neighbour.fill(SECRET);
    let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let (begun, mut sessions, mut stood, mut ended, mut has_seen) = (Instant::now(), 0, 0, Vec::new(), false);
    while begun.elapsed() < Duration::from_secs(seconds) {
        sessions += 1;
        match session(&server, &mut numbers) {
            Ok((seen, stands)) => {
                has_seen |= seen;
                stood += u32::from(stands);
            }
            Err(last) => ended.push(last),
        }
    }
    println!("{sessions} sessions of {REQUESTS} requests, of which {stood} stood still");
    assert!(ended.is_empty(), "workers ended after {ended:#?}");
    assert!(!has_seen, "an answer had the neighbour's bytes");
    let own = neighbour.read();
    assert_eq!(own.len() as u64, MEMORY);
    assert!(own.chunks(4).all(|word| word == SECRET.to_le_bytes()), "the neighbour's memory was written");
    drop(neighbour);
    let log = server.end();
    assert!(!log.contains("panicked"), "{log}");
}
