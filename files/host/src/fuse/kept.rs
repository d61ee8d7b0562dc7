// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files that are kept for a moment after the kernel has looked them up.
//!
//! The kernel opens a file by two requests: it looks the name up, then opens what it found. If that is removed in between, as when a program replaces the
//! file at a name by rename(2), the second one gets ESTALE, and the kernel walks the path once more; another ESTALE it returns to the program. So for a
//! while after one, what is looked up is kept as if it were open, until the second request has surely come.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::nodes::Nodes;
use crate::fs::{Filesystem, Handle, Result};

/// So long after an ESTALE files are kept.
const WHILE: Duration = Duration::from_secs(1);
/// So long a file is kept: the kernel's second request comes at once, unless its process waits for a CPU.
const TIME: Duration = Duration::from_millis(200);
/// More are not kept at once.
const MOST: usize = 16_384;

pub struct Kept {
    began: Instant,
    /// Until then files are kept, in milliseconds since it began.
    until: AtomicU64,
    /// By the kernel's numbers, with the time of the last lookup.
    files: Mutex<HashMap<u64, Instant>>,
}

impl Default for Kept {
    fn default() -> Kept {
        Kept { began: Instant::now(), until: AtomicU64::new(0), files: Mutex::default() }
    }
}

impl Kept {
    fn files(&self) -> MutexGuard<'_, HashMap<u64, Instant>> {
        // A panic elsewhere leaves the table as it was: still usable.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clock(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// A request has met a file that was removed.
    pub fn met_stale(&self) {
        self.until.store(self.clock() + WHILE.as_millis() as u64, Ordering::Relaxed);
    }

    /// Keeps a file that was looked up, if any is to be kept.
    ///
    /// # Errors
    /// STALE: it is removed already.
    pub fn keep(&self, fs: &Filesystem, nodes: &Nodes, found: Handle) -> Result<()> {
        let until = self.until.load(Ordering::Relaxed);
        if until == 0 || self.clock() >= until {
            return Ok(());
        }
        let number = nodes.number(found);
        {
            let mut files = self.files();
            if let Some(since) = files.get_mut(&number) {
                *since = Instant::now();
                return Ok(());
            }
            if files.len() >= MOST {
                return Ok(());
            }
        }
        // Without the table: it may wait for a suspended member.
        nodes.open(fs, found)?;
        let kept_twice = self.files().insert(number, Instant::now()).is_some();
        if kept_twice { nodes.release(fs, number) } else { Ok(()) }
    }

    /// Returns whether files are kept, which [`Kept::let_go`] is to let go later.
    pub fn any(&self) -> bool {
        !self.files().is_empty()
    }

    /// Lets those go that were kept long enough. May wait for a suspended member.
    pub fn let_go(&self, fs: &Filesystem, nodes: &Nodes) {
        self.let_go_if(fs, nodes, |_, since| since.elapsed() >= TIME);
    }

    /// Lets those go that have no name any more. Returns whether there were any. May wait for a suspended member.
    pub fn let_removed_go(&self, fs: &Filesystem, nodes: &Nodes) -> bool {
        self.let_go_if(fs, nodes, |number, _| {
            fs.getattr(nodes.handle(number)).is_ok_and(|attr| attr.nlink == 0)
        })
    }

    fn let_go_if(&self, fs: &Filesystem, nodes: &Nodes, go: impl Fn(u64, Instant) -> bool) -> bool {
        let files: Vec<(u64, Instant)> =
            self.files().iter().map(|(number, since)| (*number, *since)).collect();
        let mut gone = false;
        for (number, since) in files.into_iter().filter(|(number, since)| go(*number, *since)) {
            let mut files = self.files();
            // It may have been looked up again.
            if files.get(&number) == Some(&since) {
                files.remove(&number);
                drop(files);
                // An error has no reader: the recovery of this member does the rest.
                let _ = nodes.release(fs, number);
                gone = true;
            }
        }
        gone
    }
}
