// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes what both ends share: the constants, the structures, the kinds, and a record for each function with its encoder and decoder.

use crate::api::{Api, Constant, Function, Struct, Type};
use crate::{camel, ident, record_name};
use std::fmt::Write;

fn rust(ty: &Type) -> String {
    match ty {
        Type::Int(t) if t == "usize" => "u64".into(),
        Type::Int(t) => t.clone(),
        Type::Handle(..) | Type::Shared(..) | Type::Address | Type::Fresh(_) => "u64".into(),
        Type::Ordinal => "i32".into(),
        Type::Blocking => "u32".into(),
        Type::Handles(..) | Type::New(_) => "Cow<'a, [u64]>".into(),
        Type::Triple => "[u64; 3]".into(),
        Type::Ints(t) => format!("Cow<'a, [{t}]>"),
        Type::Properties(_) => "Cow<'a, [i64]>".into(),
        Type::Bytes(_) | Type::Blob | Type::Str(false) => "&'a [u8]".into(),
        Type::Str(true) => "Option<&'a [u8]>".into(),
        Type::Strs => "Vec<&'a [u8]>".into(),
        Type::Struct(name) => camel(name),
        Type::Out(_) | Type::Ptr | Type::Data | Type::Host(_) => unreachable!("not on the wire"),
    }
}

/// The method of `Encoder`, `Decoder` and `Maker` for a type.
fn codec(ty: &Type) -> String {
    match ty {
        Type::Int(t) if t == "usize" => "u64".into(),
        Type::Int(t) => t.clone(),
        Type::Handle(..) | Type::Shared(..) | Type::Address | Type::Fresh(_) => "u64".into(),
        Type::Ordinal => "i32".into(),
        Type::Blocking => "u32".into(),
        Type::Handles(..) | Type::New(_) => "u64s".into(),
        Type::Triple => "triple".into(),
        Type::Ints(t) => format!("{t}s"),
        Type::Properties(_) => "i64s".into(),
        Type::Bytes(_) | Type::Blob | Type::Str(false) => "bytes".into(),
        Type::Str(true) => "maybe".into(),
        Type::Strs => "strs".into(),
        Type::Struct(_) | Type::Out(_) | Type::Ptr | Type::Data | Type::Host(_) => {
            unreachable!("has no method")
        }
    }
}

fn by_reference(ty: &Type) -> bool {
    matches!(
        ty,
        Type::Handles(..) | Type::New(_) | Type::Ints(_) | Type::Properties(_) | Type::Strs | Type::Triple
    )
}

fn encoded(ty: &Type, value: &str) -> String {
    match ty {
        Type::Struct(_) => format!("{value}.encode(_to);"),
        _ => format!("_to.{}({}{value});", codec(ty), if by_reference(ty) { "&" } else { "" }),
    }
}

fn decoded(ty: &Type) -> String {
    match ty {
        Type::Struct(name) => format!("{}::decode(_from)?", camel(name)),
        _ => format!("_from.{}()?", codec(ty)),
    }
}

fn made(ty: &Type) -> String {
    match ty {
        Type::Struct(name) => format!("{}::make(&mut m);", camel(name)),
        _ => format!("m.{}();", codec(ty)),
    }
}

fn record(out: &mut String, f: &Function) -> std::fmt::Result {
    let name = record_name(&f.name);
    let fields = f.fields();
    let life = if fields.iter().any(|p| rust(&p.ty).contains("'a")) { "<'a>" } else { "" };
    writeln!(out, "/// The request of `{}`.", f.name)?;
    writeln!(out, "#[derive(Clone, Debug, PartialEq, Eq)]\npub struct {name}{life} {{")?;
    for p in &fields {
        writeln!(out, "    pub {}: {},", ident(&p.name), rust(&p.ty))?;
    }
    writeln!(out, "}}\nimpl<'a> Record<'a> for {name}{life} {{")?;
    writeln!(out, "    const ID: u32 = {:#x};", f.id)?;
    writeln!(out, "    const LAZY: bool = {};", f.is("lazy"))?;
    writeln!(out, "    fn encode(&self, _to: &mut Encoder<'_>) {{")?;
    for p in &fields {
        writeln!(out, "        {}", encoded(&p.ty, &format!("self.{}", ident(&p.name))))?;
    }
    writeln!(
        out,
        "    }}\n    fn decode(_from: &mut Decoder<'a>) -> Result<Self, Malformed> {{\n        Ok({name} {{"
    )?;
    for p in &fields {
        writeln!(out, "            {}: {},", ident(&p.name), decoded(&p.ty))?;
    }
    writeln!(out, "        }})\n    }}\n}}")
}

/// The type of a structure's field in memory, as C has it.
fn in_memory(ty: &Type) -> &str {
    match ty {
        Type::Int(t) => t,
        Type::Handle(..) => "u64",
        _ => unreachable!("structures have integers and handles"),
    }
}

