// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The actions of `up` and `restart`: the difference between the running project and the compose file.
//!
//! [`plan`] is a pure function. `up` carries its list out, `up --dry-run` prints it. Every part that runs or is declared has an action, so no
//! change is ignored without a word: what `up` can't apply to a running part is [`Action::Wait`], what the file no longer declares is
//! [`Action::Orphan`].
//!
//! Settings are compared as JSON, key by key. A key that the compose file gains needs no line here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::compose::ports::Forward;
use crate::compose::{Compose, Project, depends};

/// Parts of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Zone,
    /// A network with its switch.
    Network,
    /// An accelerator with its server.
    Accelerator,
    Vm,
}

impl Kind {
    /// The name in messages.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Zone => "zone",
            Kind::Network => "network",
            Kind::Accelerator => "accelerator",
            Kind::Vm => "VM",
        }
    }

    /// The key of a VM's table that names parts of this kind.
    fn key(self) -> &'static str {
        match self {
            Kind::Zone => "zones",
            Kind::Network => "networks",
            Kind::Accelerator => "accelerators",
            Kind::Vm => "",
        }
    }
}

/// One key whose value differs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The key of the part's table.
    pub key: String,
    /// The value of the running part; null: none was given.
    pub from: Value,
    /// The value in the file; null: none.
    pub to: Value,
}

/// An action on one part, or the reason for none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// The project has another name now.
    Rename {
        /// The name so far.
        from: String,
        /// The name from now on.
        to: String,
    },
    /// A part is stopped that the file does not declare (`--remove-orphans`).
    Stop { kind: Kind, name: String },
    /// A part that no running VM uses is ended and started as the file says now.
    Replace { kind: Kind, name: String, changes: Vec<Change> },
    /// A part is started.
    Start { kind: Kind, name: String },
    /// A VM is stopped and started as the file says now.
    Restart { name: String, changes: Vec<Change> },
    /// A part runs as the file says.
    Keep { kind: Kind, name: String },
    /// A part keeps running as it is. The change is applied when these VMs are restarted in one command; an empty list: when the project
    /// is taken down and started again.
    Wait {
        kind: Kind,
        name: String,
        changes: Vec<Change>,
        /// The VMs.
        restart: Vec<String>,
    },
    /// A part keeps running that the file does not declare.
    Orphan {
        kind: Kind,
        name: String,
        /// The VMs that use it.
        users: Vec<String>,
    },
}

/// The options of the command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// These VMs only; empty: all.
    pub vms: Vec<String>,
    /// VMs that those depend on: started where they don't run, and never restarted.
    #[serde(default)]
    pub also: BTreeSet<String>,
    /// Stop what the file does not declare.
    #[serde(default)]
    pub remove_orphans: bool,
    /// VMs of the wish that run are stopped and started again.
    #[serde(default)]
    pub restart: bool,
}

impl Wish {
    /// The wish with the VMs on which its own depend.
    #[must_use]
    pub fn with_dependencies(&self, compose: &Compose) -> Wish {
        let also = depends::with_dependencies(compose, &self.vms).into_iter().collect();
        Wish { also, ..self.clone() }
    }

    /// Refuses names of VMs that the file does not declare.
    ///
    /// # Errors
    /// Names the VM, and the one that was presumably meant.
    pub fn check(&self, project: &Project) -> anyhow::Result<()> {
        for name in &self.vms {
            if !project.compose.vm.contains_key(name) {
                let near = crate::compose::nearest(name, project.compose.vm.keys().map(String::as_str));
                let hint = near.map(|n| format!("; did you mean '{n}'?")).unwrap_or_default();
                anyhow::bail!("{} declares no VM '{name}'{hint}", project.file.display());
            }
        }
        Ok(())
    }
}

/// Parts by name, each with its settings.
pub type Parts = BTreeMap<String, Value>;

/// The parts of a project, as they run or as a file declares them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Side {
    /// The project's name.
    pub project: String,
    /// VMs. A VM that has ended does not run.
    pub vms: Parts,
    pub zones: Parts,
    pub networks: Parts,
    pub accelerators: Parts,
    /// Members of running zones that no VM's settings name: zones attached later, processes of the host.
    pub members: BTreeMap<String, BTreeSet<String>>,
    /// Ports of the host that running networks forward, by VM.
    pub forwards: BTreeMap<String, Vec<Forward>>,
}

impl Side {
    /// The parts that a compose file declares.
    pub fn declared(project: &str, compose: &Compose) -> Side {
        Side {
            project: project.to_owned(),
            vms: values(&compose.vm),
            zones: values(&compose.zone),
            networks: values(&compose.net),
            accelerators: values(&compose.accel),
            members: BTreeMap::new(),
            forwards: BTreeMap::new(),
        }
    }

