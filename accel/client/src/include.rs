// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files that a kernel's source includes: they lie where the program runs and are compiled where the server runs, so they go along.
//!
//! [`gather`] reads the source's `#include` lines, looks the names up in the folders of the options (`-I`) as a preprocessor would, and goes
//! on in what it finds. It knows no conditions, so it may take more than the compiler will read; a name that a macro computes, it
//! can't know. What it doesn't find is left to the compiler, which looks in its own machine's folders then.

use std::collections::BTreeMap;
use std::path::Path;

/// Files at most, and their bytes together: what a request can carry.
const FILES: usize = 4096;
const BYTES: usize = 32 << 20;

/// A file: the number of the folder it was found in, and its name there (`a/b.h`, `../b.h`).
pub type File = (u32, String);
/// Files with their texts.
pub type Files = BTreeMap<File, Vec<u8>>;

/// The words of compiler options: parted by blanks, but for those quoted or behind a backslash.
fn words(options: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    let mut chars = options.chars();
    while let Some(c) = chars.next() {
        match (c, quote) {
            ('\\', _) => word.extend(chars.next()),
            ('"' | '\'', None) => quote = Some(c),
            (c, Some(q)) if c == q => quote = None,
            (c, None) if c.is_whitespace() => words.extend(Some(std::mem::take(&mut word))),
            (c, _) => word.push(c),
        }
    }
    words.push(word);
    words.retain(|w| !w.is_empty());
    words
}

/// The folders that options name, in their order.
pub fn folders(options: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut words = words(options).into_iter();
    while let Some(word) = words.next() {
        match word.strip_prefix("-I") {
            Some("") => found.extend(words.next()),
            Some(folder) => found.push(folder.into()),
            None => {}
        }
    }
    found
}

/// The names that a text includes, and whether each is looked for beside it first.
fn names(text: &[u8]) -> Vec<(String, bool)> {
    let name = |line: &[u8]| {
        let line = std::str::from_utf8(line.trim_ascii_start().strip_prefix(b"#")?).ok()?;
        let rest = line.trim_start().strip_prefix("include")?.trim_start();
        let (beside, end) = match rest.chars().next()? {
            '"' => (true, '"'),
            '<' => (false, '>'),
            _ => return None,
        };
        let (name, _) = rest[1..].split_once(end)?;
        (!name.is_empty()).then(|| (name.to_owned(), beside))
    };
    text.split(|b| *b == b'\n').filter_map(name).collect()
}

/// `a/./b/../c` is `a/c`; only `..` that lead out stay, in front. None: an absolute name, which no folder changes.
fn plain(name: &str) -> Option<String> {
    if name.starts_with('/') {
        return None;
    }
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split('/') {
        match (part, parts.last()) {
            ("" | ".", _) => {}
            ("..", Some(last)) if *last != ".." => drop(parts.pop()),
            (part, _) => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The files that `source` includes from `folders`.
pub fn gather(source: &[u8], folders: &[String]) -> Files {
    let mut files = Files::new();
    let mut bytes = 0;
    let mut todo: Vec<(Option<File>, Vec<u8>)> = vec![(None, source.to_vec())];
    while let Some((from, text)) = todo.pop() {
        for (name, beside) in names(&text) {
            let neighbour = from.as_ref().filter(|_| beside).map(|(folder, own)| {
                let at = own.rsplit_once('/').map_or(String::new(), |(at, _)| format!("{at}/"));
                (*folder, format!("{at}{name}"))
            });
            let anywhere = (0u32..).zip(folders).map(|(i, _)| (i, name.clone()));
            for (folder, name) in neighbour.into_iter().chain(anywhere) {
                let Some(name) = plain(&name) else { continue };
                let key = (folder, name);
                if files.contains_key(&key) {
                    break;
                }
                let path = Path::new(&folders[folder as usize]).join(&key.1);
                // A pipe or a device would have no end.
                if !path.is_file() {
                    continue;
                }
                let Ok(text) = std::fs::read(&path) else { continue };
                bytes += text.len();
                if files.len() >= FILES || bytes > BYTES {
                    return files;
                }
                todo.push((Some(key.clone()), text.clone()));
                files.insert(key, text);
                break;
            }
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_found_however_they_are_written() {
        let options = r#"-DI=1 -I a -Ib -I "c d" -I'e f' -I g\ h -cl-std=CL1.2 -I"#;
        assert_eq!(folders(options), ["a", "b", "c d", "e f", "g h"]);
    }

    #[test]
    fn includes_are_followed_in_the_order_of_the_folders_and_beside_who_includes() {
        let root = std::env::temp_dir().join(format!("tombolo-include-{}", std::process::id()));
        let put = |name: &str, text: &str| {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        put("one/a.h", "#include \"sub/b.h\"\n#include <c.h>\n");
        put("one/sub/b.h", "# include \"../../two/up.h\"\n  #include \"near.h\"\n#include \"a.h\"\n");
        put("one/sub/near.h", "#include NAME\n#include <../one/sub/near.h>\n#include \"");
        put("two/a.h", "never");
        put("two/c.h", "#include </etc/passwd>\n#include <sub>\n#include <absent.h>");
        put("two/up.h", "");
        let at = |name: &str| root.join(name).to_str().expect("a plain path").to_owned();
        let found = gather(b"// \n\t#  include <a.h>\nint i;", &[at("one"), at("two")]);
        let keys: Vec<(u32, &str)> = found.keys().map(|(f, n)| (*f, n.as_str())).collect();
        let wanted = [(0, "../one/sub/near.h"), (0, "../two/up.h"), (0, "a.h"), (0, "sub/b.h")];
        let wanted = [&wanted[..], &[(0, "sub/near.h"), (1, "c.h")]].concat();
        std::fs::remove_dir_all(&root).expect("removed");
        assert_eq!(keys, wanted);
    }

    #[test]
    fn a_file_that_includes_itself_comes_once() {
        let root = std::env::temp_dir().join(format!("tombolo-include-self-{}", std::process::id()));
        std::fs::create_dir_all(&root).expect("made");
        std::fs::write(root.join("a.h"), "#include \"a.h\"\n#include <./a.h>").expect("written");
        let found = gather(b"#include \"a.h\"", &[root.to_str().expect("a plain path").into()]);
        std::fs::remove_dir_all(&root).expect("removed");
        assert_eq!(found.len(), 1);
    }
}
