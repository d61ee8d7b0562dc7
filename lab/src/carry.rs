// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies for a lab that cannot see this machine's file system: programs with the libraries or the interpreter that they need, files and
//! folders, each at the path that it has here.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::{Kernel, output};
use crate::config::Config;
use tombolo_rig::image::busybox;

/// Programs that a lab has where this machine has them, looked up like a shell does.
const PROGRAMS: [&str; 2] = ["bash", "qemu-system-x86_64"];
/// Files that these programs, and the C library, open.
const FILES: [&str; 4] = ["/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ld.so.cache"];
/// Folders of QEMU's firmware.
const FIRMWARE: [&str; 3] = ["/usr/share/qemu", "/usr/share/seabios", "/usr/lib/ipxe/qemu"];
/// The search path for programs that are copied. A command in the lab runs with the PATH of the client that sends it.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin";

/// The files that a lab gets: paths in the lab, and the file of this machine for each.
#[derive(Debug, Default)]
pub struct Carried {
    entries: BTreeMap<PathBuf, PathBuf>,
}

impl Carried {
    /// All that a lab of this configuration gets.
    pub fn for_lab(config: &Config, kernel: &Kernel) -> Result<Self> {
        let mut carried = Self::default();
        carried.insert(Path::new("/usr/bin/busybox"), &busybox()?);
        for program in PROGRAMS {
            if let Some(path) = find_program(program) {
                carried.add(&path)?;
            }
        }
        for path in FILES.iter().chain(&FIRMWARE).map(Path::new) {
            if path.exists() {
                carried.add(path)?;
            }
        }
        // For guests in the lab.
        carried.add(&kernel.image)?;
        carried.add(Path::new(&config.agent[0])).context("the lab's agent")?;
        for path in &config.carried {
            carried.add(path).with_context(|| format!("giving the lab {}", path.display()))?;
        }
        Ok(carried)
    }

    /// Adds a file with what it needs to run, if it is a program, or a folder with everything below it.
    pub fn add(&mut self, path: &Path) -> Result<()> {
        let place = in_lab(path)?;
        if self.entries.contains_key(&place) {
            return Ok(());
        }
        let source = path.canonicalize().with_context(|| format!("finding {}", path.display()))?;
        self.insert(&place, &source);
        if !source.is_file() {
            return Ok(());
        }
        let mut start = Vec::new();
        File::open(&source)
            .and_then(|file| file.take(256).read_to_end(&mut start))
            .with_context(|| format!("reading {}", source.display()))?;
        if start.starts_with(b"\x7fELF") {
            for library in libraries(&source)? {
                self.insert(&in_lab(&library)?, &library.canonicalize()?);
            }
        } else if let Some(interpreter) = interpreter(&start) {
            self.add(&interpreter).with_context(|| format!("the interpreter of {}", path.display()))?;
        }
        Ok(())
    }

    fn insert(&mut self, place: &Path, source: &Path) {
        self.entries.insert(place.to_owned(), source.to_owned());
    }

    /// Paths in the lab and on this machine.
    pub fn entries(&self) -> impl Iterator<Item = (&Path, &Path)> {
        self.entries.iter().map(|(place, source)| (place.as_path(), source.as_path()))
    }

    /// Returns whether something is at this path of the lab.
    pub fn has(&self, place: &Path) -> bool {
        self.entries.contains_key(place)
    }
}

/// The path of a file in the lab: its own, absolute, with Debian's /bin, /sbin and /lib* below /usr.
fn in_lab(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path).with_context(|| format!("the path {}", path.display()))?;
    let mut place = PathBuf::from("/");
    for (depth, part) in path.components().skip(1).enumerate() {
        let Component::Normal(name) = part else {
            bail!("{}: a path without `..` is needed", path.display())
        };
        let merged = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"].iter().any(|top| name == *top);
        if depth == 0 && merged {
            place.push("usr");
        }
        place.push(name);
    }
    Ok(place)
}

/// The shared libraries and the loader of a program; none for one that is linked statically.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let result = Command::new("ldd").arg(program).output().context("running ldd (package libc-bin)")?;
    if !result.status.success() {
        return Ok(Vec::new());
    }
    let said = String::from_utf8_lossy(&result.stdout);
    parse_ldd(&said).with_context(|| format!("the libraries of {}", program.display()))
}

fn parse_ldd(said: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in said.lines().map(str::trim) {
        if line.ends_with("=> not found") {
            bail!("{line}");
        }
        let path = line.split_once("=> ").map_or(line, |(_, path)| path);
        let path = path.split(" (").next().unwrap_or_default();
        if path.starts_with('/') {
            found.push(PathBuf::from(path));
        }
    }
    Ok(found)
}

