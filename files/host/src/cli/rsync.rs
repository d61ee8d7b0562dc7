// SPDX-License-Identifier: Apache-2.0 OR MIT
//! rsync as the copier of `import` and `export`, in a sandbox (bubblewrap). One side of a copy belongs to guests, which may put a link in the place of any
//! directory while rsync runs, so it runs where a link can't lead to anything else of the host: its root has `/zone`, `/folder` (read-only if it is the
//! source) and the system's programs, read-only, and nothing more.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use super::Meter;
use crate::log;
use crate::shown::shown;

/// Programs of the sandbox, and the packages that have them.
const PROGRAMS: [(&str, &str); 2] = [("/usr/bin/rsync", "rsync"), ("/usr/bin/bwrap", "bubblewrap")];
/// Begins the lines of `--out-format`.
const ITEM: &str = "=";
/// Characters of a line about one entry.
const LONGEST_LINE: usize = 200;
/// rsync(1), EXIT VALUES: entries failed; source files have vanished meanwhile.
const PARTIAL: i32 = 23;
const VANISHED: i32 = 24;

/// What a copy did.
#[derive(Debug, Default, serde::Serialize)]
pub(super) struct Done {
    /// Entries that were made or replaced.
    pub copied: u64,
    /// Bytes of the files among them.
    pub bytes: u64,
    /// Entries that were equal before, or differed in attributes alone.
    pub same: u64,
    /// Entries that only the target had.
    pub removed: u64,
    pub devices_left_out: u64,
    /// Entries, or parts of them, that could not be copied or removed.
    pub failed: u64,
}

/// A copy between a folder of the host and a directory of a zone.
pub(super) struct Job<'a> {
    /// Where the zone is mounted.
    pub mount: &'a Path,
    /// The directory in the zone.
    pub inside: &'a Path,
    pub folder: &'a Path,
    /// From the zone to the folder.
    pub export: bool,
    pub delete: bool,
    /// Set-id bits of files, capabilities and other attributes of security modules are copied.
    pub suid: bool,
    pub devices: bool,
}

/// Fails if a program is missing.
pub(super) fn check_programs() -> anyhow::Result<()> {
    match PROGRAMS.iter().find(|(program, _)| !Path::new(program).exists()) {
        Some((program, package)) => {
            bail!("{program} is missing, which copies folders; apt install {package}")
        }
        None => Ok(()),
    }
}

impl Job<'_> {
    /// Copies what differs and goes on where an entry fails, which it prints.
    pub fn run(&self, json: bool) -> anyhow::Result<Done> {
        let mut child = self.command()?.spawn().context("starting bwrap")?;
        let (out, errors) = (child.stdout.take(), child.stderr.take());
        let mut done = std::thread::scope(|threads| {
            let failed = threads.spawn(|| errors.map_or(Ok(0), print_errors));
            let done = out.map_or(Ok(Done::default()), |out| read_items(out, &mut Meter::new(json)));
            let failed = failed.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))?;
            done.map(|done| Done { failed: done.failed + failed, ..done })
        })?;
        match child.wait().context("waiting for rsync")?.code() {
            Some(0 | VANISHED) => {}
            Some(PARTIAL) => done.failed = done.failed.max(1),
            Some(code) => {
                bail!("the copy is not complete: rsync ended with code {code} (see the lines above)")
            }
            None => bail!("the copy is not complete: rsync was killed"),
        }
        Ok(done)
    }

    fn command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(PROGRAMS[1].0);
        command.args(["--unshare-pid", "--die-with-parent", "--ro-bind", "/usr", "/usr"]);
        // For ordinary users, bwrap makes a user namespace, in which capabilities reach nothing but the sandbox itself.
        command.args(["--cap-add", "ALL"]);
        for folder in ["bin", "lib", "lib64"] {
            command.args(["--symlink", &format!("usr/{folder}"), &format!("/{folder}")]);
        }
        command.args(["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]);
        command.arg("--bind").arg(self.mount).arg("/zone");
        command.arg(if self.export { "--bind" } else { "--ro-bind" }).arg(self.folder).arg("/folder");
        command.args(["--remount-ro", "/", "--chdir", "/", "--clearenv", "--setenv", "LC_ALL", "C.UTF-8"]);
        command.arg(PROGRAMS[0].0).args(self.options()?);
        let inside = PathBuf::from("/zone").join(self.inside).join("");
        let [from, to] =
            if self.export { [&*inside, Path::new("/folder/")] } else { [Path::new("/folder/"), &*inside] };
        command.arg(from).arg(to);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }

    fn options(&self) -> anyhow::Result<Vec<String>> {
        let mut options: Vec<String> = [
            "--recursive --links --perms --times --specials --hard-links --acls --xattrs --sparse --numeric-ids",
            // Times are compared by nanoseconds. A folder makes room for a file of its name.
            "--modify-window=-1 --force",
            "--no-human-readable --8-bit-output --outbuf=Line --info=nonreg1,skip1,stats2 --out-format==%i:%l",
        ]
        .iter()
        .flat_map(|line| line.split(' ').map(str::to_owned))
        .collect();
        let mut add = |option: &str| options.push(option.to_owned());
        if rustix::process::geteuid().is_root() {
            add("--owner");
            add("--group");
            // ACLs are --acls' part. Labels of the host's own security module have no meaning elsewhere.
            add("--filter=-x system.*");
            add(if self.suid { "--filter=-x security.selinux" } else { "--filter=-x security.*" });
        }
        if self.devices {
            add("--devices");
        }
        if self.delete {
            add("--delete");
        }
        if !self.suid {
            add("--chmod=Fug-s");
        }
        if self.export {
            // Should the host fail, no file has its size without its data.
            add("--fsync");
            // rsync reads holes: a guest's sparse file of terabytes would hold up all others.
            let zone = rustix::fs::statvfs(self.mount).context("the size of the zone")?;
            options.push(format!("--max-size={}", zone.f_blocks.saturating_mul(zone.f_frsize)));
        }
        Ok(options)
    }
}

