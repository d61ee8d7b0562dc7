// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands' side of the control socket: find or start the supervisor, show progress, pass streams through.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use rustix::termios::{OptionalActions, Termios};

use crate::compose::Project;
use crate::project::control::{Event, Feed, Request, Stage, Status};
use crate::project::peer::{self, Peer};
use crate::project::revival;
use crate::project::session::{self, Signals};
use crate::project::silent;
use crate::project::state::{self, Found, StateDir};
use crate::thread;

/// Times that a start is tried when other commands start or end the same project at the same moment.
const TRIES: u32 = 50;
/// Time for a supervisor to answer `ps`.
pub const STATUS: Duration = Duration::from_secs(5);
/// Bytes of input sent at once.
const CHUNK: usize = 256 << 10;
/// The exit code after a signal, as of other commands.
const INTERRUPTED: i32 = 130;
/// Ends an interactive console: Ctrl-].
const ESCAPE: u8 = 0x1d;

/// Connects to the project's supervisor and starts it if none lives.
///
/// # Errors
/// When it can't be started.
pub fn supervisor(project: &Project, request: &Request) -> anyhow::Result<Peer> {
    for _ in 0..TRIES {
        if let Some(peer) = peer::ask(project, request)? {
            return Ok(peer);
        }
        let dir = StateDir::of(&project.file)?;
        state::base_dir()?;
        if let Some(mut peer) = revival::start(None, project, &dir)? {
            let Err(e) = peer.send(request) else { return Ok(peer) };
            // One that could not begin says why, and hears nothing any more.
            match peer.receive::<Event>() {
                Ok(Some(Event::Failed { message })) => anyhow::bail!("{message}"),
                _ => anyhow::bail!("the supervisor ended before it heard the request: {e}"),
            }
        }
        // Two that begin at the same moment give way to each other; the next time they don't meet.
        std::thread::sleep(Duration::from_millis(50 + u64::from(std::process::id() % 97)));
    }
    anyhow::bail!(
        "the supervisor of the project '{}' neither lives nor dies; see {}",
        project.name,
        StateDir::of(&project.file)?.path().display()
    )
}

/// Asks the project's supervisor, which must live.
///
/// # Errors
/// When the project is not up.
pub fn living(project: &Project, request: &Request) -> anyhow::Result<Peer> {
    peer::ask(project, request)?.with_context(|| not_up(project))
}

fn not_up(project: &Project) -> String {
    format!(
        "the project '{}' ({}) is not up; start it with 'tombolo up'",
        project.name,
        project.file.display()
    )
}

/// The status of a project that is up.
///
/// # Errors
/// When it is not, or its supervisor does not answer.
pub fn status(project: &Project) -> anyhow::Result<Status> {
    status_if_up(project)?.with_context(|| not_up(project))
}

/// The status of a project; `None`: it is not up.
///
/// # Errors
/// When its supervisor does not answer.
pub fn status_if_up(project: &Project) -> anyhow::Result<Option<Status>> {
    while let Some(mut peer) = peer::ask(project, &Request::Ps)? {
        peer.set_limit(Some(STATUS));
        // One that has ended since it heard the question may be followed by another.
        if let Some(status) = receive_status(&mut peer)? {
            return Ok(Some(status));
        }
    }
    Ok(None)
}

/// The answer to `ps`; `None`: the supervisor has ended since it heard the question.
pub(crate) fn receive_status(peer: &mut Peer) -> anyhow::Result<Option<Status>> {
    match peer.receive::<Event>()? {
        Some(Event::Status(status)) => Ok(Some(*status)),
        Some(Event::Failed { message }) => anyhow::bail!("{message}"),
        Some(other) => anyhow::bail!("the supervisor answered {other:?}"),
        // A killed process closes its connections before it has ended.
        None => peer.wait_ended(STATUS).map(|()| None),
    }
}

