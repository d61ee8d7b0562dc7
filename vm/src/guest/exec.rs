// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands in a guest, through its agent: exit code, input and output as they come.
//!
//! The agent itself hands out a command's output only at its end and at most 16 MiB of it. So the command runs under a few
//! lines of shell. Each of its outputs goes through a FIFO into *segments*, files in memory of a few megabytes, which are
//! read while they grow and emptied when they have been read; the writer waits while too many are full, so that any amount
//! of output needs a bounded amount of the guest's memory. After the command's end the shell writes a random mark behind
//! its output, so that its end is known even where a daemon that it started still has the output open. Input comes
//! through a FIFO too, filled by one short-lived writer per chunk (the agent's own writes to a FIFO can be cut short
//! without notice); a handle of the agent keeps it from ending between two of them.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use qapi::qga;

use crate::guest::agent::{Agent, Calls, Error};

/// Time for one request to the agent; a guest under load on an emulated CPU is slow.
const REQUEST: Duration = Duration::from_secs(60);
/// Bytes of output read at once.
const READ: i64 = 1 << 20;
/// Waits between looks at a command that says nothing.
const PAUSES: [u64; 6] = [1, 2, 5, 10, 20, 40];

/// Makes the folder with the FIFOs and says where.
const PREPARE: &str = r#"umask 077
for base in /run /dev/shm /tmp; do
	d=$base/.tombolo-$1
	mkdir "$d" && mkfifo "$d/0" "$d/1" "$d/2" && echo "$d" && exit 0
done 2>/dev/null
echo "no folder for a command's output: /run, /dev/shm and /tmp can't be written" >&2
exit 1"#;
/// Runs the command ($4 ...) in the folder $1, with input ($2 = 0) or without, and the mark $3. A FIFO that no process has open
/// forgets its content, so the file "open" tells when the input may end. A segment is at most 8 MiB, three may be full.
const RUN: &str = r#"d=$1; in=$2; mark=$3; shift 3
if [ "$in" = 0 ]; then
	exec 3<>"$d/0" 4<"$d/0" 3>&-
	: >"$d/open"
else
	exec 4<"$in"
fi
spool() {
	n=0
	while dd bs=65536 count=128 of="$d/$1.$n" 2>/dev/null && [ -s "$d/$1.$n" ]; do
		n=$((n + 1))
		while [ -s "$d/$1.$((n - 3))" ]; do sleep 0.02; done
	done
}
spool 1 <"$d/1" 4<&- &
spool 2 <"$d/2" 4<&- &
exec 6>"$d/1" 7>"$d/2"
"$@" <&4 4<&- >&6 2>&7 6>&- 7>&-
code=$?
printf %s "$mark" >&6
printf %s "$mark" >&7
exit $code"#;

/// Takes away the folder $1. A spooler that has seen the mark may just begin the next segment: under the old name it can
/// make none any more, and each of the two can have been in the middle of making one.
const SWEEP: &str = r#"mv "$1" "$1.gone" || exit
rm -rf "$1.gone" 2>/dev/null || rm -rf "$1.gone" 2>/dev/null || rm -rf "$1.gone""#;

/// Ends the process $1 with all that it started, as far as it has not been given to init: TERM, and KILL for what is there two seconds later.
/// Stopped from the top down, none of them starts another one meanwhile. Needs nothing but a shell and /proc.
const KILL: &str = r#"children() {
	for status in /proc/[0-9]*/status; do
		while read -r key value rest; do
			case $key in
				Pid:) pid=$value ;;
				PPid:) [ "$value" = "$1" ] && echo "$pid"; break ;;
			esac
		done <"$status"
	done 2>/dev/null
}
# Succeeds if one of them lives. A zombie does not.
alive() {
	for process in $all; do
		while read -r key value rest; do
			[ "$key" = State: ] || continue
			[ "$value" = Z ] || return 0
			break
		done <"/proc/$process/status"
	done 2>/dev/null
	return 1
}
all=
next=$1
while [ "$next" ]; do
	found=
	for process in $next; do
		kill -STOP "$process" 2>/dev/null || continue
		all="$all $process"
		found="$found $(children "$process")"
	done
	next=$(echo $found)
done
[ "$all" ] || exit 0
kill -TERM $all 2>/dev/null
kill -CONT $all 2>/dev/null
looks=0
while alive && [ "$looks" -lt 20 ]; do
	looks=$((looks + 1))
	sleep 0.1
done
kill -KILL $all 2>/dev/null
exit 0"#;

/// A command.
#[derive(Clone, Debug, Default)]
pub struct Exec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// "NAME=VALUE", added to the agent's environment.
    pub env: Vec<String>,
    /// The working folder.
    pub dir: Option<String>,
}

