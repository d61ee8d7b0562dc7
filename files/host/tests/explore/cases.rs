// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Operations of members at the same time, and their required outcome.

use rustix::io::Errno;
use tombolo_files::fs::{Create, FileLock, Filesystem, Handle, ROOT};
use tombolo_files::sys;

use crate::{Case, Doing};

const REG: u32 = libc::S_IFREG | 0o644;
const DIR: u32 = libc::S_IFDIR | 0o755;
const LEN: usize = 9000;

pub(super) fn at(fs: &Filesystem, path: &str) -> Result<Handle, Errno> {
    path.split('/')
        .filter(|n| !n.is_empty())
        .try_fold(ROOT.into(), |dir, name| fs.lookup(dir, name.as_bytes()).map(|found| found.0))
}

fn make(fs: &Filesystem, dir: &str, name: &str, mode: u32) -> Result<Handle, String> {
    let text = |e| format!("create {dir}/{name}: {e}");
    fs.create(at(fs, dir).map_err(text)?, Some(name.as_bytes()), &Create::mode(mode)).map_err(text)
}

fn put(fs: &Filesystem, file: Handle, byte: u8, len: usize) -> Result<(), String> {
    match fs.pwrite(file, &vec![byte; len], 0, false) {
        Ok(n) if n == len => Ok(()),
        other => Err(format!("write: {other:?}")),
    }
}

fn is_full_of(fs: &Filesystem, file: Handle, byte: u8, len: usize) -> Result<(), String> {
    let mut bytes = vec![0; len + 1];
    match fs.pread(file, &mut bytes, 0) {
        Ok(n) if n == len && bytes[..n].iter().all(|b| *b == byte) => Ok(()),
        got => Err(format!("{got:?}, {:?} instead of {len} times {byte}", &bytes[..4])),
    }
}

pub(super) fn setup(fs: &Filesystem) {
    for dir in ["a", "b"] {
        make(fs, "", dir, DIR).expect("mkdir");
    }
    for (name, len) in [("f", LEN), ("g", 100), ("h", 40_000)] {
        let file = make(fs, "a", name, REG).expect("create");
        put(fs, file, name.as_bytes()[0], len).expect("write");
    }
    fs.xattr_set(at(fs, "a/g").expect("a/g"), b"user.a", Some(&[1; 6000]), 0, None).expect("attribute");
}

pub(super) fn doing(member: u32, mortal: bool, body: crate::Body) -> Doing {
    Doing { member, read_only: false, mortal, after: None, body }
}

pub(super) fn recover(fs: &Filesystem) -> Result<(), String> {
    fs.recover_all().map_err(|e| format!("recovery: {e}"))
}

/// Makes a file of its own in a place where freed blocks and records are reused first.
fn make_own(fs: &Filesystem) -> Result<(), String> {
    make_file(fs, "own")
}

/// The same while a second recovery runs.
fn make_late(fs: &Filesystem) -> Result<(), String> {
    make_file(fs, "late")
}

fn make_file(fs: &Filesystem, name: &str) -> Result<(), String> {
    let file = make(fs, "b", name, REG)?;
    put(fs, file, b'o', LEN)?;
    is_full_of(fs, file, b'o', LEN)
}

fn own_is_there(fs: &Filesystem) -> Result<(), String> {
    file_is_there(fs, "b/own")
}

/// In plans in which no member died twice it was not made.
fn late_is_there(fs: &Filesystem, made: bool) -> Result<(), String> {
    if made { file_is_there(fs, "b/late") } else { Ok(()) }
}

fn file_is_there(fs: &Filesystem, path: &str) -> Result<(), String> {
    let file = at(fs, path).map_err(|e| format!("{path}: {e}"))?;
    is_full_of(fs, file, b'o', LEN).map_err(|e| format!("{path}: {e}"))
}