/// The status of a project whose supervisor was found; `None`: it has ended.
///
/// # Errors
/// When it does not answer.
pub fn status_of(found: &Found) -> anyhow::Result<Option<Status>> {
    let Some(mut peer) = peer::ask_found(found, &Request::Ps)? else { return Ok(None) };
    peer.set_limit(Some(STATUS));
    receive_status(&mut peer)
}

/// As [`status_of`], for `ps`: within `longest`, and what is known of a supervisor that does not answer.
///
/// # Errors
/// When it does not answer.
pub fn status_within(found: &Found, longest: Duration) -> anyhow::Result<Option<Status>> {
    let asked = peer::ask_within(found, &Request::Ps, longest)
        .and_then(|peer| peer.map_or(Ok(None), |mut peer| receive_status(&mut peer)));
    asked.map_err(|e| {
        let folder = found.dir().file_name().unwrap_or_default().to_string_lossy();
        anyhow::anyhow!("{folder}: {e:#}; {}", silent::describe(found.dir()))
    })
}

/// Shows what happens to the VMs: bars on a terminal, lines elsewhere, or JSON for a script.
pub struct Progress {
    bars: Option<(MultiProgress, BTreeMap<String, ProgressBar>)>,
    json: bool,
}

impl Progress {
    /// For a person, or for a script that reads a line of JSON per event from the standard output.
    pub fn new(json: bool) -> Progress {
        let bars =
            (!json && std::io::stderr().is_terminal()).then(|| (MultiProgress::new(), BTreeMap::new()));
        Progress { bars, json }
    }

    /// Shows an event; what is no news for a person is none for a script either.
    fn show(&mut self, event: &Event) -> anyhow::Result<()> {
        if self.json {
            crate::commands::cli::say(&serde_json::to_string(event)?)?;
            return Ok(());
        }
        match event {
            Event::Stage { vm, stage, detail } => self.stage(vm, *stage, detail),
            Event::Note { text } => self.note(text),
            Event::Detail { text } if crate::log::is_verbose() => self.note(text),
            Event::Action(action) => self.note(&action.to_string()),
            _ => {}
        }
        Ok(())
    }

    fn stage(&mut self, vm: &str, stage: Stage, detail: &str) {
        let (text, finished) = match stage {
            Stage::Waiting => ("waiting", false),
            Stage::Starting => ("starting", false),
            Stage::Booting => ("booting", false),
            Stage::Preparing => ("preparing", false),
            Stage::Up => ("up", true),
            Stage::AlreadyUp => ("already running", true),
            Stage::Stopping => ("stopping", false),
            Stage::Stopped => ("stopped", true),
            Stage::Failed => ("failed", true),
        };
        let detail = crate::log::plain(detail);
        let message = if detail.is_empty() { text.to_owned() } else { format!("{text} ({detail})") };
        let Some((all, bars)) = &mut self.bars else {
            crate::log::show(&format!("{vm}: {message}\n"));
            return;
        };
        let bar = bars.entry(vm.to_owned()).or_insert_with(|| {
            let bar = all.add(ProgressBar::new_spinner());
            let style = ProgressStyle::with_template("{spinner:.cyan} {prefix:.bold} {msg} {elapsed:.dim}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar.set_prefix(vm.to_owned());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if finished {
            bar.finish_with_message(message);
        } else {
            bar.set_message(message);
        }
    }

    fn note(&self, text: &str) {
        match &self.bars {
            Some((all, _)) => drop(all.println(format!("tombolo: {}", crate::log::plain(text)))),
            None => crate::say!("{text}"),
        }
    }
}

/// The end of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The user pressed Ctrl-C; everything has been taken back.
    Interrupted,
    /// The user did not wait for the end; the supervisor goes on.
    Left,
}

/// The effect of Ctrl-C, SIGTERM and SIGHUP on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnInterrupt {
    /// The first cancels it, and its taking back is waited for; the second ends the wait.
    Cancel,
    /// The first ends the wait. The supervisor carries the request out.
    Leave,
}

