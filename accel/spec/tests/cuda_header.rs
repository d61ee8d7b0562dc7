// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The declarations of `cuda.api` are those of NVIDIA's cuda.h: a C++ compiler compares each; and docs/cuda-functions.md lists them.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use tombolo_accel_gen::api::{Api, Class, Function, Param, Type};
use tombolo_accel_gen::{doc, parse};
use tombolo_accel_spec::CUDA_API;

/// Returns the C++ type that a parameter of the header must have.
fn cpp(ty: &Type) -> String {
    match ty {
        Type::Int(t) => match t.as_str() {
            "f32" => "float".into(),
            "u8" => "Number<1>".into(),
            "u16" => "Number<2>".into(),
            "u32" | "i32" => "Number<4>".into(),
            _ => "Number<8>".into(),
        },
        Type::Ordinal => "CUdevice".into(),
        Type::Address => "CUdeviceptr".into(),
        Type::Handle(kind, _) => handle(kind),
        Type::Fresh(kind) => handle(kind) + "*",
        Type::Out(inner) => format!("To<{}>", cpp(inner)),
        Type::Str(_) => "const char *".into(),
        Type::Ptr => "Pointer".into(),
        other => panic!("{other:?} is no type of a parameter of CUDA"),
    }
}

fn handle(kind: &str) -> String {
    let name = match kind {
        "exec" => "graphExec",
        "node" => "graphNode",
        "pool" => "memoryPool",
        other => other,
    };
    format!("CU{name}")
}

const PRELUDE: &str = r#"
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cstddef>
#include <type_traits>
template <int N> struct Number {};
template <class T> struct To {};
struct Pointer {};
template <class D, class C> constexpr bool same = std::is_same_v<D, C>;
template <int N, class C> constexpr bool same<Number<N>, C> = (std::is_integral_v<C> || std::is_enum_v<C>) && sizeof(C) == N;
template <class D, class C> constexpr bool same<To<D>, C *> = same<D, C> && !std::is_const_v<C>;
template <class C> constexpr bool same<Pointer, C> = std::is_pointer_v<C>;
template <class... D> struct Declared {
    template <class... C> static constexpr bool is(CUresult (*)(C...)) {
        if constexpr (sizeof...(C) == sizeof...(D)) return (same<D, C> && ...);
        return false;
    }
};
"#;

fn source(api: &Api) -> Result<String, std::fmt::Error> {
    let mut out = PRELUDE.to_string();
    for c in &api.constants {
        writeln!(out, "static_assert({0} == {1}, \"{0}\");", c.name, c.value)?;
    }
    for s in &api.structs {
        let name = format!("CUDA_{}", s.name.to_uppercase());
        writeln!(out, "static_assert(sizeof({name}) == {}, \"{name}\");", s.size)?;
        let mut end = "0".to_string();
        for Param { name: field, .. } in &s.fields {
            // In the order of the declaration, and nothing but padding between.
            writeln!(
                out,
                "static_assert(offsetof({name}, {field}) >= {end} && offsetof({name}, {field}) - ({end}) < 8, \"{field}\");"
            )?;
            end = format!("offsetof({name}, {field}) + sizeof((({name} *)0)->{field})");
        }
    }
    for f in &api.functions {
        for name in f.symbols().iter().map(|s| &s.name) {
            match (&f.class, f.is_native()) {
                (Class::None, _) => writeln!(out, "static_assert(sizeof(&{name}) == 8);")?,
                (_, true) => {
                    let types: Vec<String> = f.params.iter().map(|p| cpp(&p.ty)).collect();
                    let types = types.join(", ");
                    writeln!(out, "static_assert(Declared<{types}>::is(&{name}), \"{name}\");")?;
                }
                _ => {}
            }
        }
    }
    Ok(out)
}

/// The names that the header declares.
fn declared(preprocessed: &str) -> Vec<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let after = preprocessed.split("CUresult ").skip(1);
    let names = after.map(|rest| &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())]);
    names.filter(|name| name.starts_with("cu")).collect()
}

fn compiler(source: &str, arguments: &[&str]) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let toolkit =
        Command::new(format!("{root}/accel/tests/cuda-toolkit")).arg("headers").output().expect("run");
    assert!(toolkit.status.success(), "{}", String::from_utf8_lossy(&toolkit.stderr));
    let folder = String::from_utf8(toolkit.stdout).expect("a path");
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cuda-{}.cc", arguments.len()));
    std::fs::write(&file, source).expect("written");
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-I"]).arg(Path::new(folder.trim()).join("include")).args(arguments);
    let output = command.arg(&file).output().expect("g++ is there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn every_declaration_is_that_of_the_header_and_every_function_of_the_header_is_declared() {
    let api = parse::parse(CUDA_API).expect("the declarations");
    let source = source(&api).expect("a string takes everything");
    compiler(&source, &["-fsyntax-only"]);
    let symbols: Vec<String> =
        api.functions.iter().flat_map(Function::symbols).map(|symbol| symbol.name).collect();
    let text = compiler(PRELUDE, &["-E", "-P"]);
    let names = declared(&text);
    assert!(names.len() > 600, "the header was read");
    for name in names {
        assert!(symbols.iter().any(|symbol| symbol == name), "{name} has no declaration");
    }
}

#[test]
fn the_page_of_functions_is_what_the_generator_writes() {
    let api = parse::parse(CUDA_API).expect("the declarations");
    let page = include_str!("../../../docs/cuda-functions.md");
    assert!(
        page.ends_with(&doc::page(&api)),
        "write it anew: cargo run -p tombolo-accel-gen accel/spec/cuda.api"
    );
}
