// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::os::unix::net::{UnixDatagram, UnixStream};

use super::*;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn taken(path: &Path) -> Option<(UnixListener, Name)> {
    match listen(path, Some(0o600)) {
        Ok(taken) => Some(taken),
        Err(Error::Served(_) | Error::Locked(_)) => None,
        Err(why) => panic!("{why}"),
    }
}

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().mode() & 0o777
}

#[test]
fn a_name_has_one_server_at_a_time_and_that_of_a_dead_one_is_taken() {
    let folder = folder();
    let path = folder.path().join("socket");
    let first = taken(&path).expect("free");
    assert!(taken(&path).is_none());
    drop(first);
    let second = taken(&path).expect("its server has ended");
    assert_eq!(mode(second.1.path()), 0o600);
    assert!(UnixStream::connect(&path).is_ok());
    second.1.remove().unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_server_that_has_no_room_for_one_more_client_keeps_its_name() {
    let folder = folder();
    let path = folder.path().join("socket");
    let (listener, _name) = taken(&path).expect("free");
    rustix::net::listen(&listener, 0).unwrap();
    let _waits = UnixStream::connect(&path).expect("room for one");
    assert!(taken(&path).is_none());
}

#[test]
fn of_servers_that_take_a_name_at_once_one_has_it() {
    let folder = folder();
    for round in 0..50 {
        let path = folder.path().join(round.to_string());
        // What a dead one has left.
        drop(UnixListener::bind(&path).unwrap());
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| taken(&path))).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(all.len(), 1, "round {round}");
        let _client = UnixStream::connect(&path).expect("it listens");
        all[0].0.set_nonblocking(true).unwrap();
        all[0].0.accept().expect("it is this one's client");
    }
}

#[test]
fn who_gives_up_a_name_that_another_server_has_changes_nothing() {
    let folder = folder();
    let path = folder.path().join("socket");
    let (_old, name) = taken(&path).expect("free");
    // By an administrator.
    std::fs::remove_file(&path).unwrap();
    let (_new, others) = taken(&path).expect("free");
    name.remove().expect("nothing to do");
    name.change(folder.path().join("elsewhere")).expect("nothing to do");
    assert!(UnixStream::connect(&path).is_ok());
    others.change(folder.path().join("elsewhere")).expect("its own");
    assert!(!path.exists() && UnixStream::connect(folder.path().join("elsewhere")).is_ok());
}

#[test]
fn files_that_are_no_sockets_stay_whatever_their_names() {
    let folder = folder();
    let path = folder.path().join("Cargo");
    for (name, is_in_the_way) in [("Cargo.lock", false), ("Cargo.tombolo-new", true)] {
        let file = folder.path().join(name);
        std::fs::write(&file, "words").unwrap();
        assert_eq!(listen(&path, None).is_err(), is_in_the_way);
        assert_eq!(std::fs::read(&file).unwrap(), b"words");
    }
    let why = listen(&folder.path().join("Cargo.lock"), None).unwrap_err();
    assert!(matches!(why, Error::NoSocket(_)) && why.to_string().contains("Cargo.lock: "), "{why}");
}

#[test]
fn a_link_in_the_place_of_a_new_socket_is_not_followed() {
    let folder = folder();
    let (socket, link) = (folder.path().join("socket"), folder.path().join("link"));
    let _served = taken(&socket).expect("free");
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    assert!(matches!(open(&link), Err(Error::NoSocket(_))));
    assert!(matches!(listen(&link, None), Err(Error::NoSocket(_))));
}

#[test]
fn a_socket_has_its_mode_before_its_name_and_none_is_left_of_one_that_gets_no_name() {
    let folder = folder();
    let path = folder.path().join("socket");
    let begun = begin(&path).unwrap();
    begun.set_mode(0o640).unwrap();
    assert!(!path.exists());
    assert!(UnixStream::connect(fresh(&path)).is_err(), "it does not listen yet");
    let _served = begun.finish().unwrap();
    assert_eq!(mode(&path), 0o640);
    drop(begin(&folder.path().join("other")).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_socket_of_another_kind_is_served_too() {
    let folder = folder();
    let path = folder.path().join("socket");
    let datagrams = UnixDatagram::bind(&path).unwrap();
    assert!(taken(&path).is_none());
    drop(datagrams);
    assert!(taken(&path).is_some());
}

#[test]
fn a_server_at_which_this_process_may_not_look_is_not_taken_for_a_dead_one() {
    let folder = folder();
    let path = folder.path().join("socket");
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    let (_listener, name) = taken(&path).expect("free");
    std::fs::set_permissions(&path, Permissions::from_mode(0o000)).unwrap();
    let refused = || {
        if rustix::process::geteuid().is_root() {
            // SAFETY: a number; of this thread alone.
            unsafe { libc::setfsuid(65534) };
        }
        listen(&path, None).unwrap_err()
    };
    let why = std::thread::scope(|scope| scope.spawn(refused).join().unwrap());
    assert!(matches!(why, Error::Unknown { .. }) && why.to_string().contains("Permission denied"), "{why}");
    assert!(name.is_own());
}

#[test]
fn a_lock_that_another_process_holds_is_named() {
    let folder = folder();
    let path = folder.path().join("socket");
    let held = LockFile::take(&beside(&path, ".tombolo-lock")).unwrap();
    let why = listen(&path, None).unwrap_err();
    assert!(
        matches!(why, Error::Locked(_)) && why.to_string().contains("socket.tombolo-lock: another process"),
        "{why}"
    );
    drop(held);
    assert!(listen(&path, None).is_ok());
}

#[test]
fn each_path_that_an_address_has_room_for_can_be_a_name() {
    let folder = folder();
    let longest = LONGEST - folder.path().as_os_str().len() - 1;
    let deep = folder.path().join("d".repeat(longest - 2));
    std::fs::create_dir(&deep).unwrap();
    for path in [folder.path().join("n".repeat(longest)), deep.join("n")] {
        let _served = taken(&path).expect("free");
        assert!(UnixStream::connect(&path).is_ok());
        let why = listen(&beside(&path, "n"), None).unwrap_err().to_string();
        assert!(why.contains("at most 107 bytes"), "{why}");
        assert_eq!(
            std::fs::read_dir(path.parent().unwrap())
                .unwrap()
                .filter(|e| e.as_ref().unwrap().path() != deep)
                .count(),
            1
        );
    }
}

#[test]
fn servers_whose_names_differ_by_an_ending_leave_each_other_alone() {
    let folder = folder();
    let (path, longer) = (folder.path().join("accel"), folder.path().join("accel.new"));
    let _other = taken(&longer).expect("free");
    let _own = taken(&path).expect("free");
    assert!(UnixStream::connect(&longer).is_ok());
}
