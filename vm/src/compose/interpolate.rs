// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Variables in a compose file's strings, as Compose files of containers have them: `${NAME}`, `$NAME`, `${NAME:-default}`, `${NAME:?message}`,
//! `${NAME:+alternative}`, each also without the colon, which then asks only whether the variable is set; `$$` is a dollar sign. One difference:
//! a variable that is not set is an error, not the empty string.
//!
//! The values come from the environment, and from env files for what the environment lacks.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml_edit::{ImDocument, Item, Value};

use super::{ComposeError, line_of};

/// The greatest depth of defaults in defaults.
const DEPTH: usize = 16;

/// Values by name.
#[derive(Clone, Debug, Default)]
pub struct Variables(BTreeMap<String, String>);

impl Variables {
    /// The process's environment, and beneath it these env files, the last first; without any the file `.env` beside the compose file, if it is
    /// there.
    ///
    /// # Errors
    /// Names the env file that can't be read.
    pub fn load(compose_file: &Path, env_files: &[PathBuf]) -> Result<Variables, ComposeError> {
        let mut values = BTreeMap::new();
        let beside = compose_file.with_file_name(".env");
        let files = if env_files.is_empty() && beside.is_file() { &[beside][..] } else { env_files };
        for file in files {
            let failed = |e: dotenvy::Error| ComposeError {
                file: file.clone(),
                line: None,
                message: format!("is no env file of lines NAME=VALUE: {e}"),
            };
            let text =
                File::open(file).and_then(super::read_all).map_err(|e| failed(dotenvy::Error::Io(e)))?;
            // Editors of other systems begin a text with a mark of its encoding.
            let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text);
            for pair in dotenvy::from_read_iter(text) {
                let (name, value) = pair.map_err(failed)?;
                values.insert(name, value);
            }
        }
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        values.extend(std::env::vars_os().filter_map(text));
        Ok(Variables(values))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

/// A compose file's text in which strings have been replaced. Lines keep their numbers.
#[derive(Debug)]
pub struct Expanded<'a> {
    text: &'a str,
    replaced: Vec<Replaced>,
}

#[derive(Debug)]
struct Replaced {
    /// The key, as serde's errors have it: "vm.a.disks[0].path".
    key: String,
    span: Range<usize>,
    value: String,
    /// Written without quotes: the key wants a number or a boolean.
    bare: bool,
}

impl<'a> Expanded<'a> {
    /// Replaces the variables in all strings of `text`. What is no TOML stays as it is, for the parser to tell.
    ///
    /// # Errors
    /// (line, message) of the first string that can't be expanded.
    pub fn new(text: &'a str, variables: &Variables) -> Result<Expanded<'a>, (usize, String)> {
        let mut strings = Vec::new();
        if let Ok(document) = ImDocument::parse(text) {
            for (key, item) in document.iter() {
                collect(key.to_owned(), item, &mut strings);
            }
        }
        let mut replaced = Vec::new();
        for (key, span, template) in strings {
            let value = expand(&template, variables, DEPTH)
                .map_err(|message| (line_of(text, span.start), format!("{key}: {message}")))?;
            replaced.push(Replaced { key, span, value, bare: false });
        }
        replaced.sort_by_key(|r| r.span.start);
        Ok(Expanded { text, replaced })
    }

    /// Writes the value of `key` without quotes from now on, with those of the same list and of other tables' same key; whether that is possible and was
    /// not done before.
    pub fn unquote(&mut self, key: &str) -> bool {
        let is_bare = |value: &str| {
            value.parse::<i64>().is_ok() || value.parse::<bool>().is_ok() || value.parse::<f64>().is_ok()
        };
        let is_new = |r: &Replaced| !r.bare && is_bare(&r.value);
        if !self.replaced.iter().any(|r| r.key == key && is_new(r)) {
            return false;
        }
        let kind = kind_of(key);
        for replaced in self.replaced.iter_mut().filter(|r| is_new(r) && kind_of(&r.key) == kind) {
            replaced.bare = true;
        }
        true
    }

    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        let mut at = 0;
        for Replaced { span, value, bare, .. } in &self.replaced {
            text.push_str(&self.text[at..span.start]);
            let lines = self.text[span.clone()].matches('\n').count();
            match (bare, lines) {
                (true, _) => text.push_str(value),
                (false, 0) => text.push_str(&format!("\"{}\"", escaped(value))),
                // A backslash at a line's end takes this and all empty lines after it away.
                (false, _) => {
                    text.push_str(&format!("\"\"\"{}\\{}\"\"\"", escaped(value), "\n".repeat(lines)));
                }
            }
            at = span.end;
        }
        text.push_str(&self.text[at..]);
        text
    }
}

