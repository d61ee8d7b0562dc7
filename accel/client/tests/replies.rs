// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A thread that waits for a reply gets it, whenever it comes: a link whose reply comes at a chosen look.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tombolo_accel_client::connection::Connection;
use tombolo_accel_spec::common::Ping;
use tombolo_accel_spec::wire::{Reply, ReplyKind, Request};
use tombolo_calls::children::NotInChildren;
use tombolo_calls::memory::Mapping;
use tombolo_calls::{Bell, Error, Link, Rx, Tx, Window};

/// Tells the reading side the tag of each request.
struct Out(Sender<u64>);

impl Tx for Out {
    fn try_send(&mut self, parts: &[&[u8]]) -> Result<bool, Error> {
        let (request, _) = Request::split(parts[0]).expect("a request");
        self.0.send(request.tag).expect("the other half lives as long");
        Ok(true)
    }
    fn publish(&mut self) -> Result<(), Error> {
        Ok(())
    }
    fn arm_room(&mut self) -> Result<bool, Error> {
        Ok(false)
    }
    fn max_record(&self) -> usize {
        4096
    }
    fn push_window(&mut self, _offset: u64, _len: u64) -> Result<(), Error> {
        Ok(())
    }
    fn shares_window(&self) -> bool {
        true
    }
}

/// Replies at a chosen look.
struct In {
    requests: Receiver<u64>,
    looks: u32,
    reply_at: u32,
    replied: Arc<AtomicBool>,
}

impl Rx for In {
    fn try_recv(&mut self, into: &mut Vec<u8>) -> Result<bool, Error> {
        // A look takes a while, so that a waiting thread stops spinning after some dozens of them.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(2) {
            std::hint::spin_loop();
        }
        self.looks += 1;
        if self.looks < self.reply_at {
            return Ok(false);
        }
        let Ok(tag) = self.requests.try_recv() else { return Ok(false) };
        *into = Reply { kind: ReplyKind::Result, status: 0, tag }.to_bytes().to_vec();
        self.replied.store(true, Ordering::SeqCst);
        Ok(true)
    }
    fn arm(&mut self) -> Result<bool, Error> {
        Ok(true)
    }
    fn disarm(&mut self) {}
}

/// Never sleeps; notes who would have slept for ever.
struct Alarm {
    replied: Arc<AtomicBool>,
    rung: Mutex<bool>,
    slept: AtomicU32,
    for_ever: AtomicBool,
}

impl Bell for Alarm {
    fn wait(&self) -> Result<(), Error> {
        self.slept.fetch_add(1, Ordering::SeqCst);
        if self.replied.load(Ordering::SeqCst) && !std::mem::take(&mut *self.rung.lock().expect("no panics"))
        {
            self.for_ever.store(true, Ordering::SeqCst);
            return Err(Error::Closed);
        }
        Ok(())
    }
    fn ring(&self) {
        *self.rung.lock().expect("no panics") = true;
    }
}

#[test]
fn a_thread_that_finds_its_reply_while_it_goes_to_sleep_stays_awake() {
    let mut slept = 0;
    // The number of looks before a thread sleeps depends on the machine: the last ones are late on any.
    for reply_at in (1..=100).chain((7..=16).map(|n| 1 << n)) {
        let (sent, requests) = mpsc::channel();
        let replied = Arc::new(AtomicBool::new(false));
        let bell = Arc::new(Alarm {
            replied: replied.clone(),
            rung: Mutex::new(false),
            slept: AtomicU32::new(0),
            for_ever: AtomicBool::new(false),
        });
        let mapping = Arc::new(Mapping::private(4096).expect("a page"));
        let connection = Connection::new(Link {
            tx: Box::new(Out(sent)),
            rx: Box::new(In { requests, looks: 0, reply_at, replied }),
            bell: bell.clone(),
            room: bell.clone(),
            window: Arc::new(Window::new(mapping, 0, 4096).expect("it fits")),
            gone: NotInChildren::new(File::open("/dev/null").expect("a descriptor")).expect("kept here"),
        })
        .expect("a connection");
        let answer = connection.call(&Ping {}, |status, _| status);
        assert!(!bell.for_ever.load(Ordering::SeqCst), "slept on with its reply at look {reply_at}");
        assert_eq!(answer, Ok(0), "reply at look {reply_at}");
        slept += bell.slept.load(Ordering::SeqCst);
    }
    assert!(slept > 0, "late replies found a thread that had slept");
}
