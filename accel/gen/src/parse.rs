// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The text of declarations: line-based; `#` starts a comment; indented lines belong to the line above that isn't indented.
//!
//! ```text
//! api NAME                        once
//! prefix NAME                     of functions, structures and constants in C
//! const TYPE                      constants of this type, by the names that the rest of the file uses
//!     NAME VALUE                  a number, or `1 << N`
//! unsupported NAME / success NAME / lost NAME     codes of the API
//! kind N NAME CODE                a kind of handle, and the code for an invalid one
//! struct NAME SIZE                a structure as C has it, and its size there; a handle is an id on the wire
//!     FIELD: TYPE
//! fn ID NAME CLASS [FLAG…]
//!     PARAMETER: TYPE
//!     wire FIELD: TYPE, …
//!     local NAME…
//!     changing NAME…
//!     check FUNCTION(FIELD, …)
//!     packed FUNCTION(FIELD, …)
//!     memory FUNCTION(PARAMETER, …)
//!     command NAME
//! none never|later REASON         functions that are not forwarded, and why
//!     NAME VERSION [ptsz|ptds]
//! contextual                      records have the current context; all functions are exported, in versions
//! dispatch NAME…
//! ```
//!
//! Types: `u32 i32 u64 i64 usize`; `KIND`, `KIND?` (may be null); `[KIND; len]`, `[KIND]`, `[new KIND]`; `[T; 3]`, `[T]`;
//! `bytes(len)`, `blob`, `str`, `str?`, `strs`, `struct NAME`; `blocking`; `data` and `host TYPE` (of a transfer); `shared(len)`, `shared(len)?`;
//! `properties(NAME, …)`; `out TYPE`; `new KIND`; `dptr` (an address of device memory); `device` (its number); `ptr` and `fn` (only with a hand-written client).

use crate::api::{Absence, Api, Call, Class, Constant, Direction, Function, Kind, Param, Struct, Type};
use std::collections::HashSet;

const FLAGS: [&str; 10] =
    ["cached", "sure", "lazy", "blocks", "client", "server", "pointer", "free", "ptsz", "ptds"];

/// Functions without a record have numbers above this one.
const FIRST_ABSENT: u32 = 0x400;

/// A number: decimal, hexadecimal, or one bit.
fn number(text: &str) -> Result<i64, String> {
    let parsed = match (text.strip_prefix("0x"), text.strip_prefix("1 << ")) {
        (Some(hex), _) => i64::from_str_radix(hex, 16),
        (_, Some(bit)) => bit.parse::<u32>().map(|bit| 1i64.checked_shl(bit).unwrap_or(0)),
        _ => text.parse(),
    };
    parsed.map_err(|_| format!("{text}: not a number"))
}

fn small(text: &str) -> Result<u32, String> {
    u32::try_from(number(text)?).map_err(|_| format!("{text}: not a number of 32 bits"))
}

fn is_int(text: &str) -> bool {
    matches!(text, "u8" | "u16" | "u32" | "i32" | "u64" | "i64" | "usize" | "f32")
}

/// Splits at commas outside of brackets.
fn split_fields(text: &str) -> Vec<String> {
    let (mut out, mut depth) = (vec![String::new()], 0);
    for c in text.chars() {
        match c {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                out.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = out.last_mut() {
            last.push(c);
        }
    }
    out
}

/// The text between `NAME(` and `)`.
fn inside<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')')
}

fn names(text: &str) -> Vec<String> {
    text.split(',').map(|name| name.trim().to_string()).collect()
}

/// The line that indented lines belong to.
enum Section {
    Constants(String),
    Struct,
    Function,
    Absent(Absence),
    /// Has no indented lines.
    Line,
}

struct Parser {
    api: Api,
    section: Section,
}

impl Parser {
    fn kind(&self, name: &str) -> bool {
        self.api.kinds.iter().any(|k| k.name == name)
    }

