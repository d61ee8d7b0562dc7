// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Properties of the plan, over sides of few names so that they meet often.

use std::collections::BTreeMap;

use proptest::collection::{btree_map, btree_set, vec};
use proptest::prelude::*;
use serde_json::json;

use super::*;

fn name() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["a", "b", "c"]).prop_map(str::to_owned)
}

fn parts() -> impl Strategy<Value = Parts> {
    btree_map(name(), (0..2u8).prop_map(|size| json!({ "size": size })), 0..4)
}

fn vms() -> impl Strategy<Value = Parts> {
    let used = || {
        btree_set(name(), 0..3)
            .prop_map(|names| names.into_iter().map(|n| (n, json!({}))).collect::<BTreeMap<_, _>>())
    };
    let vm = (0..2u8, used(), used(), used()).prop_map(|(cpus, zones, networks, accelerators)| {
        json!({ "cpus": cpus, "zones": zones, "networks": networks, "accelerators": accelerators })
    });
    btree_map(name(), vm, 0..4)
}

/// A side whose VMs use only what it has.
fn side() -> impl Strategy<Value = Side> {
    (name(), vms(), parts(), parts(), parts()).prop_map(
        |(project, mut vms, zones, networks, accelerators)| {
            for vm in vms.values_mut() {
                for (key, there) in
                    [("zones", &zones), ("networks", &networks), ("accelerators", &accelerators)]
                {
                    vm[key].as_object_mut().unwrap().retain(|name, _| there.contains_key(name));
                }
            }
            Side { project, vms, zones, networks, accelerators, ..Side::default() }
        },
    )
}

fn wish() -> impl Strategy<Value = Wish> {
    (vec(name(), 0..3), any::<bool>(), any::<bool>()).prop_map(|(vms, remove_orphans, restart)| Wish {
        vms,
        remove_orphans,
        restart,
        ..Wish::default()
    })
}

fn everything() -> Wish {
    Wish::default()
}

/// The project after the actions.
fn apply(running: &Side, wanted: &Side, actions: &[Action]) -> Side {
    let mut after = running.clone();
    let of = |side: &mut Side, kind: Kind| match kind {
        Kind::Zone => std::mem::take(&mut side.zones),
        Kind::Network => std::mem::take(&mut side.networks),
        Kind::Accelerator => std::mem::take(&mut side.accelerators),
        Kind::Vm => std::mem::take(&mut side.vms),
    };
    let back = |side: &mut Side, kind: Kind, parts: Parts| match kind {
        Kind::Zone => side.zones = parts,
        Kind::Network => side.networks = parts,
        Kind::Accelerator => side.accelerators = parts,
        Kind::Vm => side.vms = parts,
    };
    for action in actions {
        let (kind, name, there) = match action {
            Action::Rename { to, .. } => {
                after.project.clone_from(to);
                continue;
            }
            Action::Stop { kind, name } => (*kind, name, false),
            Action::Start { kind, name } | Action::Replace { kind, name, .. } => (*kind, name, true),
            Action::Restart { name, .. } => (Kind::Vm, name, true),
            Action::Keep { .. } | Action::Wait { .. } | Action::Orphan { .. } => continue,
        };
        let mut parts = of(&mut after, kind);
        if there {
            parts.insert(name.clone(), wanted.parts(kind)[name].clone());
        } else {
            parts.remove(name);
        }
        back(&mut after, kind, parts);
    }
    after
}

fn names(action: &Action) -> Option<(Kind, &str)> {
    match action {
        Action::Rename { .. } => None,
        Action::Restart { name, .. } => Some((Kind::Vm, name)),
        Action::Stop { kind, name }
        | Action::Replace { kind, name, .. }
        | Action::Start { kind, name }
        | Action::Keep { kind, name }
        | Action::Wait { kind, name, .. }
        | Action::Orphan { kind, name, .. } => Some((*kind, name)),
    }
}

const KINDS: [Kind; 4] = [Kind::Vm, Kind::Zone, Kind::Network, Kind::Accelerator];

