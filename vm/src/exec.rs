// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands in a guest, through its agent: exit code, input and output as they come.
//!
//! The agent itself hands out a command's output only at its end and at most 16 MiB of it. So the command runs under a few
//! lines of shell: its output goes to two files in memory, which are read while they grow, and its input comes through a
//! FIFO, filled by one short-lived writer per chunk (the agent's own writes to a FIFO can be cut short without notice).
//! A handle of the agent keeps the FIFO open until the input ends. The shell removes the files.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use qapi::qga;

use crate::agent::{Agent, Error};

/// Time for one request to the agent; a guest under load on an emulated CPU is slow.
const REQUEST: Duration = Duration::from_secs(60);
/// Bytes of output read at once.
const READ: i64 = 1 << 20;
/// Waits between looks at a command that says nothing.
const PAUSES: [u64; 6] = [1, 2, 5, 10, 20, 40];

/// Makes the folder with the FIFO and the two files, and says where.
const PREPARE: &str = r#"umask 077
for base in /run /dev/shm /tmp; do
	d=$base/.tombolo-$1
	mkdir "$d" && mkfifo "$d/0" && : >"$d/1" && : >"$d/2" && echo "$d" && exit 0
done 2>/dev/null
echo "no folder for a command's output: /run, /dev/shm and /tmp can't be written" >&2
exit 1"#;
/// Runs the command ($3 ...) in the folder $1, with input ($2 = 0) or without. A FIFO that nobody has open forgets its
/// content, so the file "open" tells when the input may end.
const RUN: &str = r#"d=$1; in=$2; shift 2
if [ "$in" = 0 ]; then
	exec 3<>"$d/0" 4<"$d/0" 3>&-
	: >"$d/open"
else
	exec 4<"$in"
fi
"$@" <&4 4<&- >>"$d/1" 2>>"$d/2"
code=$?
rm -rf "$d"
exit $code"#;

/// What to run.
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

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its exit code; 128 + n for a signal.
    Code(i32),
    /// Whoever wanted it is gone; it was killed.
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
pub fn script(agent: &Agent, text: &str, args: &[&str], limit: Duration) -> anyhow::Result<Output> {
    let mut arg = vec!["-c".to_owned(), text.to_owned(), "tombolo".to_owned()];
    arg.extend(args.iter().map(|a| (*a).to_owned()));
    let pid = start(agent, "/bin/sh", arg, Vec::new(), None, true)?;
    let begun = std::time::Instant::now();
    let mut pauses = Pauses::default();
    loop {
        let status = agent.call(qga::guest_exec_status { pid }, REQUEST)?;
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

fn start(
    agent: &Agent,
    path: &str,
    arg: Vec<String>,
    env: Vec<String>,
    input: Option<Vec<u8>>,
    capture: bool,
) -> Result<i64, Error> {
    let command = qga::guest_exec {
        path: path.to_owned(),
        arg: Some(arg),
        env: (!env.is_empty()).then_some(env),
        input_data: input,
        capture_output: Some(qga::GuestExecCaptureOutput::flag(capture)),
    };
    agent.call(command, REQUEST).map(|r| r.pid)
}

fn code_of(status: &qga::GuestExecStatus) -> i32 {
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

/// One of the two output files, read as it grows.
struct Tail {
    handle: i64,
    stream: Stream,
}

impl Tail {
    /// Passes on what is there, at most one chunk: whether there was something.
    fn pass(&self, agent: &Agent, output: &mut dyn FnMut(Stream, &[u8])) -> Result<bool, Error> {
        let read = agent.call(qga::guest_file_read { handle: self.handle, count: Some(READ) }, REQUEST)?;
        if !read.buf_b64.is_empty() {
            output(self.stream, &read.buf_b64);
        }
        Ok(!read.buf_b64.is_empty())
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
    let prepared = script(agent, PREPARE, &[&crate::state::random_hex(8)], REQUEST)?;
    if prepared.code != 0 {
        anyhow::bail!("the guest can't run the command: {}", prepared.err.trim());
    }
    let dir = prepared.out.trim();
    let open = |name: &str, mode: &str| {
        let path = format!("{dir}/{name}");
        agent.call(qga::guest_file_open { path, mode: Some(mode.to_owned()) }, REQUEST)
    };
    let close = |handle: i64| agent.call(qga::guest_file_close { handle }, REQUEST).map(|_| ());
    let tails = [
        Tail { handle: open("1", "r")?, stream: Stream::Out },
        Tail { handle: open("2", "r")?, stream: Stream::Err },
    ];
    // "r+" opens a FIFO at once and keeps it from ending between two writers.
    let mut fifo = match input {
        Some(_) => Some(open("0", "r+")?),
        None => None,
    };
    let mut arg = vec!["-c".to_owned(), RUN.to_owned(), "tombolo".to_owned(), dir.to_owned()];
    arg.push(if input.is_some() { "0" } else { "/dev/null" }.to_owned());
    if let Some(folder) = &exec.dir {
        let inner = r#"cd "$1" || exit 126; shift; exec "$@""#;
        arg.extend(["/bin/sh", "-c", inner, "tombolo", folder].map(str::to_owned));
    }
    arg.extend(exec.argv.iter().cloned());
    let pid = start(agent, "/bin/sh", arg, exec.env.clone(), None, false)?;

    let mut writer: Option<i64> = None;
    let mut at_end = false;
    let mut pauses = Pauses::default();
    let ended = loop {
        let mut busy = false;
        for tail in &tails {
            busy |= tail.pass(agent, output)?;
        }
        if let Some(w) = writer {
            if agent.call(qga::guest_exec_status { pid: w }, REQUEST)?.exited {
                writer = None;
            }
        }
        if let (Some(handle), None, true) = (fifo, writer, at_end) {
            if let Ok(mark) = open("open", "r") {
                close(mark)?;
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
            // The command's own processes, then the shell, which removes the folder first if it can.
            let kill = r#"pkill -TERM -P "$1" || kill -TERM "$1"; rm -rf "$2""#;
            script(agent, kill, &[&pid.to_string(), dir], REQUEST)?;
            break Ended::Cancelled;
        }
        if busy {
            pauses.reset();
            continue;
        }
        let status = agent.call(qga::guest_exec_status { pid }, REQUEST)?;
        if status.exited {
            for tail in &tails {
                while tail.pass(agent, output)? {}
            }
            break Ended::Code(code_of(&status));
        }
        pauses.next();
    };
    // Without a reader a writer that still waits gets EPIPE.
    for handle in fifo.into_iter().chain(tails.iter().map(|t| t.handle)) {
        close(handle)?;
    }
    Ok(ended)
}
