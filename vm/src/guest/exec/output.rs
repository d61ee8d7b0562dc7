// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The output of a command: read from its segments, up to the mark.

use qapi::qga;

use super::{REQUEST, Stream, close, open};
use crate::guest::agent::{Agent, Calls, Error};

/// Bytes of output read at once.
const READ: i64 = 1 << 20;

/// One of the two outputs: its segments one after the other, up to the mark.
pub(super) struct Tail {
    stream: Stream,
    /// Path of the segments without their number.
    base: String,
    segment: u64,
    handle: Option<i64>,
    /// The next segment, once it is there: what is still unread of this one is all that there will be.
    next: Option<i64>,
    mark: Mark,
}

impl Tail {
    pub(super) fn new(dir: &str, stream: Stream, mark: &str) -> Tail {
        let base = format!("{dir}/{}", if stream == Stream::Out { 1 } else { 2 });
        Tail { stream, base, segment: 0, handle: None, next: None, mark: Mark::new(mark) }
    }

    /// Passes on output that is there, at most one chunk. Returns whether there was any.
    pub(super) fn pass(
        &mut self,
        agent: &Agent,
        output: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<bool, Error> {
        if self.mark.found {
            return Ok(false);
        }
        let handle = match self.handle {
            Some(handle) => handle,
            // The first segment is not there before the command has begun.
            None => match open(agent, format!("{}.{}", self.base, self.segment), "r") {
                Ok(handle) => *self.handle.insert(handle),
                Err(Error::Refused { .. }) => return Ok(false),
                Err(e) => return Err(e),
            },
        };
        if self.read(agent, handle, output)? {
            return Ok(true);
        }
        // The next segment is begun when this one is complete.
        let next = match self.next {
            Some(next) => next,
            None => match open(agent, format!("{}.{}", self.base, self.segment + 1), "r") {
                Ok(next) => *self.next.insert(next),
                Err(Error::Refused { .. }) => return Ok(false),
                Err(e) => return Err(e),
            },
        };
        // The command can be ended also while the guest reports more output without end.
        if self.read(agent, handle, output)? {
            return Ok(true);
        }
        close(agent, handle)?;
        // Opening it for writing empties it.
        let emptied = open(agent, format!("{}.{}", self.base, self.segment), "w")?;
        close(agent, emptied)?;
        (self.handle, self.next) = (Some(next), None);
        self.segment += 1;
        Ok(true)
    }

    /// Returns whether the output has ended.
    pub(super) fn is_complete(&self) -> bool {
        self.mark.found
    }

    fn read(
        &mut self,
        agent: &Agent,
        handle: i64,
        output: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<bool, Error> {
        let read = agent.call(qga::guest_file_read { handle, count: Some(READ) }, REQUEST)?;
        let data = self.mark.take(read.buf_b64);
        if !data.is_empty() {
            output(self.stream, &data);
        }
        Ok(read.count > 0)
    }

    /// Closes the segments.
    pub(super) fn close(&mut self, agent: &Agent) -> Result<(), Error> {
        [self.handle.take(), self.next.take()].into_iter().flatten().try_for_each(|open| close(agent, open))
    }
}

/// Looks for the mark at the end of an output. A possible beginning of the mark is held back.
struct Mark {
    mark: Vec<u8>,
    held: Vec<u8>,
    found: bool,
}

impl Mark {
    fn new(mark: &str) -> Mark {
        Mark { mark: mark.as_bytes().to_vec(), held: Vec::new(), found: false }
    }

    /// Returns the output that can be passed on.
    fn take(&mut self, data: Vec<u8>) -> Vec<u8> {
        if self.found {
            return Vec::new();
        }
        let mut all = std::mem::take(&mut self.held);
        all.extend(data);
        if let Some(at) = all.windows(self.mark.len()).position(|w| w == self.mark) {
            self.found = true;
            all.truncate(at);
            return all;
        }
        let longest = self.mark.len().min(all.len() + 1) - 1;
        let begun = (1..=longest).rev().find(|&n| all.ends_with(&self.mark[..n])).unwrap_or(0);
        self.held = all.split_off(all.len() - begun);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::agent;
    use serde_json::json;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn passed(mark: &mut Mark, parts: &[&str]) -> Vec<String> {
        parts.iter().map(|p| String::from_utf8(mark.take(p.as_bytes().to_vec())).unwrap()).collect()
    }

    #[test]
    fn a_guest_that_says_without_end_that_there_is_more_is_asked_twice_at_a_time() {
        let asked = Arc::new(AtomicU32::new(0));
        let reads = asked.clone();
        let agent = agent::tests::fake(move |name, _| {
            Some(match name {
                "guest-file-read" if reads.fetch_add(1, Ordering::Relaxed) == 0 => {
                    json!({ "count": 0, "buf-b64": "", "eof": true })
                }
                "guest-file-read" if reads.load(Ordering::Relaxed) < 100 => {
                    json!({ "count": 1, "buf-b64": "", "eof": false })
                }
                "guest-file-read" => json!({ "refuse": "so many reads in a row" }),
                _ => json!(1),
            })
        });
        let mut tail = Tail::new("/run/x", Stream::Out, "mark");
        for pass in 1..10 {
            assert!(tail.pass(&agent, &mut |_, _| ()).unwrap());
            assert!(asked.load(Ordering::Relaxed) <= 2 * pass);
        }
    }

    #[test]
    fn output_ends_at_the_mark_and_only_what_may_be_its_beginning_is_held_back() {
        let mut mark = Mark::new("abac");
        assert_eq!(passed(&mut mark, &["xyz", "ab", "ab", "ac", "more"]), ["xyz", "", "ab", "", ""]);
        assert!(mark.found);
        let mut mark = Mark::new("abac");
        assert_eq!(passed(&mut mark, &["a", "a", "b!", "whole abac rest"]), ["", "a", "ab!", "whole "]);
        assert!(mark.found);
        let mut mark = Mark::new("abac");
        assert_eq!(passed(&mut mark, &["", "abab"]), ["", "ab"]);
        assert!(!mark.found);
    }
}
