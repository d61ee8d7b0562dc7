// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes the server's side: the table of native functions, and the decoder that checks each record and calls. Hand-written handlers
//! are expected in `super::hand`; what a call needs of its surroundings is the runtime `Cx`.

use crate::api::{Api, Class, Direction, Function, Type};
use crate::client::{constants, signature};
use crate::{ident, record_name, snake};
use std::fmt::Write;

fn has_life(f: &Function) -> bool {
    f.fields().iter().any(|p| {
        matches!(
            p.ty,
            Type::Handles(..)
                | Type::New(_)
                | Type::Ints(_)
                | Type::Properties(_)
                | Type::Bytes(_)
                | Type::Blob
                | Type::Str(_)
                | Type::Strs
        )
    })
}

/// A length: a number, or the field of that name.
fn length(len: &str) -> String {
    if len.parse::<u64>().is_ok() { len.to_string() } else { format!("r.{len}") }
}

/// The statement that makes an argument of the native call out of a field, if it needs one; and the argument.
fn argument(api: &Api, f: &Function, name: &str, ty: &Type) -> (Option<String>, String) {
    let n = ident(name);
    let made = |what: String, argument: String| (Some(format!("let {n} = {what};")), argument);
    match ty {
        Type::Int(t) if t == "usize" => (None, format!("r.{n} as usize")),
        Type::Address => (Some(format!("cx.address(r.{n})?;")), format!("r.{n}")),
        Type::Ordinal => made(format!("cx.device(r.{n})?"), n.clone()),
        Type::Fresh(_) => {
            let statement = format!("cx.vacant(r.{n})?;\n    let mut {n}: Handle = std::ptr::null_mut();");
            (Some(statement), format!("&mut {n}"))
        }
        Type::Int(_) => (None, format!("r.{n}")),
        Type::Blocking => (None, format!("r.{n}")),
        Type::Handle(kind, optional) => {
            let get = if *optional { "maybe" } else { "get" };
            made(format!("cx.{get}(kind::{}, r.{n})?", kind.to_uppercase()), n.clone())
        }
        Type::Handles(kind, _) => {
            made(format!("cx.all(kind::{}, &r.{n})?", kind.to_uppercase()), format!("{n}.as_ptr()"))
        }
        Type::Triple => made(format!("r.{n}.map(|v| v as usize)"), format!("{n}.as_ptr()")),
        Type::Bytes(len) => {
            (Some(format!("cx.same_length(r.{n}, {})?;", length(len))), format!("r.{n}.as_ptr().cast()"))
        }
        Type::Str(false) => made(format!("cx.c_string(r.{n})?"), format!("{n}.as_ptr()")),
        Type::Shared(len, optional) => {
            let address = format!("cx.shared(r.{n}, {})?", length(len));
            let null = format!("if r.{n} == 0 {{ std::ptr::null_mut() }} else {{ {address} }}");
            made(if *optional { null } else { address }, n.clone())
        }
        Type::Properties(known) => {
            let known = constants(api, known);
            let refused = format!("{}::INVALID_VALUE", api.prefix);
            made(format!("properties::pairs(&r.{n}, &[{known}], {refused})?"), n.clone())
        }
        Type::Host(inner) if **inner == Type::Triple => made("[0usize; 3]".into(), format!("{n}.as_ptr()")),
        Type::Host(_) => (None, "0".into()),
        Type::Data => (None, n),
        Type::Out(t) => match &**t {
            Type::Int(t) => (Some(format!("let mut {n}: {t} = Default::default();")), format!("&mut {n}")),
            _ => (None, format!("&mut {n}")),
        },
        _ => unreachable!("the parser wants a wire format for {}", f.name),
    }
}

/// Writes statements that look up handles and convert fields. Returns the arguments of the native call.
fn convert(out: &mut String, api: &Api, f: &Function) -> Result<Vec<String>, std::fmt::Error> {
    let mut args = Vec::new();
    for p in &f.params {
        let (statement, arg) = argument(api, f, &p.name, &p.ty);
        if let Some(statement) = statement {
            writeln!(out, "    {statement}")?;
        }
        args.push(arg);
    }
    // Counts of arrays come from the arrays: a count that disagrees can't make the driver read beyond them.
    for p in &f.params {
        if let Type::Handles(_, Some(count)) = &p.ty {
            writeln!(out, "    cx.same_count({}.len(), r.{count})?;", ident(&p.name))?;
        }
    }
    Ok(args)
}