    fn known(&self, name: &str) -> Result<String, String> {
        self.api.constant(name).map(|c| c.name.clone()).ok_or(format!("{name}: no such constant"))
    }

    fn list(&self, inner: &str) -> Option<Type> {
        let (element, count) = match inner.split_once(';') {
            Some((e, n)) => (e.trim(), Some(n.trim())),
            None => (inner.trim(), None),
        };
        match (element.strip_prefix("new "), count) {
            (Some(kind), None) if self.kind(kind) => Some(Type::New(kind.into())),
            (None, n) if self.kind(element) => Some(Type::Handles(element.into(), n.map(Into::into))),
            (None, Some("3")) if is_int(element) => Some(Type::Triple),
            (None, None) if is_int(element) => Some(Type::Ints(element.into())),
            _ => None,
        }
    }

    fn ty(&self, text: &str) -> Result<Type, String> {
        let text = text.trim();
        let (bare, optional) = match text.strip_suffix('?') {
            Some(bare) => (bare, true),
            None => (text, false),
        };
        if let Some(inner) = text.strip_prefix("out ") {
            return Ok(Type::Out(Box::new(self.ty(inner)?)));
        }
        if let Some(kind) = text.strip_prefix("new ").filter(|kind| self.kind(kind)) {
            return Ok(Type::Fresh(kind.into()));
        }
        if let Some(inner) = text.strip_prefix("host ") {
            return Ok(Type::Host(Box::new(self.ty(inner)?)));
        }
        if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            return self.list(inner).ok_or(format!("{text}: no such array"));
        }
        if let Some(name) =
            text.strip_prefix("struct ").filter(|n| self.api.structs.iter().any(|s| s.name == **n))
        {
            return Ok(Type::Struct(name.into()));
        }
        if let Some(len) = inside(bare, "shared") {
            return Ok(Type::Shared(len.into(), optional));
        }
        if let Some(known) = inside(text, "properties") {
            let known = names(known).iter().map(|name| self.known(name)).collect::<Result<_, _>>()?;
            return Ok(Type::Properties(known));
        }
        Ok(match (bare, optional) {
            (kind, _) if self.kind(kind) => Type::Handle(kind.into(), optional),
            ("str", _) => Type::Str(optional),
            (int, false) if is_int(int) => Type::Int(int.into()),
            ("blob", false) => Type::Blob,
            ("strs", false) => Type::Strs,
            ("blocking", false) => Type::Blocking,
            ("data", false) => Type::Data,
            ("dptr", false) => Type::Address,
            ("device", false) => Type::Ordinal,
            ("ptr" | "fn", false) => Type::Ptr,
            _ => match inside(text, "bytes") {
                Some(len) => Type::Bytes(len.into()),
                None => return Err(format!("{text}: no such type")),
            },
        })
    }

    fn param(&self, text: &str) -> Result<Param, String> {
        let (name, ty) = text.split_once(':').ok_or_else(|| format!("{text}: expected 'name: type'"))?;
        Ok(Param { name: name.trim().into(), ty: self.ty(ty)? })
    }

    fn constant(&mut self, ty: &str, name: &str, value: &str) -> Result<(), String> {
        if self.api.constant(name).is_some() {
            return Err(format!("{name} stands here twice"));
        }
        self.api.constants.push(Constant { name: name.into(), ty: ty.into(), value: number(value)? });
        Ok(())
    }

    /// A line that belongs to a function.
    fn detail(&self, f: &mut Function, word: &str, rest: &str, text: &str) -> Result<(), String> {
        match word {
            "wire" => {
                let fields = split_fields(rest);
                let fields = fields.iter().filter(|field| !field.is_empty());
                f.wire = Some(fields.map(|p| self.param(p)).collect::<Result<_, _>>()?);
            }
            "local" => {
                f.local = rest.split_whitespace().map(|n| self.known(n)).collect::<Result<_, _>>()?;
            }
            "changing" => {
                if !f.is("cached") {
                    return Err(format!("{} keeps no answers", f.name));
                }
                f.changing = rest.split_whitespace().map(|n| self.known(n)).collect::<Result<_, _>>()?;
            }
            "command" => f.command = Some(self.known(rest)?),
            "check" => f.checks.push(call(rest, &f.fields(), f)?),
            "packed" => f.packed = Some(call(rest, &f.fields(), f)?),
            "memory" => f.memory = Some(call(rest, &f.params, f)?),
            _ => f.params.push(self.param(text)?),
        }
        Ok(())
    }

    fn indented(&mut self, text: &str, word: &str, rest: &str) -> Result<(), String> {
        match &self.section {
            Section::Constants(ty) => {
                let ty = ty.clone();
                self.constant(&ty, word, rest)
            }
            Section::Struct => {
                let field = self.param(text)?;
                self.api.structs.last_mut().ok_or("belongs to no struct")?.fields.push(field);
                Ok(())
            }
            Section::Function => {
                let mut f = self.api.functions.pop().ok_or("belongs to no function")?;
                let done = self.detail(&mut f, word, rest, text);
                self.api.functions.push(f);
                done
            }
            Section::Absent(why) => {
                let why = why.clone();
                self.absent(why, word, rest)
            }
            Section::Line => Err("belongs to no function".into()),
        }
    }

    fn function(&mut self, at: usize, rest: &str) -> Result<(), String> {
        let mut words = rest.split_whitespace();
        let (Some(id), Some(name), Some(class)) = (words.next(), words.next(), words.next()) else {
            return Err("expected 'fn id name class'".into());
        };
        let class = match class {
            "info" => Class::Info,
            "enqueue" => Class::Enqueue,
            "transfer" => match words.next() {
                Some("reads") => Class::Transfer(Direction::Reads),
                Some("writes") => Class::Transfer(Direction::Writes),
                _ => return Err("expected 'transfer reads' or 'transfer writes'".into()),
            },
            "create" => Class::Create(words.next().ok_or("create what?")?.into()),
            "call" => Class::Call,
            "post" => Class::Post,
            "retain" => Class::Retain,
            "release" => Class::Release,
            "local" => Class::Local,
            "none" => Class::None,
            _ => return Err(format!("{class}: no such class")),
        };
        let mut flags: HashSet<String> = HashSet::new();
        let mut since = 0;
        for word in words {
            match word.strip_prefix("since=") {
                Some(version) => since = small(version)?,
                None => drop(flags.insert(word.into())),
            }
        }
        if let Some(flag) = flags.iter().find(|flag| !FLAGS.contains(&flag.as_str())) {
            return Err(format!("{flag}: no such flag"));
        }
        let has_record = !matches!(class, Class::Local | Class::None | Class::Retain | Class::Release);
        if self.api.is_contextual && has_record && !flags.contains("free") {
            flags.insert("current".into());
        }
        let id = small(id)?;
        self.add(Function { since, ..declared(id, name, class, flags, at) })
    }

    /// A line of functions that are not forwarded. Their numbers follow on all others, as they have no records.
    fn absent(&mut self, why: Absence, name: &str, rest: &str) -> Result<(), String> {
        let (version, suffix) = rest.split_once(' ').unwrap_or((rest, ""));
        let flags = suffix.split_whitespace().map(Into::into).collect();
        let id = self.api.functions.iter().map(|f| f.id).max().unwrap_or(0).max(FIRST_ABSENT) + 1;
        let f = declared(id, name, Class::None, flags, 0);
        self.add(Function { since: small(version)?, absence: Some(why), ..f })
    }

    fn add(&mut self, f: Function) -> Result<(), String> {
        let (id, name) = (f.id, f.name.as_str());
        if let Some(other) = self.api.functions.iter().find(|f| f.id == id || f.name == name) {
            return Err(format!("{name}: same id or name as {} in line {}", other.name, other.line));
        }
        self.api.functions.push(f);
        Ok(())
    }

    fn line(&mut self, at: usize, is_indented: bool, text: &str) -> Result<(), String> {
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        if is_indented {
            return self.indented(text, word, rest);
        }
        self.section = Section::Line;
        match word {
            "api" => self.api.name = rest.into(),
            "prefix" => self.api.prefix = rest.into(),
            "unsupported" => self.api.unsupported = self.known(rest)?,
            "success" => self.api.success = self.known(rest)?,
            "lost" => self.api.lost = self.known(rest)?,
            "dispatch" => self.api.dispatch.extend(rest.split_whitespace().map(Into::into)),
            "const" if is_int(rest) => self.section = Section::Constants(rest.into()),
            "struct" => {
                let (name, size) = rest.split_once(' ').ok_or("expected 'struct name size'")?;
                let size = small(size)? as usize;
                self.api.structs.push(Struct { name: name.into(), size, fields: Vec::new() });
                self.section = Section::Struct;
            }
            "kind" => {
                let [id, name, invalid] = rest.split_whitespace().collect::<Vec<_>>()[..] else {
                    return Err("expected 'kind number name code'".into());
                };
                self.api.kinds.push(Kind {
                    id: small(id)?,
                    name: name.into(),
                    invalid: self.known(invalid)?,
                });
            }
            "contextual" => self.api.is_contextual = true,
            "none" => {
                let (state, reason) = rest.split_once(' ').ok_or("expected 'none never|later reason'")?;
                if !["never", "later"].contains(&state) {
                    return Err(format!("{state}: expected never or later"));
                }
                self.section = Section::Absent(Absence { later: state == "later", reason: reason.into() });
            }
            "fn" => {
                self.function(at, rest)?;
                self.section = Section::Function;
            }
            _ => return Err(format!("{word}: unknown")),
        }
        Ok(())
    }
}

