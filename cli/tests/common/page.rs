// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fenced blocks of the guide's pages.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::path::Path;

/// A fenced block of a page: what stands behind the fence, and its lines.
pub struct Block {
    pub kind: String,
    pub text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    let page = std::fs::read_to_string(page).unwrap();
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(kind), None) => open = Some(Block { kind: kind.to_owned(), text: String::new() }),
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => block.text.extend([line, "\n"]),
            (None, None) => {}
        }
    }
    blocks
}

/// The page's file of this name, from all its pieces.
pub fn file(page: &str, name: &str) -> String {
    let pieces = blocks(page).into_iter().filter(|block| block.kind == format!("toml {name}"));
    pieces.map(|block| block.text).collect()
}

/// The commands, with what they print, of the page's blocks of this kind that `wanted` accepts.
pub fn commands(page: &str, kind: &str, wanted: impl Fn(&Block) -> bool) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    for block in blocks(page).into_iter().filter(|block| block.kind == kind) {
        assert!(block.text.starts_with("$ "), "{}", block.text);
        if !wanted(&block) {
            continue;
        }
        for line in block.text.lines() {
            match line.strip_prefix("$ ") {
                Some(command) => commands.push((command.to_owned(), String::new())),
                None => commands.last_mut().unwrap().1.extend([line, "\n"]),
            }
        }
    }
    commands
}
