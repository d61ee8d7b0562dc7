// SPDX-License-Identifier: Apache-2.0 OR MIT
//! FUSE mounts of one zone by several processes, each a member. Needs root and /dev/fuse.

use std::ffi::CString;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;
use tombolo_files::fs::{Filesystem, ROOT};
use tombolo_files::target::{Name, Target};
use tombolo_zone::{Backing, Rights, Role, Zone, ZoneConfig};

fn files(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-files-torture"));
    command.arg("files").args(args).output().expect("the command starts")
}

fn must(args: &[&str]) -> String {
    let out = files(args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// A zone in a file, mounted twice.
struct Rig {
    dir: TempDir,
    zone: PathBuf,
    pids: Vec<i32>,
    owner: Option<Zone>,
    server: Option<Killed>,
}

/// A process that is killed at the end.
struct Killed(Child);

impl Killed {
    fn end(mut self) {
        self.0.kill().expect("a child");
        self.0.wait().expect("a child");
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have been killed before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a process that owns the zone and serves its doorbells.
fn serve(zone: &Path) -> Killed {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-files-torture"));
    let mut child = command.arg("serve").arg(zone).stdout(Stdio::piped()).spawn().expect("the server starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    assert_eq!(line, "serving\n");
    Killed(child)
}

impl Rig {
    fn new() -> Rig {
        Rig::mounted_by(true, false)
    }

    /// Another process owns the zone and serves its doorbells.
    fn served() -> Rig {
        Rig::mounted_by(false, true)
    }

    /// owned: by this process, which serves no doorbells; unless another one serves it, the first mount takes the zone over.
    fn mounted_by(owned: bool, served: bool) -> Rig {
        let dir = TempDir::new().expect("a directory");
        let zone = dir.path().join("zone");
        let config = ZoneConfig::new("rig", 64 << 20).backing(Backing::File(zone.clone()));
        let owner = Some(Zone::create(&config).expect("a zone")).filter(|_| owned);
        must(&["mkfs", zone.to_str().expect("a path")]);
        let server = served.then(|| serve(&zone));
        let mut rig = Rig { dir, zone, pids: Vec::new(), owner, server };
        for name in ["a", "b"] {
            fs::create_dir(rig.at(name)).expect("a directory");
            let member = format!("member-{name}");
            let args = ["mount", "--json", "--member", &member, rig.zone_str(), &rig.at_str(name)]
                .map(str::to_owned);
            let text = must(&args.iter().map(String::as_str).collect::<Vec<_>>());
            let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            rig.pids.push(json["pid"].as_i64().expect("a pid") as i32);
        }
        rig
    }

    fn reap(&self) -> usize {
        self.owner.as_ref().expect("an owner").reap().expect("a zone").len()
    }

    fn zone_str(&self) -> &str {
        self.zone.to_str().expect("a path")
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn at_str(&self, path: &str) -> String {
        self.at(path).display().to_string()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for pid in &self.pids {
            // SAFETY: a plain call; these processes were started above and no one else waits for them.
            unsafe { libc::kill(*pid, libc::SIGTERM) };
        }
        for name in ["a", "b"] {
            wait_until(|| !mounted(&self.at(name)));
        }
    }
}

fn mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("the mount table");
    table.lines().any(|l| l.split(' ').nth(4) == path.to_str())
}

/// Waits, bounded, for another process; if it never comes, the caller's next claim fails.
fn wait_until(mut test: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if test() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Unmounts, which is busy while a child that another test has started still holds inherited descriptors.
fn unmount(at: &Path) {
    let umount = || Command::new("umount").arg(at).output().expect("umount starts");
    let mut last = umount();
    wait_until(|| {
        if !last.status.success() {
            last = umount();
        }
        last.status.success()
    });
    assert!(last.status.success(), "{}", String::from_utf8_lossy(&last.stderr));
}

#[test]
fn what_one_mount_did_the_other_sees_at_once() {
    let rig = Rig::new();
    for i in 0..50 {
        let (a, b) = (rig.at(&format!("a/f{i}")), rig.at(&format!("b/f{i}")));
        fs::write(&a, format!("first {i}")).expect("write");
        assert_eq!(fs::read_to_string(&b).expect("read"), format!("first {i}"));
        fs::OpenOptions::new().append(true).open(&b).expect("open").write_all(b" second").expect("append");
        assert_eq!(fs::metadata(&a).expect("stat").len(), format!("first {i} second").len() as u64);
        fs::set_permissions(&a, fs::Permissions::from_mode(0o600)).expect("chmod");
        assert_eq!(fs::metadata(&b).expect("stat").mode() & 0o777, 0o600);
        fs::rename(&b, rig.at(&format!("b/g{i}"))).expect("rename");
        assert!(!a.exists());
        assert_eq!(fs::read_dir(rig.at("a")).expect("list").count(), i + 1);
    }
}

/// The kernel of the first mount does not learn of the second's change, as the file stays open.
#[test]
fn who_has_a_file_open_that_another_mount_gives_away_can_change_it_no_more_than_a_stranger() {
    let rig = Rig::new();
    let path = rig.at("a/f");
    fs::write(&path, b"x").expect("write");
    std::os::unix::fs::chown(&path, Some(1000), Some(1000)).expect("chown");
    let file = fs::OpenOptions::new().write(true).open(&path).expect("open");
    assert_eq!(file.metadata().expect("stat").uid(), 1000);
    std::os::unix::fs::chown(rig.at("b/f"), Some(0), Some(0)).expect("chown");
    // Also in a user namespace of its own, where it has all capabilities.
    for apart in [false, true] {
        let code = in_child(|| {
            // SAFETY: plain calls of a child with one thread.
            unsafe {
                if libc::setgroups(0, std::ptr::null()) != 0
                    || libc::setgid(1000) != 0
                    || libc::setuid(1000) != 0
                    || (apart && libc::unshare(libc::CLONE_NEWUSER) != 0)
                {
                    return 2;
                }
                i32::from(libc::fchmod(file.as_raw_fd(), 0o4777) == 0)
            }
        });
        assert_eq!(code, 0, "in a namespace of its own: {apart}");
    }
    let now = fs::metadata(rig.at("b/f")).expect("stat");
    assert_eq!((now.mode() & 0o7777, now.uid()), (0o644, 0));
}

/// The kernel of the first mount still knows the group in which the owner is.
#[test]
fn who_has_an_open_file_that_another_mount_gave_to_a_group_runs_nothing_as_that_group() {
    let rig = Rig::new();
    let path = rig.at("a/f");
    fs::write(&path, b"x").expect("write");
    std::os::unix::fs::chown(&path, Some(1000), Some(1000)).expect("chown");
    let file = fs::OpenOptions::new().write(true).open(&path).expect("open");
    assert_eq!(file.metadata().expect("stat").gid(), 1000);
    std::os::unix::fs::chown(rig.at("b/f"), None, Some(50)).expect("chgrp");
    let code = in_child(|| {
        // SAFETY: plain calls of a child with one thread.
        unsafe {
            if libc::setgroups(0, std::ptr::null()) != 0 || libc::setgid(1000) != 0 || libc::setuid(1000) != 0
            {
                return 2;
            }
            libc::fchmod(file.as_raw_fd(), 0o2755)
        }
    });
    assert_eq!(code, 0, "it is the owner's");
    let now = fs::metadata(rig.at("b/f")).expect("stat");
    assert_eq!((now.mode() & 0o7777, now.gid()), (0o755, 50));
}

#[test]
fn a_file_unlinked_in_one_mount_lives_in_the_other_until_it_is_closed() {
    let rig = Rig::new();
    fs::write(rig.at("a/f"), "kept").expect("write");
    let mut open = fs::File::open(rig.at("b/f")).expect("open");
    fs::remove_file(rig.at("a/f")).expect("unlink");
    assert!(!rig.at("b/f").exists());
    let mut text = String::new();
    open.read_to_string(&mut text).expect("read");
    assert_eq!(text, "kept");
    assert_eq!(open.metadata().expect("stat").nlink(), 0);
}

#[test]
fn a_file_without_a_name_gets_one_and_times_before_1970_stay() {
    let rig = Rig::new();
    let mut file = fs::OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .mode(0o640)
        .open(rig.at("a"))
        .expect("O_TMPFILE");
    file.write_all(b"made before it had a name").expect("write");
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(
        rustix::fs::CWD,
        from,
        rustix::fs::CWD,
        rig.at("a/named"),
        rustix::fs::AtFlags::SYMLINK_FOLLOW,
    )
    .expect("link");
    assert_eq!(fs::read_to_string(rig.at("b/named")).expect("read"), "made before it had a name");
    let old = std::time::UNIX_EPOCH - std::time::Duration::new(1000, 250);
    file.set_modified(old).expect("utimens");
    assert_eq!(fs::metadata(rig.at("b/named")).expect("stat").modified().expect("a time"), old);
}

#[test]
fn holes_are_found_and_shared_mappings_are_refused_not_stale() {
    let rig = Rig::new();
    let mut file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(rig.at("a/sparse"))
        .expect("open");
    file.write_all_at(b"far", 1 << 20).expect("write");
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)), Ok(1 << 20));
    assert_eq!(file.seek(SeekFrom::End(0)).expect("seek"), (1 << 20) + 3);
    let map = |flags| {
        // SAFETY: a new mapping at an address of the kernel's choice, never accessed.
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, rustix::mm::ProtFlags::READ, flags, &file, 0) }
    };
    assert_eq!(map(rustix::mm::MapFlags::SHARED).map(|_| ()), Err(rustix::io::Errno::NODEV));
    assert!(map(rustix::mm::MapFlags::PRIVATE).is_ok());
}

/// Runs a check in a process of its own, with its own POSIX locks; returns its exit code.
fn in_child(check: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls nothing but file operations and _exit, and does not return.
    match unsafe { libc::fork() } {
        0 => {
            let code = check();
            // SAFETY: ends the child without the parent's cleaning up.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child just started.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            libc::WEXITSTATUS(status)
        }
    }
}

/// fcntl with a lock of `kind` on bytes from `start` on; returns the errno.
fn fcntl_lock(file: &fs::File, command: libc::c_int, kind: libc::c_int, start: i64, len: i64) -> i32 {
    let lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    // SAFETY: an open file and a lock that lives across the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &lock) } {
        0 => 0,
        _ => std::io::Error::last_os_error().raw_os_error().unwrap_or(-1),
    }
}

fn both(rig: &Rig, name: &str) -> (fs::File, fs::File) {
    let open = |path| {
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).open(path).expect("open")
    };
    (open(rig.at(&format!("a/{name}"))), open(rig.at(&format!("b/{name}"))))
}

#[test]
fn flock_excludes_across_mounts_and_goes_with_the_open_file() {
    use rustix::fs::{FlockOperation, flock};
    let rig = Rig::new();
    let (a, b) = both(&rig, "f");
    flock(&a, FlockOperation::LockShared).expect("a shared lock");
    flock(&b, FlockOperation::NonBlockingLockShared).expect("a second shared lock");
    assert_eq!(flock(&b, FlockOperation::NonBlockingLockExclusive), Err(rustix::io::Errno::WOULDBLOCK));
    // A duplicate descriptor keeps it, the last one's close releases it.
    let copy = a.try_clone().expect("dup");
    drop(a);
    assert_eq!(flock(&b, FlockOperation::NonBlockingLockExclusive), Err(rustix::io::Errno::WOULDBLOCK));
    let waiter = std::thread::spawn(move || flock(&b, FlockOperation::LockExclusive).map(|()| b));
    drop(copy);
    assert!(waiter.join().expect("no panic").is_ok());
}

