// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names that members made, as they are shown to people. A name may have any bytes but '/' and NUL: sent to a terminal as they are, some move its
//! cursor, change its title, or have it type. JSON gets names as they are, since its strings escape these.

use std::ffi::OsStr;
use std::fmt::{self, Display, Formatter, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Text that a terminal shows and does not obey: control characters, and those that turn the direction of writing, are escaped as Rust does.
pub struct Shown<'a>(&'a [u8]);

/// Shows a name or a message that has one.
pub fn shown<T: AsRef<[u8]> + ?Sized>(name: &T) -> Shown<'_> {
    Shown(name.as_ref())
}

/// Shows a path.
pub fn shown_path(path: &Path) -> Shown<'_> {
    let name: &OsStr = path.as_ref();
    Shown(name.as_bytes())
}

fn is_obeyed(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

impl Display for Shown<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        for c in String::from_utf8_lossy(self.0).chars() {
            if is_obeyed(c) {
                text.extend(c.escape_default());
            } else {
                text.write_char(c)?;
            }
        }
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_obeys_nothing_in_a_name() {
        let name = "a\u{1b}]0;title\u{7}\r\n\u{9b}2J\u{202e}txt.exe Grüße\tb";
        let text = shown(name).to_string();
        assert!(!text.chars().any(is_obeyed), "{text:?}");
        assert_eq!(text, r"a\u{1b}]0;title\u{7}\r\n\u{9b}2J\u{202e}txt.exe Grüße\tb");
        assert_eq!(shown(b"no\xfftext").to_string(), "no\u{fffd}text");
        assert_eq!(format!("{:<4}|", shown("é")), "é   |");
        assert_eq!(shown_path(Path::new("x\ny")).to_string(), r"x\ny");
    }
}
