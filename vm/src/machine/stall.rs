// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM that QEMU has paused because the host had no room for what the guest wrote to a disk (QEMU's werror=enospc). It goes on by itself once there
//! is room: QEMU writes again what it could not, and pauses the VM again where that fails.

use std::time::Duration;

use qapi::qmp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Machine, Phase};
use crate::child::halted;
use crate::project::changes::Kind;
use crate::project::journal;

/// How long QEMU may take to let the VM go on.
const ANSWER: Duration = Duration::from_secs(1);

/// Why a VM is paused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stall {
    /// In words, with the remedy.
    pub(super) why: String,
    /// It goes on since; whether that lasts is not known yet.
    tried: bool,
}

impl Stall {
    /// The pause that an event BLOCK_IO_ERROR tells of; `None`: the guest was told of the error and runs.
    pub(super) fn of(data: &Value) -> Option<Stall> {
        if data["action"] != "stop" {
            return None;
        }
        let disk = data["device"].as_str().filter(|name| !name.is_empty()).unwrap_or("a disk");
        let reason = data["reason"].as_str().unwrap_or("an error");
        let why = format!(
            "QEMU has paused it, as the host can't take what the guest writes to {disk}: {reason}; make room there, and it goes on"
        );
        Some(Stall { why, tried: false })
    }
}

impl Machine {
    /// Notes that QEMU has paused the VM.
    pub(super) fn stall(&self, stall: Stall) {
        let first = self.lock().stall.replace(stall.clone()).is_none();
        if first {
            crate::say!("the VM '{}': {}", self.name, stall.why);
            journal::record(Kind::Vm, &self.name, "paused", &stall.why);
        }
    }

    /// Lets a paused VM go on; one that has not been paused again since the last call is not paused any more.
    pub fn tend_stall(&self) {
        let mut state = self.lock();
        if state.exit.is_some() {
            return;
        }
        let Some(stall) = &mut state.stall else { return };
        if std::mem::replace(&mut stall.tried, true) {
            state.stall = None;
            let phase = state.phase.clone();
            drop(state);
            if phase == Phase::Up {
                self.record(&phase, "it goes on");
            }
            return;
        }
        drop(state);
        let asked = halted::of(self.pid).is_none()
            && self.qmp().is_ok_and(|qmp| qmp.execute_within(qmp::cont {}, ANSWER).is_ok());
        if !asked {
            if let Some(stall) = &mut self.lock().stall {
                stall.tried = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_an_error_that_pauses_the_vm_is_a_stall() {
        let told = json!({ "device": "disk0", "action": "stop", "nospace": true, "reason": "No space left on device" });
        let stall = Stall::of(&told).unwrap();
        assert!(stall.why.contains("writes to disk0: No space left on device; make room"), "{}", stall.why);
        assert_eq!(Stall::of(&json!({ "device": "disk0", "action": "report" })), None);
    }
}
