// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The signals of this process: of its children's ends, and those that ask it to end.

use std::io;

const ASK: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

fn asking() -> libc::sigset_t {
    // SAFETY: a set of signals is plain data, which sigemptyset makes whole; the set lives during the calls.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in ASK {
            libc::sigaddset(&mut set, signal);
        }
        set
    }
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
        }
    })?;
    Ok(())
}
