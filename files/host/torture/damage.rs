// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Damage: words of a file system are overwritten in meaningful places, half of them by the fuzzer's mutator (`files/fuzz/mutate.c`).
//! fsck -n, which gets the memory mapped read-only, must report it and change nothing; fsck -y must repair it or name the losses, and
//! the repaired file system must work. If fsck found nothing, every name and all contents must be unchanged.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use tombolo_files::area::{Area, Map};
use tombolo_files::fs::{self, Create, Filesystem, Handle, Mkfs, ROOT};
use tombolo_files::fsck::{self, Options, Report, Severity};
use tombolo_files::sys;

use crate::rng::{Rng, bytes};

const MIB: u64 = 12;

struct Image {
    area: Area,
    /// The same memory, without the right to write.
    read_only: Area,
    mutator: *mut c_void,
    files: Files,
    words: Vec<u64>,
    /// Blocks that something refers to.
    used: Vec<u64>,
    map_start: u64,
}

/// Damages and repairs `rounds` times.
pub fn run(seed: u64, rounds: u64) -> Result<String, String> {
    let image = Image::new()?;
    let mut rng = Rng(seed);
    let (mut found, mut lost, mut hopeless) = (0, 0, 0);
    for round in 0..rounds {
        image.restore();
        let damage: Vec<Damage> = (0..1 + rng.below(6)).map(|_| image.damage(&mut rng)).collect();
        let report = image.round(damage.iter().any(|d| d.plausible)).map_err(|e| {
            let log: Vec<&str> = damage.iter().map(|d| d.text.as_str()).collect();
            format!("round {round}: {e}; damage: {}", log.join(", "))
        })?;
        found += u64::from(report.damage > 0);
        lost += u64::from(report.problems.iter().any(|p| p.severity == Severity::Loss));
        hopeless += u64::from(report.left > 0);
    }
    Ok(format!(
        "{rounds} damaged file systems: {found} found damaged, {lost} lost something, {hopeless} beyond repair"
    ))
}

fn silent(_: &str, _: u64, _: u64) {}

/// `struct mutation` of `files/fuzz/mutate.h`.
#[repr(C)]
struct Mutation {
    kind: c_uint,
    offset: u64,
    old: u64,
    new_value: u64,
}
const TX: c_uint = 1;
const INODE: c_uint = 3;
const XATTR: c_uint = 8;

type Take = unsafe extern "C" fn(*mut c_void, c_uint) -> u64;

unsafe extern "C" {
    fn mutator_new(area: *const c_void, bytes: u64) -> *mut c_void;
    fn mutator_free(mutator: *mut c_void);
    fn mutate(mutator: *mut c_void, area: *mut c_void, take: Take, ctx: *mut c_void) -> Mutation;
}

/// One change.
struct Damage {
    text: String,
    /// The damage may leave a well-formed file system with other contents.
    plausible: bool,
}

/// By path: the type, and the contents.
type Files = BTreeMap<Vec<u8>, (u32, Vec<u8>)>;

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: made by mutator_new, not used after this.
        unsafe { mutator_free(self.mutator) };
    }
}

/// Returns all names and their contents, as the core reads them.
fn contents(area: &Area) -> Result<Files, String> {
    let fs = Filesystem::open_with(area.lone(), Box::new(|_, _, _| {})).map_err(|e| format!("open: {e}"))?;
    let mut files = Files::new();
    let mut queue = vec![(ROOT, Vec::new())];
    while let Some((dir, path)) = queue.pop() {
        for entry in fs.list(dir).map_err(|e| format!("directory {dir}: {e}"))? {
            let path = [path.as_slice(), b"/", &entry.name].concat();
            let at = |e| format!("{}: {e}", String::from_utf8_lossy(&path));
            let attr = fs.getattr(entry.ino).map_err(at)?;
            let kind = attr.mode & libc::S_IFMT;
            let what = match kind {
                libc::S_IFDIR => {
                    queue.push((entry.ino, path.clone()));
                    Vec::new()
                }
                libc::S_IFREG => {
                    let mut data = vec![0; 128 << 10];
                    let len =
                        fs.pread(entry.ino, &mut data, attr.size.saturating_sub(128 << 10)).map_err(at)?;
                    data.truncate(len);
                    data
                }
                libc::S_IFLNK => fs.readlink(entry.ino).map_err(at)?,
                _ => Vec::new(),
            };
            files.insert(path, (kind, what));
        }
    }
    Ok(files)
}

