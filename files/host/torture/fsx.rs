// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One file, one buffer with its expected contents, and members that change it in random turns: fsx across machines. Every member has the
//! file open and, if it can, mapped all the time.

use std::collections::VecDeque;
use std::time::Instant;

use tombolo_files::sys;

use crate::compare::{check_data, check_seek, stat};
use crate::remote::Remote;
use crate::rng::{self, Rng};
use crate::tree::{Answer, Call, Spot, Tree};

/// Largest size of the file, bytes.
const MOST: u64 = 256 << 10;
const PAGE: u64 = 4096;
/// Operations between two progress lines of a long run.
const REPORT: u64 = 50_000;
/// Operations that a message about a difference names.
const RECENT: usize = 12;

struct Run<'a> {
    rng: Rng,
    /// Members, and whether they can map.
    members: &'a [(Remote, bool)],
    node: Spot,
    data: Vec<u8>,
    /// The newest first.
    recent: VecDeque<String>,
}

/// Runs `operations` as random members.
pub fn run(seed: u64, members: &[(Remote, bool)], operations: u64) -> Result<String, String> {
    let name = Some(b"fsx".to_vec());
    let create =
        Call::Create { dir: Spot { ino: 0, path: Some(Vec::new()) }, name, what: libc::S_IFREG, open: true };
    let Ok(Answer::Number(ino)) = members[0].0.call(&create) else {
        return Err("the file can't be made".into());
    };
    let node = Spot { ino, path: Some(b"fsx".to_vec()) };
    for member in &members[1..] {
        member.0.call(&Call::Open { node: node.clone() }).map_err(|e| format!("open: {e}"))?;
    }
    let mut run = Run { rng: Rng(seed), members, node, data: Vec::new(), recent: VecDeque::new() };
    let since = Instant::now();
    for n in 0..operations {
        if n > 0 && n % REPORT == 0 {
            println!("{n} of {operations} operations on one file [{:.0} s]", since.elapsed().as_secs_f64());
        }
        run.step().map_err(|e| {
            let recent: Vec<&str> = run.recent.iter().map(String::as_str).collect();
            format!("operation {n}: {e}\nthe last ones, newest first:\n  {}", recent.join("\n  "))
        })?;
    }
    for member in members {
        check_data(&member.0, &run.node, 0, run.data.len() + 1, &run.data, false)?;
        member.0.call(&Call::Close { node: run.node.clone() }).map_err(|e| format!("close: {e}"))?;
    }
    Ok(format!("{operations} operations on one file by {} members: no difference", members.len()))
}

impl Run<'_> {
    fn step(&mut self) -> Result<(), String> {
        let (rng, members) = (&mut self.rng, self.members);
        let (member, maps) = &members[rng.below(members.len() as u64) as usize];
        let (size, seed) = (self.data.len() as u64, rng.next());
        let at = rng.below(MOST);
        let longest = if rng.one_in(4) { 64 << 10 } else { 6000 };
        let len = 1 + rng.below(longest).min(MOST - at - 1);
        let inside = at.min(size.saturating_sub(1));
        let (node, mapped) = (self.node.clone(), *maps && rng.one_in(2));
        let (from, to) = (at.min(size) as usize, (at + len).min(size) as usize);
        let choice = rng.below(20);
        let recent = &mut self.recent;
        let mut note = |what: &str, at: u64, len: u64| {
            recent.truncate(RECENT - 1);
            recent.push_front(format!("{}: {what} {len} at {at} of {size}", member.name()));
        };
        match choice {
            0..=4 if mapped && size > 0 => {
                let len = len.min(size - inside);
                note("mapwrite", inside, len);
                let call = Call::Write { node, at: inside, len: len as usize, seed, mapped };
                self.expect(member, &call, Some(len))?;
                self.put(inside, &rng::bytes(seed, len as usize));
            }
            0..=4 => {
                note("write", at, len);
                let call = Call::Write { node, at, len: len as usize, seed, mapped: false };
                self.expect(member, &call, Some(len))?;
                self.put(at, &rng::bytes(seed, len as usize));
            }
            5..=12 if mapped && at >= size.next_multiple_of(PAGE) => {
                note("load beyond the end", at, 1);
                let gave = member.call(&Call::Probe { node, at });
                if !matches!(gave, Err(rustix::io::Errno::FAULT)) {
                    return Err(format!("gave {gave:?}, should be a fault"));
                }
            }
            5..=12 => {
                note(if mapped { "mapread" } else { "read" }, at, len);
                let len = if mapped { to - from } else { len as usize };
                check_data(member, &node, at, len, &self.data[from..to], mapped)?;
            }
            13..=14 => {
                let to = if self.rng.one_in(2) { at } else { rng::bytes(seed, 1)[0].into() };
                note("truncate", to, 0);
                self.expect(member, &Call::Truncate { node, size: to }, None)?;
                self.data.resize(to as usize, 0);
            }
            15..=17 => {
                let (punch, keep, zero) =
                    (sys::TFS_FALLOC_PUNCH, sys::TFS_FALLOC_KEEP_SIZE, sys::TFS_FALLOC_ZERO);
                let mode = [0, keep, punch | keep, punch | keep, zero, zero | keep][seed as usize % 6];
                note(
                    ["allocate", "reserve", "punch", "punch", "zero", "zero inside"][seed as usize % 6],
                    at,
                    len,
                );
                self.expect(member, &Call::Falloc { node, mode, at, len }, None)?;
                if mode & keep == 0 && (at + len) > size {
                    self.data.resize((at + len) as usize, 0);
                }
                if mode & (punch | zero) != 0 {
                    let size = self.data.len();
                    self.data[(at as usize).min(size)..((at + len) as usize).min(size)].fill(0);
                }
            }
            18 => {
                note("seek", at, 0);
                check_seek(member, &node, &self.data, at)?;
            }
            _ => {
                note("stat", 0, 0);
                let found = stat(member, &node)?.size;
                if found != size {
                    return Err(format!("{found} bytes, should be {size}"));
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        let (at, end) = (at as usize, at as usize + bytes.len());
        if self.data.len() < end {
            self.data.resize(end, 0);
        }
        self.data[at..end].copy_from_slice(bytes);
    }

    fn expect(&self, member: &Remote, call: &Call, bytes: Option<u64>) -> Result<(), String> {
        match (member.call(call), bytes) {
            (Ok(Answer::Number(n)), Some(want)) if n == want => Ok(()),
            (Ok(Answer::Done), None) => Ok(()),
            (other, _) => Err(format!("gave {other:?}")),
        }
    }
}