/// The range of the window that a transfer's bytes have.
fn window(out: &mut String, f: &Function) -> std::fmt::Result {
    let Some(packed) = &f.packed else { return Ok(()) };
    let args: Vec<String> = packed.args.iter().map(|a| format!("r.{a}")).collect();
    writeln!(out, "    let len = cx.{}({})?;", packed.name, args.join(", "))?;
    for p in f.params.iter().filter(|p| p.ty == Type::Data) {
        writeln!(out, "    let {} = cx.offered(r.data, len)?;", ident(&p.name))?;
    }
    Ok(())
}

/// The field that says whether the client blocks for a command.
fn blocking(f: &Function) -> Option<String> {
    f.params.iter().find(|p| p.ty == Type::Blocking).map(|p| ident(&p.name))
}

fn handler(out: &mut String, api: &Api, f: &Function) -> std::fmt::Result {
    let life = if has_life(f) { "<'_>" } else { "" };
    writeln!(
        out,
        "fn {}(cx: &mut Cx<'_>, r: &wire::{}{life}) -> Result<(), i32> {{",
        snake(&f.name),
        record_name(&f.name)
    )?;
    writeln!(out, "    let f = cx.native().{}.ok_or(wire::UNSUPPORTED)?;", f.name)?;
    let args = convert(out, api, f)?;
    checks(out, f)?;
    window(out, f)?;
    if let Some(field) = blocking(f) {
        writeln!(out, "    if r.{field} != 0 {{\n        cx.may_block()?;\n    }}")?;
    }
    if f.is("blocks") {
        writeln!(out, "    cx.may_block()?;")?;
    }
    let args = args.join(", ");
    let comma = if args.is_empty() { "" } else { ", " };
    writeln!(
        out,
        "    // SAFETY: handles were looked up, lengths and ranges checked; all pointers live during the call."
    )?;
    let enqueued = format!("|n, list, event| unsafe {{ f({args}{comma}n, list, event) }}");
    match &f.class {
        Class::Info => writeln!(
            out,
            "    cx.info(r.param, &[{}], |size, value, ret| unsafe {{ f({args}, r.param, size, value, ret) }})\n}}",
            constants(api, &f.local)
        ),
        Class::Enqueue => writeln!(out, "    cx.enqueue(&r.waits, r.event, {enqueued})\n}}"),
        Class::Transfer(Direction::Writes) => {
            writeln!(out, "    cx.transfer(&r.waits, r.event, r.ticket, None, {enqueued})\n}}")
        }
        Class::Transfer(Direction::Reads) => {
            writeln!(out, "    cx.transfer(&r.waits, r.event, r.ticket, Some((r.data, len)), {enqueued})\n}}")
        }
        Class::Create(kind) => writeln!(
            out,
            "    cx.create(kind::{}, r.new, |code| unsafe {{ f({args}{comma}code) }})\n}}",
            kind.to_uppercase()
        ),
        _ => {
            writeln!(out, "    cx.status(unsafe {{ f({args}) }})?;")?;
            for p in &f.params {
                if let Type::Out(t) = &p.ty {
                    if let Type::Int(t) = &**t {
                        let (method, cast) = if t == "usize" { ("u64", " as u64") } else { (t.as_str(), "") };
                        writeln!(out, "    cx.reply().{method}({}{cast});", ident(&p.name))?;
                    }
                }
                if let Type::Fresh(kind) = &p.ty {
                    let n = ident(&p.name);
                    writeln!(out, "    cx.created(kind::{}, r.{n}, {n})?;", kind.to_uppercase())?;
                }
            }
            writeln!(out, "    Ok(())\n}}")
        }
    }
}

fn checks(out: &mut String, f: &Function) -> std::fmt::Result {
    for check in &f.checks {
        let args: Vec<String> = check.args.iter().map(|a| format!("r.{a}")).collect();
        writeln!(out, "    cx.check_{}({})?;", check.name, args.join(", "))?;
    }
    Ok(())
}

/// The server's functions, as Rust source for `include!` in a module that imports `Handle`, `c_void`, `c_char`, `Cx`, `wire`, `kind`,
/// the module of constants, `properties`, `hand`, `Record` and `Malformed`.
pub fn emit(api: &Api) -> String {
    let mut out = String::new();
    build(&mut out, api).expect("writing to a string can't fail");
    out
}

