// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The calls that the sandbox forbids the switch, and those that it leaves to the switch's libraries.

mod common;

use std::ffi::CStr;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use common::Rig;
use common::program::Switch;
use tombolo_net::control::sandbox::{drop_capabilities, filter_calls};
use tombolo_net::control::socket::{Request, ask};

const INSIDE: &str = "TOMBOLO_TEST_SANDBOXED";

/// Runs `body` in a process of its own, sandboxed as a switch is. It ended well if its status is 0 and `done` was printed.
fn sandboxed(test: &str, body: impl FnOnce()) -> Option<Output> {
    if std::env::var_os(INSIDE).is_some() {
        drop_capabilities().unwrap();
        filter_calls().unwrap();
        body();
        println!("done");
        std::process::exit(0);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(INSIDE, "1").env("RUST_BACKTRACE", "full");
    command.env("TZ", ":Europe/Berlin").env("LC_ALL", "C.UTF-8");
    Some(command.output().unwrap())
}

fn assert_done(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("done"), "{}\n{text}\n{errors}", output.status);
}

/// Makes malloc grow and trim the calling thread's own heap, for which glibc opens a file of /proc.
fn press() {
    for size in [1 << 10, 40 << 10, 100 << 10] {
        let blocks: Vec<Vec<u8>> = (0..200).map(|i| vec![i as u8; size]).collect();
        assert_eq!(std::hint::black_box(&blocks).len(), 200);
    }
}

#[test]
fn calls_that_libraries_make_of_their_own_accord_kill_nothing() {
    let test = "calls_that_libraries_make_of_their_own_accord_kill_nothing";
    let output = sandboxed(test, || {
        // The sandbox is there.
        assert_eq!(std::fs::read("/etc/hostname").unwrap_err().kind(), ErrorKind::PermissionDenied);
        let threads: Vec<_> = (0..64).map(|_| std::thread::spawn(|| (0..4).for_each(|_| press()))).collect();
        for thread in threads {
            thread.join().unwrap();
        }
        // A panic, and the backtrace that it prints.
        std::thread::spawn(|| panic!("as meant")).join().unwrap_err();
        std::thread::available_parallelism().unwrap();
        // Neither is an answer needed; both look at files.
        let _name = std::env::current_dir();
        let _host = std::net::ToSocketAddrs::to_socket_addrs("localhost:80");
        // SAFETY: strings with their zeros, structures of our own, and functions that take them. No other thread runs.
        unsafe {
            libc::malloc_trim(0);
            for locale in [c"", c"de_DE.UTF-8"] {
                libc::setlocale(libc::LC_ALL, locale.as_ptr());
                let own = libc::newlocale(libc::LC_ALL_MASK, locale.as_ptr(), std::ptr::null_mut());
                if !own.is_null() {
                    libc::freelocale(own);
                }
            }
            let mut time: libc::tm = std::mem::zeroed();
            assert!(!libc::localtime_r(&1_700_000_000, &mut time).is_null());
            assert!(!CStr::from_ptr(libc::strerror(libc::EPERM)).is_empty());
            for name in [libc::_SC_NPROCESSORS_ONLN, libc::_SC_NPROCESSORS_CONF, libc::_SC_PHYS_PAGES] {
                libc::sysconf(name);
            }
            let converter = libc::iconv_open(c"LATIN1".as_ptr(), c"UTF-8".as_ptr());
            if converter.addr() != usize::MAX {
                libc::iconv_close(converter);
            }
            assert!(libc::getpwnam(c"nobody".as_ptr()).is_null());
            libc::syslog(libc::LOG_INFO, c"as meant".as_ptr());
            assert!(libc::tmpfile().is_null());
            assert!(libc::dlopen(c"libresolv.so.2".as_ptr(), libc::RTLD_NOW).is_null());
        }
    });
    assert_done(&output.expect("a process of its own"));
}

