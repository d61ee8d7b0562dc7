// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One job: questions to the guests, the plan, the nodes made ready, the launcher, and the end, which is the same whatever ended: every node ends what it has.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::json;
use tombolo_mpi_node::frame::{Fields, Frame, Kind, LAUNCHER, PIECE, Program};
use tombolo_vm::commands::client;
use tombolo_vm::compose::Project;
use tombolo_vm::project::control::Status;

use crate::cli::RunOptions;
use crate::node::{Heard, Node};
use crate::plan::{self, Plan, Vm, Wish};

/// Time for the launcher to end after a rank was killed.
const LAUNCHER_ENDS: Duration = Duration::from_secs(1);
/// Time for ranks to be heard of after the launcher ended.
const LAST_WORDS: Duration = Duration::from_millis(700);
/// Time for a node to end what it has.
const ENDING: Duration = Duration::from_secs(15);
/// Tries to find process numbers that nobody takes meanwhile.
const TRIES: u32 = 8;
/// The exit code of a job that Ctrl-C has ended.
const INTERRUPTED: i32 = 130;

/// Something that happens to a job.
enum Event {
    /// A node, by the number of its VM.
    Node(usize, Heard),
    /// Input for the launcher; empty: its end.
    Input(Vec<u8>),
    /// A signal to this process.
    Signal(i32),
}

/// A job whose nodes run.
struct Job<'a> {
    options: &'a RunOptions,
    json: bool,
    names: Vec<String>,
    nodes: Vec<Node>,
    /// The nodes that have not ended.
    living: Vec<bool>,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

/// Runs a job: its exit code.
///
/// # Errors
/// Why it did not begin.
pub fn run(options: &RunOptions, json: bool) -> anyhow::Result<ExitCode> {
    let project = options.file.identify()?;
    let status = client::status(&project)?;
    let names = vms(options, &status)?;
    let zone = zone(options.zone.as_deref(), &status, &names)?;
    let mut below = i32::MAX;
    for _ in 0..TRIES {
        let mut job = Job::start(options, json, &project, &names)?;
        let result = job.prepare(&status, &zone, below).and_then(|prepared| match prepared {
            Ok(plan) => job.follow(&plan).map(Ok),
            Err(base) => Ok(Err(base)),
        });
        job.end();
        match result? {
            Ok(code) => return Ok(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1))),
            Err(base) => below = base,
        }
    }
    bail!("processes in the VMs took the ranks' process numbers {TRIES} times; try again")
}

/// The VMs of a job, which run.
fn vms(options: &RunOptions, status: &Status) -> anyhow::Result<Vec<String>> {
    let running = |name: &str| status.vms.iter().find(|vm| vm.name == name);
    let mut names = options.vms.clone();
    if names.is_empty() {
        names = status.vms.iter().filter(|vm| vm.state == "up").map(|vm| vm.name.clone()).collect();
    }
    ensure!(
        !names.is_empty(),
        "no VM of the project '{}' is up; start them with 'tombolo up'",
        status.project
    );
    for (at, name) in names.iter().enumerate() {
        let vm =
            running(name).with_context(|| format!("the project '{}' runs no VM '{name}'", status.project))?;
        ensure!(vm.state == "up", "the VM '{name}' is not up ({})", vm.state);
        ensure!(!names[..at].contains(name), "--vms names '{name}' twice");
    }
    Ok(names)
}

/// The name and the identity of the zone that the VMs have in common, of several the one of the name `wanted`.
///
/// # Errors
/// There is no such zone, or no single one.
pub fn zone(wanted: Option<&str>, status: &Status, names: &[String]) -> anyhow::Result<(String, String)> {
    let members = status.vms.iter().filter(|vm| names.contains(&vm.name));
    let common: Vec<_> =
        status.zones.iter().filter(|zone| members.clone().all(|vm| vm.zones.contains(&zone.name))).collect();
    let zone = match (wanted, &common[..]) {
        (Some(name), _) => *common
            .iter()
            .find(|zone| zone.name == name)
            .with_context(|| format!("not all of {} are members of a zone '{name}'", names.join(", ")))?,
        (None, [zone]) => *zone,
        (None, []) => bail!(
            "the VMs {} have no zone in common; give each `zones = {{ NAME = {{ mount = \"/mnt/NAME\" }} }}` of one zone with files",
            names.join(", ")
        ),
        (None, several) => {
            let several: Vec<_> = several.iter().map(|zone| zone.name.as_str()).collect();
            bail!("the VMs have several zones in common ({}); say which with --zone", several.join(", "))
        }
    };
    Ok((zone.name.clone(), zone.uuid.clone()))
}