/// The program that a script's first line names.
fn interpreter(start: &[u8]) -> Option<PathBuf> {
    let line = start.strip_prefix(b"#!")?.split(|b| *b == b'\n').next()?;
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_whitespace();
    let program = words.next()?;
    if program.ends_with("/env") {
        // busybox is the lab's env.
        return find_program(words.find(|word| !word.starts_with('-'))?);
    }
    Some(program.into()).filter(|path: &PathBuf| path.exists())
}

/// The path of a program of this machine: a path as it is, a name by PATH and the folders for administrators.
pub fn find_program(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(|path| path.is_file());
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let folders = path.split(':').chain(PATH.split(':'));
    folders
        .filter(|folder| folder.starts_with('/'))
        .map(|folder| Path::new(folder).join(name))
        .find(|p| p.is_file())
}

/// Names of busybox's programs.
pub fn applets() -> Result<Vec<String>> {
    let list = output(Command::new(busybox()?).arg("--list"))?;
    Ok(list.lines().map(str::to_owned).collect())
}

/// Makes the folders and links that every lab has below `root`, for all that `carried` doesn't bring.
pub fn skeleton(root: &Path, carried: &Carried) -> Result<()> {
    use std::os::unix::fs::symlink;
    for folder in [
        "dev",
        "proc",
        "sys",
        "run",
        "tmp",
        "root",
        "mnt",
        "var/tmp",
        "etc",
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
    ] {
        fs::create_dir_all(root.join(folder)).with_context(|| format!("creating {folder} for the lab"))?;
    }
    for link in ["bin", "sbin", "lib", "lib64"] {
        symlink(Path::new("usr").join(link), root.join(link))?;
    }
    for applet in applets()? {
        let own = [Path::new("/usr/bin"), Path::new("/usr/sbin")]
            .iter()
            .any(|folder| carried.has(&folder.join(&applet)));
        if !own && applet != "busybox" {
            symlink("busybox", root.join("usr/bin").join(&applet))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_comes_with_its_libraries_and_a_script_with_its_interpreter() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#!/bin/sh -e\ntrue\n").unwrap();
        let mut carried = Carried::default();
        carried.add(&script).unwrap();
        assert!(carried.has(&in_lab(&script).unwrap()));
        assert!(carried.has(Path::new("/usr/bin/sh")));
        let places: Vec<String> = carried.entries().map(|(place, _)| place.display().to_string()).collect();
        assert!(places.iter().any(|p| p.ends_with("/libc.so.6")), "{places:?}");
        assert!(places.iter().any(|p| p.starts_with("/usr/lib64/ld-linux")), "{places:?}");
        assert!(carried.entries().all(|(_, source)| source.exists()));
    }

    #[test]
    fn a_static_program_needs_nothing_and_a_missing_file_is_named() {
        let mut carried = Carried::default();
        carried.add(&busybox().unwrap()).unwrap();
        assert_eq!(carried.entries().count(), 1);
        let error = carried.add(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/at/all"), "{error:#}");
    }

    #[test]
    fn a_library_that_is_not_there_is_an_error() {
        let said = "\tlinux-vdso.so.1 (0x1)\n\tlibx.so.1 => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x2)\n";
        assert!(parse_ldd(said).unwrap_err().to_string().contains("libx.so.1"));
        let said = said.replace("not found", "/usr/lib/libx.so.1 (0x3)");
        let paths: Vec<PathBuf> = parse_ldd(&said).unwrap();
        assert_eq!(paths, [PathBuf::from("/usr/lib/libx.so.1"), "/lib64/ld-linux-x86-64.so.2".into()]);
    }

    #[test]
    fn paths_of_the_merged_usr_are_found_where_the_lab_has_them() {
        assert_eq!(in_lab(Path::new("/bin/sh")).unwrap(), Path::new("/usr/bin/sh"));
        assert_eq!(in_lab(Path::new("/srv/bin/sh")).unwrap(), Path::new("/srv/bin/sh"));
    }

    #[test]
    fn every_applet_of_busybox_is_a_program_of_the_lab() {
        let root = tempfile::tempdir().unwrap();
        let mut carried = Carried::default();
        carried.insert(Path::new("/usr/bin/sh"), Path::new("/bin/sh"));
        skeleton(root.path(), &carried).unwrap();
        assert_eq!(fs::read_link(root.path().join("bin")).unwrap(), Path::new("usr/bin"));
        assert_eq!(fs::read_link(root.path().join("usr/bin/cat")).unwrap(), Path::new("busybox"));
        assert!(!root.path().join("usr/bin/sh").is_symlink());
    }
}
