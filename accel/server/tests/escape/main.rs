// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hostile native code in a worker, as a client's kernel (accel/tests/escape.c), against servers of root, where the tests run as root, and of
//! an ordinary user. PoCL carries kernels out on the CPU (packages/accel.list).

#![cfg(target_arch = "x86_64")]

mod rig;

use rig::{
    Hostile, NOBODY, Server, User, done, folder, is_root, numbers, ping, said, server_command, users,
    wait_until,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use tombolo_accel_server::wall::limits::{FEWEST_TASKS, LOCKED, SIGNALS, SPARE_ADDRESSES, WORKING, tasks};

/// Memory of System V that all users may use; removed when dropped.
struct SystemV(i32);

impl SystemV {
    fn new() -> SystemV {
        // SAFETY: integers only.
        let id = unsafe { libc::shmget(libc::IPC_PRIVATE, 4096, libc::IPC_CREAT | 0o666) };
        assert!(id >= 0, "{}", std::io::Error::last_os_error());
        SystemV(id)
    }
}

impl Drop for SystemV {
    fn drop(&mut self) {
        // SAFETY: integers, and no structure for this command.
        unsafe { libc::shmctl(self.0, libc::IPC_RMID, std::ptr::null_mut()) };
    }
}

/// A file that all users may change; removed when dropped.
struct Secret(PathBuf);

impl Secret {
    fn new(folder: &Path) -> Secret {
        let path = folder.join(format!("tombolo-secret-{}", std::process::id()));
        std::fs::write(&path, "secret").expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).expect("its mode");
        Secret(path)
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        assert_eq!(std::fs::read_to_string(&self.0).expect("it is there"), "secret");
        std::fs::remove_file(&self.0).expect("removed");
    }
}

#[test]
fn a_kernels_system_calls_reach_no_process_file_socket_or_memory_of_others() {
    for user in users() {
        let server = Server::start(*user, "try", &[]);
        let neighbour = server.client();
        ping(&neighbour);
        let its_worker = server.tenant("neighbour").expect("it is served").pid;
        // Another tenant's zone lies in the first of these, its kernels in the second.
        let secrets = [Path::new("/dev/shm"), &std::env::temp_dir(), folder()].map(Secret::new);
        let name = format!("tombolo-escape-{}-{user:?}", std::process::id());
        let abstract_socket =
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).expect("a name")).expect("bound");
        abstract_socket.set_nonblocking(true).expect("set");
        let memory = SystemV::new();
        let (pid, worker, id) = (server.child.id().to_string(), its_worker.to_string(), memory.0.to_string());
        let mut arguments = vec!["try", &pid, &worker, &name, &id];
        arguments.extend(secrets.iter().map(|s| s.0.to_str().expect("a plain path")));
        let socket = server.socket.to_str().expect("a plain path");
        arguments.push(socket);
        // Over TCP the worker has a socket of the host's network.
        for address in server.addresses() {
            let attempts = numbers(&done(server.escape(&arguments).env("TOMBOLO_ACCEL", &address)));
            assert!(attempts.len() > 250, "{}", attempts.len());
            let succeeded: Vec<_> = attempts.iter().filter(|(_, result)| *result >= 0).collect();
            assert!(succeeded.is_empty(), "{user:?}, {address}: {succeeded:?}");
        }
        assert!(abstract_socket.recv(&mut [0; 8]).is_err(), "something came in by the abstract socket");
        ping(&neighbour);
        assert_eq!(server.tenant("neighbour").expect("it is served").pid, its_worker);
        server.end();
    }
}

#[test]
fn a_descriptor_that_a_client_passes_to_its_worker_is_not_taken_and_its_file_stays_as_it_was() {
    for user in users() {
        let server = Server::start(*user, "pass", &[]);
        // The server's user owns it, and all users may read it.
        let file = folder().join(format!("readable-{user:?}"));
        std::fs::write(&file, "settings").expect("written");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).expect("its mode");
        if *user == User::Nobody {
            std::os::unix::fs::chown(&file, Some(NOBODY), Some(NOBODY)).expect("given");
        }
        // Its connection is closed, before the kernel has run or later.
        let got = numbers(&server.escape(&["pass"]).arg(&file).output().expect("it starts"));
        let mode = std::fs::metadata(&file).expect("it is there").permissions().mode() & 0o7777;
        assert_eq!(mode, 0o644, "{user:?}: {got:?}");
        assert!(!got.is_empty() && got.iter().all(|(_, result)| *result < 0), "{user:?}: {got:?}");
        server.end();
    }
}