impl<'a> Job<'a> {
    /// Starts the nodes.
    fn start(
        options: &'a RunOptions,
        json: bool,
        project: &Project,
        names: &[String],
    ) -> anyhow::Result<Job<'a>> {
        let (sender, events) = mpsc::channel();
        let mut nodes = Vec::new();
        for (number, name) in names.iter().enumerate() {
            let tell = sender.clone();
            nodes.push(Node::start(project, name, move |heard| drop(tell.send(Event::Node(number, heard))))?);
        }
        let living = vec![true; nodes.len()];
        Ok(Job { options, json, names: names.to_vec(), nodes, living, events, sender })
    }

    /// Asks the guests, plans, and makes the nodes ready. Returns the process number at which it must lie below in the next try, if one was taken.
    fn prepare(
        &mut self,
        status: &Status,
        zone: &(String, String),
        below: i32,
    ) -> anyhow::Result<Result<Plan, i32>> {
        // What is sent before a node says that it reads, its shell may take.
        self.answers()?;
        let question = Fields::default()
            .with("zone", &zone.1)
            .with("launcher", self.options.launcher.as_deref().unwrap_or_default())
            .with("program", &self.options.command[0]);
        let question = self.options.dir.iter().fold(question, |question, dir| question.with("dir", dir));
        self.nodes.iter().for_each(|node| node.send(&Frame::new(Kind::Ask, 0, question.encode())));
        let facts = self.answers()?;
        let placed = |name: &String| status.vms.iter().any(|vm| vm.name == *name && vm.placement.is_some());
        let vms: Vec<Vm> = (self.names.iter().zip(facts))
            .map(|(name, (_, body))| Vm {
                name: name.clone(),
                facts: Fields::decode(&body),
                placed: placed(name),
            })
            .collect();
        let wish = Wish {
            ranks: self.options.ranks,
            ppn: self.options.ppn,
            launcher: self.options.launcher.clone(),
            command: self.options.command.clone(),
        };
        let plan = plan::plan(&wish, &vms, &zone.0, below)?;
        self.send_plan(&plan)?;
        for (name, (kind, body)) in self.names.clone().iter().zip(self.answers()?) {
            match kind {
                Kind::Ready => {}
                Kind::Collides => return Ok(Err(plan.base)),
                _ => bail!("the VM '{name}' can't take ranks: {}", String::from_utf8_lossy(&body)),
            }
        }
        Ok(Ok(plan))
    }

    fn send_plan(&self, plan: &Plan) -> anyhow::Result<()> {
        let random =
            |path: &str| std::fs::read_to_string(path).with_context(|| format!("{path} can't be read"));
        let boot_id = random("/proc/sys/kernel/random/uuid")?.trim().to_owned();
        let place: Vec<String> = (plan.shares.iter().enumerate())
            .flat_map(|(node, share)| (0..*share).map(move |_| node.to_string()))
            .collect();
        let common = Fields::default()
            .with("job", boot_id.replace('-', ""))
            .with("nodes", self.nodes.len())
            .with("place", place.join(" "))
            .with("base", plan.base)
            .with("boot_id", boot_id);
        for (number, node) in self.nodes.iter().enumerate() {
            let own = common.clone().with("node", number).with("mount", &plan.mounts[number]);
            let own = plan.cpus[number].iter().fold(own, |own, cpus| {
                own.with("cpus", cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
            });
            node.send(&Frame::new(Kind::Prepare, 0, own.encode()));
        }
        Ok(())
    }

    /// One frame from each node.
    fn answers(&mut self) -> anyhow::Result<Vec<(Kind, Vec<u8>)>> {
        let mut answers = BTreeMap::new();
        while answers.len() < self.nodes.len() {
            if let Event::Node(number, heard) = self.events.recv()? {
                match heard {
                    Heard::Frame(frame) => drop(answers.insert(number, (frame.kind, frame.body))),
                    Heard::Ended(why) => {
                        self.living[number] = false;
                        let why = why.unwrap_or_else(|| "it ended without a word".into());
                        bail!("the VM '{}' can't take part in a job: {why}", self.names[number]);
                    }
                }
            }
        }
        Ok(answers.into_values().collect())
    }

    /// Has the launcher run, and follows the job to its end: its exit code.
    fn follow(&mut self, plan: &Plan) -> anyhow::Result<i32> {
        let words = plan.library.command(&plan.launcher, self.options.ranks, &self.options.command);
        let mut env = plan.library.variables(plan.crowded);
        env.extend(self.options.label.then(|| "TOMBOLO_MPI_LABEL=1".to_owned()));
        env.extend(self.options.env.iter().cloned());
        let bytes = |words: Vec<String>| words.into_iter().map(String::into_bytes).collect();
        let program = Program { dir: plan.dir.clone().into_bytes(), argv: bytes(words), env: bytes(env) };
        self.say(&json!({ "event": "starts", "library": plan.library.to_string(), "version": plan.version,
            "vms": self.names, "ranks": plan.shares }))?;
        self.nodes[0].send(&Frame::new(Kind::Start, LAUNCHER, program.encode()));
        let taken = feed(self.sender.clone())?;
        signals(self.sender.clone())?;
        let mut course = Course::default();
        while !course.is_over() {
            let left =
                course.deadline.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            match self.events.recv_timeout(left) {
                Ok(Event::Input(bytes)) => self.nodes[0].send(&Frame::new(Kind::Input, LAUNCHER, bytes)),
                Ok(Event::Signal(number)) => {
                    if let Some(code) = self.signal(number) {
                        return Ok(code);
                    }
                }
                Ok(Event::Node(number, Heard::Ended(why))) => {
                    self.living[number] = false;
                    let why = why.map_or_else(String::new, |why| format!(": {why}"));
                    let (vm, ranks) = (&self.names[number], ranks(plan, number));
                    self.complain(&format!("the VM '{vm}' with {ranks} is lost, and the job with it{why}"))?;
                    return Ok(1);
                }
                Ok(Event::Node(number, Heard::Frame(frame))) => match (frame.kind, frame.id) {
                    (Kind::Taken, LAUNCHER) => drop(taken.send(())),
                    (Kind::End, _) => {
                        let why = String::from_utf8_lossy(&frame.body).into_owned();
                        self.complain(&format!("the VM '{}' has ended the job: {why}", self.names[number]))?;
                        return Ok(1);
                    }
                    _ => self.hear(plan, &frame, &mut course)?,
                },
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => bail!("the job's threads have ended"),
            }
        }
        Ok(course.code())
    }

    /// Takes note of what a node says of ranks and the launcher.
    fn hear(&self, plan: &Plan, frame: &Frame, course: &mut Course) -> anyhow::Result<()> {
        match (frame.kind, frame.id) {
            (Kind::Out | Kind::Err, LAUNCHER) => self.output(frame),
            (Kind::Began, rank) if rank != LAUNCHER => {
                course.running += 1;
                let pid: u32 = String::from_utf8_lossy(&frame.body).parse().unwrap_or(0);
                let vm = &self.names[vm_of(plan, rank)];
                self.say(&json!({ "event": "began", "rank": rank, "vm": vm, "pid": pid }))
            }
            (Kind::Exit, LAUNCHER) => {
                course.launcher = Some(exit_code(status(frame)));
                course.wait_at_most(LAST_WORDS);
                Ok(())
            }
            (Kind::Exit, rank) => {
                course.running = course.running.saturating_sub(1);
                if let Some(killed) = self.rank_ended(plan, rank, frame)? {
                    course.killed.get_or_insert(killed);
                    course.wait_at_most(LAUNCHER_ENDS);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Passes a signal on, or ends the job by it: the exit code.
    fn signal(&self, number: i32) -> Option<i32> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        match number {
            SIGINT => Some(INTERRUPTED),
            SIGTERM | SIGHUP => Some(128 + number),
            _ => {
                let all = 0..self.options.ranks;
                let body = [u8::try_from(number).unwrap_or(0)];
                all.for_each(|rank| self.nodes[0].send(&Frame::new(Kind::Signal, rank, body)));
                None
            }
        }
    }

    /// Tells of a rank that ended. Returns the job's exit code if the rank was killed, and not by its launcher.
    fn rank_ended(&self, plan: &Plan, rank: u32, frame: &Frame) -> anyhow::Result<Option<i32>> {
        let status = status(frame);
        let vm = &self.names[vm_of(plan, rank)];
        let signal = status & 0x7f;
        self.say(&json!({ "event": "ended", "rank": rank, "vm": vm,
            "code": (signal == 0).then_some(exit_code(status)), "signal": (signal != 0).then_some(signal) }))?;
        if signal == 0 || frame.body.len() > 4 {
            return Ok(None);
        }
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
        self.complain(&format!(
            "rank {rank} in the VM '{vm}' was killed by signal {signal} ({name}), and the job with it"
        ))?;
        Ok(Some(exit_code(status)))
    }

    /// Writes a piece of the launcher's output, and asks for the next.
    fn output(&self, frame: &Frame) -> anyhow::Result<()> {
        let is_error = frame.kind == Kind::Err;
        if self.json {
            let text = String::from_utf8_lossy(&frame.body);
            if !text.is_empty() {
                self.say(&json!({ "event": if is_error { "err" } else { "out" }, "text": text }))?;
            }
        } else if is_error {
            std::io::stderr().write_all(&frame.body)?;
        } else {
            let mut out = std::io::stdout().lock();
            out.write_all(&frame.body).and_then(|()| out.flush())?;
        }
        self.nodes[0].send(&Frame::new(Kind::Taken, LAUNCHER, [if is_error { 2 } else { 1 }]));
        Ok(())
    }

    /// Writes a line for scripts.
    fn say(&self, line: &serde_json::Value) -> anyhow::Result<()> {
        if self.json {
            let mut out = std::io::stdout().lock();
            writeln!(out, "{line}").and_then(|()| out.flush())?;
        }
        Ok(())
    }

    /// Tells what has gone wrong.
    fn complain(&self, text: &str) -> anyhow::Result<()> {
        if self.json {
            self.say(&json!({ "event": "failed", "text": text }))
        } else {
            tombolo_vm::say!("{text}");
            Ok(())
        }
    }

    /// Has all nodes end what they have, and waits for them.
    fn end(mut self) {
        for (node, _) in self.nodes.iter().zip(&self.living).filter(|(_, lives)| **lives) {
            node.send(&Frame::new(Kind::End, 0, ""));
        }
        let end = Instant::now() + ENDING;
        while self.living.contains(&true) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Event::Node(number, Heard::Ended(_))) => self.living[number] = false,
                Ok(_) => {}
                // The supervisor ends what is left when this process has gone.
                Err(_) => return,
            }
        }
    }
}