    fn parts(&self, kind: Kind) -> &Parts {
        match kind {
            Kind::Zone => &self.zones,
            Kind::Network => &self.networks,
            Kind::Accelerator => &self.accelerators,
            Kind::Vm => &self.vms,
        }
    }

    /// Returns whether a VM uses a part, or owns it.
    fn uses(&self, vm: &str, kind: Kind, name: &str) -> bool {
        let used = self.vms.get(vm).is_some_and(|settings| settings[kind.key()].get(name).is_some());
        let owner = self.parts(kind).get(name).filter(|_| kind == Kind::Accelerator).map(|part| &part["vm"]);
        used || owner.is_some_and(|owner| owner == vm)
    }
}

/// Settings as they are compared.
pub fn value(settings: &impl Serialize) -> Value {
    // It fails for maps whose keys are no text, which no setting is.
    serde_json::to_value(settings).unwrap_or_default()
}

fn values<T: Serialize>(parts: &BTreeMap<String, T>) -> Parts {
    parts.iter().map(|(name, settings)| (name.clone(), value(settings))).collect()
}

/// The keys whose values differ.
pub fn changes(from: &Value, to: &Value) -> Vec<Change> {
    let keys =
        |value: &Value| value.as_object().into_iter().flat_map(|o| o.keys().cloned()).collect::<Vec<_>>();
    let all: BTreeSet<String> = keys(from).into_iter().chain(keys(to)).collect();
    let differs = all.into_iter().filter(|key| from[key] != to[key]);
    differs.map(|key| Change { from: from[&key].clone(), to: to[&key].clone(), key }).collect()
}

/// The actions that lead from `running` to `wanted`, in their order.
pub fn plan(running: &Side, wanted: &Side, wish: &Wish) -> Vec<Action> {
    let mut actions = Vec::new();
    if running.project != wanted.project && !running.vms.is_empty() {
        actions.push(Action::Rename { from: running.project.clone(), to: wanted.project.clone() });
    }
    for (name, settings) in &wanted.vms {
        let named = wish.vms.is_empty() || wish.vms.contains(name);
        if named || wish.also.contains(name) {
            actions.push(vm(name, running.vms.get(name), settings, wish.restart && named));
        }
    }
    for name in running.vms.keys().filter(|name| !wanted.vms.contains_key(*name)) {
        actions.push(orphan(Kind::Vm, name, Vec::new(), wish.remove_orphans));
    }
    let moves = Moves::of(&actions);
    for kind in [Kind::Zone, Kind::Network, Kind::Accelerator] {
        for (name, settings) in wanted.parts(kind) {
            let users = users(running, &moves, kind, name);
            let needed = kind == Kind::Zone || moves.started.iter().any(|vm| wanted.uses(vm, kind, name));
            actions.extend(part(kind, name, running.parts(kind).get(name), settings, users, needed));
        }
        for name in running.parts(kind).keys().filter(|name| !wanted.parts(kind).contains_key(*name)) {
            actions.push(orphan(kind, name, users(running, &moves, kind, name), wish.remove_orphans));
        }
    }
    actions.sort_by_key(Action::turn);
    actions
}

fn vm(name: &str, running: Option<&Value>, wanted: &Value, restart: bool) -> Action {
    let name = name.to_owned();
    let Some(running) = running else { return Action::Start { kind: Kind::Vm, name } };
    let changes = changes(running, wanted);
    if restart {
        Action::Restart { name, changes }
    } else if changes.is_empty() {
        Action::Keep { kind: Kind::Vm, name }
    } else {
        Action::Wait { kind: Kind::Vm, restart: vec![name.clone()], name, changes }
    }
}

fn part(
    kind: Kind,
    name: &str,
    running: Option<&Value>,
    wanted: &Value,
    users: Vec<String>,
    needed: bool,
) -> Option<Action> {
    let name = name.to_owned();
    let Some(running) = running else { return needed.then_some(Action::Start { kind, name }) };
    let changes = changes(running, wanted);
    Some(if changes.is_empty() {
        Action::Keep { kind, name }
    } else if kind == Kind::Zone {
        // The content of a zone is not lost without an explicit 'down'.
        Action::Wait { kind, name, changes, restart: Vec::new() }
    } else if users.is_empty() {
        Action::Replace { kind, name, changes }
    } else {
        Action::Wait { kind, name, changes, restart: users }
    })
}