#[test]
fn fcntl_locks_exclude_by_range_across_mounts_and_go_when_a_process_closes_the_file() {
    let rig = Rig::new();
    let (a, b) = both(&rig, "f");
    assert_eq!(fcntl_lock(&a, libc::F_SETLK, libc::F_WRLCK, 10, 10), 0);
    assert_eq!(fcntl_lock(&b, libc::F_SETLK, libc::F_WRLCK, 20, 10), 0, "beside it");
    assert_eq!(fcntl_lock(&b, libc::F_SETLK, libc::F_RDLCK, 15, 1), libc::EAGAIN);
    let mut found =
        libc::flock { l_type: libc::F_RDLCK as libc::c_short, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: an open file and a lock that lives across the call.
    assert_eq!(unsafe { libc::fcntl(b.as_raw_fd(), libc::F_GETLK, &mut found) }, 0);
    assert_eq!((found.l_type, found.l_start, found.l_len), (libc::F_WRLCK as libc::c_short, 10, 10));
    // Another process of the same mount is another owner.
    let path = rig.at("a/f");
    let other = in_child(|| {
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).expect("open");
        fcntl_lock(&file, libc::F_SETLK, libc::F_RDLCK, 12, 1)
    });
    assert_eq!(other, libc::EAGAIN);
    // POSIX: closing any descriptor of the file releases all of the process's locks.
    drop(fs::File::open(rig.at("a/f")).expect("open"));
    assert_eq!(fcntl_lock(&b, libc::F_SETLK, libc::F_WRLCK, 0, 0), 0);
}

#[test]
fn open_file_description_locks_belong_to_the_open_file() {
    const SET: libc::c_int = libc::F_OFD_SETLK;
    let rig = Rig::new();
    let (a, b) = both(&rig, "f");
    assert_eq!(fcntl_lock(&a, SET, libc::F_WRLCK, 0, 0), 0);
    let second = fs::OpenOptions::new().read(true).write(true).open(rig.at("a/f")).expect("open");
    assert_eq!(
        fcntl_lock(&second, SET, libc::F_RDLCK, 0, 0),
        libc::EAGAIN,
        "the same process, another open file"
    );
    assert_eq!(fcntl_lock(&b, SET, libc::F_RDLCK, 0, 0), libc::EAGAIN);
    drop(second);
    assert_eq!(
        fcntl_lock(&b, SET, libc::F_RDLCK, 0, 0),
        libc::EAGAIN,
        "another open file's close is nothing"
    );
    drop(a);
    assert_eq!(fcntl_lock(&b, libc::F_OFD_SETLKW, libc::F_WRLCK, 0, 0), 0);
}

#[test]
fn two_that_wait_for_each_other_are_told_and_a_signal_ends_a_wait() {
    let rig = Rig::new();
    let (a, b) = both(&rig, "f");
    assert_eq!(fcntl_lock(&a, libc::F_SETLK, libc::F_WRLCK, 0, 1), 0);
    let path = rig.at("b/f");
    let (ready, mut told) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
    // SAFETY: the child calls nothing but file operations and _exit, and does not return.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let file = fs::OpenOptions::new().read(true).write(true).open(path).expect("open");
        let taken = fcntl_lock(&file, libc::F_SETLK, libc::F_WRLCK, 1, 1);
        let _ = (&ready).write_all(&[taken as u8]);
        let waited = fcntl_lock(&file, libc::F_SETLKW, libc::F_WRLCK, 0, 1);
        // SAFETY: ends the child without the parent's cleaning up.
        unsafe { libc::_exit(waited) }
    }
    let mut taken = [1];
    told.read_exact(&mut taken).expect("the child's word");
    assert_eq!(taken, [0]);
    // The second of the two gets the error; if it is the child, its end gives byte 1 to the parent.
    let mine = fcntl_lock(&a, libc::F_SETLKW, libc::F_WRLCK, 1, 1);
    if mine == libc::EDEADLK {
        drop((a, b));
    }
    let mut status = 0;
    // SAFETY: waits for the child started above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    let theirs = libc::WEXITSTATUS(status);
    assert!([(libc::EDEADLK, 0), (0, libc::EDEADLK)].contains(&(mine, theirs)), "{mine} {theirs}");

    let (a, _) = both(&rig, "g");
    rustix::fs::flock(&a, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let path = rig.at("b/g");
    let mut waiter = Command::new("flock").arg(&path).arg("true").spawn().expect("flock starts");
    wait_until(|| {
        let state = fs::read_to_string(format!("/proc/{}/wchan", waiter.id())).unwrap_or_default();
        state.contains("fuse") || state.contains("request_wait")
    });
    waiter.kill().expect("a signal");
    assert!(!waiter.wait().expect("its end").success());
    drop(a);
    let (_, b) = both(&rig, "g");
    rustix::fs::flock(&b, rustix::fs::FlockOperation::LockExclusive).expect("no process has it");
}

#[test]
fn a_program_that_waits_for_a_lock_when_its_mount_ends_is_told_that_the_mount_is_gone() {
    let rig = Rig::new();
    let (a, b) = both(&rig, "f");
    rustix::fs::flock(&b, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let (thread, waiting) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || {
        thread.send(rustix::thread::gettid()).expect("a receiver");
        rustix::fs::flock(&a, rustix::fs::FlockOperation::LockExclusive)
    });
    let task = format!("/proc/self/task/{}/wchan", waiting.recv().expect("a thread").as_raw_nonzero());
    wait_until(|| fs::read_to_string(&task).is_ok_and(|place| place.contains("request_wait")));
    // SAFETY: a plain call; the process was started by the rig.
    unsafe { libc::kill(rig.pids[0], libc::SIGTERM) };
    assert_eq!(waiter.join().expect("an answer"), Err(rustix::io::Errno::NOTCONN));
}

#[test]
fn a_process_joins_though_one_of_another_pid_namespace_has_its_number() {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("zone");
    let zone = Zone::create(&ZoneConfig::new("numbers", 64 << 20).backing(Backing::File(path.clone())))
        .expect("a zone");
    must(&["mkfs", path.to_str().expect("a path")]);
    let name = format!("mount-{}", std::process::id());
    let _other = zone.claim(&name, Role::Host, Rights::READ_WRITE).expect("a slot");
    let target = Target::open(&path, true, None).expect("a zone");
    assert!(target.join(Name::Member(&name)).is_err(), "a name that was asked for is not changed");
    let (_, joined) = target.join(Name::Process("mount")).expect("a membership");
    joined.expect("a zone").leave().expect("the end");
}

#[test]
fn a_mount_ends_though_another_mount_namespace_has_a_copy_of_it() {
    let rig = Rig::new();
    let mut copy = Command::new("unshare");
    copy.args(["--mount", "--propagation", "private", "sh", "-c", "echo copied; exec sleep 100"]);
    let mut copy = Killed(copy.stdout(Stdio::piped()).spawn().expect("unshare starts"));
    says(&mut copy, "copied");
    fs::write(rig.at("a/f"), "x").expect("write");
    // SAFETY: a plain call; the process was started by the rig.
    unsafe { libc::kill(rig.pids[0], libc::SIGTERM) };
    let ended = || !Path::new(&format!("/proc/{}/fd/0", rig.pids[0])).exists();
    wait_until(ended);
    assert!(ended(), "it waits for the copy");
    rig.reap();
    assert_eq!(fs::read_to_string(rig.at("b/f")).expect("read"), "x");
    fs::write(rig.at("b/f"), "y").expect("write");
}

#[test]
fn nobody_joins_while_a_file_system_is_repaired() {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("zone");
    let config = ZoneConfig::new("repair", 64 << 20).backing(Backing::File(path.clone()));
    drop(Zone::create(&config).expect("a zone"));
    let name = path.to_str().expect("a path");
    must(&["mkfs", name]);
    let target = Target::open(&path, true, None).expect("a zone");
    let repair = target.require_nobody("fsck").expect("no member");
    for args in [&["mount", name, dir.path().to_str().expect("a path")][..], &["fsck", "-y", name]] {
        let out = files(args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && said.contains("repair"), "{args:?}: {said}");
    }
    drop(repair);
    let (_, joined) = target.join(Name::Process("mount")).expect("a membership");
    assert!(target.require_nobody("fsck").is_err());
    joined.expect("a zone").leave().expect("the end");
    must(&["fsck", "-y", name]);
}

/// Waits until a line of a process that was started with a pipe for its output.
fn says(process: &mut Killed, what: &str) {
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    assert_eq!(line.trim_end(), what);
}

#[test]
fn mount_mounts_a_zones_file_with_the_options_of_a_line_in_fstab() {
    let alone = Alone::new();
    let bin = TempDir::new().expect("a directory");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tombolo-files-torture"), bin.path().join("tombolo"))
        .expect("a link");
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").expect("a path"));
    let helper = concat!(env!("CARGO_MANIFEST_DIR"), "/mount.tombolo");
    let mount = |options: &str| {
        let mut command = Command::new(helper);
        command.arg(&alone.image).arg(&alone.at).args(["-o", options]).env("PATH", &path);
        command.output().expect("the helper starts")
    };
    let said = mount("ro,nofail,x-systemd.automount,backend=fuse,allow_other,noatime");
    assert!(said.status.success(), "{said:?}");
    let table = fs::read_to_string("/proc/self/mounts").expect("the mounts");
    let line = format!(" {} fuse.tombolo ro,nosuid,nodev,noatime,", alone.at.display());
    assert!(table.contains(&line), "{table}");
    unmount(&alone.at);
    let said = mount("size=5");
    assert!(
        String::from_utf8_lossy(&said.stderr).contains("'size=5' is no option of this mount"),
        "{said:?}"
    );
}

#[test]
fn a_file_system_is_made_restored_repaired_and_granted_by_one_process_at_a_time() {
    let dir = TempDir::new().expect("a directory");
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (zone, bare, image) = (at("zone"), at("bare"), at("image"));
    let config = ZoneConfig::new("alone", 64 << 20).backing(Backing::File(zone.clone().into()));
    let owner = Zone::create(&config).expect("a zone");
    let _member = owner.claim("m", Role::Host, Rights::READ_WRITE).expect("a slot");
    must(&["mkfs", &zone]);
    must(&["mkfs", "--size=32M", &bare]);
    must(&["snapshot", &zone, &image]);
    for path in [&zone, &bare] {
        let target = Target::open(Path::new(path), true, None).expect("a file system");
        let other = target.hold_contents("mkfs").expect("no other process");
        for args in [&["mkfs", "--force", path][..], &["restore", "--force", &image, path]] {
            let out = files(args);
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(!out.status.success() && said.contains("another process"), "{args:?}: {said}");
        }
        drop((other, target));
        must(&["mkfs", "--force", path]);
    }
}

#[test]
fn a_zone_can_be_repaired_as_soon_as_it_is_unmounted() {
    let dir = TempDir::new().expect("a directory");
    let (zone, at) = (dir.path().join("zone"), dir.path().join("at"));
    let owner = Zone::create(&ZoneConfig::new("left", 32 << 20).backing(Backing::File(zone.clone())));
    drop(owner.expect("a zone"));
    fs::create_dir(&at).expect("a directory");
    let (zone, point) = (zone.to_str().expect("a path"), at.to_str().expect("a path"));
    must(&["mkfs", zone]);
    for _ in 0..20 {
        must(&["mount", zone, point]);
        fs::write(at.join("file"), vec![1; 4 << 20]).expect("write");
        unmount(&at);
        must(&["fsck", "-y", zone]);
    }
}

#[test]
fn an_image_is_not_restored_while_it_changes() {
    let alone = Alone::new();
    let to = alone.image.clone() + "-copy";
    must(&["mkfs", "--size=64M", &to]);
    let restore = ["restore", "--force", &alone.image, &to];
    let refused = |why: &str| {
        let out = files(&restore);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && said.contains(why) && said.contains(&alone.image), "{said}");
    };
    alone.mount(&[]);
    fs::write(alone.at.join("file"), "x").expect("write");
    refused("is mounted");
    unmount(&alone.at);
    let target = Target::open(Path::new(&alone.image), true, None).expect("a file system");
    target.hold_contents("fsck").expect("no other process");
    refused("another process");
    drop(target);
    must(&restore);
    must(&["fsck", "-n", &to]);
    let zone = to + "-zone";
    let config = ZoneConfig::new("image", 64 << 20).backing(Backing::File(zone.clone().into()));
    let _owner = Zone::create(&config).expect("a zone");
    must(&["mkfs", &zone]);
    let out = files(&["restore", "--force", &zone, &alone.image]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("tombolo files snapshot"), "{said}");
}