/// A declaration without details.
fn declared(id: u32, name: &str, class: Class, flags: HashSet<String>, line: usize) -> Function {
    Function {
        id,
        name: name.into(),
        class,
        flags,
        params: Vec::new(),
        wire: None,
        local: Vec::new(),
        changing: Vec::new(),
        checks: Vec::new(),
        packed: None,
        memory: None,
        command: None,
        since: 0,
        absence: None,
        line,
    }
}

/// `FUNCTION(FIELD, …)`, whose fields exist.
fn call(text: &str, fields: &[Param], f: &Function) -> Result<Call, String> {
    let (name, args) =
        text.strip_suffix(')').and_then(|r| r.split_once('(')).ok_or("expected 'function(fields)'")?;
    let args = names(args);
    match args.iter().find(|arg| !fields.iter().any(|p| p.name == **arg)) {
        Some(arg) => Err(format!("{arg}: not a field of {}", f.name)),
        None => Ok(Call { name: name.into(), args }),
    }
}

/// Refuses a declaration that lacks what the generators need.
fn complete(f: &Function) -> Result<(), String> {
    let by_hand = f.wire.is_some() || !f.on_wire();
    if let Some(p) = f.params.iter().find(|p| p.ty == Type::Ptr).filter(|_| !by_hand) {
        return Err(format!("{} has a pointer ({}) and no wire format", f.name, p.name));
    }
    // A call with results must be waited for: a result of a posted call would have nowhere to go.
    if f.params.iter().any(|p| matches!(p.ty, Type::Out(_)))
        && (f.is("lazy") || f.is("sure") || f.class == Class::Post)
    {
        return Err(format!("{} has results and can't be posted", f.name));
    }
    if f.is_command() && !f.is("client") && f.command.is_none() {
        return Err(format!("{} has no type of command", f.name));
    }
    if let Class::Transfer(_) = f.class {
        if !f.is("server") && f.packed.is_none() {
            return Err(format!("{} doesn't say how many bytes it has ('packed')", f.name));
        }
        if !f.is("client") && f.memory.is_none() {
            return Err(format!("{} doesn't say where its bytes lie ('memory')", f.name));
        }
    }
    Ok(())
}