impl Image {
    fn new() -> Result<Image, String> {
        let map = Arc::new(Map::memfd("damage", MIB << 20).map_err(|e| e.to_string())?);
        let read_only = Map::new(map.file(), MIB << 20, false).and_then(Area::whole);
        let read_only = read_only.map_err(|e| e.to_string())?;
        let area = Area::in_map(&map, 0, MIB << 20, None).map_err(|e| e.to_string())?;
        populate(&area).map_err(|e| format!("making files: {e}"))?;
        let files = contents(&area)?;
        // SAFETY: the area is that long; the mutator keeps no pointer to it.
        let mutator = unsafe { mutator_new(area.base().cast(), MIB << 20) };
        if mutator.is_null() {
            return Err("no memory for the mutator".into());
        }
        let words: Vec<u64> = (0..MIB << 17).map(|i| area.word(i * 8).expect("in the area")).collect();
        let map_start = 1 + u64::from(sys::TFS_MEMBERS) * (size_of::<sys::tfs_member_area>() as u64 / 4096);
        let used = (0..MIB << 8)
            .filter(|b| {
                let mut byte = [0];
                area.copy_out(map_start * 4096 + b, &mut byte) && u32::from(byte[0]) == sys::TFS_MAP_USED
            })
            .collect();
        Ok(Image { area, read_only, mutator, files, words, used, map_start })
    }

    fn restore(&self) {
        for (i, word) in self.words.iter().enumerate() {
            assert!(self.area.store_word(i as u64 * 8, *word));
        }
    }

    fn same(&self, as_it_was: &[u64]) -> bool {
        as_it_was.iter().enumerate().all(|(i, word)| self.area.word(i as u64 * 8) == Some(*word))
    }

    fn damage(&self, rng: &mut Rng) -> Damage {
        if rng.below(2) == 0 { self.mutate(rng) } else { self.overwrite(rng) }
    }

    fn mutate(&self, rng: &mut Rng) -> Damage {
        unsafe extern "C" fn take(rng: *mut c_void, bytes: c_uint) -> u64 {
            // SAFETY: the generator below, which has no other user meanwhile.
            unsafe { &mut *rng.cast::<Rng>() }.next() >> (64 - 8 * bytes)
        }
        // SAFETY: the mutator was made for this area and writes inside it.
        let done = unsafe { mutate(self.mutator, self.area.base().cast(), take, (&raw mut *rng).cast()) };
        let text = format!("{:#x}: {:#x} -> {:#x}", done.offset, done.old, done.new_value);
        // Inode numbers, attribute values and recorded words are plausible with any value.
        Damage { text, plausible: [TX, INODE, XATTR].contains(&done.kind) }
    }

    fn overwrite(&self, rng: &mut Rng) -> Damage {
        let block = match rng.below(10) {
            0 => 0,
            1 => 1 + rng.below(self.map_start - 1),
            2 => self.map_start,
            // The first block in use is the inode table's.
            3..=6 => self.used[rng.below(16.min(self.used.len() as u64)) as usize],
            _ => rng.pick(&self.used),
        };
        let words = if block == 0 { 48 } else { 512 };
        let at = block * 4096 + rng.below(words) * 8;
        let old = self.area.word(at).expect("in the area");
        let new = match rng.below(9) {
            0 => 0,
            1 => !0,
            2 => rng.next(),
            3 => old ^ 1 << rng.below(64),
            4 => rng.pick(&self.used),
            5 => rng.below(MIB << 8),
            6 => old.wrapping_add(rng.below(9)).wrapping_sub(4),
            7 => rng.pick(&self.used) | rng.below(5) << 48,
            _ => self.words[rng.below(self.words.len() as u64) as usize],
        };
        // Magic and version stay: without them there is nothing to repair.
        let features = [
            core::mem::offset_of!(sys::tfs_super, incompat),
            core::mem::offset_of!(sys::tfs_super, ro_compat),
        ];
        let identity = at < 16 || features.contains(&(at as usize));
        if !identity {
            assert!(self.area.store_word(at, new));
        }
        Damage { text: format!("{at:#x}: {old:#x} -> {new:#x}"), plausible: true }
    }

    fn round(&self, plausible: bool) -> Result<Report, String> {
        let damaged: Vec<u64> =
            (0..self.words.len()).map(|i| self.area.word(i as u64 * 8).expect("in the area")).collect();
        let looked = fsck::check(&self.read_only, Options::default(), &mut silent).map_err(|e| e.0)?;
        if !self.same(&damaged) {
            return Err("fsck -n wrote".into());
        }
        let repair = Options { repair: true, ..Options::default() };
        let report = fsck::check(&self.area, repair, &mut silent).map_err(|e| e.0)?;
        let text = |report: &Report| {
            report
                .problems
                .iter()
                .filter(|p| p.severity != Severity::Note)
                .take(6)
                .map(|p| p.text.clone())
                .collect::<Vec<_>>()
                .join("; ")
        };
        if report.left > 0 {
            if report.problems.iter().any(|p| p.code == "table") {
                return Ok(report);
            }
            return Err(format!("not repaired after {} passes: {}", report.passes, text(&report)));
        }
        let again = fsck::check(&self.area, Options::default(), &mut silent).map_err(|e| e.0)?;
        if !again.is_clean() {
            return Err(format!("repaired, but: {}", text(&again)));
        }
        if looked.is_clean() && !plausible {
            let now = contents(&self.area)?;
            let changed = self.files.iter().find(|(path, what)| now.get(*path) != Some(what));
            if let Some((path, _)) =
                changed.or_else(|| now.iter().find(|(path, _)| !self.files.contains_key(*path)))
            {
                return Err(format!(
                    "found nothing, but {} is not what it was",
                    String::from_utf8_lossy(path)
                ));
            }
        }
        use_all(&self.area)
            .map_err(|e| format!("repaired, but can't be used: {e} (found: {})", text(&looked)))?;
        Ok(report)
    }
}

