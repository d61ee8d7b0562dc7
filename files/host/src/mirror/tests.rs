// SPDX-License-Identifier: Apache-2.0 OR MIT
use super::*;
use walkdir::WalkDir;

/// Describes all that a copy must keep, as text, without the times of directories that the copy itself changes.
fn picture(root: &Path) -> Vec<String> {
    let mut numbers = BTreeMap::new();
    let mut lines = Vec::new();
    for entry in WalkDir::new(root).sort_by_file_name() {
        let entry = entry.unwrap();
        let meta = fs::symlink_metadata(entry.path()).unwrap();
        let inside = entry.path().strip_prefix(root).unwrap();
        let next = numbers.len();
        let inode = *numbers.entry(meta.ino()).or_insert(next);
        let held = if meta.is_file() { fs::read(entry.path()).unwrap() } else { Vec::new() };
        let link = fs::read_link(entry.path()).ok();
        let size = if meta.is_dir() { 0 } else { meta.len() };
        let attributes = attributes_of(entry.path()).unwrap();
        lines.push(format!(
            "{inside:?} {:o} {} {} {size} {} {} {inode} {link:?} {attributes:?} {:x?}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.mtime(),
            meta.mtime_nsec(),
            held.iter().fold(0u64, |sum, b| sum.wrapping_mul(31).wrapping_add(u64::from(*b)))
        ));
    }
    lines
}

fn tree() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    fs::write(at("folder/file"), "contents").unwrap();
    fs::set_permissions(at("folder/file"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::hard_link(at("folder/file"), at("second name")).unwrap();
    std::os::unix::fs::symlink("nowhere", at("link")).unwrap();
    rustix::fs::mknodat(CWD, at("pipe"), FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
    let sparse = File::create(at("sparse")).unwrap();
    sparse.set_len(64 << 20).unwrap();
    rustix::io::pwrite(&sparse, b"in the middle", 32 << 20).unwrap();
    rustix::fs::setxattr(at("sparse"), c"user.note", b"kept", XattrFlags::empty()).unwrap();
    fs::set_permissions(at("folder"), fs::Permissions::from_mode(0o1755)).unwrap();
    dir
}

fn try_run(from: &Path, to: &Path, rights: Rights, progress: &mut dyn FnMut(&Done)) -> anyhow::Result<Done> {
    mirror(&Tree::open(from)?, &Tree::open(to)?, rights, false, progress)
}

fn run(from: &Path, to: &Path, delete: bool) -> Done {
    let (from, to) = (Tree::open(from).unwrap(), Tree::open(to).unwrap());
    mirror(&from, &to, Rights::ALL, delete, &mut |_| {}).unwrap()
}

#[test]
fn a_copy_has_everything_and_a_second_run_copies_nothing() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    let first = run(from.path(), to.path(), false);
    assert_eq!(picture(from.path()), picture(to.path()));
    assert!(fs::metadata(to.path().join("sparse")).unwrap().blocks() < 1 << 10, "the hole was filled");
    assert!(first.bytes < 1 << 20, "{first:?}");
    let second = run(from.path(), to.path(), true);
    assert_eq!((second.copied, second.removed, second.bytes), (0, 0, 0), "{second:?}");
    assert_eq!(picture(from.path()), picture(to.path()));
}

#[test]
fn changes_of_every_kind_arrive_and_only_they_are_copied() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    run(from.path(), to.path(), false);
    let at = |name: &str| from.path().join(name);
    // A file becomes a directory, a directory a file, a link another, a second name a file of its own.
    fs::remove_file(at("pipe")).unwrap();
    fs::create_dir(at("pipe")).unwrap();
    fs::write(at("pipe/inside"), "x").unwrap();
    fs::remove_file(at("link")).unwrap();
    std::os::unix::fs::symlink("elsewhere", at("link")).unwrap();
    fs::remove_file(at("second name")).unwrap();
    fs::write(at("second name"), "contents").unwrap();
    rustix::fs::removexattr(at("sparse"), c"user.note").unwrap();
    fs::write(to.path().join("only there"), "y").unwrap();
    let kept = run(from.path(), to.path(), false);
    assert!(to.path().join("only there").exists() && kept.removed == 0, "{kept:?}");
    let done = run(from.path(), to.path(), true);
    assert_eq!((done.removed, done.bytes), (1, 0), "{done:?}");
    assert_eq!(picture(from.path()), picture(to.path()));
}