#[test]
fn a_sandboxed_switch_makes_threads_and_no_processes_runs_no_new_code_and_reaches_no_network() {
    let test = "a_sandboxed_switch_makes_threads_and_no_processes_runs_no_new_code_and_reaches_no_network";
    let output = sandboxed(test, || {
        std::thread::Builder::new().name("named".into()).spawn(|| ()).unwrap().join().unwrap();
        let refused = |what: &str, result: i64| {
            let err = std::io::Error::last_os_error();
            assert_eq!((result, err.raw_os_error()), (-1, Some(libc::EPERM)), "{what}");
        };
        // SAFETY: calls that fail, with arguments of the shapes that they take.
        unsafe {
            refused("fork", libc::fork().into());
            // 127: as where there is no shell.
            assert_eq!(libc::WEXITSTATUS(libc::system(c"true".as_ptr())), 127);
            let code = libc::PROT_READ | libc::PROT_EXEC;
            let at = libc::mmap(std::ptr::null_mut(), 4096, code, libc::MAP_PRIVATE | libc::MAP_ANON, -1, 0);
            refused("code", at as i64);
            for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_PACKET, libc::AF_NETLINK] {
                refused("socket", libc::socket(family, libc::SOCK_DGRAM, 0).into());
            }
            refused("connect", libc::connect(0, std::ptr::null(), 0).into());
            refused("bind", libc::bind(0, std::ptr::null(), 0).into());
            refused("unlink", libc::unlink(c"/nonexistent".as_ptr()).into());
            refused("rename", libc::rename(c"/nonexistent".as_ptr(), c"/other".as_ptr()).into());
            refused("terminal", libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr()).into());
            refused("dumpable", libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0).into());
            refused("parent", libc::kill(libc::getppid(), 0).into());
            let parent = libc::c_long::from(std::os::unix::process::parent_id());
            refused("its thread", libc::syscall(libc::SYS_tgkill, parent, parent, 0));
            refused("io_uring", libc::syscall(libc::SYS_io_uring_setup, 1, 0));
        }
    });
    assert_done(&output.expect("a process of its own"));
}

#[test]
fn a_switch_that_is_made_to_run_another_program_ends() {
    let output = sandboxed("a_switch_that_is_made_to_run_another_program_ends", || {
        // SAFETY: strings with their zeros, and a list with its null.
        unsafe { libc::execv(c"/bin/true".as_ptr(), [c"true".as_ptr(), std::ptr::null()].as_ptr()) };
    });
    assert_eq!(output.expect("a process of its own").status.signal(), Some(libc::SIGSYS));
}

#[test]
fn a_switch_that_many_ask_at_once_while_ports_come_and_go_lives_on() {
    let mut switch = Switch::start(0, &[]);
    let control = switch.control();
    for round in 0..80 {
        let added = serde_json::json!({
            "name": "come", "socket": switch.dir.path().join("come"), "macs": [Rig::mac(1)]
        });
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    ask::<serde_json::Value>(&control, &Request::Ports)
                        .unwrap_or_else(|err| panic!("round {round}: {err:#}"))
                });
            }
        });
        ask::<serde_json::Value>(&control, &Request::Add { port: serde_json::from_value(added).unwrap() })
            .unwrap();
        ask::<serde_json::Value>(&control, &Request::Remove { name: "come".into() }).unwrap();
    }
    assert_eq!(switch.child.try_wait().unwrap(), None);
    assert!(switch.port("vm").is_some());
}

#[test]
fn a_sandboxed_switch_hands_out_its_counters_and_ends_when_it_is_told_to() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics");
    let mut switch = Switch::start(0, &["--metrics", metrics.to_str().unwrap()]);
    let mut scrape = UnixStream::connect(&metrics).unwrap();
    scrape.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut text = String::new();
    scrape.read_to_string(&mut text).unwrap();
    assert!(text.contains("tombolo_net_port_up{port=\"vm\"} 0"), "{text}");
    // SAFETY: a signal to a child that was not waited for.
    assert_eq!(unsafe { libc::kill(switch.child.id() as i32, libc::SIGTERM) }, 0);
    let status = common::wait_for("the end", || switch.child.try_wait().unwrap());
    assert!(status.success(), "{status}: {}", switch.log());
    assert!(!switch.control().exists() && !switch.dir.path().join("vm").exists() && !metrics.exists());
}
