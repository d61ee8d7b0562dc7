// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes the client's C functions and its dispatch table. Hand-written ones are expected in `crate::hand`; what a call needs of its
//! surroundings is in `crate::rt`, whether a command is sure to succeed in `crate::sure`.

use crate::parse::{Api, Class, Function, Type};
use crate::{ident, record_name, snake};
use std::fmt::Write;

fn c_type(ty: &Type) -> String {
    match ty {
        Type::Int(t) => t.clone(),
        Type::Handle(..) => "Handle".into(),
        Type::Handles(..) => "*const Handle".into(),
        Type::Triple => "*const usize".into(),
        Type::Bytes(_) | Type::Ptr | Type::Ints(_) | Type::Blob | Type::Strs | Type::New(_) => {
            "*const c_void".into()
        }
        Type::Str(_) => "*const c_char".into(),
        Type::Out(t) => format!("*mut {}", c_type(t).trim_start_matches("*const ")),
    }
}

/// The C signature of a function, as a Rust function pointer's parameters and result.
pub(crate) fn signature(f: &Function) -> (Vec<(String, String)>, &'static str) {
    let mut params: Vec<(String, String)> =
        f.params.iter().map(|p| (ident(&p.name), c_type(&p.ty))).collect();
    let mut add = |name: &str, ty: &str| params.push((name.into(), ty.into()));
    let result = match f.class {
        Class::Info => {
            add("param", "u32");
            add("size", "usize");
            add("value", "*mut c_void");
            add("size_ret", "*mut usize");
            "i32"
        }
        Class::Enqueue => {
            add("num_waits", "u32");
            add("wait_list", "*const Handle");
            add("event", "*mut Handle");
            "i32"
        }
        Class::Create(_) => {
            add("errcode_ret", "*mut i32");
            "Handle"
        }
        _ if f.is("pointer") => "*mut c_void",
        _ => "i32",
    };
    (params, result)
}

/// Statements that check the parameters and turn them into fields; names of the handles among them.
fn convert(out: &mut String, f: &Function) -> Result<Vec<String>, std::fmt::Error> {
    let mut objects = Vec::new();
    for p in &f.params {
        let n = ident(&p.name);
        match &p.ty {
            Type::Handle(kind, optional) => {
                let get = if *optional { "maybe" } else { "object" };
                writeln!(out, "        let {n} = rt::{get}({n}, kind::{})?;", kind.to_uppercase())?;
                objects.push(n);
            }
            Type::Handles(kind, Some(count)) => {
                writeln!(out, "        // SAFETY: the caller passes {count} handles, as the API says.")?;
                writeln!(
                    out,
                    "        let {n} = unsafe {{ rt::objects({count}, {n}, kind::{}) }}?;",
                    kind.to_uppercase()
                )?;
            }
            Type::Triple => {
                writeln!(out, "        // SAFETY: the caller passes three numbers, as the API says.")?;
                writeln!(out, "        let {n} = unsafe {{ rt::triple({n}) }}?;")?;
            }
            Type::Bytes(len) => {
                writeln!(out, "        // SAFETY: the caller passes {len} bytes, as the API says.")?;
                writeln!(out, "        let {n} = unsafe {{ rt::bytes({n}, {len}) }}?;")?;
            }
            Type::Str(_) => {
                writeln!(out, "        // SAFETY: the caller passes a C string or null, as the API says.")?;
                writeln!(out, "        let {n} = unsafe {{ rt::string({n}) }}?;")?;
            }
            _ => {}
        }
    }
    Ok(objects)
}

fn fields(f: &Function) -> String {
    let mut out = String::new();
    for p in f.params.iter() {
        let n = ident(&p.name);
        let value = match &p.ty {
            Type::Int(t) if t == "usize" => format!("{n} as u64"),
            Type::Int(_) | Type::Triple | Type::Bytes(_) | Type::Str(_) => n.clone(),
            Type::Handle(_, false) => format!("{n}.id()"),
            Type::Handle(_, true) => format!("{n}.map_or(0, |o| o.id())"),
            Type::Handles(..) => format!("{n}.into()"),
            _ => continue,
        };
        out += &format!("{n}: {value}, ");
    }
    out
}

