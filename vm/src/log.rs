// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Logs of the supervisor and of consoles. Writing one never fails and never panics: what a full or absent folder does not take is lost, and
//! counted; when there is room again the log says how much is missing. A log has a bounded size. It is in a folder that only its user can open: one that
//! has vanished is made again, and one that another user has made in its place gets no word.

use std::borrow::Cow;
use std::fmt::Arguments;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::project::state;

/// A log that has grown to this many bytes is renamed to `NAME.1` and begun anew.
pub const LIMIT: u64 = 4 << 20;

/// The path of the log before this one.
pub fn before(path: &Path) -> PathBuf {
    let mut old = path.to_owned().into_os_string();
    old.push(".1");
    old.into()
}

/// A log in a file.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: Option<File>,
    length: u64,
    /// Bytes that could not be written since the last that could.
    lost: u64,
}

impl Log {
    /// A log in this file, which goes on where it is there already.
    pub fn new(path: &Path) -> Log {
        let mut log = Log { path: path.to_owned(), file: None, length: 0, lost: 0 };
        // The first write tries again.
        let _full = log.begin();
        log
    }

    fn begin(&mut self) -> io::Result<()> {
        self.file = None;
        self.check_folder()?;
        let opened = File::options().create(true).append(true).open(&self.path)?;
        self.length = opened.metadata()?.len();
        self.file = Some(opened);
        Ok(())
    }

    /// # Errors
    /// See [`state::renew`].
    fn check_folder(&self) -> io::Result<()> {
        self.path.parent().map_or(Ok(()), |folder| state::renew(folder).map_err(io::Error::other))
    }

    /// Writes what there is room for.
    pub fn write(&mut self, data: &[u8]) {
        let before = self.lost;
        if before > 0 {
            let gap = format!("\n[tombolo: {before} bytes are missing here]\n");
            if self.try_write(gap.as_bytes()).is_err() {
                self.lost += data.len() as u64;
                return;
            }
            self.lost = 0;
        }
        if self.try_write(data).is_err() {
            self.lost += data.len() as u64;
        }
    }

    fn try_write(&mut self, data: &[u8]) -> io::Result<()> {
        if self.length + data.len() as u64 > LIMIT {
            self.check_folder()?;
            if std::fs::rename(&self.path, before(&self.path)).is_err() {
                // It stays bounded all the same.
                let _gone = File::options().write(true).open(&self.path).and_then(|file| file.set_len(0));
            }
            self.begin()?;
        }
        if self.file.is_none() {
            self.begin()?;
        }
        let Some(file) = &mut self.file else { return Err(io::ErrorKind::NotFound.into()) };
        self.length += data.len() as u64;
        file.write_all(data)
    }
}

/// This process' log; none: the standard error.
static OWN: Mutex<Option<Log>> = Mutex::new(None);

/// The file with the words of a supervisor's panics; `dir` is its project's folder.
pub fn panics(dir: &Path) -> PathBuf {
    dir.join("supervisor.panic")
}

/// Sends what this process [says](crate::say) into a file, and what it writes to its standard error (a panic's words) into another.
///
/// # Errors
/// When the folder can't be written to.
pub fn open(path: &Path) -> io::Result<()> {
    let words = panics(path.parent().unwrap_or(Path::new("/")));
    let words = File::create(words).or_else(|_| File::create("/dev/null"))?;
    rustix::stdio::dup2_stderr(&words)?;
    *OWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(Log::new(path));
    Ok(())
}

/// Goes on with the log of the program that this process was before, which has sent the standard error where it belongs.
pub fn resume(path: &Path) {
    *OWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(Log::new(path));
}

/// `text` without what a terminal would obey: words of guests are among what is said.
pub fn plain(text: &str) -> Cow<'_, str> {
    let obeyed = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if text.contains(obeyed) { text.replace(obeyed, "\u{fffd}").into() } else { text.into() }
}

/// Writes a line for [`crate::say`].
pub fn say(text: Arguments<'_>) {
    let line = format!("tombolo: {}\n", plain(&text.to_string()));
    match &mut *OWN.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(log) => log.write(line.as_bytes()),
        // The reader may have gone.
        None => show(&line),
    }
}

/// Writes to the standard error what its reader may have left: no command depends on being watched.
pub fn show(text: &str) {
    drop(io::stderr().write_all(text.as_bytes()));
}

/// Set by `-v`.
static VERBOSE: AtomicBool = AtomicBool::new(false);

/// Says from here on what only those who ask for more want to know.
pub fn set_verbose() {
    VERBOSE.store(true, Ordering::Relaxed);
}

/// Returns whether the user gave `-v`.
pub fn is_verbose() -> bool {
    VERBOSE.load(Ordering::Relaxed)
}

/// Says a line in the log of this process. Unlike `eprintln!` it never panics.
#[macro_export]
macro_rules! say {
    ($($argument:tt)*) => { $crate::log::say(::std::format_args!($($argument)*)) };
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_log_that_had_no_room_says_how_much_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let mut log = Log::new(&path);
        log.write(b"lost");
        log.write(b"lost too");
        std::fs::remove_file(&path).unwrap();
        log.begin().unwrap();
        log.write(b"kept\n");
        assert_eq!(std::fs::read(&path).unwrap(), b"\n[tombolo: 12 bytes are missing here]\nkept\n");
    }

    #[test]
    fn words_of_guests_do_nothing_to_a_terminal() {
        assert_eq!(plain("two\n\tlines, ünï"), "two\n\tlines, ünï");
        assert_eq!(plain("\x1b]0;title\x07\u{9b}2J\r"), "\u{fffd}]0;title\u{fffd}\u{fffd}2J\u{fffd}");
    }

    #[test]
    fn a_log_whose_folder_is_gone_begins_anew_at_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("folder");
        let mut log = Log::new(&folder.join("log"));
        std::fs::remove_dir_all(&folder).unwrap();
        let half = vec![b'x'; 3 << 20];
        log.write(&half);
        log.write(&half);
        assert_eq!(std::fs::metadata(folder.join("log")).unwrap().len(), 3 << 20);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        // Another user's, in its place.
        std::fs::remove_dir_all(&folder).unwrap();
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
        log.write(&half);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    }
}
