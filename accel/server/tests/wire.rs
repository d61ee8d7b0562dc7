// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A hostile client that speaks the wire itself, to a confined worker on the real driver: every number of every function's record at its limits, with objects of the
//! right and of other kinds, that were never made, or are gone. `TOMBOLO_SEEDS` says how often all of that is done, each time with other objects (1).

mod rig;

use rig::{Numbers, Server, TIMEOUT, compiled, native, run};
use std::time::{Duration, Instant};
use tombolo_accel_client::connection::Connection;
use tombolo_accel_spec::common::{Ping, Release, Snapshot};
use tombolo_accel_spec::opencl::{self as wire, FUNCTIONS, make};
use tombolo_accel_spec::wire::{Encoder, Record, Reply, ReplyKind, Request, WANTS_REPLY};
use tombolo_calls::hello::Hello;
use tombolo_calls::{Error, Link, send};

/// PoCL ends its process, natively too: it has no such function.
const ENDS: &str = "clSetCommandQueueProperty";
/// MiB of each client's window.
const WINDOW: u64 = 16;
/// Requests of a session. A session that waits for something for ever can't wait for more than these.
const REQUESTS: usize = 100;
/// A session that answers no ping for so long stands still: its kernel may run for hours, or its command may wait for an event that nobody ends.
const PATIENCE: Duration = Duration::from_secs(5);

/// The limits that each number of a record gets in turn.
const LIMITS: [u64; 14] = [
    0,
    1,
    3,
    4095,
    1 << 31,
    (1 << 32) - 1,
    (WINDOW << 20) - 1,
    WINDOW << 20,
    (WINDOW << 20) + 1,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 4095,
    u64::MAX - 7,
    u64::MAX,
];

/// An object, mostly: those that [`Hostile::begin`] makes, some that come later, one of another generation; or a small size.
fn usual(numbers: &mut Numbers) -> u64 {
    let some = numbers.next();
    match some >> 60 {
        0..=10 => some % 12,
        11 => (some % 12) | 1 << 32,
        12 => 12 + some % 40,
        13 => 64 << (some % 8),
        _ => 4096 * (some % 8),
    }
}

/// Connects once there is a place: a worker that doesn't end with its client has one for ten seconds.
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

/// The session of a client that says anything.
struct Hostile {
    link: Link,
    tag: u64,
}

impl Hostile {
    fn say(&mut self, call: u32, flags: u32, body: &[u8]) -> Result<(), Error> {
        self.tag += 1;
        let head = Request { call, flags, tag: self.tag }.to_bytes();
        send(&mut *self.link.tx, &*self.link.room, &[&head, body])?;
        self.link.tx.publish()
    }

    fn ask<'a, R: Record<'a>>(&mut self, record: &R) {
        let mut body = Vec::new();
        record.encode(&mut Encoder::new(&mut body));
        self.say(R::ID, WANTS_REPLY, &body).expect("sent");
    }

    /// A session with an object of each kind: the platform is 1, the device 2, and so on.
    fn begin(server: &Server) -> Hostile {
        let mut own = Hostile { link: connect(server), tag: 0 };
        own.ask(&Snapshot {});
        own.ask(&wire::CreateContext {
            platform: 1,
            properties: (&[]).into(),
            devices: (&[2]).into(),
            notify: 0,
            new: 3,
        });
        own.ask(&wire::CreateCommandQueue { context: 3, device: 2, properties: 0, new: 4 });
        own.ask(&wire::CreateBuffer {
            context: 3,
            flags: 1,
            size: 4096,
            properties: (&[]).into(),
            home: 0,
            svm: 0,
            data: 0,
            ticket: 0,
            new: 5,
        });
        let source =
            b"kernel void a(global int *to, int n, local int *l, sampler_t s) { to[get_global_id(0)] = n; }";
        own.ask(&wire::CreateProgramWithSource { context: 3, source, new: 6 });
        own.ask(&wire::CreateUserEvent { context: 3, new: 8 });
        own.ask(&wire::CreateSampler {
            context: 3,
            normalized_coords: 0,
            addressing_mode: 0x1130,
            filter_mode: 0x1140,
            new: 9,
        });
        own.ask(&wire::CreateBuffer {
            context: 3,
            flags: 1 << 3,
            size: 8192,
            properties: (&[]).into(),
            home: 8192,
            svm: 0,
            data: 0,
            ticket: 1,
            new: 10,
        });
        own
    }

    /// Builds its program and makes a kernel of it: that takes long.
    fn build(&mut self) {
        let (folders, files, texts) = ((&[]).into(), vec![], vec![]);
        let devices = (&[]).into();
        self.ask(&wire::BuildProgram {
            program: 6,
            devices,
            options: None,
            notify: 0,
            folders,
            files,
            texts,
        });
        self.ask(&wire::CreateKernel { program: 6, name: b"a", new: 7 });
    }