#[test]
fn a_removal_takes_no_file_from_members_that_live() {
    let case = Case {
        setup,
        doing: vec![
            doing(4, true, |fs| {
                let dir = at(fs, "a").map_err(|e| e.to_string())?;
                fs.unlink(dir, b"f", None).map_err(|e| format!("unlink: {e}"))
            }),
            doing(20, false, make_own),
            Doing { after: Some(0), ..doing(1, true, recover) },
            Doing { after: Some(2), ..doing(2, false, recover) },
            Doing { after: Some(2), ..doing(12, false, make_late) },
        ],
        check: |fs, done| {
            late_is_there(fs, done[4])?;
            if done[0] && at(fs, "a/f") != Err(Errno::NOENT) {
                return Err("a/f is still there".into());
            }
            own_is_there(fs)
        },
    };
    case.explore("removal");
}

#[test]
fn a_rename_over_a_file_takes_no_file_from_members_that_live() {
    let case = Case {
        setup,
        doing: vec![
            doing(4, true, |fs| {
                let dir = at(fs, "a").map_err(|e| e.to_string())?;
                fs.rename((dir, b"g"), (dir, b"f"), 0).map_err(|e| format!("rename: {e}"))
            }),
            doing(20, false, make_own),
            Doing { after: Some(0), ..doing(1, true, recover) },
            Doing { after: Some(2), ..doing(2, false, recover) },
            Doing { after: Some(2), ..doing(12, false, make_late) },
        ],
        check: |fs, done| {
            late_is_there(fs, done[4])?;
            let f = at(fs, "a/f").map_err(|e| format!("a/f: {e}"))?;
            match at(fs, "a/g") {
                Ok(g) if !done[0] => {
                    is_full_of(fs, f, b'f', LEN)?;
                    is_full_of(fs, g, b'g', 100)?;
                }
                Err(Errno::NOENT) => is_full_of(fs, f, b'g', 100)?,
                other => return Err(format!("a/g: {other:?}")),
            }
            own_is_there(fs)
        },
    };
    case.explore("rename");
}

#[test]
fn the_death_of_who_recovers_a_truncate_gives_no_block_away_twice() {
    let case = Case {
        setup,
        doing: vec![
            doing(4, true, |fs| {
                let h = at(fs, "a/h").map_err(|e| e.to_string())?;
                fs.truncate(h, 5000, false).map_err(|e| format!("truncate: {e}"))
            }),
            doing(20, false, make_own),
            Doing { after: Some(0), ..doing(1, true, recover) },
            Doing { after: Some(2), ..doing(2, false, recover) },
            Doing { after: Some(2), ..doing(12, false, make_late) },
        ],
        check: |fs, done| {
            late_is_there(fs, done[4])?;
            let h = at(fs, "a/h").map_err(|e| format!("a/h: {e}"))?;
            let cut = fs.size(h) == 5000;
            if done[0] && !cut {
                return Err("a/h is not cut".into());
            }
            is_full_of(fs, h, b'h', if cut { 5000 } else { 40_000 }).map_err(|e| format!("a/h: {e}"))?;
            own_is_there(fs)
        },
    };
    case.explore("truncate");
}

/// Gives a/f to user 1000.
fn owned(fs: &Filesystem) {
    setup(fs);
    let owner = tombolo_files::fs::Attr { uid: 1000, ..Default::default() };
    fs.setattr(at(fs, "a/f").expect("a/f"), sys::TFS_SET_UID, &owner).expect("chown");
}