#[test]
fn a_copy_removes_what_killed_copies_left_and_nothing_of_living_ones() {
    let alone = Alone::new();
    let dir = TempDir::new().expect("a directory");
    let folder = |name: &str| dir.path().join(format!(".tombolo-copy-{name}"));
    for name in ["dead", "killed", "living"] {
        fs::create_dir_all(folder(name).join("zone")).expect("a directory");
    }
    let mut mount = Command::new(env!("CARGO_BIN_EXE_tombolo-files-torture"));
    mount.args(["files", "mount", "--foreground", &alone.image]).arg(folder("killed").join("zone"));
    let mut mount = Killed(mount.stdout(Stdio::piped()).spawn().expect("the mount starts"));
    says(&mut mount, "serving");
    drop(mount);
    assert!(mounted(&folder("killed").join("zone")));
    let living = fs::File::open(folder("living")).expect("a directory");
    rustix::fs::flock(&living, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let from = TempDir::new().expect("a directory");
    let mut import = Command::new(env!("CARGO_BIN_EXE_tombolo-files-torture"));
    import.args(["files", "import"]).args([from.path(), Path::new(&alone.image)]).env("TMPDIR", dir.path());
    let out = import.output().expect("the command starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(!mounted(&folder("killed").join("zone")));
    let left: Vec<_> =
        fs::read_dir(dir.path()).expect("a directory").map(|e| e.expect("an entry").path()).collect();
    assert_eq!(left, [folder("living")]);
}

#[test]
fn a_mkfs_that_fails_leaves_no_file_and_a_pipe_is_not_waited_for() {
    let dir = TempDir::new().expect("a directory");
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (small, pipe) = (at("small"), at("pipe"));
    assert!(!files(&["mkfs", "--size", "8K", &small]).status.success());
    assert!(!Path::new(&small).exists(), "a file without a file system is left");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .expect("a pipe");
    for args in
        [&["mkfs", "--size", "1M", &pipe][..], &["mkfs", &pipe], &["fsck", "-n", &pipe], &["df", &pipe]]
    {
        let out = files(args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && said.contains(&pipe), "{args:?}: {said}");
    }
    assert!(Path::new(&pipe).exists(), "the pipe is the user's");
}

#[test]
fn who_mounts_an_image_whose_mount_another_namespace_keeps_is_told_which_process_to_end() {
    let alone = Alone::new();
    alone.mount(&[]);
    let mut copy = Command::new("unshare");
    copy.args(["--mount", "--propagation", "private", "sh", "-c", "echo copied; exec sleep 100"]);
    let mut copy = Killed(copy.stdout(Stdio::piped()).spawn().expect("unshare starts"));
    says(&mut copy, "copied");
    unmount(&alone.at);
    for args in
        [&["mount", &alone.image, alone.at.to_str().expect("a path")][..], &["fsck", "-y", &alone.image]]
    {
        let out = files(args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(
            !out.status.success() && said.contains("mount namespace") && said.contains("fuser"),
            "{args:?}: {said}"
        );
    }
    drop(copy);
    alone.mount(&[]);
    unmount(&alone.at);
}

#[test]
fn a_limit_of_nothing_is_refused_and_not_taken_for_none() {
    let rig = Rig::new();
    for limit in ["--bytes=0", "--inodes=0"] {
        let out = files(&["grant", rig.zone_str(), "member-a", limit]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && said.contains("1 at least"), "{limit}: {said}");
    }
}

#[test]
fn more_waiters_than_threads_hold_nobody_up_and_use_no_cpu() {
    let rig = Rig::new();
    let (a, b) = both(&rig, "f");
    rustix::fs::flock(&a, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let path = rig.at("b/f");
    let waiters: Vec<_> = (0..12)
        .map(|_| {
            let file = fs::File::open(&path).expect("open");
            std::thread::spawn(move || rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared))
        })
        .collect();
    let cpu = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
        let fields: Vec<u64> = stat
            .rsplit(')')
            .next()
            .unwrap_or("")
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|n| n.parse().expect("a number"))
            .collect();
        fields.iter().sum::<u64>()
    };
    let (pid, before) = (rig.pids[1], cpu(rig.pids[1]));
    let start = std::time::Instant::now();
    while start.elapsed() < std::time::Duration::from_secs(1) {
        fs::metadata(&path).expect("the mount answers");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    // Ticks of 10 ms: a spinning thread would use all of the second.
    assert!(cpu(pid) - before < 50, "{} ticks", cpu(pid) - before);
    drop(a);
    for waiter in waiters {
        assert!(waiter.join().expect("no panic").is_ok());
    }
    drop(b);
}

#[test]
fn the_death_of_a_mount_gives_its_locks_up() {
    let mut rig = Rig::new();
    let (a, b) = both(&rig, "f");
    rustix::fs::flock(&b, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    assert_eq!(fcntl_lock(&b, libc::F_SETLK, libc::F_WRLCK, 0, 0), 0);
    let waiter = std::thread::spawn(move || {
        rustix::fs::flock(&a, rustix::fs::FlockOperation::LockExclusive).expect("the lock");
        fcntl_lock(&a, libc::F_SETLKW, libc::F_WRLCK, 0, 0)
    });
    let pid = rig.pids.pop().expect("two mounts");
    // SAFETY: a process started by this test.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    wait_until(|| rig.reap() == 1);
    assert_eq!(waiter.join().expect("no panic"), 0);
    drop(b);
    unmount(&rig.at("b"));
}

/// The first mount owns the zone, in the second turn it is the one that dies.
#[test]
fn nobody_joins_a_zone_that_was_removed_since_it_was_opened() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("z");
    let made = || {
        let config = ZoneConfig::new("z", 16 << 20).backing(Backing::File(path.clone()));
        drop(Zone::create(&config).expect("a zone"));
    };
    made();
    let target = Target::open(&path, true, None).expect("a zone");
    fs::remove_file(&path).expect("its file is removed");
    made();
    let refused = target.join(Name::Process("test")).err().expect("it is in no zone that has a name");
    assert!(format!("{refused:#}").contains("another file has taken its place"), "{refused:#}");
}

#[test]
fn mounts_of_a_zone_that_nobody_serves_outlive_each_other() {
    for dies in [1, 0] {
        let mut rig = Rig::mounted_by(false, false);
        let (first, second) = both(&rig, "f");
        let (held, wanted) = if dies == 1 { (second, first) } else { (first, second) };
        rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
        let pid = rig.pids.remove(dies);
        // SAFETY: a process started by this test.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        rustix::fs::flock(&wanted, rustix::fs::FlockOperation::LockExclusive).expect("the lock");
        drop((held, wanted));
        unmount(&rig.at(["a", "b"][dies]));
    }
}

#[test]
fn mounts_outlive_each_other_also_after_the_death_of_who_served_their_doorbells() {
    let mut rig = Rig::served();
    let (held, wanted) = both(&rig, "f");
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    rig.server.take().expect("a server").end();
    let pid = rig.pids.remove(0);
    // SAFETY: a process started by this test.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    rustix::fs::flock(&wanted, rustix::fs::FlockOperation::LockExclusive).expect("the lock");
    drop((held, wanted));
    unmount(&rig.at("a"));
}

#[test]
fn a_dead_mounts_locks_become_free_though_the_owner_of_the_zone_is_suspended() {
    // This process is the owner, and declares nobody dead.
    locks_become_free(Rig::new());
}

#[test]
fn a_dead_mounts_locks_become_free_though_the_server_of_the_zone_is_suspended() {
    let rig = Rig::served();
    let server = rig.server.as_ref().expect("a server").0.id();
    // SAFETY: a process started by this test.
    unsafe { libc::kill(i32::try_from(server).expect("a number"), libc::SIGSTOP) };
    locks_become_free(rig);
}

/// The lock of a mount that is killed.
fn locks_become_free(mut rig: Rig) {
    let (wanted, held) = both(&rig, "f");
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let pid = rig.pids.pop().expect("two mounts");
    // SAFETY: a process started by this test.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    let try_lock = || rustix::fs::flock(&wanted, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    wait_until(|| try_lock().is_ok());
    try_lock().expect("the lock");
    drop((held, wanted));
    unmount(&rig.at("b"));
}

#[test]
fn a_killed_mount_takes_nothing_along_and_its_files_stay() {
    let mut rig = Rig::new();
    fs::write(rig.at("b/kept"), "written before the death").expect("write");
    let open = fs::File::create(rig.at("b/open")).expect("create");
    fs::remove_file(rig.at("b/open")).expect("unlink");
    let pid = rig.pids.pop().expect("two mounts");
    // SAFETY: a process started by this test.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    drop(open);
    wait_until(|| rig.reap() == 1);
    assert_eq!(fs::read_to_string(rig.at("a/kept")).expect("read"), "written before the death");
    for i in 0..100 {
        fs::write(rig.at(&format!("a/after-{i}")), vec![1; 10_000]).expect("write");
    }
    unmount(&rig.at("b"));
}

#[test]
fn a_read_only_mount_refuses_writes_and_mkfs_refuses_to_overwrite() {
    let dir = TempDir::new().expect("a directory");
    let (image, at) = (dir.path().join("image"), dir.path().join("at"));
    let (image, target) = (image.to_str().expect("a path"), at.to_str().expect("a path"));
    fs::create_dir(&at).expect("a directory");
    must(&["mkfs", "--size", "16M", image]);
    let again = files(&["mkfs", image]);
    assert!(!again.status.success());
    assert!(String::from_utf8_lossy(&again.stderr).contains("--force"));
    must(&["mount", "--read-only", image, target]);
    let refused = fs::write(at.join("f"), "x").expect_err("a read-only mount");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    unmount(&at);
    must(&["mkfs", "--force", image]);
    let out = files(&["fsck", "-n", image]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stdout));
}

#[test]
fn what_a_member_left_unfinished_when_it_died_is_no_damage() {
    let dir = TempDir::new().expect("a directory");
    let image = dir.path().join("image");
    must(&["mkfs", "--size", "16M", image.to_str().expect("a path")]);
    finds_no_damage(&image, 0);
    // A zone, also in memory.
    for dir in [dir, TempDir::new_in("/dev/shm").expect("a directory")] {
        let zone = dir.path().join("zone");
        let config = ZoneConfig::new("unfinished", 32 << 20).backing(Backing::File(zone.clone()));
        let owner = Zone::create(&config).expect("a zone");
        let at = owner.area(tombolo_zone::AreaType::Files, None).expect("an area").offset;
        drop(owner);
        must(&["mkfs", zone.to_str().expect("a path")]);
        finds_no_damage(&zone, at);
    }
}

/// Of an operation that a member began and did not end; `files_at`: where the file system lies.
fn finds_no_damage(path: &Path, files_at: u64) {
    let file = fs::File::options().read(true).write(true).open(path).expect("open");
    let path = path.to_str().expect("a path");
    let state = files_at
        + u64::from(tombolo_files::sys::TFS_BLOCK)
        + 3 * size_of::<tombolo_files::sys::tfs_member_area>() as u64;
    let begun = u64::from(tombolo_files::sys::TFS_TX_OPEN) | 1 << 32;
    file.write_all_at(&begun.to_ne_bytes(), state).expect("write");
    for (how, says) in
        [("-n", "died: 1, completed or undone by the next mount"), ("-y", "died: 1, completed or undone\n")]
    {
        let out = files(&["fsck", how, path]);
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && said.contains(says) && said.contains(": clean: "), "{how}: {said}");
        let mut there = [0; 8];
        file.read_exact_at(&mut there, state).expect("read");
        assert_eq!(u64::from_ne_bytes(there) == begun, how == "-n");
    }
    let said = String::from_utf8_lossy(&files(&["fsck", "-n", path]).stdout).into_owned();
    assert!(!said.contains("unfinished"), "{said}");
}

