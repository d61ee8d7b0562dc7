// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes the records: a struct per function with its encoder and its decoder, the kinds, and what is known of each id.

use crate::parse::{Api, Function, Type};
use crate::{ident, record_name};
use std::fmt::Write;

fn rust(ty: &Type) -> String {
    match ty {
        Type::Int(t) if t == "usize" => "u64".into(),
        Type::Int(t) => t.clone(),
        Type::Handle(..) => "u64".into(),
        Type::Handles(..) | Type::New(_) => "Cow<'a, [u64]>".into(),
        Type::Triple => "[u64; 3]".into(),
        Type::Ints(t) => format!("Cow<'a, [{t}]>"),
        Type::Bytes(_) | Type::Blob => "&'a [u8]".into(),
        Type::Str(false) => "&'a [u8]".into(),
        Type::Str(true) => "Option<&'a [u8]>".into(),
        Type::Strs => "Vec<&'a [u8]>".into(),
        Type::Out(_) | Type::Ptr => unreachable!("not on the wire"),
    }
}

fn codec(ty: &Type) -> String {
    match ty {
        Type::Int(t) if t == "usize" => "u64".into(),
        Type::Int(t) => t.clone(),
        Type::Handle(..) => "u64".into(),
        Type::Handles(..) | Type::New(_) => "u64s".into(),
        Type::Triple => "triple".into(),
        Type::Ints(t) => format!("{t}s"),
        Type::Bytes(_) | Type::Blob | Type::Str(false) => "bytes".into(),
        Type::Str(true) => "maybe".into(),
        Type::Strs => "strs".into(),
        Type::Out(_) | Type::Ptr => unreachable!("not on the wire"),
    }
}

fn by_reference(ty: &Type) -> bool {
    matches!(ty, Type::Handles(..) | Type::New(_) | Type::Ints(_) | Type::Strs | Type::Triple)
}

fn describe(ty: &Type) -> String {
    match ty {
        Type::Handle(kind, false) => format!("A {kind}."),
        Type::Handle(kind, true) => format!("A {kind}, or 0."),
        Type::Handles(kind, _) => format!("Handles: {kind}."),
        Type::New(kind) => format!("Ids chosen for new handles: {kind}."),
        _ => "As in the declaration.".into(),
    }
}

fn record(out: &mut String, f: &Function) -> std::fmt::Result {
    let name = record_name(&f.name);
    let fields = f.fields();
    let life = if fields.iter().any(|p| rust(&p.ty).contains("'a")) { "<'a>" } else { "" };
    writeln!(out, "/// What `{}` sends.", f.name)?;
    writeln!(out, "#[derive(Clone, Debug, PartialEq, Eq)]\npub struct {name}{life} {{")?;
    for p in &fields {
        writeln!(out, "    /// {}\n    pub {}: {},", describe(&p.ty), ident(&p.name), rust(&p.ty))?;
    }
    writeln!(out, "}}\nimpl<'a> Record<'a> for {name}{life} {{")?;
    writeln!(out, "    const ID: u32 = {:#x};", f.id)?;
    writeln!(out, "    const LAZY: bool = {};", f.is("lazy"))?;
    writeln!(out, "    fn encode(&self, _to: &mut Encoder<'_>) {{")?;
    for p in &fields {
        let r = if by_reference(&p.ty) { "&" } else { "" };
        writeln!(out, "        _to.{}({r}self.{});", codec(&p.ty), ident(&p.name))?;
    }
    writeln!(
        out,
        "    }}\n    fn decode(_from: &mut Decoder<'a>) -> Result<Self, Malformed> {{\n        Ok({name} {{"
    )?;
    for p in &fields {
        writeln!(out, "            {}: _from.{}()?,", ident(&p.name), codec(&p.ty))?;
    }
    writeln!(out, "        }})\n    }}\n}}")
}

/// A function that makes a body of any record from a source of numbers.
fn making(out: &mut String, api: &Api) -> std::fmt::Result {
    writeln!(
        out,
        "/// Makes a body that decodes as the record of this id, its values from a source of numbers; `false`: no such id. For fuzzers."
    )?;
    writeln!(out, "pub fn make(id: u32, next: &mut dyn FnMut() -> u64, out: &mut Vec<u8>) -> bool {{")?;
    writeln!(out, "    let mut m = Maker::new(next, out);\n    match id {{")?;
    for f in api.functions.iter().filter(|f| f.on_wire()) {
        let fields: Vec<String> = f.fields().iter().map(|p| format!("m.{}();", codec(&p.ty))).collect();
        writeln!(out, "        {:#x} => {{ {} }}", f.id, fields.join(" "))?;
    }
    writeln!(out, "        _ => return false,\n    }}\n    true\n}}")
}

/// The records of an API, as Rust source for `include!`.
pub fn emit(api: &Api) -> String {
    let mut out = String::new();
    build(&mut out, api).expect("writing to a string can't fail");
    out
}

fn build(out: &mut String, api: &Api) -> std::fmt::Result {
    writeln!(out, "/// Name of the API in the handshake.\npub const API: &str = {:?};", api.name)?;
    let identity = api.identity.to_le_bytes();
    writeln!(out, "/// Identity of the declarations.\npub const IDENTITY: [u8; 16] = {identity:?};")?;
    writeln!(
        out,
        "/// The code for what isn't supported.\npub const UNSUPPORTED: i32 = {};",
        api.unsupported
    )?;
    writeln!(out, "/// The code for success.\npub const SUCCESS: i32 = {};", api.success)?;
    writeln!(out, "/// The code for a lost device or server.\npub const LOST: i32 = {};", api.lost)?;
    writeln!(out, "/// Kinds of handles.\npub mod kind {{")?;
    for k in &api.kinds {
        writeln!(out, "    /// {}\n    pub const {}: u32 = {};", k.name, k.name.to_uppercase(), k.id)?;
    }
    writeln!(
        out,
        "    /// The code for an invalid handle of this kind.\n    pub fn invalid(kind: u32) -> i32 {{\n        match kind {{"
    )?;
    for k in &api.kinds {
        writeln!(out, "            {} => {},", k.id, k.invalid)?;
    }
    writeln!(out, "            _ => super::UNSUPPORTED,\n        }}\n    }}")?;
    writeln!(
        out,
        "    /// The name of a kind.\n    pub fn name(kind: u32) -> &'static str {{\n        match kind {{"
    )?;
    for k in &api.kinds {
        writeln!(out, "            {} => {:?},", k.id, k.name)?;
    }
    writeln!(out, "            _ => \"?\",\n        }}\n    }}\n}}")?;
    writeln!(out, "/// All functions: id and name.\npub const FUNCTIONS: &[(u32, &str)] = &[")?;
    for f in &api.functions {
        writeln!(out, "    ({:#x}, {:?}),", f.id, f.name)?;
    }
    writeln!(
        out,
        "];\n/// Decodes a body as the record of this id and encodes it again; None: no such id. For fuzzers and tests."
    )?;
    writeln!(
        out,
        "pub fn recode(id: u32, body: &[u8], out: &mut Vec<u8>) -> Option<Result<(), Malformed>> {{"
    )?;
    writeln!(out, "    Some(match id {{")?;
    for f in api.functions.iter().filter(|f| f.on_wire()) {
        writeln!(out, "        {:#x} => again::<{}>(body, out),", f.id, record_name(&f.name))?;
    }
    writeln!(out, "        _ => return None,\n    }})\n}}")?;
    making(out, api)?;
    for f in api.functions.iter().filter(|f| f.on_wire()) {
        record(out, f)?;
    }
    Ok(())
}
