// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A safe interface to the core: [`Filesystem`] is one member's handle on a file system in an [`Area`].
//!
//! Methods map one to one to the core's functions (`files/core/tfs.h` defines them); errors are the core's errno values. Any number of threads may
//! use a handle.
//!
//! - `names`: lookups, creation, renames, listings.
//! - `data`: reads, writes, locks of files, extended attributes.

mod data;
mod names;

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use crate::area::Area;
use crate::caller;
use crate::change::Teller;
use crate::log;
use crate::shown::shown;
use crate::sys;

/// A result of the core, with its errno.
pub type Result<T> = std::result::Result<T, Errno>;

pub use data::{LockWait, Pin};
pub use names::Expect;
pub use sys::tfs_attr as Attr;
pub use sys::tfs_file_lock as FileLock;
pub use sys::tfs_run as Run;
pub use sys::tfs_statfs as Statfs;

/// Inode number of the root directory, which is never freed.
pub const ROOT: u64 = sys::TFS_ROOT_INO as u64;

/// Names one inode for its whole life. Operations on a handle whose inode was freed give ESTALE, even if another inode has its number now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    /// Inode number.
    pub ino: u64,
    /// Grows each time the number is given to a new inode; 0: the number's present inode.
    pub generation: u32,
}

/// Makes a handle of the number's present inode, for callers that know that it can't be freed meanwhile.
impl From<u64> for Handle {
    fn from(ino: u64) -> Handle {
        Handle { ino, generation: 0 }
    }
}

impl From<&Attr> for Handle {
    fn from(attr: &Attr) -> Handle {
        Handle { ino: attr.ino, generation: attr.generation }
    }
}

impl From<Handle> for sys::tfs_handle {
    fn from(h: Handle) -> sys::tfs_handle {
        sys::tfs_handle { ino: h.ino, generation: h.generation }
    }
}

impl From<sys::tfs_handle> for Handle {
    fn from(h: sys::tfs_handle) -> Handle {
        Handle { ino: h.ino, generation: h.generation }
    }
}

/// Converts to the core's type.
fn raw(h: impl Into<Handle>) -> sys::tfs_handle {
    h.into().into()
}

pub(crate) fn check(ret: c_int) -> Result<()> {
    check_len(i64::from(ret)).map(|_| ())
}

fn check_len(ret: i64) -> Result<u64> {
    u64::try_from(ret).map_err(|_| Errno::from_raw_os_error(i32::try_from(-ret).unwrap_or(libc::EIO)))
}

/// Called for each damage that the core finds: a text and two details.
pub type DamageLog = Box<dyn Fn(&str, u64, u64) + Send + Sync>;

/// Rings the doorbell of a member, best effort.
pub type Ringer = Box<dyn Fn(u32) + Send + Sync>;

struct Host {
    raw: sys::tfs_host,
    log: DamageLog,
    ringer: Option<Ringer>,
    area: Area,
    waits: WaitLog,
}

/// Called when a living member has not released a lock, or removed blocks, for long: its number and name, whether it answers its doorbell, and
/// seconds.
pub type WaitLog = Box<dyn Fn(u32, &str, bool, u64) + Send + Sync>;

fn tell_wait(member: u32, name: &str, answers: bool, seconds: u64) {
    let how = if answers { "it is at work" } else { "it does not answer: suspended, or its machine hangs" };
    log::say(&format!("waiting for member {member} ({}) for {seconds} s; {how}", shown(name)));
}

extern "C" fn on_waiting(ctx: *mut c_void, member: u32, answers: bool, seconds: u64) {
    // SAFETY: ctx is the Host of a living Filesystem.
    let host = unsafe { &*ctx.cast::<Host>() };
    (host.waits)(member, &host.area.member_name(member), answers, seconds);
}

extern "C" fn on_killed(_ctx: *mut c_void) -> bool {
    caller::is_killed()
}

