// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `depends_on =` and `healthcheck =`: which VM is started after which, and when one counts as healthy.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::check::Fault;
use super::{Compose, Ready, nearest};

/// The state of another VM that a VM waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Until {
    /// QEMU runs.
    Started,
    /// It is ready, as its key `ready` defines it, and set up.
    #[default]
    Ready,
    /// Its health check has succeeded.
    Healthy,
}

impl fmt::Display for Until {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Until::Started => "started",
            Until::Ready => "ready",
            Until::Healthy => "healthy",
        })
    }
}

/// VMs that are started before, by name: written as a table, or as a list of names.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Depends(
    /// By name.
    pub BTreeMap<String, Until>,
);

impl<'de> Deserialize<'de> for Depends {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        super::named::deserialize(d, "VM", "db = \"healthy\"").map(Depends)
    }
}

/// A command that tells whether a VM does what it is for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HealthCheck {
    /// `"true"`: A line for the guest's shell, or a list of words. 0 is healthy. Required.
    pub command: CommandLine,
    /// `"30s"`: The time from one check to the next; until the first that succeeds 5 seconds at most.
    #[serde(default = "thirty")]
    pub interval: Span,
    /// `"30s"`: A check that takes longer has failed.
    #[serde(default = "thirty")]
    pub timeout: Span,
    /// `3`: Failures in a row that make the VM unhealthy.
    #[serde(default = "three")]
    pub retries: u32,
    /// `"0s"`: Failures so soon after the VM is up don't count.
    #[serde(default)]
    pub start_period: Span,
}

fn thirty() -> Span {
    Span(Duration::from_secs(30))
}

fn three() -> u32 {
    3
}

/// A command: program and arguments, or one line for a shell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct CommandLine(
    /// Program and arguments.
    pub Vec<String>,
);

impl<'de> Deserialize<'de> for CommandLine {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = CommandLine;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a command, such as [\"pg_isready\", \"-q\"] or \"pg_isready -q\"")
            }
            fn visit_str<E: de::Error>(self, line: &str) -> Result<CommandLine, E> {
                Ok(CommandLine(["/bin/sh", "-c", line].map(str::to_owned).to_vec()))
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, seq: A) -> Result<CommandLine, A::Error> {
                Vec::deserialize(de::value::SeqAccessDeserializer::new(seq)).map(CommandLine)
            }
        }
        d.deserialize_any(V)
    }
}

/// A time, written "500ms", "30s", "2m", or as a number of seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span(pub Duration);

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&format_args!("{}ms", self.0.as_millis()))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Span;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time such as \"30s\", \"500ms\" or \"2m\"")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Span, E> {
                let wrong =
                    || E::custom(format!("'{text}' is no time; write \"500ms\", \"30s\", \"2m\" or \"1h\""));
                let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
                let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
                let milliseconds = match &text[digits..] {
                    "ms" => 1,
                    "s" | "" => 1000,
                    "m" => 60_000,
                    "h" => 3_600_000,
                    _ => return Err(wrong()),
                };
                number.checked_mul(milliseconds).map(|ms| Span(Duration::from_millis(ms))).ok_or_else(wrong)
            }
            fn visit_i64<E: de::Error>(self, n: i64) -> Result<Span, E> {
                let seconds = u64::try_from(n).map_err(|_| E::custom("a time can't be negative"))?;
                // A time is written in milliseconds, and read again by the supervisor.
                let milliseconds = seconds.checked_mul(1000);
                let too_long = || E::custom(format!("{seconds} seconds are too long a time"));
                milliseconds.map(|ms| Span(Duration::from_millis(ms))).ok_or_else(too_long)
            }
        }
        d.deserialize_any(V)
    }
}

/// These VMs, and all that they depend on.
#[must_use]
pub fn with_dependencies(compose: &Compose, vms: &[String]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut next: Vec<&String> = vms.iter().collect();
    while let Some(name) = next.pop() {
        if all.insert(name.clone()) {
            next.extend(compose.vm.get(name).into_iter().flat_map(|vm| vm.depends_on.0.keys()));
        }
    }
    all
}