/// Reads rsync's list of what it did.
fn read_items(out: impl Read, meter: &mut Meter) -> anyhow::Result<Done> {
    let mut done = Done::default();
    each_line(out, |line| {
        if let Some(file) = line.strip_suffix(" is over max-size") {
            done.failed += 1;
            fail(&format!(
                "{file}: sparse, and larger than the zone: cp --sparse=always copies it from a mount"
            ));
        } else if line.starts_with("skipping non-regular file ") {
            done.devices_left_out += 1;
        } else if let Some(total) = line.strip_prefix("Number of files: ") {
            let total = total.split(' ').next().and_then(|total| total.parse().ok()).unwrap_or(0);
            done.same = u64::saturating_sub(total, done.copied + done.devices_left_out + done.failed);
        } else if let Some((what, length)) = line.strip_prefix(ITEM).and_then(|item| item.split_once(':')) {
            match what.as_bytes().first() {
                Some(b'*') => done.removed += 1,
                Some(b'>' | b'c' | b'h') => {
                    done.copied += 1;
                    done.bytes += if what.starts_with('>') { length.parse().unwrap_or(0) } else { 0 };
                    meter.count("copied", done.copied);
                }
                _ => {}
            }
        }
    })?;
    Ok(done)
}

/// Prints what failed, a short line for each; returns how many.
fn print_errors(errors: impl Read) -> anyhow::Result<u64> {
    let mut failed = 0;
    each_line(errors, |line| {
        // A file that the source no longer has is left out. The last line repeats the exit code.
        if line.is_empty()
            || line.starts_with("file has vanished: ")
            || line.starts_with("rsync error: ")
            || line.starts_with("rsync warning: ")
        {
            return;
        }
        failed += 1;
        fail(line.strip_prefix("rsync: ").unwrap_or(line));
    })?;
    Ok(failed)
}

fn each_line(from: impl Read, mut take: impl FnMut(&str)) -> anyhow::Result<()> {
    for line in BufReader::new(from).split(b'\n') {
        take(&String::from_utf8_lossy(&line.context("reading from rsync")?));
    }
    Ok(())
}