#[test]
fn a_part_that_a_kernel_maps_a_second_time_leads_to_no_other_part_of_its_file() {
    for user in users() {
        let server = Server::start(*user, "again", &[]);
        let got = numbers(&done(&mut server.escape(&["again"])));
        let (last_pages, beyond): (Vec<_>, Vec<_>) =
            got.iter().partition(|(what, _)| what.starts_with("last page"));
        assert!(beyond.iter().all(|(_, result)| *result < 0), "{user:?}: {got:?}");
        // Shared virtual memory needs those of the channel; the worker shares other mappings, whose pages nobody needs twice.
        let allowed = last_pages.iter().filter(|(_, result)| *result >= 0).count();
        assert!(allowed == 1 && last_pages.len() > 1, "{user:?}: {got:?}");
        server.end();
    }
}

/// A line of /proc/PID/limits: soft and hard.
fn limits_of(pid: u32, name: &str) -> Vec<String> {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("it lives");
    let line = limits.lines().find_map(|line| line.strip_prefix(name)).expect("a limit");
    line.split_whitespace().take(2).map(str::to_owned).collect()
}

#[test]
fn neither_a_worker_nor_what_it_starts_is_dumped_however_the_host_takes_dumps() {
    for user in users() {
        let server = Server::start(*user, "dumps", &[]);
        let hostile = Hostile::start(&server, "linger", "lingers");
        let worker = server.worker();
        let started = children(worker).first().expect("it lingers").0;
        // With a limit of 1 the kernel writes no dump and starts no program for one; with 0 it starts the program.
        for pid in [worker, started] {
            assert_eq!(limits_of(pid, "Max core file size"), ["1", "1"], "{user:?}");
        }
        hostile.end();
        server.end();
    }
}

#[test]
fn memory_that_a_worker_keeps_from_being_taken_back_is_limited_also_where_its_server_may_keep_more() {
    for user in users() {
        let server = Server::start(*user, "locked", &[]);
        let client = server.client();
        ping(&client);
        let of_server = limits_of(server.child.id(), "Max locked memory")[1].parse().unwrap_or(u64::MAX);
        let of_worker = limits_of(server.worker(), "Max locked memory");
        assert_eq!(of_worker, [(); 2].map(|()| LOCKED.min(of_server).to_string()), "{user:?}");
        server.end();
    }
}

#[test]
fn a_call_in_the_way_of_32_bit_programs_ends_its_worker_and_no_other() {
    for user in users() {
        let server = Server::start(*user, "old", &[]);
        let neighbour = server.client();
        ping(&neighbour);
        let output = server.escape(&["old"]).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(!said.contains("survived"), "{user:?}: {said}");
        ping(&neighbour);
        wait_until("the worker has ended", || server.tenants().len() == 1);
        server.end();
    }
}

#[test]
fn a_kernels_process_groups_bring_the_servers_processes_no_signal() {
    for user in users() {
        // As a service manager starts it. No process of its group has a parent in another group of the session: the kernel ends such a group.
        let server = Server::with(*user, "orphan", &[], |command| {
            // SAFETY: takes nothing.
            let session =
                || if unsafe { libc::setsid() } < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) };
            // SAFETY: between fork and exec only that system call is made.
            unsafe { command.pre_exec(session) };
        });
        let neighbour = server.client();
        ping(&neighbour);
        let its_worker = server.worker();
        let got = numbers(&done(&mut server.escape(&["orphan"])));
        assert!(got.len() == 1 && got[0].1 < 0, "{user:?}: {got:?}");
        ping(&neighbour);
        // SAFETY: takes an integer.
        let groups = [server.child.id(), its_worker].map(|pid| unsafe { libc::getpgid(pid as i32) });
        assert_eq!(groups, [server.child.id(), its_worker].map(|pid| pid as i32), "{user:?}");
        server.end();
    }
}

/// Processes whose parent is this one: number, state.
fn children(pid: u32) -> Vec<(u32, char)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let (state, parent) = (fields.next(), fields.next().and_then(|p| p.parse::<u32>().ok()));
        if let (Some(number), Some(state), Some(parent)) = (number, state, parent) {
            if parent == pid {
                found.push((number, state.chars().next().unwrap_or(' ')));
            }
        }
    }
    found
}

