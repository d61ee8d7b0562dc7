// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A QEMU that tombolo does not start, with the guest kit's 6.1 kernel; its shell is on the serial line.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use super::TIMEOUT;

/// The guest kit's folder of one kernel.
pub fn kit() -> PathBuf {
    let near = || Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(".cache");
    std::env::var_os("TOMBOLO_CACHE").map_or_else(near, PathBuf::from).join("guest/6.1")
}

/// Arguments that the guest kit's kernel needs under emulation.
pub const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet panic=-1 no_timer_check tsc=unstable nohz=off";

/// The lines of a shell on a serial line, and commands for it.
pub struct Shell<W: Write> {
    to: W,
    lines: Receiver<String>,
    commands: u32,
}

impl<W: Write> Shell<W> {
    pub fn new(from: impl std::io::Read + Send + 'static, to: W) -> Shell<W> {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(from).split(b'\n') {
                let Ok(line) = line else { return };
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    return;
                }
            }
        });
        Shell { to, lines, commands: 0 }
    }

    /// Waits for a line that contains `words`; what came before it.
    pub fn wait_for(&self, words: &str) -> String {
        let mut said = String::new();
        loop {
            let line =
                self.lines.recv_timeout(TIMEOUT).unwrap_or_else(|e| panic!("{e} before '{words}': {said}"));
            if line.contains(words) {
                return said + &line;
            }
            said.push_str(&line);
            said.push('\n');
        }
    }

    /// The guest's shell answers.
    pub fn wait_ready(&mut self) {
        self.wait_for("tombolo-guest ready");
    }

    pub fn send(&mut self, command: &str) {
        self.to.write_all(format!("{command}\n").as_bytes()).unwrap();
        self.to.flush().unwrap();
    }

    /// Runs a command; its exit status and what it said. The line itself is echoed with its quotes, its marks without.
    pub fn run(&mut self, command: &str) -> (i32, String) {
        self.commands += 1;
        let n = self.commands;
        self.send(&format!("echo 'be''gin'-{n}; {{ {command}; }} 2>&1; echo 'en''d'-{n} $?"));
        self.wait_for(&format!("begin-{n}"));
        let said = self.wait_for(&format!("end-{n} "));
        let (output, status) = said.rsplit_once(&format!("end-{n} ")).unwrap();
        (status.trim().parse().unwrap(), output.trim().to_owned())
    }

    /// Runs a command that must succeed.
    pub fn good(&mut self, command: &str) -> String {
        let (status, output) = self.run(command);
        assert_eq!(status, 0, "`{command}` in the guest: {output}");
        output
    }
}

/// A QEMU and its guest's shell. Dropping it kills QEMU.
pub struct Plain {
    pub qemu: Child,
    pub shell: Shell<ChildStdin>,
}

impl Plain {
    pub fn start(arguments: &[String]) -> Plain {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(
            "-nodefaults -display none -machine q35 -accel tcg,thread=multi -cpu max,-erms,-fsrm,-cx16"
                .split(' '),
        );
        qemu.args(["-smp", "2", "-m", "256M,maxmem=4G", "-serial", "stdio"]);
        qemu.arg("-kernel").arg(kit().join("vmlinuz")).arg("-initrd").arg(kit().join("initrd.img"));
        qemu.args(["-append", KERNEL_ARGUMENTS]).args(arguments);
        let mut qemu = qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("qemu-system-x86_64");
        let mut shell = Shell::new(qemu.stdout.take().unwrap(), qemu.stdin.take().unwrap());
        shell.wait_ready();
        Plain { qemu, shell }
    }

    /// Ends QEMU as a crash would.
    pub fn kill(mut self) {
        self.qemu.kill().unwrap();
        self.qemu.wait().unwrap();
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
