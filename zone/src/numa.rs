// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The NUMA nodes of a zone's memory: a policy for pages that don't exist yet, and the places of those that do.
//!
//! The policy is the memory file's own (mbind(2) on a shared mapping), so it holds for the pages that any member touches first. A file on a
//! disk has none: its pages are the page cache's.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::null_mut;

use rustix::fs::SeekFrom;
use serde::{Deserialize, Serialize};

/// A mask of nodes has so many bits.
const MASK_BITS: usize = 1024;
/// Tells get_mempolicy(2) to look at an address (linux/mempolicy.h).
const MPOL_F_ADDR: libc::c_ulong = 2;
/// Bytes that are looked at together.
const WINDOW: u64 = 2 << 20;
/// The most that is looked at. Of a larger zone windows at equal distances are.
const MOST: u64 = 1 << 30;
/// Pages in one call of move_pages(2).
const BATCH: usize = 4096;

/// A mask of nodes, as words.
type Mask = [libc::c_ulong; WORDS];
const WORDS: usize = MASK_BITS / libc::c_ulong::BITS as usize;

/// The nodes that pages of a zone are taken from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "policy", content = "nodes")]
pub enum Nodes {
    /// From these alone.
    Bind(Vec<u32>),
    /// From these in turn.
    Interleave(Vec<u32>),
}

impl Nodes {
    /// The nodes, and what mbind(2) calls the policy.
    fn parts(&self) -> (&[u32], libc::c_int) {
        match self {
            Nodes::Bind(nodes) => (nodes, libc::MPOL_BIND),
            Nodes::Interleave(nodes) => (nodes, libc::MPOL_INTERLEAVE),
        }
    }
}

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (nodes, _) = self.parts();
        let list: Vec<String> = nodes.iter().map(ToString::to_string).collect();
        let how = if matches!(self, Nodes::Bind(_)) { "bound to" } else { "interleaved over" };
        write!(f, "{how} node{} {}", if list.len() == 1 { "" } else { "s" }, list.join(", "))
    }
}

/// The places of a zone's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Where new pages come from; none: the node of the member that touches a page first.
    pub nodes: Option<Nodes>,
    /// Bytes that exist, by node, of the bytes that were looked at.
    pub bytes: BTreeMap<u32, u64>,
    /// Bytes of the zone that were looked at.
    pub looked_at: u64,
}

/// A mapping that ends with this value.
struct Mapping {
    start: *mut libc::c_void,
    length: usize,
}

impl Mapping {
    fn new(file: BorrowedFd<'_>, length: u64) -> io::Result<Mapping> {
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice, which nothing dereferences: a file that is cut short can't hurt.
        let start = unsafe { libc::mmap(null_mut(), length, libc::PROT_READ, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { start, length })
    }

    fn at(&self, offset: u64) -> *mut libc::c_void {
        self.start.wrapping_byte_add(usize::try_from(offset).unwrap_or(usize::MAX))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no address in it has left this module.
        unsafe { libc::munmap(self.start, self.length) };
    }
}

/// Returns whether the file is memory (memfd, tmpfs, hugetlbfs), whose pages follow a policy. Others have no seals.
fn is_memory(file: BorrowedFd<'_>) -> bool {
    // SAFETY: asks for a number.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

/// Lets new pages of a zone's file come from `nodes`. A file on a disk is left as it is.
///
/// # Errors
/// A node does not exist or has no memory, or the kernel knows no nodes.
pub fn place(file: BorrowedFd<'_>, length: u64, nodes: &Nodes) -> io::Result<()> {
    if !is_memory(file) {
        return Ok(());
    }
    let (list, policy) = nodes.parts();
    let mut mask: Mask = [0; WORDS];
    for node in list {
        let (word, bit) = (*node as usize / 64, node % 64);
        *mask.get_mut(word).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))? |= 1 << bit;
    }
    let mapping = Mapping::new(file, length)?;
    // SAFETY: the range is the mapping, and the mask has MASK_BITS bits.
    let placed = unsafe {
        libc::syscall(libc::SYS_mbind, mapping.start, mapping.length, policy, mask.as_ptr(), MASK_BITS, 0)
    };
    if placed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Finds out where a zone's memory is. None: its pages are those of a file on a disk, or the kernel knows no nodes.
///
/// # Errors
/// The memory can't be mapped.
pub fn look(file: BorrowedFd<'_>, length: u64) -> io::Result<Option<Memory>> {
    if !is_memory(file) {
        return Ok(None);
    }
    let mapping = Mapping::new(file, length)?;
    let Some(nodes) = policy(&mapping) else { return Ok(None) };
    let mut memory = Memory { nodes, bytes: BTreeMap::new(), looked_at: 0 };
    let step = WINDOW * length.div_ceil(MOST).max(1);
    let mut start = 0;
    while start < length {
        let end = (start + WINDOW).min(length);
        memory.looked_at += end - start;
        for (from, to) in existing(file, start, end) {
            count(&mapping, from, to, &mut memory.bytes);
        }
        start += step;
    }
    Ok(Some(memory))
}

/// The policy of the mapped file; none: the kernel knows no nodes.
fn policy(mapping: &Mapping) -> Option<Option<Nodes>> {
    let mut policy: libc::c_int = 0;
    let mut mask: Mask = [0; WORDS];
    let (to, address) = (mask.as_mut_ptr(), mapping.start);
    // SAFETY: both places live during the call, the mask has MASK_BITS bits, and the address is mapped.
    let asked = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, to, MASK_BITS, address, MPOL_F_ADDR)
    };
    if asked != 0 {
        return None;
    }
    let nodes = (0..).zip(mask.iter()).flat_map(|(word, bits)| {
        (0..libc::c_ulong::BITS).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word * 64 + bit)
    });
    Some(match policy {
        libc::MPOL_BIND => Some(Nodes::Bind(nodes.collect())),
        libc::MPOL_INTERLEAVE => Some(Nodes::Interleave(nodes.collect())),
        _ => None,
    })
}

