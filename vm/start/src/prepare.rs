// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Preparation of memory that a guest is offered later.

use crate::ahead::{Ahead, Budget, Prepared};
use crate::memory::{MemoryError, Source};

/// Makes the pages of memory before the memory is offered.
pub trait Prepare {
    /// Begins at the first byte: the guest has lost all memory that it was given.
    fn restart(&mut self) -> Result<(), MemoryError>;
    /// Prepares faster: from now on the guest waits for memory that is not prepared.
    fn hasten(&mut self);
    /// Lets the preparation go on up to this byte.
    fn allow(&mut self, limit: u64);
    /// The prepared memory, and its cost so far.
    fn prepared(&self) -> Result<Prepared, MemoryError>;
}

/// No preparation: all memory counts as prepared.
pub struct Unprepared;

impl Prepare for Unprepared {
    fn restart(&mut self) -> Result<(), MemoryError> {
        Ok(())
    }
    fn hasten(&mut self) {}
    fn allow(&mut self, _: u64) {}
    fn prepared(&self) -> Result<Prepared, MemoryError> {
        Ok(Prepared { ready: u64::MAX, ..Prepared::default() })
    }
}

/// Prepares the memory of a running QEMU, from this process.
pub struct ProcessMemory {
    /// The memory in that process.
    pub source: Source,
    /// Bytes of the memory.
    pub size: u64,
    /// The host node that it is bound to.
    pub node: Option<u32>,
    /// Limits of the preparation's cost.
    pub budget: Budget,
    ahead: Option<Ahead>,
}

impl ProcessMemory {
    /// For the memory of `size` bytes of the process `pid`.
    pub fn of(pid: u32, size: u64, node: Option<u32>, budget: Budget) -> Result<Self, MemoryError> {
        let source = Source::find(std::path::Path::new("/"), pid, size)?;
        Ok(Self { source, size, node, budget, ahead: None })
    }
}

impl Prepare for ProcessMemory {
    fn restart(&mut self) -> Result<(), MemoryError> {
        // Ends the threads before new ones begin.
        self.ahead = None;
        let memory = self.source.open(self.size, self.budget.huge)?;
        self.ahead = Some(Ahead::start(memory, self.size, 0, self.node, self.budget));
        Ok(())
    }

    fn hasten(&mut self) {
        if let Some(ahead) = &mut self.ahead {
            ahead.hasten();
        }
    }

    fn allow(&mut self, limit: u64) {
        if let Some(ahead) = &self.ahead {
            ahead.allow(limit);
        }
    }

    fn prepared(&self) -> Result<Prepared, MemoryError> {
        self.ahead.as_ref().map_or(Ok(Prepared::default()), Ahead::prepared)
    }
}
