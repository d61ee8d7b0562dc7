// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo files import` and `export`, through real mounts (FUSE).

use std::path::Path;
use std::process::{Command, Output};

fn run(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tombolo")).args(args).current_dir(dir).output().unwrap()
}

fn good(dir: &Path, args: &[&str]) -> String {
    let output = run(dir, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn counts(text: &str) -> [u64; 3] {
    let done: serde_json::Value = serde_json::from_str(text).unwrap();
    ["copied", "same", "removed"].map(|key| done[key].as_u64().unwrap())
}

#[test]
fn a_directory_comes_back_from_a_zone_as_it_was_and_what_is_equal_is_not_copied_again() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    good(dir, &["zone", "create", "own.zone", "--size", "32M"]);
    good(dir, &["files", "mkfs", "own.zone"]);
    let make = "mkdir -p from/a && echo one >from/a/file && ln from/a/file from/other && ln -s a/file from/link && \
                truncate -s 8M from/sparse && echo end >>from/sparse && chmod 2750 from/a && setfattr -n user.note -v kept from/other";
    assert!(Command::new("sh").args(["-ec", make]).current_dir(dir).status().unwrap().success());

    let first = counts(&good(dir, &["files", "import", "from", "own.zone:/in/side", "--json"]));
    // The root of the copy, the folder, two names, the link, the sparse file.
    assert_eq!(first[0] + first[1], 6);
    assert_eq!(counts(&good(dir, &["files", "import", "from", "own.zone:in/side", "--json"]))[0], 0);
    good(dir, &["files", "export", "own.zone:/in/side", "back"]);
    let list = "find . -printf '%P %M %s %n %l %T@\\n' | sort; find . -type f -exec md5sum {} + | sort; getfattr -d other; stat -c %i a/file other | uniq | wc -l";
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
    assert!(said(&["files", "import", "nowhere", "own.zone"]).contains("no directory that can be copied"));
    // The zone has no file system yet.
    assert!(said(&["files", "import", "from", "own.zone"]).contains("tombolo files mkfs"));
    good(dir, &["files", "mkfs", "own.zone"]);
    assert!(
        said(&["files", "export", "own.zone:/missing", "back"]).contains("/missing is no directory there")
    );
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");
}
