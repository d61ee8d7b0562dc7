// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The declarations: a line-based format, `#` starts a comment, indented lines belong to the function above.
//!
//! ```text
//! api NAME                        once
//! unsupported N / success N / lost N     codes of the API
//! kind N NAME CODE                a kind of handle, and the code for an invalid one
//! fn ID NAME CLASS [FLAG…]
//!     PARAMETER: TYPE
//!     wire FIELD: TYPE, …
//!     local N…
//!     check NAME(FIELD, …)
//!     command N
//! dispatch NAME…
//! ```
//!
//! Types: `u32 i32 u64 i64 usize`; `KIND`, `KIND?` (may be null); `[KIND; len]`, `[KIND]`, `[new KIND]`; `[T; 3]`, `[T]`;
//! `bytes(len)`, `blob`, `str`, `str?`, `strs`; `out TYPE`; `ptr` and `fn` (only with a hand-written client).

use std::collections::HashSet;

/// A type of a parameter or of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// An integer, by its Rust name.
    Int(String),
    /// A handle; whether it may be null.
    Handle(String, bool),
    /// Several handles; the parameter that counts them.
    Handles(String, Option<String>),
    /// Ids that the client chose for handles to be created.
    New(String),
    /// Three integers.
    Triple,
    /// Any number of integers.
    Ints(String),
    /// Bytes, whose length another parameter or a number gives.
    Bytes(String),
    /// Bytes.
    Blob,
    /// A string; whether it may be null.
    Str(bool),
    /// Strings.
    Strs,
    /// A pointer to where a result goes.
    Out(Box<Type>),
    /// A pointer that hand-written code understands.
    Ptr,
}

/// A named parameter or field.
#[derive(Clone, Debug)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// Its type.
    pub ty: Type,
}

/// What kind of function it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Class {
    /// A property query.
    Info,
    /// A command in a queue.
    Enqueue,
    /// Creates a handle of this kind.
    Create(String),
    /// Returns a status.
    Call,
    /// Never leaves the client.
    Local,
    /// Not supported.
    None,
}

/// A check of the server.
#[derive(Clone, Debug)]
pub struct Check {
    /// The runtime's function.
    pub name: String,
    /// Fields it gets.
    pub args: Vec<String>,
}

/// One declaration.
#[derive(Clone, Debug)]
pub struct Function {
    /// Its number on the wire.
    pub id: u32,
    /// Its name in the API.
    pub name: String,
    /// Its class.
    pub class: Class,
    /// Its flags.
    pub flags: HashSet<String>,
    /// Its parameters in C's order, without those its class implies.
    pub params: Vec<Param>,
    /// Fields of its record, if they aren't the parameters.
    pub wire: Option<Vec<Param>>,
    /// Properties that the client answers.
    pub local: Vec<u64>,
    /// Checks before the native call.
    pub checks: Vec<Check>,
    /// The type of command its event has.
    pub command: u64,
    /// Line of the declaration.
    pub line: usize,
}

impl Function {
    /// Whether a flag is set.
    pub fn is(&self, flag: &str) -> bool {
        self.flags.contains(flag)
    }

    /// Whether it has a record.
    pub fn on_wire(&self) -> bool {
        !matches!(self.class, Class::Local | Class::None)
    }

    /// Whether it is in the native API (and not one of our own records).
    pub fn is_native(&self) -> bool {
        self.name.starts_with(|c: char| c.is_ascii_lowercase()) && !self.name.starts_with("tombolo")
    }

    /// The fields of its record, with those its class implies.
    pub fn fields(&self) -> Vec<Param> {
        let mut fields: Vec<Param> = match &self.wire {
            Some(wire) => wire.clone(),
            None => {
                self.params.iter().filter(|p| !matches!(p.ty, Type::Out(_) | Type::Ptr)).cloned().collect()
            }
        };
        let mut add = |name: &str, ty| fields.push(Param { name: name.into(), ty });
        match &self.class {
            Class::Info => add("param", Type::Int("u32".into())),
            Class::Enqueue => {
                add("waits", Type::Handles("event".into(), None));
                add("event", Type::Int("u64".into()));
            }
            Class::Create(_) => add("new", Type::Int("u64".into())),
            _ => {}
        }
        fields
    }
}

/// A kind of handle.
#[derive(Clone, Debug)]
pub struct Kind {
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The code for an invalid handle.
    pub invalid: i32,
}

