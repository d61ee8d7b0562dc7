// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tells whether a process of any user and namespace has a file open or mapped, by the kernel's leases (`F_SETLEASE`, fcntl(2)). The kernel grants a read lease
//! only on a file that no process has open for writing, and a write lease only on one that no other process has open at all.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::io::Errno;

use crate::mem::SharedMem;

/// fcntl(2); libc has no name for it.
const F_SETSIG: libc::c_int = 10;
/// The type of overlayfs in statfs(2).
const OVERLAYFS: rustix::fs::FsWord = 0x794c_7630;
/// The number of the first PID namespace in `/proc/PID/ns/pid` (PROC_PID_INIT_INO).
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// How processes that are looked for have a file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    /// For writing.
    Write,
    /// For writing, or only for reading.
    Any,
}

/// Other processes that have a file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Openers {
    None,
    Some,
    /// The file is another user's or has no name, or its file system no leases; and this process finds none, and can't look at all processes of the host.
    Unknown,
}

/// Looks for processes that have this file open so, this one among them, but for this description, which is open for reading.
pub(crate) fn look(file: &File, access: Access) -> Openers {
    // Of memory without a name the kernel doesn't count who has it open by its first description.
    if file.metadata().is_ok_and(|of| of.nlink() == 0) {
        return search(file, access);
    }
    let fd = file.as_raw_fd();
    let lease = match access {
        Access::Write => libc::F_RDLCK,
        Access::Any => libc::F_WRLCK,
    };
    // SAFETY: each call has a valid descriptor and a number. A process that opens the file while the lease lasts, and conflicts with it, waits for its end and has the
    // holder sent this signal, which is ignored unless a handler is set.
    let taken = unsafe {
        libc::fcntl(fd, F_SETSIG, libc::SIGURG);
        libc::fcntl(fd, libc::F_SETLEASE, lease)
    };
    if taken == 0 {
        // SAFETY: as above.
        unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
        // A mapping is of the file below, which no lease sees: who has closed its descriptor is not counted.
        let is_stacked = rustix::fs::fstatfs(file).is_ok_and(|at| at.f_type == OVERLAYFS);
        return if is_stacked { among(&holders(file, access)) } else { Openers::None };
    }
    match Errno::from_io_error(&std::io::Error::last_os_error()) {
        Some(Errno::AGAIN) => Openers::Some,
        // Another user's file, or a file system without leases.
        _ => search(file, access),
    }
}

/// As [`look`], by the maps of processes. Only a process that can look at all others knows for sure that none has the file mapped.
fn search(file: &File, access: Access) -> Openers {
    match among(&holders(file, access)) {
        Openers::None if !sees_all() => Openers::Unknown,
        found => found,
    }
}

/// Returns whether this process can look at all processes of the host: the first one among them, in the first PID namespace.
fn sees_all() -> bool {
    let is_first = |of: std::fs::Metadata| of.ino() == FIRST_PID_NAMESPACE;
    crate::door::check_proc().is_ok()
        && std::fs::metadata("/proc/self/ns/pid").is_ok_and(is_first)
        && std::fs::read("/proc/1/maps").is_ok()
}

fn among(holders: &[u32]) -> Openers {
    if holders.is_empty() { Openers::None } else { Openers::Some }
}

/// The processes that have the file at this path mapped so, for a message: those that this process may look at.
pub(crate) fn names(path: &Path, access: Access) -> String {
    let found = File::open(path).map(|file| holders(&file, access)).unwrap_or_default();
    let name = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        format!("process {pid} ({})", name.trim())
    };
    match found.iter().map(name).collect::<Vec<_>>() {
        named if named.is_empty() => "a process that this one can't see".to_owned(),
        named => named.join(", "),
    }
}

/// Other processes that have this file mapped so.
fn holders(file: &File, access: Access) -> Vec<u32> {
    let Some(place) = place_in_maps(file) else { return Vec::new() };
    let own = std::process::id();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.filter(|pid| *pid != own).filter(|pid| maps(*pid, &place, access)).collect()
}

/// Returns whether this process has the file mapped; `false` also where this one may not look at it.
pub(crate) fn is_mapped_by(file: &File, pid: u32) -> bool {
    place_in_maps(file).is_some_and(|place| maps(pid, &place, Access::Any))
}

