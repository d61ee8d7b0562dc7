// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libtombolo-sync as C programmers use it: installed, found by its header and name, used beside the crate.

use std::path::Path;
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

#[test]
fn a_c_program_links_with_the_installed_library_and_shares_objects_with_rust() {
    let dir = tempfile::tempdir().unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (stage, program) = (dir.path().join("stage"), dir.path().join("program"));
    let make = |goal: &str| {
        let mut make = Command::new("make");
        make.arg("-sC").arg(here).arg(goal).arg("PREFIX=/usr");
        make.arg(format!("DESTDIR={}", stage.display()))
            .arg(format!("OUT={}", dir.path().join("out").display()));
        must(&mut make)
    };
    make("install");
    for file in ["include/libtombolo-sync.h", "lib/libtombolo-sync.a", "lib/pkgconfig/tombolo-sync.pc"] {
        assert!(stage.join("usr").join(file).is_file(), "{file}");
    }
    let lib = stage.join("usr/lib");
    let source = here.join("../tests/guest/synctest.c");
    must(
        Command::new("cc")
            .args(["-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&program)
            .arg(source)
            .arg("-I")
            .arg(stage.join("usr/include"))
            .arg("-L")
            .arg(&lib)
            .args(["-ltombolo-sync", "-pthread"]),
    );
    let needed = must(Command::new("objdump").arg("-p").arg(&program));
    assert!(String::from_utf8_lossy(&needed.stdout).contains("NEEDED               libtombolo-sync.so.0"));

    let path = dir.path().join("zone");
    let config = ZoneConfig::new("c", 8 << 20).backing(Backing::File(path.clone()));
    let agent = Agent::start(Arc::new(Zone::create(&config).unwrap()), None).unwrap();
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
