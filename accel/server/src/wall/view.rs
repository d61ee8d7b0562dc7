// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A worker's root: made of nothing, then what is needed is brought in. All sources are opened before the new root hides one of them.

use anyhow::Context;
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Programs and libraries.
const PROGRAMS: &[&str] = &["/bin", "/lib", "/lib32", "/lib64", "/nix", "/opt", "/sbin", "/usr"];
/// Of the settings, those that loaders, drivers and the C library read.
const SETTINGS: &[&str] = &[
    "/etc/OpenCL",
    "/etc/alternatives",
    "/etc/amd",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/locale.alias",
    "/etc/localtime",
    "/etc/nvidia",
];
/// The kernel's facts about processors and devices; not /sys/fs, /sys/kernel and /sys/firmware.
const FACTS: &[&str] = &["/sys/bus", "/sys/class", "/sys/dev", "/sys/devices", "/sys/module"];
/// Nodes that any program may need.
const PLAIN: &[&str] = &["null", "random", "urandom", "full"];
/// Of the devices' nodes, those that compute, by how their paths below /dev begin. Of a graphics device the node that renders: at the one for displays,
/// the first process to open it may set the screen, and buffers are found by small numbers.
const NODES: &[&str] = &["dri/renderD", "kfd", "accel", "nvidia", "mali", "dxg", "davinci", "hisi_hdc"];
/// Nodes of those drivers that set screens, join devices to fabrics, or look into others' work.
const NO_NODES: &[&str] = &["nvidia-modeset", "nvidia-nvswitch", "nvidia-nvlink", "nvidia-uvm-tools"];
/// Files that a driver may make: kernels are compiled there.
const SCRATCH_FILES: &str = "65536";

/// A part of a worker's view.
enum Part {
    /// A tree of mounts, or a file.
    Tree(PathBuf, OwnedFd, FileType),
    Link(PathBuf, PathBuf),
}

