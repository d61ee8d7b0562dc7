// SPDX-License-Identifier: Apache-2.0 OR MIT
//! From one declaration per API function to both ends of a call. Knows types, handles, lengths and checks, but no API.
//!
//! Build scripts read a `.api` file with [`parse::parse`], which gives an [`api::Api`], and write:
//! - [`wire::emit`]: the constants and structures of the API; a record per function: fields, encoder, decoder with all length checks; ids and names;
//! - [`client::emit`]: the C functions of the client library, and its dispatch table;
//! - [`server::emit`]: the table of native functions, and the decoder that looks handles up, checks ranges and calls them;
//! - [`doc::emit`]: the table for people.
//!
//! Generated code calls a small runtime (`rt` and `transfer` in the client, `Cx` in the server), which each API provides for its handles
//! and errors. A function whose flags say `client` or `server` is written by hand on that side, over the generated record; if it is
//! missing there, the build fails.

pub mod api;
pub mod client;
pub mod doc;
pub mod parse;
pub mod server;
pub mod wire;

/// The name of a function's record type: `clEnqueueCopyBuffer` is `EnqueueCopyBuffer`.
pub fn record_name(function: &str) -> String {
    let bare = function.trim_start_matches(|c: char| c.is_ascii_lowercase());
    // The version of a name.
    let bare = bare.replace("_v", "V");
    if bare.is_empty() { function.to_string() } else { bare }
}

/// The name of a function in Rust's style: `clEnqueueSVMMap` is `enqueue_svm_map`.
pub fn snake(function: &str) -> String {
    let chars: Vec<char> = record_name(function).replace("IDs", "Ids").chars().collect();
    let mut out = String::new();
    for (i, c) in chars.iter().enumerate() {
        let starts_word = c.is_ascii_uppercase()
            && i > 0
            && (!chars[i - 1].is_ascii_uppercase()
                || chars.get(i + 1).is_some_and(|n| n.is_ascii_lowercase()));
        if starts_word {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

/// The name of a structure's type: `image_desc` is `ImageDesc`.
pub fn camel(name: &str) -> String {
    let capital = |word: &str| word[..1].to_uppercase() + &word[1..];
    name.split('_').filter(|word| !word.is_empty()).map(capital).collect()
}

/// A name that is no keyword of Rust.
pub fn ident(name: &str) -> String {
    match name {
        "type" | "in" | "ref" | "match" | "move" | "mod" | "fn" => format!("{name}_"),
        _ => name.to_string(),
    }
}

/// Identity of a set of declarations (FNV-1a, 128 bits): both sides of a connection must have been built from the same.
pub fn identity(text: &str) -> u128 {
    text.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |h: u128, b| {
        (h ^ u128::from(b)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}
