// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo files import` and `export`, through real mounts (FUSE).

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn run(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tombolo")).args(args).current_dir(dir).output().unwrap()
}

fn good(dir: &Path, args: &[&str]) -> String {
    let output = run(dir, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn make_zone(dir: &Path, size: &str) {
    good(dir, &["zone", "create", "own.zone", "--size", size]);
    good(dir, &["files", "mkfs", "own.zone"]);
}

fn counts(text: &str) -> [u64; 3] {
    let done: serde_json::Value = serde_json::from_str(text).unwrap();
    ["copied", "same", "removed"].map(|key| done[key].as_u64().unwrap())
}

#[test]
fn a_files_command_whose_output_takes_nothing_names_the_cause() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    make_zone(dir, "16M");
    for args in [&["files", "df", "own.zone"][..], &["files", "snapshot", "own.zone", "image"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = command.args(args).current_dir(dir).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
        let output = output.wait_with_output().unwrap();
        let words = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {words}");
        assert_eq!(words, "tombolo: the output can't be written: No space left on device (os error 28)\n");
    }
}

#[test]
fn a_copy_whose_words_find_no_room_is_made_to_its_end() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    make_zone(dir, "16M");
    std::fs::create_dir(dir.join("tree")).unwrap();
    std::fs::write(dir.join("tree/file"), "x").unwrap();
    // It is left out, which is said.
    let null = rustix::fs::makedev(1, 3);
    let (mode, kind) = (rustix::fs::Mode::RUSR, rustix::fs::FileType::CharacterDevice);
    rustix::fs::mknodat(rustix::fs::CWD, dir.join("tree/null"), kind, mode, null).unwrap();
    for args in [&["files", "import", "tree", "own.zone"][..], &["files", "export", "own.zone", "copy"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        let status = command.args(args).current_dir(dir).stdout(Stdio::null()).stderr(full).status().unwrap();
        assert_eq!(status.code(), Some(0), "{args:?}");
    }
    assert_eq!(std::fs::read(dir.join("copy/file")).unwrap(), b"x");
}

#[test]
fn fsck_calls_no_damaged_file_system_clean_or_repaired_where_nobody_takes_its_words() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    good(dir, &["files", "mkfs", "--size", "16M", "made"]);
    std::fs::create_dir(dir.join("site")).unwrap();
    std::fs::write(dir.join("site/name-of-its-own"), "x").unwrap();
    good(dir, &["files", "import", "site", "made"]);
    let mut bytes = std::fs::read(dir.join("made")).unwrap();
    // It was another name before the file was whole.
    while let Some(name) = bytes.windows(15).position(|bytes| bytes == b"name-of-its-own") {
        bytes[name] = b'f';
    }
    std::fs::write(dir.join("made"), bytes).unwrap();
    let code = |output: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        command.args(["files", "fsck", "-n", "made"]).current_dir(dir).stdout(output).stderr(Stdio::null());
        command.status().unwrap().code()
    };
    let (reader, nobody_reads) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(reader);
    assert_eq!(code(Stdio::null()), Some(4));
    assert_eq!(code(std::os::fd::OwnedFd::from(nobody_reads).into()), Some(4));
    assert_eq!(code(std::fs::File::options().write(true).open("/dev/full").unwrap().into()), Some(8));
}

#[test]
fn an_image_of_a_file_system_is_readable_for_its_user_alone() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    make_zone(dir, "16M");
    good(dir, &["files", "snapshot", "own.zone", "image"]);
    good(dir, &["files", "mkfs", "--size", "16M", "made"]);
    for name in ["image", "made"] {
        assert_eq!(std::fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o7777, 0o600, "{name}");
    }
}

