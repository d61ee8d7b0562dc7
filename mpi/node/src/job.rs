// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A job as one node of it sees it. One thread routes all frames: between the host and this node, between wrappers (in the first VM) and ranks, between the
//! launcher's ports and ranks. What is the first VM's is called the *hub*.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::frame::{self, Frame, Kind, LAUNCHER, Program};
use crate::link;
use crate::prepare::Prepared;
use crate::relay::{self, Relay};
use crate::seat::{Seat, Streams};
use crate::stream::{self, Key, News};
use crate::{family, sys};

/// Time for the end of a rank's output after its own: what it has started may keep its streams open.
const OUTPUT: Duration = Duration::from_secs(1);

/// What happens to a node.
#[derive(Debug)]
pub enum Event {
    Host(Frame),
    /// Another node of the job.
    Node(Frame),
    /// A wrapper begins.
    Wrapper(u32, UnixStream),
    FromWrapper(Frame),
    /// A wrapper ended.
    WrapperGone(u32),
    /// A child ended.
    Exited(i32, i32),
    Stream(Key, News),
    /// A rank connects to what stands for this address in the first VM.
    Accepted(TcpStream, String),
    /// The job is over for this node; the text says why, where it is this node that ends it.
    Over(Option<String>),
}

/// A rank, or the launcher, that runs here.
#[derive(Debug)]
struct Running {
    rank: u32,
    /// Its outputs that have not ended.
    open: u8,
    /// It was told to end.
    called_off: bool,
    /// Its status and when it ended.
    ended: Option<(i32, Instant)>,
}

/// One node of a job.
#[derive(Debug)]
pub struct Node {
    number: u32,
    /// The node of each rank.
    place: Vec<u32>,
    seats: Vec<Seat>,
    launcher: Option<Seat>,
    /// What is said to the others: the hub to all, the others to the hub.
    links: HashMap<u32, link::Sender>,
    wrappers: HashMap<u32, UnixStream>,
    running: HashMap<i32, Running>,
    asks: HashMap<Key, Sender<()>>,
    writes: HashMap<Key, Sender<Vec<u8>>>,
    relay: Relay,
    events: Sender<Event>,
}

/// Takes part in a job until it is over. The reason is returned where it lies in this node.
///
/// # Errors
/// The node can't begin.
pub fn run(prepared: Prepared) -> io::Result<Option<String>> {
    let (sender, events) = mpsc::channel();
    let Prepared { number, place, seats, launcher, space, nodes } = prepared;
    let mut links = HashMap::new();
    let others = if number == 0 { 1..nodes } else { 0..1 };
    for other in others {
        let (down, of) = if number == 0 { (true, other) } else { (false, number) };
        links.insert(other, link::Sender::new(&space.link(down, of))?);
        receive(link::Receiver::new(&space.link(!down, of))?, sender.clone());
    }
    let node = Node {
        number,
        place,
        seats,
        launcher,
        links,
        wrappers: HashMap::new(),
        running: HashMap::new(),
        asks: HashMap::new(),
        writes: HashMap::new(),
        relay: Relay::default(),
        events: sender.clone(),
    };
    if number == 0 {
        crate::wrappers::listen(sender.clone())?;
    }
    watch(&sender);
    to_host(&Frame::new(Kind::Ready, 0, ""))?;
    hear(sender);
    let why = node.route(&events);
    family::end();
    drop(space.leave());
    Ok(why)
}

/// Writes a frame to the host.
///
/// # Errors
/// The host has gone.
pub fn to_host(frame: &Frame) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(&frame.encode()).and_then(|()| out.flush())
}

/// Passes on what the host says; its end is the job's.
fn hear(events: Sender<Event>) {
    thread::spawn(move || {
        let mut input = io::stdin().lock();
        while let Ok(Some(frame)) = frame::read(&mut input) {
            if frame.kind == Kind::End || events.send(Event::Host(frame)).is_err() {
                break;
            }
        }
        let _over = events.send(Event::Over(None));
    });
}

/// Passes on what another node says.
fn receive(mut link: link::Receiver, events: Sender<Event>) {
    thread::spawn(move || {
        loop {
            let event = match link.receive() {
                Ok(frame) => Event::Node(frame),
                Err(e) => Event::Over(Some(format!("the job's files in the zone can't be read: {e}"))),
            };
            let over = matches!(event, Event::Over(_));
            if events.send(event).is_err() || over {
                return;
            }
        }
    });
}

/// Passes on signals, and the ends of children.
fn watch(events: &Sender<Event>) {
    let to = events.clone();
    thread::spawn(move || {
        sys::wait_signal(&sys::PASSED);
        let _over = to.send(Event::Over(None));
    });
    let to = events.clone();
    thread::spawn(move || {
        while let Some((pid, status)) = sys::wait_any() {
            if to.send(Event::Exited(pid, status)).is_err() {
                return;
            }
        }
    });
}