/// The parts of a range that have pages.
fn existing(file: BorrowedFd<'_>, start: u64, end: u64) -> Vec<(u64, u64)> {
    let mut parts = Vec::new();
    let mut at = start;
    while at < end {
        // There is no data behind the last.
        let Ok(from) = rustix::fs::seek(file, SeekFrom::Data(at)) else { break };
        let to = rustix::fs::seek(file, SeekFrom::Hole(from)).unwrap_or(end).min(end);
        if from >= to {
            break;
        }
        parts.push((from, to));
        at = to;
    }
    parts
}

/// Adds the bytes of a range's pages to their nodes. Pages that go meanwhile are not counted.
fn count(mapping: &Mapping, from: u64, to: u64, bytes: &mut BTreeMap<u32, u64>) {
    let page = rustix::param::page_size();
    let length = usize::try_from(to - from).unwrap_or(0);
    // SAFETY: the range lies in the mapping. The kernel returns an error where a page can't be had, and raises no signal.
    unsafe { libc::madvise(mapping.at(from), length, libc::MADV_POPULATE_READ) };
    let pages: Vec<*mut libc::c_void> = (from..to).step_by(page).map(|offset| mapping.at(offset)).collect();
    for batch in pages.chunks(BATCH) {
        let mut nodes = vec![-1 as libc::c_int; batch.len()];
        let to = nodes.as_mut_ptr();
        // SAFETY: both lists have as many entries as the call is told; without a list of wanted nodes it moves nothing.
        let asked = unsafe {
            let none = std::ptr::null::<libc::c_int>();
            libc::syscall(libc::SYS_move_pages, 0, batch.len(), batch.as_ptr(), none, to, 0)
        };
        if asked != 0 {
            continue;
        }
        for node in nodes.into_iter().filter_map(|node| u32::try_from(node).ok()) {
            *bytes.entry(node).or_default() += page as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    const SIZE: u64 = 16 << 20;

    fn memory() -> File {
        crate::backing::sealed_memfd("numa", SIZE as libc::off_t, 0, "a test").unwrap()
    }

    /// A node that has memory.
    fn node() -> u32 {
        let text = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap();
        text.trim().split(['-', ',']).next().unwrap().parse().unwrap()
    }

    #[test]
    fn pages_are_counted_by_node_and_none_is_made() {
        let file = memory();
        file.write_all_at(&[1; 3 << 12], 8 << 20).unwrap();
        let seen = look(file.as_fd(), SIZE).unwrap().unwrap();
        assert_eq!((seen.bytes.values().sum::<u64>(), seen.looked_at), (3 << 12, SIZE));
        assert_eq!(seen.nodes, None);
        let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
        assert_eq!(blocks * 512, 3 << 12, "looking makes no page");
    }

    #[test]
    fn new_pages_come_from_the_nodes_of_the_policy() {
        for nodes in [Nodes::Bind(vec![node()]), Nodes::Interleave(vec![node()])] {
            let file = memory();
            place(file.as_fd(), SIZE, &nodes).unwrap();
            file.write_all_at(&[1; 1 << 20], 0).unwrap();
            let seen = look(file.as_fd(), SIZE).unwrap().unwrap();
            assert_eq!(seen.nodes, Some(nodes));
            assert_eq!(seen.bytes, BTreeMap::from([(node(), 1 << 20)]));
        }
    }

    #[test]
    fn a_node_that_is_not_there_is_refused_and_a_file_on_a_disk_has_no_policy() {
        for absent in [1000, 5000] {
            assert!(place(memory().as_fd(), SIZE, &Nodes::Bind(vec![absent])).is_err());
        }
        let other = File::open("/proc/self/status").unwrap();
        place(other.as_fd(), SIZE, &Nodes::Bind(vec![1000])).unwrap();
        assert_eq!(look(other.as_fd(), SIZE).unwrap(), None);
    }

    #[test]
    fn nodes_are_named_as_a_reader_would() {
        let text = [Nodes::Bind(vec![0]), Nodes::Interleave(vec![0, 2])].map(|nodes| nodes.to_string());
        assert_eq!(text, ["bound to node 0", "interleaved over nodes 0, 2"]);
    }
}
