// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's references to our inodes: how often it has looked each up (and will forget it), and how often it has it
//! open. The first open takes the member's reference in the file system, the last release drops it.
//!
//! The kernel's number of an inode has a part of the generation: another member may remove a file and give its number to a new one while requests for
//! the old one are under way.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::fs::{Attr, Filesystem, Handle, Result};

fn ino_of(number: u64) -> u64 {
    number & ((1 << INO_BITS) - 1)
}

#[derive(Default)]
struct Node {
    lookups: u64,
    opens: u64,
    generation: u32,
    /// The directory and name of its last lookup.
    place: Option<(u64, Box<[u8]>)>,
    /// The end of the last event about a change of its data.
    modify_told: u64,
    /// The size that the kernel knows: it was told so, or its own writes made it.
    size: u64,
    /// A program has opened or written it with O_DIRECT.
    direct: bool,
}

const SHARDS: usize = 64;
const INO_BITS: u32 = 48;
const GENERATION: u32 = 0x7fff;

/// The number by which the kernel knows the root of the mount.
const TOP: u64 = 1;

/// The table. An inode stays in it while the kernel knows it.
pub struct Nodes {
    root: Handle,
    shards: Vec<Mutex<HashMap<u64, Node>>>,
}

impl Nodes {
    /// Makes the table of a mount, whose root is the member's: the directory that it is confined to, if it is.
    pub fn new(root: Handle) -> Nodes {
        Nodes { root, shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    /// Returns the number by which the kernel knows an inode. The protocol gives the root's.
    pub fn number(&self, handle: Handle) -> u64 {
        let Handle { ino, generation } = handle;
        if ino == self.root.ino { TOP } else { u64::from(generation & GENERATION) << INO_BITS | ino }
    }

    fn shard(&self, number: u64) -> MutexGuard<'_, HashMap<u64, Node>> {
        // A panic elsewhere leaves counts as they were: still usable.
        self.shards[(number % SHARDS as u64) as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a lookup: an entry was sent to the kernel, for this name of a directory.
    pub fn looked_up(&self, attr: &Attr, dir: u64, name: &[u8]) {
        let number = self.number(Handle::from(attr));
        let mut shard = self.shard(number);
        let node = shard.entry(number).or_default();
        node.lookups += 1;
        node.generation = attr.generation;
        node.size = attr.size;
        if node.place.as_ref().is_none_or(|(d, n)| (*d, &**n) != (dir, name)) && name != b"." && name != b".."
        {
            node.place = Some((dir, name.into()));
        }
    }

    /// Returns the inode number of the directory, and the name, of its last lookup.
    pub fn place(&self, number: u64) -> Option<(u64, Vec<u8>)> {
        self.shard(number).get(&number)?.place.as_ref().map(|(dir, name)| (*dir, name.to_vec()))
    }

    /// Returns the end of the last event about a change of its data.
    pub fn modify_told(&self, number: u64) -> u64 {
        self.shard(number).get(&number).map_or(0, |node| node.modify_told)
    }

    /// Stores the end of the last event about a change of its data.
    pub fn set_modify_told(&self, number: u64, end: u64) {
        if let Some(node) = self.shard(number).get_mut(&number) {
            node.modify_told = end;
        }
    }

    /// The kernel is told this size.
    pub fn set_size(&self, number: u64, size: u64) {
        if let Some(node) = self.shard(number).get_mut(&number) {
            node.size = size;
        }
    }

    /// A call of this kernel has written up to 'end'. direct: with O_DIRECT.
    pub fn wrote(&self, number: u64, end: u64, direct: bool) {
        if let Some(node) = self.shard(number).get_mut(&number) {
            node.size = node.size.max(end);
            node.direct |= direct;
        }
    }

    /// A program has opened the inode with O_DIRECT.
    pub fn set_direct(&self, number: u64) {
        self.wrote(number, 0, true);
    }

    /// Returns whether the kernel may have sent a truncation to this size of its own accord. It does so after an asynchronous direct write that failed,
    /// to remove what that left behind the end that the kernel knows. Other members' data may lie there.
    pub fn is_clean_up(&self, number: u64, size: u64) -> bool {
        self.shard(number).get(&number).is_some_and(|node| node.direct && node.size == size)
    }

    /// Returns the handle of the kernel's number. The root, which the kernel does not look up, is never freed.
    pub fn handle(&self, number: u64) -> Handle {
        let known = self.shard(number).get(&number).map(|node| node.generation);
        self.handle_of(number, known.unwrap_or((number >> INO_BITS) as u32))
    }

    fn handle_of(&self, number: u64, generation: u32) -> Handle {
        if number == TOP { self.root } else { Handle { ino: ino_of(number), generation } }
    }

    /// Subtracts `n` lookups that the kernel dropped.
    pub fn forget(&self, number: u64, n: u64) {
        if let Entry::Occupied(mut entry) = self.shard(number).entry(number) {
            let node = entry.get_mut();
            node.lookups = node.lookups.saturating_sub(n);
            if node.lookups == 0 && node.opens == 0 {
                entry.remove();
            }
        }
    }

    /// Counts an open; from the first open to the last release the inode's contents stay.
    pub fn open(&self, fs: &Filesystem, handle: Handle) -> Result<()> {
        let number = self.number(handle);
        let mut shard = self.shard(number);
        let node = shard.entry(number).or_default();
        if node.opens == 0 && fs.area().writable() {
            if let Err(error) = fs.open_bit(handle) {
                if node.lookups == 0 {
                    shard.remove(&number);
                }
                drop(shard);
                // The rest, too: what it could not do is left to its recovery.
                let _ = fs.free_unused(handle);
                return Err(error);
            }
        }
        if node.opens == 0 {
            node.generation = handle.generation;
        }
        node.opens += 1;
        Ok(())
    }

    pub fn release(&self, fs: &Filesystem, number: u64) -> Result<()> {
        // Held until the reference is dropped, so that an open in between takes it again; and not while the file is freed, which may wait for a suspended
        // member: other files are in this part of the table.
        let mut shard = self.shard(number);
        let node = shard.get_mut(&number).ok_or(Errno::BADF)?;
        node.opens = node.opens.checked_sub(1).ok_or(Errno::BADF)?;
        let last = node.opens == 0;
        let handle = self.handle_of(number, node.generation);
        if last {
            node.direct = false;
        }
        if last && node.lookups == 0 {
            shard.remove(&number);
        }
        if !last || !fs.area().writable() {
            return Ok(());
        }
        fs.close_bit(handle);
        drop(shard);
        fs.free_unused(handle)
    }

    /// Drops the references of all open files: the mount ended.
    pub fn close_all(&self, fs: &Filesystem) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for (number, node) in shard.drain().filter(|(_, node)| node.opens > 0 && fs.area().writable()) {
                let handle = self.handle_of(number, node.generation);
                // An error has no reader any more; recovery drops the rest.
                let _ = fs.close_ref(handle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::ROOT;

    #[test]
    fn a_request_for_a_removed_file_does_not_reach_the_new_file_with_its_inode_number() {
        let nodes = Nodes::new(ROOT.into());
        let [removed, anew] = [1, 2].map(|generation| Handle { ino: 7, generation });
        for (handle, name) in [(removed, b"removed".as_slice()), (anew, b"anew")] {
            let attr = Attr { ino: handle.ino, generation: handle.generation, ..Attr::default() };
            nodes.looked_up(&attr, ROOT, name);
        }
        assert_eq!([removed, anew].map(|handle| nodes.handle(nodes.number(handle))), [removed, anew]);
        nodes.forget(nodes.number(anew), 1);
        assert_eq!(nodes.handle(nodes.number(removed)), removed);
        assert_eq!(nodes.handle(ROOT), Handle { ino: ROOT, generation: 0 });
    }
}