#[test]
fn sigterm_unmounts_and_leaves_a_clean_zone() {
    let rig = Rig::new();
    fs::write(rig.at("a/f"), "x").expect("write");
    let (zone, _dir) = (rig.zone.clone(), rig.at("a"));
    let owner = rig.owner.as_ref().expect("an owner");
    for pid in &rig.pids {
        // SAFETY: a process started by this test.
        unsafe { libc::kill(*pid, libc::SIGTERM) };
    }
    wait_until(|| owner.members().expect("a zone").iter().all(|m| !m.alive));
    assert!(!mounted(&rig.at("a")) && !mounted(&rig.at("b")));
    let out = files(&["fsck", "-n", zone.to_str().expect("a path")]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stdout));
}

#[test]
fn watch_shows_what_a_mount_does_as_it_happens() {
    let rig = Rig::new();
    fs::create_dir(rig.at("a/dir")).expect("mkdir");
    let mut watch = Command::new(env!("CARGO_BIN_EXE_tombolo-files-torture"))
        .args(["files", "watch", rig.zone_str(), "/dir"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut lines =
        BufReader::new(watch.stdout.take().expect("its output")).lines().map(|l| l.expect("a line"));
    assert!(lines.next().expect("a header, once it listens").starts_with("member"));
    fs::write(rig.at("a/outside"), "not at or below /dir").expect("write");
    fs::write(rig.at("a/dir/f"), "contents").expect("write");
    fs::rename(rig.at("a/dir/f"), rig.at("a/dir/g")).expect("rename");
    fs::set_permissions(rig.at("b/dir/g"), fs::Permissions::from_mode(0o600)).expect("chmod");
    fs::create_dir(rig.at("a/dir/sub")).expect("mkdir");
    fs::create_dir(rig.at("a/dir/over")).expect("mkdir");
    fs::rename(rig.at("a/dir/sub"), rig.at("a/dir/over")).expect("rename");
    fs::remove_dir(rig.at("a/dir/over")).expect("rmdir");
    fs::remove_file(rig.at("a/dir/g")).expect("remove");
    let mut seen = Vec::new();
    while !seen.last().is_some_and(|l: &String| l.contains("delete") && l.contains("/dir/g")) {
        seen.push(lines.next().expect("more"));
    }
    let seen: Vec<Vec<&str>> = seen.iter().map(|l| l.split_whitespace().collect()).collect();
    let mut expected = vec![
        ["member-a", "create", "file", "/dir/f"],
        ["member-a", "modify", "file", "/dir/f"],
        ["member-a", "close-write", "file", "/dir/f"],
        ["member-a", "moved-from", "file", "/dir/f"],
        ["member-a", "moved-to", "file", "/dir/g"],
        ["member-b", "attrib", "file", "/dir/g"],
        ["member-a", "create", "dir", "/dir/sub"],
        ["member-a", "moved-from", "dir", "/dir/sub"],
        ["member-a", "moved-to", "dir", "/dir/over"],
        ["member-a", "delete", "dir", "/dir/over"],
        ["member-a", "delete", "file", "/dir/g"],
    ];
    for line in &seen {
        // The order of different members' changes is not kept, and the kernel reports a close in its own time.
        if let Some(at) = expected.iter().position(|e| line == e) {
            expected.remove(at);
        }
    }
    assert!(expected.is_empty(), "missing: {expected:?}; seen: {seen:?}");
    // SAFETY: a plain call on a child of this process.
    unsafe { libc::kill(watch.id() as i32, libc::SIGTERM) };
    assert!(watch.wait().expect("its end").success());
}

/// A file system in a file of its own, and where to mount it.
struct Alone {
    _dir: TempDir,
    image: String,
    at: PathBuf,
}

impl Alone {
    fn new() -> Alone {
        let dir = TempDir::new().expect("a directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
        let (image, at) = (dir.path().join("image").display().to_string(), dir.path().join("at"));
        fs::create_dir(&at).expect("a directory");
        must(&["mkfs", "--size", "64M", "--mode", "1777", &image]);
        Alone { _dir: dir, image, at }
    }

    fn mount(&self, options: &[&str]) {
        let at = self.at.to_str().expect("a path");
        must(&[&["mount"], options, &["--", &self.image, at]].concat());
    }

    /// Returns the options in the mount table.
    fn options(&self) -> String {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("the mount table");
        let line = table.lines().find(|l| l.split(' ').nth(4) == self.at.to_str()).expect("a mount");
        line.split(' ').nth(5).expect("options").to_owned()
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        if mounted(&self.at) {
            unmount(&self.at);
        }
    }
}

#[test]
fn set_id_bits_and_devices_that_a_vm_made_count_for_nothing_unless_asked_for() {
    let alone = Alone::new();
    alone.mount(&[]);
    let (program, device) = (alone.at.join("id"), alone.at.join("null"));
    // Written by another process: a child that another test's thread forks meanwhile would keep this one's descriptor, and with it the program
    // from being run (ETXTBSY).
    assert!(Command::new("cp").arg("/usr/bin/id").arg(&program).status().expect("cp starts").success());
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).expect("chmod");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &device,
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::Mode::from_raw_mode(0o666),
        rustix::fs::makedev(1, 3),
    )
    .expect("mknod");
    let user = || {
        let mut id = Command::new(&program);
        let out = std::os::unix::process::CommandExt::uid(id.arg("-u"), 65534).output().expect("id starts");
        String::from_utf8_lossy(&out.stdout).trim().to_owned()
    };
    assert_eq!(user(), "65534");
    assert_eq!(fs::File::open(&device).expect_err("a device").raw_os_error(), Some(libc::EACCES));
    unmount(&alone.at);
    alone.mount(&["--suid", "--dev"]);
    assert_eq!(user(), "0");
    fs::File::open(&device).expect("a device that is asked for");
}

#[test]
fn options_of_a_mount_hold_and_others_are_named() {
    let alone = Alone::new();
    alone.mount(&["-o", "noatime,noexec", "-o", "dev"]);
    let options = alone.options();
    for option in ["nosuid", "noexec", "noatime"] {
        assert!(options.contains(option), "{options}");
    }
    assert!(!options.contains("nodev"), "{options}");
    let path = alone.at.join("f");
    fs::write(&path, "x").expect("write");
    let before = fs::metadata(&path).expect("stat");
    assert_eq!(fs::read(&path).expect("read"), b"x");
    let after = fs::metadata(&path).expect("stat");
    assert_eq!((before.atime(), before.atime_nsec()), (after.atime(), after.atime_nsec()));
    unmount(&alone.at);
    alone.mount(&["-o", "ro"]);
    let refused = fs::write(&path, "y").expect_err("a read-only mount");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    unmount(&alone.at);
    let out = files(&["mount", "-o", "quota", &alone.image, alone.at.to_str().expect("a path")]);
    assert!(!out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("[no]atime"));
}

/// What docs/files.md says of SQLite.
#[test]
fn sqlite_works_on_a_mount_but_for_its_log_from_which_there_is_a_way_back() {
    let alone = Alone::new();
    alone.mount(&[]);
    let script = "
import sqlite3, sys
def at_once(*commands):
    c = sqlite3.connect(sys.argv[1])
    try:
        return [c.execute(command).fetchall() for command in commands]
    except sqlite3.OperationalError as e:
        return str(e)
    finally:
        c.commit()
        c.close()
print(at_once('create table t(x)', 'insert into t values (7)', 'select * from t'))
print(at_once('pragma journal_mode=wal'))
print(at_once('select * from t'))
print(at_once('pragma locking_mode=exclusive', 'pragma journal_mode=delete'))
print(at_once('select * from t'))
";
    let database = alone.at.join("database");
    let out = Command::new("python3").args(["-c", script]).arg(database).output().expect("python3 starts");
    let printed = String::from_utf8_lossy(&out.stdout).into_owned();
    let wanted = [
        "[[], [], [(7,)]]",
        "[[('wal',)]]",
        "disk I/O error",
        "[[('exclusive',)], [('delete',)]]",
        "[[(7,)]]",
    ];
    assert_eq!(printed.lines().collect::<Vec<_>>(), wanted, "{}", String::from_utf8_lossy(&out.stderr));
}

fn access_time(path: &Path) -> (i64, i64) {
    let meta = fs::symlink_metadata(path).expect("stat");
    (meta.atime(), meta.atime_nsec())
}

#[test]
fn reads_store_access_times_as_the_mount_table_says() {
    let alone = Alone::new();
    let all = ["file", "dir", "link"];
    let read = |name: &str| {
        let path = alone.at.join(name);
        let before = access_time(&path);
        match name {
            "file" => drop(fs::read(&path).expect("read")),
            "dir" => drop(fs::read_dir(&path).expect("list").count()),
            _ => drop(fs::read_link(&path).expect("readlink")),
        }
        access_time(&path) != before
    };
    alone.mount(&[]);
    fs::write(alone.at.join("file"), "x").expect("write");
    fs::create_dir(alone.at.join("dir")).expect("mkdir");
    std::os::unix::fs::symlink("file", alone.at.join("link")).expect("symlink");
    assert!(alone.options().contains("relatime"), "{}", alone.options());
    assert_eq!(all.map(read), [true; 3], "the first read since a change");
    assert_eq!(all.map(read), [false; 3], "the second");
    for (option, stored) in [("strictatime", [true; 3]), ("strictatime,nodiratime", [true, false, true])] {
        unmount(&alone.at);
        alone.mount(&["-o", option]);
        let shown = alone.options();
        assert!(!shown.contains("relatime") && shown.contains("nodiratime") == option.contains("nodiratime"));
        assert_eq!(all.map(read), stored, "{option}");
    }
}

#[test]
fn a_time_that_a_zone_cannot_store_becomes_the_last_one_as_in_guests() {
    let rig = Rig::new();
    fs::write(rig.at("a/f"), "x").expect("write");
    for (asked, stored) in
        [(1 << 34, 9_223_372_035), (9_223_372_035, 9_223_372_035), (9_223_372_034, 9_223_372_034)]
    {
        let time = rustix::fs::Timespec { tv_sec: asked, tv_nsec: 5 };
        let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(rustix::fs::CWD, rig.at("a/f"), &times, rustix::fs::AtFlags::empty())
            .expect("touch");
        let meta = fs::metadata(rig.at("b/f")).expect("stat");
        let nanoseconds = if asked == stored && asked < 9_223_372_035 { 5 } else { 0 };
        assert_eq!((meta.mtime(), meta.mtime_nsec()), (stored, nanoseconds), "{asked}");
    }
}

/// Linux leaves it to members of the group alone, since 6.2.
#[test]
fn who_is_not_in_a_files_group_takes_its_set_group_id_bit_by_a_change_also_without_group_execution() {
    let rig = Rig::new();
    let path = rig.at("a/f");
    let fallocate =
        |file: &fs::File| rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, 8192).is_ok();
    let write = |file: &fs::File| file.write_at(b"y", 0).is_ok();
    let truncate = |file: &fs::File| file.set_len(1).is_ok();
    for change in [&fallocate as &dyn Fn(&fs::File) -> bool, &write, &truncate] {
        for (group, left) in [(1000, 0o666), (50, 0o2666)] {
            fs::write(&path, "x").expect("write");
            std::os::unix::fs::chown(&path, Some(0), Some(50)).expect("chown");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o2666)).expect("chmod");
            let code = in_child(|| {
                // SAFETY: plain calls of a child with one thread.
                let dropped = unsafe {
                    libc::setgroups(0, std::ptr::null()) == 0
                        && libc::setgid(group) == 0
                        && libc::setuid(1000) == 0
                };
                let file = fs::OpenOptions::new().write(true).open(&path);
                i32::from(!(dropped && file.is_ok_and(|file| change(&file))))
            });
            let mode = fs::metadata(rig.at("b/f")).expect("stat").mode() & 0o7777;
            assert_eq!(
                (code, format!("{mode:o}")),
                (0, format!("{left:o}")),
                "by a process of group {group}"
            );
        }
    }
}

