// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices and isolated CPUs of VMs whose supervisor has died, and whether the host has them back.

/// Things of dead VMs. One that can't be given back keeps no other, and no VM that does not need it.
#[derive(Debug)]
pub struct GivenBack<T> {
    /// Those that the host has again.
    pub given: Vec<T>,
    /// Why it has not the others; each names the thing.
    pub failures: Vec<String>,
}

impl<T> Default for GivenBack<T> {
    fn default() -> Self {
        Self { given: Vec::new(), failures: Vec::new() }
    }
}

impl<T> GivenBack<T> {
    /// Adds what became of one thing.
    pub fn add(&mut self, result: anyhow::Result<T>) {
        match result {
            Ok(thing) => self.given.push(thing),
            Err(e) => self.failures.push(format!("{e:#}")),
        }
    }
}
