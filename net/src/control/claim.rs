// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A claim on the ports of the host that a passt forwards. The keeper of a killed switch ends its passt a moment after the
//! switch, while the keeper of the successor starts one that wants the same ports: the successor waits for the claim first.
//!
//! A claim is a locked file in a folder that only this user can open, named by the network namespace, to which ports belong, and by the
//! ports. The kernel unlocks it when its holder ends. Other users can neither hold a claim nor see one. Without such a folder there are no
//! claims: a passt that finds its ports in use ends, and is started again.

use std::fs::{self, DirBuilder};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::geteuid;
use tombolo_listen::lock::LockFile;

/// The longest wait for the holders of all claims of one start. Those that take longer are no keepers that end, but a running switch with
/// the same ports.
const LONGEST: Duration = Duration::from_secs(2);

/// Time from one look at a claim to the next.
const PAUSE: Duration = Duration::from_millis(10);

/// The time that the claims of one start have left to wait.
#[derive(Debug)]
pub(crate) struct Claims(Duration);

/// A claim, held until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    _lock: LockFile,
    _folder: Folder,
}

/// The folder of a claim.
#[derive(Debug)]
struct Folder(PathBuf);

impl Claims {
    /// Begins a start, which has made no claim yet.
    pub fn new() -> Self {
        Self(LONGEST)
    }

    /// Waits for the claim on these ports, if there is time left. None: it can't be had.
    pub fn wait(&mut self, tcp: &[String], udp: &[String]) -> Option<Claim> {
        self.wait_in(&own_folder(), tcp, udp)
    }

    fn wait_in(&mut self, folder: &Path, tcp: &[String], udp: &[String]) -> Option<Claim> {
        let path = folder.join(name(tcp, udp));
        let begun = Instant::now();
        let end = begun + self.0;
        let claim = loop {
            match make(folder).and_then(|()| Claim::take(folder, &path)) {
                Ok(claim) => break Some(claim),
                Err(err) if err.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                    std::thread::sleep(PAUSE);
                }
                Err(err) => {
                    tracing::debug!("no claim on ports, {}: {err}", path.display());
                    break None;
                }
            }
        };
        self.0 = self.0.saturating_sub(begun.elapsed());
        claim
    }
}

impl Claim {
    /// Takes the claim whose file is at `path` in `folder`.
    ///
    /// # Errors
    /// It is held (`WouldBlock`), or the file can't be opened.
    fn take(folder: &Path, path: &Path) -> io::Result<Self> {
        match LockFile::take(path).map_err(or_gone)? {
            Some(lock) => Ok(Self { _lock: lock, _folder: Folder(folder.to_owned()) }),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Other claims may be in it.
        let _stays = fs::remove_dir(&self.0);
    }
}

/// The folder was there: the holder of the last claim in it has just removed it.
fn or_gone(err: io::Error) -> io::Error {
    if err.kind() == io::ErrorKind::NotFound { io::ErrorKind::WouldBlock.into() } else { err }
}

/// Returns the folder of this user's claims.
fn own_folder() -> PathBuf {
    let user = geteuid();
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(runtime) if !runtime.is_empty() => PathBuf::from(runtime).join("tombolo-net"),
        _ if user.is_root() => "/run/tombolo-net".into(),
        _ => std::env::temp_dir().join(format!("tombolo-net-{}", user.as_raw())),
    }
}

/// Makes the folder of claims if it is not there.
///
/// # Errors
/// It can't be made, or others can change it: they could hold claims then. `WouldBlock`: its last claim has just ended.
fn make(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(err) if err.kind() != io::ErrorKind::AlreadyExists => return Err(err),
        _ => {}
    }
    let meta = fs::symlink_metadata(folder).map_err(or_gone)?;
    if meta.is_dir() && meta.uid() == geteuid().as_raw() && meta.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!("{} is not a folder that only its user can open", folder.display())))
}

/// Returns the name of the claim on these ports.
fn name(tcp: &[String], udp: &[String]) -> String {
    let mut hasher = DefaultHasher::new();
    (tcp, udp).hash(&mut hasher);
    let namespace = fs::metadata("/proc/self/ns/net").map_or(0, |meta| meta.ino());
    format!("{namespace:x}-{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn claim(folder: &Path, port: &str) -> Option<Claim> {
        Claims::new().wait_in(folder, &[port.to_owned()], &[])
    }

    #[test]
    fn of_several_that_want_the_same_ports_one_has_the_claim_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let folder = &dir.path().join("claims");
        let first = claim(folder, "8080:80").unwrap();
        let other = claim(folder, "8081:80").unwrap();
        let holders = AtomicUsize::new(1);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    let claim = claim(folder, "8080:80").unwrap();
                    assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                    holders.fetch_sub(1, Ordering::SeqCst);
                    drop(claim);
                });
            }
            holders.store(0, Ordering::SeqCst);
            drop(first);
        });
        drop(other);
        assert!(!folder.exists(), "left behind");
    }

    #[test]
    fn all_claims_of_a_start_that_a_running_switch_holds_are_given_up_after_one_wait() {
        let dir = tempfile::tempdir().unwrap();
        let folder = &dir.path().join("claims");
        let ports: Vec<_> = (0..8).map(|n| format!("{n}:80")).collect();
        let _held: Vec<_> = ports.iter().map(|port| claim(folder, port).unwrap()).collect();
        let begun = Instant::now();
        let mut claims = Claims::new();
        for port in ports {
            assert!(claims.wait_in(folder, &[port], &[]).is_none());
        }
        assert!(begun.elapsed() >= LONGEST, "the holders could have ended");
        assert_eq!(claims.0, Duration::ZERO);
        assert!(claims.wait_in(folder, &["9090:90".into()], &[]).is_some(), "a free one takes no time");
    }

    #[test]
    fn a_folder_that_others_can_enter_or_a_link_to_one_has_no_claims_and_costs_no_time() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, link) = (dir.path().join("folder"), dir.path().join("link"));
        fs::create_dir(&folder).unwrap();
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        let has = |folder: &Path| {
            let mut claims = Claims::new();
            let has = claims.wait_in(folder, &["8080:80".into()], &[]).is_some();
            assert!(has || claims.0 > LONGEST / 2, "{:?} left", claims.0);
            has
        };
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o711)).unwrap();
        assert!(!has(&folder));
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
        assert!(!has(&link));
        assert!(!has(&dir.path().join("missing/folder")));
        assert!(has(&folder));
    }
}
