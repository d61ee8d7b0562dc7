// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands in a guest, through its agent: exit code, input and output as they come.
//!
//! The agent itself hands out a command's output only at its end and at most 16 MiB of it. So the command runs under a few
//! lines of shell. Each of its outputs goes through a FIFO into *segments*, files in memory of a few megabytes, which are
//! read while they grow and emptied when they have been read; the writer waits while too many are full, so that any amount
//! of output needs a bounded amount of the guest's memory. After the command's end the shell writes a random mark behind
//! its output, so that its end is known even where a daemon that it started still has the output open. Input comes
//! through a virtio-serial port of its own, without the agent.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use qapi::qga;

use crate::guest::agent::{Agent, Calls, Error};
use crate::machine::port::Port;
use crate::project::state::random_hex;
use output::Tail;

mod input;
mod output;

/// Time for one request to the agent; a guest under load on an emulated CPU is slow.
const REQUEST: Duration = Duration::from_secs(60);
/// Waits between looks at a command that says nothing.
const PAUSES: [u64; 6] = [1, 2, 5, 10, 20, 40];

/// Makes the folder with the FIFOs and says where.
const PREPARE: &str = r#"umask 077
for base in /run /dev/shm /tmp; do
	d=$base/.tombolo-$1
	mkdir "$d" && mkfifo "$d/1" "$d/2" && echo "$d" && exit 0
done 2>/dev/null
echo "no folder for a command's output: /run, /dev/shm and /tmp can't be written" >&2
exit 1"#;
/// A function for a guest's shell: sets `node` to the device of the port named $1. A port's node and its name come a moment after its device.
pub(super) const FIND_PORT: &str = r#"find_port() {
	looks=0
	while :; do
		for name in /sys/class/virtio-ports/*/name; do
			[ -e "$name" ] && read -r it <"$name" && [ "$it" = "$1" ] || continue
			node=${name%/name}
			node=/dev/${node##*/}
			[ -c "$node" ] && return
		done
		looks=$((looks + 1))
		[ "$looks" -lt 3000 ] || break
		sleep 0.02
	done
	echo "the guest has not seen the port $1 within a minute: it is too busy, try again" >&2
	return 1
}
"#;
/// Runs the command ($4 ...) in the folder $1, with the port $2 as its input (empty: none), and the mark $3. A port that the host has not opened yet
/// reads as ended, so a line is waited for. A segment is at most 8 MiB, three may be full.
const RUN: &str = r#"d=$1 in=$2 mark=$3
shift 3
spool() {
	n=0
	while dd bs=65536 count=128 of="$d/$1.$n" 2>/dev/null && [ -s "$d/$1.$n" ]; do
		n=$((n + 1))
		while [ -s "$d/$1.$((n - 3))" ]; do sleep 0.02; done
	done
}
spool 1 <"$d/1" &
spool 2 <"$d/2" &
exec 6>"$d/1" 7>"$d/2"
node=/dev/null code=125
if [ -z "$in" ] || find_port "$in" 2>&7; then
	exec 4<"$node"
	[ -z "$in" ] || until read -r it <&4; do sleep 0.02; done
	"$@" <&4 4<&- >&6 2>&7 6>&- 7>&-
	code=$?
fi
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
    let prepared = script(agent, PREPARE, &[&random_hex(8)], REQUEST)?;
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

/// Opens a file of the guest. Returns the agent's handle.
fn open(agent: &Agent, path: String, mode: &str) -> Result<i64, Error> {
    agent.call(qga::guest_file_open { path, mode: Some(mode.to_owned()) }, REQUEST)
}

fn close(agent: &Agent, handle: i64) -> Result<(), Error> {
    agent.call(qga::guest_file_close { handle }, REQUEST).map(drop)
}