/// The key without the name of its table and its places in lists: the values of one kind have one type.
fn kind_of(key: &str) -> String {
    let mut parts: Vec<&str> =
        key.split('.').map(|part| part.split_once('[').map_or(part, |(name, _)| name)).collect();
    if parts.len() > 2 {
        parts[1] = "*";
    }
    parts.join(".")
}

fn collect(key: String, item: &Item, strings: &mut Vec<(String, Range<usize>, String)>) {
    match item {
        Item::None => {}
        Item::Value(value) => collect_value(key, value, strings),
        Item::Table(table) => {
            for (name, item) in table.iter() {
                collect(format!("{key}.{name}"), item, strings);
            }
        }
        Item::ArrayOfTables(tables) => {
            for (n, table) in tables.iter().enumerate() {
                for (name, item) in table.iter() {
                    collect(format!("{key}[{n}].{name}"), item, strings);
                }
            }
        }
    }
}

fn collect_value(key: String, value: &Value, strings: &mut Vec<(String, Range<usize>, String)>) {
    match value {
        Value::String(text) => {
            if let Some(span) = text.span().filter(|_| text.value().contains('$')) {
                strings.push((key, span, text.value().clone()));
            }
        }
        Value::Array(values) => {
            for (n, value) in values.iter().enumerate() {
                collect_value(format!("{key}[{n}]"), value, strings);
            }
        }
        Value::InlineTable(table) => {
            for (name, value) in table.iter() {
                collect_value(format!("{key}.{name}"), value, strings);
            }
        }
        _ => {}
    }
}

/// A string's content as TOML's basic strings have it.
fn escaped(value: &str) -> String {
    let mut text = String::new();
    for c in value.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            '\n' => text.push_str("\\n"),
            c if c.is_control() => text.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => text.push(c),
        }
    }
    text
}

/// Replaces the variables in `template`; `depth`: how deep defaults may still stand in each other.
fn expand(template: &str, variables: &Variables, depth: usize) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = template;
    while let Some(at) = rest.find('$') {
        text.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            text.push('$');
            rest = after;
        } else if let Some(after) = rest.strip_prefix('{') {
            let end = closing(after).ok_or_else(|| format!("'${{{after}' has no closing brace"))?;
            text.push_str(&braced(&after[..end], variables, depth)?);
            rest = &after[end + 1..];
        } else if name_length(rest) > 0 {
            let (name, after) = rest.split_at(name_length(rest));
            text.push_str(variables.get(name).ok_or_else(|| not_set(name))?);
            rest = after;
        } else {
            // The end of a regular expression, for instance.
            text.push('$');
        }
    }
    text.push_str(rest);
    Ok(text)
}

fn not_set(name: &str) -> String {
    format!(
        "the variable {name} is not set; set it, write ${{{name}:-default}} for a default, or $$ for a dollar sign"
    )
}

/// Bytes of the name that `text` begins with.
fn name_length(text: &str) -> usize {
    if text.starts_with(|c: char| c.is_ascii_digit()) {
        return 0;
    }
    text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len())
}

/// The position of the brace that closes the one before `text`.
fn closing(text: &str) -> Option<usize> {
    let mut open = 1;
    let bytes = text.as_bytes();
    for (at, &byte) in bytes.iter().enumerate() {
        match byte {
            b'{' if at > 0 && bytes[at - 1] == b'$' => open += 1,
            b'}' => open -= 1,
            _ => {}
        }
        if open == 0 {
            return Some(at);
        }
    }
    None
}