/// How far a job is.
#[derive(Debug, Default)]
struct Course {
    /// Ranks that run.
    running: u32,
    /// The exit code of the first rank that was killed.
    killed: Option<i32>,
    /// The exit code of the launcher.
    launcher: Option<i32>,
    /// When it is no longer waited for.
    deadline: Option<Instant>,
}

impl Course {
    fn is_over(&self) -> bool {
        self.launcher.is_some() && self.running == 0
    }

    fn wait_at_most(&mut self, longest: Duration) {
        self.deadline.get_or_insert_with(|| Instant::now() + longest);
    }

    /// The job's exit code: that of a rank that was killed, or the launcher's.
    fn code(&self) -> i32 {
        self.killed.or(self.launcher).unwrap_or(1)
    }
}

/// The number of the VM that has this rank.
fn vm_of(plan: &Plan, rank: u32) -> usize {
    let mut end = 0;
    let before = |share: &&u32| {
        end += **share;
        end <= rank
    };
    plan.shares.iter().take_while(before).count().min(plan.shares.len() - 1)
}

/// The ranks of a VM, in words.
fn ranks(plan: &Plan, vm: usize) -> String {
    let first: u32 = plan.shares[..vm].iter().sum();
    match plan.shares[vm] {
        1 => format!("rank {first}"),
        count => format!("ranks {first} to {}", first + count - 1),
    }
}