/// The effective and the permitted capabilities, and those that a program may get.
fn capabilities(pid: u32) -> Vec<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let of = |set: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(set)).expect("a set");
        u64::from_str_radix(line.trim(), 16).expect("bits")
    };
    ["CapEff:", "CapPrm:", "CapBnd:"].map(of).to_vec()
}

#[test]
fn a_worker_has_no_capability_and_a_server_only_those_that_it_uses() {
    for user in users() {
        let server = Server::start(*user, "capabilities", &[]);
        let client = server.client();
        ping(&client);
        let worker = server.worker();
        let status = std::fs::read_to_string(format!("/proc/{worker}/status")).expect("it lives");
        assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{status}");
        let adjusted = std::fs::read_to_string(format!("/proc/{worker}/oom_score_adj")).expect("it lives");
        assert_eq!(adjusted.trim(), "1000");
        assert_eq!(capabilities(worker), [0, 0, 0]);
        // Loading modules, raw devices, rebooting, setting the clock, making nodes: none of a server's business.
        let others = 1 << 16 | 1 << 17 | 1 << 22 | 1 << 25 | 1 << 27;
        let server_has = capabilities(server.child.id());
        assert_eq!((server_has[0] & others, server_has[1] & others), (0, 0), "{server_has:x?}");
        if is_root() && *user == User::Own {
            assert_eq!(server_has[2] & others, 0, "{server_has:x?}");
            let uids = status.lines().find(|line| line.starts_with("Uid:")).expect("ids");
            let own = format!("{}", 0x7000_0000_u32 + worker);
            assert!(uids.split_whitespace().skip(1).all(|uid| uid == own), "{uids}");
        }
        server.end();
    }
}

/// Returns whether a process runs; a zombie does not.
fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[test]
fn workers_and_what_they_started_end_with_their_server_however_it_ends() {
    for user in users() {
        let server = Server::start(*user, "killed", &[]);
        let hostile = Hostile::start(&server, "linger", "lingers");
        let worker = server.worker();
        let started: Vec<u32> = children(worker).into_iter().map(|(pid, _)| pid).collect();
        assert!(lives(worker) && started.len() == 1 && lives(started[0]), "{started:?}");
        server.end();
        wait_until("the worker has ended", || !lives(worker));
        wait_until("what it started has ended", || !lives(started[0]));
        hostile.end();
    }
}

#[test]
fn no_program_that_a_kernel_executes_takes_its_workers_place_and_with_it_outlives_the_server() {
    for user in users() {
        let server = Server::start(*user, "replace", &[]);
        let got = numbers(&done(&mut server.escape(&["replace"])));
        assert!(
            got.len() == 2 && got.iter().all(|(_, result)| *result == -i64::from(libc::EPERM)),
            "{user:?}: {got:?}"
        );
        server.end();
    }
}

#[test]
fn a_server_whose_files_are_its_users_alone_serves() {
    for user in users() {
        let server = Server::with(*user, "umask", &[], |command| {
            let umask = || {
                // SAFETY: an integer only.
                unsafe { libc::umask(0o077) };
                Ok(())
            };
            // SAFETY: between fork and exec only that system call is made.
            unsafe { command.pre_exec(umask) };
        });
        done(&mut server.escape(&["come"]));
        server.end();
    }
}

#[test]
fn a_client_is_told_that_its_server_can_start_nothing_for_it() {
    // The kernel limits no tasks of root's.
    let Some(user) = users().iter().find(|user| !is_root() || **user == User::Nobody) else { return };
    let server = Server::start(*user, "tasks", &[]);
    // As the server's user: a root without CAP_SYS_RESOURCE may not limit others' processes.
    let mut prlimit = Command::new("prlimit");
    if *user == User::Nobody {
        prlimit.uid(NOBODY).gid(NOBODY);
    }
    done(prlimit.args(["--nproc=0:0", "--pid"]).arg(server.child.id().to_string()));
    for _ in 0..3 {
        let mut client = std::os::unix::net::UnixStream::connect(&server.socket).expect("it listens");
        let why = tombolo_calls::hello::welcomed(&mut client).expect_err("it has no threads").to_string();
        assert!(why.contains("could not start a worker"), "{why}");
    }
    assert!(server.end().contains("no thread could be started for a client"));
}

