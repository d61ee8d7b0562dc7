// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The signals of this process: of its children's ends, and those that ask it to end.

use std::io;

const ASK: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Returns whether the program that started this one had it ignore a signal, as nohup(1) does.
fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: plain data, for which zeroes are values, that lives during the call; nothing is changed.
    unsafe {
        let mut how: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut how) == 0 && how.sa_sigaction == libc::SIG_IGN
    }
}

/// Those that ask this process to end. One that is ignored does not: a thread that waited for it would get it all the same.
fn asking() -> libc::sigset_t {
    // SAFETY: a set of signals is plain data, which sigemptyset makes whole; the set lives during the calls.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in ASK.into_iter().filter(|signal| !is_ignored(*signal)) {
            libc::sigaddset(&mut set, signal);
        }
        set
    }
}

/// Has a write beyond the limit of a file's size (RLIMIT_FSIZE) fail, here and in what this process starts: by itself the kernel ends a process for it, and a server with it as soon as its log
/// is that long.
pub fn keep_writes_beyond_a_files_limit_from_ending_this() {
    // SAFETY: integers only; for this signal the call can't fail.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Has the kernel keep ended children until this process waits for them. A program may have started this one with their ends ignored: then the kernel forgets them,
/// with the processor time that they used and with their numbers, and so it is for what workers start, which inherit that.
pub fn keep_ended_children() {
    // SAFETY: integers only; for this signal the call can't fail.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Calls `last` when a signal asks this process to end, and then ends it by that signal. For a process that has one thread yet.
///
/// # Errors
/// There is no thread for it.
pub fn before_the_end(last: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let set = asking();
    // SAFETY: the set lives during the call.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut signal = 0;
        // SAFETY: the set, and room for a signal.
        unsafe { libc::sigwait(&set, &mut signal) };
        last();
        // SAFETY: integers, and a set that lives during the call. Unblocked, the signal ends the process before raise returns.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
            libc::raise(signal);
            // The first process of a PID namespace (a container's) gets no signal for which it has no handler.
            libc::_exit(128 + signal);
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_was_ignored_when_a_server_began_does_not_ask_it_to_end() {
        let ask = || {
            let set = asking();
            // SAFETY: a set that lives during the call.
            ASK.map(|signal| unsafe { libc::sigismember(&set, signal) } == 1)
        };
        // The tests may run under nohup(1), or in the background of a shell without job control.
        for signal in ASK {
            // SAFETY: integers only; no other test is about these signals.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        assert_eq!(ask(), [true; 3]);
        // SAFETY: integers only; no other test is about this signal.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
        assert_eq!(ask(), [true, true, false]);
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
    }
}