proptest! {
    #[test]
    fn every_part_that_runs_has_one_action_and_so_has_every_difference(running in side(), wanted in side()) {
        let actions = plan(&running, &wanted, &everything());
        for kind in KINDS {
            for name in running.parts(kind).keys().chain(wanted.parts(kind).keys()) {
                let about = actions.iter().filter(|a| names(a) == Some((kind, name.as_str()))).collect::<Vec<_>>();
                prop_assert!(about.len() <= 1, "{about:?}");
                // A network that no VM needs now is not started.
                let needs = |action: &Action| matches!(action, Action::Start { kind: Kind::Vm, name: vm } if wanted.uses(vm, kind, name));
                let spare = !running.parts(kind).contains_key(name) && !actions.iter().any(needs);
                prop_assert!(about.len() == 1 || spare, "nothing about the {} {name}", kind.word());
                let same = running.parts(kind).get(name) == wanted.parts(kind).get(name);
                prop_assert_eq!(about.iter().any(|a| matches!(a, Action::Keep { .. })), same, "{:?}", about);
            }
        }
    }

    #[test]
    fn a_second_up_has_nothing_to_do_and_says_the_same_of_what_waits(running in side(), wanted in side(), wish in wish()) {
        let wish = Wish { restart: false, ..wish };
        let first = plan(&running, &wanted, &wish);
        let second = plan(&apply(&running, &wanted, &first), &wanted, &wish);
        for action in &second {
            // A new name of a project without VMs is no news.
            prop_assert!(!action.acts() || matches!(action, Action::Rename { .. }), "{action:?} after {first:?}");
        }
        let left = |actions: &[Action]| actions.iter().filter(|a| matches!(a, Action::Wait { .. } | Action::Orphan { .. })).cloned().collect::<Vec<_>>();
        prop_assert_eq!(left(&first).len(), left(&second).len());
    }

    #[test]
    fn what_runs_as_the_file_says_is_left_alone(wanted in side()) {
        let actions = plan(&wanted, &wanted, &everything());
        prop_assert!(actions.iter().all(|a| matches!(a, Action::Keep { .. })), "{actions:?}");
    }

    #[test]
    fn no_up_without_a_word_of_it_stops_a_vm_or_takes_what_a_running_one_uses(running in side(), wanted in side(), wish in wish()) {
        let actions = plan(&running, &wanted, &wish);
        let stops: Vec<&str> = actions.iter().filter_map(|a| match a {
            Action::Stop { kind: Kind::Vm, name } | Action::Restart { name, .. } => Some(name.as_str()),
            _ => None,
        }).collect();
        for vm in &stops {
            let orphan = !wanted.vms.contains_key(*vm);
            prop_assert!(if orphan { wish.remove_orphans } else { wish.restart }, "{vm}");
            prop_assert!(orphan || wish.vms.is_empty() || wish.vms.iter().any(|v| v == vm));
        }
        for action in &actions {
            if let Action::Stop { kind, name } | Action::Replace { kind, name, .. } = action {
                let used = running.vms.keys().any(|vm| !stops.contains(&vm.as_str()) && running.uses(vm, *kind, name));
                prop_assert!(!used, "{action:?} takes from a running VM");
            }
        }
    }

    #[test]
    fn the_restart_that_a_change_names_applies_it(running in side(), wanted in side()) {
        for action in plan(&running, &wanted, &everything()) {
            let Action::Wait { kind, name, restart, .. } = &action else { continue };
            // An orphan among them has to be stopped too, which is told beside it.
            if *kind == Kind::Zone { continue }
            let again = Wish { vms: restart.clone(), remove_orphans: true, restart: true, ..Wish::default() };
            let after = apply(&running, &wanted, &plan(&running, &wanted, &again));
            prop_assert_eq!(after.parts(*kind).get(name), wanted.parts(*kind).get(name), "{:?}", action);
        }
    }

    #[test]
    fn what_is_stopped_comes_before_what_is_started(running in side(), wanted in side(), wish in wish()) {
        let turns: Vec<u32> = plan(&running, &wanted, &wish).iter().map(Action::turn).collect();
        prop_assert!(turns.is_sorted());
    }
}

#[test]
fn a_change_says_what_held_what_is_wanted_and_how_to_get_there() {
    let running = Side {
        project: "p".into(),
        vms: [("a".to_owned(), json!({ "memory": "512M", "networks": { "lan": {} } }))].into(),
        networks: [("lan".to_owned(), json!({ "mtu": null }))].into(),
        ..Side::default()
    };
    let mut wanted = running.clone();
    wanted.project = "q".into();
    wanted.vms.get_mut("a").unwrap()["memory"] = json!("1G");
    wanted.networks.get_mut("lan").unwrap()["mtu"] = json!(9000);
    let said: Vec<String> = plan(&running, &wanted, &everything()).iter().map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "rename the project 'p' to 'q' (its logs stay in their folder until 'tombolo down')",
            "leave the VM 'a' as it runs: memory 512M -> 1G; to apply: tombolo restart a",
            "leave the network 'lan' as it runs: mtu default -> 9000; to apply: tombolo restart a",
        ]
    );
}

#[test]
fn the_vm_that_owns_an_accelerator_is_among_its_users() {
    let side = |memory: &str| Side {
        vms: Parts::from([
            ("owner".to_owned(), json!({})),
            ("a".to_owned(), json!({ "accelerators": { "gpu": {} } })),
        ]),
        accelerators: Parts::from([("gpu".to_owned(), json!({ "vm": "owner", "memory": memory }))]),
        ..Side::default()
    };
    let owner_alone = Wish { vms: vec!["owner".into()], ..Wish::default() };
    let start = Action::Start { kind: Kind::Accelerator, name: "gpu".into() };
    assert!(plan(&Side::default(), &side("1G"), &owner_alone).contains(&start), "its clients may come later");
    let mut running = side("1G");
    running.vms.remove("a");
    let waits = plan(&running, &side("2G"), &everything()).into_iter().find_map(|action| match action {
        Action::Wait { kind: Kind::Accelerator, restart, .. } => Some(restart),
        _ => None,
    });
    assert_eq!(waits, Some(vec!["owner".to_owned()]), "what the owner has is not replaced below it");
}