#[test]
fn a_copy_in_the_middle_shows_no_other_user_what_the_source_does_not() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (private, secret) = (from.path().join("private"), from.path().join("private/secret"));
    fs::create_dir(&private).unwrap();
    fs::write(&secret, "key").unwrap();
    fs::set_permissions(&private, fs::Permissions::from_mode(0o700)).unwrap();
    let open = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o077;
    let mut seen = 0;
    try_run(from.path(), to.path(), Rights::ALL, &mut |_| {
        let copy = to.path().join("private");
        if copy.exists() {
            assert_eq!(open(&copy), 0);
            seen += 1;
        }
    })
    .unwrap();
    assert_eq!(seen, 2, "the folder, and the file in it");
    let (new, file) = unfinished::create(&to.path().join("secret")).unwrap();
    contents(&secret, &fs::metadata(&secret).unwrap(), &file).unwrap();
    assert_eq!(open(&new), 0);
}

/// An ACL by which user 1000 may read and search a folder, beside its owner and group.
const LIST: [u8; 44] = {
    let (none, user) = ([0xff; 4], 1000u32.to_le_bytes());
    let entries = [(1, 7, none), (2, 5, user), (4, 5, none), (0x10, 5, none), (0x20, 0, none)];
    let mut list = [0; 44];
    list[0] = 2;
    let mut i = 0;
    while i < entries.len() {
        let (tag, rights, id) = entries[i];
        let at = 4 + 8 * i;
        (list[at], list[at + 2]) = (tag, rights);
        (list[at + 4], list[at + 5], list[at + 6], list[at + 7]) = (id[0], id[1], id[2], id[3]);
        i += 1;
    }
    list
};

#[test]
fn a_folder_that_was_there_gives_no_right_that_the_source_lacks_once_something_is_put_into_it() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (name, mode) in [("listed", 0o750), ("private", 0o700)] {
        for (root, mode) in [(from.path(), mode), (to.path(), 0o755)] {
            fs::create_dir(root.join(name)).unwrap();
            fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        fs::write(from.path().join(name).join("secret"), "key").unwrap();
    }
    rustix::fs::setxattr(to.path().join("listed"), ACCESS_LIST, &LIST, XattrFlags::empty()).unwrap();
    fs::set_permissions(from.path(), fs::Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(to.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let open = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o077;
    let mut seen = 0;
    try_run(from.path(), to.path(), Rights::ALL, &mut |_| {
        assert_eq!(open(to.path()), 0, "the root");
        for name in ["listed", "private"] {
            if to.path().join(name).join("secret").exists() {
                assert_eq!(open(&to.path().join(name)), 0, "{name}");
                seen += 1;
            }
        }
    })
    .unwrap();
    assert_eq!(seen, 4);
    assert_eq!(picture(from.path()), picture(to.path()));
}

#[test]
fn what_an_interrupted_run_left_is_no_part_of_the_tree() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    // In earlier releases it had no number.
    let left = [unfinished::beside(&to.path().join("x")), to.path().join(".tombolo-unfinished")];
    for delete in [false, true] {
        left.iter().for_each(|left| fs::write(left, "half").unwrap());
        fs::write(from.path().join("folder/file"), format!("changed {delete}")).unwrap();
        fs::write(from.path().join("in the same folder"), format!("changed {delete}")).unwrap();
        run(from.path(), to.path(), delete);
        assert_eq!(picture(from.path()), picture(to.path()));
    }
}

#[test]
fn of_runs_into_one_directory_at_once_each_gives_its_names_its_own_contents() {
    let to = tempfile::tempdir().unwrap();
    let sources = [b'a', b'b', b'c'].map(|letter| {
        let from = tempfile::tempdir().unwrap();
        for i in 0..8 {
            let name = format!("{}{i}", char::from(letter));
            fs::write(from.path().join(name), vec![letter; 1 << 20]).unwrap();
        }
        from
    });
    std::thread::scope(|scope| {
        for from in &sources {
            scope.spawn(|| {
                for _ in 0..10 {
                    for entry in fs::read_dir(from.path()).unwrap() {
                        // A new time: it is copied again.
                        File::options()
                            .write(true)
                            .open(entry.unwrap().path())
                            .unwrap()
                            .set_modified(std::time::SystemTime::now())
                            .unwrap();
                    }
                    let done = run(from.path(), to.path(), false);
                    assert_eq!(done.bytes, 8 << 20);
                }
            });
        }
    });
    let names: Vec<_> = fs::read_dir(to.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 24, "{names:?}");
    for name in names {
        let held = fs::read(to.path().join(&name)).unwrap();
        assert!(held.len() == 1 << 20 && held.iter().all(|b| *b == name.as_encoded_bytes()[0]), "{name:?}");
    }
}

#[test]
fn what_a_living_run_has_not_finished_stays_also_with_delete() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    let (living, file) = unfinished::create(&to.path().join("its")).unwrap();
    run(from.path(), to.path(), true);
    assert!(living.exists());
    drop(file);
    run(from.path(), to.path(), true);
    assert_eq!(picture(from.path()), picture(to.path()));
}