/// Expands the text between braces: a name, maybe with a default or a message.
fn braced(inner: &str, variables: &Variables, depth: usize) -> Result<String, String> {
    let (name, rest) = inner.split_at(name_length(inner));
    if name.is_empty() {
        return Err(format!("'${{{inner}}}' names no variable; a name has letters, digits and '_'"));
    }
    let (strict, rest) = match rest.strip_prefix(':') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    let value = variables.get(name).filter(|value| !strict || !value.is_empty());
    let word = |word: &str| match depth.checked_sub(1) {
        Some(depth) => expand(word, variables, depth),
        None => Err(format!("'${{{inner}}}' stands too deep in other variables' defaults")),
    };
    match (rest.chars().next(), value) {
        (None, _) if strict => Err(format!("'${{{inner}}}' ends with ':'; write -, ? or + after it")),
        (None, value) => value.map(str::to_owned).ok_or_else(|| not_set(name)),
        (Some('-' | '?'), Some(value)) => Ok(value.to_owned()),
        (Some('-'), None) | (Some('+'), Some(_)) => word(&rest[1..]),
        (Some('+'), None) => Ok(String::new()),
        (Some('?'), None) if rest.len() == 1 => Err(not_set(name)),
        (Some('?'), None) => Err(format!("{name}: {}", word(&rest[1..])?)),
        (Some(_), _) => Err(format!(
            "'${{{inner}}}' is not understood; write ${{NAME}}, ${{NAME:-default}} or ${{NAME:?message}}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::Project;

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        Variables(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn variables_defaults_messages_and_dollar_signs_are_what_compose_files_have() {
        let set = variables(&[("A", "one"), ("EMPTY", ""), ("B_2", "two")]);
        for (template, expected) in [
            ("${A}/$B_2-x", "one/two-x"),
            ("${NONE:-default}${EMPTY:-other}${EMPTY-kept}", "defaultother"),
            ("${NONE:-${ALSO:-${A}}}", "one"),
            ("${A:+there}${NONE:+there}${EMPTY:+there}${EMPTY+set}", "thereset"),
            ("${A:?must be set}${EMPTY?}", "one"),
            ("$$A costs $5, login:$", "$A costs $5, login:$"),
            ("no variable", "no variable"),
        ] {
            assert_eq!(expand(template, &set, DEPTH).as_deref(), Ok(expected), "{template}");
        }
        for (template, expected) in [
            ("${NONE}", "the variable NONE is not set"),
            ("$NONE", "write ${NONE:-default}"),
            ("${EMPTY:?give a size}", "EMPTY: give a size"),
            ("${A", "has no closing brace"),
            ("${}", "names no variable"),
            ("${A!x}", "is not understood"),
            ("${A:}", "ends with ':'"),
        ] {
            let e = expand(template, &set, DEPTH).expect_err(template);
            assert!(e.contains(expected), "{template}: {e}");
        }
        assert!(expand(&format!("{}x{}", "${N:-".repeat(99), "}".repeat(99)), &set, DEPTH).is_err());
    }

    fn parse(text: &str, set: &[(&str, &str)]) -> Result<Project, String> {
        let file = Path::new("/somewhere/demo/tombolo.toml");
        Project::parse_with(file, text, &variables(set)).map_err(|e| e.to_string())
    }

    #[test]
    fn strings_become_numbers_where_the_key_wants_one_and_errors_keep_their_lines() {
        let text = "[vm.a]\ncmdline = \"\"\"\na ${X}\nb\\\n  c\"\"\"\ncpus = \"${CPUS}\"\nsnapshot = \"${S:-false}\"\nmemory = \"${MB:-256}M\"\n";
        let project = parse(text, &[("X", "\"quoted\"\n\\"), ("CPUS", "3")]).unwrap();
        let vm = &project.compose.vm["a"];
        assert_eq!(vm.cmdline.as_deref(), Some("a \"quoted\"\n\\\nbc"));
        assert_eq!((vm.cpus, vm.snapshot, vm.memory.0), (3, false, 256 << 20));
        let e = parse(text, &[("X", ""), ("CPUS", "many")]).unwrap_err();
        assert!(e.starts_with("/somewhere/demo/tombolo.toml:6: vm.a.cpus: invalid type: string"), "{e}");
        let e = parse(text, &[("X", ""), ("CPUS", "2"), ("MB", "16")]).unwrap_err();
        assert!(e.starts_with("/somewhere/demo/tombolo.toml:8: vm.a.memory is 16M"), "{e}");
        let e = parse("[vm.a]\n\nshare = [{ tag = \"x\", path = \"${HERE}\" }]\n", &[]).unwrap_err();
        assert!(e.contains(":3: vm.a.share[0].path: the variable HERE is not set"), "{e}");
    }

    #[test]
    fn values_of_one_kind_lose_their_quotes_together_and_those_of_other_kinds_keep_them() {
        let text = "[net.l]\ncpus = [\"$N\", \"$N\"]\n[vm.a]\ncpus = \"$N\"\ncmdline = \"$N\"\n[vm.b]\ncpus = \"$N\"\n[vm.c]\ncpus = \"$T\"\n";
        let mut expanded = Expanded::new(text, &variables(&[("N", "2"), ("T", "two")])).unwrap();
        assert!(expanded.unquote("net.l.cpus[1]") && expanded.unquote("vm.b.cpus"));
        assert_eq!(
            expanded.render(),
            "[net.l]\ncpus = [2, 2]\n[vm.a]\ncpus = 2\ncmdline = \"2\"\n[vm.b]\ncpus = 2\n[vm.c]\ncpus = \"two\"\n"
        );
        for key in ["net.l.cpus[0]", "vm.a.cpus", "vm.c.cpus", "vm.d.cpus"] {
            assert!(!expanded.unquote(key), "{key}");
        }
    }

    #[test]
    fn a_file_of_another_systems_editor_means_the_same() {
        let text = "name = \"${NAME}\"\n[vm.a]\ncpus = \"${CPUS}\"\ncmdline = \"\"\"\na ${NAME}\nb\"\"\"\nmemory = \"16M\"\n";
        let set = [("NAME", "demo"), ("CPUS", "3")];
        let other = format!("\u{feff}{}", text.replace('\n', "\r\n"));
        let e = parse(&other, &set).unwrap_err();
        assert!(e.starts_with("/somewhere/demo/tombolo.toml:7: vm.a.memory is 16M"), "{e}");
        let project = parse(&other.replace("16M", "256M"), &set).unwrap();
        assert_eq!((project.name.as_str(), project.compose.vm["a"].cpus), ("demo", 3));
    }

    #[test]
    fn the_environment_goes_before_env_files_and_a_named_one_before_the_one_beside_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tombolo.toml");
        let get = |files: &[PathBuf], name: &str| {
            Variables::load(&file, files).unwrap().get(name).map(str::to_owned)
        };
        assert_eq!(get(&[], "TOMBOLO_TEST_UNSET"), None);
        std::fs::write(dir.path().join(".env"), "# sizes\nMB='256'\nexport PATH=/nowhere\nBOTH=beside\n")
            .unwrap();
        assert_eq!(get(&[], "MB").as_deref(), Some("256"));
        assert_ne!(get(&[], "PATH").as_deref(), Some("/nowhere"), "the environment's own");
        std::fs::write(dir.path().join(".env"), "\u{feff}MB=512\r\nTEXT=\"two words\"\r\n").unwrap();
        assert_eq!(
            (get(&[], "MB").as_deref(), get(&[], "TEXT").as_deref()),
            (Some("512"), Some("two words"))
        );
        let named = dir.path().join("other.env");
        std::fs::write(&named, "BOTH=named\n").unwrap();
        assert_eq!(get(std::slice::from_ref(&named), "BOTH").as_deref(), Some("named"));
        assert_eq!(get(&[named], "MB"), None, "the one beside the file counts only where none is named");
        let e = Variables::load(&file, &[dir.path().join("none.env")]).unwrap_err().to_string();
        assert!(e.contains("none.env: is no env file"), "{e}");
    }
}
