// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Members that survive another one's death: in a directory of their own they make, fill, lock, read, cut and remove files at any time, also
//! before the death is known and during the recovery. Their files must be there at the end, and no other remains of theirs.
//!
//! They allocate near the other members' blocks: a member's search for free blocks starts at a place that follows from its number.

use std::collections::BTreeMap;

use rustix::io::Errno;
use tombolo_files::fs::{self, Create, FileLock, Filesystem, Handle};
use tombolo_files::sys;

use crate::world::{self, Tree, World};

/// The directory that only they use.
pub const HOME: &str = "living";
/// Members whose searches start where those of members 2 and 3 do: the one that dies, and the one that made the files before.
const MEMBERS: [u32; 2] = [10, 11];
const LEN: usize = 5000;

pub struct Living {
    members: Vec<Filesystem>,
    work: Work,
}

/// The files that they have made.
#[derive(Clone)]
pub struct Work {
    home: Handle,
    /// By path: its maker, handle, and the byte that fills it.
    files: BTreeMap<String, (usize, Handle, u8)>,
    made: usize,
}

impl Living {
    pub fn join(world: &World, home: Handle) -> Result<Living, String> {
        let members = MEMBERS.iter().map(|m| world.open(*m)).collect::<Result<_, _>>()?;
        Ok(Living { members, work: Work { home, files: BTreeMap::new(), made: 0 } })
    }

    pub fn work(&self) -> Work {
        self.work.clone()
    }

    /// Makes the same members again as they were after this work, in memory that is as it was then.
    pub fn again(world: &World, work: Work) -> Result<Living, String> {
        let members = MEMBERS.iter().map(|m| world.open_again(*m)).collect::<Result<_, _>>()?;
        Ok(Living { members, work })
    }

    /// One turn: reads the present files; each member makes a file and locks it; one removes the oldest. Every second turn has changes of other kinds, too.
    pub fn go_on(&mut self) -> Result<(), String> {
        self.read()?;
        for i in 0..self.members.len() {
            let (name, byte) = (format!("l{}", self.work.made), b'a' + (self.work.made % 26) as u8);
            self.work.made += 1;
            let fs = &self.members[i];
            let file = match fs.create(
                self.work.home,
                Some(name.as_bytes()),
                &Create::mode(libc::S_IFREG | 0o600),
            ) {
                Err(Errno::NOSPC) => continue,
                made => made.map_err(|e| format!("create {name}: {e}"))?,
            };
            match fs.pwrite(file, &[byte; LEN], 0, false) {
                Ok(LEN) => {
                    let lock = FileLock {
                        owner: 1,
                        end: 9,
                        type_: sys::TFS_LK_WRITE,
                        kind: sys::TFS_LK_POSIX,
                        ..FileLock::default()
                    };
                    match fs.set_lock(file, &lock) {
                        Err(Errno::NOLCK) => {}
                        done => done.map_err(|e| format!("lock {name}: {e}"))?,
                    }
                    self.work.files.insert(name, (i, file, byte));
                }
                Ok(_) | Err(Errno::NOSPC) => fs
                    .unlink(self.work.home, name.as_bytes(), Some(file))
                    .map_err(|e| format!("unlink {name}: {e}"))?,
                Err(e) => return Err(format!("write to {name}: {e}")),
            }
        }
        if self.work.made % 4 == 0 {
            self.change_and_undo()?;
        }
        if self.work.files.len() > 3 {
            let (name, (i, file, _)) = self.work.files.pop_first().expect("more than three");
            let fs = &self.members[1 - i];
            fs.truncate(file, 1, false).map_err(|e| format!("truncate {name}: {e}"))?;
            fs.unlink(self.work.home, name.as_bytes(), Some(file))
                .map_err(|e| format!("unlink {name}: {e}"))?;
        }
        self.read()
    }