#[test]
fn runs_into_one_directory_at_once_make_its_directories_and_links_together() {
    let from = tempfile::tempdir().unwrap();
    for i in 0..40 {
        let folder = from.path().join(format!("{i}"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("one"), "x").unwrap();
        fs::hard_link(folder.join("one"), folder.join("two")).unwrap();
        std::os::unix::fs::symlink("one", folder.join("link")).unwrap();
    }
    for _ in 0..20 {
        let to = tempfile::tempdir().unwrap();
        let ready = std::sync::Barrier::new(3);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    ready.wait();
                    run(from.path(), to.path(), true);
                });
            }
        });
        run(from.path(), to.path(), true);
        assert_eq!(picture(from.path()), picture(to.path()));
    }
}

#[test]
fn a_directory_may_be_called_as_what_is_not_finished() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    fs::create_dir(from.path().join(".tombolo-unfinished")).unwrap();
    fs::write(from.path().join(".tombolo-unfinished/file"), "x").unwrap();
    for delete in [false, true] {
        run(from.path(), to.path(), delete);
        assert_eq!(picture(from.path()), picture(to.path()));
    }
}

#[test]
fn a_run_that_fails_leaves_nothing_unfinished() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    // It is gone before it is copied; a full disk, say, ends a run in the same place.
    let (source, target) = (from.path().join("folder/file"), to.path().join("folder/copy"));
    fs::create_dir_all(to.path().join("folder")).unwrap();
    let meta = fs::symlink_metadata(&source).unwrap();
    fs::remove_file(&source).unwrap();
    let trees = (Tree::open(from.path()).unwrap(), Tree::open(to.path()).unwrap());
    let mut copy = Copy {
        from: &trees.0,
        to: &trees.1,
        rights: Rights::ALL,
        links: BTreeMap::new(),
        kept: BTreeMap::new(),
        swept: None,
        done: Done::default(),
    };
    copy.replace(Path::new("folder/copy"), &source, &target, &meta, None).unwrap_err();
    let left: Vec<_> = fs::read_dir(to.path().join("folder"))
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .filter(|name| unfinished::is_named(name))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_copy_has_its_size_only_with_its_data() {
    let from = tree();
    let file = from.path().join("folder/file");
    let sealed = rustix::fs::memfd_create("to", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
    let to = File::from(sealed);
    contents(&file, &fs::metadata(&file).unwrap(), &to).unwrap_err();
    assert_eq!(to.metadata().unwrap().len(), 0);
}

#[test]
fn what_can_not_be_written_is_named() {
    let from = tree();
    let said = try_run(from.path(), Path::new("/proc/nowhere"), Rights::ALL, &mut |_| {}).unwrap_err();
    assert!(said.to_string().contains("/proc/nowhere"), "{said:#}");
    let said = try_run(from.path(), Path::new("/proc/self"), Rights::ALL, &mut |_| {}).unwrap_err();
    assert!(said.to_string().starts_with("/proc/self/"), "{said:#}");
}

#[test]
fn a_source_that_is_a_link_to_a_directory_is_that_directory() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    let beside = tempfile::tempdir().unwrap();
    let link = beside.path().join("link");
    std::os::unix::fs::symlink(from.path(), &link).unwrap();
    fs::write(to.path().join("kept"), "").unwrap();
    run(&link, to.path(), false);
    assert!(to.path().join("kept").exists() && to.path().join("folder/file").exists());
}

