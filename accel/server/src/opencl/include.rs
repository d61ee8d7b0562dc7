// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files that a client's kernels include, in folders of the worker's scratch where the compiler finds them.
//!
//! The same files always lie in the same place, named by what they contain, so that a driver which keeps compiled kernels by their
//! options knows them again. They stay until the worker ends; a client's kernels could write there anyway.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Component, Path, PathBuf};
use tombolo_accel_spec::opencl::cl;
use tombolo_calls::say;

/// A name may lead out of its folder this often (`../../common.h`): so deep below the files' place a folder lies.
const DEPTH: usize = 8;
/// Folders at most; options with more of them than that are no program's.
const FOLDERS: u32 = 256;

/// The path of folder `i` in `place`.
fn folder(place: &Path, i: u32) -> PathBuf {
    place.join(i.to_string()).join("d/".repeat(DEPTH))
}

/// A relative name with at most [`DEPTH`] times `..`, all of them in front.
fn name(bytes: &[u8]) -> Result<&Path, i32> {
    let name = Path::new(std::str::from_utf8(bytes).map_err(|_| cl::INVALID_VALUE)?);
    let out = name.components().take_while(|c| *c == Component::ParentDir).count();
    let inside = name.components().skip(out).all(|c| matches!(c, Component::Normal(_)));
    if out > DEPTH || !inside || name.file_name().is_none() || bytes.contains(&0) {
        Err(cl::INVALID_VALUE)
    } else {
        Ok(name)
    }
}

fn write(place: &Path, last: u32, files: &[(u32, &Path, &[u8])]) -> io::Result<()> {
    // All of them, also those without files: a name leads out of folders that exist.
    (0..=last).try_for_each(|i| std::fs::create_dir_all(folder(place, i)))?;
    for (i, name, text) in files {
        let path = folder(place, *i).join(name);
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::write(path, text)?;
    }
    Ok(())
}

/// Writes them beside their place, into a folder that no other worker can have left there, and then moves that.
fn made(all: &Path, place: &Path, last: u32, files: &[(u32, &Path, &[u8])]) -> io::Result<()> {
    std::fs::create_dir_all(all)?;
    let fresh = tempfile::tempdir_in(all)?;
    write(fresh.path(), last, files)?;
    std::fs::rename(fresh.path(), place)
}

/// Puts files where they can be included from; the options that say so, with a blank at their end.
pub fn keep(scratch: &Path, folders: &[u32], names: &[&[u8]], texts: &[&[u8]]) -> Result<String, i32> {
    let Some(last) = folders.iter().copied().max() else { return Ok(String::new()) };
    if folders.len() != names.len() || names.len() != texts.len() || last >= FOLDERS {
        return Err(cl::INVALID_VALUE);
    }
    let mut files = Vec::with_capacity(names.len());
    for ((i, bytes), text) in folders.iter().zip(names).zip(texts) {
        files.push((*i, name(bytes)?, *text));
    }
    let mut hash = DefaultHasher::new();
    files.hash(&mut hash);
    let all = scratch.join("tombolo-include");
    let place = all.join(format!("{:016x}", hash.finish()));
    if !place.is_dir() {
        // Another thread, or worker, may be doing the same: the first has done it for both.
        let made = made(&all, &place, last, &files);
        if let Some(e) = made.err().filter(|_| !place.is_dir()) {
            say!("tombolo accel: included files: {}: {e}", place.display());
            return Err(cl::OUT_OF_RESOURCES);
        }
    }
    Ok((0..=last).map(|i| format!("-I{} ", folder(&place, i).display())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_reaches_outside_the_place_of_included_files() {
        let out = format!("{}x", "../".repeat(DEPTH + 1));
        for bad in ["/etc/passwd", "a/../../b", "a/..", "..", "", "./../x", "a\0b", out.as_str()] {
            assert_eq!(name(bad.as_bytes()), Err(cl::INVALID_VALUE), "{bad}");
        }
        for good in ["a.h", "a/b.h", "../a.h", "../../a/b.h"] {
            assert_eq!(name(good.as_bytes()), Ok(Path::new(good)), "{good}");
        }
    }

    #[test]
    fn the_same_files_lie_in_the_same_place_and_others_elsewhere() {
        let scratch = std::env::temp_dir().join(format!("tombolo-keep-{}", std::process::id()));
        let names: [&[u8]; 2] = [b"a.h", b"../b.h"];
        let first = keep(&scratch, &[0, 1], &names, &[b"A", b"B"]).expect("kept");
        assert_eq!(keep(&scratch, &[0, 1], &names, &[b"A", b"B"]).expect("kept"), first);
        assert_ne!(keep(&scratch, &[0, 1], &names, &[b"A", b"C"]).expect("kept"), first);
        let at: Vec<&str> = first.split_whitespace().map(|o| &o[2..]).collect();
        assert_eq!(std::fs::read(Path::new(at[0]).join("a.h")).expect("there"), b"A");
        assert_eq!(std::fs::read(Path::new(at[1]).join("../b.h")).expect("there"), b"B");
        assert_eq!(keep(&scratch, &[], &[], &[]), Ok(String::new()));
        assert_eq!(keep(&scratch, &[0], &names, &[b"A"]), Err(cl::INVALID_VALUE));
        std::fs::remove_dir_all(&scratch).expect("removed");
    }
}
