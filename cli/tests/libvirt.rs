// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo libvirt hook` as libvirt calls it: the domain's name, operation, phase and '-', with the XML on the standard input; a start is refused by the exit
//! code. A process that connects to a doorbell is not needed here; vm/libvirt/tests/libvirtd.py has real domains.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tombolo_zone::{MemberState, Zone};

const LONG: Duration = Duration::from_secs(300);
const DOMAIN: &str =
    "<domain type='qemu'><name>web</name><memory unit='MiB'>256</memory><vcpu>1</vcpu><devices/></domain>";

/// A zone with a file system, and a domain that is defined to be its member.
struct Host {
    dir: tempfile::TempDir,
    xml: String,
}

impl Host {
    fn new(dir: tempfile::TempDir) -> Host {
        let mut host = Host { dir, xml: String::new() };
        std::fs::write(host.dir.path().join("domain.xml"), DOMAIN).unwrap();
        host.good(&["zone", "create", "own.zone", "--size", "16M"]);
        host.good(&["files", "mkfs", "own.zone"]);
        host.xml = host.good(&["libvirt", "xml", "./domain.xml", "--zone", "own.zone", "--whole"]);
        host
    }

    /// In memory, as zones are by default.
    fn in_memory() -> Host {
        Host::new(tempfile::tempdir_in("/dev/shm").unwrap())
    }

    fn zone(&self) -> PathBuf {
        self.dir.path().join("own.zone")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        command.args(args).current_dir(self.dir.path()).env("TOMBOLO_ZONES_RUN", self.dir.path().join("run"));
        command.stdin(Stdio::null());
        command
    }