/// Parses declarations. The error names the line.
pub fn parse(text: &str) -> Result<Api, String> {
    let api = Api { identity: crate::identity(text), ..Api::default() };
    let mut parser = Parser { api, section: Section::Line };
    for (i, line) in text.lines().enumerate() {
        let bare = line.split('#').next().unwrap_or("");
        if !bare.trim().is_empty() {
            let indented = bare.starts_with(char::is_whitespace);
            parser.line(i + 1, indented, bare.trim()).map_err(|e| format!("line {}: {e}", i + 1))?;
        }
    }
    let api = parser.api;
    for f in &api.functions {
        complete(f).map_err(|e| format!("line {}: {e}", f.line))?;
    }
    for name in api.dispatch.iter().filter(|n| !n.starts_with('-')) {
        api.function(name).ok_or(format!("dispatch: {name} has no declaration"))?;
    }
    Ok(api)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "api t\nconst i32\n  BAD -1\n  READ 0x10\nkind 1 thing BAD\n";

    fn error(text: &str) -> String {
        parse(&format!("{HEAD}{text}")).expect_err("it is refused")
    }

    #[test]
    fn a_posted_call_with_a_result_does_not_compile() {
        let e = error("fn 1 tGet call lazy\n  thing: thing\n  value: out u32\n");
        assert!(e.contains("line 6: tGet has results"), "{e}");
    }

    #[test]
    fn ids_and_names_are_used_once() {
        let e = error("fn 1 tA call\nfn 1 tB call\n");
        assert!(e.contains("same id or name as tA"), "{e}");
        let e = error("const u32\n  BAD 1\n");
        assert!(e.contains("BAD stands here twice"), "{e}");
    }

    #[test]
    fn a_pointer_without_a_wire_format_does_not_compile() {
        let e = error("fn 1 tA call\n  p: ptr\n");
        assert!(e.contains("has a pointer (p)"), "{e}");
    }

    #[test]
    fn a_dispatch_entry_needs_a_declaration() {
        let e = error("fn 1 tA call\ndispatch tA tB\n");
        assert!(e.contains("tB has no declaration"), "{e}");
    }

    #[test]
    fn a_check_names_fields_that_exist() {
        let e = error("fn 1 tA call\n  x: thing\n  check range(x, y)\n");
        assert!(e.contains("y: not a field of tA"), "{e}");
    }

    #[test]
    fn a_number_has_a_name() {
        let e = error("fn 1 tA info\n  x: thing\n  local 0x1080\n");
        assert!(e.contains("0x1080: no such constant"), "{e}");
        let e = error("fn 1 tA info\n  x: thing\n  changing READ\n");
        assert!(e.contains("tA keeps no answers"), "{e}");
        let e = error("fn 1 tA enqueue\n  x: thing\n");
        assert!(e.contains("tA has no type of command"), "{e}");
    }

    #[test]
    fn a_transfer_says_how_many_bytes_go_and_where_they_lie() {
        let head = "fn 1 tRead transfer reads\n  x: thing\n  size: usize\n  to: data\n  command READ\n";
        let e = error(head);
        assert!(e.contains("tRead doesn't say how many bytes"), "{e}");
        let e = error(&format!("{head}  packed bytes(size)\n"));
        assert!(e.contains("tRead doesn't say where its bytes lie"), "{e}");
        let api =
            parse(&format!("{HEAD}{head}  packed bytes(size)\n  memory flat(size)\n")).expect("complete");
        let fields: Vec<_> = api.functions[0].fields().into_iter().map(|p| p.name).collect();
        assert_eq!(fields, ["x", "size", "data", "ticket", "waits", "event"]);
    }
}