/// Input for a running command.
#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    /// Some bytes.
    Data(Vec<u8>),
    /// There is no more.
    End,
}

/// The end of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its exit code; 128 + n for a signal.
    Code(i32),
    /// The client has gone, and the command was killed.
    Cancelled,
}

/// The output of one [`run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// Output of a short command.
#[derive(Debug)]
pub struct Output {
    /// Exit code.
    pub code: i64,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// Runs a short shell script in the guest, at most for `limit`.
///
/// # Errors
/// Those of the agent, or that it took too long.
pub fn script(agent: &impl Calls, text: &str, args: &[&str], limit: Duration) -> anyhow::Result<Output> {
    let mut arg = vec!["-c".to_owned(), text.to_owned(), "tombolo".to_owned()];
    arg.extend(args.iter().map(|a| (*a).to_owned()));
    let begun = std::time::Instant::now();
    // An agent that hangs does not make a short limit long.
    let request = limit.min(REQUEST);
    let pid = start_within(agent, "/bin/sh", arg, Vec::new(), None, true, request)?;
    let mut pauses = Pauses::default();
    loop {
        let status = agent.call(qga::guest_exec_status { pid }, request)?;
        if status.exited {
            let text =
                |data: Option<Vec<u8>>| String::from_utf8_lossy(&data.unwrap_or_default()).into_owned();
            return Ok(Output {
                code: code_of(&status).into(),
                out: text(status.out_data),
                err: text(status.err_data),
            });
        }
        if begun.elapsed() > limit {
            anyhow::bail!(
                "a command in the guest did not end within {} s: {}",
                limit.as_secs(),
                text.lines().next().unwrap_or_default()
            );
        }
        pauses.next();
    }
}

/// Makes the folder for one command in the guest.
///
/// # Errors
/// Those of the agent; the guest has no folder that can be written.
pub(super) fn prepare(agent: &Agent) -> anyhow::Result<String> {
    let prepared = script(agent, PREPARE, &[&crate::project::state::random_hex(8)], REQUEST)?;
    anyhow::ensure!(prepared.code == 0, "the guest can't run the command: {}", prepared.err.trim());
    Ok(prepared.out.trim().to_owned())
}

/// Takes a command's folder away; what is returned tells why it stays.
///
/// # Errors
/// Those of the agent.
pub(super) fn sweep(agent: &Agent, dir: &str) -> anyhow::Result<Option<String>> {
    let swept = script(agent, SWEEP, &[dir], REQUEST)?;
    Ok((swept.code != 0).then(|| format!("tombolo: the guest keeps {dir}: {}\n", swept.err.trim())))
}

/// Ends a process of the guest with all that it started.
///
/// # Errors
/// Those of the agent.
pub(super) fn kill(agent: &Agent, pid: i64) -> anyhow::Result<()> {
    script(agent, KILL, &[&pid.to_string()], REQUEST).map(drop)
}

pub(super) fn start(
    agent: &Agent,
    path: &str,
    arg: Vec<String>,
    env: Vec<String>,
    input: Option<Vec<u8>>,
    capture: bool,
) -> Result<i64, Error> {
    start_within(agent, path, arg, env, input, capture, REQUEST)
}

fn start_within(
    agent: &impl Calls,
    path: &str,
    arg: Vec<String>,
    env: Vec<String>,
    input: Option<Vec<u8>>,
    capture: bool,
    limit: Duration,
) -> Result<i64, Error> {
    let command = qga::guest_exec {
        path: path.to_owned(),
        arg: Some(arg),
        env: (!env.is_empty()).then_some(env),
        input_data: input,
        capture_output: Some(qga::GuestExecCaptureOutput::flag(capture)),
    };
    agent.call(command, limit).map(|r| r.pid)
}

pub(super) fn code_of(status: &qga::GuestExecStatus) -> i32 {
    let code = match (status.exitcode, status.signal) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 255,
    };
    i32::try_from(code).unwrap_or(255)
}

#[derive(Default)]
struct Pauses {
    quiet: usize,
}

impl Pauses {
    fn reset(&mut self) {
        self.quiet = 0;
    }

    fn next(&mut self) {
        std::thread::sleep(Duration::from_millis(PAUSES[self.quiet.min(PAUSES.len() - 1)]));
        self.quiet += 1;
    }
}

/// One of the two outputs: its segments one after the other, up to the mark.
struct Tail {
    stream: Stream,
    /// Path of the segments without their number.
    base: String,
    segment: u64,
    handle: Option<i64>,
    mark: Mark,
}

impl Tail {
    fn new(dir: &str, stream: Stream, mark: &str) -> Tail {
        let base = format!("{dir}/{}", if stream == Stream::Out { 1 } else { 2 });
        Tail { stream, base, segment: 0, handle: None, mark: Mark::new(mark) }
    }

