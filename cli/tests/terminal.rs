// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `exec -t` and `cp` with a real guest, at a real terminal. Under TCG, with the guest kit's 6.1 kernel.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{Lab, TIMEOUT, signal};
use rustix::pty::OpenptFlags;
use rustix::termios::{LocalModes, Termios, Winsize};

mod common;

const ONE: &str = "[vm.a]\nkernel = \"6.1\"\nmemory = \"256M\"\n";

/// A terminal with a command at it.
struct Session {
    command: Child,
    master: File,
    slave: OwnedFd,
    before: Termios,
    seen: String,
}

impl Session {
    fn start(lab: &Lab, arguments: &[&str]) -> Session {
        let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        rustix::pty::grantpt(&master).unwrap();
        rustix::pty::unlockpt(&master).unwrap();
        let path = rustix::pty::ptsname(&master, Vec::new()).unwrap();
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
        let slave = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
        resize(&master, 33, 111);
        let before = rustix::termios::tcgetattr(&slave).unwrap();
        let end = || Stdio::from(slave.try_clone().unwrap());
        let mut command = lab.command(arguments);
        let command = command.env("TERM", "vt100").stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        Session { command, master: File::from(master), slave, before, seen: String::new() }
    }

    fn type_in(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Reads until the terminal has shown `text`.
    fn wait_for(&mut self, text: &str) {
        let mut buffer = [0; 4096];
        while !self.seen.contains(text) {
            let n = self.master.read(&mut buffer).unwrap_or_else(|e| panic!("{e}: {}", self.seen));
            self.seen.push_str(&String::from_utf8_lossy(&buffer[..n]));
        }
        let end = self.seen.find(text).unwrap() + text.len();
        self.seen.drain(..end);
    }

    fn is_raw(&self) -> bool {
        !rustix::termios::tcgetattr(&self.slave).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    /// The command's exit code; the terminal is what it was.
    fn ended(mut self) -> i32 {
        let code = self.command.wait().unwrap().code().unwrap();
        let after = rustix::termios::tcgetattr(&self.slave).unwrap();
        assert_eq!(
            (after.local_modes, after.input_modes, after.output_modes),
            (self.before.local_modes, self.before.input_modes, self.before.output_modes)
        );
        code
    }
}

fn resize(terminal: impl std::os::fd::AsFd, rows: u16, columns: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(terminal, size).unwrap();
}

/// Processes in the guest whose command line has this word.
fn running(lab: &Lab, word: &str) -> String {
    lab.good(&["exec", "a", "--", "sh", "-c", &format!("ps | grep '{word}' | grep -v grep | wc -l")])
}

#[test]
fn a_command_in_a_guest_has_a_terminal_with_its_size_its_keys_and_job_control() {
    let lab = Lab::new(ONE);
    lab.good(&["up"]);

    let mut session =
        Session::start(&lab, &["exec", "-t", "-e", "GREETING=it's", "-C", "/tmp", "a", "--", "sh"]);
    session.wait_for("# ");
    assert!(session.is_raw());
    session.type_in("stty size; echo $TERM-$GREETING-$PWD\r");
    session.wait_for("33 111\r\n");
    session.wait_for("vt100-it's-/tmp\r\n");
    // Ctrl-C ends what runs in the foreground, not the shell and not this command.
    session.type_in("sleep 1000; echo after-$?\r");
    session.wait_for("echo after-$?\r\n");
    let start = Instant::now();
    while running(&lab, "sleep 1000") != "1\n" {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(50));
    }
    session.type_in("\x03");
    session.wait_for("# ");
    assert_eq!(running(&lab, "sleep 1000"), "0\n");
    // A change of the size reaches what runs there.
    session.type_in("sh -c 'trap \"stty size\" WINCH; echo waiting; while :; do sleep 1; done'\r");
    session.wait_for("\nwaiting\r\n");
    resize(&session.master, 50, 140);
    signal(session.command.id(), "WINCH");
    session.wait_for("50 140\r\n");
    session.type_in("\x03");
    session.wait_for("# ");
    // Much output arrives whole and in order.
    session.type_in("seq 1 20000 | tee /tmp/sequence; echo end-of-it\r");
    session.wait_for("\n20000\r\n");
    session.wait_for("end-of-it");
    session.type_in("exit 42\r");
    assert_eq!(session.ended(), 42);

    // Its own exit code, without a terminal on this side.
    let output = lab.run(&["exec", "-t", "a", "--", "sh", "-c", "test -t 0 && test -t 1 && exit 7"]);
    assert_eq!(output.status.code(), Some(7), "{}", String::from_utf8_lossy(&output.stderr));

    // A signal to this command puts the terminal back and ends what ran in the guest.
    let mut session = Session::start(&lab, &["exec", "-t", "a", "--", "sh"]);
    session.wait_for("# ");
    session.type_in("sleep 2000\r");
    session.wait_for("sleep 2000\r\n");
    signal(session.command.id(), "TERM");
    assert_eq!(session.ended(), 130);
    let start = Instant::now();
    while running(&lab, "sleep 2000") != "0\n" || running(&lab, "script -q") != "0\n" {
        assert!(start.elapsed() < TIMEOUT, "{}", lab.good(&["exec", "a", "--", "ps"]));
        std::thread::sleep(Duration::from_millis(50));
    }
    // Neither ports nor folders are left in the guest.
    let left = "ls -d /run/.tombolo-* 2>/dev/null | wc -l; cat /sys/class/virtio-ports/*/name";
    assert_eq!(lab.good(&["exec", "a", "--", "sh", "-c", left]), "1\norg.qemu.guest_agent.0\n");

    // Two at once; the end of the VM ends them, and puts their terminals back.
    let mut sessions = [0, 1].map(|_| Session::start(&lab, &["exec", "-t", "a", "--", "sh"]));
    for session in &mut sessions {
        session.wait_for("# ");
    }
    lab.good(&["down"]);
    for session in sessions {
        assert_eq!(session.ended(), 125);
    }
    lab.assert_nothing_left();
}

/// The sum of a file of the guest.
fn sum(lab: &Lab, path: &str) -> String {
    lab.good(&["exec", "a", "--", "md5sum", path])[..32].to_owned()
}

#[test]
fn files_and_folders_go_to_a_guest_and_back_as_they_are_and_an_interrupted_copy_leaves_none() {
    let lab = Lab::new(ONE);
    lab.good(&["up"]);
    let here = |name: &str| lab.dir.path().join(name);
    let data: Vec<u8> = (0u32..1_500_000).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    std::fs::create_dir_all(here("tree/sub")).unwrap();
    std::fs::write(here("tree/sub/data"), &data).unwrap();
    std::fs::set_permissions(here("tree/sub/data"), std::fs::Permissions::from_mode(0o4751)).unwrap();
    std::os::unix::fs::symlink("sub/data", here("tree/link")).unwrap();

    lab.good(&["cp", "tree/sub/data", "a:/root/copy"]);
    lab.good(&["cp", "a:/root/copy", "back"]);
    assert!(std::fs::read(here("back")).unwrap() == data);
    // A guest's set-id bit does not come back (decision 0060).
    assert_eq!(std::fs::metadata(here("back")).unwrap().permissions().mode() & 0o7777, 0o751);
    assert_eq!(lab.good(&["exec", "a", "--", "stat", "-c", "%a %u", "/root/copy"]), "4751 0\n");

    lab.good(&["cp", "-r", "tree", "a:/root"]);
    lab.good(&["cp", "-r", "a:/root/tree", "again"]);
    assert!(std::fs::read(here("again/link")).unwrap() == data);
    assert_eq!(std::fs::read_link(here("again/link")).unwrap(), Path::new("sub/data"));
    let refused = lab.run(&["cp", "a:/root/tree", "other"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("/root/tree is a folder; copy it with -r"));

    // A tar through a pipe.
    let mut from = lab.command(&["cp", "a:/root/tree", "-"]).stdout(Stdio::piped()).spawn().unwrap();
    lab.good(&["exec", "a", "--", "mkdir", "/root/piped"]);
    let mut to = lab.command(&["cp", "-", "a:/root/piped"]);
    assert!(to.stdin(from.stdout.take().unwrap()).status().unwrap().success());
    assert!(from.wait().unwrap().success());
    assert_eq!(sum(&lab, "/root/piped/tree/sub/data"), sum(&lab, "/root/copy"));

    // A copy that is interrupted in the middle leaves what was there.
    lab.good(&["exec", "a", "--", "sh", "-c", "echo before >/root/kept"]);
    let fifo = here("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut copy = lab.command(&["cp", "fifo", "a:/root/kept"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut feed = File::options().write(true).open(&fifo).unwrap();
    feed.write_all(&data[..1 << 20]).unwrap();
    let begun = "for i in $(seq 3000); do [ -s /root/.tombolo-cp-* ] && exit; usleep 100000; done; exit 1";
    lab.good(&["exec", "a", "--", "sh", "-c", begun]);
    signal(copy.id(), "INT");
    let mut words = String::new();
    copy.stderr.take().unwrap().read_to_string(&mut words).unwrap();
    assert!(
        !copy.wait().unwrap().success() && words.contains("interrupted; nothing has been copied"),
        "{words}"
    );
    drop(feed);
    let start = Instant::now();
    let left = || {
        lab.good(&["exec", "a", "--", "sh", "-c", "cat /root/kept; ls -A /root | grep -c tombolo-cp; true"])
    };
    while left() != "before\n0\n" {
        assert!(start.elapsed() < TIMEOUT, "{}", left());
        std::thread::sleep(Duration::from_millis(50));
    }
    let missing = lab.run(&["cp", "a:/root/none", "x"]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("the VM 'a': /root/none: no such file"));
    assert!(!here("x").exists());
    lab.good(&["down"]);
}
