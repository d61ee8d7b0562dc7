// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures an appender among threads that lock and unlock ranges of its file.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tombolo_files::fs::{Create, FileLock, ROOT};
use tombolo_files::sys;

use crate::zone::{Zone, raise};

/// Between two appends.
const PAUSE: Duration = Duration::from_millis(1);

/// Lockers of one member without pause, and an appender with one.
pub fn run(mib: u64, lockers: u64, seconds: u64) -> Result<String, String> {
    let zone = Zone::new(mib)?;
    let fs = zone.open(zone.join(0)?)?;
    let file = Create::mode(libc::S_IFREG | 0o644);
    let file = fs.create(ROOT, Some(b"file"), &file).map_err(|e| format!("create: {e}"))?;
    let (stop, longest, locked) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let lock_on = |who: u64| -> Result<(), String> {
        while !stop.load(Ordering::Relaxed) {
            for type_ in [sys::TFS_LK_WRITE, sys::TFS_LK_UNLOCK] {
                let (start, kind) = (who * 10, sys::TFS_LK_POSIX);
                let lock = FileLock { owner: who, start, end: start + 5, type_, kind, ..FileLock::default() };
                let since = Instant::now();
                fs.set_lock(file, &lock).map_err(|e| format!("locker {who}: {e}"))?;
                raise(&longest, since.elapsed().as_nanos() as u64);
            }
            locked.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    };
    let (appends, slowest, passed) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..lockers).map(|who| scope.spawn(move || lock_on(who))).collect();
        let (mut appends, mut slowest, mut passed) = (0u64, Duration::ZERO, 0);
        let end = Instant::now() + Duration::from_secs(seconds);
        let mut result = Ok(());
        while Instant::now() < end && result.is_ok() {
            let (since, before) = (Instant::now(), locked.load(Ordering::Relaxed));
            result = fs.append(file, &[1; 4096], false).map(|_| ()).map_err(|e| format!("append: {e}"));
            slowest = slowest.max(since.elapsed());
            passed += locked.load(Ordering::Relaxed) - before;
            appends += 1;
            std::thread::sleep(PAUSE);
        }
        stop.store(true, Ordering::Relaxed);
        let joined =
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a locker panicked".into())));
        joined.chain([result]).collect::<Result<(), String>>().map(|()| (appends, slowest, passed))
    })?;
    drop(fs);
    zone.check()?;
    Ok(format!(
        "{lockers} lockers: {appends} appends in {seconds} s, the slowest {} ms, {} locks of others during one; {} locks, the slowest {} ms",
        slowest.as_millis(),
        passed / appends.max(1),
        locked.load(Ordering::Relaxed),
        longest.load(Ordering::Relaxed) / 1_000_000
    ))
}
