// SPDX-License-Identifier: Apache-2.0 OR MIT
//! In which order VMs are started and stopped: what one depends on is there before it, and goes after it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::compose::depends::{Depends, Until};
use crate::guest::health::Health;
use crate::machine::{Machine, Phase};

/// The pause between two checks whether the request was cancelled.
const LOOK: Duration = Duration::from_millis(100);

/// The progress of a VM that is being started.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reached {
    /// QEMU runs.
    Started,
    /// It is up, or was: it may reboot.
    Ready,
    /// It will not be up.
    Failed,
}

/// The progress of VMs that are being started, and of those that ran before.
#[derive(Debug, Default)]
pub(super) struct Order {
    reached: Mutex<BTreeMap<String, Reached>>,
    changed: Condvar,
}

impl Order {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Reached>> {
        self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes how far a VM has come.
    pub(super) fn reach(&self, vm: &str, reached: Reached) {
        self.lock().insert(vm.to_owned(), reached);
        self.changed.notify_all();
    }

    /// Waits until all that `vm` depends on has come so far; `machine` finds a VM, and `report` is told what is waited for.
    ///
    /// # Errors
    /// When one of them fails or is unhealthy, and when the request is cancelled.
    pub(super) fn wait(
        &self,
        vm: &str,
        depends: &Depends,
        machine: &Find<'_>,
        cancelled: &dyn Fn() -> bool,
        report: &dyn Fn(&str),
    ) -> anyhow::Result<()> {
        for (other, until) in &depends.0 {
            let mut told = false;
            while !self.is_so_far(vm, other, *until, machine)? {
                anyhow::ensure!(!cancelled(), "cancelled");
                if !std::mem::replace(&mut told, true) {
                    report(&format!("until '{other}' is {until}"));
                }
                drop(self.changed.wait_timeout(self.lock(), LOOK));
            }
        }
        Ok(())
    }

    fn is_so_far(&self, vm: &str, other: &str, until: Until, machine: &Find<'_>) -> anyhow::Result<bool> {
        let reached = self.lock().get(other).copied();
        Ok(match (reached, until) {
            (None, _) | (Some(Reached::Started), Until::Ready | Until::Healthy) => false,
            (Some(Reached::Failed), _) => {
                anyhow::bail!("the VM '{vm}' was not started: '{other}', on which it depends, failed")
            }
            (Some(Reached::Started | Reached::Ready), Until::Started)
            | (Some(Reached::Ready), Until::Ready) => true,
            (Some(Reached::Ready), Until::Healthy) => is_healthy(other, machine)
                .map_err(|e| anyhow::anyhow!("the VM '{vm}' was not started: {e}"))?,
        })
    }
}

/// Finds the machine that runs under a VM's name now: a VM that reboots is another machine afterwards.
pub(super) type Find<'a> = dyn Fn(&str) -> Option<Arc<Machine>> + Sync + 'a;

fn stopped(name: &str) -> String {
    format!("the VM '{name}' was stopped")
}

/// Returns whether a VM is healthy or has no check.
///
/// # Errors
/// When it is unhealthy, or has ended and is not about to start again.
pub(super) fn is_healthy(name: &str, machine: &Find<'_>) -> anyhow::Result<bool> {
    let Some(machine) = machine(name) else { anyhow::bail!("{}", stopped(name)) };
    match machine.phase() {
        Phase::Up => {}
        Phase::Booting => return Ok(false),
        _ if machine.is_to_start_again() => return Ok(false),
        _ if machine.is_stopped() => anyhow::bail!("{}", stopped(name)),
        _ => {
            anyhow::bail!("the VM '{name}' does not run any more ({})", machine.status().state)
        }
    }
    match machine.health() {
        Some(Health::Healthy) => Ok(true),
        // Its checks may be about to begin.
        None => Ok(machine.spec().healthcheck.is_none()),
        Some(Health::Starting) => Ok(false),
        Some(Health::Unhealthy) => {
            anyhow::bail!("the VM '{name}' is unhealthy: its health check fails, see supervisor.log")
        }
    }
}

/// VMs in the order of their stop: each wave is stopped when the one before it has ended. VMs on which none depends are first.
pub(super) fn waves(vms: &BTreeMap<String, Depends>) -> Vec<BTreeSet<String>> {
    let mut left: BTreeSet<&String> = vms.keys().collect();
    let mut waves = Vec::new();
    while !left.is_empty() {
        let needed: BTreeSet<&String> = left.iter().flat_map(|vm| vms[*vm].0.keys()).collect();
        let mut wave: BTreeSet<String> =
            left.iter().filter(|vm| !needed.contains(**vm)).map(|vm| (*vm).clone()).collect();
        if wave.is_empty() {
            // A circle: these VMs were started from different states of the file.
            wave = left.iter().map(|vm| (*vm).clone()).collect();
        }
        left.retain(|vm| !wave.contains(*vm));
        waves.push(wave);
    }
    waves
}

/// Lets each wave begin when the one before it has ended, or after its share of the time.
#[derive(Debug)]
pub(super) struct Turnstile {
    /// VMs of each wave that have not ended.
    left: Mutex<Vec<usize>>,
    changed: Condvar,
    begun: Instant,
    share: Duration,
}

impl Turnstile {
    /// For waves of so many VMs, which have `all` of the time together.
    pub(super) fn new(sizes: Vec<usize>, all: Duration) -> Turnstile {
        let share = all / u32::try_from(sizes.len().max(1)).unwrap_or(u32::MAX);
        Turnstile { left: Mutex::new(sizes), changed: Condvar::new(), begun: Instant::now(), share }
    }

