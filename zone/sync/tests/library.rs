// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libtombolo-sync as C programmers use it: installed, found by its header and name, used beside the crate.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use tombolo_sync::{Agent, Locked, Mutex, Semaphore};
use tombolo_zone::{Backing, Zone, ZoneConfig};

const LONG: Option<Duration> = Some(Duration::from_secs(20));

fn must(command: &mut Command) -> Output {
    let out = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{command:?}: {}{}", text(&out.stdout), text(&out.stderr));
    out
}

/// Installs the library in a folder. Returns where programs find it.
fn installed(dir: &Path) -> PathBuf {
    let (here, stage) = (Path::new(env!("CARGO_MANIFEST_DIR")), dir.join("stage"));
    let mut make = Command::new("make");
    make.arg("-sC").arg(here).arg("install").arg("PREFIX=/usr");
    must(make.arg(format!("DESTDIR={}", stage.display())).arg(format!("OUT={}", dir.join("out").display())));
    stage.join("usr")
}

/// Builds a program from a source below this folder.
fn build(source: &str, usr: &Path, program: &Path) {
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-o"]).arg(program);
    cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source));
    cc.arg("-I").arg(usr.join("include")).arg("-L").arg(usr.join("lib"));
    must(cc.args(["-ltombolo-sync", "-pthread"]));
}

/// Makes a zone in a file, with the host's part of it.
fn served(path: &Path) -> Agent {
    let config = ZoneConfig::new("c", 8 << 20).backing(Backing::File(path.to_owned()));
    Agent::start(Arc::new(Zone::create(&config).unwrap()), None).unwrap()
}

#[test]
fn a_thread_that_is_cancelled_while_it_opens_or_closes_a_session_holds_up_no_fork() {
    let dir = tempfile::tempdir().unwrap();
    let (usr, program, zone) = (installed(dir.path()), dir.path().join("program"), dir.path().join("zone"));
    build("tests/cancelled.c", &usr, &program);
    let _agent = served(&zone);
    must(Command::new(program).env("LD_LIBRARY_PATH", usr.join("lib")).arg(zone));
}

#[test]
fn a_c_program_links_with_the_installed_library_and_shares_objects_with_rust() {
    let dir = tempfile::tempdir().unwrap();
    let (usr, program) = (installed(dir.path()), dir.path().join("program"));
    for file in ["include/libtombolo-sync.h", "lib/libtombolo-sync.a", "lib/pkgconfig/tombolo-sync.pc"] {
        assert!(usr.join(file).is_file(), "{file}");
    }
    let lib = usr.join("lib");
    build("../tests/guest/synctest.c", &usr, &program);
    let needed = must(Command::new("objdump").arg("-p").arg(&program));
    assert!(String::from_utf8_lossy(&needed.stdout).contains("NEEDED               libtombolo-sync.so.0"));

    let path = dir.path().join("zone");
    let agent = served(&path);
    let sem = Semaphore::create(agent.sync(), "s", 0).unwrap();
    let mutex = Mutex::create(agent.sync(), "m").unwrap();
    let run = |what: &[&str]| {
        Command::new(&program).env("LD_LIBRARY_PATH", &lib).arg(&path).args(what).status().unwrap().code()
    };
    assert_eq!(run(&["post", "s"]), Some(0));
    assert_eq!(sem.wait(LONG), Ok(()));
    sem.post().unwrap();
    assert_eq!(run(&["wait", "s"]), Some(0));
    assert_eq!(run(&["wait", "nothing"]), Some(2), "ENOENT");
    assert_eq!(run(&["lock", "m"]), Some(0));
    assert_eq!(mutex.lock(LONG), Ok(Locked::OwnerDied), "it ended without unlocking");
}
