// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps a process of another part running for as long as it is wanted: the switch of a network, the server of an accelerator.
//!
//! One that dies is started again, at once if it had lived for a while, otherwise after pauses that grow. It is told to end when it is not
//! wanted any more, and is killed if it doesn't. It is the child of a shim, so it lives on when the supervisor dies, and the next one goes on with it.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::Signal;

use crate::child::Handle;
use crate::compose::{Compose, Project, VmSpec};
use crate::project::changes::Kind;
use crate::project::journal;
use crate::shim::handle::Started;
use crate::shim::{Order, Place, Shim};

/// Time for a process to answer.
pub const ANSWER: Duration = Duration::from_secs(10);
/// Time for a process to end before it is killed.
pub const ENDING: Duration = Duration::from_secs(3);
/// Time for a killed process to end.
pub const DEATH: Duration = Duration::from_millis(500);
/// The longest pause before one that died is started again.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// One that lived so long starts again at once.
const SETTLED: Duration = Duration::from_secs(2);
/// Lines of its log in an error.
const LAST_LINES: usize = 8;

/// A service whose process is kept running.
pub trait Service: Send + Sync + 'static {
    /// The connection to a new process.
    type Link;

    /// The order for the shim, with the descriptors of its places. The shim's child writes to the service's log.
    ///
    /// # Errors
    /// Those of the system.
    fn order(&self) -> anyhow::Result<(Order, Vec<OwnedFd>, Self::Link)>;

    /// Tells the new process what it must know; then it is ready. Where that fails it is ended.
    ///
    /// # Errors
    /// Why it is of no use.
    fn begin(&self, link: Self::Link) -> anyhow::Result<()>;

    /// The process has ended.
    fn ended(&self);

    /// Has the shim of the process, which was started so often, keep what the next supervisor needs to know.
    ///
    /// # Errors
    /// It does not answer.
    fn keep(&self, shim: &Shim, starts: u32) -> anyhow::Result<()>;
}

/// A network or an accelerator: VMs of a project share it, and a process of its own serves it.
pub trait Part: Sized {
    /// Names of those that a VM of the project uses, or serves.
    fn used_by<'a>(name: &str, vm: &'a VmSpec, compose: &'a Compose) -> Vec<&'a String>;

    /// Starts it, with a place for each of its VMs.
    ///
    /// # Errors
    /// Why it can't be had.
    fn start(name: &str, project: &Project, dir: &Path) -> anyhow::Result<Self>;

    /// Makes places for VMs that it did not have before, and changes those of VMs in `starting` to what the file says now.
    ///
    /// # Errors
    /// Its own words.
    fn extend(&self, project: &Project, starting: &BTreeSet<&String>) -> anyhow::Result<()>;
}

/// Keeps one process.
#[derive(Debug)]
pub struct Keeper {
    shared: Arc<Shared>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    names: Names,
    state: Mutex<State>,
    changed: Condvar,
}

/// The name in messages.
#[derive(Debug)]
pub struct Names {
    /// The kind of what it serves.
    pub kind: Kind,
    /// The name of what it serves.
    pub name: String,
    /// The kind of the process: `switch`.
    pub process: &'static str,
    /// The path of its log.
    pub log: PathBuf,
}

impl Names {
    /// The part that it serves: `network 'lan'`.
    fn owner(&self) -> String {
        format!("{} '{}'", self.kind.word(), self.name)
    }

    /// The name of its shim in the project's folder.
    pub fn shim(&self) -> String {
        format!("{}-{}", self.process, self.name)
    }

    fn record(&self, state: &str, detail: &str) {
        journal::record(self.kind, &self.name, state, detail);
    }
}

#[derive(Debug, Default)]
struct State {
    process: Option<(Handle, u32)>,
    /// The shim whose child it is.
    shim: Option<Arc<Shim>>,
    starts: u32,
    ready: bool,
    /// Why the last one was given up.
    trouble: Option<String>,
    /// A process is being started; it is not in `process` yet.
    starting: bool,
    over: bool,
}