#[test]
fn a_former_owner_gives_a_file_of_root_no_set_id_bit() {
    let case = Case {
        setup: owned,
        doing: vec![
            doing(4, false, |fs| {
                let f = at(fs, "a/f").map_err(|e| e.to_string())?;
                let mode = tombolo_files::fs::Attr { mode: libc::S_IFREG | 0o4755, ..Default::default() };
                for _ in 0..3 {
                    let checked = fs.getattr(f).map_err(|e| e.to_string())?;
                    let done = match checked.uid {
                        1000 => fs.setattr_as(&checked, sys::TFS_SET_MODE, &mode),
                        _ => Ok(()),
                    };
                    if !matches!(done, Ok(()) | Err(Errno::AGAIN)) {
                        return Err(format!("chmod: {done:?}"));
                    }
                }
                Ok(())
            }),
            doing(20, true, |fs| {
                let f = at(fs, "a/f").map_err(|e| e.to_string())?;
                let what = sys::TFS_SET_UID | sys::TFS_KILL_SET_ID;
                fs.setattr(f, what, &Default::default()).map_err(|e| format!("chown: {e}"))
            }),
            Doing { after: Some(1), ..doing(1, false, recover) },
        ],
        check: |fs, done| {
            let f = fs.getattr(at(fs, "a/f").map_err(|e| e.to_string())?).map_err(|e| e.to_string())?;
            if (done[1] && f.uid != 0) || (f.uid == 0 && f.mode & 0o4000 != 0) {
                return Err(format!("user {}, mode {:o}", f.uid, f.mode));
            }
            Ok(())
        },
    };
    case.explore("chown");
}

#[test]
fn a_path_that_means_another_file_by_now_leaves_that_one_as_it_is() {
    let case = Case {
        setup,
        doing: vec![
            doing(4, false, |fs| {
                let Ok(f) = at(fs, "a/f") else { return Ok(()) };
                let attr = tombolo_files::fs::Attr { mode: 0o4777, ..Default::default() };
                for done in [
                    fs.truncate(f, 1, false),
                    fs.setattr(f, sys::TFS_SET_MODE, &attr),
                    fs.xattr_set(f, b"user.x", Some(b"x"), 0, None),
                    fs.pwrite(f, b"x", 0, false).map(|_| ()),
                ] {
                    if !matches!(done, Ok(()) | Err(Errno::STALE)) {
                        return Err(format!("{done:?}"));
                    }
                }
                Ok(())
            }),
            doing(20, false, |fs| {
                let a = at(fs, "a").map_err(|e| e.to_string())?;
                fs.unlink(a, b"f", None).map_err(|e| format!("unlink: {e}"))?;
                make_own(fs)
            }),
        ],
        check: |fs, _| {
            own_is_there(fs)?;
            let own = at(fs, "b/own").map_err(|e| e.to_string())?;
            let attr = fs.getattr(own).map_err(|e| e.to_string())?;
            if attr.mode != REG || attr.has_xattr {
                return Err(format!("mode {:o}, attributes {}", attr.mode, attr.has_xattr));
            }
            Ok(())
        },
    };
    case.explore("handles");
}

#[test]
fn an_open_file_stays_though_another_thread_was_late_for_the_last_one_with_its_number() {
    /// A skin has one reference for each inode: here one thread for the first open, one for later ones.
    fn open_and_close(fs: &Filesystem, first: bool) -> Result<(), String> {
        for _ in 0..3 {
            let Ok(f) = at(fs, "a/f") else { continue };
            if (f.generation == 1) != first {
                continue;
            }
            match fs.open_ref(f) {
                Err(Errno::STALE) => continue,
                done => done.map_err(|e| format!("open: {e}"))?,
            }
            fs.getattr(f).map_err(|e| format!("a file that is open: {e}"))?;
            fs.close_ref(f).map_err(|e| format!("close: {e}"))?;
        }
        Ok(())
    }
    /// Leaves no free record but those that become free.
    fn setup_full(fs: &Filesystem) {
        setup(fs);
        make(fs, "", "full", DIR).expect("mkdir");
        for i in 0.. {
            let file = make(fs, "full", &i.to_string(), REG).expect("create");
            if file.ino == 255 {
                break;
            }
        }
    }
    let case = Case {
        setup: setup_full,
        doing: vec![
            doing(4, false, |fs| open_and_close(fs, true)),
            doing(4, false, |fs| open_and_close(fs, false)),
            doing(20, false, |fs| {
                let a = at(fs, "a").map_err(|e| e.to_string())?;
                for _ in 0..2 {
                    fs.unlink(a, b"f", None).map_err(|e| format!("unlink: {e}"))?;
                    make(fs, "a", "f", REG)?;
                }
                Ok(())
            }),
            doing(1, true, |fs| open_and_close(fs, true)),
        ],
        check: |_, _| Ok(()),
    };
    case.explore("references");
}

