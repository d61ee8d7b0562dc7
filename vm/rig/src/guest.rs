// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A running guest, and the shell on its second serial port.

use std::io::{BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::machine::Machine;

/// The shell's prompt.
pub const READY: &str = "<<ready>>";
/// The shell's text after a command's output: this, the exit status, and [`END_CLOSES`].
pub const END: &str = "<<rc=";
/// The text after the exit status.
pub const END_CLOSES: &str = ">>";

/// The longest silence of a guest. It is far beyond the time of any step, so that no test fails on a busy host.
pub const SILENCE: Duration = Duration::from_secs(300);

/// A running guest. Dropping it kills QEMU, and so does the end of the thread that started it.
#[derive(Debug)]
pub struct Guest {
    child: Child,
    stdin: ChildStdin,
    output: Receiver<Vec<u8>>,
    /// Output of the shell that was not read yet.
    unread: Vec<u8>,
    console: PathBuf,
}

impl Guest {
    /// Starts `machine` and waits until its shell takes commands.
    ///
    /// # Errors
    /// QEMU can't be started or the guest stays silent; the error has the end of its console.
    pub fn start(machine: &Machine) -> Result<Guest> {
        let mut command = machine.command()?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        die_with_parent(&mut command);
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().to_string_lossy()))?;
        let stdin = child.stdin.take().context("the shell's input is piped")?;
        let mut stdout = BufReader::new(child.stdout.take().context("the shell's output is piped")?);
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n) = stdout.read(&mut buffer) {
                if n == 0 || sender.send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        let console = machine.console.clone();
        let mut guest = Guest { child, stdin, output, unread: Vec::new(), console };
        guest.until(READY)?;
        Ok(guest)
    }

    /// Sends a command without waiting for its end.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn send(&mut self, command: &str) -> Result<()> {
        writeln!(self.stdin, "{command}").with_context(|| format!("sending `{command}`"))
    }

    /// Waits for the end of a command that was sent; returns its exit status and its output without the white space around it.
    ///
    /// # Errors
    /// The guest is silent for [`SILENCE`], or QEMU has ended.
    pub fn finish(&mut self) -> Result<(i32, String)> {
        let output = self.until(END)?;
        let status = self.until(END_CLOSES)?;
        let status = status.parse().with_context(|| format!("the exit status {status:?}"))?;
        Ok((status, output.trim().to_owned()))
    }

    /// Runs a command that must succeed; returns its output.
    ///
    /// # Errors
    /// The command fails, or as [`Guest::finish`] says.
    pub fn run(&mut self, command: &str) -> Result<String> {
        self.send(command)?;
        match self.finish()? {
            (0, output) => Ok(output),
            (status, output) => bail!("`{command}` ended with {status} in the guest: {output}"),
        }
    }

    /// Boots again, where QEMU has `-action reboot=reset`, and waits until the shell takes commands.
    ///
    /// # Errors
    /// As [`Guest::finish`] says.
    pub fn reboot(&mut self) -> Result<()> {
        self.send("reboot -f")?;
        self.until(READY).map(drop)
    }

    /// Kills QEMU, as a crash of the VM would, and waits for its end.
    pub fn kill(mut self) {
        self.end();
    }

    /// The end of what the kernel wrote to its console.
    pub fn log(&self) -> String {
        let log = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(6000)..]).into_owned()
    }

    fn until(&mut self, mark: &str) -> Result<String> {
        let deadline = Instant::now() + SILENCE;
        // Outputs can have megabytes: what was searched already is not searched again.
        let mut searched = 0;
        loop {
            let found = self.unread[searched..].windows(mark.len()).position(|w| w == mark.as_bytes());
            if let Some(at) = found.map(|at| searched + at) {
                let before = String::from_utf8_lossy(&self.unread[..at]).into_owned();
                self.unread.drain(..at + mark.len());
                return Ok(before);
            }
            searched = (self.unread.len() + 1).saturating_sub(mark.len());
            match self.output.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(more) => self.unread.extend(more),
                Err(RecvTimeoutError::Timeout) => {
                    bail!("the guest is silent for {} s; its console:\n{}", SILENCE.as_secs(), self.log())
                }
                Err(RecvTimeoutError::Disconnected) => bail!("QEMU has ended; its console:\n{}", self.log()),
            }
        }
    }

    fn end(&mut self) {
        // Both fail only where it has been waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.end();
    }
}

/// Makes the process die with the thread that starts it.
fn die_with_parent(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: prctl is async-signal-safe, and nothing is allocated.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
    }
}