    fn open(agent: &Agent, path: String, mode: &str) -> Result<i64, Error> {
        agent.call(qga::guest_file_open { path, mode: Some(mode.to_owned()) }, REQUEST)
    }

    /// Passes on what is there, at most one chunk: whether there was something.
    fn pass(&mut self, agent: &Agent, output: &mut dyn FnMut(Stream, &[u8])) -> Result<bool, Error> {
        if self.mark.found {
            return Ok(false);
        }
        let handle = match self.handle {
            Some(handle) => handle,
            // The first segment is not there before the command has begun.
            None => match Tail::open(agent, format!("{}.{}", self.base, self.segment), "r") {
                Ok(handle) => *self.handle.insert(handle),
                Err(Error::Refused { .. }) => return Ok(false),
                Err(e) => return Err(e),
            },
        };
        if self.read(agent, handle, output)? {
            return Ok(true);
        }
        // The next segment is begun when this one is complete.
        let next = match Tail::open(agent, format!("{}.{}", self.base, self.segment + 1), "r") {
            Ok(next) => next,
            Err(Error::Refused { .. }) => return Ok(false),
            Err(e) => return Err(e),
        };
        while self.read(agent, handle, output)? {}
        agent.call(qga::guest_file_close { handle }, REQUEST)?;
        // Opening it for writing empties it.
        let emptied = Tail::open(agent, format!("{}.{}", self.base, self.segment), "w")?;
        agent.call(qga::guest_file_close { handle: emptied }, REQUEST)?;
        self.handle = Some(next);
        self.segment += 1;
        Ok(true)
    }

    fn read(
        &mut self,
        agent: &Agent,
        handle: i64,
        output: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<bool, Error> {
        let read = agent.call(qga::guest_file_read { handle, count: Some(READ) }, REQUEST)?;
        let data = self.mark.take(read.buf_b64);
        if !data.is_empty() {
            output(self.stream, &data);
        }
        Ok(read.count > 0)
    }

    fn close(&mut self, agent: &Agent) -> Result<(), Error> {
        match self.handle.take() {
            Some(handle) => agent.call(qga::guest_file_close { handle }, REQUEST).map(|_| ()),
            None => Ok(()),
        }
    }
}

/// Looks for the mark at the end of an output. Only what may be the mark's beginning is held back.
struct Mark {
    mark: Vec<u8>,
    held: Vec<u8>,
    found: bool,
}

impl Mark {
    fn new(mark: &str) -> Mark {
        Mark { mark: mark.as_bytes().to_vec(), held: Vec::new(), found: false }
    }

