// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Health checks: a command that runs in a guest again and again, and what its results make of the VM.

use std::sync::Arc;
use std::time::{Duration, Instant};

use qapi::qga;
use serde::{Deserialize, Serialize};

use super::exec;
use crate::compose::depends::HealthCheck;
use crate::guest::agent::{Agent, Calls};
use crate::machine::Machine;
use crate::project::state::random_hex;

/// The longest time between checks before the first one that succeeds.
const EAGER: Duration = Duration::from_secs(5);
/// The pause between two checks whether a check has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Runs the check ($1 ...) and hands on the end of what it says: the agent keeps all that a command says, and refuses what is too much for it.
/// The shell finds the program by the PATH.
const CHECK: &str = r#"exec 3>&1
code=$({ { "$@" 2>&1 3>&- 4>&-; echo $? >&4; } | tail -c 4096 >&3; } 4>&1)
exit "$code""#;

/// Tells the processes whose command line begins with a mark ($1), which is in the first line of their script.
const FIND: &str = r#"for process in /proc/[0-9]*; do
	line=
	read -r line <"$process/cmdline" || [ "$line" ] || continue
	case $line in *"$1"*) echo "${process#/proc/}" ;; esac
done 2>/dev/null"#;

/// The most processes of one check that are looked for.
const FOUND_MAX: usize = 8;

/// The result of a VM's checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// None has succeeded yet.
    Starting,
    /// The last one has succeeded, or fewer than `retries` in a row have failed since.
    Healthy,
    /// So many in a row have failed.
    Unhealthy,
}

impl std::fmt::Display for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Health::Starting => "starting",
            Health::Healthy => "healthy",
            Health::Unhealthy => "unhealthy",
        })
    }
}

/// Checks the VM until it ends, on a thread of its own.
///
/// # Errors
/// When no thread can be had.
pub fn begin(machine: &Arc<Machine>, check: &HealthCheck) -> std::io::Result<()> {
    machine.set_health(Health::Starting);
    go_on(machine, check, Duration::ZERO)
}

/// Goes on with the checks of a VM that has been up for so long. Failures in a row are counted anew.
///
/// # Errors
/// When no thread can be had.
pub fn go_on(machine: &Arc<Machine>, check: &HealthCheck, up: Duration) -> std::io::Result<()> {
    let (machine, check) = (machine.clone(), check.clone());
    let name = format!("health-{}", machine.name());
    crate::thread::start(&name, move || watch(&machine, &check, up)).map(drop)
}

fn watch(machine: &Machine, check: &HealthCheck, up: Duration) {
    let begun = Instant::now();
    let mut checker = Checker::new(machine.agent());
    let mut tally = Tally { health: machine.health().unwrap_or(Health::Starting), failures: 0 };
    while machine.is_up() {
        let pass = checker.check(&check.command.0, check.timeout.0);
        // A VM that is being stopped or reboots has no agent.
        if !machine.is_up() {
            return;
        }
        let early = up + begun.elapsed() < check.start_period.0;
        let before = tally.health;
        tally.count(pass.is_ok(), early, check.retries);
        if let (true, Err(why)) = (tally.health == Health::Unhealthy && before != Health::Unhealthy, &pass) {
            crate::say!("the VM '{}' is unhealthy: {why:#}", machine.name());
        }
        machine.set_health(tally.health);
        let eager = tally.health == Health::Starting;
        machine.wait_end(if eager { check.interval.0.min(EAGER) } else { check.interval.0 });
    }
}

/// Counts results, and turns them into a VM's health.
#[derive(Debug)]
struct Tally {
    health: Health,
    failures: u32,
}

impl Tally {
    fn count(&mut self, pass: bool, early: bool, retries: u32) {
        if pass {
            (self.health, self.failures) = (Health::Healthy, 0);
        } else if !early || self.health != Health::Starting {
            self.failures = self.failures.saturating_add(1);
            if self.failures >= retries {
                self.health = Health::Unhealthy;
            }
        }
    }
}

/// Runs the checks of one VM.
#[derive(Debug)]
pub struct Checker<'a> {
    agent: &'a Agent,
    /// The marks of checks that may still run, or begin to: the agent has not answered.
    late: Vec<String>,
}

/// A check that has failed.
struct Failed {
    why: anyhow::Error,
    /// Its command may still run, or begin to.
    may_run: bool,
}

impl Failed {
    fn unseen(why: impl Into<anyhow::Error>) -> Failed {
        Failed { why: why.into(), may_run: true }
    }
}