#[test]
fn a_reader_without_a_pin_reads_attributes_whole() {
    let case = Case {
        setup,
        doing: vec![
            Doing {
                read_only: true,
                ..doing(4, false, |fs| {
                    let g = at(fs, "a/g").map_err(|e| e.to_string())?;
                    for _ in 0..2 {
                        let value = fs.xattr_get(g, b"user.a").map_err(|e| format!("get: {e}"))?;
                        let (first, len) = (value[0], value.len());
                        if ![(1, 6000), (2, 6000)].contains(&(first, len))
                            || value.iter().any(|b| *b != first)
                        {
                            return Err(format!("{len} bytes, the first {first}"));
                        }
                    }
                    Ok(())
                })
            },
            doing(20, true, |fs| {
                let g = at(fs, "a/g").map_err(|e| e.to_string())?;
                fs.xattr_set(g, b"user.a", Some(&[2; 6000]), 0, None).map_err(|e| format!("set: {e}"))
            }),
            doing(12, false, make_own),
        ],
        check: |_, _| Ok(()),
    };
    case.explore("attributes");
}

#[test]
fn names_made_and_removed_in_one_directory_are_those_that_were_told() {
    let case = Case {
        setup,
        doing: vec![
            doing(4, true, |fs| {
                make(fs, "a", "new", REG)?;
                let a = at(fs, "a").map_err(|e| e.to_string())?;
                fs.rename((a, b"new"), (a, b"moved"), 0).map_err(|e| format!("rename: {e}"))
            }),
            doing(20, true, |fs| {
                let a = at(fs, "a").map_err(|e| e.to_string())?;
                fs.unlink(a, b"g", None).map_err(|e| format!("unlink: {e}"))?;
                make(fs, "a", "other", DIR).map(|_| ())
            }),
            Doing {
                read_only: false,
                ..doing(5, false, |fs| {
                    let a = at(fs, "a").map_err(|e| e.to_string())?;
                    let names = fs.list(a).map_err(|e| format!("list: {e}"))?;
                    if !names.iter().any(|entry| entry.name == b"f") {
                        return Err("f is not listed".into());
                    }
                    let f = at(fs, "a/f").map_err(|e| format!("a/f: {e}"))?;
                    is_full_of(fs, f, b'f', LEN)
                })
            },
            Doing { after: Some(0), ..doing(1, true, recover) },
            Doing { after: Some(1), ..doing(2, true, recover) },
        ],
        check: |fs, done| {
            if done[0] && (at(fs, "a/moved").is_err() || at(fs, "a/new").is_ok()) {
                return Err("a/moved is not there, or a/new is".into());
            }
            if done[1] && (at(fs, "a/other").is_err() || at(fs, "a/g").is_ok()) {
                return Err("a/other is not there, or a/g is".into());
            }
            at(fs, "a/f").map(|_| ()).map_err(|e| format!("a/f: {e}"))
        },
    };
    case.explore("names");
}

/// Returns whether a reader without an open file may get this error for a name that is removed meanwhile.
fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::STALE)
}

