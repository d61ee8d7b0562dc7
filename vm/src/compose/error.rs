// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of a compose file: where they stand in the file, and what they say to a user.

use std::path::PathBuf;

use toml::{Table, Value};

use super::check::NAMES;

/// An error of a compose file.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{}{}: {message}", file.display(), line.map(|l| format!(":{l}")).unwrap_or_default())]
pub struct ComposeError {
    pub file: PathBuf,
    /// Line, from 1.
    pub line: Option<usize>,
    /// The error and its remedy.
    pub message: String,
}

/// Line, from 1, of a byte offset.
pub(super) fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset.min(text.len())].iter().filter(|&&b| b == b'\n').count() + 1
}

/// Line, from 1, where `key` stands in `[table]`; the table's own line if the key has none.
pub(super) fn locate(text: &str, table: &str, key: &str) -> Option<usize> {
    let mut inside = table.is_empty();
    let mut of_table = None;
    for (n, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('[') {
            let found = header(line).unwrap_or_default();
            if found == format!("{table}.{key}") {
                return Some(n + 1);
            }
            inside = found == table;
            if inside {
                of_table = Some(n + 1);
            }
        } else if inside && !key.is_empty() {
            let name = line.split(['=', '.']).next().unwrap_or("").trim();
            if line.contains('=') && name == key {
                return Some(n + 1);
            }
        }
    }
    of_table
}

/// Of a line that should open a table and is no TOML, as with a name of other letters: what is wrong with it.
pub(super) fn bad_header(text: &str, line: usize) -> Option<String> {
    let line = text.lines().nth(line - 1)?.trim();
    let is_bad = line.starts_with('[') && header(line).is_none();
    is_bad.then(|| format!("{line} names no table; the names of VMs, zones and the like: {NAMES}"))
}

/// The table that a line opens, [vm."a b"] say: its keys with dots between them. None: the line opens none.
fn header(line: &str) -> Option<String> {
    let mut table: Table = line.parse().ok()?;
    let mut keys = Vec::new();
    while let Some((key, value)) = table.into_iter().next() {
        keys.push(key);
        table = match value {
            Value::Table(inner) => inner,
            Value::Array(mut tables) => tables.pop()?.try_into().ok()?,
            _ => return None,
        };
    }
    Some(keys.join("."))
}

/// Makes serde's message about the value at `path` ("vm.a.cpus"; "." for the whole file) one for people: unknown keys get their table and
/// the nearest valid key, other errors the key that they are about.
pub(super) fn explain(path: &str, message: &str) -> String {
    let whole_file = path == ".";
    let in_table = |table: &str| {
        if table.is_empty() { " at the top level".to_owned() } else { format!(" in [{table}]") }
    };
    if let Some(rest) = message.strip_prefix("unknown field `") {
        let mut quoted = rest.split('`');
        let key = quoted.next().unwrap_or_default();
        let valid: Vec<&str> = quoted.skip(1).step_by(2).collect();
        let hint = match nearest(key, valid.iter().copied()) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!("valid keys: {}", valid.join(", ")),
        };
        // The path ends with the unknown key itself.
        let table = path.rsplit_once('.').map_or("", |(table, _)| table);
        return format!("unknown key '{key}'{}; {hint}", in_table(table));
    }
    if let Some(rest) = message.strip_prefix("missing field `") {
        let key = rest.split('`').next().unwrap_or_default();
        return format!("key '{key}' is missing{}; add it", in_table(if whole_file { "" } else { path }));
    }
    let message = message.trim().replace('\n', ": ");
    if whole_file { message } else { format!("{path}: {message}") }
}

/// The candidate nearest to `word`, if one is near enough to be meant.
pub fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(1) + 1;
    candidates.map(|c| (strsim::osa_distance(word, c), c)).filter(|(d, _)| *d <= limit).min().map(|(_, c)| c)
}