#[test]
fn a_mount_that_ends_leaves_what_has_been_mounted_at_its_place_since() {
    let (first, second) = (Alone::new(), Alone::new());
    let at = first.at.to_str().expect("a path");
    let json: serde_json::Value =
        serde_json::from_str(&must(&["mount", "--json", &first.image, at])).expect("JSON");
    let pid = json["pid"].as_i64().expect("a pid") as i32;
    // SAFETY: plain calls on the process started above.
    let signal = |signal| assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    signal(libc::SIGSTOP);
    // Not umount(8), which would ask the suspended process for the directory's attributes.
    let path = CString::new(at).expect("a path");
    // SAFETY: a terminated string.
    assert_eq!(unsafe { libc::umount2(path.as_ptr(), 0) }, 0);
    must(&["mount", &second.image, at]);
    fs::write(first.at.join("f"), "of the second").expect("write");
    signal(libc::SIGCONT);
    wait_until(|| !Path::new(&format!("/proc/{pid}")).exists());
    assert_eq!(fs::read(first.at.join("f")).expect("the second mount"), b"of the second");
}

#[test]
fn a_mount_whose_directory_was_moved_leaves_no_dead_mount_when_it_ends() {
    let alone = Alone::new();
    let [before, after] = ["before", "a f\tter"].map(|name| alone.at.with_file_name(name));
    fs::create_dir_all(before.join("at")).expect("directories");
    let at = before.join("at");
    let json: serde_json::Value =
        serde_json::from_str(&must(&["mount", "--json", &alone.image, at.to_str().expect("a path")]))
            .expect("JSON");
    let pid = json["pid"].as_i64().expect("a pid") as i32;
    fs::rename(&before, &after).expect("rename");
    // SAFETY: a plain call on the process started above.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    wait_until(|| !Path::new(&format!("/proc/{pid}")).exists());
    fs::remove_dir(after.join("at")).expect("a directory that nothing is mounted at");
}

#[test]
fn a_mount_that_is_covered_as_it_ends_says_so() {
    let alone = Alone::new();
    let at = alone.at.to_str().expect("a path");
    let mut mount = Command::new(env!("CARGO_BIN_EXE_tombolo-files-torture"));
    mount.args(["files", "mount", "--foreground", &alone.image, at]);
    let mut mount = mount.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(mount.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
    let covered = Command::new("mount").args(["-t", "tmpfs", "tmpfs", at]).status().expect("mount starts");
    assert!(covered.success());
    // SAFETY: a plain call on the process started above.
    assert_eq!(unsafe { libc::kill(mount.id() as i32, libc::SIGTERM) }, 0);
    let out = mount.wait_with_output().expect("its end");
    for _ in 0..2 {
        unmount(&alone.at);
    }
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("another mount covers it"), "{said}");
}

#[test]
fn fallocate_by_an_ordinary_user_takes_set_id_bits_away() {
    let alone = Alone::new();
    alone.mount(&[]);
    let modes = [
        0,
        libc::FALLOC_FL_KEEP_SIZE,
        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        libc::FALLOC_FL_ZERO_RANGE,
        libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
    ];
    // Also in a user namespace of its own, where it has all capabilities.
    for (uid, apart, left) in [(1000, false, 0o777), (1000, true, 0o777), (0, false, 0o6777)] {
        for mode in modes {
            let path = alone.at.join("f");
            fs::write(&path, [1; 10_000]).expect("write");
            std::os::unix::fs::chown(&path, Some(0), Some(0)).expect("chown");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).expect("chmod");
            let file = fs::OpenOptions::new().write(true).open(&path).expect("open");
            let code = in_child(|| {
                // SAFETY: plain calls of a child with one thread.
                let ret = unsafe {
                    let given_up = libc::setgid(uid) == 0 && libc::setuid(uid) == 0;
                    if !given_up || (apart && libc::unshare(libc::CLONE_NEWUSER) != 0) {
                        return 2;
                    }
                    libc::fallocate(file.as_raw_fd(), mode, 4096, 8192)
                };
                i32::from(ret != 0)
            });
            assert_eq!(code, 0, "mode {mode:#x}");
            let now = fs::metadata(&path).expect("stat").mode() & 0o7777;
            assert_eq!(now, left, "user {uid}, in a namespace of its own: {apart}, mode {mode:#x}: {now:o}");
            fs::remove_file(&path).expect("unlink");
        }
    }
}

/// By the calls of chattr(1) and lsattr(1). Before the kernel sets flags it asks for `struct fsxattr`.
#[test]
fn chattr_makes_files_and_folders_of_a_mount_immutable_and_append_only() {
    const GETFLAGS: libc::c_ulong = 0x8008_6601;
    const SETFLAGS: libc::c_ulong = 0x4008_6602;
    const FSGETXATTR: libc::c_ulong = 0x801c_581f;
    const FSSETXATTR: libc::c_ulong = 0x401c_5820;
    let alone = Alone::new();
    alone.mount(&[]);
    let (file, folder) = (alone.at.join("file"), alone.at.join("folder"));
    fs::write(&file, b"old").expect("write");
    fs::create_dir(&folder).expect("mkdir");
    let call = |path: &Path, call: libc::c_ulong, value: &mut [u32; 7]| {
        let file = fs::File::open(path).expect("open");
        // SAFETY: an open file, and a buffer as long as the largest of these calls needs.
        match unsafe { libc::ioctl(file.as_raw_fd(), call, value.as_mut_ptr()) } {
            0 => Ok(value[0]),
            _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    };
    let set = |path: &Path, flags: u32| call(path, SETFLAGS, &mut [flags, 0, 0, 0, 0, 0, 0]).map(drop);
    // As FS_IOC_GETFLAGS and as FS_IOC_FSGETXATTR name the flags.
    let get = |path: &Path| [GETFLAGS, FSGETXATTR].map(|which| call(path, which, &mut [0; 7]));
    for path in [&file, &folder] {
        assert_eq!(set(path, 0x10), Ok(()));
        assert_eq!(get(path), [Ok(0x10), Ok(0x8)]);
        let refused = match path == &file {
            true => fs::write(path, b"new").map(drop),
            false => fs::write(path.join("in"), b"new").map(drop),
        };
        assert_eq!(refused.expect_err("immutable").raw_os_error(), Some(libc::EPERM));
        assert_eq!(set(path, 0x20), Ok(()));
        assert_eq!(get(path), [Ok(0x20), Ok(0x10)]);
        assert_eq!(set(path, 0x40), Err(libc::EOPNOTSUPP), "no flag of this file system");
        assert_eq!(call(path, FSSETXATTR, &mut [0x8, 0, 0, 0, 0, 0, 0]), Ok(0x8));
        assert_eq!(get(path), [Ok(0x10), Ok(0x8)]);
        assert_eq!(call(path, FSSETXATTR, &mut [0x8, 0, 0, 9, 0, 0, 0]), Err(libc::EOPNOTSUPP), "a project");
        assert_eq!(set(path, 0), Ok(()));
    }
    fs::write(&file, b"new").expect("write");
}

/// As local file systems refuse them, and the kernel of a guest.
#[test]
fn sendfile_sends_what_another_mount_had_written_at_the_last_stat() {
    let rig = Rig::new();
    let (mine, other) = both(&rig, "file");
    let sent = || {
        let mut to = tempfile::tempfile().expect("a file");
        let mut offset = 0;
        // SAFETY: open files and a place for the offset.
        let len = unsafe { libc::sendfile(to.as_raw_fd(), mine.as_raw_fd(), &mut offset, 100) };
        assert!(len >= 0, "{}", std::io::Error::last_os_error());
        let mut data = Vec::new();
        to.rewind().and_then(|()| to.read_to_end(&mut data)).expect("the copy");
        data
    };
    // The same size, a larger and a smaller one.
    for data in [&b"the first"[..], b"the other", b"one that is longer", b"shorter"] {
        other.set_len(data.len() as u64).and_then(|()| other.write_all_at(data, 0)).expect("the file");
        assert_eq!(mine.metadata().expect("attributes").len(), data.len() as u64);
        assert_eq!(sent(), data);
    }
}

/// Writes `data` by one request of the kernel's asynchronous I/O, as `io_submit(2)` does it.
fn write_asynchronously(file: &fs::File, data: &[u8], offset: u64) -> i64 {
    let mut context: libc::c_ulong = 0;
    // struct iocb: key and flags 0, a pwrite by priority 0 to the descriptor, the buffer, its length, the offset.
    const PWRITE: u64 = 1;
    let (fd, buffer) = (file.as_raw_fd() as u64, data.as_ptr() as u64);
    let mut request = [0u64, 0, PWRITE | fd << 32, buffer, data.len() as u64, offset, 0, 0];
    let requests = [request.as_mut_ptr()];
    let mut event = [0i64; 4];
    // SAFETY: the arguments are as the calls want them; the buffers outlive the request, whose end is waited for.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_io_setup, 1, &mut context), 0);
        assert_eq!(libc::syscall(libc::SYS_io_submit, context, 1, requests.as_ptr()), 1);
        let none = std::ptr::null_mut::<libc::timespec>();
        assert_eq!(libc::syscall(libc::SYS_io_getevents, context, 1, 1, event.as_mut_ptr(), none), 1);
        assert_eq!(libc::syscall(libc::SYS_io_destroy, context), 0);
    }
    event[2]
}

#[test]
fn one_large_asynchronous_append_is_in_the_file_in_its_order() {
    let rig = Rig::new();
    let data: Vec<u8> = (0..2u32 << 20).flat_map(u32::to_ne_bytes).collect();
    // The kernel begins pages of a direct write at pages of the buffer.
    let start = data.as_ptr().align_offset(4096);
    let data = &data[start..start + (7 << 20)];
    for (name, flags) in [("buffered", 0), ("direct", libc::O_DIRECT)] {
        for round in 0..8 {
            let name = format!("a/{name}-{round}");
            let mut open = fs::File::options();
            let file = open.append(true).create_new(true).custom_flags(flags).open(rig.at(&name));
            let file = file.expect("a new file");
            assert_eq!(write_asynchronously(&file, data, 0), data.len() as i64);
            let found = fs::read(rig.at(&name)).expect("the file");
            fs::remove_file(rig.at(&name)).expect("the file");
            assert!(found == data, "{name}: {} bytes in another order", found.len());
        }
    }
}

/// Then the kernel truncates the file to the size that it knows.
#[test]
fn an_asynchronous_write_that_fails_cuts_nothing_that_another_mount_has_appended() {
    let rig = Rig::new();
    let mut open = fs::File::options();
    let mine = open.read(true).write(true).create(true).custom_flags(libc::O_DIRECT).open(rig.at("a/file"));
    let mine = mine.expect("a new file");
    let pages = vec![b'a'; 8192];
    let page = &pages[pages.as_ptr().align_offset(4096)..][..4096];
    mine.write_all_at(page, 0).expect("a page");
    let mut other = fs::File::options().append(true).open(rig.at("b/file")).expect("the file");
    other.write_all(&[b'b'; 5000]).expect("an append");
    // No file of the zone reaches so far.
    assert_eq!(write_asynchronously(&mine, page, 1 << 47), -i64::from(libc::EFBIG));
    let found = fs::read(rig.at("b/file")).expect("the file");
    assert!(found == [page, &[b'b'; 5000]].concat(), "{} bytes are left", found.len());
    // A truncation by the program itself removes the data.
    mine.set_len(4096 + 2000).expect("a truncation");
    other.write_all(b"more").expect("an append");
    assert_eq!(mine.metadata().expect("attributes").len(), 4096 + 2000 + 4);
    mine.set_len(1000).expect("a truncation");
    assert_eq!(fs::read(rig.at("b/file")).expect("the file"), page[..1000]);
}