#[test]
fn names_without_a_pin_are_read_whole_or_not_at_all() {
    const TARGET: &[u8] = &[b'l'; 40];
    fn setup_names(fs: &Filesystem) {
        let link = Create { target: Some(TARGET), ..Create::mode(libc::S_IFLNK | 0o777) };
        fs.create(ROOT, Some(b"link"), &link).expect("symlink");
        make(fs, "", "d", DIR).expect("mkdir");
        make(fs, "d", "gone", REG).expect("create");
        fs.unlink(at(fs, "d").expect("d"), b"gone", None).expect("unlink");
    }
    fn read_names(fs: &Filesystem) -> Result<(), String> {
        match at(fs, "link").and_then(|link| fs.readlink(link)) {
            Ok(target) if target == TARGET => {}
            Err(e) if is_gone(e) => {}
            other => return Err(format!("readlink: {other:?}")),
        }
        let listed = at(fs, "d").and_then(|d| {
            let missing = fs.lookup(d, b"x").map(|_| ()).expect_err("it has no such name");
            if !is_gone(missing) {
                return Err(missing);
            }
            fs.list(d)
        });
        match listed {
            Ok(names) if names.is_empty() => Ok(()),
            Err(e) if is_gone(e) => Ok(()),
            other => Err(format!("list: {other:?}")),
        }
    }
    let case = Case {
        setup: setup_names,
        doing: vec![
            doing(4, false, read_names),
            Doing { read_only: true, ..doing(28, false, read_names) },
            doing(20, true, |fs| {
                fs.unlink(ROOT, b"link", None).map_err(|e| format!("unlink: {e}"))?;
                fs.rmdir(ROOT, b"d", None).map_err(|e| format!("rmdir: {e}"))
            }),
            doing(12, false, |fs| {
                let other = make(fs, "", "other", REG)?;
                put(fs, other, b'o', LEN)?;
                is_full_of(fs, other, b'o', LEN)
            }),
            // A read-only member waits for a dead member's change until another member has recovered it.
            Doing { after: Some(2), ..doing(1, false, recover) },
        ],
        check: |fs, _| is_full_of(fs, at(fs, "other").map_err(|e| e.to_string())?, b'o', LEN),
    };
    case.explore("unpinned names");
}

fn setup_data(fs: &Filesystem) {
    make(fs, "", "b", DIR).expect("mkdir");
    let h = make(fs, "", "h", REG).expect("create");
    put(fs, h, b'h', 40_000).expect("write");
}

#[test]
fn data_that_is_removed_is_read_whole_or_not_at_all_and_is_no_damage() {
    fn read_and_seek(fs: &Filesystem) -> Result<(), String> {
        let Ok(h) = at(fs, "h") else { return Ok(()) };
        let mut bytes = [0; 20_000];
        match fs.pread(h, &mut bytes, 9000) {
            Ok(len) if bytes[..len].iter().all(|b| *b == b'h') => {}
            Err(e) if is_gone(e) => return Ok(()),
            other => return Err(format!("read: {other:?}")),
        }
        match fs.seek(h, 0, true) {
            Ok(0..=40_000) | Err(Errno::NXIO) => Ok(()),
            Err(e) if is_gone(e) => Ok(()),
            other => Err(format!("seek: {other:?}")),
        }
    }
    let case = Case {
        setup: setup_data,
        doing: vec![
            doing(4, false, |fs| {
                let Ok(h) = at(fs, "h") else { return Ok(()) };
                if fs.open_ref(h).is_err() {
                    return Ok(());
                }
                read_and_seek(fs)?;
                fs.close_ref(h).map_err(|e| format!("close: {e}"))
            }),
            Doing { read_only: true, ..doing(28, false, read_and_seek) },
            doing(20, true, |fs| {
                let h = at(fs, "h").map_err(|e| e.to_string())?;
                fs.truncate(h, 9000, false).map_err(|e| format!("truncate: {e}"))?;
                fs.unlink(ROOT, b"h", None).map_err(|e| format!("unlink: {e}"))
            }),
            doing(12, false, make_own),
            Doing { after: Some(2), ..doing(1, false, recover) },
        ],
        check: |fs, _| own_is_there(fs),
    };
    case.explore("unpinned data");
}

#[test]
fn a_reader_without_a_pin_reads_no_other_file_where_a_hole_was_punched() {
    let case = Case {
        setup: setup_data,
        doing: vec![
            Doing {
                read_only: true,
                ..doing(28, false, |fs| {
                    let h = at(fs, "h").map_err(|e| e.to_string())?;
                    let mut bytes = [1; 20_000];
                    // The file keeps its size, so only the stamp tells that its blocks have gone.
                    match fs.pread(h, &mut bytes, 9000) {
                        Ok(20_000) if bytes.iter().all(|b| [b'h', 0].contains(b)) => Ok(()),
                        other => Err(format!("read: {other:?}, {}", bytes.contains(&b'o'))),
                    }
                })
            },
            doing(20, false, |fs| {
                let h = at(fs, "h").map_err(|e| e.to_string())?;
                let punch = sys::TFS_FALLOC_PUNCH | sys::TFS_FALLOC_KEEP_SIZE;
                fs.fallocate(h, punch, 8192, 24_576).map_err(|e| format!("punch: {e}"))
            }),
            doing(12, false, make_own),
        ],
        check: |fs, _| own_is_there(fs),
    };
    case.explore("punched data");
}