pub(super) fn start_within(
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
        (None, Some(signal)) => signal.saturating_add(128),
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

/// Runs a command; `input` feeds it through a new port of the VM (`None`: it reads /dev/null), `output` gets what it says, and it is killed when
/// `cancelled` says so.
///
/// # Errors
/// Those of the agent.
pub fn run(
    agent: &Agent,
    exec: &Exec,
    input: Option<(&Port<'_>, Receiver<Input>)>,
    cancelled: &dyn Fn() -> bool,
    output: &mut dyn FnMut(Stream, &[u8]),
) -> anyhow::Result<Ended> {
    let dir = prepare(agent)?;
    let port = input.as_ref().map(|(port, _)| *port);
    let over = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        if let Some((port, input)) = input {
            let over = &over;
            // A VM that has ended is noticed by the agent's end.
            crate::thread::start_in(scope, "exec-feed", move || input::feed(port.socket(), &input, over))?;
        }
        let result = run_in(agent, &dir, exec, port, cancelled, output);
        over.store(true, Ordering::Release);
        result
    });
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
    input: Option<&Port<'_>>,
    cancelled: &dyn Fn() -> bool,
    output: &mut dyn FnMut(Stream, &[u8]),
) -> anyhow::Result<Ended> {
    let mut command = Running::start(agent, dir, exec, input)?;
    let mut pauses = Pauses::default();
    let ended = loop {
        let busy = command.pass_output(output)?;
        if cancelled() {
            kill(agent, command.pid)?;
            break Ended::Cancelled;
        }
        if busy {
            pauses.reset();
            continue;
        }
        let known = command.code;
        match command.exit_code()? {
            Some(code) if command.has_all_output() => break Ended::Code(code),
            // The end of its output may have come before its exit code.
            Some(_) if known.is_none() => continue,
            _ => pauses.next(),
        }
    };
    command.close()?;
    Ok(ended)
}

/// A command that runs in the guest, under [`RUN`].
struct Running<'a> {
    agent: &'a Agent,
    /// The process of the shell around the command.
    pid: i64,
    outputs: [Tail; 2],
    /// The exit code, once the command has ended.
    code: Option<i32>,
}

impl<'a> Running<'a> {
    fn start(
        agent: &'a Agent,
        dir: &str,
        exec: &Exec,
        input: Option<&Port<'_>>,
    ) -> anyhow::Result<Running<'a>> {
        let mark = random_hex(16);
        let outputs = [Tail::new(dir, Stream::Out, &mark), Tail::new(dir, Stream::Err, &mark)];
        let mut arg =
            vec!["-c".to_owned(), format!("{FIND_PORT}{RUN}"), "tombolo".to_owned(), dir.to_owned()];
        arg.push(input.map_or("", Port::name).to_owned());
        arg.push(mark);
        if let Some(folder) = &exec.dir {
            let inner = r#"cd "$1" || exit 126; shift; exec "$@""#;
            arg.extend(["/bin/sh", "-c", inner, "tombolo", folder].map(str::to_owned));
        }
        arg.extend(exec.argv.iter().cloned());
        let pid = start(agent, "/bin/sh", arg, exec.env.clone(), None, false)?;
        Ok(Running { agent, pid, outputs, code: None })
    }

    /// Passes on the output that is there. Returns whether there was any.
    fn pass_output(&mut self, output: &mut dyn FnMut(Stream, &[u8])) -> Result<bool, Error> {
        let mut any = false;
        for tail in &mut self.outputs {
            any |= tail.pass(self.agent, output)?;
        }
        Ok(any)
    }

    fn has_all_output(&self) -> bool {
        self.outputs.iter().all(Tail::is_complete)
    }

    /// The exit code, if the command has ended.
    ///
    /// # Errors
    /// Those of the agent; the shell around the command was killed.
    fn exit_code(&mut self) -> anyhow::Result<Option<i32>> {
        if self.code.is_none() {
            let status = self.agent.call(qga::guest_exec_status { pid: self.pid }, REQUEST)?;
            if status.exited {
                anyhow::ensure!(
                    status.signal.is_none(),
                    "the shell around the command was killed in the guest (signal {:?})",
                    status.signal
                );
                self.code = Some(code_of(&status));
            }
        }
        Ok(self.code)
    }

    /// Closes the files of the guest.
    fn close(&mut self) -> Result<(), Error> {
        self.outputs.iter_mut().try_for_each(|tail| tail.close(self.agent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `text` as the guest would, with `arg` as $1.
    fn shell(text: &str, arg: &std::path::Path) -> std::process::Command {
        let mut command = std::process::Command::new("/bin/sh");
        command.args(["-c", text, "tombolo"]).arg(arg);
        command
    }

    #[test]
    fn a_guest_may_report_any_number_as_an_exit_code_or_a_signal() {
        let code = |exitcode, signal| {
            code_of(&qga::GuestExecStatus {
                exited: true,
                exitcode,
                signal,
                out_data: None,
                err_data: None,
                out_truncated: None,
                err_truncated: None,
            })
        };
        assert_eq!([code(Some(3), Some(9)), code(None, Some(9)), code(None, None)], [3, 137, 255]);
        assert_eq!([code(Some(i64::MIN), None), code(None, Some(i64::MAX))], [255, 255]);
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
}
