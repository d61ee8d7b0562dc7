// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two emulators that labs run in, behind what both do: prepare a folder, give the command that starts, say when the lab is there.

use std::fmt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use crate::bochs::Bochs;
use crate::cache::Kernel;
use crate::config::{Config, Machine};
use crate::qemu::Qemu;

/// The program that emulates a lab's host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Emulator {
    /// For AMD SVM, an IOMMU and devices.
    Qemu(Qemu),
    /// For Intel VMX, EPT and VMFUNC.
    Bochs(Bochs),
}

/// Looks at an emulator's process: an error once it has ended.
pub type Alive<'a> = dyn FnMut() -> Result<()> + 'a;

impl Emulator {
    /// Chooses the emulator for a lab like this: an installed one, or one that can be fetched.
    pub fn choose(config: &Config) -> Result<Self> {
        match config.machine {
            Machine::Svm => Qemu::choose(config.qemu.as_deref()).map(Self::Qemu),
            Machine::Vmx => Bochs::fetched().map(Self::Bochs),
        }
    }

    /// Writes what the emulator starts from into the lab's folder and returns the command that starts it.
    pub fn prepare(&self, folder: &Path, config: &Config, kernel: &Kernel) -> Result<Command> {
        match self {
            Self::Qemu(qemu) => qemu.prepare(folder, config, kernel),
            Self::Bochs(bochs) => bochs.prepare(folder, config, kernel),
        }
    }

    /// Waits until the lab's agent can be greeted.
    pub fn await_agent(&self, folder: &Path, alive: &mut Alive<'_>, deadline: Instant) -> Result<()> {
        match self {
            Self::Qemu(_) => Qemu::await_sockets(folder, alive, deadline),
            Self::Bochs(_) => Bochs::await_status(folder, alive, deadline),
        }
    }

    /// Its QEMU, if it is one.
    pub fn qemu(&self) -> Option<&Qemu> {
        match self {
            Self::Qemu(qemu) => Some(qemu),
            Self::Bochs(_) => None,
        }
    }
}

impl fmt::Display for Emulator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu(qemu) => write!(f, "QEMU {}.{}", qemu.version.0, qemu.version.1),
            Self::Bochs(bochs) => write!(f, "Bochs {}", bochs.version),
        }
    }
}
