// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes the client's C functions and its dispatch table. Hand-written ones are expected in `crate::hand`; what a call needs of its
//! surroundings is in `crate::rt`, what a transfer needs in `crate::transfer`, whether a command is sure to succeed in `crate::sure`.

use crate::api::{Api, Call, Class, Direction, Function, Type};
use crate::{ident, record_name, snake};
use std::fmt::Write;

fn c_type(ty: &Type) -> String {
    match ty.in_c() {
        Type::Int(t) => t,
        Type::Handle(..) => "Handle".into(),
        Type::Handles(..) => "*const Handle".into(),
        Type::Triple => "*const usize".into(),
        Type::Str(_) => "*const c_char".into(),
        Type::Out(t) => format!("*mut {}", c_type(&t).trim_start_matches("*const ")),
        Type::Fresh(_) => "*mut Handle".into(),
        Type::Address => "u64".into(),
        Type::Ordinal => "i32".into(),
        _ => "*const c_void".into(),
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
        Class::Enqueue | Class::Transfer(_) => {
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

/// Writes statements that check the parameters and turn them into fields. Returns the names of the handles among them.
fn convert(out: &mut String, f: &Function) -> Result<Vec<String>, std::fmt::Error> {
    let mut objects = Vec::new();
    for p in &f.params {
        let n = ident(&p.name);
        if let Type::Properties(_) = p.ty {
            writeln!(
                out,
                "        // SAFETY: the caller passes null or pairs that end with 0, as the API says."
            )?;
            writeln!(out, "        let {n} = unsafe {{ rt::properties({n}, 2) }};")?;
            continue;
        }
        if let Type::Ordinal = p.ty {
            writeln!(out, "        let {n} = rt::device({n})?;")?;
            continue;
        }
        if let Type::Fresh(kind) = &p.ty {
            writeln!(out, "        let new_{n} = rt::fresh(kind::{}, {n}.is_null())?;", kind.to_uppercase())?;
            continue;
        }
        let (promised, call) = match &p.ty.in_c() {
            Type::Handle(kind, optional) => {
                let get = if *optional { "maybe" } else { "object" };
                writeln!(out, "        let {n} = rt::{get}({n}, kind::{})?;", kind.to_uppercase())?;
                objects.push(n);
                continue;
            }
            Type::Handles(kind, Some(count)) => {
                (format!("{count} handles"), format!("objects({count}, {n}, kind::{})", kind.to_uppercase()))
            }
            Type::Triple => ("three numbers".into(), format!("triple({n})")),
            Type::Bytes(len) => (format!("{len} bytes"), format!("bytes({n}, {len})")),
            Type::Str(_) => ("a C string or null".into(), format!("string({n})")),
            _ => continue,
        };
        writeln!(out, "        // SAFETY: the caller passes {promised}, as the API says.")?;
        writeln!(out, "        let {n} = unsafe {{ rt::{call} }}?;")?;
    }
    Ok(objects)
}

/// A parameter as its record has it.
fn value(f: &Function, name: &str, ty: &Type) -> String {
    match ty {
        Type::Int(t) if t == "usize" => format!("{name} as u64"),
        Type::Shared(..) => format!("{name} as u64"),
        Type::Handle(_, false) => format!("{name}.id()"),
        Type::Handle(_, true) => format!("{name}.map_or(0, |o| o.id())"),
        Type::Handles(..) | Type::Properties(_) => format!("{name}.into()"),
        Type::Fresh(_) => format!("new_{name}.id()"),
        Type::Address
        | Type::Ordinal
        | Type::Int(_)
        | Type::Blocking
        | Type::Triple
        | Type::Bytes(_)
        | Type::Str(_) => name.into(),
        _ => unreachable!("the parser wants a wire format for {}", f.name),
    }
}

/// The parameters in the record, each as `name: value, `.
fn fields(f: &Function) -> String {
    let is_param = |name: &str| f.params.iter().any(|p| p.name == name);
    let mut out = String::new();
    for p in f.fields().iter().filter(|p| is_param(&p.name)) {
        let n = ident(&p.name);
        out += &format!("{n}: {}, ", value(f, &n, &p.ty));
    }
    if f.is("current") {
        out += "current: rt::current(), ";
    }
    out
}

/// The parameters that a function of the runtime gets.
fn arguments(f: &Function, call: &Call) -> String {
    let mut out = String::new();
    for p in call.args.iter().filter_map(|arg| f.params.iter().find(|p| p.name == *arg)) {
        let n = ident(&p.name);
        out += ", ";
        out += &match p.ty.in_c() {
            Type::Int(t) if t == "usize" => format!("{n} as u64"),
            _ => n,
        };
    }
    out
}

fn info(out: &mut String, api: &Api, f: &Function) -> std::fmt::Result {
    writeln!(out, "    rt::status(|| {{")?;
    convert(out, f)?;
    let object = ident(&f.params[0].name);
    writeln!(out, "        if [{}].contains(&param) {{", constants(api, &f.local))?;
    writeln!(
        out,
        "            // SAFETY: the caller passes room for size bytes and for a size, as the API says."
    )?;
    writeln!(
        out,
        "            return unsafe {{ rt::answer(&crate::local::answer({object}, param)?, size, value, size_ret) }};\n        }}"
    )?;
    writeln!(out, "        let record = wire::{} {{ {}param }};", record_name(&f.name), fields(f))?;
    let cached = match (f.is("cached"), &f.changing[..]) {
        (cached, []) => cached.to_string(),
        (_, changing) => format!("![{}].contains(&param)", constants(api, changing)),
    };
    writeln!(out, "        // SAFETY: as above.")?;
    writeln!(out, "        unsafe {{ rt::info(&record, {cached}, size, value, size_ret) }}\n    }})\n}}")
}

/// Writes the beginning of a command: its parameters, whose objects must be of one context, and its wait list. Returns the names of the handles.
fn command(out: &mut String, f: &Function) -> Result<Vec<String>, std::fmt::Error> {
    writeln!(out, "    rt::status(|| {{")?;
    let objects = convert(out, f)?;
    for other in &objects[1..] {
        writeln!(out, "        rt::same_context({}, {other})?;", objects[0])?;
    }
    writeln!(out, "        // SAFETY: the caller passes num_waits events, as the API says.")?;
    writeln!(out, "        let waits = unsafe {{ rt::waits(num_waits, wait_list) }}?;")?;
    Ok(objects)
}

/// The type of a function's command, as an expression.
fn command_type(api: &Api, f: &Function) -> String {
    f.command.as_ref().map_or("0".into(), |name| format!("{}::{name}", api.prefix))
}

/// Constants, as expressions.
pub(crate) fn constants(api: &Api, names: &[String]) -> String {
    names.iter().map(|name| format!("{}::{name}", api.prefix)).collect::<Vec<_>>().join(", ")
}

fn enqueue(out: &mut String, api: &Api, f: &Function) -> std::fmt::Result {
    let objects = command(out, f)?;
    writeln!(
        out,
        "        let new = rt::new_event({}, !event.is_null(), {})?;",
        objects[0],
        command_type(api, f)
    )?;
    writeln!(
        out,
        "        let record = wire::{} {{ {}waits: waits.into(), event: new.id() }};",
        record_name(&f.name),
        fields(f)
    )?;
    let sure = match f.is("sure") {
        true => format!("crate::sure::{}({}, &record)", snake(&f.name), objects.join(", ")),
        false => "false".into(),
    };
    writeln!(out, "        let sure = {sure};")?;
    writeln!(out, "        // SAFETY: event is null or points to room for a handle, as the API says.")?;
    writeln!(out, "        unsafe {{ rt::submit(&record, sure, new, event) }}\n    }})\n}}")
}

fn transfer(out: &mut String, api: &Api, f: &Function, direction: Direction) -> std::fmt::Result {
    let objects = command(out, f)?;
    for check in &f.checks {
        writeln!(
            out,
            "        transfer::check_{}(Direction::{direction:?}{})?;",
            check.name,
            arguments(f, check)
        )?;
    }
    let parameter = |ty: Type| f.params.iter().find(|p| p.ty == ty).map_or("", |p| p.name.as_str());
    if let Some(memory) = &f.memory {
        writeln!(
            out,
            "        let host = transfer::{}({} as usize{})?;",
            memory.name,
            parameter(Type::Data),
            arguments(f, memory)
        )?;
    }
    let blocking = parameter(Type::Blocking);
    // A write that looks complete to the program doesn't block for the device.
    let (call, blocks) = match direction {
        Direction::Reads => ("read(".to_string(), String::new()),
        Direction::Writes => (format!("write({blocking} != 0, "), format!(", {blocking}")),
    };
    writeln!(
        out,
        "        // SAFETY: the program's memory lies where the parameters say; event is null or points to room for a handle, as the API says."
    )?;
    writeln!(
        out,
        "        unsafe {{ transfer::{call}{}, host, {}, event, |slot, event{blocks}| {{",
        objects[0],
        command_type(api, f)
    )?;
    writeln!(
        out,
        "            let record = wire::{} {{ {}data: slot.data, ticket: slot.ticket, waits: waits.into(), event }};\n            rt::send(&record, {blocking} == 0 && crate::sure::pixels({}, {}, &record.waits))\n        }}) }}\n    }})\n}}",
        record_name(&f.name),
        fields(f),
        objects[0],
        objects[1]
    )
}

fn create(out: &mut String, f: &Function, kind: &str) -> std::fmt::Result {
    writeln!(out, "    let made = || {{")?;
    convert(out, f)?;
    writeln!(
        out,
        "        let new = rt::new_object(kind::{}, crate::state::Body::Plain({}))?;",
        kind.to_uppercase(),
        ident(&f.params[0].name)
    )?;
    writeln!(out, "        rt::call(&wire::{} {{ {}new: new.id() }})?;", record_name(&f.name), fields(f))?;
    writeln!(out, "        Ok(new.publish())\n    }};")?;
    writeln!(out, "    // SAFETY: errcode_ret is null or points to room for a code, as the API says.")?;
    writeln!(out, "    unsafe {{ rt::create(errcode_ret, made) }}\n}}")
}

fn call(out: &mut String, f: &Function) -> std::fmt::Result {
    writeln!(out, "    rt::status(|| {{")?;
    convert(out, f)?;
    let how = if f.class == Class::Post { "post" } else { "call" };
    writeln!(out, "        let _reply = rt::{how}(&wire::{} {{ {}}})?;", record_name(&f.name), fields(f))?;
    let outs: Vec<_> = f.params.iter().filter(|p| matches!(p.ty, Type::Out(_))).collect();
    if !outs.is_empty() {
        writeln!(out, "        let mut from = Decoder::new(&_reply);")?;
    }
    for p in outs {
        if let Type::Out(t) = &p.ty {
            let n = ident(&p.name);
            let (method, cast) = match c_type(t).as_str() {
                "usize" => ("u64".to_string(), " as usize"),
                ty => (ty.to_string(), ""),
            };
            writeln!(out, "        let value = from.{method}().map_err(|_| wire::LOST)?{cast};")?;
            writeln!(out, "        // SAFETY: null or room for the value, as the API says.")?;
            writeln!(out, "        unsafe {{ rt::write({n}, value) }};")?;
        }
    }
    for p in f.params.iter().filter(|p| matches!(p.ty, Type::Fresh(_))) {
        let n = ident(&p.name);
        writeln!(out, "        // SAFETY: room for a handle: rt::fresh refused null.")?;
        writeln!(out, "        unsafe {{ rt::write({n}, new_{n}.publish()) }};")?;
    }
    writeln!(out, "        Ok(())\n    }})\n}}")
}

fn count(out: &mut String, f: &Function, method: &str) -> std::fmt::Result {
    writeln!(out, "    rt::status(|| {{")?;
    let objects = convert(out, f)?;
    writeln!(out, "        rt::ARENA.{method}({});\n        Ok(())\n    }})\n}}", objects[0])
}

fn stub(out: &mut String, api: &Api, f: &Function) -> std::fmt::Result {
    let (params, result) = signature(f);
    let params: Vec<String> = params.iter().map(|(n, t)| format!("{n}: {t}")).collect();
    if api.is_contextual {
        writeln!(out, "#[unsafe(no_mangle)]")?;
    }
    writeln!(out, "pub unsafe extern \"C\" fn {}({}) -> {result} {{", f.name, params.join(", "))?;
    match &f.class {
        Class::Info => info(out, api, f),
        Class::Enqueue => enqueue(out, api, f),
        Class::Transfer(direction) => transfer(out, api, f, *direction),
        Class::Create(kind) => create(out, f, kind),
        Class::Call | Class::Post => call(out, f),
        Class::Retain => count(out, f, "retain"),
        Class::Release => count(out, f, "release"),
        Class::Local | Class::None => {
            let names: String = f.params.iter().map(|p| ident(&p.name) + ",").collect();
            writeln!(out, "    let _unused = ({names});")?;
            writeln!(out, "    rt::unsupported({:?}, {:#x})\n}}", f.name, f.id)
        }
    }
}

/// The second export of a function, whose default stream is the calling thread's.
fn threaded(out: &mut String, f: &Function, suffix: &str) -> std::fmt::Result {
    let (params, result) = signature(f);
    let name = &f.name;
    let declared: Vec<String> = params.iter().map(|(n, t)| format!("{n}: {t}")).collect();
    let passed: Vec<&str> = params.iter().map(|p| p.0.as_str()).collect();
    let (declared, passed, module) = (declared.join(", "), passed.join(", "), module(f));
    writeln!(
        out,
        "#[unsafe(no_mangle)]\npub unsafe extern \"C\" fn {name}_{suffix}({declared}) -> {result} {{"
    )?;
    writeln!(out, "    // SAFETY: as the caller promises.")?;
    writeln!(out, "    rt::threaded(|| unsafe {{ {module}::{name}({passed}) }})\n}}")
}

/// The client's functions and dispatch table, as Rust source for `include!` in a module that imports `Handle`, `c_void`, `c_char`,
/// `Decoder`, `Direction`, `wire`, `kind`, the module of constants, `rt` and `transfer`.
pub fn emit(api: &Api) -> String {
    let mut out = String::new();
    build(&mut out, api).expect("writing to a string can't fail");
    out
}

fn by_hand(f: &Function) -> bool {
    f.is("client") || f.class == Class::Local
}

/// The module of a function.
fn module(f: &Function) -> &'static str {
    if by_hand(f) { "crate::hand" } else { "self" }
}

fn build(out: &mut String, api: &Api) -> std::fmt::Result {
    for f in api.functions.iter().filter(|f| f.is_native() && !by_hand(f)) {
        stub(out, api, f)?;
    }
    for f in &api.functions {
        f.threaded().map_or(Ok(()), |suffix| threaded(out, f, suffix))?;
    }
    if !api.dispatch.is_empty() {
        table(out, api)?;
    }
    by_name(out, api)
}

fn pointer(f: &Function) -> String {
    format!("{}::{} as *const c_void", module(f), f.name)
}

fn table(out: &mut String, api: &Api) -> std::fmt::Result {
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
    writeln!(out, "]);")
}

fn by_name(out: &mut String, api: &Api) -> std::fmt::Result {
    writeln!(
        out,
        "/// The function of this name, for programs that ask by name; null: none.\npub fn by_name(name: &[u8]) -> *const c_void {{\n    match name {{"
    )?;
    for f in api.functions.iter().filter(|f| f.is_native()) {
        writeln!(out, "        b{:?} => {},", f.name, pointer(f))?;
        if let Some(suffix) = f.threaded() {
            let name = format!("{}_{suffix}", f.name);
            writeln!(out, "        b{name:?} => self::{name} as *const c_void,")?;
        }
    }
    writeln!(out, "        _ => std::ptr::null(),\n    }}\n}}")
}
