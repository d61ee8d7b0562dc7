// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Children of a server, from fork to execve. A child has copies of all that its server has open, also of the sockets of clients. If the server closes one meanwhile, the
//! child's copy is the last one, and the files that its client has passed along end in the child. execve closes copies, and waits for such an end: no signal
//! has come to its process until then. So the child closes them before, while signals come.

use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::{A_MOMENT, nothing};

/// The first descriptor that is no standard one.
const FIRST: RawFd = 3;

/// Has `command`'s process close the sockets that it doesn't keep (FD_CLOEXEC) before it becomes its program. To be called last: what was told the command before decides what
/// the process keeps.
pub fn leave_sockets(command: &mut Command) {
    // SAFETY: the closure makes async-signal-safe calls only.
    unsafe { command.pre_exec(|| while_signals_come(close_sockets)?) };
}

/// Does something in a child that may end files of clients: no such end waits for long.
///
/// # Errors
/// The kernel's.
///
/// # Safety
/// The process is a child of fork that has not executed a program: it has one thread, and its handlers of signals are its own. `run` makes async-signal-safe calls only.
pub unsafe fn while_signals_come<T>(run: impl FnOnce() -> T) -> io::Result<T> {
    let done = |r: libc::c_int| if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    let timer = |micros| {
        let interval = libc::timeval { tv_sec: 0, tv_usec: micros };
        let times = libc::itimerval { it_interval: interval, it_value: interval };
        // SAFETY: a structure that lives during the call.
        done(unsafe { libc::setitimer(libc::ITIMER_REAL, &times, std::ptr::null_mut()) })
    };
    // SAFETY: plain data, for which zeroes are values, that lives during the calls; a handler that does nothing may run at any time.
    unsafe {
        let (mut how, mut how_before): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        how.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        how.sa_flags = libc::SA_RESTART;
        done(libc::sigaction(libc::SIGALRM, &how, &mut how_before))?;
        let (mut alarm, mut blocked): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigemptyset(&mut alarm);
        libc::sigaddset(&mut alarm, libc::SIGALRM);
        done(libc::sigprocmask(libc::SIG_UNBLOCK, &alarm, &mut blocked))?;
        timer(A_MOMENT.as_micros() as libc::suseconds_t)?;
        let result = run();
        timer(0)?;
        done(libc::sigprocmask(libc::SIG_SETMASK, &blocked, std::ptr::null_mut()))?;
        done(libc::sigaction(libc::SIGALRM, &how_before, std::ptr::null_mut()))?;
        Ok(result)
    }
}

/// Closes the sockets that execve would close, but the one by which this process's starter learns whether that succeeds: of a pair (SOCK_SEQPACKET) that `Command` has made.
fn close_sockets() -> io::Result<()> {
    // SAFETY: a string with its zero; room for as many bytes as are said; numbers.
    unsafe {
        let folder =
            libc::open(c"/proc/self/fd".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC);
        if folder < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut entries = [0_u64; 256];
        loop {
            let read =
                libc::syscall(libc::SYS_getdents64, folder, entries.as_mut_ptr(), size_of_val(&entries));
            if read < 0 {
                return Err(io::Error::last_os_error());
            }
            if read == 0 {
                libc::close(folder);
                return Ok(());
            }
            let bytes = std::slice::from_raw_parts(entries.as_ptr().cast::<u8>(), read as usize);
            numbers(bytes, |fd| {
                if fd >= FIRST && is_left(fd) {
                    libc::close(fd);
                }
            });
        }
    }
}

/// The numbers among the names of a folder's entries (getdents64(2)): each begins with number, offset, length and kind.
fn numbers(mut entries: &[u8], mut each: impl FnMut(RawFd)) {
    const LENGTH: usize = 16;
    const NAME: usize = 19;
    while let Some(&[low, high]) = entries.get(LENGTH..LENGTH + 2) {
        let length = usize::from(u16::from_ne_bytes([low, high]));
        let (Some(name), Some(rest)) = (entries.get(NAME..length), entries.get(length..)) else { return };
        let digits = name.iter().take_while(|byte| byte.is_ascii_digit());
        // "." and ".." have none.
        if name.first().is_some_and(u8::is_ascii_digit) {
            each(digits.fold(0, |number, digit| number * 10 + RawFd::from(digit - b'0')));
        }
        entries = rest;
    }
}

fn is_left(fd: RawFd) -> bool {
    // SAFETY: numbers only.
    let is_closed_anyway = unsafe { libc::fcntl(fd, libc::F_GETFD) } & libc::FD_CLOEXEC != 0;
    let kind = option(fd, libc::SO_TYPE, 0);
    is_closed_anyway && kind.is_some_and(|kind| kind != libc::SOCK_SEQPACKET || !is_of_starter(fd))
}

/// Returns whether this process's starter has made a pair of sockets. A client can pass such a one along, too, but not one that another process has made.
fn is_of_starter(fd: RawFd) -> bool {
    let made_by = option(fd, libc::SO_PEERCRED, libc::ucred { pid: 0, uid: 0, gid: 0 });
    // SAFETY: takes nothing.
    made_by.is_some_and(|by| by.pid == unsafe { libc::getppid() })
}

