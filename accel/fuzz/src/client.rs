// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A session without a client: requests are carried out as if they had come in, replies are dropped.

use crate::{cuda, driver};
use std::sync::Arc;
use tombolo_accel_server::cuda::Cuda;
use tombolo_accel_server::figures::Figures;
use tombolo_accel_server::limits::{Bucket, Limits};
use tombolo_accel_server::opencl::OpenCl;
use tombolo_accel_server::session::Session;
use tombolo_accel_spec::common::Snapshot;
use tombolo_accel_spec::cuda as wire;
use tombolo_accel_spec::wire::{Encoder, Record, Request, WANTS_REPLY};
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

/// An API, on a driver that does nothing.
#[derive(Clone, Copy)]
enum Driver {
    OpenCl(&'static OpenCl),
    Cuda(&'static Cuda),
}

pub struct Client {
    session: Arc<Session>,
    api: Driver,
    /// The window, between two pieces of its own length that stay zero.
    memory: Arc<Mapping>,
}

impl Client {
    /// A session of OpenCL.
    pub fn of_opencl() -> Client {
        Client::new(|limits, session| {
            // SAFETY: functions with the parameters of the API's, or fewer.
            let api = unsafe { OpenCl::with(limits, None, driver::find) };
            api.attach(session);
            session.set_api(Arc::new(api));
            Driver::OpenCl(api)
        })
    }

    /// A session of CUDA.
    pub fn of_cuda() -> Client {
        Client::new(|limits, session| {
            // SAFETY: functions with the parameters of the API's, or fewer.
            let api = unsafe { Cuda::with(limits, None, cuda::find) }.expect("the driver takes every call");
            api.attach(session);
            session.set_api(Arc::new(api));
            Driver::Cuda(api)
        })
    }

    fn new(api: impl FnOnce(Limits, &Arc<Session>) -> Driver) -> Client {
        let memory = Arc::new(Mapping::private(3 * WINDOW).expect("memory"));
        let window = Arc::new(Window::new(memory.clone(), WINDOW as u64, WINDOW as u64).expect("it fits"));
        let (figures, page) = Figures::new().expect("a page");
        let (bell, room) = (Arc::new(Silence), Arc::new(Silence));
        let gone = NotInChildren::new(page).expect("a handler of forks");
        let link = Link { tx: Box::new(Sink), rx: Box::new(Nothing), bell, room, window, gone };
        let limits = Limits { memory: 1 << 20, objects: 1000, ..Limits::default() };
        let session = Session::new(link, Bucket::new(limits.rate, None), figures);
        let api = api(limits, &session);
        Client { session, api, memory }
    }

    /// The first requests of every client. One of CUDA has a context, whose number is 1, memory, a module, a function, a stream, an event, a graph with a node, what can be launched of it, and a pool.
    pub fn begin(&mut self) {
        self.request(Snapshot::ID, true, &[]);
        if let Driver::OpenCl(_) = self.api {
            return;
        }
        let current = 1;
        self.record(&wire::DevicePrimaryCtxRetain { dev: 0, new: current });
        self.record(&wire::MemAllocV2 { bytesize: 4096, current });
        let (image, options, values) = (&b"a module\0"[..], [][..].into(), [][..].into());
        self.record(&wire::ModuleLoadDataEx { image, options, values, new: 2, current });
        self.record(&wire::ModuleGetFunction { hmod: 2, name: b"f", new: 3, current });
        self.record(&wire::StreamCreate { phStream: 4, Flags: 0, current });
        self.record(&wire::EventCreate { phEvent: 5, Flags: 0, current });
        self.record(&wire::GraphCreate { phGraph: 6, flags: 0 });
        self.record(&wire::GraphAddEmptyNode { new: 7, hGraph: 6, after: [][..].into(), current });
        self.record(&wire::GraphInstantiateWithFlags { phGraphExec: 8, hGraph: 6, flags: 0, current });
        self.record(&wire::DeviceGetDefaultMemPool { dev: 0, new: 9 });
    }

    fn record<'a, R: Record<'a>>(&mut self, record: &R) {
        let mut body = Vec::new();
        record.encode(&mut Encoder::new(&mut body));
        self.request(R::ID, true, &body);
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
        match self.api {
            Driver::OpenCl(api) => api.release_all(),
            Driver::Cuda(api) => api.release_all(),
        }
        for piece in [0, 2 * WINDOW] {
            // SAFETY: inside the mapping, which this test alone uses.
            let bytes = unsafe { std::slice::from_raw_parts(self.memory.base().add(piece), WINDOW) };
            assert!(bytes == [0; WINDOW], "the driver was led out of the window");
        }
    }
}
