// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A command on a terminal of its own in a guest (`exec -t`).
//!
//! The terminal is a pty that `script` makes in the guest; it copies between the pty and a virtio-serial port that the VM has for as long as the
//! command runs. So a key takes no request to the agent, and output waits for its reader. The agent starts the command, sets the terminal's size
//! (the kernel then tells the programs on it), and ends the command where its client has gone. A random mark on the port tells where the
//! terminal's output begins, and a second one, followed by the exit code, where it ends.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use qapi::qga;
use serde::{Deserialize, Serialize};

use super::exec::{self, Ended, Exec, Stream};
use crate::guest::agent::Calls;
use crate::machine::Machine;
use crate::machine::port::{PREFIX, Port};
use crate::project::state::random_hex;
use crate::thread;

/// Time for one request to the agent.
const REQUEST: Duration = Duration::from_secs(60);
/// The pause between two checks whether the client has gone.
const LOOK: Duration = Duration::from_millis(100);
/// The pause between two questions whether the command runs: until its terminal is open, and afterwards.
const ASK: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(5)];
/// For a port's socket to take what is typed; a program that does not read lets no more than a buffer pass.
const TYPE: Duration = Duration::from_millis(200);

/// The most bytes of an exit code.
const CODE: usize = 16;

/// Joins the port $1 and the terminal on which `script` runs the command line $3, in the folder $4.
const JOIN: &str = r#"port=$1 mark=$2 line=$3 dir=$4
command -v script >/dev/null || {
	echo "the guest has no 'script', which makes the terminal; install util-linux in it (Debian: bsdutils, Fedora: util-linux-script)" >&2
	exit 1
}
find_port "$port" || exit 1
exec 3<>"$node"
printf %s "$mark" >&3
SHELL=/bin/sh script -qfc "$line" /dev/null <&3 >&3 2>&3 3>&-
code=255
[ ! -e "$dir/code" ] || read -r code <"$dir/code"
printf '%s%s\n' "$mark" "$code" >&3"#;

/// Gives the terminal whose path is in the folder $1 $2 rows and $3 columns; 3: it is not there yet.
const RESIZE: &str = r#"[ -s "$1/tty" ] || exit 3
read -r tty <"$1/tty"
stty -F "$tty" rows "$2" cols "$3""#;

/// A client's terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    pub size: Size,
    /// Its kind: the variable TERM.
    pub term: String,
}

/// A terminal's size in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

impl Default for Size {
    fn default() -> Size {
        Size { rows: 24, columns: 80 }
    }
}

/// An event of a client's terminal.
#[derive(Debug, PartialEq, Eq)]
pub enum Typed {
    /// It typed these bytes.
    Keys(Vec<u8>),
    /// It changed the terminal's size.
    Size(Size),
    /// It types no more.
    End,
}

/// Runs a command on a terminal; it is ended when `cancelled` says so.
///
/// # Errors
/// Those of QEMU and the agent, and what the guest lacks.
pub fn run(
    machine: &Machine,
    exec: &Exec,
    terminal: &Terminal,
    typed: &Receiver<Typed>,
    cancelled: &(dyn Fn() -> bool + Sync),
    output: &(dyn Fn(Stream, &[u8]) + Sync),
) -> anyhow::Result<Ended> {
    let agent = machine.agent();
    let port = machine.add_port(&format!("{PREFIX}terminal.{}", random_hex(8)))?;
    let dir = exec::prepare(agent)?;
    let session = Session { machine, dir: &dir, mark: random_hex(16), screen: Mutex::default() };
    let ended = session.run(&port, exec, terminal, typed, cancelled, output);
    let swept = exec::sweep(agent, &dir);
    let ended = ended?;
    if let Some(kept) = swept? {
        output(Stream::Err, kept.as_bytes());
    }
    Ok(ended)
}

struct Session<'a> {
    machine: &'a Machine,
    dir: &'a str,
    mark: String,
    screen: Mutex<Screen>,
}