#[test]
fn a_directory_comes_back_from_a_zone_as_it_was_and_what_is_equal_is_not_copied_again() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    make_zone(dir, "32M");
    let make = "mkdir -p from/a && echo one >from/a/file && ln from/a/file from/other && ln -s a/file from/link && \
                truncate -s 8M from/sparse && echo end >>from/sparse && chmod 2750 from/a && setfattr -n user.note -v kept from/other && mkfifo from/pipe && setfacl -m u:1234:r from/sparse";
    assert!(Command::new("sh").args(["-ec", make]).current_dir(dir).status().unwrap().success());

    let first = counts(&good(dir, &["files", "import", "from", "own.zone:/in/side", "--json"]));
    // The root of the copy, the folder, two names, the link, the sparse file, the pipe.
    assert_eq!(first[0] + first[1], 7);
    assert_eq!(counts(&good(dir, &["files", "import", "from", "own.zone:in/side", "--json"]))[0], 0);
    good(dir, &["files", "export", "own.zone:/in/side", "back"]);
    let list = "find . -printf '%P %M %s %n %l %T@\\n' | sort; find . -type f -exec md5sum {} + | sort; getfattr -d other; getfacl -n sparse; stat -c %i a/file other | uniq | wc -l";
    let picture = |folder: &str| {
        let output = Command::new("sh").args(["-ec", list]).current_dir(dir.join(folder)).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    // A directory's size is the file system's own.
    let files = |text: String| {
        text.lines().filter(|line| !line.contains(" d")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(files(picture("from")), files(picture("back")));

    std::fs::remove_file(dir.join("from/link")).unwrap();
    assert_eq!(
        counts(&good(dir, &["files", "import", "from", "own.zone:/in/side", "--delete", "--json"]))[2],
        1
    );
    assert_eq!(
        counts(&good(dir, &["files", "export", "own.zone:/in/side", "back", "--delete", "--json"]))[2],
        1
    );
    assert!(!dir.join("back/link").is_symlink());
}

#[test]
fn an_archive_is_unpacked_into_a_new_directory_as_a_whole_or_not_at_all() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    make_zone(dir, "64M");
    shell(
        dir,
        "mkdir -p tree/sub && echo x >tree/sub/file && chmod 4751 tree/sub/file && ln tree/sub/file tree/hard && ln -s /sub tree/link
        mkfifo tree/fifo && mknod tree/null c 1 3 && chown -h 1234:4321 tree/link tree/sub && head -c 5M /dev/urandom >tree/large
        tar -C tree -cf - . | gzip >tree.tar.gz && head -c 1M tree.tar.gz >cut.tar.gz
        listed() { (cd $1 && find . -printf '%P %y %m %U:%G %n %s %Ts %l\\n' | sort; sha256sum large hard); }
        listed tree >before",
    );
    good(dir, &["files", "import", "tree.tar.gz", "own.zone:images/one"]);
    good(dir, &["files", "export", "--suid", "--dev", "own.zone:images/one", "back"]);
    shell(
        dir,
        "listed() { (cd $1 && find . -printf '%P %y %m %U:%G %n %s %Ts %l\\n' | sort; sha256sum large hard); }
        listed back | diff before -",
    );
    for (from, to, why) in [
        ("tree.tar.gz", "own.zone:images/one", "there already"),
        ("tree.tar.gz", "own.zone", "name it"),
        ("cut.tar.gz", "own.zone:images/two", "cut.tar.gz"),
        ("own.zone", "own.zone:images/two", "neither a directory nor a tar archive"),
    ] {
        let output = run(dir, &["files", "import", from, to]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(why), "{from} {to}: {error}");
    }
    good(dir, &["files", "export", "own.zone", "all"]);
    shell(dir, "test \"$(ls -A all all/images | tr '\\n' ' ')\" = 'all: images  all/images: one '");
}

#[test]
fn the_next_import_removes_what_a_killed_one_has_unpacked_and_none_of_one_that_runs() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    make_zone(dir, "64M");
    shell(dir, "mkdir tree && touch tree/file && tar -C tree -cf tree.tar . && mkdir point");
    // The import waits for ever: the second layer is a FIFO that nobody writes.
    let image = |name: &str| {
        shell(
            dir,
            &format!(
                "mkdir -p {name}/blobs/sha256 && cp tree.tar {name}/blobs/sha256/a && mkfifo {name}/blobs/sha256/b && echo '{{}}' >{name}/oci-layout
                echo '{{\"layers\":[{{\"digest\":\"sha256:a\",\"size\":'$(stat -c %s tree.tar)'}},{{\"digest\":\"sha256:b\",\"size\":0}}]}}' >{name}/index.json"
            ),
        );
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        command.args(["files", "import", name, "own.zone:same"]).current_dir(dir).stdout(Stdio::null());
        command.spawn().unwrap()
    };
    let mount = format!("{} files mount own.zone point", env!("CARGO_BIN_EXE_tombolo"));
    shell(dir, &mount);
    let stages = |how_many: usize, import: &mut std::process::Child| {
        let stages = |root: &str| {
            let named = std::fs::read_dir(dir.join("point")).unwrap().map(|entry| entry.unwrap().path());
            named.filter(|path| path.join(root).exists()).count()
        };
        while stages("root/file") < how_many {
            assert!(import.try_wait().unwrap().is_none(), "the import has ended");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        stages("")
    };
    let mut killed = image("one");
    assert_eq!(stages(1, &mut killed), 1);
    let left = std::fs::read_dir(dir.join("point")).unwrap().next().unwrap().unwrap().path().join("lock");
    let mut running = image("two");
    assert_eq!(stages(2, &mut running), 2);
    killed.kill().unwrap();
    killed.wait().unwrap();
    // Its lock ends with its membership.
    let lock = std::fs::File::open(left).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    drop(lock);
    good(dir, &["files", "import", "tree.tar", "own.zone:same"]);
    assert!(dir.join("point/same/file").exists());
    assert_eq!(stages(1, &mut running), 2, "the running one's, and what it was named");
    running.kill().unwrap();
    running.wait().unwrap();
    shell(dir, "umount point");
}

#[test]
fn what_can_not_be_copied_is_said_and_no_mount_is_left() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    good(dir, &["zone", "create", "own.zone", "--size", "16M"]);
    let said = |args: &[&str]| {
        let output = run(dir, args);
        assert!(!output.status.success(), "{args:?} succeeded");
        String::from_utf8(output.stderr).unwrap()
    };
    std::fs::create_dir(dir.join("from")).unwrap();
    assert!(said(&["files", "import", "nowhere", "own.zone"]).contains("nowhere: No such file"));
    // The zone has no file system yet.
    assert!(said(&["files", "import", "from", "own.zone"]).contains("tombolo files mkfs"));
    good(dir, &["files", "mkfs", "own.zone"]);
    assert!(said(&["files", "export", "own.zone:/missing", "back"]).contains("own.zone:/missing: 'missing'"));
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");
}

