// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A member's process next to a mount, in a guest or on the host, that runs the orders it receives. Messages are JSON, one to a line. It runs
//! single calls, or works by itself against a model of its own and reports each operation before and after. A message can be lost with the
//! machine, so an operation begins only when its announcement has been answered.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::compare::Found;
use crate::model::{Model, Reach};
use crate::mounted::Mounted;
use crate::rng::Rng;
use crate::tree::{Answer, Call, Spot, Tree};

/// To a worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    Call(Call),
    /// Work until told to stop.
    Load(Load),
    /// The operation that was announced may begin.
    Go,
    /// Do not begin another.
    Stop,
}

/// From a worker: reports.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// It can be given orders.
    Ready,
    /// Or an errno.
    Answer(std::result::Result<Answer, i32>),
    /// An operation of a load is about to begin.
    B,
    /// It is done.
    D,
    Ended(Ended),
}

/// The end of a load.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ended {
    /// The longest operation, without the time that this machine stood still, nanoseconds.
    pub longest: u64,
    /// The same with it.
    pub longest_raw: u64,
    /// The longest operation.
    pub what: String,
    /// A difference from the model.
    pub difference: Option<String>,
}

/// Work for a worker by itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Load {
    pub seed: u64,
    /// Paths of a directory that only this load uses, and of the common one.
    pub own: Vec<u8>,
    pub shared: Vec<u8>,
    /// Prefix of its names in the common one.
    pub prefix: String,
    pub reach: Reach,
}

impl Load {
    /// Returns the model for it, and the generator that chooses operations. `own` and `shared`: inode numbers of the directories.
    pub fn model(&self, own: u64, shared: u64) -> (Model, Rng) {
        let spot = |ino, path: &Vec<u8>| Spot { ino, path: Some(path.clone()) };
        let model =
            Model::new(spot(own, &self.own), Some(spot(shared, &self.shared)), &self.prefix, self.reach);
        (model, Rng(self.seed))
    }
}

/// How much later than planned a thread woke, in sum. When a machine stands still because its host is busy, so does every thread of it, and
/// the file system is not to blame.
struct Stillness {
    nanoseconds: AtomicU64,
    over: AtomicBool,
}

const NAP: Duration = Duration::from_millis(2);

impl Stillness {
    fn watch() -> Arc<Stillness> {
        let own = Arc::new(Stillness { nanoseconds: AtomicU64::new(0), over: AtomicBool::new(false) });
        let shared = Arc::clone(&own);
        std::thread::spawn(move || {
            while !shared.over.load(Ordering::Relaxed) {
                let since = Instant::now();
                std::thread::sleep(NAP);
                let late = since.elapsed().saturating_sub(2 * NAP);
                shared.nanoseconds.fetch_add(late.as_nanos() as u64, Ordering::Relaxed);
            }
        });
        own
    }
}

/// Serves orders that come through `channel`: a socket's path, or a device's.
pub fn run(root: &Path, channel: &Path) -> Result<String, String> {
    let text = |e: std::io::Error| format!("{}: {e}", channel.display());
    let (input, output): (File, File) = match UnixStream::connect(channel) {
        Ok(stream) => {
            let other = stream.try_clone().map_err(text)?;
            (std::os::fd::OwnedFd::from(stream).into(), std::os::fd::OwnedFd::from(other).into())
        }
        Err(_) => {
            let device = File::options().read(true).write(true).open(channel).map_err(text)?;
            (device.try_clone().map_err(text)?, device)
        }
    };
    let mounted = Mounted::new(root.to_owned()).map_err(|e| format!("{}: {e}", root.display()))?;
    let (orders, ordered) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(input).lines().map_while(Result::ok) {
            let order = serde_json::from_str::<Order>(&line).map_err(|e| format!("{line}: {e}"));
            if orders.send(order).is_err() {
                break;
            }
        }
    });
    let mut served = 0u64;
    send(&output, &Report::Ready)?;
    for order in ordered.iter() {
        match order? {
            Order::Call(call) => {
                let answer = mounted.call(&call).map_err(Errno::raw_os_error);
                send(&output, &Report::Answer(answer))?;
            }
            Order::Load(load) => {
                let go = || matches!(ordered.recv(), Ok(Ok(Order::Go)));
                let ended = work(&mounted, &load, &output, go)?;
                send(&output, &Report::Ended(ended))?;
            }
            // An answer that came after the end of a load.
            Order::Go | Order::Stop => {}
        }
        served += 1;
    }
    Ok(format!("{served} orders"))
}

fn send(mut to: &File, report: &Report) -> Result<(), String> {
    let mut line = serde_json::to_vec(report).map_err(|e| e.to_string())?;
    line.push(b'\n');
    to.write_all(&line).map_err(|e| format!("sending a report: {e}"))
}

/// Works until stopped, and compares everything at the end. An error: the connection has ended.
fn work(mounted: &Mounted, load: &Load, output: &File, go: impl Fn() -> bool) -> Result<Ended, String> {
    let still = Stillness::watch();
    let mut ended = Ended::default();
    let result = operations(mounted, load, output, go, &still, &mut ended);
    still.over.store(true, Ordering::Relaxed);
    mounted.close_all();
    ended.difference = result?.err();
    Ok(ended)
}

fn operations(
    mounted: &Mounted,
    load: &Load,
    output: &File,
    go: impl Fn() -> bool,
    still: &Stillness,
    ended: &mut Ended,
) -> Result<Found<()>, String> {
    let (mut model, mut rng) = load.model(0, 0);
    let quiet = || still.nanoseconds.load(Ordering::Relaxed);
    loop {
        let op = model.random_op(&mut rng);
        send(output, &Report::B)?;
        if !go() {
            break;
        }
        let (since, before) = (Instant::now(), quiet());
        let real = model.execute(mounted, &op);
        let took = since.elapsed().as_nanos() as u64;
        // A program whose mount has died does not learn whether the operation was done. EIO is the kernel's answer when it was just copying
        // the request to the dying process; a survivor that gets it has found a difference.
        if !matches!(real, Err(_) | Ok(Err(Errno::NOTCONN | Errno::CONNABORTED | Errno::IO))) {
            send(output, &Report::D)?;
        }
        let own = took.saturating_sub(quiet() - before);
        ended.longest_raw = ended.longest_raw.max(took);
        if own > ended.longest {
            ended.longest = own;
            ended.what = format!("{op:?}").chars().take(120).collect();
        }
        if let Err(why) = real.and_then(|real| model.settle(&op, real)) {
            return Ok(Err(why));
        }
    }
    Ok(model.compare(mounted, None).map(|_| ()))
}