/// The status of a rank that ended, as of waitpid(2).
fn status(frame: &Frame) -> i32 {
    let bytes = frame.body.get(..4).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(1 << 8, i32::from_le_bytes)
}

/// The exit code of a status, as shells have it.
fn exit_code(status: i32) -> i32 {
    match status & 0x7f {
        0 => (status >> 8) & 0xff,
        signal => 128 + signal,
    }
}

/// Passes the standard input on, a piece when the one before was taken. A job in the background has none of a terminal's.
fn feed(events: Sender<Event>) -> anyhow::Result<Sender<()>> {
    let (taken, asked) = mpsc::channel();
    tombolo_vm::thread::start("input", move || {
        let mut piece = vec![0; PIECE];
        loop {
            let n = match std::io::stdin().read(&mut piece) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                n => n.unwrap_or(0),
            };
            if events.send(Event::Input(piece[..n].to_vec())).is_err() || n == 0 || asked.recv().is_err() {
                return;
            }
        }
    })?;
    Ok(taken)
}

/// Passes signals to this process on.
fn signals(events: Sender<Event>) -> anyhow::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
    for number in [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2] {
        let (mut reader, writer) = UnixStream::pair()?;
        signal_hook::low_level::pipe::register(number, writer)?;
        let events = events.clone();
        tombolo_vm::thread::start("signals", move || {
            let mut byte = [0];
            while reader.read_exact(&mut byte).is_ok() && events.send(Event::Signal(number)).is_ok() {}
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launcher::Library;

    #[test]
    fn a_rank_is_found_in_its_vm_and_a_vms_ranks_are_told() {
        let plan = Plan {
            library: Library::Mpich,
            launcher: String::new(),
            version: String::new(),
            shares: vec![3, 1, 2],
            base: 1,
            dir: String::new(),
            mounts: Vec::new(),
            cpus: Vec::new(),
            crowded: false,
        };
        assert_eq!([0, 2, 3, 4, 5].map(|rank| vm_of(&plan, rank)), [0, 0, 1, 2, 2]);
        assert_eq!([0, 1, 2].map(|vm| ranks(&plan, vm)), ["ranks 0 to 2", "rank 3", "ranks 4 to 5"]);
    }

    #[test]
    fn a_signal_is_an_exit_code_as_in_a_shell() {
        assert_eq!([exit_code(0), exit_code(7 << 8), exit_code(9)], [0, 7, 137]);
    }
}