    fn good(&self, args: &[&str]) -> String {
        let output = self.command(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn hook(&self, operation: &str, phase: &str, xml: &str) -> Output {
        let mut hook = self.command(&["libvirt", "hook", "web", operation, phase, "-"]);
        let pipes = hook.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut hook = pipes.spawn().unwrap();
        // A hook with nothing to do ends without having read it.
        let _ = hook.stdin.take().unwrap().write_all(xml.as_bytes());
        hook.wait_with_output().unwrap()
    }

    fn starts(&self) {
        let output = self.hook("prepare", "begin", &self.xml);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn ends(&self) {
        let output = self.hook("release", "end", &self.xml);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// What `virsh start` shows of a start that is refused.
    fn refused(&self) -> String {
        let output = self.hook("prepare", "begin", &self.xml);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains("for the domain 'web'"), "{said}");
        said
    }

    /// Ends the zone's server and takes the zone's file, as the host's reboot does.
    fn reboots(&self) {
        if let Some(pid) = self.server() {
            let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            let began = Instant::now();
            while self.server().is_some() {
                assert!(began.elapsed() < LONG, "the server lives");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        let run = self.dir.path().join("run");
        if run.exists() {
            std::fs::remove_dir_all(run).unwrap();
        }
        if self.zone().exists() {
            std::fs::remove_file(self.zone()).unwrap();
        }
    }

    fn server(&self) -> Option<u32> {
        let uuid = Zone::open(self.zone(), false).ok()?.uuid();
        let record = self.dir.path().join("run").join(uuid.to_string()).join("server.lock");
        let pid = std::fs::read_to_string(record).ok()?.trim().parse().ok()?;
        Zone::open(self.zone(), false).is_ok_and(|zone| zone.has_owner().unwrap()).then_some(pid)
    }

    /// The text of a file that the zone holds.
    fn note(&self) -> Option<String> {
        let copy = tempfile::tempdir().unwrap();
        self.good(&["files", "export", "own.zone", copy.path().to_str().unwrap()]);
        std::fs::read_to_string(copy.path().join("note")).ok()
    }

    fn write_note(&self) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("note"), "kept").unwrap();
        self.good(&["files", "import", folder.path().to_str().unwrap(), "own.zone"]);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.reboots();
    }
}

#[test]
fn a_zone_in_memory_that_a_reboot_took_is_made_anew_with_its_identity_and_a_file_system() {
    let host = Host::in_memory();
    let before = Zone::open(host.zone(), false).unwrap();
    let (name, uuid, size) = (before.name().to_owned(), before.uuid(), before.size());
    drop(before);
    for _ in 0..2 {
        host.reboots();
        host.starts();
        let zone = Zone::open(host.zone(), false).unwrap();
        assert_eq!((zone.name(), zone.uuid(), zone.size()), (name.as_str(), uuid, size));
        let web = zone.members().unwrap().into_iter().find(|m| m.name == "web").unwrap();
        assert_eq!(web.state, MemberState::Invited);
        // The socket that the domain's XML names is there.
        let socket = format!("{uuid}/web.sock");
        assert!(
            host.xml.contains(&socket) && host.dir.path().join("run").join(&socket).exists(),
            "{}",
            host.xml
        );
        assert_eq!(host.note(), None);
        host.ends();
    }
}

#[test]
fn neither_the_end_of_a_domain_nor_its_next_start_touches_what_is_in_the_zone() {
    let host = Host::in_memory();
    host.write_note();
    for _ in 0..2 {
        host.starts();
        host.ends();
        assert_eq!(host.note().as_deref(), Some("kept"));
    }
}

#[test]
fn domains_that_start_at_once_share_the_one_zone_that_is_made() {
    let host = Host::in_memory();
    host.reboots();
    let outputs: Vec<Output> = std::thread::scope(|scope| {
        let hooks: Vec<_> =
            (0..4).map(|_| scope.spawn(|| host.hook("prepare", "begin", &host.xml))).collect();
        hooks.into_iter().map(|hook| hook.join().unwrap()).collect()
    });
    for output in outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    // Nothing lies beside the zone: no half-made one, no copy.
    let mut names: Vec<_> =
        std::fs::read_dir(host.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["domain.xml", "own.zone", "run"]);
    host.good(&["files", "fsck", "-n", "own.zone"]);
}

#[test]
fn a_zone_on_a_disk_that_is_not_there_is_not_replaced_by_an_empty_one() {
    let host = Host::new(
        tempfile::Builder::new().prefix("a disk ").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
    );
    let uuid = Zone::open(host.zone(), false).unwrap().uuid();
    let away = host.dir.path().join("away");
    std::fs::rename(host.zone(), &away).unwrap();
    let said = host.refused();
    assert!(said.contains("mount the disk") && !host.zone().exists(), "{said}");
    // The commands that it names make one, by the same identity.
    let (_, commands) = said.trim().rsplit_once("in its place: ").unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_tombolo")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let made = Command::new("sh").args(["-c", commands]).env("PATH", path).output().unwrap();
    assert!(made.status.success(), "{commands}: {}", String::from_utf8_lossy(&made.stderr));
    assert_eq!(Zone::open(host.zone(), false).unwrap().uuid(), uuid);
    host.starts();
}

#[test]
fn another_zone_at_its_path_is_refused_and_stays_as_it_is() {
    let host = Host::in_memory();
    host.reboots();
    host.good(&["zone", "create", "own.zone", "--size", "32M"]);
    let said = host.refused();
    assert!(said.contains("detach and attach it again"), "{said}");
    assert_eq!(Zone::open(host.zone(), false).unwrap().size(), 32 << 20);
    std::fs::write(host.zone(), "words").unwrap();
    assert!(host.refused().contains("not a zone"));
    assert_eq!(std::fs::read(host.zone()).unwrap(), b"words");
}

#[test]
fn a_link_or_another_users_file_in_the_place_of_the_zone_is_refused() {
    let host = Host::in_memory();
    let away = host.dir.path().join("away");
    std::fs::rename(host.zone(), &away).unwrap();
    std::os::unix::fs::symlink(&away, host.zone()).unwrap();
    assert!(host.refused().contains("is a symbolic link"));
    std::fs::remove_file(host.zone()).unwrap();
    std::fs::rename(&away, host.zone()).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(host.zone(), Some(65534), None).unwrap();
        assert!(host.refused().contains("belongs to the user 65534"));
        std::os::unix::fs::chown(host.zone(), Some(0), None).unwrap();
    }
    host.starts();
}

#[test]
fn a_domain_of_an_older_version_is_told_the_commands_and_no_zone_is_guessed() {
    let mut host = Host::in_memory();
    host.reboots();
    let element = host.xml.split("<tombolo:zone").nth(1).unwrap().split("/>").next().unwrap().to_owned();
    let old = format!(" path=\"{}\" member=\"web\" ", host.zone().display());
    host.xml = host.xml.replace(&element, &old);
    let said = host.refused();
    assert!(said.contains("make the zone anew") && said.contains("tombolo zone create"), "{said}");
    assert!(!host.zone().exists());
}

#[test]
fn other_operations_and_domains_without_tombolo_are_let_through_and_broken_xml_is_not() {
    let host = Host::in_memory();
    host.reboots();
    for (operation, phase, xml) in [
        ("start", "begin", host.xml.as_str()),
        ("started", "begin", &host.xml),
        ("stopped", "end", &host.xml),
        ("reconnect", "begin", &host.xml),
        ("prepare", "begin", DOMAIN),
        ("release", "end", DOMAIN),
    ] {
        let output = host.hook(operation, phase, xml);
        assert!(output.status.success() && output.stderr.is_empty(), "{operation}: {output:?}");
    }
    assert!(!host.zone().exists());
    let output = host.hook("prepare", "begin", "<domain>");
    assert!(String::from_utf8_lossy(&output.stderr).contains("XML is malformed"), "{output:?}");
    assert!(!output.status.success());
}