/// All declarations of an API.
#[derive(Clone, Debug, Default)]
pub struct Api {
    /// Its name.
    pub name: String,
    /// The code for what isn't supported.
    pub unsupported: i32,
    /// The code for success.
    pub success: i32,
    /// The code for a lost device.
    pub lost: i32,
    /// Kinds of handles.
    pub kinds: Vec<Kind>,
    /// Functions.
    pub functions: Vec<Function>,
    /// Dispatch table.
    pub dispatch: Vec<String>,
    /// Identity of the text.
    pub identity: u128,
}

fn number(text: &str) -> Result<i64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{text}: not a number"))
}

fn is_int(text: &str) -> bool {
    matches!(text, "u32" | "i32" | "u64" | "i64" | "usize")
}

impl Api {
    fn ty(&self, text: &str) -> Result<Type, String> {
        let text = text.trim();
        let handle = |name: &str| self.kinds.iter().any(|k| k.name == name);
        if let Some(inner) = text.strip_prefix("out ") {
            return Ok(Type::Out(Box::new(self.ty(inner)?)));
        }
        if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            let (element, count) = match inner.split_once(';') {
                Some((e, n)) => (e.trim(), Some(n.trim())),
                None => (inner.trim(), None),
            };
            return match (element.strip_prefix("new "), count) {
                (Some(kind), None) if handle(kind) => Ok(Type::New(kind.into())),
                (None, n) if handle(element) => Ok(Type::Handles(element.into(), n.map(Into::into))),
                (None, Some("3")) if is_int(element) => Ok(Type::Triple),
                (None, None) if is_int(element) => Ok(Type::Ints(element.into())),
                _ => Err(format!("{text}: no such array")),
            };
        }
        if let Some(len) = text.strip_prefix("bytes(").and_then(|t| t.strip_suffix(')')) {
            return Ok(Type::Bytes(len.into()));
        }
        let (bare, optional) = (text.trim_end_matches('?'), text.ends_with('?'));
        Ok(match bare {
            _ if is_int(bare) && !optional => Type::Int(bare.into()),
            _ if handle(bare) => Type::Handle(bare.into(), optional),
            "blob" => Type::Blob,
            "str" => Type::Str(optional),
            "strs" => Type::Strs,
            "ptr" | "fn" => Type::Ptr,
            _ => return Err(format!("{text}: no such type")),
        })
    }

    fn param(&self, text: &str) -> Result<Param, String> {
        let (name, ty) = text.split_once(':').ok_or_else(|| format!("{text}: expected 'name: type'"))?;
        Ok(Param { name: name.trim().into(), ty: self.ty(ty)? })
    }

    fn line(&mut self, at: usize, indented: bool, text: &str) -> Result<(), String> {
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        if indented {
            let mut f = self.functions.pop().ok_or("belongs to no function")?;
            match word {
                "wire" => {
                    f.wire =
                        Some(split_fields(rest).iter().map(|p| self.param(p)).collect::<Result<_, _>>()?);
                }
                "local" => {
                    f.local = rest
                        .split_whitespace()
                        .map(|n| number(n).map(|n| n as u64))
                        .collect::<Result<_, _>>()?;
                }
                "command" => f.command = number(rest)? as u64,
                "check" => {
                    let (name, args) = rest
                        .strip_suffix(')')
                        .and_then(|r| r.split_once('('))
                        .ok_or("expected 'check name(fields)'")?;
                    let args: Vec<String> = args.split(',').map(|a| a.trim().to_string()).collect();
                    for arg in &args {
                        if !f.fields().iter().any(|p| p.name == *arg) {
                            return Err(format!("{arg}: not a field of {}", f.name));
                        }
                    }
                    f.checks.push(Check { name: name.into(), args });
                }
                _ => f.params.push(self.param(text)?),
            }
            self.functions.push(f);
            return Ok(());
        }
        match word {
            "api" => self.name = rest.into(),
            "unsupported" => self.unsupported = number(rest)? as i32,
            "success" => self.success = number(rest)? as i32,
            "lost" => self.lost = number(rest)? as i32,
            "dispatch" => self.dispatch.extend(rest.split_whitespace().map(Into::into)),
            "kind" => {
                let [id, name, invalid] = rest.split_whitespace().collect::<Vec<_>>()[..] else {
                    return Err("expected 'kind number name code'".into());
                };
                self.kinds.push(Kind {
                    id: number(id)? as u32,
                    name: name.into(),
                    invalid: number(invalid)? as i32,
                });
            }
            "fn" => {
                let mut words = rest.split_whitespace();
                let (Some(id), Some(name), Some(class)) = (words.next(), words.next(), words.next()) else {
                    return Err("expected 'fn id name class'".into());
                };
                let class = match class {
                    "info" => Class::Info,
                    "enqueue" => Class::Enqueue,
                    "create" => Class::Create(words.next().ok_or("create what?")?.into()),
                    "call" => Class::Call,
                    "local" => Class::Local,
                    "none" => Class::None,
                    _ => return Err(format!("{class}: no such class")),
                };
                let flags: HashSet<String> = words.map(Into::into).collect();
                for flag in &flags {
                    if !["cached", "sure", "lazy", "blocks", "client", "server", "pointer"]
                        .contains(&flag.as_str())
                    {
                        return Err(format!("{flag}: no such flag"));
                    }
                }
                let id = number(id)? as u32;
                if let Some(other) = self.functions.iter().find(|f| f.id == id || f.name == name) {
                    return Err(format!("{name}: same id or name as {} in line {}", other.name, other.line));
                }
                self.functions.push(Function {
                    id,
                    name: name.into(),
                    class,
                    flags,
                    params: Vec::new(),
                    wire: None,
                    local: Vec::new(),
                    checks: Vec::new(),
                    command: 0,
                    line: at,
                });
            }
            _ => return Err(format!("{word}: unknown")),
        }
        Ok(())
    }

    /// The function of this name.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|f| f.name == name)
    }
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