/// A process opens, locks and closes a file again and again: the kernel tells of its closes late.
#[test]
fn who_was_told_that_it_has_a_lock_of_a_mount_has_it_though_it_closed_the_file_a_moment_ago() {
    let rig = Rig::new();
    let (_, other) = both(&rig, "file");
    let open = || fs::File::options().read(true).write(true).open(rig.at("a/file")).expect("the file");
    // SAFETY: flock is plain data for which zero is valid: the whole file.
    let mut whole: libc::flock = unsafe { std::mem::zeroed() };
    whole.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: open files and valid structures.
    let lock = |file: &fs::File, kind: usize| unsafe {
        match kind {
            0 => libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &whole),
            1 => libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &whole),
            _ => libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB),
        }
    };
    for kind in 0..3 {
        for round in 0..1500 {
            let first = open();
            let taken = lock(&first, kind);
            drop(first);
            assert_eq!(taken, 0, "{kind}, {round}: {}", std::io::Error::last_os_error());
            let second = open();
            assert_eq!(lock(&second, kind), 0, "{kind}, {round}: {}", std::io::Error::last_os_error());
            std::thread::yield_now();
            assert_eq!(lock(&other, kind), -1, "{kind}, {round}: two have the lock");
        }
    }
}

#[test]
fn names_of_attributes_that_no_other_member_could_use_are_refused() {
    let alone = Alone::new();
    alone.mount(&[]);
    let path = alone.at.join("f");
    fs::write(&path, b"x").expect("write");
    let c_path = CString::new(path.as_os_str().as_bytes()).expect("a path");
    let code = |ret: isize| match ret {
        -1 => std::io::Error::last_os_error().raw_os_error(),
        _ => None,
    };
    let mut value = [0u8; 8];
    let mut tried = |name: &std::ffi::CStr| {
        let (path, name) = (c_path.as_ptr(), name.as_ptr());
        // SAFETY: terminated strings, and a buffer with its length.
        unsafe {
            [
                code(libc::setxattr(path, name, value.as_ptr().cast(), 8, 0) as isize),
                code(libc::getxattr(path, name, value.as_mut_ptr().cast(), 8)),
                code(libc::removexattr(path, name) as isize),
            ]
        }
    };
    assert_eq!(tried(c"user.a"), [None; 3]);
    assert_eq!(tried(c"user."), [Some(libc::EINVAL); 3]);
    for name in [c"user", c"bogus.a", c"system.a"] {
        assert_eq!(tried(name), [Some(libc::EOPNOTSUPP); 3], "{name:?}");
    }
    // SAFETY: terminated strings.
    let removed = unsafe { libc::removexattr(c_path.as_ptr(), c"system.posix_acl_access".as_ptr()) };
    assert_eq!(code(removed as isize), None, "an ACL that is not there");
}

#[test]
fn a_file_system_can_be_mounted_again_as_soon_as_it_is_unmounted() {
    let alone = Alone::new();
    for round in 0..10 {
        alone.mount(&[]);
        if round == 0 {
            let busy = files(&["mount", &alone.image, alone.at.to_str().expect("a path")]);
            assert!(String::from_utf8_lossy(&busy.stderr).contains("is mounted already"));
        }
        fs::write(alone.at.join("f"), vec![round; 20 << 20]).expect("write");
        unmount(&alone.at);
    }
    let out = files(&["fsck", "-n", &alone.image]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stdout));
}

#[test]
fn a_snapshot_of_a_zone_into_a_mount_of_it_is_refused_and_holds_nobody_up() {
    let dir = TempDir::new().expect("a directory");
    let (zone, at) = (dir.path().join("zone"), dir.path().join("mnt"));
    let owner =
        Zone::create(&ZoneConfig::new("own", 32 << 20).backing(Backing::File(zone.clone()))).expect("a zone");
    drop(owner);
    let zone = zone.to_str().expect("a path");
    must(&["mkfs", zone]);
    fs::create_dir(&at).expect("mkdir");
    must(&["mount", zone, at.to_str().expect("a path")]);
    let image = at.join("image");
    let out = files(&["snapshot", zone, image.to_str().expect("a path")]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    let left = image.exists();
    unmount(&at);
    assert!(!out.status.success() && said.contains("lies in the zone itself"), "{said}");
    assert!(!left, "an image that was not taken is removed");
}

/// As a project holds its VMs: active from before they mount until after they unmount.
#[test]
fn an_image_comes_back_into_a_zone_whose_vms_live_but_have_unmounted_it() {
    let dir = TempDir::new().expect("a directory");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (zone, image) = (path("zone"), path("image"));
    let config = ZoneConfig::new("rig", 32 << 20).backing(Backing::File(zone.clone().into()));
    let owner = Zone::create(&config).expect("a zone");
    must(&["mkfs", &zone]);
    must(&["snapshot", &zone, &image]);
    let vm = owner.invite("one", Role::Vm, Rights::READ_WRITE).expect("a slot");
    let reader = owner.invite("reader", Role::Vm, Rights::READ_ONLY).expect("a slot");
    let _alive = (owner.hold(vm).expect("alive"), owner.hold(reader).expect("alive"));

    let restore = |force: bool| {
        let force: &[&str] = if force { &["--force"] } else { &[] };
        files(&[&["restore"], force, &[&image, &zone]].concat())
    };
    let refused = |out: Output, why: &str| {
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && said.contains(why), "{said}");
    };
    owner.activate(vm).expect("what its kernel does when it mounts");
    refused(restore(true), "in use by one");
    owner.declare_dead(vm).expect("its end");
    let vm = owner.invite("two", Role::Vm, Rights::READ_WRITE).expect("a slot");
    let _two = owner.hold(vm).expect("alive");
    assert!(restore(true).status.success());
    owner.activate(reader).expect("what the host does for a VM that may only read");
    refused(restore(false), "in use by reader");
    assert!(restore(true).status.success());
    must(&["grant", &zone, "two", "--bytes", "1M"]);
    refused(restore(true), "granted to two");
    refused(files(&["fsck", "-y", &zone]), "could mount it");
}

#[test]
fn opening_a_name_that_another_mount_makes_at_that_moment_never_says_that_it_exists() {
    let rig = Rig::new();
    let start = std::sync::Barrier::new(2);
    let open_all = |dir: &str| -> Vec<_> {
        let open = |i| {
            start.wait();
            let path = rig.at(&format!("{dir}/n{i}"));
            fs::OpenOptions::new().create(true).truncate(false).write(true).open(path).err()
        };
        (0..1000).filter_map(open).collect()
    };
    let (a, b) = std::thread::scope(|scope| {
        let b = scope.spawn(|| open_all("b"));
        (open_all("a"), b.join().expect("no panic"))
    });
    assert!(a.is_empty() && b.is_empty(), "{a:?} {b:?}");
}

#[test]
fn a_file_that_is_replaced_all_the_time_is_there_for_who_opens_it_on_each_mount() {
    const COUNT: usize = 2000;
    let rig = Rig::new();
    fs::write(rig.at("a/name"), "0").expect("write");
    let done = AtomicUsize::new(0);
    let replace = |i: u32| {
        let mut replaced = 0;
        while done.load(Ordering::Acquire) < 2 {
            fs::write(rig.at(&format!("a/new{i}")), "1").expect("write");
            fs::rename(rig.at(&format!("a/new{i}")), rig.at("a/name")).expect("rename");
            replaced += 1;
        }
        assert!(replaced > COUNT / 10, "{replaced}");
    };
    let open_all = |path: &str| -> Vec<_> {
        let path = rig.at(path);
        let open = |_| [fs::File::open(&path).err(), fs::metadata(&path).err()];
        let errors = (0..COUNT).flat_map(open).flatten().collect();
        done.fetch_add(1, Ordering::Release);
        errors
    };
    let (here, there) = std::thread::scope(|scope| {
        (0..2).for_each(|i| _ = scope.spawn(move || replace(i)));
        let there = scope.spawn(|| open_all("b/name"));
        (open_all("a/name"), there.join().expect("no panic"))
    });
    assert!(here.is_empty() && there.is_empty(), "{here:?} {there:?}");
    // The mounts let the files go that they kept for openers.
    wait_until(|| rustix::fs::statvfs(rig.at("a")).is_ok_and(|at| at.f_files - at.f_ffree == 2));
}

/// For a moment after an ESTALE, files are kept that were looked up.
#[test]
fn the_room_of_a_removed_file_is_free_at_once_also_after_an_estale() {
    let rig = Rig::new();
    let room = rustix::fs::statvfs(rig.at("a")).expect("statvfs");
    let much = vec![1; (room.f_bavail * room.f_frsize / 10 * 7) as usize];
    fs::write(rig.at("a/much"), &much).expect("there is room");
    fs::write(rig.at("a/gone"), "").expect("write");
    let gone =
        fs::File::options().read(true).custom_flags(libc::O_PATH).open(rig.at("a/gone")).expect("open");
    fs::remove_file(rig.at("b/gone")).expect("remove");
    let stale = fs::File::open(format!("/proc/self/fd/{}", gone.as_raw_fd())).expect_err("it is removed");
    assert_eq!(stale.raw_os_error(), Some(libc::ESTALE));
    fs::remove_file(rig.at("a/much")).expect("remove");
    fs::write(rig.at("a/as much"), &much).expect("there is room");
}

#[test]
fn a_folder_that_another_member_removes_while_it_is_made_was_made() {
    const COUNT: usize = 300;
    let rig = Rig::new();
    let target = Target::open(&rig.zone, true, None).expect("the zone");
    let (area, joined) = target.join(Name::Member("remover")).expect("a membership");
    let core = Filesystem::open(area).expect("its files");
    let (made, removed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let errors = std::thread::scope(|scope| {
        scope.spawn(|| {
            while made.load(Ordering::Acquire) < COUNT {
                if core.rmdir(ROOT, b"x", None).is_ok() {
                    removed.fetch_add(1, Ordering::Release);
                }
            }
        });
        let mut errors = Vec::new();
        while made.load(Ordering::Acquire) < COUNT {
            errors
                .extend(fs::create_dir(rig.at("a/x")).err().filter(|e| e.kind() != ErrorKind::AlreadyExists));
            made.store(removed.load(Ordering::Acquire) + errors.len(), Ordering::Release);
        }
        errors
    });
    drop(core);
    joined.expect("a member of a zone").leave().expect("it leaves");
    assert!(errors.is_empty(), "{errors:?}");
}

#[test]
fn names_that_members_made_go_to_no_terminal_as_they_are() {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("zone");
    let config = ZoneConfig::new("names", 64 << 20).backing(Backing::File(path.clone()));
    let owner = Zone::create(&config).expect("a zone");
    owner.invite("vm", Role::Vm, Rights::READ_WRITE).expect("a slot");
    let path = path.to_str().expect("a path");
    must(&["mkfs", path]);
    let name = "\u{1b}]0;x\u{7}\n";
    must(&["grant", path, "vm", "--account", name]);
    let shown = must(&["accounts", path]);
    assert!(shown.contains(r"\u{1b}]0;x\u{7}\n") && !shown.contains(['\u{1b}', '\u{7}']), "{shown:?}");
    let json: serde_json::Value = serde_json::from_str(&must(&["accounts", "--json", path])).expect("JSON");
    assert_eq!(json[0]["name"], name);
    let target = Target::open(Path::new(path), true, None).expect("the zone");
    let (area, joined) = target.join(Name::Member("writer")).expect("a member");
    let core = Filesystem::open(area).expect("open");
    core.xattr_set(ROOT, b"user.\x1b[2J", Some(b"x"), 0, None).expect("an attribute");
    drop(core);
    joined.expect("a member of a zone").leave().expect("it leaves");
    let shown = must(&["stat", path]);
    assert!(shown.contains(r"user.\u{1b}[2J") && !shown.contains('\u{1b}'), "{shown:?}");
}

/// As `tombolo up` of several VMs grants.
#[test]
fn fifty_grants_at_once_give_each_member_an_account_of_its_own() {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("zone");
    let config = ZoneConfig::new("grants", 64 << 20).backing(Backing::File(path.clone()));
    let owner = Zone::create(&config).expect("a zone");
    let path = path.to_str().expect("a path");
    must(&["mkfs", path]);
    let names: Vec<String> = (0..50).map(|i| format!("vm{i}")).collect();
    for name in &names {
        owner.invite(name, Role::Vm, Rights::READ_WRITE).expect("a slot");
    }
    let grants: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(i, name)| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo-files-torture"));
            let inodes = format!("--inodes={}", i + 1);
            command.args(["files", "grant", path, name, &inodes, &format!("--subtree=/{name}")]);
            command.stderr(std::process::Stdio::piped()).spawn().expect("it starts")
        })
        .collect();
    for grant in grants {
        let out = grant.wait_with_output().expect("its end");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
    let text = must(&["accounts", "--json", path]);
    let accounts: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let mut found: Vec<(u64, String)> = accounts
        .as_array()
        .expect("a list")
        .iter()
        .map(|a| {
            (a["inodes_limit"].as_u64().expect("a number"), a["name"].as_str().expect("a name").to_owned())
        })
        .collect();
    found.sort();
    let wanted: Vec<(u64, String)> = (1..).zip(names).collect();
    assert_eq!(found, wanted);
}