impl Keeper {
    /// Starts the process, and starts it again whenever it ends.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn start<S: Service>(names: Names, service: Arc<S>) -> std::io::Result<Keeper> {
        Keeper::begin(names, State::default(), None, service)
    }

    /// Goes on with the child of a shim that an earlier supervisor has started. One that has ended is started again.
    ///
    /// # Errors
    /// The shim does not answer, or there is no thread for it.
    pub fn adopt<S: Service>(
        names: Names,
        service: Arc<S>,
        shim: Shim,
        starts: u32,
    ) -> anyhow::Result<Keeper> {
        let (found, child) = shim.look()?;
        let process = child.filter(|_| found.exit.is_none()).map(|child| (child.process, child.pid));
        let shim = Arc::new(shim);
        let (ready, running) = (process.is_some(), process.as_ref().map(|_| shim.clone()));
        let state = State { ready, process, shim: Some(shim), starts, ..State::default() };
        Ok(Keeper::begin(names, state, running, service)?)
    }

    fn begin<S: Service>(
        names: Names,
        state: State,
        process: Option<Arc<Shim>>,
        service: Arc<S>,
    ) -> std::io::Result<Keeper> {
        let shared = Arc::new(Shared { names, state: Mutex::new(state), changed: Condvar::new() });
        let own = shared.clone();
        let watcher = crate::thread::start(shared.names.process, move || own.watch(&*service, process))?;
        Ok(Keeper { shared, watcher: Mutex::new(Some(watcher)) })
    }

    /// Kills the process, so that another one is started.
    pub fn start_again(&self) {
        if let Some((process, _)) = &self.shared.lock().process {
            process.kill();
        }
    }

    /// Has the shim keep what the next supervisor needs to know, where that has changed.
    ///
    /// # Errors
    /// It does not answer.
    pub fn keep<S: Service>(&self, service: &S) -> anyhow::Result<()> {
        let state = self.shared.lock();
        let (shim, starts) = (state.shim.clone(), state.starts);
        drop(state);
        // One that is being started keeps it then.
        shim.map_or(Ok(()), |shim| service.keep(&shim, starts))
    }

    /// Gives the shim its socket again, where the project's folder has vanished.
    ///
    /// # Errors
    /// See [`Shim::listen_again`].
    pub fn listen_again(&self) -> anyhow::Result<()> {
        let shim = self.shared.lock().shim.clone();
        shim.map_or(Ok(()), |shim| shim.listen_again())
    }

    /// The process, and how often it has been started.
    pub fn process(&self) -> (Option<u32>, u32) {
        let state = self.shared.lock();
        (state.process.as_ref().map(|(_, pid)| *pid), state.starts)
    }

    /// Why the last process was given up.
    pub fn trouble(&self) -> Option<String> {
        self.shared.lock().trouble.clone()
    }

    /// Waits until it is ready; one that has just died may be followed by one that lives.
    ///
    /// # Errors
    /// Why it is not, with the last lines of its log.
    pub fn wait_ready(&self) -> anyhow::Result<()> {
        let state = self.shared.lock();
        let last = state.starts + 1;
        let waits = |s: &mut State| !s.ready && (s.trouble.is_none() || s.starts <= last);
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, ANSWER, waits)
            .unwrap_or_else(PoisonError::into_inner);
        match &state.trouble {
            _ if state.ready => Ok(()),
            Some(trouble) => Err(self.failure(trouble)),
            None => {
                let process = self.shared.names.process;
                Err(self.failure(&format!("its {process} does not answer within {} s", ANSWER.as_secs())))
            }
        }
    }

    /// An error with the last lines of the log.
    pub fn failure(&self, what: &str) -> anyhow::Error {
        let mut text = format!("the {} failed: {what}", self.shared.names.owner());
        let log = std::fs::read_to_string(&self.shared.names.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        for line in &lines[lines.len().saturating_sub(LAST_LINES)..] {
            text.push_str("\n  | ");
            text.push_str(line);
        }
        anyhow::anyhow!(text)
    }

    /// Ends the process; nothing is started afterwards.
    pub fn stop(&self) {
        let mut state = self.shared.lock();
        state.over = true;
        if let Some((process, _)) = &state.process {
            process.signal(Signal::TERM);
        }
        self.shared.changed.notify_all();
        let (mut state, late) = self
            .shared
            .changed
            .wait_timeout_while(state, ENDING, |s| s.starting || s.process.is_some())
            .unwrap_or_else(PoisonError::into_inner);
        let named = |pid: u32| {
            let names = &self.shared.names;
            format!("the {} of the {} (process {pid})", names.process, names.owner())
        };
        if late.timed_out() {
            if let Some((process, pid)) = &state.process {
                crate::say!("{} does not end and is killed", named(*pid));
                process.kill();
            }
            let waited = self.shared.changed.wait_timeout_while(state, DEATH, |s| s.process.is_some());
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if let Some((_, pid)) = &state.process {
            crate::say!("{} does not die, though it was killed; see /proc/{pid}/stack", named(*pid));
            // Nobody waits for its watcher, which ends with it.
            return;
        }
        if state.starting {
            crate::say!(
                "the start of a {} for the {} does not end",
                self.shared.names.process,
                self.shared.names.owner()
            );
            return;
        }
        let ran = state.starts > 0;
        drop(state);
        if let Some(watcher) = self.watcher.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // One that panicked has ended too.
            let _ended = watcher.join();
            if ran {
                self.shared.names.record("ended", "");
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a process running, one that runs already where it is there.
    fn watch<S: Service>(&self, service: &S, mut process: Option<Arc<Shim>>) {
        let mut pause = Duration::ZERO;
        loop {
            let begun = Instant::now();
            let trouble = match process.take() {
                Some(shim) => self.see_out(service, &shim, None),
                None => {
                    if !self.wait_turn(pause) {
                        return;
                    }
                    match self.launch(service) {
                        Ok(None) => return,
                        Ok(Some((shim, trouble))) => self.see_out(service, &shim, trouble),
                        Err(e) => Some(format!("{e:#}")),
                    }
                }
            };
            if let Some(why) = trouble {
                crate::say!("the {}: {why}; it is started again", self.names.owner());
                self.names.record("ended", &why);
                self.lock().trouble = Some(why);
            }
            self.changed.notify_all();
            pause = match begun.elapsed() {
                lived if lived > SETTLED => Duration::ZERO,
                _ => (pause * 2).clamp(Duration::from_millis(100), PAUSE_MAX),
            };
        }
    }

    /// Waits before the next start; false: none is wanted any more.
    fn wait_turn(&self, pause: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), pause, |s| !s.over);
        !waited.unwrap_or_else(PoisonError::into_inner).0.over
    }

    /// Starts a process and tells it what it must know; with it comes why it is of no use. `None`: none is wanted any more.
    fn launch<S: Service>(&self, service: &S) -> anyhow::Result<Option<(Arc<Shim>, Option<anyhow::Error>)>> {
        let mut state = self.lock();
        if state.over {
            return Ok(None);
        }
        state.starts += 1;
        state.starting = true;
        drop(state);
        let spawned = self.spawn(service);
        let mut state = self.lock();
        state.starting = false;
        let (shim, started, link) = spawned.inspect_err(|_| self.changed.notify_all())?;
        if state.over {
            started.process.kill();
        }
        let over = state.over;
        (state.process, state.shim) = (Some((started.process, started.pid)), Some(shim.clone()));
        let starts = state.starts;
        drop(state);
        let begun = || service.keep(&shim, starts).and_then(|()| self.begin(service, link));
        let trouble = if over { None } else { begun().err() };
        if trouble.is_some() {
            if let Some((handle, _)) = &self.lock().process {
                handle.kill();
            }
        }
        Ok(Some((shim, trouble)))
    }

    /// Waits for the end of a process. Returns its cause, unless the process was told to end.
    fn see_out<S: Service>(
        &self,
        service: &S,
        shim: &Shim,
        trouble: Option<anyhow::Error>,
    ) -> Option<String> {
        let how = shim.wait().ok().flatten();
        let how = how.map_or("it was killed with its shim".to_owned(), |status| status.to_string());
        if let Some((process, _)) = &self.lock().process {
            // The kernel kills it with its shim.
            process.wait_end();
        }
        service.ended();
        shim.end();
        let mut state = self.lock();
        (state.process, state.shim, state.ready) = (None, None, false);
        let kind = self.names.process;
        (!state.over).then(|| match trouble {
            Some(e) => format!("its {kind} does not begin: {e:#}"),
            None => format!("its {kind} ended: {how}"),
        })
    }

    fn spawn<S: Service>(&self, service: &S) -> anyhow::Result<(Arc<Shim>, Started, S::Link)> {
        let folder = self.names.log.parent().context("the log has no folder")?;
        // At the end of a login session the folder vanishes.
        crate::project::state::renew(folder)?;
        let log = File::options().create(true).append(true).open(&self.names.log);
        let log = log.with_context(|| self.names.log.display().to_string())?;
        let (mut order, fds, link) = service.order()?;
        order.places.push(Place::Child(2));
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).chain([log.as_fd()]).collect();
        let shim = Shim::start(folder, &self.names.shim())?;
        let started = shim.run(order, &fds).inspect_err(|_| shim.end())?;
        Ok((Arc::new(shim), started, link))
    }

    fn begin<S: Service>(&self, service: &S, link: S::Link) -> anyhow::Result<()> {
        service.begin(link)?;
        let mut state = self.lock();
        (state.ready, state.trouble) = (true, None);
        drop(state);
        self.names.record("up", "");
        self.changed.notify_all();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A shell command; the first `refusals` processes are of no use.
    struct Shell {
        command: &'static str,
        refusals: u32,
        begun: AtomicU32,
    }

    impl Service for Shell {
        type Link = ();

        fn order(&self) -> anyhow::Result<(Order, Vec<OwnedFd>, ())> {
            let arguments = ["-c", self.command].map(str::to_owned).into();
            let order = Order { program: Some("/bin/sh".into()), arguments, ..Order::default() };
            Ok((order, Vec::new(), ()))
        }

        fn begin(&self, (): ()) -> anyhow::Result<()> {
            let nth = self.begun.fetch_add(1, Ordering::SeqCst);
            anyhow::ensure!(nth >= self.refusals, "refused");
            Ok(())
        }

        fn ended(&self) {}

        fn keep(&self, _: &Shim, _: u32) -> anyhow::Result<()> {
            Ok(())
        }
    }

    fn keeper(command: &'static str, refusals: u32) -> (tempfile::TempDir, Keeper) {
        let dir = tempfile::tempdir().unwrap();
        let names =
            Names { kind: Kind::Network, name: "a".into(), process: "command", log: dir.path().join("log") };
        let service = Arc::new(Shell { command, refusals, begun: AtomicU32::new(0) });
        let keeper = Keeper::start(names, service).unwrap();
        (dir, keeper)
    }

    #[test]
    fn one_that_is_killed_is_followed_by_another_and_stop_ends_it() {
        let (_dir, keeper) = keeper("exec sleep 1000", 0);
        keeper.wait_ready().unwrap();
        let first = keeper.process().0.unwrap();
        let pid = rustix::process::Pid::from_raw(first.try_into().unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
        let state = keeper.shared.lock();
        let same = |s: &mut State| !s.ready || s.process.as_ref().is_none_or(|(_, pid)| *pid == first);
        let (state, late) = keeper.shared.changed.wait_timeout_while(state, ANSWER, same).unwrap();
        assert!(!late.timed_out() && state.starts == 2);
        drop(state);
        keeper.stop();
        assert_eq!(keeper.process(), (None, 2));
    }

    #[test]
    fn one_that_can_not_begin_is_an_error_with_the_words_of_its_log() {
        let (_dir, keeper) = keeper("echo no such device >&2; exec sleep 1000", u32::MAX);
        let why = keeper.wait_ready().unwrap_err().to_string();
        assert!(why.starts_with("the network 'a' failed: its command does not begin: refused"), "{why}");
    }

    #[test]
    fn one_that_begins_at_the_second_try_is_ready() {
        let (_dir, keeper) = keeper("exec sleep 1000", 1);
        keeper.wait_ready().unwrap();
        assert_eq!(keeper.process().1, 2);
    }

    /// Starts its process only when it is told to.
    struct Late {
        go: Mutex<std::sync::mpsc::Receiver<()>>,
        shell: Shell,
    }

    impl Service for Late {
        type Link = ();

        fn order(&self) -> anyhow::Result<(Order, Vec<OwnedFd>, ())> {
            self.go.lock().unwrap().recv()?;
            self.shell.order()
        }

        fn begin(&self, (): ()) -> anyhow::Result<()> {
            self.shell.begin(())
        }

        fn ended(&self) {}

        fn keep(&self, _: &Shim, _: u32) -> anyhow::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_start_that_takes_long_holds_up_no_question_and_its_process_ends_if_none_is_wanted_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let names =
            Names { kind: Kind::Network, name: "a".into(), process: "command", log: dir.path().join("log") };
        let (go, told) = std::sync::mpsc::channel();
        let shell = Shell { command: "exec sleep 1000", refusals: 0, begun: AtomicU32::new(0) };
        let service = Arc::new(Late { go: Mutex::new(told), shell });
        let keeper = Keeper::start(names, service.clone()).unwrap();
        while keeper.process().1 == 0 {
            std::thread::yield_now();
        }
        assert_eq!((keeper.process(), keeper.trouble()), ((None, 1), None));
        std::thread::scope(|scope| {
            let stopping = scope.spawn(|| keeper.stop());
            while !keeper.shared.lock().over {
                std::thread::yield_now();
            }
            go.send(()).unwrap();
            stopping.join().unwrap();
        });
        assert_eq!((keeper.process(), service.shell.begun.load(Ordering::SeqCst)), ((None, 1), 0));
    }
}