fn set_attributes(tree: &OwnedFd, flags: libc::c_uint, set: u64) -> io::Result<()> {
    let attributes = libc::mount_attr { attr_set: set, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH as libc::c_uint | flags;
    // SAFETY: the string and the structure live during the call, and its size is given.
    let r = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Opens what is at a path, if something is, for a part of the view.
fn part(path: &Path, attributes: u64) -> anyhow::Result<Option<Part>> {
    let kind = match std::fs::symlink_metadata(path) {
        Err(_) => return Ok(None),
        Ok(found) => FileType::from_raw_mode(found.mode()),
    };
    if kind == FileType::Symlink {
        let to = std::fs::read_link(path).with_context(|| path.display().to_string())?;
        return Ok(Some(Part::Link(path.to_owned(), to)));
    }
    let open = || -> io::Result<OwnedFd> {
        let whole = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
        let tree = rustix::mount::open_tree(CWD, path, whole)?;
        set_attributes(&tree, libc::AT_RECURSIVE as libc::c_uint, attributes)?;
        Ok(tree)
    };
    let tree = open().with_context(|| path.display().to_string())?;
    Ok(Some(Part::Tree(path.to_owned(), tree, kind)))
}

/// Returns whether a worker sees a device's node, by its path below /dev.
fn is_seen(node: &str) -> bool {
    let begins = |names: &[&str]| names.iter().any(|n| node.starts_with(n));
    PLAIN.contains(&node) || begins(NODES) && !begins(NO_NODES)
}

/// Returns whether nodes that a worker sees may be in a folder, by its path below /dev.
fn leads_on(folder: &str) -> bool {
    is_seen(folder) || NODES.iter().any(|n| n.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')))
}

/// The nodes of devices that a worker sees, and their groups.
fn nodes() -> anyhow::Result<(Vec<Part>, Vec<libc::gid_t>)> {
    let (mut parts, mut groups) = (Vec::new(), Vec::new());
    let mut todo: Vec<PathBuf> =
        std::fs::read_dir("/dev")?.filter_map(|entry| entry.ok().map(|e| e.path())).collect();
    while let Some(path) = todo.pop() {
        let Some(name) = path.strip_prefix("/dev").ok().and_then(Path::to_str) else { continue };
        let Ok(found) = std::fs::symlink_metadata(&path) else { continue };
        if !(if found.is_dir() { leads_on(name) } else { is_seen(name) }) {
            continue;
        }
        if found.is_dir() {
            let inside = std::fs::read_dir(&path).with_context(|| path.display().to_string())?;
            todo.extend(inside.filter_map(|entry| entry.ok().map(|e| e.path())));
            continue;
        }
        // The members of its group may use it.
        if found.mode() & 0o060 != 0 && found.gid() != 0 && !groups.contains(&found.gid()) {
            groups.push(found.gid());
        }
        // A read-only mount lets a device be written to; its node's mode, owner and times stay as they are.
        let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOSUID;
        parts.extend(part(&path, attributes.bits().into())?);
    }
    Ok((parts, groups))
}

/// Folders of drivers that the environment names, where they lie outside of what is brought in anyway.
fn drivers() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name);
    let mut named: Vec<PathBuf> =
        variable("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths).collect();
    named.extend(variable("OCL_ICD_FILENAMES").iter().flat_map(std::env::split_paths));
    if let Some(vendors) = variable("OCL_ICD_VENDORS").map(PathBuf::from) {
        let listed =
            std::fs::read_dir(&vendors).into_iter().flatten().filter_map(|e| e.ok().map(|e| e.path()));
        let icds = listed.chain([vendors.clone()]).filter(|p| p.extension().is_some_and(|e| e == "icd"));
        named.extend(icds.filter_map(|icd| std::fs::read_to_string(icd).ok()).map(|text| text.trim().into()));
        named.push(vendors);
    }
    // A link's own folder, and that of what it leads to.
    let folders = |path: PathBuf| {
        let holding = |path: &Path| {
            if path.is_dir() { Some(path.to_owned()) } else { path.parent().map(Path::to_owned) }
        };
        [path.canonicalize().ok().as_deref().and_then(holding), holding(&path)]
    };
    let known = |folder: &PathBuf| {
        PROGRAMS.iter().chain(SETTINGS).chain(&["/dev", "/proc", "/sys"]).any(|p| folder.starts_with(p))
    };
    // Folders right below the root, as /tmp, hold more than drivers.
    let deep = |folder: &PathBuf| folder.components().count() > 2;
    let named = named.into_iter().filter(|p| p.is_absolute()).flat_map(folders).flatten();
    let mut found: Vec<PathBuf> =
        named.filter(|folder| !known(folder) && deep(folder) && folder.is_dir()).collect();
    found.sort();
    // A folder inside of another one comes with it; sorted, it stands behind that one.
    found.dedup_by(|inner, outer| inner.starts_with(outer));
    found
}

fn file_system(kind: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let fs = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (name, value) in options {
        rustix::mount::fsconfig_set_string(&fs, *name, *value)?;
    }
    rustix::mount::fsconfig_create(&fs)?;
    Ok(rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// The path of something in the new root, relative to it; the folders above it are made.
fn place(root: &OwnedFd, path: &Path) -> io::Result<PathBuf> {
    let inside = path.strip_prefix("/").unwrap_or(path);
    let mut above = PathBuf::new();
    for part in inside.parent().into_iter().flat_map(Path::iter) {
        above.push(part);
        match rustix::fs::mkdirat(root, &above, Mode::from_raw_mode(0o755)) {
            Err(e) if e != rustix::io::Errno::EXIST => return Err(e.into()),
            _ => {}
        }
    }
    Ok(inside.to_owned())
}

fn attach(root: &OwnedFd, path: &Path, tree: impl AsFd, kind: FileType) -> io::Result<()> {
    let inside = place(root, path)?;
    if kind == FileType::Directory {
        match rustix::fs::mkdirat(root, &inside, Mode::from_raw_mode(0o755)) {
            Err(e) if e != rustix::io::Errno::EXIST => return Err(e.into()),
            _ => {}
        }
    } else {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(root, &inside, flags, Mode::from_raw_mode(0o444))?;
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(rustix::mount::move_mount(tree, "", root, inside, flags)?)
}

/// Makes the view this process's root. The groups of the devices' nodes in it.
pub fn enter() -> anyhow::Result<Vec<libc::gid_t>> {
    // Nothing that is mounted from here on is seen outside.
    rustix::mount::mount_change(
        "/",
        rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC,
    )
    .context("/ can't be made private")?;
    let nosuid = MountAttrFlags::MOUNT_ATTR_NOSUID;
    let still = MountAttrFlags::MOUNT_ATTR_RDONLY | nosuid | MountAttrFlags::MOUNT_ATTR_NODEV;
    let (mut parts, groups) = nodes().context("/dev")?;
    let named = PROGRAMS.iter().chain(SETTINGS).chain(FACTS).map(PathBuf::from).chain(drivers());
    for path in named {
        parts.extend(part(&path, still.bits().into())?);
    }
    let plain = nosuid | MountAttrFlags::MOUNT_ATTR_NODEV;
    // Also where the server's files are its user's alone (UMask=0077 of a service), a worker's user may look into the folders that are made here.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let root = file_system("tmpfs", &[("size", "1048576"), ("nr_inodes", "4096"), ("mode", "0755")], plain)
        .context("tmpfs")?;
    // All processes have /proc, of which nothing is needed any more.
    let here = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(&root, "", CWD, "/proc", here).context("the new root")?;
    let size = super::limits::SCRATCH.to_string();
    let options = [("size", size.as_str()), ("nr_inodes", SCRATCH_FILES), ("mode", "1777")];
    let scratch = file_system("tmpfs", &options, plain).context("tmpfs")?;
    attach(&root, Path::new("/tmp"), scratch, FileType::Directory).context("/tmp")?;
    let proc = file_system("proc", &[], plain | MountAttrFlags::MOUNT_ATTR_NOEXEC)
        .context("/proc can't be mounted anew (a container that hides parts of /proc forbids it)")?;
    attach(&root, Path::new("/proc"), proc, FileType::Directory).context("/proc")?;
    for part in parts {
        let (path, done) = match part {
            Part::Tree(path, tree, kind) => {
                let done = attach(&root, &path, tree, kind);
                (path, done)
            }
            Part::Link(path, to) => {
                let done = place(&root, &path).and_then(|at| Ok(rustix::fs::symlinkat(to, &root, at)?));
                (path, done)
            }
        };
        done.with_context(|| path.display().to_string())?;
    }
    // Semaphores and memory that libraries share between their own processes.
    rustix::fs::symlinkat("../tmp", &root, "dev/shm").context("/dev/shm")?;
    set_attributes(&root, 0, still.bits().into()).context("the new root can't be made read-only")?;
    rustix::process::fchdir(&root).context("the new root")?;
    rustix::process::pivot_root(".", ".").context("pivot_root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).context("the old root stays")?;
    rustix::process::chdir("/").context("/")?;
    Ok(groups)
}

/// Opens the view's /dev/null.
pub fn null() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_devices_only_nodes_that_compute_are_seen() {
        for seen in [
            "null",
            "dri/renderD128",
            "kfd",
            "accel/accel0",
            "nvidia0",
            "nvidiactl",
            "nvidia-uvm",
            "nvidia-caps/nvidia-cap1",
        ] {
            assert!(is_seen(seen), "{seen}");
        }
        for other in [
            "dri/card0",
            "dri/by-path/card",
            "nullb0",
            "nvidia-modeset",
            "nvidia-nvswitchctl",
            "nvidia-uvm-tools",
            "zero",
            "shm",
            "kvm",
        ] {
            assert!(!is_seen(other), "{other}");
        }
        let folders = ["dri", "accel", "nvidia-caps", "dri/by-path", "shm", "dr", "d"];
        assert_eq!(folders.map(leads_on), [true, true, true, false, false, false, false]);
    }
}