extern "C" fn on_damage(ctx: *mut c_void, what: *const c_char, a: u64, b: u64) {
    // SAFETY: ctx is the Host of a living Filesystem, what is static text of the core.
    let (host, what) = unsafe { (&*ctx.cast::<Host>(), CStr::from_ptr(what)) };
    (host.log)(&what.to_string_lossy(), a, b);
}

extern "C" fn on_ring(ctx: *mut c_void, member: u32) {
    // SAFETY: ctx is the Host of a living Filesystem.
    let host = unsafe { &*ctx.cast::<Host>() };
    if let Some(ring) = &host.ringer {
        ring(member);
    }
}

/// Options for making a file system.
#[derive(Clone, Debug)]
pub struct Mkfs {
    /// The file system's UUID.
    pub uuid: [u8; 16],
    /// At most 31 bytes.
    pub label: String,
    /// Owner of the root directory.
    pub uid: u32,
    /// Group of the root directory.
    pub gid: u32,
    /// Permission bits of the root directory.
    pub mode: u32,
    /// Seed of the directories' hash.
    pub hash_seed: u64,
    /// The memory outlives power: members order their stores for that.
    pub persistent: bool,
}

impl Default for Mkfs {
    fn default() -> Mkfs {
        let uuid = uuid::Uuid::new_v4();
        let seed = uuid::Uuid::new_v4().as_u64_pair().0;
        Mkfs {
            uuid: *uuid.as_bytes(),
            label: String::new(),
            uid: 0,
            gid: 0,
            mode: 0o755,
            hash_seed: seed,
            persistent: false,
        }
    }
}

/// Properties of a new inode.
#[derive(Clone, Debug)]
pub struct Create<'a> {
    /// With the file type.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// major << 20 | minor.
    pub rdev: u64,
    /// Target of a symbolic link.
    pub target: Option<&'a [u8]>,
    /// An image of extended attributes ([`xattr_image`]), or empty.
    pub xattrs: &'a [u8],
    /// Also takes the opener's reference.
    pub open: bool,
}

impl Create<'_> {
    /// A new inode with this mode, owned by root.
    pub fn mode(mode: u32) -> Create<'static> {
        Create { mode, uid: 0, gid: 0, rdev: 0, target: None, xattrs: &[], open: false }
    }
}

/// Packs extended attributes into the form that a new object takes.
pub fn xattr_image(attrs: &[(&[u8], &[u8])]) -> Vec<u8> {
    if attrs.is_empty() {
        return Vec::new();
    }
    let mut image = vec![0; size_of::<sys::tfs_xattr_image>()];
    for (name, value) in attrs {
        image.extend_from_slice(&(name.len() as u16).to_le_bytes());
        image.extend_from_slice(&[0; 2]);
        image.extend_from_slice(&(value.len() as u32).to_le_bytes());
        image.extend_from_slice(name);
        image.extend_from_slice(value);
        image.resize(image.len().next_multiple_of(8), 0);
    }
    let (bytes, count) = (image.len() as u32, attrs.len() as u32);
    image[0..4].copy_from_slice(&bytes.to_le_bytes());
    image[4..8].copy_from_slice(&count.to_le_bytes());
    image
}

/// One name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name, any bytes but '/' and NUL.
    pub name: Vec<u8>,
    /// Inode number.
    pub ino: u64,
    /// `DT_*`.
    pub kind: u8,
    /// Cookie of the following entry.
    pub next: u64,
}

/// One member's handle on a file system. Dropping it closes the file system.
pub struct Filesystem {
    tfs: UnsafeCell<sys::tfs>,
    host: Box<Host>,
    area: Area,
    close: bool,
    teller: Teller,
}

// SAFETY: the core's functions may be called from any thread at once on one handle (tfs.h: the two hints in it are racy
// on purpose); the memory behind it is shared anyway.
unsafe impl Send for Filesystem {}
// SAFETY: as above.
unsafe impl Sync for Filesystem {}

