// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The running switch: starts its threads from a configuration, and ends them.
//!
//! A port that can't be made (its socket is in use, another port has its MAC) is left out with a message, and the others
//! are served. Only if nothing is left is that an error.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::control::config::{Config, Multicast, PortConfig, UplinkConfig};
use crate::control::keeper::{Answer, Keeper, Told};
use crate::control::link::Link;
use crate::control::services::{self, Services};
use crate::control::socket::Request;
use crate::control::{metrics, socket};
use crate::forwarding::switch::Switch;
use crate::forwarding::view::Attached;
use crate::forwarding::worker::{Pace, Worker};
use crate::ports::endpoint::{Endpoint, Stop};
use crate::ports::port::Port;
use crate::uplink::Opened;
use crate::vring::features::{OFFERED, PLAIN};

/// The largest number of workers.
const MAX_WORKERS: usize = 64;

/// Timeout for the end of a port's thread. None of its operations takes long, except that closing a descriptor from a
/// front-end may take for ever if it is a file of a FUSE file system.
const END: Duration = Duration::from_secs(2);

/// Ends a process whose ports would be served no more. Another is started in its place, to which their front-ends connect.
fn give_up(why: &str) -> ! {
    tracing::error!("the switch ends: {why}");
    crate::control::log::finish();
    std::process::abort()
}

/// A port that is served.
struct Served {
    name: String,
    stop: Arc<Stop>,
    thread: JoinHandle<()>,
    /// Hung up when the thread has ended.
    ended: Receiver<()>,
}

impl Served {
    fn end(self) {
        self.stop.now();
        self.thread.thread().unpark();
        match self.ended.recv_timeout(END) {
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!(
                    port = self.name,
                    "its thread is held up, by a descriptor of its front-end perhaps, and is left behind"
                );
            }
            // A thread that panicked has ended, too.
            Ok(()) | Err(RecvTimeoutError::Disconnected) => drop(self.thread.join()),
        }
    }
}

/// A port or uplink that is in no view any more, and its thread.
pub(crate) struct Detached(Option<Served>);

/// A running switch.
pub struct Daemon {
    switch: Arc<Switch>,
    stop: Arc<AtomicBool>,
    served: Mutex<Vec<Served>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    wake: Mutex<Vec<Box<dyn Fn() + Send>>>,
    link: Link,
    keeper: Mutex<Option<Keeper>>,
    /// The switch's own services.
    services: Services,
}

impl Daemon {
    /// Starts the switch of `config`. With a sandbox the caller's process has no second thread yet.
    ///
    /// # Errors
    /// Nothing of it can be started, or the control socket or the address for metrics is in use.
    pub fn start(config: &Config) -> anyhow::Result<Arc<Self>> {
        let workers = config.switch.workers;
        anyhow::ensure!(
            (1..=MAX_WORKERS).contains(&workers),
            "{workers} workers; 1 to {MAX_WORKERS} are possible"
        );
        for cpu in config.switch.cpus.iter().take(workers) {
            anyhow::ensure!(
                crate::forwarding::worker::may_use(*cpu)?,
                "workers can't run on CPU {cpu}, which this process may not use; 'taskset -p $$' shows which it may"
            );
        }
        let services = Services::new(config)?;
        let snoops = config.switch.multicast != Multicast::Flood;
        let switch = Arc::new(Switch::new(workers, config.switch.budget, snoops)?);
        let (keeper, link) = Keeper::start(config, config.switch.sandbox)?;
        let daemon = Arc::new(Self {
            switch,
            stop: Arc::default(),
            served: Mutex::default(),
            threads: Mutex::default(),
            wake: Mutex::default(),
            link,
            keeper: Mutex::new(Some(keeper)),
            services,
        });
        let begun = daemon.begin(config);
        if begun.is_err() {
            daemon.stop();
        }
        begun.map(|()| daemon)
    }