fn populate(area: &Area) -> fs::Result<()> {
    fs::mkfs(area, &Mkfs { hash_seed: 7, ..Mkfs::default() })?;
    let fs = Filesystem::open(area.clone())?;
    let dir = |parent: Handle, name: &str| {
        fs.create(parent, Some(name.as_bytes()), &Create::mode(libc::S_IFDIR | 0o755))
    };
    let file =
        |parent, name: &str| fs.create(parent, Some(name.as_bytes()), &Create::mode(libc::S_IFREG | 0o644));
    let (a, large) = (dir(ROOT.into(), "a")?, dir(ROOT.into(), "large")?);
    let b = dir(dir(a, "b")?, "c")?;
    for i in 0..300 {
        let ino = file(large, &format!("file-{i}-{}", "x".repeat(i % 150)))?;
        if i % 10 == 0 {
            fs.pwrite(ino, &bytes(i as u64, 3000), (i as u64 % 5) << 20, false)?;
        }
    }
    let sparse = file(a, "sparse")?;
    fs.pwrite(sparse, b"end", 3 << 30, false)?;
    let huge = file(a, "huge")?;
    fs.pwrite(huge, &vec![1; 2 << 20], 2 << 20, false)?;
    let plain = file(b, "plain")?;
    fs.pwrite(plain, &bytes(1, 100_000), 0, false)?;
    fs.link(a, b"second name", plain)?;
    fs.xattr_set(plain, b"user.small", Some(b"value"), 0, None)?;
    fs.xattr_set(sparse, b"user.large", Some(&bytes(2, 20_000)), 0, None)?;
    fs.create(
        a,
        Some(b"link"),
        &Create { target: Some(b"b/c/plain"), ..Create::mode(libc::S_IFLNK | 0o777) },
    )?;
    fs.create(a, Some(b"pipe"), &Create::mode(libc::S_IFIFO | 0o644))?;
    Ok(())
}

/// Reads everything and changes a little.
fn use_all(area: &Area) -> Result<(), String> {
    let noticed = std::sync::Arc::new(std::sync::Mutex::new(None));
    let log = {
        let noticed = std::sync::Arc::clone(&noticed);
        Box::new(move |what: &str, a, b| {
            let mut noticed = noticed.lock().expect("no panic while it is held");
            noticed.get_or_insert_with(|| format!("{what} ({a:#x}, {b:#x})"));
        })
    };
    let fs = Filesystem::open_with(area.lone(), log).map_err(|e| format!("open: {e}"))?;
    let mut queue = vec![ROOT];
    let mut buf = vec![0; 64 << 10];
    while let Some(dir) = queue.pop() {
        for entry in fs.list(dir).map_err(|e| format!("directory {dir}: {e}"))? {
            let at = |e| format!("inode {}: {e}", entry.ino);
            let attr = fs.getattr(entry.ino).map_err(at)?;
            fs.lookup(dir, &entry.name).map_err(at)?;
            for name in fs.xattr_list(entry.ino).map_err(at)?.split(|b| *b == 0).filter(|n| !n.is_empty()) {
                fs.xattr_get(entry.ino, name).map_err(at)?;
            }
            match attr.mode & libc::S_IFMT {
                libc::S_IFDIR => queue.push(entry.ino),
                libc::S_IFREG => {
                    fs.pread(entry.ino, &mut buf, 0).map_err(at)?;
                    match fs.pwrite(entry.ino, b"x", attr.size.min(1 << 40), false) {
                        Ok(_) | Err(rustix::io::Errno::NOSPC) => {}
                        Err(e) => return Err(at(e)),
                    }
                    fs.truncate(entry.ino, 10, false).map_err(at)?;
                }
                libc::S_IFLNK => {
                    fs.readlink(entry.ino).map_err(at)?;
                }
                _ => {}
            }
        }
    }
    let new = fs.create(ROOT, Some(b"made after repair"), &Create::mode(libc::S_IFREG | 0o600));
    new.map_err(|e| format!("create: {e}"))?;
    let noticed = noticed.lock().expect("no panic while it is held").take();
    drop(fs);
    match noticed {
        Some(what) => Err(what),
        None => {
            let report = fsck::check(area, Options::default(), &mut silent).map_err(|e| e.0)?;
            if report.is_clean() { Ok(()) } else { Err(format!("after use: {:?}", report.problems.first())) }
        }
    }
}
