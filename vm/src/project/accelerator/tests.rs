// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slots, and the members of their zones.

use super::*;
use crate::compose::accelerator::{AccelSpec, AccelUse};
use crate::project::keeper::Service;
use crate::project::patience::tests::Processes;
use crate::project::peer::Peer;
use crate::project::zones::Place;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use tombolo_control::accel::{Answer, Request};

/// A server of these slots, whose zones are in `safe`.
fn server(safe: Arc<Safe>, slots: BTreeMap<String, Slot>) -> Server {
    Server {
        name: "cl".into(),
        spec: AccelSpec::default(),
        scratch: None,
        safe,
        telling: Mutex::default(),
        slots: Mutex::new(slots),
        link: Mutex::default(),
        started: Mutex::default(),
    }
}

fn zone(safe: &Arc<Safe>, vm: &str) -> Arc<HostZone> {
    Arc::new(HostZone::for_calls("cl", 8 << 20, Place::part(safe, vm)).unwrap())
}

/// Slots of the VMs a and b, whose server may refuse a.
fn refused(before: Option<bool>) -> (anyhow::Result<()>, Vec<Option<bool>>) {
    let dir = tempfile::tempdir().unwrap();
    let safe = Arc::new(Safe::start(dir.path(), "calls-cl").unwrap());
    let slot = |vm: &str| {
        let (zone, served) = (zone(&safe, vm), before);
        Slot { zone, used: AccelUse::default(), served, library: None, channels: None }
    };
    let slots = ["a", "b"].map(|vm| (vm.to_owned(), slot(vm)));
    let server = server(safe.clone(), slots.into());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let answering = std::thread::spawn(move || {
        for line in BufReader::new(&theirs).lines().map_while(Result::ok) {
            let Request::Vm(guest) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
            let answer = if guest.vm == "a" { Answer::Error("no zone".into()) } else { Answer::Ok(()) };
            writeln!(&theirs, "{}", serde_json::to_string(&answer).unwrap()).unwrap();
        }
    });
    let result = server.begin(Peer::new(ours));
    let served = lock(&server.slots).values().map(|slot| slot.served).collect();
    drop(server);
    answering.join().unwrap();
    (result, served)
}

#[test]
fn a_vm_that_damaged_its_zone_keeps_no_other_from_being_served() {
    let (result, served) = refused(Some(true));
    assert!(result.is_ok());
    assert_eq!(served, [Some(false), Some(true)]);
}

#[test]
fn a_zone_that_no_server_could_ever_enter_is_an_error() {
    let (result, _) = refused(None);
    assert_eq!(result.unwrap_err().to_string(), "no zone");
}

#[test]
fn a_server_that_hangs_while_it_is_told_of_a_vm_holds_up_no_look_at_the_seats() {
    let dir = tempfile::tempdir().unwrap();
    let safe = Arc::new(Safe::start(dir.path(), "calls-cl").unwrap());
    let slot = Slot {
        zone: zone(&safe, "a"),
        used: AccelUse::default(),
        served: None,
        library: None,
        channels: None,
    };
    let server = server(safe, [("a".to_owned(), slot)].into());
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let telling = scope.spawn(|| server.begin(Peer::new(ours)));
        BufReader::new(&theirs).read_line(&mut String::new()).unwrap();
        assert!(server.slots.try_lock().is_ok(), "the slots are locked while the server is asked");
        drop(theirs);
        assert!(telling.join().unwrap().is_err());
    });
}

/// Of an accelerator that the VM `owner` serves to a and b.
fn owned() -> (Accelerator, Project) {
    let text = "[accel.gpu]\nvm = \"owner\"\nwindow = \"1M\"\nchannels = 1\n[vm.owner]\n[vm.a]\naccelerators = [\"gpu\"]\n\
                [vm.b]\naccelerators = [\"gpu\"]\n[vm.c]\n";
    let project = Project::parse(Path::new("/somewhere/tombolo.toml"), text).unwrap();
    let dir = tempfile::tempdir().unwrap();
    (Accelerator::start("gpu", &project, dir.path()).unwrap(), project)
}

/// The clients whose zones the owner VM has, as it runs now.
fn reached(accelerator: &Accelerator) -> Vec<String> {
    let slots = lock(&accelerator.server.slots);
    let there = slots.iter().filter(|(_, slot)| slot.reach().is_some_and(|reach| reach != Reach::Apart));
    there.map(|(vm, _)| vm.clone()).collect()
}

fn names(invitations: Vec<(String, Invitation)>) -> Vec<String> {
    invitations.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn an_owner_gets_the_zone_of_each_client_and_a_client_its_own() {
    let (gpu, _) = owned();
    assert_eq!(reached(&gpu), [""; 0], "the owner has not been started");
    assert_eq!(names(gpu.invite("owner").unwrap()), ["gpu.a", "gpu.b"]);
    assert_eq!(names(gpu.invite("a").unwrap()), ["gpu"]);
    assert_eq!(names(gpu.invite("c").unwrap()), [""; 0]);
    let [a, b] = &gpu.zones()[..] else { panic!("two zones") };
    assert_ne!(a.uuid(), b.uuid());
    assert_eq!(a.slot("owner").is_some() && a.slot("a").is_some(), b.slot("b").is_none());
    assert_eq!(reached(&gpu), ["a", "b"]);
    gpu.gone("owner");
    assert!(reached(&gpu).is_empty() && a.slot("owner").is_none() && a.slot("a").is_some());
    let status = gpu.status();
    assert_eq!((status.owner.as_deref(), status.state.as_str()), (Some("owner"), "'owner' is not up"));
}

#[test]
fn an_accelerator_is_there_for_its_owner_before_any_client_is_started() {
    let (_, project) = owned();
    let used = |vm: &str| Accelerator::used_by(vm, &project.compose.vm[vm], &project.compose);
    assert_eq!((used("owner").len(), used("a").len(), used("c").len()), (1, 1, 0));
}

#[test]
fn a_server_that_does_not_answer_while_it_waits_for_a_cpu_is_not_said_to_be_silent() {
    let look = |process: &Processes| {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        look(Arc::new(Mutex::new(Peer::new(ours))), process.first()).unwrap_err()
    };
    assert_eq!(look(&Processes::start(&["sleep", "1000"], 1)), "does not answer");
    let crowd = Processes::on_one_cpu(8);
    // A first look may come before there is a crowd.
    while look(&crowd) != "waits for a CPU of this busy host" {}
}
