// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Frames between the first VM of a job and each of the others, through files in the zone: the sender appends to the newest file of a folder, the receiver is
//! woken by the file system's change events and removes a file when it has read all of it. So nothing polls, and the VMs need no network.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::frame::{Decoder, Frame};
use crate::sys::Watch;

/// Bytes after which the sender goes on in the next file.
const FILE: u64 = 1 << 20;
/// Milliseconds after which the receiver looks without an event: a member that can't be rung is late by this.
const LOOK: i32 = 100;

/// A file of a folder by its number.
fn numbered(dir: &Path, number: u64) -> PathBuf {
    dir.join(number.to_string())
}

/// The sender's end.
#[derive(Debug)]
pub struct Sender {
    dir: PathBuf,
    file: File,
    number: u64,
    written: u64,
}

impl Sender {
    /// The first sender in a folder.
    ///
    /// # Errors
    /// The zone is full or can't be written.
    pub fn new(dir: &Path) -> io::Result<Sender> {
        let file = File::create(numbered(dir, 0))?;
        Ok(Sender { dir: dir.to_owned(), file, number: 0, written: 0 })
    }

    /// Appends a frame.
    ///
    /// # Errors
    /// The zone is full.
    pub fn send(&mut self, frame: &Frame) -> io::Result<()> {
        if self.written >= FILE {
            self.number += 1;
            self.file = File::create(numbered(&self.dir, self.number))?;
            self.written = 0;
        }
        let bytes = frame.encode();
        self.file.write_all(&bytes)?;
        self.written += u64::try_from(bytes.len()).unwrap_or(FILE);
        Ok(())
    }
}

/// The receiver's end.
#[derive(Debug)]
pub struct Receiver {
    dir: PathBuf,
    watch: Watch,
    file: Option<File>,
    number: u64,
    decoder: Decoder,
}

impl Receiver {
    /// The only receiver in a folder.
    ///
    /// # Errors
    /// It can't be watched.
    pub fn new(dir: &Path) -> io::Result<Receiver> {
        let watch = Watch::new(dir)?;
        Ok(Receiver { dir: dir.to_owned(), watch, file: None, number: 0, decoder: Decoder::default() })
    }

    /// The next frame, which is waited for.
    ///
    /// # Errors
    /// A file can't be read, or holds something else.
    pub fn receive(&mut self) -> io::Result<Frame> {
        loop {
            if let Some(frame) = self.decoder.next()? {
                return Ok(frame);
            }
            if !self.read()? {
                self.watch.wait(LOOK);
            }
        }
    }

    /// Reads what is there. Returns whether there was anything.
    fn read(&mut self) -> io::Result<bool> {
        if self.file.is_none() {
            match File::open(numbered(&self.dir, self.number)) {
                Ok(file) => self.file = Some(file),
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        // Before the read: a file that has a successor grows no more.
        let complete = numbered(&self.dir, self.number + 1).exists();
        let Some(file) = &mut self.file else { return Ok(false) };
        let mut bytes = vec![0; 256 << 10];
        let n = file.read(&mut bytes)?;
        self.decoder.push(&bytes[..n]);
        if n == 0 && complete {
            fs::remove_file(numbered(&self.dir, self.number))?;
            self.number += 1;
            self.file = None;
            return Ok(true);
        }
        Ok(n > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Kind;

    #[test]
    fn frames_arrive_in_order_over_many_files_and_read_files_are_removed() {
        let dir = std::env::temp_dir().join(format!("tombolo-mpi-link-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut receiver = Receiver::new(&dir).unwrap();
        let frame = |number: u32| Frame::new(Kind::Data, number, vec![1; 40_000]);
        let to = dir.clone();
        let sender = std::thread::spawn(move || {
            let mut sender = Sender::new(&to).unwrap();
            (0..200).for_each(|number| sender.send(&frame(number)).unwrap());
        });
        for number in 0..200 {
            assert_eq!(receiver.receive().unwrap(), frame(number));
        }
        sender.join().unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        fs::remove_dir_all(&dir).unwrap();
    }
}
