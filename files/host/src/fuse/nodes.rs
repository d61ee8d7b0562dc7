// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's references to our inodes: how often it has looked each up (and will forget it), and how often it has it
//! open. The first open takes the member's reference in the file system, the last release drops it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::fs::{Filesystem, Handle, Result};

#[derive(Default)]
struct Node {
    lookups: u64,
    opens: u64,
    generation: u32,
    /// The directory and name of its last lookup.
    place: Option<(u64, Box<[u8]>)>,
    /// The end of the last event about a change of its data.
    modify_told: u64,
}

const SHARDS: usize = 64;

/// The table. An inode stays in it while the kernel knows it.
pub struct Nodes {
    shards: Vec<Mutex<HashMap<u64, Node>>>,
}

impl Default for Nodes {
    fn default() -> Nodes {
        Nodes { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
}

impl Nodes {
    fn shard(&self, ino: u64) -> MutexGuard<'_, HashMap<u64, Node>> {
        // A panic elsewhere leaves counts as they were: still usable.
        self.shards[(ino % SHARDS as u64) as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a lookup: an entry was sent to the kernel, for this name of a directory.
    pub fn looked_up(&self, handle: Handle, dir: u64, name: &[u8]) {
        let Handle { ino, generation } = handle;
        let mut shard = self.shard(ino);
        let node = shard.entry(ino).or_default();
        node.lookups += 1;
        node.generation = generation;
        if node.place.as_ref().is_none_or(|(d, n)| (*d, &**n) != (dir, name)) && name != b"." && name != b".."
        {
            node.place = Some((dir, name.into()));
        }
    }

    /// Returns the directory and name of its last lookup.
    pub fn place(&self, ino: u64) -> Option<(u64, Vec<u8>)> {
        self.shard(ino).get(&ino)?.place.as_ref().map(|(dir, name)| (*dir, name.to_vec()))
    }

    /// Returns the end of the last event about a change of its data.
    pub fn modify_told(&self, ino: u64) -> u64 {
        self.shard(ino).get(&ino).map_or(0, |node| node.modify_told)
    }

    /// Stores the end of the last event about a change of its data.
    pub fn set_modify_told(&self, ino: u64, end: u64) {
        if let Some(node) = self.shard(ino).get_mut(&ino) {
            node.modify_told = end;
        }
    }

    /// Returns the handle of the kernel's number. The root, which the kernel does not look up, is never freed.
    pub fn handle(&self, ino: u64) -> Handle {
        let generation = self.shard(ino).get(&ino).map_or(0, |node| node.generation);
        Handle { ino, generation }
    }

    /// Subtracts `n` lookups that the kernel dropped.
    pub fn forget(&self, ino: u64, n: u64) {
        if let Entry::Occupied(mut entry) = self.shard(ino).entry(ino) {
            let node = entry.get_mut();
            node.lookups = node.lookups.saturating_sub(n);
            if node.lookups == 0 && node.opens == 0 {
                entry.remove();
            }
        }
    }

    /// Counts an open; from the first open to the last release the inode's contents stay.
    pub fn open(&self, fs: &Filesystem, handle: Handle) -> Result<()> {
        let Handle { ino, generation } = handle;
        let mut shard = self.shard(ino);
        let node = shard.entry(ino).or_default();
        if node.opens == 0 {
            if fs.area().writable() {
                fs.open_ref(handle)?;
            }
            node.generation = generation;
        }
        node.opens += 1;
        Ok(())
    }

    pub fn release(&self, fs: &Filesystem, ino: u64) -> Result<()> {
        // Held until the reference is dropped, so that an open in between takes it again.
        let mut shard = self.shard(ino);
        let node = shard.get_mut(&ino).ok_or(Errno::BADF)?;
        node.opens = node.opens.checked_sub(1).ok_or(Errno::BADF)?;
        let last = node.opens == 0;
        let handle = Handle { ino, generation: node.generation };
        if last && node.lookups == 0 {
            shard.remove(&ino);
        }
        if last && fs.area().writable() { fs.close_ref(handle) } else { Ok(()) }
    }

    /// Drops the references of all open files: the mount ended.
    pub fn close_all(&self, fs: &Filesystem) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for (ino, node) in shard.drain().filter(|(_, node)| node.opens > 0 && fs.area().writable()) {
                // An error has no reader any more; recovery drops the rest.
                let _ = fs.close_ref(Handle { ino, generation: node.generation });
            }
        }
    }
}
