// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The running switch: configuration in, threads out, and back.
//!
//! A port that can't be made (its socket is in use, its MAC is another's) is left out with a message, and the others
//! go on; only if nothing is left is that an error.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;

use crate::config::{Config, PortConfig, UplinkConfig, Way};
use crate::endpoint::{self, Endpoint, Role, Stop};
use crate::features::{OFFERED, PLAIN};
use crate::port::Port;
use crate::switch::Switch;
use crate::uplink::{Link, Uplink, packet::Packet, passt::Passt, tap::Tap};
use crate::view::Attached;
use crate::worker::{Pace, Worker};
use crate::{control, metrics};

/// Most threads that carry packets.
const MAX_WORKERS: usize = 64;

/// How long the end of a port's thread is waited for. It does nothing that takes long; but a descriptor that a front-end
/// sent may be a file of a FUSE file system, and to close that may take for ever.
const END: Duration = Duration::from_secs(2);

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
            // A thread that panicked has ended too.
            Ok(()) | Err(RecvTimeoutError::Disconnected) => drop(self.thread.join()),
        }
    }
}

/// A running switch.
pub struct Daemon {
    switch: Arc<Switch>,
    stop: Arc<AtomicBool>,
    served: Mutex<Vec<Served>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    wake: Mutex<Vec<Box<dyn Fn() + Send>>>,
}

impl Daemon {
    /// Starts what `config` says.
    ///
    /// # Errors
    /// Nothing of it can be started, or the control socket or the address for metrics are in use.
    pub fn start(config: &Config) -> anyhow::Result<Arc<Self>> {
        let workers = config.switch.workers;
        anyhow::ensure!(
            (1..=MAX_WORKERS).contains(&workers),
            "{workers} workers; 1 to {MAX_WORKERS} are possible"
        );
        for cpu in config.switch.cpus.iter().take(workers) {
            anyhow::ensure!(
                crate::worker::may_use(*cpu)?,
                "workers can't run on CPU {cpu}, which this process may not use; 'taskset -p $$' shows which it may"
            );
        }
        let daemon = Arc::new(Self {
            switch: Arc::new(Switch::new(workers, config.switch.budget)?),
            stop: Arc::default(),
            served: Mutex::default(),
            threads: Mutex::default(),
            wake: Mutex::default(),
        });
        let mut working = 0;
        for uplink in &config.uplink {
            match daemon.add_uplink(uplink) {
                Ok(()) => working += 1,
                Err(err) => tracing::error!("uplink {}: {err:#}", uplink.name),
            }
        }
        if config.switch.sandbox {
            // Before any thread is started: each has its own capabilities.
            crate::sandbox::drop_capabilities().context("capabilities can't be dropped")?;
        }
        for port in &config.port {
            match daemon.add_port(port) {
                Ok(()) => working += 1,
                Err(err) => tracing::error!("{err:#}"),
            }
        }
        let wanted = config.port.len() + config.uplink.len();
        anyhow::ensure!(working > 0 || wanted == 0, "none of the {wanted} ports could be made");
        for index in 0..workers {
            let pace = Pace {
                poll: Duration::from_micros(config.switch.poll_us),
                cpu: config.switch.cpus.get(index).copied(),
            };
            let worker = Worker::new(daemon.switch.clone(), index, pace, daemon.stop.clone())?;
            daemon.spawn(&format!("net-worker-{index}"), move || {
                if let Err(err) = worker.run() {
                    tracing::error!("worker {index} ended: {err}");
                }
            })?;
        }
        if let Some(path) = &config.switch.control {
            daemon.serve_control(path)?;
        }
        if let Some(place) = &config.switch.metrics {
            let server = tombolo_metrics::Server::bind(place)
                .with_context(|| format!("metrics at {place}; choose another address"))?;
            let stop = server.stop()?;
            let switch = daemon.switch.clone();
            daemon.spawn("net-metrics", move || metrics::serve(&server, &switch))?;
            daemon.on_stop(move || stop.now());
        }
        Ok(daemon)
    }

    /// What the workers share.
    #[must_use]
    pub fn switch(&self) -> &Arc<Switch> {
        &self.switch
    }

    /// Has [`Daemon::stop`] been called?
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