impl Checker<'_> {
    /// For the VM with this agent.
    pub fn new(agent: &Agent) -> Checker<'_> {
        Checker { agent, late: Vec::new() }
    }

    /// Runs one check; one that takes too long is killed with all that it started. An agent that does not answer within the check's time makes it fail;
    /// what it begins afterwards is killed before the next check.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn check(&mut self, command: &[String], limit: Duration) -> anyhow::Result<()> {
        self.end_late(limit)?;
        let mark = format!("tombolo-check-{}", random_hex(8));
        self.run(&mark, command, limit).map_err(|failed| {
            self.late.extend(failed.may_run.then_some(mark));
            failed.why
        })
    }

    fn end_late(&mut self, limit: Duration) -> anyhow::Result<()> {
        while let Some(mark) = self.late.last() {
            let found = exec::script(self.agent, FIND, &[mark], limit)?;
            // A shell and its copies.
            for process in found.out.split_whitespace().take(FOUND_MAX).filter_map(|pid| pid.parse().ok()) {
                exec::kill(self.agent, process)?;
            }
            self.late.pop();
        }
        Ok(())
    }

    fn run(&self, mark: &str, command: &[String], limit: Duration) -> Result<(), Failed> {
        let mut arg = ["-c", &format!(": {mark}\n{CHECK}"), "tombolo"].map(str::to_owned).to_vec();
        arg.extend(command.iter().cloned());
        let begun = Instant::now();
        let pid = exec::start_within(self.agent, "/bin/sh", arg, Vec::new(), None, true, limit)
            .map_err(Failed::unseen)?;
        loop {
            let status = self.agent.call(qga::guest_exec_status { pid }, limit).map_err(Failed::unseen)?;
            if status.exited {
                return judge(&status, command).map_err(|why| Failed { why, may_run: false });
            }
            if begun.elapsed() >= limit {
                exec::kill(self.agent, pid).map_err(Failed::unseen)?;
                let why =
                    anyhow::anyhow!("'{}' took longer than {} s", command.join(" "), limit.as_secs_f64());
                return Err(Failed { why, may_run: false });
            }
            std::thread::sleep(LOOK);
        }
    }
}

fn judge(status: &qga::GuestExecStatus, command: &[String]) -> anyhow::Result<()> {
    let code = exec::code_of(status);
    let words =
        [&status.out_data, &status.err_data].into_iter().flatten().flatten().copied().collect::<Vec<u8>>();
    anyhow::ensure!(
        code == 0,
        "'{}' ended with {code}: {}",
        command.join(" "),
        String::from_utf8_lossy(&words).trim()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health(results: &[(bool, bool)]) -> Vec<Health> {
        let mut tally = Tally { health: Health::Starting, failures: 0 };
        let mut said = Vec::new();
        for &(pass, early) in results {
            tally.count(pass, early, 3);
            said.push(tally.health);
        }
        said
    }

    #[test]
    fn a_check_that_says_a_lot_is_as_healthy_as_its_exit_code_says() {
        let check = |words: &[&str]| {
            let mut command = std::process::Command::new("/bin/sh");
            command.args(["-c", CHECK, "tombolo"]).args(words).output().unwrap()
        };
        for code in [0, 3] {
            let line = format!("head -c 3000000 /dev/zero | tr '\\0' x; echo the end >&2; exit {code}");
            let output = check(&["/bin/sh", "-c", &line]);
            assert_eq!(output.status.code(), Some(code));
            assert_eq!((output.stdout.len(), output.stdout.ends_with(b"xthe end\n")), (4096, true));
        }
        assert_eq!(check(&["true"]).status.code(), Some(0));
        assert_eq!(check(&["no such program"]).status.code(), Some(127));
    }

    #[test]
    fn an_agent_that_does_not_answer_fails_a_check_in_the_checks_time() {
        let agent = crate::guest::agent::tests::fake(|_, _| None);
        let begun = Instant::now();
        let e = Checker::new(&agent).check(&["true".to_owned()], Duration::from_millis(100)).unwrap_err();
        assert!(e.to_string().contains("did not answer guest-exec"), "{e}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    }

    #[test]
    fn so_many_failures_in_a_row_make_a_vm_unhealthy_and_one_success_healthy_again() {
        use Health::{Healthy, Starting, Unhealthy};
        assert_eq!(health(&[(false, false); 3]), [Starting, Starting, Unhealthy]);
        let (good, bad) = ((true, false), (false, false));
        assert_eq!(
            health(&[good, bad, bad, good, bad, bad, bad, good]),
            [Healthy, Healthy, Healthy, Healthy, Healthy, Healthy, Unhealthy, Healthy]
        );
        // Failures in the beginning don't count, but for one that was healthy already.
        assert_eq!(health(&[(false, true), (false, true), (false, true), bad]), [Starting; 4]);
        assert_eq!(
            health(&[(true, true), (false, true), (false, true), (false, true)]).last(),
            Some(&Unhealthy)
        );
    }
}