fn maps(pid: u32, place: &Place, access: Access) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines().filter_map(Mapping::of).any(|mapping| {
        (access == Access::Any || mapping.rights.contains('w')) && mapping.place == (&place.0, &place.1)
    })
}

/// A file's device and number in /proc/PID/maps.
type Place = (String, String);

/// A line of /proc/PID/maps.
struct Mapping<'a> {
    addresses: &'a str,
    rights: &'a str,
    place: (&'a str, &'a str),
}

impl Mapping<'_> {
    fn of(line: &str) -> Option<Mapping<'_>> {
        // Addresses, rights, offset, device, inode, path.
        let mut fields = line.split_ascii_whitespace();
        let (addresses, rights) = (fields.next()?, fields.next()?);
        Some(Mapping { addresses, rights, place: (fields.nth(1)?, fields.next()?) })
    }

    fn begins_at(&self, address: usize) -> bool {
        let begin = self.addresses.split('-').next().unwrap_or_default();
        usize::from_str_radix(begin, 16) == Ok(address)
    }
}

/// The file's device and number as /proc/PID/maps has them. This process maps the file and reads its own maps: stat(2) tells another device on btrfs, and on an
/// overlay over several file systems.
fn place_in_maps(file: &File) -> Option<Place> {
    let page = crate::backing::huge_page_size(file.as_fd()).unwrap_or(4096);
    let own = SharedMem::map(file.as_fd(), 0, page as u64, false).ok().and_then(|mapping| {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let at = mapping.as_ptr() as usize;
        let (device, inode) = maps.lines().filter_map(Mapping::of).find(|m| m.begins_at(at))?.place;
        Some((device.to_owned(), inode.to_owned()))
    });
    own.or_else(|| {
        let meta = file.metadata().ok()?;
        let device = format!("{:02x}:{:02x}", rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
        Some((device, meta.ino().to_string()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_could_write_to_a_file_is_found_also_by_a_mapping_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = File::create_new(&path).unwrap();
        file.set_len(1 << 16).unwrap();
        drop(file);
        let reader = File::open(&path).unwrap();
        assert_eq!(look(&reader, Access::Write), Openers::None);
        let second = File::open(&path).unwrap();
        assert_eq!(look(&reader, Access::Write), Openers::None, "another reader");
        let writer = File::options().read(true).write(true).open(&path).unwrap();
        assert_eq!(look(&reader, Access::Write), Openers::Some, "a descriptor");
        let mapping = SharedMem::map(writer.as_fd(), 0, 1 << 16, true).unwrap();
        drop(writer);
        assert_eq!(look(&reader, Access::Write), Openers::Some, "a mapping");
        drop(mapping);
        assert_eq!(look(&reader, Access::Write), Openers::None);
        assert_eq!(look(&reader, Access::Any), Openers::Some, "another reader");
        drop(second);
        assert_eq!(look(&reader, Access::Any), Openers::None);
        let second = File::open(&path).unwrap();
        let mapping = SharedMem::map(second.as_fd(), 0, 1 << 16, false).unwrap();
        drop(second);
        assert_eq!(look(&reader, Access::Any), Openers::Some, "another reader's mapping");
        drop(mapping);
        assert_eq!(look(&reader, Access::Any), Openers::None);
        // The lease has ended.
        File::options().write(true).open(&path).unwrap();
    }

    /// The kernel grants a lease on it.
    #[test]
    fn a_process_that_has_memory_without_a_name_is_found() {
        let script = "import mmap, os, sys\nf = os.memfd_create('zone')\nos.ftruncate(f, 4096)\nm = mmap.mmap(f, 0)\nprint(f, flush=True)\nsys.stdin.read()";
        let piped = std::process::Stdio::piped;
        let mut python = std::process::Command::new("python3");
        let mut child = python.args(["-c", script]).stdin(piped()).stdout(piped()).spawn().unwrap();
        let mut number = String::new();
        let mut lines = std::io::BufReader::new(child.stdout.as_mut().unwrap());
        std::io::BufRead::read_line(&mut lines, &mut number).unwrap();
        let file = File::open(format!("/proc/{}/fd/{}", child.id(), number.trim())).unwrap();
        assert_eq!(look(&file, Access::Write), Openers::Some);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(look(&file, Access::Write), if sees_all() { Openers::None } else { Openers::Unknown });
    }

    #[test]
    fn without_leases_or_a_name_a_process_that_can_not_look_at_all_others_knows_nothing() {
        let file = tempfile::tempfile().unwrap();
        let found = [search(&file, Access::Any), look(&file, Access::Any)];
        assert_eq!(found, [if sees_all() { Openers::None } else { Openers::Unknown }; 2]);
        // As an ordinary user, this thread alone.
        let ordinary = move || {
            // SAFETY: numbers only. A process that may not change them is an ordinary user's by now.
            unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            [search(&file, Access::Any), look(&file, Access::Any)]
        };
        assert_eq!(std::thread::spawn(ordinary).join().unwrap(), [Openers::Unknown; 2]);
    }

    /// A process that has mapped a file, and closed its descriptor.
    struct Mapper(std::process::Child);

    impl Mapper {
        fn of(path: &Path) -> Mapper {
            // Python's own mappings keep a descriptor.
            let script = "import ctypes, os, sys\nf = os.open(sys.argv[1], os.O_RDWR)\nmmap = ctypes.CDLL(None).mmap\nmmap.restype = ctypes.c_void_p\nassert mmap(None, ctypes.c_size_t(4096), 3, 1, f, ctypes.c_long(0)) != ctypes.c_void_p(-1).value\nos.close(f)\nprint(flush=True)\nsys.stdin.read()";
            let piped = std::process::Stdio::piped;
            let mut python = std::process::Command::new("python3");
            let mut child =
                python.args(["-c", script]).arg(path).stdin(piped()).stdout(piped()).spawn().unwrap();
            std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
            Mapper(child)
        }
    }

    impl Drop for Mapper {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[test]
    fn a_process_that_maps_a_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [0; 4096]).unwrap();
        let mapper = Mapper::of(&path);
        assert_eq!(names(&path, Access::Write), format!("process {} (python3)", mapper.0.id()));
        drop(mapper);
        assert_eq!(names(&path, Access::Write), "a process that this one can't see");
    }

    /// It may ask for no lease of another user's file, and may look at its own processes.
    #[test]
    fn an_ordinary_user_finds_its_own_process_that_maps_another_users_file() {
        use std::os::unix::fs::PermissionsExt;
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [0; 4096]).unwrap();
        for (path, mode) in [(dir.path(), 0o755), (path.as_path(), 0o666)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let ordinary = move || {
            // SAFETY: numbers only, of this thread alone.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
            let reader = File::open(&path).unwrap();
            let mapper = Mapper::of(&path);
            assert_eq!(look(&reader, Access::Write), Openers::Some);
            drop(mapper);
            assert_eq!(look(&reader, Access::Write), Openers::Unknown);
        };
        std::thread::spawn(ordinary).join().unwrap();
    }

    /// There the kernel grants the lease.
    #[test]
    fn a_process_that_maps_a_file_of_an_overlay_without_a_descriptor_is_found() {
        finds_a_mapping_of_an_overlay(&[]);
        // Their device is not that of the overlay.
        finds_a_mapping_of_an_overlay(&["lower"]);
    }

    /// `apart`: layers that are on a file system of their own.
    fn finds_a_mapping_of_an_overlay(apart: &'static [&str]) {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let in_namespace = move || {
            let mount = |words: &[&str]| {
                assert!(std::process::Command::new("mount").args(words).status().unwrap().success());
            };
            // SAFETY: this thread alone gets another root directory and current directory, of the same places.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
            mount(&["--make-rprivate", "/"]);
            let at = |name: &str| format!("{}/{name}", dir.path().display());
            mount(&["-t", "tmpfs", "none", &at("")]);
            for name in ["lower", "upper", "work", "all"] {
                std::fs::create_dir(at(name)).unwrap();
            }
            apart.iter().for_each(|name| mount(&["-t", "tmpfs", "none", &at(name)]));
            let options = ["lower", "upper", "work"].map(|name| format!("{name}dir={}", at(name))).join(",");
            mount(&["-t", "overlay", "-o", &options, "none", &at("all")]);
            let path = Path::new(&at("all")).join("file");
            std::fs::write(&path, [0; 4096]).unwrap();
            let reader = File::open(&path).unwrap();
            assert_eq!(look(&reader, Access::Write), Openers::None);
            let mapper = Mapper::of(&path);
            assert_eq!(look(&reader, Access::Write), Openers::Some);
            drop(mapper);
            assert_eq!(look(&reader, Access::Any), Openers::None);
        };
        std::thread::spawn(in_namespace).join().unwrap();
    }
}
