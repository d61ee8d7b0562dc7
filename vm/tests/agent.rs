// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands through a real guest agent, which runs here instead of in a guest.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tombolo_vm::guest::agent::Agent;
use tombolo_vm::guest::exec::{Ended, Exec, Stream, run};
use tombolo_vm::guest::health::Checker;

const TIMEOUT: Duration = Duration::from_secs(120);

struct Guest {
    process: Child,
    agent: Agent,
    _dir: tempfile::TempDir,
}

impl Guest {
    fn new() -> Guest {
        Guest::with("/usr/sbin:/usr/bin:/sbin:/bin")
    }

    /// With these folders of programs.
    fn with(path: &str) -> Guest {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent");
        let program = ["/usr/sbin/qemu-ga", "/usr/bin/qemu-ga"].into_iter().find(|p| Path::new(p).exists());
        let process = Command::new(program.expect("the package qemu-guest-agent"))
            .env("PATH", path)
            .args(["-m", "unix-listen", "-p"])
            .arg(&socket)
            .arg("-t")
            .arg(dir.path())
            .arg("-l")
            .arg(dir.path().join("log"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(e) => assert!(start.elapsed() < TIMEOUT, "{e}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        Guest { process, agent: Agent::new(stream), _dir: dir }
    }

    fn run(&self, script: &str) -> (Ended, Vec<u8>, Vec<u8>) {
        let exec = Exec { argv: vec!["sh".into(), "-c".into(), script.into()], ..Exec::default() };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let ended = run(&self.agent, &exec, None, &|| false, &mut |stream, data| match stream {
            Stream::Out => out.extend_from_slice(data),
            Stream::Err => err.extend_from_slice(data),
        });
        (ended.unwrap(), out, err)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn code_output_and_errors_are_passed_on_each_for_itself() {
    let guest = Guest::new();
    let (ended, out, err) = guest.run("printf out; printf err >&2; exit 3");
    assert_eq!((ended, &out[..], &err[..]), (Ended::Code(3), &b"out"[..], &b"err"[..]));
    assert_eq!(guest.run("cat; kill -9 $$").0, Ended::Code(137));
}

#[test]
fn output_of_any_length_passes_through_a_bounded_amount_of_memory() {
    let guest = Guest::new();
    // Ten segments; the numbers tell whether each byte came once and in order.
    let (ended, out, _) = guest.run("seq 10000000");
    assert_eq!(ended, Ended::Code(0));
    let mut lines = out.split(|&b| b == b'\n');
    for n in 1..=10_000_000u32 {
        assert_eq!(lines.next(), Some(n.to_string().as_bytes()));
    }
    assert_eq!((lines.next(), lines.next()), (Some(&b""[..]), None));
}

#[test]
fn a_daemon_that_keeps_the_output_open_does_not_keep_the_command() {
    let guest = Guest::new();
    let begun = Instant::now();
    let (ended, out, _) = guest.run("sleep 100 & echo $!");
    assert_eq!(ended, Ended::Code(0));
    assert!(begun.elapsed() < Duration::from_secs(100));
    let status = Command::new("kill").arg(String::from_utf8(out).unwrap().trim()).status().unwrap();
    assert!(status.success(), "it lives on");
}

#[test]
fn a_command_whose_caller_has_gone_is_ended() {
    let guest = Guest::new();
    let exec = Exec {
        argv: ["sh", "-c", "echo $$; exec sleep 1000"].map(str::to_owned).to_vec(),
        ..Exec::default()
    };
    let gone = AtomicBool::new(false);
    let mut pid = String::new();
    let ended = run(&guest.agent, &exec, None, &|| gone.load(Ordering::Acquire), &mut |_, data| {
        pid.push_str(&String::from_utf8_lossy(data));
        gone.store(true, Ordering::Release);
    });
    assert_eq!(ended.unwrap(), Ended::Cancelled);
    let start = Instant::now();
    let path = format!("/proc/{}/cmdline", pid.trim());
    while std::fs::read(&path).is_ok_and(|c| !c.is_empty()) {
        assert!(start.elapsed() < TIMEOUT, "it lives on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_command_that_ignores_its_end_is_killed_with_all_that_it_started_in_a_guest_that_has_little() {
    // The programs of a small image: no pkill, no setsid.
    let programs = tempfile::tempdir().unwrap();
    for program in ["sh", "mkfifo", "dd", "mkdir", "mv", "rm", "sleep", "cat"] {
        let found = ["/usr/bin", "/bin"].map(|folder| Path::new(folder).join(program));
        let found = found.iter().find(|path| path.exists()).unwrap();
        std::os::unix::fs::symlink(found, programs.path().join(program)).unwrap();
    }
    let guest = Guest::with(programs.path().to_str().unwrap());
    let command = r#"trap "" TERM; sh -c 'trap "" TERM; sleep 1000 & echo $! deepest; wait' & wait"#;
    let exec = Exec { argv: ["sh", "-c", command].map(str::to_owned).to_vec(), ..Exec::default() };
    let mut said = String::new();
    let gone = AtomicBool::new(false);
    let ended = run(&guest.agent, &exec, None, &|| gone.load(Ordering::Acquire), &mut |_, data| {
        said.push_str(&String::from_utf8_lossy(data));
        gone.store(said.contains("deepest"), Ordering::Release);
    });
    assert_eq!(ended.unwrap(), Ended::Cancelled);
    let deepest = format!("/proc/{}", said.split_whitespace().next().unwrap());
    let agent = guest.process.id();
    let left = || {
        let children = std::fs::read_to_string(format!("/proc/{agent}/task/{agent}/children")).unwrap();
        let alive = |pid: &&str| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|c| !c.is_empty());
        children.split_whitespace().filter(alive).map(str::to_owned).collect::<Vec<_>>()
    };
    let start = Instant::now();
    while Path::new(&deepest).exists() || !left().is_empty() {
        assert!(start.elapsed() < TIMEOUT, "{:?} of the agent live on, and {deepest}", left());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_health_check_that_begins_when_nobody_waits_for_it_any_more_is_ended_before_the_next() {
    let guest = Guest::new();
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let signal = |signal| {
        rustix::process::kill_process(rustix::process::Pid::from_child(&guest.process), signal).unwrap();
    };
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let mut checker = Checker::new(&guest.agent);
    checker.check(&words(&["true"]), TIMEOUT).unwrap();
    signal(rustix::process::Signal::STOP);
    let endless = format!("echo $$ >'{0}.new'; mv '{0}.new' '{0}'; exec sleep 100000", pid.display());
    let late = checker.check(&words(&["sh", "-c", &endless]), Duration::from_millis(200)).unwrap_err();
    assert!(late.to_string().contains("did not answer"), "{late}");
    signal(rustix::process::Signal::CONT);
    let start = Instant::now();
    while !pid.exists() {
        assert!(start.elapsed() < TIMEOUT, "the agent does not begin it");
        std::thread::sleep(Duration::from_millis(10));
    }
    let process = std::fs::read_to_string(&pid).unwrap();
    checker.check(&words(&["true"]), TIMEOUT).unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.trim())).unwrap_or_default();
    assert!(stat.is_empty() || stat.contains(") Z "), "{stat}");
}