    /// Returns the output that can be passed on.
    fn take(&mut self, data: Vec<u8>) -> Vec<u8> {
        if self.found {
            return Vec::new();
        }
        let mut all = std::mem::take(&mut self.held);
        all.extend(data);
        if let Some(at) = all.windows(self.mark.len()).position(|w| w == self.mark) {
            self.found = true;
            all.truncate(at);
            return all;
        }
        let longest = self.mark.len().min(all.len() + 1) - 1;
        let begun = (1..=longest).rev().find(|&n| all.ends_with(&self.mark[..n])).unwrap_or(0);
        self.held = all.split_off(all.len() - begun);
        all
    }
}

/// Runs a command; `input` feeds it (`None`: it reads /dev/null), `output` gets what it says, and it is killed when
/// `cancelled` says so.
///
/// # Errors
/// Those of the agent.
pub fn run(
    agent: &Agent,
    exec: &Exec,
    input: Option<&Receiver<Input>>,
    cancelled: &dyn Fn() -> bool,
    output: &mut dyn FnMut(Stream, &[u8]),
) -> anyhow::Result<Ended> {
    let dir = prepare(agent)?;
    let result = run_in(agent, &dir, exec, input, cancelled, output);
    // Also after a failure: the agent may still answer.
    let swept = sweep(agent, &dir);
    let ended = result?;
    if let Some(kept) = swept? {
        output(Stream::Err, kept.as_bytes());
    }
    Ok(ended)
}

fn run_in(
    agent: &Agent,
    dir: &str,
    exec: &Exec,
    input: Option<&Receiver<Input>>,
    cancelled: &dyn Fn() -> bool,
    output: &mut dyn FnMut(Stream, &[u8]),
) -> anyhow::Result<Ended> {
    let mark = crate::project::state::random_hex(16);
    let mut tails = [Tail::new(dir, Stream::Out, &mark), Tail::new(dir, Stream::Err, &mark)];
    let close = |handle: i64| agent.call(qga::guest_file_close { handle }, REQUEST).map(|_| ());
    // "r+" opens a FIFO at once and keeps it from ending between two writers.
    let mut fifo = match input {
        Some(_) => Some(Tail::open(agent, format!("{dir}/0"), "r+")?),
        None => None,
    };
    let mut arg = vec!["-c".to_owned(), RUN.to_owned(), "tombolo".to_owned(), dir.to_owned()];
    arg.push(if input.is_some() { "0" } else { "/dev/null" }.to_owned());
    arg.push(mark);
    if let Some(folder) = &exec.dir {
        let inner = r#"cd "$1" || exit 126; shift; exec "$@""#;
        arg.extend(["/bin/sh", "-c", inner, "tombolo", folder].map(str::to_owned));
    }
    arg.extend(exec.argv.iter().cloned());
    let pid = start(agent, "/bin/sh", arg, exec.env.clone(), None, false)?;

    let mut writer: Option<i64> = None;
    let mut at_end = false;
    let mut code = None;
    let mut pauses = Pauses::default();
    let ended = loop {
        let mut busy = false;
        for tail in &mut tails {
            busy |= tail.pass(agent, output)?;
        }
        if let Some(w) = writer {
            if agent.call(qga::guest_exec_status { pid: w }, REQUEST)?.exited {
                writer = None;
            }
        }
        if let (Some(handle), None, true) = (fifo, writer, at_end) {
            if let Ok(open) = Tail::open(agent, format!("{dir}/open"), "r") {
                close(open)?;
                close(handle)?;
                fifo = None;
            }
        } else if let (Some(_), None, Some(input)) = (fifo, writer, input) {
            match input.try_recv() {
                Ok(Input::Data(data)) => {
                    let arg =
                        vec!["-c".into(), "exec cat >\"$1\"".into(), "tombolo".into(), format!("{dir}/0")];
                    writer = Some(start(agent, "/bin/sh", arg, Vec::new(), Some(data), false)?);
                    busy = true;
                }
                Ok(Input::End) => at_end = true,
                // The end of the connection is for 'cancelled' to tell.
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => {}
            }
        }
        if cancelled() {
            kill(agent, pid)?;
            break Ended::Cancelled;
        }
        if busy {
            pauses.reset();
            continue;
        }
        if let Some(code) = code {
            if tails.iter().all(|t| t.mark.found) {
                break Ended::Code(code);
            }
        } else {
            let status = agent.call(qga::guest_exec_status { pid }, REQUEST)?;
            if status.exited {
                code = Some(code_of(&status));
                if status.signal.is_some() {
                    anyhow::bail!(
                        "the shell around the command was killed in the guest (signal {:?})",
                        status.signal
                    );
                }
                continue;
            }
        }
        pauses.next();
    };
    // Without a reader a writer that still waits gets EPIPE.
    for tail in &mut tails {
        tail.close(agent)?;
    }
    if let Some(handle) = fifo {
        close(handle)?;
    }
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(mark: &mut Mark, parts: &[&str]) -> Vec<String> {
        parts.iter().map(|p| String::from_utf8(mark.take(p.as_bytes().to_vec())).unwrap()).collect()
    }

    /// Runs `text` as the guest would, with `arg` as $1.
    fn shell(text: &str, arg: &std::path::Path) -> std::process::Command {
        let mut command = std::process::Command::new("/bin/sh");
        command.args(["-c", text, "tombolo"]).arg(arg);
        command
    }

    #[test]
    fn a_folder_goes_while_both_spoolers_still_begin_segments() {
        let parent = tempfile::tempdir().unwrap();
        for round in 0..100 {
            let dir = parent.path().join(round.to_string());
            std::fs::create_dir(&dir).unwrap();
            let spool = r#"n=0; while [ $n -lt 100000 ] && : >"$1/$$.$n"; do n=$((n + 1)); done 2>/dev/null"#;
            let spoolers: Vec<_> = (0..2).map(|_| shell(spool, &dir).spawn().unwrap()).collect();
            while std::fs::read_dir(&dir).unwrap().count() < 20 {
                std::thread::yield_now();
            }
            let swept = shell(SWEEP, &dir).output().unwrap();
            for mut spooler in spoolers {
                spooler.wait().unwrap();
            }
            assert!(swept.status.success(), "{}", String::from_utf8_lossy(&swept.stderr));
            assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn output_ends_at_the_mark_and_only_what_may_be_its_beginning_is_held_back() {
        let mut mark = Mark::new("abac");
        assert_eq!(passed(&mut mark, &["xyz", "ab", "ab", "ac", "more"]), ["xyz", "", "ab", "", ""]);
        assert!(mark.found);
        let mut mark = Mark::new("abac");
        assert_eq!(passed(&mut mark, &["a", "a", "b!", "whole abac rest"]), ["", "a", "ab!", "whole "]);
        assert!(mark.found);
        let mut mark = Mark::new("abac");
        assert_eq!(passed(&mut mark, &["", "abab"]), ["", "ab"]);
        assert!(!mark.found);
    }
}