/// Follows a request to its end.
///
/// # Errors
/// The supervisor refuses or fails.
pub fn follow(peer: &mut Peer, progress: &mut Progress, on: OnInterrupt) -> anyhow::Result<Outcome> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let left = Arc::new(AtomicBool::new(false));
    let signals = session::signals()?;
    let socket = peer.socket();
    let (cancels, leaves) = (interrupted.clone(), left.clone());
    thread::start("signals", move || {
        if on == OnInterrupt::Cancel && signals.wait() {
            cancels.store(true, Ordering::Release);
            // The supervisor takes the end of what is said to it as the word to stop; its answer still comes.
            let _ = socket.shutdown(std::net::Shutdown::Write);
        }
        if signals.wait() {
            leaves.store(true, Ordering::Release);
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    })?;
    let ended = follow_events(peer, progress, &interrupted, &left);
    if left.load(Ordering::Acquire) { Ok(Outcome::Left) } else { ended }
}

fn follow_events(
    peer: &mut Peer,
    progress: &mut Progress,
    interrupted: &AtomicBool,
    left: &AtomicBool,
) -> anyhow::Result<Outcome> {
    loop {
        let event = peer.receive::<Event>()?;
        if let Some(event) = &event {
            progress.show(event)?;
        }
        match event {
            Some(Event::Done) => return Ok(Outcome::Done),
            Some(Event::Failed { .. }) if interrupted.load(Ordering::Acquire) => {
                return Ok(Outcome::Interrupted);
            }
            Some(Event::Failed { message }) => anyhow::bail!("{message}"),
            Some(_) => {}
            None if left.load(Ordering::Acquire) => return Ok(Outcome::Left),
            None if interrupted.load(Ordering::Acquire) => return Ok(Outcome::Interrupted),
            None => {
                return Err(
                    peer.broken("the supervisor died; 'tombolo ps' shows what runs on, 'tombolo up' goes on")
                );
            }
        }
    }
}

/// Waits for one of these signals or the project's end, for `up --attach`. A supervisor that dies is followed by another one.
///
/// # Errors
/// The project has ended.
pub fn attach(project: &Project, signals: Signals) -> anyhow::Result<()> {
    let over = Arc::new(AtomicBool::new(false));
    let seen = over.clone();
    thread::start("signals", move || {
        if signals.wait() {
            seen.store(true, Ordering::Release);
        }
    })?;
    loop {
        let (_, socket) = living(project, &Request::Attend)?.into_raw();
        if !session::wait_hangup(&socket, &over) {
            return Ok(());
        }
    }
}

/// Runs a command in a guest with this process's input and output: its exit code.
///
/// # Errors
/// When it can't be run.
pub fn exec(project: &Project, request: &Request) -> anyhow::Result<i32> {
    let mut peer = living(project, request)?;
    let unread = Arc::new(OnceLock::new());
    if matches!(request, Request::Exec { input: true, .. }) {
        feed(peer.socket(), unread.clone())?;
    }
    let mut code = None;
    loop {
        let event = match peer.receive::<Event>() {
            Ok(None) | Err(_) if unread.get().is_some() => None,
            event => event?,
        };
        match event {
            Some(Event::Out { data }) => write(&mut std::io::stdout().lock(), &BASE64.decode(data)?)?,
            Some(Event::Err { data }) => write(&mut std::io::stderr().lock(), &BASE64.decode(data)?)?,
            Some(Event::Exit { code: c }) => code = Some(c),
            Some(Event::Done) => return code.context("the command's exit code is missing"),
            Some(Event::Failed { message }) => anyhow::bail!("{message}"),
            Some(_) => {}
            None => match unread.get() {
                Some(why) => anyhow::bail!("the input can't be read: {why}; the command is killed"),
                None => return Err(peer.broken("the supervisor died while the command ran")),
            },
        }
    }
}

