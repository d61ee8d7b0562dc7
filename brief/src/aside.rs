// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A thread that ends what clients have left. Signals cut a wait short, and no work: the kernel frees a file in memory of a GiB in an eighth of a second of processor time, and an epoll with 100,000
//! entries in a twentieth. A thread that serves all clients has another one do that.

use std::io;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

/// Drops values in a thread of its own, one after the other.
#[derive(Debug)]
pub struct Aside<T>(SyncSender<T>);

impl<T: Send + 'static> Aside<T> {
    /// Starts the thread, for which at most `most` values wait. It ends with this.
    ///
    /// # Errors
    /// There is no room for a thread.
    pub fn start(most: usize) -> io::Result<Aside<T>> {
        let (sender, values) = sync_channel(most);
        let thread = std::thread::Builder::new().name("ends".to_owned());
        thread.spawn(move || values.into_iter().for_each(drop))?;
        Ok(Aside(sender))
    }

    /// Has the thread drop a value; drops it here if as many wait as may.
    pub fn end(&self, value: T) {
        if let Err(TrySendError::Full(value) | TrySendError::Disconnected(value)) = self.0.try_send(value) {
            drop(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::ThreadId;

    /// Its end waits for a word, and tells which thread it was.
    struct Slow(Receiver<()>, Sender<ThreadId>);

    impl Drop for Slow {
        fn drop(&mut self) {
            // It also returns when the sender is dropped.
            let _word = self.0.recv();
            self.1.send(std::thread::current().id()).unwrap();
        }
    }

    #[test]
    fn an_end_that_takes_long_holds_up_nobody_and_only_so_many_wait() {
        let aside = Aside::start(1).unwrap();
        let (tells, told) = channel();
        let slow = || {
            let (go, word) = channel();
            (go, Slow(word, tells.clone()))
        };
        // The thread has taken this one when it tells so.
        let (go, at_once) = slow();
        drop(go);
        aside.end(at_once);
        let other = told.recv().unwrap();
        let here = std::thread::current().id();
        assert_ne!(other, here);
        let (first_go, first) = slow();
        aside.end(first);
        // One of these waits, or two of them do: the thread may have taken the first one.
        for _ in 0..3 {
            let (go, more) = slow();
            drop(go);
            aside.end(more);
        }
        assert_eq!(told.recv().unwrap(), here, "as many wait as may");
        drop(first_go);
        drop((aside, tells));
        let ended: Vec<ThreadId> = told.iter().collect();
        assert!(ended.len() == 3 && ended.contains(&other), "{ended:?}");
    }
}
