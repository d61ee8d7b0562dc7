// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a guest has, for the host to decide whether and how a job can run.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::frame::Fields;
use crate::{space, sys};

/// Folders of programs, where the agent's environment names none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The names of Open MPI's launcher, Debian's own first.
const OPENMPI: [&str; 2] = ["mpirun.openmpi", "mpirun"];
/// The names of MPICH's launcher.
const MPICH: [&str; 3] = ["mpiexec.hydra", "mpirun.mpich", "mpiexec"];

/// The folders in which programs are looked for.
pub fn path() -> String {
    match std::env::var("PATH") {
        Ok(own) if !own.is_empty() => format!("{own}:{PATH}"),
        _ => PATH.to_owned(),
    }
}

/// Answers a question. Its fields: `zone`, a zone's identity; `launcher`, a library's name, a launcher, or empty for any; `program` and `dir`, what the
/// ranks run and where.
pub fn answer(question: &Fields) -> Fields {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let mut facts = Fields::default()
        .with("root", sys::is_root())
        .with("pid_max", read("/proc/sys/kernel/pid_max"))
        .with("cpus", read("/sys/devices/system/cpu/online"))
        .with("ids", ids().iter().map(i32::to_string).collect::<Vec<_>>().join(" "));
    let mut dir = question.get("dir").map(PathBuf::from);
    if let Some((mount, writes)) =
        question.get("zone").and_then(|zone| space::mount_of(&read("/proc/mounts"), zone))
    {
        let tree = fs::metadata(&mount).map(|root| root.ino()).unwrap_or(0);
        facts = facts.with("mount", mount.display()).with("writes", writes).with("tree", tree);
        if let Ok(free) = sys::bytes_free(&mount) {
            facts = facts.with("free", free);
        }
        dir = dir.or(Some(mount));
    }
    for (library, launcher) in launchers(question.get("launcher").unwrap_or_default()) {
        if let Some(version) = version(&launcher, library) {
            facts = facts.with(library, format!("{version} {}", launcher.display()));
        }
    }
    let dir = dir.unwrap_or_else(|| "/".into());
    facts = facts.with("dir", dir.display()).with("dir_there", dir.is_dir());
    if let Some(program) = question.get("program").and_then(|program| find(program, &dir)) {
        facts = facts.with("program", program.display());
        if let Some(library) = library_of(&program) {
            facts = facts.with("uses", library);
        }
    }
    facts
}

/// The numbers of all processes and threads, which no other process can have.
fn ids() -> Vec<i32> {
    let numbers = |dir: &Path| -> Vec<i32> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    };
    let processes = numbers(Path::new("/proc"));
    processes.iter().flat_map(|pid| numbers(Path::new(&format!("/proc/{pid}/task")))).collect()
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// The file that `name` is run from in this folder.
fn find(name: &str, dir: &Path) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(dir.join(name)).filter(|path| is_program(path));
    }
    path().split(':').map(|folder| Path::new(folder).join(name)).find(|path| is_program(path))
}

/// The launchers that may be there: of one library, of both, or the one that is named, whose library is not known yet.
fn launchers(wanted: &str) -> Vec<(&'static str, PathBuf)> {
    let named = |library, names: &[&str]| {
        let found = names.iter().filter_map(|name| find(name, Path::new("/")));
        found.map(|path| (library, path)).collect::<Vec<_>>()
    };
    match wanted {
        "openmpi" => named("openmpi", &OPENMPI),
        "mpich" => named("mpich", &MPICH),
        "" => [named("openmpi", &OPENMPI), named("mpich", &MPICH)].concat(),
        launcher => [named("openmpi", &[launcher]), named("mpich", &[launcher])].concat(),
    }
}

/// The version of a launcher; `None`: it is not one of this library.
fn version(launcher: &Path, library: &str) -> Option<String> {
    let output = Command::new(launcher).arg("--version").env("PATH", path()).output().ok()?;
    version_in(&String::from_utf8_lossy(&output.stdout), library)
}

fn version_in(said: &str, library: &str) -> Option<String> {
    let line = match library {
        // Debian's orterun under its other name calls itself OpenRTE.
        "openmpi" => {
            said.lines().next().filter(|line| line.contains("(Open MPI)") || line.contains("(OpenRTE)"))
        }
        _ if !said.contains("HYDRA") => None,
        _ => said.lines().find(|line| line.trim_start().starts_with("Version:")),
    };
    line?.split_whitespace().next_back().map(str::to_owned)
}

/// The library that a program was linked with.
fn library_of(program: &Path) -> Option<&'static str> {
    let bytes = fs::read(program).ok().filter(|bytes| bytes.starts_with(b"\x7fELF"))?;
    let has = |name: &[u8]| bytes.windows(name.len()).any(|window| window == name);
    if has(b"libmpi.so.40") {
        return Some("openmpi");
    }
    (has(b"libmpich.so.12") || has(b"libmpi.so.12")).then_some("mpich")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_told_apart_by_what_they_say_of_themselves() {
        let openmpi = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n";
        let hydra = "HYDRA build details:\n    Version:                                 4.0.2\n    CC: gcc\n";
        assert_eq!(version_in(openmpi, "openmpi").as_deref(), Some("4.1.4"));
        assert_eq!(version_in("mpirun.openmpi (OpenRTE) 4.1.4\n", "openmpi").as_deref(), Some("4.1.4"));
        assert_eq!(version_in(hydra, "mpich").as_deref(), Some("4.0.2"));
        assert_eq!((version_in(openmpi, "mpich"), version_in(hydra, "openmpi")), (None, None));
        assert_eq!(version_in("slurm 22.05.8\n", "openmpi"), None);
    }

    #[test]
    fn a_program_is_found_as_a_shell_finds_it() {
        assert!(find("sh", Path::new("/")).is_some_and(|path| path.ends_with("sh")));
        assert_eq!(find("./sh", Path::new("/bin")), Some("/bin/./sh".into()));
        assert_eq!(find("./sh", Path::new("/dev")), None);
        assert_eq!(find("no-such-program", Path::new("/")), None);
    }

    #[test]
    fn the_numbers_of_this_process_and_its_threads_are_taken() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(ids().contains(&own) && ids().contains(&1));
    }
}