fn build(out: &mut String, api: &Api) -> std::fmt::Result {
    let is_there = |f: &&Function| f.is_native() && f.absence.is_none();
    let native: Vec<&Function> = api.functions.iter().filter(is_there).collect();
    writeln!(
        out,
        "/// The native functions; None: this driver doesn't have it.\n#[allow(non_snake_case)]\npub struct Native {{"
    )?;
    for f in &native {
        let (params, result) = signature(f);
        let types: Vec<String> = params.into_iter().map(|p| p.1).collect();
        writeln!(
            out,
            "    /// `{}`\n    pub {}: Option<unsafe extern \"C\" fn({}) -> {result}>,",
            f.name,
            f.name,
            types.join(", ")
        )?;
    }
    writeln!(out, "}}\nimpl Native {{")?;
    writeln!(
        out,
        "    /// Looks all functions up.\n    ///\n    /// # Safety\n    /// `find` returns null or the address of the API's function of that name."
    )?;
    writeln!(
        out,
        "    pub unsafe fn load(mut find: impl FnMut(&CStr) -> *mut c_void) -> Native {{\n        Native {{"
    )?;
    for f in &native {
        writeln!(
            out,
            "            // SAFETY: an address or null, as the caller promises; Option of a function pointer has null as None."
        )?;
        let (params, result) = signature(f);
        let types: Vec<String> = params.into_iter().map(|p| p.1).collect();
        let ty = format!("Option<unsafe extern \"C\" fn({}) -> {result}>", types.join(", "));
        writeln!(
            out,
            "            {}: unsafe {{ std::mem::transmute::<*mut c_void, {ty}>(find(c{:?})) }},",
            f.name, f.name
        )?;
    }
    writeln!(out, "        }}\n    }}\n}}")?;
    for f in api.functions.iter().filter(|f| f.on_wire() && !f.is("server")) {
        handler(out, api, f)?;
    }
    writeln!(out, "/// Decodes the record of `id` and carries it out. The inner error is the API's own.")?;
    writeln!(
        out,
        "pub fn dispatch(cx: &mut Cx<'_>, id: u32, body: &[u8]) -> Result<Result<(), i32>, Malformed> {{\n    Ok(match id {{"
    )?;
    for f in api.functions.iter().filter(|f| f.on_wire()) {
        let record = record_name(&f.name);
        writeln!(
            out,
            "        {:#x} => {{\n            let r = tombolo_accel_spec::wire::decode::<wire::{record}>(body)?;",
            f.id
        )?;
        // Before any check: what is refused redeems its ticket too.
        if f.fields().iter().any(|p| p.name == "ticket") {
            writeln!(out, "            cx.owe(r.ticket);")?;
        }
        let mut steps = Vec::new();
        // A command of a queue in which a posted one failed is refused, until the program was told.
        let queue = f.fields().into_iter().find(|p| p.ty == Type::Handle("queue".into(), false));
        if let (true, Some(queue)) = (f.is_command(), queue) {
            steps.push(format!("cx.in_queue(r.{}, r.event)", ident(&queue.name)));
        }
        if f.is("current") {
            steps.push("cx.enter(r.current)".into());
        }
        if f.is("server") && !f.checks.is_empty() {
            steps.push(format!("check_{}(cx, &r)", snake(&f.name)));
        }
        let module = if f.is("server") { "hand::" } else { "" };
        steps.push(format!("{module}{}(cx, &r)", snake(&f.name)));
        writeln!(out, "            {}", steps.join(".and_then(|()| ") + &")".repeat(steps.len() - 1))?;
        writeln!(out, "        }}")?;
    }
    writeln!(out, "        _ => Err(wire::UNSUPPORTED),\n    }})\n}}")?;
    for f in api.functions.iter().filter(|f| f.on_wire() && f.is("server") && !f.checks.is_empty()) {
        let life = if has_life(f) { "<'_>" } else { "" };
        writeln!(
            out,
            "fn check_{}(cx: &mut Cx<'_>, r: &wire::{}{life}) -> Result<(), i32> {{",
            snake(&f.name),
            record_name(&f.name)
        )?;
        checks(out, f)?;
        writeln!(out, "    Ok(())\n}}")?;
    }
    Ok(())
}