#[test]
fn directories_that_are_moved_into_each_other_form_no_circle() {
    fn setup_directories(fs: &Filesystem) {
        for (dir, name) in [("", "p"), ("", "q"), ("p", "x"), ("q", "y")] {
            make(fs, dir, name, DIR).expect("mkdir");
        }
    }
    fn move_into(fs: &Filesystem, from: (&str, &str), to: (&str, &str)) -> Result<(), String> {
        let (Ok(old), Ok(new)) = (at(fs, from.0), at(fs, to.0)) else { return Ok(()) };
        match fs.rename((old, from.1.as_bytes()), (new, to.1.as_bytes()), 0) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
            Err(e) => Err(format!("{from:?} to {to:?}: {e}")),
        }
    }
    /// A directory is found where its parent says that it is, and one name leads to each.
    fn count(fs: &Filesystem, dir: Handle) -> Result<usize, String> {
        let mut n = 0;
        for entry in fs.list(dir).map_err(|e| format!("list: {e}"))? {
            let (found, _) = fs.lookup(dir, &entry.name).map_err(|e| format!("a listed name: {e}"))?;
            let parent = fs.parent(found).map_err(|e| format!("parent: {e}"))?;
            if parent != dir.ino {
                return Err(format!("inode {} in {} has the parent {parent}", found.ino, dir.ino));
            }
            n += 1 + count(fs, found)?;
        }
        Ok(n)
    }
    let case = Case {
        setup: setup_directories,
        doing: vec![
            doing(4, true, |fs| move_into(fs, ("", "p"), ("q/y", "p"))),
            doing(20, true, |fs| move_into(fs, ("", "q"), ("p/x", "q"))),
            doing(5, false, |fs| move_into(fs, ("p", "x"), ("", "x"))),
            Doing { after: Some(0), ..doing(1, true, recover) },
            Doing { after: Some(1), ..doing(2, false, recover) },
        ],
        check: |fs, _| match count(fs, ROOT.into())? {
            4 => Ok(()),
            n => Err(format!("{n} directories can be reached")),
        },
    };
    case.explore("moved directories");
}

#[test]
fn a_file_with_two_names_has_as_many_links_as_names_whoever_dies() {
    let case = Case {
        setup: |fs| {
            setup(fs);
            fs.link(at(fs, "b").expect("b"), b"second", at(fs, "a/f").expect("a/f")).expect("link");
        },
        doing: vec![
            doing(4, true, |fs| {
                let (a, b) =
                    (at(fs, "a").map_err(|e| e.to_string())?, at(fs, "b").map_err(|e| e.to_string())?);
                match fs.rename((a, b"g"), (b, b"second"), sys::TFS_RENAME_EXCHANGE) {
                    Ok(()) | Err(Errno::NOENT) => Ok(()),
                    Err(e) => Err(format!("exchange: {e}")),
                }
            }),
            doing(20, true, |fs| {
                let a = at(fs, "a").map_err(|e| e.to_string())?;
                fs.unlink(a, b"f", None).map_err(|e| format!("unlink: {e}"))
            }),
            doing(5, true, |fs| {
                let b = at(fs, "b").map_err(|e| e.to_string())?;
                let Ok(f) = at(fs, "a/f") else { return Ok(()) };
                match fs.link(b, b"third", f) {
                    Ok(()) | Err(Errno::NOENT) => Ok(()),
                    Err(e) => Err(format!("link: {e}")),
                }
            }),
            doing(12, false, make_own),
            Doing { after: Some(0), ..doing(1, true, recover) },
            Doing { after: Some(1), ..doing(2, false, recover) },
        ],
        check: |fs, _| {
            own_is_there(fs)?;
            let names = ["a/f", "a/g", "b/second", "b/third"].map(|path| at(fs, path).ok());
            for file in names.iter().flatten() {
                let attr = fs.getattr(*file).map_err(|e| format!("attributes: {e}"))?;
                let n = names.iter().flatten().filter(|other| other.ino == file.ino).count();
                if attr.nlink as usize != n {
                    return Err(format!("{n} names and {} links: {names:?}", attr.nlink));
                }
                let (byte, len) = if attr.has_xattr { (b'g', 100) } else { (b'f', LEN) };
                is_full_of(fs, *file, byte, len)?;
            }
            let different = |i: usize| names[i].map(|file| file.ino);
            match (different(1), different(2)) {
                (Some(g), Some(second)) if g != second => Ok(()),
                _ => Err(format!("a file has no name: {names:?}")),
            }
        },
    };
    case.explore("links");
}