fn stub(out: &mut String, f: &Function) -> std::fmt::Result {
    let (params, result) = signature(f);
    let params: Vec<String> = params.iter().map(|(n, t)| format!("{n}: {t}")).collect();
    let (name, record, id) = (&f.name, record_name(&f.name), f.id);
    writeln!(out, "pub unsafe extern \"C\" fn {name}({}) -> {result} {{", params.join(", "))?;
    match &f.class {
        Class::Info => {
            writeln!(out, "    rt::status(|| {{")?;
            convert(out, f)?;
            let object = ident(&f.params[0].name);
            let local: Vec<String> = f.local.iter().map(|n| format!("{n:#x}")).collect();
            writeln!(out, "        if [{}].contains(&param) {{", local.join(", "))?;
            writeln!(
                out,
                "            // SAFETY: the caller passes room for size bytes and for a size, as the API says."
            )?;
            writeln!(
                out,
                "            return unsafe {{ rt::answer(&crate::local::answer({object}, param)?, size, value, size_ret) }};\n        }}"
            )?;
            writeln!(out, "        let record = wire::{record} {{ {}param }};", fields(f))?;
            writeln!(out, "        // SAFETY: as above.")?;
            writeln!(
                out,
                "        unsafe {{ rt::info(&record, {}, size, value, size_ret) }}",
                f.is("cached")
            )?;
            writeln!(out, "    }})\n}}")
        }
        Class::Enqueue => {
            writeln!(out, "    rt::status(|| {{")?;
            let objects = convert(out, f)?;
            for other in &objects[1..] {
                writeln!(out, "        rt::same_context({}, {other})?;", objects[0])?;
            }
            writeln!(out, "        // SAFETY: the caller passes num_waits events, as the API says.")?;
            writeln!(out, "        let waits = unsafe {{ rt::waits(num_waits, wait_list) }}?;")?;
            writeln!(
                out,
                "        let new = rt::new_event({}, !event.is_null(), {:#x})?;",
                objects[0], f.command
            )?;
            writeln!(
                out,
                "        let record = wire::{record} {{ {}waits: waits.into(), event: new.id() }};",
                fields(f)
            )?;
            if f.is("sure") {
                writeln!(
                    out,
                    "        let sure = crate::sure::{}({}, &record);",
                    snake(name),
                    objects.join(", ")
                )?;
            } else {
                writeln!(out, "        let sure = false;")?;
            }
            writeln!(
                out,
                "        // SAFETY: event is null or points to room for a handle, as the API says."
            )?;
            writeln!(out, "        unsafe {{ rt::submit(&record, sure, new, event) }}")?;
            writeln!(out, "    }})\n}}")
        }
        Class::Create(kind) => {
            writeln!(
                out,
                "    // SAFETY: errcode_ret is null or points to room for a code, as the API says."
            )?;
            writeln!(out, "    unsafe {{ rt::create(errcode_ret, || {{")?;
            convert(out, f)?;
            writeln!(
                out,
                "        let new = rt::new_object(kind::{}, crate::state::Body::Plain({}))?;",
                kind.to_uppercase(),
                ident(&f.params[0].name)
            )?;
            writeln!(out, "        rt::call(&wire::{record} {{ {}new: new.id() }})?;", fields(f))?;
            writeln!(out, "        Ok(new.publish())\n    }}) }}\n}}")
        }
        Class::Call => {
            writeln!(out, "    rt::status(|| {{")?;
            convert(out, f)?;
            writeln!(out, "        let _reply = rt::call(&wire::{record} {{ {}}})?;", fields(f))?;
            let outs: Vec<_> = f.params.iter().filter(|p| matches!(p.ty, Type::Out(_))).collect();
            if !outs.is_empty() {
                writeln!(out, "        let mut from = Decoder::new(&_reply);")?;
            }
            for p in outs {
                if let Type::Out(t) = &p.ty {
                    let n = ident(&p.name);
                    writeln!(out, "        let value = from.{}().map_err(|_| wire::LOST)?;", c_type(t))?;
                    writeln!(out, "        // SAFETY: null or room for the value, as the API says.")?;
                    writeln!(out, "        unsafe {{ rt::write({n}, value) }};")?;
                }
            }
            writeln!(out, "        Ok(())\n    }})\n}}")
        }
        Class::Local | Class::None => {
            let names: Vec<String> = f.params.iter().map(|p| ident(&p.name)).collect();
            writeln!(out, "    let _unused = ({});", names.join(", ") + ",")?;
            writeln!(out, "    rt::unsupported({name:?}, {id:#x})\n}}")
        }
    }
}

/// The client's functions and dispatch table, as Rust source for `include!` in a module that imports `Handle`, `c_void`, `c_char`,
/// `Decoder`, `wire`, `kind` and `rt`.
pub fn emit(api: &Api) -> String {
    let mut out = String::new();
    build(&mut out, api).expect("writing to a string can't fail");
    out
}

fn by_hand(f: &Function) -> bool {
    f.is("client") || f.class == Class::Local
}

fn build(out: &mut String, api: &Api) -> std::fmt::Result {
    for f in api.functions.iter().filter(|f| f.is_native() && !by_hand(f)) {
        stub(out, f)?;
    }
    let pointer = |f: &Function| {
        let module = if by_hand(f) { "crate::hand" } else { "self" };
        format!("{module}::{} as *const c_void", f.name)
    };
    writeln!(
        out,
        "/// Entries of the dispatch table, in the loader's order.\n#[repr(transparent)]\npub struct Table(pub [*const c_void; {}]);",
        api.dispatch.len()
    )?;
    writeln!(out, "// SAFETY: pointers to functions, never written.\nunsafe impl Sync for Table {{}}")?;
    writeln!(out, "/// The dispatch table.\npub static DISPATCH: Table = Table([")?;
    for name in &api.dispatch {
        match name.strip_prefix("-p") {
            Some(n) => writeln!(out, "    rt::unsupported_{n} as *const c_void,")?,
            None if name == "-i" => writeln!(out, "    rt::unsupported_status as *const c_void,")?,
            None => {
                if let Some(f) = api.function(name) {
                    writeln!(out, "    {},", pointer(f))?;
                }
            }
        }
    }
    writeln!(
        out,
        "]);\n/// The function of this name, for programs that ask by name; null: none.\npub fn by_name(name: &[u8]) -> *const c_void {{\n    match name {{"
    )?;
    for f in api.functions.iter().filter(|f| f.is_native()) {
        writeln!(out, "        b{:?} => {},", f.name, pointer(f))?;
    }
    writeln!(out, "        _ => std::ptr::null(),\n    }}\n}}")
}