impl Drop for Filesystem {
    fn drop(&mut self) {
        if self.close {
            // SAFETY: opened in open(), no reference from the outside is left.
            unsafe { sys::tfs_close(self.tfs.get()) }
        }
    }
}

/// Makes an empty file system in an area, over whatever is there.
pub fn mkfs(area: &Area, options: &Mkfs) -> Result<()> {
    if !area.writable() {
        return Err(Errno::ROFS);
    }
    let label = CString::new(options.label.as_str()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the area is mapped writable with this length; uuid has 16 bytes; label is terminated.
    check(unsafe {
        sys::tfs_mkfs(
            area.base().cast(),
            area.size(),
            options.uuid.as_ptr(),
            label.as_ptr(),
            options.hash_seed,
            area.offset(),
            options.uid,
            options.gid,
            options.mode,
            if options.persistent { u64::from(sys::TFS_RO_COMPAT_PERSISTENT) } else { 0 },
        )
    })
}

impl Filesystem {
    /// Opens a file system as the area's incarnation. EINVAL: there is none; EPROTONOSUPPORT: of another version; EUCLEAN: damaged.
    pub fn open(area: Area) -> Result<Filesystem> {
        Filesystem::open_with(
            area,
            Box::new(|what, a, b| log::say(&format!("damaged file system: {what} ({a:#x}, {b:#x})"))),
        )
    }

    /// Opens with a callback for damage.
    pub fn open_with(area: Area, log: DamageLog) -> Result<Filesystem> {
        let (area_of_host, waits) = (area.clone(), Box::new(tell_wait));
        let mut host =
            Box::new(Host { raw: sys::tfs_host::default(), log, ringer: None, area: area_of_host, waits });
        host.raw = sys::tfs_host {
            ctx: (&raw mut *host).cast(),
            damage: Some(on_damage),
            ring: Some(on_ring),
            waiting: Some(on_waiting),
            killed: Some(on_killed),
            ending: false,
        };
        let os = (&raw mut host.raw).cast();
        let mut tfs = sys::tfs { os, read_only: !area.writable(), ..Default::default() };
        let (member, epoch) = area.incarnation().map_or((0, 0), |own| (own.member, own.epoch));
        // SAFETY: the area and the member table stay mapped as long as self.area lives.
        check(unsafe {
            sys::tfs_open(&mut tfs, area.base().cast(), area.size(), area.members(), member, epoch)
        })?;
        tfs.os = (&raw mut host.raw).cast();
        let close = area.writable();
        Ok(Filesystem { tfs: UnsafeCell::new(tfs), host, area, close, teller: Teller::default() })
    }

    /// Sets how to ring other members. Without it they notice their pending bits later, by polling.
    pub fn ring_by(&mut self, ringer: Option<Ringer>) {
        self.host.ringer = ringer;
    }

    /// Sets the callback for long waits for a member; the default writes to standard error.
    pub fn tell_waits_to(&mut self, log: WaitLog) {
        self.host.waits = log;
    }

    /// Called when this member's doorbell rang: threads that wait for locks look again.
    pub fn rang(&self) {
        // SAFETY: an open handle.
        unsafe { sys::tfs_rang(self.raw()) }
    }

    /// Takes the member's pending bits by `take`, in another thread than that which calls [`Filesystem::let_go`]. After TMB_PENDING_REVOKE, the caller has
    /// that thread call it.
    ///
    /// # Errors
    /// Those of `take`.
    pub fn take_pending<E>(
        &self,
        take: impl FnOnce() -> std::result::Result<u64, E>,
    ) -> std::result::Result<u64, E> {
        // SAFETY: an open handle.
        unsafe { sys::tfs_take_begin(self.raw()) };
        let taken = take();
        // SAFETY: as above.
        unsafe { sys::tfs_take_end(self.raw(), *taken.as_ref().unwrap_or(&0)) };
        taken
    }

    /// Called after TMB_PENDING_REVOKE was cleared: this handle maps nothing, so blocks deferred for its readers become free. True: one of them
    /// has not finished, or another member has the lock of these blocks, and the caller calls it once more after a while.
    pub fn let_go(&self) -> bool {
        self.let_go_of(|| ())
    }

    /// As [`Filesystem::let_go`], for a handle that maps files: `revoke` takes its stale mappings back.
    pub fn let_go_of(&self, revoke: impl FnOnce()) -> bool {
        // SAFETY: an open handle.
        unsafe { sys::tfs_revoke(self.raw()) };
        revoke();
        // SAFETY: as above.
        unsafe { sys::tfs_revoked(self.raw()) }
    }

    /// Ends all waits for other members in this handle, and later ones: such calls give EINTR, as if the thread had been killed.
    pub fn end_waits(&self) {
        self.ending().store(true, Ordering::SeqCst);
        self.rang();
    }

    /// Returns whether [`Filesystem::end_waits`] was called.
    pub fn waits_are_over(&self) -> bool {
        self.ending().load(Ordering::SeqCst)
    }

    fn ending(&self) -> &AtomicBool {
        // SAFETY: a flag in the Host, which lives as long as self; the core reads it by atomic loads.
        unsafe { AtomicBool::from_ptr((&raw const self.host.raw.ending).cast_mut()) }
    }

    /// Drops the handle without closing the file system, as a process' death does. For tests of recovery.
    pub fn abandon(mut self) {
        self.close = false;
    }

    pub(crate) fn teller(&self) -> &Teller {
        &self.teller
    }

    /// The area that holds the file system.
    pub fn area(&self) -> &Area {
        &self.area
    }

    pub(crate) fn raw(&self) -> *mut sys::tfs {
        debug_assert!(!self.host.raw.ctx.is_null());
        self.tfs.get()
    }

    fn writable(&self) -> Result<*mut sys::tfs> {
        if self.area.writable() { Ok(self.raw()) } else { Err(Errno::ROFS) }
    }

    /// Blocks and inodes, in all and free.
    pub fn statfs(&self) -> Statfs {
        let mut out = Statfs::default();
        // SAFETY: an open handle.
        unsafe { sys::tfs_statfs(self.raw(), &mut out) };
        out
    }

    /// The directory that this member is confined to; [`ROOT`] if it is not.
    pub fn root(&self) -> Handle {
        // SAFETY: an open handle, whose root stays as it is.
        let root = unsafe { (*self.raw()).root };
        Handle { ino: root.ino, generation: root.generation }
    }

    /// For the host: grants limits and a root to a member, see `tfs_grant`. Limits in blocks and inodes, 0: none.
    pub fn grant(
        &self,
        member: u32,
        account: &str,
        blocks: u64,
        inodes: u64,
        root: Option<Handle>,
    ) -> Result<()> {
        let root = raw(root.unwrap_or_default());
        let (name, len) = (account.as_ptr().cast(), u32::try_from(account.len()).map_err(|_| Errno::INVAL)?);
        // SAFETY: an open handle; name with its length.
        check(unsafe { sys::tfs_grant(self.writable()?, member, name, len, blocks, inodes, root) })
    }

    /// Stops all changes by other members until [`Filesystem::thaw`] or this member's death. EBUSY: another member has frozen it, or does not revoke
    /// a mapping. STALE, also of the next two: the others have ended the freeze, since it was not renewed for a minute.
    pub fn freeze(&self) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_freeze(self.writable()?) })
    }

    /// Tells the other members that this one still needs the freeze.
    pub fn renew_freeze(&self) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_renew_freeze(self.raw()) })
    }

    /// Lets other members go on. On success none of them has changed anything since the freeze.
    pub fn thaw(&self) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_thaw(self.raw()) })
    }

    /// Returns the number of deferred blocks, and the members that may still look at them.
    pub fn deferred(&self) -> (u64, Vec<u32>) {
        let word = |at: usize| self.area.word(at as u64).unwrap_or(0);
        let members = word(offset_of!(sys::tfs_super, deferred_members));
        let map = word(offset_of!(sys::tfs_super, map_start)).saturating_mul(u64::from(sys::TFS_BLOCK));
        let mut bytes = vec![0; 4096];
        let mut blocks = 0;
        for at in (0..word(offset_of!(sys::tfs_super, blocks))).step_by(bytes.len()) {
            if !self.area.copy_out(map.saturating_add(at), &mut bytes) {
                break;
            }
            blocks += bytes.iter().filter(|b| u32::from(**b) == sys::TFS_MAP_DEFERRED).count() as u64;
        }
        (blocks, (0..sys::TFS_MEMBERS).filter(|m| members >> m & 1 == 1).collect())
    }

    /// Recovers a dead member.
    pub fn recover(&self, member: u32) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_recover(self.writable()?, member) })
    }

    /// Recovers all dead members.
    pub fn recover_all(&self) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_recover_all(self.writable()?) })
    }

    pub fn getattr(&self, ino: impl Into<Handle>) -> Result<Attr> {
        let mut out = Attr::default();
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_getattr(self.raw(), raw(ino), &mut out) })?;
        Ok(out)
    }

    /// Sets the attributes that `what` (`TFS_SET_*`) names.
    pub fn setattr(&self, ino: impl Into<Handle>, what: u32, attr: &Attr) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_setattr(self.writable()?, raw(ino), what, attr, std::ptr::null()) })
    }

    /// The same for a caller whose right to it follows from the inode's owner and flags in `checked`. EAGAIN: it has others by now.
    pub fn setattr_as(&self, checked: &Attr, what: u32, attr: &Attr) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_setattr(self.writable()?, raw(Handle::from(checked)), what, attr, checked) })
    }

    /// Updates the access time.
    pub fn touch_atime(&self, ino: impl Into<Handle>, now: i64) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_touch_atime(self.writable()?, raw(ino), now) })
    }

    /// Keeps the inode after its last unlink. The caller counts: once per member.
    pub fn open_ref(&self, ino: impl Into<Handle>) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_open_ref(self.writable()?, raw(ino)) })
    }

    /// [`Filesystem::open_ref`] for callers that hold a lock: waits for nobody. After an error the caller calls [`Filesystem::free_unused`].
    pub(crate) fn open_bit(&self, ino: impl Into<Handle>) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_open_bit(self.writable()?, raw(ino)) })
    }

    /// [`Filesystem::close_ref`] for callers that hold a lock: waits for nobody. Afterwards the caller calls [`Filesystem::free_unused`].
    pub(crate) fn close_bit(&self, ino: impl Into<Handle>) {
        // SAFETY: an open handle.
        unsafe { sys::tfs_close_bit(self.raw(), raw(ino)) }
    }

    /// Frees the inode if it has neither name nor opener; may wait for another member's lock.
    pub(crate) fn free_unused(&self, ino: impl Into<Handle>) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_free_unused(self.writable()?, raw(ino)) })
    }

    /// Drops the reference of [`Filesystem::open_ref`].
    pub fn close_ref(&self, ino: impl Into<Handle>) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_close_ref(self.writable()?, raw(ino)) })
    }

    /// Declares that this member maps the inode's blocks, before the first is mapped. EAGAIN: frozen.
    pub fn map_ref(&self, ino: impl Into<Handle>) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_map_ref(self.writable()?, raw(ino)) })
    }

    /// Declares that no block is mapped any more.
    pub fn unmap_ref(&self, ino: impl Into<Handle>) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_unmap_ref(self.writable()?, raw(ino)) })
    }

    /// Writes the inode's data back where the memory is persistent.
    pub fn sync(&self, ino: impl Into<Handle>) -> Result<()> {
        // SAFETY: an open handle.
        check(unsafe { sys::tfs_sync(self.raw(), raw(ino)) })
    }
}

/// The time in ns since 1970.
pub fn now() -> i64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}
