// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The input of a command: a FIFO of the guest, filled by one short-lived writer for each chunk.

use std::sync::mpsc::{Receiver, TryRecvError};

use qapi::qga;

use super::{Input, REQUEST, close, open, start};
use crate::guest::agent::{Agent, Calls, Error};

/// Feeds the input of a running command.
pub(super) struct Feeder<'a> {
    input: &'a Receiver<Input>,
    /// The command's folder in the guest.
    dir: String,
    /// A handle that keeps the FIFO from ending between two writers; `None`: the input has ended.
    fifo: Option<i64>,
    /// The process that writes a chunk.
    writer: Option<i64>,
    /// The client has sent all input.
    at_end: bool,
}

impl<'a> Feeder<'a> {
    pub(super) fn open(agent: &Agent, dir: &str, input: &'a Receiver<Input>) -> Result<Feeder<'a>, Error> {
        // "r+" opens a FIFO at once, without a process at its other end.
        let fifo = Some(open(agent, format!("{dir}/0"), "r+")?);
        Ok(Feeder { input, dir: dir.to_owned(), fifo, writer: None, at_end: false })
    }

    /// Begins to write the next chunk, or ends the input. Returns whether a chunk was begun.
    pub(super) fn pass(&mut self, agent: &Agent) -> Result<bool, Error> {
        if self.fifo.is_none() || self.is_writing(agent)? {
            return Ok(false);
        }
        if self.at_end {
            // The command has opened its input, so it sees the end.
            if let Ok(opened) = open(agent, format!("{}/open", self.dir), "r") {
                close(agent, opened)?;
                self.close(agent)?;
            }
            return Ok(false);
        }
        match self.input.try_recv() {
            Ok(Input::Data(data)) => {
                let fifo = format!("{}/0", self.dir);
                let arg = vec!["-c".into(), "exec cat >\"$1\"".into(), "tombolo".into(), fifo];
                self.writer = Some(start(agent, "/bin/sh", arg, Vec::new(), Some(data), false)?);
                Ok(true)
            }
            Ok(Input::End) => {
                self.at_end = true;
                Ok(false)
            }
            // The caller of `run` notices the end of the connection by itself.
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => Ok(false),
        }
    }

    /// Returns whether a chunk is still being written.
    fn is_writing(&mut self, agent: &Agent) -> Result<bool, Error> {
        if let Some(pid) = self.writer {
            if agent.call(qga::guest_exec_status { pid }, REQUEST)?.exited {
                self.writer = None;
            }
        }
        Ok(self.writer.is_some())
    }

    /// Closes the FIFO.
    pub(super) fn close(&mut self, agent: &Agent) -> Result<(), Error> {
        self.fifo.take().map_or(Ok(()), |handle| close(agent, handle))
    }
}