#[test]
fn a_death_amid_several_operations_of_a_member_leaves_each_done_or_not_begun() {
    let case = Case {
        setup,
        doing: vec![
            doing(4, true, |fs| {
                let a = at(fs, "a").map_err(|e| e.to_string())?;
                fs.unlink(a, b"f", None).map_err(|e| format!("unlink: {e}"))
            }),
            doing(4, true, |fs| {
                let h = at(fs, "a/h").map_err(|e| e.to_string())?;
                fs.truncate(h, 5000, false).map_err(|e| format!("truncate: {e}"))?;
                fs.append(h, &[b'h'; 9000], false).map(|_| ()).map_err(|e| format!("append: {e}"))
            }),
            doing(4, true, |fs| {
                let (a, b) = (at(fs, "a"), at(fs, "b"));
                let (a, b) = (a.map_err(|e| e.to_string())?, b.map_err(|e| e.to_string())?);
                make(fs, "a", "new", REG)?;
                fs.rename((a, b"g"), (b, b"g"), 0).map_err(|e| format!("rename: {e}"))
            }),
            doing(20, false, make_own),
            Doing { after: Some(0), ..doing(1, true, recover) },
            Doing { after: Some(4), ..doing(2, false, recover) },
            Doing { after: Some(4), ..doing(12, false, make_late) },
        ],
        check: |fs, done| {
            late_is_there(fs, done[6])?;
            own_is_there(fs)?;
            if done[0] && at(fs, "a/f") != Err(Errno::NOENT) {
                return Err("a/f is still there".into());
            }
            let h = at(fs, "a/h").map_err(|e| format!("a/h: {e}"))?;
            let size = fs.size(h);
            if (done[1] && size != 14_000) || ![5000, 14_000, 40_000].contains(&size) {
                return Err(format!("a/h has {size} bytes"));
            }
            is_full_of(fs, h, b'h', size as usize).map_err(|e| format!("a/h: {e}"))?;
            match (at(fs, "a/g"), at(fs, "b/g")) {
                (Ok(g), Err(Errno::NOENT)) if !done[2] => is_full_of(fs, g, b'g', 100),
                (Err(Errno::NOENT), Ok(g)) => is_full_of(fs, g, b'g', 100),
                other => Err(format!("a/g and b/g: {other:?}")),
            }
        },
    };
    case.explore("several operations");
}