impl Session<'_> {
    fn screen(&self) -> std::sync::MutexGuard<'_, Screen> {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(
        &self,
        port: &Port<'_>,
        exec: &Exec,
        terminal: &Terminal,
        typed: &Receiver<Typed>,
        cancelled: &(dyn Fn() -> bool + Sync),
        output: &(dyn Fn(Stream, &[u8]) + Sync),
    ) -> anyhow::Result<Ended> {
        let line = command_line(exec, terminal, self.dir);
        let join = format!("{}{JOIN}", exec::FIND_PORT);
        let arg = ["-c", &join, "tombolo", port.name(), &self.mark, &line, self.dir].map(str::to_owned);
        std::thread::scope(|scope| {
            let socket = port.socket();
            thread::start_in(scope, "terminal", move || self.read(socket, output))?;
            let pid = exec::start(self.machine.agent(), "/bin/sh", arg.to_vec(), Vec::new(), None, true);
            let ended = pid.map_err(Into::into).and_then(|pid| self.follow(socket, pid, typed, cancelled));
            // The reader ends with it.
            let _gone_already = socket.shutdown(std::net::Shutdown::Both);
            ended
        })
    }

    /// Passes on what the terminal shows, until its end or the port's.
    fn read(&self, mut socket: &UnixStream, output: &(dyn Fn(Stream, &[u8]) + Sync)) {
        let mut buffer = vec![0; 64 << 10];
        while self.screen().code.is_none() {
            match socket.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    let shown = self.screen().take(self.mark.as_bytes(), &buffer[..n]);
                    if !shown.is_empty() {
                        output(Stream::Out, &shown);
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.screen().over = true;
    }

    fn follow(
        &self,
        mut socket: &UnixStream,
        pid: i64,
        typed: &Receiver<Typed>,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> anyhow::Result<Ended> {
        socket.set_write_timeout(Some(TYPE))?;
        let mut asked = Instant::now();
        let mut size = None;
        let mut keys: Vec<u8> = Vec::new();
        loop {
            let (begun, over, code) = {
                let screen = self.screen();
                (screen.begun, screen.over, screen.code)
            };
            if let Some(code) = code {
                return Ok(Ended::Code(code));
            }
            if cancelled() {
                exec::kill(self.machine.agent(), pid)?;
                return Ok(Ended::Cancelled);
            }
            anyhow::ensure!(!over, "the VM '{}' has ended", self.machine.name());
            if asked.elapsed() >= ASK[usize::from(begun)] {
                self.check_runs(pid)?;
                asked = Instant::now();
            }
            if let Some(wanted) = size.take_if(|_| begun) {
                size = self.resize(wanted)?;
            }
            if !keys.is_empty() {
                match socket.write(&keys) {
                    Ok(n) => drop(keys.drain(..n)),
                    Err(e) if is_pause(&e) => {}
                    Err(e) => return Err(e.into()),
                }
                continue;
            }
            match typed.recv_timeout(LOOK) {
                Ok(Typed::Keys(more)) => keys = more,
                Ok(Typed::Size(new)) => size = Some(new),
                // At a terminal Ctrl-D ends the input.
                Ok(Typed::End) => keys = vec![4],
                Err(RecvTimeoutError::Timeout) => {}
                // The client has gone: 'cancelled' says so next.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(LOOK),
            }
        }
    }

    /// Fails where the command's shell has ended without a word on the port.
    fn check_runs(&self, pid: i64) -> anyhow::Result<()> {
        let status = self.machine.agent().call(qga::guest_exec_status { pid }, REQUEST)?;
        // Its last words may be on their way.
        if !status.exited || self.screen().begun && status.exitcode == Some(0) {
            return Ok(());
        }
        let words = String::from_utf8_lossy(&status.err_data.unwrap_or_default()).trim().to_owned();
        anyhow::ensure!(!words.is_empty(), "the command's terminal was ended in the guest");
        anyhow::bail!(words)
    }

    /// Sets the terminal's size; what is returned is to be tried again.
    fn resize(&self, size: Size) -> anyhow::Result<Option<Size>> {
        let numbers = (size.rows.to_string(), size.columns.to_string());
        let set = exec::script(self.machine.agent(), RESIZE, &[self.dir, &numbers.0, &numbers.1], REQUEST)?;
        // A guest that can't goes on with the size that it has.
        Ok((set.code == 3).then_some(size))
    }
}

fn is_pause(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

/// The command as a line for the terminal's shell, which outlives Ctrl-C to keep the exit code.
fn command_line(exec: &Exec, terminal: &Terminal, dir: &str) -> String {
    let Size { rows, columns } = terminal.size;
    let mut line = format!("trap : INT QUIT; stty sane rows {rows} cols {columns}; tty >{dir}/tty; ");
    let term = format!("TERM={}", terminal.term);
    for variable in exec.env.iter().chain([&term]) {
        line.push_str(&format!("export {}; ", quoted(variable)));
    }
    let words: Vec<String> = exec.argv.iter().map(|word| quoted(word)).collect();
    let command = words.join(" ");
    match &exec.dir {
        Some(folder) => line.push_str(&format!("(cd {} && exec {command})", quoted(folder))),
        None => line.push_str(&command),
    }
    line.push_str(&format!("; echo $? >{dir}/code"));
    line
}

/// One word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Finds the part of a port's bytes that the terminal shows.
#[derive(Debug, Default)]
struct Screen {
    held: Vec<u8>,
    begun: bool,
    code: Option<i32>,
    /// Nothing more comes.
    over: bool,
}

impl Screen {
    /// Returns the bytes to show. A possible beginning of a mark is held back, and so are the bytes after the second mark.
    fn take(&mut self, mark: &[u8], data: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(data);
        if !self.begun {
            let Some(at) = find(&self.held, mark) else {
                drop(self.let_go(mark));
                return Vec::new();
            };
            self.held.drain(..at + mark.len());
            self.begun = true;
        }
        let Some(at) = find(&self.held, mark) else { return self.let_go(mark) };
        let rest = &self.held[at + mark.len()..];
        let end = rest.iter().position(|&b| b == b'\n');
        if end.is_some() || rest.len() > CODE {
            let text = std::str::from_utf8(&rest[..end.unwrap_or(0)]).ok();
            self.code = Some(text.and_then(|text| text.trim().parse().ok()).unwrap_or(255));
        }
        self.held.drain(..at).collect()
    }

    /// Takes out what can't be the mark's beginning.
    fn let_go(&mut self, mark: &[u8]) -> Vec<u8> {
        let longest = mark.len().min(self.held.len() + 1) - 1;
        let kept = (1..=longest).rev().find(|&n| self.held.ends_with(&mark[..n])).unwrap_or(0);
        self.held.drain(..self.held.len() - kept).collect()
    }
}

fn find(data: &[u8], mark: &[u8]) -> Option<usize> {
    data.windows(mark.len()).position(|window| window == mark)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_is_what_is_between_the_marks_however_the_bytes_come() {
        let all = b"kernel noise#M#hello\r\n#M is no mark\r\n#M#42\n";
        for cut in 0..all.len() {
            let mut screen = Screen::default();
            let mut shown = screen.take(b"#M#", &all[..cut]);
            shown.extend(screen.take(b"#M#", &all[cut..]));
            assert_eq!(String::from_utf8(shown).unwrap(), "hello\r\n#M is no mark\r\n", "cut at {cut}");
            assert_eq!(screen.code, Some(42), "cut at {cut}");
        }
    }

    #[test]
    fn a_guest_that_floods_the_port_without_marks_has_nothing_kept_of_it() {
        let mut screen = Screen::default();
        for _ in 0..100 {
            assert!(screen.take(b"#M#", &[b'x'; 1 << 16]).is_empty());
            assert!(screen.held.len() < 3, "noise before the first mark");
        }
        assert_eq!(screen.take(b"#M#", b"#M#shown#M#"), b"shown");
        assert!(screen.take(b"#M#", &[b'9'; 1 << 16]).is_empty());
        assert_eq!(screen.code, Some(255), "no code is so long");
    }

    #[test]
    fn words_reach_the_command_as_they_are() {
        let words = ["it's", "$HOME", "a b", "", "`id`", "\\", "new\nline"];
        let exec = Exec {
            argv: ["printf", "%s|"].iter().chain(&words).map(|w| (*w).to_owned()).collect(),
            env: vec!["NAME=it's $5".into()],
            dir: None,
        };
        let dir = tempfile::tempdir().unwrap();
        let line = command_line(&exec, &Terminal::default(), dir.path().to_str().unwrap());
        let output = std::process::Command::new("/bin/sh").args(["-c", &line]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), words.map(|w| format!("{w}|")).concat());
        assert_eq!(std::fs::read_to_string(dir.path().join("code")).unwrap(), "0\n");
    }
}
