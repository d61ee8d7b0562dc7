// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A session without a client: requests are carried out as if they had come in, replies are dropped.

use crate::driver;
use std::sync::Arc;
use tombolo_accel_server::figures::Figures;
use tombolo_accel_server::limits::{Bucket, Limits};
use tombolo_accel_server::opencl::OpenCl;
use tombolo_accel_server::session::Session;
use tombolo_accel_spec::common::Snapshot;
use tombolo_accel_spec::wire::{Record, Request, WANTS_REPLY};
use tombolo_calls::children::NotInChildren;
use tombolo_calls::memory::Mapping;
use tombolo_calls::{Bell, Error, Link, Rx, Tx, Window};

const WINDOW: usize = 64 << 10;

struct Sink;

impl Tx for Sink {
    fn try_send(&mut self, _parts: &[&[u8]]) -> Result<bool, Error> {
        Ok(true)
    }
    fn publish(&mut self) -> Result<(), Error> {
        Ok(())
    }
    fn arm_room(&mut self) -> Result<bool, Error> {
        Ok(false)
    }
    fn max_record(&self) -> usize {
        1 << 20
    }
    fn push_window(&mut self, _offset: u64, _len: u64) -> Result<(), Error> {
        Ok(())
    }
    fn shares_window(&self) -> bool {
        true
    }
}

struct Nothing;

impl Rx for Nothing {
    fn try_recv(&mut self, _into: &mut Vec<u8>) -> Result<bool, Error> {
        Ok(false)
    }
    fn arm(&mut self) -> Result<bool, Error> {
        Ok(true)
    }
    fn disarm(&mut self) {}
}

/// A bell that is never rung.
struct Silence;

impl Bell for Silence {
    fn wait(&self) -> Result<(), Error> {
        std::thread::park();
        Ok(())
    }
    fn ring(&self) {}
}

pub struct Client {
    session: Arc<Session>,
    api: &'static OpenCl,
    /// The window, between two pieces of its own length that stay zero.
    memory: Arc<Mapping>,
}

impl Default for Client {
    fn default() -> Self {
        Client::new()
    }
}

impl Client {
    /// A session on the driver that does nothing.
    pub fn new() -> Client {
        let memory = Arc::new(Mapping::private(3 * WINDOW).expect("memory"));
        let window = Arc::new(Window::new(memory.clone(), WINDOW as u64, WINDOW as u64).expect("it fits"));
        let (figures, page) = Figures::new().expect("a page");
        let (bell, room) = (Arc::new(Silence), Arc::new(Silence));
        let gone = NotInChildren::new(page).expect("a handler of forks");
        let link = Link { tx: Box::new(Sink), rx: Box::new(Nothing), bell, room, window, gone };
        let limits = Limits { memory: 1 << 20, objects: 1000, ..Limits::default() };
        let session = Session::new(link, Bucket::new(limits.rate, None), figures);
        // SAFETY: functions with the parameters of the API's, or fewer.
        let api = unsafe { OpenCl::with(limits, None, driver::find) };
        api.attach(&session);
        session.set_api(Arc::new(api));
        Client { session, api, memory }
    }

    /// The first request of every client.
    pub fn begin(&mut self) {
        self.request(Snapshot::ID, true, &[]);
    }

    /// Carries a request out. It decodes, so the session goes on.
    pub fn request(&mut self, id: u32, waits: bool, body: &[u8]) {
        let flags = if waits { WANTS_REPLY } else { 0 };
        let mut record = Request { call: id, flags, tag: 1 }.to_bytes().to_vec();
        record.extend_from_slice(body);
        if let Err(e) = self.session.carry(&record) {
            panic!("request {id:#x}: {e}");
        }
    }

    /// Gives everything back, and looks whether the driver left the window.
    pub fn end(&mut self) {
        self.api.release_all();
        for piece in [0, 2 * WINDOW] {
            // SAFETY: inside the mapping, which this test alone uses.
            let bytes = unsafe { std::slice::from_raw_parts(self.memory.base().add(piece), WINDOW) };
            assert!(bytes == [0; WINDOW], "the driver was led out of the window");
        }
    }
}