/// An option of a socket, a value of plain numbers.
fn option<T: Copy>(fd: RawFd, name: libc::c_int, mut value: T) -> Option<T> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: room for as many bytes as are said.
    let got = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &mut len) };
    (got == 0).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Brief, endless};
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;
    use std::process::Stdio;
    use std::time::Duration;

    /// Returns the server's socket of a client that has passed along a lingering TCP socket and has gone, and the peer of that TCP socket.
    fn of_a_client() -> (UnixStream, TcpStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (passed, other) = endless::lingering().unwrap();
        endless::pass(&theirs, b"T", passed).unwrap();
        (ours, other)
    }

    /// The same, where the client has made a socket of the kind by which programs are started, and passed it along.
    fn of_a_client_who_starts_programs() -> (OwnedFd, TcpStream) {
        let (passed, other) = endless::lingering().unwrap();
        let (reads, writes) = UnixStream::pair().unwrap();
        let number = reads.as_raw_fd();
        // SAFETY: the child makes async-signal-safe calls only.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: numbers, room for two, and descriptors that nobody else owns in this process.
            unsafe {
                let mut pair = [0; 2];
                libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, pair.as_mut_ptr());
                let _passed = endless::pass(&UnixStream::from_raw_fd(pair[1]), b"T", passed);
                libc::dup2(pair[0], number);
                libc::write(writes.as_raw_fd(), [0_u8].as_ptr().cast(), 1);
                libc::pause();
                libc::_exit(0);
            }
        }
        drop(passed);
        (&reads).read_exact(&mut [0]).unwrap();
        // SAFETY: numbers only; the results are checked.
        let ours = unsafe {
            let process = libc::syscall(libc::SYS_pidfd_open, child, 0) as RawFd;
            let ours = libc::syscall(libc::SYS_pidfd_getfd, process, number, 0) as RawFd;
            assert!(ours >= 0, "{}", io::Error::last_os_error());
            libc::close(process);
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
            OwnedFd::from_raw_fd(ours)
        };
        (ours, other)
    }

    #[test]
    fn a_program_begins_though_a_client_goes_while_it_is_started_who_has_passed_an_endless_file_along() {
        let (ours, other) = of_a_client();
        begins_though_it_goes(ours.into(), other);
        let (ours, other) = of_a_client_who_starts_programs();
        begins_though_it_goes(ours, other);
    }

    fn begins_though_it_goes(ours: OwnedFd, other: TcpStream) {
        let ours = Brief::from(ours);
        let (here, there) = UnixStream::pair().unwrap();
        let go = there.as_raw_fd();
        let mut command = Command::new("echo");
        command.arg("begun");
        // SAFETY: system calls.
        unsafe {
            command.pre_exec(move || {
                // Until the other process has closed the client's socket.
                let mut byte = 0_u8;
                libc::write(go, (&raw const byte).cast(), 1);
                libc::read(go, (&raw mut byte).cast(), 1);
                Ok(())
            });
        }
        leave_sockets(&mut command);
        let (tells, told) = std::sync::mpsc::channel();
        let starter = std::thread::spawn(move || tells.send(command.output()).unwrap());
        (&here).read_exact(&mut [0]).unwrap();
        drop(ours);
        (&here).write_all(&[1]).unwrap();
        let output = told.recv_timeout(Duration::from_secs(20));
        // The file ends with its other end: a failure is no hang.
        drop((there, other));
        starter.join().unwrap();
        assert_eq!(output.expect("it begins at once").unwrap().stdout, b"begun\n");
    }

    #[test]
    fn who_starts_a_program_that_is_not_there_is_told_so() {
        let mut command = Command::new("/nonexistent/program");
        leave_sockets(&mut command);
        assert_eq!(command.spawn().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_program_has_its_signals_as_they_were_and_no_socket_but_those_it_keeps() {
        let _others: Vec<_> = (0..300).map(|_| UnixStream::pair().unwrap()).collect();
        let mut command = Command::new("sh");
        let look = "ls -l /proc/self/fd | grep -c socket; grep -E 'Sig(Blk|Ign)' /proc/self/status";
        command.args(["-c", look]).stdin(Stdio::null()).stderr(Stdio::inherit());
        // Without a closure `Command` has posix_spawn start the program, which ignores the C library's own signals.
        // SAFETY: it does nothing.
        unsafe { command.pre_exec(|| Ok(())) };
        let before = command.output().unwrap();
        leave_sockets(&mut command);
        let after = command.output().unwrap();
        assert!(after.status.success(), "{after:?}");
        assert_eq!(String::from_utf8_lossy(&before.stdout), String::from_utf8_lossy(&after.stdout));
    }

    #[test]
    fn numbers_are_read_from_a_folders_entries() {
        let entry = |name: &str| {
            let length = (19 + name.len() + 1).next_multiple_of(8);
            let mut bytes = vec![0; length];
            bytes[16..18].copy_from_slice(&(length as u16).to_ne_bytes());
            bytes[19..19 + name.len()].copy_from_slice(name.as_bytes());
            bytes
        };
        let mut found = Vec::new();
        numbers(&[".", "..", "0", "17", "1048575"].map(entry).concat(), |fd| found.push(fd));
        assert_eq!(found, [0, 17, 1_048_575]);
        numbers(&[1; 20], |_| panic!("there is none"));
    }
}
