// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The figures that a worker writes for its supervisor, into a page that both map. Writing wakes no process, so it costs nothing while the
//! supervisor doesn't look. A worker runs its client's kernels, so the figures may be a lie about that client; the supervisor copies and shows them,
//! nothing else.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use tombolo_calls::memory::{Mapping, sealed_memfd};

const PAGE: usize = 4096;
const NAME_AT: usize = 512;
const NAME_LEN: usize = 128;

/// A number in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    Calls,
    /// Of these, those that the client waited for.
    Waits,
    /// Bytes in records.
    Bytes,
    /// Nanoseconds from a request that the client waits for to its reply.
    Busy,
    /// Nanoseconds for which requests were held back by the client's rate.
    Held,
    /// Bytes of device memory.
    Memory,
    Objects,
}

pub struct Figures(Mapping);

impl Figures {
    /// A fresh page, and the file to pass on.
    pub fn new() -> io::Result<(Figures, File)> {
        let file = sealed_memfd(c"tombolo-accel-figures", PAGE as u64)?;
        Ok((Figures::of(&file)?, file))
    }

    /// The page of a file that [`Figures::new`] made.
    pub fn of(file: &File) -> io::Result<Figures> {
        Mapping::of_file(file, 0, PAGE).map(Figures)
    }

    fn word(&self, figure: Figure) -> &AtomicU64 {
        // SAFETY: the word lies in the page, aligned; the mapping lives as long as self; an atomic may be written by others at any time.
        unsafe { AtomicU64::from_ptr(self.0.base().cast::<u64>().add(figure as usize)) }
    }

    pub fn add(&self, figure: Figure, n: u64) {
        self.word(figure).fetch_add(n, Ordering::Relaxed);
    }

    /// Replaces a figure's value.
    pub fn set(&self, figure: Figure, value: u64) {
        self.word(figure).store(value, Ordering::Relaxed);
    }

    /// The value of a figure.
    pub fn get(&self, figure: Figure) -> u64 {
        self.word(figure).load(Ordering::Relaxed)
    }

    fn letters(&self) -> impl Iterator<Item = &AtomicU8> {
        // SAFETY: as in word(); the name lies in the page.
        (0..NAME_LEN).map(|i| unsafe { AtomicU8::from_ptr(self.0.base().add(NAME_AT + i)) })
    }

    /// Says who the client claims to be.
    pub fn set_name(&self, name: &str) {
        self.letters().zip(name.bytes()).for_each(|(to, b)| to.store(b, Ordering::Relaxed));
    }

    /// The name that the client gave itself; empty before its hello.
    pub fn name(&self) -> String {
        let bytes: Vec<u8> =
            self.letters().map(|b| b.load(Ordering::Relaxed)).take_while(|b| *b != 0).collect();
        String::from_utf8_lossy(&bytes).chars().map(|c| if c.is_control() { '?' } else { c }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_side_writes_the_other_reads() {
        let (ours, file) = Figures::new().expect("a page");
        let theirs = Figures::of(&file).expect("the same page");
        theirs.add(Figure::Calls, 2);
        theirs.add(Figure::Calls, 3);
        theirs.set(Figure::Objects, 7);
        theirs.set_name("clinfo:12");
        assert_eq!((ours.get(Figure::Calls), ours.get(Figure::Objects)), (5, 7));
        assert_eq!(ours.name(), "clinfo:12");
    }

    #[test]
    fn a_name_that_lies_about_its_length_or_hides_control_characters_is_shown_all_the_same() {
        let (page, _file) = Figures::new().expect("a page");
        page.set_name(&"x\n".repeat(1000));
        assert_eq!(page.name(), "x?".repeat(NAME_LEN / 2));
    }
}
