// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The names that a compose file declares, for completion.

use std::path::Path;

use crate::compose::{self, Project};

/// Names by what they name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    pub vms: Vec<String>,
    pub zones: Vec<String>,
    pub networks: Vec<String>,
    pub accelerators: Vec<String>,
}

/// The names in this file; without one, in `tombolo.toml` here or in a folder above. `None`: it can't be read.
pub fn names(file: Option<&Path>) -> Option<Names> {
    let compose = Project::load(&compose::find(file).ok()?).ok()?.compose;
    Some(Names {
        vms: compose.vm.into_keys().collect(),
        zones: compose.zone.into_keys().collect(),
        networks: compose.net.into_keys().collect(),
        accelerators: compose.accel.into_keys().collect(),
    })
}