impl Node {
    fn is_hub(&self) -> bool {
        self.number == 0
    }

    /// Routes until the job is over.
    fn route(mut self, events: &Receiver<Event>) -> Option<String> {
        loop {
            let event = match events.recv_timeout(OUTPUT) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(e) = self.report_ended() {
                        return Some(e);
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return None,
            };
            if let Event::Over(why) = event {
                return why;
            }
            if let Err(e) = self.act(event).and_then(|()| self.report_ended()) {
                return Some(e);
            }
        }
    }

    fn act(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Host(frame) | Event::Node(frame) | Event::FromWrapper(frame) => self.pass(frame),
            Event::Wrapper(rank, socket) => {
                self.wrappers.insert(rank, socket);
                Ok(())
            }
            Event::WrapperGone(rank) => {
                // The launcher has killed it: so it wants the rank.
                self.wrappers.remove(&rank);
                let kill = u8::try_from(sys::SIGKILL).unwrap_or(9);
                self.pass(Frame::new(Kind::Signal, rank, [kill]))
            }
            Event::Exited(pid, status) => {
                if let Some(running) = self.running.get_mut(&pid) {
                    running.ended = Some((status, Instant::now()));
                }
                Ok(())
            }
            Event::Stream(key, news) => self.streamed(key, news),
            Event::Accepted(stream, address) => match self.relay.accept(self.number, stream, &self.events) {
                Ok(number) => self.say(0, &Frame::new(Kind::Connect, number, address)),
                Err(e) => Err(format!("a rank's connection to the launcher can't be passed on: {e}")),
            },
            Event::Over(_) => Ok(()),
        }
    }

    /// Passes a frame on to whom it is for.
    fn pass(&mut self, frame: Frame) -> Result<(), String> {
        match frame.kind {
            Kind::Start | Kind::Input | Kind::Signal => self.toward_rank(frame),
            Kind::Taken if frame.body != [0] => self.toward_rank(frame),
            Kind::Exit if !self.is_hub() => {
                self.end_shadow(frame.id);
                Ok(())
            }
            Kind::Taken | Kind::Out | Kind::Err | Kind::Exit | Kind::Began => self.toward_wrapper(frame),
            Kind::Connect => {
                let address = String::from_utf8_lossy(&frame.body).into_owned();
                if self.relay.connect(frame.id, &address, &self.events).is_err() {
                    // As a refused connection is seen through a relay: it ends at once.
                    return self.say(relay::node_of(frame.id), &Frame::new(Kind::Data, frame.id, ""));
                }
                Ok(())
            }
            Kind::Data => {
                self.relay.write(frame.id, frame.body);
                Ok(())
            }
            Kind::Sent => {
                self.relay.sent(frame.id);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Sends a frame to another node.
    fn say(&mut self, node: u32, frame: &Frame) -> Result<(), String> {
        let Some(link) = self.links.get_mut(&node) else { return Ok(()) };
        link.send(frame).map_err(|e| format!("the job's files in the zone can't be written: {e}"))
    }

    fn node_of(&self, rank: u32) -> Option<u32> {
        if rank == LAUNCHER {
            return Some(0);
        }
        self.place.get(usize::try_from(rank).ok()?).copied()
    }

    fn toward_rank(&mut self, frame: Frame) -> Result<(), String> {
        match self.node_of(frame.id) {
            Some(node) if node == self.number => self.at_rank(frame),
            Some(node) if self.is_hub() => self.say(node, &frame),
            _ => Ok(()),
        }
    }

    fn toward_wrapper(&mut self, frame: Frame) -> Result<(), String> {
        if !self.is_hub() {
            return self.say(0, &frame);
        }
        if frame.id == LAUNCHER {
            return to_host(&frame).map_err(|e| format!("the host does not hear any more: {e}"));
        }
        if let Some(wrapper) = self.wrappers.get_mut(&frame.id) {
            // One that was killed is reported by the thread that reads from it.
            let _gone = wrapper.write_all(&frame.encode());
        }
        if frame.kind == Kind::Exit {
            self.wrappers.remove(&frame.id);
            self.end_shadow(frame.id);
            let others: Vec<u32> = self.links.keys().copied().collect();
            others.into_iter().try_for_each(|node| self.say(node, &frame))?;
        }
        if matches!(frame.kind, Kind::Exit | Kind::Began) {
            to_host(&frame).map_err(|e| format!("the host does not hear any more: {e}"))?;
        }
        Ok(())
    }

    /// Ends the process that stands for a rank of another VM: the rank has ended.
    fn end_shadow(&mut self, rank: u32) {
        let seat = usize::try_from(rank).ok().and_then(|rank| self.seats.get(rank));
        if let Some(seat) = seat.filter(|_| self.node_of(rank).is_some_and(|node| node != self.number)) {
            sys::send_signal(seat.pid, sys::SIGKILL);
        }
    }

    fn at_rank(&mut self, frame: Frame) -> Result<(), String> {
        match frame.kind {
            Kind::Start => self.start(frame.id, &frame.body)?,
            Kind::Input => {
                if let Some(write) = self.writes.get(&Key::Rank(frame.id, 0)) {
                    let _ended = write.send(frame.body);
                }
            }
            Kind::Taken => {
                let key = frame.body.first().map(|stream| Key::Rank(frame.id, *stream));
                if let Some(ask) = key.and_then(|key| self.asks.get(&key)) {
                    let _ended = ask.send(());
                }
            }
            Kind::Signal => {
                let running = self.running.iter_mut().find(|(_, r)| r.rank == frame.id && r.ended.is_none());
                if let (Some((pid, running)), [number]) = (running, &frame.body[..]) {
                    let number = i32::from(*number);
                    let ends = [sys::SIGINT, sys::SIGTERM, sys::SIGKILL].contains(&number);
                    running.called_off |= ends && !family::is_ending(*pid);
                    sys::send_signal(*pid, number);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Has a seat of this node become its program.
    fn start(&mut self, rank: u32, body: &[u8]) -> Result<(), String> {
        let Some(mut program) = Program::decode(body) else { return Ok(()) };
        let number = self.number;
        let (relay, events) = (&mut self.relay, &self.events);
        let mut port = |address: &str| {
            let own = address.rsplit(':').next().and_then(|port| port.parse().ok());
            // The hub's ranks reach the launcher as they are.
            own.filter(|_| number == 0).map_or_else(|| relay.port(address, events), Ok)
        };
        for variable in &mut program.env {
            *variable = relay::redirect(variable, &mut port)
                .map_err(|e| format!("the launcher's port can't be had in this VM: {e}"))?;
        }
        let seat = match rank {
            LAUNCHER => self.launcher.as_mut(),
            rank => usize::try_from(rank).ok().and_then(|rank| self.seats.get_mut(rank)),
        };
        // A rank is started once.
        let Some((seat, streams)) = seat.and_then(|seat| seat.streams.take().map(|streams| (seat, streams)))
        else {
            return Ok(());
        };
        let pid = seat.pid;
        // One that was killed meanwhile is reported as any other.
        let _ended = seat.begin(&program);
        self.running.insert(pid, Running { rank, open: 2, called_off: false, ended: None });
        self.connect(rank, streams);
        self.toward_wrapper(Frame::new(Kind::Began, rank, pid.to_string()))
    }

    /// Passes a rank's streams on.
    fn connect(&mut self, rank: u32, streams: Streams) {
        let tell = |key| {
            let events = self.events.clone();
            move |news| drop(events.send(Event::Stream(key, news)))
        };
        let keys = [0, 1, 2].map(|stream| Key::Rank(rank, stream));
        self.writes.insert(keys[0], stream::write(streams.input, drop, tell(keys[0])));
        self.asks.insert(keys[1], stream::read(streams.out, tell(keys[1])));
        self.asks.insert(keys[2], stream::read(streams.err, tell(keys[2])));
    }

    fn streamed(&mut self, key: Key, news: News) -> Result<(), String> {
        match (key, news) {
            (Key::Rank(rank, stream), News::Read(bytes)) => {
                let running = self.running.values_mut().find(|running| running.rank == rank);
                if let Some(running) = running.filter(|_| bytes.is_empty()) {
                    running.open -= 1;
                }
                let kind = if stream == 1 { Kind::Out } else { Kind::Err };
                self.toward_wrapper(Frame::new(kind, rank, bytes))
            }
            (Key::Rank(rank, stream), News::Written) => {
                self.toward_wrapper(Frame::new(Kind::Taken, rank, [stream]))
            }
            (Key::Connection(number), News::Read(bytes)) => {
                let over = bytes.is_empty();
                self.say(self.other_end(number), &Frame::new(Kind::Data, number, bytes))?;
                if over {
                    self.relay.read_all(number);
                }
                Ok(())
            }
            (Key::Connection(number), News::Written) => {
                self.say(self.other_end(number), &Frame::new(Kind::Sent, number, ""))
            }
        }
    }

    fn other_end(&self, connection: u32) -> u32 {
        if self.is_hub() { relay::node_of(connection) } else { 0 }
    }

    /// Tells of ranks that have ended, once their output has.
    fn report_ended(&mut self) -> Result<(), String> {
        let over = |running: &Running| {
            let ended = running.ended?;
            (running.open == 0 || ended.1.elapsed() >= OUTPUT).then_some(ended.0)
        };
        let ended: Vec<_> = self.running.iter().filter_map(|(pid, r)| Some((*pid, over(r)?))).collect();
        for (pid, status) in ended {
            let Some(running) = self.running.remove(&pid) else { continue };
            let mut body = status.to_le_bytes().to_vec();
            body.extend(running.called_off.then_some(1));
            self.toward_wrapper(Frame::new(Kind::Exit, running.rank, body))?;
        }
        Ok(())
    }
}