    fn begin(self: &Arc<Self>, config: &Config) -> anyhow::Result<()> {
        if config.switch.sandbox {
            // Before any thread is started: each has its own capabilities.
            crate::control::sandbox::drop_user(config.switch.user.as_deref())?;
            crate::control::sandbox::drop_capabilities().context("capabilities can't be dropped")?;
            // Before any message of a front-end is read.
            crate::control::sandbox::filter_calls().context("sandbox; --no-sandbox runs without")?;
        }
        crate::control::log::start();
        let announcers = self.services.attach(&self.switch)?;
        let mut answers = Vec::new();
        let mut metrics = None;
        loop {
            let gone = || anyhow::anyhow!("the switch's keeper ended at once");
            let (told, fd) = self.link.receive()?.ok_or_else(gone)?;
            match told {
                Told::Started => break,
                Told::Failed(why) => anyhow::bail!("{why}"),
                Told::Metrics(place) => metrics = Some((place, fd.ok_or_else(gone)?)),
                told => answers.extend(self.take(told, fd)),
            }
        }
        // The keeper reads no answers before it has sent everything.
        let has = answers.iter().filter(|a| matches!(a, Answer::Has(_))).count();
        for answer in answers {
            self.link.send(&answer, None)?;
        }
        let wanted = config.port.len() + config.uplink.len();
        anyhow::ensure!(has > 0 || wanted == 0, "none of the {wanted} ports could be made");
        let switch = self.switch.clone();
        self.spawn("net-watch", move || {
            if let Err(err) = switch.watch().run() {
                tracing::error!("the watch that frees blocked workers ended: {err}");
            }
        })?;
        let switch = self.switch.clone();
        self.on_stop(move || switch.watch().stop());
        for index in 0..config.switch.workers {
            let pace = Pace {
                poll: Duration::from_micros(config.switch.poll_us),
                cpu: config.switch.cpus.get(index).copied(),
            };
            let worker = Worker::new(self.switch.clone(), index, pace, self.stop.clone())?;
            self.spawn(&format!("net-worker-{index}"), move || {
                let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker.run()));
                match ended {
                    Ok(Ok(())) => {}
                    Ok(Err(err)) => give_up(&format!("worker {index} ended: {err}")),
                    Err(_) => give_up(&format!("worker {index} panicked")),
                }
            })?;
        }
        let daemon = self.clone();
        self.spawn("net-link", move || daemon.listen())?;
        if !announcers.is_empty() {
            let (stop, stopped) = mpsc::channel();
            let switch = self.switch.clone();
            self.spawn("net-announcer", move || services::announce(&switch, &announcers, &stopped))?;
            self.on_stop(move || {
                let _ended = stop.send(());
            });
        }
        if let Some((place, listener)) = metrics {
            let server = tombolo_metrics::Server::over(listener, &place);
            let stop = server.stop()?;
            let switch = self.switch.clone();
            self.spawn("net-metrics", move || metrics::serve(&server, &switch))?;
            self.on_stop(move || stop.now());
        }
        Ok(())
    }

    /// Handles the keeper's messages until it ends.
    fn listen(self: &Arc<Self>) {
        loop {
            match self.link.receive() {
                Ok(Some((told, fd))) => {
                    if let Some(answer) = self.take(told, fd) {
                        self.settle();
                        if let Err(err) = self.link.send(&answer, None) {
                            tracing::warn!("the switch's keeper doesn't listen: {err}");
                        }
                    }
                }
                Ok(None) => break,
                Err(err) => {
                    tracing::error!("invalid message of the switch's keeper: {err}");
                    break;
                }
            }
        }
        if !self.is_stopping() {
            tracing::error!(
                "the switch's keeper ended: ports stay as they are; start the switch again to change them"
            );
        }
    }

    /// Handles a message of the keeper; returns the answer if the keeper waits for one.
    fn take(self: &Arc<Self>, told: Told, fd: Option<OwnedFd>) -> Option<Answer> {
        let fd = fd.or_else(|| {
            tracing::error!("the switch's keeper sent no descriptor; are too many open?");
            None
        });
        let (id, outcome) = match told {
            Told::Port(id, config) => (id, fd.map(|source| self.add_port(&config, source))),
            Told::Uplink(id, config, opened) => (id, fd.map(|fd| self.add_uplink(&config, opened, fd))),
            Told::Asked(request) => {
                let removed = match &request {
                    Request::Remove { name } => Some(self.detach(name)),
                    _ => None,
                };
                if let Some(fd) = fd {
                    self.answer(fd.into(), request, removed);
                }
                return None;
            }
            Told::Renewed(name, opened) => {
                let renewed = fd.map_or(Ok(()), |fd| self.renew_uplink(&name, opened, fd));
                if let Err(err) = renewed {
                    tracing::error!("{err:#}");
                }
                return None;
            }
            Told::Metrics(_) | Told::Started | Told::Failed(_) => return None,
        };
        Some(match outcome {
            Some(Ok(())) => Answer::Has(id),
            Some(Err(why)) => Answer::Refuses(id, format!("{why:#}")),
            None => Answer::Refuses(id, "its descriptor did not arrive".into()),
        })
    }

    /// Answers a request in a thread of its own, since a capture lasts.
    fn answer(
        self: &Arc<Self>,
        stream: UnixStream,
        request: Request,
        removed: Option<anyhow::Result<Detached>>,
    ) {
        let daemon = self.clone();
        let spawned = std::thread::Builder::new().name("net-answer".into()).spawn(move || {
            if let Err(err) = socket::answer(&daemon, stream, request, removed) {
                tracing::debug!("control connection: {err}");
            }
        });
        if let Err(err) = spawned {
            tracing::warn!("no thread for a control connection: {err}");
        }
    }

    /// Returns the state that the workers share.
    #[must_use]
    pub fn switch(&self) -> &Arc<Switch> {
        &self.switch
    }

    /// Returns whether [`Daemon::stop`] has been called.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(run)?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    fn on_stop(&self, wake: impl Fn() + Send + 'static) {
        self.wake.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(wake));
    }

    /// Adds a guest's port, for which the keeper has made `source`.
    fn add_port(&self, config: &PortConfig, source: OwnedFd) -> anyhow::Result<()> {
        let name = &config.name;
        self.check_name(name)?;
        let endpoint = Endpoint::over(config.role, source);
        let stop = Arc::new(endpoint.stop()?);
        let port = Arc::new(Port::new(name, config.queues));
        let policy = self.services.policy(config);
        // Until the port is in both lists, none removes it.
        let mut list = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        anyhow::ensure!(!self.is_stopping(), "port {name}: the switch ends; start it again");
        self.switch.attach(Attached::guest(port.clone(), policy)).map_err(|d| self.explain(&d, name))?;
        let served = self.services.give(config).and_then(|()| {
            let offered = if config.offload { OFFERED } else { PLAIN };
            let (running, ended) = mpsc::channel();
            let (switch, port, stopped) = (self.switch.clone(), port.clone(), stop.clone());
            let thread = std::thread::Builder::new().name(format!("net-{name}").chars().take(15).collect());
            let thread = thread.spawn(move || {
                endpoint.serve(&switch, &port, offered, &stopped);
                drop(running);
            });
            let thread = thread.with_context(|| format!("port {name}: no thread for it"));
            let thread = thread.inspect_err(|_| self.services.take(&config.macs))?;
            Ok(Served { name: name.clone(), stop, thread, ended })
        });
        list.push(served.inspect_err(|_| self.switch.detach(&port))?);
        Ok(())
    }

    fn check_name(&self, name: &str) -> anyhow::Result<()> {
        let taken = self.switch.view().ports().iter().any(|a| a.port.name() == name);
        anyhow::ensure!(!taken, "port {name}: the name is in use; choose another");
        Ok(())
    }

    fn explain(&self, duplicate: &crate::forwarding::table::Duplicate, name: &str) -> anyhow::Error {
        let view = self.switch.view();
        let owner = view.ports().get(duplicate.first).map_or("another port", |a| a.port.name());
        anyhow::anyhow!(
            "port {name}: MAC {} belongs to port {owner} already; give one of them another",
            duplicate.mac
        )
    }

    /// Waits until the workers use the change, so that the client that asked for it sees its effect.
    fn settle(&self) {
        let end = Instant::now() + END;
        self.switch.settle(|| self.is_stopping() || Instant::now() > end);
    }

    /// Takes a port or an uplink out of the view. Called in the order of the keeper's messages: a later port of the same name is another
    /// one.
    ///
    /// # Errors
    /// There is none of that name.
    pub(crate) fn detach(&self, name: &str) -> anyhow::Result<Detached> {
        if let Some(part) = self.services.part(name) {
            anyhow::bail!("port {name} is the switch's own service; leave {part} out of its configuration");
        }
        let mut list = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        let view = self.switch.view();
        let attached = view.ports().iter().find(|a| a.port.name() == name);
        let attached = attached.with_context(|| {
            format!("port {name}: there is none of that name; 'tombolo net ports' lists them")
        })?;
        self.services.take(&attached.policy.macs);
        self.switch.detach(&attached.port);
        let served = list.iter().position(|s| s.name == name).map(|at| list.remove(at));
        if let Some(served) = &served {
            served.stop.now();
        }
        Ok(Detached(served))
    }

    /// Waits for the end of a port's thread, and until no worker uses the port.
    pub(crate) fn end(&self, detached: Detached) {
        if let Some(served) = detached.0 {
            served.end();
        }
        self.settle();
    }

    fn add_uplink(&self, config: &UplinkConfig, opened: Opened, fd: OwnedFd) -> anyhow::Result<()> {
        self.check_name(&config.name)?;
        let uplink = opened.uplink(fd).with_context(|| format!("uplink {}", config.name))?;
        self.switch.attach(Attached {
            port: Arc::new(Port::new(&config.name, 1)),
            policy: Arc::new(config.into()),
            uplink: Some(Arc::new(uplink)),
            capture: None,
        })?;
        Ok(())
    }

    /// Gives the uplink `name` another device, if it is still there.
    fn renew_uplink(&self, name: &str, opened: Opened, fd: OwnedFd) -> anyhow::Result<()> {
        let uplink = Arc::new(opened.uplink(fd).with_context(|| format!("uplink {name}"))?);
        // The same ports contain no duplicate.
        let _never = self.switch.edit(|ports| {
            if let Some(a) = ports.iter_mut().find(|a| a.port.name() == name && a.uplink.is_some()) {
                a.uplink = Some(uplink);
            }
        });
        Ok(())
    }

    /// Ends all threads, and the keeper, which removes the sockets.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        for served in std::mem::take(&mut *self.served.lock().unwrap_or_else(PoisonError::into_inner)) {
            served.end();
        }
        self.switch.changed();
        for wake in self.wake.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            wake();
        }
        let keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(keeper) = keeper {
            // If the keeper has ended, the sockets stay.
            let _gone = self.link.send(&Answer::End, None);
            keeper.wait();
        }
        for thread in std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner)) {
            // A thread that panicked has ended, too.
            let _ended = thread.join();
        }
    }
}