#[test]
fn what_is_appended_beside_a_truncation_is_there_whole_or_cut_where_that_cuts() {
    const PIECE: usize = 5000;
    let case = Case {
        setup: |fs| {
            setup(fs);
            make(fs, "", "log", REG).expect("create");
        },
        doing: vec![
            doing(4, false, |fs| {
                let log = at(fs, "log").map_err(|e| e.to_string())?;
                for _ in 0..2 {
                    let (_, place) =
                        fs.append(log, &[4; PIECE], false).map_err(|e| format!("append: {e}"))?;
                    if place % PIECE as u64 != 0 {
                        return Err(format!("appended at {place}"));
                    }
                }
                Ok(())
            }),
            doing(5, true, |fs| {
                let log = at(fs, "log").map_err(|e| e.to_string())?;
                fs.append(log, &[5; PIECE], false).map(|_| ()).map_err(|e| format!("append: {e}"))
            }),
            doing(20, true, |fs| {
                let log = at(fs, "log").map_err(|e| e.to_string())?;
                fs.truncate(log, 0, false).map_err(|e| format!("truncate: {e}"))
            }),
            doing(12, false, make_own),
            Doing { after: Some(1), ..doing(1, true, recover) },
            Doing { after: Some(2), ..doing(2, false, recover) },
        ],
        check: |fs, _| {
            own_is_there(fs)?;
            let log = at(fs, "log").map_err(|e| format!("log: {e}"))?;
            let mut bytes = vec![0; 4 * PIECE];
            let n = fs.pread(log, &mut bytes, 0).map_err(|e| format!("read: {e}"))?;
            let pieces: Vec<u8> = bytes[..n].chunks(PIECE).map(|piece| piece[0]).collect();
            let whole = n % PIECE == 0 && bytes[..n].chunks(PIECE).all(|p| p.iter().all(|b| *b == p[0]));
            let most = |byte: u8, most| pieces.iter().filter(|b| **b == byte).count() <= most;
            if !whole || !most(4, 2) || !most(5, 1) || pieces.iter().any(|b| ![4, 5].contains(b)) {
                return Err(format!("{n} bytes, pieces {pieces:?}"));
            }
            Ok(())
        },
    };
    case.explore("appends");
}

#[test]
fn a_range_has_one_locker_at_a_time_whatever_becomes_of_its_file_and_of_other_lockers() {
    std::thread_local! {
        static HOLDER: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }
    fn range(owner: u64, type_: u32) -> FileLock {
        FileLock { owner, start: 10, end: 20, type_, kind: sys::TFS_LK_POSIX, ..FileLock::default() }
    }
    fn lock(fs: &Filesystem, owner: u64, living: bool) -> Result<(), String> {
        let Ok(g) = at(fs, "a/g") else { return Ok(()) };
        if fs.open_ref(g).is_err() {
            return Ok(());
        }
        for _ in 0..3 {
            match fs.set_lock(g, &range(owner, sys::TFS_LK_WRITE)) {
                Ok(()) => {}
                Err(Errno::AGAIN) => continue,
                Err(e) => return Err(format!("lock: {e}")),
            }
            if living {
                let other = HOLDER.replace(owner);
                if other != 0 {
                    return Err(format!("{owner} has the lock that {other} has"));
                }
            }
            let found =
                fs.get_lock(g, &range(owner + 100, sys::TFS_LK_WRITE)).map_err(|e| format!("test: {e}"))?;
            if found.owner != owner {
                return Err(format!("the lock of {owner} is named as that of {}", found.owner));
            }
            if living {
                HOLDER.set(0);
            }
            fs.set_lock(g, &range(owner, sys::TFS_LK_UNLOCK)).map_err(|e| format!("unlock: {e}"))?;
        }
        fs.close_ref(g).map_err(|e| format!("close: {e}"))
    }
    let case = Case {
        setup,
        doing: vec![
            doing(4, false, |fs| {
                HOLDER.set(0);
                lock(fs, 1, true)
            }),
            doing(20, false, |fs| lock(fs, 2, true)),
            doing(12, true, |fs| lock(fs, 3, false)),
            doing(5, true, |fs| {
                let a = at(fs, "a").map_err(|e| e.to_string())?;
                let g = at(fs, "a/g").map_err(|e| e.to_string())?;
                fs.append(g, &[1; 100], false).map_err(|e| format!("append: {e}"))?;
                fs.unlink(a, b"g", None).map_err(|e| format!("unlink: {e}"))
            }),
            Doing { after: Some(2), ..doing(1, false, recover) },
        ],
        check: |_, _| Ok(()),
    };
    case.explore("file locks");
}