/// Prints a line about an entry. A guest chose its path, which may have kilobytes: its middle is left out.
fn fail(line: &str) {
    let line = shown(line).to_string();
    let (length, half) = (line.chars().count(), LONGEST_LINE / 2);
    if length <= LONGEST_LINE {
        return log::say(&line);
    }
    let begin: String = line.chars().take(half).collect();
    let end: String = line.chars().skip(length - half).collect();
    log::say(&format!("{begin}…{end}"));
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// A "mount" in which a member has put a link in the place of the copy's directory since that was looked at, a folder, and one of the host.
    fn hostile() -> (tempfile::TempDir, [PathBuf; 3]) {
        let dir = tempfile::tempdir().unwrap();
        let [mount, folder, victim] = ["mount", "folder", "victim"].map(|name| dir.path().join(name));
        for made in [&mount, &folder, &victim] {
            fs::create_dir(made).unwrap();
        }
        fs::write(victim.join("secret"), "secret").unwrap();
        fs::write(folder.join("new"), "new").unwrap();
        symlink(&victim, mount.join("absolute")).unwrap();
        symlink("../victim", mount.join("relative")).unwrap();
        symlink(format!("/proc/self/root{}", victim.display()), mount.join("proc")).unwrap();
        (dir, [mount, folder, victim])
    }

    #[test]
    fn a_link_that_comes_in_the_place_of_a_directory_leads_rsync_to_nothing_of_the_host() {
        let (_dir, [mount, folder, victim]) = hostile();
        for inside in ["absolute", "relative", "proc"] {
            for export in [false, true] {
                let (mount, inside) = (&*mount, Path::new(inside));
                let job =
                    Job { mount, inside, folder: &folder, export, delete: true, suid: true, devices: true };
                assert!(job.run(true).is_err() || job.run(true).unwrap().failed > 0, "{}", inside.display());
                let names =
                    |of: &Path| fs::read_dir(of).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
                assert_eq!((names(&victim), names(&folder)), (vec!["secret".into()], vec!["new".into()]));
            }
        }
    }

    #[test]
    fn a_folder_that_was_there_has_no_right_that_the_source_lacks_and_what_is_in_the_way_makes_room() {
        let (_dir, [mount, folder, _victim]) = hostile();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let [from, to] = [folder.join("private"), mount.join("in/private")];
        for made in [&from, &to, &folder.join("link"), &mount.join("in/new")] {
            fs::create_dir_all(made).unwrap();
        }
        fs::write(mount.join("in/new/below"), "in the way").unwrap();
        symlink("private", mount.join("in/link")).unwrap();
        fs::write(from.join("file"), "file").unwrap();
        set(&from, 0o700);
        set(&from.join("file"), 0o6750);
        set(&to, 0o777);
        let job = |export, suid| {
            let (mount, inside) = (&*mount, Path::new("in"));
            Job { mount, inside, folder: &folder, export, delete: false, suid, devices: true }
                .run(true)
                .unwrap()
        };
        assert_eq!(job(false, true).failed, 0);
        assert_eq!((mode(&to), mode(&to.join("file"))), (0o700, 0o6750));
        assert!(mount.join("in/link").symlink_metadata().unwrap().is_dir());
        assert_eq!(fs::read(mount.join("in/new")).unwrap(), b"new");
        assert_eq!(job(false, true).copied, 0);
        set(&to.join("file"), 0o6755);
        assert_eq!(job(true, false).failed, 0);
        assert_eq!(mode(&from.join("file")), 0o755);
    }

    #[test]
    fn what_fails_is_counted_and_printed_in_short_lines() {
        let long = format!(
            "rsync: [sender] readlink_stat(\"/zone/{}\") failed: File name too long (36)\n",
            "d/".repeat(3000)
        );
        let told = format!("{long}file has vanished: \"/zone/x\"\nrsync error: some files (code 23)\n");
        assert_eq!(print_errors(told.as_bytes()).unwrap(), 1);
        let out = "=>f+++++++++:2\n=hf+++++++++:2\n=cL+++++++++:1\n=.d..t......:40\n=*deleting  :0\nskipping non-regular file \"n\"\nbig is over max-size\nNumber of files: 7 (reg: 3)\n";
        let done = read_items(out.as_bytes(), &mut Meter::new(true)).unwrap();
        let Done { copied, bytes, same, removed, devices_left_out, failed } = done;
        assert_eq!([copied, bytes, same, removed, devices_left_out, failed], [3, 2, 2, 1, 1, 1]);
    }
}