/// Checks what needs nothing from the host.
pub(super) fn check(compose: &Compose) -> Result<(), Fault> {
    for (name, vm) in &compose.vm {
        let fail = |key: &str, message: String| Err((format!("vm.{name}"), key.to_owned(), message));
        if let Some(check) = &vm.healthcheck {
            if check.command.0.is_empty() {
                return fail("healthcheck", format!("vm.{name}.healthcheck.command is empty"));
            }
            if check.interval.0.is_zero() || check.timeout.0.is_zero() || check.retries == 0 {
                return fail(
                    "healthcheck",
                    format!("vm.{name}.healthcheck: interval, timeout and retries must be more than 0"),
                );
            }
            if vm.ready != Ready::Agent {
                return fail(
                    "healthcheck",
                    format!(
                        "vm.{name} has a health check, which runs through the guest agent: ready must be \"agent\""
                    ),
                );
            }
        }
        for (other, until) in &vm.depends_on.0 {
            let Some(spec) = compose.vm.get(other) else {
                let near = nearest(other, compose.vm.keys().map(String::as_str));
                let hint = near
                    .map_or_else(|| format!("add [vm.{other}]"), |near| format!("did you mean '{near}'?"));
                return fail(
                    "depends_on",
                    format!("vm.{name}.depends_on names the VM '{other}', which is not declared; {hint}"),
                );
            };
            if *until == Until::Healthy && spec.healthcheck.is_none() {
                return fail(
                    "depends_on",
                    format!(
                        "vm.{name} waits until vm.{other} is healthy, which has no health check; add healthcheck to [vm.{other}]"
                    ),
                );
            }
        }
    }
    let mut done = BTreeSet::new();
    for name in compose.vm.keys() {
        if let Some(cycle) = cycle(compose, name, &mut Vec::new(), &mut done) {
            let message = format!(
                "vm.{}: no VM of this circle can be first; take one dependency out",
                cycle.join(" depends on vm.")
            );
            return Err((format!("vm.{}", cycle[0]), "depends_on".to_owned(), message));
        }
    }
    Ok(())
}

/// A circle of dependencies that can be reached from `name`: its VMs in order, the first one again at its end.
fn cycle<'a>(
    compose: &'a Compose,
    name: &'a str,
    path: &mut Vec<&'a str>,
    done: &mut BTreeSet<&'a str>,
) -> Option<Vec<&'a str>> {
    if let Some(at) = path.iter().position(|p| *p == name) {
        return Some(path[at..].iter().copied().chain([name]).collect());
    }
    if !done.insert(name) {
        return None;
    }
    path.push(name);
    let found = compose.vm[name].depends_on.0.keys().find_map(|next| cycle(compose, next, path, done));
    path.pop();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::Project;
    use std::path::Path;

    fn parse(text: &str) -> Result<Project, String> {
        Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn a_circle_is_refused_with_its_names() {
        let e = parse(
            "[vm.a]\ndepends_on = [\"b\"]\n[vm.b]\ndepends_on = [\"c\"]\n[vm.c]\n\ndepends_on = [\"b\"]\n",
        )
        .unwrap_err();
        assert!(
            e.contains(":4: vm.b depends on vm.c depends on vm.b: no VM of this circle can be first"),
            "{e}"
        );
        assert!(parse("[vm.a]\ndepends_on = [\"a\"]\n").unwrap_err().contains("vm.a depends on vm.a"));
        parse("[vm.a]\ndepends_on = [\"b\", \"c\"]\n[vm.b]\ndepends_on = [\"c\"]\n[vm.c]\n").unwrap();
    }

    #[test]
    fn what_a_vm_waits_for_must_be_there() {
        let e = parse("[vm.a]\ndepends_on = [\"dbb\"]\n[vm.db]\n").unwrap_err();
        assert!(e.contains(":2: ") && e.ends_with("did you mean 'db'?"), "{e}");
        let e = parse("[vm.a]\ndepends_on = { db = \"healthy\" }\n[vm.db]\n").unwrap_err();
        assert!(e.contains("vm.db is healthy, which has no health check"), "{e}");
        let e = parse("[vm.a]\ndepends_on = { db = \"up\" }\n[vm.db]\n").unwrap_err();
        assert!(e.contains("`started`, `ready`, `healthy`"), "{e}");
    }

    #[test]
    fn a_check_has_the_times_of_compose_files() {
        let vm = |text: &str| {
            parse(&format!("[vm.a]\nhealthcheck = {text}\n"))
                .map(|p| p.compose.vm["a"].healthcheck.clone().unwrap())
        };
        let check = vm("{ command = \"true\" }").unwrap();
        assert_eq!(check.command.0, ["/bin/sh", "-c", "true"]);
        assert_eq!((check.interval, check.timeout, check.retries), (thirty(), thirty(), 3));
        let check =
            vm("{ command = [\"true\"], interval = \"500ms\", timeout = 2, start_period = \"1m\" }").unwrap();
        assert_eq!((check.interval.0, check.timeout.0.as_secs()), (Duration::from_millis(500), 2));
        assert_eq!((check.start_period.0.as_secs(), check.command.0.len()), (60, 1));
        assert!(vm("{ command = \"true\", interval = \"soon\" }").unwrap_err().contains("'soon' is no time"));
        let e = vm("{ command = \"true\", timeout = 9223372036854775807 }").unwrap_err();
        assert!(e.contains("9223372036854775807 seconds are too long a time"), "{e}");
        assert!(vm("{ command = \"true\", retries = 0 }").unwrap_err().contains("must be more than 0"));
        assert!(parse("[vm.a]\nready = \"running\"\nhealthcheck = { command = \"true\" }\n").is_err());
    }

    #[test]
    fn a_vm_comes_with_all_that_it_depends_on() {
        let project =
            parse("[vm.a]\ndepends_on = [\"b\"]\n[vm.b]\ndepends_on = { c = \"started\" }\n[vm.c]\n[vm.d]\n")
                .unwrap();
        let names = with_dependencies(&project.compose, &["a".to_owned()]);
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["a", "b", "c"]);
    }
}