/// Parses declarations. The error names the line.
pub fn parse(text: &str) -> Result<Api, String> {
    let mut api = Api { identity: crate::identity(text), ..Api::default() };
    for (i, line) in text.lines().enumerate() {
        let bare = line.split('#').next().unwrap_or("");
        if !bare.trim().is_empty() {
            let indented = bare.starts_with(char::is_whitespace);
            api.line(i + 1, indented, bare.trim()).map_err(|e| format!("line {}: {e}", i + 1))?;
        }
    }
    for f in &api.functions {
        let by_hand = f.wire.is_some() || !f.on_wire();
        if let Some(p) = f.params.iter().find(|p| p.ty == Type::Ptr).filter(|_| !by_hand) {
            return Err(format!("line {}: {} has a pointer ({}) and no wire format", f.line, f.name, p.name));
        }
        // A call with results must be waited for: a result of a posted call would have nowhere to go.
        if f.params.iter().any(|p| matches!(p.ty, Type::Out(_))) && (f.is("lazy") || f.is("sure")) {
            return Err(format!("line {}: {} has results and can't be posted", f.line, f.name));
        }
    }
    for name in api.dispatch.iter().filter(|n| !n.starts_with('-')) {
        api.function(name).ok_or(format!("dispatch: {name} has no declaration"))?;
    }
    Ok(api)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "api t\nkind 1 thing -1\n";

    #[test]
    fn a_posted_call_with_a_result_does_not_compile() {
        let e = parse(&format!("{HEAD}fn 1 tGet call lazy\n  thing: thing\n  value: out u32\n")).unwrap_err();
        assert!(e.contains("line 3: tGet has results"), "{e}");
    }

    #[test]
    fn ids_and_names_are_used_once() {
        let e = parse(&format!("{HEAD}fn 1 tA call\nfn 1 tB call\n")).unwrap_err();
        assert!(e.contains("same id or name as tA"), "{e}");
    }

    #[test]
    fn a_pointer_without_a_wire_format_does_not_compile() {
        let e = parse(&format!("{HEAD}fn 1 tA call\n  p: ptr\n")).unwrap_err();
        assert!(e.contains("has a pointer (p)"), "{e}");
    }

    #[test]
    fn a_dispatch_entry_needs_a_declaration() {
        let e = parse(&format!("{HEAD}fn 1 tA call\ndispatch tA tB\n")).unwrap_err();
        assert!(e.contains("tB has no declaration"), "{e}");
    }

    #[test]
    fn a_check_names_fields_that_exist() {
        let e = parse(&format!("{HEAD}fn 1 tA call\n  x: thing\n  check range(x, y)\n")).unwrap_err();
        assert!(e.contains("y: not a field of tA"), "{e}");
    }
}
