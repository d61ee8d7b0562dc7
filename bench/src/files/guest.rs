// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the guests are given: programs of this folder's `guest/`, and a source tree to unpack.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Makes a static program of `guest/NAME.c`.
pub fn build_tool(name: &str, into: &Path) -> Result<()> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest").join(format!("{name}.c"));
    let status = Command::new("cc")
        .args(["-O2", "-static", "-o"])
        .arg(into.join(name))
        .arg(&source)
        .status()
        .context("can't run cc (package gcc)")?;
    ensure!(status.success(), "can't compile {}", source.display());
    Ok(())
}

/// Copies `program` with its libraries, all but those of the C library, which guests have: to `into/NAME` and `into/lib`.
pub fn copy_with_libraries(program: &Path, into: &Path) -> Result<()> {
    let copy = |from: &Path, to: &Path| {
        let name = from.file_name().context("a program without a name")?;
        fs::create_dir_all(to)?;
        fs::copy(from, to.join(name)).with_context(|| format!("can't copy {}", from.display()))?;
        anyhow::Ok(())
    };
    copy(program, into)?;
    let output = Command::new("ldd").arg(program).output().context("can't run ldd")?;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        // NAME => PATH (address)
        let Some(library) = line.split_whitespace().nth(2).filter(|path| path.starts_with('/')) else {
            continue;
        };
        if !library.ends_with("/libc.so.6") {
            copy(Path::new(library), &into.join("lib"))?;
        }
    }
    Ok(())
}

fn git(dir: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
    // The checkout may be another user's, and no configuration of the user's may change what is measured.
    let output = Command::new("git")
        .args(["-c", "safe.directory=*", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-C"])
        .arg(dir)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("can't run git")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "git {} in {}: {said}", arguments.join(" "), dir.display());
    Ok(output.stdout)
}

/// Files of the source tree: over 9p each takes a tenth of a second under emulation.
pub const TREE_FILES: usize = 300;

/// The first `most` tracked files of the checkout `root` as a new git repository with one commit, in the tar file `to`; `work` is an empty place for
/// it. Returns the number of files. The tree depends on nothing else that lies in the checkout.
pub fn pack_tree(root: &Path, most: usize, work: &Path, to: &Path) -> Result<usize> {
    let tracked = git(root, &["ls-files", "-z"])?;
    let mut count = 0;
    for name in tracked.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if count == most {
            break;
        }
        let name = std::str::from_utf8(name).context("a tracked file's name is not UTF-8")?;
        // One that is deleted in the checkout is not there; links and submodules stay out.
        let file = root.join(name);
        if !file.symlink_metadata().is_ok_and(|meta| meta.is_file()) {
            continue;
        }
        let copy = work.join(name);
        fs::create_dir_all(copy.parent().unwrap_or(work))?;
        fs::copy(&file, &copy).with_context(|| format!("can't copy {}", file.display()))?;
        count += 1;
    }
    git(work, &["init", "-q"])?;
    // Tracked files are wanted also where a pattern of .gitignore names them.
    git(work, &["add", "-A", "-f"])?;
    git(work, &["commit", "-q", "-m", "tree"])?;
    git(work, &["repack", "-adq"])?;
    git(work, &["prune"])?;
    let status = Command::new("tar").arg("-cf").arg(to).arg("-C").arg(work).arg(".").status();
    ensure!(status.context("can't run tar")?.success(), "can't pack {}", work.display());
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_what_the_checkout_tracks_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (root, work, tar) =
            (dir.path().join("root"), dir.path().join("work"), dir.path().join("tree.tar"));
        fs::create_dir_all(root.join("folder")).unwrap();
        fs::create_dir(&work).unwrap();
        for (name, text) in [("folder/kept", "1"), ("gone", "2"), (".gitignore", "folder\n"), ("later", "4")]
        {
            fs::write(root.join(name), text).unwrap();
        }
        git(&root, &["init", "-q"]).unwrap();
        git(&root, &["add", "-A", "-f"]).unwrap();
        fs::remove_file(root.join("gone")).unwrap();
        fs::write(root.join("untracked"), "3").unwrap();
        assert_eq!(pack_tree(&root, 2, &work, &tar).unwrap(), 2);
        let listed = Command::new("tar").arg("-tf").arg(&tar).output().unwrap();
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        assert!(listed.contains("./folder/kept\n") && listed.contains("./.git/HEAD\n"), "{listed}");
        assert!(!["untracked", "gone", "later"].iter().any(|name| listed.contains(name)), "{listed}");
        assert!(git(&work, &["status", "--porcelain"]).unwrap().is_empty(), "the tree is clean");
    }

    #[test]
    fn a_change_is_seen_by_the_first_look_after_it() {
        let dir = tempfile::tempdir().unwrap();
        build_tool("coherence", dir.path()).unwrap();
        let run = |words: &[&str]| {
            let mut command = Command::new(dir.path().join("coherence"));
            command.args(words).stdout(Stdio::piped());
            command.spawn().unwrap()
        };
        let path = |name: &str| dir.path().join(name).display().to_string();
        let (files, flag) = (path("files"), path("flag"));
        assert!(run(&["make", &files]).wait().unwrap().success());
        let looker = run(&["look", &files, &flag, "30"]);
        assert!(run(&["change", &files, &flag]).wait().unwrap().success());
        let said = looker.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stdout), "read 0.000\nopen 0.000\nname 0.000\ngone 0.000\n");
        // Nobody changes it: the flag stands from the first time, the files are made anew.
        let again = path("again");
        assert!(run(&["make", &again]).wait().unwrap().success());
        fs::remove_file(path("flag.looked")).unwrap();
        let said = run(&["look", &again, &flag, "0.05"]).wait_with_output().unwrap();
        assert_eq!(
            String::from_utf8_lossy(&said.stdout),
            "read 0.050 unseen\nopen 0.050 unseen\nname 0.050 unseen\ngone 0.050 unseen\n"
        );
    }
}