fn structure(out: &mut String, prefix: &str, s: &Struct) -> std::fmt::Result {
    let name = camel(&s.name);
    writeln!(out, "/// `{prefix}_{}`; a handle is an object's id on the wire.", s.name)?;
    writeln!(out, "#[repr(C)]\n#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]\npub struct {name} {{")?;
    for p in &s.fields {
        writeln!(out, "    pub {}: {},", ident(&p.name), in_memory(&p.ty))?;
    }
    writeln!(out, "}}\nconst _: () = assert!(size_of::<{name}>() == {});", s.size)?;
    writeln!(out, "impl {name} {{\n    fn encode(&self, _to: &mut Encoder<'_>) {{")?;
    for p in &s.fields {
        let cast = if in_memory(&p.ty) == "usize" { " as u64" } else { "" };
        writeln!(out, "        _to.{}(self.{}{cast});", codec(&p.ty), ident(&p.name))?;
    }
    writeln!(
        out,
        "    }}\n    fn decode(_from: &mut Decoder<'_>) -> Result<Self, Malformed> {{\n        Ok({name} {{"
    )?;
    for p in &s.fields {
        let taken = decoded(&p.ty);
        let value = match in_memory(&p.ty) {
            "usize" => format!("usize::try_from({taken}).map_err(|_| Malformed)?"),
            _ => taken,
        };
        writeln!(out, "            {}: {value},", ident(&p.name))?;
    }
    writeln!(out, "        }})\n    }}\n    fn make(m: &mut Maker<'_>) {{")?;
    for p in &s.fields {
        writeln!(out, "        m.{}();", codec(&p.ty))?;
    }
    writeln!(out, "    }}\n}}")
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
        let fields: Vec<String> = f.fields().iter().map(|p| made(&p.ty)).collect();
        writeln!(out, "        {:#x} => {{ {} }}", f.id, fields.join(" "))?;
    }
    writeln!(out, "        _ => return false,\n    }}\n    true\n}}")
}

/// A constant's value as Rust source of its type.
fn literal(c: &Constant) -> String {
    if c.ty == "i32" { c.value.to_string() } else { format!("{:#x}", c.value) }
}

fn constants(out: &mut String, api: &Api) -> std::fmt::Result {
    writeln!(
        out,
        "/// Constants, by the names that the API's headers have, without their prefix.\npub mod {} {{",
        api.prefix
    )?;
    for c in &api.constants {
        writeln!(out, "    pub const {}: {} = {};", c.name, c.ty, literal(c))?;
    }
    writeln!(out, "}}")
}

/// The API's codes, and of an API with versions the names that are exported.
fn names(out: &mut String, api: &Api) -> std::fmt::Result {
    writeln!(out, "/// The API's codes and their names.\npub const CODES: &[(i32, &str)] = &[")?;
    for c in api.constants.iter().filter(|c| c.ty == "i32") {
        writeln!(out, "    ({}, {:?}),", c.value, c.name)?;
    }
    writeln!(
        out,
        "];\n/// What is exported: the symbol, the name to ask for, the version since which that finds it, and whether its default stream is the thread's."
    )?;
    writeln!(out, "pub const SYMBOLS: &[(&str, &str, u32, bool)] = &[")?;
    for s in api.functions.iter().flat_map(Function::symbols) {
        writeln!(out, "    ({:?}, {:?}, {}, {}),", s.name, s.base, s.since, s.threaded)?;
    }
    writeln!(out, "];")
}

fn kinds(out: &mut String, api: &Api) -> std::fmt::Result {
    writeln!(out, "/// Kinds of handles.\npub mod kind {{")?;
    for k in &api.kinds {
        writeln!(out, "    pub const {}: u32 = {};", k.name.to_uppercase(), k.id)?;
    }
    writeln!(
        out,
        "    /// The code for an invalid handle of this kind.\n    pub fn invalid(kind: u32) -> i32 {{\n        match kind {{"
    )?;
    for k in &api.kinds {
        writeln!(out, "            {} => super::{}::{},", k.id, api.prefix, k.invalid)?;
    }
    writeln!(out, "            _ => super::UNSUPPORTED,\n        }}\n    }}")?;
    writeln!(
        out,
        "    /// The name of a kind.\n    pub fn name(kind: u32) -> &'static str {{\n        match kind {{"
    )?;
    for k in &api.kinds {
        writeln!(out, "            {} => {:?},", k.id, k.name)?;
    }
    writeln!(out, "            _ => \"?\",\n        }}\n    }}\n}}")
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
        "/// The code for what isn't supported.\npub const UNSUPPORTED: i32 = {}::{};",
        api.prefix, api.unsupported
    )?;
    writeln!(out, "/// The code for success.\npub const SUCCESS: i32 = {}::{};", api.prefix, api.success)?;
    writeln!(
        out,
        "/// The code for a lost device or server.\npub const LOST: i32 = {}::{};",
        api.prefix, api.lost
    )?;
    constants(out, api)?;
    kinds(out, api)?;
    if api.is_contextual {
        names(out, api)?;
    }
    writeln!(out, "/// All functions: id and name.\npub const FUNCTIONS: &[(u32, &str)] = &[")?;
    for f in api.functions.iter().filter(|f| f.absence.is_none()) {
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
    for s in &api.structs {
        structure(out, &api.prefix, s)?;
    }
    for f in api.functions.iter().filter(|f| f.on_wire()) {
        record(out, f)?;
    }
    Ok(())
}