/// Sends this process's input. One that can't be read ends the connection, and with it the command, rather than the input: `unread` has the reason then.
/// The thread ends with the process: a read of a terminal can't be called off.
fn feed(socket: Arc<UnixStream>, unread: Arc<OnceLock<std::io::Error>>) -> std::io::Result<()> {
    let send = move || {
        let mut buffer = vec![0; CHUNK];
        loop {
            let message = match std::io::stdin().read(&mut buffer) {
                Ok(0) => Feed::End,
                Ok(n) => Feed::Input(BASE64.encode(&buffer[..n])),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    let _first = unread.set(e);
                    // It fails where the supervisor has gone.
                    let _gone = socket.shutdown(std::net::Shutdown::Both);
                    return;
                }
            };
            if peer::send(&socket, &message).is_err() || matches!(message, Feed::End) {
                return;
            }
        }
    };
    thread::start("input", send).map(drop)
}

pub(super) fn write(to: &mut impl Write, bytes: &[u8]) -> anyhow::Result<()> {
    to.write_all(bytes).and_then(|()| to.flush()).context("the output can't be written")
}

/// Connects the terminal to a VM's console, until Ctrl-] or the VM's end.
///
/// # Errors
/// When the VM does not run.
pub fn console(project: &Project, vm: &str) -> anyhow::Result<()> {
    let mut peer = living(project, &Request::Console { vm: vm.to_owned() })?;
    match peer.receive::<Event>()? {
        Some(Event::Done) => {}
        Some(Event::Failed { message }) => anyhow::bail!("{message}"),
        _ => return Err(peer.broken("the supervisor died")),
    }
    let (ahead, socket) = peer.into_raw();
    let raw = RawTerminal::enter()?;
    if let Some(raw) = &raw {
        restore_at_signal(raw)?;
        crate::log::show(&format!("console of '{vm}'; Ctrl-] leaves it\r\n"));
    }
    write(&mut std::io::stdout().lock(), &ahead)?;
    let (sender, ended) = mpsc::channel();
    let mut reader = socket.try_clone()?;
    let output_ended = sender.clone();
    thread::start("console-output", move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(n) = reader.read(&mut buffer) {
            if n == 0 || write(&mut std::io::stdout().lock(), &buffer[..n]).is_err() {
                break;
            }
        }
        let _ = output_ended.send("the VM has ended");
    })?;
    let interactive = raw.is_some();
    thread::start("console-input", move || {
        let mut buffer = [0; 4096];
        while let Ok(n) = std::io::stdin().read(&mut buffer) {
            let typed = &buffer[..n];
            let typed = typed.split(|&b| interactive && b == ESCAPE).next().unwrap_or_default();
            if (&*socket).write_all(typed).is_err() || typed.len() < n {
                break;
            }
            // A script that has no more to type still reads.
            if n == 0 {
                return;
            }
        }
        let _ = sender.send("left");
    })?;
    let why = ended.recv().unwrap_or("left");
    drop(raw);
    if interactive {
        crate::log::show(&format!("\n{why}\n"));
    }
    Ok(())
}

/// A signal ends this process, and with its connection what it does; first the terminal is what it was.
pub(super) fn restore_at_signal(raw: &RawTerminal) -> anyhow::Result<()> {
    let signals = session::signals()?;
    let before = raw.before();
    thread::start("signals", move || {
        if signals.wait() {
            // It fails where the terminal is gone.
            let _gone = rustix::termios::tcsetattr(std::io::stdin(), OptionalActions::Now, &before);
            std::process::exit(INTERRUPTED);
        }
    })?;
    Ok(())
}

/// The terminal in raw mode, until dropped.
pub(super) struct RawTerminal(Termios);

impl RawTerminal {
    /// The terminal's settings before.
    pub(super) fn before(&self) -> Termios {
        self.0.clone()
    }

    /// Enters raw mode where the standard input is a terminal.
    pub(super) fn enter() -> anyhow::Result<Option<RawTerminal>> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = rustix::termios::tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Some(RawTerminal(before)))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = rustix::termios::tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}