/// Copies a tree, and puts a link to a directory in the place of `folder` of one side once it was handled. Returns the directory, the other
/// side, and the error.
fn exchanged(side: usize) -> (tempfile::TempDir, tempfile::TempDir, String) {
    let (from, to, victim) = (tree(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(victim.path().join("secret"), "of the host").unwrap();
    let folder = [from.path(), to.path()][side].join("folder");
    let mut moved = false;
    let said = try_run(from.path(), to.path(), Rights::ALL, &mut |_| {
        if !moved && folder.is_dir() {
            moved = true;
            fs::rename(&folder, folder.with_file_name("away")).unwrap();
            std::os::unix::fs::symlink(victim.path(), &folder).unwrap();
        }
    });
    let other = [to, from].into_iter().nth(side).unwrap();
    (victim, other, format!("{:#}", said.unwrap_err()))
}

#[test]
fn a_link_that_comes_in_the_place_of_a_directory_of_the_target_is_not_followed() {
    let (victim, _, said) = exchanged(1);
    let left: Vec<_> = fs::read_dir(victim.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["secret"], "{said}");
    assert!(said.contains("folder"), "{said}");
}

#[test]
fn a_link_that_comes_in_the_place_of_a_directory_of_the_source_is_not_followed() {
    let (_, copy, said) = exchanged(0);
    assert!(!copy.path().join("folder/secret").exists(), "{said}");
}

#[test]
fn rights_that_lie_in_files_are_copied_only_if_they_are_asked_for() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    let mode = || fs::metadata(to.path().join("folder/file")).unwrap().mode() & 0o7777;
    let none = Rights { suid: false, devices: false };
    try_run(from.path(), to.path(), none, &mut |_| {}).unwrap();
    assert_eq!(mode(), 0o711);
    run(from.path(), to.path(), false);
    assert_eq!(mode(), 0o4711);
    // A later copy without them takes them back.
    try_run(from.path(), to.path(), none, &mut |_| {}).unwrap();
    assert_eq!(mode(), 0o711);
}

#[test]
fn files_that_became_two_in_the_source_become_two_in_the_copy() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = |name: &str| from.path().join(name);
    fs::write(at("a"), "one").unwrap();
    for name in ["b", "c", "d"] {
        fs::hard_link(at("a"), at(name)).unwrap();
    }
    run(from.path(), to.path(), false);
    let time = fs::metadata(at("a")).unwrap().modified().unwrap();
    for name in ["c", "d"] {
        fs::remove_file(at(name)).unwrap();
    }
    let second = File::create(at("c")).unwrap();
    fs::write(at("c"), "two").unwrap();
    second.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    second.set_modified(time).unwrap();
    fs::hard_link(at("c"), at("d")).unwrap();
    run(from.path(), to.path(), false);
    assert_eq!(picture(to.path()), picture(from.path()));
}

#[test]
fn what_the_source_no_longer_has_makes_room_for_what_it_has() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mount = |what: &[&str]| std::process::Command::new(what[0]).args(&what[1..]).arg(to.path()).status();
    assert!(mount(&["mount", "-t", "tmpfs", "-o", "size=4M", "none"]).unwrap().success());
    let old = fs::write(to.path().join("old"), vec![1; 3 << 20]);
    let written = old.and_then(|()| fs::write(from.path().join("new"), vec![2; 3 << 20]));
    let done = written.map_err(Into::into).and_then(|()| {
        mirror(&Tree::open(from.path())?, &Tree::open(to.path())?, Rights::ALL, true, &mut |_| {})
    });
    assert!(mount(&["umount"]).unwrap().success());
    assert_eq!(done.unwrap().removed, 1);
}

#[test]
fn a_directory_in_which_a_living_run_has_an_entry_stays_and_the_run_goes_on() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    run(from.path(), to.path(), false);
    fs::create_dir(to.path().join("no longer there")).unwrap();
    let living = to.path().join("no longer there/.tombolo-unfinished-0123456789abcdef0123456789abcdef");
    std::os::unix::fs::symlink("x", &living).unwrap();
    run(from.path(), to.path(), true);
    assert!(fs::symlink_metadata(living).is_ok());
}

#[test]
fn a_source_whose_files_are_replaced_and_removed_meanwhile_is_copied() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    let busy = from.path().join("busy");
    fs::create_dir(&busy).unwrap();
    let ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0.. {
                let name = |kind: &str| busy.join(format!("{kind}{}", turn % 50));
                fs::write(name("new"), format!("{turn}")).unwrap();
                fs::rename(name("new"), name("file")).unwrap();
                if turn % 2 == 0 {
                    fs::remove_file(name("file")).unwrap();
                }
                fs::create_dir_all(name("folder").join("inner")).unwrap();
                fs::write(name("folder").join("file"), "").unwrap();
                fs::remove_dir_all(name("folder")).unwrap();
                if ended.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
            }
        });
        let done = (0..100).try_for_each(|_| {
            mirror(&Tree::open(from.path())?, &Tree::open(to.path())?, Rights::ALL, true, &mut |_| {})
                .map(drop)
        });
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        done.unwrap();
    });
    run(from.path(), to.path(), true);
    assert_eq!(picture(to.path()), picture(from.path()));
}

#[test]
fn a_directory_that_became_a_link_is_one_in_the_copy_also_with_delete() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    run(from.path(), to.path(), true);
    fs::rename(from.path().join("folder"), from.path().join("moved")).unwrap();
    std::os::unix::fs::symlink("moved", from.path().join("folder")).unwrap();
    run(from.path(), to.path(), true);
    assert_eq!(picture(to.path()), picture(from.path()));
}
