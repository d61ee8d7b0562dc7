// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks of files between processes (flock(2)). Whoever can open a file can lock it, and a process that is stopped keeps its locks, so every wait has
//! a limit.

use std::fs::File;
use std::io;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(20);

/// Locks `file`, which is at `path`, until it is closed. Waits at most `limit` for another process.
///
/// # Errors
/// At the limit, with the way to find that process, and those of the system.
pub fn take(file: &File, path: &Path, limit: Duration) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < limit => sleep(PAUSE),
            Err(Errno::WOULDBLOCK) => {
                let (seconds, path) = (limit.as_secs(), path.display());
                let text = format!(
                    "another process keeps it locked for more than {seconds} s; 'fuser -v {path}' says which"
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            other => return Ok(other?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_another_keeps_is_an_error_at_the_limit_that_says_how_to_find_whose_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let [first, second] = [(); 2].map(|()| File::create(&path).unwrap());
        take(&first, &path, Duration::ZERO).unwrap();
        let error = take(&second, &path, Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains(&format!("fuser -v {}", path.display())), "{error}");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| take(&second, &path, Duration::from_secs(3600)));
            drop(first);
            waits.join().unwrap().unwrap();
        });
    }
}