fn orphan(kind: Kind, name: &str, users: Vec<String>, remove: bool) -> Action {
    let name = name.to_owned();
    if remove && users.is_empty() {
        Action::Stop { kind, name }
    } else {
        Action::Orphan { kind, name, users }
    }
}

/// The VMs that stop and start.
struct Moves {
    stopped: BTreeSet<String>,
    started: BTreeSet<String>,
}

impl Moves {
    fn of(vms: &[Action]) -> Moves {
        let mut moves = Moves { stopped: BTreeSet::new(), started: BTreeSet::new() };
        for action in vms {
            match action {
                Action::Start { name, .. } => drop(moves.started.insert(name.clone())),
                Action::Stop { name, .. } => drop(moves.stopped.insert(name.clone())),
                Action::Restart { name, .. } => {
                    moves.stopped.insert(name.clone());
                    moves.started.insert(name.clone());
                }
                _ => {}
            }
        }
        moves
    }
}

/// The VMs that use a running part and go on running.
fn users(running: &Side, moves: &Moves, kind: Kind, name: &str) -> Vec<String> {
    let vms = running.vms.keys().filter(|vm| running.uses(vm, kind, name));
    let members = running.members.get(name).filter(|_| kind == Kind::Zone).into_iter().flatten();
    let users: BTreeSet<&String> = vms.chain(members).filter(|user| !moves.stopped.contains(*user)).collect();
    users.into_iter().cloned().collect()
}

impl Action {
    /// Its place in the order: what is stopped comes before what is started, VMs are stopped before and started after what they use.
    fn turn(&self) -> u32 {
        match self {
            Action::Rename { .. } => 0,
            Action::Stop { kind: Kind::Vm, .. } => 1,
            Action::Stop { .. } => 2,
            Action::Replace { .. } => 3,
            Action::Start { kind: Kind::Vm, .. } => 5,
            Action::Start { .. } => 4,
            Action::Restart { .. } => 5,
            Action::Keep { .. } => 6,
            Action::Wait { .. } => 7,
            Action::Orphan { .. } => 8,
        }
    }

    /// Returns whether it starts this VM.
    pub fn starts(&self, vm: &str) -> bool {
        match self {
            Action::Start { kind: Kind::Vm, name } | Action::Restart { name, .. } => name == vm,
            _ => false,
        }
    }

    /// Returns whether it changes anything.
    pub fn acts(&self) -> bool {
        !matches!(self, Action::Keep { .. } | Action::Wait { .. } | Action::Orphan { .. })
    }

    /// Returns whether the user has to know of it, beside the stages of VMs that `up` reports.
    pub fn is_news(&self) -> bool {
        !matches!(self, Action::Keep { .. } | Action::Start { .. } | Action::Restart { .. })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Rename { from, to } => {
                write!(
                    f,
                    "rename the project '{from}' to '{to}' (its logs stay in their folder until 'tombolo down')"
                )
            }
            Action::Stop { kind, name } => {
                write!(f, "stop the {} '{name}', which the file does not declare", kind.word())
            }
            Action::Replace { kind, name, changes } => {
                write!(f, "start the {} '{name}' anew: {}", kind.word(), list(changes))
            }
            Action::Start { kind, name } => write!(f, "start the {} '{name}'", kind.word()),
            Action::Restart { name, changes } if changes.is_empty() => write!(f, "restart the VM '{name}'"),
            Action::Restart { name, changes } => write!(f, "restart the VM '{name}': {}", list(changes)),
            Action::Keep { kind, name } => write!(f, "keep the {} '{name}'", kind.word()),
            Action::Wait { kind, name, changes, restart } => {
                let how = match &restart[..] {
                    [] => "tombolo down && tombolo up (a zone in memory loses what is in it)".to_owned(),
                    vms => format!("tombolo restart {}", vms.join(" ")),
                };
                write!(f, "leave the {} '{name}' as it runs: {}; to apply: {how}", kind.word(), list(changes))
            }
            Action::Orphan { kind, name, users } => {
                write!(f, "leave the {} '{name}', which the file does not declare; ", kind.word())?;
                match &users[..] {
                    [] => write!(f, "to stop it: tombolo up --remove-orphans"),
                    users => write!(f, "used by {}", users.join(", ")),
                }
            }
        }
    }
}

fn list(changes: &[Change]) -> String {
    changes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |value: &Value| match value {
            Value::Null => "default".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let (from, to) = (word(&self.from), word(&self.to));
        // Tables are long, and the file has them.
        if from.len() + to.len() > 60 {
            write!(f, "{} differs", self.key)
        } else {
            write!(f, "{} {from} -> {to}", self.key)
        }
    }
}

#[cfg(test)]
mod tests;