    /// Returns whether the worker answers; `None`: something takes longer than it may.
    fn answers(&mut self) -> Option<bool> {
        if self.say(Ping::ID, WANTS_REPLY, &[]).is_err() {
            return Some(false);
        }
        let (own, begun, mut record) = (self.tag, Instant::now(), Vec::new());
        while begun.elapsed() < PATIENCE {
            match self.link.rx.try_recv(&mut record) {
                Ok(true) => {
                    let (reply, _) = Reply::split(&record).expect("the server speaks the protocol");
                    if reply.kind == ReplyKind::Result && reply.tag == own {
                        return Some(true);
                    }
                }
                Ok(false) => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => return Some(false),
            }
            // SAFETY: the structure lives during the call.
            let gone = unsafe {
                let mut fd = libc::pollfd {
                    fd: std::os::fd::AsRawFd::as_raw_fd(&self.link.gone),
                    events: libc::POLLRDHUP,
                    revents: 0,
                };
                libc::poll(&mut fd, 1, 0) > 0
            };
            if gone {
                return Some(false);
            }
        }
        None
    }
}

/// Bodies of a function's record, in which each number in turn has each of the limits; the others are what is usual.
fn bodies(id: u32, numbers: &mut Numbers, each: &mut dyn FnMut(Vec<u8>)) {
    let mut at = 0;
    loop {
        let (mut asked, seed) = (0, numbers.next() | 1);
        for limit in LIMITS {
            // The same usual numbers, so that one alone differs.
            let (mut others, mut body) = (Numbers(seed), Vec::new());
            asked = 0;
            let there = make(
                id,
                &mut || {
                    asked += 1;
                    let number = usual(&mut others);
                    if asked - 1 == at { limit } else { number }
                },
                &mut body,
            );
            if !there {
                return;
            }
            each(body);
        }
        at += 1;
        // Some twenty numbers: the bytes of a text are not tried one by one.
        if at >= asked.min(20) {
            return;
        }
    }
}

fn ping(client: &Connection) {
    client.call(&Ping {}, |_, _| ()).expect("an answer");
}

#[test]
fn no_number_of_a_record_at_its_limit_ends_the_server_or_harms_a_neighbour() {
    let seeds: u64 = std::env::var("TOMBOLO_SEEDS").map_or(1, |n| n.parse().expect("a number"));
    let first: u64 = std::env::var("TOMBOLO_SEED").map_or(1, |n| n.parse().expect("a number"));
    let window = WINDOW.to_string();
    let server = Server::start("wire", &["--window", &window, "--memory", "256"]);
    let neighbour = server.client();
    let mut sent = 0;
    let (mut ended, mut stood) = (Vec::new(), 0);
    for seed in first..first + seeds {
        let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut all = Vec::new();
        for (id, name) in FUNCTIONS.iter().filter(|(_, name)| *name != ENDS) {
            bodies(*id, &mut numbers, &mut |body| all.push((*id, *name, body)));
        }
        for kind in 0..12 {
            for object in LIMITS.into_iter().chain(0..12) {
                let mut body = Vec::new();
                Release { kind, id: object }.encode(&mut Encoder::new(&mut body));
                all.push((Release::ID, "release", body));
            }
        }
        // In an order in which functions follow each other that have to do with each other, or not.
        for last in (1..all.len()).rev() {
            let other = numbers.next() as usize % (last + 1);
            all.swap(last, other);
        }
        for (session, requests) in all.chunks(REQUESTS).enumerate() {
            let mut hostile = Hostile::begin(&server);
            if numbers.next() % 4 == 0 {
                hostile.build();
            }
            // One by one, so that the request is known after which a worker has ended, or all at once.
            let one_by_one = session % 2 == 0;
            let mut last = String::new();
            let mut answers = Some(true);
            for (id, name, body) in requests {
                let flags = if numbers.next() % 3 == 0 { 0 } else { WANTS_REPLY };
                last = format!("seed {seed}, session {session}, {name}: {body:02x?}");
                if hostile.say(*id, flags, body).is_err() {
                    answers = Some(false);
                    break;
                }
                sent += 1;
                if one_by_one {
                    answers = hostile.answers();
                    if answers != Some(true) {
                        break;
                    }
                }
            }
            if answers == Some(true) && !one_by_one {
                answers = hostile.answers();
            }
            match answers {
                Some(true) => {}
                Some(false) => ended.push(last),
                None => stood += 1,
            }
            drop(hostile);
            ping(&neighbour);
        }
    }
    println!("{sent} requests; {stood} sessions stood still for {PATIENCE:?}; ended: {ended:#?}");
    assert!(ended.is_empty(), "{ended:#?}");
    let begun = Instant::now();
    while server.ls()[0].tenants.len() > 1 {
        assert!(begun.elapsed() < TIMEOUT, "clients that left are still served");
        std::thread::sleep(Duration::from_millis(20));
    }
    let program = compiled("svm");
    let expected = run(&mut native(&program)).stdout;
    let forwarded = run(&mut server.program(&program)).stdout;
    assert!(!expected.is_empty() && expected == forwarded);
    ping(&neighbour);
    let log = server.end();
    assert!(!log.contains("panicked"), "{log}");
}