#[test]
fn what_fails_holds_up_nothing_else_and_is_told_in_short_lines() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    make_zone(dir, "32M");
    // A file that can't be replaced, a tree that no path leads to, and a sparse file larger than the zone.
    let deep = "import os; [(os.mkdir('n' * 200), os.chdir('n' * 200)) for _ in range(40)]";
    let make = format!(
        "mkdir from mnt && for f in a m z; do echo $f >from/$f; done && tombolo files mount own.zone mnt && mkdir -p mnt/in/deep && \
         echo old >mnt/in/m && chattr +i mnt/in/m && truncate -s 1T mnt/in/sparse && (cd mnt/in/deep && python3 -c \"{deep}\") && umount mnt"
    );
    shell(dir, &make);
    let failed = |args: &[&str]| {
        let output = run(dir, args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.lines().all(|line| line.chars().count() < 300), "{said}");
        (serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap(), said)
    };
    let (done, said) = failed(&["files", "import", "from", "own.zone:in", "--json"]);
    assert_eq!((done["copied"].as_u64(), done["failed"].as_u64()), (Some(3), Some(1)), "{said}");
    assert!(said.contains("Operation not permitted"), "{said}");
    let (_, said) = failed(&["files", "export", "own.zone:in", "back", "--json"]);
    assert!(said.contains("sparse: sparse, and larger than the zone"), "{said}");
    for (name, content) in [("a", "a\n"), ("m", "old\n"), ("z", "z\n")] {
        assert_eq!(std::fs::read_to_string(dir.join("back").join(name)).unwrap(), content);
    }
}