#[test]
fn what_a_kernel_starts_has_its_workers_niceness_and_ends_with_it() {
    for user in users() {
        let server = Server::start(*user, "linger", &["--weight", "50"]);
        let hostile = [(); 2].map(|()| Hostile::start(&server, "linger", "lingers"));
        let workers: Vec<u32> = server.tenants().iter().map(|t| t.pid).collect();
        let started: Vec<u32> = workers.iter().flat_map(|w| children(*w)).map(|(pid, _)| pid).collect();
        assert_eq!((workers.len(), started.len()), (2, 2), "{workers:?} {started:?}");
        // SAFETY: integers only.
        let niceness = |pid: u32| unsafe { libc::getpriority(libc::PRIO_PROCESS, pid) };
        let of_server = niceness(server.child.id());
        for pid in workers.into_iter().chain(started.iter().copied()) {
            assert_eq!(niceness(pid), (of_server + 3).min(19), "{user:?}");
            // A kernel that groups threads by session divides by the sessions' niceness.
            if let Ok(group) = std::fs::read_to_string(format!("/proc/{pid}/autogroup")) {
                assert!(group.ends_with(" nice 3\n"), "{user:?}: {group}");
            }
        }
        for hostile in hostile {
            hostile.end();
        }
        wait_until("the workers have ended", || server.tenants().is_empty());
        for pid in started {
            assert!(!lives(pid), "{user:?}: process {pid} outlives its worker");
        }
        server.end();
    }
}

#[test]
fn children_of_a_server_and_of_its_workers_are_not_forgotten_where_a_program_starts_it_that_ignores_their_ends()
 {
    for user in users() {
        for options in [&[][..], &["--unconfined"]] {
            let name = format!("ignores{}", options.concat());
            let server = Server::with(*user, &name, options, |command| {
                let ignore = || {
                    // SAFETY: integers only.
                    let before = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
                    if before == libc::SIG_ERR { Err(std::io::Error::last_os_error()) } else { Ok(()) }
                };
                // SAFETY: between fork and exec only that system call is made.
                unsafe { command.pre_exec(ignore) };
            });
            let client = server.client();
            ping(&client);
            for pid in [server.child.id(), server.worker()] {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
                let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("signals");
                let ignored = u64::from_str_radix(ignored.trim(), 16).expect("bits");
                assert_eq!(ignored & 1 << (libc::SIGCHLD - 1), 0, "{user:?} {options:?}");
            }
            server.end();
        }
    }
}

#[test]
fn memory_disk_and_processes_end_at_their_limits_and_nothing_of_them_stays() {
    for user in users() {
        let server = Server::start(*user, "fill", &["--memory", "64"]);
        let got = numbers(&done(&mut server.escape(&["fill"])));
        let of = |what: &str| got.iter().find(|(w, _)| w == what).unwrap_or_else(|| panic!("{got:?}")).1;
        // Each is more than nothing, so that what ended it was its limit.
        let most = (64 + (WORKING >> 20)) as i64;
        assert!((most / 2..=most).contains(&of("private MiB")), "{got:?}");
        assert!(of("shared") < 0, "{got:?}");
        let to_read = most + (SPARE_ADDRESSES >> 20) as i64;
        assert!((most / 2..=to_read).contains(&of("MiB to read")), "{got:?}");
        assert!((256..=512).contains(&of("file MiB")), "{got:?}");
        assert!((1024..=1 << 16).contains(&of("files")), "{got:?}");
        assert_eq!(of("KiB in sockets"), 0, "{got:?}");
        // Its threads are tasks too.
        assert!((FEWEST_TASKS as i64 / 2..=tasks(64) as i64).contains(&of("processes")), "{got:?}");
        assert!((1..=SIGNALS as i64).contains(&of("signals")), "{got:?}");
        wait_until("the worker has ended", || server.tenants().is_empty());
        server.end();
    }
}