    /// Changes that are undone within the turn: of attributes, links, names and room; a nameless file, and a directory renamed over another one.
    fn change_and_undo(&self) -> Result<(), String> {
        let Some((name, (_, file, byte))) = self.work.files.last_key_value() else { return Ok(()) };
        let ([a, b], home, name) = ([&self.members[0], &self.members[1]], self.work.home, name.as_bytes());
        let fits = |what: &str, done: fs::Result<()>| match done {
            Ok(()) => Ok(true),
            Err(Errno::NOSPC) => Ok(false),
            Err(e) => Err(format!("{what}: {e}")),
        };
        let must = |what: &str, done: fs::Result<()>| done.map_err(|e| format!("{what}: {e}"));
        let value = [*byte; LEN];
        if fits("an attribute", a.xattr_set(*file, b"user.a", Some(&value), 0, None))? {
            if b.xattr_get(*file, b"user.a").as_deref() != Ok(&value[..]) {
                return Err("the attribute has another value".into());
            }
            must("its removal", b.xattr_set(*file, b"user.a", None, 0, None))?;
        }
        if fits("a link", a.link(home, b"link", *file))? {
            must("its removal", b.unlink(home, b"link", Some(*file)))?;
        }
        fits("more room", a.fallocate(*file, sys::TFS_FALLOC_KEEP_SIZE, 0, 3 * LEN as u64))?;
        must("a cut at the end", b.truncate(*file, LEN as u64, false))?;
        if fits("another name", b.rename((home, name), (home, b"other"), 0))? {
            must("the name back", a.rename((home, b"other"), (home, name), 0))?;
        }
        let open = Create { open: true, ..Create::mode(libc::S_IFREG | 0o600) };
        match a.create(home, None, &open) {
            Err(Errno::NOSPC) => {}
            made => {
                let made = made.map_err(|e| format!("a nameless file: {e}"))?;
                if fits("its name", a.link(home, b"named", made))? {
                    must("an exchange", b.rename((home, b"named"), (home, name), libc::RENAME_EXCHANGE))?;
                    must("an exchange", a.rename((home, name), (home, b"named"), libc::RENAME_EXCHANGE))?;
                    must("its removal", b.unlink(home, b"named", Some(made)))?;
                }
                must("its close", a.close_ref(made))?;
            }
        }
        let directory = |fs: &Filesystem, name: &str| match fs.create(
            home,
            Some(name.as_bytes()),
            &Create::mode(libc::S_IFDIR | 0o700),
        ) {
            Err(Errno::NOSPC) => Ok(None),
            made => made.map(Some).map_err(|e| format!("mkdir {name}: {e}")),
        };
        if let Some(first) = directory(a, "first")? {
            let mut left = first;
            if let Some(second) = directory(b, "second")? {
                must("a directory over another", a.rename((home, b"second"), (home, b"first"), 0))?;
                left = second;
            }
            must("rmdir", b.rmdir(home, b"first", Some(left)))?;
        }
        Ok(())
    }

    /// Checks that all their files are as they made them.
    fn read(&self) -> Result<(), String> {
        for (name, (_, file, byte)) in &self.work.files {
            for fs in &self.members {
                let (found, _) =
                    fs.lookup(self.work.home, name.as_bytes()).map_err(|e| format!("{name}: {e}"))?;
                if found != *file {
                    return Err(format!("{name} is {found:?}, not {file:?}"));
                }
                let mut bytes = [0; LEN + 1];
                let n = fs.pread(*file, &mut bytes, 0).map_err(|e| format!("read {name}: {e}"))?;
                if n != LEN || bytes[..n].iter().any(|b| b != byte) {
                    return Err(format!("{name} has {n} bytes, not all {byte}"));
                }
                let attr = fs.getattr(*file).map_err(|e| format!("{name}: {e}"))?;
                if attr.nlink != 1 {
                    return Err(format!("{name} has {} links", attr.nlink));
                }
            }
        }
        Ok(())
    }

    /// Returns the tree without their directory.
    pub fn tree_without(&self, fs: &Filesystem) -> Result<Tree, String> {
        self.read()?;
        let mut tree = world::read(fs)?;
        let home = format!("/{HOME}/");
        let theirs = tree.keys().filter(|path| path.starts_with(&home)).count();
        if theirs != self.work.files.len() {
            return Err(format!("{theirs} files of the living, not {}", self.work.files.len()));
        }
        tree.retain(|path, _| !path.starts_with(&home));
        Ok(tree)
    }
}

impl Drop for Living {
    fn drop(&mut self) {
        self.members.drain(..).for_each(Filesystem::abandon);
    }
}