/// Words of the lock of an inode, of those that mkfs makes room for.
fn lock_of(rig: &Rig, ino: u64) -> u64 {
    let area = rig
        .owner
        .as_ref()
        .expect("an owner")
        .area(tombolo_zone::AreaType::Files, None)
        .expect("a file system")
        .offset;
    let word =
        |at| rig.owner.as_ref().expect("an owner").mem().load_u64(area + at).expect("a word of the zone");
    let table = word(core::mem::offset_of!(tombolo_files::sys::tfs_super, data_start) as u64) * 4096;
    area + table + ino * 256 + core::mem::offset_of!(tombolo_files::sys::tfs_inode, lock) as u64
}

/// Stops the second mount's process as if it held these locks.
fn suspend_with(rig: &Rig, locks: &[u64]) {
    // SAFETY: a process that the rig started.
    assert_eq!(unsafe { libc::kill(rig.pids[1], libc::SIGSTOP) }, 0);
    let owner = rig.owner.as_ref().expect("an owner");
    let members = owner.members().expect("members");
    let stopped = members.iter().find(|m| m.name == "member-b").expect("it is there");
    let (id, epoch) = (u64::from(stopped.id.index()), u64::from(stopped.epoch));
    let word = epoch << 32 | u64::from(tombolo_files::sys::TFS_LOCK_HELD) | (id + 1);
    locks.iter().for_each(|lock| owner.mem().store_u64(*lock, word).expect("a word"));
}

fn resume(rig: &Rig) {
    // SAFETY: a process that the rig started.
    assert_eq!(unsafe { libc::kill(rig.pids[1], libc::SIGCONT) }, 0);
}

#[test]
fn a_program_that_waits_for_a_suspended_member_can_be_killed_and_goes_on_after_other_signals() {
    let rig = Rig::new();
    fs::write(rig.at("a/f"), "x").expect("write");
    let lock = lock_of(&rig, fs::metadata(rig.at("a/f")).expect("stat").ino());
    let mem = rig.owner.as_ref().expect("an owner").mem();
    suspend_with(&rig, &[lock]);
    let waits = || mem.load_u64(lock + 8).expect("a word") != 0;
    let start = || {
        let mut dd = Command::new("dd");
        let dd = dd.args(["if=/dev/zero", "bs=1", "count=1", "conv=notrunc", "status=none"]);
        let dd = dd.arg(format!("of={}", rig.at("a/f").display())).spawn().expect("dd starts");
        wait_until(waits);
        dd
    };
    for signal in [libc::SIGKILL, libc::SIGTERM] {
        let mut dd = start();
        // SAFETY: a child of this test.
        assert_eq!(unsafe { libc::kill(dd.id() as i32, signal) }, 0);
        wait_until(|| dd.try_wait().expect("a child").is_some());
        wait_until(|| !waits());
    }
    let mut dd = start();
    // SAFETY: a child of this test. dd goes on after it, and says how far it is.
    assert_eq!(unsafe { libc::kill(dd.id() as i32, libc::SIGCONT) }, 0);
    mem.store_u64(lock, 0).expect("a word");
    assert!(dd.wait().expect("a child").success());
    resume(&rig);
}

/// Makes so many files; returns them, and where the zone has their locks.
fn files_and_locks(rig: &Rig, count: usize) -> (Vec<PathBuf>, Vec<u64>) {
    let make = |i: usize| {
        let file = rig.at(&format!("a/f{i}"));
        fs::write(&file, "x").expect("write");
        let lock = lock_of(rig, fs::metadata(&file).expect("stat").ino());
        (file, lock)
    };
    (0..count).map(make).unzip()
}

#[test]
fn more_programs_than_threads_that_wait_for_a_suspended_member_hold_up_nobody_else() {
    const WAITERS: usize = 150;
    let rig = Rig::new();
    let mem = rig.owner.as_ref().expect("an owner").mem();
    let (files, locks) = files_and_locks(&rig, WAITERS);
    suspend_with(&rig, &locks);
    std::thread::scope(|scope| {
        for file in &files {
            scope.spawn(move || fs::set_permissions(file, fs::Permissions::from_mode(0o600)).expect("chmod"));
        }
        let waits = |lock: &u64| mem.load_u64(lock + 8).expect("a word") != 0;
        wait_until(|| locks.iter().all(waits));
        let other = scope.spawn(|| {
            fs::write(rig.at("a/other"), "done").expect("write");
            fs::read_dir(rig.at("a")).expect("list").count()
        });
        wait_until(|| other.is_finished());
        let done = other.is_finished();
        for lock in &locks {
            mem.store_u64(*lock, 0).expect("a word");
        }
        resume(&rig);
        assert!(done, "a program that needs none of these files waits with the others");
        assert_eq!(other.join().expect("no panic"), WAITERS + 1);
    });
}

/// Three programs wait for a suspended member. Each request of another one takes the mount's last thread, which then tries to start a fifth.
#[test]
fn a_mount_without_memory_for_more_threads_goes_on_with_those_it_has() {
    const WAITERS: usize = 3;
    let rig = Rig::new();
    let mem = rig.owner.as_ref().expect("an owner").mem();
    let (files, locks) = files_and_locks(&rig, WAITERS);
    take_addresses(rig.pids[0]);
    suspend_with(&rig, &locks);
    std::thread::scope(|scope| {
        for file in &files {
            scope.spawn(move || fs::set_permissions(file, fs::Permissions::from_mode(0o600)));
        }
        let waits = |lock: &u64| mem.load_u64(lock + 8).expect("a word") != 0;
        wait_until(|| locks.iter().all(waits));
        let other = scope.spawn(|| {
            fs::write(rig.at("a/other"), "done")?;
            fs::read(rig.at("a/other"))
        });
        wait_until(|| other.is_finished());
        for lock in &locks {
            mem.store_u64(*lock, 0).expect("a word");
        }
        resume(&rig);
        assert_eq!(other.join().expect("no panic").expect("the mount lives"), b"done");
    });
}

/// Lets a process map 2.5 MiB more than it has mapped: the stack of one more thread, and then no buffer for a request of 1 MiB.
fn take_addresses(pid: i32) {
    let pages = fs::read_to_string(format!("/proc/{pid}/statm")).expect("a process");
    let pages: u64 = pages.split(' ').next().and_then(|n| n.parse().ok()).expect("a number");
    let limit = libc::rlimit { rlim_cur: (pages + 640) * 4096, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a plain call with a limit to read.
    let ret = unsafe { libc::prlimit(pid, libc::RLIMIT_AS, &limit, std::ptr::null_mut()) };
    assert_eq!(ret, 0, "{}", std::io::Error::last_os_error());
}

/// The closed file's number and that of the mount's root are in the same part of the mount's table of files.
#[test]
fn the_close_of_a_removed_file_that_waits_for_a_suspended_member_delays_no_other_program() {
    const PARTS: u64 = 64;
    let rig = Rig::new();
    let mem = rig.owner.as_ref().expect("an owner").mem();
    let mut made = (0..2 * PARTS).map(|i| {
        let file = fs::File::create(rig.at(&format!("a/f{i}"))).expect("create");
        (i, file.metadata().expect("stat").ino(), file)
    });
    let (name, ino, file) = made.find(|(_, ino, _)| ino % PARTS == ROOT % PARTS).expect("one of them");
    fs::remove_file(rig.at(&format!("b/f{name}"))).expect("unlink");
    let lock = lock_of(&rig, ino);
    suspend_with(&rig, &[lock]);
    drop(file);
    wait_until(|| mem.load_u64(lock + 8).expect("a word") != 0);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| fs::read_dir(rig.at("a")).expect("list").count());
        wait_until(|| other.is_finished());
        let done = other.is_finished();
        mem.store_u64(lock, 0).expect("a word");
        resume(&rig);
        assert!(done, "a program that needs none of the suspended member's locks waits");
    });
}

/// The kernel has the mount's process work on 64 closes at a time.
#[test]
fn closes_that_wait_for_a_suspended_member_delay_no_release_of_another_lock_however_many_they_are() {
    let rig = Rig::new();
    let mem = rig.owner.as_ref().expect("an owner").mem();
    let exclusive = rustix::fs::FlockOperation::LockExclusive;
    let (held, waiting) = (both(&rig, "other").0, both(&rig, "other").0);
    rustix::fs::flock(&held, exclusive).expect("a lock");
    let removed: Vec<fs::File> = (0..100)
        .map(|i| {
            let file = fs::File::create(rig.at(&format!("a/f{i}"))).expect("create");
            fs::remove_file(rig.at(&format!("b/f{i}"))).expect("unlink");
            file
        })
        .collect();
    let locks: Vec<u64> = removed.iter().map(|f| lock_of(&rig, f.metadata().expect("stat").ino())).collect();
    suspend_with(&rig, &locks);
    drop(removed);
    let waits = |lock: &&u64| mem.load_u64(**lock + 8).expect("a word") != 0;
    wait_until(|| locks.iter().filter(waits).count() >= 64);
    drop(held);
    std::thread::scope(|scope| {
        let next = scope.spawn(|| rustix::fs::flock(&waiting, exclusive));
        wait_until(|| next.is_finished());
        let done = next.is_finished();
        locks.iter().for_each(|lock| mem.store_u64(*lock, 0).expect("a word"));
        resume(&rig);
        assert!(done, "it waits for the suspended member, too");
        assert_eq!(next.join().expect("no panic"), Ok(()));
    });
}

/// The command that started it, and read what it said, has ended.
#[test]
fn a_mount_in_the_background_goes_on_after_it_has_told_of_damage() {
    let rig = Rig::new();
    fs::write(rig.at("a/f"), "x").expect("write");
    let lock = lock_of(&rig, fs::metadata(rig.at("a/f")).expect("stat").ino());
    let no_owner = u64::from(tombolo_files::sys::TFS_LOCK_HELD) | 200;
    rig.owner.as_ref().expect("an owner").mem().store_u64(lock, no_owner).expect("a word");
    fs::set_permissions(rig.at("a/f"), fs::Permissions::from_mode(0o600)).expect("chmod");
    assert_eq!(fs::read_to_string(rig.at("a/f")).expect("read"), "x");
}

