// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes the server's side: the table of native functions, and the decoder that checks each record and calls. Hand-written handlers
//! are expected in `super::hand`; what a call needs of its surroundings is the runtime `Cx`.

use crate::client::signature;
use crate::parse::{Api, Class, Function, Type};
use crate::{ident, record_name, snake};
use std::fmt::Write;

fn has_life(f: &Function) -> bool {
    f.fields().iter().any(|p| {
        matches!(
            p.ty,
            Type::Handles(..)
                | Type::New(_)
                | Type::Ints(_)
                | Type::Bytes(_)
                | Type::Blob
                | Type::Str(_)
                | Type::Strs
        )
    })
}

/// Statements that look up handles and convert fields; the arguments of the native call.
fn convert(out: &mut String, f: &Function) -> Result<Vec<String>, std::fmt::Error> {
    let mut args = Vec::new();
    for p in &f.params {
        let n = ident(&p.name);
        let arg = match &p.ty {
            Type::Int(t) if t == "usize" => format!("r.{n} as usize"),
            Type::Int(_) => format!("r.{n}"),
            Type::Handle(kind, optional) => {
                let get = if *optional { "maybe" } else { "get" };
                writeln!(out, "    let {n} = cx.{get}(kind::{}, r.{n})?;", kind.to_uppercase())?;
                n
            }
            Type::Handles(kind, _) => {
                writeln!(out, "    let {n} = cx.all(kind::{}, &r.{n})?;", kind.to_uppercase())?;
                format!("{n}.as_ptr()")
            }
            Type::Triple => {
                writeln!(out, "    let {n} = r.{n}.map(|v| v as usize);")?;
                format!("{n}.as_ptr()")
            }
            Type::Bytes(len) => {
                let len = if len.parse::<u64>().is_ok() { len.clone() } else { format!("r.{len}") };
                writeln!(out, "    cx.same_length(r.{n}, {len})?;")?;
                format!("r.{n}.as_ptr().cast()")
            }
            Type::Str(false) => {
                writeln!(out, "    let {n} = cx.c_string(r.{n})?;")?;
                format!("{n}.as_ptr()")
            }
            Type::Out(t) => {
                if let Type::Int(t) = &**t {
                    writeln!(out, "    let mut {n}: {t} = 0;")?;
                }
                format!("&mut {n}")
            }
            _ => unreachable!("the parser wants a wire format for {}", f.name),
        };
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

fn handler(out: &mut String, f: &Function) -> std::fmt::Result {
    let life = if has_life(f) { "<'_>" } else { "" };
    writeln!(
        out,
        "fn {}(cx: &mut Cx<'_>, r: &wire::{}{life}) -> Result<(), i32> {{",
        snake(&f.name),
        record_name(&f.name)
    )?;
    writeln!(out, "    let f = cx.native().{}.ok_or(wire::UNSUPPORTED)?;", f.name)?;
    let args = convert(out, f)?;
    checks(out, f)?;
    let args = args.join(", ");
    let lead = if args.is_empty() { "" } else { ", " };
    writeln!(
        out,
        "    // SAFETY: handles were looked up, lengths and ranges checked; all pointers live during the call."
    )?;
    match &f.class {
        Class::Info => {
            let local: Vec<String> = f.local.iter().map(|n| format!("{n:#x}")).collect();
            writeln!(
                out,
                "    cx.info(r.param, &[{}], |size, value, ret| unsafe {{ f({args}, r.param, size, value, ret) }})\n}}",
                local.join(", ")
            )
        }
        Class::Enqueue => {
            writeln!(
                out,
                "    cx.enqueue(&r.waits, r.event, |n, list, event| unsafe {{ f({args}{lead}n, list, event) }})\n}}"
            )
        }
        Class::Create(kind) => {
            writeln!(
                out,
                "    cx.create(kind::{}, r.new, |code| unsafe {{ f({args}{lead}code) }})\n}}",
                kind.to_uppercase()
            )
        }
        _ => {
            if f.is("blocks") {
                writeln!(out, "    cx.may_block()?;")?;
            }
            writeln!(out, "    cx.status(unsafe {{ f({args}) }})?;")?;
            for p in &f.params {
                if let Type::Out(t) = &p.ty {
                    if let Type::Int(t) = &**t {
                        writeln!(out, "    cx.reply().{t}({});", ident(&p.name))?;
                    }
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
/// `hand`, `Record` and `Malformed`.
pub fn emit(api: &Api) -> String {
    let mut out = String::new();
    build(&mut out, api).expect("writing to a string can't fail");
    out
}

fn build(out: &mut String, api: &Api) -> std::fmt::Result {
    let native: Vec<&Function> = api.functions.iter().filter(|f| f.is_native()).collect();
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
        handler(out, f)?;
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
        if let (Class::Enqueue, Some(queue)) = (&f.class, queue) {
            steps.push(format!("cx.in_queue(r.{}, r.event)", ident(&queue.name)));
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