#[test]
fn a_client_is_served_beside_a_worker_that_starts_all_the_processes_that_it_may_have() {
    for user in users() {
        let server = Server::start(*user, "many", &[]);
        let neighbour = server.client();
        ping(&neighbour);
        let mut hostile =
            server.escape(&["many"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        let worker = || server.tenants().iter().map(|t| t.pid).find(|pid| children(*pid).len() >= 128);
        wait_until("it has processes", || worker().is_some());
        ping(&neighbour);
        hostile.kill().expect("killed");
        hostile.wait().expect("its end");
        wait_until("its worker is ended", || server.tenants().len() == 1);
        ping(&neighbour);
        server.end();
    }
}

#[test]
fn a_worker_that_does_not_end_with_its_client_is_ended() {
    for user in users() {
        let server = Server::start(*user, "deaf", &[]);
        let hostile = Hostile::start(&server, "deaf", "deaf");
        let worker = server.worker();
        assert!(hostile.end().success());
        wait_until("the worker is ended", || server.tenants().is_empty());
        assert!(!lives(worker));
        server.end();
    }
}

#[test]
fn a_worker_that_never_stops_talking_is_ended_with_its_client_and_sends_no_terminal_its_codes() {
    for user in users() {
        let mut server = Server::start(*user, "chatter", &[]);
        let mut said = server.child.stderr.take().expect("piped");
        // Room for all of it: a server leaves out lines that no reader takes.
        // SAFETY: integers only.
        assert!(unsafe { libc::fcntl(said.as_raw_fd(), libc::F_SETPIPE_SZ, 1 << 20) } > 0);
        let hostile = Hostile::start(&server, "chatter", "chatter");
        let worker = server.worker();
        let (mut log, mut bytes) = (String::new(), [0; 4096]);
        while !log.contains("says too much") {
            let n = said.read(&mut bytes).expect("a log");
            assert_ne!(n, 0, "the server ended: {log}");
            log.push_str(&String::from_utf8_lossy(&bytes[..n]));
        }
        assert!(log.contains("?c??c?") && !log.chars().any(|c| c.is_control() && c != '\n'), "{log}");
        assert!(hostile.end().success());
        wait_until("the worker is ended", || server.tenants().is_empty());
        assert!(!lives(worker));
        server.end();
    }
}

#[test]
fn more_waits_than_a_worker_has_threads_for_are_refused_and_the_others_end() {
    let server = Server::start(User::Own, "waits", &[]);
    let mut child =
        server.program("waits").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    out.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    let calls = || server.tenant("waits").expect("it is served").calls;
    let before = calls();
    let go_on = || child.stdin.as_ref().expect("piped").write_all(b"x").expect("written");
    go_on();
    wait_until("all waits are read", || calls() >= before + 300);
    go_on();
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("text");
    assert!(child.wait().expect("it ends").success());
    let number = |what: &str| -> u32 {
        let line = rest.lines().find_map(|line| line.strip_prefix(what)).unwrap_or_else(|| panic!("{rest}"));
        line.parse().expect("a number")
    };
    assert_eq!((number("set: "), number("done: ") + number("refused: ")), (0, 300), "{rest}");
    assert!(number("done: ") > 128 && number("refused: ") > 0, "{rest}");
    server.end();
}

/// A filter that lets this process, and whatever it starts, have no such system call.
fn without(number: libc::c_long) -> seccompiler::BpfProgram {
    let rules = [(number, Vec::new())].into_iter().collect();
    let (allow, none) =
        (seccompiler::SeccompAction::Allow, seccompiler::SeccompAction::Errno(libc::ENOSYS as u32));
    let arch = std::env::consts::ARCH.try_into().expect("this processor");
    let filter = seccompiler::SeccompFilter::new(rules, allow, none, arch).expect("a filter");
    filter.try_into().expect("a program")
}

/// A server on a host that lacks a system call: how it ended, and what it said.
fn where_there_is_no(number: libc::c_long, options: &[&str]) -> (ExitStatus, String) {
    let program = without(number);
    ended_or_listens(&format!("lacks-{number}"), options, move || {
        // SAFETY: integers only.
        unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        seccompiler::apply_filter(&program).map_err(std::io::Error::other)
    })
}

/// A server that makes some system calls before it starts: how it ended, and what it said. One that listens is killed.
fn ended_or_listens(
    name: &str,
    options: &[&str],
    before: impl FnMut() -> std::io::Result<()> + Send + Sync + 'static,
) -> (ExitStatus, String) {
    let socket = folder().join(format!("{name}.sock"));
    let mut command = server_command(User::Own);
    command.arg("--listen").arg(format!("unix:{}", socket.display())).args(options);
    // SAFETY: between fork and exec only system calls are made.
    unsafe { command.pre_exec(before) };
    let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
    wait_until("it ends or listens", || socket.exists() || child.try_wait().expect("a child").is_some());
    if socket.exists() {
        child.kill().expect("it runs");
    }
    let status = child.wait().expect("it ended");
    // A killed server leaves its socket.
    let _there_or_not = std::fs::remove_file(&socket);
    (status, said(&mut child))
}

#[test]
fn a_server_that_can_not_confine_its_workers_says_what_is_missing_and_serves_only_when_told_to() {
    let lacking = [
        (libc::SYS_landlock_create_ruleset, "CONFIG_SECURITY_LANDLOCK"),
        (libc::SYS_pivot_root, "a file system of its own (mount namespace)"),
        (libc::SYS_clone3, "no process with namespaces of its own"),
    ];
    for (number, words) in lacking {
        let (status, said) = where_there_is_no(number, &[]);
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains("can't be confined here") && said.contains(words), "{said}");
        assert!(said.contains("--unconfined"), "{said}");
    }
    let (status, said) = where_there_is_no(libc::SYS_landlock_create_ruleset, &["--unconfined"]);
    assert!(status.code().is_none(), "it was killed when it listened: {said}");
    assert!(said.contains("a client's kernels can do all that this server's user can"), "{said}");
}

/// Takes the control groups and a capability from the program that this process executes.
fn lose_groups_and_namespaces() -> std::io::Result<()> {
    const CAP_SYS_ADMIN: libc::c_int = 21;
    let check = |r| if r < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) };
    let (root, tmpfs, groups, none) =
        (c"/".as_ptr(), c"tmpfs".as_ptr(), c"/sys/fs/cgroup".as_ptr(), std::ptr::null());
    // SAFETY: strings that end with a zero, and integers.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS))?;
        check(libc::mount(none, root, none, libc::MS_REC | libc::MS_PRIVATE, none.cast()))?;
        check(libc::mount(tmpfs, groups, tmpfs, 0, none.cast()))?;
        check(libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0))
    }
}