/// No member is declared dead that lives, except by mistake, or by a store of another member.
#[test]
fn a_mount_declared_dead_while_it_is_stopped_harms_nobody_when_it_runs_again_and_ends() {
    let rig = Rig::new();
    let owner = rig.owner.as_ref().expect("an owner");
    fs::write(rig.at("a/removed"), vec![1; 1 << 20]).expect("write");
    let (mine, other) = both(&rig, "locked");
    assert_eq!(fcntl_lock(&mine, libc::F_SETLK, libc::F_WRLCK, 0, 10), 0);
    assert_ne!(fcntl_lock(&other, libc::F_SETLK, libc::F_WRLCK, 0, 10), 0);
    let open = fs::File::open(rig.at("a/removed")).expect("open");
    fs::remove_file(rig.at("b/removed")).expect("unlink");
    let [stopped, _] = rig.pids[..] else { panic!("two mounts") };
    // SAFETY: a process started by this test.
    assert_eq!(unsafe { libc::kill(stopped, libc::SIGSTOP) }, 0);
    let members = owner.members().expect("a zone");
    let expelled = members.iter().find(|m| m.name == "member-a").expect("a member").id;
    assert!(owner.declare_dead(expelled).expect("a zone"));
    wait_until(|| fcntl_lock(&other, libc::F_SETLK, libc::F_WRLCK, 0, 10) == 0);
    assert_eq!(fcntl_lock(&other, libc::F_SETLK, libc::F_WRLCK, 0, 10), 0, "its lock is kept");
    for i in 0..40 {
        fs::write(rig.at(&format!("b/f{i}")), vec![i; 1 << 20]).expect("write");
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(stopped, libc::SIGCONT) }, 0);
    let read = open.read_at(&mut [0; 4096], 0).expect_err("a mount that is over").raw_os_error();
    assert!(
        [libc::ESHUTDOWN, libc::ESTALE, libc::ENOTCONN, libc::ECONNABORTED].map(Some).contains(&read),
        "{read:?}"
    );
    drop((open, mine));
    let is_there = || Path::new(&format!("/proc/{stopped}/fd/0")).exists();
    wait_until(|| !is_there());
    assert!(!is_there(), "a mount whose member is dead goes on");
    for i in 0..40 {
        assert!(fs::read(rig.at(&format!("b/f{i}"))).expect("read") == vec![i; 1 << 20], "f{i}");
    }
    drop(other);
    unmount(&rig.at("b"));
    let clean = || files(&["fsck", "-n", rig.zone_str()]).status.code() == Some(0);
    wait_until(clean);
    assert!(clean());
}

#[test]
fn a_mount_of_a_file_system_of_another_version_is_refused_and_changes_nothing_in_it() {
    let dir = TempDir::new().expect("a directory");
    let (zone, at) = (dir.path().join("zone"), dir.path().join("at").display().to_string());
    fs::create_dir(&at).expect("a directory");
    let config = ZoneConfig::new("rig", 32 << 20).backing(Backing::File(zone.clone()));
    let owner = Zone::create(&config).expect("a zone");
    owner.invite("vm", Role::Vm, Rights::READ_WRITE).expect("a slot");
    let name = zone.to_str().expect("a path");
    must(&["mkfs", name]);
    let area = Target::open(&zone, true, None).expect("the zone").area().expect("its area");
    let version = std::mem::offset_of!(tombolo_files::sys::tfs_super, version) as u64;
    let next = area.word(version).expect("a word") + 1;
    assert!(area.store_word(version, next));
    // Another version may keep other data where this one keeps its members' areas.
    assert!((4096..(4 << 20)).step_by(8).all(|at| area.store_word(at, 0x1234_5678)));
    let bytes = || {
        let mut copy = vec![0; area.size() as usize];
        assert!(area.copy_out(0, &mut copy));
        copy
    };
    let before = bytes();
    for args in
        [&["mount", name, &at][..], &["grant", name, "vm", "--none"], &["grant", name, "vm", "--bytes", "1M"]]
    {
        let out = files(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && said.contains("version"), "{args:?}: {said}");
        assert!(bytes() == before, "{args:?} changed it");
    }
}

/// A tmpfs of this many bytes, unmounted at the end.
struct Small(PathBuf);

impl Small {
    fn new(at: PathBuf, size: &str) -> Small {
        fs::create_dir(&at).expect("a directory");
        let made = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "small"])
            .arg(&at)
            .status();
        assert!(made.expect("mount starts").success());
        Small(at)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        if let Err(e) = Command::new("umount").arg("-l").arg(&self.0).status() {
            eprintln!("umount {}: {e}", self.0.display());
        }
    }
}

#[test]
fn a_file_system_in_a_file_takes_its_room_when_it_is_made_or_mounted_or_is_refused() {
    let dir = TempDir::new().expect("a directory");
    let (small, at) = (Small::new(dir.path().join("small"), "40M"), dir.path().join("at"));
    fs::create_dir(&at).expect("a directory");
    let (large, sparse) = (small.file("large"), small.file("sparse"));
    let refused = |args: &[&str], why: &str| {
        let out = files(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && said.contains(why) && said.contains("No space left"), "{said}");
    };
    refused(&["mkfs", "--size", "64M", &large], "growing to 67108864 bytes");
    assert!(!Path::new(&large).exists(), "a file without a file system is left");

    let image = dir.path().join("image").display().to_string();
    must(&["mkfs", "--size", "64M", &image]);
    let copied = Command::new("cp").args(["--sparse=always", &image, &sparse]).status();
    assert!(copied.expect("cp starts").success());
    refused(&["mount", &sparse, at.to_str().expect("a path")], "has holes");
    refused(&["restore", "--force", &image, &sparse], "has holes");
    refused(&["fsck", "-y", &sparse], "has holes");
    refused(&["mkfs", "--force", &sparse], "has holes");
    must(&["fsck", "-n", &sparse]);
    fs::remove_file(&sparse).expect("unlink");
    must(&["mkfs", "--size", "32M", &sparse]);
    assert!(fs::metadata(&sparse).expect("stat").blocks() * 512 >= 32 << 20, "it has holes");
}

/// Cuts the file short under its mounts, and waits for their end. Returns what programs are told meanwhile.
fn cut_short(file: &Path, read: &fs::File, pids: &[i32]) -> Vec<Option<i32>> {
    fs::OpenOptions::new().write(true).open(file).expect("open").set_len(1 << 20).expect("truncate");
    let mut told = Vec::new();
    wait_until(|| {
        if let Err(e) = read.read_at(&mut [0; 4096], 8 << 20) {
            told.push(e.raw_os_error());
        }
        pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}/fd/0")).exists())
    });
    told
}

#[test]
fn a_mount_whose_file_is_cut_short_ends_with_an_error_and_a_line_and_mounts_of_other_zones_go_on() {
    let other = Rig::new();
    let dir = TempDir::new().expect("a directory");
    let at = dir.path().join("at");
    fs::create_dir(&at).expect("a directory");
    for is_zone in [false, true] {
        let file = dir.path().join(format!("zone-{is_zone}"));
        let name = file.to_str().expect("a path");
        let owner = is_zone.then(|| {
            Zone::create(&ZoneConfig::new("cut", 64 << 20).backing(Backing::File(file.clone())))
                .expect("a zone")
        });
        let size: &[&str] = if is_zone { &[] } else { &["--size", "64M"] };
        must(&[&["mkfs"], size, &[name]].concat());
        let mut mount = Command::new(env!("CARGO_BIN_EXE_tombolo-files-torture"));
        mount.args(["files", "mount", "--foreground", name]).arg(&at);
        let mut mount =
            mount.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the mount starts");
        let mut line = String::new();
        BufReader::new(mount.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        assert_eq!(line, "serving\n");
        fs::write(at.join("f"), vec![7; 16 << 20]).expect("write");
        let open = fs::File::open(at.join("f")).expect("open");
        let told = cut_short(&file, &open, &[mount.id() as i32]);
        drop(open);
        let ended = mount.wait().expect("its end");
        let mut said = String::new();
        mount.stderr.take().expect("a pipe").read_to_string(&mut said).expect("its last words");
        assert_eq!(ended.code(), Some(1), "a zone: {is_zone}; {said}");
        assert!(said.contains(name) && said.contains("cut short"), "{said}");
        assert_eq!(told.first(), Some(&Some(libc::EIO)), "a zone: {is_zone}; {told:?}");
        assert!(!mounted(&at), "a zone: {is_zone}");
        drop(owner);
    }
    fs::write(other.at("a/f"), "x").expect("write");
    assert_eq!(fs::read_to_string(other.at("b/f")).expect("read"), "x");
}

/// Waits until a request for a lock of this inode is in a mount's queue, from where it is tried again and again.
fn wait_for_waiter(rig: &Rig, ino: u64) {
    let owner = rig.owner.as_ref().expect("an owner");
    let area = owner.area(tombolo_zone::AreaType::Files, None).expect("a file system").offset;
    let root = lock_of(rig, ino) - core::mem::offset_of!(tombolo_files::sys::tfs_inode, lock) as u64
        + core::mem::offset_of!(tombolo_files::sys::tfs_inode, locks) as u64;
    let root = owner.mem().load_u64(root).expect("a word") & tombolo_files::sys::TFS_BLOCKNR_MASK;
    let waiters = area + root * 4096;
    let waits = || owner.mem().load_u64(waiters).expect("a word") != 0;
    wait_until(waits);
    owner.mem().store_u64(waiters, 0).expect("a word");
    wait_until(waits);
}

#[test]
fn a_program_gets_a_file_lock_though_one_that_waits_longer_meets_a_suspended_member() {
    let rig = Rig::new();
    let exclusive = rustix::fs::FlockOperation::LockExclusive;
    let (first, held) = both(&rig, "first");
    let own = both(&rig, "second").0;
    let second = both(&rig, "second").0;
    let [first_ino, second_ino] = [&first, &second].map(|file| file.metadata().expect("stat").ino());
    rustix::fs::flock(&held, exclusive).expect("a lock");
    rustix::fs::flock(&own, exclusive).expect("a lock");
    let table = lock_of(&rig, first_ino) - core::mem::offset_of!(tombolo_files::sys::tfs_inode, lock) as u64
        + core::mem::offset_of!(tombolo_files::sys::tfs_inode, entries) as u64;
    std::thread::scope(|scope| {
        let longer = scope.spawn(|| rustix::fs::flock(&first, exclusive));
        wait_for_waiter(&rig, first_ino);
        let later = scope.spawn(|| rustix::fs::flock(&second, exclusive));
        wait_for_waiter(&rig, second_ino);
        suspend_with(&rig, &[table]);
        rustix::fs::flock(&own, rustix::fs::FlockOperation::Unlock).expect("unlock");
        wait_until(|| later.is_finished());
        let done = later.is_finished();
        rig.owner.as_ref().expect("an owner").mem().store_u64(table, 0).expect("a word");
        resume(&rig);
        rustix::fs::flock(&held, rustix::fs::FlockOperation::Unlock).expect("unlock");
        assert!(done, "it waits for the suspended member, too");
        assert!(longer.join().expect("no panic").is_ok());
        assert!(later.join().expect("no panic").is_ok());
    });
}

/// Its lock is released once the suspended member goes on, and no earlier is it another process's.
#[test]
fn a_program_can_be_killed_though_a_suspended_member_delays_the_release_of_its_lock() {
    let rig = Rig::new();
    // Open in the first mount only: the end of a process also closes what the suspended one would have to answer for.
    let a = fs::File::create(rig.at("a/f")).expect("create");
    let lock = lock_of(&rig, a.metadata().expect("stat").ino());
    let table = lock - core::mem::offset_of!(tombolo_files::sys::tfs_inode, lock) as u64
        + core::mem::offset_of!(tombolo_files::sys::tfs_inode, entries) as u64;
    let (read, write) = rustix::pipe::pipe().expect("a pipe");
    // SAFETY: the child calls nothing but file operations and pause, until it is killed.
    let child = match unsafe { libc::fork() } {
        0 => {
            let taken = fcntl_lock(&a, libc::F_SETLK, libc::F_WRLCK, 0, 0) == 0;
            let _told = rustix::io::write(&write, &[u8::from(taken)]);
            loop {
                // SAFETY: a plain call.
                unsafe { libc::pause() };
            }
        }
        child => child,
    };
    let mut taken = [0];
    rustix::io::read(&read, &mut taken).expect("a byte");
    assert_eq!(taken, [1]);
    suspend_with(&rig, &[table]);
    let gone = || {
        // SAFETY: a child of this test, waited for here only.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::WNOHANG) == child }
    };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    let mut ended = false;
    wait_until(|| {
        ended |= gone();
        ended
    });
    let killed = ended;
    rig.owner.as_ref().expect("an owner").mem().store_u64(table, 0).expect("a word");
    resume(&rig);
    wait_until(|| {
        ended = ended || gone();
        ended
    });
    let mut free = libc::EAGAIN;
    wait_until(|| {
        free = fcntl_lock(&a, libc::F_SETLK, libc::F_WRLCK, 0, 0);
        free == 0
    });
    assert!(killed, "it waits for the suspended member");
    assert_eq!(free, 0, "the killed program's lock stays");
}