/// The children of a process.
fn children(pid: u32) -> Vec<u32> {
    let listed = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn a_copy_whose_mount_is_killed_says_so_and_leaves_no_mount() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    make_zone(dir, "256M");
    std::fs::create_dir_all(dir.join("from")).unwrap();
    std::fs::create_dir(dir.join("tmp")).unwrap();
    for i in 0..100 {
        std::fs::write(dir.join(format!("from/{i}")), vec![1; 2 << 20]).unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    command.args(["files", "import", "from", "own.zone"]).current_dir(dir).env("TMPDIR", dir.join("tmp"));
    let copy = command.stderr(Stdio::piped()).spawn().unwrap();
    let is_mounted = || {
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        mounts.contains(dir.join("tmp").to_str().unwrap())
    };
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !is_mounted() {
        assert!(std::time::Instant::now() < until, "it does not mount");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    signal(children(copy.id())[0], rustix::process::Signal::KILL);
    let output = copy.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(!is_mounted(), "{said}");
    assert_eq!(std::fs::read_dir(dir.join("tmp")).unwrap().count(), 0, "{said}");
}

/// Runs commands, `tombolo` among them.
fn shell(dir: &Path, commands: &str) {
    let program = Path::new(env!("CARGO_BIN_EXE_tombolo")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-ec", commands]).current_dir(dir).env("PATH", path);
    assert!(shell.status().unwrap().success());
}

/// A zone in which a member has made `www` a link to the folder `victim` of the host, and two programs with set-id bits.
fn hostile(dir: &Path) {
    make_zone(dir, "32M");
    let make = "mkdir victim from mnt && echo kept >victim/kept && echo new >from/new && \
                tombolo files mount own.zone mnt && ln -s \"$PWD/victim\" mnt/www && mkdir mnt/out && echo >mnt/out/program && \
                chmod 6755 mnt/out/program && chmod 2755 mnt/out && umount mnt";
    shell(dir, make);
}

#[test]
fn a_link_that_a_vm_made_in_the_zone_leads_no_copy_to_the_host() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    hostile(dir);
    for place in ["own.zone:www", "own.zone:www/below"] {
        let refused = run(dir, &["files", "import", "--delete", "from", place]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains("'www' is a link or a file"), "{said}");
    }
    let refused = run(dir, &["files", "export", "own.zone:www", "back"]);
    assert!(!refused.status.success() && !dir.join("back/kept").exists());
    let left: Vec<_> =
        std::fs::read_dir(dir.join("victim")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["kept"]);
}

#[test]
fn a_copy_from_a_zone_has_no_set_id_bits_unless_they_are_asked_for() {
    use std::os::unix::fs::MetadataExt;
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    hostile(dir);
    let mode = || std::fs::metadata(dir.join("back/program")).unwrap().mode() & 0o7777;
    good(dir, &["files", "export", "own.zone:out", "back"]);
    assert_eq!(mode(), 0o755);
    good(dir, &["files", "export", "--suid", "own.zone:out", "back"]);
    assert_eq!(mode(), 0o6755);
}

/// Returns the line of a mount below a folder.
fn mount_below(dir: &Path) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().find(|line| line.contains(dir.to_str().unwrap())).map(str::to_owned)
}

/// Begins an import of many files; the mount that it works with.
fn begin_import(dir: &Path) -> (Child, String) {
    (0..2000).for_each(|n| std::fs::write(dir.join(format!("from/{n}")), "x").unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    command.args(["files", "import", "from", "own.zone:in"]).current_dir(dir).env("TMPDIR", dir);
    let mut copying = command.stdout(Stdio::null()).spawn().unwrap();
    loop {
        if let Some(line) = mount_below(dir) {
            return (copying, line);
        }
        assert!(copying.try_wait().unwrap().is_none(), "the copy ended before its mount was seen");
    }
}

#[test]
fn a_copy_that_is_killed_leaves_no_mount_and_no_member() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    hostile(dir);
    let (mut copying, _) = begin_import(dir);
    copying.kill().unwrap();
    copying.wait().unwrap();
    while mount_below(dir).is_some() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // No member of the zone lives.
    good(dir, &["files", "import", "from", "own.zone:in"]);
    assert_eq!(std::fs::read_dir(dir.join("from")).unwrap().count(), 2001);
}

#[test]
fn the_mount_of_a_copy_is_reached_by_its_user_alone_and_runs_no_set_id_program() {
    use std::os::unix::fs::MetadataExt;
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    hostile(dir);
    let (mut copying, mount) = begin_import(dir);
    let fields: Vec<&str> = mount.split(' ').collect();
    let options: Vec<&str> = fields[3].split(',').collect();
    assert!(options.contains(&"nosuid") && options.contains(&"nodev"), "{mount}");
    let folder = Path::new(fields[1]).parent().unwrap();
    assert_eq!(std::fs::metadata(folder).unwrap().mode() & 0o777, 0o700, "{}", folder.display());
    assert!(copying.wait().unwrap().success());
    assert!(!folder.exists());
}