    /// Waits for the turn of a wave.
    pub(super) fn wait(&self, wave: usize) {
        let latest = self.begun + self.share * u32::try_from(wave).unwrap_or(u32::MAX);
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = latest.saturating_duration_since(Instant::now());
        drop(self.changed.wait_timeout_while(left, limit, |left| left[..wave].iter().any(|&n| n > 0)));
    }

    /// One VM of a wave has ended.
    pub(super) fn leave(&self, wave: usize) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)[wave] -= 1;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depends(names: &[&str]) -> Depends {
        Depends(names.iter().map(|name| ((*name).to_owned(), Until::Ready)).collect())
    }

    #[test]
    fn who_depends_on_others_is_stopped_before_them() {
        let vms = [
            ("db", depends(&[])),
            ("web", depends(&["db", "cache"])),
            ("cache", depends(&["db"])),
            ("alone", depends(&["gone"])),
        ];
        let vms: BTreeMap<String, Depends> = vms.into_iter().map(|(n, d)| (n.to_owned(), d)).collect();
        let waves: Vec<Vec<String>> = waves(&vms).into_iter().map(|w| w.into_iter().collect()).collect();
        assert_eq!(waves, [vec!["alone", "web"], vec!["cache"], vec!["db"]]);
    }

    #[test]
    fn vms_that_were_started_from_different_files_are_stopped_though_they_form_a_circle() {
        let vms = [("a", depends(&["b"])), ("b", depends(&["a"]))];
        let vms: BTreeMap<String, Depends> = vms.into_iter().map(|(n, d)| (n.to_owned(), d)).collect();
        assert_eq!(waves(&vms).len(), 1);
    }

    #[test]
    fn a_wave_that_takes_its_time_holds_up_the_next_for_its_share_only() {
        let gate = Turnstile::new(vec![1, 1], Duration::from_millis(20));
        gate.wait(0);
        gate.wait(1);
        assert!(gate.begun.elapsed() >= Duration::from_millis(10));
        let long = Turnstile::new(vec![1, 1], Duration::from_secs(36_000));
        std::thread::scope(|scope| {
            let second = scope.spawn(|| long.wait(1));
            long.leave(0);
            second.join().unwrap();
        });
    }
}