#[test]
fn a_server_of_root_without_capabilities_and_control_groups_does_not_serve_as_its_workers_would_be_root() {
    if !is_root() {
        return;
    }
    let (status, said) = ended_or_listens("bounded", &[], lose_groups_and_namespaces);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("CAP_SYS_ADMIN") && said.contains("--cgroup"), "{said}");
}

#[test]
fn shared_virtual_memory_works_behind_the_wall() {
    let natively = done(Command::new(folder().join("svm")).env_remove("OCL_ICD_VENDORS"));
    for user in users() {
        let server = Server::start(*user, "svm", &[]);
        let forwarded = done(&mut server.program("svm"));
        let [natively, forwarded] = [&natively, &forwarded].map(|o| String::from_utf8_lossy(&o.stdout));
        assert!(!natively.is_empty());
        assert_eq!(natively, forwarded);
        server.end();
    }
}

#[test]
fn drivers_are_found_by_a_list_that_lies_where_the_server_is_told() {
    for user in users() {
        // PoCL finds its own files by where its library lies, so only the list is elsewhere.
        let vendors = folder().join(format!("vendors-{user:?}"));
        std::fs::create_dir_all(&vendors).expect("a folder");
        std::fs::copy("/etc/OpenCL/vendors/pocl.icd", vendors.join("one.icd")).expect("pocl-opencl-icd");
        let server = Server::with(*user, "elsewhere", &[], |command| {
            command.env("OCL_ICD_VENDORS", &vendors);
        });
        let said = numbers(&done(&mut server.escape(&["fill"])));
        assert_eq!(said.len(), 8, "{said:?}");
        server.end();
    }
}

#[test]
fn a_client_reads_nothing_of_the_servers_environment_and_descriptors() {
    for user in users() {
        let server = Server::start(*user, "environment", &[]);
        let client = server.client();
        ping(&client);
        let worker = server.worker();
        let environment = std::fs::read(format!("/proc/{worker}/environ"));
        // A process that isn't dumpable shows it to root alone.
        if is_root() {
            let environment = String::from_utf8_lossy(&environment.expect("root reads it")).into_owned();
            assert!(environment.contains("PATH=") && !environment.contains("SECRET"), "{environment}");
            let descriptors = std::fs::read_dir(format!("/proc/{worker}/fd")).expect("root reads them");
            let names: Vec<String> = descriptors
                .filter_map(|fd| Some(std::fs::read_link(fd.ok()?.path()).ok()?.display().to_string()))
                .collect();
            let known = |name: &String| {
                ["/dev/null", "pipe:", "socket:", "anon_inode:", "/memfd:tombolo-"]
                    .iter()
                    .any(|k| name.starts_with(k))
            };
            assert!(names.iter().all(known), "{names:?}");
        }
        server.end();
    }
}
