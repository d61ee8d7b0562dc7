// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The end of a supervisor whose project lives on, for `tombolo upgrade`: the next one goes on with it.

use std::time::{Duration, Instant};

use super::turn::Of;
use super::{Reporter, Supervisor};
use crate::machine::Phase;
use crate::project::control::Event;
use crate::project::journal;
use crate::project::peer::Peer;
use crate::project::session;

/// Between two looks whether what has to end first has ended.
const PAUSE: Duration = Duration::from_millis(20);
/// For short requests to end while new ones are held, and then for these.
const TURN: Duration = Duration::from_secs(2);

/// Lets requests in again when this is dropped.
struct Held<'a>(&'a Supervisor);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.lock().held = false;
    }
}

impl Supervisor {
    /// Ends this process when no request runs and no VM boots. It returns only where that is not done.
    ///
    /// # Errors
    /// Names the commands and the boots that have not ended within `seconds`.
    pub(super) fn leave_all(&self, seconds: u64, peer: &Peer, reporter: &Reporter) -> anyhow::Result<()> {
        let name = self.lock().project.name.clone();
        let (begun, longest, mut told) = (Instant::now(), Duration::from_secs(seconds), false);
        let _held = Held(self);
        loop {
            // Else they never end where one always follows another.
            self.lock().held = begun.elapsed().as_secs() / TURN.as_secs() % 2 == 0;
            let busy = self.busy()?;
            if busy.is_empty() {
                if let Some(_turn) = self.changing.take_within(Of::All, Duration::ZERO) {
                    // From here on a request finds the next supervisor.
                    self.lock().withdrawn = true;
                    reporter.send(&Event::Done);
                    journal::close();
                    std::process::exit(0);
                }
            }
            let what = if busy.is_empty() { "the start of a VM".to_owned() } else { busy.join(", ") };
            anyhow::ensure!(
                !session::has_gone(&peer.socket()),
                "cancelled; the project '{name}' runs on as it did"
            );
            anyhow::ensure!(
                begun.elapsed() < longest,
                "the project '{name}' is busy, so it runs on as it did; to be ended first: {what}"
            );
            if !std::mem::replace(&mut told, true) {
                reporter.send(&Event::Note { text: format!("this waits for the end of: {what}") });
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// What has to end first.
    ///
    /// # Errors
    /// A VM needs this process.
    fn busy(&self) -> anyhow::Result<Vec<String>> {
        let inner = self.lock();
        let bypassed = inner.machines.values().find(|m| !m.has_ended() && !m.spec().bypassed().is_empty());
        if let Some(machine) = bypassed {
            anyhow::bail!(
                "the VM '{}' has bypassed devices, whose requests this program answers: stop it before the upgrade",
                machine.name()
            );
        }
        let booting = inner.machines.values().filter(|machine| machine.phase() == Phase::Booting);
        let booting =
            booting.map(|machine| format!("{} of the VM '{}'", machine.status().state, machine.name()));
        Ok(inner
            .requests
            .values()
            .filter(|what| !["upgrade", "ps"].contains(&what.as_str()))
            .cloned()
            .chain(booting)
            .collect())
    }
}
