// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes the documentation table: every function, how it travels, and what is checked.

use crate::api::{Api, Class};
use std::fmt::Write;

/// The table, in Markdown.
pub fn emit(api: &Api) -> String {
    let mut out =
        format!("| id | function of {} | travels | checked by the server |\n|---|---|---|---|\n", api.name);
    for f in &api.functions {
        let how = match &f.class {
            Class::Info if f.is("cached") => "waits once, then from the snapshot".to_string(),
            Class::Info => "waits".to_string(),
            Class::Post => "posted".to_string(),
            Class::Local | Class::Retain | Class::Release => "never: answered by the client".to_string(),
            Class::None => format!("never: answers {}_{}", api.prefix.to_uppercase(), api.unsupported),
            _ if f.is("lazy") => {
                "posted with the next call, once the driver accepted the same before".to_string()
            }
            _ if f.is("sure") => "posted when sure to succeed, else waits".to_string(),
            _ if f.is("client") => "posted or waits, by hand".to_string(),
            _ => "waits".to_string(),
        };
        let checks: Vec<String> =
            f.checks.iter().map(|c| format!("{}({})", c.name, c.args.join(", "))).collect();
        // Writing to a string can't fail.
        let _ok = writeln!(out, "| {:#x} | {} | {how} | {} |", f.id, f.name, checks.join("; "));
    }
    out
}

/// The page of an API whose functions say why they are not forwarded, in Markdown: each function, its state and the reason.
pub fn page(api: &Api) -> String {
    let mut out = String::new();
    for f in &api.functions {
        let (state, reason) = match (&f.absence, &f.class) {
            (Some(why), _) if why.later => ("not yet", why.reason.as_str()),
            (Some(why), _) => ("no", why.reason.as_str()),
            (None, Class::Local | Class::Retain | Class::Release) => ("yes", "answered by the client"),
            (None, Class::Post) => ("yes", "posted"),
            (None, _) => ("yes", ""),
        };
        // Writing to a string can't fail.
        let _ok = writeln!(out, "| `{}` | {state} | {reason} |", f.name);
    }
    out
}