    fn serve_control(self: &Arc<Self>, path: &Path) -> anyhow::Result<()> {
        // The same care as for a port's socket: never take a living one.
        drop(Endpoint::open(path, Role::Server).context("control socket")?);
        let listener = UnixListener::bind(path).with_context(|| format!("control {}", path.display()))?;
        let waiting = listener.try_clone()?;
        let daemon = self.clone();
        let own = path.to_path_buf();
        self.spawn("net-control", move || {
            for stream in listener.incoming() {
                if daemon.is_stopping() {
                    break;
                }
                let (Ok(stream), daemon) = (stream, daemon.clone()) else { continue };
                // One thread per question: a capture lasts.
                let spawned = std::thread::Builder::new().name("net-answer".into()).spawn(move || {
                    if let Err(err) = control::answer(&daemon, stream) {
                        tracing::debug!("control connection: {err}");
                    }
                });
                if let Err(err) = spawned {
                    tracing::warn!("no thread for a control connection: {err}");
                }
            }
            // Gone already is as good.
            let _gone = std::fs::remove_file(&own);
        })?;
        self.on_stop(move || endpoint::interrupt(&waiting));
        Ok(())
    }

    /// Adds a guest's port.
    ///
    /// # Errors
    /// Its configuration is impossible, its name, MAC or socket is in use.
    pub fn add_port(&self, config: &PortConfig) -> anyhow::Result<()> {
        let name = &config.name;
        config.check()?;
        self.check_name(name)?;
        let endpoint = Endpoint::open(&config.socket, config.role).with_context(|| format!("port {name}"))?;
        let stop = Arc::new(endpoint.stop()?);
        let port = Arc::new(Port::new(name, config.queues));
        self.switch
            .attach(Attached::guest(port.clone(), config.policy()))
            .map_err(|d| self.explain(&d, name))?;
        let offered = if config.offload { OFFERED } else { PLAIN };
        let (running, ended) = mpsc::channel();
        let thread = {
            let (switch, stop) = (self.switch.clone(), stop.clone());
            std::thread::Builder::new().name(format!("net-{name}").chars().take(15).collect()).spawn(
                move || {
                    endpoint.serve(&switch, &port, offered, &stop);
                    drop(running);
                },
            )?
        };
        let served = Served { name: name.clone(), stop, thread, ended };
        self.served.lock().unwrap_or_else(PoisonError::into_inner).push(served);
        Ok(())
    }

    fn check_name(&self, name: &str) -> anyhow::Result<()> {
        let taken = self.switch.view().ports().iter().any(|a| a.port.name() == name);
        anyhow::ensure!(!taken, "port {name}: the name is in use; choose another");
        Ok(())
    }

    fn explain(&self, duplicate: &crate::table::Duplicate, name: &str) -> anyhow::Error {
        let view = self.switch.view();
        let owner = view.ports().get(duplicate.first).map_or("another port", |a| a.port.name());
        anyhow::anyhow!(
            "port {name}: MAC {} belongs to port {owner} already; give one of them another",
            duplicate.mac
        )
    }

    /// Removes a guest's port.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn remove_port(&self, name: &str) -> anyhow::Result<()> {
        let served = {
            let mut list = self.served.lock().unwrap_or_else(PoisonError::into_inner);
            let at = list.iter().position(|s| s.name == name).with_context(|| {
                format!("port {name}: there is none of that name; 'tombolo net ports' lists them")
            })?;
            list.remove(at)
        };
        served.end();
        let view = self.switch.view();
        for attached in view.ports().iter().filter(|a| a.port.name() == name) {
            self.switch.detach(&attached.port);
        }
        Ok(())
    }

    fn add_uplink(&self, config: &UplinkConfig) -> anyhow::Result<()> {
        self.check_name(&config.name)?;
        let link: Box<dyn Link> = match &config.way {
            Way::Tap(name) => Box::new(Tap::open(name)?),
            Way::Interface(name) => Box::new(Packet::open(name)?),
            Way::Passt(path) => Box::new(Passt::connect(path)?),
            Way::User(program) => Box::new(Passt::start(program)?),
        };
        self.switch.attach(Attached {
            port: Arc::new(Port::new(&config.name, 1)),
            policy: Arc::new(config.policy()),
            uplink: Some(Arc::new(Uplink::new(link))),
            capture: None,
        })?;
        Ok(())
    }

    /// Ends all threads and removes the sockets.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        for served in std::mem::take(&mut *self.served.lock().unwrap_or_else(PoisonError::into_inner)) {
            served.end();
        }
        self.switch.changed();
        for wake in self.wake.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            wake();
        }
        for thread in std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner)) {
            // A thread that panicked has ended too.
            let _ended = thread.join();
        }
    }
}
