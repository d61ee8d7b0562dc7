// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The display of a long start: on a terminal the time and the last line of a log, elsewhere one line at the beginning.

use std::fs::File;
use std::io::{IsTerminal, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A line on the error output that goes away when this is dropped.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Says what takes long.
    pub fn begin(what: &str) -> Self {
        let bar = ProgressBar::new_spinner();
        if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar.enable_steady_tick(Duration::from_millis(250));
        } else {
            eprintln!("lab: {what}");
        }
        bar.set_message(what.to_owned());
        Self { bar }
    }

    /// Shows the last line of a log that grows; none is no error.
    pub fn show_end_of(&mut self, log: &Path) {
        if let Some(line) = last_line(log) {
            self.bar.set_message(line);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The last line that ends, without control characters.
fn last_line(log: &Path) -> Option<String> {
    const ENOUGH: u64 = 1024;
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(ENOUGH))).ok()?;
    let mut end = Vec::new();
    file.take(ENOUGH).read_to_end(&mut end).ok()?;
    let text = String::from_utf8_lossy(&end);
    let (whole, _) = text.rsplit_once('\n')?;
    let line: String = whole.lines().next_back()?.chars().filter(|c| !c.is_control()).collect();
    Some(line).filter(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_line_is_shown_without_what_would_move_the_cursor() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        assert_eq!(last_line(&log), None);
        std::fs::write(&log, "one\r\n\x1b[2Jtwo\r\nthr").unwrap();
        assert_eq!(last_line(&log), Some("[2Jtwo".into()));
        std::fs::write(&log, "x".repeat(5000) + "\nlast\n").unwrap();
        assert_eq!(last_line(&log), Some("last".into()));
    }
}
